"""Simulation-based calibration of every kernel on one- and two-layer programs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, init_to_sample

import numpyro_dgp as dgp
from numpyro_dgp.diagnostics import uniformity

rng = np.random.default_rng(0)
X = jnp.linspace(-1, 1, 8)[:, None]
Z = dgp.Points(jnp.linspace(-1, 1, 4)[:, None])
DRAWS = 50


def program(layers, X, y=None):
    """Every function is drawn, the last one too: the observations have the density that the chain sees."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.5))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), Z, outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 0.7), Z) if layers == 2 else None
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        mean = h[:, 0] if g is None else numpyro.sample("v", g(h))
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def under_a_likelihood(layers, X, y=None):
    """The last function under a Gaussian likelihood with its normalised density: ``for_mcmc`` integrates it."""
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    scale = numpyro.sample("scale", dist.LogNormal(-0.5, 0.5))
    g = dgp.gp("g", dgp.kernels.RBF(1.0, scale), Z)
    f = dgp.gp("f", dgp.kernels.RBF(0.3, 0.7), Z, outputs=1, mean=dgp.means.IdentityMean()) if layers == 2 else None
    with numpyro.plate("data", len(X)):
        h = X if f is None else numpyro.sample("h", f(X))
        likelihood = dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise), collapse="marginal")
        numpyro.sample("y", likelihood, obs=y)


def nuts(model):
    return NUTS(dgp.for_mcmc(model), max_tree_depth=6)


def ranks(
    layers, repeats, error=1.0, program=program, sites=("noise", "scale", "f"), kernel=nuts, warmup=200, thinning=4
):
    """Ranks of true values among draws of a chain given data simulated with them, by site: (repeats, ...)."""

    def model(X, y=None):
        program(layers, X, y)

    def once(key):
        truth_key, chain_key = jax.random.split(key)
        truth = handlers.trace(handlers.seed(dgp.for_mcmc(model), truth_key)).get_trace(X)
        mcmc = MCMC(
            kernel(model), num_warmup=warmup, num_samples=thinning * DRAWS, thinning=thinning, progress_bar=False
        )
        mcmc.run(chain_key, X, error * truth["y"]["value"])
        found = mcmc.get_samples()
        return {name: (found[name] < truth[name]["value"]).sum(0) for name in sites}

    found = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(layers), repeats))
    return {name: np.asarray(value).reshape(repeats, -1) for name, value in found.items()}


def p_values(found):
    return [
        uniformity((column + rng.uniform(size=len(column))) / (DRAWS + 1))
        for value in found.values()
        for column in value.T
    ]


@pytest.mark.long
@pytest.mark.parametrize(("layers", "repeats"), [(1, 120), (2, 60)])
def test_ranks_of_the_truth_are_uniform(layers, repeats):
    found = p_values(ranks(layers, repeats))
    assert min(found) > 0.01 / len(found)


@pytest.mark.long
@pytest.mark.parametrize(("layers", "repeats"), [(1, 120), (2, 60)])
def test_ranks_with_an_integrated_layer_are_uniform(layers, repeats):
    """Of its inducing values too, which are drawn after the chain."""
    found = p_values(ranks(layers, repeats, program=under_a_likelihood, sites=("noise", "scale", "g")))
    assert min(found) > 0.01 / len(found)


@pytest.mark.long
def test_wrong_data_are_noticed():
    """The same test sees data that are half as large again as the program makes them."""
    assert min(p_values(ranks(1, 120, error=1.5))) < 1e-4


# --- other kernels, on the program whose last layer may be integrated


def in_coordinates(model):
    """NUTS in the coordinates of a guide that was fitted to other data, briefly: a fair guide, not a good one."""
    y = handlers.trace(handlers.seed(model, 7)).get_trace(X)["y"]["value"]
    guide = dgp.guides.InducingPoint(model, other=dgp.guides.Normal())
    params = (
        SVI(model, guide, optax.adam(0.03), dgp.ELBO()).run(jax.random.key(3), 200, X, y, progress_bar=False).params
    )
    return lambda model: NUTS(
        dgp.for_mcmc(model, params, guide=guide), max_tree_depth=6, init_strategy=init_to_sample()
    )


def gibbs(**options):
    return lambda model: dgp.mcmc.Gibbs(model, **options)


