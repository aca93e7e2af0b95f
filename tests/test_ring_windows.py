"""Layers on rings whose values are computed from neighbours, against the same layers with all grid points."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from programs import sizes

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import testing
from numpyro_dgp.functions.weights import DiagonalBelief
from numpyro_dgp.rings.circulant import even_part, hartley
from numpyro_dgp.rings.features import RingFeatures
from numpyro_dgp.rings.ring_beliefs import RingBelief, RingPrior
from numpyro_dgp.rings.spectra import Ring, frequencies, periodised

rng = np.random.default_rng(5)
K = dgp.kernels
# Two grid points per lengthscale; inputs on both sides of where the ring closes, on a grid point, half-way.
LENGTH = {"line": 60.0, "odd": 60.5, "plane": np.array([10.0, 10.5])}
SIZE = {"line": 120, "odd": 121, "plane": (20, 21)}
FAMILIES = ["circulant", "scaled prior", "scaled circulant", "whitened sites", "sites"]
slow = pytest.mark.long
# One family for each of the two kinds of weights; the others take longer to compile than to test.
FEW = [pytest.param(f, marks=() if f in ("scaled circulant", "whitened sites") else slow) for f in FAMILIES]
CASES = [("line", K.RBF(1.2)), ("line", K.Matern52(1.2))]
CASES += [
    pytest.param(which, kernel, marks=slow) for which in ("odd", "plane") for kernel in (K.RBF(1.2), K.Matern52(1.2))
]


def grid_of(which, neighbours=None):
    return dgp.Grid(0.0, LENGTH[which], SIZE[which], neighbours)


def inputs(which, n=7):
    x = rng.uniform(0, 1, (n, np.ndim(LENGTH[which]) + 1 if which != "plane" else 2)) * LENGTH[which]
    x[0], x[1], x[2], x[3] = 1e-3, np.ones(x.shape[1]) * LENGTH[which] - 1e-3, 5.0, 5.25
    return x


def open_gp(value, *args, **kwargs):
    with numpyro.handlers.substitute(data={"f": value}), numpyro.handlers.seed(rng_seed=0):
        return dgp.gp("f", *args, **kwargs)


def prior_of(kernels, grid, outputs=None):
    shape = open_shape(kernels, grid, outputs)
    C = open_gp(jnp.zeros(shape), kernels, grid, outputs=outputs).prior_covariance()
    return RingPrior(shape, C.spectrum, C.blocks)


def open_shape(kernels, grid, outputs):
    with numpyro.handlers.seed(rng_seed=0):
        return dgp.gp("f", kernels, grid, outputs=outputs).v.loc.shape


def belief(family, prior):
    """A random member of each family; the numbers at neighbouring sites and frequencies have nothing in common."""
    loc, w, g = (jnp.array(rng.uniform(*ends, prior.event_shape)) for ends in ((-1, 1), (0.3, 1.5), (0.3, 1.5)))
    return {
        "circulant": lambda: RingBelief(prior, loc, gain=g),
        "scaled prior": lambda: RingBelief(prior, loc, outer=w),
        "scaled circulant": lambda: RingBelief(prior, loc, outer=w, gain=g),
        "whitened sites": lambda: RingBelief(prior, loc, outer=w, powers=(0.0, 0.0)),
        "sites": lambda: RingBelief(prior, loc, outer=w, powers=(0.5, 0.0)),
        "scaled product": lambda: RingBelief(prior, loc, outer=w, gain=g, inner=w[..., ::-1]),
        "diagonal": lambda: DiagonalBelief(loc, w),
    }[family]()


def both(q, kernels, grid, neighbours, x, outputs=None):
    local = dgp.Grid(grid.low, grid.high, grid.size, neighbours)
    return tuple(open_gp(q, kernels, g, outputs=outputs)(x) for g in (grid, local))


@pytest.mark.long
@pytest.mark.parametrize("which", [pytest.param(name, marks=[pytest.mark.long] * (name != "odd")) for name in SIZE])
@pytest.mark.parametrize("family", FEW)
def test_all_points_as_neighbours_are_the_dense_layer(which, family):
    grid, x = grid_of(which), inputs(which)
    dense, near = both(belief(family, prior_of(K.Matern32(1.2), grid)), K.Matern32(1.2), grid, 121, x)
    for name in ("loc", "conditional_variance", "belief_variance"):
        np.testing.assert_allclose(getattr(near, name), getattr(dense, name), rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(("which", "kernel"), CASES, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
@pytest.mark.parametrize("family", FEW)
def test_neighbours_are_enough(which, kernel, family):
    """What ``tol`` leaves out of the weights: the error of the mean in prior deviations, and of variances."""
    scaled = family in ("scaled prior", "scaled circulant", "sites")
    grid, x, tol = grid_of(which), inputs(which), 1e-3 if which == "plane" else 1e-5
    local = grid.local(kernel, tol=tol, scaled=scaled)
    if type(kernel) is K.Matern52 or not scaled:
        assert max(local.neighbours) < max(grid.size)
    dense, near = both(belief(family, prior_of(kernel, grid)), kernel, grid, local.neighbours, x)
    for name in ("loc", "conditional_variance", "belief_variance"):
        np.testing.assert_allclose(getattr(near, name), getattr(dense, name), atol=4 * tol, err_msg=name)


@pytest.mark.long
def test_error_falls_with_neighbours():
    grid, x = grid_of("line"), inputs("line")
    q = belief("whitened sites", prior_of(K.RBF(), grid))
    errors = []
    for n in (12, 32):
        dense, near = both(q, K.RBF(), grid, n, x)
        errors.append(
            [
                float(jnp.abs(a - b).max())
                for a, b in ((near.loc, dense.loc), (near.belief_variance, dense.belief_variance))
            ]
        )
    assert (np.array(errors[0]) > 20 * np.array(errors[1])).all()
    assert max(errors[1]) < 1e-5


def map_of_means(kernel, neighbours, x):
    """The linear map from whitened values on the grid to means, (N, 120)."""
    return open_gp(jnp.zeros(120), kernel, grid_of("line", neighbours)).means_at(x)(jnp.eye(120))


@pytest.mark.long
@pytest.mark.parametrize("kernel", [K.RBF, K.Matern32, K.Matern12])
def test_windows_that_are_too_small_give_nan(kernel):
    """At growing lengthscales, compiled: as long as means are finite, their error is below 2 % of a prior deviation,
    and the same lengthscales raise where they are known."""
    x = jnp.array(rng.uniform(20, 40, (9, 1)))
    found = jax.jit(lambda ls: [map_of_means(kernel(1.0, ls), n, x) for n in (20, None)])
    errors = []
    for ls in (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0):
        near, dense = found(ls)
        errors.append(float(jnp.sqrt(jnp.square(near - dense).sum(-1)).max()))
        if np.isfinite(errors[-1]):
            map_of_means(kernel(1.0, ls), 20, x)
        else:
            with pytest.raises(ValueError, match=r"expected the neighbours of a dgp\.Grid to reach"):
                map_of_means(kernel(1.0, ls), 20, x)
    known = np.isfinite(errors)
    assert (np.diff(known.astype(int)) <= 0).all()  # once too long, always
    assert 2 <= known.sum() <= 6
    assert np.array(errors)[known].max() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "scaled"), [(K.RBF, False), (K.Matern32, True)])
def test_windows_that_are_chosen_are_large_enough(kernel, scaled):
    """For means too, where the rule's own weights are shorter: those of Matern32 are."""
    grid = dgp.Grid(0.0, 500.0, 1000).local(kernel(1.0, 1.0), tol=1e-3, scaled=scaled)
    assert grid.neighbours == ((18,) if scaled else (12,))
    found = jax.jit(lambda ls: open_gp(jnp.ones(1000), kernel(1.0, ls), grid)(jnp.array([[250.1]])).mean)
    assert np.isfinite(found(1.0)).all()
    assert np.isnan(found(2.0)).all()


