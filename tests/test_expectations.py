"""Expectations of kernels under Gaussian inputs against tensor quadrature, exact inputs, and each other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sizes import mostly_long, tune

import numpyro_dgp as dgp
from numpyro_dgp import kernels as k
from numpyro_dgp._typing import Number, pytree
from numpyro_dgp.extend import Term
from numpyro_dgp.kernels import expectations as E
from numpyro_dgp.kernels.expectations import terms

rng = np.random.default_rng(0)
N, M, D = 5, 4, 2
LOC, Z = rng.normal(size=(N, D)), rng.normal(size=(M, D))
VARIANCE = rng.uniform(0.05, 0.8, size=(N, D))
W = np.array([[0.9, -0.5], [0.3, 1.1]])
ROOTS = rng.normal(size=(N, D, D)) * 0.5
FULL = ROOTS @ ROOTS.transpose(0, 2, 1) + 0.05 * np.eye(D)
KERNELS = {
    "ARD": k.RBF(0.7, np.array([0.8, 1.7])),
    "Linear": k.Linear(np.array([0.5, 1.2])),
    "Polynomial": k.Polynomial(0.4, 0.8, degree=2),
    "sum": k.RBF(1.3, 0.9) + k.Linear(0.5) + 0.3,
    "product": k.RBF(1.3, 0.9) * k.Linear(np.array([0.5, 1.2])),
    "two RBFs": k.RBF(1.3, 0.9) * k.RBF(0.5, 2.0) + k.RBF(0.2, 0.7),
    "columns": k.RBF(1.3, 0.9).on(0) + k.RBF(0.8, 1.1).on(1) * k.Linear(0.7).on(0),
}


@pytree
class Bumps(k.Kernel):
    """A kernel of one's own with a closed form: an RBF plus its square."""

    lengthscale: Number = 1.0

    def evaluate(self, X1, X2):
        bump = k.RBF(1.0, self.lengthscale).evaluate(X1, X2)
        return bump + bump**2

    def diagonal(self, X):
        return jnp.full(X.shape[:-1], 2.0)

    def tilts(self, dims):
        precision = jnp.zeros(dims) + 1 / jnp.square(self.lengthscale)
        return Term(jnp.zeros(()), precision), Term(jnp.zeros(()), 2 * precision)


@pytree
class Narrow(k.RBF):
    """Another profile than that of its base class."""

    def profile(self, r2):
        return jnp.exp(-2 * r2)


KERNELS |= {
    "multiples": k.Constant(2.0) * (k.Constant(0.5) * k.RBF(1.3, 0.9) * 0.7 + k.Linear(0.5)) + k.Constant(0.2),
    "columns of columns": 2.0 * (k.RBF(1.3, 0.9).on(1) + 0.3 * k.Linear(0.7)).on(1, 0),
    "a column twice": k.RBF(1.3, np.array([0.9, 1.5])).on(0, 0) + k.Linear(np.array([0.4, 0.7])).on(1, 1),
    "a precision of rank one": k.Transformed(k.RBF(1.3), np.array([[0.9, -0.5]])),
    "a full precision": 0.8 * k.Transformed(k.RBF(1.3, np.array([0.9, 1.5])), W) + 0.2,
    "linear maps": k.Transformed(k.RBF(1.3) * k.Linear(np.array([0.3, 0.6])) + 0.4, W) + k.RBF(0.5, 0.9).on(1),
    "a map of a map": k.Transformed(k.Transformed(k.RBF() + 0.1, W[:1]) * k.Linear(0.4).on(1), W).on(1, 0),
    "one's own": 0.5 * Bumps(0.9).on(1) * k.Linear(0.4) + Bumps(np.array([1.2, 0.8])),
}

# One kernel for each way to take the statistics.
FEW = ["ARD", "Polynomial", "sum", "columns of columns", "linear maps", "one's own"]


