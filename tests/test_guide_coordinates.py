"""``for_mcmc(model, params, guide=guide)``: the same posterior in the coordinates of a guide."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, init_to_sample
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import log_density
from programs import X, Y, Z, bayesian, random_params, shallow

import numpyro_dgp as dgp
from numpyro_dgp import guides as G

ROWS, TARGET = X[::6], Y[::6]
W = dgp.Points(jnp.hstack([Z, jnp.sin(9 * Z)])[::3])


def program(X, y=None):
    """Hyperparameters on half-lines and on an interval, a latent per datum, a hidden layer."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.Uniform(jnp.array([0.5, 1.0]), 2.0).to_event(1))
    f = dgp.gp("f", dgp.kernels.RBF(0.3, scale), W, outputs=2)
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(jnp.hstack([Z, -Z])[::3]))
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, 1)
        h = numpyro.sample("h", f(x, noise=0.2))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)
    numpyro.deterministic("twice", 2 * noise)


GUIDES = {
    "inducing points": lambda model: G.InducingPoint(model),
    "normal": lambda model: G.InducingPoint(model, other=G.Normal(), latent=G.Amortised(hidden=(3,))),
    "mean field": lambda model: G.MeanField(model, latent=G.Prior()),
    "given inducing": lambda model: G.InducingPoint(
        model, sites={"h": G.GivenInducing("free"), "g": G.MarkovInducing()}, other=AutoNormal
    ),
    "global inducing": lambda model: G.InducingPoint(model, inducing=G.GlobalInducing(3)),
    "joint outputs": lambda model: G.InducingPoint(
        model, sites={"h": G.JointOutputs()}, other=AutoMultivariateNormal, num_samples=2
    ),
    "NumPyro's": lambda model: AutoNormal(model),
    "NumPyro's, joint": lambda model: AutoMultivariateNormal(model),
}


def fitted(name):
    """A guide, and parameters away from the start."""
    guide = GUIDES[name](program)
    if isinstance(guide, G.Guide):
        params = random_params(program, guide, ROWS, TARGET, scale=0.1)
        return guide, params | {n: jnp.clip(v, 1.05, 1.9) for n, v in params.items() if n == "scale_auto_loc"}
    svi = SVI(program, guide, optax.adam(0.1), numpyro.infer.Trace_ELBO())
    return guide, svi.run(jax.random.key(0), 3, ROWS, TARGET, progress_bar=False).params


def require_jacobian(model, guide, params, latent, args, collapse):
    """By forward-mode derivatives of the values of all sites by the numbers that are sampled."""
    prepared = dgp.for_mcmc(model, params, guide=guide, collapse=collapse)
    centred = dgp.for_mcmc(model, params, noncentered=False, collapse="g" not in latent)
    flat, unravel = ravel_pytree(standard(prepared, args))
    flat = 0.7 * jax.random.normal(jax.random.key(5), flat.shape)

    def values(z):
        density, sites = log_density(prepared, args, {}, unravel(z))
        found = {name: sites[name]["value"] for name in latent}
        return ravel_pytree(found)[0], (density, found)

    @jax.jit
    def both(z):
        jacobian, (density, found) = jax.jacfwd(values, has_aux=True)(z)
        return density, log_density(centred, args, {}, found)[0], jacobian

    density, direct, jacobian = both(flat)
    assert jacobian.shape == (flat.size, flat.size)
    np.testing.assert_allclose(density, direct + np.linalg.slogdet(jacobian)[1], rtol=0, atol=1e-6)


def standard(prepared, args):
    """The sampled sites of a prepared program, zeros."""
    shapes = {}

    def run():
        with handlers.seed(rng_seed=3), handlers.trace() as sites:
            prepared(*args)
        shapes.update({n: jnp.shape(s["value"]) for n, s in sites.items() if s["type"] == "sample"})
        shapes.pop("guide_ratio")

    jax.eval_shape(run)
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "collapse"),
    [
        *((name, False) for name in GUIDES),
        *((name, "auto") for name in ("normal", "given inducing", "NumPyro's, joint")),
    ],
)
def test_the_density_is_that_of_the_program_times_the_jacobian(name, collapse):
    guide, params = fitted(name)
    latent = ["noise", "scale", "f", "w", "h", *([] if collapse and name != "NumPyro's, joint" else ["g"])]
    require_jacobian(program, guide, params, latent, (ROWS, TARGET), collapse)


