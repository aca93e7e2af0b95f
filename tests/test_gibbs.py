"""Gibbs sampling: its parts against formulas, the kernel against the joint distribution of parameters and data."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC, NUTS, init_to_value
from numpyro.infer.util import log_density
from programs import NOISE, X, Y, Z, deep, explicit, shallow

import numpyro_dgp as dgp
from numpyro_dgp.mcmc import BlockNUTS, EllipticalSlice, Slice
from numpyro_dgp.mcmc.for_mcmc import sampled_program
from numpyro_dgp.mcmc.gaussian_blocks import latents
from numpyro_dgp.mcmc.gibbs import planned
from numpyro_dgp.mcmc.slices import elliptical_slice

x = jnp.linspace(-1, 1, 5)[:, None]


def run(model, *args, warmup=100, samples=400, chains=1, method="vectorized", extra=(), **options):
    mcmc = MCMC(
        dgp.mcmc.Gibbs(model, **options),
        num_warmup=warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method=method if chains > 1 else "sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *args, extra_fields=extra)
    return mcmc


# --- the joint distribution of parameters and data stays as it is (Geweke, 2004)


def exact_layer(x, y=None):
    """One exact layer, drawn; hyperparameters of it and of the noise."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.3))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), None)
    v = numpyro.sample("v", f(x))
    numpyro.sample("y", dist.Normal(v, noise).to_event(1), obs=y)


def exact_layers(x, y=None):
    """The deep GP of Sauer et al.: the outer layer has no values of its own."""
    scales = numpyro.sample("scales", dist.LogNormal(0.0, 0.5).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scales[0]), None, outputs=2)
    g = dgp.gp("g", dgp.kernels.RBF(1.0, scales[1]), None)
    h = numpyro.sample("h", f(x))
    numpyro.sample("y", g(h, noise=noise), obs=y)


