"""Natural gradients and full-batch optimisers against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from programs import NOISE, X, Y, Z, bayesian, bound, deep, random_params, shallow
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient, log_linear, minimize
from numpyro_dgp.optim.natural import gaussian_sites

ALL = ["mean/sqrt", "mean/cov", "mean/log", "natural", "natural/sqrt", "natural/log", "expectation"]


def optimum(kernel, x, z, y, noise):
    """The best q(v) of one layer under Gaussian noise: precision I + A'A / noise^2."""
    L = np.linalg.cholesky(np.asarray(kernel(z, z)) + 1e-10 * kernel.diag(z).mean() * np.eye(len(z)))
    A = np.linalg.solve(L, np.asarray(kernel(z, x))).T
    precision = np.eye(len(z)) + A.T @ A / noise**2
    return np.linalg.solve(precision, A.T @ np.asarray(y)) / noise**2, np.linalg.inv(precision)


def natural(model, step_size=1.0, other=None, guide=dgp.guides.InducingPoint, **kwargs):
    q = guide(model)
    return SVI(model, q, NaturalGradient(q, step_size, other or optax.sgd(0.0), **kwargs), dgp.ELBO())


def after_one_step(svi, *args, start=None, **kwargs):
    """The state and the parameters after one compiled step."""
    state = svi.init(jax.random.key(0), *args, init_params=start, **kwargs)
    state, _ = jax.jit(lambda s: svi.update(s, *args, **kwargs))(state)
    return state, svi.get_params(state)