@pytest.mark.slow
def test_one_layer_times_the_jacobian():
    def model(X, y):
        shallow(X, y, Z=Z[::4], noise=numpyro.sample("noise", dist.LogNormal(-1.0, 0.5)))

    params = {"g_auto_loc": jnp.array([0.3, -1.0]), "g_auto_scale_tril": jnp.array([[0.5, 0.0], [0.2, 0.3]])}
    params["noise_auto_loc"] = jnp.array(0.4)
    require_jacobian(model, G.InducingPoint(model), params, ["noise", "g"], (ROWS, TARGET), False)


@pytest.mark.slow
def test_numbers_are_those_of_the_guide():
    """Standard normal numbers give draws of the guide: where it is the posterior, the density is standard normal."""
    guide = G.InducingPoint(shallow)
    from test_svgp import KZX, KZZ, optimum

    prepared = dgp.for_mcmc(shallow, optimum(KZZ, KZX), guide=guide, collapse=False)
    z = jax.random.normal(jax.random.key(0), (5, 8))
    density = jax.jit(jax.vmap(lambda z: log_density(prepared, (X, Y), {}, {"g_white": z})[0]))(z)
    np.testing.assert_allclose(
        density + 0.5 * jnp.square(z).sum(1), density[0] + 0.5 * jnp.square(z[0]).sum(), rtol=1e-8
    )


@pytest.mark.long
@pytest.mark.parametrize("collapse", [True, False])
def test_a_condition_from_outside_is_refused(collapse):
    """What the program samples are the numbers of the guide."""
    guide, params = fitted("normal")
    prepared = dgp.for_mcmc(program, params, guide=guide, collapse=collapse)
    for data in ({"g": jnp.zeros(3)}, {"noise": 0.3}):
        message = f"on sites that the program samples, got one on '{next(iter(data))}', which it computes"
        with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=message):
            handlers.condition(prepared, data=data)(ROWS, TARGET)


