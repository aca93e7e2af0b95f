"""The data and programs of ``guide_table.py``: layers with process noise between them, so that every guide applies."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from implementations.guide_tables import CHOSEN, SYNTHETIC

import numpyro_dgp as dgp

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import regression
import step_function

ROWS = 200  # training rows at most


class Layer(NamedTuple):
    """Inducing inputs (M, D), mean function and outputs of one layer."""

    Z: jax.Array
    mean: dgp.means.Mean
    outputs: int | None


class Problem(NamedTuple):
    """Training and test rows in standard units, and the layers of the program."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array
    layers: list[Layer]
    kind: str = "numbers"  # or "labels", 0 and 1; or "latent": numbers, with a latent column beside the inputs

    def hyperparameters(self) -> dict[str, dist.Distribution]:
        """Priors, by name."""
        found: dict[str, dist.Distribution] = {}
        if self.kind != "labels":
            found["noise"] = dist.LogNormal(math.log(0.1), 1.0)
        for i, layer in enumerate(self.layers):
            D = layer.Z.shape[1]
            found[f"variance{i}"] = dist.LogNormal(0.0, 1.0)
            found[f"lengthscale{i}"] = dist.LogNormal(0.5 * math.log(D), 0.7).expand([D]).to_event(1)
        return found | {f"process{i}": dist.LogNormal(math.log(0.1), 0.7) for i in range(len(self.layers) - 1)}

    def kernel(self, values: dict[str, Any], i: int) -> dgp.kernels.Kernel:
        return dgp.kernels.RBF(values[f"variance{i}"], values[f"lengthscale{i}"])


def problem(name: str, depth: int, width: int, data: Path | None, num: int, num_inducing: int) -> Problem:
    """The set ``name`` for ``depth`` layers with ``width`` hidden columns.

    The first hidden layer begins as the input, padded with zeros. With more inputs than hidden columns it begins as the
    linear regression of y, then principal directions. Other inducing inputs are a grid, or spread over where hidden
    values are. Of ``labels``, observations are whether the sum of sinusoids is positive; of ``branches``, they are on
    one of two curves, which a latent column tells apart.
    """
    kind = {"labels": "labels", "branches": "latent"}.get(name, "numbers")
    if name in CHOSEN:
        split = drawn_rows(name, num)
    elif name in SYNTHETIC:
        split = step_function.make_data(name, num, 0.1, 0)
    else:
        split = regression.split_data(*regression.load(str(data / f"{name}.npz")), 0, "B")
    X, y, X_test, y_test = (jnp.asarray(a, float) for a in split[:4])
    X, y = X[:ROWS], y[:ROWS]
    if kind == "latent":
        width = 2
    D, rng = X.shape[1] + (kind == "latent"), np.random.default_rng(0)
    if kind == "latent":
        both = np.stack([rng.uniform(X.min(), X.max(), 2000), rng.normal(size=2000)], 1)
        first, mean = dgp.initial.kmeans(both, num_inducing), dgp.means.IdentityMean()
    elif D == 1:
        first, mean = np.linspace(X.min(), X.max(), num_inducing)[:, None], dgp.means.LinearMean(np.eye(1, width))
    else:
        slopes = np.linalg.lstsq(np.asarray(X), np.asarray(y), rcond=1e-4)[0][:, None]
        W = np.hstack([slopes, dgp.means.principal_directions(X, width - 1)]) if width > 1 else slopes
        first, mean = dgp.initial.kmeans(X, num_inducing), dgp.means.LinearMean(W / np.std(X @ W, axis=0))
    if width == 1:
        inner = np.linspace(-3, 3, num_inducing)[:, None]
    else:
        inner = dgp.initial.kmeans(1.5 * rng.normal(size=(2000, width)), num_inducing)
    layers = [Layer(jnp.asarray(first), mean, width)]
    layers += [Layer(jnp.asarray(inner), dgp.means.IdentityMean(), width) for _ in range(depth - 2)]
    return Problem(X, y, X_test, y_test, [*layers, Layer(jnp.asarray(inner), dgp.means.ZeroMean(), None)], kind)


def drawn_rows(name: str, num: int) -> tuple[Any, ...]:
    """``num`` training rows and 1000 test rows of the sets with labels or two branches, on [-1, 1]."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, num + 1000)
    if name == "labels":
        y = (step_function.FUNCTIONS["sinusoids"](x) + 0.3 * rng.normal(size=x.shape) > 0).astype(float)
    else:
        y = np.where(rng.random(x.shape) < 0.5, 1.0, -1.0) * (0.5 + 0.5 * x**2) + 0.1 * rng.normal(size=x.shape)
    X = x[:, None] / np.std(x)
    return X[:num], y[:num], X[num:], y[num:]


def program(p: Problem, fixed: dict[str, Any] | None, latent: bool = False) -> Callable[..., None]:
    """Process noise is part of the hidden layers, or written as a latent variable per datum."""

    def model(X: Any, y: Any = None) -> None:
        values = fixed or {name: numpyro.sample(name, prior) for name, prior in p.hyperparameters().items()}
        functions = [
            dgp.gp(f"f{i}", p.kernel(values, i), dgp.Points(layer.Z), outputs=layer.outputs, mean=layer.mean)
            for i, layer in enumerate(p.layers)
        ]
        with numpyro.plate("data", len(X)):
            x = dgp.latent("w", X, 1) if p.kind == "latent" else X
            for i, f in enumerate(functions[:-1]):
                s = values[f"process{i}"]
                if latent:
                    w = numpyro.sample(f"w{i}", dist.Normal(jnp.zeros(f.outputs), 1.0).to_event(1))
                    x = numpyro.sample(f"h{i}", f(x)) + s * w
                else:
                    x = numpyro.sample(f"h{i}", f(x, noise=s))
            observed = dist.BernoulliLogits if p.kind == "labels" else lambda v: dist.Normal(v, values["noise"])
            numpyro.sample("y", dgp.Likelihood(functions[-1](x), observed), obs=y)

    return model
