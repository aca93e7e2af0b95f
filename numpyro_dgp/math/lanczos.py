r"""Log determinants from products of the matrix with vectors: stochastic Lanczos quadrature.

For a symmetric positive definite A whose diagonal has a mean of one and independent signs z, the mean of
:math:`z^\top f(A)\, z` is the trace of f(A). With :math:`f(x) = \log x - (x - 1)`, whose second part has a trace of
zero, it is the log determinant, and where A is near the identity it varies in second order only. Where the trace of
:math:`(A - I)^2` is known, :math:`f(x) = \log x - (x - 1) + (x - 1)^2 / 4` varies less still (1/2 does near the
identity only). After m steps of Lanczos' recursion from z, with the basis V and the tridiagonal matrix
:math:`V^\top A V = Y\, \mathrm{diag}(\theta)\, Y^\top`,

.. math:: z^\top f(A)\, z \approx |z|^2 \sum_i Y_{1i}^2 f(\theta_i) .

The derivative is that of this number for the same z, so that value and slope belong to one function of the parameters:

.. math:: d\, z^\top f(A)\, z \approx |z|^2 \sum_{ij} Y_{1i} Y_{1j}\, f[\theta_i, \theta_j]\,
          (V Y)_i^\top\, dA\, (V Y)_j ,

with divided differences :math:`f[s, t] = (f(s) - f(t)) / (s - t)`. No step of the recursion is differentiated.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import expected
from numpyro_dgp._typing import Array
from numpyro_dgp.math.linalg import matmul

__all__ = ["Estimate", "UnitTrace", "log_determinant_by_probes"]

# The recursion stops when a step changes the quadrature by less than this share of |z|^2, or the rounding of numbers.
_TOL = 1e-9
# Share of the largest term below which the terms of a slope are left out.
_NEGLIGIBLE = 1e-9
# Of the square of A - I, where its trace is known: small enough for eigenvalues far above one.
_SECOND = 0.25


class UnitTrace(Protocol):
    """A symmetric positive definite matrix whose diagonal has a mean of one: a pytree of floating arrays."""

    @property
    def size(self) -> int:
        """Rows n."""

    @property
    def dtype(self) -> Any:
        """Of its entries."""

    def apply(self, x: Array) -> Array:
        """A x for a vector (n,)."""

    def form(self, x: Array) -> Array:
        """x' A x for a vector (n,): what derivatives are taken of."""

    def squared_rest(self) -> Array | None:
        """The trace of (A - I)^2, or ``None`` where it is not known."""


class Estimate(NamedTuple):
    """A log determinant, how wrong it may be, and the smallest eigenvalue that was seen; only the first has a slope."""

    value: Array
    standard_error: Array
    truncation: Array
    smallest: Array


def log_determinant_by_probes(matrix: UnitTrace, seed: int, probes: int, steps: int) -> Estimate:
    """The log determinant of a matrix with a mean diagonal of one: the same signs for the same seed and size.

    Args:
        matrix: A.
        seed: of the signs.
        probes: vectors of signs, from 2 on.
        steps: of the recursion at most; each keeps a vector.

    Returns:
        The estimate; its standard error over the probes; the change by the last step, mean over the probes; the
        smallest Ritz value.

    Source: Ubaru et al. (2017) for the quadrature; Gardner et al. (2018) for its use in regression.
    """
    known = matrix.squared_rest()
    if known is None:
        return _trace(matrix, seed, probes, steps, False)
    found = _trace(matrix, seed, probes, steps, True)
    # log|A| = tr f(A) - tr (A - I)^2 / 4, since tr (A - I) = 0
    return found._replace(value=found.value - _SECOND * known)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _trace(matrix: UnitTrace, seed: int, probes: int, steps: int, second: bool) -> Estimate:
    """The trace of f(A), the f of second order or the other."""
    return _estimate(jax.lax.map(lambda key: _quadrature(matrix, key, steps, second)[0], _keys(seed, probes)))


def _forward(matrix: UnitTrace, seed: int, probes: int, steps: int, second: bool) -> tuple[Estimate, UnitTrace]:
    matrix = _known_once(matrix)

    def add(total: UnitTrace, key: Array) -> tuple[UnitTrace, tuple[Array, Array, Array]]:
        found, basis, core = _quadrature(matrix, key, steps, second)
        return jax.tree.map(jnp.add, total, _slope(matrix, basis, core)), found

    total, found = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, matrix), _keys(seed, probes))
    return _estimate(found), jax.tree.map(lambda slope: slope / probes, total)


def _backward(
    seed: int, probes: int, steps: int, second: bool, slope: UnitTrace, cotangent: Estimate
) -> tuple[UnitTrace]:
    return (jax.tree.map(lambda part: cotangent.value * part, slope),)


_trace.defvjp(_forward, _backward)


@jax.custom_jvp
def _known_once(matrix: UnitTrace) -> UnitTrace:
    """The matrix itself, which cannot be differentiated a second time."""
    return matrix


@_known_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise expected(
        "first derivatives of a density whose log determinant is estimated",
        "second ones",
        "use solver=dgp.rings.Solver(exact=...), at least the number of gaps, or fit by first derivatives",
    )


def _keys(seed: int, probes: int) -> Array:
    return jax.random.split(jax.random.key(seed), probes)


def _estimate(found: tuple[Array, Array, Array]) -> Estimate:
    values, change, smallest = found
    error = jnp.std(values, ddof=1) / jnp.sqrt(len(values))
    return Estimate(values.mean(), error, change.mean(), smallest.min())


