r"""Kernels of one input column as linear stochastic differential equations.

A process :math:`f(t) = h^\top s(t)` has a Markov state s of d numbers, the function and some of its derivatives,

.. math:: s(t + \tau) = \Phi(\tau)\, s(t) + \epsilon, \quad \epsilon \sim N(0, Q(\tau)), \quad s(t) \sim N(0, P_\infty)

with :math:`Q = P_\infty - \Phi P_\infty \Phi^\top`. That difference cancels where :math:`\tau` is small: a Matern 5/2
has :math:`Q_{11} \propto \tau^5`. The sums that stand here for Q do not.

Matrices stand first: :math:`\Phi` at times :math:`\tau` (...,) has shape (d, d, ...), so that arithmetic on many of
them is arithmetic on long rows.

Source: Hartikainen and Sarkka (2010); Solin and Sarkka (2014) for periodic kernels; Sarkka and Solin (2019), chapter
12.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, Number, pytree, static
from numpyro_dgp.math.linalg import einsum

__all__ = [
    "ConstantState",
    "MaternState",
    "ProductState",
    "RotatingState",
    "StateSpaceForm",
    "SumState",
    "no_state_space",
]

# exp(-x) is zero in any precision beyond; powers of x are still finite.
_LONG = 1000.0


def no_state_space(name: str, why: str = "") -> ValueError:
    """What to raise for the kernel ``name``, which has none."""
    return ValueError(
        f"{name} has no state space{why}: expected a kernel of one input column (Matern12, Matern32, Matern52, Cosine, "
        "Periodic, Constant, sums and products of them)"
    )


class StateSpaceForm:
    """What ``kernel.state_space()`` returns: the matrices above, as functions of the time that passes.

    A form of one's own is a ``pytree`` with ``size``, :meth:`observation`, :meth:`covariance` and :meth:`transition`;
    :meth:`noise` where the difference is not accurate enough; :meth:`random_states` for draws of functions.

    Raises:
        ValueError: where random states are asked of a form without them.
    """

    __repr__ = brief

    @property
    def size(self) -> int:
        """d, the number of states."""
        raise NotImplementedError

    def observation(self) -> Array:
        """h, with f = h' s: shape (d,)."""
        raise NotImplementedError

    def covariance(self) -> Array:
        """P_inf, that of the state at any time: shape (d, d)."""
        raise NotImplementedError

    def transition(self, time: Array) -> Array:
        """Phi after times (...,), none of them negative: shape (d, d, ...)."""
        raise NotImplementedError

    def noise(self, time: Array) -> Array:
        """Q after times (...,): shape (d, d, ...)."""
        before = self.stationary(time)  # P - Φ P Φ'
        return before - einsum("ij...,jk,lk...->il...", phi := self.transition(time), self.covariance(), phi)

    def random_states(self, key: Array, time: Array, num: int) -> Array:
        """``num`` random functions at times (N,), with their states: shape (d, N, num); their covariance is exact.

        Raises:
            ValueError: a form without it.
        """
        raise ValueError(
            f"{type(self).__name__} has no random_states, which draws of functions need: define it, or draw at fixed "
            "inputs with f.joint(x)"
        )

    def stationary(self, time: Array) -> Array:
        """P_inf once for every time: shape (d, d, ...)."""
        P = self.covariance()
        return jnp.broadcast_to(P.reshape(P.shape + (1,) * time.ndim), P.shape + time.shape)


def _matrix(rows: list[list[Any]], like: Array) -> Array:
    entries = [jnp.broadcast_to(jnp.asarray(entry, like.dtype), like.shape) for row in rows for entry in row]
    return jnp.stack(entries).reshape(len(rows), len(rows), *like.shape)