@pytest.mark.long
@pytest.mark.smoke
@pytest.mark.parametrize("start", ["initial", "random"])
def test_one_step_of_size_one_is_the_collapsed_optimum(start):
    svi = natural(shallow)
    moved = None if start == "initial" else random_params(shallow, dgp.guides.InducingPoint(shallow), X, Y)
    state, params = after_one_step(svi, X, Y, start=moved)
    m, S = optimum(dgp.kernels.RBF(1.2, 0.7), X, Z, Y, NOISE)
    np.testing.assert_allclose(params["g_auto_loc"], m, atol=1e-6)
    L = params["g_auto_scale_tril"]
    np.testing.assert_allclose(L @ L.T, S, atol=1e-8)
    assert svi.optim.shortened(state)["g"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("coordinates", mostly_long(["natural", "expectation", "mean/sqrt"], ALL))
def test_all_coordinates_reach_the_same_optimum(coordinates):
    svi = natural(shallow, log_linear(1e-3, 0.5, 60), coordinates=coordinates)
    result = svi.run(jax.random.key(0), 150, X, Y, progress_bar=False)
    m, S = optimum(dgp.kernels.RBF(1.2, 0.7), X, Z, Y, NOISE)
    np.testing.assert_allclose(result.params["g_auto_loc"], m, atol=1e-4)
    L = result.params["g_auto_scale_tril"]
    np.testing.assert_allclose(L @ L.T, S, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("coordinates", mostly_long(["natural", "mean/sqrt"], ALL))
def test_small_steps_go_the_same_way_in_all_coordinates(coordinates):
    """Per unit of step size, the mean and the covariance change as in natural coordinates."""
    start = random_params(shallow, dgp.guides.InducingPoint(shallow), X, Y)

    def change(coordinates):
        _, params = after_one_step(natural(shallow, 1e-7, coordinates=coordinates), X, Y, start=start)
        before, after = start["g_auto_scale_tril"], params["g_auto_scale_tril"]
        moved = params["g_auto_loc"] - start["g_auto_loc"], after @ after.T - before @ before.T
        return [1e7 * a for a in moved]

    for found, expected in zip(change(coordinates), change("natural"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * float(jnp.abs(expected).max()))


@pytest.mark.slow
def test_no_step_at_the_optimum():
    m, S = optimum(dgp.kernels.RBF(1.2, 0.7), X, Z, Y, NOISE)
    start = {"g_auto_loc": jnp.asarray(m), "g_auto_scale_tril": jnp.linalg.cholesky(jnp.asarray(S))}
    _, params = after_one_step(natural(shallow, 0.3), X, Y, start=start)
    for name, value in start.items():
        np.testing.assert_allclose(params[name], value, atol=1e-6)


@pytest.mark.long
def test_one_step_on_the_last_of_two_layers_is_its_collapsed_optimum():
    """With the same inner draws: after the step the bound of these draws has no slope in q(u) of the last layer."""
    svi = natural(deep)
    state = svi.init(jax.random.key(0), X, Y)
    before, (_, params) = svi.get_params(state), after_one_step(svi, X, Y)
    for name in ("f_auto_loc", "f_auto_scale_tril"):
        np.testing.assert_array_equal(params[name], before[name])
    key = jax.random.split(state.rng_key)[1]  # as SVI.update splits

    def loss(last):
        return dgp.ELBO().loss(key, {**params, **last}, svi.model, svi.guide, X, Y)

    last = {name: value for name, value in params.items() if name.startswith("g_")}
    gradient = jax.jit(jax.grad(loss))
    slopes, start = gradient(last), gradient({name: before[name] for name in last})
    for name in last:
        scale = float(jnp.abs(start[name]).max())
        np.testing.assert_allclose(jnp.tril(slopes[name]) if "tril" in name else slopes[name], 0, atol=1e-7 * scale)


@pytest.mark.slow
def test_diagonal_posteriors_reach_the_diagonal_optimum():
    """Of a Gaussian target: its mean, and the reciprocals of the diagonal of its precision."""
    svi = natural(shallow, 0.1, guide=lambda m: dgp.guides.InducingPoint(m, inducing=dgp.guides.Diagonal()))
    result = svi.run(jax.random.key(0), 2000, X, Y, progress_bar=False)
    m, S = optimum(dgp.kernels.RBF(1.2, 0.7), X, Z, Y, NOISE)
    np.testing.assert_allclose(result.params["g_auto_loc"], m, atol=2e-3)  # coordinate-wise steps converge slowly
    np.testing.assert_allclose(result.params["g_auto_scale"], np.diag(np.linalg.inv(S)) ** -0.5, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("auto", [AutoNormal, pytest.param(AutoMultivariateNormal, marks=pytest.mark.long)])
def test_stock_guides(auto):
    """Their inducing values are Gaussian too; slopes are Monte-Carlo averages there."""
    guide = auto(shallow)
    sites = "last" if auto is AutoNormal else ["_auto_latent"]
    optimizer = NaturalGradient(guide, log_linear(1e-2, 0.05, 20), optax.sgd(0.0), sites=sites)
    svi = SVI(shallow, guide, optimizer, Trace_ELBO(num_particles=200))
    result = svi.run(jax.random.key(0), 1000, X, Y, progress_bar=False)
    m, S = optimum(dgp.kernels.RBF(1.2, 0.7), X, Z, Y, NOISE)
    mean = result.params["g_auto_loc" if auto is AutoNormal else "auto_loc"]
    error = np.asarray(mean) - m
    assert 0.5 * error @ np.linalg.solve(S, error) < 0.3  # nats below the optimum: flat directions converge slowly
    scale = result.params["g_auto_scale" if auto is AutoNormal else "auto_scale_tril"]
    expected = np.diag(np.linalg.inv(S)) ** -0.5 if auto is AutoNormal else np.linalg.cholesky(S)
    np.testing.assert_allclose(scale, expected, atol=0.1)


def latent_mean(y, batch=None):
    """A latent per datum whose posterior is known: N(y / 1.25, 0.2)."""
    with numpyro.plate("data", len(y), subsample_size=batch) as i:
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(w, 0.5), obs=y[i])


@pytest.mark.long
def test_steps_of_latents_are_relative_to_one_datum():
    """A full step on half of the data: those rows are near their optimum whatever the scale, the others untouched."""
    guide = dgp.guides.InducingPoint(latent_mean, latent=dgp.guides.Normal(1.0, loc=0.0))
    optimizer = NaturalGradient(guide, 1.0, optax.sgd(0.0), sites=["w"])
    svi = SVI(latent_mean, guide, optimizer, dgp.ELBO(num_particles=4000))
    _, params = after_one_step(svi, Y, batch=10)
    moved = np.flatnonzero(params["w_auto_scale"] != 1.0)
    assert len(moved) == 10
    np.testing.assert_array_equal(np.delete(params["w_auto_loc"], moved), 0.0)
    # The slopes are Monte-Carlo averages here: the error of 4000 draws with variance 4 + 4.
    np.testing.assert_allclose(params["w_auto_loc"][moved], Y[moved] / 1.25, atol=0.2)
    np.testing.assert_allclose(params["w_auto_scale"][moved], 0.2**0.5, atol=0.05)


@pytest.mark.slow
def test_the_scale_of_a_plate_is_that_of_this_fit():
    """Even where the guide has run on all data before."""
    guide = dgp.guides.InducingPoint(latent_mean, latent=dgp.guides.Normal(1.0, loc=0.0))
    for batch, scale in ((None, 1.0), (10, 3.0)):
        sites = handlers.trace(handlers.seed(guide, 0)).get_trace(Y, batch=batch)
        assert gaussian_sites(guide, sites)["w"].plate_scale == scale


@pytest.mark.long
@pytest.mark.parametrize("guide", [dgp.guides.InducingPoint, dgp.guides.MeanField])
@pytest.mark.parametrize("batch", [None, 10])
def test_all_sites_of_every_guide(guide, batch):
    """Deep, with a latent, hyperparameters and minibatches: everything stays finite and the bound rises."""
    svi = natural(bayesian, log_linear(1e-3, 0.05, 30), optax.adam(0.01), guide=guide, sites="all")
    result = svi.run(jax.random.key(0), 60, X, Y, batch=batch, progress_bar=False)
    assert jax.tree.all(jax.tree.map(lambda a: bool(jnp.isfinite(a).all()), result.params))
    assert jnp.median(result.losses[-10:]) < 0.6 * jnp.median(result.losses[:3])
    expected = {"f", "g", "w"} | ({"h"} if guide is dgp.guides.MeanField else set())
    assert set(NaturalGradient.shortened(result.state)) == expected


@pytest.mark.slow
def test_a_step_out_of_the_cone_is_shortened_and_counted():
    """A likelihood that is not log-concave and a start far away: the full step would have negative precision."""
    svi = natural(robust)
    start = {"g_auto_loc": jnp.zeros(8), "g_auto_scale_tril": 0.05 * jnp.eye(8)}
    state, params = after_one_step(svi, X, 8 * Y, start=start)
    assert svi.optim.shortened(state)["g"] == 1
    L = params["g_auto_scale_tril"]
    growth = np.linalg.eigvalsh(L @ L.T / 0.05**2)  # of the variance: at least half of the precision is left
    assert growth.min() > 0
    assert growth.max() <= 2 * (1 + 1e-6)


@pytest.mark.slow
def test_a_line_search_takes_the_whole_step_under_a_gaussian_likelihood_and_stays_at_the_optimum():
    svi = natural(shallow, line_search=True)
    state, params = after_one_step(svi, X, Y)
    m, _ = optimum(dgp.kernels.RBF(1.2, 0.7), X, Z, Y, NOISE)
    np.testing.assert_allclose(params["g_auto_loc"], m, atol=1e-6)
    assert state.optim_state[1].size == 1
    state, before = svi.update(state, X, Y)
    np.testing.assert_allclose(svi.evaluate(state, X, Y), before, rtol=1e-9)


def robust(X, y=None):
    g = dgp.gp("g", dgp.kernels.RBF(4.0, 0.7), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.StudentT(1.0, v, 0.05)), obs=y)


@pytest.mark.slow
def test_a_line_search_follows_the_ladder_of_halves():
    """Each size is that of a search over whole updates; losses fall; the end is that of L-BFGS."""
    y, key = 2 * Y, jax.random.key(0)
    svi = natural(robust, line_search=True)
    start = {"g_auto_loc": jnp.zeros(8), "g_auto_scale_tril": 0.05 * jnp.eye(8)}
    state = svi.init(key, X, y, init_params=start)
    update = jax.jit(lambda s: svi.update(s, X, y))
    eager, compiled = (move(state)[0].optim_state[1] for move in (lambda s: svi.update(s, X, y), update))
    assert eager.size == compiled.size
    for name in start:
        np.testing.assert_allclose(compiled.params[name], eager.params[name], rtol=1e-8, atol=1e-10)

    @jax.jit
    def loss_after(params, size):
        fixed = natural(robust, lambda _: size)
        moved, loss = fixed.update(fixed.init(key, X, y, init_params=params), X, y)
        return loss, fixed.evaluate(moved, X, y)

    losses, sizes = [], [1.0]
    for step in range(25):
        params, size = svi.get_params(state), min(1.0, 2 * sizes[-1])
        expected, lowest, rises = 1e-6, np.inf, False
        while step < 10 and size >= 1e-6 and not rises:
            loss, found = loss_after(params, size)
            lowest, better = min(lowest, loss), found < min(lowest, loss)
            rises = not better and lowest < loss
            expected, lowest = (size, found) if better else (expected, lowest)
            size /= 2
        state, loss = update(state)
        losses.append(float(loss))
        sizes.append(float(state.optim_state[1].size))
        assert step >= 10 or sizes[-1] == expected
    assert (np.diff(losses[:15]) < 0).all()
    assert min(sizes) < 1
    best = minimize(robust, dgp.guides.InducingPoint(robust), key, X, y, progress_bar=False)
    np.testing.assert_allclose(losses[-1], best.losses[-1], atol=1e-4)


@pytest.mark.slow
def test_a_line_search_finds_tiny_sizes():
    """In mean/sqrt coordinates the first size under a Gaussian likelihood of little noise has to be tiny."""
    noise = 0.02

    def precise(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, noise)), obs=y)

    svi = natural(precise, coordinates="mean/sqrt", line_search=True)
    state, losses = svi.init(jax.random.key(0), X, Y), []
    for _ in range(5):
        state, loss = jax.jit(svi.update)(state, X, Y)
        losses.append(float(loss))
    assert state.optim_state[1].size < 1e-3
    assert (np.diff(losses) < 0).all()


