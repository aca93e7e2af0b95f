"""``deepen``: the start of a deeper program at the fit of a shallower one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import SVI

from numpyro_dgp._checks import require_count, require_key, require_positive
from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.deepening.layer_inputs import first_rows, layer_inputs, require_same_inputs
from numpyro_dgp.deepening.new_layers import NewLayers, find_new_layers, with_prior_values
from numpyro_dgp.deepening.parameters_by_site import shared_sites, taken_parameters
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.run import Run, run
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.inference.fit_start import require_compiling_itself, start_of_fit
from numpyro_dgp.inference.initial_state import has_no_state
from numpyro_dgp.inference.program_sites import Rebuild, sites_of_fit
from numpyro_dgp.predict import Posterior

__all__ = ["DeeperStart", "deepen"]

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
    """The bound of the deeper program at ``params``, but for ``densities``."""
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

    A site of the deeper program is that of the fit with the same name, or with the name that ``names`` says. All others
    are new. Parameters of the fit are taken over; for a new layer f with the mean m(x) = x,

    .. math:: q(v) = p(v) = N(0, I), \qquad \operatorname{var} f(x) = c\, \sigma_0^2(x),

    where :math:`\sigma_0^2` is the variance, process noise included, at the initial values of the program, and c the
    largest of 1, 1/2, 1/4, ... at which the bound is not lower than that of the fit by more than ``errors`` standard
    errors of their difference. All positive hyperparameters of the new layers' own that the variance rises with are
    multiplied by c. That q(v) has no divergence: the bound loses only what a layer of that variance costs those above.

    The two bounds are compared without the densities of the hyperparameters that the fitted program does not have,
    since it has no such term. What these are is in the result. A narrow prior of the variance pulls a layer away from
    the identity, whatever the data say (``docs/depth.md``).

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
        ...         f = dgp.gp(f"f{i}", dgp.kernels.RBF(variance), points, outputs=1, mean=dgp.means.Identity())
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
    require_compiling_itself("deepen", rng_key, args, kwargs)
    require_key("deepen", rng_key)
    require_positive("deepen", "errors", errors, "1.0")
    require_count("deepen", "num_samples", num_samples, "200")
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
    state, _ = start_of_fit("deepen", svi, rng_key, rebuild, arrays, None)
    params = with_prior_values(svi.get_params(state) | taken, layers)
    _require_wiring(posterior, model, params, sites.old, rebuild, arrays)
    directions = layers.directions(params, lambda params: once(params, arrays))
    if not any(map(np.any, directions.values())):
        raise ValueError(
            f"deepen: expected a variance of the new layer {next(iter(layers.inducing))!r} that can start small, got "
            "one that no positive hyperparameter of its own changes: take the variance of its kernel from "
            "numpyro.sample or numpyro.param, as in numpyro.param('variance', 1.0, constraint=constraints.positive)"
        )

    @jax.jit
    def draws(params: dict[str, Array], arrays: list[Array]) -> tuple[Array, Array, Array]:
        """Of the bound without densities, of the densities, of the variance."""

        def draw(key: Array) -> tuple[Array, Array, Array]:
            args, kwargs = rebuild(arrays)
            bound, found = -ELBO().loss(key, params, model, guide, *args, **kwargs), once(params, arrays, key)
            densities = layers.log_densities(found)
            return bound - densities, densities, jnp.exp(layers.variance(found))

        return jax.lax.map(draw, keys)

    def scaled(halvings: int) -> dict[str, Array]:
        factors = {name: -halvings * jnp.log(2.0).astype(d.dtype) * d for name, d in directions.items()}
        return layers.scaled(params, factors)

    fitted = np.asarray(_bounds(before, posterior.params, keys, rebuild, arrays), float)
    return _largest(lambda halvings: (scaled(halvings), draws(scaled(halvings), arrays)), fitted, errors, layers)


def _require_fit(posterior: Any, model: Any, guide: Any, names: Any) -> None:
    if not isinstance(posterior, Posterior) or not isinstance(posterior.guide, Guide):
        of = f" of {type(posterior.guide).__name__}" if isinstance(posterior, Posterior) else ""
        raise ValueError(
            f"deepen: expected a Posterior with a guide of dgp.guides, got {type(posterior).__name__}{of}: "
            "dgp.Posterior(model, dgp.guides.InducingPoint(model), result.params)"
        )
    if not callable(model):
        raise ValueError(f"deepen: expected the deeper model, a function, got {type(model).__name__}")
    if not isinstance(guide, Guide):
        raise ValueError(
            f"deepen: expected a guide of dgp.guides for the deeper model, got {type(guide).__name__}: "
            "dgp.guides.InducingPoint(model)"
        )
    if not isinstance(names, Mapping | None):
        raise ValueError(
            f"deepen: expected names as a dict from names of the deeper program to those of the fitted one, got "
            f"{type(names).__name__}: names={{'f1': 'f0'}}"
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
    """Raise unless the layers of the fit see what they saw, with new layers at their means."""
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

    What a variance costs is the difference to the smallest one, of which the draws have the same random numbers.

    Raises:
        ValueError: the bound at the smallest variance is lower than that of the fit.
    """

    def start(halvings: int) -> tuple[DeeperStart, np.ndarray]:
        params, found = at(halvings)
        bounds, densities, variances = (np.asarray(values, float) for values in found)
        error = np.std(bounds - fitted) / np.sqrt(len(bounds))
        numbers = map(float, (fitted.mean(), bounds.mean(), error, densities.mean(), variances.mean()))
        return DeeperStart(params, *numbers), bounds

    best, least = start(_HALVINGS)
    rounding = 1e-4 * (1 + abs(best.fitted))
    if not best.bound >= best.fitted - _CERTAIN * best.error - rounding:
        raise ValueError(
            f"deepen: expected a bound that is not lower than that of the fit, {best.fitted:.6g}, got "
            f"{best.bound:.6g} with the new layers {sorted(layers.inducing)} at a variance of {best.variance:.3g}: "
            "where that is not small, take their variance and process noise from numpyro.sample or numpyro.param; "
            "where it is, see that priors, likelihood and fixed numbers are those of the fit"
        )
    allowed = errors * best.error + rounding
    low, high = -1, _HALVINGS
    while high - low > 1:
        middle = (low + high) // 2
        found, bounds = start(middle)
        costs = least - bounds
        if np.mean(costs) + 2 * np.std(costs) / np.sqrt(len(costs)) <= allowed:
            high, best = middle, found
        else:
            low = middle
    return best