@pytree
class MaternState(StateSpaceForm):
    r"""A Matern of smoothness d - 1/2: the function and its derivatives :math:`f^{(i)} / \lambda^i`, i < d.

    In these units all matrices are functions of :math:`a = \lambda \tau`, :math:`\lambda = \sqrt{2 \nu} / \ell`, and Q
    is made of :math:`p_n = e^{-x} x^n / n!` and :math:`1 - \sum_{n < 2d - 1} p_n` at :math:`x = 2a`.

    Args:
        variance: k(t, t).
        rate: lambda.
        order: d, from 1 to 3.
    """

    variance: Number
    rate: Number
    order: int = static()

    @property
    def size(self) -> int:
        return self.order

    def observation(self) -> Array:
        return jnp.zeros(self.order, jnp.result_type(self.variance)).at[0].set(1)

    def covariance(self) -> Array:
        # E[f^(i) f^(j)] / λ^(i + j): derivatives of the kernel at zero
        unit = {1: [[1.0]], 2: [[1.0, 0.0], [0.0, 1.0]], 3: [[1.0, 0.0, -1 / 3], [0.0, 1 / 3, 0.0], [-1 / 3, 0.0, 1.0]]}
        return self.variance * jnp.asarray(unit[self.order], jnp.result_type(self.variance))

    def transition(self, time: Array) -> Array:
        a = jnp.minimum(self.rate * time, _LONG)
        b = a * a / 2
        # The rows of e^a Φ, with Φ = e^(a F) of ds = F s da + noise
        rows: dict[int, list[list[Any]]] = {
            1: [[1.0]],
            2: [[1 + a, a], [-a, 1 - a]],
            3: [[1 + a + b, a + 2 * b, b], [-b, 1 + a - 2 * b, a - b], [b - a, 2 * b - 3 * a, 1 - 2 * a + b]],
        }
        return jnp.exp(-a) * _matrix(rows[self.order], a)

    def noise(self, time: Array) -> Array:
        x = jnp.minimum(2 * self.rate * time, _LONG)
        p = [jnp.exp(-x)]  # p_n = e^-x x^n / n!
        for n in range(1, 2 * self.order - 1):
            p.append(p[-1] * x / n)
        rest = _rest(x, p)  # Q_11, of the order x^(2d - 1)
        if self.order == 1:
            rows: list[list[Any]] = [[rest]]
        elif self.order == 2:
            rows = [[rest, p[2]], [p[2], rest + 2 * p[1]]]
        else:
            third = rest / 3
            corner = 2 / 3 * p[3] - 4 / 3 * p[4] - third
            middle, below = third + 4 / 3 * p[3] - 2 / 3 * p[4], p[2] * jnp.square(x - 4) / 12
            last = rest + 8 / 3 * p[1] * (1 - x / 2) + 4 * p[3]
            rows = [[rest, p[4], corner], [p[4], middle, below], [corner, below, last]]
        return self.variance * _matrix(rows, x)

    def random_states(self, key: Array, time: Array, num: int) -> Array:
        normal_key, gamma_key, phase_key = jax.random.split(key, 3)
        nu, dtype = self.order - 0.5, time.dtype
        precision = jax.random.gamma(gamma_key, nu, (num,), dtype) / nu  # chi^2 / 2 ν with 2 ν degrees of freedom
        # Frequencies in units of lambda: a Student t with 2 nu degrees of freedom, at the lengthscale sqrt(2 nu).
        omega = jax.random.normal(normal_key, (num,), dtype) / jnp.sqrt(2 * nu * precision)
        phase = jax.random.uniform(phase_key, (num,), dtype, maxval=2 * math.pi)
        angle = self.rate * time[:, None] * omega + phase
        # f^(i) / λ^i of f(t) = cos(ω λ t + phase)
        states = [omega**i * jnp.cos(angle + i * math.pi / 2) for i in range(self.order)]
        return jnp.sqrt(2 * self.variance) * jnp.stack(states)


def _rest(x: Array, p: list[Array]) -> Array:
    """1 - sum(p), by the series where that cancels: p_n (x / (n + 1) + x^2 / (n + 1)(n + 2) + ...)."""
    n = len(p) - 1
    series = jnp.zeros_like(x)
    for k in range(22, 0, -1):
        # Horner's scheme, from the last term on.
        series = jnp.minimum(x, 2) / (n + k) * (1 + series)
    return jnp.where(x < 2, p[-1] * series, 1 - sum(p))


@pytree
class RotatingState(StateSpaceForm):
    r"""Waves that keep their phase, :math:`\sum_j q_j \cos(\omega_j \tau)`: two states each, no noise.

    Args:
        weights: q (J,), none of them negative.
        frequencies: omega (J,), radians per unit of time.
    """

    weights: Array
    frequencies: Array

    @property
    def size(self) -> int:
        return 2 * len(self.weights)

    def observation(self) -> Array:
        return jnp.tile(jnp.array([1.0, 0.0], self.weights.dtype), len(self.weights))

    def covariance(self) -> Array:
        return jnp.diag(jnp.repeat(self.weights, 2))

    def transition(self, time: Array) -> Array:
        angle = self.frequencies.reshape(-1, *(1,) * time.ndim) * time
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        # Φ = [cos, sin; -sin, cos] for the states (cos, -sin) of a wave
        turns = jnp.stack([jnp.stack([cos, sin], 1), jnp.stack([-sin, cos], 1)], 1)  # (J, 2, 2, ...)
        J = len(self.weights)
        apart = jnp.eye(J, dtype=cos.dtype).reshape(J, 1, J, 1, *(1,) * time.ndim)
        return (apart * turns[:, :, None]).reshape(2 * J, 2 * J, *time.shape)

    def noise(self, time: Array) -> Array:
        return jnp.zeros((self.size, self.size, *time.shape), self.weights.dtype)

    def random_states(self, key: Array, time: Array, num: int) -> Array:
        J = len(self.weights)
        phase = jax.random.uniform(key, (J, 1, num), time.dtype, maxval=2 * math.pi)
        angle = self.frequencies[:, None, None] * time[:, None] + phase
        waves = jnp.stack([jnp.cos(angle), -jnp.sin(angle)], 1)
        return (jnp.sqrt(2 * self.weights)[:, None, None, None] * waves).reshape(2 * J, len(time), num)


