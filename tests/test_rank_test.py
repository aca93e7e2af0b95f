"""The sequential test of uniform ranks: its bets have expectation one, its alarms and its exclusions their levels."""

import itertools

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtri
from scipy.stats import norm

from numpyro_dgp.diagnostics.rank_test import ALTERNATIVES, gross, judge, log_ratios, log_wealth, rank_probabilities

rng = np.random.default_rng(0)
S = 99


def ranks_of(shift, width, shape):
    """Of the truth z ~ N(0, 1) among draws of N(shift, width^2), counted."""
    z = rng.normal(size=shape)
    return (shift + width * rng.normal(size=(S, *shape)) < z).sum(0)


@pytest.mark.parametrize(("shift", "width"), [(0.5, 0.7), (-1.0, 2.0), (0.0, 1.0)])
def test_probabilities_of_ranks(shift, width):
    """Against quadrature: the density of u = Phi((z - shift) / width) between the edges of a rank."""

    def density(u):
        return width * norm.pdf(shift + width * ndtri(u)) / norm.pdf(ndtri(u))

    (found,) = rank_probabilities(9, np.array([[shift, width]]))
    wanted = [quad(density, r / 10, (r + 1) / 10, epsabs=1e-11)[0] for r in range(10)]
    np.testing.assert_allclose(found, wanted, rtol=1e-7)
    np.testing.assert_allclose(rank_probabilities(9, ALTERNATIVES).sum(-1), 1, rtol=1e-14)
    # S draws of that posterior have its ranks, up to their noise
    many = np.bincount(ranks_of(shift, width, (4000,)) // 10, minlength=10) / 4000
    np.testing.assert_allclose(many, wanted, atol=0.03)


def test_bets_have_expectation_one():
    """Over all sequences of four ranks of three draws, every bet after every rank."""
    sequences = np.array(list(itertools.product(range(4), repeat=4))).T  # (4, 256)
    np.testing.assert_allclose(np.exp(log_wealth(sequences, 3)).mean(1), 1, rtol=1e-12)


def test_false_alarms():
    """Ranks of three quantities, two of which depend on each other, in 300 runs at a level of five per cent."""
    alarms = 0
    for _ in range(300):
        base = rng.integers(0, S + 1, (40, 2))
        verdict = judge({"a": base, "b": S - base[:, :1]}, S, 0.05, 1.4)
        alarms += verdict.alarm is not None
    assert alarms < 300 * 0.05 + 3 * (300 * 0.05 * 0.95) ** 0.5
    assert alarms > 0


@pytest.mark.slow
def test_no_false_alarms_at_the_usual_level():
    """In 2000 runs of a hundred replications, eight values of a function and two others: about two at most."""
    alarms = 0
    for _ in range(2000):
        base = rng.integers(0, S + 1, (100, 3))
        function = (base[:, :1] + rng.integers(0, 5, (100, 8))) % (S + 1)
        verdict = judge({"f": function, "noise": base[:, 1], "log density": base[:, 2]}, S, 1e-3, 1.4)
        alarms += verdict.alarm is not None
    assert alarms <= 2 + 3 * 2**0.5


@pytest.mark.parametrize(
    ("shift", "width", "words"),
    [(0.0, 0.5, "too narrow"), (0.0, 2.0, "too wide"), (-1.0, 1.0, "biased low"), (1.0, 1.0, "biased high")],
)
def test_deviations_are_found_and_named(shift, width, words):
    columns = np.stack([rng.integers(0, S + 1, 150), ranks_of(shift, width, (150,))], -1)
    verdict = judge({"right": columns[:, 0], "pair": columns}, S, 1e-3, 1.4)
    assert verdict.alarm < 110
    assert (verdict.quantity, verdict.entry) == ("pair", (1,))
    assert words in verdict.deviation
    assert verdict.cleared is None


def test_another_shape_is_found():
    """Ranks in the middle and at both ends, as of no Gaussian."""
    ranks = rng.choice([0, 1, 48, 49, 50, 51, 98, 99], 150)
    verdict = judge({"f": ranks}, S, 1e-3, 1.4)
    assert verdict.alarm is not None
    assert verdict.deviation == "has another shape"


@pytest.mark.parametrize("k", range(4))
def test_exclusions_have_their_level(k):
    """At a level of ten per cent so many runs under an alternative fall below it, and far fewer are cleared."""
    ranks = rng.choice(S + 1, (200, 400), p=rank_probabilities(S, gross(1.4))[k])
    ever = log_ratios(ranks, S, gross(1.4)[[k]])[..., 0].min(0) < np.log(0.1)
    assert 0 < ever.mean() < 0.1 + 3 * (0.09 / 400) ** 0.5
    cleared = [judge({"f": column}, S, 0.1, 1.4).cleared is not None for column in ranks.T[:50]]
    assert np.mean(cleared) < 0.1 + 3 * (0.09 / 50) ** 0.5


@pytest.mark.parametrize("tolerance", [1.1, 1.4])
def test_gross_deviations_are_equally_far(tolerance):
    """From uniform ranks, by the divergence of those from theirs."""
    divergence = -np.log((S + 1) * rank_probabilities(S, gross(tolerance))).mean(-1)
    np.testing.assert_allclose(divergence, np.log(tolerance) ** 2, rtol=0.35 if tolerance == 1.4 else 0.1)


def test_about_a_hundred_replications_are_enough():
    cleared = [judge({"f": rng.integers(0, S + 1, 300)}, S, 1e-3, 1.4).cleared or 300 for _ in range(40)]
    assert np.median(cleared) < 130
