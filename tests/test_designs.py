"""Designs and the space they are in: what they promise, columns of whole numbers and labels, wrong calls."""

import jax
import numpy as np
import pytest
from scipy.spatial.distance import pdist

from numpyro_dgp import design

SQUARE = [[0.0, 1.0], [0.0, 1.0]]
MIXED = design.Box([[-1.0, 1.0], [1, 4], [0, 2]], integers=[1], categories=[2])


@pytest.mark.parametrize("make", [design.latin_hypercube, design.maximin])
def test_latin_hypercubes_have_a_point_in_every_part_of_every_column(make, key):
    box = [[0.0, 1.0], [-2.0, 2.0]]
    X = make(box, 10, key)
    parts = np.floor(10 * (X - [0, -2]) / [1, 4])
    assert (np.sort(parts, 0) == np.arange(10)[:, None]).all()
    assert (make(box, 10, key) == X).all()
    assert not (make(box, 10, jax.random.key(1)) == X).all()


@pytest.mark.slow
def test_maximin_is_as_far_apart_as_it_is_known_to_be_possible(key):
    # The best Latin hypercube of five points in a square has squared distance 5 in units of its levels.
    X = np.floor(5 * design.maximin(SQUARE, 5, key))
    assert pdist(X).min() ** 2 == pytest.approx(5)
    random = [pdist(design.latin_hypercube(SQUARE, 20, k)).min() for k in jax.random.split(key, 30)]
    assert pdist(design.maximin(SQUARE, 20, key)).min() > 1.3 * max(random)
    assert design.maximin(SQUARE, 1, key).shape == (1, 2)


@pytest.mark.smoke
def test_sobol_points_fill_halves_evenly(key):
    X = design.sobol([[0.0, 1.0], [-3.0, 1.0]], 64, key)
    assert ((X < [0.5, -1.0]).sum(0) == 32).all()
    assert design.sobol(SQUARE, 5, key).shape == (5, 2)


@pytest.mark.parametrize("make", [design.latin_hypercube, design.maximin, design.sobol])
def test_whole_numbers_and_labels(make, key):
    X = make(MIXED, 24, key)
    values, counts = np.unique(X[:, 1], return_counts=True)
    assert values.tolist() == [1, 2, 3, 4]
    assert np.abs(counts - 6).max() <= (2 if make is design.sobol else 0)
    assert set(np.unique(X[:, 2])) == {0, 1, 2}
    assert (MIXED.snapped(X) == X).all()


@pytest.mark.slow
@pytest.mark.parametrize("num", [4, 5, 9])
@pytest.mark.parametrize("make", [design.latin_hypercube, design.maximin])
def test_every_whole_number_equally_often_or_one_time_more(make, num):
    box = design.Box([[0, 2], [0.0, 1.0]], integers=[0])
    for key in jax.random.split(jax.random.key(1), 40):
        X = make(box, num, key)
        counts = np.bincount(X[:, 0].astype(int), minlength=3)
        assert set(counts) <= {num // 3, -(-num // 3)}
        assert (np.sort(np.floor(num * X[:, 1])) == np.arange(num)).all()


def test_a_box_is_its_own():
    bounds = np.array([[0.0, 1.0]])
    box = design.Box(bounds)
    bounds[0, 1] = 5.0
    assert box.high.tolist() == [1.0]


def test_additions_are_far_from_everything(key):
    existing = np.array([[0.1, 0.1], [0.9, 0.2]])
    X = design.additions(SQUARE, existing, 3, key)
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 51)] * 2), -1).reshape(-1, 2)
    for n in range(3):
        there = np.concatenate([existing, X[:n]])
        farthest = np.linalg.norm(grid[:, None] - there, axis=-1).min(1).max()
        assert np.linalg.norm(X[n] - there, axis=-1).min() > farthest - 1e-3
    added = design.additions(MIXED, design.maximin(MIXED, 5, key), 4, key)
    assert (MIXED.snapped(added) == added).all()


def test_labels_are_as_far_apart_as_the_ends_of_a_column():
    places = MIXED.places(np.array([[-1.0, 1, 0], [1.0, 1, 0], [-1.0, 4, 0], [-1.0, 1, 1], [-1.0, 1, 2]]))
    assert np.linalg.norm(places[1:] - places[0], axis=1) == pytest.approx([1, 1, 1, 1])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda key: design.Box([0.0, 1.0]), r"bounds of shape \(D, 2\).*got shape \(2,\): np.array"),
        (lambda key: design.Box([[0.0, 0.0]]), r"low < high in every row of bounds, got 0 and 0 for column 0"),
        (lambda key: design.Box([[0.0, np.inf]]), r"finite bounds"),
        (lambda key: design.Box([[0.0, 1.0]], integers=[1]), r"integers to be different numbers of columns.*0 to 0"),
        (lambda key: design.Box(SQUARE, integers=[1], categories=[1]), r"got column 1 in both"),
        (lambda key: design.Box([[0.0, 1.5]], integers=[0]), r"whole bounds.*for column 0"),
        (lambda key: design.latin_hypercube(SQUARE, 0, key), r"num to be a positive integer, got 0"),
        (lambda key: design.sobol(SQUARE, 4, 0), r"design.sobol: expected a PRNG key"),
        (lambda key: design.maximin(SQUARE, 4, key, num_exchanges=-1), r"num_exchanges to be a positive"),
        (lambda key: design.additions(SQUARE, [[0.5, 2.0]], 1, key), r"got 2 in row 0, column 1, outside \[0, 1\]"),
        (lambda key: design.additions(SQUARE, [[0.5]], 1, key), r"existing of shape \(N, 2\).*got \(1, 1\)"),
        (lambda key: design.additions(SQUARE, np.zeros((0, 2)), 1, key), r"at least one existing point, got none"),
        (lambda key: design.additions(MIXED, [[0.5, 1.5, 0]], 1, key), r"whole numbers in column 1 of existing"),
    ],
)
def test_wrong_calls(call, says, key):
    with pytest.raises(ValueError, match=says):
        call(key)
