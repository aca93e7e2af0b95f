"""A rule for inducing values whose density is not known: a network that draws them, and one that learns the density."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints

from numpyro_dgp._checks import require_count
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.fields_in_order import FieldsInOrder
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.guides.rules.flow_inducing import AroundGaussian, Base
from numpyro_dgp.guides.rules.inducing_values import Full
from numpyro_dgp.guides.rules.latents import TanhNetwork, tanh_network
from numpyro_dgp.guides.rules.rule import Site

__all__ = ["Implicit", "Sampled"]


class Sampled(FieldsInOrder):
    r"""What a network makes of standard normal numbers, :math:`v = m + R z`, with an estimate of its density.

    .. math::
        z = \epsilon + g(\epsilon, \xi), \qquad t = (z - \mu) / \sigma, \qquad
        \log q(v) \approx \log N(t; 0, I) + D(t) - \sum_j \log \sigma_j - \log\lvert\det R\rvert

    with mean and standard deviation of draws of z. D tells t from standard normal numbers. Where it does so as well as
    can be, :math:`D(t) = \log q(t) - \log N(t; 0, I)`. The gradient of the density is that of the right-hand side with
    D, :math:`\mu` and :math:`\sigma` held fixed; D itself gets the gradient of its own loss,

    .. math:: E_{q(t)} \log (1 + e^{-D(t)}) + E_{N(\epsilon; 0, I)} \log (1 + e^{D(\epsilon)}),

    of which the density contains a term whose value is zero. An optimiser of the bound trains both.

    Args:
        base: the Gaussian N(m, R R').
        generator: g, from the n numbers and those in addition.
        critic: D, from n numbers to one.
        draws: how many draws moments and the loss of D are averages over.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    pytree_data_fields = ("base", "generator", "critic")
    pytree_aux_fields = ("draws",)
    density_is_estimated = True

    __repr__ = brief

    def __init__(self, base: Belief, generator: TanhNetwork, critic: TanhNetwork, draws: int) -> None:
        self.base, self.generator, self.critic, self.draws = base, generator, critic, draws
        super().__init__((), base.event_shape)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    def white(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of z (..., n)."""
        size, wide = math.prod(self.event_shape), len(self.generator.weights[0])
        numbers = jax.random.normal(key, (*sample_shape, wide), self.base.loc.dtype)
        return numbers[..., :size] + self.generator(numbers)  # z = e + g(e, xi)

    def reference(self, key: Any) -> Reference:
        """Moments of draws of z, and the loss of D with a gradient by D only."""
        one, other = jax.random.split(key)
        drawn = jax.lax.stop_gradient(self.white(one, (self.draws,)))  # mu, sigma and D's loss have no gradient by g
        mean, scale = drawn.mean(0), drawn.std(0)
        normal = jax.random.normal(other, drawn.shape, drawn.dtype)
        found, wrong = self.critic((drawn - mean) / scale), self.critic(normal)
        # E_q log(1 + e^-D) + E_N log(1 + e^D)
        return Reference(mean, scale, (jax.nn.softplus(-found) + jax.nn.softplus(wrong)).mean())

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        draw_key, reference_key = jax.random.split(key)
        z = self.white(draw_key, sample_shape)
        reference = self.reference(reference_key)
        ratio = self._log_ratio(jax.lax.stop_gradient(self.critic), reference, z)
        # adds zero, and the gradient of D's loss
        ratio = ratio + reference.loss - jax.lax.stop_gradient(reference.loss)
        z = z.reshape(*sample_shape, *self.event_shape)
        return self.base.from_white(z), [z, ratio]

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        draw_key, _ = jax.random.split(key)
        return self.base.from_white(self.white(draw_key, sample_shape).reshape(*sample_shape, *self.event_shape))

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        """The estimate; of a value alone with moments of the same draws in every call."""
        if intermediates:
            z, ratio = intermediates
        else:
            z = self.base.white(value)
            flat = z.reshape(*z.shape[: z.ndim - self.event_dim], -1)
            ratio = self._log_ratio(self.critic, self.reference(jax.random.key(0)), flat)
        return self.base.log_prob(value, [z]) + ratio

    @staticmethod
    def _log_ratio(critic: TanhNetwork, reference: Reference, z: Array) -> Array:
        """log q(z) - log N(z; 0, I) of vectors (..., n)."""
        t = (z - reference.mean) / reference.scale
        # log N(t; 0, 1) - log sigma - log N(z; 0, 1)
        gaussian = 0.5 * (jnp.square(z) - jnp.square(t)) - jnp.log(reference.scale)
        return gaussian.sum(-1) + critic(t)[..., 0]


class Reference(NamedTuple):
    """What a critic compares draws with: their own moments (n,), and the loss of the critic."""

    mean: Array
    scale: Array
    loss: Array


@dataclasses.dataclass(frozen=True)
class Implicit(AroundGaussian):
    r"""Whatever a network makes of standard normal numbers; joint over all outputs. Its density is learned beside it.

    .. math:: v = m + R\,[\epsilon + g(\epsilon, \xi)], \qquad \epsilon, \xi \sim N(0, I)

    g, a network with ``extra`` more numbers than there are values, starts at zero, so that q(v) starts as ``base``,
    ``Full()`` by default. The density of v is not known. A second network D learns to tell draws from those of a
    Gaussian with the same means and variances, which gives the ratio of the two densities. A Gaussian of the same
    moments, and not the prior, leaves little to learn, and nothing to gain by running away from what D knows.

    **What is maximised is no bound of the evidence.** It is an estimate that is right where D is, and too high where D
    lags behind, by more with more inducing values. Judge such a fit by test densities and draws: k-hats are those of
    the estimate, and ``to_arviz`` warns. Both networks have the optimiser of the fit; with small learning rates D
    follows. :class:`Diffusion` is as flexible and has a bound.

    Args:
        base: rule of the Gaussian: ``Full()``, ``Diagonal()``, ``LowRank(...)``, or ``MarkovInducing(below=...)`` for
            means that depend on the draw of the layer below.
        extra: numbers that go into the network beside one for every value.
        hidden: units of the hidden layer of g, and of each of the two of D; by default twice the number of values, at
            least 16.
        draws: how many draws of q and of the Gaussian a step takes for the moments and for D.

    Raises:
        ValueError: numbers that are not positive integers, another base, or a site that does not hold inducing values.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 3)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Poisson(jnp.exp(v))), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Implicit(draws=20))
        >>> svi = SVI(model, guide, optax.adam(0.005), dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, jnp.arange(20) % 2, progress_bar=False)
        >>> [name for name in sorted(result.params) if "critic_W" in name]
        ['f_auto_critic_W0', 'f_auto_critic_W1', 'f_auto_critic_W2']

    Source: Yu et al. (2019), section 3, for inducing values; Mescheder et al. (2017), section 4, for the
    Gaussian of the same moments in place of the prior.
    """

    base: Base = dataclasses.field(default_factory=Full)
    extra: int = 4
    hidden: int | None = None
    draws: int = 500

    __repr__ = brief

    def __post_init__(self) -> None:
        require_count("rule Implicit", "extra", self.extra, "4")
        require_count("rule Implicit", "draws", self.draws, "500")
        if self.draws < 2:
            raise ValueError("rule Implicit: expected draws of at least 2, for their variances, got 1: try 500")
        self.require_base("that draws start at")

    def __call__(self, site: Site) -> Sampled:
        base, size = self.gaussian_of(site)
        dtype, units = site.fn.dtype, self.units(size)
        generator = tanh_network(
            site, [size + self.extra, units, size], dtype, prefix="generator_", starts_at_zero=True
        )
        critic = tanh_network(site, [size, units, units, 1], dtype, prefix="critic_", starts_at_zero=True)
        return Sampled(base, generator, critic, self.draws)
