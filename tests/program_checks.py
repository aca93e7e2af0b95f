"""Properties of a program under a guide: the same bound by every objective, predictions, files, and no dependence on
the order of rows, inducing inputs or columns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from generated_guides import GUIDES, guides_of
from generated_parts import SYMMETRIC
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import Predictive, Trace_ELBO
from numpyro.infer.util import log_density
from program_generator import random_program
from programs import agree

import numpyro_dgp as dgp
from numpyro_dgp.math.linalg import with_jitter

KEY = jax.random.key(0)
DRAWS = 400
SHARED = ("_basis", "_W0", "_b0", "_W1", "_b1")  # parameters of all rows together


class Case:
    """A program with its data, a guide, and parameters away from their start."""

    def __init__(self, program, name):
        self.program, self.choice, self.args = program, GUIDES[name], program.data()
        self.name, self.keep = name, jnp.arange(program.rows) % 3 != 1
        self.guide = self.choice.make(program, program.model)
        self.params = self._parameters(self.guide)
        self.values = jax.jit(self._draw)(self.params)
        self._density = jax.jit(self._log_density, static_argnums=3)
        self._bounds = {
            objective: jax.jit(partial(self._estimates, loss, self.guide))
            for objective, loss in (("dgp.ELBO", dgp.ELBO()), ("Trace_ELBO", Trace_ELBO()))
        }

    def _parameters(self, guide):
        positive = set()

        def shapes():
            sites = handlers.trace(handlers.seed(guide, KEY)).get_trace(*self.args, keep=self.keep)
            found = {name: site for name, site in sites.items() if site["type"] == "param"}
            positive.update(n for n, site in found.items() if site["kwargs"].get("constraint") is constraints.positive)
            return {name: site["value"] for name, site in found.items()}

        return _random(jax.eval_shape(shapes), positive)

    def _draw(self, params):
        guide = handlers.seed(handlers.substitute(self.guide, data=params), KEY)
        return guide(*self.args, keep=self.keep, whole=True)

    def _log_density(self, values, args, keep, flipped):
        settings = {"keep": keep, "flipped": flipped, "whole": True}
        return log_density(self.program.all_rows, args, settings, values)[0]

    def _estimates(self, objective, guide, params, args, keep):
        def one(key):
            return -objective.loss(key, params, self.program.model, guide, *args, keep=keep)

        return jax.vmap(one)(jax.random.split(KEY, DRAWS))

    def bounds(self, objective="dgp.ELBO", *, params=None, args=None, keep=None):
        """Estimates of the bound, by the same keys whatever the arguments."""
        new, old = (params, args, keep), (self.params, self.args, self.keep)
        return np.asarray(self._bounds[objective](*(b if a is None else a for a, b in zip(new, old, strict=True))))

    def bounds_of_any(self):
        """Of a guide with full Gaussians for inducing values, which are not at their optimum."""
        guide = GUIDES["mean field, full"].make(self.program, self.program.model)
        params = self._parameters(guide) | self.params
        return np.asarray(jax.jit(partial(self._estimates, dgp.ELBO(), guide))(params, self.args, self.keep))

    def density(self, *, values=None, args=None, keep=None, flipped=False):
        """Log joint density of the program."""
        new, old = (values, args, keep), (self.values, self.args, self.keep)
        given = [b if a is None else a for a, b in zip(new, old, strict=True)]
        return float(self._density(*given, flipped))

    def kernels(self, name):
        """The kernel of every output of a function, at the case's hyperparameters."""
        f = self.program.functions[name]
        if name == "g" and self.program.lengths:
            return [dgp.kernels.RBF(0.9, self.values["lengths"])] * (f.width or 1)
        found = f.kernels()
        return found if isinstance(found, list) else [found] * (f.width or 1)


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


def above(a, b):
    """Whether the mean of the first estimates is not below that of the second, by their own errors."""
    return np.mean(a) > np.mean(b) or same(a, b)


def close(case, rtol, **changes):
    """Whether the log density stays as it is; a random one only has to be finite."""
    found = case.density(**changes)
    return np.isfinite(found) if case.program.is_estimated else np.isclose(found, case.density(), rtol=rtol)


def objectives_agree(case):
    program, ours = case.program, case.bounds()
    assert np.isfinite(ours).all()
    if program.is_deterministic and case.name != "hyperparameters":
        assert np.ptp(ours) < 1e-9 * (1 + np.abs(ours).max())
    if case.choice.objectives == "agree":
        assert same(ours, case.bounds("Trace_ELBO"))
    elif case.choice.objectives == "above":
        assert above(ours, case.bounds("Trace_ELBO"))
    elif case.choice.objectives == "below":
        assert above(case.bounds("Trace_ELBO"), ours)
    elif not program.levels:
        assert above(ours, case.bounds_of_any())


