"""Likelihoods of several functions, against sums over dense grids and the sites of a program."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.util import log_density

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.math.quadrature import ProductGrid

rng = np.random.default_rng(0)
MEANS, VARIANCES = rng.normal(size=(3, 3)), rng.uniform(0.1, 0.6, size=(3, 3))


def scalar(column):
    return FunctionValues(jnp.array(MEANS[:, column]), jnp.array(VARIANCES[:, column]), event_dim=0)


F, G, H = (scalar(column) for column in range(3))
PAIR = FunctionValues(jnp.array(MEANS[:, :2]), jnp.array(VARIANCES[:, :2]))
ONE = FunctionValues(jnp.array(MEANS[:, 2:]), jnp.array(VARIANCES[:, 2:]))
Y, Y2 = jnp.array([0.1, -0.4, 0.8]), jnp.array([[0.1, 1.0], [-0.4, 0.2], [0.8, -0.3]])


def dense(conditional, columns, y, size=81, width=7.5):
    """E log p and log E p per row, by sums over a fine regular grid of the numbers of v of the row."""
    z = np.linspace(-width, width, size)
    axes = np.stack(np.meshgrid(*[z] * len(columns), indexing="ij"), -1).reshape(-1, len(columns))
    weights = np.exp(-0.5 * np.square(axes).sum(1))
    weights /= weights.sum()
    points = MEANS[:, columns] + np.sqrt(VARIANCES[:, columns]) * axes[:, None]  # (grid, rows, columns)
    log_p = np.asarray(conditional(jnp.asarray(points)).log_prob(y))
    top = log_p.max(0)
    return weights @ log_p, top + np.log(weights @ np.exp(log_p - top))


def likelihood_of_sum(*v):
    return dist.Normal(v[0] - 2 * v[1] + 0.5 * v[2] + 3 * v[3], 0.7)


CASES = {  # values, conditional of each, conditional of all columns, observations, how
    "log scale": (
        (F, G),
        lambda v, s: dist.Normal(2 * v - 1, jnp.exp(0.5 * s)),
        lambda a: dist.Normal(2 * a[..., 0] - 1, jnp.exp(0.5 * a[..., 1])),
        Y,
        "closed form",
    ),
    "log variance": (
        (F, G),
        lambda v, s: dist.Normal(v, jnp.sqrt(jnp.exp(s - 1.0))),
        lambda a: dist.Normal(a[..., 0], jnp.exp(0.5 * a[..., 1] - 0.5)),
        Y,
        "closed form",
    ),
    "the other order": (
        (F, G),
        lambda s, v: dist.Normal(v, jnp.exp(s)),
        lambda a: dist.Normal(a[..., 1], jnp.exp(a[..., 0])),
        Y,
        "closed form",
    ),
    "softplus": (
        (F, G),
        lambda v, s: dist.Normal(v, 0.3 + jax.nn.softplus(s)),
        lambda a: dist.Normal(a[..., 0], 0.3 + jax.nn.softplus(a[..., 1])),
        Y,
        "20 Gauss-Hermite nodes",
    ),
    "student-t": (
        (F, G),
        lambda v, s: dist.StudentT(4.0, v, jnp.exp(0.5 * s)),
        lambda a: dist.StudentT(4.0, a[..., 0], jnp.exp(0.5 * a[..., 1])),
        Y,
        "225 Gauss-Hermite nodes",
    ),
    "beta": (
        (F, G),
        lambda v, s: dist.BetaProportion(jax.nn.sigmoid(v), 2 + jnp.exp(s)),
        lambda a: dist.BetaProportion(jax.nn.sigmoid(a[..., 0]), 2 + jnp.exp(a[..., 1])),
        jnp.array([0.1, 0.5, 0.8]),
        "225 Gauss-Hermite nodes",
    ),
    "gamma": (
        (F, G),
        lambda v, s: dist.Gamma(1 + jnp.exp(s), jnp.exp(v)),
        lambda a: dist.Gamma(1 + jnp.exp(a[..., 1]), jnp.exp(a[..., 0])),
        jnp.array([0.1, 0.5, 2.8]),
        "225 Gauss-Hermite nodes",
    ),
    "negative binomial": (
        (F, G),
        lambda v, s: dist.NegativeBinomial2(jnp.exp(v), jnp.exp(s)),
        lambda a: dist.NegativeBinomial2(jnp.exp(a[..., 0]), jnp.exp(a[..., 1])),
        jnp.array([0, 2, 5]),
        "225 Gauss-Hermite nodes",
    ),
    "zero-inflated": (
        (F, G),
        lambda v, s: dist.ZeroInflatedPoisson(jax.nn.sigmoid(s), jnp.exp(v)),
        lambda a: dist.ZeroInflatedPoisson(jax.nn.sigmoid(a[..., 1]), jnp.exp(a[..., 0])),
        jnp.array([0, 2, 5]),
        "225 Gauss-Hermite nodes",
    ),
    "three functions": (
        (F, G, H),
        lambda v, s, w: dist.StudentT(3 + jnp.exp(w), v, jnp.exp(0.5 * s)),
        lambda a: dist.StudentT(3 + jnp.exp(a[..., 2]), a[..., 0], jnp.exp(0.5 * a[..., 1])),
        Y,
        "512 Gauss-Hermite nodes",
    ),
    "three functions, one in closed form": (
        (F, G, H),
        lambda v, s, w: dist.Normal(v, 0.5 + jax.nn.softplus(s) * jax.nn.sigmoid(w)),
        lambda a: dist.Normal(a[..., 0], 0.5 + jax.nn.softplus(a[..., 1]) * jax.nn.sigmoid(a[..., 2])),
        Y,
        "225 Gauss-Hermite nodes",
    ),
    "columns that share a scale": (
        (PAIR, ONE),
        lambda v, s: dist.Normal(v, jnp.exp(0.5 * s)).to_event(1),
        lambda a: dist.Normal(a[..., :2], jnp.exp(0.5 * a[..., 2:])).to_event(1),
        Y2,
        "closed form",
    ),
    "columns that share a scalar scale": (
        (PAIR, H),
        lambda v, s: dist.StudentT(5.0, v, jnp.exp(0.5 * s)[..., None]).to_event(1),
        lambda a: dist.StudentT(5.0, a[..., :2], jnp.exp(0.5 * a[..., 2:])).to_event(1),
        Y2,
        "225 Gauss-Hermite nodes",
    ),
    "a difference": (
        (F, G),
        lambda v, w: dist.Normal(v - 2 * w + 1, 0.6),
        lambda a: dist.Normal(a[..., 0] - 2 * a[..., 1] + 1, 0.6),
        Y,
        "closed form",
    ),
    "a sum and a log scale": (
        (F, G, H),
        lambda v, s, w: dist.Normal(3 * w + v, jnp.exp(0.5 * s)),
        lambda a: dist.Normal(3 * a[..., 2] + a[..., 0], jnp.exp(0.5 * a[..., 1])),
        Y,
        "closed form",
    ),
    "a sum and another scale": (
        (F, G, H),
        lambda v, w, s: dist.Normal((v + w) / 2, 0.3 + jax.nn.softplus(s)),
        lambda a: dist.Normal((a[..., 0] + a[..., 1]) / 2, 0.3 + jax.nn.softplus(a[..., 2])),
        Y,
        "20 Gauss-Hermite nodes",
    ),
    "sums of columns": (
        (PAIR, FunctionValues(PAIR.loc[:, ::-1], PAIR.variance[:, ::-1])),
        lambda v, w: dist.Normal(v + 2 * w, jnp.array([0.4, 0.9])).to_event(1),
        lambda a: dist.Normal(a[..., :2] + 2 * a[..., 2:], jnp.array([0.4, 0.9])).to_event(1),
        Y2,
        "closed form",
    ),
    "a product": (
        (F, G),
        lambda v, w: dist.Normal(v * w, 0.6),
        lambda a: dist.Normal(a[..., 0] * a[..., 1], 0.6),
        Y,
        "225 Gauss-Hermite nodes",
    ),
    "a sum with a share for all columns": (
        (PAIR, ONE),
        lambda v, w: dist.Normal(v + w, 0.6).to_event(1),
        lambda a: dist.Normal(a[..., :2] + a[..., 2:], 0.6).to_event(1),
        Y2,
        "225 Gauss-Hermite nodes",
    ),
    "a sum whose log scale is one of its terms": (
        (F, G),
        lambda v, w: dist.Normal(v + w, jnp.exp(0.5 * w)),
        lambda a: dist.Normal(a[..., 0] + a[..., 1], jnp.exp(0.5 * a[..., 1])),
        Y,
        "225 Gauss-Hermite nodes",
    ),
    "two outputs of one function": (
        PAIR,
        lambda v: dist.Normal(v[..., 0], jnp.exp(0.5 * v[..., 1])),
        lambda a: dist.Normal(a[..., 0], jnp.exp(0.5 * a[..., 1])),
        Y,
        "225 Gauss-Hermite nodes",
    ),
    "outputs that are mixed": (
        PAIR,
        lambda v: dist.Normal(v @ jnp.array([[1.0, 0.3], [0.5, -1.0]]), 0.7).to_event(1),
        lambda a: dist.Normal(a @ jnp.array([[1.0, 0.3], [0.5, -1.0]]), 0.7).to_event(1),
        Y2,
        "225 Gauss-Hermite nodes",
    ),
    "softmax of three": (
        FunctionValues(jnp.array(MEANS), jnp.array(VARIANCES)),
        lambda v: dist.Categorical(logits=v),
        lambda a: dist.Categorical(logits=a),
        jnp.array([0, 2, 1]),
        "512 Gauss-Hermite nodes",
    ),
}


QUICK = (
    "log scale",
    "softplus",
    "a difference",
    "a product",
    "student-t",
    "columns that share a scale",
    "two outputs of one function",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in CASES])
def test_expectations_are_those_of_a_dense_grid(name):
    values, conditional, of_all, y, how = CASES[name]
    likelihood = dgp.Likelihood(values, conditional)  # without a warning: they are errors here
    assert repr(likelihood) == f"Likelihood({likelihood.family}, {how})"
    columns = [0, 1, 1, 0] if name == "sums of columns" else list(range(likelihood.f_x.loc.shape[-1]))
    expected, marginal = dense(of_all, columns, y, 81 if len(columns) < 3 else 41)
    np.testing.assert_allclose(likelihood.log_prob(y), expected, rtol=3e-3, atol=2e-3)
    np.testing.assert_allclose(likelihood.log_marginal(y), marginal, rtol=5e-3, atol=5e-3)
    if how == "closed form":
        np.testing.assert_allclose(likelihood.log_prob(y), expected, rtol=1e-7)
    assert likelihood.sample(jax.random.key(0)).shape == y.shape


@pytest.mark.slow
def test_sums_of_many_functions_need_no_draws():
    """Four functions, more than a grid takes: density, bound and moments of y in closed form."""
    weights = jnp.array([1.0, -2.0, 0.5, 3.0])
    values = [F, G, H, FunctionValues(F.loc[::-1], F.variance[::-1], event_dim=0)]
    likelihood = dgp.Likelihood(values, likelihood_of_sum)
    assert repr(likelihood) == "Likelihood(Normal, closed form)"
    loc = sum(w * u.loc for w, u in zip(weights, values, strict=True))
    variance = sum(w**2 * u.variance for w, u in zip(weights, values, strict=True))
    np.testing.assert_allclose(likelihood.mean, loc, rtol=1e-10)
    np.testing.assert_allclose(likelihood.variance, variance + 0.49, rtol=1e-10)
    np.testing.assert_allclose(likelihood.log_marginal(Y), dist.Normal(loc, jnp.sqrt(variance + 0.49)).log_prob(Y))
    expected = dist.Normal(loc, 0.7).log_prob(Y) - variance / 0.98
    np.testing.assert_allclose(likelihood.log_prob(Y), expected, rtol=1e-10)
    given_v = dgp.Likelihood(values, likelihood_of_sum, collapse="marginal")
    np.testing.assert_allclose(given_v.log_prob(Y), likelihood.log_marginal(Y))


@pytest.mark.slow
def test_moments_of_two_functions():
    """E y and var y of a normal with a random log scale, in closed form."""
    likelihood = dgp.Likelihood((F, G), lambda v, s: dist.Normal(2 * v, jnp.exp(0.5 * s)))
    np.testing.assert_allclose(likelihood.mean, 2 * F.loc, rtol=1e-10)
    np.testing.assert_allclose(likelihood.variance, 4 * F.variance + jnp.exp(G.loc + 0.5 * G.variance), rtol=1e-10)


@pytest.mark.long
def test_more_nodes_are_more_exact():
    _, marginal = dense(CASES["student-t"][2], [0, 1], Y, 401)
    errors = [
        np.abs(
            dgp.Likelihood((F, G), CASES["student-t"][1], integrate=dgp.likelihoods.GaussHermite(n)).log_marginal(Y)
            - marginal
        )
        for n in (5, 15, 60)
    ]
    assert errors[2].max() < 1e-4 < errors[0].max()
    assert errors[1].max() < 5e-3


@pytest.mark.slow
def test_draws_and_four_functions(key):
    """More than three numbers of v per y: draws, with a warning unless they are asked for."""
    conditional = lambda v, s, w, t: dist.StudentT(3 + jnp.exp(w + t), v, jnp.exp(0.5 * s))  # noqa: E731
    with pytest.warns(UserWarning, match="StudentT depends on 4 functions together, so its expectation is taken by 20"):
        dgp.Likelihood((F, G, H, F), conditional)
    asked = dgp.Likelihood((F, G), CASES["student-t"][1], integrate=dgp.likelihoods.MonteCarlo(100_000, key))
    expected, marginal = dense(CASES["student-t"][2], [0, 1], Y)
    np.testing.assert_allclose(asked.log_prob(Y), expected, atol=0.03)
    np.testing.assert_allclose(asked.log_marginal(Y), marginal, atol=0.03)
    with pytest.raises(ValueError, match="at most 3 entries of v for GaussHermite, got StudentT, which depends on 4"):
        dgp.Likelihood((F, G, H, F), conditional, integrate=dgp.likelihoods.GaussHermite(5))


def test_grids_of_nodes():
    """A column that stays at its mean has no direction; the others keep theirs."""
    grid = ProductGrid((1, 1, 0, 2), shared=1)
    assert (grid.count, grid.size) == (3, 512)
    left = grid.at_mean(range(2))
    assert (left.directions, left.shared, left.size) == ((-1, -1, 0, 1), 1, 225)
    nodes = left.nodes(jnp.arange(4.0), jnp.ones(4))
    assert (nodes.points[:, :2] == jnp.arange(2.0)).all()
    np.testing.assert_allclose(nodes.mean(nodes.points), jnp.arange(4.0), atol=1e-12)


WRONG = {
    "nothing": ((), r"expected the distribution f\(x\), got NoneType"),
    "a draw": ((F, jnp.zeros(3)), r"expected the distribution f\(x\), got ArrayImpl"),
    "other rows": (
        (F, FunctionValues(jnp.zeros(4), jnp.ones(4), event_dim=0)),
        r"values of all functions at the same rows, got batch shapes \[\(3,\), \(4,\)\]: call each function on N",
    ),
    "one row": (
        (F, FunctionValues(jnp.zeros(1), jnp.ones(1), event_dim=0)),
        r"values of all functions at the same rows, got batch shapes",
    ),
    "a mixture": ((PAIR.mix(jnp.eye(2)), ONE), r"functions that are not mixed, got f\(x\).mix\(W\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name):
    values, match = WRONG[name]
    with pytest.raises(ValueError, match=match):
        dgp.Likelihood(values, lambda v, s: dist.Normal(v, jnp.exp(s)))


def test_wrong_conditionals_and_uses():
    with pytest.raises(ValueError, match="several rows of v by reduce_sum"):
        dgp.Likelihood((F, G), lambda v, s: dist.Normal(v - v.mean(), jnp.exp(s)))
    with pytest.raises(ValueError, match="mix: expected values of one function, got several: mix in the conditional"):
        dgp.Likelihood((F, G), lambda v, s: dist.Normal(v, jnp.exp(s))).f_x.mix(jnp.eye(2))
    assert dgp.Likelihood([F], lambda v: dist.Normal(v, 1.0)).log_prob(Y).shape == (3,)  # one in a list


@pytest.mark.slow
def test_one_function_at_one_input_twice():
    """f(x) + f(x) is 2 f(x), and has four times its variance."""
    with handlers.seed(rng_seed=0):
        f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.5), dgp.Points(Z))
    double = dgp.Likelihood((f(X), f(np.array(X))), lambda v, s: dist.Normal(v + s, 0.3))
    np.testing.assert_allclose(double.variance, 4 * f(X).variance + 0.09, rtol=1e-4)


@pytest.mark.slow
def test_values_given_their_neighbours_at_one_input_twice_are_refused():
    """They are independent in the model, at other inputs."""
    f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.5), dgp.Neighbours(X, num=3)).condition(X, y)
    sums = lambda v, s: dist.Normal(v + s, 0.3)  # noqa: E731
    for run in (lambda at: at(X), lambda at: jax.jit(at)(X)):
        with pytest.raises(ValueError, match="values of different functions or at different inputs, got those of"):
            run(lambda x: dgp.Likelihood((f(x), f(x)), sums).variance)
    with pytest.raises(ValueError, match="at one input twice"):
        dgp.Likelihood((f(X), f(np.array(X))), sums)
    assert dgp.Likelihood((f(X), f(-X)), sums).variance.shape == (12,)


@pytest.mark.slow
def test_slopes_along_two_columns_are_two_functions():
    with handlers.seed(rng_seed=0):
        f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.5), dgp.Points(jnp.eye(2)))
    x = jnp.ones((3, 2))
    found = dgp.Likelihood((f.grad(x, 0), f.grad(x, 1)), lambda v, w: dist.Normal(v + w, 0.3))
    assert found.f_x.loc.shape == (3, 2)


X = jnp.array(rng.uniform(-1, 1, size=(12, 1)))
y = jnp.sin(3 * X[:, 0]) + jnp.exp(X[:, 0] - 1) * jnp.array(rng.normal(size=12))
Z = jnp.linspace(-1, 1, 4)[:, None]


def model(X, y=None, hidden=True):
    h = dgp.gp("h", dgp.kernels.RBF(1.0, 0.7), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.5), dgp.Points(Z))
    s = dgp.gp("s", dgp.kernels.RBF(0.5, 1.0), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        x = numpyro.sample("x", h(X)) if hidden else X
        numpyro.sample("y", dgp.Likelihood((f(x), s(X)), lambda v, s: dist.Normal(v, jnp.exp(s - 1))), obs=y)


def fitted(hidden, steps=300):
    guide = dgp.guides.InducingPoint(model)
    svi = SVI(model, guide, optax.adam(0.02), dgp.ELBO())
    return guide, svi.run(jax.random.key(0), steps, X, y, hidden, progress_bar=False).params


@pytest.mark.long
@pytest.mark.parametrize("hidden", [False, True])
def test_the_bound_is_that_of_trace_elbo(hidden, key):
    """dgp.ELBO integrates both functions, NumPyro's objective draws their inducing values."""
    guide, params = fitted(hidden)
    ours, theirs = (
        jax.vmap(lambda k, of=of: of.loss(k, params, model, guide, X, y, hidden))(jax.random.split(key, 4000))
        for of in (dgp.ELBO(), Trace_ELBO())
    )
    error = np.sqrt(ours.var() / 4000 + theirs.var() / 4000)
    assert abs(ours.mean() - theirs.mean()) < 4 * error + 1e-6
    assert ours.std() < 0.5 * theirs.std()


