r"""Observations of a Gaussian Markov chain: their log density, and the state given all of them, in O(N).

.. math:: s_n = \Phi_n s_{n-1} + \epsilon_n, \quad \epsilon_n \sim N(0, Q_n), \qquad
          y_n = h^\top s_n + \text{noise of variance } r_n .

The N steps are cut into chunks, which run side by side: in each a Kalman filter from an unknown state, whose slopes,
covariance and likelihood by that state are an element (``chain_elements``). The elements are then joined. With chunks
of :math:`\sqrt N` steps that is :math:`2 \sqrt N` steps one after the other instead of N, each on long rows of numbers.
Smoothing runs the filter again, from the state that is now known at the start of each chunk, and its derivative back:
with :math:`\lambda` and :math:`-\Lambda` the first and second derivative of the log density of all later observations
by the filter's mean m, the state given all observations is :math:`N(m + P \lambda,\, P - P \Lambda P)`. No covariance
of states is inverted, so that they may be without noise and times may repeat.

**Stretches** of a Gaussian Markov chain are functions of the state before them, and can be joined.

Given the state :math:`s_0` before a stretch, the state after it and the density of the observations in it are

.. math:: s_1 \sim N(A s_0 + b,\; C), \qquad \log p(y \mid s_0) = c + \eta^\top s_0 - \tfrac12 s_0^\top J s_0 .

Two stretches, one after the other, are a stretch. Joining is associative, so that many can be joined in any order: one
after the other, or all pairs at once, which takes as many rounds as the logarithm of their number.

Source: Sarkka and Garcia-Fernandez (2021), their elements of filtering and smoothing in one, with the constant. The
backward pass is known by the names of Bryson and Frazier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.scipy.linalg import lu_factor, lu_solve

from numpyro_dgp._typing import Array
from numpyro_dgp.math.linalg import fused, matmul, safe_sqrt, solve_lower, with_jitter
from numpyro_dgp.math.tuning import tuned

__all__ = [
    "Chain",
    "Element",
    "Observed",
    "after",
    "before",
    "join",
    "log_evidence",
    "prior_states",
    "shock_factors",
    "smoothed",
]


class Element(NamedTuple):
    """A stretch of a chain.

    Args:
        A: slope (..., d, d) of the state after it by the state before it.
        b: shift (..., d).
        C: covariance (..., d, d).
        eta: slope (..., d) of the log density of its observations, at the state zero before it.
        J: minus their curvature (..., d, d).
        c: their log density (...,) at the state zero before it.
    """

    A: Array
    b: Array
    C: Array
    eta: Array
    J: Array
    c: Array

    @classmethod
    def start(cls, mean: Array, covariance: Array) -> Element:
        """The stretch before all observations, after which the state is N(mean, covariance) whatever was before."""
        zeros = jnp.zeros_like(covariance)
        return cls(zeros, mean, covariance, jnp.zeros_like(mean), zeros, jnp.zeros(mean.shape[:-1], mean.dtype))

    @classmethod
    def nothing(cls, size: int, dtype: jnp.dtype) -> Element:
        """A stretch in which nothing happens."""
        eye, zero = jnp.eye(size, dtype=dtype), jnp.zeros(size, dtype)
        return cls(eye, zero, 0 * eye, zero, 0 * eye, zero[0])


def join(first: Element, then: Element) -> Element:
    """Two stretches as one; leading dimensions broadcast."""
    d = first.b.shape[-1]
    # Stretch 1: s_1 | s_0 ~ N(A_1 s_0 + b_1, C_1).
    # Stretch 2: log p(y_2 | s_1) = c_2 + η_2' s_1 - s_1' J_2 s_1 / 2.
    lu = lu_factor(jnp.eye(d, dtype=first.C.dtype) + matmul(first.C, then.J))  # eigenvalues of one and more
    residual = then.eta - _times(then.J, first.b)  # η_2 - J_2 b_1
    # (I + C J)^-1 of A, of C, and of the mean after the first stretch given the observations in the second.
    informed = first.b + _times(first.C, then.eta)
    solved = lu_solve(lu, jnp.concatenate([first.A, first.C], -1))
    # s_1 | s_0, y_2 ~ N(A s_0 + b, C) from here on.
    A, C, b = solved[..., :d], solved[..., d:], lu_solve(lu, informed[..., None])[..., 0]
    log_det = jnp.log(jnp.abs(jnp.diagonal(lu[0], axis1=-2, axis2=-1))).sum(-1)  # log|I + C_1 J_2|
    square = (residual * _times(C, residual)).sum(-1)  # (η_2 - J_2 b_1)' C (η_2 - J_2 b_1)
    # η_2' b_1 - b_1' J_2 b_1 / 2
    known = (then.eta * first.b).sum(-1) - 0.5 * (first.b * _times(then.J, first.b)).sum(-1)
    forward = matmul(then.A, C)
    slope = lu_solve(lu, residual[..., None], trans=1)[..., 0]  # (I + J C)^-1 (eta - J b)
    return Element(
        matmul(then.A, A),  # A_2 A
        _times(then.A, b) + then.b,  # A_2 b + b_2
        _symmetric(matmul(forward, then.A.mT)) + then.C,  # A_2 C A_2' + C_2
        first.eta + _times(first.A.mT, slope),  # η_1 + A_1' (I + J_2 C_1)^-1 (η_2 - J_2 b_1)
        first.J + _symmetric(matmul(first.A.mT, matmul(then.J, A))),  # J_1 + A_1' J_2 (I + C_1 J_2)^-1 A_1
        first.c + then.c + known + 0.5 * square - 0.5 * log_det,
    )


def _times(matrix: Array, vector: Array) -> Array:
    return matmul(matrix, vector[..., None])[..., 0]


def _symmetric(matrix: Array) -> Array:
    return 0.5 * (matrix + matrix.mT)


def before(elements: Element, start: Element, parallel: bool) -> tuple[Element, Element]:
    """All that is before each of several stretches, ``start`` included, and all together.

    Args:
        elements: the stretches, leading dimension first.
        start: what is before all of them.
        parallel: join pairs at once, not one stretch after the other.
    """
    if parallel:
        joined = jax.lax.associative_scan(join, _stacked(start, elements))
        return jax.tree.map(lambda a: a[:-1], joined), jax.tree.map(lambda a: a[-1], joined)

    def step(so_far: Element, element: Element) -> tuple[Element, Element]:
        return join(so_far, element), so_far

    total, earlier = jax.lax.scan(step, start, elements)
    return earlier, total


def after(elements: Element, parallel: bool) -> tuple[Array, Array]:
    """The likelihood of all stretches after each one as a function of the state after it: eta and J.

    Args:
        elements: the stretches, leading dimension first.
        parallel: as in :func:`before`.
    """
    end = Element.nothing(elements.b.shape[-1], elements.b.dtype)
    if parallel:
        last = jax.tree.map(lambda a: a[::-1], elements)
        joined = jax.lax.associative_scan(lambda a, b: join(b, a), _stacked(end, last))
        return joined.eta[:-1][::-1], joined.J[:-1][::-1]

    def step(rest: Element, element: Element) -> tuple[Element, tuple[Array, Array]]:
        return join(element, rest), (rest.eta, rest.J)

    return jax.lax.scan(step, end, elements, reverse=True)[1]


def _stacked(one: Element, many: Element) -> Element:
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), one, many)


class Chain(Protocol):
    """A stationary Markov chain with one observed number per state, a pytree: ``kernel.state_space()`` is one."""

    def observation(self) -> Array:
        """h (d,)."""

    def covariance(self) -> Array:
        """That of the state at any time (d, d)."""

    def transition(self, time: Array) -> Array:
        """Phi where times (...,) pass: (d, d, ...)."""

    def noise(self, time: Array) -> Array:
        """Q where times (...,) pass: (d, d, ...)."""


class Observed(NamedTuple):
    """Observations (N,), one for each step of a chain.

    Args:
        time: that passes before each.
        value: y.
        variance: r, of their noise.
        present: one where there is an observation, zero where there is none.
    """

    time: Array
    value: Array
    variance: Array
    present: Array


@fused
def log_evidence(chain: Chain, observed: Observed) -> Array:
    """The log density of the observations: ()."""
    elements = _elements(chain, _in_chunks(observed))
    return before(elements, _start(chain), tuned().chunk > 0)[1].c


@fused
def smoothed(chain: Chain, observed: Observed) -> tuple[Array, Array]:
    """Mean and variance of h's given all observations, at every step: (N,) each."""
    chunks = _in_chunks(observed)
    elements = _elements(chain, chunks)
    parallel = tuned().chunk > 0
    earlier, _ = before(elements, _start(chain), parallel)
    eta, J = after(elements, parallel)
    # The state at the start of each chunk, given all observations before it.
    state = _last(earlier.b), _last(earlier.C)
    (mean, covariance), steps = jax.lax.scan(_filter(chain), state, chunks)
    # With m and P at the end of a chunk: λ = (I + J P)^-1 (η - J m) and Λ = (I + J P)^-1 J.
    inverse = jnp.linalg.inv(jnp.eye(J.shape[-1], dtype=J.dtype) + matmul(J, jnp.moveaxis(covariance, -1, 0)))
    slope = _last(eta) - _apply(_last(J), mean)
    back = _apply(_last(inverse), slope), _product(_last(inverse), _last(J))
    _, (means, variances) = jax.lax.scan(_smoother(chain), back, (chunks, steps), reverse=True)
    size = len(observed.time)
    return means.T.reshape(-1)[:size], variances.T.reshape(-1)[:size]


