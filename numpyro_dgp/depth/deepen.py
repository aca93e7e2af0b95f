r"""``deepen``: initial parameters of a deeper program from the fit of a shallower one.

Checks that the layers of the fit receive the same inputs in the deeper program.

New layers start near the identity: :math:`q(v) = p(v)`, and a small variance.

A layer with the mean m(x) = x moves its inputs by a function of variance k(x, x). Where q(v) is the prior, its
divergence is zero, and the loss of the bound through the layers above goes to zero with k(x, x). A narrow q(v) of
standard deviation s would instead cost :math:`\log(1/s)` for each of the M P inducing values, and would keep the
conditional variance between inducing points.

Parameters are matched by the names of their sites; the others are new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ExpTransform
from numpyro.infer import SVI

from numpyro_dgp._checks import (
    expect,
    expect_kind,
    expected,
    require_count,
    require_key,
    require_positive,
    with_nearest,
)
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.program import structure
from numpyro_dgp.analysis.run_at_rows import at_mean
from numpyro_dgp.analysis.sites import Message, each_values_of, log_prob, site_kind, unwrap, values_of
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.record import SiteRecord, record_of
from numpyro_dgp.guides.run import Run, run
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.inference.fit_start import has_no_state, require_compiling_itself, start_of_fit
from numpyro_dgp.inference.program_sites import Rebuild, SitesOfFit, sites_of_fit
from numpyro_dgp.predict.posterior import Posterior

__all__ = [
    "DeeperStart",
    "LayerInputs",
    "NewLayers",
    "SharedSites",
    "deepen",
    "find_new_layers",
    "first_rows",
    "layer_inputs",
    "require_same_inputs",
    "shared_sites",
    "taken_parameters",
    "with_prior_values",
]


class LayerInputs(NamedTuple):
    """Where a layer is called, and its inducing inputs, ``None`` for layers without."""

    inputs: Array
    inducing: Array | None


def first_rows(msg: Message) -> Array | None:
    """The first rows of a plate, so that runs of several programs have the same."""
    if msg["type"] != "plate":
        return None
    size, subsample_size = msg["args"]
    return jnp.arange(subsample_size or size)


def layer_inputs(
    model: Callable[..., Any],
    params: Mapping[str, Array],
    values: Mapping[str, Array],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, list[LayerInputs]]:
    """By inducing site, the calls of its function, in a run at these values; other layers are at their means.

    Args:
        model: the program.
        params: values of its parameters.
        values: values of latent sites.
        args: arguments of the program.
        kwargs: its keyword arguments.
    """

    def value(msg: Message) -> Any:
        if msg["type"] != "sample" or msg["is_observed"]:
            return first_rows(msg)
        return values[msg["name"]] if msg["name"] in values else at_mean(msg)

    found: dict[str, list[LayerInputs]] = {}
    given = handlers.substitute(handlers.substitute(model, data=dict(params)), substitute_fn=value)
    with handlers.block(), handlers.trace() as sites, handlers.seed(rng_seed=0):
        given(*args, **kwargs)
    for site in sites.values():
        for drawn in each_values_of(site["fn"]) if site["type"] == "sample" else ():
            if (name := drawn.layer) is not None:
                found.setdefault(name, []).append(LayerInputs(drawn.inputs, drawn.function.inducing_inputs))
    return found


def require_same_inputs(
    deeper: Mapping[str, list[LayerInputs]], fitted: Mapping[str, list[LayerInputs]], old: Mapping[str, str]
) -> None:
    """Raise unless every layer of the fit has the same inputs in the deeper program.

    Args:
        deeper: inputs of the layers of the deeper program, with new layers at their means.
        fitted: those of the fitted one.
        old: names of the sites of the fit, by name in the deeper program.
    """
    new = ", ".join(repr(name) for name in deeper if name not in old)
    advice = f"give {new} mean=dgp.means.IdentityMean() and as many outputs as inputs"
    for name in deeper.keys() & old.keys():
        for ours, theirs in zip(deeper[name], fitted[old[name]], strict=False):
            same = f"layer {name!r} to have the inputs of {old[name]!r} in the fitted program"
            got, shape = ours.inputs.shape, theirs.inputs.shape
            expect(got == shape, f"{same}, of shape {shape}", got, advice)
            if (far := _distance(ours.inputs, theirs.inputs)) > 0:
                apart = f"inputs that differ by up to {far:.3g}"
                raise expected(f"{same} when the new layer is at its mean", apart, advice)
            if ours.inducing is None or theirs.inducing is None:
                continue
            if ours.inducing.shape != theirs.inducing.shape or _distance(ours.inducing, theirs.inducing) > 0:
                raise expected(
                    f"layer {name!r} to have the inducing inputs of {old[name]!r}, shape {theirs.inducing.shape}",
                    f"others, shape {ours.inducing.shape}",
                    "pass the same Z, or Points(Z, learn=True), which starts at those of the fit",
                )


def _distance(ours: Array, theirs: Array) -> float:
    """The largest difference, zero if it is of the size of rounding."""
    far = float(jnp.max(jnp.abs(ours - theirs)))
    rounding = 100 * float(jnp.finfo(jnp.result_type(ours, theirs)).eps) * (1 + float(np.max(np.abs(theirs))))
    return far if jax.numpy.isnan(far) or far > rounding else 0.0


class SharedSites(NamedTuple):
    """The sample sites of a deeper program.

    Args:
        old: by name, the name that the site has in the fitted program.
        new: those that the fitted program does not have.
        prefixes: of the names of parameters, in the guide of the deeper program and in that of the fitted one.
    """

    old: dict[str, str]
    new: tuple[str, ...]
    prefixes: tuple[str, str]

    def owner(self, parameter: str) -> tuple[str, str]:
        """The site that a parameter of the deeper program belongs to, and the rest of its name; ``""`` for none."""
        found = [site for site in (*self.old, *self.new) if parameter.startswith(f"{site}_")]
        site = max(found, key=len, default="")
        return site, parameter[len(site) :]


def shared_sites(
    deeper: SitesOfFit, fitted: SitesOfFit, names: Mapping[str, str], prefixes: tuple[str, str]
) -> SharedSites:
    """Tell old sites from new ones: a site is that of its name in ``names``, else the one of the same name.

    Raises:
        ValueError: ``names`` with names that there are not, or the same one twice; a site of the fitted program that
            the deeper one does not have.
    """
    ours, theirs = (
        [name for name, site in sites.model.items() if site.kind == "sample" and not site.auxiliary]
        for sites in (deeper, fitted)
    )
    known = {*ours, *deeper.parameters}, {*theirs, *fitted.parameters}
    for which, given, there in (("deeper", names.keys(), known[0]), ("fitted", names.values(), known[1])):
        if missing := set(given) - there:
            raise expected(
                f"names of sites or parameters of the {which} program in names",
                with_nearest(missing, there),
                "names={deeper: fitted}, such as {'f1': 'f0'}",
            )
    if len(set(names.values())) < len(names):
        raise expected("every site of the fitted program once in names", dict(names), "the new layer has no entry")
    old = {site: source for site in ours if (source := _source(site, names)) in theirs}
    if lost := set(theirs) - set(old.values()):
        raise expected(
            "every site of the fitted program in the deeper one",
            f"none for {with_nearest(lost, set(ours) - old.keys())}",
            "map its name, names={deeper: fitted}, such as {'f1': 'f0'}",
        )
    return SharedSites(old, tuple(site for site in ours if site not in old), prefixes)


def _source(name: str, names: Mapping[str, str]) -> str | None:
    """The name in the fitted program, if it is not taken by another name."""
    return names.get(name, None if name in names.values() else name)


def taken_parameters(
    initial: Mapping[str, Any], fitted: Mapping[str, Array], sites: SharedSites, names: Mapping[str, str]
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The values of the fit under their names in the deeper program, and the names of the parameters that are new.

    Args:
        initial: all parameters of the deeper program, or their shapes.
        fitted: those of the fit.
        sites: of the deeper program.
        names: from names of the deeper program to those of the fitted one.

    Raises:
        ValueError: parameters of a site of the fit that are not in the other guide, or have another shape.
    """
    taken: dict[str, Array] = {}
    sources: dict[str, str] = {}
    new = []
    for name, value in initial.items():
        site, rest = sites.owner(name)
        if site in sites.new and name not in names:
            new.append(name)
            continue
        ours, theirs = (f"_{prefix}_" for prefix in sites.prefixes)
        rest = theirs + rest[len(ours) :] if site and rest.startswith(ours) else rest
        source = sites.old[site] + rest if site and name not in names else _source(name, names)
        if source is None or source not in fitted:
            expect(
                not site or name in names,
                f"a parameter {source!r} in the fit, for {name!r}",
                "none",
                "take guides with the same rules for the sites that both programs have",
            )
            new.append(name)
            continue
        shapes = [jax.tree.map(np.shape, leaf) for leaf in (value, fitted[source])]
        if shapes[0] != shapes[1]:
            raise expected(
                f"{name!r} to have the shape of {source!r} of the fit, {shapes[1]}",
                shapes[0],
                "map layers by names={'f1': 'f0'}, with as many outputs, inducing points and the same rules",
            )
        taken[name], sources[source] = fitted[source], name
    if lost := fitted.keys() - sources.keys():
        raise expected(
            "every parameter of the fit in the deeper program",
            f"none for {with_nearest(lost, new)}",
            "map its name, names={deeper: fitted}, and take guides with the same rules",
        )
    return taken, tuple(new)


