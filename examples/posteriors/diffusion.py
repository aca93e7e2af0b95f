r"""Inducing values at the end of a learned diffusion: a posterior that is not Gaussian, with a bound of its path.

.. math::
    v = m + R z_0, \qquad z_{k-1} = a_k z_k + s_k\, b_k(z_k) + s_k \tau_k \epsilon_k, \quad z_K \sim N(0, I), \qquad
    a_k^2 + s_k^2 = 1

b is a network that starts at zero and :math:`\tau` starts at one, so that the fit starts at the Gaussian N(m, R R').
The density of v is an integral over paths. Without the drift the chain is at its equilibrium N(0, I) and looks the same
in both directions; F are its steps in the other direction, :math:`F(z_k \mid z_{k-1}) = N(a_k z_{k-1}, s_k^2 I)`. With

.. math::
    \log \tilde q = \log q(z_0, \dots, z_K) - \sum_k \log F(z_k \mid z_{k-1}) - \log\lvert\det R\rvert,
    \qquad E \log \tilde q \ge E \log q(v),

in the place of log q(v) the bound holds, lower by what the path costs beside its end.

``python examples/posteriors/diffusion.py`` prints how far its bound is from an evidence that is known by quadrature,
and that of the package's own families: on a posterior that is cut off and on one with two modes.

Source: Xu et al. (2024), for inducing values; Vargas et al. (2023), section 3, for the diffusion at its equilibrium as
reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from numpyro.infer import SVI
from numpyro.infer.util import log_density

import numpyro_dgp as dgp

LONGEST = 0.7  # the standard deviation of the first step, s_K


class Diffused(dist.Distribution):
    """What a chain of Gaussian steps ends at; its density is that of the path.

    Args:
        base: the Gaussian N(m, R R').
        drift: weights and biases of b (W0, b0, W1, b1), from z and the number of the step, one-hot.
        log_scales: logarithms of tau, from the first step to the last (K, n).
        variances: squares of s, in the same order.
    """

    pytree_data_fields = ("base", "drift", "log_scales")
    pytree_aux_fields = ("variances",)

    def __init__(self, base: Any, drift: tuple[Any, ...], log_scales: jax.Array, variances: tuple[float, ...]) -> None:
        self.base, self.drift, self.log_scales, self.variances = base, drift, log_scales, variances
        super().__init__((), base.event_shape)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        steps, size = self.log_scales.shape
        dtype = self.log_scales.dtype
        W0, b0, W1, b1 = self.drift
        white = jax.random.normal(key, (steps + 1, *sample_shape, size), dtype)
        s2 = jnp.asarray(self.variances, dtype)

        def step(carry: Any, each: Any) -> Any:
            (z, log_ratio), (number, s2, log_tau, noise) = carry, each
            rows = jnp.concatenate([z, jnp.broadcast_to(number, (*sample_shape, steps))], -1)
            moved = jnp.tanh(rows @ W0 + b0) @ W1 + b1 + jnp.exp(log_tau) * noise  # b(z) + tau eps
            # log N(z_{k-1}; a z_k + s b, s^2 tau^2) - log F(z_k | z_{k-1}), less log N(z_{k-1}; 0, I) / N(z_k; 0, I)
            log_ratio += (0.5 * (moved**2 - noise**2) - log_tau).sum(-1)
            return (jnp.sqrt(1 - s2) * z + jnp.sqrt(s2) * moved, log_ratio), None

        start = white[0], jnp.zeros(sample_shape, dtype)
        (z, log_ratio), _ = jax.lax.scan(step, start, (jnp.eye(steps, dtype=dtype), s2, self.log_scales, white[1:]))
        z = z.reshape(*sample_shape, *self.event_shape)
        return self.base.from_white(z), [z, log_ratio]  # v = m + R z_0

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        return self.sample_with_intermediates(key, sample_shape)[0]

    def log_prob(self, value: Any, intermediates: Any = None) -> jax.Array:
        """Of a draw with its path; a value alone has none."""
        if not intermediates:
            raise ValueError("Diffused: expected a draw with the path that led to it, got a value alone")
        z, log_ratio = intermediates
        return self.base.log_prob(value, [z]) + log_ratio


@dataclasses.dataclass(frozen=True)
class Diffusion(dgp.extend.Rule):
    """The rule: ``dgp.guides.InducingPoint(model, inducing=Diffusion())``. Its draws serve all data at once.

    Args:
        base: rule of the Gaussian.
        steps: their number, K.
        smallest: the last step, in units of the base; those before are longer, by equal factors.
        hidden: units of the network; by default twice the number of values, at least 16.
    """

    base: dgp.extend.Rule = dataclasses.field(default_factory=dgp.guides.Full)
    steps: int = 10
    smallest: float = 0.1
    hidden: int | None = None

    def __call__(self, site: dgp.extend.SiteContext) -> Diffused:
        dgp.extend.require_site(dgp.extend.InducingPrior, self, site, "inducing values")
        dtype, size = site.fn.dtype, math.prod(site.fn.event_shape)
        units = self.hidden or max(2 * size, 16)
        drift = network(site, "diffusion", [size + self.steps, units, size], dtype)
        log_scales = site.param("diffusion_log_scales", lambda: jnp.zeros((self.steps, size), dtype))
        lengths = np.geomspace(LONGEST, self.smallest, self.steps) if self.steps > 1 else np.array([self.smallest])
        return Diffused(self.base(site), drift, log_scales, tuple(np.square(lengths).tolist()))

    def follows(self, name: str, order: tuple[str, ...]) -> str | None:
        return self.base.follows(name, order)


def network(site: dgp.extend.SiteContext, name: str, widths: list[int], dtype: Any) -> tuple[jax.Array, ...]:
    """Weights and biases of a site, W0, b0, W1, ...; the last are zero at the start, and so is all that comes out."""
    found: list[jax.Array] = []
    for i, shape in enumerate(itertools.pairwise(widths)):
        size = math.sqrt(2 / sum(shape)) * (i < len(widths) - 2)
        start = lambda s=shape, size=size: size * jax.random.normal(numpyro.prng_key(), s, dtype)  # noqa: E731
        found.append(site.param(f"{name}_W{i}", start))
        found.append(site.param(f"{name}_b{i}", lambda s=shape: jnp.zeros(s[1:], dtype)))
    return tuple(found)


# Two programs with two inducing values, so that the evidence is a sum over a grid.
X = jnp.array([[-0.5], [0.5]])


def labels(X: Any, y: Any = None) -> None:
    """Two ones under a wide prior: the posterior is cut off on one side."""
    f = dgp.gp("f", dgp.kernels.RBF(25.0, 1.0), dgp.Points(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Bernoulli(logits=v)), obs=y)


def squares(X: Any, y: Any = None) -> None:
    """Two squares: the posterior has two modes that mirror each other."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(jnp.square(v), 0.3)), obs=y)


PROGRAMS: dict[str, tuple[Callable[..., None], jax.Array]] = {
    "cut off": (labels, jnp.array([1, 1])),
    "two modes": (squares, jnp.array([1.0, 1.0])),
}


def evidence(model: Callable[..., None], y: jax.Array) -> float:
    line = jnp.linspace(-7, 7, 401)
    grid = jnp.stack(jnp.meshgrid(line, line), -1).reshape(-1, 2)
    densities = jax.vmap(lambda v: log_density(model, (X, y), {}, {"f": v})[0])(grid)
    return float(jax.nn.logsumexp(densities) + 2 * jnp.log(line[1] - line[0]))


def bound(
    model: Callable[..., None], y: jax.Array, rule: dgp.extend.Rule, particles: int, steps: int, seed: int
) -> tuple[float, float]:
    """At the end of a fit by Adam, over 20 000 draws, and its standard error."""
    guide = dgp.guides.InducingPoint(model, inducing=rule)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.01, steps)), dgp.ELBO(particles))
    params = dgp.fit(svi, jax.random.key(seed), steps, X, y, progress_bar=False).params
    loss = jax.jit(jax.vmap(lambda key: dgp.ELBO().loss(key, params, model, guide, X, y)))
    draws = -np.asarray(loss(jax.random.split(jax.random.key(seed + 1), 20_000)))
    return float(draws.mean()), float(draws.std() / math.sqrt(len(draws)))


