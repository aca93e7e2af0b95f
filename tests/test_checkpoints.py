"""The file of an interrupted fit: of which fit it is, who may use it, and what happens to it when things go wrong."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import identities
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from programs import X, Y, shallow

import numpyro_dgp as dgp
from numpyro_dgp.functions.site_distribution import SiteDistribution
from numpyro_dgp.inference.checkpoints import locked
from numpyro_dgp.inference.fit_identity import FitIdentity, digest
from numpyro_dgp.inference.parameter_files import read_arrays, write_arrays


def line(X, y=None, count=None, *, site="slope", noise=0.5):
    slope = numpyro.sample(site, dist.Normal())
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(slope * X[:, 0], noise), obs=y)


def point(X, y=None, count=None, *, site="slope", noise=0.5):
    numpyro.sample(site, dist.Normal(numpyro.param(f"{site}_loc", 0.0), numpyro.param(f"{site}_scale", 0.1)))


def make(optimiser=None, *, loss=None, model=line, guide=point):
    return SVI(model, guide, optimiser or optax.adam(0.01), loss or dgp.ELBO())


def fit(file, svi=None, *args, steps=6, **kwargs):
    args = args or (X, Y)
    return dgp.fit(svi or make(), jax.random.key(0), steps, *args, checkpoint=file, progress_bar=False, **kwargs)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("fit") / "fit.npz"
    fit(file, steps=3)
    return file


OTHERS = {
    "data": (lambda: (make(), X, Y.at[3].add(1e-3)), "argument 2 is float64 .* in the file and float64"),
    "rows": (lambda: (make(), X[:20], Y[:20]), r"argument 1 is float64 \(30, 1\) .* in the file and float64 \(20, 1\)"),
    "a number": (lambda: (make(), X, Y, 7), "argument 3 is missing in the file and 7 in this call"),
    "learning rate": (
        lambda: (make(optax.adam(0.02)), X, Y),
        r"a number of the optimiser \(a learning rate.*\) is -0.01 in the file and -0.02 in this call: remove it",
    ),
    "schedule": (
        lambda: (make(optax.adam(optax.cosine_decay_schedule(0.01, 100))), X, Y),
        "the optimiser is .* operations with digest",
    ),
    "learning rate in the state": (
        lambda: (make(optax.inject_hyperparams(optax.adam)(learning_rate=0.01)), X, Y),
        "the optimiser is .* operations with digest",
    ),
    "objective": (lambda: (make(loss=dgp.ELBO(num_particles=2)), X, Y), "the objective is ELBO with num_particles=1"),
    "name of a site": (
        lambda: (make(model=partial(line, site="scale"), guide=partial(point, site="scale")), X, Y),
        "the order of the guide's sites is slope_loc slope_scale slope in the file and scale_loc",
    ),
    "a constant": (
        lambda: (make(model=partial(line, noise=0.4)), X, Y),
        r"a constant of a training step .* is \[0.5\] in the file and \[0.4\] in this call",
    ),
    "single precision": (
        lambda: (make(), np.asarray(X, np.float32), Y),
        r"argument 1 is float64 .* in the file and float32",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_fit_is_refused_with_the_first_difference(written, name):
    make_arguments, message = OTHERS[name]
    with pytest.raises(ValueError, match=f"fit: expected a checkpoint of this fit in .*: {message}"):
        fit(written, *make_arguments())


@pytest.mark.slow
def test_the_same_fit_is_not_refused_and_traced_as_often(written, tmp_path):
    """Another call, with objects made anew, longer: nothing differs. The identity comes from the trace of the fit."""

    def traces(**kwargs):
        runs = []

        def counted(X, y=None):
            runs.append(1)
            return line(X, y)

        fit(kwargs.get("file"), make(model=counted))
        return len(runs)

    copy = tmp_path / "fit.npz"
    copy.write_bytes(written.read_bytes())
    assert len(fit(copy, make(optax.adam(0.01)), X + 0.0, np.asarray(Y)).losses) == 6
    assert traces() == traces(file=tmp_path / "new.npz")


@pytest.mark.slow
def test_a_learning_rate_in_the_state_of_the_optimiser(tmp_path):
    rate = lambda value: make(optax.inject_hyperparams(optax.sgd)(learning_rate=value))  # noqa: E731
    fit(tmp_path / "a.npz", rate(0.01))
    with pytest.raises(ValueError, match=r"a number of the optimiser .* is 0.01 in the file and 0.02 in this call"):
        fit(tmp_path / "a.npz", rate(0.02), steps=9)


@pytest.mark.long
def test_kernels_are_told_by_name_and_by_their_constants(tmp_path):
    program = lambda kernel: partial(shallow, kernel=kernel)  # noqa: E731

    def run(kernel, **kwargs):
        model = program(kernel)
        return fit(tmp_path / "a.npz", make(model=model, guide=dgp.guides.InducingPoint(model)), **kwargs)

    run(dgp.kernels.RBF(1.2, 0.7), steps=2)
    with pytest.raises(ValueError, match=r"site 'y' of the model is .* with kernel RBF, .* with kernel Matern52"):
        run(dgp.kernels.Matern52(1.2, 0.7))
    with pytest.raises(
        ValueError, match=r"a constant of a training step .* is .*0.7.* in the file and .*0.8.* in this call"
    ):
        run(dgp.kernels.RBF(1.2, 0.8))


@pytest.mark.slow
def test_continuing_all_the_same(written, tmp_path):
    """With another learning rate from the same state; never from arrays that are not those of the state."""
    file = tmp_path / "fit.npz"
    file.write_bytes(written.read_bytes())
    slower = make(optax.adam(0.002))
    forced = fit(dgp.Checkpoint(file, force=True), slower)
    np.testing.assert_array_equal(forced.losses[:3], read_arrays(written, "")["losses"])
    fit(file, slower, steps=9)  # the file is now of this fit
    renamed = make(model=partial(line, site="scale"), guide=partial(point, site="scale"))
    with pytest.raises(ValueError, match=r"state\S*'scale_loc'\S* is missing in the file and of type float64"):
        fit(dgp.Checkpoint(file, force=True), renamed)
    with pytest.raises(ValueError, match=r"state.* is missing in the file"):
        fit(dgp.Checkpoint(file, force=True), make(optax.sgd(0.01, momentum=0.9)))


@pytest.mark.slow
def test_other_versions_warn_and_go_on(written, tmp_path):
    arrays = read_arrays(written, "")
    identity = FitIdentity.from_json(str(arrays["identity"]))
    older = identity._replace(versions=identity.versions | {"jax": "0.1"}, programs={"the optimiser": "another"})
    write_arrays(tmp_path / "a.npz", arrays | {"identity": np.array(older.to_json())})
    with pytest.warns(UserWarning, match=r"was written with jax 0.1 \(here .*\): the fit continues"):
        found = fit(tmp_path / "a.npz")
    np.testing.assert_array_equal(found.losses, fit(None).losses)


def test_files_of_an_older_version_are_refused(tmp_path):
    write_arrays(tmp_path / "a.npz", {"losses": np.zeros(3), "leaf0": np.zeros(2)})
    with pytest.raises(ValueError, match="got one of an older version, which does not identify its fit: remove"):
        fit(tmp_path / "a.npz")


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [pytest.param(["mixture"], id="mixture"), pytest.param([], id="every", marks=pytest.mark.long)]
)
def test_the_identity_is_the_same_in_every_process(names):
    """Neither addresses nor the order of sets, which differ between processes, are in it: by guide and likelihood."""
    tests = Path(__file__).parent

    def run(seed):
        path = os.pathsep.join([str(tests), str(Path(dgp.__file__).parent.parent)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(tests / "identities.py"), *names]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    first, second = (json.loads(process.communicate()[0]) for process in [run(5), run(9)])
    assert [name for name in first if first[name] != second[name]] == []
    assert len(first) == len(second) == (len(names) or len(list(identities.cases())))
    assert all("operations with digest" in found for found in first.values())


@pytest.mark.long
def test_a_mixture_is_resumed_in_another_process(tmp_path):
    """Whatever the order of sets there is, and as if it had not been interrupted."""
    program = """
