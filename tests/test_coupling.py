"""Which rows a density sees, and that the bound is the same one where it sees several."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Trace_ELBO
from programs import NOISE, X, Y, Z, agree, bayesian, deep, draws_of_bound, explicit, random_params, shallow
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp.analysis.program import inspect_program
from numpyro_dgp.jaxprs.row_dependence import mark, row_dependence

GROUPS = jnp.arange(30) % 7


def layer(name, outputs=None, mean=None):
    return dgp.gp(name, dgp.kernels.RBF(0.5, 0.9), dgp.Points(Z), outputs=outputs, mean=mean)


def mean_of_rows(X, y=None):
    """Only the mean of all values is observed."""
    f = layer("f")
    with numpyro.plate("data", len(X)):
        v = numpyro.sample("v", f(X))
    numpyro.sample("total", dist.Normal(v.mean(), 0.1), obs=None if y is None else y.mean())


def bins(X, y=None):
    """Sums over bins, as of counts that were binned."""
    f = layer("f")
    with numpyro.plate("data", len(X)):
        v = numpyro.sample("v", f(X))
    with numpyro.plate("bins", 7):
        sums = jax.ops.segment_sum(v, GROUPS, 7)
        numpyro.sample("y", dist.Normal(sums, 0.3), obs=None if y is None else jax.ops.segment_sum(y, GROUPS, 7))


def driven(X, y=None):
    """An ordinary differential equation that f drives, x' = f(t) - x, seen at every step."""
    f = layer("f")
    with numpyro.plate("times", len(X)):
        v = numpyro.sample("v", f(X))
    _, path = jax.lax.scan(lambda x, force: (x + 0.1 * (force - x),) * 2, 0.0, v)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(path, 0.2), obs=y)


def twice(X, y=None):
    """One function above itself."""
    f = layer("f", outputs=1, mean=dgp.means.IdentityMean())
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        likelihood = dgp.Likelihood(
            f(h), lambda v: dist.Normal(v[..., 0], NOISE), integrate=dgp.likelihoods.MonteCarlo(20)
        )
        numpyro.sample("y", likelihood, obs=y)


def differences(X, y=None):
    """Duels: one function at two inputs."""
    f = layer("f")
    with numpyro.plate("data", len(X)):
        first, second = numpyro.sample("first", f(X)), numpyro.sample("second", f(X[::-1]))
        numpyro.sample("y", dist.Normal(first - second, NOISE), obs=y)


def noise_of_all(X, y=None):
    """A likelihood whose noise sees every row of a hidden layer."""
    f, g = layer("f", outputs=1, mean=dgp.means.IdentityMean()), layer("g")
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        scale = jnp.exp(h.mean() - 1)
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, scale)), obs=y)


def centred(X, y=None):
    """A layer whose inputs see every row of the one below."""
    f, g = layer("f", outputs=1, mean=dgp.means.IdentityMean()), layer("g")
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h - h.mean(0)), lambda v: dist.Normal(v, NOISE)), obs=y)


def several_places(X, y=None):
    """Values at three places of every datum, each drawn on its own, that a layer sees together."""
    f, g = layer("f"), dgp.gp("g", dgp.kernels.RBF(1.0, 2.0), dgp.Points(jnp.hstack([Z, -Z, jnp.sin(9 * Z)])))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(jnp.stack([X, 0.5 * X, -X], -2), noise=0.1).to_event(1))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, NOISE)), obs=y)


def grouped(X, y=None):
    """A value per group, which several data see: one row for every datum, though a row has several data."""
    f, g = layer("f", outputs=1, mean=dgp.means.IdentityMean()), layer("g")
    with numpyro.plate("groups", 7):
        h = numpyro.sample("h", f(X[:7]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(h[GROUPS]), lambda v: dist.Normal(v, NOISE)), obs=y)


def two_tasks(X, y=None):
    """One function under two likelihoods: a row each."""
    f = layer("f")
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, NOISE)), obs=y)
        numpyro.sample("z", dgp.Likelihood(f(X + 0.1), lambda v: dist.Normal(v, NOISE)), obs=y)