def sparse_layers(x, y=None):
    """The outer layer is integrated; its inducing points are dense, so that the bound is nearly a density of y."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), dgp.Points(x[::2]), outputs=1)
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.5), dgp.Points(jnp.linspace(-3, 3, 7)[:, None]))
    with numpyro.plate("data", len(x)):
        h = numpyro.sample("h", f(x))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(2 * v + 1, 2 * noise)), obs=y)


def latent_inputs(x, y=None):
    shift = numpyro.sample("shift", dist.Normal(0.5, 1.0))
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.0), dgp.Points(x[::2]))
    with numpyro.plate("data", len(x)):
        w = numpyro.sample("w", dist.Normal(shift, 0.7))
        v = numpyro.sample("v", g(w[:, None], noise=0.3))
        numpyro.sample("y", dist.Normal(v, 0.5), obs=y)


def statistics(model, z, y):
    """Moments of the latent values and of the data, and by how much a draw of the program has to be weighted."""
    sites = handlers.trace(handlers.seed(handlers.substitute(model, data=z), 0)).get_trace(x, y)
    numbers = jnp.concatenate([jnp.ravel(sites[name]["value"]) for name in sorted(z)] + [jnp.ravel(y)])
    numbers = jnp.arctan(numbers)  # of heavy tails no moments
    log_weight = 0.0
    fn = sites["y"]["fn"]
    if isinstance(fn, dgp.Likelihood):  # the bound is a density of y, N(y; a v + b, s), times a function of the rest
        slope, offset, scale = fn.normal_form()
        log_weight = (fn.log_prob(y) - dist.Normal(slope * fn.f_x.loc + offset, scale).log_prob(y)).sum()
    return jnp.concatenate([numbers, jnp.square(numbers), numbers[1:] * numbers[:-1]]), log_weight


def observations(model, key, z):
    """Data given the latent values, under the density of the program."""
    fn = handlers.trace(handlers.seed(handlers.substitute(model, data=z), key)).get_trace(x, jnp.zeros(len(x)))["y"][
        "fn"
    ]
    if isinstance(fn, dgp.Likelihood):
        slope, offset, scale = fn.normal_form()
        fn = dist.Normal(slope * fn.f_x.loc + offset, scale)
    return fn.sample(key)


SHORT = BlockNUTS(step_size=0.3)
SLICES = {"h": EllipticalSlice(repeat=2)}
CASES = {
    "exact layer": (exact_layer, dict(rest=SHORT)),
    "exact layer, centred": (exact_layer, dict(noncentered=False, rest=SHORT)),
    "exact layers": (exact_layers, dict(rest=SHORT)),
    "exact layers, centred": (exact_layers, dict(noncentered=False, rest=Slice())),
    "sparse layers": (sparse_layers, dict(rest=SHORT)),
    "sparse layers, one block": (
        sparse_layers,
        dict(blocks={("f", "h"): EllipticalSlice(), ("scale", "noise"): Slice()}),
    ),
    "sparse layers, all sliced": (sparse_layers, dict(blocks=SLICES, rest=SHORT, collapse=False)),
    "latent inputs": (latent_inputs, dict(rest=SHORT)),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_joint_distribution_is_invariant(case):
    """Chains that start at draws of the program, with data drawn anew after each sweep, stay draws of it.

    Data are drawn given all sites, of integrated layers those that the program draws.
    """
    model, options = CASES[case]
    chains, sweeps = 3000, 15
    kernel = dgp.mcmc.Gibbs(model, **options)
    keys = jax.random.split(jax.random.key(0), chains)
    program = sampled_program(kernel.model)

    def draw(key, data_key):
        sites = handlers.trace(handlers.seed(program, key)).get_trace(x, jnp.zeros(len(x)))
        z = {n: s["value"] for n, s in sites.items() if s["type"] == "sample" and n != "y"}
        y = observations(program, data_key, z)
        return z, y, *statistics(program, z, y)

    z, y, before, log_weights = jax.jit(jax.vmap(draw))(keys, jax.random.split(jax.random.key(3), chains))
    weights = np.asarray(jax.nn.softmax(log_weights))
    if weights.std() > 1e-6 / chains:  # chains start at draws of the density of the program itself
        rows = np.random.default_rng(0).choice(chains, chains, p=weights)
        z, y = jax.tree.map(lambda a: a[rows], (z, y))
        assert 1 / np.square(weights).sum() > chains / 3
    moved = {n: s["fn"].support for n, s in sites_of(kernel.model).items() if s["type"] == "sample" and n in z}
    unconstrained = {n: dist.transforms.biject_to(s).inv(z[n]) for n, s in moved.items()}
    state = kernel.init(keys, 0, unconstrained, (x, y[0]), {})
    start = state.z

    def values_of(states, ys):
        found = jax.vmap(lambda z, y: kernel.postprocess_fn((x, y), {})(z))(states.z, ys)
        return {n: found[n] for n in z}

    def step(carry, key):
        states, ys = carry
        states = jax.vmap(lambda s, y: kernel.sample(s, (x, y), {}))(states, ys)
        values = values_of(states, ys)
        split = jax.random.split(key, chains)
        return (states, jax.vmap(lambda k, z: observations(program, k, z))(split, values)), values

    def sweep(state, y):
        (end, ys), values = jax.lax.scan(step, (state, y), jax.random.split(jax.random.key(2), sweeps))
        return end, ys, jax.tree.map(lambda a: a[-1], values)

    end, ys, values = jax.jit(sweep)(state, y)
    after = np.asarray(jax.vmap(lambda z, y: statistics(program, z, y)[0])(values, ys))
    expected = weights @ before
    weighted_error = np.sqrt(weights @ np.square(before - expected) * np.square(weights).sum())
    error = np.sqrt(after.var(0) / chains + (1 + (weights.std() > 1e-6 / chains)) * weighted_error**2)
    scores = np.abs(after.mean(0) - expected) / error
    assert scores.max() < 4.5, (case, scores.round(1))
    share = [np.mean(np.any(np.asarray(end.z[n] != start[n]).reshape(chains, -1), -1)) for n in moved]
    assert min(share) > 0.9, (case, share)


def sites_of(program):
    return handlers.trace(handlers.seed(program, 0)).get_trace(x, jnp.zeros(len(x)))


# --- its parts


@pytest.mark.long
@pytest.mark.parametrize(("bracket", "most"), [(2 * np.pi, 6.0), (2.0, 2.5), (0.4, 1.3)])
def test_elliptical_slices_leave_a_gaussian_posterior_as_it_is(bracket, most):
    """Draws of the posterior stay draws of it, with a prior that has a mean and a covariance."""
    A, y = jnp.array([[1.0, 2.0], [0.0, 1.0]]), jnp.array([0.3, -0.8])
    prior = dist.MultivariateNormal(jnp.array([1.0, -1.0]), jnp.array([[1.0, 0.6], [0.6, 2.0]]))
    precision = prior.precision_matrix + A @ A.T / 0.49
    covariance = jnp.linalg.inv(precision)
    mean = covariance @ (prior.precision_matrix @ prior.loc + A @ y / 0.49)
    posterior = dist.MultivariateNormal(mean, covariance)

    def density(z):
        return -prior.log_prob(z["u"]) - dist.Normal(z["u"] @ A, 0.7).log_prob(y).sum()

    def move(key, u):
        return elliptical_slice(key, {"u": u}, density({"u": u}), density, {"u": prior}, bracket=bracket)

    starts = posterior.sample(jax.random.key(0), (20000,))
    moved, energy, tries = jax.jit(jax.vmap(move))(jax.random.split(jax.random.key(1), 20000), starts)
    draws = np.asarray(moved["u"])
    np.testing.assert_allclose(energy, jax.vmap(lambda u: density({"u": u}))(draws), rtol=1e-9)
    assert 1 < tries.mean() < most
    error = np.sqrt(np.diag(covariance) / 20000)
    assert (np.abs(draws.mean(0) - mean) < 4.5 * error).all()
    np.testing.assert_allclose(np.cov(draws.T), covariance, atol=4.5 * np.sqrt(2 / 20000) * covariance.max())
    assert np.mean(draws != starts) > 0.999


@pytest.mark.smoke
def test_a_chain_without_density_stays_where_it_is():
    z = {"u": jnp.ones(2)}
    moved, _, tries = elliptical_slice(
        jax.random.key(0), z, jnp.array(jnp.nan), lambda z: z["u"].sum(), {"u": dist.Normal(jnp.zeros(2), 1.0)}
    )
    assert (moved["u"] == 1).all()
    assert tries > 50


def classed(X, y):
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Bernoulli(logits=v)), obs=(y > 0) * 1)


def above_itself(X, y):
    """One function as both layers: its last use alone would make it Gaussian."""
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z), outputs=1)
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", g(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE).to_event(1)), obs=y[:, None])


def in_the_noise(X, y):
    """The values of the function also scale its noise."""
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, jnp.exp(g.v.loc[0]))), obs=y)


@pytest.mark.parametrize(
    ("model", "sites"),
    [
        (shallow, ["g"]),
        (deep, ["f", "h_white"]),
        (classed, ["g"]),
        (above_itself, ["g", "h_white"]),
        (in_the_noise, ["g"]),
        (explicit, ["f", "g", "h_white", "v_white"]),
    ],
)
def test_which_sites_move(model, sites):
    """All but those that for_mcmc integrates, from the program as it is and as for_mcmc prepares it."""
    for kernel in (dgp.mcmc.Gibbs(model), dgp.mcmc.Gibbs(dgp.for_mcmc(model))):
        found = planned(latents(lambda kernel=kernel: handlers.seed(kernel.model, 0)(X, Y)), {}, BlockNUTS())
        assert sorted(found) == sites


def test_layers_are_sampled_without_collapse():
    for kernel in (dgp.mcmc.Gibbs(deep, collapse=False), dgp.mcmc.Gibbs(dgp.for_mcmc(deep, collapse=False))):
        found = planned(latents(lambda kernel=kernel: handlers.seed(kernel.model, 0)(X, Y)), {}, BlockNUTS())
        assert sorted(found) == ["f", "g", "h_white"]


# --- behaviour


def unknown(X, y=None, Z=Z):
    """Two layers on inducing points with unknown noise and lengthscale."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    f = dgp.gp("f", dgp.kernels.RBF(0.3, scale), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)


