"""Constants of the fast paths for each platform, most of them from measurements on one machine.

None of them changes a result beyond rounding: they decide which of two ways of computing the same numbers is taken, or
how much memory is used. Constants that do change results (jitter, for one) are not here.

:func:`tuned` gives those of the platform that a program is traced for.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

__all__ = ["ACCELERATOR", "CPU", "Tuning", "tuned"]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Sizes at which the fast paths change their way, for one platform.

    Args:
        kept_products: bytes of the products Σ_p a_n of one layer, one per row and output, that are kept for the
            derivative. Where they would need more, or there are more than ``single_rows``, the derivative does without.
        kept_rows: bytes of whitened rows A that a layer computed in blocks keeps for the derivative. Where they would
            need more, they are computed again.
        single_rows: rows of a layer that are computed together in single precision.
        double_rows: the same in double precision.
        block_bytes: bytes of the products of a layer's rows, one per output and inducing value, that may be computed
            together where that is more than so many rows.
        block_columns: columns in a block of a symmetric matrix, or a multiple of that where there would be more than
            four blocks. Of the blocks, those below the diagonal are left out: narrower blocks leave out more arithmetic
            and make smaller products, which are slower per operation.
        one_thread: numbers of rows N for which the product of an (N, M) and an (M, M) matrix is written as a batch of
            two with N/2 rows each.
        large: number of inducing points from which on arithmetic outweighs passes over memory and waking of threads:
            no product is written as a batch of two, and rows A are kept up to ``kept_large``.
        kept_large: bytes, as ``kept_rows``.
        large_block: numbers in the rows A of one block with so many inducing points.
        halves: size from which on products with triangular matrices are written as two, which leave out zeros.
        narrow: columns P up to which the product of an (N, P) array with the identity, which makes XLA keep the array
            instead of computing it again in every place that uses it, costs less than computing it again.
        summed: outputs P up to which sums over the inducing values of (N, P, M) numbers are products with ones.
        small_solve: size up to which a triangular matrix is inverted by one triangular solve, and not by halves.
        single_factor: size up to which a matrix is factorised by one call, and not by halves.
        many_matrices: from this many matrices of size up to ``small_solve`` on, products over all of them at once
            factorise them, and not one factorisation each.
        leaf: size of the blocks that are then factorised elementwise.
        few_columns: input columns up to which squared distances are summed column by column, in one fused pass over
            the result: exact where the matrix product that takes over with more columns loses digits.
        cells: most entries of the arrays that expectations of kernels make at once.
        chunk: steps of a Markov chain in one chunk, where chunks are joined by a parallel scan; 0 for the root of the
            number of steps, where they are joined one after the other.
        together: points of sequential Monte Carlo that are moved together. They wait for the one whose slice takes
            most tries.
    """

    kept_products: int
    kept_rows: int
    single_rows: int
    double_rows: int
    block_bytes: int
    block_columns: int
    one_thread: range
    large: int
    kept_large: int
    large_block: int
    halves: int
    narrow: int
    summed: int
    small_solve: int
    single_factor: int
    many_matrices: int
    leaf: int
    few_columns: int
    cells: int
    chunk: int
    together: int

    def rows(self, dtype: jnp.dtype) -> int:
        """Rows of a layer that are computed together."""
        return self.single_rows if jnp.dtype(dtype).itemsize <= 4 else self.double_rows

    def keeps_rows(self, rows: int, size: int, dtype: jnp.dtype) -> bool:
        """Whether A, of that many rows and inducing points, is kept for the derivative of a layer in blocks."""
        most = self.kept_large if size >= self.large else self.kept_rows
        return rows * size * jnp.dtype(dtype).itemsize <= most


