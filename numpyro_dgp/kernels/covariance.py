"""What a covariance function computes, and how it is called: checked inputs, one dtype, one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import require_inputs
from numpyro_dgp._data import as_floats, as_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import set_diagonal
from numpyro_dgp.kernels.state_space_forms import StateSpaceForm, no_state_space
from numpyro_dgp.kernels.terms import Term

__all__ = ["Covariance", "no_spectral_density", "of_both"]


def no_spectral_density(name: str) -> ValueError:
    """What to raise for the kernel ``name``, which has none."""
    return ValueError(
        f"{name} has no spectral density: expected a stationary kernel with one "
        "(RBF, Matern12, Matern32, Matern52, SpectralMixture, or sums and positive multiples of them)"
    )


def of_both(function: Callable[[Array], Array], X1: Array, X2: Array) -> tuple[Array, Array]:
    """A function of both inputs of a kernel: of one array only once, and its results are one array too.

    A kernel that maps its inputs keeps what :meth:`Covariance.gram` tells the kernels below it, that both are one.
    """
    first = function(X1)
    return first, first if X1 is X2 else function(X2)


class Covariance:
    """What a kernel defines, and what it has from that; :class:`~numpyro_dgp.kernels.Kernel` adds the algebra."""

    # Whether all of its columns are labels, which are known exactly wherever inputs are uncertain.
    of_labels: ClassVar[bool] = False

    def evaluate(self, X1: Array, X2: Array) -> Array:
        """Gram matrix (..., N1, N2) of inputs (..., N1, D) and (..., N2, D), which may be one and the same array."""
        raise NotImplementedError

    def diagonal(self, X: Array) -> Array:
        """Variances k(x, x), shape (..., N)."""
        raise NotImplementedError

    def check_inputs(self, X: Any) -> None:
        """Raise a ``ValueError`` where known inputs (..., N, D) are none of the kernel's; nothing by default."""

    def features(self, key: Array, X: Array, num: int) -> Array:
        r"""``num`` random functions with covariance k, evaluated at ``X``: shape (..., N, num).

        Each column is an independent random function :math:`f` with :math:`E[f(x)] = 0` and
        :math:`E[f(x) f(x')] = k(x, x')`, fixed by ``key``; a Gaussian mixture of many is a draw
        from the process (random Fourier features where the kernel is stationary).
        """
        raise ValueError(
            f"{type(self).__name__} has no features, which function draws need: define "
            "features(key, X, num) on the kernel, or draw at fixed inputs with f.joint(x)"
        )

    def spectral_density(self, omega: Array) -> Array:
        r"""Spectral density :math:`\varrho(\omega) = \int k(r)\, e^{-i \omega \cdot r}\, dr`.

        Args:
            omega: angular frequencies (..., D), in radians per unit of input.

        Returns:
            Densities (...,), so that :math:`k(r) = (2\pi)^{-D} \int \varrho(\omega) e^{i\omega r} d\omega`.
        """
        raise no_spectral_density(type(self).__name__)

    def series(self, X: Array, sizes: tuple[int, ...]) -> Array | None:
        r"""Features (N, M) of a function that is a sum of known functions with independent weights N(0, 1), or an
        infinite series of them that is cut off: their products are k(X, X). ``None`` where there is none.

        Args:
            X: inputs (N, D).
            sizes: of a series, how many functions of each column at most.
        """
        return None

    def state_space(self, order: int = 8) -> StateSpaceForm:
        """The kernel of one input column as a linear stochastic differential equation.

        Args:
            order: waves that a ``Periodic`` kernel is made of, beside a constant.
        """
        raise no_state_space(type(self).__name__)

    def tilts(self, dims: int) -> tuple[Term, ...]:
        r"""The kernel as a sum of :class:`Term`, for which Gaussian expectations have a closed form.

        Args:
            dims: columns of the inputs.

        Returns:
            Terms whose diagonals have shape (dims,), and the dtype of the hyperparameters.

        Not inherited: a subclass may compute another kernel. One with the same closed form says so:
        ``def tilts(self, dims): return RBF(self.variance, self.lengthscale).tilts(dims)``.
        """
        raise ValueError(
            "expected a kernel with expectations in closed form (RBF, Linear, Polynomial, Constant, kernels of "
            f"labels, their sums, products and .on(...)), got {type(self).__name__}: pass "
            "integrate=dgp.GaussHermite(20) for up to three input columns, or integrate=dgp.MonteCarlo(1000, key) for "
            "any number; or define tilts(dims) on the kernel"
        )

    def __call__(self, X1: ArrayLike, X2: ArrayLike) -> Array:
        """Gram matrix (..., N1, N2) between inputs (..., N1, D) and (..., N2, D)."""
        X1, X2 = self._inputs(X1, X2)
        # Outside of a compiled program this call is compiled as a whole; inside of one it is inlined.
        return jax.jit(type(self).evaluate, inline=True)(self.cast(X1.dtype), X1, X2)

    def diag(self, X: ArrayLike) -> Array:
        """Variances k(x, x) of inputs (..., N, D): shape (..., N), without an N x N matrix."""
        (X,) = self._inputs(X)
        return self.cast(X.dtype).diagonal(X)

    def gram(self, X: ArrayLike) -> Array:
        """``k(X, X)`` with the diagonal from :meth:`diag`, free of the rounding of distances."""
        (X,) = self._inputs(X)
        k = self.cast(X.dtype)
        return set_diagonal(jax.jit(Covariance._within, inline=True)(k, X), k.diagonal(X))

    def _within(self, X: Array) -> Array:
        return self.evaluate(X, X)

    def _inputs(self, *arrays: ArrayLike) -> tuple[Array, ...]:
        owner = f"kernel {type(self).__name__}"
        arrays = tuple(as_numbers(f"inputs of {owner}", array) for array in arrays)
        for array in arrays:
            require_inputs(owner, array)
        columns = {np.shape(array)[-1] for array in arrays}
        if len(columns) > 1:
            raise ValueError(
                f"{owner}: expected two sets of inputs with the same number of columns, got "
                f"{' and '.join(str(np.shape(a)) for a in arrays)}: rows are data, columns dimensions"
            )
        for array in arrays:
            self.check_inputs(array)
        dtype = jnp.result_type(*arrays, float)
        return tuple(as_floats(f"inputs of {owner}", array).astype(dtype) for array in arrays)

    def cast(self, dtype: jnp.dtype) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), self)
