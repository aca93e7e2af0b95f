r"""Distributions of function values: at each input on its own (``FunctionValues``, which ``f(x)`` returns), and at all
inputs of a call together (``ProcessValues``, where the rows are part of the event).

The first represent :math:`p(f(x) \mid v)` and, while a :class:`~numpyro_dgp.extend.Belief` q(v) is
integrated out, the variance that q(v) adds, ``belief_variance``. Samples come from the sum. ``log_prob`` is
:math:`E_{q(v)}[\log p(f(x) \mid v)]`, the log density itself when v is known.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._checks import expect, expected, require_finite
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike, pytree
from numpyro_dgp.functions.open_plates import require_outside
from numpyro_dgp.functions.site_distribution import SiteDistribution, declared
from numpyro_dgp.math.gaussians import expected_kl
from numpyro_dgp.math.linalg import computed_once, matmul, safe_sqrt, sum_event

__all__ = [
    "FunctionValues",
    "MixedValues",
    "NotAnArray",
    "Origin",
    "ProcessValues",
    "Values",
    "follows",
]


class _Shape:
    """The method ``fn.shape()`` of a distribution, with a readable error where a program uses it as an array's
    tuple."""

    def __init__(self, owner: NotAnArray) -> None:
        self.owner = owner

    def __call__(self, sample_shape: tuple[int, ...] = ()) -> tuple[int, ...]:
        return tuple(sample_shape) + self.owner.batch_shape + self.owner.event_shape

    def __iter__(self) -> NoReturn:
        self.owner.refuse_array()

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


class NotAnArray(SiteDistribution):
    """A distribution that raises a readable error where a program uses it as an array: sample it or integrate it."""

    __repr__ = brief

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return _Shape(self)

    def refuse_array(self, *others: Any) -> NoReturn:
        """Raise the error.

        Args:
            *others: what it was combined with.

        Raises:
            ValueError: always.
        """
        raise expected(
            "an array",
            f"the distribution {type(self).__name__}",
            'draw it, h = numpyro.sample("h", f(x)), or integrate it, dgp.Likelihood(f(x), ...)',
            at="f(x)",
        )

    __jax_array__ = __getitem__ = refuse_array
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse_array
    __lt__ = __le__ = __gt__ = __ge__ = refuse_array
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = refuse_array


@pytree
class Origin:
    """Where values come from: a random function at inputs, with process noise.

    Args:
        function: the random function.
        inputs: where it was called (..., D).
        noise: standard deviation of the process noise, a number or one per output; ``None`` for none.
    """

    function: Any
    inputs: Array
    noise: ArrayLike | None = None


class Values(NotAnArray):
    """Gaussian function values, drawn from standard normal numbers, with a reference to the function and its inputs."""

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields: tuple[str, ...] = ("loc", "origin")
    pytree_aux_fields: tuple[str, ...] = ("follows_model",)
    loc: Array
    origin: Origin | None
    correlated_parts: frozenset[int] = frozenset()
    """Of several values, those whose correlation with others is known."""
    each_by_its_own = False
    """Whether each number of a draw depends on one standard normal number, the one at its place."""

    def __init__(self, loc: Array, event_dim: int, origin: Origin | None) -> None:
        self.loc, self.origin, self.follows_model = loc, origin, False
        split = loc.ndim - event_dim
        super().__init__(loc.shape[:split], loc.shape[split:])

    @property
    def function(self) -> Any:  # type: ignore[override]
        """The random function, or ``None`` for values without one."""
        return None if self.origin is None else self.origin.function

    @property
    def inputs(self) -> Any:  # type: ignore[override]
        """The inputs it was called on (..., D)."""
        return None if self.origin is None else self.origin.inputs

    @property
    def noise(self) -> Any:  # type: ignore[override]
        """Standard deviation of the process noise."""
        return None if self.origin is None else self.origin.noise

    @property
    def v(self) -> Any:
        """The weights of the function; ``None`` for one without."""
        return getattr(self.function, "v", None)

    @property
    def of_prior(self) -> bool:
        """Whether these are values of a process without weights, under its prior."""
        return self.site_kind == "exact" and self.v is None

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    @property
    def mean(self) -> Array:
        return self.loc

    def propagated(self) -> Self:
        """The same distribution for a guide, with ``follows_model``: q equals the model's conditional, so the two
        cancel exactly in a bound, without rounding."""
        found = copy.copy(self)
        found.follows_model = True
        return found

    @property
    def white_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal numbers behind a draw."""
        return self.batch_shape + self.event_shape

    def from_white(self, white: Array) -> Array:
        """The draw for given standard normal numbers of this shape."""
        raise NotImplementedError

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        # Held: XLA would generate the numbers again in every fusion that uses them.
        white = computed_once(jax.random.normal(key, self.shape(sample_shape), self.loc.dtype))
        return self.from_white(white), [white]

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.sample_with_intermediates(key, sample_shape)[0]


