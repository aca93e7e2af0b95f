"""Minibatches that come as arguments, from files, on one device and on many."""

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.handlers import seed
from numpyro.infer import SVI
from numpyro.infer.util import log_density

import numpyro_dgp as dgp
from numpyro_dgp.diagnostics.convergence import sites_of_draws
from numpyro_dgp.diagnostics.local_sites import local_sites

rng = np.random.default_rng(0)
X = rng.normal(size=(90, 2))
Y = np.sin(X[:, 0])


def shallow(X, y=None, width=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.asarray(X_SOME, X.dtype)))
    with numpyro.plate("data", len(X)):
        x = X if width is None else dgp.latent("w", X, width)[..., :2]
        numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, 0.1)), obs=y)


X_SOME = X[:8]


@pytest.mark.smoke
@pytest.mark.parametrize(("rows", "size", "block", "window"), [(1000, 100, 10, 20), (1003, 64, 10, 7), (50, 50, 99, 9)])
def test_an_epoch_has_every_row_once(rows, size, block, window):
    stream = dgp.Stream((np.arange(rows), -np.arange(rows)), size, block=block, window=window)
    for epoch in range(2):
        steps = range(epoch * stream.steps_per_epoch, (epoch + 1) * stream.steps_per_epoch)
        found = [stream.batch(step) for step in steps]
        assert all(len(a) == size and (a == -b).all() for a, b in found)
        seen = np.concatenate([a for a, _ in found])
        assert len(set(seen)) == len(seen) == rows // size * size
    again = dgp.Stream((np.arange(rows), -np.arange(rows)), size, block=block, window=window)
    np.testing.assert_array_equal(again.batch(steps[-1])[0], found[-1][0])
    assert (dgp.Stream((np.arange(rows),), size, seed=1).batch(0)[0] != found[0][0]).any()


def test_every_row_is_as_often_in_a_batch():
    stream = dgp.Stream((np.arange(23),), 5, block=4, window=2)
    counts = np.zeros(23)
    for step in range(4 * 2000):
        np.add.at(counts, stream.batch(step)[0], 1)
    p = 20 / 23
    assert (abs(counts / 2000 - p) < 4.5 * np.sqrt(p * (1 - p) / 2000)).all()


def test_files_are_mapped(tmp_path):
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", Y)
    stream = dgp.Stream.open(tmp_path / "X.npy", tmp_path / "y.npy", batch_size=30)
    assert isinstance(stream.arrays[0], np.memmap)
    x, y = stream.batch(1)
    np.testing.assert_array_equal(y, np.sin(x[:, 0]))


@pytest.mark.long
def test_mean_over_an_epoch_is_the_whole():
    model = dgp.minibatch(shallow, data=len(X))
    values = {"f": jnp.asarray(rng.normal(size=8))}
    stream = dgp.Stream((X, Y), 15)
    batches = [stream.batch(step) for step in range(stream.steps_per_epoch)]
    found = [log_density(model, batch, {}, values)[0] for batch in batches]
    np.testing.assert_allclose(np.mean(found), log_density(shallow, (X, Y), {}, values)[0], rtol=1e-12)


@pytest.mark.long
@pytest.mark.smoke
def test_a_fit_and_an_interrupted_fit(tmp_path):
    model = dgp.minibatch(shallow, data=len(X))
    svi = SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.05), dgp.ELBO())
    stream = dgp.Stream((X, Y), 30)
    whole = dgp.fit_stream(svi, jax.random.key(0), 250, stream, progress_bar=False)
    assert whole.losses[-50:].mean() < whole.losses[:50].mean() - 50
    file = tmp_path / "fit.npz"
    dgp.fit_stream(svi, jax.random.key(0), 130, stream, checkpoint=file, progress_bar=False)
    resumed = dgp.fit_stream(svi, jax.random.key(9), 250, stream, checkpoint=file, progress_bar=False)
    np.testing.assert_array_equal(whole.losses, resumed.losses)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    posterior = dgp.Posterior(model, svi.guide, whole.params)
    assert jnp.sqrt(jnp.square(posterior.predict(jax.random.key(1), X).mean - Y).mean()) < 0.2


class Simulated:
    """Rows that are drawn when they are asked for; every batch after ``shrinks`` lacks a row."""

    num_rows = 600

    def __init__(self, shrinks=10**6):
        self.shrinks, self.asked = shrinks, []

    def batch(self, step):
        self.asked.append(step)
        x = np.random.default_rng(step).normal(size=(30 - (step > self.shrinks), 2))
        return x, np.sin(x[:, 0])


