"""The sequential search: rows that are filled up, rounds without a refit, records that it goes on from, wrong calls."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.scipy.stats import norm
from numpyro.infer import init_to_median
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from programs import X as ROWS
from programs import Y, Z, bound, deep, random_params, shallow

import numpyro_dgp as dgp
from numpyro_dgp.design import Box, Record, Search, loop
from numpyro_dgp.design.surrogate import filled_rows, plates_of_rows, with_known_rows

LINE = [[-2.0, 2.0]]
QUICK = {"num_steps": 20, "refit_steps": 10, "num_candidates": 32, "num_starts": 2, "initial": 4}


def precise(X, y=None):
    shallow(X, y, noise=0.02)


def simulator(x):
    return float(np.sin(3 * x[0]) + 0.3 * x[0])


def improvement(posterior, seen, key):
    def acquisition(x):
        found = posterior.using(num_samples=1).predict_function(key, x)
        scale = jnp.sqrt(found.variance.sum())
        gap = (seen.best - found.mean.sum()) / scale
        return scale * (norm.pdf(gap) + gap * norm.cdf(gap))

    return acquisition


def search(bounds=LINE, **settings):
    return Search(precise, dgp.guides.InducingPoint, bounds, improvement, **{**QUICK, **settings})


def run(key, **settings):
    settings = {"simulator": simulator, "progress_bar": False, "budget": 8, "path": None, **QUICK, **settings}
    code = settings.pop("simulator")
    options = {name: settings.pop(name) for name in ("budget", "path", "progress_bar")}
    program, guide = settings.pop("model", precise), settings.pop("guide", dgp.guides.InducingPoint)
    mine = Search(program, guide, settings.pop("bounds", LINE), settings.pop("acquisition", improvement), **settings)
    return loop(mine, code, key, **options)


@pytest.mark.long
@pytest.mark.parametrize("model", [shallow, deep])
def test_rows_that_are_not_known_do_not_count(model, key):
    assert plates_of_rows("test", model, Box(LINE)) == {"data"}
    program = with_known_rows(model, frozenset({"data"}))
    guide = dgp.guides.InducingPoint(program)
    filled = filled_rows(np.array(ROWS[:20]), np.array(Y[:20]))
    assert filled[0].shape == (64, 1)
    few = ROWS[:20], Y[:20], jnp.ones(20, bool)
    params = random_params(program, guide, *few)
    values = [bound(dgp.ELBO(num_particles=300), params, program, guide, *data) for data in (few, filled)]
    assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-9 if model is shallow else 0.03)


@pytest.mark.long
def test_a_round_without_a_refit_is_exact_for_one_layer(key):
    mine = search(refit_every=100, standardise=False, num_steps=1)
    record = mine.start(key)
    x = np.linspace(-1.5, 1.5, 7)[:, None]
    record = record.add(np.cos(x[:, 0]), x)
    record = mine.fitted(record).record.add([0.3], [[0.7]])
    found = mine.fitted(record)
    assert found.record.params is record.params
    guide = dgp.guides.Collapsed(precise)
    exact = dgp.Posterior(precise, guide.on(jnp.asarray(record.X), jnp.asarray(record.y)), {})
    for a, b in zip(*(p.using(num_samples=1).predict(key, ROWS) for p in (found.posterior, exact)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.long
def test_finds_the_minimum(key):
    found = run(key, budget=12)
    line = np.linspace(-2, 2, 2001)[:, None]
    assert found.record.y.min() == pytest.approx(min(map(simulator, line)), abs=0.01)
    assert found.record.rounds.tolist() == [0] * 4 + list(range(1, 9))
    assert np.isfinite(found.record.acquisition[4:]).all()
    assert float(found.units.inverse(found.seen.best)) == pytest.approx(found.record.y.min())
    largest = run(key, budget=12, minimise=False, simulator=lambda x: -simulator(x), acquisition=negative)
    assert largest.record.y.max() == pytest.approx(-min(map(simulator, line)), abs=0.01)


def negative(posterior, seen, key):
    def acquisition(x):
        found = posterior.using(num_samples=1).predict_function(key, x)
        return found.mean.sum() + 2 * jnp.sqrt(found.variance.sum())

    return acquisition


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.long)


class Killed(Exception):
    pass


class Fails:
    """A simulator that is killed at the evaluations with these numbers."""

    def __init__(self, *at):
        self.left, self.count = list(at), 0

    def __call__(self, x):
        self.count += 1
        if self.left and self.count == self.left[0]:
            self.left.pop(0)
            raise Killed
        return simulator(x)


@pytest.mark.long
@pytest.mark.parametrize(("q", "kills"), [(1, (5,)), (2, (3, 7))])
def test_goes_on_as_if_it_had_not_been_killed(q, kills, key, tmp_path):
    settings = {"q": q, "initial": 3, "refit_every": 2, "budget": 6 if q == 1 else 9}
    whole = run(key, **settings).record
    path, killed = tmp_path / "there" / "search.npz", Fails(*kills)
    for _ in kills:
        with pytest.raises(Killed) as caught:
            run(key, path=path, simulator=killed, **settings)
    done = kills[-1] - len(kills)  # a killed evaluation is done again
    assert f"at evaluation {done + 1}, x = [" in caught.value.__notes__[0]
    assert f"the {done} before it are saved in {path}" in caught.value.__notes__[0]
    assert len(Record.load(path).y) == done
    resumed = run(key, path=path, **settings).record
    for name in ("X", "y", "rounds", "acquisition"):
        np.testing.assert_array_equal(getattr(resumed, name), getattr(whole, name), err_msg=name)
    assert (Record.load(path).X == whole.X).all()
    assert [p.name for p in path.parent.iterdir()] == ["search.npz"]
    if q > 1:
        more = run(key, path=path, **settings | {"budget": 10}).record
        assert (more.X[:9] == whole.X).all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"bounds": [[-2.0, 3.0]]},
            r"got one of another: bounds is \[\[-2.0, 2.0\]\] in the file and \[\[-2.0, 3.0\]\]",
        ),
        ({"initial": 5}, r"initial is 4 in the file and 5 in this call"),
        ({"refit_every": 3}, r"refit_every is 5 in the file and 3 in this call"),
        ({"key": jax.random.key(1)}, r"another: the key is another"),
        (
            {"model": lambda X, y=None: shallow(X, y, noise=0.2)},
            r"a constant of a fit .* is .* in the file and .* in this call",
        ),
    ],
)
def test_refuses_the_record_of_another_search(changed, says, key, tmp_path):
    path = tmp_path / "search.npz"
    search().start(key).save(path)
    with pytest.raises(ValueError, match=says):
        run(changed.pop("key", key), path=path, **changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "got"), [(np.nan, "nan"), slow([1.0, 2.0], r"shape \(2,\)"), slow("broken", "'broken'")]
)
def test_a_simulator_without_a_number(value, got, key, tmp_path):
    path = tmp_path / "search.npz"
    with pytest.raises(
        ValueError, match=rf"one finite number, got {got} at evaluation 3, x = .*the 2 before it are saved"
    ):
        run(key, path=path, simulator=lambda x, left=iter([0.0, 1.0, value]): next(left))
    assert Record.load(path).y.tolist() == [0, 1]


@pytest.mark.long
def test_points_for_simulators_elsewhere(key, tmp_path):
    mine = search()
    record = mine.start(key)
    assert mine.propose(record) is record
    record = record.add([simulator(x) for x in record.pending]).add([5.0], [[1.9]])
    record.save(tmp_path / "search.npz")
    proposals = [mine.propose(r).pending for r in (record, Record.load(tmp_path / "search.npz"))]
    assert (proposals[0] == proposals[1]).all()
    assert proposals[0].shape == (1, 1)


@pytest.mark.long
def test_rounds_are_not_traced_again(key):
    traced = []

    def counted(X, y=None):
        traced.append(len(X))
        precise(X, y)

    mine = Search(counted, dgp.guides.InducingPoint, LINE, improvement, **QUICK, refit_every=2)
    record, counts = mine.start(key), []
    for _ in range(5):
        record = mine.propose(record)
        record = record.add([simulator(x) for x in record.pending])
        counts.append(len(traced))
    assert counts[2] == counts[3] == counts[4]


@pytest.mark.long
def test_acquisitions_that_need_values(key):
    def with_numpy(posterior, seen, key):
        best = float(seen.best)  # no tracer
        return lambda x: -jnp.square(posterior.using(num_samples=1).predict_function(key, x).mean.sum() - best)

    assert len(run(key, budget=5, acquisition=with_numpy).record.y) == 5


@pytest.mark.long
def test_a_guide_that_computes_its_posterior_from_the_rows(key):
    found = run(key, guide=dgp.guides.Collapsed, budget=6, optimizer=optax.adam(0.01))
    mean = found.units.inverse(found.posterior.using(num_samples=1).predict(key, jnp.asarray(found.record.X)).mean)
    assert np.abs(mean - found.record.y).max() < 0.05


def at_the_runs(X, y=None, runs=None):
    scale = jnp.exp(numpyro.sample("log_scale", dist.Normal(-0.5, 0.5)))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), dgp.Points(runs))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 1e-4)), obs=y)


def at_the_runs_in_a_plate(X, y=None, runs=None):
    with numpyro.plate("columns", 1):
        scale = jnp.exp(numpyro.sample("log_scale", dist.Normal(-0.5, 0.5)))
    f = dgp.gp("f", dgp.kernels.RBF(1.0, scale), dgp.Points(runs))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 1e-4)), obs=y)


def exact_means(scale, X, y, X_new):
    """Dense algebra, without noise to speak of."""
    gram = lambda a, b: np.exp(-0.5 * (a - b.T) ** 2 / scale**2)  # noqa: E731
    return gram(X_new, X) @ np.linalg.solve(gram(X, X) + 2e-8 * np.eye(len(X)), y)


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "guide"),
    [(at_the_runs, dgp.guides.Collapsed), (at_the_runs, AutoDelta), (at_the_runs_in_a_plate, AutoDelta)],
    ids=["collapsed", "integrated", "plate"],
)
def test_inducing_inputs_at_the_runs(program, guide, key):
    with jax.enable_x64(True):
        mine = Search(program, guide, LINE, improvement, standardise=False, num_steps=3, refit_every=100,
                      optimizer=optax.adam(0.01))  # fmt: skip
        x = np.linspace(-2, 2, 9)[:, None]
        record = mine.start(key).add(np.sin(2 * x[:-1, 0]), x[:-1])
        record = mine.fitted(record).record.add(np.sin(2 * x[-1]), x[-1:])  # conditioned on one more
        found = mine.fitted(record)
        samples = found.posterior.samples
        log_scale = found.posterior.params["log_scale_auto_loc"] if samples is None else samples["log_scale"][0]
        prediction = found.posterior.predict_function(key, jnp.asarray(ROWS, float))
        expected = exact_means(np.exp(log_scale.item()), x, np.sin(2 * x[:, 0]), np.asarray(ROWS))
        error = 4 * np.sqrt(np.asarray(prediction.variance) / len(prediction.means))  # of a mean over draws
        assert (np.abs(np.asarray(prediction.mean) - expected) < error + 1e-3).all()


def deep_at_the_runs(X, y=None, runs=None):
    noise = jnp.exp(numpyro.sample("log_noise", dist.Normal(-5.0, 2.0)))
    f = dgp.gp("f", dgp.kernels.RBF(0.2, 0.7), dgp.Points(runs), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.2, 0.7), dgp.Points(f(runs).loc))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)


@pytest.mark.long
def test_two_layers_with_the_last_integrated_past_64_rows(key):
    with jax.enable_x64(True):
        guide = partial(AutoNormal, init_loc_fn=init_to_median)
        mine = Search(deep_at_the_runs, guide, LINE, improvement, num_steps=200, refit_steps=20, num_particles=2,
                      refit_every=3)  # fmt: skip
        x = np.random.default_rng(0).uniform(-2, 2, (65, 1))
        y = np.sin(3 * x[:, 0])
        record = mine.fitted(mine.start(key).add(y[:63], x[:63])).record
        assert record.params["f_auto_loc"].shape == (1, 64)
        record = mine.fitted(record.add(y[63:], x[63:])).record  # longer arrays, without a refit
        found = mine.fitted(dataclasses.replace(record, fitted_round=-9))
        assert found.record.params["f_auto_loc"].shape == (1, 128)
        # rows that are not known have no effect on hidden values, which stay at their start
        assert float(found.record.params["h_white_auto_scale"][65:].max()) == pytest.approx(0.1)
        mean = found.units.inverse(found.posterior.predict(key, jnp.asarray(x)).mean)
        assert np.abs(np.asarray(mean) - y).max() < 0.1


def whole_numbers(x):
    return (x[0] - 0.5) ** 2 + abs(x[1] - 3) + [2.0, 0.0, 1.0][int(x[2])]


@pytest.mark.long
def test_whole_numbers_and_labels(key):
    box = Box([[0.0, 1.0], [0, 6], [0, 2]], integers=[1], categories=[2])
    points = dgp.design.sobol(box, 32, key)

    def model(X, y=None):
        K = dgp.kernels
        kernel = K.RBF(1.0, jnp.array([0.5, 3.0])).on(0, 1) * K.Categorical(3, correlation=0.3).on(2)
        f = dgp.gp("f", kernel, dgp.Points(points))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.05)), obs=y)

    found = run(key, simulator=whole_numbers, model=model, bounds=box, budget=20, num_starts=4)
    assert (box.snapped(found.record.X) == found.record.X).all()
    assert found.record.y.min() < 0.1


def outside(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z))
    numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)).to_event(1), obs=y)


def independent(model):
    return dgp.guides.InducingPoint(model, inducing=dgp.guides.Diagonal())


def with_latents(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.hstack([Z, Z])))
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, 1)
        numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, 0.1)), obs=y)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"simulator": 3}, r"expected the simulator, a function of one point x \(D,\), got int"),
        ({"budget": 0}, r"budget to be a positive integer"),
        ({"guide": dgp.guides.InducingPoint(shallow)}, r"make a guide from a program, got a InducingPoint.*guide=dgp"),
        ({"guide": lambda model: model}, r"to make a guide of dgp.guides, got function"),
        ({"guide": independent}, r"q\(v\) of the last layers are Full\(\) for rounds without a refit, got Inducing"),
        ({"model": outside}, r"in a numpyro.plate of the rows, got none"),
        ({"model": with_latents}, r"parameters that all rows share, got 'w_auto_loc' with values of every row"),
        ({"budget": 1, "simulator": lambda x: pytest.fail("it ran")}, r"design.loop: .*budget of at least 2, .* got 1"),
        ({"initial": 0}, r"initial to be a positive integer, got 0"),
        ({"initial": 1}, r"initial of at least 2 points, got 1: initial=10"),
        ({"initial": [[0.0]]}, r"initial of at least 2 points, got 1: initial=10"),
        ({"initial": [[0.0], [3.0]]}, r"initial within bounds, got 3 in row 1"),
        ({"acquisition": 1}, r"the acquisition, a function, got int"),
        ({"acquisition": lambda posterior, seen: None}, r"acquisition\(posterior, seen, key\), .* \(posterior, seen\)"),
        ({"acquisition": partial(improvement, key=3)}, r"got one that takes \(posterior, seen, \*, key=3\): lambda"),
        ({"acquisition": dgp.design.ThompsonSampling}, r"got one that takes \(posterior: .*, key: .*: lambda"),
        ({"q": 1.5}, r"q to be a positive integer, got 1.5"),
    ],
)
def test_wrong_calls(settings, says, key):
    with pytest.raises(ValueError, match=says):
        run(key, **settings)


@pytest.mark.parametrize("acquisition", [partial(lambda scale, *args: None, 2.0), dgp.design.UpperConfidence, max])
def test_acquisitions_that_take_three_arguments(acquisition):
    assert Search(precise, dgp.guides.InducingPoint, LINE, acquisition).acquisition is acquisition


@pytest.mark.slow
def test_independent_inducing_values_where_every_round_has_a_fit(key):
    assert Search(precise, independent, LINE, improvement, **QUICK, refit_every=1).start(key).pending.shape == (4, 1)


@pytest.mark.slow
def test_wrong_records(key, tmp_path):
    mine = search()
    record = mine.start(key)
    for call, says in (
        (lambda: record.add([np.nan]), r"finite values of shape \(K,\), got nan"),
        (lambda: record.add(np.zeros(7)), r"at most 4 values, one per pending point, got 7"),
        (lambda: record.add([1.0], [[np.nan]]), r"finite points X, got 1 NaN"),
        (lambda: record.add([1.0], [[1.0, 2.0]]), r"points X of shape \(1, 1\), got \(1, 2\)"),
        (lambda: mine.fitted(record), r"at least two values, got 0"),
        (lambda: mine.require_own(Record()), r"a record of this search, got one of another: bounds is missing"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    boxes = search(bounds=Box([[-2, 2]], categories=[0]), initial=[[0], [1]])
    for searched, x, says in (
        (mine, 2.1, r"expected X of the record within bounds, got 2.1 in row 1, column 0"),
        (boxes, 0.5, r"expected whole numbers in column 0 of X of the record, got 0.5 in row 1"),
    ):
        for method in (searched.fitted, searched.propose):
            with pytest.raises(ValueError, match=says):
                method(Record(pending=np.zeros((0, 1)), identity=searched.identity).add([1.0, 2.0], [[0.0], [x]]))
    dgp.save(tmp_path / "other.npz", {"a": np.zeros(2)})
    with pytest.raises(ValueError, match=r"a file of Record.save or design.loop, got other arrays"):
        Record.load(tmp_path / "other.npz")
