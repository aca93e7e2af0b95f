"""The BoTorch example, where torch and BoTorch are installed."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PATH = Path(__file__).parent.parent / "examples" / "botorch_model.py"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("torch")
    pytest.importorskip("botorch")
    return runpy.run_path(str(PATH))


def values(X):
    """Two functions of X (N, 2)."""
    return jnp.stack([jnp.sin(X[:, 0]) * X[:, 1], jnp.square(X).sum(1)])


@pytest.mark.filterwarnings("default")
def test_values_and_gradients_cross(example):
    import torch

    model = example["DeepGPModel"](values)
    X = torch.tensor(np.random.default_rng(0).normal(size=(3, 2, 2)), requires_grad=True)
    found = model.posterior(X).values
    assert found.shape == (3, 2, 2, 1)  # batches, draws, points, outputs
    expected = jax.vmap(values)(jnp.asarray(X.detach().numpy()))
    np.testing.assert_allclose(found[..., 0].detach(), expected, rtol=1e-5)
    weights = torch.arange(12.0, dtype=torch.double).reshape(3, 2, 2, 1)
    (weights * found).sum().backward()
    slope = jax.grad(lambda x: (jnp.asarray(weights[..., 0].numpy()) * jax.vmap(values)(x)).sum())
    np.testing.assert_allclose(X.grad, slope(jnp.asarray(X.detach().numpy())), rtol=1e-4)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_a_round(example, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["botorch_model.py", "--smoke"])
    example["main"]()
    assert "10 values: the best is" in capsys.readouterr().out