@fused
def shock_factors(Q: Array) -> tuple[Array, Array]:
    """Lower factors of covariances (..., d, d) and their inverses; both have zeros where the diagonal is zero.

    Diagonals may be of any size, because correlations are factorised: with the time that passes, the variances of a
    function's derivatives become small at different rates.
    """
    # Q = S F F' S with standard deviations S and correlations F F': factor S F, inverse F^-1 S^-1.
    scale = safe_sqrt(jnp.diagonal(Q, axis1=-2, axis2=-1))
    moving = scale > 0
    inverse = 1 / jnp.where(moving, scale, jnp.inf)  # 1 / inf = 0 in rows of Q that are zero
    eye = jnp.eye(Q.shape[-1], dtype=Q.dtype)
    correlation = inverse[..., None] * Q * inverse[..., None, :] + jnp.where(moving, 0, 1)[..., None] * eye
    factor = jnp.linalg.cholesky(with_jitter(correlation))
    return scale[..., None] * factor, solve_lower(factor, eye) * inverse[..., None, :]


@fused
def prior_states(chain: Chain, time: Array, first: Array, shocks: Array) -> Array:
    """The states of a chain with given shocks: (d, N).

    Args:
        chain: its matrices.
        time: that passes before each step (N,), of which the first counts as zero.
        first: the first state (d,).
        shocks: epsilon (d, N), of which the first is not used.
    """
    Phi = _first(chain.transition(time))
    start = jnp.concatenate([first[None], shocks[:, 1:].T])

    if tuned().chunk:
        # (Φ_2, e_2) after (Φ_1, e_1): s_2 = Φ_2 Φ_1 s_0 + Φ_2 e_1 + e_2.
        def after_both(one: Any, two: Any) -> Any:
            return matmul(two[0], one[0]), matmul(two[0], one[1][..., None])[..., 0] + two[1]

        return jax.lax.associative_scan(after_both, (Phi.at[0].set(0), start))[1].T

    def step(state: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        state = matmul(x[0], state) + x[1]
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(first), (Phi, start))[1].T


