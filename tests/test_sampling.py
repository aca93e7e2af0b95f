"""NUTS on the same programs: exact posteriors, both forms, and errors where it would be wrong in silence."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS, SVI, Predictive, init_to_value, log_likelihood
from programs import NOISE, X, Y, Z, bayesian, deep, explicit, shallow
from test_svgp import KZX, KZZ, optimum

import numpyro_dgp as dgp


def run(model, *args, warmup=300, samples=600, key=0, chains=1, **options):
    mcmc = MCMC(NUTS(model, **options), num_warmup=warmup, num_samples=samples, num_chains=chains, progress_bar=False)
    mcmc.run(jax.random.key(key), *args)
    return mcmc


def effective(draws):
    return np.asarray(numpyro.diagnostics.effective_sample_size(np.asarray(draws)[None]))


@pytest.mark.long
@pytest.mark.smoke
def test_nuts_lands_on_the_optimal_posterior():
    """One layer, fixed hyperparameters, Gaussian likelihood: Titsias' optimal q(u), exactly Gaussian."""
    draws = run(shallow, X, Y, warmup=500, samples=4000).get_samples()["g"]
    exact = optimum(KZZ, KZX)
    mean = np.asarray(exact["g_auto_loc"])
    sd = np.sqrt(np.diag(np.asarray(exact["g_auto_scale_tril"] @ exact["g_auto_scale_tril"].T)))
    assert (np.abs(draws.mean(0) - mean) < 0.1 * sd).all()
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.05)


@pytest.mark.long
def test_centred_and_non_centred_forms_agree():
    """The same posterior in both forms, within Monte-Carlo error."""

    def model(X, y=None):
        # Enough process noise that the centred form mixes too, and one mode.
        return deep(X, y, inner=dgp.kernels.RBF(0.05, 0.9), process_noise=0.3)

    x, y = X[::3], Y[::3]
    centred = run(model, x, y, samples=3000, warmup=1000, target_accept_prob=0.9).get_samples()
    noncentred = run(dgp.for_mcmc(model), x, y, samples=3000, warmup=1000, target_accept_prob=0.9).get_samples()
    assert sorted(noncentred) == ["f", "g", "h", "h_white"]
    for name in ("f", "g", "h"):
        for moment in (lambda d: d, np.square):
            a, b = (np.asarray(moment(d[name])).reshape(3000, -1) for d in (centred, noncentred))
            error = np.sqrt(a.var(0) / effective(a) + b.var(0) / effective(b))
            assert (np.abs(a.mean(0) - b.mean(0)) < 4.5 * error).all()


@pytest.mark.slow
def test_reparam_handler_is_the_same_density():
    """The non-centred program has the density of the centred one times the Jacobian of the change of variables."""
    explicit_form = handlers.reparam(deep, config={"h": dgp.mcmc.NonCentered()})
    key = jax.random.key(0)
    white = {name: jax.random.normal(key, shape) for name, shape in (("f", (1, 8)), ("g", (8,)), ("h_white", (30, 1)))}
    value, sites = numpyro.infer.util.log_density(explicit_form, (X, Y), {}, white)
    assert sites["h"]["type"] == "deterministic"
    h = sites["h"]["value"]
    direct, centred = numpyro.infer.util.log_density(deep, (X, Y), {}, {"f": white["f"], "g": white["g"], "h": h})
    jacobian = 0.5 * jnp.log(centred["h"]["fn"].variance).sum()
    np.testing.assert_allclose(value, direct + jacobian, rtol=1e-8)


@pytest.mark.long
def test_exact_layer_non_centred():
    def model(X, y=None):
        v = numpyro.sample("v", dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), None)(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(v, NOISE), obs=y)

    draws = run(dgp.for_mcmc(model), X, Y, samples=2000).get_samples()["v"]
    x = np.asarray(X)
    from dense import rbf

    K = rbf(x, x, 1.2, 0.7)
    gain = np.linalg.solve(K + NOISE**2 * np.eye(30), K).T
    np.testing.assert_allclose(draws.mean(0), gain @ np.asarray(Y), atol=0.03)
    np.testing.assert_allclose(draws.std(0), np.sqrt(np.diag(K - gain @ K)), rtol=0.12)


@pytest.mark.long
def test_hyperparameters_by_nuts_from_an_svi_start():
    """init_to_value from a fit, hyperparameters from sample sites, numpyro.param sites from the fit."""
    guide = dgp.guides.InducingPoint(bayesian)
    result = SVI(bayesian, guide, optax.adam(0.02), dgp.ELBO()).run(jax.random.key(0), 500, X, Y, progress_bar=False)
    start = init_to_value(values=guide.median(result.params, X, Y))
    mcmc = run(dgp.for_mcmc(bayesian, result.params), X, Y, warmup=100, samples=100, init_strategy=start)
    draws = mcmc.get_samples()
    assert {"noise", "scales", "f", "g", "w", "h_white"} <= set(draws)
    assert "g_Z" not in draws
    assert all(np.isfinite(value).all() for value in draws.values())
    mixture = (
        dgp.Posterior(bayesian, samples=draws, params=result.params).using(num_samples=50).predict(jax.random.key(1), X)
    )
    assert np.sqrt(np.mean((mixture.mean - Y) ** 2)) < 0.5


@pytest.mark.long
def test_lifted_parameters_are_sampled():
    lifted = handlers.lift(bayesian, prior={"g_Z": dist.Normal(Z, 0.1).to_event(2)})
    draws = run(dgp.for_mcmc(lifted), X, Y, warmup=20, samples=20).get_samples()
    assert draws["g_Z"].shape == (20, 8, 1)