@pytest.mark.slow
def test_one_bad_gaussian_does_not_shorten_the_others():
    """Two outputs, one with a likelihood that pushes out of the cone."""

    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z), outputs=2)
        with numpyro.plate("data", len(X)):
            likelihood = dgp.Likelihood(
                g(X), lambda v: dist.StudentT(jnp.array([1e6, 1.0]), v, jnp.array([NOISE, 0.05])).to_event(1)
            )
            numpyro.sample("y", likelihood, obs=y)

    svi = natural(model)
    y = jnp.stack([Y, 8 * Y], -1)
    start = {"g_auto_loc": jnp.zeros((2, 8)), "g_auto_scale_tril": jnp.stack([jnp.eye(8), 0.05 * jnp.eye(8)])}
    state, params = after_one_step(svi, X, y, start=start)
    m, _ = optimum(dgp.kernels.RBF(), X, Z, Y, NOISE)
    assert svi.optim.shortened(state)["g"] == 1
    np.testing.assert_allclose(params["g_auto_loc"][0], m, atol=0.02)  # Student-t is nearly normal


@pytest.mark.long
def test_single_precision():
    svi = natural(bayesian, 0.05, optax.adam(0.01), sites="all")
    x, y = X.astype(jnp.float32), Y.astype(jnp.float32)
    result = svi.run(jax.random.key(0), 20, x, y, progress_bar=False)
    gaussians = {n: v for n, v in result.params.items() if n.split("_")[0] in ("f", "g", "w")}
    assert jnp.isfinite(result.losses).all()
    assert all(jnp.isfinite(v).all() for v in gaussians.values())


