r"""The knowledge gradient: how much better the best predicted mean is expected to become by an observation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._fields import checked, flag
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import JointMixture, lower_factors
from numpyro_dgp.design.improvement import largest, log_expected_excess
from numpyro_dgp.design.posterior_acquisition import WithDraws, rows_of, spread
from numpyro_dgp.math.linalg import matmul, solve_lower

__all__ = ["KnowledgeGradient", "expected_gain"]

_FAR = 50.0  # standard deviations, beyond which the expected excess is zero in both precisions


def expected_gain(a: Array, b: Array) -> Array:
    r""":math:`E \max_i (a_i + b_i Z) - \max_i a_i` with :math:`Z \sim N(0, 1)`, in closed form.

    Line i is the highest between :math:`l_i` and :math:`u_i`, where it meets others. With
    :math:`H(c) = \varphi(c) - |c|\, \Phi(-|c|)` and the line \* that is highest at zero,

    .. math:: \sum_{i:\, l_i < u_i} (b_i - b_*) \bigl(H(l_i) - H(u_i)\bigr),

    of which no term is negative.

    Args:
        a: values at zero (m,).
        b: slopes (m,).

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.design.knowledge_gradient import expected_gain
        >>> print(expected_gain(jnp.zeros(2), jnp.array([0.0, 1.0])).round(4))  # E max(0, Z)
        0.3989

    Source: Frazier et al. (2009), section 3.1, whose sum is over the corners; here over the lines, without sorting.
    """
    steeper = b[:, None] > b[None, :]
    slope = jnp.where(b[:, None] == b[None, :], 1.0, b[:, None] - b[None, :])
    meets = (a[None, :] - a[:, None]) / slope  # of line i with line j
    # Line i is above flatter ones to the right of where they meet, above steeper ones to the left.
    low, high = largest(jnp.where(steeper, meets, -jnp.inf)), -largest(jnp.where(steeper.T, -meets, -jnp.inf))
    index = jnp.arange(len(a))
    # Of parallel lines the highest counts, of equal ones the first.
    above = (a[None, :] > a[:, None]) | ((a[None, :] == a[:, None]) & (index[None, :] < index[:, None]))
    highest = (low < high) & ~((b[:, None] == b[None, :]) & above).any(1)

    def corner(c: Array) -> Array:
        return jnp.exp(log_expected_excess(-jnp.minimum(jnp.abs(c), _FAR)))  # H(c) = phi(c) - |c| Phi(-|c|)

    return jnp.where(highest, (b - b[a.argmax()]) * (corner(low) - corner(high)), 0.0).sum()


@dataclasses.dataclass(frozen=True, eq=False)
class KnowledgeGradient(WithDraws):
    r"""The expected rise of the best predicted mean, over candidate points, by observations at x.

    .. math:: \mathrm{KG}(x) = \tfrac1S \sum_s E_Z \max_{a \in A \cup x} \bigl(\pm\mu_s(a) + b_s(a)^\top Z\bigr)
              - \max_{a \in A \cup x} \pm\mu_s(a), \qquad
              b_s(a)^\top = c_s(a, x)\, L^{-\top}, \quad L L^\top = c_s(x, x) + \sigma^2 I

    with :math:`Z \sim N(0, I_q)`. For one point the expectation is in closed form; for a batch that over its last
    number is, and the others are quasi-random draws, in each of which the rise is that over the point which is best
    before: the same expectation, and none below zero. Each of the S Gaussians is treated as if it were the posterior,
    which is exact where there is one. It costs the square of the number of candidates.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes all random numbers.
        candidates: A, points (R, D) at which the optimum may be, a few dozen.
        noise: :math:`\sigma`, the standard deviation of the noise of an observation; 0.0 for a code without noise.
        minimise: whether small values are good.
        num_draws: quasi-random draws given each of them, for batches; a power of two.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`, candidates that are not points, or noise below zero.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 5))})
        >>> kg = dgp.design.KnowledgeGradient(posterior, jax.random.key(0), jnp.array([[0.0], [9.0]]))
        >>> print(f"{kg(jnp.array([[0.0]])):.3f} {kg(jnp.array([[9.0]])):.3f}")
        0.000 0.399

    Source: Frazier et al. (2009), section 3.
    """

    candidates: Any = checked(rows_of)
    noise: ArrayLike = spread()
    minimise: bool = flag(True, "True where small values are good", kw_only=True)

    __repr__ = brief

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        rows = self.points(x)
        found = self.jointly(rows, self.candidates, args, kwargs)
        white = self.white(len(found.means), len(rows) - 1, found.means.dtype)
        block = max(1, len(white) // white.shape[1])
        return jax.lax.map(jax.checkpoint(self._gain), (found, white), batch_size=block).mean()

    def _gain(self, given: tuple[JointMixture, Array]) -> Array:
        (mean, C, _), white = given
        mean, q = -mean if self.minimise else mean, white.shape[-1] + 1
        noise = jnp.square(jnp.asarray(self.noise, C.dtype)) * jnp.eye(q, dtype=C.dtype)
        L = lower_factors(C[:q, :q] + noise, mean[:q])  # L L' = c(x, x) + sigma^2 I
        rises = solve_lower(L, C[:q]).T  # b(a)' = c(a, x) L^-T (q + R, q)
        before = mean + matmul(white, rises[:, :-1].T)  # mu + b' Z without the last number
        # Instead of the mean at its best, its value in the same draw is taken off: E before[best] = max mu.
        best = mean.argmax()
        return jax.vmap(lambda a: expected_gain(a, rises[:, -1]) + largest(a) - a[best])(before).mean()