@slow
def test_a_fit_that_outgrows_its_window_says_so():
    """Twelve neighbours and a function that varies slowly: without the check the loss falls to a wrong optimum."""
    x = jnp.array(np.sort(rng.uniform(5, 55, (100, 1)), 0))
    guide = G.InducingPoint(program, inducing=G.Circulant())
    svi = SVI(program, guide, optax.adam(0.05), dgp.ELBO())
    y = jnp.sin(x[:, 0] / 4) + 0.3 * jnp.array(rng.normal(size=100))
    fit = lambda n: dgp.fit(svi, jax.random.key(0), 150, x, y, grid=grid_of("line", n), progress_bar=False)  # noqa: E731
    with pytest.raises(ValueError, match=r"the loss became nan at step \d+: expected the neighbours .* got \(12,\)"):
        fit(12)
    assert np.isfinite(fit(100).losses).all()


@pytest.mark.long
def test_the_prior_comes_back():
    """With few neighbours too: the moments are those of a process on a small ring."""
    grid = grid_of("line", 12)
    prior = prior_of(K.Matern32(1.2, 0.7), grid)
    one = jnp.ones(120)
    x = rng.uniform(0, 60, (50, 1))
    for q in (RingBelief(prior, 0 * one, gain=one), RingBelief(prior, 0 * one, outer=one, powers=(0.0, 0.0))):
        expected = periodised(K.Matern32(1.2, 0.7), Ring(0.0, 6.0, 12), jnp.zeros((1, 1)), jnp.zeros((1, 1)))[0, 0]
        np.testing.assert_allclose(open_gp(q, K.Matern32(1.2, 0.7), grid)(x).variance, expected, rtol=1e-9)