Families = dict[str, tuple[dgp.extend.Rule, int]]

# Rules of the package, each with the particles of a step.
PACKAGE: Families = {
    "`Full()`": (dgp.guides.Full(), 8),
    "`Flow(antithetic=True)`": (dgp.guides.Flow(antithetic=True), 4),
    "`MixtureOfGaussians(2)`": (dgp.guides.MixtureOfGaussians(2), 8),
}


def table(description: str | None, families: Families) -> None:
    """A row for each family, those of the package first: what its bounds lack of the evidence, from all seeds, and the
    largest standard error in brackets."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds = 5, 1
    jax.config.update("jax_enable_x64", True)
    print("| nats below the evidence | " + " | ".join(PROGRAMS) + " |\n" + "|---" * (len(PROGRAMS) + 1) + "|")
    truths = {name: evidence(*program) for name, program in PROGRAMS.items()}
    for family, (rule, particles) in (PACKAGE | families).items():
        cells = []
        for name, program in PROGRAMS.items():
            found = [bound(*program, rule, particles, options.steps, seed) for seed in range(options.seeds)]
            gaps = sorted(truths[name] - value for value, _ in found)
            cells.append(", ".join(f"{gap:.3f}" for gap in gaps) + f" ({max(error for _, error in found):.3f})")
        print(f"| {family} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    table(
        __doc__,
        {
            "`Diffusion()`": (Diffusion(), 8),
            "`Diffusion(steps=20, hidden=64)`": (Diffusion(steps=20, hidden=64), 8),
        },
    )