@pytest.mark.long
@pytest.mark.parametrize("collapse", ["auto", False])
def test_one_layer_against_the_exact_posterior(collapse):
    """With nothing else in the program its values move by slices; beside another site they are exact draws."""

    def model(X, y):
        if collapse:
            numpyro.sample("a", dist.Normal(0.0, 1.0))
        shallow(X, y)

    mcmc = run(model, X, Y, warmup=100, samples=4000, collapse=collapse)
    draws = np.asarray(mcmc.get_samples()["g"])
    negative = jax.jit(lambda v: -log_density(handlers.seed(shallow, 0), (X, Y), {}, {"g": v})[0])
    covariance = np.linalg.inv(jax.hessian(negative)(jnp.zeros(8)))
    mean = -covariance @ jax.grad(negative)(jnp.zeros(8))
    scale = np.sqrt(np.diag(covariance))
    size = 4000 if collapse else np.asarray(effective_sample_size(draws[None]))
    assert (np.abs(draws.mean(0) - mean) < 4.5 * scale / np.sqrt(size)).all()
    assert np.abs((np.cov(draws.T) - covariance) / scale / scale[:, None]).max() < 5.5 * np.sqrt(2 / np.min(size))


@pytest.mark.long
@pytest.mark.parametrize("method", ["vectorized", "sequential"])
def test_several_chains(method):
    """The sites are those of NUTS on for_mcmc, whether the program was prepared or not, and predictions work."""
    fields = "potential_energy", "evaluations", "gradients", "blocks.h_white.evaluations", "blocks.rest.hmc.num_steps"
    options = dict(warmup=300, samples=500, chains=4, method=method, extra=fields)
    mcmc = run(unknown, X, Y, **options)
    chains = mcmc.get_samples(group_by_chain=True)
    shapes = {"noise": (), "scale": (), "f": (1, 8), "g": (8,), "h": (30, 1), "h_white": (30, 1)}
    assert {name: value.shape for name, value in chains.items()} == {n: (4, 500, *s) for n, s in shapes.items()}
    assert all(value.shape == (4, 500) for value in mcmc.get_extra_fields(group_by_chain=True).values())
    assert gelman_rubin(np.log(np.asarray(chains["noise"]))) < 1.05
    mean = dgp.Posterior(unknown, samples=mcmc.get_samples()).using(num_samples=300).predict(jax.random.key(1), X).mean
    assert np.sqrt(np.mean((mean - Y) ** 2)) < 0.2
    tree = dgp.diagnostics.to_arviz(mcmc, jax.random.key(2), X, Y)
    assert tree.posterior["noise"].shape == (4, 500)
    if method == "vectorized":
        prepared = run(dgp.for_mcmc(unknown), X, Y, **options).get_samples(group_by_chain=True)
        np.testing.assert_allclose(prepared["noise"], chains["noise"], rtol=1e-6)


