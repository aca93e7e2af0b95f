"""Precision of products is chosen, not left to a platform's default, which is TF32 or bfloat16 on accelerators."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from numpyro.infer import SVI
from numpyro.infer.initialization import init_to_median
from numpyro.infer.util import initialize_model
from programs import X, Y, bayesian, deep, shallow
from sizes import mostly_long

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.math.linalg import einsum, matmul, tensordot

ROOT = Path(dgp.__file__).parent
# Figures, and moments of draws, are computed with NumPy; linalg is where the precision is chosen.
ELSEWHERE = {"plots", "linalg.py", "left_out.py"}
BY_NAME = {"dot", "einsum", "inner", "matmul", "tensordot", "vdot", "dot_general"}


@pytest.mark.slow
def test_products_in_the_source_go_through_linalg():
    found = []
    for path in ROOT.rglob("*.py"):
        if ELSEWHERE & {path.name, *path.parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            operator = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
            call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BY_NAME
            if operator or call:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "write matmul, einsum or tensordot of math/linalg.py:\n" + "\n".join(found)


def products(jaxpr):
    """Precisions of all products of a program, those of its derivatives and inner functions included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from products(getattr(inner, "jaxpr", inner))


def in_full_precision(f, *args):
    found = list(products(jax.make_jaxpr(f)(*args).jaxpr))
    highest = jax.lax.Precision.HIGHEST
    assert found, "a program without products tests nothing"
    assert set(found) == {(highest, highest)}


PROGRAMS = {
    "inducing points": (bayesian, G.InducingPoint),
    "mean field": (bayesian, G.MeanField),
    "importance weights": (bayesian, lambda model: G.ImportanceWeighted(model, num_samples=3)),
    "amortised": (bayesian, lambda model: G.InducingPoint(model, latent=G.Amortised(hidden=(4,)))),
    "collapsed": (shallow, G.Collapsed),
    "diagonal": (deep, lambda model: G.InducingPoint(model, inducing=G.Diagonal())),
    "given inducing": (deep, lambda model: G.InducingPoint(model, sites={"h": G.GivenInducing()})),
    "joint outputs": (deep, lambda model: G.InducingPoint(model, sites={"h": G.JointOutputs()})),
    "given below": (deep, lambda model: G.InducingPoint(model, sites={"h": G.GivenBelow()})),
    "global": (deep, lambda model: G.InducingPoint(model, inducing=G.GlobalInducing(5))),
    "low rank": (deep, lambda model: G.InducingPoint(model, inducing=G.LowRank(2))),
    "mixture": (deep, lambda model: G.InducingPoint(model, sites={"f": G.MixtureOfGaussians()})),
    "flow": (deep, lambda model: G.InducingPoint(model, sites={"g": G.Flow()})),
    "Markov": (deep, lambda model: G.InducingPoint(model, sites={"g": G.MarkovInducing()})),
}


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_long(["inducing points", "importance weights", "collapsed"], PROGRAMS))
def test_products_of_a_step_and_a_prediction(name):
    model, make = PROGRAMS[name]
    guide = make(model)
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    state = svi.init(jax.random.key(0), X, Y)
    in_full_precision(lambda state: svi.update(state, X, Y), state)
    params = svi.get_params(state)

    def predictive(key):
        posterior = dgp.Posterior(model, guide.on(X, Y), params)
        return posterior.using(num_samples=2).predict(key, X).means, posterior.using(num_samples=2).functions(key)(X)

    in_full_precision(predictive, jax.random.key(1))


@pytest.mark.long
@pytest.mark.parametrize("rule", mostly_long(["Circulant"], ["Full", "Circulant", "ScaledCirculant", "WhitenedSites"]))
def test_products_of_a_ring(rule):
    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(1.2, 0.7), dgp.Grid(-6.0, 6.0, 24))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.3)), obs=y)

    svi = SVI(model, G.InducingPoint(model, inducing=getattr(G, rule)()), optax.adam(0.01), dgp.ELBO())
    state = svi.init(jax.random.key(0), X, Y)
    in_full_precision(lambda state: svi.update(state, X, Y), state)


@pytest.mark.long
def test_products_of_a_potential():
    found = initialize_model(
        jax.random.key(0), dgp.for_mcmc(deep), model_args=(X, Y), init_strategy=init_to_median(num_samples=1)
    )
    in_full_precision(jax.grad(found.potential_fn), found.param_info.z)


@pytest.mark.slow
def test_the_package_agrees_with_jax_on_products():
    """The three functions are JAX's, with another precision."""
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)
    assert (matmul(a, b) == a @ b).all()
    assert (einsum("ij,jk->ki", a, b) == (a @ b).T).all()
    assert (tensordot(a, b) == jnp.tensordot(a, b, 1)).all()
