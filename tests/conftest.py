import os

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)


def pytest_configure(config):
    """Compiled programs are kept between modules and runs: most of the time here goes into compilation."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")  # files are not written atomically
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax") / worker))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
    """Programs of a finished module only fill memory."""
    yield
    jax.clear_caches()


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def x32():
    """Run a test with 64-bit numbers switched off, as most users do."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)
