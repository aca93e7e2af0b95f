"""Programs that are compiled once for all functions that perform the same operations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI
from programs import X, Y, deep, shallow
from test_initial_state import count_compilations

import numpyro_dgp as dgp
from numpyro_dgp._compiled import Compiled


def test_one_program_for_functions_that_differ_in_arrays_only():
    def make(a):
        return Compiled(lambda x: jnp.sin(a @ x))

    x = jnp.arange(3.0)
    first, second = jnp.ones((3, 3)), jnp.eye(3)
    np.testing.assert_allclose(make(first)(x), jnp.sin(jnp.full(3, 3.0)), rtol=1e-12)
    other = make(second)
    assert count_compilations(lambda: other(x)) == 0
    np.testing.assert_allclose(other(x), jnp.sin(x), rtol=1e-12)


def test_as_many_operations_of_each_kind_are_not_yet_the_same():
    x = jnp.linspace(0.1, 1.0, 4)
    functions = [
        lambda x: jnp.sin(x) - jnp.cos(x),
        lambda x: jnp.cos(x) - jnp.sin(x),
        lambda x: jnp.sin(jnp.cos(x)) - x,
    ]
    functions += [lambda x: 2.0 * x, lambda x: 3.0 * x]
    for function in functions:
        np.testing.assert_allclose(Compiled(function)(x), function(x), rtol=1e-12)


def test_branches_and_loops_are_looked_into():
    def make(branch):
        return lambda x: jax.lax.fori_loop(0, 3, lambda i, s: jax.lax.cond(s.sum() > 0, branch, jnp.negative, s), x)

    x = jnp.ones(2)
    for branch in (jnp.sin, jnp.cos):
        np.testing.assert_allclose(Compiled(make(branch))(x), make(branch)(x), rtol=1e-12)


def test_a_program_for_many_calls():
    compiled = Compiled(lambda tree, factor: {"doubled": 2 * tree["a"], "scaled": factor * tree["a"]})
    program = compiled.at({"a": jnp.ones(2)}, 3.0)
    for a in (jnp.ones(2), jnp.arange(2.0)):
        found = program({"a": a}, 3.0)
        np.testing.assert_array_equal(found["doubled"], 2 * a)
        np.testing.assert_array_equal(found["scaled"], 3 * a)


def test_nothing_is_compiled_where_jit_is_disabled():
    seen = []
    function = Compiled(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or 2 * x)
    with jax.disable_jit():
        function(jnp.ones(3))
    assert seen == [False]
    function(jnp.ones(3))
    assert seen == [False, True]


@pytest.mark.slow
def test_arrays_on_a_mesh():
    """Functions with as many operations of every kind are compared although no device stands in the mesh of a trace."""
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("rows",))
    for spec in (PartitionSpec(), PartitionSpec("rows")):
        x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, spec))
        for a in (jnp.full(4, 1.0), jnp.full(4, 2.0)):
            expected = jnp.sin(a * jnp.arange(4.0))
            np.testing.assert_allclose(Compiled(lambda x, a=a: jnp.sin(a * x))(x), expected, rtol=1e-12)
            np.testing.assert_allclose(Compiled(lambda x, a=a: jnp.sin(a * x))(jnp.arange(4.0)), expected, rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("model", [shallow, deep])
def test_a_second_fit_compiles_nothing(model, key):

    def fit(guide, seed):
        svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
        return dgp.fit(svi, jax.random.key(seed), 3, X, Y, progress_bar=False)

    first = fit(dgp.guides.InducingPoint(model), 0)
    seconds = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda event, s, **__: seconds.append(s) if event.endswith("backend_compile_duration") else None
    )
    try:
        again = fit(dgp.guides.InducingPoint(model), 0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not seconds
    np.testing.assert_array_equal(first.losses, again.losses)
    assert not np.array_equal(fit(dgp.guides.InducingPoint(model), 1).losses, first.losses) or model is shallow
