"""The distributions of function values, which ``f(x)`` and ``f.joint(x)`` return.

Both hold p(f(x) | u) and, while a :class:`~numpyro_dgp.model.beliefs.Belief` about u is being integrated out,
the *spread*: the covariance that the belief adds. Samples come from the sum. ``log_prob`` is
:math:`E_{q(u)}[\\log p(f(x) | u)]`, the log density itself when u is known.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.gaussians import kl_full, log_density, log_determinant
from numpyro_dgp.algebra.linalg import cholesky, computed_once, safe_sqrt, solve_lower
from numpyro_dgp.model.beliefs import StandardNormal

if TYPE_CHECKING:
    from numpyro_dgp.model.mixing import MixedValues

__all__ = ["FunctionValues", "JointValues", "Propagated", "WhitenedValues"]


class _Values(dist.Distribution):
    """What the two have in common: Gaussian draws made from standard normal ones."""

    arg_constraints: dict[str, Any] = {}
    # The random function these are values of, where, and with which process noise; not part of the pytree.
    function: Any = None
    inputs: Any = None
    noise: Any = None
    loc: Array

    def _from(self, other: _Values) -> Self:
        """Itself, as values of the same function at the same inputs as ``other``."""
        self.function, self.inputs, self.noise = other.function, other.inputs, other.noise
        return self

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    @property
    def mean(self) -> Array:
        return self.loc

    def from_white(self, white: Array) -> Array:
        """The draw that standard normal numbers of shape ``batch_shape + event_shape`` give."""
        raise NotImplementedError

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        white = computed_once(jax.random.normal(key, self.shape(sample_shape), self.loc.dtype))
        return self.from_white(white), [white]

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.sample_with_intermediates(key, sample_shape)[0]


def _sum_event(values: Array, event_dim: int) -> Array:
    return values.sum(tuple(range(-event_dim, 0))) if event_dim else values


class FunctionValues(_Values):
    r"""Values of P independent functions at each input on its own: :math:`h_{np} \sim N(m_{np}, c_{np} + s_{np})`.

    Args:
        loc: means, (..., P), or (...,) for a scalar function.
        conditional_variance: variances given u, including process noise; broadcasts against ``loc``.
        spread: variances that a belief about u adds, or ``None``.
        event_dim: 1 for vector-valued functions, 0 for scalar ones.
        total: the sum of the two variances, where it was computed without them.
    """

    pytree_data_fields: tuple[str, ...] = ("loc", "conditional_variance", "spread", "total")

    def __init__(
        self,
        loc: Array,
        conditional_variance: Array,
        spread: Array | None = None,
        event_dim: int = 1,
        total: Array | None = None,
    ) -> None:
        self.loc, self.spread, self.total = loc, spread, total
        self.conditional_variance = jnp.broadcast_to(conditional_variance, loc.shape)
        split = loc.ndim - event_dim
        super().__init__(loc.shape[:split], loc.shape[split:])

    @property
    def variance(self) -> Array:
        spread = 0 if self.spread is None else self.spread
        return self.conditional_variance + spread if self.total is None else self.total

    def from_white(self, white: Array) -> Array:
        return self.loc + safe_sqrt(self.variance) * white

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        c = self.conditional_variance
        if intermediates and self.spread is None:
            square = jnp.square(intermediates[0])
        else:
            square = (jnp.square(value - self.loc) + (0 if self.spread is None else self.spread)) / c
        return _sum_event(-0.5 * (square + jnp.log(2 * math.pi * c)), self.event_dim)

    def expand(self, batch_shape: Any) -> FunctionValues:
        shape = (*batch_shape, *self.event_shape)
        spread, total = (None if a is None else jnp.broadcast_to(a, shape) for a in (self.spread, self.total))
        arrays = jnp.broadcast_to(self.loc, shape), jnp.broadcast_to(self.conditional_variance, shape)
        return type(self)(*arrays, spread, self.event_dim, total)._from(self)

    def propagated(self) -> Propagated:
        """The same distribution, as a posterior that equals the model's own conditional."""
        return Propagated(self.loc, self.conditional_variance, self.spread, self.event_dim, self.total)._from(self)

    def mix(self, P: ArrayLike) -> MixedValues:
        r"""Values of P linear mixtures of the Q functions, :math:`v = P g(x)`, inside a ``Likelihood``.

        .. math:: E[v] = P m, \qquad \operatorname{Cov}[v] = P \,\mathrm{diag}(c + s)\, P^\top

        Args:
            P: weights (P, Q): fixed, a ``numpyro.param`` or the value of a site.

        Raises:
            ValueError: weights that are not a finite matrix with one column per function, or mixed values used as
                the site of a hidden layer, which draws the functions and mixes the draw.

        Example:
            >>> g = FunctionValues(jnp.zeros((1, 2)), jnp.ones((1, 2)))
            >>> print(g.mix(jnp.array([[1.0, 1.0], [0.0, 2.0], [3.0, 0.0]])).variance)
            [[2. 4. 9.]]

        Source: Salimbeni (2020), sections 4.2.3 and 5.1.5.
        """
        from numpyro_dgp.model.mixing import MixedValues

        return MixedValues(self, P)


class Propagated(FunctionValues):
    """A guide's declaration that q(h | u, x) = p(h | u, x), so that the two cancel in a bound."""