@pytest.mark.long
def test_float32(x32):
    x, y = X.astype(jnp.float32), Y.astype(jnp.float32)
    mcmc = run(unknown, x, y, x[::4], warmup=50, samples=100, chains=2)
    draws = mcmc.get_samples()
    assert {str(value.dtype) for value in draws.values()} == {"float32"}
    assert all(np.isfinite(value).all() for value in draws.values())
    assert all(len(np.unique(np.asarray(value).reshape(200, -1)[:, 0])) > 50 for value in draws.values())


@pytest.mark.long
def test_the_progress_bar_and_what_a_block_says():
    kernel = dgp.mcmc.Gibbs(unknown, {}, blocks={"f": Slice()})
    state = kernel.init(jax.random.key(0), 10, None, (X, Y), {})
    state = kernel.sample(state, (X, Y), {})
    shown = kernel.get_diagnostics_str(state)
    assert "rest: " in shown
    assert "steps of" in shown
    assert "f: " in shown
    assert "h_white: " in shown


@pytest.mark.long
def test_parameters_and_starts():
    def program(X, y):
        variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        numpyro.deterministic("double", 2 * noise)
        shallow(X, y, kernel=dgp.kernels.RBF(variance, 0.7), noise=noise)

    start = init_to_value(values={"noise": jnp.array(0.4)})
    mcmc = run(program, X, Y, warmup=0, samples=20, params={"variance": jnp.array(1.2)}, init_strategy=start)
    draws = mcmc.get_samples()
    np.testing.assert_allclose(draws["double"], 2 * draws["noise"])
    assert abs(np.log(draws["noise"][0] / 0.4)) < 1.0


