"""What a likelihood reads off its conditional: which integral it takes, and what it says about that."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from test_likelihood import CLASSES, LOC, PAIRS, SCALAR, VARIANCE, F

import numpyro_dgp as dgp
from numpyro_dgp.functions.function_values import FunctionValues

SQUARE = FunctionValues(jnp.zeros((3, 3)), jnp.ones((3, 3)))
# Each density sees several rows of v: values, conditional, how
SHARED = {
    "centred": (F, lambda v: dist.Normal(v - v.mean(), 0.1), "takes loc from several rows of v by reduce_sum"),
    "path": (F, lambda v: dist.Normal(jnp.cumsum(v), 0.1), "takes loc from several rows of v by cumsum"),
    "matrix": (F, lambda v: dist.Normal(v @ jnp.ones((3, 3)), 0.1), "takes loc from several rows of v by dot_general"),
    "columns": (PAIRS, lambda v: dist.Normal(v - v.mean(0), 0.1).to_event(1), "takes loc .* by reduce_sum"),
    "classes": (CLASSES, lambda v: dist.Categorical(logits=v - v.max(0)), "takes logits .* by reduce_max"),
    "scale": (F, lambda v: dist.StudentT(4.0, 0.0, v.std() + jnp.ones(3)), "takes scale .* by reduce_sum"),
    "sum": (F, lambda v: dist.Normal(v.sum(), 0.1), "takes loc .* by reduce_sum"),
    "steps": (F, lambda v: dist.Normal(v[1:] - v[:-1], 0.1), "takes loc .* by sub"),
    "two rows": (F, lambda v: dist.Normal(v, jnp.exp(v[::-1])), "by different parameters"),
    "one density": (F, lambda v: dist.MultivariateNormal(v, jnp.eye(3)), "takes loc .* by one density for all of them"),
    "grid": (F, lambda v: dist.Normal(v[:, None], jnp.exp(v)), "by different parameters"),
    "transposed": (SQUARE, lambda v: dist.Normal(v.T, 0.1).to_event(1), "takes loc .* by a change of their axis"),
}
# Each density sees one row of v, though not every number of y has its own number of v.
OWN = {
    "reversed": (F, lambda v: dist.Normal(v[::-1], 0.1)),
    "chosen": (F, lambda v: dist.Normal(v[jnp.array([2, 0, 1])], 0.1)),
    "some": (F, lambda v: dist.Normal(v[1:], 0.1)),
    "softmax": (CLASSES, lambda v: dist.Categorical(probs=jax.nn.softmax(v, -1))),
    "product": (PAIRS, lambda v: dist.Normal(v @ jnp.ones((2, 3)), 0.1).to_event(1)),
    "correlated": (PAIRS, lambda v: dist.MultivariateNormal(v, jnp.eye(2))),
    "mixture": (PAIRS, lambda v: dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones(2) / 2), dist.Normal(v, 0.1))),
}
# An operation that is not known, and gathered rows, which may be the same ones: a warning, and no error.
UNKNOWN = {
    "loop": (F, lambda v: dist.Normal(jax.lax.fori_loop(0, 2, lambda _, r: jnp.sin(r), v), 0.1), "from v by scan"),
    "gathered": (
        F,
        lambda v: dist.Normal(v[jnp.array([2, 0, 1])] + v[jnp.array([2, 0, 1])], 0.1),
        "from v by add",
    ),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("integrate", [None, dgp.likelihoods.MonteCarlo(7)])
def test_rows_that_are_seen_together_are_refused(name, integrate):
    f_x, conditional, how = SHARED[name]
    with pytest.raises(ValueError, match=f"{how}.*draw them together.*f.joint"):
        dgp.Likelihood(f_x, conditional, integrate=integrate)


@pytest.mark.parametrize("name", OWN)
def test_rows_that_are_seen_one_by_one_are_integrated(name):
    f_x, conditional = OWN[name]
    dgp.Likelihood(f_x, conditional, integrate=dgp.likelihoods.MonteCarlo(7))  # no warning: they are errors here


@pytest.mark.parametrize("name", UNKNOWN)
def test_rows_that_may_be_seen_together_are_warned_of(name):
    f_x, conditional, how = UNKNOWN[name]
    with pytest.warns(UserWarning, match=f"Rows are drawn one by one: it takes loc {how}, which may combine rows"):
        dgp.Likelihood(f_x, conditional)
    dgp.Likelihood(f_x, conditional, integrate=dgp.likelihoods.MonteCarlo(7))


MIXING = jnp.eye(4)[::-1] + jnp.eye(4)
FOUR = FunctionValues(jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), jnp.full((3, 4), 0.3))
# values, conditional, why its numbers of y do not have their own number of v
MIXED = {
    "classes": (FOUR, lambda v: dist.Categorical(logits=v), "Categorical mixes the 4 outputs of f"),
    "scale": (FOUR, lambda v: dist.Normal(v[..., 0], jnp.exp(v[..., 1])), "Normal mixes the 4 outputs of f"),
    "event": (FOUR, lambda v: dist.MultivariateNormal(v, jnp.eye(4)), "MultivariateNormal mixes the 4 outputs of f"),
    "product": (
        FOUR,
        lambda v: dist.Normal(v @ MIXING, 1.0).to_event(1),
        "Normal takes loc from v by dot_general, which is not known to act elementwise",
    ),
    "loop": (
        F,
        lambda v: dist.Poisson(jax.lax.fori_loop(0, 2, lambda _, r: jnp.square(r), v)),
        "Poisson takes rate from v by scan, which is not known",
    ),
    "nested": (
        FOUR,
        lambda v: dist.ZeroInflatedPoisson(0.1, jnp.exp(v[::-1])),
        "ZeroInflatedPoisson takes base_dist from v by rev,",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_draws_nobody_asked_for_are_warned_of_with_their_cause(name):
    f_x, conditional, cause = MIXED[name]
    with pytest.warns(
        UserWarning, match="by 20 Monte-Carlo draws per step; pass integrate=dgp.likelihoods.MonteCarlo"
    ) as caught:
        likelihood = dgp.Likelihood(f_x, conditional)
    assert len(caught) == 1
    assert cause in str(caught[0].message)
    assert caught[0].filename == __file__
    assert not likelihood.factorised
    assert repr(likelihood) == f"Likelihood({likelihood.family}, 20 draws: its conditional {likelihood.mixes})"
    asked = dgp.Likelihood(
        f_x, conditional, integrate=dgp.likelihoods.MonteCarlo(7)
    )  # no warning: they are errors here
    assert repr(asked) == f"Likelihood({likelihood.family}, 7 draws: its conditional {likelihood.mixes})"


def test_warned_once_per_line_of_a_program():
    def model(n):
        for _ in range(n):
            numpyro.sample("y", dgp.Likelihood(FOUR, lambda v: dist.Categorical(logits=v)), obs=jnp.array([2, 0, 3]))

    for action, expected in (("default", 1), ("always", 3)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            for seed in range(3):
                handlers.seed(model, seed)(1)
        assert len(caught) == expected
        assert {warning.filename for warning in caught} == {__file__}


def test_says_how_it_is_integrated():
    def said(f_x, conditional, **options):
        return repr(dgp.Likelihood(f_x, conditional, **options))

    belief = FunctionValues(LOC, VARIANCE, VARIANCE, event_dim=0)
    poisson, student = SCALAR["poisson-exp"][0], SCALAR["student-t"][0]
    assert said(F, SCALAR["normal"][0]) == "Likelihood(Normal, closed form)"
    assert said(PAIRS, lambda v: dist.Normal(v, 1.0).to_event(1)) == "Likelihood(Normal, closed form)"
    assert said(F, poisson) == "Likelihood(Poisson, closed form)"
    assert said(F, poisson, collapse="marginal") == "Likelihood(Poisson, nodes around the peak)"
    assert said(belief, SCALAR["normal"][0], collapse="marginal") == "Likelihood(Normal, 20 Gauss-Hermite nodes)"
    assert said(F, student) == "Likelihood(StudentT, 48 nodes around the location)"
    assert said(F, student, integrate=dgp.likelihoods.GaussHermite(7)) == "Likelihood(StudentT, 7 Gauss-Hermite nodes)"
    assert said(F, student, integrate=dgp.likelihoods.MonteCarlo(7)) == "Likelihood(StudentT, 7 draws)"
    assert said(F, SCALAR["bernoulli-logits"][0]) == "Likelihood(Bernoulli, 20 Gauss-Hermite nodes)"
    assert said(CLASSES, dgp.likelihoods.RobustMax) == "Likelihood(RobustMax, own integral)"
    uncertain = FunctionValues(CLASSES.loc, CLASSES.variance, CLASSES.variance)
    with pytest.warns(UserWarning, match="RobustMax mixes the 3 outputs of f, so its expectation is taken by 20"):
        dgp.Likelihood(uncertain, dgp.likelihoods.RobustMax, collapse="marginal")


COUNTED = {
    "normal": (F, SCALAR["normal"][0], [0.1, 0.2, 1.0], 2),
    "poisson": (F, SCALAR["poisson-exp"][0], [0, 2, 3], 2),
    "gamma": (F, SCALAR["gamma"][0], [0.1, 2.0, 3.0], 2),
    "student-t": (F, SCALAR["student-t"][0], [0.1, 0.2, 1.0], 2),
    "categorical": (CLASSES, lambda v: dist.Categorical(logits=v), [2, 0], 2),
    "robust-max": (CLASSES, dgp.likelihoods.RobustMax, [2, 0], 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_calls_the_conditional_no_more_than_it_must(name):
    """An example and a trace at first; then once per density."""
    f_x, conditional, y, at_first = COUNTED[name]
    calls = []

    def counting(v):
        calls.append(v)
        return conditional(v)

    likelihood = dgp.Likelihood(f_x, counting, integrate=dgp.likelihoods.MonteCarlo(20))
    assert len(calls) == at_first
    for density in (likelihood.log_prob, likelihood.log_marginal):
        calls.clear()
        density(jnp.array(y))
        assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normal-affine", "poisson-exp", "student-t"])
def test_conditional_may_close_over_tracers(name):
    """Of jit, vmap and grad around the program."""
    family = {
        "normal-affine": lambda v, a: dist.Normal(a * v, a),
        "poisson-exp": lambda v, a: dist.Poisson(a * jnp.exp(v)),
        "student-t": lambda v, a: dist.StudentT(4.0, v, a),
    }[name]
    y = jnp.array([0, 2, 3])

    def total(a):
        return dgp.Likelihood(F, lambda v: family(v, a)).log_prob(y).sum()

    scales = jnp.array([0.5, 2.0])
    expected = [total(a) for a in scales]
    np.testing.assert_allclose(jax.jit(jax.vmap(total))(scales), expected, rtol=1e-12)
    slope = (total(2.0 + 1e-5) - total(2.0 - 1e-5)) / 2e-5
    np.testing.assert_allclose(jax.jit(jax.grad(total))(2.0), slope, rtol=1e-6)


@pytest.mark.slow
def test_draws_take_their_key_from_the_program():
    def density():
        likelihood = dgp.Likelihood(
            CLASSES, lambda v: dist.Categorical(logits=v), integrate=dgp.likelihoods.MonteCarlo(5)
        )
        return likelihood.log_prob(jnp.array([2, 0]))

    np.testing.assert_array_equal(density(), density())  # outside of a program, without a warning
    np.testing.assert_array_equal(handlers.trace(density)(), density())  # no seed
    seeded = [handlers.seed(density, seed)() for seed in (0, 0, 1)]
    np.testing.assert_array_equal(seeded[0], seeded[1])
    assert (seeded[0] != seeded[2]).all()


@pytest.mark.slow
def test_an_integral_over_independent_values_is_not_used_for_mixtures(key):
    """Robust-max has one, but mixtures are correlated: draws of the functions instead."""
    mixed = PAIRS.mix(jnp.array([[1.0, 0.5], [-0.3, 1.0], [0.2, 0.2], [1.0, -1.0]]))
    labels = jnp.array([0, 3, 2])
    rule = dgp.likelihoods.MonteCarlo(50_000, jax.random.key(1))
    likelihood = dgp.Likelihood(mixed, lambda v: dgp.likelihoods.RobustMax(v, 0.2), integrate=rule)
    log_p = jax.vmap(lambda v: dgp.likelihoods.RobustMax(v, 0.2).log_prob(labels))(mixed.sample(key, (50_000,)))
    np.testing.assert_allclose(likelihood.log_prob(labels), log_p.mean(0), atol=0.05)
    np.testing.assert_allclose(jnp.exp(likelihood.log_marginal(labels)), jnp.exp(log_p).mean(0), atol=0.02)
    assert repr(likelihood) == "Likelihood(RobustMax, 50000 draws: its conditional mixes the 4 outputs of f)"


@pytest.mark.slow
def test_normal_form():
    slope, offset, scale = dgp.Likelihood(F, SCALAR["normal-affine"][0]).normal_form()
    np.testing.assert_allclose(slope, 2 * np.ones(3), rtol=1e-12)
    np.testing.assert_allclose(offset, -scale, rtol=1e-12)
    slope, offset, scale = dgp.Likelihood(F, lambda v: dist.Normal(v, 0.5)).normal_form()
    assert slope.shape == offset.shape == ()
    assert (slope, offset, *scale) == (1.0, 0.0, 0.5)
    assert dgp.Likelihood(F, SCALAR["heteroscedastic"][0]).normal_form() is None