class JointValues(_Values):
    """Values of P independent functions with their correlations over the last batch dimension.

    Args:
        loc: means (..., N, P), or (..., N) for a scalar function.
        covariance: covariances given u (..., P, N, N), P = 1 where outputs share it.
        spread: covariances that a belief about u adds (..., P, N, N), or ``None``.
        event_dim: 2 for vector-valued functions, 1 for scalar ones.
    """

    pytree_data_fields = ("loc", "conditional_covariance", "spread")

    def __init__(
        self, loc: Array, conditional_covariance: Array, spread: Array | None = None, event_dim: int = 2
    ) -> None:
        self.loc, self.conditional_covariance, self.spread = loc, conditional_covariance, spread
        split = loc.ndim - event_dim
        super().__init__(loc.shape[:split], loc.shape[split:])

    @property
    def covariance(self) -> Array:
        """Total covariances (..., P, N, N)."""
        return self.conditional_covariance if self.spread is None else self.conditional_covariance + self.spread

    @property
    def variance(self) -> Array:
        return self._diagonal(self.covariance)

    def _to_output_major(self, value: Array) -> Array:
        return value.mT if self.event_dim == 2 else value[..., None, :]

    def _to_value(self, rows: Array) -> Array:
        return rows.mT if self.event_dim == 2 else rows[..., 0, :]

    def _diagonal(self, covariance: Array) -> Array:
        return jnp.broadcast_to(self._to_value(jnp.diagonal(covariance, axis1=-2, axis2=-1)), self.loc.shape)

    def from_white(self, white: Array) -> Array:
        L = cholesky(self.covariance, "the joint covariance of function values")
        return self.loc + self._to_value((L @ self._to_output_major(white)[..., None])[..., 0])

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        L = cholesky(self.conditional_covariance, "the joint covariance of function values")
        residual = self._to_output_major(value - self.loc)
        square = jnp.square(solve_lower(L, residual[..., None])[..., 0]).sum(-1)
        if self.spread is not None:
            half = solve_lower(L, self.spread)
            square = square + jnp.trace(solve_lower(L, half.mT), axis1=-2, axis2=-1)
        size = residual.shape[-1]
        return (-0.5 * (square + size * math.log(2 * math.pi)) - log_determinant(L)).sum(-1)

    def expand(self, batch_shape: Any) -> JointValues:
        batch = tuple(batch_shape)
        C, S = self.conditional_covariance, self.spread
        expanded = JointValues(
            jnp.broadcast_to(self.loc, batch + self.event_shape),
            jnp.broadcast_to(C, batch + C.shape[-3:]),
            None if S is None else jnp.broadcast_to(S, batch + S.shape[-3:]),
            self.event_dim,
        )
        return expanded._from(self)

    def mix(self, P: ArrayLike) -> MixedValues:
        """Mixtures of the functions, each datum on its own, as a ``Likelihood`` sees them: ``FunctionValues.mix``."""
        return self.marginals().mix(P)

    def marginals(self) -> FunctionValues:
        """The same values without their correlations: a :class:`FunctionValues` over (..., N)."""
        diagonal = self._diagonal(self.conditional_covariance)
        spread = None if self.spread is None else self._diagonal(self.spread)
        return FunctionValues(self.loc, diagonal, spread, self.event_dim - 1)._from(self)


class WhitenedValues(JointValues):
    r"""A Gaussian over joint values in the whitened coordinates of their prior: :math:`m + L(a + R\epsilon)`.

    A posterior over the values of an exact process is nearly singular wherever its prior is. In these
    coordinates its divergence from the prior and its log density are exact all the same.

    Args:
        prior: the prior of the values, mean m and covariance :math:`L L^\top`.
        shift: a, whitened means (P, N).
        root: R, triangular (P, N, N); signs on the diagonal are free.
    """

    pytree_data_fields = ("shift", "root", "L")

    def __init__(self, prior: JointValues, shift: Array, root: Array) -> None:
        self.shift, self.root = shift, root
        self.L = cholesky(prior.covariance, "the prior covariance of function values")
        half = self.L @ root
        loc = prior.loc + prior._to_value((self.L @ shift[..., None])[..., 0])
        super().__init__(loc, half @ half.mT, event_dim=prior.event_dim)

    def from_white(self, white: Array) -> Array:
        return self.loc + self._to_value((self.L @ self.root @ self._to_output_major(white)[..., None])[..., 0])

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        if intermediates:
            white = self._to_output_major(intermediates[0])
        else:
            unit = solve_lower(self.L, self._to_output_major(value - self.loc)[..., None])
            white = jnp.linalg.solve(self.root, unit)[..., 0]
        return log_density(white, log_determinant(self.L) + log_determinant(self.root)).sum(-1)


@kl_divergence.register(WhitenedValues, JointValues)
def _kl_whitened(q: WhitenedValues, p: JointValues) -> Array:
    """KL to the prior that ``q`` was built from."""
    return kl_full(q.shift, q.root).sum(-1)


@kl_divergence.register(FunctionValues, FunctionValues)
def _kl_values(q: FunctionValues, p: FunctionValues) -> Array:
    r"""KL between independent Gaussians, with :math:`E_{q(u)}` of the second where it has a spread."""
    square = q.variance + jnp.square(q.loc - p.loc) + (0 if p.spread is None else p.spread)
    c = p.conditional_variance
    return _sum_event(0.5 * (square / c - 1 + jnp.log(c) - jnp.log(q.variance)), q.event_dim)


@kl_divergence.register(FunctionValues, StandardNormal)
def _kl_values_prior(q: FunctionValues, p: StandardNormal) -> Array:
    return _sum_event(0.5 * (q.variance + jnp.square(q.loc) - 1 - jnp.log(q.variance)), q.event_dim)
