"""Stochastic-gradient HMC: its step in closed form, its target against NUTS, honest minibatches."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dense import rbf, titsias
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, init_to_value
from programs import NOISE, X, Y, Z, agree, bayesian, deep, explicit, shallow
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import approx_fprime, minimize
from test_svgp import KZX, KZZ, optimum

import numpyro_dgp as dgp
from numpyro_dgp.mcmc import sghmc as langevin

rng = np.random.default_rng(0)


def run(model, *args, warmup=200, samples=400, chains=1, key=0, fields=("heat",), thinning=1, **options):
    mcmc = MCMC(
        dgp.mcmc.SGHMC(model, **options),
        num_warmup=warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method="vectorized",
        thinning=thinning,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(key), *args, extra_fields=fields)
    return mcmc


# --- one step


@pytest.mark.parametrize("friction", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("step_size", [0.01, 0.4])
def test_stationary_variance_of_a_step(friction, step_size):
    """The covariance that the step leaves unchanged, by a Lyapunov equation, against the formula of its docstring."""
    precision, mass, noise = 7.0, 2.0, 3.0
    key = jax.random.key(0)

    def move(state, gradient_noise=0.0, key=key):
        position, velocity = state
        gradient = precision * position + gradient_noise
        args = [a[None] for a in (position, velocity, gradient)]
        return jnp.concatenate(langevin.step(key, *args, mass, step_size, friction))

    A = jax.jacobian(move)(jnp.zeros(2))
    by_key = move(jnp.zeros(2)) / jax.random.normal(key, (1,))
    by_gradient = jax.jacobian(move, 1)(jnp.zeros(2), 0.0)
    a = step_size**2 * precision / mass
    for variance in (0.0, noise):
        Q = np.outer(by_key, by_key) + variance * np.outer(by_gradient, by_gradient)
        heat = langevin.heat(jnp.full(1, mass), jnp.full(1, variance), step_size, friction)
        found = solve_discrete_lyapunov(np.asarray(A), Q)[0, 0]
        np.testing.assert_allclose(found, (1 + heat / (1 - a / 4)) / precision, rtol=1e-9)


def test_adaptation_against_the_recursions():
    gradients = rng.normal(size=(50, 2, 3)) * np.array([1.0, 5.0, 0.1]) + np.array([0.0, 2.0, 3.0])
    tau, g, V, B = np.ones(3), np.zeros(3), np.ones(3), np.zeros(3)
    state = langevin.Adaptation.start(jnp.zeros(3))
    for first, second in gradients:
        w = 1 / (tau + 1)
        tau = 1 + tau * (1 - g**2 / V)
        g, V, B = g + w * (first - g), V + w * (first**2 - V), B + w * ((first - second) ** 2 / 2 - B)
        state = langevin.adapt(state, jnp.asarray(first), jnp.asarray(second))
    for found, expected in zip(state, (tau, g, V, B), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert (state.window >= 1).all()
    assert state.window[0] > 10 * state.window[2]  # long where noise dominates
    np.testing.assert_allclose(state.mass, np.sqrt(V))


@pytest.mark.smoke
def test_noise_is_measured_without_bias():
    start = langevin.Adaptation.start(jnp.zeros(2000))
    pairs = jnp.asarray(rng.normal(size=(300, 2, 2000)) * 3.0 + 1.0)
    state, _ = jax.lax.scan(lambda s, p: (langevin.adapt(s, p[0], p[1]), None), start, pairs)
    error = state.noise.std() / np.sqrt(2000)
    assert abs(state.noise.mean() - 9.0) < 4 * error + 0.1  # the start, zero, still has some weight


# --- the target

COUNT, SPREAD = 60, 0.7
DATA = jnp.asarray(rng.normal(size=COUNT))


def location(batch=None):
    m = numpyro.sample("m", dist.Normal(jnp.zeros(2), jnp.array([1.0, 3.0])).to_event(1))
    with numpyro.plate("data", COUNT, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(m[0] + 0.3 * m[1], SPREAD), obs=DATA[i])


def exact_covariance():
    direction = np.array([1.0, 0.3])
    return np.linalg.inv(np.diag([1.0, 1 / 9]) + COUNT / SPREAD**2 * np.outer(direction, direction))


@pytest.mark.long
def test_variance_on_a_gaussian():
    """On full data: within 3 % in every direction, at a step as large as its exactness allows."""
    fields = "heat", "temperature"
    mcmc = run(location, warmup=500, samples=4000, chains=60, step_size=0.3, friction=0.1, thinning=4, fields=fields)
    draws = np.asarray(mcmc.get_samples()["m"])
    ratios = np.linalg.eigvals(np.linalg.solve(exact_covariance(), np.cov(draws.T)))
    np.testing.assert_allclose(ratios, 1.0, atol=0.03)
    assert mcmc.get_extra_fields()["heat"].max() < 1e-20
    assert abs(mcmc.get_extra_fields(group_by_chain=True)["temperature"][:, -1].mean() - 1.0) < 0.03
    assert not mcmc.get_extra_fields()["diverging"].any()


def pooled(batch=None):
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", 8, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(m, SPREAD), obs=DATA[i])


@pytest.mark.long
@pytest.mark.parametrize(("step_size", "samples"), [(0.25, 600), (0.04, 4000)])
def test_variance_on_a_gaussian_with_minibatches(step_size, samples):
    """Batches of half the data: the formula of ``step`` for the variance;
    within 3 % of exact where the step is small."""
    precision = 1 + 8 / SPREAD**2
    mcmc = run(pooled, 4, warmup=600, samples=samples, chains=80, thinning=4, step_size=step_size, friction=0.1)
    heat = np.asarray(mcmc.get_extra_fields()["heat"])
    a = step_size**2 * precision / np.asarray(mcmc.last_state.adaptation.mass)
    ratio = np.asarray(mcmc.get_samples()["m"]).var() * precision
    expected = np.mean(1 + heat / (1 - a.mean() / 4))
    assert abs(ratio / expected - 1) < 0.05
    assert abs(ratio - 1) < 0.03 if step_size < 0.1 else expected > 1.3


@pytest.mark.long
def test_minibatch_gradients_are_unbiased():
    """The mean over all batches is the gradient over all data."""
    kernel, z = dgp.mcmc.SGHMC(shallow), {"g": jnp.linspace(-1, 1, 8)}
    x, y, key = X[:6], Y[:6], jax.random.key(0)

    def gradient(model, batch):
        kernel = dgp.mcmc.SGHMC(model)
        return jax.grad(lambda z: kernel.potential(key, z, (x, y, batch), {}))(z)["g"]

    full = jax.grad(lambda z: kernel.potential(key, z, (x, y), {}))(z)["g"]
    batches = [jnp.array(rows) for rows in combinations(range(6), 2)]
    each = [gradient(handlers.substitute(shallow, data={"data": rows}), 2) for rows in batches]
    np.testing.assert_allclose(np.mean(each, 0), full, rtol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("model", [deep, explicit])
def test_hidden_layers_are_integrated(model):
    """The mean of the potential is the bound at one v, by quadrature; it has new rows and new layers in every step."""
    white = {"f": 0.3 * jnp.ones((1, 8)), "g": jnp.linspace(-1, 1, 8)}
    kernel = dgp.mcmc.SGHMC(model)
    draw = jax.jit(lambda key: kernel.potential(key, white, (X, Y, 10), {}))
    draws = jax.lax.map(draw, jax.random.split(jax.random.key(0), 3000), batch_size=100)

    with handlers.seed(rng_seed=0), handlers.substitute(data=white):
        f = dgp.gp("f", dgp.kernels.RBF(0.3, 0.9), dgp.Points(jnp.linspace(-2, 2, 8)[:, None]), outputs=1,
                   mean=dgp.means.IdentityMean())  # fmt: skip
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(jnp.linspace(-2, 2, 8)[:, None]))
    nodes = dgp.likelihoods.GaussHermite(100).nodes(f(X).loc, f(X).variance)
    values = jax.vmap(lambda h: dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)).log_prob(Y))(nodes.points)
    prior = sum(dist.Normal().log_prob(v).sum() for v in white.values())
    assert agree(np.asarray(draws), np.full(2, -prior - nodes.mean(values[..., None])[:, 0].sum()), width=4.0)


@pytest.mark.long
def test_one_layer_against_the_exact_posterior():
    """One layer, Gaussian noise: Titsias' optimal q(v), with minibatches whose heat is small."""
    options = dict(step_size=0.1, friction=0.2)
    mcmc = run(shallow, X, Y, warmup=1000, samples=6000, chains=20, thinning=20, **options)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["g"])
    exact = optimum(KZZ, KZX)
    mean = np.asarray(exact["g_auto_loc"])
    sd = np.sqrt(np.diag(np.asarray(exact["g_auto_scale_tril"] @ exact["g_auto_scale_tril"].T)))
    error = draws.mean(1).std(0) / np.sqrt(20)
    assert (error < 0.1 * sd).all()
    assert (np.abs(draws.mean((0, 1)) - mean) < 4.5 * error).all()
    np.testing.assert_allclose(draws.reshape(-1, 8).std(0), sd, rtol=0.1)