def _quadrature(
    matrix: UnitTrace, key: Array, steps: int, second: bool
) -> tuple[tuple[Array, Array, Array], Array, Array]:
    """Of one probe: value, change by the last step, smallest Ritz value; the basis (steps, n); the core of its slope.

    The core C (steps, steps) gives the slope as the sum over entries of C_ab v_a' dA v_b.
    """
    n, dtype = matrix.size, matrix.dtype
    steps = min(steps, n)
    signs = jax.random.rademacher(key, (n,), dtype)
    tiny = 10 * jnp.finfo(dtype).eps
    State = tuple[Array, Array, Array, Array, Array, Array]

    def step(state: State) -> State:
        m, basis, diagonal, beside, value, _ = state
        product = matrix.apply(basis[m])
        diagonal = diagonal.at[m].set(matmul(product, basis[m]))  # T_mm = v_m' A v_m
        product = product - diagonal[m] * basis[m]  # (A - T_mm I) v_m
        product = product - matmul(matmul(basis, product), basis)  # of the vector before, and what rounding left of all
        norm = jnp.sqrt(jnp.square(product).sum())  # T_m,m+1, and below v_m+1 = product / norm
        theta, vectors = _ritz(diagonal, beside)
        found = n * (jnp.square(vectors[0]) * _function(theta, second)).sum()  # |z|^2 sum_i Y_1i^2 f(θ_i), |z|^2 = n
        # The basis spans an invariant subspace of A: the quadrature is exact, and no vector follows.
        ended = norm <= tiny * jnp.abs(diagonal[m])
        beside = beside.at[m].set(jnp.where(ended | (m == steps - 1), 0, norm), mode="drop")
        basis = basis.at[m + 1].set(product / jnp.where(ended, jnp.inf, norm), mode="drop")
        change = jnp.where(ended, 0, jnp.abs(found - value))
        return m + 1, basis, diagonal, beside, found, change

    def goes_on(state: State) -> Array:
        m, change = state[0], state[-1]
        return (m < steps) & ((m < 2) | (change > max(_TOL, float(tiny)) * n))

    basis = jnp.zeros((steps, n), dtype).at[0].set(signs / jnp.sqrt(jnp.asarray(n, dtype)))
    start = jnp.zeros((), jnp.int32), basis, jnp.ones(steps, dtype), jnp.zeros(max(steps - 1, 1), dtype)
    m, basis, diagonal, beside, value, change = jax.lax.while_loop(
        goes_on, step, (*start, jnp.zeros((), dtype), jnp.full((), jnp.inf, dtype))
    )
    known = jnp.arange(steps) < m
    beside = jnp.where(jnp.arange(len(beside)) < m - 1, beside, 0)
    theta, vectors = _ritz(diagonal, beside)
    weights = vectors[0]
    weighted = vectors * weights  # Y_ai Y_1i
    # C_ab = |z|^2 sum_ij Y_ai Y_1i f[θ_i, θ_j] Y_1j Y_bj
    core = matmul(matmul(weighted, _divided_differences(theta, second)), weighted.T)
    core = n * jnp.where(known[:, None] & known, core, 0)
    # Ritz values without weight do not count: those of steps not taken.
    smallest = jnp.where(jnp.abs(weights) > tiny, theta, jnp.inf).min()
    return (value, change, smallest), jnp.where(known[:, None], basis, 0), core


def _ritz(diagonal: Array, beside: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors of the tridiagonal matrix; steps that were not taken stand apart, with ones."""
    beside = beside[: len(diagonal) - 1]
    return jnp.linalg.eigh(jnp.diag(diagonal) + jnp.diag(beside, 1) + jnp.diag(beside, -1))


def _function(theta: Array, second: bool) -> Array:
    """f of Ritz values."""
    rest = theta - 1
    # log θ - (θ - 1), and + (θ - 1)^2 / 4; rounding may make θ negative.
    return jnp.log(jnp.maximum(theta, 1e-30)) - rest + (_SECOND * jnp.square(rest) if second else 0)


def _divided_differences(theta: Array, second: bool) -> Array:
    """f[s, t] for all pairs of Ritz values."""
    theta = jnp.maximum(theta, 1e-30)
    ratio = theta[:, None] / theta - 1  # s / t - 1
    near = jnp.abs(ratio) < 1e-6
    away = jnp.where(near, 1e-6, ratio)
    quotient = jnp.where(near, 1 - ratio / 2, jnp.log1p(away) / away)  # log(1 + r) / r, with its series at r = 0
    # f[s, t] = log(s / t) / (s - t) - 1 + (s + t - 2) / 4
    return quotient / theta - 1 + (_SECOND * (theta[:, None] + theta - 2) if second else 0)


def _slope(matrix: UnitTrace, basis: Array, core: Array) -> UnitTrace:
    """The slope of the form sum C_ab v_a' A v_b by the matrix's arrays, one eigenvector of C after the other."""
    # C = sum_w w u u', so that sum_ab C_ab v_a' A v_b = sum_w w (V u)' A (V u).
    weights, vectors = jnp.linalg.eigh(core)
    least = _NEGLIGIBLE * jnp.abs(weights).max()

    def add(total: UnitTrace, pair: tuple[Array, Array]) -> tuple[UnitTrace, None]:
        weight, vector = pair

        def with_term(total: UnitTrace) -> UnitTrace:
            slope = jax.grad(lambda A: A.form(matmul(vector, basis)))(matrix)
            return jax.tree.map(lambda a, b: a + weight * b, total, slope)

        return jax.lax.cond(jnp.abs(weight) > least, with_term, lambda total: total, total), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, matrix), (weights, vectors.T))[0]
