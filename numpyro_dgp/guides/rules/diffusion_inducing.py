"""A rule for inducing values whose posterior is not Gaussian: the end of a learned diffusion."""

from __future__ import annotations

import dataclasses
import math
from numbers import Real
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
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

__all__ = ["Diffused", "Diffusion"]


class Diffused(FieldsInOrder):
    r"""What a chain of Gaussian steps ends at, :math:`v = m + R z_0`, with a density of its path in place of its own.

    .. math::
        z_K \sim N(0, I), \qquad
        z_{k-1} = a_k z_k + s_k\, b_k(z_k) + s_k \tau_k \epsilon_k, \qquad a_k^2 + s_k^2 = 1

    Without the drift b and with :math:`\tau = 1` the chain is at its equilibrium N(0, I), and looks the same in both
    directions. With F for its steps in the other direction, :math:`F(z_k \mid z_{k-1}) = N(a_k z_{k-1}, s_k^2 I)`,

    .. math::
        \log \tilde q = \log q(z_0, \dots, z_K) - \sum_k \log F(z_k \mid z_{k-1}) - \log\lvert\det R\rvert,
        \qquad E \log \tilde q \ge E \log q(v),

    so that the bound with :math:`\tilde q` in the place of q holds. The ratio of a density of v to :math:`\tilde q`
    is an importance weight of the path.

    Args:
        base: the Gaussian N(m, R R').
        drift: b of all steps, from z and the number of the step, one-hot.
        log_scales: :math:`\log \tau_k`, from the first step to the last (K, n).
        variances: :math:`s_k^2`, in the same order.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    pytree_data_fields = ("base", "drift", "log_scales")
    pytree_aux_fields = ("variances",)

    __repr__ = brief

    def __init__(self, base: Belief, drift: TanhNetwork, log_scales: Array, variances: tuple[float, ...]) -> None:
        self.base, self.drift, self.log_scales, self.variances = base, drift, log_scales, variances
        super().__init__((), base.event_shape)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        dtype, size = self.base.loc.dtype, math.prod(self.event_shape)
        steps = len(self.variances)
        white = jax.random.normal(key, (steps + 1, *sample_shape, size), dtype)
        variances = jnp.asarray(self.variances, dtype)

        def step(carry: tuple[Array, Array], each: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
            (z, ratio), (number, variance, log_scale, noise) = carry, each
            number = jnp.broadcast_to(number, (*sample_shape, steps))
            moved = self.drift(jnp.concatenate([z, number], -1)) + jnp.exp(log_scale) * noise  # in units of s
            # log q(z_k-1 | z_k) - log P(z_k-1 | z_k), where P is the step at equilibrium: b = 0, tau = 1
            ratio = ratio + (0.5 * (jnp.square(moved) - jnp.square(noise)) - log_scale).sum(-1)
            return (jnp.sqrt(1 - variance) * z + jnp.sqrt(variance) * moved, ratio), None  # a z + s (b + tau e)

        start = white[0], jnp.zeros(sample_shape, dtype)
        (z, ratio), _ = jax.lax.scan(step, start, (jnp.eye(steps, dtype=dtype), variances, self.log_scales, white[1:]))
        z = z.reshape(*sample_shape, *self.event_shape)
        return self.base.from_white(z), [z, ratio]

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.sample_with_intermediates(key, sample_shape)[0]

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        """Of a draw with its path; a value alone has none."""
        if not intermediates:
            raise ValueError(
                "rule Diffusion: expected a draw with the path that led to it, got a value alone: its density is an "
                "integral over all paths; dgp.guides.Flow() has densities of given values"
            )
        z, ratio = intermediates
        # N(z_k) P(z_k-1 | z_k) = N(z_k-1) F(z_k | z_k-1): of log q - log F, N(z_0) and the ratios of steps stay.
        return self.base.log_prob(value, [z]) + ratio


@dataclasses.dataclass(frozen=True)
class Diffusion(AroundGaussian):
    r"""The end of a learned diffusion that starts from standard normal numbers; joint over all outputs of the layer.

    .. math:: v = m + R z_0, \qquad z_{k-1} = a_k z_k + s_k\, b_k(z_k) + s_k \tau_k \epsilon_k, \quad z_K \sim N(0, I)

    b is a network and starts at zero, :math:`\tau` at one, so that q(v) starts as ``base``, ``Full()`` by default.
    A chain of Gaussian steps is a mixture of infinitely many Gaussians. It can hold separate modes, but a fit seldom
    finds a second one (``docs/posteriors.md``); :class:`MixtureOfGaussians` does.
    Its density at v is an integral over paths. The bound has the divergence of the whole path from the same diffusion
    at its equilibrium, which is larger by the divergence of the two given v: it is a bound, lower by that much.

    Nothing is integrated out: v is drawn once for all data. Gradients are noisier than those of a Gaussian q(v);
    ``ELBO(num_particles=...)`` has more draws. Natural gradients need a Gaussian. Pareto k-hats are those of
    the weights of paths.

    Args:
        base: rule of the Gaussian: ``Full()``, ``Diagonal()``, ``LowRank(...)``, or ``MarkovInducing(below=...)`` for
            means that depend on the draw of the layer below.
        steps: the number of steps, K.
        smallest: :math:`s_1`, standard deviation of the last step, in units of the base. Steps before are longer, by
            equal factors; the first has 0.7.
        hidden: units of the network's hidden layer; by default twice the number of values, at least 16.

    Raises:
        ValueError: numbers of steps or units that are not positive integers, a last step that is not between 0 and 0.7,
            another base, or a site that does not hold inducing values.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 3)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(jnp.square(v), 0.5)), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Diffusion(steps=5))
        >>> svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO(4))
        >>> result = svi.run(jax.random.key(0), 20, X, 1.0 + X[:, 0], progress_bar=False)
        >>> result.params["f_auto_diffusion_log_scales"].shape
        (5, 3)

    Source: Xu et al. (2024), for inducing values; Vargas et al. (2023), section 3, for the diffusion at
    its equilibrium as reference.
    """

    base: Base = dataclasses.field(default_factory=Full)
    steps: int = 10
    smallest: float = 0.1
    hidden: int | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        require_count("rule Diffusion", "steps", self.steps, "10")
        if not isinstance(self.smallest, Real) or not 0 < self.smallest <= _LONGEST:
            raise ValueError(
                f"rule Diffusion: expected smallest, the last step, to be between 0 and {_LONGEST}, got "
                f"{self.smallest!r}: try 0.1"
            )
        self.require_base("that the diffusion starts at")

    def __call__(self, site: Site) -> Diffused:
        base, size = self.gaussian_of(site)
        dtype = site.fn.dtype
        widths = [size + self.steps, self.units(size), size]
        drift = tanh_network(site, widths, dtype, prefix="diffusion_", starts_at_zero=True)
        log_scales = site.param("diffusion_log_scales", lambda: jnp.zeros((self.steps, size), dtype))
        # s_K, ..., s_1
        lengths = np.geomspace(_LONGEST, self.smallest, self.steps) if self.steps > 1 else np.array([self.smallest])
        return Diffused(base, drift, log_scales, tuple(np.square(lengths).tolist()))


_LONGEST = 0.7
"""Standard deviation of the first step."""