_LEAST_EXPONENT = 1e-3
"""Of the variance of a layer in a number, below which the number is not taken for a part of it."""


class NewLayers(NamedTuple):
    """The new layers of a program.

    Args:
        inducing: records of the sites of their inducing values.
        hidden: sites of their values.
        shared: their hyperparameters that are sample sites.
        logarithmic: new parameters that are logarithms of positive numbers.
        positive: new parameters that are positive numbers.
    """

    inducing: dict[str, SiteRecord]
    hidden: tuple[str, ...]
    shared: tuple[str, ...]
    logarithmic: tuple[str, ...]
    positive: tuple[str, ...]

    def variance(self, found: Run) -> Array:
        """Log of the variance by which new layers move their inputs, mean over layers and rows."""
        # log of the mean over rows
        logs = [jnp.log(jnp.mean(unwrap(found.model[name]["fn"]).variance)) for name in self.hidden]
        return jnp.stack(logs).mean()

    def scaled(self, params: dict[str, Array], factors: dict[str, Array]) -> dict[str, Array]:
        """Parameters of which new positive numbers are multiplied by ``exp(factors)``."""
        times = {name: params[name] * jnp.exp(factors[name]) for name in self.positive}
        plus = {name: params[name] + factors[name] for name in self.logarithmic}
        return params | times | plus

    def directions(self, params: dict[str, Array], run: Callable[[dict[str, Array]], Run]) -> dict[str, np.ndarray]:
        """Which entries of positive numbers the variance rises with, as zeros and ones."""
        names = (*self.positive, *self.logarithmic)
        zero = {name: jnp.zeros_like(params[name]) for name in names}
        # d log var / d log theta
        slope = jax.jit(jax.grad(lambda factors: self.variance(run(self.scaled(params, factors)))))(zero)
        return {name: np.asarray(slope[name] > _LEAST_EXPONENT, slope[name].dtype) for name in names}

    def log_densities(self, found: Run) -> Array:
        """log p - log q of the hyperparameters of new layers, at their draw."""
        total = jnp.zeros(())
        for name in self.shared:
            for sign, site in ((1, found.model[name]), (-1, found.guide[name])):
                total = total + sign * jnp.sum(log_prob(site))
        return total