def unknown(X, y=None, batch=None):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    shallow(X, y, batch, kernel=dgp.kernels.RBF(1.2, scale), noise=noise)


@pytest.mark.long
@pytest.mark.parametrize("batch", [None, 15])
def test_agrees_with_nuts(batch):
    """Hyperparameters too, means within Monte-Carlo error of both chains plus what the heat may do."""
    nuts = MCMC(NUTS(unknown), num_warmup=500, num_samples=4000, progress_bar=False)
    nuts.run(jax.random.key(1), X, Y)
    options = dict(step_size=0.1 if batch is None else 0.03, friction=0.1)
    samples, chains = (8000, 30) if batch is None else (20000, 30)
    mcmc = run(unknown, X, Y, batch, warmup=2000, samples=samples, chains=chains, thinning=20, **options)
    for name, values in nuts.get_samples().items():
        exact = np.asarray(values)
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)[name])
        size = numpyro.diagnostics.effective_sample_size(exact[None])
        error = np.sqrt(draws.mean(1).var(0) / chains + exact.var(0) / size)
        assert (
            np.abs(draws.mean((0, 1)) - exact.mean(0)) < 4.5 * error + (0 if batch is None else 0.1) * exact.std(0)
        ).all()
        ratio = draws.std((0, 1)) / exact.std(0)
        assert (np.abs(ratio - 1) < (0.12 if batch is None else 0.25)).all()