@pytest.mark.long
def test_any_source_of_batches(tmp_path):
    source, model = Simulated(), dgp.minibatch(shallow, data=Simulated.num_rows)
    whole = run(model, stream=source, steps=120)
    assert source.asked == [0, *range(120)]
    assert whole.losses[-20:].mean() < whole.losses[:20].mean()
    run(model, stream=source, steps=50, checkpoint=tmp_path / "a.npz")
    resumed = run(model, stream=source, steps=120, checkpoint=tmp_path / "a.npz")
    np.testing.assert_array_equal(whole.losses, resumed.losses)
    assert isinstance(source, dgp.extend.BatchSource)
    assert isinstance(dgp.Stream((X, Y), 30), dgp.extend.BatchSource)


@pytest.mark.slow
def test_sources_that_are_none():
    model = dgp.minibatch(shallow, data=90)
    with pytest.raises(ValueError, match=r"expected a source of batches.*got tuple: dgp\.Stream"):
        run(model, stream=(X, Y))
    sizes = r"shapes \[\(30, 2\), \(30,\)\] as in step 0, got \[\(29, 2\), \(29,\)\] in step 3"
    with pytest.raises(ValueError, match=sizes):
        run(dgp.minibatch(shallow, data=600), stream=Simulated(2), steps=5)
    for batch in (X, (), (X, Y[:3]), (X, 1.0)):
        stream = SimpleNamespace(num_rows=90, batch=lambda step, batch=batch: batch)
        with pytest.raises(ValueError, match=r"batch\(0\), a tuple of arrays with equally many rows"):
            run(model, stream=stream)


@pytest.mark.long
@pytest.mark.usefixtures("x32")
def test_single_precision_and_latents():
    model = dgp.minibatch(shallow, data=len(X))
    guide = dgp.guides.ImportanceWeighted(model, num_samples=2, latent=dgp.guides.Amortised(hidden=(4,)))
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    result = dgp.fit_stream(svi, jax.random.key(0), 3, dgp.Stream((X, Y), 30), width=2, progress_bar=False)
    assert result.losses.dtype == jnp.float32
    assert np.isfinite(result.losses).all()


def on_devices(*arguments):
    flags = f"--xla_force_host_platform_device_count={8 if len(arguments) == 1 else 2}"
    environment = {**os.environ, "PYTHONPATH": str(Path(dgp.__file__).parent.parent), "XLA_FLAGS": flags}
    command = [sys.executable, str(Path(__file__).parent / "sharded.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answers(*processes):
    found = [process.communicate() for process in processes]
    for process, (_, error) in zip(processes, found, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in found]


@pytest.mark.slow
def test_two_fits_on_devices_in_one_process():
    model = dgp.minibatch(shallow, data=len(X))
    svi = SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.05), dgp.ELBO())
    first, second = (
        dgp.fit_stream(svi, jax.random.key(0), 2, dgp.Stream((X, Y), 30), devices=jax.devices()[:1], progress_bar=False)
        for _ in range(2)
    )
    np.testing.assert_array_equal(first.losses, second.losses)


@pytest.mark.long
@pytest.mark.parametrize("rows", [400, 4800])
def test_eight_devices_agree_with_one(rows):
    """The same numbers, and nothing but sums over devices: no rows are gathered."""
    (found,) = answers(on_devices(rows))
    assert found["devices"] == 8
    assert found["loss"] < 1e-10
    assert found["gradient"] < 1e-10
    assert found["collectives"] == ["all-reduce"]
    # Adam makes steps of full size out of gradients that are zero but for rounding.
    np.testing.assert_allclose(found["together"], found["alone"], rtol=1e-8)
    assert found["again"] == found["resumed"] == found["together"]
    assert found["other seed"] != found["together"]
    assert found["from its parameters"] < 1e-8
    assert found["predicted"] < 1e-8


@pytest.mark.long
def test_two_hosts_agree_with_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second, alone = answers(*(on_devices(400, port, i) for i in range(2)), on_devices(400))
    assert first == second
    assert first["devices"] == 4
    np.testing.assert_allclose(first["together"], alone["alone"], rtol=1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((X, Y[:3]), 10), "expected arrays of equal length, got lengths"),
        (((), 10), "expected arrays of equal length"),
        (((X, Y), 0), "expected batch_size to be a positive integer, got 0"),
        (((X, Y), 91), "expected at most 90 rows per batch"),
    ],
)
def test_streams_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        dgp.Stream(*arguments)


