"""Messages of wrong calls name what the user called, and fields of dataclasses check what they are given."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest

import numpyro_dgp as dgp
from numpyro_dgp import _fields
from numpyro_dgp._checks import expect, expect_kind, expected

KEY = jax.random.key(0)


class Own(dgp.kernels.RBF):
    """A kernel of a user."""


def in_a_layer():
    with numpyro.handlers.seed(rng_seed=0):
        dgp.gp("f", dgp.kernels.RBF(), dgp.kernels.RBF())


def in_a_program_that_is_fitted():
    def model(X, y=None):
        dgp.gp("h", dgp.kernels.RBF(-1.0), dgp.Points(X[:3]))

    svi = numpyro.infer.SVI(model, dgp.guides.InducingPoint(model), numpyro.optim.Adam(0.1), dgp.ELBO())
    dgp.fit(svi, KEY, 1, jnp.zeros((5, 1)))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: dgp.kernels.RBF(-1.0), "RBF"),  # a field
        (lambda: Own(-1.0), "Own"),  # of a subclass elsewhere
        (lambda: dgp.kernels.RBF().gram(np.zeros(3)), r"RBF\.gram"),
        (lambda: dgp.Grid.around(np.zeros(3), 1.0), r"Grid\.around"),  # a class method
        (lambda: dgp.design.sobol([[0, 1]], 0, KEY), r"design\.sobol"),  # through helpers
        (lambda: dgp.initial.kmeans(np.zeros((3, 1)), 9), r"initial\.kmeans"),
        (in_a_layer, "gp 'f'"),
        (in_a_program_that_is_fitted, "RBF"),  # called by the program, under the handlers of a fit
        (lambda: dgp.fit(None, KEY, 1), "fit"),
    ],
)
def test_messages_name_what_was_called(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected "):
        call()


def test_three_parts():
    assert str(expected("x", 3, "write x[:, None]")) == "expected x, got 3: write x[:, None]"
    assert str(expected("x", (2,), at="gp 'f'")) == "gp 'f': expected x, got (2,)"
    expect(True, "x", 3)
    expect_kind(3, int | str, "x")
    with pytest.raises(ValueError, match=r"^expected a text, got int: str"):
        expect_kind(3, str, "a text", "str(x)")


@dataclasses.dataclass(frozen=True)
class Settings(_fields.Checked):
    scale: float | None = _fields.scale()
    widths: object = _fields.positive((1.0, 2.0))
    num: int = _fields.count(3)
    mode: str = _fields.one_of("fast", "exact")
    quiet: bool = _fields.flag()
    shift: float = _fields.nonnegative(0.0)


def test_fields_convert_and_let_none_pass_where_it_is_the_default():
    made = Settings()
    assert made.scale is None
    assert isinstance(made.widths, jax.Array)
    given = np.ones(2)
    kept = Settings(widths=given)
    given[0] = -1
    assert kept.widths[0] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": -1.0}, "scale to be positive, got -1.0"),
        ({"scale": len}, "scale to be a positive number, got builtin.*a program goes to a guide"),
        ({"widths": [1.0, 0.0]}, "widths to be positive"),
        ({"num": True}, "num to be a positive integer, got True: try 3"),
        ({"mode": "slow"}, "mode to be 'fast' or 'exact', got 'slow': 'fast' is the default"),
        ({"quiet": 1}, "quiet to be True or False, got 1: False is the default"),
        ({"shift": -1.0}, "shift of at least zero, got -1.0"),
        ({"shift": [1.0, 2.0]}, "shift to be a single number"),
    ],
)
def test_fields_refuse(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**settings)