# --- parameters by moving-window Monte Carlo EM


def learned(X, y=None, batch=None):
    """One layer with its noise and lengthscale as parameters."""
    noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    numpyro.deterministic("precision", noise**-2)
    shallow(X, y, batch, Z=jnp.asarray(Z, X.dtype), kernel=dgp.kernels.RBF(1.2, scale), noise=noise)


def gram(scale):
    return [rbf(np.asarray(a), np.asarray(b), 1.2, scale) for a, b in ((Z, Z), (Z, X), (X, X))]


@pytest.mark.slow
def test_one_step_of_the_parameters():
    """Gradient ascent of log p(y, v | theta) at the new position: its density in dense algebra, finite differences."""

    def log_joint(log_theta, v):
        noise, scale = np.exp(log_theta)
        Kzz, Kzx, Kxx = gram(scale)
        A = np.linalg.solve(np.linalg.cholesky(Kzz), Kzx)
        loss = np.sum((np.asarray(Y) - A.T @ v) ** 2) + np.trace(Kxx) - np.sum(A**2)
        return -0.5 * (loss / noise**2 + len(X) * np.log(2 * np.pi * noise**2) + v @ v + 8 * np.log(2 * np.pi))

    kernel = dgp.mcmc.SGHMC(learned, {"scale": jnp.array(0.8)}, step_size=0.1, optim=optax.sgd(1e-4), window=1)
    start = kernel.init(jax.random.key(0), 5, None, (X, Y), {})
    step = jax.jit(lambda state: kernel.sample(state, (X, Y), {}))
    found = step(start)
    theta = np.array([start.z["noise"], start.z["scale"]])
    np.testing.assert_allclose(np.exp(theta), [0.5, 0.8])
    np.testing.assert_allclose(found.potential_energy, -log_joint(theta, np.asarray(start.z["g"])), rtol=1e-6)
    slope = approx_fprime(theta, log_joint, 1e-6, np.asarray(found.z["g"]))
    np.testing.assert_allclose([found.z["noise"], found.z["scale"]], theta + 1e-4 * slope, rtol=1e-5)
    after = step(found._replace(warmup_left=jnp.array(0)))
    assert (after.z["noise"], after.z["scale"]) == (found.z["noise"], found.z["scale"])
    assert not np.allclose(after.z["g"], found.z["g"])


