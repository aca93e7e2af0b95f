"""Products with triangular matrices against plain ones, on both sides of the size from which on they are by halves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sizes import tune

from numpyro_dgp.math import linalg as triangular
from numpyro_dgp.math.linalg import row_sums
from numpyro_dgp.math.row_blocks import rows_in_block

# The product, the same in one line, and the shapes of arguments: L is lower triangular, S symmetric.
PRODUCTS = {
    "times lower": (triangular.times_lower, lambda A, L: A @ jnp.tril(L), "NM L"),
    "times transposed": (triangular.times_transposed, lambda A, L: A @ jnp.tril(L).mT, "NM L"),
    "lower product": (triangular.lower_product, lambda A, B: jnp.tril(A @ B), "MN NM"),
    "lower congruence": (triangular.lower_congruence, lambda L, K: jnp.tril(jnp.tril(L) @ K @ jnp.tril(L).mT), "L S"),
    "covariance": (triangular.covariance_of, lambda R: jnp.tril(R) @ jnp.tril(R).mT, "L"),
}


def argument(kind, rng, batch, size):
    full = rng.normal(size=(*batch, *{"NM": (7, size), "MN": (size, 7)}.get(kind, (size, size))))
    return np.tril(full) if kind == "L" else full + full.swapaxes(-1, -2) if kind == "S" else full


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_the_plain_ones(monkeypatch, dtype, batch, name):
    tune(monkeypatch, halves=8)
    fast, reference, kinds = PRODUCTS[name]
    for size in (1, 7, 8, 9):
        rng = np.random.default_rng(size)
        arguments = [jnp.array(argument(kind, rng, batch, size), dtype) for kind in kinds.split()]
        slope = rng.normal(size=reference(*arguments).shape)
        slope = jnp.array(slope + slope.swapaxes(-1, -2) if name == "covariance" else slope, dtype)
        tolerance = 50 * size * float(jnp.finfo(dtype).eps)
        (value, derivatives), (expected, others) = (
            (f(*arguments), jax.vjp(f, *arguments)[1](slope)) for f in (fast, reference)
        )
        for a, b, kind in zip((value, *derivatives), (expected, *others), ["", *kinds.split()], strict=True):
            assert a.dtype == b.dtype == dtype
            a, b = (jnp.tril(x) if kind == "L" else x for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(jnp.abs(b).max())))


def test_halves_begin_at_their_size(monkeypatch):
    tune(monkeypatch, halves=8)
    assert triangular.halves(7) == [(0, 7)]
    assert triangular.halves(9) == [(0, 4), (4, 9)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("summed", [0, 1])
def test_row_sums(monkeypatch, dtype, summed):
    tune(monkeypatch, summed=summed)
    x = jnp.array(np.random.default_rng(0).normal(size=(5, 3, 40)), dtype)
    np.testing.assert_allclose(row_sums(x), np.asarray(x, float).sum(-1), atol=200 * jnp.finfo(dtype).eps)
    np.testing.assert_array_equal(jax.grad(lambda x: row_sums(x).sum())(x), jnp.ones_like(x))


@pytest.mark.slow
def test_many_inducing_points_make_short_blocks(monkeypatch):
    tune(monkeypatch, single_rows=100, block_bytes=4 * 4 * 1000, large=20, large_block=500)
    rows = jnp.zeros((1000, 3), jnp.float32)
    assert rows_in_block(rows, outputs=1, size=4) == 1000
    assert rows_in_block(rows, outputs=50, size=10) == 100
    assert rows_in_block(rows, outputs=1, size=20) == 25
    assert rows_in_block(rows[:100], outputs=1, size=20) == 100