@pytest.mark.long
def test_checkpoints_and_stable_updates(tmp_path):
    """A resumed fit goes on bit by bit, its count of shortened steps included."""

    def run(steps, file):
        svi = natural(deep, 0.5, optax.adam(0.01), sites="all")
        return dgp.fit(
            svi,
            jax.random.key(0),
            steps,
            X,
            Y,
            checkpoint=dgp.Checkpoint(file, every=5),
            stable_update=True,
            progress_bar=False,
        )

    run(5, tmp_path / "a")
    resumed, whole = run(10, tmp_path / "a"), run(10, tmp_path / "b")
    for name in whole.params:
        np.testing.assert_array_equal(resumed.params[name], whole.params[name])
    assert NaturalGradient.shortened(resumed.state) == NaturalGradient.shortened(whole.state)


@pytest.mark.long
@pytest.mark.parametrize("method", ["L-BFGS", "CG"])
def test_full_batch_methods_reach_the_collapsed_optimum(method):
    svi = SVI(shallow, dgp.guides.InducingPoint(shallow), optax.sgd(0.0), dgp.ELBO())
    found = minimize(svi, jax.random.key(0), X, Y, method=method, max_steps=3000, progress_bar=False)
    one_step = natural(shallow)
    _, best = after_one_step(one_step, X, Y)
    expected = bound(dgp.ELBO(), best, shallow, one_step.guide, X, Y)
    np.testing.assert_allclose(-found.losses[-1], expected, atol=1e-2)
    np.testing.assert_allclose(bound(dgp.ELBO(), found.params, shallow, svi.guide, X, Y), -found.losses[-1], rtol=1e-8)
    assert found.converged
    assert method in found.report