def test_steps_are_taken_at_the_last_positions():
    kernel = dgp.mcmc.SGHMC(learned, step_size=0.1, optim=optax.sgd(1e-4), window=4)
    states = [kernel.init(jax.random.key(0), 9, None, (X, Y), {})]
    step = jax.jit(lambda state: kernel.sample(state, (X, Y), {}))
    for _ in range(6):
        states.append(step(states[-1]))
    recent = {tuple(row) for row in np.asarray(states[-1].learning.recent)}
    assert recent == {tuple(np.asarray(state.z["g"])) for state in states[-4:]}


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [
        pytest.param(None, jnp.float64, marks=pytest.mark.slow),
        pytest.param(15, jnp.float64, marks=pytest.mark.long),
        pytest.param(15, jnp.float32, marks=pytest.mark.long),
    ],
)
def test_parameters_maximise_the_marginal_likelihood(batch, dtype):
    """Noise and lengthscale near the maximum of the bound of Titsias, whose integral over v they see as draws."""
    y = np.asarray(Y)
    best = np.exp(minimize(lambda t: -titsias(y, np.exp(t[0]), *gram(np.exp(t[1])))[0], np.log([0.2, 0.8])).x)
    steps = 5000 if batch is None else 20000
    options = dict(step_size=0.2 if batch is None else 0.03, friction=0.1, window=10)
    optim = optax.adam(optax.cosine_decay_schedule(0.02, steps))
    with jax.enable_x64(dtype == jnp.float64):
        data = jnp.asarray(X, dtype), jnp.asarray(Y, dtype)
        draws = run(learned, *data, batch, warmup=steps, samples=10, optim=optim, **options).get_samples()
    assert draws["noise"].dtype == draws["g"].dtype == dtype
    found = np.array([draws["noise"][-1], draws["scale"][-1]])
    assert np.abs(found / best - 1).max() < (0.05 if batch is None else 0.1), (found, best)


@pytest.mark.long
def test_draws_have_the_learned_parameters():
    """The same for all draws of a chain, other ones in another; deterministic sites and predictions know them."""
    options = dict(warmup=30, samples=20, step_size=0.1, optim=optax.adam(0.02), window=5)
    draws = run(learned, X, Y, 10, chains=2, **options).get_samples(group_by_chain=True)
    assert {name: value.shape for name, value in draws.items()} == {
        "g": (2, 20, 8), "noise": (2, 20), "scale": (2, 20), "precision": (2, 20)
    }  # fmt: skip
    assert (draws["noise"] == draws["noise"][:, :1]).all()
    assert draws["noise"][0, 0] != draws["noise"][1, 0]
    np.testing.assert_allclose(draws["precision"], draws["noise"] ** -2.0)

    mcmc = run(learned, X, Y, 10, **options)
    draws = mcmc.get_samples()
    posterior = dgp.Posterior(learned, params={n: draws[n][-1] for n in ("noise", "scale")}, samples=draws)
    variance = posterior.predict(jax.random.key(1), X[:1]).variance
    assert variance > draws["noise"][-1] ** 2
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, X, Y, 10)  # goes on, with the same parameters
    assert (mcmc.get_samples()["noise"] == draws["noise"][-1]).all()


