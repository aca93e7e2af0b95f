"""Fitting: same steps as svi.run, checkpoints, one file, errors that name the layer."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from programs import X, Y, Z, bayesian, deep, random_params

import numpyro_dgp as dgp
from numpyro_dgp.inference.checkpoints import CheckpointFile
from numpyro_dgp.inference.parameter_files import require_dicts


def make(model=deep, guide=dgp.guides.InducingPoint, optimiser=None, loss=None):
    return SVI(model, guide(model), optimiser or optax.adam(0.01), loss or dgp.ELBO())


def same(a, b):
    assert sorted(a) == sorted(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def fit(svi, steps, *args, **kwargs):
    return dgp.fit(svi, jax.random.key(0), steps, *args, progress_bar=False, **kwargs)


@pytest.mark.long
def test_same_result_as_svi_run():
    ours = fit(make(), 130, X, Y, 10)
    stock = make().run(jax.random.key(0), 130, X, Y, 10, progress_bar=False)
    assert ours.losses.shape == (130,)
    np.testing.assert_allclose(ours.losses, stock.losses, rtol=1e-8)
    for name, value in stock.params.items():
        np.testing.assert_allclose(ours.params[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.long
def test_one_compiled_program_for_any_number_of_steps():
    """However many steps, whole chunks or parts of them: the model is traced as often."""

    def traces(steps, **kwargs):
        runs = []

        def counted(X, y=None):
            runs.append(1)
            return deep(X, y)

        fit(make(counted), steps, X, Y, **kwargs)
        return len(runs)

    assert traces(3) == traces(130)


@pytest.mark.long
@pytest.mark.smoke
def test_numpy_data_and_keyword_arguments():
    ours = fit(make(), 5, np.asarray(X), y=np.asarray(Y), batch=7)
    assert np.isfinite(ours.losses).all()


@pytest.mark.long
@pytest.mark.parametrize("guide", [dgp.guides.InducingPoint, dgp.guides.MeanField])
def test_an_interrupted_fit_resumes_with_identical_results(tmp_path, guide):
    schedule = optax.chain(optax.clip_by_global_norm(100.0), optax.adam(optax.cosine_decay_schedule(0.01, 350)))
    whole = fit(make(bayesian, guide, schedule), 350, X, Y, 10)
    file = tmp_path / "deep" / "fit.npz"
    part = fit(make(bayesian, guide, schedule), 170, X, Y, 10, checkpoint=dgp.Checkpoint(file, every=60))
    assert len(part.losses) == 170
    resumed = fit(make(bayesian, guide, schedule), 350, X, Y, 10, checkpoint=dgp.Checkpoint(file, every=60))
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    same(resumed.params, whole.params)
    again = fit(make(bayesian, guide, schedule), 350, X, Y, 10, checkpoint=file)
    same(again.params, whole.params)
    assert [p.name for p in file.parent.iterdir()] == ["fit.npz"]


class Interrupted(Exception):
    pass


@pytest.mark.long
def test_a_fit_killed_in_the_middle_loses_only_what_follows_its_checkpoint(tmp_path, monkeypatch):
    whole = fit(make(), 250, X, Y)
    file, writes = tmp_path / "fit.npz", []
    write = CheckpointFile.write

    def interrupted(*args):
        write(*args)
        writes.append(args)
        if len(writes) == 2:
            raise Interrupted

    monkeypatch.setattr(CheckpointFile, "write", interrupted)
    with pytest.raises(Interrupted):
        fit(make(), 250, X, Y, checkpoint=dgp.Checkpoint(file, every=50))
    monkeypatch.undo()
    resumed = fit(make(), 250, X, Y, checkpoint=dgp.Checkpoint(file, every=50))
    same(resumed.params, whole.params)


@pytest.mark.long
def test_parameters_in_one_file(tmp_path):
    params = random_params(bayesian, dgp.guides.InducingPoint(bayesian), X, Y)
    nested = params | {
        "net$params": {"dense/0": {"w": jnp.ones((2, 3), jnp.float32), "b": jnp.zeros(3)}},
        "count": jnp.array(3),
    }
    dgp.save(tmp_path / "posterior.npz", nested)
    loaded = dgp.load(tmp_path / "posterior.npz")
    same({k: v for k, v in loaded.items() if k != "net$params"}, params | {"count": jnp.array(3)})
    same(loaded["net$params"]["dense/0"], nested["net$params"]["dense/0"])
    assert loaded["net$params"]["dense/0"]["w"].dtype == jnp.float32
    # A new process: a guide that has never run predicts from the loaded file.
    guide = dgp.guides.InducingPoint(bayesian)
    a = dgp.Posterior(bayesian, guide, {k: v for k, v in loaded.items() if k in params}).predict(
        jax.random.key(0), X[:4]
    )
    b = dgp.Posterior(bayesian, guide, params).predict(jax.random.key(0), X[:4])
    np.testing.assert_array_equal(a.mean, b.mean)


@pytest.mark.long
def test_stock_losses_and_autoguides(tmp_path):
    from numpyro.infer.autoguide import AutoNormal

    result = fit(
        make(loss=Trace_ELBO(), guide=AutoNormal), 60, X, Y, checkpoint=dgp.Checkpoint(tmp_path / "a.npz", every=20)
    )
    assert np.isfinite(result.losses).all()


@pytest.mark.slow
def test_progress_is_shown(capsys):
    dgp.fit(make(), jax.random.key(0), 150, X, Y)
    assert "150/150" in capsys.readouterr().err


@pytest.mark.long
def test_stable_update_skips_bad_steps():
    svi = make(optimiser=optax.sgd(10.0))
    with pytest.warns(RuntimeWarning, match=r"skipped each of the last \d+ of 20 steps"):
        result = dgp.fit(svi, jax.random.key(0), 20, X, Y, stable_update=True, progress_bar=False)
    assert not np.isfinite(result.losses).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(svi.optim.get_params(result.state.optim_state)))


@pytest.mark.slow
def test_a_fit_that_is_stuck_says_so():
    """A step that leaves the domain of the loss: with ``stable_update`` no further step is taken."""

    def model(X, y=None):
        numpyro.factor("bad", -jnp.log(numpyro.param("s", 1.0)))

    svi = SVI(model, lambda X, y=None: None, optax.sgd(2.0), dgp.ELBO())
    falls = optax.sgd(-2.0)
    with pytest.warns(RuntimeWarning, match=r"skipped each of the last 129 of 130 steps.* lower the learning rate"):
        fit(svi, 130, X, Y, stable_update=True)
    svi = SVI(model, lambda X, y=None: None, falls, dgp.ELBO())
    assert np.isfinite(fit(svi, 130, X, Y, stable_update=True).losses).all()


def fragile(X, y=None):
    ls = numpyro.param("ls", 0.5)
    g = dgp.gp("g", lambda A, B: jnp.exp(-0.5 * (A - B.T) ** 2 / ls), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, 0.3)), obs=y)


def test_a_fit_that_ends_far_above_its_lowest_loss_says_so():
    """Natural gradients of exponential tails: one step is too long, and none that is finite leads back."""
    from numpyro_dgp.inference.fit_loop import _warn_of_overshoot

    losses = np.array([2.5e13, 2.2e3, 2.1e3, *[4.6e29] * 9])
    with pytest.warns(UserWarning, match=r"the fit ends at a loss of 4.6e\+29, after 2.1e\+03 at step 3: a step was"):
        _warn_of_overshoot(losses)
    for sound in (losses[:3], losses[:1], losses[[3, 3]], np.append(losses, 2.0e3), np.array([-0.1, 500.0, 30.0])):
        _warn_of_overshoot(sound)


def hierarchy(y, plate=True, centred=True):
    """Groups with a common scale: at points for both, the density has no bound as the scale goes to zero."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    prior = dist.Normal(mu, tau) if centred else dist.Normal(0.0, 1.0)
    if plate:
        with numpyro.plate("groups", 4):
            e = numpyro.sample("e", prior)
    else:
        e = numpyro.sample("e", prior.expand([4]).to_event(1))
    e = e if centred else mu + tau * e
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(e, 1.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("plate", [True, False])
def test_a_funnel_at_a_point_is_warned_of(plate, key):
    program, y = partial(hierarchy, plate=plate), jnp.array([0.3, -0.2, 0.1, 0.4])
    svi = SVI(program, AutoDelta(program), optax.adam(0.1), dgp.ELBO())
    with pytest.warns(UserWarning, match="fit: 'tau' ends at .*, where all values of 'e' are equal: with a point for"):
        result = dgp.fit(svi, key, 150, y, progress_bar=False)
    assert result.params["tau_auto_loc"] < 0.05
    apart = partial(hierarchy, plate=plate, centred=False)
    dgp.fit(SVI(apart, AutoDelta(apart), optax.adam(0.1), dgp.ELBO()), key, 150, y, progress_bar=False)


@pytest.mark.slow
def test_values_whose_prior_has_another_scale_are_no_funnel(key):
    def program():
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 2.0))
        numpyro.sample("e", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        y = dist.Normal(jnp.zeros(3), tau).to_event(1)
        numpyro.sample("y", y, obs=0.003 * jnp.array([1.0, -1.0, 1.0]))

    svi = SVI(program, AutoDelta(program), optax.adam(0.1), dgp.ELBO())
    params = dgp.fit(svi, key, 150, progress_bar=False).params
    assert params["tau_auto_loc"] < 0.05
    assert params["e_auto_loc"].std() < params["tau_auto_loc"]


@pytest.mark.slow
def test_a_failed_factorisation_names_step_and_layer():
    """A kernel that stops being one, once the optimiser has made its lengthscale negative."""
    with pytest.raises(
        ValueError, match=r"fit: the loss became nan at step \d+: Cholesky factorisation of k\(Z, Z\) of gp 'g'"
    ):
        fit(make(fragile, optimiser=optax.sgd(3.0)), 200, X, Y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: fit(make(), 0, X, Y), "expected num_steps to be a positive integer, got 0"),
        (
            lambda p: fit(make(), 5, X, Y, checkpoint=dgp.Checkpoint(p, every=0)),
            "expected every to be a positive",
        ),
        (lambda p: fit(make(), 5, X, Y.at[2].set(jnp.nan)), r"expected finite data, got 1 NaN .* index \(2,\)"),
        (lambda p: fit(make(optimiser=optax.sgd(1e30)), 20, X, Y), "fit: (expected a finite loss|the loss became)"),
    ],
)
def test_bad_input(call, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        call(tmp_path / "fit.npz")


@pytest.mark.long
def test_a_checkpoint_of_another_fit_is_refused(tmp_path):
    file = tmp_path / "fit.npz"
    fit(make(), 3, X, Y, checkpoint=file)
    with pytest.raises(ValueError, match="expected a checkpoint of this fit"):
        fit(make(bayesian), 6, X, Y, checkpoint=file)
    dgp.save(file, {"a": jnp.ones(2)})
    with pytest.raises(ValueError, match="expected a checkpoint of this fit"):
        fit(make(), 6, X, Y, checkpoint=file)
    file.write_text("no arrays")
    with pytest.raises(ValueError, match=r"fit: expected a file of arrays, got no \.npz file, 9 bytes"):
        fit(make(), 6, X, Y, checkpoint=file)


def test_files_of_something_else(tmp_path):
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(ValueError, match=r"load: expected a file of arrays, got no \.npz file, 9 bytes"):
        dgp.load(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", plain=np.ones(2))
    with pytest.raises(ValueError, match=r"expected a file written by dgp\.save"):
        dgp.load(tmp_path / "other.npz")


def test_parameters_in_other_containers(tmp_path):
    """Lists and tuples come back where the file is told of them, with their dtypes and shapes."""
    file = tmp_path / "a.npz"
    params = {"a": jnp.zeros(()), "net": [{"w": jnp.ones((1, 2), jnp.float32), "none": None}, (jnp.arange(3), None)]}
    dgp.save(file, params)
    loaded = dgp.load(file, like=jax.tree.map(jnp.zeros_like, params))
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()
    with pytest.raises(ValueError, match=r"load: expected like= for parameters in other containers .*svi\.get_params"):
        dgp.load(file)
    with pytest.raises(ValueError, match=r"like= with the names of .*a\.npz, got another one at .*net"):
        dgp.load(file, like={"a": 0.0, "net": [{"v": 1.0}, (2.0,)]})
    with pytest.raises(ValueError, match=r"save: expected numbers at params\['net'\]\[0\], got str"):
        dgp.save(file, {"net": ["text"]})
    with pytest.raises(ValueError, match=r"expected arrays in dicts, got params\['net'\]\[0\]"):
        require_dicts({"net": [1.0]})


def test_parameters_that_a_file_would_not_give_back(tmp_path, x32):
    """What ``load`` could not read is not written, and what JAX would wrap around or make infinite is an error."""
    file = tmp_path / "a.npz"
    with pytest.raises(ValueError, match=r"save: expected numbers of a dtype that NumPy has .*\['a'\], got bfloat16"):
        dgp.save(file, {"a": jnp.ones(2, jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"save: expected text as names in dicts, got \('a', 'b'\)"):
        dgp.save(file, {("a", "b"): jnp.ones(2)})
    assert not file.exists()
    for value in (2**40 + 1, 1e300):  # they were 1 and inf
        dgp.save(file, {"a": np.array([0, value])})
        for like in (None, {"a": 0.0}):
            with pytest.raises(ValueError, match=r"load: expected parameters within the range of .*jax_enable_x64"):
                dgp.load(file, like=like)
    dgp.save(file, {"a": np.array([0.1, np.inf, np.nan]), "b": {1: 2}, "c": True})
    loaded = dgp.load(file)
    np.testing.assert_array_equal(loaded["a"], np.array([0.1, np.inf, np.nan], np.float32))
    assert int(loaded["b"][1]) == 2
    assert bool(loaded["c"])


@pytest.mark.smoke
def test_random_keys_of_another_kind_survive_a_checkpoint(tmp_path):
    """The state of a fit holds a key, and the file its numbers."""
    key = jax.random.key(3, impl="rbg")
    file = CheckpointFile.of("fit", tmp_path / "a.npz")
    file.write({"key": key, "x": jnp.ones(2)}, np.zeros(5))
    state, losses = file.resume({"key": jax.random.key(0, impl="rbg"), "x": jnp.zeros(2)})
    assert str(jax.random.key_impl(state["key"])) == "rbg"
    np.testing.assert_array_equal(jax.random.key_data(state["key"]), jax.random.key_data(key))
    assert len(losses) == 5


@pytest.mark.long
def test_a_finished_fit_lets_go_of_its_data():
    """Neither the compiled program nor the result holds the rows; what a guide holds is tested with the guides."""

    def model(X, y=None):
        slope = numpyro.sample("slope", dist.Normal())
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(slope * X[:, 0]), obs=y)

    def guide(X, y=None):
        numpyro.sample("slope", dist.Normal(numpyro.param("loc", 0.0), 1.0))

    rows, svi = X + 0.0, SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    kept = weakref.ref(rows)
    result = fit(svi, 3, rows, Y)
    del rows
    gc.collect()
    assert len(result.losses) == 3
    assert kept() is None


@pytest.mark.long
def test_particles_in_stages_end_at_the_same_bound():
    """Few particles first and more of them later, from the state of the first stage, as docs/bound.md shows it."""
    key, x = jax.random.key(0), jnp.linspace(-1, 1, 9)[:, None]
    y, points = jnp.sin(3 * x[:, 0]), dgp.Points(jnp.linspace(-1, 1, 4)[:, None])

    def program(X, y=None):
        f, g = (dgp.gp(name, dgp.kernels.RBF(1.3, 0.5), points) for name in "fg")
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=1e-2))
            numpyro.sample("y", dgp.Likelihood(g(h[:, None]), lambda v: dist.Normal(v, 0.3)), obs=y)

    guide = dgp.guides.InducingPoint(program)

    def bounds(stages):
        svi, state = SVI(program, guide, optax.adam(optax.cosine_decay_schedule(0.05, 1500)), dgp.ELBO()), None
        for particles, steps in stages:
            svi.loss = dgp.ELBO(particles)
            result = svi.run(key, steps, x, y, init_state=state, progress_bar=False)
            state = result.state
        assert state.optim_state[0] == 1500
        keys = jax.random.split(key, 400)
        return -jax.vmap(lambda key: dgp.ELBO().loss(key, result.params, program, guide, x, y))(keys)

    staged, constant = bounds([(1, 1000), (8, 500)]), bounds([(8, 1500)])
    error = np.hypot(staged.std(), constant.std()) / np.sqrt(400)
    assert abs(staged.mean() - constant.mean()) < 4 * error + 0.02  # and what Adam leaves of its own noise
