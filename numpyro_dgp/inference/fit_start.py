"""The state before the first step of a fit, after checks of the program, guide, objective and data.

The initial state comes from one compiled program.

``svi.init`` runs guide and model operation by operation, and JAX compiles each of these. One program that returns only
parameters computes no function values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_dgp._checks import (
    caller,
    expect,
    expect_kind,
    expected,
    inside_transformation,
    is_concrete,
    nearest,
    with_checks,
)
from numpyro_dgp._compiled import Compiled, one_thread
from numpyro_dgp._data import warn_of_units
from numpyro_dgp._typing import Array
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.inference.program_sites import ProgramSite, Rebuild, SitesOfFit, sites_of_fit
from numpyro_dgp.jaxprs.argument_indices import require_inside

__all__ = [
    "has_no_state",
    "initial_state",
    "require_compiling_itself",
    "require_svi",
    "start_of_fit",
    "warn_of_first_loss",
    "warn_of_funnel",
]


def has_no_state(svi: SVI) -> bool:
    """Whether the guide has no state between calls."""
    return not adapted(svi.guide).keeps_state


def initial_state(
    svi: SVI, rng_key: Array, rebuild: Rebuild, arrays: list[Array], init_params: dict[str, Array] | None
) -> SVIState:
    """``svi.init(rng_key, *args, init_params=init_params, **kwargs)``, compiled where that is possible.

    Without compilation run guides with a state, programs that need the values of their arguments, those whose
    parameters' constraints are computed from arrays, and those of which a check fails, which raises its error then.

    Args:
        svi: what is fitted.
        rng_key: PRNG key.
        rebuild: the arguments of the model, from ``arrays``.
        arrays: those of them that are arrays.
        init_params: initial values of some parameters, or ``None``.
    """

    def init(key: Array, arrays: list[Array], params: Any) -> SVIState:
        args, kwargs = rebuild(arrays)
        return svi.init(key, *args, init_params=params, **kwargs)

    if has_no_state(svi):
        try:
            checked, state = Compiled(with_checks(init))(rng_key, arrays, init_params)
            sound = bool(checked)
        except Exception:  # whatever it is, the program without compilation raises it again, or needs values
            sound = False
        if sound and is_concrete(svi.constrain_fn.args):
            return state
    with one_thread:
        return init(rng_key, arrays, init_params)


_SHOWN = 12
"""Names that a message lists at most."""

_LARGE_LOSS = 1e3
"""Loss per observation above which to warn: about forty standard deviations."""


_EDGE = 0.05
"""Share of its initial value below which a scale counts as zero."""

_EQUAL = 10.0
"""Times that scale: the most by which values in a plate then differ."""


def require_svi(svi: Any) -> None:
    """Raise unless ``svi`` is an ``SVI`` of a guide and a loss that are instances."""
    if not isinstance(svi, SVI):
        got = f"the class {svi.__name__}" if isinstance(svi, type) else type(svi).__name__
        raise expected("a numpyro.infer.SVI", got, "SVI(model, guide, optax.adam(0.01), dgp.ELBO())")
    for what, value, example in (
        ("a guide", svi.guide, "dgp.guides.InducingPoint(model)"),
        ("an objective", svi.loss, "dgp.ELBO()"),
    ):
        if isinstance(value, type):
            raise expected(f"{what} in the SVI", f"the class {value.__name__}", f"make one, such as {example}")
    expect(
        callable(getattr(svi.loss, "loss", None)),
        "an objective with a method loss",
        type(svi.loss).__name__,
        "dgp.ELBO()",
    )


def require_compiling_itself(*arguments: Any) -> None:
    """Raise if arguments are traced: a fit compiles its steps itself, and reads losses and files between them."""
    expect(
        is_concrete(arguments),
        "arrays",
        "traced ones",
        "in jax.jit or vmap, svi.run(key, num_steps, X, y, progress_bar=False)",
    )


def start_of_fit(
    svi: SVI, rng_key: Array, rebuild: Rebuild, arrays: list[Array], init_params: Any
) -> tuple[SVIState, SitesOfFit]:
    """The initial state of a fit, and the sites of its guide and model.

    Args:
        svi: what is fitted.
        rng_key: PRNG key.
        rebuild: the arguments of the model, from ``arrays``.
        arrays: those of them that are arrays.
        init_params: initial values of some parameters, or ``None``.

    Raises:
        ValueError: a guide of another model; initial values of unknown parameters, of other shapes, outside the
            parameters' constraints, or not finite; an index among the arguments outside of the array that it is of.
    """
    # A guide with a state is set up by its first run.
    first = None if has_no_state(svi) else initial_state(svi, rng_key, rebuild, arrays, None)
    sites = _sites(svi, rng_key, rebuild, arrays)
    _require_same_sites(svi, sites)
    expect_kind(init_params, dict | None, "init_params to be a dict of arrays", "try init_params=svi_result.params")
    for name, value in (init_params or {}).items():
        _require_initial_value(name, value, sites.parameters)
    if first is None or init_params:
        first = initial_state(svi, rng_key, rebuild, arrays, init_params)  # errors of kernels are more specific
    require_inside(sites.outside)
    return first, sites


def _sites(svi: SVI, rng_key: Array, rebuild: Rebuild, arrays: list[Array]) -> SitesOfFit:
    """The sites of guide and model; an error of theirs is raised by a run with values, whose messages have these."""
    try:
        return sites_of_fit(svi, rebuild, arrays)
    except Exception as error:
        of_shapes = error
    args, kwargs = rebuild(arrays)  # outside the block above, so that a user sees one error and not two
    with one_thread:
        svi.init(rng_key, *args, **kwargs)
    raise of_shapes


def _require_same_sites(svi: SVI, sites: SitesOfFit) -> None:
    """Raise where the guide lacks a latent site of the model, or has one that the model lacks."""
    model = {n: s for n, s in sites.model.items() if s.kind == "sample" and not s.auxiliary}
    guide = {n: s for n, s in sites.guide.items() if s.kind == "sample" and not s.auxiliary}
    lacks = [name for name in model if name not in sites.guide]
    alien = [name for name in guide if name not in sites.model]
    if lacks and alien:
        raise expected(
            "a guide of the model in the SVI",
            f"one that has no site {lacks[0]!r}, as the model has, but {alien[0]!r}",
            f"make the guide from the same model, {type(svi.guide).__name__}(model)",
        )
    if alien:
        raise expected(
            "a guide of the model in the SVI",
            f"one with a site {alien[0]!r} that the model does not sample",
            f"{type(svi.guide).__name__}(model); for an auxiliary variable infer={{'is_auxiliary': True}}",
        )


def warn_of_first_loss(sites: SitesOfFit, arrays: list[Array], losses: Array) -> None:
    """Warn of data in other units than the program expects: a first loss that no noise near one explains.

    Args:
        sites: of the fit.
        arrays: the data.
        losses: of all steps.
    """
    observed = [s for s in sites.model.values() if s.kind == "observed"]
    count = sum(math.prod(s.value.shape) * (s.scale or 1.0) for s in observed)
    if count and losses.size and losses[0] > _LARGE_LOSS * count:
        first = f"the first loss is {losses[0]:.3g} for {count:.6g} observations, and the values"
        for i, array in enumerate(arrays):
            warn_of_units(f"{first} of array {i + 1}", array, beyond=100.0, stacklevel=4)


def warn_of_funnel(
    svi: SVI, sites: SitesOfFit, start: SVIState, params: dict[str, Array], args: Any, kwargs: Any
) -> None:
    r"""Warn of a funnel: a scale of several values, such as those in a plate, that has collapsed to zero because both
    are points.

    The density :math:`\prod_g N(e_g; m, \tau^2)` is unbounded where all :math:`e_g = m` and :math:`\tau` tends to zero.

    Args:
        svi: what is fitted.
        sites: of the fit.
        start: the state before the first step.
        params: after the last one.
        args: positional arguments of the model.
        kwargs: its keyword arguments.
    """
    points = {
        name: loc
        for name, site in sites.guide.items()
        if site.kind == "sample" and site.distribution in ("Delta", "Independent") and name in sites.model
        for loc in params
        if loc.startswith(f"{name}_") and loc.endswith("_loc") and loc.count("_") == name.count("_") + 2
        if not any(other.startswith(f"{loc.removesuffix('loc')}scale") for other in params)
    }
    several = {name: loc for name, loc in points.items() if np.shape(params[loc])[:1] > (1,)}
    if not several or len(points) < 2:
        return
    first = svi.get_params(start)
    for name, loc in points.items():
        before, after = np.asarray(first[loc]), np.asarray(params[loc])
        if not after.size or not (before > 0).all() or not ((after > 0) & (after < _EDGE * before)).any():
            continue
        scale = float(after.min())
        for other, theirs in several.items():
            if other == name or _deviation(np.asarray(params[theirs], float)) >= _EQUAL * scale:
                continue
            values = {site: params[loc] for site, loc in points.items()}
            if _prior_depends(partial(svi.model, *args, **kwargs, **svi.static_kwargs), params, values, other, name):
                warnings.warn(
                    f"{caller()}: {name!r} ends at {scale:.2g}, where all values of {other!r} are equal: with a point "
                    "for each, Delta(), the density has no bound as the scale that they share goes to zero; give both "
                    "a distribution, dgp.guides.InducingPoint(model, latent=dgp.guides.Normal(), "
                    "other=dgp.guides.Normal()), or run NUTS on dgp.for_mcmc(model)",
                    stacklevel=3,
                )


@one_thread
def _prior_depends(
    program: Callable[[], Any], params: dict[str, Array], values: dict[str, Array], site: str, other: str
) -> bool:
    """Whether a parameter of the prior of ``site`` moves with the value of ``other``."""

    def prior(value: Array) -> list[Array]:
        given = handlers.substitute(program, data=params | values | {other: value})
        with handlers.block():
            sites = handlers.trace(handlers.seed(given, 0)).get_trace()
        return [jnp.asarray(leaf, float) for leaf in jax.tree.leaves(sites[site]["fn"])]

    value = jnp.asarray(values[other], float)
    return any((np.asarray(slope) != 0).any() for slope in jax.jvp(prior, (value,), (jnp.ones_like(value),))[1])


def _deviation(values: np.ndarray) -> float:
    """Of values along the first axis, or of their logarithms."""
    found = values.std(0).max()
    return float(min(found, np.log(values).std(0).max()) if (values > 0).all() else found)


def _require_initial_value(name: Any, value: Any, known: dict[str, ProgramSite]) -> None:
    """Raise unless a value can be the initial value of a parameter."""
    if name not in known:
        near = nearest(str(name), known)
        found = f"the nearest is {near!r}, " if near else ""
        names = f"{list(known)[:_SHOWN]}{' and more' if len(known) > _SHOWN else ''}"
        raise expected("names of parameters in init_params", repr(name), f"{found}and all are {names}")
    site = known[name]
    where = f"init_params[{name!r}] to"
    got, shape = (jax.tree.map(jnp.shape, v) for v in (value, site.value))
    expect(got == shape, f"{where} have shape {shape}", got, "pass one value for every entry")
    for given, like in zip(jax.tree.leaves(value), jax.tree.leaves(site.value), strict=True):
        if not is_concrete(given) or inside_transformation():  # where what is computed from known values is not known
            return
        number = np.asarray(given).dtype.kind in "biufcV"
        expect(number, f"{where} be numbers", type(given).__name__, "pass arrays, as in svi_result.params")
        dtype = jnp.result_type(given)
        floats = jnp.issubdtype(like.dtype, jnp.floating) <= jnp.issubdtype(dtype, jnp.floating)
        expect(floats, f"{where} be floating-point", dtype, "write 1.0 instead of 1")
        finite = np.isfinite(np.asarray(given)).all()
        expect(finite, f"{where} be finite", "NaN or infinite values", "take them from a fit that converged")
        expect(
            site.constraint is None or np.all(site.constraint(jnp.asarray(given))),
            f"{where} satisfy the parameter's constraint {site.distribution}",
            "values outside it",
            "pass constrained values, as in svi_result.params",
        )