@pytest.mark.long
def test_chains_run_in_parallel_by_vmap():
    mcmc = MCMC(
        NUTS(shallow), num_warmup=50, num_samples=50, num_chains=2, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(jax.random.key(0), X, Y)
    assert mcmc.get_samples(group_by_chain=True)["g"].shape == (2, 50, 8)


@pytest.mark.long
def test_pointwise_log_likelihood():
    draws = run(shallow, X, Y, warmup=50, samples=50).get_samples()
    assert log_likelihood(shallow, draws, X, Y)["y"].shape == (50, 30)


@pytest.mark.long
def test_float32_nuts(x32):
    x, y = X.astype(jnp.float32), Y.astype(jnp.float32)

    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(x[::4]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE)), obs=y)

    draws = run(model, x, y, warmup=200, samples=200).get_samples()["g"]
    assert draws.dtype == jnp.float32
    assert np.isfinite(draws).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: dgp.for_mcmc(deep)(X, Y, 7),
            "expected a program over all data, got plate 'data' that takes 7 of 30",
        ),
        (
            lambda: dgp.for_mcmc(bayesian)(X, Y),
            "expected a value for every numpyro.param, got none for 'g_Z'",
        ),
        (
            lambda: handlers.reparam(bayesian, config={"noise": dgp.mcmc.NonCentered()})(X, Y),
            "expected 'noise' to hold unobserved function",
        ),
    ],
)
def test_bad_input(build, message):
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("prepare", [lambda model: model, dgp.for_mcmc])
@pytest.mark.parametrize("likelihood", [lambda v: dist.Normal(v, NOISE), lambda v: dist.Poisson(jnp.exp(v))])
def test_forgotten_observations(prepare, likelihood):
    """Unobserved, the bound in a ``Likelihood`` is no density of y: a chain over y too would be wrong."""

    def program(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), likelihood), obs=y)

    owner = "Likelihood" if prepare is not dgp.for_mcmc else "site 'y'"
    with pytest.raises(
        ValueError, match=f"{owner}: expected observations in every run of a sampler or an autoguide, got a site"
    ):
        NUTS(prepare(program)).init(jax.random.key(0), 1, None, (X,), {})


@pytest.mark.long
def test_without_observations_a_prepared_program_is_its_prior():
    """Where nothing is observed, NUTS is refused, and draws are those of the same form by hand."""
    program, by_hand = dgp.for_mcmc(explicit), dict.fromkeys("hv", dgp.mcmc.NonCentered())
    with pytest.raises(ValueError, match="site 'y': expected observations in every run of a sampler"):
        NUTS(program).init(jax.random.key(0), 1, None, (X,), {})
    forms = program, handlers.reparam(explicit, config=by_hand)
    drawn = [Predictive(form, num_samples=2)(jax.random.key(0), X[:4]) for form in forms]
    jax.tree.map(np.testing.assert_array_equal, *drawn)


@pytest.mark.long
def test_samples_of_a_chain_are_not_for_other_rows():
    """Its hidden values are those of its rows; ``Posterior`` leaves them to the program."""
    program = dgp.for_mcmc(deep)
    draws = {name: jnp.zeros((3, *shape)) for name, shape in (("f", (1, 8)), ("g", (8,)), ("h_white", (30, 1)))}
    assert Predictive(program, draws)(jax.random.key(0), X)["y"].shape == (3, 30)
    for rows in (X[:7], X[:1]):
        with pytest.raises(ValueError, match=r"got \(30, 1\), those of the data of the chain: predict by dgp"):
            Predictive(program, draws)(jax.random.key(0), rows)
    assert dgp.Posterior(program, samples=draws).using(num_samples=3).sample(jax.random.key(0), X[:7]).shape == (3, 7)


@pytest.mark.smoke
def test_a_prepared_program_survives_pickle():
    program = pickle.loads(pickle.dumps(dgp.for_mcmc(explicit, {"unused": jnp.ones(2)})))
    values = {name: jnp.ones(shape) for name, shape in (("f", (1, 8)), ("g", (8,)))}
    values |= {"h_white": jnp.ones((30, 1)), "v_white": jnp.ones(30)}
    density = [numpyro.infer.util.log_density(p, (X, Y), {}, values)[0] for p in (program, dgp.for_mcmc(explicit))]
    assert density[0] == density[1]


@pytest.mark.long
def test_chains_survive_pickle():
    mcmc = run(dgp.for_mcmc(deep), X[::3], Y[::3], warmup=5, samples=5)
    again = pickle.loads(pickle.dumps(mcmc))
    np.testing.assert_array_equal(again.get_samples()["h"], mcmc.get_samples()["h"])
    assert again.sampler.model is not mcmc.sampler.model
    dgp.Posterior(again.sampler.model, samples=again.get_samples()).using(num_samples=2).predict(
        jax.random.key(0), X[:3]
    )


@pytest.mark.long
def test_stock_nuts_refuses_subsampling_and_explicit_programs_run():
    with pytest.raises(ValueError, match=r"do(es)? not support subsampling"):
        run(deep, X, Y, 7, warmup=5, samples=5)
    draws = run(dgp.for_mcmc(explicit), X, Y, warmup=20, samples=20).get_samples()
    assert {"h_white", "v_white", "f", "g"} <= set(draws)


@pytest.mark.long
def test_scan_of_numpyro_is_no_transformation():
    def model(X, y=None):
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(Z))
        walk = scan(lambda c, _: (numpyro.sample("e", dist.Normal(c, 0.1)),) * 2, 0.0, X[:, 0])[1]
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v + walk, NOISE)), obs=y)

    with handlers.trace() as sites, handlers.seed(rng_seed=0):
        dgp.for_mcmc(model)(X, Y)
    assert sites["e"]["value"].shape == (30,)