@pytest.mark.long
def test_additive_kernels_and_outputs_with_kernels_of_their_own():
    grid, x = dgp.Grid([0.0, 0.0], [40.0, 36.0], (80, 80)), rng.uniform(0, 36, (6, 2))
    kernels = [K.Matern52(1.2).on(0) + K.Matern52(0.7, s).on(1) for s in (1.2, 0.9)]
    prior = prior_of(kernels, grid, 2)
    for family in ("scaled circulant", "whitened sites"):
        dense, near = both(belief(family, prior), kernels, grid, (40, 36), x[None, :, None], outputs=2)
        assert near.shape() == (1, 6, 1, 2)
        np.testing.assert_allclose(near.mean, dense.mean, atol=1e-5)
        np.testing.assert_allclose(near.variance, dense.variance, atol=1e-5)
    assert all(16 <= n < 60 for n in grid.local(kernels[0]).neighbours)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["scaled product", "diagonal"])
def test_families_that_are_not_local_keep_all_points(family):
    grid, x = grid_of("line"), inputs("line")
    dense, near = both(belief(family, prior_of(K.RBF(), grid)), K.RBF(), grid, 16, x)
    np.testing.assert_array_equal(near.variance, dense.variance)
    np.testing.assert_array_equal(near.mean, dense.mean)


@pytest.mark.long
@pytest.mark.parametrize("family", FEW)
def test_derivatives(family):
    """By inputs, hyperparameters, means and diagonals."""
    grid, x = grid_of("line"), jnp.array(inputs("line"))
    scales = jnp.array(rng.uniform(0.3, 1.5, (3, 120)))

    def total(x, lengthscale, scales, neighbours):
        kernel = K.Matern52(1.2, lengthscale)
        with numpyro.handlers.seed(rng_seed=0):
            C = dgp.gp("f", kernel, grid).prior_covariance()
        prior = RingPrior((120,), C.spectrum, C.blocks)
        template = belief(family, prior)
        parts = {"outer": template.outer, "gain": template.gain}
        given = {k: scales[i] for i, (k, v) in enumerate(parts.items()) if v is not None}
        q = RingBelief(prior, scales[2], **given, powers=template.powers)
        values = open_gp(q, kernel, dgp.Grid(0.0, 60.0, 120, neighbours))(x)
        return (jnp.sin(jnp.arange(7)) * (values.mean**2 + values.variance)).sum()

    slopes = [jax.jit(jax.grad(total, (0, 1, 2)), static_argnums=3)(x, 1.0, scales, n) for n in (None, 40)]
    for dense, near in zip(*slopes, strict=True):
        np.testing.assert_allclose(near, dense, atol=3e-5 * max(1.0, float(jnp.abs(dense).max())))