@pytest.mark.long
def test_a_chain_has_the_density_of_the_program():
    prepared = dgp.for_mcmc(model)
    mcmc = MCMC(NUTS(prepared), num_warmup=100, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y)
    draws = {name: value[-1] for name, value in mcmc.get_samples().items()}
    sites = handlers.trace(handlers.seed(handlers.substitute(model, data=draws), 0)).get_trace(X, y)
    likelihood = sites["y"]["fn"]
    f, s = likelihood.f_x.parts
    by_hand = dist.Normal(f.loc, jnp.exp(s.loc - 1)).log_prob(y)  # at the means, less what the variances cost
    rate = jnp.exp(2 * s.variance)
    square = jnp.square(y - f.loc) * (rate - 1) + f.variance * rate
    by_hand -= 0.5 * square * jnp.exp(-2 * (s.loc - 1))
    np.testing.assert_allclose(likelihood.log_prob(y), by_hand, rtol=1e-6)
    assert np.isfinite(log_density(prepared, (X, y), {}, {k: v for k, v in draws.items() if k != "x"})[0])
    posterior = dgp.Posterior(model, samples=mcmc.get_samples())
    assert np.isfinite(posterior.log_density(jax.random.key(1), y, X)).all()


@pytest.mark.long
def test_predictions_of_two_functions(key):
    guide, params = fitted(False)
    posterior = dgp.Posterior(model, guide, params)
    mixture = posterior.predict(key, X, hidden=False)
    site = handlers.trace(handlers.seed(model, 0)).get_trace(X, hidden=False)["y"]["fn"]
    assert site.f_x.loc.shape == (12, 2)
    assert mixture.mean.shape == mixture.variance.shape == (12,)
    draws = posterior.using(num_samples=4000).sample(key, X, hidden=False)
    error = draws.std(0) / np.sqrt(4000)
    assert (np.abs(draws.mean(0) - mixture.mean) < 5 * error).all()
    layers = posterior.layers(key, X, hidden=False)
    assert set(layers) == {"f", "s"}


