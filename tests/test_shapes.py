"""The shapes in docstrings, executed: every function at a boundary is called under a signature of shapes.

A signature is a line of the table below: one shape per argument, and one per result. Within one call a letter stands
for one number, all letters for different ones, so that axes mixed up between arguments or results are an error.
"""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest
from beartype import beartype
from jaxtyping import Array, Float32, Float64, TypeCheckError, jaxtyped

import numpyro_dgp as dgp
from numpyro_dgp import bounds as B
from numpyro_dgp import kernels as k
from numpyro_dgp.bounds import markov_layers
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.joint_values import JointValues
from numpyro_dgp.functions.points import SparseFunction
from numpyro_dgp.functions.weights import FullBelief, KnownWeights
from numpyro_dgp.kernels import expectations as psi_statistics
from numpyro_dgp.kernels import per_output
from numpyro_dgp.math import belief_moments, distances, gaussians, linalg, row_blocks, whitening
from numpyro_dgp.math import quadratic_forms as forms
from numpyro_dgp.optim import natural as coordinates

SIZES = [dict(N=7, M=5, D=2, P=3, Q=4), dict(N=1, M=6, D=3, P=2, Q=5)]
NAMES = {jnp.float32: Float32, jnp.float64: Float64}


# -- functions that need objects, as functions of arrays --------------------------------------------------------------


def function(Z, whiten, loc, scale_tril, cls=FullBelief):
    """A layer of P outputs with a full Gaussian belief."""
    return SparseFunction(RBF, Z, whiten, cls(loc, scale_tril), len(loc), dgp.means.ZeroMean())


def at_inputs(x, Z, whiten, loc, scale_tril):
    values = function(Z, whiten, loc, scale_tril)(x)
    return values.loc, values.conditional_variance, values.belief_variance, values.variance


def joint(x, Z, whiten, loc, scale_tril):
    values = function(Z, whiten, loc, scale_tril).joint(x)
    return values.loc, values.covariance, values.variance


def given_values(x, Z, whiten, u):
    values = SparseFunction(RBF, Z, whiten, KnownWeights(u), len(u), dgp.means.ZeroMean())(x)
    return values.loc, values.variance


def draw(x, Z, whiten, loc, scale_tril):
    return function(Z, whiten, loc, scale_tril).draw(jax.random.key(0), x)


def noise(v):
    return jnp.full_like(v, 0.3)


def likelihood(loc, variance, y):
    return dgp.Likelihood(FunctionValues(loc, variance), lambda v: dist.Normal(v, noise(v)).to_event(1)).log_prob(y)


def quadrature(loc, variance, y):
    student = lambda v: dist.StudentT(4 * noise(v), v, noise(v)).to_event(1)  # noqa: E731
    return dgp.Likelihood(FunctionValues(loc, variance), student).log_prob(y)


def joint_density(loc, covariance, value):
    return JointValues(loc, covariance).log_prob(value)


def moments(change, whiten, loc, scale_tril, cross):
    return belief_moments.belief_moments(len(cross), change, whiten, loc, scale_tril)(cross)


def optimum(Phi, b, c):
    data = B.Quadratic(Phi, b, c)
    return *data.optimum(), data.bound()


def coupled(Z, whiten, loc, variance, mean, covariance, with_inputs, t, t_with_inputs, t_with_values):
    v, target = (
        markov_layers.Coupled(mean, covariance, with_inputs),
        markov_layers.Target(t, t_with_inputs, t_with_values),
    )
    where = RBF, Z, whiten, loc, variance, v
    density = markov_layers.expected_density(*where, target, B.Observations(t, 0.3))
    return markov_layers.expected_product(*where, target), markov_layers.expected_square(*where), density


def step(pair_m, pair_L, by_m, by_L, size):
    return coordinates.natural_step((pair_m, pair_L), (by_m, by_L), size, "natural")


def from_features(A, variances, y, noise):
    return B.from_features(A, variances, B.Observations(y, noise))


def from_moments(Z, whiten, loc, variance, y, noise):
    return B.from_moments(RBF, Z, whiten, loc, variance, B.Observations(y, noise))


def psi(name):
    def of(loc, variance, Z):
        return getattr(psi_statistics, name)(RBF, loc, variance, Z)

    return of


RBF = k.RBF(1.3, 0.9)
TWO = (k.RBF(1.3, 0.9), k.Matern32(0.7, 1.1))
LAYER = "Z: M D, whiten: M M, loc: P M, scale_tril: P M M"

