"""Properties of every well-formed program, on random ones: the same bound by every objective, predictions, files, and
no dependence on the order of rows, inducing inputs or columns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import Predictive, Trace_ELBO
from numpyro.infer.util import log_density
from programs import agree
from random_programs import programs

import numpyro_dgp as dgp
from numpyro_dgp.algebra.linalg import with_jitter

KEY = jax.random.key(0)
DRAWS = 400
options = dict(  # the same programs in every run, and no search for a smaller one: each costs seconds
    derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate], print_blob=False,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


class Case:
    """A program with its data, a guide, and parameters away from their start."""

    def __init__(self, program):
        self.program, self.args = program, program.data()
        self.keep = jnp.arange(program.rows) % 3 != 1
        noisy = all(f.noise for f in program.hidden) and not program.drawn
        choice = program.seed % 3
        if choice == 0 and noisy:
            self.guide = dgp.guides.MeanField(program.model)
        elif choice == 1:
            self.guide = dgp.guides.InducingPoint(program.model, inducing=dgp.guides.Diagonal())
        else:
            self.guide = dgp.guides.InducingPoint(program.model, other=dgp.guides.Normal())
        program, guide, keep = self.program.model, self.guide, self.keep

        positive = set()

        def shapes():
            sites = handlers.trace(handlers.seed(guide, KEY)).get_trace(*self.args, keep=keep)
            found = {name: site for name, site in sites.items() if site["type"] == "param"}
            positive.update(n for n, site in found.items() if site["kwargs"].get("constraint") is constraints.positive)
            return {name: site["value"] for name, site in found.items()}

        self.params = _random(jax.eval_shape(shapes), positive)

        def draw(params):
            return handlers.seed(handlers.substitute(guide, data=params), KEY)(*self.args, keep=keep)

        def density(values, args, keep, flipped):
            return log_density(program, args, {"keep": keep, "flipped": flipped}, values)[0]

        def bounds(objective, params, args, keep):
            def one(key):
                return -objective.loss(key, params, program, guide, *args, keep=keep)

            return jax.lax.map(one, jax.random.split(KEY, DRAWS), batch_size=100)

        self.values = jax.jit(draw)(self.params)
        self._density = jax.jit(density, static_argnums=3)
        self._bounds = {
            "dgp.ELBO": jax.jit(partial(bounds, dgp.ELBO())),
            "Trace_ELBO": jax.jit(partial(bounds, Trace_ELBO())),
        }

    def bounds(self, objective="dgp.ELBO", *, params=None, args=None, keep=None):
        """Estimates of the bound, by the same keys whatever the arguments."""
        new, old = (params, args, keep), (self.params, self.args, self.keep)
        return np.asarray(self._bounds[objective](*(b if a is None else a for a, b in zip(new, old, strict=True))))

    def density(self, *, values=None, args=None, keep=None, flipped=False):
        """Log joint density of the program."""
        new, old = (values, args, keep), (self.values, self.args, self.keep)
        given = [b if a is None else a for a, b in zip(new, old, strict=True)]
        return float(self._density(*given, flipped))


def _random(shapes, positive):
    """Parameters of a guide, of these shapes, near a standard normal distribution."""
    found, rng = {}, np.random.default_rng(3)
    for name, leaf in sorted(shapes.items()):
        value = 0.15 * rng.normal(size=leaf.shape)
        if name.endswith("scale_tril"):
            value = np.tril(value) + 0.5 * np.eye(leaf.shape[-1])
        elif name.endswith("scale"):
            value = np.abs(0.5 + value)
        elif name in positive:
            value = np.exp(value)
        found[name] = jnp.asarray(value, leaf.dtype)
    return found


def same(a, b, rtol=1e-6):
    """Equal where there is nothing to draw, else of equal mean by their own errors."""
    if np.ptp(a) < 1e-9 * (1 + np.abs(a).max()) and np.ptp(b) < 1e-9 * (1 + np.abs(b).max()):
        return np.isclose(a[0], b[0], rtol=rtol)
    return agree(a, b, width=5.0)


def objectives_agree(case):
    ours = case.bounds()
    assert np.isfinite(ours).all()
    assert not case.program.is_deterministic or case.program.scale or np.ptp(ours) < 1e-9 * (1 + np.abs(ours).max())
    assert same(ours, case.bounds("Trace_ELBO"))


def predictions_and_files(case, path):
    program = case.program
    fewer = program.data(rows=2)
    predict = Predictive(program.model, guide=case.guide, params=case.params, num_samples=3)
    found = jax.jit(lambda X, X2, Z: predict(KEY, X, None, X2, None, Z))(fewer[0], fewer[2], case.args[4])
    event = case.args[1].shape[len(program.plates) + 1 :]
    assert found["y"].shape == (3, *program.plates, 2, *event)
    assert all(np.isfinite(values).all() for values in found.values())
    dgp.save(path / "params.npz", case.params)
    again = dgp.load(path / "params.npz")
    np.testing.assert_array_equal(case.bounds(params=again), case.bounds())


def rows_in_any_order(case):
    program = case.program
    order = np.random.default_rng(1).permutation(program.rows)
    axis = len(program.plates)
    X, y, *rest = case.args
    args = jnp.take(X, order, axis), jnp.take(y, order, axis), *rest

    def moved(named):
        """Values and parameters of single rows; those of the second site stay."""
        return {
            name: jnp.take(value, order, axis) if name[0] in "hvw" and "_2" not in name else value
            for name, value in named.items()
        }

    keep = case.keep[order]
    assert np.isclose(case.density(values=moved(case.values), args=args, keep=keep), case.density(), rtol=1e-9)
    assert same(case.bounds(params=moved(case.params), args=args, keep=keep), case.bounds(), rtol=1e-9)


def inducing_points_in_any_order(case):
    program = case.program
    *data, Z = case.args
    values, params, others = dict(case.values), dict(case.params), []
    for (name, f), z in zip(program.functions.items(), Z, strict=True):
        order = np.random.default_rng(2).permutation(f.points)
        kernels = f.kernels() if isinstance(f.kernels(), list) else [f.kernels()] * (f.width or 1)
        turns = [_turn(kernel, z, order) for kernel in kernels]
        others.append(z[order])
        values[name] = _turned(turns, values[name])
        params[f"{name}_auto_loc"] = _turned(turns, params[f"{name}_auto_loc"])
        if f"{name}_auto_scale_tril" in params:
            params[f"{name}_auto_scale_tril"] = _turned_root(turns, params[f"{name}_auto_scale_tril"])
    args = (*data, others)
    assert np.isclose(case.density(values=values, args=args), case.density(), rtol=1e-5)
    if all(f"{name}_auto_scale_tril" in params for name in program.functions):
        assert same(case.bounds(params=params, args=args), case.bounds(), rtol=1e-5)


def _turn(kernel, z, order):
    """From the whitened values at z to those at z in another order: both have the same unwhitened ones."""
    K = np.asarray(with_jitter(kernel(z, z)))
    return np.linalg.solve(np.linalg.cholesky(K[np.ix_(order, order)]), np.linalg.cholesky(K)[order])


def _turned(turns, v):
    rows = np.atleast_2d(v)
    return jnp.array(np.stack([turn @ row for turn, row in zip(turns, rows, strict=True)]).reshape(v.shape))


def _turned_root(turns, root):
    S = np.asarray(root).reshape(-1, *root.shape[-2:])
    found = [np.linalg.cholesky(t @ r @ r.T @ t.T) for t, r in zip(turns, S, strict=True)]
    return jnp.array(np.stack(found).reshape(root.shape))


def columns_in_any_order(case):
    """Of the first hidden layer, with the columns of the layer above it."""
    program = case.program
    if not program.hidden or program.hidden[0].width < 2 or program.hidden[0].mean == "identity":
        return
    if [*program.hidden[1:], program.last][0].mean == "identity":
        return
    *data, Z = case.args
    args = (*data, [Z[0], Z[1][:, ::-1], *Z[2:]])
    values = {
        name: value[..., ::-1, :] if name == "f0" else value[..., ::-1] if name in ("h0", "h0_2") else value
        for name, value in case.values.items()
    }
    assert np.isclose(case.density(values=values, args=args, flipped=True), case.density(), rtol=1e-9)


def check(program, path):
    case = Case(program)
    objectives_agree(case)
    predictions_and_files(case, path)
    rows_in_any_order(case)
    inducing_points_in_any_order(case)
    columns_in_any_order(case)


@settings(max_examples=1, **options)
@given(program=programs())
def test_a_few(program, tmp_path_factory):
    check(program, tmp_path_factory.mktemp("params"))


@pytest.mark.slow
@settings(max_examples=15, **options)
@given(program=programs())
def test_many(program, tmp_path_factory):
    check(program, tmp_path_factory.mktemp("params"))
