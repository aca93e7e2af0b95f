"""Kernels of inner products, white noise, change points, and lengthscales that vary over the inputs.

Source: Salimbeni (2020), section 1.4; arc-cosine kernels are Cho and Saul (2009), equations 3-6.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import erf

from numpyro_dgp._checks import expect, expect_kind, expected
from numpyro_dgp._fields import count, finite, number, one_of, positive
from numpyro_dgp._typing import Array, Number, pytree, static
from numpyro_dgp.kernels.base import Kernel, as_kernel
from numpyro_dgp.kernels.hyperparameters import by_column, column_number
from numpyro_dgp.kernels.sphere import ZonalKernel, extended, extended_directions, squared_length
from numpyro_dgp.kernels.stationary import Stationary
from numpyro_dgp.kernels.terms import Term
from numpyro_dgp.math.linalg import matmul

__all__ = ["ArcCosine", "ChangePoint", "ErrorFunction", "Linear", "Polynomial", "VaryingLengthscale", "White"]


@pytree
class White(Kernel):
    r"""White noise: :math:`\sigma^2` where :math:`x = x'` exactly, zero elsewhere.

    Args:
        variance: :math:`\sigma^2`, squared units of the output.

    Raises:
        ValueError: a variance that is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import White
        >>> x = jnp.array([[1.0, 2.0], [3.0, -1.0]])
        >>> print(White(0.1)(x, x))
        [[0.1 0. ]
         [0.  0.1]]

    Source: Salimbeni (2020), section 1.4.
    """

    num_derivatives = 0

    variance: Number = number(1.0)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        same = jnp.asarray(True)
        for d in range(X1.shape[-1]):
            same = same & (X1[..., :, None, d] == X2[..., None, :, d])
        return jnp.where(same, self.variance, 0)

    def diagonal(self, X: Array) -> Array:
        return jnp.broadcast_to(self.variance, X.shape[:-1])


@pytree
class Linear(Kernel):
    r"""Linear: :math:`\sum_d \sigma_d^2\, x_d x'_d`; add a :class:`Constant` for an offset.

    Args:
        variance: squared units of output over input; a number, or (D,).

    Raises:
        ValueError: a variance that is not positive; where it is called, variances that do not match the columns.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Linear
        >>> x = jnp.array([[1.0, 2.0], [3.0, -1.0]])
        >>> print(Linear(variance=jnp.array([1.0, 0.5]))(x, x))
        [[3.  2. ]
         [2.  9.5]]

    Source: Salimbeni (2020), section 1.4.
    """

    variance: Number = positive(1.0)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return matmul(X1 * by_column(self, "variance", X1.shape[-1]), X2.mT)  # sum_d σ_d^2 x_d x'_d

    def diagonal(self, X: Array) -> Array:
        return (jnp.square(X) * by_column(self, "variance", X.shape[-1])).sum(-1)

    def features(self, key: Array, X: Array, num: int) -> Array:
        slope = jax.random.normal(key, (X.shape[-1], num), X.dtype)
        return matmul(X * jnp.sqrt(by_column(self, "variance", X.shape[-1])), slope)

    def series(self, X: Array, sizes: tuple[int, ...]) -> Array:
        return X * jnp.sqrt(by_column(self, "variance", X.shape[-1]))

    def tilts(self, dims: int) -> tuple[Term, ...]:
        if type(self) is not Linear:
            return super().tilts(dims)
        none = jnp.zeros(dims, jnp.asarray(self.variance).dtype)
        return (Term(none.sum(), none, (none + by_column(self, "variance", dims),)),)  # log α = 0, τ = 0, F = diag(σ^2)


@pytree
class Polynomial(Kernel):
    r"""Polynomial: :math:`\bigl(\sum_d \sigma_d^2\, x_d x'_d + \mathrm{offset}\bigr)^{\mathrm{degree}}`.

    Args:
        variance: a number, or (D,).
        offset: a positive number.
        degree: a positive integer.

    Raises:
        ValueError: a variance that is not positive, an offset that is not a positive number, or another degree; where
            it is called, variances that do not match the columns.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import Polynomial
        >>> x = jnp.array([[1.0, 2.0], [3.0, -1.0]])
        >>> print(Polynomial(offset=1.0, degree=2)(x, x))
        [[ 36.   4.]
         [  4. 121.]]

    Source: Salimbeni (2020), section 1.4.
    """

    variance: Number = positive(1.0)
    offset: Number = number(1.0)
    degree: int = count(2, static=True)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return (matmul(X1 * by_column(self, "variance", X1.shape[-1]), X2.mT) + self.offset) ** self.degree

    def diagonal(self, X: Array) -> Array:
        return squared_length(X, by_column(self, "variance", X.shape[-1]), self.offset) ** self.degree

    def features(self, key: Array, X: Array, num: int) -> Array:
        draws = jax.random.normal(key, (self.degree, X.shape[-1] + 1, num), X.dtype)
        scaled = extended(X, by_column(self, "variance", X.shape[-1]), self.offset)
        # A product of independent linear functions, each of covariance sum_d σ_d^2 x_d x'_d + offset.
        return math.prod(matmul(scaled, draw) for draw in draws)  # type: ignore[return-value]

    def tilts(self, dims: int) -> tuple[Term, ...]:
        if type(self) is not Polynomial:
            return super().tilts(dims)
        none, p = jnp.zeros(dims, jnp.asarray(self.variance).dtype), self.degree
        # (x' F z + c)^p = sum_j (p over j) c^(p - j) (x' F z)^j
        scales = [math.log(math.comb(p, j)) + (p - j) * jnp.log(self.offset) for j in range(p + 1)]
        form = none + by_column(self, "variance", dims)
        return tuple(Term(scale, none, (form,) * j) for j, scale in enumerate(scales))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _arc_cosine(order: int, cosine: Array) -> Array:
    r"""Angular part :math:`J_n(\chi)` of the arc-cosine kernel, as a function of :math:`\cos\chi`.

    In the cosine the derivatives are :math:`J_n' = n^2 J_{n-1}` and :math:`J_0' = 1/\sin\chi`, so that
    only order 0, whose draws jump, is singular where two inputs point the same way.
    """
    cosine = jnp.clip(cosine, -1, 1)
    theta, sine = jnp.arccos(cosine), jnp.sqrt(1 - jnp.square(cosine))
    if order == 0:
        return math.pi - theta  # J_0
    if order == 1:
        return sine + (math.pi - theta) * cosine  # J_1
    return 3 * sine * cosine + (math.pi - theta) * (1 + 2 * jnp.square(cosine))  # J_2


@_arc_cosine.defjvp
def _arc_cosine_jvp(order: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (cosine,), (tangent,) = primals, tangents
    if order > 0:
        slope = order**2 * _arc_cosine(order - 1, cosine)  # n^2 J_n-1
    else:
        sine2 = 1 - jnp.square(cosine)
        # 1 / sin χ, and zero where χ is 0 or π
        slope = jax.lax.rsqrt(jnp.where(sine2 > jnp.finfo(cosine.dtype).eps, sine2, jnp.inf))
    return _arc_cosine(order, cosine), slope * tangent


@pytree
class ArcCosine(ZonalKernel):
    r"""Arc-cosine kernel of order n, the limit of a wide layer of units :math:`\Theta(\tau)\, \tau^n`:

    .. math:: k(x, x') = \tfrac{\sigma^2}{\pi} \lVert x\rVert^n \lVert x'\rVert^n J_n(\chi),
              \quad x \cdot x' = \sum_d \sigma_d^2\, x_d x'_d + \sigma_0^2 ,

    with :math:`\chi` the angle between x and x', and :math:`J_n` the function of Cho and Saul. ``depth`` wide layers on
    top of each other have inner products and angles given by the kernel of the layer below with :math:`\sigma^2 = 1`.

    Args:
        variance: :math:`\sigma^2`.
        weight_variances: :math:`\sigma_d^2`, a number or (D,).
        bias_variance: :math:`\sigma_0^2`, a positive number.
        order: 0 (steps), 1 (rectified linear) or 2.
        depth: how many wide layers, of order 1 or 2 if there are several.

    Raises:
        ValueError: a variance that is not positive or of another shape, or another order; several layers of order 0,
            whose covariance near equal inputs is rounding error; where it is called, weight variances that do not
            match the columns; draws of functions for several layers.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import ArcCosine
        >>> x = jnp.array([[1.0, 2.0], [3.0, -1.0]])
        >>> print(np.array(ArcCosine(order=1)(x, x)).round(3))
        [[ 6.     3.665]
         [ 3.665 11.   ]]

    Source: Cho and Saul (2009), equations 3-6; their section 2.3 for several layers.
    """

    variance: Number = number(1.0)
    weight_variances: Number = positive(1.0)
    bias_variance: Number = number(1.0)
    order: int = one_of(0, 1, 2, default=1, hint="1 is rectified linear", static=True)
    depth: int = count(1, static=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        what = "order 1 or 2 for several layers"
        expect(self.order > 0 or self.depth == 1, what, f"order=0, depth={self.depth}", "ArcCosine(order=1, depth=2)")

    @property
    def num_derivatives(self) -> int:
        """How many derivatives the random functions have, in mean square."""
        return self.order

    def _weights(self, X: Array) -> Number:
        return by_column(self, "weight_variances", X.shape[-1])

    @property
    def _at_zero(self) -> float:
        return {0: 1.0, 1: 1.0, 2: 3.0}[self.order]  # J_n(0) / π

    def _squared_norm(self, X: Array) -> Array:
        return squared_length(X, self._weights(X), self.bias_variance)

    def _below(self, square: Array) -> Array:
        """The squared length of the input of the last layer."""
        for _ in range(self.depth - 1):
            square = self._at_zero * square**self.order  # k(x, x)
        return square

    def _angular(self, cosine: Array) -> Array:
        """J_n of the angle between the inputs of the last layer."""
        for _ in range(self.depth - 1):
            cosine = _arc_cosine(self.order, cosine) / (math.pi * self._at_zero)  # k(x, x') / sqrt(k(x, x) k(x', x'))
        return _arc_cosine(self.order, cosine)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        first, second = self._squared_norm(X1)[..., :, None], self._squared_norm(X2)[..., None, :]
        # cos χ = x . x' / |x| |x'|
        cosine = (matmul(X1 * self._weights(X1), X2.mT) + self.bias_variance) / jnp.sqrt(first * second)
        norms = jnp.sqrt(self._below(first) * self._below(second))
        return self.variance / math.pi * norms**self.order * self._angular(cosine)

    def diagonal(self, X: Array) -> Array:
        return self.variance * self._at_zero * self._below(self._squared_norm(X)) ** self.order

    def directions(self, X: Array) -> Array:
        return extended_directions(X, self._weights(X), self.bias_variance)

    def factor(self, X: Array) -> Array:
        return self._below(self._squared_norm(X)) ** (self.order / 2)

    def by_angle(self, angle: Array) -> Array:
        return self.variance / math.pi * self._angular(jnp.cos(angle))

    def features(self, key: Array, X: Array, num: int) -> Array:
        if self.depth > 1:
            return super().features(key, X, num)
        weight_key, sign_key = jax.random.split(key)
        weights = jax.random.normal(weight_key, (X.shape[-1] + 1, num), X.dtype)
        activation = matmul(extended(X, self._weights(X), self.bias_variance), weights)
        sign = jax.random.rademacher(sign_key, (num,), X.dtype)  # of mean zero: a random sign for each unit
        units = jnp.maximum(activation, 0) ** self.order if self.order else activation > 0
        # E[Θ(τ) τ^n Θ(τ') τ'^n] = |x|^n |x'|^n J_n(χ) / 2 π
        return sign * jnp.sqrt(2 * self.variance) * units


@pytree
class ErrorFunction(Kernel):
    r"""The limit of a wide layer of units erf(w . x + b), with Gaussian weights w and biases b:

    .. math:: k(x, x') = \sigma^2\, \frac2\pi \arcsin \frac{2\, \langle x, x'\rangle}
              {\sqrt{(1 + 2 \langle x, x\rangle)\,(1 + 2 \langle x', x'\rangle)}},
              \quad \langle x, x'\rangle = \sum_d \sigma_d^2\, x_d x'_d + \sigma_0^2 .

    Its functions are sigmoids of all directions and steepnesses: smooth, and constant far away from the origin.

    Args:
        variance: :math:`\sigma^2`, squared units of the output.
        weight_variances: :math:`\sigma_d^2`, a number or (D,), over squared units of the input.
        bias_variance: :math:`\sigma_0^2`, a positive number.

    Raises:
        ValueError: a variance that is not positive or of another shape; where it is called, weight variances that do
            not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import ErrorFunction
        >>> x = jnp.array([[0.0], [1.0], [3.0]])
        >>> print(np.array(ErrorFunction(weight_variances=4.0)(x, x)).round(3))
        [[0.465 0.226 0.085]
         [0.226 0.726 0.721]
         [0.085 0.721 0.896]]

    Source: Williams (1997), equation 11.
    """

    variance: Number = number(1.0)
    weight_variances: Number = positive(1.0)
    bias_variance: Number = number(1.0)

    def _squares(self, X: Array) -> Array:
        weights = by_column(self, "weight_variances", X.shape[-1])
        return 1 + 2 * squared_length(X, weights, self.bias_variance)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        weights = by_column(self, "weight_variances", X1.shape[-1])
        product = 2 * (matmul(X1 * weights, X2.mT) + self.bias_variance)
        squares = self._squares(X1)[..., :, None], self._squares(X2)[..., None, :]
        return self.variance * 2 / math.pi * _arcsine(product, *squares)

    def diagonal(self, X: Array) -> Array:
        squares = self._squares(X)
        return self.variance * 2 / math.pi * _arcsine(squares - 1, squares, squares)

    def features(self, key: Array, X: Array, num: int) -> Array:
        weights = jax.random.normal(key, (X.shape[-1] + 1, num), X.dtype)
        scaled = extended(X, by_column(self, "weight_variances", X.shape[-1]), self.bias_variance)
        return jnp.sqrt(self.variance) * erf(matmul(scaled, weights))


def _arcsine(product: Array, first: Array, second: Array) -> Array:
    """arcsin(p / sqrt(a b)) as arctan2(p, sqrt(a b - p^2)), which keeps its digits where p^2 is nearly a b."""
    # a b - p^2 = (sqrt(a b) - p) (sqrt(a b) + p) >= 1
    norm = jnp.sqrt(first * second)
    return jnp.arctan2(product, jnp.sqrt(jnp.maximum((norm - product) * (norm + product), 1)))


@pytree
class ChangePoint(Kernel):
    r"""A change point: one function before it, an independent one after it, with a smooth transition:

    .. math:: k(x, x') = (1 - w(x))\, k_1(x, x')\, (1 - w(x')) + w(x)\, k_2(x, x')\, w(x'),
              \qquad w(x) = \frac{1}{1 + e^{-(x_d - c) / a}} .

    The function is :math:`(1 - w) f_1 + w f_2`; half way its variance is a quarter of the sum of both. For several
    places nest it. Parts see all columns: ``ChangePoint(RBF().on(0), Matern32().on(0, 1), 0.5)``.

    Args:
        before: :math:`k_1`, a kernel, a number for a constant one, or a function k(X1, X2).
        after: :math:`k_2`, likewise.
        location: c, units of column d.
        width: a, positive, units of column d; nine tenths of the transition are within three widths of c.
        column: d, counted from 0.

    Raises:
        ValueError: parts that are no kernels, a location that is not finite, a width that is not positive, a column
            that is not an integer from 0 on or that the inputs do not have.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import ChangePoint, RBF
        >>> kernel = ChangePoint(RBF(lengthscale=5.0), RBF(lengthscale=0.1), location=0.0, width=0.1)
        >>> x = jnp.array([[-1.0], [-0.5], [0.5], [1.0]])
        >>> print(np.array(kernel(x, x)).round(2))
        [[1.   0.99 0.01 0.  ]
         [0.99 0.99 0.01 0.  ]
         [0.01 0.01 0.99 0.  ]
         [0.   0.   0.   1.  ]]

    Source: Lloyd et al. (2014).
    """

    before: Kernel
    after: Kernel
    location: Number = finite(advice="a place along the column, 0.5")
    width: Number = number(1.0)
    column: int = static(default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "before", as_kernel(self.before))
        object.__setattr__(self, "after", as_kernel(self.after))
        if (column := column_number(self.column)) is None:
            raise expected("column to be a number counted from 0", repr(self.column), "column=0 is the first")
        object.__setattr__(self, "column", column)

    def check_inputs(self, X: Any) -> None:
        self.before.check_inputs(X)
        self.after.check_inputs(X)

    def _weights(self, X: Array) -> tuple[Array, Array]:
        """1 - w and w at inputs (..., N, D), each (..., N)."""
        if self.column >= X.shape[-1]:
            raise expected(
                f"at least {self.column + 1} columns, for column={self.column}",
                f"shape {X.shape}",
                "columns are counted from 0",
            )
        z = (X[..., self.column] - self.location) / self.width
        return jax.nn.sigmoid(-z), jax.nn.sigmoid(z)

    def evaluate(self, X1: Array, X2: Array) -> Array:
        (b1, a1), (b2, a2) = self._weights(X1), self._weights(X2)
        before = b1[..., :, None] * self.before.evaluate(X1, X2) * b2[..., None, :]
        return before + a1[..., :, None] * self.after.evaluate(X1, X2) * a2[..., None, :]

    def diagonal(self, X: Array) -> Array:
        before, after = self._weights(X)
        return jnp.square(before) * self.before.diagonal(X) + jnp.square(after) * self.after.diagonal(X)

    def features(self, key: Array, X: Array, num: int) -> Array:
        before, after = self._weights(X)
        first, second = jax.random.split(key)
        return before[..., None] * self.before.features(first, X, num) + after[..., None] * self.after.features(
            second, X, num
        )


@pytree
class VaryingLengthscale(Kernel):
    r"""A stationary kernel with a lengthscale at every input, :math:`\ell_d(x) = \ell_d\, e^{s_d(x)}`:

    .. math:: k = \sigma^2 \prod_d \sqrt{\frac{2\,\ell_d(x)\,\ell_d(x')}{\ell_d(x)^2 + \ell_d(x')^2}}\;
              \rho\Bigl(\sum_d \frac{2\,(x_d - x'_d)^2}{\ell_d(x)^2 + \ell_d(x')^2}\Bigr) ,

    where the stationary kernel is :math:`\sigma^2 \rho(r^2)`. For an RBF it is the kernel of Gibbs. The variance stays
    the same everywhere. Inputs are the columns [x, s]: D places, and behind them the log factors s of the lengthscales,
    one for all places or one for each. Any numbers s give a valid kernel, if :math:`\rho` is one in any number of
    dimensions, as those of this package. The log factors of another layer are appended to x by the program,
    ``s = sample("s", scale(X))`` and ``f(concatenate([X, s], -1))``, and inducing inputs then have a factor too. A
    function of x is ``Transformed(VaryingLengthscale(RBF()), lambda X: concatenate([X, log_factor(X)], -1))``.

    Random features have frequencies from a Cauchy distribution; their variance grows with the ratio of
    :math:`\ell_d(x)` and :math:`\ell_d`, one way or the other.

    Args:
        kernel: ``RBF``, a Matern kernel or ``RationalQuadratic``, with the lengthscale where s is zero.
        places: D, the number of columns before those of s.

    Raises:
        ValueError: another kernel; where it is called, inputs with another number of columns, or lengthscales that do
            not match the places.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Matern32, VaryingLengthscale
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> s = jnp.log(0.5 + x)  # lengthscales 0.5, 1 and 1.5
        >>> X = jnp.concatenate([x, s], -1)
        >>> print(np.array(VaryingLengthscale(Matern32())(X[:1], X)).round(3))
        [[1.    0.627 0.419]]

    Source: Paciorek and Schervish (2004); Gibbs (1997) for the RBF.
    """

    kernel: Stationary
    places: int = count(1, "X.shape[-1]", static=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_kind(self.kernel, Stationary, "RBF, a Matern kernel or RationalQuadratic", "VaryingLengthscale(RBF())")

    @property
    def num_derivatives(self) -> float:
        """How many derivatives the random functions have, in mean square."""
        return self.kernel.num_derivatives

    def _checked_lengthscale(self, X: Array) -> Number:
        """The lengthscale, where it fits to inputs (..., N, D + 1) or (..., N, 2 D)."""
        D = self.places
        if X.shape[-1] not in (D + 1, 2 * D):
            raise expected(
                f"{D} column(s) of places and 1{('' if D == 1 else f' or {D}')} of log factors of lengthscales",
                f"inputs of shape {X.shape}",
                "jnp.concatenate([X, s], -1), and VaryingLengthscale(kernel, places=X.shape[-1])",
            )
        return by_column(self.kernel, "lengthscale", D)

    def _parts(self, X: Array) -> tuple[Array, Array]:
        """Scaled places (..., N, D), and the factors of their lengthscales (..., N, D)."""
        lengthscale, D = self._checked_lengthscale(X), self.places
        factors = jnp.broadcast_to(jnp.exp(X[..., D:]), (*X.shape[:-1], D))
        return X[..., :D] / lengthscale, factors

    def evaluate(self, X1: Array, X2: Array) -> Array:
        (x, l1), (z, l2) = self._parts(X1), self._parts(X2)
        log_factor = r2 = jnp.zeros((), X1.dtype)
        for d in range(self.places):
            a, b = l1[..., :, None, d], l2[..., None, :, d]
            total = jnp.square(a) + jnp.square(b)  # l(x) = l a and l(x') = l b
            log_factor = log_factor + 0.5 * jnp.log(2 * a * b / total)
            r2 = r2 + 2 * jnp.square(x[..., :, None, d] - z[..., None, :, d]) / total
        return self.kernel.variance * jnp.exp(log_factor) * self.kernel.profile(r2)

    def diagonal(self, X: Array) -> Array:
        self._checked_lengthscale(X)
        return jnp.broadcast_to(self.kernel.variance, X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        frequency_key, phase_key, precision_key = jax.random.split(key, 3)
        x, factors = self._parts(X)
        omega = jax.random.cauchy(frequency_key, (self.places, num), X.dtype)
        phase = jax.random.uniform(phase_key, (num,), X.dtype, maxval=2 * math.pi)
        # ρ(r^2) = E[exp(-τ r^2 / 2)]: an RBF with the places sqrt(τ) x. Each of its factors is an integral of
        # exp(-l^2 w^2 / 4) exp(-l'^2 w^2 / 4) cos(w sqrt(τ) (x - x')) over w.
        root = jnp.sqrt(self.kernel.precisions(precision_key, (num,), X.dtype))
        log_weight = -0.25 * matmul(jnp.square(factors), jnp.square(omega))
        # sqrt(l (1 + w^2)): 1 / (1 + w^2) is the density of w, up to π
        log_weight = log_weight + 0.5 * (jnp.log(factors).sum(-1)[..., None] + jnp.log1p(jnp.square(omega)).sum(0))
        constant = jnp.sqrt(2 * self.kernel.variance) * (0.5 * math.pi) ** (0.25 * self.places)
        return constant * jnp.exp(log_weight) * jnp.cos(matmul(x, omega * root) + phase)