@pytest.mark.slow
def test_parameters_of_a_lost_step_are_dropped():
    """Where the density ends, the chain and its parameters go back to the last sound ones."""

    def program(y):
        shift = numpyro.param("shift", 0.0)
        m = numpyro.sample("m", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(m + shift, 1.0), obs=y)
        numpyro.factor("wall", jnp.where(jnp.abs(m) < 3.0, 0.0, jnp.nan))

    kernel = dgp.mcmc.SGHMC(program, step_size=0.1, optim=optax.adam(0.1))
    state = kernel.init(jax.random.key(0), 10, None, (1.0,), {})
    sound = {"m": jnp.array(1.0), "shift": jnp.array(0.2)}
    back = kernel.sample(state._replace(z={"m": jnp.array(5.0), "shift": jnp.array(7.0)}, sound=sound), (1.0,), {})
    assert back.z == sound
    assert np.isfinite(back.learning.recent).all()
    assert kernel.sample(back, (1.0,), {}).z["shift"] != 0.2


# --- behaviour


@pytest.mark.long
def test_predictions_from_its_draws():
    """A two-layer program with minibatches, several chains, and dgp.Posterior on what comes out."""
    mcmc = run(deep, X, Y, 10, warmup=300, samples=300, chains=2, step_size=0.05)
    draws = mcmc.get_samples()
    assert sorted(draws) == ["f", "g"]
    assert draws["f"].shape == (600, 1, 8)
    heat = mcmc.get_extra_fields(group_by_chain=True)["heat"]
    assert (heat == heat[:, :1]).all()  # fixed after warm-up
    assert (heat > 0).all()
    mixture = dgp.Posterior(deep, samples=draws).using(num_samples=50).predict(jax.random.key(1), X)
    assert np.sqrt(np.mean((mixture.mean - Y) ** 2)) < 0.4


@pytest.mark.long
def test_parameters_constraints_and_deterministic_sites():
    def program(X, y, batch=None):
        variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        numpyro.deterministic("double", 2 * noise)
        shallow(X, y, batch, kernel=dgp.kernels.RBF(variance, 0.7), noise=noise)

    start = init_to_value(values={"noise": jnp.array(0.4), "g": jnp.zeros(8)})
    mcmc = MCMC(
        dgp.mcmc.SGHMC(program, {"variance": jnp.array(1.2)}, init_strategy=start, adapt_mass=False, step_size=1e-3),
        num_warmup=0,
        num_samples=20,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), X, Y, 10, extra_fields=("z.noise", "velocity"))
    draws = mcmc.get_samples()
    np.testing.assert_allclose(draws["noise"], np.exp(mcmc.get_extra_fields()["z.noise"]))
    np.testing.assert_allclose(draws["double"], 2 * draws["noise"])
    np.testing.assert_allclose(draws["noise"][0], 0.4, rtol=0.02)
    assert not np.allclose(draws["g"][1:], draws["g"][:-1])


def cliff():
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(m, 1.0), obs=0.0)
    numpyro.factor("wall", jnp.where(jnp.abs(m) < 3.0, 0.0, -jnp.inf))


@pytest.mark.slow
@pytest.mark.parametrize("chains", [1, 2])
def test_a_step_too_large_is_an_error(chains):
    """A draw behind the end of the density is no draw: the run ends in an error that says which it was."""
    with pytest.raises(ValueError, match=r"finite density and gradient, got none at draw \d+ after warm-up: halve"):
        run(cliff, warmup=0, samples=300, step_size=3.0, friction=0.5, adapt_mass=False, chains=chains)


@pytest.mark.long
def test_a_chain_that_runs_away_is_an_error():
    """Its numbers stay finite, and have nothing to do with the target."""
    with pytest.raises(
        ValueError, match=r"expected velocities of temperature one, got .*e\+0\d on average over 90 draws"
    ):
        run(pooled, 4, warmup=10, samples=90, step_size=8.0)


