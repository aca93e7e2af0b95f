r"""Inducing values that a network draws, with a density that a second network learns: no bound of the evidence.

.. math:: v = m + R z, \qquad z = \epsilon + g(\epsilon, \xi), \qquad \epsilon, \xi \sim N(0, I)

g starts at zero, so that the fit starts at the Gaussian N(m, R R'). The density of v is not known. A second network D
learns to tell draws, in units of their own moments :math:`t = (z - \mu) / \sigma`, from standard normal numbers, by

.. math:: E_{q(t)} \log (1 + e^{-D(t)}) + E_{N(\epsilon; 0, I)} \log (1 + e^{D(\epsilon)}) .

Where it does so as well as can be, :math:`D(t) = \log q(t) - \log N(t; 0, I)`, and

.. math:: \log q(v) = \log N(t; 0, I) + D(t) - \sum_j \log \sigma_j - \log\lvert\det R\rvert .

What is maximised is an estimate that is right where D is, and too high where D lags behind, by more with more inducing
values; k-hats are those of the estimate. Judge such a fit by test densities.

``python examples/posteriors/implicit.py`` prints how far its estimate is from an evidence that is known by quadrature,
and the bounds of the package's own families, as ``diffusion.py`` does.

Source: Yu et al. (2019), section 3, for inducing values; Mescheder et al. (2017), section 4, for the Gaussian of the
same moments in place of the prior.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from diffusion import network, table
from numpyro.distributions import constraints

import numpyro_dgp as dgp

Network = tuple[jax.Array, ...]


def outputs(weights: Network, rows: jax.Array) -> jax.Array:
    """Of a network with tanh units (W0, b0, W1, ...), for rows (..., inputs)."""
    for i in range(0, len(weights), 2):
        rows = (jnp.tanh(rows) if i else rows) @ weights[i] + weights[i + 1]
    return rows


class Reference(NamedTuple):
    """What the critic compares draws with: their own moments (n,), and its loss."""

    mean: jax.Array
    scale: jax.Array
    loss: jax.Array


class Sampled(dist.Distribution):
    """What a network makes of standard normal numbers, with an estimate of its density.

    Args:
        base: the Gaussian N(m, R R').
        generator: g, from the n numbers and those in addition.
        critic: D, from n numbers to one.
        draws: how many draws moments and the loss of D are averages over.
    """

    pytree_data_fields = ("base", "generator", "critic")
    pytree_aux_fields = ("draws",)

    def __init__(self, base: Any, generator: Network, critic: Network, draws: int) -> None:
        self.base, self.generator, self.critic, self.draws = base, generator, critic, draws
        super().__init__((), base.event_shape)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    def white(self, key: Any, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """Draws of z (..., n)."""
        size, inputs = math.prod(self.event_shape), len(self.generator[0])
        numbers = jax.random.normal(key, (*sample_shape, inputs), self.generator[0].dtype)  # epsilon and xi
        return numbers[..., :size] + outputs(self.generator, numbers)

    def reference(self, key: Any) -> Reference:
        """Moments of draws of z, and the loss of D with a gradient by D only."""
        one, other = jax.random.split(key)
        drawn = jax.lax.stop_gradient(self.white(one, (self.draws,)))
        mean, scale = drawn.mean(0), drawn.std(0)
        normal = jax.random.normal(other, drawn.shape, drawn.dtype)
        found, wrong = outputs(self.critic, (drawn - mean) / scale), outputs(self.critic, normal)
        return Reference(mean, scale, (jax.nn.softplus(-found) + jax.nn.softplus(wrong)).mean())

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        draw_key, reference_key = jax.random.split(key)
        z, reference = self.white(draw_key, sample_shape), self.reference(reference_key)
        # The density's gradient is that with D held fixed; D has the gradient of its own loss, whose value is left out.
        log_ratio = self.log_ratio(jax.lax.stop_gradient(self.critic), reference, z)
        log_ratio += reference.loss - jax.lax.stop_gradient(reference.loss)
        z = z.reshape(*sample_shape, *self.event_shape)
        return self.base.from_white(z), [z, log_ratio]  # v = m + R z

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        return self.sample_with_intermediates(key, sample_shape)[0]

    def log_prob(self, value: Any, intermediates: Any = None) -> jax.Array:
        """The estimate; of a value alone with moments of the same draws in every call."""
        if intermediates:
            z, log_ratio = intermediates
        else:
            z = self.base.white(value)
            flat = z.reshape(*z.shape[: z.ndim - self.event_dim], -1)
            log_ratio = self.log_ratio(self.critic, self.reference(jax.random.key(0)), flat)
        return self.base.log_prob(value, [z]) + log_ratio

    @staticmethod
    def log_ratio(critic: Network, reference: Reference, z: jax.Array) -> jax.Array:
        """log q(z) - log N(z; 0, I), of vectors (..., n)."""
        t = (z - reference.mean) / reference.scale
        gaussian = 0.5 * (z**2 - t**2) - jnp.log(reference.scale)  # log N(z; mu, sigma^2) - log N(z; 0, 1)
        return gaussian.sum(-1) + outputs(critic, t)[..., 0]


@dataclasses.dataclass(frozen=True)
class Implicit(dgp.extend.Rule):
    """The rule: ``dgp.guides.InducingPoint(model, inducing=Implicit())``. Its draws serve all data at once.

    Args:
        base: rule of the Gaussian.
        extra: numbers xi that go into the network beside one for every value.
        hidden: units of the hidden layer of g, and of each of the two of D; by default twice the number of values, at
            least 16.
        draws: how many draws of q and of the Gaussian a step takes for the moments and for D.
    """

    base: dgp.extend.Rule = dataclasses.field(default_factory=dgp.guides.Full)
    extra: int = 4
    hidden: int | None = None
    draws: int = 500

    def __call__(self, site: dgp.extend.SiteContext) -> Sampled:
        dgp.extend.require_site(dgp.extend.InducingPrior, self, site, "inducing values")
        dtype, size = site.fn.dtype, math.prod(site.fn.event_shape)
        units = self.hidden or max(2 * size, 16)
        generator = network(site, "generator", [size + self.extra, units, size], dtype)
        critic = network(site, "critic", [size, units, units, 1], dtype)
        return Sampled(self.base(site), generator, critic, self.draws)

    def follows(self, name: str, order: tuple[str, ...]) -> str | None:
        return self.base.follows(name, order)


if __name__ == "__main__":
    table(__doc__, {"`Implicit()`": (Implicit(), 4)})
