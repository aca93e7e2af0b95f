"""All constants of the fast paths that were chosen by measurements on one machine.

None of them changes a result beyond rounding: they decide which of two ways of computing the same numbers is taken, or
how much is held in memory. Constants that do change results (jitter, for one) are not here.

**Holds for:** JAX's platform ``"cpu"``, on two cores of an x86-64 server with AVX-512, jaxlib 0.9.2 with its OpenBLAS.

**How they were measured:** with the script named at each, run once per candidate value. For most that is::

    python benchmarks/train_step.py --only numpyro_dgp

the time of a training step of one to five layers (8 inputs, inner width 8, 100 inducing points) at batches of 1000 and
10 000 rows in both precisions. ``docs/performance.md`` says what each one gained.

**Another platform** has not been measured: there the values are correct, and not tuned. To add one, turn the constants
into the fields of a frozen dataclass, keep one instance per platform, and choose it by ``jax.default_backend()`` where
a constant is read, which is always while a program is traced, never inside a compiled one.
"""

from __future__ import annotations

__all__ = [
    "BLOCK_COLUMNS",
    "CACHED_ROWS",
    "CELLS",
    "FEW_COLUMNS",
    "KEPT_PRODUCTS",
    "KEPT_ROWS",
    "LEAF",
    "MANY_MATRICES",
    "NARROW",
    "ONE_THREAD",
    "SMALL_SOLVE",
]

# -- memory of a training step: benchmarks/train_step.py, batches of 1000 and 10 000 -----------------------------------
# A step that needs more than 32 MiB gets this memory from the system anew every time, page by page, because the C
# library returns blocks of that size to the system. The first two limits keep a step of a few layers below that, and
# its arrays in cache.

#: Bytes of the products Σ_p a_n of one layer, one per row and output, that are kept for the derivative. Where they
#: would need more, the derivative does without them.
KEPT_PRODUCTS = 2**22
#: Bytes of whitened rows A that a layer computed in blocks keeps for the derivative. Where they would need more, they
#: are computed again.
KEPT_ROWS = 2**22
#: Rows of a layer that are computed together, by the bytes of a number. More leave the cache. Fewer, 500 to 1250 rows
#: in single precision, make so many products that waking and joining threads for each takes longer than that saves.
CACHED_ROWS = {4: 2000, 8: 1250}

# -- matrix products: benchmarks/train_step.py -------------------------------------------------------------------------

#: Columns in a block of a symmetric matrix. Of the blocks, those below the diagonal are left out: narrower blocks leave
#: out more arithmetic and make smaller products, which are slower per operation.
BLOCK_COLUMNS = 32
#: Numbers of rows N for which XLA's CPU backend may run the product of an (N, M) and an (M, M) matrix, M about 100, on
#: a single thread. Within this range the product is written as a batch of two with N/2 rows each: two threads.
ONE_THREAD = range(700, 1800)
#: Columns P up to which the product of an (N, P) array with the identity, which makes XLA keep the array instead of
#: computing it again in every place that uses it, costs less than computing it again.
NARROW = 128

# -- factorisations ----------------------------------------------------------------------------------------------------

#: Size up to which a triangular solve of OpenBLAS stays on the thread that calls it. A larger one wakes threads that
#: keep spinning after the call, on the cores that XLA needs: a third of a step. From benchmarks/train_step.py.
SMALL_SOLVE = 25
#: From this many matrices of size up to SMALL_SOLVE on, products over all of them at once are faster than LAPACK, which
#: takes one matrix after the other. From benchmarks/natural_step.py.
MANY_MATRICES = 8
#: Size of the blocks that are then factorised number by number. From benchmarks/natural_step.py.
LEAF = 4

# -- kernels and their expectations ------------------------------------------------------------------------------------

#: Input columns up to which squared distances are summed column by column, in one fused pass over the result: as fast
#: as the matrix product that takes over with more columns, and exact where that loses digits. Chosen for inputs in
#: space; no table of other values exists.
FEW_COLUMNS = 3
#: Numbers that expectations of kernels hold at once: 4 MiB in single precision, 8 MiB in double. A limit on memory,
#: chosen by order of magnitude; no benchmark was run for it.
CELLS = 2**20
