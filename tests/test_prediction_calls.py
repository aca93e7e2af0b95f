"""What a call of ``Posterior`` means: latents that other observed sites see, inducing inputs made from the call's rows,
labels, and parameters or draws that are not those of the program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from programs import NOISE, X, Y, Z, bayesian, deep, random_params, shallow

import numpyro_dgp as dgp

NEW = jnp.linspace(-2.0, 2.0, 30)[:, None]
PLANE = jnp.hstack([Z, jnp.sin(9 * Z)])
IGNORED = "'z' is observed in this call, which does not change the prediction: .*'w' at new rows"


def seen_twice(X, y=None, z=None, explicit=False):
    """A latent per datum below two observed sites."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(PLANE))
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, 1)
        numpyro.sample("z", dist.Normal(x[:, 1], 0.1), obs=z)
        if explicit:
            numpyro.sample("y", dist.Normal(numpyro.sample("v", f(x)), NOISE), obs=y)
        else:
            numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, NOISE)), obs=y)


W = 0.5 * X[:, 0]
GUIDE = dgp.guides.InducingPoint(seen_twice)
PARAMS = random_params(seen_twice, GUIDE, X, Y, W)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [30, 7])
@pytest.mark.parametrize("source", ["guide", "chain"])
def test_latents_of_a_prediction_do_not_take_those_of_the_fit(source, rows, key):
    """Neither where there are as many rows as in the fit nor elsewhere, and with a chain as with a guide."""
    if source == "guide":
        params = PARAMS | {"w_auto_loc": jnp.full((30, 1), 100.0)}
        posterior = dgp.Posterior(seen_twice, GUIDE, params, site="y")
    else:
        samples = {"f": jnp.zeros((4, 8)), "w": jnp.full((4, 30, 1), 100.0)}
        posterior = dgp.Posterior(seen_twice, samples=samples, site="y")
    with pytest.warns(UserWarning, match=IGNORED):
        inputs = posterior.layers(key, NEW[:rows], z=jnp.full(rows, 0.4))["y"][1]
    assert inputs.shape == (rows, 2)
    assert jnp.abs(inputs[:, 1]).max() < 10


@pytest.mark.long
def test_a_guide_and_a_chain_give_one_prediction(key):
    """With equal posteriors of what is shared, whatever is observed beside."""
    params = PARAMS | {"f_auto_scale_tril": 1e-4 * jnp.eye(8)}
    samples = {"f": jnp.broadcast_to(params["f_auto_loc"], (600, 8))}
    both = [
        dgp.Posterior(seen_twice, GUIDE, params, site="y"),
        dgp.Posterior(seen_twice, samples=samples, site="y"),
    ]
    with pytest.warns(UserWarning, match=IGNORED):
        a, b = (p.using(num_samples=600).predict(key, NEW, z=jnp.full(30, 0.4)).means for p in both)
    error = jnp.sqrt((a.var(0) + b.var(0)) / 600)
    assert (jnp.abs(a.mean(0) - b.mean(0)) < 4.5 * error).all()


@pytest.mark.slow
def test_an_observation_beside_leaves_no_fresh_parameters(key):
    """An explicit y is predicted, not given a posterior of its own, where another site of the same rows is observed."""
    program = lambda X, y=None, z=None: seen_twice(X, y, z, explicit=True)  # noqa: E731
    guide = dgp.guides.InducingPoint(program)
    params = random_params(program, guide, X, Y, W)
    posterior = dgp.Posterior(program, guide, params, site="y")
    with pytest.warns(UserWarning, match=IGNORED):
        found = posterior.layers(key, NEW[:7], z=W[:7])
    assert found["v"][1].shape == (7, 2)


