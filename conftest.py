"""How the programs of tests and doctests are compiled and kept."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import jax

jax.config.update("jax_disable_most_optimizations", True)


def compile_quickly():
    """XLA's older emitters compile these small programs in half the time, each as one piece; not every jaxlib still
    has them."""
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {quick}"
    probe = [sys.executable, "-c", "import jax; jax.devices()"]
    if subprocess.run(probe, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True).returncode == 0:
        os.environ["XLA_FLAGS"] = flags  # workers and the processes that tests start inherit it


def _share_programs(folder):
    """Before they start, all workers get the programs that any of them compiled in earlier runs."""
    workers = [path for path in folder.iterdir() if path.is_dir()]
    programs = {path.name: path for worker in workers for path in worker.iterdir()}
    for worker in workers:
        for name in programs.keys() - {path.name for path in worker.iterdir()}:
            os.link(programs[name], worker / name)


def pytest_configure(config):
    """Compiled programs are kept between modules and runs: most of the time here goes into compilation."""
    folder = Path(config.cache.mkdir("jax"))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _share_programs(folder)
        compile_quickly()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")  # files are not written atomically
    jax.config.update("jax_compilation_cache_dir", str(folder / worker))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    gc.set_threshold(200_000, 50, 100)  # traces are many small objects, most of which live as long as their program
