"""A kernel whose lengthscale changes over the inputs, of which it is given as columns."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import require_count
from numpyro_dgp._typing import Array, Number, pytree, static
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.hyperparameters import by_column, require_number, require_positive_array

__all__ = ["Gibbs"]


@pytree
class Gibbs(Kernel):
    r"""An RBF with a lengthscale at every input, :math:`\ell_d(x) = \ell_d\, e^{s_d(x)}`:

    .. math:: k = \sigma^2 \prod_d \sqrt{\frac{2\,\ell_d(x)\,\ell_d(x')}{\ell_d(x)^2 + \ell_d(x')^2}}\;
              \exp\Bigl(-\sum_d \frac{(x_d - x'_d)^2}{\ell_d(x)^2 + \ell_d(x')^2}\Bigr) .

    The variance stays the same everywhere. Inputs are the columns [x, s]: D places, and behind them the log factors s
    of the lengthscales, one for all places or one for each. Any numbers s give a valid kernel. Those of another layer
    are put beside x by the program, ``s = sample("s", scale(X))`` and ``f(concatenate([X, s], -1))``, and inducing
    inputs then have a factor of their own. A function of x is ``Transformed(Gibbs(), lambda X:
    concatenate([X, log_factor(X)], -1))``.

    Random features have frequencies from a Cauchy distribution; their variance grows with the ratio of
    :math:`\ell_d(x)` and :math:`\ell_d`, one way or the other.

    Args:
        variance: :math:`\sigma^2`, squared units of the output.
        lengthscale: :math:`\ell`, units of the input, where s is zero; a number, or (D,).
        places: D, the number of columns before those of s.

    Raises:
        ValueError: a value that is not positive; where it is called, inputs with another number of columns, or
            lengthscales that do not match the places.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import Gibbs
        >>> x = jnp.array([[0.0], [0.5], [1.0]])
        >>> s = jnp.log(0.5 + x)  # lengthscales 0.5, 1 and 1.5
        >>> X = jnp.concatenate([x, s], -1)
        >>> print(np.array(Gibbs()(X[:1], X)).round(3))
        [[1.    0.732 0.519]]

    Source: Gibbs (1997), with the lengthscales of all columns functions of all of x.
    """

    variance: Number = 1.0
    lengthscale: Number = 1.0
    places: int = static(default=1)

    def __post_init__(self) -> None:
        require_number(self, "variance")
        require_positive_array(self, "lengthscale")
        require_count("Gibbs", "places", self.places, "X.shape[-1]")

    def _checked_lengthscale(self, X: Array) -> Number:
        """The lengthscale, where it fits to inputs (..., N, D + 1) or (..., N, 2 D)."""
        D = self.places
        if X.shape[-1] not in (D + 1, 2 * D):
            raise ValueError(
                f"kernel Gibbs: expected {D} column(s) of places and 1{'' if D == 1 else f' or {D}'} of log factors of "
                f"lengthscales behind them, got inputs of shape {X.shape}: jnp.concatenate([X, s], -1), and "
                "Gibbs(places=X.shape[-1])"
            )
        return by_column(self, "lengthscale", D)

    def _parts(self, X: Array) -> tuple[Array, Array]:
        """Scaled places (..., N, D), and the factors of their lengthscales (..., N, D)."""
        lengthscale, D = self._checked_lengthscale(X), self.places
        factors = jnp.broadcast_to(jnp.exp(X[..., D:]), (*X.shape[:-1], D))
        return X[..., :D] / lengthscale, factors

    def evaluate(self, X1: Array, X2: Array) -> Array:
        (x, l1), (z, l2) = self._parts(X1), self._parts(X2)
        exponent = jnp.zeros((), X1.dtype)
        for d in range(self.places):
            a, b = l1[..., :, None, d], l2[..., None, :, d]
            total = jnp.square(a) + jnp.square(b)
            exponent = exponent + 0.5 * jnp.log(2 * a * b / total)
            exponent = exponent - jnp.square(x[..., :, None, d] - z[..., None, :, d]) / total
        return self.variance * jnp.exp(exponent)

    def diagonal(self, X: Array) -> Array:
        self._checked_lengthscale(X)
        return jnp.broadcast_to(self.variance, X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        frequency_key, phase_key = jax.random.split(key)
        x, factors = self._parts(X)
        omega = jax.random.cauchy(frequency_key, (self.places, num), X.dtype)
        phase = jax.random.uniform(phase_key, (num,), X.dtype, maxval=2 * math.pi)
        # Each factor of the kernel is an integral of exp(-l^2 w^2 / 4) exp(-l'^2 w^2 / 4) cos(w (x - x')) over w.
        log_weight = -0.25 * matmul(jnp.square(factors), jnp.square(omega))
        log_weight = log_weight + 0.5 * (jnp.log(factors).sum(-1)[..., None] + jnp.log1p(jnp.square(omega)).sum(0))
        constant = jnp.sqrt(2 * self.variance) * (0.5 * math.pi) ** (0.25 * self.places)
        return constant * jnp.exp(log_weight) * jnp.cos(matmul(x, omega) + phase)