def quadrature(kernel, variance, size=90):
    """Nodes (N, Q, D), weights (Q,), k(nodes, Z) (N, Q, M) and k(nodes, nodes) (N, Q)."""
    x, w = np.polynomial.hermite_e.hermegauss(size)
    white = np.stack([a.ravel() for a in np.meshgrid(x, x)], -1)
    weights = np.outer(w, w).ravel() / (2 * np.pi)
    roots = np.linalg.cholesky(variance if variance.ndim == 3 else np.stack([np.diag(v) for v in variance]))
    points = LOC[:, None] + np.einsum("nij,qj->nqi", roots, white)
    values = np.stack([np.asarray(kernel(p, Z)) for p in points])
    return points, weights, values, np.stack([np.asarray(kernel.diag(p)) for p in points])


@pytest.mark.long
@pytest.mark.parametrize("variance", [pytest.param(VARIANCE, marks=pytest.mark.long), FULL], ids=["diagonal", "full"])
@pytest.mark.parametrize("name", mostly_long(FEW, KERNELS))
def test_statistics_against_quadrature(name, variance):
    kernel, args = KERNELS[name], (LOC, variance, Z)
    h, w, K, diagonal = quadrature(kernel, variance)
    close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9)
    close(E.psi0(kernel, LOC, variance), diagonal @ w)
    close(E.psi1(kernel, *args), np.einsum("q,nqm->nm", w, K))
    close(E.psi2(kernel, *args), np.einsum("q,nqm,nql->ml", w, K, K))
    weights = np.array([0.0, 1.0, 2.0, -1.0, 0.5])
    close(E.psi2(kernel, *args, weights=weights), np.einsum("n,q,nqm,nql->ml", weights, w, K, K))
    close(E.psi1_times_h(kernel, *args), np.einsum("q,nqm,nqd->nmd", w, K, h))
    close(E.psi1_times_hh(kernel, *args), np.einsum("q,nqm,nqd,nqe->nmde", w, K, h, h))
    directions = np.random.default_rng(1).normal(size=(N, D))
    close(E.psi2_times_h(kernel, *args, directions), np.einsum("q,nqm,nql,nqd,nd->ml", w, K, K, h, directions))


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(FEW, KERNELS))
def test_inputs_without_variance_give_gram_matrices(name):
    kernel = KERNELS[name]
    K = np.asarray(kernel(LOC, Z))
    for exact in (np.zeros((N, D)), np.zeros((N, D, D))):
        np.testing.assert_allclose(E.psi0(kernel, LOC, exact), kernel.diag(LOC), rtol=1e-12)
        np.testing.assert_allclose(E.psi1(kernel, LOC, exact, Z), K, rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(E.psi2(kernel, LOC, exact, Z), K.T @ K, rtol=1e-10)
        np.testing.assert_allclose(E.psi1_times_h(kernel, LOC, exact, Z), K[..., None] * LOC[:, None], rtol=1e-9)


def test_a_closed_form_is_not_inherited():
    for kernel in (Narrow(), 2.0 * Narrow().on(0) * k.RBF()):
        with pytest.raises(ValueError, match=r"closed form .* got Narrow: pass integrate=.* or define tilts\(dims\)"):
            E.psi1(kernel, LOC, VARIANCE, Z)
    for base in (k.Linear, k.Polynomial):
        other = pytree(type("Other", (base,), {}))
        with pytest.raises(ValueError, match=r"closed form .* got Other"):
            E.psi1(other(), LOC, VARIANCE, Z)


@pytest.mark.parametrize("name", KERNELS)
def test_terms_add_up_to_the_kernel(name):
    """Also with hyperparameters that are traced."""

    def evaluate(kernel):
        total = 0
        found, rows = terms(kernel, D, jnp.dtype("float64"))
        rows = np.eye(D) if rows is None else rows
        x, z = LOC @ rows.T, Z @ rows.T
        for t, _ in found:
            difference = x[:, None] - z
            value = jnp.exp(t.log_scale - 0.5 * (t.precision * difference**2).sum(-1))
            for form in t.forms:
                value = value * ((x * form) @ z.T)
            total = total + value
        return total

    np.testing.assert_allclose(evaluate(KERNELS[name]), KERNELS[name](LOC, Z), rtol=1e-10)
    np.testing.assert_allclose(jax.jit(evaluate)(KERNELS[name]), KERNELS[name](LOC, Z), rtol=1e-10)


@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_precision_matrix_against_dense_algebra(rank, full):
    """E k(h, z) = s^2 |I + Lambda V|^(-1/2) exp(-(z - m)' (I + Lambda V)^-1 Lambda (z - m) / 2), four columns."""
    rng = np.random.default_rng(rank)
    W, loc, z, root = (rng.normal(size=size) for size in [(rank, 4), (3, 4), (5, 4), (3, 4, 4)])
    variance = root @ root.mT if full else np.diagonal(root @ root.mT, axis1=1, axis2=2)
    kernel, precision = k.Transformed(k.RBF(1.3), W), W.T @ W
    first, second = np.empty((3, 5)), np.zeros((5, 5))
    for n in range(3):
        V = variance[n] if full else np.diag(variance[n])

        def mean(scale, tau, centre, V=V, m=loc[n]):
            growth = np.eye(4) + tau * precision @ V
            square = (centre - m) @ np.linalg.solve(growth, tau * precision) @ (centre - m)
            return scale * np.exp(-0.5 * square) / np.sqrt(np.linalg.det(growth))

        first[n] = [mean(1.3, 1.0, a) for a in z]
        for i, a in enumerate(z):
            for j, b in enumerate(z):  # two bumps are one of twice the precision, half-way between
                second[i, j] += mean(1.3**2, 2.0, (a + b) / 2) * np.exp(-0.25 * (a - b) @ precision @ (a - b))
    np.testing.assert_allclose(E.psi1(kernel, loc, variance, z), first, rtol=1e-10)
    np.testing.assert_allclose(E.psi2(kernel, loc, variance, z), second, rtol=1e-10)
    np.testing.assert_allclose(E.psi0(kernel, loc, variance), 1.3)


def test_only_matrices_of_the_rank_are_factorised():
    """A hundred columns, two rows: nothing in the program is as large as a covariance of the columns."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=size)) for size in [(2, 100), (3, 100), (4, 100)]]

    def statistics(W, loc, z):
        kernel, variance = k.Transformed(k.RBF(), W), jnp.ones_like(loc)
        return E.psi1(kernel, loc, variance, z), E.psi2(kernel, loc, variance, z)

    text = jax.jit(statistics).lower(*arrays).compile().as_text()
    assert "100,100" not in text
    assert "2,2" in text


@pytest.mark.slow
def test_one_datum_at_a_time_is_the_sum():
    kernel = KERNELS["sum"]
    each = jax.vmap(lambda m, v: E.psi2(kernel, m[None], v[None], Z))(jnp.array(LOC), jnp.array(VARIANCE))
    np.testing.assert_allclose(each.sum(0), E.psi2(kernel, LOC, VARIANCE, Z), rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("cells", mostly_long([30], [1, 30, 50]))
@pytest.mark.parametrize("variance", [VARIANCE, FULL], ids=["diagonal", "full"])
def test_blocks_of_data_change_nothing(monkeypatch, cells, variance):
    def statistics(loc):
        first = E.psi1(KERNELS["product"], loc, variance, Z)
        return E.psi2(KERNELS["product"], loc, variance, Z, weights=first[:, 0]).sum()

    value, slope = jax.value_and_grad(statistics)(jnp.array(LOC))
    tune(monkeypatch, cells=cells)
    blocked = jax.value_and_grad(statistics)(jnp.array(LOC))
    np.testing.assert_allclose(blocked[0], value, rtol=1e-12)
    np.testing.assert_allclose(blocked[1], slope, rtol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("variance", [VARIANCE, FULL], ids=["diagonal", "full"])
def test_nodes_instead_of_the_closed_form(variance):
    nodes = dgp.likelihoods.GaussHermite(40)
    directions = np.ones((N, D))
    for name in ("ARD", "sum"):
        kernel, args = KERNELS[name], (LOC, variance, Z)
        for statistic, extra in (
            (E.psi1, ()), (E.psi2, ()), (E.psi1_times_h, ()), (E.psi1_times_hh, ()), (E.psi2_times_h, (directions,)),
        ):  # fmt: skip
            exact, approximate = statistic(kernel, *args, *extra), statistic(kernel, *args, *extra, integrate=nodes)
            np.testing.assert_allclose(approximate, exact, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(E.psi0(kernel, LOC, variance, integrate=nodes), E.psi0(kernel, LOC, variance))


@pytest.mark.slow
def test_kernels_without_closed_form_by_nodes_and_by_draws():
    kernel = k.Matern52(1.2, 0.8)
    _, w, K, _ = quadrature(kernel, VARIANCE)
    nodes, draws = dgp.likelihoods.GaussHermite(90), dgp.likelihoods.MonteCarlo(20_000, jax.random.key(0))
    np.testing.assert_allclose(E.psi1(kernel, LOC, VARIANCE, Z, integrate=nodes), np.einsum("q,nqm->nm", w, K))
    exact = np.einsum("q,nqm,nql->ml", w, K, K)
    np.testing.assert_allclose(E.psi2(kernel, LOC, VARIANCE, Z, integrate=nodes), exact)
    products = np.einsum("nqm,nql->qml", K, K)
    error = np.sqrt(np.einsum("q,qml->ml", w, (products - exact) ** 2) / 20_000)
    assert (abs(E.psi2(kernel, LOC, VARIANCE, Z, integrate=draws) - exact) < 5 * error).all()


@pytest.mark.slow
def test_a_kernel_far_away_underflows_to_zero_with_finite_slopes():
    far = jax.value_and_grad(lambda m: E.psi2(k.RBF(1.0, 0.01), m, jnp.full((1, 1), 1e-4), jnp.zeros((3, 1))).sum())
    value, slope = far(jnp.full((1, 1), 50.0))
    assert value == 0
    assert slope[0, 0] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["ARD", "columns"])
@pytest.mark.parametrize("variance", [0 * VARIANCE, 0 * FULL], ids=["diagonal", "full"])
def test_slopes_are_finite_where_the_variance_is_zero(name, variance):
    def total(kernel, loc, variance, Z):
        return E.psi2(kernel, loc, variance, Z).sum() + E.psi1(kernel, loc, variance, Z).sum()

    arrays = (jax.tree.map(jnp.asarray, KERNELS[name]), jnp.array(LOC), jnp.array(variance), jnp.array(Z))
    for slope in jax.tree.leaves(jax.grad(total, argnums=(0, 1, 2, 3))(*arrays)):
        assert np.isfinite(slope).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["ARD", "sum", "product"])
def test_single_precision(x32, name):
    kernel = KERNELS[name]
    for variance in (VARIANCE, FULL):
        single = [jnp.asarray(a, jnp.float32) for a in (LOC, variance, Z)]
        for statistic in (E.psi1, E.psi2, E.psi1_times_h):
            value = statistic(kernel, *single)
            assert value.dtype == jnp.float32
            _, w, K, _ = quadrature(kernel, variance)
            if statistic is E.psi2:
                np.testing.assert_allclose(value, np.einsum("q,nqm,nql->ml", w, K, K), rtol=1e-4, atol=1e-5)
        assert E.psi0(kernel, *single[:2]).dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: E.psi1(k.Matern32(), LOC, VARIANCE, Z),
            "closed form .* got Matern32: pass integrate=dgp.likelihoods.GaussHermite",
        ),
        (lambda: E.psi1(k.RBF() * k.Periodic(), LOC, VARIANCE, Z), "closed form .* got Periodic"),
        (lambda: E.psi1(k.Transformed(k.RBF(), jnp.sin), LOC, VARIANCE, Z), "closed form .* got Transformed"),
        (lambda: E.psi1(k.Transformed(k.Matern32(), W), LOC, VARIANCE, Z), "closed form .* got Matern32"),
        (
            lambda: E.psi1(k.Transformed(k.RBF(), W).on(0), LOC, VARIANCE, Z),
            r"a matrix W of shape \(Q, 1\), got \(2, 2\)",
        ),
        (
            lambda: E.psi1(k.Transformed(k.Categorical(3), W[:1]), LOC, VARIANCE, Z),
            "of numbers behind a linear map, got",
        ),
        (lambda: E.psi1(k.RBF().on(2), LOC, VARIANCE, Z), r"kernel.on\(2,\): expected at least 3 input columns"),
        (lambda: E.psi0(k.RBF(), LOC, VARIANCE[:, :1]), r"expected means of shape \(N, D\) with variances"),
        (lambda: E.psi0(k.RBF(), LOC, -VARIANCE), "expected variances of at least zero, got -0"),
        (lambda: E.psi1(k.RBF(), LOC, np.linalg.cholesky(FULL), Z), "expected .* symmetric.*L @ L.mT"),
        (lambda: E.psi2(k.RBF(), LOC, -FULL, Z), r"expected covariances .* variances of at least zero"),
        (lambda: E.psi1(k.RBF(), LOC[:, 0], VARIANCE, Z), r"expected inputs of shape \(..., N, D\)"),
        (lambda: E.psi1(k.RBF(), LOC, VARIANCE, Z[:, :1]), "expected inputs with D = 2 columns"),
        (lambda: E.psi2(k.RBF(), LOC, VARIANCE, Z, weights=1.0), r"expected weights of shape \(5,\), got \(\)"),
        (lambda: E.psi2_times_h(k.RBF(), LOC, VARIANCE, Z, Z), r"expected directions of shape \(5, 2\), got \(4, 2\)"),
        (
            lambda: E.psi1(k.RBF(), LOC, VARIANCE, Z, integrate=dgp.likelihoods.GaussHermite(200)),
            "at most 20000 nodes, got 200.2",
        ),
        (lambda: E.psi1(k.RBF(), LOC, VARIANCE, Z, integrate=dgp.likelihoods.MonteCarlo(9)), "with a key, got none"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def with_labels():
    """Kernels of a number and a label, at labels that are known exactly."""
    loc, labels = np.array([[0.3], [-0.5], [1.2], [0.1]]), np.array([[0.0], [2.0], [1.0], [0.0]])
    points = np.array([[0.0, 0.0], [0.5, 1.0], [-1.0, 2.0]])
    table = np.array([[0.1], [0.7], [-0.4]])
    kernels = {
        "product": 1.3 * k.RBF(0.8, 0.7).on(0) * k.Categorical(3, 1.2, 0.4).on(1),
        "sum": k.RBF().on(0) + k.Linear().on(0) * k.Categorical(3, correlation=0.2).on(1) + k.Embedding(table).on(1),
    }
    return kernels, np.hstack([loc, labels]), np.hstack([[[0.4], [0.9], [0.2], [0.0]], np.zeros((4, 1))]), points


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["sum"], ["product", "sum"]))
@pytest.mark.parametrize("full", mostly_long([False], [False, True]))
def test_products_with_kernels_of_labels(name, full):
    kernels, loc, variance, points = with_labels()
    kernel, nodes = kernels[name], np.polynomial.hermite_e.hermegauss(60)
    x = loc[:, None] + np.sqrt(variance)[:, None] * nodes[0][:, None]
    w = nodes[1] / nodes[1].sum()
    K = np.asarray(kernel(x, points))
    v = np.stack([np.diag(each) for each in variance]) if full else variance
    close = partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-9)
    close(E.psi0(kernel, loc, v), kernel.diag(x) @ w)
    close(E.psi1(kernel, loc, v, points), np.einsum("q,nqm->nm", w, K))
    close(E.psi1_times_h(kernel, loc, v, points), np.einsum("q,nqm,nqd->nmd", w, K, x))
    close(E.psi2(kernel, loc, v, points), np.einsum("q,nqm,nql->ml", w, K, K))
    assert np.isnan(jax.jit(E.psi1)(kernel, loc, np.ones((4, 2)), points)).all()


@pytest.mark.slow
def test_labels_with_a_variance_are_refused():
    kernels, loc, _, points = with_labels()
    with pytest.raises(ValueError, match=r"labels that are known exactly, got a variance .* columns \[1\].*average"):
        E.psi1(kernels["product"], loc, np.ones((4, 2)), points)
