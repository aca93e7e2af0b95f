import gc
import zlib

import jax
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)

QUICK = "smoke and not slow and not long"  # what -m smoke stands for: a test in the selection may have slow cases


def pytest_configure(config):
    if config.option.markexpr == "smoke":
        config.option.markexpr = QUICK


def pytest_ignore_collect(collection_path, config):
    """``-m smoke`` reads only the files that have such tests, so that it needs what these import and nothing else."""
    chosen = config.option.markexpr == QUICK and collection_path.match("test_*.py")
    return True if chosen and "@pytest.mark.smoke" not in collection_path.read_text() else None


@pytest.fixture(scope="session", autouse=True)
def _exact_products():
    """Plain references leave the precision of products to JAX, which takes a tenth of the digits on a GPU. The package
    names its own (``test_lowering.py``)."""
    if jax.default_backend() != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Programs of a finished module only fill memory."""
    yield
    jax.clear_caches()
    gc.collect()  # which is rare otherwise, conftest.py at the root


@pytest.fixture(autouse=True)
def _own_random_numbers(request):
    """A module's ``rng`` starts anew in every test: its numbers do not depend on which tests ran before."""
    rng = getattr(request.module, "rng", None)
    if rng is not None:
        rng.bit_generator.state = np.random.default_rng(zlib.crc32(request.node.name.encode())).bit_generator.state


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def x32():
    """Run a test with 64-bit numbers switched off, as most users do."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)
