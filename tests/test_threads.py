"""A service that predicts from several threads, while another one fits: NumPyro has one list of handlers for all."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from sizes import mostly_long

import numpyro_dgp as dgp

X = jnp.linspace(-1.0, 1.0, 9)[:, None]
KEY = jax.random.key(0)


class Meeting:
    """A program in which every thread waits, the first time, for another one to be in it too."""

    def __init__(self):
        self.barrier, self.met, self.entered = threading.Barrier(2), threading.local(), threading.Event()

    def __call__(self, X, y=None):
        f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 3)[:, None]))
        with numpyro.plate("data", len(X)):
            if not hasattr(self.met, "once"):
                self.met.once = True
                self.entered.set()
                with suppress(threading.BrokenBarrierError):  # one thread at a time
                    self.barrier.wait(0.2)
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def task(kind, rows):
    """A call at so many rows, of a program and with a guide of its own."""
    program = Meeting()
    guide = dgp.guides.InducingPoint(program)
    params = {"f_auto_loc": jnp.arange(3.0), "f_auto_scale_tril": 0.1 * jnp.eye(3)}
    posterior = dgp.Posterior(program, guide, params)
    x = X[:rows]

    def fit():
        svi = SVI(program, guide, optax.adam(0.1), dgp.ELBO())
        return dgp.fit(svi, KEY, 2, x, x[:, 0], progress_bar=False).losses

    return program, {
        "predict": lambda: posterior.using(num_samples=1).predict(KEY, x).means,
        "sample": lambda: posterior.using(num_samples=1).sample(KEY, x),
        "layers": lambda: posterior.layers(KEY, x)["y"][1],
        "draws": lambda: guide.sample_posterior(KEY, params, x)["f"],
        "median": lambda: guide.median(params, x, x[:, 0])["f"],
        "fit": fit,
    }[kind]


PAIRS = [("fit", "predict"), ("predict", "sample"), ("layers", "draws"), ("median", "fit")]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", mostly_long(PAIRS[:1], PAIRS))
def test_two_threads_trace_one_after_the_other(kinds):
    calls = [task(kind, rows) for kind, rows in zip(kinds, (4, 7), strict=True)]
    expected = []
    for program, call in calls:
        program.met.once = True
        expected.append(call())
    calls = [task(kind, rows) for kind, rows in zip(kinds, (4, 7), strict=True)]
    calls[1][0].barrier = calls[0][0].barrier
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(calls[0][1])
        assert calls[0][0].entered.wait(60)
        second = pool.submit(calls[1][1])  # while the other one is within its program
        found = [first.result(), second.result()]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_one_posterior_serves_many_threads():
    posterior = dgp.Posterior(Meeting(), samples={"f": jnp.array([[0.0, 1.0, 2.0]])})
    posterior.model.barrier.abort()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rows: posterior.predict(KEY, X[:rows]).mean, (1, 3, 1, 8)))
    assert [len(mean) for mean in found] == [1, 3, 1, 8]
    np.testing.assert_allclose(found[1], found[3][:3], atol=1e-12)