def run(model, guide=dgp.guides.InducingPoint, stream=None, steps=2, **kwargs):
    svi = SVI(model, guide(model), optax.adam(0.01), dgp.ELBO())
    stream = dgp.Stream((X, Y), 30) if stream is None else stream
    return dgp.fit_stream(svi, jax.random.key(0), steps, stream, progress_bar=False, **kwargs)


def subsampled(X, y=None):
    with numpyro.plate("data", 90, subsample_size=30):
        numpyro.sample("y", dist.Normal(), obs=y)


@pytest.mark.slow
def test_bad_programs():
    with pytest.raises(ValueError, match=r"a program with plates \['rows'\], got none named \['rows'\]"):
        run(dgp.minibatch(shallow, rows=90))
    with pytest.raises(ValueError, match="got size 90 with subsample_size 30: leave subsampling"):
        run(dgp.minibatch(subsampled, data=90))
    with pytest.raises(ValueError, match="a batch of at most 20 rows"):
        run(dgp.minibatch(shallow, data=20))
    with pytest.raises(ValueError, match="expected no parameters per row in plate 'data', got 'w_auto_loc'"):
        run(dgp.minibatch(shallow, data=90), width=1)


@pytest.mark.long
def test_programs_that_count_rows_in_other_ways():
    """Rows scaled by the plate or a handler, all rows in one batch, handlers of two plates: no message."""

    def line(X, y=None, size=90):
        slope = numpyro.sample("slope", dist.Normal())
        with numpyro.plate("data", size, subsample_size=len(X)):
            numpyro.sample("y", dist.Normal(slope * X[:, 0]), obs=y)

    def table(X, y=None):
        with numpyro.plate("columns", 2), numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(), obs=None if y is None else y[:, None] + X)

    def guide(X, y=None, size=90):
        numpyro.sample("slope", dist.Normal(numpyro.param("loc", 0.0), 1.0))

    def steps(model, guide, size=30, **kwargs):
        svi = SVI(model, guide, optax.sgd(0.01), dgp.ELBO())
        source = dgp.Stream((X, Y), size)
        return dgp.fit_stream(svi, jax.random.key(0), 1, source, progress_bar=False, **kwargs).losses

    steps(line, guide)
    steps(numpyro.handlers.scale(partial(line, size=30), scale=3.0), guide)
    steps(line, guide, 90)
    for rows in (90, np.int64(90), 9e1):
        steps(dgp.minibatch(partial(line, size=30), data=rows), guide)
    nothing = lambda X, y=None: numpyro.param("unused", 0.0)  # noqa: E731
    once, twice = dgp.minibatch(table, data=90), dgp.minibatch(dgp.minibatch(table, columns=4), data=90)
    np.testing.assert_allclose(2 * steps(once, nothing), steps(twice, nothing), rtol=1e-12)


def plain(name):
    def program(y):
        with numpyro.plate(name, len(y)):
            numpyro.sample("y", dist.Normal(), obs=y)

    return program


def test_every_run_has_its_own_plates():
    """One handler, two runs, the second of a program that lacks the plate."""
    missing = r"a program with plates \['data'\], got none named \['data'\]"
    names = iter(["data", "rows", "data"])
    model = dgp.minibatch(lambda y: plain(next(names))(y), data=90)
    density = lambda: log_density(model, (Y[:30],), {}, {})[0]  # noqa: E731
    expected = 3 * dist.Normal().log_prob(Y[:30]).sum()
    np.testing.assert_allclose(density(), expected, rtol=1e-12)
    with pytest.raises(ValueError, match=missing):
        density()
    np.testing.assert_allclose(density(), expected, rtol=1e-12)

    handler = dgp.minibatch(data=90)
    with handler:
        plain("data")(Y[:30])
    with pytest.raises(ValueError, match=missing), handler:
        plain("rows")(Y[:30])
    with pytest.raises(ZeroDivisionError), handler:
        1 / 0  # noqa: B018 - an error of the program is not hidden by the missing plate
    with handler:
        plain("data")(Y[:30])