CPU = Tuning(
    kept_products=2**22,
    kept_rows=2**22,
    single_rows=2000,
    double_rows=1250,
    block_bytes=6 * 2**20,
    block_columns=32,
    one_thread=range(700, 1800),
    large=200,
    kept_large=2**26,
    large_block=2**18,
    halves=400,
    narrow=128,
    summed=1,
    small_solve=25,
    single_factor=200,
    many_matrices=8,
    leaf=4,
    few_columns=3,
    cells=2**20,
    chunk=0,
    together=1,
)
"""For JAX's platform ``"cpu"``, measured on two cores of an x86-64 server with AVX-512, jaxlib 0.9.2 with its OpenBLAS.

How: ``python benchmarks/train_step.py --only numpyro_dgp``, once per candidate value, is the time of a training step
of one to five layers (8 inputs, inner width 8, 100 inducing points) at batches of 1000 and 10 000 rows in both
precisions; ``many_matrices`` and ``leaf`` come from ``benchmarks/natural_step.py``. Why:

- ``kept_products``, ``kept_rows``: a step that needs more than 32 MiB gets this memory from the system anew every time,
  page by page, because the C library returns blocks of that size. These limits keep a step of a few layers below that,
  and its arrays in cache.
- ``single_rows``, ``double_rows``: more leave the cache. Fewer, 500 to 1250 rows in single precision, make so many
  products that waking and joining threads for each takes longer than that saves.
- ``block_bytes``: a layer of one output needs an eighth of the memory of one of eight. All 10 000 rows of it together
  take four fifths of the time of five blocks (100 inducing points; with 500, four blocks that of five). Products that
  so many rows would keep are slower than the derivative without them, by a fifth of a step.
- ``one_thread``: the backend may run such a product on a single thread; a batch of two gets two.
- ``large``: a product with so many columns gets two threads by itself. Keeping A saves its product, which grows with
  the square of M, for memory that grows with M: a tenth of a step of 10 000 rows at M = 500, nothing at 200.
- ``halves``: at 250 columns products keep their speed, and a half of three left out outweighs copies of slices: with
  M = 500 and 1000 rows a step takes 0.88 of its time. Blocks of 125 leave out more and gain no more.
- ``large_block``: blocks of 500 rows at M = 500 bring a step of 10 000 rows below 32 MiB in single precision, with A
  kept. ``summed``: the backend sums rows on one thread; a product with ones takes a quarter of that, but with several
  outputs more than the contraction that it replaces.
- ``small_solve``: OpenBLAS wakes threads for a larger solve, which keep spinning after it on the cores that XLA needs:
  a third of a step. ``single_factor``: it does the same for factorisations of more than 200 rows; with 500 inducing
  points and 1000 rows that was two fifths of a step. ``many_matrices``: LAPACK takes one matrix after the other.
- ``together``: a batch of small factorisations is hardly faster than as many single ones, which does not pay for the
  waiting: one by one, ``dgp.fit_best`` takes 0.57 of the time of 100 together with 20 rows of two inputs, 0.51 with 60
  rows of six (seconds of ``benchmarks/emulation.py --methods fit_best --depths 1 2``).
- ``few_columns`` was chosen for inputs in space, ``cells`` (4 MiB in single precision) by order of magnitude; no table
  of other values exists.
"""

ACCELERATOR = Tuning(
    kept_products=2**28,
    kept_rows=2**30,
    single_rows=100_000,
    double_rows=50_000,
    block_bytes=0,
    block_columns=128,
    one_thread=range(0),
    large=200,
    kept_large=2**30,
    large_block=2**30,
    halves=2**30,
    narrow=0,
    summed=0,
    small_solve=2**16,
    single_factor=2**16,
    many_matrices=2**30,
    leaf=4,
    few_columns=3,
    cells=2**24,
    chunk=16,
    together=100,
)
"""For every other platform (``"gpu"``, ``"tpu"``). **Chosen by reasoning;** of ``small_solve``, ``single_factor`` and
``many_matrices`` other values were tried on one GPU (``benchmarks/constants.py``): blocks of
25 and 200 take up to 1.11 of the time, 8 matrices 0.93 to 1.00.

A device with thousands of threads waits in loops and for small kernels: up to 100 000 rows are one block (with 8
outputs and 100 inducing points, 0.3 GB in single precision), a factor is inverted by one solve, a batch is factorised
by one call, and nothing is written in a longer way for the sake of a cache or of threads.
"""


def tuned() -> Tuning:
    """The constants of JAX's default backend, read while a program is traced and never inside a compiled one.

    Example:
        >>> tuned() in (CPU, ACCELERATOR)
        True
    """
    return CPU if jax.default_backend() == "cpu" else ACCELERATOR