def find_new_layers(found: Run, sites: SharedSites, program: SitesOfFit, names: tuple[str, ...]) -> NewLayers:
    """The new layers in a run of guide and model.

    Args:
        found: the run.
        sites: which sites are new.
        program: the sites of guide and model.
        names: of the parameters that are new.

    Raises:
        ValueError: no new layer, or one that is observed; one whose hidden values do not follow the model.
    """
    model, guide = found.model, found.guide
    inducing = {name: record_of(guide[name]) for name in sites.new if site_kind(model[name]) == "inducing"}
    if not inducing:
        raise expected(
            "a layer that the fitted program does not have",
            f"the new sites {list(sites.new)}",
            "map the names of the layers, deeper to fitted, names={'f1': 'f0'}",
        )
    if last := sorted(inducing.keys() - structure(model).inner):
        raise expected(
            "new layers below the last one",
            f"{last[0]!r}, which is under the likelihood",
            f"map it to a layer of the fit, names={{{last[0]!r}: ...}}",
        )
    hidden = tuple(
        name
        for name, site in model.items()
        if site["type"] == "sample" and site_kind(site) == "hidden" and values_of(site["fn"]).layer in inducing
    )
    if own := [name for name in hidden if record_of(guide[name]).is_variational]:
        raise expected(
            "values of a new layer that follow the model",
            f"{own[0]!r} with another posterior",
            f"give it sites={{{own[0]!r}: dgp.guides.Propagate()}}",
        )
    shared = tuple(name for name in sites.new if site_kind(model[name]) == "other")
    positive, logarithmic = [], []
    for name in names:
        owner, rest = sites.owner(name)
        of_guide = rest.startswith(f"_{sites.prefixes[0]}_")  # and not the program's own, named after a layer
        if of_guide and owner in inducing:
            continue
        if _is_positive(program.parameters[name].constraint):
            if not of_guide or rest.endswith("_loc"):
                positive.append(name)
        elif owner in shared and rest.endswith("_loc") and _is_positive(unwrap(model[owner]["fn"]).support):
            logarithmic.append(name)
    return NewLayers(inducing, hidden, shared, tuple(logarithmic), tuple(positive))