@pytest.mark.slow
def test_full_batch_reports_that_it_ran_out_of_steps():
    guide, key = dgp.guides.InducingPoint(shallow), jax.random.key(0)
    found = minimize(shallow, guide, key, X, Y, max_steps=2, progress_bar=False)
    assert not found.converged
    assert len(found.losses) == 3
    assert "2 iterations" in found.report
    svi = SVI(shallow, guide, optax.sgd(0.0), dgp.ELBO())
    np.testing.assert_array_equal(minimize(svi, key, X, Y, max_steps=2, progress_bar=False).losses, found.losses)
    named = minimize(shallow, guide, key, X, y=Y, max_steps=2, progress_bar=False)
    np.testing.assert_array_equal(named.losses, found.losses)


def slope(X, y):
    s = numpyro.sample("s", dist.Normal())
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(s * X[:, 0], 0.5), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("value", [jnp.nan, -0.1, jnp.inf])
def test_a_schedule_that_stops_being_a_step_size_is_an_error_that_names_the_step(value):
    """And not steps that are never taken, or that go uphill."""
    svi = natural(slope, lambda t: jnp.where(t < 3, 0.5, value), guide=AutoNormal, sites="s")
    message = r"expected a schedule of step sizes that are finite and not negative, got \S+ at step 3"
    with pytest.raises(ValueError, match=rf"fit: the loss became nan at step 5: NaturalGradient.*: {message}"):
        dgp.fit(svi, jax.random.key(0), 10, X, Y, progress_bar=False)
    with pytest.raises(ValueError, match=message):  # stock steps, the last of which is the bad one
        svi.run(jax.random.key(0), 4, X, Y, progress_bar=False)
    assert np.isfinite(dgp.fit(svi, jax.random.key(0), 3, X, Y, progress_bar=False).losses).all()


@pytest.mark.smoke
def test_ramp():
    ramp = log_linear(1e-4, 1e-1, 5)
    np.testing.assert_allclose([ramp(0), ramp(5), ramp(50)], [1e-4, 1e-1, 1e-1], rtol=1e-6)
    np.testing.assert_allclose(jnp.diff(jnp.log(jnp.stack([ramp(t) for t in range(6)]))), np.log(1e3) / 5, rtol=1e-6)