# What is called, the shapes of its arguments, and those of its results; "" is a number.
TABLE = {
    # algebra
    "cholesky": (linalg.cholesky, "K: M M", "M M"),
    "inverse_cholesky": (whitening.inverse_cholesky, "K: P M M", "P M M"),
    "relative_change": (whitening.relative_change, "K: M M, whiten: M M", "M M"),
    "resolved": (whitening.resolved, "whiten: M M, second: M M", "M M"),
    "solve_lower": (linalg.solve_lower, "L: P M M, B: M N", "P M N"),
    "with_jitter": (linalg.with_jitter, "K: P M M", "P M M"),
    "conditional_cholesky": (linalg.conditional_cholesky, "C: P M M, scale: P M", "P M M"),
    "rows_times": (linalg.rows_times, "A: N M, B: M P", "N P"),
    "squared_distances": (distances.squared_distances, "X1: Q N D, X2: M D", "Q N M"),
    "residual_variance": (lambda k, e: whitening.residual_variance(k, e, 9), "k: P N, e: N", "P N"),
    "quadratic_forms": (forms.quadratic_forms, "S: P M M, A: N M", "N P"),
    "quadratic_forms_reference": (forms.quadratic_forms_reference, "S: P M M, A: N M", "N P"),
    "belief_moments": (moments, "change: M M, whiten: M M, loc: P M, scale_tril: P M M, cross: N M", "N P, N, N P"),
    "in_blocks": (lambda x: row_blocks.in_blocks(lambda rows: rows[:, 0], x), "x: N D", "N"),
    "expected_kl": (gaussians.expected_kl, "variance: N P, square: N P, prior_variance: N 1", "N P"),
    "kl_full": (gaussians.kl_full, "loc: P M, scale_tril: P M M", "P"),
    "kl_diagonal": (gaussians.kl_diagonal, "loc: P M, scale: P M", "P"),
    "expected_log_ratio": (
        gaussians.expected_log_ratio,
        "loc: P M, inverse: P M M, mean: P M, covariance: P M M",
        "P",
    ),
    "narrower_than_prior": (gaussians.narrower_than_prior, "loc: P M, scale_tril: P M M", "P M, P M M"),
    "log_density": (gaussians.log_density, "white: N M, log_det: N", "N"),
    "opper_archambeau": (gaussians.opper_archambeau, "L: N N, alpha: N, lam: N", "N, N N"),
    "natural_step": (step, "pair_m: P M, pair_L: P M M, by_m: P M, by_L: P M M, size: P", "P M, P M M"),
    # kernels
    "kernel": (RBF, "X1: N D, X2: M D", "N M"),
    "kernel of batches": (RBF, "X1: Q N D, X2: Q M D", "Q N M"),
    "kernel.gram": (RBF.gram, "X: Q N D", "Q N N"),
    "kernel.diag": (RBF.diag, "X: Q N D", "Q N"),
    "features": (lambda X: RBF.features(jax.random.key(0), X, 11), "X: N D", "N 11"),
    "gram": (lambda Z: per_output.gram(RBF, Z), "Z: M D", "M M"),
    "gram per output": (lambda Z: per_output.gram(TWO, Z), "Z: 2 M D", "2 M M"),
    "cross_covariance": (lambda x, Z: per_output.cross_covariance(RBF, x, Z), "x: N D, Z: M D", "N M"),
    "cross_covariance per output": (lambda x, Z: per_output.cross_covariance(TWO, x, Z), "x: N D, Z: M D", "2 N M"),
    "variances per output": (lambda x: per_output.variances(TWO, x), "x: N D", "2 N"),
    "covariances": (lambda x: per_output.covariances(RBF, x), "x: Q N D", "Q 1 N N"),
    "psi1": (psi("psi1"), "loc: N D, variance: N D, Z: M D", "N M"),
    "psi1_times_h": (psi("psi1_times_h"), "loc: N D, variance: N D, Z: M D", "N M D"),
    "psi2": (psi("psi2"), "loc: N D, variance: N D, Z: M D", "M M"),
    "psi2 of covariances": (psi("psi2"), "loc: N D, variance: N D D, Z: M D", "M M"),
    # bounds
    "from_features": (from_features, "A: N M, variances: N, y: N, noise: N", "M M, M, , "),
    "from_moments": (from_moments, "Z: M D, whiten: M M, loc: N D, variance: N D, y: N, noise: N", "M M, M, , "),
    "optimum": (optimum, "Phi: M M, b: M, c: ", "M, M M, "),
    "predict": (B.predict, "A: N M, variances: N, loc: M, scale_tril: M M", "N, N"),
    "upper_bound": (B.upper_bound, "A: N M, variances: N, y: N, noise: ", ""),
    "follow": (
        lambda Phi, b, c, A, r: B.follow(B.Quadratic(Phi, b, c), A, 2.0, r),
        "Phi: M M, b: M, c: , features: N M, ratio: N",
        "M, M M, N M, N, N, ",
    ),
    "coupled expectations": (
        coupled,
        "Z: M D, whiten: M M, loc: N D, variance: N D, mean: M, covariance: M M, with_inputs: N M D, t: N, "
        "t_with_inputs: N D, t_with_values: N M",
        "N, N, ",
    ),
    # model
    "f(x)": (at_inputs, f"x: N D, {LAYER}", "N P, N P, N P, N P"),
    "f(x) of batches": (at_inputs, f"x: Q N D, {LAYER}", "Q N P, Q N P, Q N P, Q N P"),
    "f(x) given values": (given_values, "x: N D, Z: M D, whiten: M M, u: P M", "N P, N P"),
    "f.joint(x)": (joint, f"x: Q N D, {LAYER}", "Q N P, Q P N N, Q N P"),
    "f.draw(key, x)": (draw, f"x: Q N D, {LAYER}", "Q N P"),
    "Likelihood": (likelihood, "loc: N P, variance: N P, y: N P", "N"),
    "Likelihood of draws": (likelihood, "loc: Q N P, variance: Q N P, y: N P", "Q N"),
    "Likelihood by quadrature": (quadrature, "loc: N P, variance: N P, y: N P", "N"),
    "JointValues.log_prob": (joint_density, "loc: N P, covariance: P N N, value: N P", ""),
}