def skip(X, y=None):
    """A hidden layer, a latent that follows it, and a layer that sees both and the inputs."""
    f = layer("f", outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 2.0), dgp.Points(jnp.hstack([Z, Z, Z])))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        z = numpyro.sample("z", dist.Normal(h[..., 0], 0.5))
        x = jnp.concatenate([X, h, z[..., None]], -1)
        numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, jnp.exp(0.1 * h[..., 0]))), obs=y)


def labels(X, y=None):
    """Classes whose logits are drawn."""
    f = layer("f", outputs=3)
    with numpyro.plate("data", len(X)):
        v = numpyro.sample("v", f(X))
        numpyro.sample("y", dist.Categorical(logits=v), obs=jnp.arange(30) % 3)


COUPLED = {
    mean_of_rows: {"f"},
    bins: {"f"},
    driven: {"f"},
    twice: {"f"},
    differences: {"f"},
    noise_of_all: {"f"},
    centred: {"f"},
    several_places: {"f"},
}
FREE = [grouped, two_tasks, skip, labels, shallow, deep, explicit, bayesian]


@pytest.mark.parametrize("model", COUPLED, ids=lambda m: m.__name__)
def test_values_that_are_seen_together_are_found(model):
    assert inspect_program(model, (X, Y), {}).coupled == COUPLED[model]


@pytest.mark.slow
@pytest.mark.parametrize("model", mostly_long([bins], COUPLED), ids=lambda m: m.__name__)
def test_values_that_are_seen_together_are_drawn_together(model):
    guide = dgp.guides.InducingPoint(model)
    params = random_params(model, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y)
    stock = draws_of_bound(Trace_ELBO(), params, model, guide, X, Y, num=4000)
    assert agree(ours, stock), (ours.mean(), stock.mean())


@pytest.mark.parametrize("model", FREE, ids=lambda m: m.__name__)
def test_values_that_are_seen_row_by_row_stay_integrated(model):
    found = inspect_program(model, (X, Y), {})
    assert not found.coupled
    assert not found.aggregates


@pytest.mark.long
@pytest.mark.parametrize("model", mostly_long([skip], [grouped, two_tasks, skip]), ids=lambda m: m.__name__)
def test_integrated_bounds_equal_the_stock_one(model):
    guide = dgp.guides.InducingPoint(model)
    params = random_params(model, guide, X, Y)
    ours = draws_of_bound(dgp.ELBO(), params, model, guide, X, Y)
    stock = draws_of_bound(Trace_ELBO(), params, model, guide, X, Y, num=4000)
    assert agree(ours, stock), (ours.mean(), stock.mean())
    assert ours.var() < stock.var()


def test_a_single_row_is_seen_by_itself():
    assert not inspect_program(mean_of_rows, (X[:1], Y[:1]), {}).coupled


def test_joint_values_may_be_summed():
    """f.joint draws all rows from one function: nothing has to be drawn for them."""

    def model(X, y=None):
        f = layer("f")
        v = numpyro.sample("v", f.joint(X))
        numpyro.sample("total", dist.Normal(v.mean(), 0.1), obs=None if y is None else y.mean())

    assert not inspect_program(model, (X, Y), {}).coupled


@pytest.mark.long
def test_predictions_of_sums_are_of_whole_draws():
    """The variance of a sum is that of one function, not of independent rows."""
    guide = dgp.guides.InducingPoint(mean_of_rows)
    params = random_params(mean_of_rows, guide, X, Y)
    posterior = dgp.Posterior(mean_of_rows, guide, params, site="total")
    draws = posterior.using(num_samples=4000).sample(jax.random.key(0), X)

    def total(key):
        values = guide.sample_posterior(key, params, X)
        return values["v"].mean()

    wanted = jax.vmap(total)(jax.random.split(jax.random.key(1), 4000)).var() + 0.1**2
    assert abs(draws.var() / wanted - 1) < 4 * np.sqrt(4 / 4000)