def _in_chunks(observed: Observed) -> Observed:
    """Each array as (steps of a chunk, chunks), filled up by steps in which nothing happens."""
    N = len(observed.time)
    size = min(tuned().chunk or math.isqrt(max(N - 1, 0)) + 1, N)
    chunks = -(-N // size)

    def cut(a: Array, fill: float) -> Array:
        return jnp.pad(a, (0, chunks * size - N), constant_values=fill).reshape(chunks, size).T

    # Time 0 gives Φ = I and Q = 0.
    return Observed(cut(observed.time, 0), cut(observed.value, 0), cut(observed.variance, 1), cut(observed.present, 0))


def _start(chain: Chain) -> Element:
    P = chain.covariance()
    return Element.start(jnp.zeros(len(P), P.dtype), P)


def _elements(chain: Chain, chunks: Observed) -> Element:
    """The chunks as elements, with their numbers in the leading dimension."""
    h = chain.observation()[:, None]

    @jax.checkpoint
    def step(so_far: Element, x: Observed) -> tuple[Element, None]:
        Phi = chain.transition(x.time)
        # Predict: s_n | s_0 ~ N(A s_0 + b, C), with s_0 the state before the chunk.
        A, b = _product(Phi, so_far.A), _apply(Phi, so_far.b)
        cov = _product(_product(Phi, so_far.C), jnp.swapaxes(Phi, 0, 1)) + chain.noise(x.time)
        at, row = _apply(cov, h), _apply(jnp.swapaxes(A, 0, 1), h)  # C h and A' h
        S = _dot(h, at) + x.variance  # Var[y_n | s_0, earlier y] = h' C h + r
        error, weight = (x.value - _dot(h, b)), x.present / S  # at s_0 = 0: y - h' b; and 1 / S
        return Element(
            A - weight * at[:, None] * row,  # A - K h' A with the gain K = C h / S
            b + weight * error * at,  # b + K (y - h' b)
            cov - weight * at[:, None] * at,  # C - K h' C
            # log N(y; h' (A s_0 + b), S) at s_0 = 0: slope A' h (y - h' b) / S, curvature -A' h h' A / S
            so_far.eta + weight * error * row,
            so_far.J + weight * row[:, None] * row,
            so_far.c - 0.5 * (weight * jnp.square(error) + x.present * jnp.log(2 * math.pi * S)),
        ), None

    nothing = Element.nothing(len(h), h.dtype)
    start = jax.tree.map(lambda a: jnp.broadcast_to(a[..., None], (*a.shape, chunks.time.shape[-1])), nothing)
    return jax.tree.map(_first, jax.lax.scan(step, start, chunks)[0])


class _Step(NamedTuple):
    """What the smoother keeps of a step of the filter: the mean and variance of h's, P h, the gain, the error, 1/S."""

    mean: Array
    variance: Array
    across: Array
    gain: Array
    error: Array
    weight: Array


_State = tuple[Array, Array]


def _filter(chain: Chain) -> Callable[[_State, Observed], tuple[_State, _Step]]:
    h = chain.observation()[:, None]

    def step(state: _State, x: Observed) -> tuple[_State, _Step]:
        Phi = chain.transition(x.time)
        # Predict: Φ m and Φ P Φ' + Q.
        m, P = _apply(Phi, state[0]), _product(_product(Phi, state[1]), jnp.swapaxes(Phi, 0, 1)) + chain.noise(x.time)
        at = _apply(P, h)  # P h
        before = _dot(h, at)  # h' P h
        weight, error = x.present / (before + x.variance), x.value - _dot(h, m)  # 1 / S with S = h' P h + r; y - h' m
        gain, left = weight * at, 1 - weight * before  # left is r / S without the difference of large numbers
        left = jnp.where(x.present > 0, x.variance * weight, left)
        # Update: m + K e and P - K h' P with K = P h / S; then P h becomes P h r / S.
        m, P = m + gain * error, P - gain[:, None] * at
        return (m, P), _Step(_dot(h, m), before * left, at * left, gain, error, weight)

    return step


def _smoother(chain: Chain) -> Callable[[_State, tuple[Observed, _Step]], tuple[_State, _State]]:
    h = chain.observation()[:, None]

    def step(later: _State, x: tuple[Observed, _Step]) -> tuple[_State, _State]:
        (slope, curve), (observed, kept) = later, x
        Phi = chain.transition(observed.time)
        across = _apply(curve, kept.across)  # Λ P h
        # Given all observations: h' m + h' P λ and h' P h - h' P Λ P h.
        found = kept.mean + _dot(kept.across, slope), kept.variance - _dot(kept.across, across)
        # Through the update of the mean, I - gain h', and then through the transition.
        # λ: (I - h K') λ + h e / S
        slope = slope + h * (kept.weight * kept.error - _dot(kept.gain, slope))
        # Λ: (I - h K') Λ (I - K h') + h h' / S
        seen = _apply(curve, kept.gain)
        both = h[:, None] * seen
        corner = _dot(kept.gain, seen) + kept.weight  # K' Λ K + 1 / S
        curve = curve - both - jnp.swapaxes(both, 0, 1) + corner * h[:, None] * h
        back = jnp.swapaxes(Phi, 0, 1)
        return (_apply(back, slope), _product(_product(back, curve), Phi)), found  # Φ' λ and Φ' Λ Φ

    return step


def _product(a: Array, b: Array) -> Array:
    """Products of matrices (d, e, ...) and (e, f, ...)."""
    if a.shape[1] > _FEW:
        return (a[:, :, None] * b).sum(1)
    total = a[:, 0, None] * b[0]
    for k in range(1, a.shape[1]):
        total = total + a[:, k, None] * b[k]
    return total


# States up to which a product is written out, which XLA fuses with what is around it.
_FEW = 6


def _apply(a: Array, v: Array) -> Array:
    """Products of matrices (d, e, ...) and vectors (e, ...)."""
    return (a * v).sum(1)


def _dot(u: Array, v: Array) -> Array:
    return (u * v).sum(0)


def _first(a: Array) -> Array:
    """The numbers of the chunks from the last axis to the first."""
    return jnp.moveaxis(a, -1, 0)


def _last(a: Array) -> Array:
    return jnp.moveaxis(a, 0, -1)