def _is_positive(constraint: Any) -> bool:
    while isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    return isinstance(biject_to(constraint), ExpTransform)


def with_prior_values(params: dict[str, Array], layers: NewLayers) -> dict[str, Array]:
    """Parameters at which q(v) of new layers is their prior, where their rules are Gaussians."""
    changed: dict[str, Array] = {}
    for record in layers.inducing.values():
        if record.gaussian is None or record.follows:
            continue
        loc, scale = f"{record.param_prefix}_loc", f"{record.param_prefix}_{record.gaussian.scale}"
        like = params[scale]
        # q(v) = N(0, I)
        one = jnp.ones_like(like) if record.gaussian.diagonal else jnp.eye(like.shape[-1], dtype=like.dtype)
        changed |= {loc: jnp.zeros_like(params[loc]), scale: jnp.broadcast_to(one, like.shape)}
    return params | changed


_HALVINGS = 40
"""The smallest variance that is tried, as the number of times that the first one is halved."""


_CERTAIN = 4.0
"""Standard errors by which the bound must be lower for it to be certain."""


class DeeperStart(NamedTuple):
    """Initial values of a deeper program at the fit of a shallower one; :func:`deepen` makes it.

    Example:
        >>> from numpyro_dgp import initial
        >>> start = initial.DeeperStart({}, fitted=-10.0, bound=-10.1, error=0.1, densities=-3.0, variance=1e-4)
        >>> start.bound + start.densities  # what dgp.ELBO() estimates for the deeper program
        -13.1
    """

    params: dict[str, Array]
    """Values of all parameters, for ``init_params``."""
    fitted: float
    """The bound of the fitted program."""
    bound: float
    """The bound of the deeper program at ``params``, without ``densities``."""
    error: float
    """Standard error of the difference of the two."""
    densities: float
    """log p - log q of the hyperparameters that only the deeper program has."""
    variance: float
    """By which new layers move their inputs: the mean over rows, geometric over layers."""

    def __repr__(self) -> str:
        return brief(self)