@pytest.mark.long
def test_one_function_at_two_inputs_has_the_bound_of_draws(key):
    """Its values at two inputs are dependent given the belief; the expectation is taken without draws all the same."""

    def twice(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(1.0, 0.5), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood((f(X), f(-X)), lambda v, s: dist.Normal(v, jnp.exp(s))), obs=y)

    guide = dgp.guides.InducingPoint(twice)
    params = SVI(twice, guide, optax.adam(0.02), dgp.ELBO()).run(key, 200, X, y, progress_bar=False).params
    ours, theirs = (
        jax.vmap(lambda k, of=of: of.loss(k, params, twice, guide, X, y))(jax.random.split(key, 4000))
        for of in (dgp.ELBO(), Trace_ELBO())
    )
    assert abs(ours.mean() - theirs.mean()) < 4 * np.sqrt(ours.var() / 4000 + theirs.var() / 4000)
    assert ours.std() < 1e-4 < theirs.std()


@pytest.mark.long
def test_guides_and_optimisers(key):
    """Importance weights over a latent, natural gradients, mean field, a guide that refuses."""

    def with_latent(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(1.0, jnp.ones(2)), dgp.Points(jax.random.normal(key, (4, 2))))
        s = dgp.gp("s", dgp.kernels.RBF(0.5, 1.0), dgp.Points(Z))
        with numpyro.plate("data", len(X)):
            x = dgp.latent("w", X, 1)
            numpyro.sample("y", dgp.Likelihood((f(x), s(X)), lambda v, s: dist.Normal(v, jnp.exp(s))), obs=y)

    guide = dgp.guides.ImportanceWeighted(with_latent, num_samples=3, latent=dgp.guides.Amortised())
    svi = SVI(with_latent, guide, optax.adam(0.01), dgp.ELBO())
    assert np.isfinite(svi.run(key, 20, X, y, progress_bar=False).losses).all()
    guide = dgp.guides.InducingPoint(model)
    natural = dgp.optim.NaturalGradient(guide, 0.05, optax.adam(0.01))
    losses = SVI(model, guide, natural, dgp.ELBO()).run(key, 60, X, y, progress_bar=False).losses
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    with pytest.raises(ValueError, match="Collapsed: expected a Gaussian likelihood at 'y'"):
        SVI(model, dgp.guides.Collapsed(model), optax.adam(0.01), dgp.ELBO()).run(
            key, 2, X, y, False, progress_bar=False
        )


def _first(d):
    """Of a distribution of two numbers per row, that of the first."""
    parameters = {name: getattr(d, name) for name in d.arg_constraints}
    return type(d)(
        **{name: value[..., :1] if np.ndim(value) > 1 else value for name, value in parameters.items()}
    ).to_event(1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["columns that share a scale", "columns that share a scalar scale"])
def test_missing_entries_count_nothing(name):
    """Of two columns that share a scale, one is missing in the first row: as if the row had the other only."""
    values, conditional, of_all, y, _ = CASES[name]
    observed = jnp.array([[True, False], [True, True], [False, False]])
    likelihood = dgp.Likelihood(values, conditional, observed=observed)
    expected, marginal = dense(lambda a: _first(of_all(a).base_dist), [0, 1, 2], y[:, :1], 41)
    both = dgp.Likelihood(values, conditional)
    for method, alone in (("log_prob", expected), ("log_marginal", marginal)):
        found = getattr(likelihood, method)(y.at[0, 1].set(jnp.nan))
        np.testing.assert_allclose(found[0], alone[0], atol=5e-3)
        np.testing.assert_allclose(found[1], getattr(both, method)(y)[1], rtol=1e-10)
        np.testing.assert_allclose(found[2], 0, atol=1e-12)