@pytest.mark.slow
def test_collapsed_keeps_its_data_where_another_site_is_observed(key):
    """It would otherwise compute q(v) from the observations of the call."""

    def two(X, y=None, z=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            for name, value in (("y", y), ("z", z)):
                numpyro.sample(name, dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=value)

    posterior = dgp.Posterior(two, dgp.guides.Collapsed(two).on(X, Y, Y), site="y")
    alone, _ = posterior.layers(key, NEW)["y"]
    with pytest.warns(UserWarning, match="'z' is observed in this call, .* 'f' is that of the fit"):
        beside, _ = posterior.layers(key, NEW, z=jnp.full(30, 5.0))["y"]
    np.testing.assert_allclose(beside(NEW).mean, alone(NEW).mean)


@pytest.mark.slow
def test_a_guide_need_not_have_what_the_program_is_given(key):
    """By a handler, or among the parameters: then nothing is drawn from its prior."""

    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        shallow(X, y, kernel=dgp.kernels.RBF(1.2, scale))

    params = {"g_auto_loc": jnp.linspace(-1, 1, 8), "g_auto_scale_tril": 0.1 * jnp.eye(8)}
    guide = dgp.guides.InducingPoint(shallow)
    expected = dgp.Posterior(shallow, guide, params).predict(key, NEW).mean
    for program, given in (
        (handlers.substitute(model, data={"scale": 0.7}), params),
        (handlers.condition(model, data={"scale": 0.7}), params),
        (model, params | {"scale": jnp.array(0.7)}),
    ):
        np.testing.assert_allclose(dgp.Posterior(program, guide, given).predict(key, NEW).mean, expected)


def two_sources(X, group, y=None, sizes=None):
    """Numbers per group, seen by data of the groups and by the data that are predicted."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("sizes", dgp.Likelihood(f(Z[:3]), lambda v: dist.Normal(v + a, 0.1)), obs=sizes)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v + a[group], NOISE)), obs=y)


@pytest.mark.long
def test_latents_of_other_rows_keep_their_posterior_where_these_are_observed(key):
    sizes, group = jnp.array([10.0, 20.0, 30.0]), jnp.arange(30) % 3
    guide = dgp.guides.InducingPoint(two_sources)
    params = random_params(two_sources, guide, X, group, Y, sizes)
    params |= {"a_auto_loc": sizes, "a_auto_scale": jnp.full(3, 1e-3), "f_auto_loc": jnp.zeros(8)}
    params |= {"f_auto_scale_tril": 1e-3 * jnp.eye(8)}
    samples = {"f": jnp.zeros((2, 8)), "a": jnp.broadcast_to(sizes, (2, 3))}
    for posterior in (
        dgp.Posterior(two_sources, guide, params, site="y"),
        dgp.Posterior(two_sources, samples=samples, site="y"),
    ):
        found = posterior.using(num_samples=2).predict(key, X[:7], group[:7], sizes=sizes)
        np.testing.assert_allclose(found.mean, sizes[group[:7]], atol=0.02)
        with pytest.warns(UserWarning, match="'a' belongs to rows of other data.*drawn from its prior"):
            posterior.layers(key, X[:7], group[:7])


def from_rows(X, y=None, how="slice", Z=None, scale=None):
    X = X if scale is None else X / scale
    inducing = {
        "slice": X[::4],
        "head": X[:6],
        "range": X.min() + jnp.linspace(0, 1, 6)[:, None] * (X.max() - X.min()),
        "lengthscale": PLANE[:, :1],
        "fixed": PLANE[:, :1] if scale is None else PLANE[:, :1] / scale,
        "argument": Z,
    }[how]
    width = X.std() if how == "lengthscale" else numpyro.sample("width", dist.LogNormal(jnp.log(X.std()), 0.1))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, width), dgp.Points(inducing))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.parametrize("how", ["slice", "head", "range", "lengthscale"])
@pytest.mark.parametrize("method", ["predict", "sample", "hidden", "functions", "layers", "log_density"])
def test_functions_of_the_rows_of_a_call_are_refused(how, method, key):
    """Before anything is compiled, at the rows of the fit too: elsewhere it would be another function."""
    posterior = dgp.Posterior(from_rows, samples={"f": jnp.zeros((2, 8)), "width": jnp.ones(2)})
    calls = {
        "functions": lambda: posterior.functions(key)(X, how=how),
        "log_density": lambda: posterior.log_density(key, Y, X, how=how),
    }
    call = calls.get(method, lambda: getattr(posterior, method)(key, X, how=how))
    with pytest.raises(ValueError, match="'f' that do not depend on the rows of the call, got some computed from X"):
        call()


@pytest.mark.parametrize(
    "settings",
    [{"how": "fixed"}, {"how": "fixed", "scale": jnp.ones(1)}, {"how": "argument", "Z": Z}],
    ids=["fixed", "fixed in the units of the call", "an argument of its own"],
)
def test_functions_of_other_arguments_are_not_refused(settings, key):
    posterior = dgp.Posterior(from_rows, samples={"f": jnp.zeros((2, 8)), "width": jnp.ones(2)})
    assert posterior.layers(key, NEW, **settings)["y"][1].shape == (30, 1)


def test_learned_inducing_inputs_may_start_from_the_rows_of_the_fit(key):
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X[:5], learn=True))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)

    posterior = dgp.Posterior(model, samples={"f": jnp.ones((1, 5))}, params={"f_Z": X[::6]})
    np.testing.assert_array_equal(posterior.layers(key, NEW)["y"][0].Z, X[::6])


def classifier(X, y=None, kind="softmax", explicit=False):
    outputs = None if kind == "bernoulli" else 3
    conditional = {
        "softmax": lambda v: dist.Categorical(logits=v),
        "robust-max": lambda v: dgp.likelihoods.RobustMax(v, 0.1),
        "bernoulli": lambda v: dist.Bernoulli(logits=v),
    }[kind]
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=outputs)
    with numpyro.plate("data", len(X)):
        likelihood = dgp.Likelihood(
            f(X), conditional, integrate=dgp.likelihoods.MonteCarlo(200) if kind == "softmax" else None
        )
        observed = conditional(numpyro.sample("v", f(X))) if explicit else likelihood
        numpyro.sample("y", observed, obs=y)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("softmax", marks=pytest.mark.long), "robust-max", "bernoulli"])
def test_probabilities_are_those_of_draws(kind, key):
    K = 2 if kind == "bernoulli" else 3
    samples = {"f": jax.random.normal(key, (8,) if K == 2 else (3, 8))[None]}
    posterior = dgp.Posterior(lambda X, y=None: classifier(X, y, kind), samples=samples)
    p = posterior.probs(key, NEW[::5])
    assert p.shape == (6, K)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)
    many = {"f": jnp.broadcast_to(samples["f"][0], (1000, *samples["f"].shape[1:]))}
    y = (
        dgp.Posterior(lambda X, y=None: classifier(X, y, kind), samples=many)
        .using(num_samples=1000)
        .sample(key, NEW[::5])
    )
    share = (y[..., None] == jnp.arange(K)).mean(0)
    width = 0.08 if kind == "softmax" else 0.0  # one set of 200 nodes
    assert (jnp.abs(p - share) < 4.5 * jnp.sqrt(p * (1 - p) / 1000) + 1e-3 + width).all()
    density = posterior.log_density(key, jnp.zeros(6, int), NEW[::5])
    np.testing.assert_allclose(density, jnp.log(p[:, 0]), rtol=1e-6 if kind != "softmax" else 0.2, atol=1e-6)


@pytest.mark.long
def test_probabilities_of_an_explicit_program(key):
    posterior = dgp.Posterior(lambda X, y=None: classifier(X, y, explicit=True), samples={"f": jnp.zeros((50, 3, 8))})
    p = posterior.probs(key, NEW[:4])
    assert p.shape == (4, 3)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-6)


@pytest.mark.long
def test_all_draws_are_used_where_there_are_fewer_than_the_default(key):
    posterior = dgp.Posterior(shallow, samples={"g": jax.random.normal(key, (7, 8))})
    assert posterior.predict(key, NEW[:2]).means.shape == (7, 2)
    assert posterior.functions(key)(NEW[:2])["y"].shape == (7, 2)


@pytest.mark.long
def test_parameters_of_single_data_are_not_missed_at_new_rows(key):
    """MeanField has a Gaussian per hidden value of the fit; a prediction needs none of them, and has them at hand."""
    guide = dgp.guides.MeanField(bayesian)
    params = random_params(bayesian, guide, X, Y)
    assert {"h_auto_loc", "w_auto_loc"} <= params.keys()
    layers = dgp.Posterior(bayesian, guide, params).layers(key, NEW[:7])
    assert {name: rows.shape for name, (_, rows) in layers.items()} == {"h": (7, 2), "y": (7, 1)}


@pytest.mark.long
def test_layers_at_the_rows_of_the_fit(key):
    """A call with the observations is one at the rows of the fit: hidden values and latents are those of the fit."""
    guide = dgp.guides.MeanField(bayesian)
    params = random_params(bayesian, guide, X, Y)
    params |= {name: jnp.full_like(value, 1e-6) for name, value in params.items() if name.endswith("auto_scale")}
    layers = dgp.Posterior(bayesian, guide, params).layers(key, X, Y)
    np.testing.assert_allclose(layers["y"][1].ravel(), params["h_auto_loc"].ravel(), atol=1e-4)
    np.testing.assert_allclose(layers["h"][1][:, -1], params["w_auto_loc"].ravel(), atol=1e-4)
    drawn = guide.sample_posterior(key, params, X, Y, sample_shape=(3,))
    layers = dgp.Posterior(bayesian, samples=drawn, params={"g_Z": params["g_Z"]}).layers(key, X, Y)
    np.testing.assert_array_equal(layers["y"][1].ravel(), drawn["h"][0].ravel())
    np.testing.assert_array_equal(layers["h"][1][:, -1], drawn["w"][0].ravel())
    weighted = dgp.guides.ImportanceWeighted(bayesian, num_samples=3)
    with pytest.raises(
        ValueError, match=r"Posterior\.layers: expected a call without observations, got the data of the fit"
    ):
        dgp.Posterior(bayesian, weighted, params).layers(key, X, Y)
    with pytest.raises(ValueError, match=r"each draw of 'w' to have shape \(7, 1\), got \(30, 1\)"):
        dgp.Posterior(bayesian, samples=drawn).layers(key, X[:7], Y[:7])


@pytest.mark.slow
def test_layers_of_an_exact_process_at_the_rows_of_the_fit(key):
    """Whoever passes the observations says which rows these are: there is nothing to warn of."""

    def program(X, y=None):
        v = numpyro.sample("v", dgp.gp("f", dgp.kernels.RBF(), None)(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(v, 0.1), obs=y)

    guide = dgp.guides.InducingPoint(program)
    posterior = dgp.Posterior(program, guide, random_params(program, guide, X, Y))
    f, inputs = posterior.layers(key, X, Y)["v"]
    np.testing.assert_array_equal(inputs, X)
    assert f(X).mean.shape == (30,)
    with pytest.warns(
        UserWarning, match="expected the rows of the fit, in their order, in a call without observations"
    ):
        posterior.layers(key, X)
    with pytest.raises(ValueError, match="expected the exact process at 'v' at the rows of the fit"):
        posterior.layers(key, X[:7], Y[:7])


@pytest.mark.slow
def test_parameters_of_other_programs_are_ignored_with_a_warning(key):
    guide = dgp.guides.InducingPoint(shallow)
    params = random_params(deep, dgp.guides.InducingPoint(deep), X, Y)
    with pytest.warns(UserWarning, match="sites that the model does not have, 'f_auto_loc', 'f_auto_scale_tril'"):
        dgp.Posterior(shallow, guide, params).layers(key, NEW[:2])


@pytest.mark.slow
def test_observations_under_a_mask_may_be_anything(key):
    def program(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
        with numpyro.plate("data", len(X)), numpyro.handlers.mask(mask=jnp.arange(len(X)) < 20):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Poisson(jnp.exp(v))), obs=y)

    counts = jnp.where(jnp.arange(30) < 20, 1, -1)
    guide = dgp.guides.InducingPoint(program)
    params = random_params(program, guide, X, counts)
    assert np.isfinite(dgp.ELBO().loss(key, params, program, guide, X, counts))


def exact_at(rows, X, y=None):
    """An exact process at ``rows``, which a call at X reads off; at the rows of the call if there are none."""
    f = dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), None)
    v = numpyro.sample("v", f(X if rows is None else rows))
    with numpyro.plate("data", len(X)):
        if rows is None:
            numpyro.sample("y", dist.Normal(v, NOISE), obs=y)
        else:
            numpyro.sample("y", dgp.Likelihood(f.condition(rows, v)(X), lambda v: dist.Normal(v, NOISE)), obs=y)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, {"loc": jnp.ones((1, 30)), "scale_tril": jnp.eye(30)[None]}),
        ({"exact": dgp.guides.OpperArchambeau()}, {"alpha": jnp.ones(30), "lambda": jnp.ones(30)}),
        ({"exact": dgp.guides.Normal()}, {"loc": jnp.ones(30), "scale": jnp.ones(30)}),
        ({"exact": dgp.guides.Delta()}, {"loc": jnp.ones(30)}),
    ],
    ids=["full", "two numbers", "independent", "point"],
)
def test_an_exact_process_at_fewer_rows_is_refused(rows, options, params, key):
    guide = dgp.guides.InducingPoint(partial(exact_at, None), **options)
    program = handlers.substitute(guide, data={f"v_auto_{name}": value for name, value in params.items()})
    with pytest.raises(ValueError, match="exact process at 'v' at the rows of the fit, got shape"):
        jax.eval_shape(lambda: handlers.seed(program, key)(X[:rows]))


@pytest.mark.long
def test_an_exact_process_conditioned_on_its_values_predicts_anywhere(key):
    """As the message says: a program whose process stays at the rows of the fit."""
    model = partial(exact_at, X)
    params = {"v_auto_loc": jnp.ones((1, 30)), "v_auto_scale_tril": 1e-3 * jnp.eye(30)[None]}
    posterior = dgp.Posterior(model, dgp.guides.InducingPoint(model), params)
    near, far = posterior.predict(key, X[:7]), posterior.predict(key, X[:7] + 50)
    assert (jnp.abs(near.mean) > 0.1).any()
    np.testing.assert_allclose(far.mean, 0.0, atol=1e-6)
    np.testing.assert_allclose(far.variance, 1.2 + NOISE**2, rtol=1e-3)


def of_lengthscale(X, y=None, lengthscale=0.7):
    shallow(X, y, kernel=dgp.kernels.RBF(1.2, lengthscale))


@pytest.mark.long
def test_hyperparameters_of_a_prediction_may_be_traced(key):
    """As an argument of the model and as a number that the model holds, under ``vmap`` and ``grad``."""
    guide = dgp.guides.InducingPoint(shallow)
    params, scales = random_params(shallow, guide, X, Y), jnp.array([0.5, 0.9])

    def by_argument(lengthscale):
        posterior = dgp.Posterior(of_lengthscale, dgp.guides.InducingPoint(of_lengthscale), params)
        return posterior.using(num_samples=1).log_density(key, Y, X, lengthscale=lengthscale).sum()

    def held(lengthscale):
        model = partial(of_lengthscale, lengthscale=lengthscale)
        posterior = dgp.Posterior(model, dgp.guides.InducingPoint(model), params)
        return posterior.using(num_samples=1).log_density(key, Y, X).sum()

    expected = jnp.array([by_argument(float(scale)) for scale in scales])
    assert abs(expected[1] - expected[0]) > 0.5
    assert jnp.allclose(by_argument(scales[0]), expected[0])
    for call in by_argument, held:
        assert jnp.allclose(jax.vmap(call)(scales), expected)
    slope = (by_argument(0.5 + 1e-5) - by_argument(0.5 - 1e-5)) / 2e-5
    assert jnp.allclose(jax.grad(held)(0.5), slope, rtol=1e-4)


HELD = ["predict", "predict_function", "hidden", "layers", "functions", "sample_posterior"]


@pytest.mark.slow
@pytest.mark.parametrize("method", HELD)
def test_a_fit_within_another_program_has_no_sites_there(method, key):
    """A fitted function as a mean: the program has its own sites, and the prediction is that of outside."""
    guide = dgp.guides.InducingPoint(deep)
    posterior = dgp.Posterior(deep, guide, random_params(deep, guide, X, Y))

    def mean(x):
        if method == "sample_posterior":
            return guide.sample_posterior(key, posterior.params, x)["g"].sum() + x
        if method == "layers":
            f, inputs = posterior.layers(key, x)["h"]
            return f(inputs).mean
        if method == "functions":
            return posterior.using(num_samples=1).functions(key)(x)["y"].T
        if method == "hidden":
            return posterior.using(num_samples=2).hidden(key, x)["h"].mean(0)
        return getattr(posterior.using(num_samples=2), method)(key, x).mean[:, None]

    def outer(x):
        v = dgp.gp("v", dgp.kernels.RBF(), dgp.Points(Z), mean=mean, outputs=1)
        with numpyro.plate("rows", len(x)):
            numpyro.sample("w", v(x))

    x = X[:3]
    with handlers.trace() as sites, handlers.seed(rng_seed=0), handlers.substitute(data={"v": jnp.zeros((1, len(Z)))}):
        outer(x)
    assert list(sites) == ["v", "rows", "w"]
    np.testing.assert_allclose(sites["w"]["fn"].mean, mean(x), rtol=1e-6)


def siblings(X, y=None, c=None, more=None):
    """Two outcomes of one function, a value that is known beforehand, and another source of data."""
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    numpyro.sample("known", dgp.Likelihood(f(Z[:1]), lambda v: dist.Normal(v, NOISE)), obs=jnp.zeros(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)
        numpyro.sample("c", dgp.Likelihood(f(X), lambda v: dist.Bernoulli(logits=v)), obs=c)
    if more is not None:
        with numpyro.plate("others", 3):
            numpyro.sample("z", dgp.Likelihood(f(Z[:3]), lambda v: dist.Normal(v, NOISE)), obs=more)


def test_an_observation_of_the_same_function_warns_and_names_condition():
    posterior = dgp.Posterior(siblings, samples={"f": jnp.zeros((2, len(Z)))}, site="c")
    warning = "'{}' is observed in this call, which does not change the prediction: 'f' is that of the fit.*"
    with pytest.warns(UserWarning, match=warning.format("y") + r"dgp.condition\(posterior, key, X, y\)"):
        posterior.call((jnp.array([[3.0]]), jnp.array([5.0])), {})
    with pytest.warns(UserWarning, match=warning.format("z")):
        posterior.call((X[:2],), {"more": jnp.ones(3)})
    posterior.call((X[:2],), {})  # what the program itself observes is the same in the fit


@pytest.mark.slow
def test_export_with_a_symbolic_number_of_rows():
    """Of one row, over rows: the program sees known shapes. Whole rows are refused in a sentence."""
    from jax import export

    def line(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 4)[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    params = {"f_auto_loc": jnp.arange(4.0), "f_auto_scale_tril": 0.1 * jnp.eye(4)}
    posterior, key = dgp.Posterior(line, dgp.guides.InducingPoint(line), params), jax.random.key(0)
    (n,) = export.symbolic_shape("n")
    rows = jax.ShapeDtypeStruct((n, 1), jnp.result_type(float))
    of_row = jax.jit(jax.vmap(lambda x: posterior.predict(key, x[None]).mean[0]))
    exported = export.export(of_row)(rows)
    for count in (1, 3):
        X = jnp.linspace(0, 1, count)[:, None]
        np.testing.assert_allclose(exported.call(X), posterior.predict(key, X).mean, rtol=1e-6)
    with pytest.raises(ValueError, match=r"expected a number of rows, got a symbolic one, .* jax.vmap\(lambda x"):
        export.export(jax.jit(lambda X: posterior.predict(key, X).mean))(rows)
    with pytest.raises(ValueError, match="a symbolic one"):
        export.export(jax.jit(lambda X: posterior.log_density(key, X[:, 0], X)))(rows)


@pytest.mark.slow
def test_options_are_those_of_the_posterior_and_share_its_programs(key):
    """What is not given stays; a parameter of the program that is called like an option is the program's."""
    seen = []

    def program(X, y=None, num_samples=None, **kwargs):
        seen.append((num_samples, kwargs))
        shallow(X, y)

    posterior = dgp.Posterior(program, samples={"g": jax.random.normal(key, (20, 8))})
    few = posterior.using(num_samples=3, progress_bar=False)
    again = few.using(batch_size=10)
    assert (again.options.num_samples, again.options.batch_size, again.options.progress_bar) == (3, 10, False)
    assert few.options.batch_size is None
    assert posterior.options.num_samples is None
    found, batched = few.predict(key, NEW), again.predict(key, NEW)
    assert found.means.shape == (3, 30)
    assert isinstance(batched.means, np.ndarray)
    np.testing.assert_allclose(found.means, batched.means, rtol=1e-6)
    before = len(seen)
    np.testing.assert_array_equal(posterior.using(num_samples=3).predict(key, NEW).means, found.means)
    assert len(seen) == before  # nothing was traced again
    assert few.on(X, Y).options == few.options
    assert few.predict(key, NEW, num_samples=7, width=2).means.shape == (3, 30)
    assert seen[-1] == (7, {"width": 2})
    assert few.predict_jointly(key, NEW[:4]).means.shape == again.predict_jointly(key, NEW[:4]).means.shape == (3, 4)