def deepen(
    posterior: Posterior,
    model: Callable[..., Any],
    guide: Guide,
    rng_key: Array,
    *args: Any,
    names: Mapping[str, str] | None = None,
    num_samples: int = 200,
    errors: float = 1.0,
    **kwargs: Any,
) -> DeeperStart:
    r"""Parameters of a deeper program at which it is the fitted one, with new layers that are the identity.

    A site of the deeper program is that of the fit with the same name, or with the name given in ``names``. All others
    are new. Parameters of the fit are taken over; for a new layer f with the mean m(x) = x,

    .. math:: q(v) = p(v) = N(0, I), \qquad \operatorname{var} f(x) = c\, \sigma_0^2(x),

    where :math:`\sigma_0^2` is the variance, process noise included, at the initial values of the program, and c the
    largest of 1, 1/2, 1/4, ... at which the bound is not lower than that of the fit by more than ``errors`` standard
    errors of their difference. All positive hyperparameters of the new layers' own that the variance rises with are
    multiplied by c. That q(v) has no divergence: the bound loses only what a layer of that variance costs those above.

    The two bounds are compared without the densities of the hyperparameters that the fitted program does not have,
    since it has no such term. What these are is in the result. A narrow prior of the variance pulls a layer away from
    the identity, whatever the data (``docs/depth.md``).

    Args:
        posterior: the fitted program, with a guide of this package.
        model: the deeper program.
        guide: its guide, with the same rules for sites of the fit.
        rng_key: PRNG key.
        *args: arguments of the model, those of the fit; both programs are called with them.
        names: from names of the deeper program to those of the fitted one, sites and ``numpyro.param``, where they
            differ. Other names mean the same in both, unless another site has taken them.
        num_samples: draws of each bound.
        errors: by how many of its standard errors the bound may be lower. With more of them, or fewer draws,
            new layers start with a larger variance and come into use in fewer steps.
        **kwargs: keyword arguments of the model.

    Returns:
        Parameters, and both bounds.

    Raises:
        ValueError: a posterior or guide of another kind; names that there are not; sites or parameters of the fit
            without a place, or of another shape; a layer of the fit that sees other inputs or has other inducing
            inputs when the new layers are at their means; a new layer with a variance that is fixed, or under the
            likelihood; a bound that is lower than that of the fit at every variance.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> X = jnp.linspace(-1, 1, 20)[:, None]
        >>> def model(X, y=None, depth=1):
        ...     h, points = X, dgp.Points(jnp.linspace(-1, 1, 5)[:, None])
        ...     for i in range(1, depth):
        ...         variance = numpyro.param(f"variance{i}", 1.0, constraint=dist.constraints.positive)
        ...         f = dgp.gp(f"f{i}", dgp.kernels.RBF(variance), points, outputs=1, mean=dgp.means.IdentityMean())
        ...         with numpyro.plate(f"rows{i}", len(X)):
        ...             h = numpyro.sample(f"h{i}", f(h))
        ...     g = dgp.gp("g", dgp.kernels.RBF(), points)
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> deeper = lambda X, y=None: model(X, y, depth=2)
        >>> guides = dgp.guides.InducingPoint(model), dgp.guides.InducingPoint(deeper)
        >>> y = jnp.sign(X[:, 0])
        >>> svi = SVI(model, guides[0], optax.adam(0.05), dgp.ELBO())
        >>> result = dgp.fit(svi, jax.random.key(0), 100, X, y, progress_bar=False)
        >>> fitted = dgp.Posterior(model, guides[0], result.params)
        >>> start = dgp.initial.deepen(fitted, deeper, guides[1], jax.random.key(1), X, y)
        >>> start.bound > start.fitted - 0.1
        True
        >>> svi = SVI(deeper, guides[1], optax.adam(0.05), dgp.ELBO())
        >>> result = dgp.fit(svi, jax.random.key(2), 10, X, y, init_params=start.params, progress_bar=False)
    """
    _require_fit(posterior, model, guide, names)
    require_compiling_itself(rng_key, args, kwargs)
    require_key(rng_key)
    require_positive("errors", errors, "1.0")
    require_count("num_samples", num_samples, "200")
    names = names or {}
    arrays, rebuild = split_arguments(args, kwargs)
    keys = jax.random.split(rng_key, num_samples)
    svi, before = (
        SVI(*program, optax.sgd(0.0), ELBO()) for program in ((model, guide), (posterior.model, posterior.guide))
    )
    if not has_no_state(svi):
        svi.init(rng_key, *args, **kwargs)
    program, fitted_program = (sites_of_fit(of, rebuild, arrays) for of in (svi, before))
    sites = shared_sites(program, fitted_program, names, (guide.prefix, before.guide.prefix))
    shapes = {name: site.value for name, site in program.parameters.items()}
    taken, new = taken_parameters(shapes, posterior.params, sites, names)

    def once(params: dict[str, Array], arrays: list[Array], key: Array = rng_key) -> Run:
        plate_key, particle_key = jax.random.split(key)  # as ELBO does
        args, kwargs = rebuild(arrays)
        return run(particle_key, plate_key, params, model, guide, args, kwargs)

    layers = find_new_layers(_on_shapes(once, shapes, arrays), sites, program, new)
    state, _ = start_of_fit(svi, rng_key, rebuild, arrays, None)
    params = with_prior_values(svi.get_params(state) | taken, layers)
    _require_wiring(posterior, model, params, sites.old, rebuild, arrays)
    directions = layers.directions(params, lambda params: once(params, arrays))
    if not any(map(np.any, directions.values())):
        raise expected(
            f"a variance of the new layer {next(iter(layers.inducing))!r} that can start small",
            "one without a positive hyperparameter that changes it",
            "write variance = numpyro.param('variance', 1.0, constraint=constraints.positive), or sample it",
        )

    @jax.jit
    def draws(params: dict[str, Array], arrays: list[Array]) -> tuple[Array, Array, Array]:
        """Of the bound without densities, of the densities, of the variance."""

        def draw(key: Array) -> tuple[Array, Array, Array]:
            args, kwargs = rebuild(arrays)
            bound, found = -ELBO().loss(key, params, model, guide, *args, **kwargs), once(params, arrays, key)
            densities = layers.log_densities(found)
            return bound - densities, densities, jnp.exp(layers.variance(found))  # less log p - log q of what is new

        return jax.lax.map(draw, keys)

    def scaled(halvings: int) -> dict[str, Array]:
        # c = 2^-halvings
        factors = {name: -halvings * jnp.log(2.0).astype(d.dtype) * d for name, d in directions.items()}
        return layers.scaled(params, factors)

    fitted = np.asarray(_bounds(before, posterior.params, keys, rebuild, arrays), float)
    return _largest(lambda halvings: (scaled(halvings), draws(scaled(halvings), arrays)), fitted, errors, layers)


