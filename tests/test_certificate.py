"""Certificates: what is certified is close to the posterior, and what cannot be is refused with its reason."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest

import numpyro_dgp as dgp
from numpyro_dgp.diagnostics import Evidence, certify
from numpyro_dgp.diagnostics.certificate import _Bounds, _certificate, _doubt, _of_ladder
from numpyro_dgp.diagnostics.comparison import verdict

KEY = jax.random.key(0)
MODEL, X, Y = dgp.testing.toy()
FAST = {"key": KEY, "num_steps": 200, "num_starts": 1}


@pytest.mark.slow
def test_an_exact_guide_is_certified():
    """One Gaussian layer: q(v) at its optimum is the posterior, and the bound the evidence."""
    found = certify(MODEL, (X, Y), gap=0.5, **FAST)
    exact = -dgp.ELBO().loss(KEY, {}, MODEL, dgp.guides.Collapsed(MODEL), X, Y)
    row = found.table.loc["InducingPoint"]
    assert found.guide == "InducingPoint"
    assert not found.reasons
    assert row.gap_low <= 0.02
    assert row.gap_high < 0.5
    assert row.khat < 0.7
    assert row.verdict == "close enough"
    assert abs(row.bound - exact) < 0.01
    assert (
        found.evidence.lower - 3 * found.evidence.lower_se < exact < found.evidence.upper + 3 * found.evidence.upper_se
    )
    assert str(found).startswith("Certified: the divergence of InducingPoint from the posterior is at most 0.")
    assert found.posterior.predict(KEY, X).mean.shape == (20,)
    assert found.draws.using(num_samples=5).sample(KEY, X).shape == (5, 20)


@pytest.mark.slow
def test_a_ladder_is_climbed_to_the_first_guide_that_is_close():
    """A diagonal q(v) is further away by its divergence from the posterior, which is known."""
    diagonal = dgp.guides.InducingPoint(MODEL, inducing=dgp.guides.Diagonal())
    ladder = {"diagonal": diagonal, "full": dgp.guides.InducingPoint(MODEL), "never tried": None}
    found = certify(MODEL, (X, Y), guides=ladder, gap=0.5, **FAST | {"num_steps": 2000})
    assert found.guide == "full"
    assert list(found.table.index) == ["diagonal", "full"]
    row = found.table.loc["diagonal"]
    between = found.table.bound["full"] - row.bound  # of two bounds, the second of which is the evidence
    assert row.verdict == "too far"
    assert row.gap_low < between + 0.02 < row.gap_high + 0.04
    assert "Cheaper guides are further away: diagonal" in str(found)


@pytest.mark.slow
def test_mirror_images_count():
    """f and -f explain y alike: a Gaussian guide has one of them, and is log 2 away at least."""

    def model(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.zeros((1, 1))))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v**2, 0.3)), obs=y)

    data = jnp.zeros((4, 1)), jnp.array([1.0, 1.2, 0.9, 1.1])
    found = certify(model, data, gap=0.25, **FAST | {"num_steps": 1000, "num_starts": 2})
    (row,) = found.table.itertuples()
    assert found.guide is None
    assert found.posterior is None
    assert row.verdict == "too far"
    assert 0.25 < row.gap_low < np.log(2) < row.gap_high + 0.1 < 1.5
    assert row.starts > 5  # the guide's own start, at f = 0, stays between the two
    assert found.reasons[0].startswith(
        "no guide is within 0.25 nats of the posterior; the closest, InducingPoint, is 0."
    )
    assert found.draws_gap < 0.25  # which have both images
    assert str(found).endswith(f" are at most {found.draws_gap:.2f} nats from the posterior.")
    values = np.asarray(found.draws.samples["f"])
    assert (values > 0).any()
    assert (values < 0).any()


@pytest.mark.slow
def test_refits_find_a_guide_that_is_too_narrow():
    """A diagonal q(v), certified by a gap that is far too large."""
    ladder = {"diagonal": dgp.guides.InducingPoint(MODEL, inducing=dgp.guides.Diagonal())}
    found = certify(MODEL, (X, Y), guides=ladder, gap=1e6, refits=100, **FAST)
    (reason,) = found.reasons
    assert found.guide is None
    assert reason.startswith("in refits of diagonal to data drawn given these, the posterior of 'f(x) of y'[")
    assert "is too narrow" in reason
    good = certify(MODEL, (X, Y), gap=0.5, refits=25, **FAST)
    assert good.guide == "InducingPoint"
    assert "In 25 refits to data drawn given these, ranks of the truth are uniform." in str(good)


@pytest.mark.slow
def test_collapsed_is_certified_where_hyperparameters_are_uncertain():
    """q(v) that does not depend on the hyperparameters is further away than the best q(v) for each of them."""

    def model(X, y=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))
        noise = numpyro.sample("noise", dist.LogNormal(-1.5, 0.5))
        f = dgp.gp("f", dgp.kernels.RBF(1.0, lengthscale), dgp.Points(jnp.linspace(-2, 2, 8)[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)

    X = jnp.linspace(-2, 2, 40)[:, None]
    y = jnp.sin(3 * X[:, 0]) + 0.2 * jax.random.normal(KEY, (40,))
    found = certify(model, (X, y), gap=0.5, **FAST | {"num_steps": 800})
    assert found.guide == "Collapsed"
    assert found.table.gap_low["InducingPoint"] > 0.5


@pytest.mark.slow
def test_a_ladder_of_collapsed_begins_with_a_guide_to_anneal_from():
    found = certify(MODEL, (X, Y), guides={"best": dgp.guides.Collapsed(MODEL)}, gap=1e-9, **FAST)
    assert list(found.table.index) == ["InducingPoint", "best"]


def test_the_ladder_has_the_guides_that_the_program_admits():
    from numpyro_dgp.diagnostics.certificate import _ladder

    def deep(X, y=None, noise=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 3)[:, None]), outputs=1)
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 3)[:, None]))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=noise))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)

    def upside_down(X, y=None):  # global inducing points go through layers in the order in which they are opened
        g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 3)[:, None]))
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 3)[:, None]), outputs=1)
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X))
            numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)

    def not_normal(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.StudentT(4.0, v, 0.1)), obs=y)

    def uncertain(X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(1.0, numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))), dgp.Points(X))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), dist.BernoulliLogits), obs=y)

    assert list(_ladder(not_normal, (X, Y))) == ["InducingPoint"]
    assert list(_ladder(uncertain, (X, Y > 0))) == ["InducingPoint", "GlobalInducing"]
    assert list(_ladder(MODEL, (X, Y))) == ["InducingPoint", "Collapsed"]
    assert list(_ladder(deep, (X, Y))) == ["InducingPoint", "GlobalInducing"]
    assert list(_ladder(upside_down, (X, Y))) == ["InducingPoint"]
    noisy = _ladder(deep, (X, Y, 0.1))
    both = "GlobalInducing, GivenInducing"
    assert list(noisy) == ["InducingPoint", "Collapsed", "GivenInducing", "GlobalInducing", both]
    rules = noisy["GlobalInducing, GivenInducing"].config
    assert rules.rules.inducing == dgp.guides.GlobalInducing(20)
    assert rules.sites == {"h": dgp.guides.GivenInducing()}


def test_runs_that_disagree_are_a_reason():
    assert _doubt(np.zeros(4)) is None
    assert _doubt(np.array([0.0, 0.2, -0.3, 0.1])) is None
    assert "differ by 9.0 nats" in _doubt(np.array([0.0, -9.0, -9.0, -9.0]))


def test_verdicts():
    cases = {(-0.1, 0.9): "close enough", (0.5, 1.5): "undecided", (1.5, 2.0): "too far", (0.0, np.nan): "undecided"}
    assert {case: verdict(*case, 1.0) for case in cases} == cases


def row(low, high, gap=1.0, **others):
    return {"bound": 0.0, "bound_se": 0.0, "gap_low": low, "gap_high": high, "khat": 0.1, "starts": 0.0,
            "converged": True, "verdict": verdict(low, high, gap)} | others  # fmt: skip


def table(**rows):
    return pandas.DataFrame.from_dict(rows, orient="index")


def test_reasons_name_the_check():
    rows = table(a=row(5.0, 6.0), b=row(3.0, 4.0, starts=14.2, converged=False))
    assert _of_ladder(rows, 3.0, 4.0, 1.0, 10) == [
        "no guide is within 1 nats of the posterior; the closest, b, is 3.0 to 4.0 nats away",
        "the fit of b has not converged: give more num_steps",
        "starts of b end 14.2 nats apart",
    ]
    (open_,) = _of_ladder(table(a=row(0.5, 7.0)), -64.5, -58.0, 1.0, 512000)
    assert open_.startswith("the log evidence is between -64.5 and -58.0, 6.5 nats apart after 512000 gradients")


def test_an_upper_bound_below_the_lower_one_is_refused():
    """Draws from a part of the posterior: the guide looks closer than it can be."""
    bounds = _Bounds(KEY, (X, Y), {}, -9.0, 1)
    bounds.found = Evidence(np.zeros(9), np.ones(2), np.full(9, 3.0))  # lower bound 0, upper bound -3
    posterior = dgp.Posterior(MODEL, samples={"f": jnp.zeros((1, 5))})
    found = _certificate(("a", posterior), [], {"a": row(-3.0, -2.9)}, bounds, posterior, np.zeros(4), 1.0)
    assert found.guide is None
    assert found.draws_gap == np.inf
    assert "3.00 nats below the lower one" in str(found)
    bounds.lower = -2.95  # by chance: less than any decision needs
    bounds.found = Evidence(np.full(9, -3.0), np.ones(2), np.full(9, 3.0))
    found = _certificate(("a", posterior), [], {"a": row(0.0, 0.1)}, bounds, posterior, np.full(4, -3.0), 1.0)
    assert found.guide == "a"
    assert found.between == (-2.95, -2.95)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gap": 0.0}, "a positive gap, in nats, got 0.0"),
        ({"gap": True}, "a positive gap"),
        ({"guides": {}}, "at least one guide, got none"),
        ({"guides": [1]}, "guides as a dict"),
        ({"data": X}, r"data=\(X, y\)"),
        ({"budget": 0}, "budget"),
        ({"num_steps": 0.5}, "num_steps"),
        ({"key": 3}, "PRNG key"),
    ],
)
def test_wrong_calls(change, message):
    options = {"data": (X, Y), "key": KEY} | change
    with pytest.raises(ValueError, match=message):
        certify(MODEL, options.pop("data"), **options)


def test_a_program_with_parameters_is_refused():
    def model(X, y=None):
        scale = numpyro.param("scale", 0.1, constraint=dist.constraints.positive)
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.zeros((1, 1))))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, scale)), obs=y)

    with pytest.raises(ValueError, match=r"got numpyro.param at \['scale'\]: give them priors"):
        certify(model, (X, Y), key=KEY)
