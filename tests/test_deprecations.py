"""The decorator for what goes: one warning for each line that uses it, and nothing else changes."""

import inspect
import warnings

import pytest

from numpyro_dgp._deprecations import deprecated
from numpyro_dgp._typing import pytree


@deprecated(since="1.1", removed="2.0", instead="dgp.fit")
def train(model, *, steps: int = 10) -> int:
    """Train a model.

    Args:
        model: anything.
    """
    return steps


@deprecated(since="1.2", removed="2.0", instead="rows=", argument="size")
def batch(rows=None, size=None):
    """Rows of a batch."""
    return rows or size


@deprecated(since="1.1", removed="2.0", instead="dgp.kernels.RBF")
@pytree
class Squares:
    """A kernel."""

    scale: float = 1.0

    @deprecated(since="1.1", removed="2.0", instead="twice = 2 * kernel.scale")
    def twice(self):
        return 2 * self.scale


@pytest.fixture
def seen():
    """The warnings of a test, as Python shows them by default: once for each line."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("default")
        yield record


def test_one_warning_for_each_line(seen):
    for _ in range(3):
        assert train("model", steps=4) == 4
    assert len(seen) == 1
    train("model")
    assert len(seen) == 2
    assert {(w.category, w.filename) for w in seen} == {(DeprecationWarning, __file__)}
    assert seen[0].lineno < seen[1].lineno


def test_the_warning_says_what_to_write():
    message = r"^train is deprecated since version 1\.1 and will be removed in version 2\.0: use dgp\.fit$"
    with pytest.warns(DeprecationWarning, match=message):
        train("model")


def test_name_signature_and_docstring_stay():
    assert train.__name__ == "train"
    assert str(inspect.signature(train)) == "(model, *, steps: int = 10) -> int"
    text = "Train a model.\n\nArgs:\n    model: anything.\n\n.. deprecated:: 1.1\n   train is deprecated since"
    assert train.__doc__.startswith(text)


def test_an_argument_goes_alone(seen):
    assert batch(3) == 3
    assert batch(rows=3) == 3
    assert not seen
    assert batch(None, 4) == 4
    assert batch(size=5) == 5
    assert [str(w.message).partition(" is ")[0] for w in seen] == 2 * ["the argument size of batch"]
    with pytest.raises(ValueError, match=r"expected an argument of f, got 'n': it has m"):
        deprecated(since="1.1", removed="2.0", instead="m", argument="n")(f)


def f(m):
    return m


def test_a_class_stays_a_class(seen):
    kernel = Squares(scale=2.0)
    assert isinstance(kernel, Squares)
    assert str(inspect.signature(Squares)).startswith("(scale:")
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert kernel.twice() == 4.0
    assert "Squares.twice is deprecated" in str(seen[1].message)


@pytest.mark.slow
def test_jax_rebuilds_an_object_without_a_warning(seen):
    import jax

    kernel = Squares(scale=2.0)
    seen.clear()
    assert jax.tree.map(lambda leaf: 2 * leaf, kernel).scale == 4.0
    assert not seen