def follows(q: Any) -> bool:
    """Whether a guide's distribution of function values is the model's own conditional."""
    return declared(q).follows_model


class FunctionValues(Values):
    r"""Values of P independent functions at each input on its own.

    .. math:: h_{np} \sim N(\mu_{np},\; c_{np} + s_{np})

    Args:
        loc: means, (..., P), or (...,) for a scalar function.
        conditional_variance: variances given v, including process noise; broadcasts against ``loc``.
        belief_variance: :math:`s = \operatorname{Var}_{q(v)} E[f \mid v]`, what a belief about v adds, or ``None``.
        event_dim: 1 for vector-valued functions, 0 for scalar ones.
        total: the sum of the two variances, if it was computed directly.
        origin: which function these are values of, and where.
    """

    pytree_data_fields: tuple[str, ...] = ("conditional_variance", "belief_variance", "total")
    site_kind = "hidden"
    suggested_rule = "dgp.guides.Propagate()"
    each_by_its_own = True
    correlated_outputs: ClassVar[bool] = False
    """Whether the outputs at an input are correlated, as of mixtures."""

    def __init__(
        self,
        loc: Array,
        conditional_variance: Array,
        belief_variance: Array | None = None,
        event_dim: int = 1,
        total: Array | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.belief_variance, self.total = belief_variance, total
        self.conditional_variance = jnp.broadcast_to(conditional_variance, loc.shape)
        super().__init__(loc, event_dim, origin)

    @property
    def variance(self) -> Array:
        if self.total is not None:
            return self.total
        return self.conditional_variance + (0 if self.belief_variance is None else self.belief_variance)

    def from_white(self, white: Array) -> Array:
        return self.loc + safe_sqrt(self.variance) * white  # mu + sqrt(c + s) eps; slope zero at variance zero

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        c = self.conditional_variance
        if intermediates and self.belief_variance is None:
            square = jnp.square(intermediates[0])  # of a draw, (h - mu)^2 / c = eps^2 to the last digit
        else:
            # E_q (h - mu(v))^2 / c = ((h - E_q mu(v))^2 + Var_q[mu(v)]) / c
            square = (jnp.square(value - self.loc) + (0 if self.belief_variance is None else self.belief_variance)) / c
        return sum_event(-0.5 * (square + jnp.log(2 * math.pi * c)), self.event_dim)  # E_q log N(h; mu(v), c)

    def expand(self, batch_shape: Any) -> FunctionValues:
        shape = (*batch_shape, *self.event_shape)
        parts = (self.belief_variance, self.total)
        belief_variance, total = (None if a is None else jnp.broadcast_to(a, shape) for a in parts)
        arrays = jnp.broadcast_to(self.loc, shape), jnp.broadcast_to(self.conditional_variance, shape)
        found = type(self)(*arrays, belief_variance, self.event_dim, total, self.origin)
        found.follows_model = self.follows_model
        return found

    def marginals(self) -> FunctionValues:
        """The marginal distribution at each input: the distribution itself here, without correlations for joint
        values."""
        return self

    def unmixed(self, conditional: Callable[..., Any]) -> tuple[FunctionValues, Callable[..., Any]]:
        """The values of the functions that these are mixtures of, and a conditional of the mixtures as one of those."""
        return self, conditional

    def of_innovations(self, conditional: Callable[..., Any]) -> Callable[..., Any]:
        """A conditional of the values, as one of the independent numbers that a likelihood integrates."""
        return conditional

    def of_columns(self, conditional: Callable[..., Any]) -> Callable[[Array], Any]:
        """A conditional of the values of each function, as one of all columns."""
        return conditional

    def mix(self, W: ArrayLike) -> MixedValues:
        r"""Values of P linear mixtures of the Q functions, :math:`f(x) = W g(x)`, inside a ``Likelihood``.

        .. math:: E[f] = W \mu, \qquad \operatorname{Cov}[f] = W \,\mathrm{diag}(c + s)\, W^\top

        Args:
            W: weights (P, Q): fixed, a ``numpyro.param`` or the value of a site.

        Raises:
            ValueError: weights that are not a finite matrix with one column per function, or mixed values used as
                the site of a hidden layer, which draws the functions and mixes the draw.

        Example:
            >>> g = FunctionValues(jnp.zeros((1, 2)), jnp.ones((1, 2)))
            >>> print(g.mix(jnp.array([[1.0, 1.0], [0.0, 2.0], [3.0, 0.0]])).variance)
            [[2. 4. 9.]]

        Source: Salimbeni (2020), sections 4.2.3 and 5.1.5.
        """
        return MixedValues(self, W)


class MixedValues(FunctionValues):
    r"""Linear mixtures of independent functions, :math:`f(x) = W g(x)`: correlated outputs under a ``Likelihood``.

    ``g(x).mix(W)`` makes it. With :math:`g_q(x) \sim N(\mu_q, \sigma_q^2)`, where :math:`\sigma_q^2` is the total
    variance, the mixtures have marginals
    :math:`f_p(x) \sim N(\sum_q W_{pq} \mu_q, \sum_q W_{pq}^2 \sigma_q^2)`, which is all that the expected log density
    of a likelihood that factorises over outputs needs: ``loc``, ``conditional_variance`` and ``belief_variance`` are
    the marginal ones. Draws and the log density of several outputs together use their covariance
    :math:`W \,\mathrm{diag}(\sigma^2)\, W^\top`. A shared kernel k gives the outputs the covariance
    :math:`(W W^\top) \otimes k`, one kernel for each the linear model of coregionalisation,
    :math:`\sum_q W_{pq} W_{p'q} k_q`.

    Args:
        functions: the values that are mixed, event shape (Q,).
        W: weights (P, Q).

    Raises:
        ValueError: weights that are not a matrix with one column per function, or not finite; used as the site of a
            hidden layer.

    Source: Salimbeni (2020), sections 4.2.3 and 5.1.5.
    """

    pytree_data_fields = ("functions", "W")
    correlated_outputs = True

    def __init__(self, functions: FunctionValues, W: ArrayLike) -> None:
        Q = functions.event_shape
        expect(
            Q and np.ndim(W) == 2 and np.shape(W)[1] == Q[0],
            "weights of shape (P, Q) for values of Q functions",
            f"weights {np.shape(W)} for values {Q}",
            "dgp.gp(..., outputs=Q) has Q functions; P is the number of columns of y",
            at="mix",
        )
        require_finite("weights of mix", W, "check the data the directions came from")
        self.functions, self.W = functions, jnp.asarray(W, functions.loc.dtype)
        # Var[f_p] = sum_q W_pq^2 sigma_q^2, part by part of the variance.
        squares = jnp.square(self.W).T
        parts = (functions.belief_variance, functions.total)
        belief_variance, total = (None if a is None else matmul(a, squares) for a in parts)
        variance = matmul(functions.conditional_variance, squares)
        super().__init__(self.mixed(functions.loc), variance, belief_variance, total=total, origin=functions.origin)

    def mixed(self, g: Array) -> Array:
        """Mixtures (..., P) of numbers (..., Q), one per function."""
        return matmul(g, self.W.T)

    def unmixed(self, conditional: Callable[..., Any]) -> tuple[FunctionValues, Callable[..., Any]]:
        return self.functions, lambda g: conditional(self.mixed(g))

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        return self.mixed(self.functions.sample(key, sample_shape)), []

    def observed(self, mean: Array, slope: Array, scale: ArrayLike) -> dist.LowRankMultivariateNormal:
        r"""The distribution of all columns of y together, the mixtures integrated out.

        Given the mixtures, :math:`y_p \sim N(\alpha_p f_p + \beta_p, \tau_p^2)`. Then y is Gaussian with the mean
        :math:`\alpha \odot W \mu + \beta` and the covariance
        :math:`G \,\mathrm{diag}(\sigma^2)\, G^\top + \mathrm{diag}(\tau^2)`, :math:`G = \mathrm{diag}(\alpha)\, W`:
        one of rank Q plus a diagonal.

        Args:
            mean: of y at the means of the mixtures (..., P).
            slope: :math:`\alpha` (..., P).
            scale: :math:`\tau`, broadcasts against ``mean``.

        Example:
            >>> g = FunctionValues(jnp.zeros((1, 2)), jnp.ones((1, 2))).mix(jnp.array([[1.0, 0.0], [1.0, 1.0]]))
            >>> print(g.observed(g.loc, jnp.ones((1, 2)), 0.5).covariance_matrix)
            [[[1.25 1.  ]
              [1.   2.25]]]
        """
        # G diag(sigma), G = diag(alpha) W (..., P, Q), and tau^2 (..., P)
        factor = (slope[..., None] * self.W) * safe_sqrt(self.functions.variance)[..., None, :]
        diagonal = jnp.square(jnp.broadcast_to(scale, mean.shape))
        return dist.LowRankMultivariateNormal(mean, factor, diagonal, validate_args=False)

    def log_prob_observed(
        self, y: Array, mean: Array, slope: Array, scale: ArrayLike, observed: Array | None = None
    ) -> Array:
        r"""The log density of y under :meth:`observed`, for the observed columns or all.

        A column that is left out gets a factor :math:`N(y_p; y_p, 1)`, which is divided out again.
        """
        if observed is None:
            return self.observed(mean, slope, scale).log_prob(y)
        observed, slope, scale = (jnp.broadcast_to(a, mean.shape) for a in (observed, slope, scale))
        # alpha_p = 0 and tau_p = 1: the factor of a column that is left out is N(y_p; y_p, 1).
        kept = self.observed(mean, jnp.where(observed, slope, 0.0), jnp.where(observed, scale, 1.0))
        left_out = 0.5 * math.log(2 * math.pi) * (~observed).sum(-1)
        return kept.log_prob(jnp.where(observed, y, mean)) + left_out

    def expand(self, batch_shape: Any) -> MixedValues:
        return MixedValues(self.functions.expand(batch_shape), self.W)

    def propagated(self) -> NoReturn:
        _refuse_site()

    def log_prob(self, value: Array, intermediates: Any = None) -> NoReturn:
        _refuse_site()

    def from_white(self, white: Array) -> NoReturn:
        _refuse_site()


def _refuse_site() -> NoReturn:
    raise expected(
        "mixed values inside dgp.Likelihood",
        "them at a site",
        'for a hidden layer mix a draw, g = numpyro.sample("g", f(x)); h = mean(x) + g @ P.T',
        at="mix",
    )


@kl_divergence.register(FunctionValues, FunctionValues)
def _kl_values(q: FunctionValues, p: FunctionValues) -> Array:
    r"""KL between independent Gaussians, with :math:`E_{q(v)}` of the second where its mean is uncertain."""
    # E (m_q - m_p(v))^2 = (m_q - E m_p(v))^2 + Var[m_p(v)]
    square = jnp.square(q.loc - p.loc) + (0 if p.belief_variance is None else p.belief_variance)
    return sum_event(expected_kl(q.variance, square, p.conditional_variance), q.event_dim)


class ProcessValues(Values):
    """Values of P independent functions at N inputs together: event shape (N, P), or (N,) for a scalar function.

    A subclass defines their correlations: :class:`~numpyro_dgp.functions.joint_values.JointValues` by covariances.

    Raises:
        ValueError: by :meth:`residual`, from which a density begins, for values of another shape than the event's; by
            :meth:`expand`, in a plate of their rows.
    """

    all_rows_together = True

    @property
    def site_kind(self) -> str:  # type: ignore[override]
        """``"exact"`` for values of a process without inducing values, else ``"hidden"``."""
        return "exact" if self.function is not None and self.function.site is None else "hidden"

    def expand(self, batch_shape: Any) -> Any:
        require_outside("f(x)", self.event_shape[0], self.batch_shape, tuple(batch_shape))
        return self._expanded(tuple(batch_shape))

    def _expanded(self, batch: tuple[int, ...]) -> Any:
        return super().expand(batch)

    def residual(self, value: Array) -> Array:
        """Values minus their means; raises unless the event shape matches, which would broadcast.

        Raises:
            ValueError: another shape.
        """
        shape = np.shape(value)
        expect(
            shape[-self.event_dim :] == self.event_shape,
            f"observations y of shape {self.shape()}",
            shape,
            "y is (N,) for a scalar function (outputs=None), (N, P) for outputs=P",
            at="f(x)",
        )
        return value - self.loc

    def to_output_major(self, value: Array) -> Array:
        """Values (..., N, P), or (..., N), as (..., P, N)."""
        return value.mT if self.event_dim == 2 else value[..., None, :]

    def to_value(self, rows: Array) -> Array:
        """Numbers (..., P, N) in the shape of values."""
        return rows.mT if self.event_dim == 2 else rows[..., 0, :]

    def precision_times(self, residual: Array) -> Array:
        """The inverse covariance given v times numbers of the shape of values."""
        raise NotImplementedError