@pytest.mark.slow
def test_weights_of_single_data_need_densities_of_single_rows():
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.hstack([Z, Z])), outputs=1)
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(dgp.latent("w", X, 1)))
            numpyro.sample("y", dist.Normal(h[..., 0], 0.1), obs=y)
        numpyro.sample("total", dist.Normal(h.mean(), 0.1), obs=None if y is None else y.mean())

    guide = dgp.guides.ImportanceWeighted(model, num_samples=3)
    params = random_params(model, guide, X, Y)
    with pytest.raises(ValueError, match=r"one row of a hidden layer each, got \['total'\]"):
        draws_of_bound(dgp.ELBO(), params, model, guide, X, Y, num=1)


ROWS = {
    "each": lambda h: jnp.tanh(h @ jnp.ones((2, 3)) + 1),
    "columns": lambda h: jnp.concatenate([h, jnp.zeros((5, 1))], -1)[:, 1:],
    "chosen columns": lambda h: h[:, jnp.array([1, 0])],
    "normalised": lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
    "softmax of a row": lambda h: jax.nn.softmax(h, -1),
    "outer": lambda h: jnp.linalg.cholesky(jnp.einsum("nd,ne->nde", h, h) + jnp.eye(2)),
    "vmap": lambda h: jax.vmap(lambda row: row @ jnp.ones(2))(h),
    "several times": lambda h: h[None] * jnp.ones((3, 1, 1)),
    "density": lambda h: dist.Normal(h, jnp.exp(h)).to_event(1).log_prob(1.0),
    "one of a row": lambda h: jnp.take_along_axis(h, jnp.array([0, 1, 1, 0, 0])[:, None], -1)[:, 0],
    "density of labels": lambda h: dist.Categorical(logits=h).log_prob(jnp.array([0, 1, 1, 0, 0])),
    "one of a row of several": lambda h: jnp.take_along_axis(h * jnp.ones((3, 1, 1)), jnp.ones((3, 5, 1), int), -1),
}
OTHER_ROWS = {"reversed": lambda h: h[::-1], "chosen": lambda h: h[jnp.array([0, 0, 3])], "part": lambda h: h[1:4]}
SEVERAL = {
    "mean": lambda h: h - h.mean(0),
    "cumulative": lambda h: jnp.cumsum(h, 0),
    "pairs": lambda h: h[:, None] - h[None],
    "gram": lambda h: h @ h.T,
    "shifted": lambda h: h[1:] - h[:-1],
    "sorted": lambda h: jnp.sort(h, 0),
    "one of a column": lambda h: jnp.take_along_axis(h, jnp.array([[0, 1]]), 0)[0],
    "flat": lambda h: h.reshape(-1),
    "softmax of a column": lambda h: jax.nn.softmax(h, 0),
    "scan": lambda h: jax.lax.scan(lambda c, row: (c + row,) * 2, h[0], h)[1],
    "segments": lambda h: jax.ops.segment_sum(h, jnp.array([0, 0, 1, 1, 1]), 2),
}


def rows_of(function):
    return row_dependence(lambda h: {"out": function(mark("h", h, 1))}, jnp.ones((5, 2)))["out"]["h"]


@pytest.mark.parametrize("name", ROWS)
def test_own_rows(name):
    found = rows_of(ROWS[name])
    assert found.which == ()
    out = ROWS[name](jnp.ones((5, 2)))
    assert out.shape[found.axes[0]] == 5


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_one_row_elsewhere(name):
    found = rows_of(OTHER_ROWS[name])
    assert found.axes == (-2,)
    assert found.which != ()
    assert rows_of(lambda h: OTHER_ROWS[name](h) - OTHER_ROWS[name](h) + 0 * h[: len(OTHER_ROWS[name](h))]) is None


@pytest.mark.parametrize("name", SEVERAL)
def test_several_rows(name):
    assert rows_of(SEVERAL[name]) is None


@pytest.mark.slow
def test_values_that_are_not_marked_are_constants():
    assert row_dependence(lambda h: {"out": h.sum()}, jnp.ones(3)) == {"out": {}}
    assert rows_of(lambda h: h[2] ** 2).axes == ()