@pytest.mark.usefixtures("x32")
@pytest.mark.parametrize("family", FEW)
@pytest.mark.long
def test_single_precision(family):
    """Nearly the numbers of double precision, and in single precision throughout."""
    x = inputs("line")
    low, high = np.float32(0), np.float32(60)
    numbers = {n: rng.uniform(0.3, 1.5, 120) for n in ("loc", "outer", "gain")}

    def values(dtype, neighbours):
        kernel, grid = K.RBF(dtype(1.2), dtype(1.0)), dgp.Grid(dtype(low), dtype(high), 120, neighbours)
        prior = prior_of(kernel, grid)
        template = belief(family, prior)
        used = {n: jnp.asarray(v, dtype) for n, v in numbers.items() if getattr(template, n) is not None}
        return open_gp(RingBelief(prior, **used, powers=template.powers), kernel, grid)(x.astype(dtype))

    near = values(np.float32, 90)
    assert near.mean.dtype == near.variance.dtype == jnp.float32
    dense = values(np.float32, None)
    np.testing.assert_allclose(near.mean, dense.mean, atol=1e-4)
    np.testing.assert_allclose(near.variance, dense.variance, rtol=1e-3)


def program(x, y=None, batch=None, grid=None):
    kernel = K.RBF(1.0, numpyro.param("ls", jnp.ones((), x.dtype), constraint=dist.constraints.positive))
    f = dgp.gp("f", kernel, grid)
    with numpyro.plate("data", len(x), subsample_size=batch) as i:
        likelihood = dgp.Likelihood(f(x[i]), lambda v: dist.Normal(v, 0.3))
        numpyro.sample("y", likelihood, obs=None if y is None else y[i])


@pytest.mark.long
@pytest.mark.parametrize(
    "rule", [G.Circulant(), G.ScaledCirculant(), G.WhitenedSites()], ids=lambda r: type(r).__name__
)
def test_no_array_of_data_times_grid_points(rule):
    """A step with 100 000 grid points and 1000 data: aliases times points, neighbours times data, nothing larger."""
    M, B, N = 100_000, 1000, 50_000
    grid = dgp.Grid(0.0, M / 2, M, 200)
    guide = G.InducingPoint(program, inducing=rule)
    names = {G.Circulant: ["gain"], G.ScaledCirculant: ["gain", "outer"], G.WhitenedSites: ["outer"]}[type(rule)]
    params = {f"f_auto_{n}": jax.ShapeDtypeStruct((M,), float) for n in ["loc", *names]}
    params["ls"] = jax.ShapeDtypeStruct((), float)

    def loss(params, x, y):
        return dgp.ELBO().loss(jax.random.key(0), params, program, guide, x, y, batch=B, grid=grid)

    data = jax.ShapeDtypeStruct((N, 1), float), jax.ShapeDtypeStruct((N,), float)
    found = jax.make_jaxpr(jax.value_and_grad(loss))(params, *data)
    assert 17 * M <= max(sizes(found.jaxpr)) <= 20 * M < B * M / 40
    dense = dgp.Grid(0.0, 1000.0, 2000)
    params = {name: jax.ShapeDtypeStruct((2000,) if p.shape else (), float) for name, p in params.items()}
    grid = dense  # and the count above would have seen one
    assert max(sizes(jax.make_jaxpr(loss)(params, *data).jaxpr)) >= 2000 * B


@pytest.mark.slow
@pytest.mark.parametrize("which", SIZE)
@pytest.mark.parametrize("kernel", [K.RBF(1.2), K.Matern12(1.2)], ids=lambda k: type(k).__name__)
def test_power_is_the_sum_of_squares(which, kernel):
    f, x = RingFeatures.of(kernel, grid_of(which)), jnp.array(inputs(which))
    expected = even_part(jnp.square(f.whitened(x)).sum(0), (f.ring.sizes,))
    np.testing.assert_allclose(f.power(x), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_optimal_mean_from_neighbours():
    """Of several outputs with an additive kernel; by the transpose of the same map."""
    x = rng.uniform(5, 30, (60, 2))
    y = np.stack([np.sin(x[:, 0]), np.cos(x[:, 1])], 1)
    kernel = K.Matern52(1.2).on(0) + K.Matern52(0.7, 1.2).on(1)
    found = []
    for neighbours in (None, 60):
        grid = dgp.Grid([0.0, 0.0], [40.0, 36.0], (80, 80), neighbours)
        f = open_gp(jnp.zeros((2, 160)), kernel, grid, outputs=2)
        found.append(dgp.rings.optimal_mean(f, x, y, 0.2))
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)
    assert float(jnp.abs(found[0]).max()) > 0.1


