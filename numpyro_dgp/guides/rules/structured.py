r"""Rules for hidden layers whose values depend on the inducing values, on each other or on the layer below.

Each works with any kernel, likelihood and minibatch. Under ``dgp.ELBO`` inducing values are still integrated out.

**Dependence on the inducing values of the layer.**

.. math:: q(h_n \mid v) = N(T_n v + t_n, \Omega_n), \qquad p(h_n \mid v, x_n) = N(m(x_n) + a_n v, c_n)

While a belief :math:`q(v) = N(m, \Sigma)` is integrated out, a draw of h comes from the marginal
:math:`N(T_n m + t_n, \Omega_n + T_n \Sigma T_n^\top)`. The divergence, averaged over v, contains v only in the *gap*
between the two means, :math:`(T_n - a_n) v + t_n - m(x_n)`, which is Gaussian:

.. math:: E_{q(v)} \mathrm{KL}[q(h_n \mid v) \,\|\, p(h_n \mid v)] = \tfrac12 \Bigl(
          \frac{\Omega_n + E[\mathrm{gap}]^2 + \mathrm{var}[\mathrm{gap}]}{c_n} - 1 + \log \frac{c_n}{\Omega_n} \Bigr)

Source: Chamberlin (2016), sections 4.3 and 4.4, whitened; there with log N(h; f, s^2) in place of log p(h | v).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._checks import expect
from numpyro_dgp._data import own
from numpyro_dgp._fields import scale
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.function_values import FunctionValues, Values
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.joint_values import require_following
from numpyro_dgp.guides.rules.inducing_values import row_scaled_tril
from numpyro_dgp.guides.rules.rule import Rule, SiteContext, require_site
from numpyro_dgp.math.gaussians import expected_kl, log_density, log_determinant
from numpyro_dgp.math.linalg import cholesky, einsum, matmul, orthonormal, solve_lower, sum_event, tensordot

__all__ = ["ConditionalValues", "CorrelatedOutputs", "GivenBelow", "GivenInducing", "JointOutputs", "LinearValues"]


class ConditionalValues(FunctionValues):
    r"""q(h | v), independent over entries.

    Args:
        loc: means (..., P) or (...,), at the mean of v where a belief about v is integrated out.
        conditional_variance: :math:`\Omega`, of the same shape.
        belief_variance: variances that the belief adds, or ``None``.
        gap: variance of the gap under the belief, or ``None``.
        event_dim: 1 for vector-valued functions, 0 for scalar ones.
        weights: T, shape (P, N, M), or ``None`` where they are not kept.
    """

    pytree_data_fields = ("gap", "weights")

    def __init__(
        self,
        loc: Array,
        conditional_variance: Array,
        belief_variance: Array | None,
        gap: Array | None,
        event_dim: int,
        weights: Array | None = None,
    ) -> None:
        self.gap, self.weights = gap, weights
        super().__init__(loc, conditional_variance, belief_variance, event_dim)

    def expand(self, batch_shape: Any) -> ConditionalValues:
        shape = (*batch_shape, *self.event_shape)
        arrays = (self.loc, self.conditional_variance, self.belief_variance, self.gap)
        loc, variance, belief_variance, gap = (None if a is None else jnp.broadcast_to(a, shape) for a in arrays)
        return ConditionalValues(loc, variance, belief_variance, gap, self.event_dim, self.weights)  # type: ignore[arg-type]


class LinearValues(FunctionValues):
    r"""q(h | x) of entries that are linear in the inputs x of their layer and independent given x.

    Args:
        shift: t (..., P), or (...,) for a scalar function.
        slopes: G (..., P, D), or (..., D).
        variance: :math:`\Omega`, of the shape of ``shift``.
        inputs: x (..., D).
        event_dim: 1 for vector-valued functions, 0 for scalar ones.
    """

    pytree_data_fields = ("shift", "slopes", "at")

    def __init__(self, shift: Array, slopes: Array, variance: Array, inputs: Array, event_dim: int) -> None:
        self.shift, self.slopes, self.at = shift, slopes, inputs
        super().__init__(shift + along(slopes, inputs, event_dim), variance, event_dim=event_dim)

    def expand(self, batch_shape: Any) -> LinearValues:
        shape, D = (*batch_shape, *self.event_shape), self.at.shape[-1]
        wide = jnp.broadcast_to
        shift, variance = wide(self.shift, shape), wide(self.conditional_variance, shape)
        slopes, at = wide(self.slopes, (*shape, D)), wide(self.at, (*batch_shape, D))
        return LinearValues(shift, slopes, variance, at, self.event_dim)

    def mean_at(self, inputs: Array) -> Array:
        """The means at other inputs of the same rows."""
        return self.shift + along(self.slopes, inputs, self.event_dim)


def along(slopes: Array, inputs: Array, event_dim: int) -> Array:
    """Products G'x of slopes (..., P, D), or (..., D) where ``event_dim`` is 0, with inputs (..., D)."""
    return (slopes * (inputs[..., None, :] if event_dim else inputs)).sum(-1)


