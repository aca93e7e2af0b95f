"""What a conditional does to v: the answers that decide how it is integrated."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import norm

from numpyro_dgp.jaxprs.dependence import Dependence, dependence, explained

C, A, X, E, M = Dependence
s = jnp.array([0.3, 0.4, 0.5, 0.6, 0.7])

SCALAR = [
    (lambda v: s, C),
    (lambda v: v, A),
    (lambda v: 2 * v + s, A),
    (lambda v: (s - v) / s - v, A),
    (lambda v: jnp.log(2 * jnp.exp(v)), A),
    (lambda v: jnp.exp(v), X),
    (lambda v: s / jnp.exp(v), X),
    (lambda v: 2 * jnp.exp(-v) * jnp.exp(3 * v), X),
    (lambda v: jax.jit(jnp.exp)(v), X),
    (lambda v: jnp.sqrt(jnp.exp(v)), X),
    (lambda v: jnp.exp(v) + 1, E),
    (lambda v: v * v, E),
    (lambda v: v.astype(int) * 1.0, E),
    (lambda v: (v > 0) * 1.0, E),
    (lambda v: v.astype("float16"), A),
    (lambda v: -jnp.exp(v), E),
    (jax.nn.softplus, E),
    (jax.nn.sigmoid, E),
    (norm.cdf, E),
    (lambda v: jnp.where(v > 0, v, 0.0), E),
    (lambda v: jnp.stack([v, 1 - v], -1), E),
    (lambda v: jnp.stack([v, 1 - v], -1).sum(-1), E),
    (lambda v: jax.nn.softmax(v[:, None] * jnp.ones(3), -1), E),
    (lambda v: jax.lax.pad(v[:, None], 0.0, ((0, 0, 0), (1, 0, 0))), E),
    (lambda v: jax.lax.pad(v, 0.0, ((1, -1, 0),)), M),
    (lambda v: v - v.mean(), M),
    (lambda v: v[::-1], M),
    (jnp.cumsum, M),
    (lambda v: jnp.roll(v, 1), M),
    (lambda v: v @ jnp.ones((5, 5)), M),
    (lambda v: v[:, None] * v, M),
    (lambda v: jax.lax.fori_loop(0, 3, lambda _, u: jnp.sin(u), v), M),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("function", "kind"), SCALAR)
def test_of_functions(function, kind):
    assert dependence(function, jnp.ones(5)) == [kind]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("conditional", "largest"),
    [
        (lambda v: dist.StudentT(3.0, v, 0.1), A),
        (lambda v: dist.Bernoulli(logits=v), A),
        (lambda v: dist.Gamma(2.0, 2.0 / jnp.exp(v)), X),
        (lambda v: dist.Beta(3 * jax.nn.sigmoid(v), 3 - 3 * jax.nn.sigmoid(v)), E),
        (lambda v: dist.OrderedLogistic(v, jnp.array([-1.0, 1.0])), E),
        (lambda v: dist.NegativeBinomial2(jnp.exp(v), 3.0), X),
        (lambda v: dist.Normal(v, v.std()), M),
    ],
)
def test_of_distributions(conditional, largest):
    assert max(dependence(lambda v: jax.tree.leaves(conditional(v)), jnp.ones(5))) == largest


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (jnp.exp, None),
        (lambda v: v - v.max(), "reduce_max"),
        (lambda v: v @ jnp.ones((5, 5)), "dot_general"),
        (lambda v: jnp.tanh(v[::-1]).sum(), "rev"),  # the first that mixes
        (lambda v: jax.jit(jnp.cumsum)(v), "cumsum"),
        (lambda v: jax.lax.while_loop(lambda u: u.sum() < 9, jnp.exp, v), "while"),  # unknown
    ],
)
def test_the_primitive_that_mixes_is_named(function, cause):
    found = explained(lambda v: {"a": 1.0, "b": (function(v), v)}, jnp.ones(5))
    assert found["a"] == (C, None)
    assert found["b"][0].cause == cause
    assert found["b"][1] == (A, None)
    assert (found["b"][0].kind is M) == (cause is not None)
    assert dependence(function, jnp.ones(5)) == [found["b"][0].kind]


@pytest.mark.slow
def test_closing_over_tracers():
    @jax.jit
    def run(scale):
        assert dependence(lambda v: v * scale, jnp.ones(3)) == [A]
        return scale

    run(2.0)