@pytest.mark.slow
def test_phases_keep_their_digits_at_many_points():
    """Products of indices beyond 32 bits, against Python's integers."""
    M, i, theta = 200_003, 177_777, 0.3
    f = RingFeatures.of(K.RBF(), Ring(0.0, M / 2, M))
    A = f.whitened(jnp.array([[(i + theta) / 2]]))[0]
    k = frequencies((M,))[:, 0]
    whole = np.array([i * int(q) % M for q in k]) / M
    phase = 2 * np.pi * (whole + theta * k / M)
    few = abs(k) < 0.4 * M  # two points per lengthscale: only one alias counts there
    np.testing.assert_allclose(A[few], (f.roots[8] * (np.cos(phase) + np.sin(phase)))[few], atol=1e-9)


@slow
def test_mean_at_many_points():
    """The mean of a layer of 100 000 points is that of a piece of it."""
    M, n = 100_000, 400
    v = rng.normal(size=n)
    at_sites = np.zeros(M)
    at_sites[70_000 : 70_000 + n] = v
    far = open_gp(hartley(jnp.array(at_sites), ((M,),)), K.RBF(), dgp.Grid(0.0, M / 2, M, 64))
    here = open_gp(hartley(jnp.array(v), ((n,),)), K.RBF(), dgp.Grid(0.0, n / 2, n))
    x = rng.uniform(40, n / 2 - 40, (20, 1))
    np.testing.assert_allclose(far(x + 35_000).mean, here(x).mean, atol=1e-5)


@slow
def test_minibatches_train():
    """Predictions of a fit with neighbours are those of a fit with all points."""
    x = jnp.array(np.sort(rng.uniform(8, 52, (300, 1)), 0))
    y = jnp.sin(x[:, 0]) + 0.3 * jnp.array(rng.normal(size=300))
    found = []
    for neighbours in (None, 48):
        grid = dgp.Grid(0.0, 60.0, 120, neighbours)
        guide = G.InducingPoint(program, inducing=G.Circulant())
        svi = SVI(program, guide, optax.adam(0.05), dgp.ELBO())
        result = svi.run(jax.random.key(0), 150, x, y, batch=100, grid=grid, progress_bar=False)
        at = jnp.linspace(10, 50, 30)[:, None]
        posterior = dgp.Posterior(program, guide, result.params)
        found.append((result.losses, posterior.predict(jax.random.key(1), at, grid=grid).mean))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-5)
    assert np.sqrt(np.square(found[1][1] - np.sin(np.linspace(10, 50, 30))).mean()) < 0.3


