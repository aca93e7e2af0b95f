"""How many steps a fit needs: runs of several lengths, each with a cosine schedule of its own, against the longest.

``python benchmarks/steps.py`` fits the step of ``examples/step_function.py`` (200 rows, one input) and scikit-learn's
``friedman1`` (300 rows, ten inputs), all rows in every step, by the program of ``examples/regression.py`` with 30
inducing points and a normal likelihood: one to three layers by Adam, and two with natural gradients for the last. It
prints the bound per row of the longest run, how far from it the shorter ones end, the shortest from which on all end
within ``--tolerance`` of it, and the step of the longest run after which the mean of a hundred bounds stays within it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.optim import NaturalGradient, log_linear

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import library_sets
import regression
import step_function

FITS = {"one layer": 1, "two layers": 2, "three layers": 3, "two layers, natural gradients": 2}


def fit(data: str, name: str, lengths: list[int], rate: float) -> Any:
    """For each length the bound per row at the end, by 200 draws of hidden layers, and that of every step, by one."""
    if data == "step":
        X, y, *_ = step_function.make_data(data, 200, 0.05, 0)
    else:
        X, y = (jnp.asarray(dgp.initial.Standardizer.fit(a)(a), jnp.float32) for a in library_sets.load(data))
    model = regression.make_model(X, FITS[name], 30, likelihood="normal")
    guide = dgp.guides.InducingPoint(model)

    @jax.jit  # one program for all lengths
    def run(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
        def cosine(i: jax.Array) -> jax.Array:
            return (1 + jnp.cos(jnp.pi * i / steps)) / 2

        adam, rise = optax.adam(lambda i: rate * cosine(i)), log_linear(1e-4, 0.1, 40)
        optimizer = NaturalGradient(guide, lambda i: rise(i) * cosine(i), adam) if "natural" in name else adam
        svi = SVI(model, guide, optimizer, dgp.ELBO())

        def step(i: jax.Array, carry: Any) -> Any:
            state, loss = svi.update(carry[0], X, y)
            return state, carry[1].at[i].set(loss)

        start = svi.init(jax.random.key(0), X, y), jnp.zeros(lengths[-1])
        state, losses = jax.lax.fori_loop(0, steps, step, start)
        return dgp.ELBO(200).loss(jax.random.key(1), svi.get_params(state), model, guide, X, y), losses

    for steps in lengths:
        loss, losses = run(jnp.asarray(steps))
        yield -float(loss) / len(X), -np.asarray(losses, float)[:steps] / len(X)


def settled(values: np.ndarray, tolerance: float) -> int:
    """The first index from which on all values are close to the last."""
    return int(np.flatnonzero(np.append(True, np.abs(values - values[-1]) > tolerance))[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["step", "friedman1"], help="step, or names in library_sets.py")
    parser.add_argument("--lengths", type=int, nargs="+", default=[250, 500, 1000, 2000, 4000, 8000])
    parser.add_argument("--rate", type=float, default=0.02, help="of the first step of Adam")
    parser.add_argument("--tolerance", type=float, default=0.01, help="nats per row")
    parser.add_argument("--smoke", action="store_true", help="short runs of the first set")
    options = parser.parse_args()
    sets, lengths = (options.sets[:1], [120, 240]) if options.smoke else (options.sets, options.lengths)
    print(f"| set | fit | {lengths[-1]} steps | {' | '.join(map(str, lengths[:-1]))} | enough | in the longest |")
    print("|---" * (len(lengths) + 4) + "|")
    for data, name in [(data, name) for data in sets for name in FITS]:
        ends, bounds = zip(*fit(data, name, lengths, options.rate), strict=True)
        enough = lengths[settled(np.array(ends), options.tolerance)]
        stays = settled(np.convolve(bounds[-1], np.full(100, 0.01), "valid"), options.tolerance) + 100
        cells = " | ".join(f"{end - ends[-1]:+.3f}" for end in ends[:-1])
        print(f"| {data} | {name} | {ends[-1]:.3f} | {cells} | {enough} | {stays} |", flush=True)


if __name__ == "__main__":
    main()
