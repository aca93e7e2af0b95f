"""What an error message advises works where it is given: each wrong call beside the call that its message names."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.math.linalg import cholesky

X = jnp.linspace(-1.0, 1.0, 4)[:, None]
Y = X[:, 0]
Z = X[::2]
KEY = jax.random.key(0)


def likelihood(conditional, functions=1, outputs=None, integrate=None):
    """A likelihood of function values at the four rows."""
    with handlers.seed(rng_seed=0):
        every = [dgp.gp(f"f{i}", dgp.kernels.RBF(), dgp.Points(Z), outputs=outputs)(X) for i in range(functions)]
        return dgp.Likelihood(every[0] if functions == 1 else tuple(every), conditional, integrate=integrate)


def program(X, y=None, *, conditional=lambda v: dist.Normal(v, 0.1)):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), conditional), obs=y)


def projected(X, y=None):
    project = dgp.projection("project", 1, 1)
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        z = numpyro.sample("z", project(X))
        numpyro.sample("y", dgp.Likelihood(f(z), lambda v: dist.Normal(v, 0.1)), obs=y)


def on_shapes(model, guide):
    """A step of a fit, traced."""
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    return jax.eval_shape(lambda: svi.update(svi.init(KEY, X, Y), X, Y))


POSTERIOR = dgp.Posterior(program, samples={"f": jnp.zeros((2, 2))})
EARTH = jnp.array([[0.0, 0.0], [0.0, 120.0], [0.0, 240.0], [80.0, 10.0], [-80.0, 10.0]])


def haversine(a, b):
    """The squared exponential of an angle, which is no kernel."""
    (p, s), (q, t) = jnp.radians(a), jnp.radians(b)
    h = jnp.sin((p - q) / 2) ** 2 + jnp.cos(p) * jnp.cos(q) * jnp.sin((s - t) / 2) ** 2
    return jnp.exp(-((2 * jnp.arcsin(jnp.sqrt(jnp.clip(h, 0, 1)))) ** 2) / 2 / 3.0**2)


CASES = {
    "a conditional of two functions with one argument": (
        lambda: likelihood(lambda v: dist.Normal(v, 0.1), functions=2),
        r"expected a conditional of 2 argument\(s\).*lambda v, w: ",
        lambda: likelihood(lambda v, w: dist.Normal(v, jnp.exp(w)), functions=2),
    ),
    "a conditional of one function with two arguments": (
        lambda: likelihood(lambda v, w: dist.Normal(v, jnp.exp(w))),
        r"expected a conditional of 1 argument\(s\).*lambda v: ",
        lambda: likelihood(lambda v: dist.Normal(v, 0.1)),
    ),
    "noise with another number of rows": (
        lambda: likelihood(lambda v: dist.Normal(v, jnp.ones(3))),
        r"arrays of shape \(4,\) or \(\) in the conditional",
        lambda: (likelihood(lambda v: dist.Normal(v, jnp.ones(4))), likelihood(lambda v: dist.Normal(v, jnp.ones(())))),
    ),
    "a function as a probability": (
        lambda: likelihood(lambda v: dist.Bernoulli(probs=v)),
        "expected probs of Bernoulli in its range.*got v itself: write logits=v",
        lambda: (
            likelihood(lambda v: dist.Bernoulli(logits=v)),
            likelihood(lambda v: dist.Bernoulli(probs=jax.nn.sigmoid(v))),
        ),
    ),
    "a line as a probability": (
        lambda: likelihood(lambda v: dist.Bernoulli(probs=0.5 + v)),
        "expected probs of Bernoulli in its range.*got a line in v: write logits=v",
        lambda: likelihood(lambda v: dist.Bernoulli(probs=0.5 + 0 * v)),
    ),
    "functions as probabilities": (
        lambda: likelihood(lambda v: dist.Categorical(probs=v), outputs=3),
        r"expected probs of Categorical in its range.*jax.nn.softmax\(v\) of several",
        lambda: likelihood(
            lambda v: dist.Categorical(probs=jax.nn.softmax(v)), outputs=3, integrate=dgp.likelihoods.MonteCarlo(2)
        ),
    ),
    "a function as a rate": (
        lambda: likelihood(lambda v: dist.Poisson(v)),
        r"expected rate of Poisson in its range.*rate=jnp.exp\(v\)",
        lambda: likelihood(lambda v: dist.Poisson(rate=jnp.exp(v))),
    ),
    "a function as a scale": (
        lambda: likelihood(lambda v: dist.Normal(0.0, v)),
        r"expected scale of Normal in its range.*scale=jnp.exp\(v\)",
        lambda: likelihood(lambda v: dist.Normal(0.0, scale=jnp.exp(v))),
    ),
    "layers without inputs": (
        lambda: POSTERIOR.layers(KEY),
        r"Posterior\.\w+: expected the arguments of the model, got 0 positional.*posterior.layers\(key, X\)",
        lambda: POSTERIOR.layers(KEY, X),
    ),
    "a prediction without inputs": (
        lambda: POSTERIOR.predict(KEY),
        r"Posterior\.\w+: expected the arguments of the model, got 0 positional.*posterior.predict\(key, X\)",
        lambda: jax.eval_shape(lambda x: POSTERIOR.predict(KEY, x).mean, X),
    ),
    "densities without inputs": (
        lambda: POSTERIOR.log_density(KEY, Y),
        r"Posterior\.\w+: expected the arguments of the model, got 0 positional",
        lambda: jax.eval_shape(lambda x: POSTERIOR.log_density(KEY, Y, x), X),
    ),
    "a fit without data": (
        lambda: dgp.fit(SVI(program, G.InducingPoint(program), optax.adam(0.1), dgp.ELBO()), KEY, 1),
        r"fit: expected the arguments of the model, got 0 positional.*dgp.fit\(svi, key, 1000, X, y\)",
        lambda: on_shapes(program, G.InducingPoint(program)),
    ),
    "a collapsed guide of a projection": (
        lambda: on_shapes(projected, G.Collapsed(projected)),
        r"Collapsed: expected a Gaussian rule for the matrix.*sites=\{'project': dgp.guides.Full\(\)\}",
        lambda: on_shapes(projected, G.Collapsed(projected, sites={"project": G.Full()})),
    ),
    "a mean-field guide of a projection": (
        lambda: on_shapes(projected, G.MeanField(projected)),
        r"MeanField: .*sites=\{'z': dgp.guides.Propagate\(\)\}",
        lambda: on_shapes(projected, G.MeanField(projected, sites={"z": G.Propagate()})),
    ),
    "labels in another column": (
        lambda: dgp.kernels.Categorical(2).on(1).check_inputs(jnp.array([[0.0, 2.0]])),
        r"expected labels 0 to 1 in column 1 of its inputs, got 2 .*count them with levels",
        lambda: dgp.kernels.Categorical(3).on(1).check_inputs(jnp.array([[0.0, 2.0]])),
    ),
    "labels in a column of a column": (
        lambda: (2.0 * dgp.kernels.Categorical((2, 2)).on(0, 1)).on(3, 2).check_inputs(jnp.array([[0.0, 0, 5, 0]])),
        "in column 2 of its inputs, got 5",
        lambda: (2.0 * dgp.kernels.Categorical((2, 6)).on(0, 1)).on(3, 2).check_inputs(jnp.array([[0.0, 0, 5, 0]])),
    ),
    "a function of two places that is no kernel": (
        lambda: cholesky(jax.vmap(jax.vmap(haversine, (None, 0)), (0, None))(EARTH, EARTH), "k(Z, Z)"),
        r"a kernel that is not positive definite: the smallest eigenvalue is -.*dgp.kernels.GreatCircle",
        lambda: cholesky(dgp.kernels.GreatCircle()(EARTH, EARTH), "k(Z, Z)"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_message_advises_works(name):
    wrong, message, advised = CASES[name]
    with pytest.raises(ValueError, match=message):
        wrong()
    advised()


def test_rounding_is_not_taken_for_a_function_that_is_no_kernel():
    K = jnp.ones((3, 3)) - 3e-10 * jnp.eye(3)
    with pytest.raises(ValueError, match="which usually means nearly identical inducing inputs"):
        cholesky(K, "K")


RANGES = {"Uniform": lambda v: dist.Uniform(v - 0.1, v + 0.1), "Delta": lambda v: dist.Delta(v)}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_long(["Uniform"], RANGES))
def test_a_range_of_y_that_moves_with_the_function_is_named(name):
    model = lambda X, y=None: program(X, y, conditional=RANGES[name])  # noqa: E731
    svi = SVI(model, G.InducingPoint(model), optax.adam(0.01), dgp.ELBO())
    message = rf"fit: expected a density of 'y' that is positive.*with {name}, whose support.*dist.Normal\(v, 0.1\)"
    with pytest.raises(ValueError, match=message):
        dgp.fit(svi, KEY, 1, X, Y, progress_bar=False)


@pytest.mark.slow
def test_a_scale_that_is_constant_may_be_written_with_v():
    assert np.isfinite(likelihood(lambda v: dist.Normal(v, 0.1 + 0 * v)).log_prob(Y)).all()
