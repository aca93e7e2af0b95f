"""The expected log density of a program with Gaussian hidden layers, as quadratics in the inducing values.

The jaxpr of the program shows which input columns of a layer are Gaussian (hidden values or latents), and which arrays
depend on integrated values.

A Gaussian belief has one covariance for all outputs where all outputs have the same observations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._checks import expect, expect_kind, expected
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.analysis.sites import Message, is_likelihood, is_row_by_row, masks_around, site_kind, unwrap
from numpyro_dgp.bounds.collapsed import Observations, Quadratic, from_features, from_rows, with_features
from numpyro_dgp.functions.function_values import MixedValues
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.projections import Projection
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.functions.weights import Belief, FullBelief, InducingPrior
from numpyro_dgp.jaxprs.walk import walk
from numpyro_dgp.kernels.expectations import Integrate
from numpyro_dgp.math.gaussians import kl_full, log_density, log_determinant
from numpyro_dgp.math.linalg import einsum, jitter, matmul, solve_lower, times_transpose
from numpyro_dgp.math.quadratic_forms import quadratic_forms
from numpyro_dgp.math.whitening import residual_variance
from numpyro_dgp.means import ConstantMean, IdentityMean, LinearMean, ZeroMean

__all__ = [
    "Column",
    "Gaussian",
    "SharedBelief",
    "Use",
    "input_columns",
    "is_projected",
    "moved_by",
    "optimal_belief",
    "over_inputs",
    "use_of_likelihood",
    "uses_of",
    "with_conditional_variance",
]

# A column of the values of a site, (site, output), or None for a column of data.
Column = tuple[str, int] | None
# The columns of an array, the name of the primitive that computed it, or None where it holds numbers only.
_Origin = tuple[Column, ...] | str | None
_COPIES = frozenset(["copy", "convert_element_type"])
_SAME_SHAPE = frozenset(["broadcast_in_dim", "reshape"])


def input_columns(
    program: Callable[[dict[str, Array]], tuple[dict[str, Array], Any]], values: dict[str, Array]
) -> dict[str, tuple[Column, ...]]:
    """For every layer, which site and output each of its input columns is; ``None`` for columns of data.

    Args:
        program: from the values (..., N, P) of Gaussian sites to the inputs (..., N, D) of every layer, by name, and to
            everything else that must not depend on these values.
        values: examples; those of scalar layers are (..., N).

    Raises:
        ValueError: inputs computed from Gaussian values, or something else that depends on them.

    Example:
        >>> import jax.numpy as jnp
        >>> def program(values):
        ...     return {"y": jnp.concatenate([jnp.zeros((3, 1)), values["h"]], -1)}, None
        >>> input_columns(program, {"h": jnp.ones((3, 2))})
        {'y': (None, ('h', 0), ('h', 1))}
    """
    closed, shapes = jax.make_jaxpr(program, return_shape=True)(values)
    starts: list[_Origin] = [
        tuple((name, i) for i in range(v.shape[-1] if v.ndim > 1 else 1)) for name, v in sorted(values.items())
    ]
    found = walk(closed.jaxpr, starts, _apply, None)
    names = sorted(shapes[0])
    for name, columns in zip(names, found, strict=False):
        expect(
            not isinstance(columns, str),
            f"the inputs of the layer at {name!r} to be columns of data, latents and hidden layers side by side",
            f"the result of `{columns}` on Gaussian values",
            "use dgp.latent or jnp.concatenate([X, h], -1), or guides.InducingPoint(), which draws them",
        )
    expect(
        not any(columns is not None for columns in found[len(names) :]),
        "Gaussian latents and hidden layers to be inputs of layers only",
        "a program that uses one in a scale, a kernel, an observation or another site",
        "use guides.MeanField() for it",
    )
    width = {name: shapes[0][name].shape[-1] for name in names}
    return {n: (None,) * width[n] if c is None else c for n, c in zip(names, found, strict=False)}  # type: ignore[misc]


def moved_by(program: Callable[[Any], dict[str, Any]], values: Any) -> list[str]:
    """Which results of a program depend on its argument.

    Args:
        program: from arrays to arrays by name.
        values: examples of the arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> moved_by(lambda v: {"a": jnp.ones(3), "b": jnp.sin(v)}, jnp.ones(2))
        ['b']
    """
    closed, shapes = jax.make_jaxpr(program, return_shape=True)(values)
    starts = [True] * len(closed.jaxpr.invars)
    found = walk(closed.jaxpr, starts, lambda equation, moved: [any(moved)] * len(equation.outvars), False)
    names = [path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    return sorted({name for name, moved in zip(names, found, strict=True) if moved})


def _apply(equation: Any, origins: list[_Origin]) -> list[_Origin]:
    name, params = equation.primitive.name, equation.params
    shapes = [atom.aval.shape for atom in equation.invars]
    out = equation.outvars[0].aval.shape
    computed: list[_Origin] = [name] * len(equation.outvars)
    if all(origin is None for origin in origins):
        return [None] * len(equation.outvars)
    for origin in origins:
        if isinstance(origin, str):
            return [origin] * len(equation.outvars)
    widths = [s[-1] if s else 0 for s in shapes]
    parts: list[Any] = [(None,) * w if o is None else o for o, w in zip(origins, widths, strict=True)]
    is_column = len(parts[0]) == 1 and out == (*shapes[0], 1)  # the one column of a scalar layer
    if name in _COPIES or (name in _SAME_SHAPE and (out == shapes[0] or is_column)):
        return [origins[0]]
    if [len(part) for part in parts] != widths:
        return computed
    if name == "concatenate" and params["dimension"] == len(out) - 1:
        return [tuple(column for part in parts for column in part)]
    if name == "slice" and out[:-1] == shapes[0][:-1]:
        stride = (params["strides"] or (1,))[-1]
        return [parts[0][params["start_indices"][-1] : params["limit_indices"][-1] : stride]]
    return computed


class SharedBelief(Belief):
    r"""One full covariance for all outputs: :math:`q(v_p) = N(m_p, R R^\top)`.

    Args:
        loc: means (P, M).
        scale_tril: the lower triangular factor R (M, M).
    """

    arg_constraints = {"loc": constraints.real, "scale_tril": constraints.real}
    reparametrized_params = ["loc", "scale_tril"]

    def __init__(self, loc: Array, scale_tril: Array) -> None:
        self.loc, self.scale_tril = loc, scale_tril
        super().__init__((), jnp.shape(loc), validate_args=False)

    def from_white(self, white: Array) -> Array:
        return self.loc + matmul(white, self.scale_tril.T)  # m_p + R e_p, one row per output

    def around(self, loc: Array) -> SharedBelief:
        return SharedBelief(loc, self.scale_tril)

    def white(self, value: Array) -> Array:
        rows = (value - self.loc).reshape(-1, self.loc.shape[-1])
        return solve_lower(self.scale_tril, rows.T).T.reshape(value.shape)  # R^-1 (v_p - m_p)

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = intermediates[0] if intermediates else self.white(value)
        return log_density(white, log_determinant(self.scale_tril)).sum(-1)

    @property
    def variance(self) -> Array:
        return jnp.broadcast_to(jnp.square(self.scale_tril).sum(-1), self.loc.shape)

    def feature_variance(self, A: Array) -> Array:
        # a_n' R R' a_n (N, P), the same for all outputs unless their features differ
        S = times_transpose(self.scale_tril)[None]
        if A.ndim == 3:
            return jax.vmap(lambda A_p: quadratic_forms(S, A_p)[:, 0], out_axes=1)(A)
        return jnp.broadcast_to(quadratic_forms(S, A), (len(A), len(self.loc)))

    def feature_covariance(self, A: Array) -> Array:
        # A R (A R)'
        half = matmul(A, self.scale_tril)
        found = matmul(half, half.mT)
        return jnp.broadcast_to(found, (len(self.loc), *found.shape[-2:]))


@kl_divergence.register(SharedBelief, InducingPrior)
def _kl_shared_belief(q: SharedBelief, prior: InducingPrior) -> Array:
    return kl_full(q.loc, q.scale_tril).sum()


class Gaussian(NamedTuple):
    """Gaussian values of a site, independent over data.

    Args:
        loc: means (..., P).
        variance: their variances; of values that are linear in the inputs of their layer, given these.
        slopes: G of such values (N, P, D).
        covariances: by site, with its values of the same datum (N, P, Q), and with each other; none where they are
            zero.
    """

    loc: Array
    variance: Array
    slopes: Array | None = None
    covariances: Mapping[str, Array] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Use:
    """A likelihood or a hidden layer: values of a function under Gaussian noise, known or with Gaussian posteriors.

    Rows are data, all leading dimensions flattened: targets and their variances (N, P); slope, noise and weights
    broadcast against them. They have one column where outputs share it. With
    ``add_conditional`` the conditional variance Var[f | v] is added to that of the targets. Targets that are linear in
    the inputs have ``target_slopes`` G (N, P, D), the variance given the inputs, and their mean at the mean input.
    """

    function: Any
    inputs: Array
    target: Array
    target_variance: Array
    slope: Array
    noise: Array
    weights: Array
    add_conditional: bool = True
    target_slopes: Array | None = None

    def leaves(self) -> list[Any]:
        """All arrays but inputs and targets, which must not depend on Gaussian values."""
        return arrays_of([dataclasses.replace(self.function, v=None), self.slope, self.noise, self.weights])

    def quadratic(self, columns: tuple[Column, ...], known: dict[str, Gaussian], integrate: Integrate) -> Quadratic:
        """The expected log density as a quadratic in the whitened inducing values of every output: b (P, M), c (P,).

        Where they fall into blocks, in those of every block of every output: b (P L, M), c (P L,).
        """
        if self.function.blocked:
            return self._of_blocks(columns)
        return self.statistics(columns, known, integrate)[0]

    def _of_blocks(self, columns: tuple[Column, ...]) -> Quadratic:
        if any(column is not None for column in columns):
            raise _gaussian_inputs(self.function)
        f, (N, P) = self.function, self.target.shape
        rows = self.inputs.reshape(N, -1)
        A, blocks = f.blocks(rows)
        k = f.prior_variance(rows)

        def datum(a: Array, k: Array, data: Observations) -> Quadratic:
            data = jax.tree.map(lambda value: value[None], data)
            return from_features(a[None], k[None], data) if self.add_conditional else from_rows(a[None], data)

        def output(data: Observations) -> Quadratic:
            each = jax.vmap(datum)(A, k, data)
            return jax.tree.map(lambda q: jax.ops.segment_sum(q, blocks, f.groups), each)

        target = self.target - self.slope * f.mean_at(rows).reshape(N, -1)
        data = Observations(target, self.noise, self.slope, self.target_variance, self.weights)
        data = jax.tree.map(lambda a: jnp.broadcast_to(a, (N, P)), data)
        found = jax.vmap(output, 1)(data)
        return jax.tree.map(lambda q: q.reshape(-1, *q.shape[2:]), found)

    def statistics(
        self, columns: tuple[Column, ...], known: dict[str, Gaussian], integrate: Integrate
    ) -> tuple[Quadratic, Array]:
        """As :meth:`quadratic`, and expected features (P, N, M), or (N, M) where outputs share them."""
        f, P = self.function, self.target.shape[-1]
        exact = all(column is None for column in columns)
        rows = self.inputs.reshape(-1, self.inputs.shape[-1])
        if exact:
            # Rows a_n = L^-1 k(Z, x_n), and k(x_n, x_n) where f | v has variance that is not in the noise.
            A, k = f.features(rows), f.prior_variance(rows) if self.add_conditional and not f.determined else None
            target, tilts = self.target - self.slope * f.mean_at(rows).reshape(len(rows), -1), None
        elif f.at_points(None) is None:
            raise _gaussian_inputs(f)
        else:
            loc, variance = _moments(rows, columns, known)
            # m(h) = w'h + m_0: kappa m_0 goes to the target, and the tilt is zeta = G - kappa w.
            w, offset = affine_mean(f.mean, rows.shape[-1], P, rows.dtype)
            target, tilts = self.target - self.slope * offset, None
            if not isinstance(f.mean, ZeroMean | ConstantMean):
                tilts = jnp.broadcast_to(-self.slope[..., None] * w.T, (*self.target.shape, len(w)))
            if (G := self.target_slopes) is not None:
                target = target - einsum("npd,nd->np", G, rows)
                tilts = G if tilts is None else G + tilts

        def output(p: Any, data: Observations, tilt: Array | None) -> tuple[Quadratic, Array]:
            if exact:
                rows_of = A[p] if p is not None and A.ndim == 3 else A
                if k is None:
                    return from_rows(rows_of, data), rows_of
                variances = k[p] if k.ndim == 2 else k
                if (points := f.at_points(p)) is None or points.Z.shape[-1] != rows.shape[-1]:
                    return from_features(rows_of, variances, data), rows_of
                rows_of, left = at_inducing_inputs(rows_of, variances, points, rows)
                data = data._replace(y_variance=data.y_variance + jnp.square(data.slope) * left)
                return from_rows(rows_of, data), rows_of
            kernel, Z, whiten = f.at_points(p)
            return with_features(kernel, Z, whiten, loc, variance, data, tilt=tilt, integrate=integrate)

        N = self.target.shape[0]
        each = [jnp.broadcast_to(a, (N, a.shape[-1])) for a in (self.noise, self.slope, self.weights)]
        shared = all(a.shape[-1] == 1 for a in each) and not f.outputs_differ  # if so, all outputs have the same Phi
        noise, slope, weights = (a[:, 0] if shared else jnp.broadcast_to(a, (N, P)) for a in each)
        data = Observations(target, noise, slope, self.target_variance, weights)
        if f.outputs_differ:
            found = [output(p, *jax.tree.map(lambda a: a[:, p], (data, tilts))) for p in range(P)]  # noqa: B023
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)
        axis: Any = None if shared else 1
        ours: Any = Observations(1, axis, axis, 1, axis)  # type: ignore[arg-type]
        each_output: Any = (Quadratic(None if shared else 0, 0, 0, 0), None if shared else 0)  # type: ignore[arg-type]
        each_tilt = None if tilts is None else 1
        return jax.vmap(lambda data, tilt: output(None, data, tilt), (ours, each_tilt), each_output)(data, tilts)


def _gaussian_inputs(f: Any) -> ValueError:
    return expected(
        f"known inputs of layer {f.site!r}, a {type(f).__name__}",
        "Gaussian ones",
        "closed forms are for values on dgp.Points, not for slopes, sums, groups in a plate and other representations; "
        "use guides.InducingPoint()",
    )


def uses_of(sites: dict[str, Message], known: dict[str, Gaussian]) -> dict[str, Use]:
    """The hidden layers and Gaussian likelihoods of a run of the program, by site.

    Args:
        sites: its trace.
        known: posterior of every hidden layer.

    Raises:
        ValueError: a hidden layer without process noise, values drawn jointly, mixtures, another likelihood, or a layer
            that is not on ``dgp.Points``.
    """
    found = {}
    for name, site in sites.items():
        if site["type"] != "sample":
            continue
        fn = unwrap(site["fn"])
        if is_likelihood(fn):
            found[name] = _of_likelihood(name, fn, site)
        elif is_projected(fn):
            continue
        elif site_kind(site) == "hidden" or is_row_by_row(fn):
            found[name] = _of_hidden(name, fn, site, known)
    for name, use in found.items():
        expect(
            is_dense(use.function),
            f"the layer at {name!r} to be on dgp.Points or a dgp.Basis",
            type(use.function).__name__,
            "use guides.InducingPoint(); for a dgp.Grid dgp.rings.optimal_mean has the optimal means",
        )
    return found


def is_projected(fn: Any) -> bool:
    """Whether it is a distribution of the values of a projection, at each input on its own."""
    return is_row_by_row(fn) and isinstance(declared(unwrap(fn)).function, Projection)


def is_dense(function: Any) -> bool:
    """Whether closed forms may build matrices (M, M) for a random function, as on ``dgp.Points``."""
    return isinstance(function, InducedFunction) and function.dense


def with_conditional_variance(
    uses: dict[str, Use], columns: dict[str, tuple[Column, ...]], sites: dict[str, Message]
) -> dict[str, Use]:
    r"""The uses, with the conditional variance added to the noise of hidden layers whose inputs are data.

    .. math:: \log p(h_n \mid v, x_n) = \log N(h_n;\, m(x_n) + a_n v,\, c_n), \qquad
              c_n = k(x_n, x_n) - a_n a_n^\top + s^2 ,

    is quadratic in v like :math:`E[\log N(h_n; f(x_n), s^2)]`, and larger by Jensen's inequality. At Gaussian inputs
    :math:`c_n` is no constant, and the latter remains.
    """
    found = dict(uses)
    for name, use in uses.items():
        fn: Any = unwrap(sites[name]["fn"])
        if is_likelihood(fn) or any(column is not None for column in columns[name]):
            continue
        variance = _rows(fn.conditional_variance, fn.loc.shape, fn.event_dim)  # c_n
        alike = use.noise.shape[-1] == 1 and not use.function.outputs_differ
        noise = jnp.sqrt(variance[:, :1] if alike else variance)
        found[name] = dataclasses.replace(use, noise=noise, add_conditional=False)
    return found


def _of_likelihood(name: str, fn: Any, site: Message) -> Use:
    expect(
        not isinstance(fn.f_x, MixedValues),
        f"independent functions under the likelihood at {name!r}",
        "mixtures, f(x).mix(W)",
        "mixtures have no closed form here; use guides.InducingPoint() and natural gradients for q(v)",
    )
    expect(
        fn.normal_form() is not None and fn.collapse == "bound",
        f"a Gaussian likelihood at {name!r}, dist.Normal(a * v + b, scale)",
        fn,
        "use guides.InducingPoint(), and natural gradients for q(v)",
    )
    if jnp.size(site["value"]) > 1 and jnp.shape(site["value"]) != fn.f_x.loc.shape:
        raise expected(
            f"one observation of every function value at {name!r}, shape {fn.f_x.loc.shape}",
            f"shape {jnp.shape(site['value'])}",
            "repeat the inputs, one row for each, or use guides.InducingPoint()",
        )
    return _under_noise(fn, site, _process_noise(fn), add_conditional=True)


def _process_noise(fn: Any) -> ArrayLike:
    return 0.0 if fn.f_x.noise is None else jnp.square(fn.f_x.noise)


def use_of_likelihood(fn: Any, site: Message) -> Use:
    r"""A likelihood ``Normal(slope * v + offset, scale)`` at its observations, given the inducing values.

    The variance of f given v, process noise included, is a variance of the targets where the likelihood takes the
    expected log density, and part of the noise where it takes the log density of the mean (``collapse="marginal"``).
    """
    if fn.collapse == "bound":
        return _under_noise(fn, site, _process_noise(fn), add_conditional=True)
    use = _under_noise(fn, site, fn.f_x.conditional_variance, add_conditional=False)
    # log N(y; kappa a'v + b, s^2 + kappa^2 var[f | v])
    noise = jnp.sqrt(jnp.square(use.noise) + use.target_variance)
    return dataclasses.replace(use, noise=noise, target_variance=jnp.zeros_like(use.target))


def _under_noise(fn: Any, site: Message, variance: ArrayLike, add_conditional: bool) -> Use:
    """A likelihood ``Normal(slope * f + offset, scale)``, with a part of the variance of f."""
    values, form = fn.f_x, fn.normal_form()
    assert form is not None
    shape, event_dim, dtype = values.loc.shape, values.event_dim, values.loc.dtype
    slope, offset, scale = (_rows(jnp.asarray(a), shape, event_dim) for a in form)
    y = _rows(jnp.asarray(fn.complete(site["value"]), dtype), shape, event_dim) - offset  # y - b
    doubt = jnp.square(slope) * _rows(jnp.asarray(variance, dtype), shape, event_dim) + jnp.zeros_like(y)  # kappa^2 var
    return Use(values.function, values.inputs, y, doubt, slope, scale, _entry_weights(fn, site), add_conditional)


def at_inducing_inputs(A: Array, variances: Array, points: Any, rows: Array) -> tuple[Array, Array]:
    r"""Features (N, M) and variances given v (N,) of data, some of which are at inducing inputs.

    The jitter of k(Z, Z) is noise of the function itself at the inducing inputs, which a datum there shares. Counted as
    conditional variance, it would be divided by the noise variance of y, which is smaller in codes without noise.

    Args:
        A: features :math:`L^{-1} k(Z, x_n)` of the data (N, M).
        variances: :math:`k(x_n, x_n)` (N,).
        points: the kernel, the inducing inputs and :math:`L^{-1}`.
        rows: inputs (N, D).
    """
    M = A.shape[-1]
    same = (rows[:, None] == points.Z).all(-1)
    first = jnp.where(same, jnp.arange(M), M).min(1)  # m where x_n = z_m, M where x_n is none of Z
    there = first < M
    # L L' = k(Z, Z) + e I, hence L^-1 k(Z, z_m) = L'[:, m] - e L^-1[:, m]. With the last term added
    # back, a_n v = (L v)_m is the inducing value itself, and v leaves no variance.
    noise = jitter(A.dtype, M) * points.kernel.diag(points.Z).mean() * there.astype(A.dtype)
    A = A + noise[:, None] * points.whiten.mT.astype(A.dtype)[jnp.minimum(first, M - 1)]
    return A, jnp.where(there, 0.0, residual_variance(variances, jnp.square(A).sum(-1), M))


def optimal_belief(total: Quadratic, scalar: bool) -> FullBelief | SharedBelief:
    """The optimal q(v) from the quadratic of all uses of a function, with one covariance where outputs share it."""
    loc, root = total.optimum()
    if scalar:
        return FullBelief(loc[0], root.reshape(root.shape[-2:]))
    return SharedBelief(loc, root) if root.ndim == 2 else FullBelief(loc, root)


def _of_hidden(name: str, fn: Any, site: Message, known: dict[str, Gaussian]) -> Use:
    if not is_row_by_row(fn) or fn.noise is None:
        raise expected(
            f"process noise at hidden layer {name!r}, f(x, noise=s), and values drawn row by row",
            "no noise" if is_row_by_row(fn) else "f.joint(x)",
            "write f(x, noise=s), or use guides.InducingPoint(): without noise the bound is nearly singular",
        )
    shape, event_dim = fn.loc.shape, fn.event_dim
    target, variance = (_rows(a, shape, event_dim) for a in (known[name].loc, known[name].variance))
    noise, slopes = _rows(jnp.asarray(fn.noise, fn.loc.dtype), shape, event_dim), known[name].slopes
    slopes = None if slopes is None else slopes.reshape(*target.shape, -1)
    one = jnp.ones((1, 1), fn.loc.dtype)
    return Use(fn.function, fn.inputs, target, variance, one, noise, _weights(site), target_slopes=slopes)


def _rows(value: Array, shape: tuple[int, ...], event_dim: int) -> Array:
    """An array that broadcasts against function values of ``shape``, as (N, P), or (N, 1) where outputs share it."""
    P = shape[-1] if event_dim else 1
    if value.size == 1:
        return value.reshape(1, 1)
    return jnp.broadcast_to(value, shape).reshape(-1, P)


def _entry_weights(fn: Any, site: Message) -> Array:
    """Weights of entries (N, P), or (N, 1) and (1, 1), from masks and scales of the program and missing entries."""
    weights = _weights(site)
    if fn.observed is None:
        return weights
    shape, event_dim = fn.f_x.loc.shape, fn.f_x.event_dim
    columns = shape[-1] if fn.observed.shape[-1:] == shape[-1:] and event_dim else 1
    observed = jnp.broadcast_to(fn.observed, (*shape[: len(shape) - event_dim], *(columns,) * event_dim))
    return weights * observed.reshape(-1, columns)


def _weights(site: Message) -> Array:
    """Weights of rows (N, 1) or (1, 1), from masks and scales of the program."""
    scale = site["scale"]
    weights = jnp.asarray(1.0 if scale is None else scale)
    for fn in masks_around(site["fn"]):
        weights = weights * jnp.broadcast_to(fn._mask, fn.batch_shape)
    return weights.reshape(-1, 1)


def over_inputs(name: str, use: Use, columns: tuple[Column, ...], known: dict[str, Gaussian]) -> Gaussian:
    r"""The moments of values :math:`h = G x + t + \epsilon` of a hidden layer, averaged over its inputs.

    .. math:: \operatorname{Cov}[h] = G \operatorname{Cov}[x]\, G^\top + \Omega, \qquad
              \operatorname{Cov}[h, z] = G \operatorname{Cov}[x, z]

    with all other Gaussian values z of the same datum.

    Args:
        name: of the site of h.
        use: the layer.
        columns: of its inputs.
        known: moments of the sites, of those before it over their inputs.
    """
    loc, N, G = known[name].loc, len(use.target), use.target_slopes
    assert G is not None
    inputs = [c for c in columns if c is not None]
    sites = [s for s in known if any(_covariance(c, s, known, N) is not None for c in inputs)]

    def with_inputs(site: str) -> list[Array]:
        zero = jnp.zeros((N, known[site].loc.size // N), loc.dtype)
        found = [None if c is None else _covariance(c, site, known, N) for c in columns]
        return [zero if a is None else a for a in found]

    cross = {s: einsum("npd,ndq->npq", G, jnp.stack(with_inputs(s), 1)) for s in sites}
    if not cross:  # known inputs
        return Gaussian(loc, known[name].variance)
    zero = jnp.zeros_like(use.target)
    of_inputs = jnp.stack([zero if c is None else cross[c[0]][..., c[1]] for c in columns], 1)  # Cov[x, h] (N, D, P)
    own = jnp.eye(zero.shape[-1], dtype=loc.dtype) * use.target_variance[..., None]  # Omega
    own = own + einsum("npd,ndq->npq", G, of_inputs)
    variance = jnp.diagonal(own, axis1=-2, axis2=-1).reshape(loc.shape)
    return Gaussian(loc, variance, covariances=cross | {name: own})


def _covariance(column: tuple[str, int], site: str, known: dict[str, Gaussian], rows: int) -> Array | None:
    """Covariances (N, Q) of a column of values with the values at a site; ``None`` where they are independent."""
    name, index = column
    if site in known[name].covariances:
        return known[name].covariances[site][:, index]
    if name in known[site].covariances:
        return known[site].covariances[name][..., index]
    if name != site:
        return None
    variance = known[name].variance.reshape(rows, -1)
    return variance * (jnp.arange(variance.shape[-1]) == index)


def _moments(rows: Array, columns: tuple[Column, ...], known: dict[str, Gaussian]) -> tuple[Array, Array]:
    """Means (N, D) of inputs, and their variances (N, D), or covariances (N, D, D) where columns are correlated."""
    N, inputs = len(rows), [(d, column) for d, column in enumerate(columns) if column is not None]
    repeated = [column for _, column in inputs]
    expect(
        len(set(repeated)) >= len(repeated),
        "different columns as inputs of a layer",
        repeated,
        "a column that occurs twice only changes its lengthscale",
    )
    variance = jnp.zeros_like(rows)
    for d, (name, index) in inputs:
        variance = variance.at[:, d].set(known[name].variance.reshape(N, -1)[:, index])
    correlated = any(known[name].covariances.keys() & {other for other, _ in repeated} for name, _ in repeated)
    if not correlated:
        return rows, variance
    covariance = variance[..., None] * jnp.eye(rows.shape[-1], dtype=rows.dtype)
    for i, a in inputs:
        for j, (name, index) in inputs:
            found = _covariance(a, name, known, N)
            if i != j and found is not None:
                covariance = covariance.at[:, i, j].set(found[:, index])
    return rows, covariance


def affine_mean(mean: Callable[[Array], Array], dims: int, outputs: int, dtype: Any) -> tuple[Array, Array]:
    """Weights (D, P) and offset (P,) of a mean function.

    Raises:
        ValueError: a mean function that is not affine.
    """
    expect_kind(
        mean,
        ZeroMean | ConstantMean | IdentityMean | LinearMean,
        "a mean function among dgp.means.ZeroMean, ConstantMean, IdentityMean and LinearMean where inputs are Gaussian",
        "write it as one of these",
    )
    offset = mean(jnp.zeros((1, dims), dtype))[0]
    weights = mean(jnp.eye(dims, dtype=dtype)) - offset  # w_d = m(e_d) - m(0)
    return jnp.broadcast_to(weights, (dims, outputs)), jnp.broadcast_to(offset, (outputs,))


def arrays_of(tree: Any) -> list[Array]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