@slow
def test_the_contract_of_guides_in_a_deep_model():
    def deep(X, y=None):
        ls = numpyro.sample("ls", dist.LogNormal(jnp.zeros(2), 0.1).to_event(1))
        f = dgp.gp("f", K.Matern52(0.3, ls[0]), dgp.Grid(-20.0, 20.0, 80, 40), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", K.Matern52(1.0, ls[1]), dgp.Grid(-20.0, 20.0, 81, 41))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.2)), obs=y)

    x = jnp.array(np.sort(rng.uniform(-3, 3, (40, 1)), 0))
    testing.check_guide(deep, G.InducingPoint(deep, inducing=G.ScaledCirculant()), x, jnp.sin(2 * x[:, 0]))


@pytest.mark.long
def test_bad_input():
    with pytest.raises(ValueError, match=r"expected neighbours to be an integer from 2 on, .* got 1 for 1 dimension"):
        dgp.Grid(0.0, 1.0, 8, 1)
    with pytest.raises(ValueError, match=r"one per dimension, got \(4, 4\) for 1 dimension"):
        dgp.Grid(0.0, 1.0, 8, (4, 4))
    with pytest.raises(ValueError, match=r"expected the tol of Grid\.local to be positive"):
        grid_of("line").local(K.RBF(), tol=0.0)
    with pytest.raises(ValueError, match="has no spectral density"):
        grid_of("line").local(K.Linear())
    with pytest.raises(ValueError, match="expected a kernel with known hyperparameters, got traced ones"):
        jax.jit(lambda ls: grid_of("line").local(K.RBF(1.0, ls)).origin)(1.0)
    f = open_gp(jnp.zeros(120), K.RBF(1.0, 8.0), grid_of("line", 12))
    with pytest.raises(ValueError, match=r"expected the neighbours .* got \(12,\) with \d+ % of the weights in their"):
        f(inputs("line"))
    f = open_gp(jnp.zeros(120), K.RBF(1.0, 2.0), grid_of("line", 3))
    with pytest.raises(ValueError, match=r"expected the neighbours .* got \(3,\) with \d+ % of the weights in their"):
        f(inputs("line"))
    q = belief("scaled prior", prior_of(K.RBF(), grid_of("line")))
    with pytest.raises(ValueError, match=r"got \(16,\) with .* scaled=...\) at the largest"):
        open_gp(q, K.RBF(), grid_of("line", 16))(inputs("line"))
    f = open_gp(jnp.zeros(120), K.RBF(), grid_of("line", 32))
    with pytest.raises(ValueError, match=r"expected inputs on the ring, from 0.0 to 60.0, got 1 outside"):
        f(np.array([[61.0]]))
    with pytest.raises(ValueError, match=r"expected finite inputs of f\(x\), got 1 NaN"):
        f(np.array([[np.nan]]))
    with pytest.raises(ValueError, match=r"expected finite inputs of Grid\.around, got 1 NaN"):
        dgp.Grid.around(np.array([[0.0], [np.nan]]), 1.0)


@pytest.mark.slow
def test_collapsed_guides_are_for_points():
    x, guide = jnp.linspace(10, 50, 20)[:, None], G.Collapsed(program)
    with pytest.raises(ValueError, match=r"layer at 'y' to be on dgp.Points or a dgp.Basis, got RingFunction"):
        dgp.ELBO().loss(jax.random.key(0), {}, program, guide, x, jnp.sin(x[:, 0]), grid=grid_of("line"))


@pytest.mark.long
def test_coarse_grids_warn_with_the_number():
    with pytest.warns(UserWarning, match=r"gp 'f': a grid with steps of \[3\.\] leaves 100% of the variance .* open"):
        open_gp(jnp.zeros(20), K.RBF(1.0, 0.5), dgp.Grid(0.0, 60.0, 20))
    coarse = jax.jit(lambda ls: open_gp(jnp.ones(20), K.RBF(1.0, ls), dgp.Grid(0.0, 60.0, 20))(np.ones((1, 1))).mean)
    assert np.isfinite(coarse(0.5)).all()  # compiled programs do not look at values


@slow
def test_the_benchmark_runs(tmp_path):
    script = Path(__file__).parent.parent / "benchmarks" / "ring_scale.py"
    for part in ("neighbours", "figure"):
        command = [sys.executable, str(script), part, "--smoke", "--out", str(tmp_path)]
        assert "|" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert (tmp_path / "ring_scale.png").stat().st_size > 10_000


@pytest.mark.long
def test_too_large_for_all_grid_points_says_which_rules_are_not():
    """Found from shapes, before anything of the size is made."""
    grid = dgp.Grid(0.0, 25_000.0, 50_000, 16)
    x = jax.ShapeDtypeStruct((50_000, 1), jnp.float64)
    only_near = r"f\(x\) .* Circulant\(\) \(data everywhere\) or WhitenedSites\(\)"

    def moments(x, value, joint=False):
        f = open_gp(value, K.RBF(), grid)
        return f.joint(x).loc if joint else f(x).loc

    value = jnp.zeros(50_000)
    assert jax.eval_shape(moments, x, value).shape == (50_000,)
    with pytest.raises(ValueError, match=r"layer 'f': .* got 50000 x 50000 numbers: .*" + only_near):
        jax.eval_shape(lambda x: moments(x, value, joint=True), x)
    product = RingBelief(RingPrior((50_000,), value + 1, ((50_000,),)), value, value + 1, value + 1, value + 1)
    with pytest.raises(ValueError, match="rule ScaledProduct: expected a grid small enough for its divergence"):
        product.squared_norm()

    def model(x, y=None):
        f = dgp.gp("f", K.RBF(), grid)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, 0.1)), obs=y)

    guide = G.InducingPoint(model, inducing=G.Full())
    with pytest.raises(ValueError, match="rule Full: expected a grid small enough for its covariance, got 50000 x 500"):
        jax.eval_shape(lambda: numpyro.handlers.seed(guide, 0)(jnp.zeros((2, 1)), jnp.zeros(2)))
