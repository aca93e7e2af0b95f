r"""A program fitted with its last layer integrated, and with independent Gaussians for all other numbers.

With the unconstrained numbers u of all sites but the inducing values of integrated layers, and their density
:math:`p(y, u)`,

.. math:: \mathcal L = E_{q(u)}[\log p(y, u)] + H[q], \qquad q(u) = \prod_i N(u_i; m_i, s_i^2)

bounds the evidence. Hyperparameters are among u, so that bounds of different programs can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.compiled import Compiled
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.inference.mcmc import for_mcmc
from numpyro_dgp.model.beliefs import InducingPrior, StandardNormal
from numpyro_dgp.model.site_densities import total_log_prob
from numpyro_dgp.model.sites import Message, Trace, unwrap
from numpyro_dgp.predict import Posterior

__all__ = ["IntegratedFit", "Settings", "fit_integrated"]

_SCALE = 0.1
"""Standard deviation of new hyperparameters at the start, on the unconstrained scale."""
_DRAWS_OF_BOUND = 200
_STARTS = 3
"""Of each fit; the one with the largest bound is kept. A single one often ends at a local optimum of lengthscales."""

Numbers = dict[str, Array]


class Settings(NamedTuple):
    """How each program is fitted.

    Args:
        num_steps: of Adam.
        learning_rate: of the first step.
        num_particles: draws of the bound in a step.
        num_draws: of the posterior that are kept.
        tries: draws of new hyperparameters among which the starts are chosen.
    """

    num_steps: int
    learning_rate: float
    num_particles: int
    num_draws: int
    tries: int


class IntegratedFit(NamedTuple):
    """A fitted program.

    Args:
        posterior: draws of it.
        bound: of its evidence, with everything integrated.
        error: standard error of that number.
        loc: means of the Gaussians, on the unconstrained scale, by site.
        log_scale: logarithms of their standard deviations.
    """

    posterior: Posterior
    bound: float
    error: float
    loc: Numbers
    log_scale: Numbers


def fit_integrated(
    model: Callable[..., Any],
    rng_key: Array,
    args: tuple[Any, ...],
    settings: Settings,
    below: IntegratedFit | None,
) -> IntegratedFit:
    """Fit one program, from the fit of a shallower one where there is one.

    Sites of the same name and shape start at the same Gaussians. The whitened values of new layers start at their
    prior, at which they cost nothing, and new hyperparameters at the best three of some draws, one of which is kept.

    Raises:
        ValueError: a bound that is not finite at the end.
    """
    program = for_mcmc(model)
    arrays, rebuild = split_arguments(args, {})

    def run(key: Array, known: tuple[Numbers, Numbers], arrays: list[Array]) -> Any:
        args, _ = rebuild(arrays)
        start_key, step_key, bound_key, draw_key = jax.random.split(key, 4)
        density = _Density(program, args, start_key)
        starts = density.starts(start_key, known, settings.tries)
        adam = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.num_steps))

        def loss(params: tuple[Numbers, Numbers], key: Array) -> Array:
            keys = jax.random.split(key, settings.num_particles)
            return -jax.vmap(lambda key: density.bound(params, key))(keys).mean()

        def step(state: Any, key: Array) -> tuple[Any, None]:
            params, moments = state
            changes, moments = adam.update(jax.grad(loss)(params, key), moments)
            return (optax.apply_updates(params, changes), moments), None

        def trained(params: tuple[Numbers, Numbers]) -> tuple[tuple[Numbers, Numbers], Array]:
            keys = jax.random.split(step_key, settings.num_steps)
            (params, _), _ = jax.lax.scan(step, (params, adam.init(params)), keys)
            return params, jax.lax.map(
                lambda key: density.bound(params, key), jax.random.split(bound_key, _DRAWS_OF_BOUND)
            )

        every = jax.lax.map(trained, starts)
        means = every[1].mean(1)
        best = jnp.argmax(jnp.where(jnp.isfinite(means), means, -jnp.inf))
        params, bounds = jax.tree.map(lambda leaf: leaf[best], every)
        draws = jax.lax.map(lambda key: density.draw(params, key), jax.random.split(draw_key, settings.num_draws))
        return params, bounds, draws

    known = ({}, {}) if below is None else (below.loc, below.log_scale)
    (loc, log_scale), bounds, draws = Compiled(run).at(rng_key, known, arrays)(rng_key, known, arrays)
    values = np.asarray(bounds, float)
    if not np.isfinite(values).all():
        raise ValueError(
            "fit_best: expected a finite bound, got one that is not: standardise X and y, give the noise a prior away "
            "from zero, take a smaller learning_rate, or run in float64"
        )
    error = float(values.std(ddof=1) / math.sqrt(len(values)))
    return IntegratedFit(Posterior(model, samples=draws), float(values.mean()), error, loc, log_scale)


class _Density:
    """The joint density of a program's observations and of the unconstrained numbers of its latent sites."""

    def __init__(self, program: Callable[..., Any], args: tuple[Any, ...], key: Array) -> None:
        self.program, self.args, self.key = program, args, key
        self.sites = _latent(self.trace({}, key))
        self.bijections = {name: biject_to(site["fn"].support) for name, site in self.sites.items()}
        self.white = [n for n, s in self.sites.items() if isinstance(unwrap(s["fn"]), InducingPrior | StandardNormal)]

    def trace(self, values: Numbers, key: Array) -> Trace:
        given = handlers.substitute(handlers.seed(self.program, key), data=values)
        with handlers.block():
            return handlers.trace(given).get_trace(*self.args)

    def constrained(self, numbers: Numbers) -> Numbers:
        return {name: bijection(numbers[name]) for name, bijection in self.bijections.items()}

    def __call__(self, numbers: Numbers) -> Array:
        values = self.constrained(numbers)
        sites = self.trace(values, self.key).values()
        total = sum((total_log_prob(s) for s in sites if s["type"] == "sample"), jnp.zeros(()))
        for name, bijection in self.bijections.items():
            total = total + jnp.sum(bijection.log_abs_det_jacobian(numbers[name], values[name]))
        return total

    def starts(self, key: Array, known: tuple[Numbers, Numbers], tries: int) -> tuple[Numbers, Numbers]:
        """Means and logarithms of scales of the Gaussians of all sites at a few starts, along a first axis.

        Whitened values are drawn as well in the tries, so that a new layer starts with a variance that costs little.
        """
        shapes = {
            name: jnp.shape(bijection.inv(self.sites[name]["value"])) for name, bijection in self.bijections.items()
        }
        loc, log_scale = ({n: v for n, v in part.items() if shapes.get(n) == jnp.shape(v)} for part in known)
        zero = {name: jnp.zeros_like(self.sites[name]["value"]) for name in self.white}
        fixed = {name: value for name, value in loc.items() if name not in self.white}

        def draw(key: Array) -> tuple[Array, Numbers]:
            sites = _latent(self.trace({name: self.bijections[name](u) for name, u in fixed.items()}, key))
            numbers = {name: self.bijections[name].inv(sites[name]["value"]) for name in sites} | fixed
            return self(numbers), numbers

        densities, numbers = jax.lax.map(draw, jax.random.split(key, tries))
        best = jax.lax.top_k(jnp.where(jnp.isfinite(densities), densities, -jnp.inf), min(_STARTS, tries))[1]
        same = lambda value: jnp.broadcast_to(value, (len(best), *jnp.shape(value)))  # noqa: E731
        first = {name: value[best] for name, value in numbers.items()} | jax.tree.map(same, zero | loc)
        scales = {
            name: jnp.full_like(value, 0.0 if name in self.white else math.log(_SCALE)) for name, value in first.items()
        }
        return first, scales | jax.tree.map(same, log_scale)

    def bound(self, params: tuple[Numbers, Numbers], key: Array) -> Array:
        """A draw of the bound, with the entropy in closed form."""
        entropies = [jnp.sum(rho + 0.5 * math.log(2 * math.pi * math.e)) for rho in params[1].values()]
        return self(_drawn(params, key)) + sum(entropies, jnp.zeros(()))

    def draw(self, params: tuple[Numbers, Numbers], key: Array) -> Numbers:
        """A draw of what all data share: hyperparameters and inducing values."""
        sites = self.trace(self.constrained(_drawn(params, key)), key)
        shared = [n for n, s in sites.items() if not s.get("cond_indep_stack") and not n.endswith("_white")]
        kept = ("sample", "deterministic")
        return {n: sites[n]["value"] for n in shared if sites[n]["type"] in kept and not sites[n].get("is_observed")}


def _drawn(params: tuple[Numbers, Numbers], key: Array) -> Numbers:
    loc, log_scale = params
    keys = jax.random.split(key, len(loc))
    return {
        name: loc[name] + jnp.exp(log_scale[name]) * jax.random.normal(k, loc[name].shape, loc[name].dtype)
        for name, k in zip(sorted(loc), keys, strict=True)
    }


def _latent(sites: Trace) -> dict[str, Message]:
    return {n: s for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
