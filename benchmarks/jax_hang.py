"""Whether this JAX stops for ever in a program with two independent batches of Cholesky factorisations on a CPU.

``python benchmarks/jax_hang.py`` runs the program 300 times in a process of its own, several times, and counts the
processes that do not end. jaxlib 0.10.0 to 0.10.2 stop in some of them on a machine with two cores, whatever
``--xla_cpu_multi_thread_eigen`` says; 0.9 and 0.12 in none. One batch after the other (``--ordered``) never stopped,
but a program of several layers has too many pairs of factorisations and solves to order all of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import jax
import jax.numpy as jnp


def work(size: int, count: int, ordered: bool) -> None:
    def program(K: jax.Array) -> jax.Array:
        first = jnp.linalg.cholesky(K)
        second = jnp.linalg.cholesky(2 * K + (jnp.where(jnp.isnan(first[0, 0]), 1.0, 0.0) if ordered else 0.0))
        return first.sum() + second.sum()

    matrices = jnp.tile(2 * jnp.eye(size) + 0.1, (count, 1, 1))
    run = jax.jit(jax.vmap(program))
    for _ in range(300):
        run(matrices).block_until_ready()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0, help="after which a process counts as stopped")
    parser.add_argument("--size", type=int, default=200, help="of a matrix")
    parser.add_argument("--count", type=int, default=20, help="of matrices in a batch")
    parser.add_argument("--ordered", action="store_true", help="the second batch waits for the first")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments.size, arguments.count, arguments.ordered)
    stopped = 0
    for _ in range(arguments.processes):
        try:
            subprocess.run([sys.executable, *sys.argv, "--work"], timeout=arguments.seconds, check=True)
        except subprocess.TimeoutExpired:
            stopped += 1
    print(f"JAX {jax.__version__}: {stopped} of {arguments.processes} processes stopped for ever")


if __name__ == "__main__":
    main()