class CorrelatedOutputs(Values):
    r"""q(h | v), with correlations between the P outputs at each input.

    Args:
        loc: means (..., P), at the mean of v where a belief about v is integrated out.
        scale_tril: triangular roots of :math:`\Omega` (..., P, P).
        belief_covariance: covariances that the belief adds (..., P, P), or ``None``.
        gap: variances of the gap under the belief (..., P), or ``None``.
    """

    pytree_data_fields = ("scale_tril", "belief_covariance", "gap")

    def __init__(self, loc: Array, scale_tril: Array, belief_covariance: Array | None, gap: Array | None) -> None:
        self.scale_tril, self.belief_covariance, self.gap = scale_tril, belief_covariance, gap
        super().__init__(loc, 1, None)

    @property
    def variance(self) -> Array:
        own = jnp.square(self.scale_tril).sum(-1)  # diag Omega
        return own if self.belief_covariance is None else own + jnp.diagonal(self.belief_covariance, axis1=-2, axis2=-1)

    def from_white(self, white: Array) -> Array:
        root = self.scale_tril
        if self.belief_covariance is not None:
            # R R' = Omega + T Sigma T'
            covariance = matmul(root, root.mT) + self.belief_covariance
            root = cholesky(covariance, "the covariance of outputs of a hidden layer")
        return self.loc + matmul(root, white[..., None])[..., 0]

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        """Log density given v; only where v is known."""
        if intermediates:
            (white,) = intermediates
        else:
            white = solve_lower(self.scale_tril, (value - self.loc)[..., None])[..., 0]  # R^-1 (h - E[h])
        return log_density(white, log_determinant(self.scale_tril))

    def expand(self, batch_shape: Any) -> CorrelatedOutputs:
        def wide(a: Array | None, event: int) -> Array | None:
            return None if a is None else jnp.broadcast_to(a, (*batch_shape, *a.shape[a.ndim - event :]))

        return CorrelatedOutputs(*(wide(a, e) for a, e in self._with_event_dims()))  # type: ignore[arg-type]

    def _with_event_dims(self) -> list[tuple[Array | None, int]]:
        return [(self.loc, 1), (self.scale_tril, 2), (self.belief_covariance, 2), (self.gap, 1)]


def _gap(q: Any, p: FunctionValues) -> Array:
    """Expected square of the distance between the means of q(h | v) and p(h | v)."""
    return jnp.square(q.loc - p.loc) + (0 if q.gap is None else q.gap)  # E[gap]^2 + var[gap]


@kl_divergence.register(ConditionalValues, FunctionValues)
def _kl_conditional(q: ConditionalValues, p: FunctionValues) -> Array:
    return sum_event(expected_kl(q.conditional_variance, _gap(q, p), p.conditional_variance), q.event_dim)


@kl_divergence.register(CorrelatedOutputs, FunctionValues)
def _kl_correlated(q: CorrelatedOutputs, p: FunctionValues) -> Array:
    # The divergence of independent numbers with the variances of Omega, plus the loss of entropy by its correlations.
    own = jnp.square(q.scale_tril).sum(-1)
    correlations = 0.5 * jnp.log(own).sum(-1) - log_determinant(q.scale_tril)  # (sum log Omega_pp - log|Omega|) / 2
    return expected_kl(own, _gap(q, p), p.conditional_variance).sum(-1) + correlations