def _require_fit(posterior: Any, model: Any, guide: Any, names: Any) -> None:
    what, do = (
        "a Posterior with a guide of dgp.guides",
        "dgp.Posterior(model, dgp.guides.InducingPoint(model), result.params)",
    )
    expect_kind(posterior, Posterior, what, do)
    expect(isinstance(posterior.guide, Guide), what, f"Posterior of {type(posterior.guide).__name__}", do)
    expect(callable(model), "the deeper model, a function", type(model).__name__)
    expect_kind(guide, Guide, "a guide of dgp.guides for the deeper model", "dgp.guides.InducingPoint(model)")
    expect_kind(
        names,
        Mapping | None,
        "names as a dict from names of the deeper program to those of the fitted one",
        "names={'f1': 'f0'}",
    )


def _on_shapes(once: Callable[..., Run], params: dict[str, Array], arrays: list[Array]) -> Run:
    found: list[Run] = []

    def keep(params: dict[str, Array], arrays: list[Array]) -> tuple[()]:
        found.append(once(params, arrays))
        return ()

    jax.eval_shape(keep, params, arrays)
    return found[0]


def _require_wiring(
    posterior: Posterior,
    model: Callable[..., Any],
    params: dict[str, Array],
    old: Mapping[str, str],
    rebuild: Rebuild,
    arrays: list[Array],
) -> None:
    """Raise unless the layers of the fit have their inputs, with new layers at their means."""
    fit = dict(posterior.params)
    first = handlers.substitute(handlers.substitute(posterior.guide, data=fit), substitute_fn=first_rows)

    @jax.jit
    def inputs(arrays: list[Array]) -> Any:
        args, kwargs = rebuild(arrays)
        values = handlers.seed(first, 0)(*args, **kwargs)  # not under block, under which a guide returns nothing
        renamed = {name: values[source] for name, source in old.items() if source in values}
        return (
            layer_inputs(model, params, renamed, args, kwargs),
            layer_inputs(posterior.model, fit, values, args, kwargs),
        )

    deeper, fitted = inputs(arrays)
    require_same_inputs(deeper, fitted, old)