@pytree
class ConstantState(StateSpaceForm):
    """A random offset: one state that stays.

    Args:
        variance: its variance.
    """

    variance: Number

    @property
    def size(self) -> int:
        return 1

    def observation(self) -> Array:
        return jnp.ones(1, jnp.result_type(self.variance))

    def covariance(self) -> Array:
        return jnp.reshape(self.variance, (1, 1))

    def transition(self, time: Array) -> Array:
        return jnp.ones((1, 1, *time.shape), time.dtype)

    def noise(self, time: Array) -> Array:
        return jnp.zeros((1, 1, *time.shape), time.dtype)

    def random_states(self, key: Array, time: Array, num: int) -> Array:
        offset = jnp.sqrt(self.variance) * jax.random.normal(key, (num,), time.dtype)
        return jnp.broadcast_to(offset, (1, len(time), num))


@pytree
class SumState(StateSpaceForm):
    """A sum of two processes: their states side by side.

    Args:
        left: of the one.
        right: of the other.
    """

    left: StateSpaceForm
    right: StateSpaceForm

    @property
    def size(self) -> int:
        return self.left.size + self.right.size

    def observation(self) -> Array:
        return jnp.concatenate([self.left.observation(), self.right.observation()])

    def covariance(self) -> Array:
        return _side_by_side(self.left.covariance(), self.right.covariance())

    def transition(self, time: Array) -> Array:
        return _side_by_side(self.left.transition(time), self.right.transition(time))

    def noise(self, time: Array) -> Array:
        return _side_by_side(self.left.noise(time), self.right.noise(time))

    def random_states(self, key: Array, time: Array, num: int) -> Array:
        left, right = jax.random.split(key)
        return jnp.concatenate([self.left.random_states(left, time, num), self.right.random_states(right, time, num)])


def _side_by_side(a: Array, b: Array) -> Array:
    """The block-diagonal matrices of matrices (d, d, ...) and (e, e, ...)."""
    upper = jnp.concatenate([a, jnp.zeros((len(a), len(b), *a.shape[2:]), a.dtype)], 1)
    lower = jnp.concatenate([jnp.zeros((len(b), len(a), *b.shape[2:]), b.dtype), b], 1)
    return jnp.concatenate([upper, lower])


@pytree
class ProductState(StateSpaceForm):
    r"""A kernel that is the product of two: Kronecker products of their matrices,

    .. math:: Q = Q_1 \otimes P_2 + \Phi_1 P_1 \Phi_1^\top \otimes Q_2 .

    Args:
        left: of the one.
        right: of the other.
    """

    left: StateSpaceForm
    right: StateSpaceForm

    @property
    def size(self) -> int:
        return self.left.size * self.right.size

    def observation(self) -> Array:
        return jnp.kron(self.left.observation(), self.right.observation())

    def covariance(self) -> Array:
        return jnp.kron(self.left.covariance(), self.right.covariance())

    def transition(self, time: Array) -> Array:
        return _kronecker(self.left.transition(time), self.right.transition(time))

    def noise(self, time: Array) -> Array:
        Q, right = self.left.noise(time), self.right
        moved = self.left.stationary(time) - Q  # Φ_1 P_1 Φ_1'
        return _kronecker(Q, right.stationary(time)) + _kronecker(moved, right.noise(time))

    def random_states(self, key: Array, time: Array, num: int) -> Array:
        left, right = jax.random.split(key)
        one, other = self.left.random_states(left, time, num), self.right.random_states(right, time, num)
        return (one[:, None] * other).reshape(self.size, len(time), num)


def _kronecker(a: Array, b: Array) -> Array:
    """The Kronecker products of matrices (d, d, ...) and (e, e, ...)."""
    size = len(a) * len(b)
    return (a[:, None, :, None] * b[None, :, None, :]).reshape(size, size, *a.shape[2:])