import sys, jax, optax, numpyro_dgp as dgp
from numpyro.infer import SVI
from programs import X, Y, shallow
guide = dgp.guides.InducingPoint(shallow, inducing=dgp.guides.MixtureOfGaussians(2))
svi = SVI(shallow, guide, optax.adam(0.01), dgp.ELBO())
result = dgp.fit(svi, jax.random.key(0), int(sys.argv[2]), X, Y, checkpoint=sys.argv[1], progress_bar=False)
print(result.losses.tolist())
"""

    def run(seed, file, steps):
        path = os.pathsep.join([str(Path(__file__).parent), str(Path(dgp.__file__).parent.parent)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", program, str(tmp_path / file), str(steps)]
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    run(5, "fit.npz", 3)
    assert run(9, "fit.npz", 6) == run(9, "other.npz", 6)


def test_arrays_of_distributions_have_an_order():
    """NumPyro takes that of a set, which is another one in every process."""

    def every(cls):
        return [cls, *(found for c in cls.__subclasses__() for found in every(c))]

    own = [c for c in every(SiteDistribution) if c.__module__.startswith("numpyro_dgp")]
    assert len(own) > 20
    for cls in own:
        fields = cls.gather_pytree_data_fields()
        assert list(fields) == sorted(fields), cls
    others = set(every(dist.Distribution)) - set(own)
    fields = {c: c.gather_pytree_data_fields() for c in others if c.__module__.startswith("numpyro_dgp")}
    assert {c: f for c, f in fields.items() if len(f) > 1 and not issubclass(c, dist.ExpandedDistribution)} == {}


def test_digests_see_what_is_computed():
    def of(function):
        return digest(jax.make_jaxpr(function)(jnp.ones(3)))

    large = np.arange(5.0)
    assert of(lambda x: x * 2.0) == of(lambda y: y * 2.0)
    assert of(lambda x: x * 2.0).operations == of(lambda x: x * 3.0).operations != of(lambda x: x + 2.0).operations
    assert of(lambda x: x * 2.0).constants == ["2.0"] != of(lambda x: x * 3.0).constants
    assert of(lambda x: x[0] * large).constants != of(lambda x: x[0] * (large + 1)).constants
    assert of(lambda x: x - x[::-1]).operations != of(lambda x: x[::-1] - x).operations
    inside = lambda c: of(jax.jit(lambda x: jax.lax.scan(lambda s, _: (s * c, None), x, None, 3)[0]))  # noqa: E731
    assert inside(2.0).operations == inside(3.0).operations
    assert inside(2.0).constants != inside(3.0).constants


# Faults.


def test_every_truncation_is_an_error_in_words(written, tmp_path):
    whole, file = written.read_bytes(), tmp_path / "cut.npz"
    for size in [*range(0, len(whole), 97), len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"expected a file of arrays, got (an empty|a damaged|no \.npz)"):
            read_arrays(file, "remove it")


def test_overwritten_bytes_are_an_error_in_words(written, tmp_path):
    whole, file = bytearray(written.read_bytes()), tmp_path / "bad.npz"
    for i in range(0, len(whole), 61):
        damaged = whole.copy()
        damaged[i] ^= 0xFF
        file.write_bytes(damaged)
        try:
            found = read_arrays(file, "remove it")
        except ValueError as error:
            assert "expected a file of arrays" in str(error)  # noqa: PT017
        else:  # bytes that mean nothing, such as a date
            assert found.keys() <= read_arrays(written, "").keys()


@pytest.mark.parametrize("name", ["file/fit.npz", "file/deep/fit.npz", "."])
def test_a_path_that_cannot_be_written_is_found_before_the_first_step(tmp_path, name):
    (tmp_path / "file").write_text("in the way")
    svi = make(optax.GradientTransformation(None, None))  # a fit that cannot begin
    with pytest.raises(ValueError, match=r"expected checkpoint to be (a path that can be written|the path of a file)"):
        dgp.fit(svi, jax.random.key(0), 3, X, Y, checkpoint=tmp_path / name)


def test_a_finished_fit_is_read_where_nothing_can_be_written(written, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert len(fit(written, steps=3).losses) == 3
    with pytest.raises(ValueError, match=r"a path that can be written, got .*Permission denied"):
        fit(written, steps=4)


def test_a_full_disk_keeps_the_old_file_and_says_when(tmp_path, tmp_path_factory):
    """The system refuses files above some bytes, as a full disk does."""
    other, file = tmp_path_factory.mktemp("other") / "fit.npz", tmp_path / "fit.npz"
    for steps in (3, 6):  # what is compiled is kept in files, which the system would refuse as well
        fit(other, steps=steps)
    fit(file, steps=3)
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match=r"could not be written after step 6 \(.*\)\. The file is as it was"):
            found = fit(file, steps=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.read_bytes() == before
    assert len(found.losses) == 6
    assert [p.name for p in tmp_path.iterdir()] == ["fit.npz"]


def stop_after(monkeypatch, steps, error):
    """Raise ``error`` in the middle of a fit, as the signal of an interruption does."""
    from numpyro_dgp.inference import fit_loop

    monkeypatch.setattr(fit_loop, "CHUNK", 2)

    class Bar(fit_loop.tqdm.tqdm):
        def update(self, n=1):
            super().update(n)
            if self.n >= steps:
                raise error

    monkeypatch.setattr(fit_loop.tqdm, "tqdm", Bar)


@pytest.mark.slow
def test_an_interruption_saves_what_is_there_and_says_where(tmp_path, monkeypatch):
    whole = fit(None, steps=9)
    stop_after(monkeypatch, 4, KeyboardInterrupt())
    with pytest.raises(
        KeyboardInterrupt, match=r"interrupted after \d of 9 steps, which are saved in .*a\.npz: the same"
    ):
        dgp.fit(make(), jax.random.key(0), 9, X, Y, checkpoint=tmp_path / "a.npz")
    with pytest.raises(KeyboardInterrupt, match=r"fit: interrupted after \d of 9 steps$"):
        dgp.fit(make(), jax.random.key(0), 9, X, Y)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
    assert 4 <= len(read_arrays(tmp_path / "a.npz", "")["losses"]) < 9
    np.testing.assert_array_equal(fit(tmp_path / "a.npz", steps=9).losses, whole.losses)


def test_an_interruption_while_the_disk_is_full(tmp_path, monkeypatch):
    stop_after(monkeypatch, 4, KeyboardInterrupt())
    monkeypatch.setattr(np, "savez", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(RuntimeWarning, match="No space left"), pytest.raises(KeyboardInterrupt, match=r"of 9 steps$"):
        dgp.fit(make(), jax.random.key(0), 9, X, Y, checkpoint=tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


def test_one_fit_at_a_time(tmp_path):
    file = tmp_path / "fit.npz"
    busy = rf"one fit at a time, got it while process {os.getpid()} on .* fits with it: wait"
    with locked(file), pytest.raises(ValueError, match=busy):
        fit(file)
    fit(file)
    assert [p.name for p in tmp_path.iterdir()] == ["fit.npz"]


def test_a_lock_and_a_part_of_a_killed_process_are_in_nobodys_way(tmp_path):
    file = tmp_path / "fit.npz"
    (tmp_path / "fit.npz.lock").write_text("process 1 on another")
    (tmp_path / "fit.npz.0123.part").write_text("half")
    (tmp_path / "fit.npz2.0123.part").write_text("of another file")
    fit(file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fit.npz", "fit.npz2.0123.part"]


def test_threads_that_write_one_file_never_leave_a_part(tmp_path):
    file = tmp_path / "a.npz"
    writes = [threading.Thread(target=write_arrays, args=(file, {"a": np.full(1000, i)})) for i in range(8)]
    for thread in writes:
        thread.start()
    for thread in writes:
        thread.join()
    found = read_arrays(file, "")["a"]
    assert (found == found[0]).all()
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.slow
def test_fit_and_fit_stream_do_not_take_each_others_files(tmp_path):
    file, rows = tmp_path / "fit.npz", (np.asarray(X), np.asarray(Y))
    stream = lambda seed=0, size=30: dgp.Stream(rows, size, seed=seed)  # noqa: E731

    def run(source, **kwargs):
        model = dgp.minibatch(line, data=30)
        return dgp.fit_stream(
            make(model=model), jax.random.key(0), 4, source, checkpoint=file, progress_bar=False, **kwargs
        )

    run(stream())
    with pytest.raises(ValueError, match=r"the function is dgp\.fit_stream in the file and dgp\.fit in this call"):
        fit(file)
    with pytest.raises(ValueError, match=r"array 1 of batch 0 is .* in the file"):
        run(stream(seed=1))
    with pytest.raises(ValueError, match=r"array 1 of batch 0 is float64 \(30, 1\) .* and float64 \(15, 1\)"):
        run(stream(size=15))
    assert len(run(stream()).losses) == 4


def test_an_identity_survives_its_file():
    here = FitIdentity({"a": "1", "b": "2"}, {"p": ["1", "2"]}, {"jax": "1"})
    assert FitIdentity.from_json(here.to_json()) == here
    assert json.loads(here.to_json())["facts"]["a"] == "1"
    assert here.difference(here) is None
    assert here.difference(here._replace(facts={"a": "1"})) == "b is missing in the file and 2 in this call"
    assert here.difference(here._replace(programs={"p": ["1", "3"]})) == "p is 3 in the file and 2 in this call"
    assert here.difference(here._replace(programs={"p": ["1"]})) == "p is 1 in the file and 2 in this call"
    assert here.difference(here._replace(programs={"p": []}, versions={"jax": "2"})) is None
    assert here.other_versions(here._replace(versions={"jax": "2"})) == "jax 2 (here 1)"


@pytest.mark.slow
def test_initial_values():
    """Those of an earlier fit are accepted, and the fit that starts there is that of ``svi.run``."""
    svi = make()
    params = fit(None, svi, steps=2).params
    again = fit(None, svi, steps=2, init_params=params)
    stock = svi.run(jax.random.key(0), 2, X, Y, init_params=params, progress_bar=False)
    np.testing.assert_allclose(again.losses, stock.losses, rtol=1e-9)


@pytest.mark.long
def test_the_table_of_faults():
    """Every row of benchmarks/reliability.py that says whether a fit is the same, once."""
    script = Path(__file__).parent.parent / "benchmarks" / "reliability.py"
    rows = ["SIGINT", "two processes", "full disk", "cannot be written", "vanishes"]
    environment = {**os.environ, "PYTHONPATH": str(Path(dgp.__file__).parent.parent)}
    found = subprocess.run(
        [sys.executable, str(script), "--smoke", "--only", *rows], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert len(found.stdout.splitlines()) == 2 + 7
    assert found.stdout.count("identical") == 5
    assert "NOT" not in found.stdout
    assert "LOST" not in found.stdout