def not_streamed(rows):
    """Calls that are for all rows, of a program that counts 90, on some of them."""
    model, x, y, key = dgp.minibatch(shallow, data=90), X[:rows], Y[:rows], jax.random.key(0)
    guide, draws = dgp.guides.InducingPoint(model), {"f": jnp.zeros((8, 8))}
    params = {"f_auto_loc": jnp.zeros(8), "f_auto_scale_tril": jnp.eye(8)}
    fitted, options = dgp.Posterior(model, guide, params), {"num_steps": 1, "progress_bar": False}
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    return {
        "condition": lambda: dgp.condition(fitted, key, x, y, **options),
        "update": lambda: dgp.update(fitted, key, x, y, **options),
        "Collapsed": lambda: seed(dgp.guides.Collapsed(model), 0)(x, y),
        "minimize": lambda: dgp.optim.minimize(svi, key, x, y, progress_bar=False),
        "for_mcmc": lambda: seed(dgp.for_mcmc(model), 0)(x, y),
        "SGHMC": lambda: dgp.mcmc.SGHMC(model).init(key, 1, None, (x, y), {}),
        "diagnostics": lambda: local_sites(fitted, (x, y), {}),
        "convergence": lambda: sites_of_draws(dgp.Posterior(model, samples=draws), (x, y), {}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("owner", not_streamed(30))
def test_some_rows_do_not_count_for_all_where_no_other_batch_follows(owner):
    with pytest.raises(ValueError, match=r"expected all 90 rows .* got 30, .* count 3 times: pass the program"):
        not_streamed(30)[owner]()
    not_streamed(90)[owner]()


@pytest.mark.slow
def test_draws_of_a_program_of_batches_predict_at_any_rows():
    model = dgp.for_mcmc(dgp.minibatch(shallow, data=90))
    posterior = dgp.Posterior(model, samples={"f": jnp.ones((8, 8))})
    assert posterior.predict(jax.random.key(0), X[:4]).mean.shape == (4,)


def test_one_decorator_for_two_programs():
    handler = dgp.minibatch(data=90)
    good, bad = handler(plain("data")), handler(plain("rows"))
    good(Y[:30])
    with pytest.raises(ValueError, match=r"got none named \['data'\]"):
        bad(Y[:30])
    good(Y[:30])


@pytest.mark.long
def test_bad_fits():
    model = dgp.minibatch(shallow, data=90)
    with pytest.raises(ValueError, match="num_steps to be a positive integer, got 0"):
        run(model, steps=0)
    with pytest.raises(ValueError, match="a multiple of the 7 devices, got 30: try 35"):
        run(model, devices=jax.devices() * 7)
    bad = Y.copy()
    bad[5] = np.nan
    with pytest.raises(ValueError, match="data in the batch of step"):
        run(model, stream=dgp.Stream((X, bad), 45))

    def explodes(X, y=None):
        numpyro.factor("bad", jnp.log(numpyro.param("s", 1.0) - 2))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(), obs=y)

    with pytest.raises(ValueError, match=r"fit_stream: expected a finite loss, got \S+ at step 1: lower the learning"):
        run(dgp.minibatch(explodes, data=90))

    def fragile(X, y=None):
        ls = numpyro.param("ls", 0.5)
        g = dgp.gp("g", lambda A, B: jnp.exp(-0.5 * (A - B.T) ** 2 / ls), dgp.Points(jnp.asarray(X_SOME[:, :1])))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(g(X[:, :1]), lambda v: dist.Normal(v, 0.3)), obs=y)

    model = dgp.minibatch(fragile, data=90)
    svi = SVI(model, dgp.guides.InducingPoint(model), optax.sgd(0.3), dgp.ELBO())
    with pytest.raises(ValueError, match=r"fit_stream: the loss became nan at step \d+: Cholesky factorisation"):
        dgp.fit_stream(svi, jax.random.key(0), 200, dgp.Stream((X, Y), 30), progress_bar=False)


@pytest.mark.slow
def test_rows_that_single_precision_would_make_equal_are_refused(x32):
    """Unix seconds, as ``dgp.fit`` refuses them."""
    stream = dgp.Stream((1.6e9 + X, Y), 30)
    with pytest.raises(ValueError, match=r"expected distinct values of data in the batch of step 0 to stay distinct"):
        run(dgp.minibatch(shallow, data=90), stream=stream)


@pytest.mark.slow
def test_a_guide_of_the_program_without_minibatch_is_refused():
    """Its latents would count once, and their densities in the model three times."""
    program = partial(shallow, width=1)
    model, rule = dgp.minibatch(program, data=90), {"latent": dgp.guides.Amortised()}
    good, bad = (dgp.guides.InducingPoint(of, **rule) for of in (model, program))

    def fit(guide):
        svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
        return dgp.fit(svi, jax.random.key(0), 1, X[:30], Y[:30], progress_bar=False)

    assert np.isfinite(fit(good).losses).all()
    with pytest.raises(ValueError, match=r"counts the latent 'w' as the model does, 3\.0 times, got 1\.0 times"):
        fit(bad)