def discrete(X, y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(k, 1.0).expand([len(X)]).to_event(1), obs=y)


def empty(X, y):
    numpyro.sample("y", dist.Normal(0.0, 1.0).expand([len(X)]).to_event(1), obs=y)


def learned(X, y):
    shallow(X, y, noise=numpyro.param("noise", 0.3))


def dependent(X, y):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    b = numpyro.sample("b", dist.Normal(a, 1.0))
    numpyro.sample("y", dist.Normal(a + b, 1.0).expand([len(X)]).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: dgp.mcmc.Gibbs(3), "expected a program and an init_strategy, both functions, got int"),
        (
            lambda: dgp.mcmc.Gibbs(dgp.for_mcmc(deep), collapse=False),
            "Gibbs: expected no params, noncentered or collapse for a program of for_mcmc, which has its own",
        ),
        (lambda: dgp.mcmc.Gibbs(dgp.for_mcmc(deep), {}), "Gibbs: expected no params, noncentered or collapse for a"),
        (lambda: dgp.mcmc.Gibbs(deep, collapse="yes"), "expected collapse to be \"auto\", True or False, got 'yes'"),
        (lambda: run(classed, X, Y, collapse=True), "expected collapse=True for a program with a"),
        (
            lambda: dgp.mcmc.Gibbs(deep, blocks=[EllipticalSlice()]),
            "expected blocks as a dict of updates by site, got list",
        ),
        (
            lambda: dgp.mcmc.Gibbs(deep, blocks={"h": NUTS(deep)}),
            "an update for the block 'h', got NUTS: dgp",
        ),
        (
            lambda: dgp.mcmc.Gibbs(deep, blocks={"h": Slice}),
            "expected an update for the block 'h', got the class Slice",
        ),
        (lambda: dgp.mcmc.Gibbs(deep, rest=EllipticalSlice()), "rest to be an update of any site, got EllipticalSlice"),
        (lambda: dgp.mcmc.Gibbs(deep, rest=3), "expected an update as rest, got int"),
        (lambda: EllipticalSlice(repeat=0), "EllipticalSlice: expected repeat to be a positive integer, got 0"),
        (lambda: Slice(width=-1.0), "Slice: expected width to be positive, got -1.0"),
        (lambda: BlockNUTS(target_accept_prob=1.5), "BlockNUTS: expected 0 < target_accept_prob < 1, got 1.5"),
        (lambda: dgp.mcmc.Gibbs(shallow).postprocess_fn((), {}), r"Gibbs\.\w+: expected init before anything else"),
        (lambda: run(discrete, X, Y), r"Gibbs\.\w+: expected continuous sites, got the discrete 'k'"),
        (lambda: run(empty, X, Y), r"Gibbs\.\w+: expected a program with latent sites, got none"),
        (lambda: run(shallow, X), r"Gibbs\.\w+: expected observations at 'y', got none"),
        (
            lambda: run(shallow, X, Y, 10),
            "expected a program over all data, got plate 'data'",
        ),
        (lambda: run(learned, X, Y), "expected a value for every numpyro.param, got none for 'noise'"),
        (
            lambda: run(deep, X, Y, blocks={"k": EllipticalSlice()}),
            "expected blocks of latent sites, got 'k': they are",
        ),
        (
            lambda: run(deep, X, Y, blocks={"h": Slice(), ("f", "h_white"): EllipticalSlice()}),
            "expected every site in one block, got 'h_white' in two",
        ),
        (
            lambda: run(unknown, X, Y, blocks={"noise": EllipticalSlice()}),
            "expected Gaussian priors for EllipticalSlice, got 'noise'",
        ),
        (
            lambda: run(dependent, X, Y, blocks={("a", "b"): EllipticalSlice()}),
            "expected standard normal sites where EllipticalSlice moves several together, got 'a'",
        ),
        (
            lambda: run(deep, X, Y, blocks={"g": EllipticalSlice()}),
            "expected blocks of latent sites, got 'g', which is integrated out: leave it out, or pass",
        ),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
