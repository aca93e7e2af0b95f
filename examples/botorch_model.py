"""A fitted deep GP as a BoTorch model: its draws of whole functions are an ensemble whose gradients torch can follow.

``pip install botorch`` first; the package does not depend on it. ``posterior.functions`` fixes S functions, and
``DeepGPModel`` gives BoTorch their values at any X (b, q, D) as an ensemble, joint over the q points. Values and
gradients cross from JAX to torch in one ``torch.autograd.Function``, so that acquisitions that are means over draws,
and ``optimize_acqf``, work as they do for BoTorch's own models. Branin's function, eight values to begin with, then
batches of two by log expected improvement. In double precision: ``JAX_ENABLE_X64=1 python examples/botorch_model.py``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.models.ensemble import EnsembleModel
from botorch.optim import optimize_acqf

from numpyro_dgp.sklearn import DeepGPRegressor


class FromJAX(torch.autograd.Function):
    """``f(x)`` by JAX, with the gradient of ``jax.vjp``: arrays and tensors share memory on the CPU where they can."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: Callable[..., Any], vjp: Callable[..., Any]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.vjp = vjp
        return torch.from_numpy(np.array(f(x.detach().numpy()))).to(x)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        found = ctx.vjp(x.detach().numpy(), slopes[0].numpy())
        return torch.from_numpy(np.array(found)).to(x), None, None


class DeepGPModel(EnsembleModel):
    """Draws of the function under y as an ensemble.

    Args:
        values: from inputs (N, D) to draws (S, N), a pure JAX function.
    """

    def __init__(self, values: Callable[[jax.Array], jax.Array]) -> None:
        super().__init__()
        self._num_outputs = 1

        def vjp(x: jax.Array, slopes: jax.Array) -> jax.Array:
            found, pull = jax.vjp(values, jnp.asarray(x))
            return pull(jnp.asarray(slopes, found.dtype))[0]

        self._values, self._vjp = jax.jit(values), jax.jit(vjp)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Values (b, S, q, 1) at X (b, q, D)."""
        rows = X.reshape(-1, X.shape[-1])
        size = 2 ** max(3, math.ceil(math.log2(len(rows))))  # few shapes: each is compiled once
        filled = torch.cat([rows, rows[-1:].expand(size - len(rows), -1)])
        values = FromJAX.apply(filled, self._values, self._vjp)[:, : len(rows)]
        return values.reshape(-1, *X.shape[:-1]).movedim(0, -2).unsqueeze(-1)


def model_of(found: DeepGPRegressor, num_samples: int, seed: int = 0) -> DeepGPModel:
    """The BoTorch model of a fitted regressor, in the units of X and y."""
    functions = found.posterior_.using(num_samples=num_samples).functions(jax.random.key(seed))
    units_X, units_y = found.units_X_, found.units_y_

    def values(X: jax.Array) -> jax.Array:
        inputs = (X - jnp.asarray(units_X.loc, X.dtype)) / jnp.asarray(units_X.scale, X.dtype)
        return functions(inputs)["y"] * float(units_y.scale) + float(units_y.loc)

    return DeepGPModel(values)


def branin(x: np.ndarray) -> np.ndarray:
    """Minus Branin's function of the unit square: BoTorch maximises, and the maximum is -0.398."""
    a, b = 15 * x[..., 0] - 5, 15 * x[..., 1]
    valley = b - 5.1 / (4 * math.pi**2) * a**2 + 5 / math.pi * a - 6
    return -(valley**2 + 10 * (1 - 1 / (8 * math.pi)) * np.cos(a) + 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="of two evaluations")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000, help="of each fit")
    parser.add_argument("--draws", type=int, default=64, help="functions in the ensemble")
    parser.add_argument("--smoke", action="store_true", help="one round of a few steps, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.steps, arguments.draws = 1, 20, 4
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.double)
    X = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(8, dtype=torch.double).numpy()
    y = branin(X)
    for step in range(arguments.rounds):
        regressor = DeepGPRegressor(arguments.layers, num_steps=arguments.steps, random_state=step).fit(X, y)
        model = model_of(regressor, arguments.draws, seed=step)
        acquisition = qLogExpectedImprovement(model, best_f=float(y.max()))
        restarts, raw = (2, 8) if arguments.smoke else (8, 256)
        torch.manual_seed(step)
        new, _ = optimize_acqf(acquisition, bounds, q=2, num_restarts=restarts, raw_samples=raw)
        X, y = np.concatenate([X, new.numpy()]), np.concatenate([y, branin(new.numpy())])
        print(f"{len(y)} values: the best is {y.max():.4f}", flush=True)


if __name__ == "__main__":
    main()