def _bounds(svi: SVI, params: Mapping[str, Array], keys: Array, rebuild: Rebuild, arrays: list[Array]) -> Array:
    """A draw of the bound for each key."""

    @jax.jit
    def draws(params: dict[str, Array], arrays: list[Array]) -> Array:
        args, kwargs = rebuild(arrays)
        return jax.lax.map(lambda key: -svi.loss.loss(key, params, svi.model, svi.guide, *args, **kwargs), keys)

    return draws(dict(params), arrays)


def _largest(
    at: Callable[[int], tuple[dict[str, Array], tuple[Array, Array, Array]]],
    fitted: np.ndarray,
    errors: float,
    layers: NewLayers,
) -> DeeperStart:
    """The start with the largest variance that costs little, by bisection over how often the first one is halved.

    The cost of a variance is the loss of the bound against the smallest one, at the same random numbers.

    Raises:
        ValueError: the bound at the smallest variance is lower than that of the fit.
    """

    def start(halvings: int) -> tuple[DeeperStart, np.ndarray]:
        params, found = at(halvings)
        bounds, densities, variances = (np.asarray(values, float) for values in found)
        error = np.std(bounds - fitted) / np.sqrt(len(bounds))  # of draws in pairs, with one key each
        numbers = map(float, (fitted.mean(), bounds.mean(), error, densities.mean(), variances.mean()))
        return DeeperStart(params, *numbers), bounds

    best, least = start(_HALVINGS)
    rounding = 1e-4 * (1 + abs(best.fitted))
    if not best.bound >= best.fitted - _CERTAIN * best.error - rounding:
        raise expected(
            f"a bound that is not lower than that of the fit, {best.fitted:.6g}",
            f"{best.bound:.6g} with the new layers {sorted(layers.inducing)} at a variance of {best.variance:.3g}",
            "sample the new layers' variance and noise; keep priors, likelihood and constants of the fit",
        )
    allowed = errors * best.error + rounding
    low, high = -1, _HALVINGS
    while high - low > 1:
        middle = (low + high) // 2
        found, bounds = start(middle)
        costs = least - bounds
        if np.mean(costs) + 2 * np.std(costs) / np.sqrt(len(costs)) <= allowed:  # two errors above
            high, best = middle, found
        else:
            low = middle
    return best