@pytest.mark.slow
def test_bad_input():
    guide = dgp.guides.InducingPoint(shallow)
    with pytest.raises(ValueError, match=r"expected one of dgp.guides, AutoNormal.*got function"):
        NaturalGradient(shallow, 0.1, optax.adam(0.01))
    with pytest.raises(ValueError, match=r"expected coordinates among .*got 'precision'"):
        NaturalGradient(guide, 0.1, optax.adam(0.01), coordinates="precision")
    with pytest.raises(ValueError, match=r"NaturalGradient: expected a positive step_size, got -0.1"):
        NaturalGradient(guide, -0.1, optax.adam(0.01))
    with pytest.raises(ValueError, match=r"log_linear: expected a positive final, got 0.0"):
        log_linear(1e-4, 0.0, 5)
    with pytest.raises(ValueError, match=r"sites with Gaussian posteriors, got sites=\['q'\]: the guide has \['g'\]"):
        natural(shallow, sites=["q"]).init(jax.random.key(0), X, Y)
    with pytest.raises(ValueError, match=r"got sites=\['noise'\]: the guide has \['f', 'g', 'w'\]"):
        natural(bayesian, sites=["noise"]).init(jax.random.key(0), X, Y)  # a point, not a Gaussian
    svi = SVI(shallow, guide, optax.sgd(0.0), dgp.ELBO())
    with pytest.raises(ValueError, match=r'expected method "L-BFGS" or "CG", got \'newton\''):
        minimize(svi, jax.random.key(0), X, Y, method="newton")
    with pytest.raises(ValueError, match=r"minimize: expected a program over all data.*takes 10 of 30 rows"):
        minimize(svi, jax.random.key(0), X, Y, batch=10)
    with pytest.raises(ValueError, match=r"NaN or infinite|finite"):
        minimize(svi, jax.random.key(0), X.at[0].set(jnp.nan), Y)


def with_scale(X, y=None):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    f = dgp.gp("f", dgp.kernels.RBF(scale), dgp.Points(jnp.linspace(-1, 1, 3)[:, None]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("stable", [False, True])
def test_optimisers_beside_natural_gradients_get_the_loss(stable, key):
    """Polyak's step size is the loss over the square of the gradient, here that of the one other parameter."""
    x = jnp.linspace(-1, 1, 5)[:, None]
    guide = dgp.guides.InducingPoint(with_scale)
    svi = SVI(with_scale, guide, NaturalGradient(guide, 0.1, optax.polyak_sgd(1e9)), dgp.ELBO())
    state = svi.init(key, x, x[:, 0])
    free = svi.optim.get_params(state.optim_state)

    def loss(scale):
        params = svi.constrain_fn(free | {"scale": scale})
        return dgp.ELBO().loss(key, params, with_scale, guide, x, x[:, 0])

    value, slope = jax.value_and_grad(loss)(free["scale"])
    step = svi.stable_update if stable else svi.update
    moved = svi.optim.get_params(step(state, x, x[:, 0])[0].optim_state)
    np.testing.assert_allclose(moved["scale"], free["scale"] - value / slope, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("natural", [False, True])
def test_optimisers_that_evaluate_the_loss_are_refused(natural, key):
    x = jnp.linspace(-1, 1, 5)[:, None]
    guide = dgp.guides.InducingPoint(with_scale)
    optimizer = NaturalGradient(guide, 0.1, optax.lbfgs()) if natural else optax.lbfgs()
    svi = SVI(with_scale, guide, optimizer, dgp.ELBO())
    with pytest.raises(
        ValueError, match=r"expected an optimiser that steps by a gradient and its loss.*optim.minimize"
    ):
        dgp.fit(svi, key, 2, x, x[:, 0], progress_bar=False)
    assert minimize(svi, key, x, x[:, 0], max_steps=1, progress_bar=False).params.keys() >= {"scale"}
