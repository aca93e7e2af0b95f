import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)


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
