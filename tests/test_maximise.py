"""The search of an acquisition's maximum: known optima, whole numbers and labels, what is compiled, wrong calls."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sizes import mostly_long

from numpyro_dgp import design
from numpyro_dgp.design.maximise import maximise

SQUARE = [[0.0, 1.0], [0.0, 1.0]]
FEW = {"num_candidates": 64, "num_starts": 4}


def branin(x):
    a, b = 15 * x[0] - 5, 15 * x[1]
    valley = b - 5.1 / (4 * jnp.pi**2) * a**2 + 5 / jnp.pi * a - 6
    return valley**2 + 10 * (1 - 1 / (8 * jnp.pi)) * jnp.cos(a) + 10


def test_finds_the_minimum_of_branin(key):
    found = maximise(lambda x: -branin(x[0]), SQUARE, key, **FEW)
    assert found.value == pytest.approx(-0.397887, abs=1e-6)
    assert found.x.shape == (1, 2)
    assert found.candidate_values.max() <= found.refined_values.max() <= found.value
    minima = {tuple(x.round(2)) for x in found.refined[:, 0]}  # the starts are in different valleys
    assert len(minima) >= 2
    again = maximise(lambda x: -branin(x[0]), SQUARE, key, **FEW)
    assert (again.x == found.x).all()


@pytest.mark.long
def test_values_of_any_size_are_as_steep(key):
    big, tiny = (maximise(lambda x: s * jnp.cos(x.sum() - 1.0), [[-1.0, 2.0]], key, **FEW) for s in (1e9, 1e-9))
    assert big.x == pytest.approx(1.0, abs=1e-4)
    assert tiny.x == pytest.approx(1.0, abs=1e-4)


@pytest.mark.long
def test_a_maximum_at_the_bounds_is_at_the_bounds(key):
    found = maximise(lambda x: x[0, 0] - x[0, 1], [[0.0, 3.0], [-2.0, 1.0]], key, **FEW)
    assert found.x.tolist() == [[3.0, -2.0]]


@pytest.mark.long
def test_several_points_together(key):
    def apart(x):  # three points on a line, away from each other and from the middle
        distances = jnp.abs(x[:, None] - x[None]).sum(-1) + jnp.eye(3)
        return jnp.log(distances + 0.01).sum()

    found = maximise(apart, [[0.0, 1.0]], key, q=3, **FEW)
    assert np.sort(found.x[:, 0]) == pytest.approx([0, 0.5, 1], abs=1e-3)


def mixed(x):
    height = jnp.array([0.0, 2.0, 1.0, 3.0])[x[..., 2].astype(int)]
    return (height - (x[..., 0] - 0.2 * x[..., 1]) ** 2 - 0.3 * (x[..., 1] - 2.5 - 0.2 * height) ** 2).sum()


MIXED = design.Box([[0.0, 1.0], [0, 6], [0, 3]], integers=[1], categories=[2])


@pytest.mark.slow
@pytest.mark.parametrize("starts", mostly_long([4], [1, 4]))
def test_whole_numbers_and_labels_against_all_of_them(starts, key):
    found = maximise(mixed, MIXED, key, num_candidates=32, num_starts=starts)
    best = max(itertools.product(range(7), range(4)), key=lambda c: mixed(jnp.array([[0.2 * c[0], *c]])))
    assert found.x[0] == pytest.approx([0.2 * best[0], *best], abs=1e-4)
    assert MIXED.snapped(found.candidates).tolist() == found.candidates.tolist()
    assert found.value == pytest.approx(float(mixed(jnp.array(found.x))))


def test_nothing_but_labels(key):
    table = jnp.array([[0.0, 3.0, 1.0], [2.0, 0.0, 5.0]])
    box = design.Box([[0, 1], [0, 2]], categories=[0, 1])
    found = maximise(lambda x: table[x[0, 0].astype(int), x[0, 1].astype(int)], box, key, num_candidates=8)
    assert found.x.tolist() == [[1, 2]]


@pytest.mark.long
def test_points_of_ones_own_are_candidates(key):
    def needle(x):
        return jnp.exp(-1e8 * jnp.square(x - 0.31415).sum())

    lost = maximise(lambda x: needle(x) + 1e-9 * x.sum(), [[0.0, 1.0]], key, **FEW)
    found = maximise(lambda x: needle(x) + 1e-9 * x.sum(), [[0.0, 1.0]], key, starts=[[0.31412]], **FEW)
    assert lost.value < 1e-3 < 0.99 < found.value


def test_minus_infinity_is_no_maximum(key):
    found = maximise(lambda x: jnp.where(x[0, 0] < 0.7, -jnp.inf, -x[0, 0]), [[0.0, 1.0]], key, **FEW)
    assert found.x[0, 0] == pytest.approx(0.7, abs=0.05)


def test_flat_acquisitions_are_announced(key):
    with pytest.warns(UserWarning, match=r"is 0 at all 64 candidates.*take the logarithm"):
        found = maximise(lambda x: 0.0 * x.sum(), [[0.0, 1.0]], key, **FEW)
    assert found.value == 0


@pytest.mark.long
def test_single_precision(key, x32):
    found = maximise(lambda x: -branin(x[0]), SQUARE, key, **FEW)
    assert found.value == pytest.approx(-0.397887, abs=1e-4)


@pytest.mark.parametrize(
    ("acquisition", "settings", "says"),
    [
        (lambda x: jnp.log(x[0, 0] - 0.5), {}, r"without NaN, got NaN at 32 of 64 points, the first at x = \[\[0\.4"),
        (lambda x: x[0], {}, r"one number for q points x \(1, 2\), got shape \(2,\): sum or average"),
        (lambda x: -jnp.inf * (1 + x.sum()), {}, r"a finite value somewhere, got -inf at all 64"),
        (lambda x: 1 / (0 * x.sum()), {}, r"expected a finite acquisition, got inf at x = "),
        (lambda x: np.sin(x).sum(), {}, r"of JAX operations, got one .*\(TracerArrayConversionError\): jnp.sin in"),
        (lambda x: float(x.sum()), {}, r"of JAX operations, got one .*\(ConcretizationTypeError\).*no float\(\)"),
        (lambda x: x.sum() if x.sum() > 0 else 0.0, {}, r"of JAX operations, got one .*jnp.where in place of if"),
        (lambda x: jax.lax.complex(x, x).sum(), {}, r"a real acquisition, got complex128: take .real"),
        (lambda x: None, {}, r"values of the acquisition to be numbers, got a NoneType"),
        (lambda x: "high", {}, r"values of the acquisition to be numbers, got text"),
        (3, {}, r"an acquisition, a function of x \(q, D\), got int"),
        (branin, {"starts": [[0.5]]}, r"starts \(K, 1, 2\), got \(1, 1\)"),
        (branin, {"starts": [[0.5, 7.0]]}, r"starts within bounds, got 7 in row 0"),
        (branin, {"q": 0}, r"q to be a positive integer"),
    ],
)
def test_wrong_calls(acquisition, settings, says, key):
    with pytest.raises(ValueError, match=says):
        maximise(acquisition, SQUARE, key, **{**FEW, **settings})
