"""Checks of a call of a program at new inputs: whether a fit has what its prediction needs."""

from __future__ import annotations

import warnings

from numpyro_dgp.model.calls import Call

__all__ = [
    "require_conditionals",
    "require_new_rows",
    "require_own_functions",
    "require_unobserved",
    "warn_rows_together",
]


def require_unobserved(call: Call) -> None:
    """Raise if a call observes what it is to predict; warn if latents have another distribution than one may expect."""
    if call.candidates and not call.predicted:
        raise ValueError(
            "Posterior: expected a call without the observations that are to be predicted, got those of "
            f"{', '.join(map(repr, call.candidates))}: leave them out, posterior.predict(key, X), "
            "posterior.sample(key, X); posterior.log_density(key, y, X) takes them right after the key"
        )
    observed, latents = call.ignored()
    if observed:
        warnings.warn(
            f"Posterior: {', '.join(map(repr, observed))} is observed in this call, which does not change the "
            f"prediction: {', '.join(map(repr, latents))} at new rows is drawn given the fit alone; leave the "
            "observations out",
            stacklevel=2,
        )
    known, functions = call.known_functions()
    if known:
        warnings.warn(
            f"Posterior: {', '.join(map(repr, known))} is observed in this call, which does not change the prediction: "
            f"{', '.join(map(repr, functions))} is that of the fit; leave the observations out, or give them to the "
            "fit first, posterior = dgp.condition(posterior, key, X, y)",
            stacklevel=2,
        )
    if call.unobserved():
        warnings.warn(
            f"Posterior: {', '.join(map(repr, call.unobserved()))} belongs to rows of other data, which this call does "
            "not observe, so that it is drawn from its prior: pass the observations of these rows as in the fit",
            stacklevel=2,
        )


def require_own_functions(call: Call) -> None:
    """Raise if a function of the program is computed from the rows of the call."""
    for layer, arguments in call.from_rows.items():
        raise ValueError(
            f"Posterior: expected inducing inputs and hyperparameters of {layer!r} that do not depend on the rows of "
            f"the call, got some computed from {', '.join(arguments)}: at other rows that is not the function that was "
            "fitted. Compute them once, outside the model: Z = X[::10] before def model(X, y=None)"
        )


def require_new_rows(call: Call) -> None:
    """Raise if values that belong to the rows of the fit would be used at the rows of the call."""
    for name, user in call.fixed_rows().items():
        plates = sorted(frame.name for frame in call.sites[user]["cond_indep_stack"])
        where = f"in plate(s) {', '.join(map(repr, plates))}, as {user!r} is" if plates else "in a plate of the data"
        raise ValueError(
            f"Posterior: expected sites with a value per row in the plates of the rows, got {name!r}, of which "
            f"{user!r} uses row n at row n of the call: the fit has its values for its own rows only. Open it {where}, "
            f"so that new rows draw their own; values of groups are picked by an argument, {name}[group]"
        )


def require_conditionals(call: Call, below: bool) -> None:
    """Raise if y is an exact process, whose values at new rows depend on the data of the fit.

    Args:
        call: of the program.
        below: raise for exact processes that y depends on too.
    """
    above = {name for y in call.predicted for name in call.below[y]}
    for name in call.exact:
        of_data = name in call.predicted or not call.candidates
        if of_data or (below and name in above):
            raise ValueError(
                "Posterior: expected functions with inducing points, got values of one without (inducing=None or "
                f"dgp.Neighbours) at {name!r}: at new rows they depend on the data of the fit, which its parameters "
                "and draws do not hold. Give the data, posterior.on(X, y), or give the layer dgp.Points(X), and y a "
                "dgp.Likelihood"
            )


def warn_rows_together(call: Call) -> None:
    """Warn if inputs or densities of single rows are computed from all rows of the call."""
    for site, seen, source in call.together[:1]:
        what = "a density" if seen == "density" else seen
        warnings.warn(
            f"Posterior: expected every row to be predicted by itself, got {what} at {site!r} computed from all rows "
            f"of {source!r} in this call: a prediction changes with the rows that are asked for together, and at new "
            "rows is not that of the fit. Compute what all rows share, such as a mean, once, outside the model: "
            "units = dgp.initial.Standardizer.fit(X); X = units(X)",
            stacklevel=2,
        )
