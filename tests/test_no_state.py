"""Guides hold no state between calls, and values carry where they come from."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from programs import X, Y, Z, bayesian, deep, random_params, shallow
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.analysis.sites import rewrap, site_kind, unwrap

GUIDES = {
    "inducing-point": (bayesian, G.InducingPoint),
    "importance-weighted": (bayesian, lambda model: G.ImportanceWeighted(model, num_samples=3)),
    "mean-field": (bayesian, G.MeanField),
    "collapsed": (shallow, G.Collapsed),
    "nested": (shallow, G.Nested),
    "global": (deep, lambda model: G.InducingPoint(model, inducing=G.GlobalInducing(5))),
    "markov": (deep, lambda model: G.InducingPoint(model, sites={"g": G.MarkovInducing()})),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["inducing-point"], GUIDES))
def test_calls_leave_no_trace(name):
    model, make = GUIDES[name]
    guide = make(model)
    before = {key: copy.copy(value) for key, value in vars(guide).items()}
    svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    dgp.Posterior(model, guide.on(X, Y), params).using(num_samples=2).predict(jax.random.key(1), X[:3])
    guide.median(params, X, Y)
    assert vars(guide) == before


@pytest.mark.parametrize(
    "make",
    [
        dgp.Points,
        dgp.functions.InducingPatches,
        lambda a: dgp.functions.PointsAndSlopes(a, a),
        dgp.StateSpace,
        lambda a: dgp.Grid(0.0, a[1:, 0], 8),
        lambda a: dgp.Basis(0.0, a[1:, 0], 8),
        dgp.kernels.Embedding,
        lambda a: dgp.kernels.RBF(1.0, a[1:, 0]),
        lambda a: dgp.kernels.SpectralMixture(a[1:, 0], a[1:], a[1:]),
        lambda a: dgp.kernels.Convolutional(dgp.kernels.RBF(), dgp.kernels.Patches((1, 3), (1, 2)), a[:, 0]),
        lambda a: dgp.functions.StateSpaceNormal(dgp.kernels.Matern32(), a).times,
    ],
)
def test_arrays_are_copied(make):
    """They followed whatever became of the array that was given, after it was checked."""
    given = np.array([[0.0], [1.0]])
    made = make(given)
    before = jax.tree.map(np.array, made)
    given[:] = np.nan
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(made), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_medians_are_of_the_data_given():
    """Two data sets, one guide, in any order."""
    guide = G.Collapsed(shallow)
    first = guide.median({}, X, Y)["g"]
    second = guide.median({}, X[:10], -Y[:10])["g"]
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(guide.median({}, X, Y)["g"], first)


@pytest.mark.long
def test_bound_data_stay_with_their_own_guide():
    guide = G.Collapsed(shallow)
    one, two = guide.on(X, Y), guide.on(X, -Y)
    mean = lambda g: dgp.Posterior(shallow, g, {}).using(num_samples=2).predict(jax.random.key(0), X).mean  # noqa: E731
    np.testing.assert_allclose(mean(one), -mean(two), atol=1e-9)
    with pytest.raises(ValueError, match="got a call without observations"):
        mean(guide)
    assert G.InducingPoint(shallow).on(X, Y).model is shallow


@pytest.mark.long
def test_one_guide_in_threads():
    """Traced one at a time, since NumPyro's stack of handlers is one for all threads, and run at the same time."""
    guide, stack = G.InducingPoint(bayesian), threading.Lock()
    params = random_params(bayesian, guide, X, Y)

    def draw(n):
        def program(X, y):
            with stack:
                return handlers.substitute(handlers.seed(guide, n), data=params)(X, y)

        return jax.tree.map(np.asarray, jax.jit(program)(X + 0.1 * n, Y - 0.1 * n))

    numbers = range(4)
    alone = [draw(n) for n in numbers]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(draw, numbers))
    jax.tree.map(np.testing.assert_array_equal, alone, together)


@pytest.mark.slow
def test_a_guide_inside_another_program():
    """Nested use: a guide drawn from within the run of another one."""
    inner, outer = G.InducingPoint(shallow), G.InducingPoint(deep)

    def both():
        with handlers.scope(prefix="a", hide_types=["plate"]):
            first = inner(X, Y)
        return first, outer(X[:5], Y[:5])

    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        first, second = both()
    assert (sorted(first), sorted(second)) == (["g"], ["f", "g", "h"])
    assert {"a/g_auto_loc", "g_auto_loc", "f_auto_loc"} <= set(sites)
    assert second["h"].shape == (5, 1)


def opened(inducing=None, outputs=2):
    with handlers.seed(rng_seed=0), handlers.scope(prefix="outer"):
        return dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z) if inducing is None else inducing, outputs=outputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda f: f(X, noise=0.1),
        lambda f: f(X, noise=0.1).propagated(),
        lambda f: f.joint(X, noise=0.1),
        lambda f: f.joint(X, noise=0.1).propagated(),
        lambda f: f.joint(X, noise=0.1).marginals(),
    ],
)
@pytest.mark.parametrize("inducing", [dgp.Points(Z), dgp.Grid(-6.0, 6.0, 24)])
def test_values_know_their_origin(make, inducing):
    f = opened(inducing)
    values = make(f)
    assert f.site == "outer/f"
    leaves, treedef = jax.tree.flatten(values)
    wide = values.expand((3, *values.batch_shape))
    masked, more = values.mask(True), values.expand((4, *values.batch_shape)).to_event(1)
    for found in (values, wide, jax.tree.unflatten(treedef, leaves), unwrap(masked), unwrap(more)):
        assert found.function.site == "outer/f"
        assert found.noise == 0.1
        np.testing.assert_array_equal(found.inputs, X)
        np.testing.assert_allclose(found.function(X).mean, f(X).mean, rtol=1e-12)
    assert jax.jit(lambda v: v.function.site and v.inputs.sum())(values) == X.sum()


def test_exact_processes_have_no_site():
    f = dgp.gp("f", dgp.kernels.RBF(), None)
    assert f.site is None
    assert isinstance(f, dgp.extend.RandomFunction)
    with handlers.seed(rng_seed=0), handlers.trace() as sites:
        numpyro.sample("v", f(X))
    assert site_kind(sites["v"]) == "exact"


@pytest.mark.slow
def test_wrappers_go_around_what_replaces_a_distribution():
    values = opened()(X)
    q = dist.Normal(jnp.zeros((30, 2)), 1.0).to_event(1)
    fn = values.expand((4, 30)).mask(jnp.ones((4, 30), bool)).to_event(1)
    found = rewrap(q, fn)
    assert (found.batch_shape, found.event_shape) == (fn.batch_shape, fn.event_shape) == ((4,), (30, 2))


@pytest.mark.long
@pytest.mark.parametrize("make", mostly_long([G.MeanField], [G.InducingPoint, G.MeanField, AutoNormal]))
def test_hidden_values_with_to_event(make):
    """A layer drawn as one event is a hidden layer all the same."""

    def model(X, y=None):
        f, g = (dgp.gp(n, dgp.kernels.RBF(), dgp.Points(Z), outputs=o) for n, o in (("f", 1), ("g", None)))
        h = numpyro.sample("h", f(X, noise=0.1).to_event(1))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.3)), obs=y)

    svi = SVI(model, make(model), optax.adam(0.01), dgp.ELBO())
    assert np.isfinite(svi.run(jax.random.key(0), 3, X, Y, progress_bar=False).losses).all()
