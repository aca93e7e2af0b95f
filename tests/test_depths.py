"""``numpyro_dgp.depth.weighted_posterior``: how programs of a family are named."""

import jax
import numpy as np
import pytest

from numpyro_dgp.depth.weighted_posterior import arguments_of, as_depths, key_of


@pytest.mark.parametrize(
    ("given", "depths"),
    [
        (2, (2,)),
        ([1, 2, 3], (1, 2, 3)),
        (np.array([1, 3]), (1, 3)),
        ((1, (2, 1), 2), (1, (2, 1), 2)),
        ((1, 2, [2, 1], (2, 3), (3, 1)), (1, 2, (2, 1), (2, 3), (3, 1))),
        (range(1, 3), (1, 2)),
    ],
)
def test_depths_are_numbers_of_layers_and_pairs(given, depths):
    assert as_depths(given) == depths
    assert all(type(n) is int for depth in depths for n in arguments_of(depth))


@pytest.mark.parametrize(
    "given",
    [(), 0, (2, 1), (1, 1), (1.0,), (True,), "12", ((2, 1), (2, 1)), ((2, 1), 1), ((),), ((2, 0),), ((2, 1, 1),)],
)
def test_others_are_refused(given):
    with pytest.raises(ValueError, match=r"expected depths as ascending .*or pairs .*depths=\(1, \(2, 1\), 2\)"):
        as_depths(given)


@pytest.mark.slow
def test_keys_differ_and_those_of_layers_are_as_ever():
    key = jax.random.key(0)
    assert (key_of(key, 2) == jax.random.fold_in(key, 2)).all()
    found = {tuple(jax.random.key_data(key_of(key, d)).tolist()) for d in (1, 2, 3, (2, 1), (2, 2), (3, 1), (3, 2))}
    assert len(found) == 7