SHORT = dgp.mcmc.BlockNUTS(max_tree_depth=4)
SAMPLERS = {
    "elliptical and slice": (1, gibbs(collapse=False, rest=dgp.mcmc.Slice())),
    "elliptical and NUTS": (2, gibbs(rest=SHORT)),
    "NUTS and slice": (1, gibbs(collapse=False, blocks={"g": SHORT}, rest=dgp.mcmc.Slice())),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_of_gibbs_are_uniform(name):
    layers, kernel = SAMPLERS[name]
    options = dict(program=under_a_likelihood, sites=("noise", "scale", "g"), kernel=kernel, warmup=100, thinning=10)
    found = p_values(ranks(layers, 100, **options))
    assert min(found) > 0.01 / len(found)


@pytest.mark.long
@pytest.mark.parametrize("layers", [1, 2])
def test_ranks_in_the_coordinates_of_a_guide_are_uniform(layers):
    kernel = in_coordinates(lambda X, y=None: under_a_likelihood(layers, X, y))
    options = dict(program=under_a_likelihood, sites=("noise", "scale", "g"), kernel=kernel)
    found = p_values(ranks(layers, 100, **options))
    assert min(found) > 0.01 / len(found)


class Cold(dgp.mcmc.EllipticalSlice):
    """A wrong update: of the cube of the density."""

    def move(self, key, state, z, energy, given):
        cube = given._replace(density=lambda z: 3 * given.density(z))
        state, z, energy = super().move(key, state, z, 3 * energy, cube)
        return state, z, energy / 3


@pytest.mark.long
def test_a_wrong_update_is_noticed():
    kernel = gibbs(collapse=False, blocks={"g": Cold()}, rest=dgp.mcmc.Slice())
    options = dict(program=under_a_likelihood, sites=("noise", "scale", "g"), kernel=kernel, warmup=100, thinning=10)
    assert min(p_values(ranks(1, 100, **options))) < 1e-4


def test_reliability_of_class_probabilities():
    """Against sums by hand, and the error of right probabilities against what chance gives."""
    p = np.array([[0.9, 0.1, 0.0], [0.85, 0.1, 0.05], [0.2, 0.3, 0.5], [0.1, 0.45, 0.45], [0.0, 0.0, 1.0]])
    y = np.array([0, 1, 2, 2, 2])
    found = dgp.diagnostics.class_calibration(p, y, bins=5)
    np.testing.assert_allclose(found.probability, [0.475, 2.75 / 3])  # 0.5 and 0.45, the first of two; 0.9, 0.85, 1
    np.testing.assert_allclose(found.share, [0.5, 2 / 3])
    np.testing.assert_array_equal(found.num_data, [2, 3])
    np.testing.assert_allclose(found.ece, (2 * abs(0.5 - 0.475) + 3 * abs(2 / 3 - 2.75 / 3)) / 5)
    variance = 0.25 + 0.45 * 0.55 + 0.09 + 0.85 * 0.15
    np.testing.assert_allclose(found.ece_error, np.sqrt(variance) / 5)
    np.testing.assert_allclose(found.error[0], np.sqrt(0.25 + 0.45 * 0.55) / 2)
    one = dgp.diagnostics.class_calibration(p, y, bins=1, label=2)
    np.testing.assert_allclose([one.probability[0], one.share[0]], [2.0 / 5, 3 / 5])
    assert list(found.table.columns) == ["probability", "share", "error", "num_data"]
    assert repr(one).startswith("ClassCalibration(probability=[0.4], share=[0.6]")
    rng = np.random.default_rng(0)
    q = rng.uniform(size=(2000, 300))
    errors = [dgp.diagnostics.class_calibration(row, rng.uniform(size=300) < row) for row in q[:200]]
    np.testing.assert_allclose(np.mean([e.ece for e in errors]), np.mean([e.ece_by_chance for e in errors]), rtol=0.05)


@pytest.mark.parametrize(
    ("probs", "y", "message"),
    [
        (np.ones((3, 2)) / 2, np.zeros(2), r"got \(3, 2\) and \(2,\)"),
        (np.full((3, 2), 1.5), np.zeros(3), "probabilities between 0 and 1"),
        (np.ones((3, 2)) / 2, np.array([0, 1, 2]), "labels from 0 to 1"),
        (np.full((3, 2), np.nan), np.zeros(3), "finite probabilities"),
    ],
)
def test_wrong_class_probabilities(probs, y, message):
    with pytest.raises(ValueError, match=message):
        dgp.diagnostics.class_calibration(probs, y)