LinearWeights = Literal["free", "model"] | int | Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class GivenInducing(Rule):
    r"""Hidden values whose mean is linear in the inducing values of their layer.

    .. math:: q(h_{np} \mid v_p) = N(T_{np} v_p + t_{np}, \Omega_{np})

    Args:
        weights: how the rows :math:`T_{np}`, M numbers each, are tied.

            - ``"model"`` (default): the model's own :math:`k(x, Z)\, k(Z, Z)^{-1}`, whitened. :math:`t_{np}` is added
              to the model's mean and :math:`\Omega_{np}` multiplies its variance, so that the start, t = 0 and
              :math:`\Omega = 1`, is ``Propagate()``.
            - ``"free"``: a parameter per datum; T = 0, where it starts, is mean field.
            - a number J: low rank, :math:`T_{np}` is J numbers per datum and output times a basis :math:`O_p` (J, M).
            - a function from inputs (N, D) to (N, P, M), or (N, M) for a scalar function: amortised. It runs inside the
              guide, so that it may call ``numpyro.param`` or ``flax_module``.
        scale: initial standard deviation; with ``"model"``, relative to the model's.

    Where :class:`~numpyro_dgp.guides.Collapsed` takes this rule, T is at its optimum.

    Raises:
        ValueError: weights of another kind, a scale that is not positive, or a site that is not a hidden layer.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy(2)
        >>> guide = dgp.guides.InducingPoint(model, sites={"h": dgp.guides.GivenInducing(3)})  # rank 3
        >>> shapes = dgp.testing.parameter_shapes(guide, X, y)
        >>> {name: shape for name, shape in shapes.items() if name.startswith("h_auto")}
        {'h_auto_weights': (20, 2, 3), 'h_auto_basis': (2, 3, 5), 'h_auto_shift': (20, 2), 'h_auto_scale': (20, 2)}

    Source: Chamberlin (2016), sections 4.3 and A.6, whitened.
    """

    only_for: ClassVar[str | None] = "hidden"

    weights: LinearWeights = "model"
    scale: float | None = scale()

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_weights("GivenInducing", self.weights)

    def __call__(self, site: SiteContext) -> dist.Distribution:
        fn, function = require_hidden(self, site)
        event_dim = fn.event_dim
        A = _by_output(function, function.features(_rows(fn)))  # a_np (P, N, M)
        if self.weights == "model":
            # The model's weights: E[h | v] = m(x) + a v + t, so that only t is in the gap.
            T, start, base = A, lambda: jnp.zeros_like(site.initial()), 1.0
        else:
            # T_np (P, N, M)
            T = jnp.moveaxis(_weights(self.weights, site, fn, ()).reshape(-1, A.shape[0], A.shape[-1]), 1, 0)
            start, base = site.initial, 0.1
        shift = site.param("shift", start, event_dim=event_dim)
        scale = site.param(
            "scale",
            lambda: jnp.full_like(start(), self.scale or base),
            event_dim=event_dim,
            constraint=constraints.positive,
        )
        if self.weights == "model":
            variance = jnp.square(scale) * fn.conditional_variance  # Omega c
            return ConditionalValues(fn.loc + shift, variance, fn.belief_variance, None, event_dim, T)
        return given_inducing(fn, T, shift, jnp.square(scale))


def given_inducing(fn: Any, T: Array, shift: Array, variance: Array) -> ConditionalValues:
    """q(h | v) with weights T (P, N, M) of the inducing values, for the model's distribution ``fn`` of h."""
    v, A = fn.function.v, _by_output(fn.function, fn.function.features(_rows(fn)))
    loc = shift + _unrows(einsum("pnm,pm->np", T, v.loc.reshape(T.shape[0], -1)), fn)  # T m + t
    feature_variance, belief_variance, gap = v.feature_variances(), None, None
    if feature_variance is not None:
        # T Sigma T' of the draw, (T - a) Sigma (T - a)' of the gap
        belief_variance, gap = _unrows(feature_variance(T), fn), _unrows(feature_variance(T - A), fn)
    return ConditionalValues(loc, variance, belief_variance, gap, fn.event_dim, T)


