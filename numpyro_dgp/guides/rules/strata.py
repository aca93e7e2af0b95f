r"""Non-Gaussian posteriors of inducing values, in parts that ``dgp.ELBO`` evaluates one by one.

.. math:: q(v) = \sum_i w_i\, q_i(v), \qquad
          E_q[F(v)] = \sum_i w_i\, E_{q_i}[F(v)]

Every part is evaluated with its weight, instead of drawing one: the estimate has less variance, and its gradient by the
weights needs no discrete draws. A part that is a :class:`~numpyro_dgp.extend.Belief` is integrated out by
its layer. Everywhere else q is sampled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform

from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.site_distribution import SiteDistribution
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.math.linalg import tensordot

__all__ = ["BeliefMixture", "Flowed", "Stratified"]


class Stratified(SiteDistribution):
    """A distribution over whitened inducing values, event shape (P, M) or (M,), with :attr:`num_strata` parts."""

    __repr__ = brief

    @property
    def num_strata(self) -> int:
        """How many parts there are."""
        raise NotImplementedError

    def weight(self, index: Array) -> Array:
        """Of a part, a number."""
        raise NotImplementedError

    def stratum(self, index: Array) -> dist.Distribution:
        """A part: a ``Belief``, or another distribution that is drawn."""
        raise NotImplementedError

    def log_ratio(self, index: Array, key: Any) -> Array:
        r"""One draw of :math:`E_{q_i} \log [q(v) / q_i(v)]` for a part that is a ``Belief``."""
        raise NotImplementedError

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)


class BeliefMixture(Stratified):
    r"""A mixture of Gaussians, :math:`q(v) = \sum_k \pi_k N(v; m_k, \Sigma_k)`, joint over all outputs.

    Args:
        parts: the Gaussians, all of one class.
        logits: :math:`\log \pi_k` up to a constant (K,).
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("parts", "logits")

    def __init__(self, parts: tuple[Belief, ...], logits: Array) -> None:
        self.parts, self.logits = parts, logits
        super().__init__((), parts[0].event_shape)

    @property
    def num_strata(self) -> int:
        return len(self.parts)

    def weight(self, index: Array) -> Array:
        return jax.nn.softmax(self.logits)[index]

    def stratum(self, index: Array) -> Belief:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves)[index], *self.parts)

    def log_ratio(self, index: Array, key: Any) -> Array:
        one = self.stratum(index)
        value, white = one.sample_with_intermediates(key)
        # The part itself has the ratio one, in all digits.
        others = self._log_densities(value) - one.log_prob(value, white)  # log q_j(v) - log q_i(v)
        ratios = jnp.where(jnp.arange(self.num_strata) == index, 0, others)
        return jax.nn.logsumexp(jax.nn.log_softmax(self.logits) + ratios)  # log sum_j pi_j q_j(v) / q_i(v)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        which_key, key = jax.random.split(key)
        which = jax.random.categorical(which_key, self.logits, shape=sample_shape)
        draws = jnp.stack([part.sample(key, sample_shape) for part in self.parts])
        return jnp.take_along_axis(draws, which.reshape(1, *sample_shape, *(1,) * self.event_dim), 0)[0]

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        log_weights = jax.nn.log_softmax(self.logits)
        densities = self._log_densities(value)
        # log sum_k pi_k q_k(v)
        return jax.nn.logsumexp(log_weights.reshape(-1, *(1,) * (densities.ndim - 1)) + densities, 0)

    @property
    def mean(self) -> Array:
        return self._average([part.loc for part in self.parts])

    @property
    def variance(self) -> Array:
        square = self._average([part.variance + jnp.square(part.loc) for part in self.parts])
        return square - jnp.square(self.mean)  # E[v^2] - E[v]^2

    def _log_densities(self, value: Array) -> Array:
        return jnp.stack([part.log_prob(value) for part in self.parts])

    def _average(self, values: list[Array]) -> Array:
        return tensordot(jax.nn.softmax(self.logits), jnp.stack(values))


class Flowed(Stratified):
    r"""A Gaussian whose standard normal numbers are first mapped by a bijection: :math:`v = m + R\, T(\epsilon)`.

    .. math:: \log q(v) = \log N(\epsilon; 0, I) - \log\lvert\det T'(\epsilon)\rvert - \log\lvert\det R\rvert

    Its values are drawn. With antithetic numbers there are two parts, :math:`\epsilon` and :math:`-\epsilon`.

    Args:
        base: the Gaussian, N(m, R R').
        transform: T, of vectors of all numbers of an event.
        signs: of the numbers in each part, (1,) or (-1, 1).
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("base", "transform")
    pytree_aux_fields = ("signs",)

    def __init__(self, base: Belief, transform: Transform, signs: tuple[Any, ...] = (1,)) -> None:
        self.base, self.transform, self.signs = base, transform, signs
        super().__init__((), base.event_shape)

    @property
    def num_strata(self) -> int:
        return len(self.signs)

    def weight(self, index: Array) -> Array:
        return jnp.asarray(1 / len(self.signs), self.base.loc.dtype)

    def stratum(self, index: Array) -> dist.Distribution:
        return Flowed(self.base, self.transform, (jnp.asarray(self.signs)[index],))

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        white = self.signs[0] * jax.random.normal(key, self.shape(sample_shape), self.base.loc.dtype)
        flat = self._flat(white)
        moved, inside = self.transform.call_with_intermediates(flat)
        log_det = self._log_det(flat, moved, inside)
        return self.base.from_white(moved.astype(white.dtype).reshape(white.shape)), [white, log_det]

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.sample_with_intermediates(key, sample_shape)[0]

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        if intermediates:
            white, log_det = intermediates
        else:
            moved = self._flat(self.base.white(value)).astype(float)  # as NumPyro's inverses want it
            flat = self.transform.inv(moved)  # e = T^-1(R^-1 (v - m))
            log_det = self._log_det(flat, moved)
            white = flat.astype(self.base.loc.dtype).reshape(value.shape)
        return self.base.log_prob(value, [white]) - log_det.astype(white.dtype)  # base: log N(e; 0, I) - log|det R|

    def _log_det(self, flat: Array, moved: Array, inside: Any = None) -> Array:
        """Of the transform, one number per vector: transforms of single numbers have one for each of these."""
        found = self.transform.log_abs_det_jacobian(flat, moved, inside)
        return found.sum(-1) if found.ndim == flat.ndim else found

    def _flat(self, values: Array) -> Array:
        return values.reshape(*values.shape[: values.ndim - self.event_dim], -1)