def predictions_and_files(case, path):
    program = case.program
    dgp.save(path / "params.npz", case.params)
    again = dgp.load(path / "params.npz")
    np.testing.assert_array_equal(case.bounds(params=again), case.bounds())
    if program.is_exact:  # its values are those of the rows of the fit
        return
    fewer = program.data(rows=2)
    guide = case.guide.on(*case.args, keep=case.keep) if case.name == "collapsed" else case.guide
    predict = Predictive(program.model, guide=guide, params=case.params, num_samples=3)
    found = jax.jit(lambda X, X2, Z: predict(KEY, X, None, X2, None, Z))(fewer[0], fewer[2], case.args[4])
    event = case.args[1].shape[len(program.groups) + 1 :]
    assert found["y"].shape == (3, *program.groups, 2, *event)
    assert all(np.isfinite(values).all() for values in found.values())


def rows_in_any_order(case):
    program = case.program
    order = np.random.default_rng(1).permutation(program.rows)
    axis = len(program.groups)
    X, y, *rest = case.args
    args = jnp.take(X, order, axis), jnp.take(y, order, axis), *rest
    rows = {"w", "z", "a", "v", *program.hidden} | ({"h0"} if program.is_exact and program.levels else set())

    def moved(named):
        """Values and parameters of single rows; those of the second site stay."""
        return {
            name: jnp.take(value, order, axis)
            if name.split("_auto_")[0] in rows and "_2" not in name and not name.endswith(SHARED)
            else value
            for name, value in named.items()
        }

    params = moved(case.params)
    exact = "h0" if program.levels else "v"
    if program.is_exact and f"{exact}_auto_scale_tril" in params:  # over the whitened values of all rows together
        noise = program.functions[program.first].noise
        turns = [_turn(kernel, X, order, noise or 0.0) for kernel in case.kernels(program.first)]
        params[f"{exact}_auto_loc"] = _turned(turns, case.params[f"{exact}_auto_loc"])
        params[f"{exact}_auto_scale_tril"] = _turned_root(turns, case.params[f"{exact}_auto_scale_tril"])
    keep = case.keep[order]
    assert close(case, 1e-7, values=moved(case.values), args=args, keep=keep)
    assert same(case.bounds(params=params, args=args, keep=keep), case.bounds(), rtol=1e-7)


def inducing_points_in_any_order(case):
    program = case.program
    *data, Z = case.args
    values, params, others = dict(case.values), dict(case.params), []
    for (name, f), z in zip(program.functions.items(), Z, strict=True):
        order = np.random.default_rng(2).permutation(f.points)
        others.append(z[order] if f.form == "points" else z)
        if f.form != "points":
            continue
        turns = [_turn(kernel, z, order) for kernel in case.kernels(name)]
        values[name] = _turned(turns, values[name])
        if case.choice.turns:
            params[f"{name}_auto_loc"] = _turned(turns, params[f"{name}_auto_loc"])
            params[f"{name}_auto_scale_tril"] = _turned_root(turns, params[f"{name}_auto_scale_tril"])
    args = (*data, others)
    assert close(case, 1e-5, values=values, args=args)
    if case.choice.turns and not program.lengths:  # drawn, and whitening depends on them
        assert same(case.bounds(params=params, args=args), case.bounds(), rtol=1e-5)


def _turn(kernel, z, order, noise=0.0):
    """From the whitened values at z to those at z in another order: both have the same unwhitened ones."""
    K = np.asarray(with_jitter(kernel(z, z))) + noise**2 * np.eye(len(z))
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
    if program.levels.count("f0") != 1 or program.functions["f0"].width < 2 or program.skip or program.latent_at == 1:
        return
    above_it = (*program.levels, "g")[1]
    f, g = program.functions["f0"], program.functions[above_it]
    fixed = g.form != "points" or g.kernel not in SYMMETRIC or (above_it == "g" and program.lengths)
    if fixed or "identity" in (f.mean, g.mean):
        return
    *data, Z = case.args
    where = list(program.functions).index(above_it)
    args = (*data, [z[:, ::-1] if k == where else z for k, z in enumerate(Z)])
    values = {
        name: value[..., ::-1, :] if name == "f0" else value[..., ::-1] if name in ("h0", "h0_2") else value
        for name, value in case.values.items()
    }
    assert close(case, 1e-7, values=values, args=args, flipped=True)


def random_case(seed):
    """A random program under a random one of its guides."""
    program = random_program(seed)
    names = guides_of(program)
    return program, names[np.random.default_rng([seed, 1]).integers(len(names))]


def check(program, name, path):
    """All properties of a program under a guide."""
    case = Case(program, name)
    objectives_agree(case)
    predictions_and_files(case, path)
    rows_in_any_order(case)
    inducing_points_in_any_order(case)
    columns_in_any_order(case)