@dataclasses.dataclass(frozen=True)
class JointOutputs(Rule):
    r"""Hidden values that depend on the inducing values of all outputs, and on each other:
    :math:`q(h_n \mid v) = N(T_n \mathrm{vec}(v) + t_n, \Omega_n)` with :math:`T_n` (P, P M) and
    :math:`\Omega_n` (P, P).

    Args:
        weights: ``"free"`` (default), a rank J, with one basis O (J, P M) for all outputs, or a function from inputs
            (N, D) to (N, P, P, M), as in :class:`GivenInducing`.
        scale: initial standard deviation.

    Raises:
        ValueError: weights of another kind, a scale that is not positive, or a site that is not a hidden layer with
            several outputs.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy(2)
        >>> guide = dgp.guides.InducingPoint(model, sites={"h": dgp.guides.JointOutputs()})
        >>> shapes = dgp.testing.parameter_shapes(guide, X, y)
        >>> {name: shape for name, shape in shapes.items() if name.startswith("h_auto")}
        {'h_auto_weights': (20, 2, 2, 5), 'h_auto_shift': (20, 2), 'h_auto_scale_tril': (20, 2, 2)}

    Source: Chamberlin (2016), sections 4.4, 4.9 and A.6, whitened; there q(v) is joint over outputs.
    """

    only_for: ClassVar[str | None] = "hidden"

    weights: LinearWeights = "free"
    scale: float = scale(0.1)

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_weights("JointOutputs", self.weights)
        expect(self.weights != "model", 'weights "free", a rank or a function', '"model"', "use GivenInducing()")

    def __call__(self, site: SiteContext) -> dist.Distribution:
        fn, function = require_hidden(self, site)
        expect(fn.event_dim == 1, f"several outputs at {site.name!r}", "a scalar function", "use GivenInducing()")
        P = fn.event_shape[0]
        T = _weights(self.weights, site, fn, (P,)).reshape(-1, P, P, function.size)  # T[n, p, q]: from v_q to h_np
        shift = site.param("shift", site.initial, event_dim=1)
        tril = site.param(
            "scale_tril",
            lambda: jnp.broadcast_to(self.scale * jnp.eye(P, dtype=shift.dtype), (*site.initial().shape, P)),
            event_dim=2,
            constraint=row_scaled_tril,
        )
        return joint_outputs(fn, T, shift, jnp.tril(tril))


def joint_outputs(fn: Any, T: Array, shift: Array, scale_tril: Array) -> CorrelatedOutputs:
    """q(h | v) with weights T (N, P, P, M) of all inducing values, for the model's distribution ``fn`` of h."""
    v, P = fn.function.v, T.shape[1]
    loc = shift + _unrows(einsum("npqm,qm->np", T, v.loc), fn)  # T vec(m) + t
    belief_covariance = gap = None
    if not v.known:
        A = _by_output(fn.function, fn.function.features(_rows(fn)))
        # T - a, with a[n, p, q] = 0 for p != q
        between = T - jnp.eye(P, dtype=A.dtype)[:, :, None] * jnp.moveaxis(A, 1, 0)[:, None]
        # sum_q T_q Sigma_q T_q' (N, P, P), because outputs of v are independent
        covariance = jax.vmap(lambda rows: v.feature_covariance(jnp.moveaxis(rows, 1, 0)).sum(0))
        belief_covariance = covariance(T).reshape(*fn.loc.shape, P)
        gap = _unrows(jnp.diagonal(covariance(between), axis1=-2, axis2=-1), fn)
    return CorrelatedOutputs(loc, scale_tril, belief_covariance, gap)


