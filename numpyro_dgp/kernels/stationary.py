r"""Stationary kernels, functions of the scaled distance

.. math:: r^2 = \sum_d (x_d - x'_d)^2 / \ell_d^2 .

Profiles of the half-integer Matern kernels as functions of :math:`q = s^2 = 2 \nu r^2`, with exact derivatives.

.. math:: M_{1/2} = e^{-s}, \quad M_{3/2} = (1 + s)\, e^{-s}, \quad M_{5/2} = (1 + s + \tfrac13 s^2)\, e^{-s}, \qquad
          \frac{dM_{5/2}}{dq} = -\tfrac16 M_{3/2}, \quad \frac{dM_{3/2}}{dq} = -\tfrac12 M_{1/2}, \quad
          \frac{dM_{1/2}}{dq} = -\frac{e^{-s}}{2 s} .

In s the first two cancel at zero distance, where the derivative of the square root is infinite: differentiated as they
are written, the profiles give slopes of a random function the variance zero.

``SpectralMixture`` has a mixture of Gaussians as spectral density. Source: Salimbeni (2020), section 1.4; spectral
densities from the Fourier transform of each profile.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from numpyro_dgp._checks import expected
from numpyro_dgp._fields import array, number, positive
from numpyro_dgp._typing import Array, Number, pytree
from numpyro_dgp.kernels.base import Kernel, of_both
from numpyro_dgp.kernels.hyperparameters import by_column
from numpyro_dgp.kernels.state_space_forms import MaternState, StateSpaceForm, no_state_space
from numpyro_dgp.kernels.terms import Term
from numpyro_dgp.math.distances import squared_distances
from numpyro_dgp.math.linalg import matmul, safe_sqrt

__all__ = [
    "Matern12",
    "Matern32",
    "Matern52",
    "RBF",
    "RationalQuadratic",
    "SpectralMixture",
    "Stationary",
    "matern12",
    "matern32",
    "matern52",
    "phase_features",
]

_Pair = tuple[Array, Array]
_COINCIDENT = 32.0  # units in the last place of one lengthscale, within which two points count as one


@jax.custom_jvp
def matern12(q: Array) -> Array:
    """exp(-s), whose derivative at zero counts as zero."""
    return jnp.exp(-safe_sqrt(q))


@matern12.defjvp
def _matern12_jvp(primals: tuple[Array], tangents: tuple[Array]) -> _Pair:
    # The slope has another sign on each side of zero. In a compiled program the distance of equal points may be a
    # rounding error: x / l - x / l with a fused multiply-add.
    s, value = safe_sqrt(*primals), matern12(*primals)
    apart = s > _COINCIDENT * jnp.finfo(s.dtype).eps
    return value, -0.5 * value / jnp.where(apart, s, jnp.inf) * tangents[0]  # dM_1/2 / dq = -e^-s / 2 s


@jax.custom_jvp
def matern32(q: Array) -> Array:
    """(1 + s) exp(-s)."""
    s = safe_sqrt(q)
    return (1 + s) * jnp.exp(-s)


@matern32.defjvp
def _matern32_jvp(primals: tuple[Array], tangents: tuple[Array]) -> _Pair:
    return matern32(*primals), -0.5 * matern12(*primals) * tangents[0]  # dM_3/2 / dq = -M_1/2 / 2


@jax.custom_jvp
def matern52(q: Array) -> Array:
    """(1 + s + s^2 / 3) exp(-s)."""
    s = safe_sqrt(q)
    return (1 + s + jnp.square(s) / 3) * jnp.exp(-s)


@matern52.defjvp
def _matern52_jvp(primals: tuple[Array], tangents: tuple[Array]) -> _Pair:
    return matern52(*primals), -matern32(*primals) / 6 * tangents[0]  # dM_5/2 / dq = -M_3/2 / 6


def phase_features(key: Array, projected: Array) -> Array:
    """``sqrt(2) cos(omega x + phase)`` with a uniform phase: one random function per frequency."""
    phase = jax.random.uniform(key, projected.shape[-1:], projected.dtype, maxval=2 * jnp.pi)
    return math.sqrt(2) * jnp.cos(projected + phase)


@pytree
class Stationary(Kernel):
    """A kernel ``variance * profile(r^2)``.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.
    """

    variance: Number = number(1.0)
    lengthscale: Number = positive(1.0)

    def profile(self, r2: Array) -> Array:
        """The correlation as a function of the squared scaled distance."""
        raise NotImplementedError

    def frequencies(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        """Draws from the normalised spectral density at unit lengthscale, shape (D, num)."""
        normal_key, precision_key = jax.random.split(key)
        # E[cos(ω . r)] = E[exp(-τ r^2 / 2)] for ω ~ N(0, τ I)
        precisions = self.precisions(precision_key, shape[-1:], dtype)
        return jax.random.normal(normal_key, shape, dtype) * jnp.sqrt(precisions)

    def precisions(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        r"""Draws of :math:`\tau`, where the correlation is a mixture of RBFs, :math:`E[\exp(-\tau r^2 / 2)]`."""
        raise ValueError(
            f"{type(self).__name__} has no frequencies, which function draws need: define "
            "frequencies(key, shape, dtype) on the kernel, or draw at fixed inputs with f.joint(x)"
        )

    def _require_columns(self, columns: int) -> None:
        """Raise unless the hyperparameters fit to inputs with so many columns."""
        by_column(self, "lengthscale", columns)

    def _scale(self, X: Array) -> Array:
        return X / by_column(self, "lengthscale", X.shape[-1])

    def _lengthscales(self, columns: int) -> Array:
        """The lengthscale of every column, (columns,)."""
        return jnp.broadcast_to(by_column(self, "lengthscale", columns), (columns,))

    def _one_lengthscale(self) -> Array:
        """The lengthscale as a single number, for kernels of time."""
        if jnp.size(self.lengthscale) != 1:
            raise no_state_space(type(self).__name__, f" with lengthscales of shape {jnp.shape(self.lengthscale)}")
        return jnp.reshape(self.lengthscale, ())

    def evaluate(self, X1: Array, X2: Array) -> Array:
        return self.variance * self.profile(squared_distances(*of_both(self._scale, X1, X2)))

    def diagonal(self, X: Array) -> Array:
        self._require_columns(X.shape[-1])
        return jnp.broadcast_to(self.variance, X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        frequency_key, phase_key = jax.random.split(key)
        omega = self.frequencies(frequency_key, (X.shape[-1], num), X.dtype)
        return jnp.sqrt(self.variance) * phase_features(phase_key, matmul(self._scale(X), omega))


@pytree
class RBF(Stationary):
    r"""Squared exponential (exponentiated quadratic): :math:`\sigma^2 \exp(-r^2 / 2)`.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import RBF
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(RBF(variance=2.0, lengthscale=0.5)(x[:1], x)).round(3))
        [[2.    1.213 0.271]]

    Source: Salimbeni (2020), section 1.4.
    """

    def profile(self, r2: Array) -> Array:
        return jnp.exp(-0.5 * r2)

    def frequencies(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jax.random.normal(key, shape, dtype)

    def precisions(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jnp.ones(shape, dtype)

    def spectral_density(self, omega: Array) -> Array:
        lengthscale = self._lengthscales(omega.shape[-1])
        # ϱ(ω) = σ^2 prod_d sqrt(2 π) l_d exp(-l_d^2 ω_d^2 / 2)
        volume = jnp.prod(lengthscale * math.sqrt(2 * math.pi))
        return self.variance * volume * jnp.exp(-0.5 * jnp.square(lengthscale * omega).sum(-1))

    def tilts(self, dims: int) -> tuple[Term, ...]:
        if type(self) is not RBF:
            return super().tilts(dims)
        variance = jnp.asarray(self.variance)
        # α = σ^2, τ_d = 1 / l_d^2
        return (Term(jnp.log(variance), jnp.zeros(dims, variance.dtype) + 1 / jnp.square(self._lengthscales(dims))),)


@pytree
class _Matern(Stationary):
    """Shared by the half-integer Materns: a Student-t spectrum with ``2 nu`` degrees of freedom."""

    @property
    def nu(self) -> float:
        raise NotImplementedError

    @property
    def num_derivatives(self) -> int:
        """How many derivatives the random functions have, in mean square."""
        return math.ceil(self.nu) - 1

    def precisions(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return self.nu / jax.random.gamma(key, self.nu, shape, dtype)  # 2 ν / chi^2 with 2 ν degrees of freedom

    def spectral_density(self, omega: Array) -> Array:
        D, nu = omega.shape[-1], self.nu
        lengthscale = self._lengthscales(omega.shape[-1])
        # ϱ(ω) = σ^2 prod_d l_d 2^D π^(D/2) (2 ν)^ν Γ(ν + D/2) / Γ(ν)
        # * (2 ν + sum_d l_d^2 ω_d^2)^-(ν + D/2)
        log_constant = (
            D * math.log(2) + 0.5 * D * math.log(math.pi) + gammaln(nu + 0.5 * D) - gammaln(nu) + nu * math.log(2 * nu)
        )
        base = 2 * nu + jnp.square(lengthscale * omega).sum(-1)
        volume = self.variance * jnp.prod(lengthscale)
        return volume * jnp.exp(log_constant - (nu + 0.5 * D) * jnp.log(base))

    def state_space(self, order: int = 8) -> StateSpaceForm:
        rate = math.sqrt(2 * self.nu) / self._one_lengthscale()  # λ = sqrt(2 ν) / l
        return MaternState(jnp.asarray(self.variance), rate, self.num_derivatives + 1)


@pytree
class Matern12(_Matern):
    r"""Exponential (Ornstein-Uhlenbeck): :math:`\sigma^2 e^{-r}`; draws are continuous only.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Matern12
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(Matern12(variance=2.0, lengthscale=0.5)(x[:1], x)).round(3))
        [[2.    0.736 0.271]]

    Source: Salimbeni (2020), section 1.4.
    """

    nu = 0.5

    def profile(self, r2: Array) -> Array:
        return matern12(r2)


@pytree
class Matern32(_Matern):
    r"""Matern 3/2: :math:`\sigma^2 (1 + \sqrt 3 r)\, e^{-\sqrt 3 r}`; draws differentiable once.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Matern32
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(Matern32(variance=2.0, lengthscale=0.5)(x[:1], x)).round(3))
        [[2.    0.967 0.279]]

    Source: Salimbeni (2020), section 1.4.
    """

    nu = 1.5

    def profile(self, r2: Array) -> Array:
        return matern32(3 * r2)


@pytree
class Matern52(_Matern):
    r"""Matern 5/2: :math:`\sigma^2 (1 + \sqrt 5 r + \tfrac53 r^2)\, e^{-\sqrt 5 r}`; differentiable twice.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).

    Raises:
        ValueError: a value that is not positive, or lengthscales that do not match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Matern52
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(Matern52(variance=2.0, lengthscale=0.5)(x[:1], x)).round(3))
        [[2.    1.048 0.277]]

    Source: Salimbeni (2020), section 1.4.
    """

    nu = 2.5

    def profile(self, r2: Array) -> Array:
        return matern52(5 * r2)


@pytree
class RationalQuadratic(Stationary):
    r"""Rational quadratic: :math:`\sigma^2 (1 + r^2 / 2\alpha)^{-\alpha}`, a mixture of RBFs over lengthscales.

    Args:
        variance: k(x, x), squared units of the output.
        lengthscale: units of the input; a number, or (D,) for one per column (ARD).
        alpha: :math:`\alpha`, a number; the smaller, the slower the decay.

    Raises:
        ValueError: a value that is not positive, an alpha that is not a single number, or lengthscales that do not
            match the columns.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import RationalQuadratic
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(RationalQuadratic(alpha=0.5)(x[:1], x)).round(3))
        [[1.    0.894 0.707]]

    Source: Salimbeni (2020), section 1.4.
    """

    alpha: Number = number(1.0)

    def profile(self, r2: Array) -> Array:
        return jnp.exp(-self.alpha * jnp.log1p(0.5 * r2 / self.alpha))  # (1 + r^2 / 2 α)^-α

    def precisions(self, key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jax.random.gamma(key, self.alpha, shape, dtype) / self.alpha  # τ ~ Gamma(α, rate α)


@pytree
class SpectralMixture(Kernel):
    r"""Waves that lose their phase, one for each component q of a Gaussian mixture over frequencies:

    .. math:: k(x, x') = \sum_q \sigma_q^2 \exp\Bigl(-\tfrac12 \sum_d \frac{r_d^2}{\ell_{qd}^2}\Bigr)
              \cos\Bigl(2\pi \sum_d \mu_{qd}\, r_d\Bigr), \qquad r = x - x' .

    The spectral density is that of Gaussians around :math:`\pm 2\pi\mu_q` with standard deviations
    :math:`1 / \ell_{qd}` in radians per unit. The bound has many optima in the frequencies: start them at peaks of a
    periodogram, or at several places.

    Args:
        variance: :math:`\sigma^2` (Q,), squared units of the output.
        frequency: :math:`\mu` (Q, D), or (Q,) for one column; turns per unit of input, of either sign.
        lengthscale: :math:`\ell` (Q, D), or (Q,) for the same in all columns, units of the input: after about so long
            a wave has forgotten its phase.

    Raises:
        ValueError: variances or lengthscales that are not positive, frequencies that are not finite, shapes that do not
            fit together or to the inputs.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import SpectralMixture
        >>> kernel = SpectralMixture([1.0, 0.5], frequency=[1.0, 0.0], lengthscale=[2.0, 1.0])
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> print(np.array(kernel(x[:1], x)).round(3))
        [[ 1.5   -0.528  1.186]]

    Source: Wilson and Adams (2013); in several columns the cosine of the sum, which belongs to Gaussians
    at plus and minus :math:`\mu_q`, takes the place of a product of cosines.
    """

    variance: Any = positive()
    frequency: Any = array(advice="turns per unit of input, one over the period")
    lengthscale: Any = positive()

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = [jnp.shape(a) for a in (self.variance, self.frequency, self.lengthscale)]
        widths = {shape[1] for shape in shapes[1:] if len(shape) == 2}
        if len(shapes[0]) != 1 or any(s[:1] != shapes[0] or len(s) > 2 for s in shapes) or len(widths) > 1:
            raise expected(
                "variance (Q,), frequency and lengthscale (Q, D) or (Q,)",
                ", ".join(map(str, shapes)),
                "one row per component",
            )

    def _by_component(self, columns: int) -> tuple[Array, Array]:
        """Frequencies (Q, D), and lengthscales (Q, D) or (Q, 1)."""
        frequency, lengthscale = map(jnp.asarray, (self.frequency, self.lengthscale))
        frequency = frequency[:, None] if frequency.ndim == 1 else frequency
        lengthscale = lengthscale[:, None] if lengthscale.ndim == 1 else lengthscale
        if frequency.shape[1] != columns or lengthscale.shape[1] not in (1, columns):
            what = f"inputs with {frequency.shape[1]} column(s), as of frequency"
            raise expected(what, columns, "frequency has shape (Q, D)", type(self).__name__)
        return frequency, lengthscale

    def _components(self, columns: int) -> list[tuple[Array, Array, Array]]:
        """Variance (), angular frequency (D,) and lengthscale (D,) of every component."""
        frequency, lengthscale = self._by_component(columns)
        lengthscale = jnp.broadcast_to(lengthscale, frequency.shape)
        return list(zip(jnp.asarray(self.variance), 2 * math.pi * frequency, lengthscale, strict=True))

    def evaluate(self, X1: Array, X2: Array) -> Array:
        total: Any = 0
        for variance, omega, lengthscale in self._components(X1.shape[-1]):
            phase = matmul(X1, omega)[..., :, None] - matmul(X2, omega)[..., None, :]  # 2 π mu . (x - x')
            r2 = squared_distances(*of_both(partial(jnp.multiply, 1 / lengthscale), X1, X2))
            total = total + variance * jnp.exp(-0.5 * r2) * jnp.cos(phase)
        return total

    def diagonal(self, X: Array) -> Array:
        self._by_component(X.shape[-1])
        return jnp.broadcast_to(jnp.sum(self.variance), X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        components = self._components(X.shape[-1])
        total: Any = 0
        for (variance, omega, lengthscale), own in zip(components, jax.random.split(key, len(components)), strict=True):
            frequency_key, phase_key = jax.random.split(own)
            # ω ~ N(2 π mu, 1 / l^2)
            around = jax.random.normal(frequency_key, (X.shape[-1], num), X.dtype) / lengthscale[:, None]
            phase = jax.random.uniform(phase_key, (num,), X.dtype, maxval=2 * math.pi)
            total = total + jnp.sqrt(2 * variance) * jnp.cos(matmul(X, omega[:, None] + around) + phase)
        return total

    def spectral_density(self, omega: Array) -> Array:
        total: Any = 0
        for variance, centre, lengthscale in self._components(omega.shape[-1]):
            peak = variance * jnp.prod(lengthscale * math.sqrt(2 * math.pi))
            for sign in (1, -1):
                z = lengthscale * (omega + sign * centre)
                # Half of the variance around 2 π mu and around -2 π mu.
                total = total + 0.5 * peak * jnp.exp(-0.5 * jnp.square(z).sum(-1))
        return total
