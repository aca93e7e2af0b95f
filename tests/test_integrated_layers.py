"""Layers under Gaussian likelihoods, integrated by ``for_mcmc``: the density, the draws, and what is left alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import constrain_fn, log_density
from programs import NOISE, X, Y, Z, deep, shallow
from scipy.stats import multivariate_normal
from sizes import mostly_long

import numpyro_dgp as dgp

ROWS = X[::3]
COLUMNS = jnp.stack([Y, jnp.cos(X[:, 0])], -1)[::3]
TARGET = Y[::3]


def program(
    x=ROWS,
    y=None,
    *,
    outputs=None,
    collapse="bound",
    noise=NOISE,
    mask=None,
    obs_scale=None,
    process_noise=None,
    kernels=dgp.kernels.RBF(1.2, 0.7),
    conditional=lambda v, s: dist.Normal(2 * v + 0.3, s),
    rest=lambda g, h: None,
):
    """Two layers with a random noise and a random lengthscale; the keywords vary the last one."""
    s = numpyro.sample("s", dist.LogNormal(jnp.log(jnp.asarray(noise)), 0.3).to_event(np.ndim(noise)))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    f = dgp.gp("f", dgp.kernels.RBF(0.3, scale), dgp.Points(Z[::3]), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", kernels, dgp.Points(Z[::2]), outputs=outputs, mean=dgp.means.ConstantMean(0.2))
    with numpyro.plate("data", len(x)):
        h = numpyro.sample("h", f(x))
        event = 0 if outputs is None else 1
        likelihood = dgp.Likelihood(
            g(h, noise=process_noise), lambda v: conditional(v, s).to_event(event), collapse=collapse
        )
        with handlers.mask(mask=True if mask is None else mask), handlers.scale(scale=obs_scale or 1.0):
            numpyro.sample("y", likelihood, obs=y)
        rest(g, h)


def twice(g, h):
    numpyro.sample("z", dgp.Likelihood(g(0.5 * h), lambda v: dist.Normal(-v, 0.5)), obs=TARGET[::-1])


CASES = {
    "bound": {},
    "marginal": {"collapse": "marginal"},
    "shared noise": {"outputs": 2},
    "a noise for each output": {"outputs": 2, "noise": (0.3, 0.6)},
    "a kernel for each output": {"outputs": 2, "kernels": (dgp.kernels.RBF(1.2, 0.7), dgp.kernels.Matern32(0.8, 0.5))},
    "process noise": {"process_noise": 0.4},
    "process noise, marginal": {"process_noise": 0.4, "collapse": "marginal", "outputs": 2},
    "mask and scale": {"mask": jnp.arange(len(ROWS)) % 3 > 0, "obs_scale": 2.5},
    "two likelihoods": {"rest": twice},
    "a noise that depends on the datum": {"conditional": lambda v, s: dist.Normal(v * ROWS[:, 0], s + ROWS[:, 0] ** 2)},
}


def data(case):
    return ROWS, COLUMNS if CASES[case].get("outputs") else TARGET


def prior_draw(model, args, seed):
    """Values of all sampled sites of a program that is not integrated."""
    with handlers.seed(rng_seed=seed), handlers.trace() as sites:
        dgp.for_mcmc(model, collapse=False)(*args)
    return {n: s["value"] for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}


def directions(size):
    """Points at which a quadratic function of this many variables is known when its values are."""
    e = np.eye(size)
    pairs = [(i, j) for i in range(size) for j in range(i)]
    return np.concatenate([np.zeros((1, size)), e, -e, [e[i] + e[j] for i, j in pairs]]), pairs


def integral(values, pairs):
    """log of the integral of exp of a quadratic function with these values at ``directions``, and the mean and
    covariance of the Gaussian."""
    size = (len(values) - 1 - len(pairs)) // 2
    at_zero, plus, minus, both = np.split(np.asarray(values), [1, 1 + size, 1 + 2 * size])
    precision = np.diag(-(plus + minus - 2 * at_zero))
    for (i, j), value in zip(pairs, both, strict=True):
        precision[i, j] = precision[j, i] = -(value - plus[i] - plus[j] + at_zero[0])
    mean = np.linalg.solve(precision, (plus - minus) / 2)
    log_det = np.linalg.slogdet(precision / (2 * np.pi))[1]
    return at_zero[0] + 0.5 * mean @ precision @ mean - 0.5 * log_det, mean, np.linalg.inv(precision)


@pytest.mark.slow
@pytest.mark.parametrize("case", mostly_long(["bound"], list(CASES)))
def test_the_density_is_the_integral(case):
    """Collapsed minus log of the integral over v of the program as it is sampled otherwise, at random other values."""
    model, args = partial(program, **CASES[case]), data(case)
    values = prior_draw(model, args, 1)
    v = values.pop("g")
    probes, pairs = directions(v.size)
    probes = np.concatenate([probes, [3 * v.ravel()]])

    @jax.jit
    def both(values):
        bare = dgp.for_mcmc(model, collapse=False)
        at = jax.vmap(lambda u: log_density(bare, args, {}, values | {"g": u.reshape(v.shape)})[0])(probes)
        found, sites = log_density(dgp.for_mcmc(model, collapse=True), args, {}, values)
        return at, found, sites["g"]["value"]

    (*at, further), found, draw = both(values)
    exact, mean, covariance = integral(at, pairs)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-8)
    gaussian = multivariate_normal(mean, covariance).logpdf(3 * v.ravel())
    np.testing.assert_allclose(further - exact, gaussian, rtol=0, atol=1e-7)  # it is quadratic in v
    assert draw.shape == v.shape
    assert np.abs(np.linalg.solve(np.linalg.cholesky(covariance), draw.ravel() - mean)).max() < 5


@pytest.mark.long
def test_draws_have_the_moments_of_the_posterior():
    """At random hyperparameters near one place: the residuals from the exact means are independent and standard."""
    model = partial(program, noise=0.5)
    bare, collapsed = dgp.for_mcmc(model, collapse=False), dgp.for_mcmc(model, collapse=True)
    base = prior_draw(model, (ROWS, TARGET), 0)
    v = base.pop("g")
    probes, pairs = directions(v.size)

    @jax.jit
    @jax.vmap
    def run(shift):
        values = base | {"scale": base["scale"] * jnp.exp(1e-3 * shift)}
        at = jax.vmap(lambda u: log_density(bare, (ROWS, TARGET), {}, values | {"g": u})[0])(probes)
        return at, log_density(collapsed, (ROWS, TARGET), {}, values)[1]["g"]["value"]

    draws = []
    for at, draw in zip(*map(np.asarray, run(jax.random.normal(jax.random.key(0), (4000,)))), strict=True):
        _, mean, covariance = integral(at, pairs)
        draws.append(np.linalg.solve(np.linalg.cholesky(covariance), draw - mean))
    draws = np.stack(draws)
    np.testing.assert_allclose(draws.mean(0), 0, atol=5 / np.sqrt(4000))
    np.testing.assert_allclose(draws.T @ draws / 4000, np.eye(v.size), atol=0.12)
    lag = (draws[1:] * draws[:-1]).mean(0)
    np.testing.assert_allclose(lag, 0, atol=5 / np.sqrt(4000))


def sampled(model, *args, collapse="auto"):
    found = set()

    def run():
        with handlers.seed(rng_seed=0), handlers.trace() as sites:
            dgp.for_mcmc(model, collapse=collapse)(*args)
        found.update(n for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"])

    jax.eval_shape(run)
    return found


def two_functions(x=ROWS, y=None):
    """Of which one has no random hyperparameters, and the other is seen by no Gaussian likelihood."""
    a, b = (dgp.gp(name, dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z)) for name in "ab")
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dgp.Likelihood(a(x), lambda v: dist.Normal(v, 0.3)), obs=y)
        numpyro.sample("z", dgp.Likelihood(b(x), lambda v: dist.Poisson(jnp.exp(v))), obs=jnp.ones(len(x)))


@pytest.mark.slow
def test_which_sites_are_sampled():
    assert sampled(program, ROWS, TARGET) == {"s", "scale", "f", "h_white"}
    assert sampled(program, ROWS, TARGET, collapse=False) == {"s", "scale", "f", "h_white", "g"}
    assert "g" in sampled(program, ROWS)  # nothing is observed
    assert sampled(shallow, X, Y) == {"g"}  # nothing else is random
    assert sampled(two_functions, ROWS, TARGET) == {"b"}
    scoped = handlers.scope(program, prefix="inside")
    assert "inside/g" not in sampled(scoped, ROWS, TARGET)


def heteroscedastic(g, h):
    numpyro.sample("z", dist.Normal(0.0, jnp.exp(g(h).mean)), obs=TARGET)


REFUSED = {
    "another likelihood": (
        {"conditional": lambda v, s: dist.StudentT(4.0, v, s)},
        "'g': the likelihood at 'y' is StudentT, and not",
    ),
    "a curved mean": ({"conditional": lambda v, s: dist.Normal(v**2, s)}, "'g': the likelihood at 'y' is Normal, and"),
    "a second use": ({"rest": heteroscedastic}, "'g': 'z' depends on it"),
    "a deterministic site": (
        {"rest": lambda g, h: numpyro.deterministic("z", g(h).mean)},
        "'f': 'h' depends on it; 'g': 'z' depends on it",
    ),
    "values of it drawn": ({"rest": lambda g, h: numpyro.sample("z", g(h))}, "'g': 'z' depends on it"),
    "unobserved": (
        {"rest": lambda g, h: numpyro.sample("z", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 1.0)))},
        "'g': 'z' is not observed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_in_the_way(case):
    settings, message = REFUSED[case]
    model = partial(program, **settings)
    assert "g" in sampled(model, ROWS, TARGET)
    with pytest.raises(ValueError, match=f"for_mcmc: expected collapse=True for a program with a layer.*{message}"):
        sampled(model, ROWS, TARGET, collapse=True)


def other_program(inducing, use, x=ROWS, y=None):
    with handlers.scale(scale=0.5) if use == "scaled" else handlers.mask(mask=True):
        g = dgp.gp("g", dgp.kernels.RBF(), inducing, outputs=2 if use == "mixed" else None)
    if use == "drawn":
        numpyro.sample("y", g(x, noise=0.1), obs=y)
        return
    with numpyro.plate("data", len(x)):
        values = g(x).mix(jnp.ones((2, 2))) if use == "mixed" else g(x)
        numpyro.sample("y", dgp.Likelihood(values, lambda v: dist.Normal(v, 1.0).to_event(v.ndim - 1)), obs=y)


@pytest.mark.parametrize(
    ("inducing", "use", "y", "message"),
    [
        (dgp.Points(Z), "scaled", TARGET, "'g': its inducing values are observed, scaled or masked"),
        (dgp.Points(Z), "mixed", COLUMNS, "'g': the likelihood at 'y' depends on mixtures of its outputs"),
        (dgp.Grid(-3.0, 3.0, 16), "plain", TARGET, "'g': it is on a RingFunction and not on dgp.Points"),
        (None, "drawn", TARGET, "got no inducing values"),
    ],
)
def test_other_layers(inducing, use, y, message):
    model = partial(other_program, inducing, use)
    sampled(model, ROWS, y)
    with pytest.raises(ValueError, match=message):
        sampled(model, ROWS, y, collapse=True)


@pytest.mark.long
def test_numpy_arrays():
    """Rows that the indices of a plate pick, and settings of which the program needs the values of NumPy arrays."""

    def model(X, y):
        size = int(X[0, 0] > 5)
        numpyro.sample("noise", dist.LogNormal(0.0, 1.0).expand([size + 1]).to_event(1))
        shallow(X, y)

    numbers = np.asarray(X), np.asarray(Y)
    cases = (shallow_and_noise, numbers, "deterministic"), (model, numbers, "deterministic"), (model, (X, Y), "sample")
    for program, args, kind in cases:
        with handlers.seed(rng_seed=0), handlers.trace() as sites:
            dgp.for_mcmc(program)(*args)
        assert sites["g"]["type"] == kind
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match="got one that needs the values of its arguments"):
        dgp.for_mcmc(model, collapse=True)(X, Y)


def test_settings():
    with pytest.raises(ValueError, match="expected collapse to be \"auto\", True or False, got 'yes'"):
        dgp.for_mcmc(deep, collapse="yes")
    with pytest.raises(ValueError, match="got 'g': nothing else is left to sample, its posterior is the Gaussian of"):
        sampled(shallow, X, Y, collapse=True)
    with pytest.raises(ValueError, match="got plate 'data' that takes 7 of 30 rows"):
        sampled(deep, X, Y, 7, collapse=True)


def shallow_and_noise(X, y=None):
    shallow(X, y, noise=numpyro.sample("noise", dist.LogNormal(-1.0, 0.5)))


G_AT, H_AT = jnp.linspace(-0.3, 0.4, len(Z[::2])), jnp.linspace(-1.0, 1.0, len(ROWS))[:, None]
OUTSIDE = {
    "integrated": ({}, {"g": G_AT}, "g"),
    "non-centred": ({"collapse": False}, {"h": H_AT}, "h"),
    "both": ({}, {"g": G_AT, "h": H_AT, "s": 0.2}, "h', 'g"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OUTSIDE)
def test_a_condition_from_outside_is_refused_where_it_would_change_nothing(case):
    settings, data, names = OUTSIDE[case]
    message = f"conditions on sites that the program samples, got one on '{names}', .*: condition the program first, d"
    prepared = dgp.for_mcmc(program, **settings)
    for wrong in (
        handlers.condition(prepared, data=data),
        handlers.condition(prepared, condition_fn=lambda msg: data.get(msg["name"])),
        handlers.condition(handlers.scope(prepared, prefix="a"), data={f"a/{name}": v for name, v in data.items()}),
    ):
        with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=message):
            wrong(ROWS, TARGET)
    with pytest.raises(ValueError, match=message):
        NUTS(handlers.condition(prepared, data=data)).init(jax.random.key(0), 1, None, (ROWS, TARGET), {})
    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        dgp.for_mcmc(handlers.condition(program, data=data), **settings)(ROWS, TARGET)
    assert all(sites[name]["is_observed"] for name in data)


@pytest.mark.slow
@pytest.mark.parametrize("make", [AutoNormal, AutoMultivariateNormal])
def test_a_condition_from_outside_is_refused_in_coordinates_of_a_guide(make):
    """One number behind each site, or one vector behind all."""
    guide = make(shallow_and_noise)
    svi = SVI(shallow_and_noise, guide, optax.adam(0.01), dgp.ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    prepared = dgp.for_mcmc(shallow_and_noise, guide=guide, params=params, collapse=False)
    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        prepared(X, Y)
    draws = {name: site["value"] for name, site in sites.items() if site["type"] in ("sample", "deterministic")}
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match="program samples, got one on 'noise', which it"):
        handlers.condition(prepared, data={"noise": 0.3})(X, Y)
    with handlers.seed(rng_seed=0), handlers.trace() as again:  # draws of a chain hold the numbers behind too
        handlers.condition(prepared, data=draws)(X, Y)
    np.testing.assert_allclose(again["noise"]["value"], draws["noise"], rtol=1e-6)


@pytest.mark.slow
def test_a_condition_from_outside_on_all_that_is_sampled():
    """It would leave the integrated layer with a single draw."""
    wrong = handlers.condition(dgp.for_mcmc(shallow_and_noise), data={"noise": 0.3})
    with pytest.raises(ValueError, match=r"sites to sample next to the integrated \['g'\], got a condition on all"):
        wrong(X, Y)


@pytest.mark.slow
def test_a_condition_from_outside_on_what_is_sampled():
    """It is one of the program, also beside values of what follows from it."""
    inside = handlers.condition(program, data={"s": 0.2})
    values = prior_draw(inside, (ROWS, TARGET), 0)
    outside = [{"s": 0.2}, {"s": 0.2, "h": H_AT, "h_white": values["h_white"]}]
    programs = [dgp.for_mcmc(inside), *(handlers.condition(dgp.for_mcmc(program), data=data) for data in outside)]
    expected, *found = (log_density(p, (ROWS, TARGET), {}, values)[0] for p in programs)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
def test_values_of_integrated_layers_may_be_substituted():
    """As NumPyro does with the draws of a chain, among which they are."""
    prepared = dgp.for_mcmc(shallow_and_noise)
    alone, beside = (log_density(prepared, (X, Y), {}, {"noise": 0.3} | g)[0] for g in ({}, {"g": jnp.ones(8)}))
    assert alone == beside
    drawn = {"noise": jnp.full(3, 0.3), "g": jnp.ones((3, 8))}
    assert Predictive(prepared, drawn)(jax.random.key(0), X, Y)["g"].shape == (3, 8)
    assert Predictive(prepared, drawn)(jax.random.key(0), X[:3])["y"].shape == (3, 3)


@pytest.mark.slow
def test_draws_are_new_at_every_position_of_a_chain():
    program = dgp.for_mcmc(shallow_and_noise)
    at = lambda z: constrain_fn(program, (X, Y), {}, {"noise": z}, return_deterministic=True)["g"]  # noqa: E731
    first, again, other = jax.jit(jax.vmap(at))(jnp.array([-1.0, -1.0, np.nextafter(-1.0, 0.0)]))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()


@pytest.mark.long
def test_draws_of_a_function_that_no_other_site_tells_about_are_new():
    """Its posterior is the same at every position of the chain, and its draws are not."""
    program = dgp.for_mcmc(two_functions)
    at = lambda b: constrain_fn(program, (ROWS, TARGET), {}, {"b": b}, return_deterministic=True)["a"]  # noqa: E731
    draws = jax.jit(jax.vmap(at))(jax.random.normal(jax.random.key(0), (500, 8)))
    assert (draws.std(0) > 0.05).all()


@pytest.mark.long
def test_chains_predict():
    mcmc = MCMC(NUTS(dgp.for_mcmc(shallow_and_noise)), num_warmup=100, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), X, Y)
    samples = mcmc.get_samples()
    assert {name: draws.shape for name, draws in samples.items()} == {"g": (50, 8), "noise": (50,)}
    assert mcmc.last_state.z.keys() == {"noise"}
    assert Predictive(dgp.for_mcmc(shallow_and_noise), samples)(jax.random.key(0), X[:3])["y"].shape == (50, 3)
    mixture = dgp.Posterior(shallow_and_noise, samples=samples).using(num_samples=50).predict(jax.random.key(1), X)
    assert np.sqrt(np.mean((mixture.mean - Y) ** 2)) < 0.2


@pytest.mark.long
def test_the_tree_of_a_chain():
    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        deep(X, y, process_noise=noise)

    trees = []
    for collapse in (True, False):
        kernel = NUTS(dgp.for_mcmc(model, collapse=collapse))
        mcmc = MCMC(kernel, num_warmup=30, num_samples=30, progress_bar=False)
        mcmc.run(jax.random.key(0), ROWS, TARGET)
        trees.append(dgp.diagnostics.to_arviz(mcmc, jax.random.key(1), ROWS, TARGET, local_samples=3))
    first, second = ({g: set(tree[g].data_vars) for g in tree.children} for tree in trees)
    assert first.pop("posterior") == second.pop("posterior")
    assert first == second
    assert trees[0]["log_likelihood_target"]["y"].shape == trees[1]["log_likelihood_target"]["y"].shape


@pytest.mark.long
def test_the_posterior_of_the_rest_is_the_same():
    """Means and mean squares of all sites by NUTS with and without the last layer integrated."""

    def model(X, y=None):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        f = dgp.gp("f", dgp.kernels.RBF(0.1, 0.9), dgp.Points(Z[::2]), outputs=1, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z[::2]))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.3))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)

    chains = []
    for collapse in (True, False):
        kernel = NUTS(dgp.for_mcmc(model, collapse=collapse), target_accept_prob=0.9)
        mcmc = MCMC(kernel, num_warmup=1000, num_samples=3000, progress_bar=False)
        mcmc.run(jax.random.key(2), ROWS, TARGET)
        chains.append(mcmc.get_samples())
    for name in ("noise", "f", "g", "h"):
        for moment in (lambda d: d, np.square):
            a, b = (np.asarray(moment(d[name])).reshape(1, 3000, -1) for d in chains)
            sizes = [numpyro.diagnostics.effective_sample_size(d) for d in (a, b)]
            error = np.sqrt(a.var((0, 1)) / sizes[0] + b.var((0, 1)) / sizes[1])
            assert (np.abs(a.mean((0, 1)) - b.mean((0, 1))) < 4.5 * error).all()