@dataclasses.dataclass(frozen=True)
class GivenBelow(Rule):
    r"""Hidden values that are linear in the layer below.

    .. math:: q(h_{np} \mid x_n) = N(G_{np}^\top x_n + t_{np}, \Omega_{np})

    Here x are all inputs of the layer, hidden values and data.

    Args:
        scale: initial standard deviation.
        slopes: initial slopes G (D, P), or (D,) for a scalar function; zero by default.

    Raises:
        ValueError: a scale that is not positive, slopes of another shape, or a site that is not a hidden layer.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy(2)
        >>> guide = dgp.guides.InducingPoint(model, sites={"h": dgp.guides.GivenBelow()})
        >>> shapes = dgp.testing.parameter_shapes(guide, X, y)
        >>> {name: shape for name, shape in shapes.items() if name.startswith("h_auto")}
        {'h_auto_slopes': (20, 2, 1), 'h_auto_shift': (20, 2), 'h_auto_scale': (20, 2)}

    Source: Chamberlin (2016), section 4.6.
    """

    only_for: ClassVar[str | None] = "hidden"

    scale: float = scale(0.1)
    slopes: Any = None

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "slopes", own(self.slopes))

    def __call__(self, site: SiteContext) -> dist.Distribution:
        fn, _ = require_hidden(self, site)
        x = fn.inputs
        D = x.shape[-1]
        expected = (D, *fn.event_shape)
        expect(
            self.slopes is None or jnp.shape(self.slopes) == expected,
            f"initial slopes at {site.name!r} of shape {expected}, inputs by outputs",
            np.shape(self.slopes),
            f"jnp.eye({D}) passes inputs on to as many outputs",
        )

        def slopes() -> Array:
            start = jnp.zeros((*site.initial().shape, D), x.dtype)
            return start if self.slopes is None else start + jnp.asarray(self.slopes, x.dtype).T

        G = site.param("slopes", slopes, event_dim=fn.event_dim + 1)
        shift = site.param("shift", site.initial, event_dim=fn.event_dim)
        scale = site.param(
            "scale",
            lambda: jnp.full_like(site.initial(), self.scale),
            event_dim=fn.event_dim,
            constraint=constraints.positive,
        )
        return LinearValues(shift, G, jnp.square(scale), x, fn.event_dim)  # N(G_n' x_n + t_n, Omega_n)


def _require_weights(rule: str, weights: Any) -> None:
    rank = isinstance(weights, int) and not isinstance(weights, bool) and weights > 0
    expect(
        rank or weights in ("free", "model") or callable(weights),
        'weights "free", "model", a positive rank or a function of the inputs',
        repr(weights),
        "the default ties them as the model does",
    )


def require_hidden(rule: Rule, site: SiteContext) -> tuple[FunctionValues, InducedFunction]:
    """The model's distribution of a hidden layer and its function."""
    require_site(FunctionValues, rule, site, "the values of a hidden layer")
    fn: Any = site.fn
    require_following(site.name, fn, dist.Normal())  # or any other distribution of its own
    return fn, fn.function


def _rows(fn: Any) -> Array:
    batch = fn.loc.shape[: fn.loc.ndim - fn.event_dim]  # a plate may hold several values of each row
    return jnp.broadcast_to(fn.inputs, (*batch, fn.inputs.shape[-1])).reshape(-1, fn.inputs.shape[-1])


def _unrows(values: Array, fn: FunctionValues) -> Array:
    return values.reshape(fn.loc.shape)


def _by_output(function: InducedFunction, A: Array) -> Array:
    """A of shape (P, N, M)."""
    return jnp.broadcast_to(A, (function.outputs or 1, *A.shape[-2:]))


def _weights(weights: LinearWeights, site: SiteContext, fn: Any, inner: tuple[int, ...]) -> Array:
    """T of shape (..., P) + ``inner`` + (M,)."""
    M, dtype, event_dim = fn.function.size, fn.loc.dtype, fn.event_dim
    if callable(weights):
        found, shape = jnp.asarray(weights(fn.inputs), dtype), (*fn.loc.shape, *inner, M)
        expect(
            found.shape == shape,
            f"a function from inputs {fn.inputs.shape} to weights {shape}, of every row, output and inducing value",
            found.shape,
            "the inducing values go last",
            at=f"weights of site {site.name!r}",
        )
        return found
    if isinstance(weights, str):
        start = lambda: jnp.zeros((*site.initial().shape, *inner, M), dtype)  # noqa: E731
        return site.param("weights", start, event_dim=event_dim + len(inner) + 1)
    numbers = site.param("weights", lambda: jnp.zeros((*site.initial().shape, weights), dtype), event_dim=event_dim + 1)
    if inner:
        basis = site.param("basis", lambda: orthonormal(weights, inner[0] * M, dtype).reshape(weights, *inner, M))
        return tensordot(numbers, basis)  # T_n = sum_j numbers_nj O_j (P, P M)
    shape = (*fn.event_shape, weights, M)
    basis = site.param("basis", lambda: jnp.broadcast_to(orthonormal(weights, M, dtype), shape))
    return matmul(numbers[..., None, :], basis)[..., 0, :]  # T_np = sum_j numbers_npj O_pj (M,)