@pytest.mark.long
def test_a_guide_of_all_sites_together_leaves_no_layer_to_integrate():
    guide, params = fitted("NumPyro's, joint")
    with (
        handlers.seed(rng_seed=0),
        pytest.raises(ValueError, match=r"draws \['g'\] on their own for collapse=True, got"),
    ):
        dgp.for_mcmc(program, params, guide=guide, collapse=True)(ROWS, TARGET)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: dgp.for_mcmc(shallow, guide="guide"), "for_mcmc: expected the guide of a fit, got str"),
        (lambda: dgp.for_mcmc(shallow, guide=G.InducingPoint), "expected the guide of a fit, got type"),
        (
            lambda: dgp.for_mcmc(shallow, guide=G.InducingPoint(shallow)),
            "expected the parameters of the guide, got none",
        ),
        (
            lambda: dgp.for_mcmc(shallow, {"a": 1.0}, guide=G.Collapsed(shallow)),
            "got Collapsed: use for_mcmc.model, coll",
        ),
        (
            lambda: dgp.for_mcmc(shallow, {"a": 1.0}, guide=AutoDelta(shallow)),
            "expected a guide of Gaussians, got AutoDelta",
        ),
        (
            lambda: dgp.for_mcmc(shallow, {"a": 1.0}, guide=G.InducingPoint(shallow), noncentered=False),
            "expected guide= or noncentered=False, got both",
        ),
        (
            lambda: dgp.for_mcmc(shallow, {"a": 1.0}, guide=G.InducingPoint(shallow))(X, Y),
            "expected a value for every numpyro.param, got none for 'g_auto_loc'",
        ),
        (
            lambda: dgp.for_mcmc(shallow, {"a": 1.0}, guide=lambda X, y, batch: None)(X, Y, 7),
            "expected a program over all data, got plate 'data' that takes 7 of 30 rows",
        ),
        (
            lambda: dgp.for_mcmc(bayesian, {"g_Z": Z}, guide=lambda X, y: None)(X, Y),
            r"got none for \['noise', 'scales', 'f', 'w', 'h'\]: pass the guide that was fitted to this program",
        ),
        (
            lambda: dgp.for_mcmc(
                handlers.condition(shallow, data={"g": jnp.zeros(len(Z))}),
                {"g_auto_loc": jnp.ones(len(Z)), "g_auto_scale_tril": jnp.eye(len(Z))},
                guide=G.InducingPoint(shallow),
            )(X, Y),
            r"expected a guide without values for what the program observes, got some for \['g'\]",
        ),
        (
            lambda: dgp.for_mcmc(shallow, {"a": 1.0}, guide=lambda X, y: numpyro.sample("g", dist.Gamma(1.0)))(X, Y),
            "expected a guide of Gaussians, got Gamma at 'g': give that site dgp.guides.Normal",
        ),
    ],
)
def test_wrong_calls(build, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: (handlers.seed(build, 0)(), None)[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "collapse"),
    [("inducing points", "auto"), *((name, False) for name in ("normal", "mean field", "given inducing", "NumPyro's"))],
)
def test_numbers_behind_a_draw(name, collapse):
    """Values of the sites lead back to the numbers that they were drawn from."""
    guide, params = fitted(name)
    prepared = dgp.for_mcmc(program, params, guide=guide, collapse=collapse)
    white = {
        site: jax.random.normal(jax.random.fold_in(jax.random.key(0), i), zeros.shape)
        for i, (site, zeros) in enumerate(standard(prepared, (ROWS, TARGET)).items())
    }
    sites = log_density(prepared, (ROWS, TARGET), {}, white)[1]
    values = {site.removesuffix("_white"): sites[site.removesuffix("_white")]["value"] for site in white}
    found = prepared.position_of(values, (ROWS, TARGET), {})
    assert found.keys() == white.keys()
    for site, numbers in white.items():
        np.testing.assert_allclose(found[site], numbers, atol=1e-6)


@pytest.mark.long
def test_chains_start_at_draws_of_the_guide_and_have_all_sites():
    guide, params = fitted("inducing points")
    prepared = dgp.for_mcmc(program, params, guide=guide)
    mcmc = MCMC(NUTS(prepared, init_strategy=init_to_sample()), num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), ROWS, TARGET)
    samples = mcmc.get_samples()
    assert {"noise", "scale", "f", "g", "w", "h", "twice"} <= set(samples)
    assert mcmc.last_state.z.keys() == {f"{name}_white" for name in ("noise", "scale", "f", "w", "h")}
    posterior = dgp.Posterior(program, samples=samples)
    assert posterior.using(num_samples=10).predict(jax.random.key(1), X).mean.shape == (30,)
    tree = dgp.diagnostics.to_arviz(mcmc, jax.random.key(1), ROWS, TARGET, local_samples=2)
    assert tree["log_likelihood_target"]["y"].shape == (1, 10, len(ROWS))


@pytest.mark.long
def test_the_target_is_the_same():
    """Moments of chains in the coordinates of a guide, a bad one, and without it."""
    guide, params = fitted("normal")
    chains = []
    for options in ({"guide": guide, "collapse": False}, {"guide": guide}, {}):
        kernel = NUTS(dgp.for_mcmc(program, params, **options), target_accept_prob=0.9)
        mcmc = MCMC(kernel, num_warmup=1000, num_samples=3000, progress_bar=False)
        mcmc.run(jax.random.key(2), ROWS, TARGET)
        chains.append(mcmc.get_samples())
    for name in ("noise", "scale", "f", "g", "h"):
        for moment in (lambda d: d, np.square):
            *new, old = (np.asarray(moment(d[name])).reshape(1, 3000, -1) for d in chains)
            of = lambda d: d.var((0, 1)) / numpyro.diagnostics.effective_sample_size(d)  # noqa: E731
            for a in new:
                error = np.sqrt(of(a) + of(old))
                assert (np.abs(a.mean((0, 1)) - old.mean((0, 1))) < 4.5 * error).all()