@pytest.mark.slow
def test_warm_up_returns_from_where_the_density_ends():
    """The first steps of a warm-up may be too large: the chain goes back to the last sound place, at rest."""
    kernel = dgp.mcmc.SGHMC(cliff, step_size=0.1)
    state = kernel.init(jax.random.key(0), 10, None, (), {})
    away = state._replace(z={"m": jnp.array(5.0)}, sound={"m": jnp.array(1.0)}, velocity=jnp.ones(1))
    back = kernel.sample(away, (), {})
    assert back.z["m"] == 1.0
    assert back.velocity == 0.0
    assert back.diverging
    assert not back.lost
    after = kernel.sample(back, (), {})
    assert after.z["m"] != 1.0
    assert not after.diverging
    with pytest.raises(ValueError, match="got none at draw 3 after warm-up"):
        kernel.sample(away._replace(warmup_left=jnp.array(0), draws=jnp.array(3)), (), {})


@pytest.mark.long
def test_float32(x32):
    data = X.astype(jnp.float32), Y.astype(jnp.float32)

    def model(X, y):
        shallow(X, y, 10, Z=X[::4], kernel=dgp.kernels.RBF(1.2, 0.7))

    draws = run(model, *data, warmup=50, samples=50).get_samples()["g"]
    assert draws.dtype == jnp.float32
    assert np.isfinite(draws).all()


@pytest.mark.slow
def test_diagnostics_are_shown():
    kernel = dgp.mcmc.SGHMC(pooled)
    state = kernel.init(jax.random.key(0), 10, None, (4,), {})
    state = kernel.sample(state, (4,), {})
    assert "heat" in kernel.get_diagnostics_str(state)
    assert int(state.warmup_left) == 9
    assert kernel.sample_field == "z"


def normal(X, y=None):
    m = numpyro.sample("m", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(m, 1.0), obs=y)


def discrete(y):
    numpyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: dgp.mcmc.SGHMC(shallow, step_size=0.0), "expected a positive step_size, got 0.0"),
        (lambda: dgp.mcmc.SGHMC(shallow, friction=1.5), "expected 0 < friction <= 1, got 1.5"),
        (lambda: dgp.mcmc.SGHMC(shallow).postprocess_fn((), {}), "expected init before postprocess_fn"),
        (lambda: run(bayesian, X, Y, 10), "expected a value for every numpyro.param, got none for 'g_Z'"),
        (
            lambda: run(handlers.substitute(bayesian, data={"g_Z": jnp.zeros((8, 1))}), X, Y, 10),
            "expected global sites only under plate 'data', which takes minibatches, got the latent 'w'",
        ),
        (lambda: run(shallow, X), "expected a program that observes data, got none"),
        (lambda: run(normal, X), "expected a program that observes data, got none"),
        (lambda: run(discrete, 0.0), "expected continuous sites, got the discrete 'k'"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [dgp.mcmc.SGHMC, dgp.mcmc.Gibbs])
@pytest.mark.parametrize(
    "start", [{"a": jnp.zeros(2)}, {"a": jnp.zeros(()), "b": 0.0}, {"a": jnp.zeros(2), "b": 0.0, "c": 0.0}]
)
def test_a_chain_begins_with_all_sites(kernel, start):
    """A site without a value was drawn from its prior in every step, and was none of the chain."""

    def model(y):
        a, b = numpyro.sample("a", dist.Normal(jnp.zeros(2), 1.0).to_event(1)), numpyro.sample("b", dist.LogNormal())
        numpyro.sample("y", dist.Normal(a.sum(), b), obs=y)

    found = kernel(model).init(jax.random.key(0), 1, {"a": jnp.ones(2), "b": -1}, (0.0,), {})
    assert {name: value.tolist() for name, value in found.z.items()} == {"a": [1.0, 1.0], "b": -1.0}
    with pytest.raises(ValueError, match=r"expected init_params with an unconstrained value of every site, of shapes"):
        kernel(model).init(jax.random.key(0), 1, start, (0.0,), {})