def shapes_of(arguments):
    return {name: shape for name, _, shape in (part.partition(":") for part in arguments.split(", "))}


def executed(function, shapes, results, dtype):
    """``function`` under its signature of shapes."""
    of = lambda shape: NAMES[dtype][Array, shape]  # noqa: E731
    found = tuple(of(shape) for shape in results.split(", "))

    def call(*arrays):
        out = function(*arrays)
        return tuple(out) if isinstance(out, tuple) else out

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=of(shape)) for name, shape in shapes.items()]
    result = found[0] if len(found) == 1 else tuple[found]
    call.__signature__ = inspect.Signature(parameters, return_annotation=result)
    return jaxtyped(call, typechecker=beartype)


def run(call, shapes, dtype, sizes=SIZES[0]):
    """Traced, not compiled: nothing here depends on the numbers in the arrays."""
    axes = ([sizes.get(axis) or int(axis) for axis in shape.split()] for shape in shapes.values())
    jax.eval_shape(call, *(jax.ShapeDtypeStruct(a, dtype) for a in axes))


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("sizes", SIZES, ids=["several data", "one datum"])
@pytest.mark.parametrize("name", TABLE)
def test_shapes(name, sizes, dtype):
    function, arguments, results = TABLE[name]
    shapes = shapes_of(arguments)
    run(executed(function, shapes, results, dtype), shapes, dtype, sizes)


@pytest.mark.parametrize(
    ("name", "argument", "wrong", "result"),
    [
        ("quadratic_forms", "A", "N P", "P N"),
        ("kernel", "X2", "M P", "M N"),
        ("from_features", "y", "M", "M M, N, , "),
        ("f(x)", "loc", "M P", "P N, N P, N P, N P"),
    ],
)
def test_wrong_shapes_are_caught(name, argument, wrong, result):
    function, arguments, results = TABLE[name]
    shapes = shapes_of(arguments)
    with pytest.raises(TypeCheckError, match="parameters"):
        run(executed(function, shapes, results, jnp.float64), shapes | {argument: wrong}, jnp.float64)
    with pytest.raises(TypeCheckError, match="return value"):
        run(executed(function, shapes, result, jnp.float64), shapes, jnp.float64)


def test_wrong_precision_is_caught():
    function, arguments, results = TABLE["kernel"]
    shapes = shapes_of(arguments)
    with pytest.raises(TypeCheckError, match="parameters"):
        run(executed(function, shapes, results, jnp.float32), shapes, jnp.float64)


def test_the_package_imports_no_type_checker():
    sources = [path.read_text() for path in Path(dgp.__file__).parent.rglob("*.py")]
    assert sources
    assert not any(name in source for source in sources for name in ("jaxtyping", "beartype"))
