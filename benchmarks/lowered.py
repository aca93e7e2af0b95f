"""What a training step is made of on a CPU, a CUDA device and a TPU, read off its lowered text. None of them is needed.

``python benchmarks/lowered.py`` prints loops, products of matrices, those of them at full precision, and calls of
libraries. The program is that of ``train_step.py`` with two layers. Constants of the fast paths are chosen by JAX's
default backend, which is replaced by the name of an accelerator here.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))
from implementations import ours
from train_step import make_data


def row(platform: str, batch: int) -> str:
    jax.default_backend = lambda: platform if platform == "cpu" else "gpu"
    jax.clear_caches()
    svi, data = ours.make(*make_data(batch), 2, "float32")
    state = jax.eval_shape(svi.init, jax.random.key(0), *data)
    step = jax.jit(lambda state: svi.update(state, *data)).trace(state)
    text = step.lower(lowering_platforms=(platform,)).as_text()
    patterns = ("stablehlo.while", "stablehlo.dot_general", r"dot_general.*precision = \[HIGHEST")
    counts = " | ".join(str(len(re.findall(pattern, text))) for pattern in patterns)
    calls = sorted(set(re.findall(r"custom_call @(\w+)\(", text)) - {"Sharding"})
    return f"| {platform} | {batch} | {counts} | {', '.join(calls) or 'none'} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| platform | B | loops | products | at full precision | calls |\n|---|---|---|---|---|---|")
    for platform in ("cpu", "cuda", "tpu"):
        for batch in (1000, 10_000):
            print(row(platform, batch), flush=True)


if __name__ == "__main__":
    main()
