r"""Linear mixtures of independent functions, :math:`v = P g(x)`: correlated outputs of a last layer.

With :math:`g_q(x) \sim N(m_q, s_q)` the mixtures have marginals :math:`v_p \sim N((P m)_p, (P^{\circ 2} s)_p)`, which
is all that the expected log density of a likelihood that factorises over outputs needs. Draws and the log density of
several outputs together see their covariance :math:`P \,\mathrm{diag}(s) P^\top`. A shared kernel k gives the
outputs the covariance :math:`(P P^\top) \otimes k`, kernels of their own the linear model of coregionalisation,
:math:`\sum_q P_{pq} P_{p'q} k_q`. Source: Salimbeni (2020), sections 4.2.3 and 5.1.5.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_dgp._checks import require_finite
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import safe_sqrt
from numpyro_dgp.model.function_values import FunctionValues

__all__ = ["MixedValues"]


class MixedValues(FunctionValues):
    """Linear mixtures of function values, for the inside of a ``Likelihood``; ``f(x).mix(P)`` makes it.

    ``loc``, ``conditional_variance`` and ``spread`` are the marginal ones; draws have the correlations between outputs.

    Args:
        functions: the values that are mixed, event shape (Q,).
        P: weights (P, Q).

    Raises:
        ValueError: weights that are not a matrix with one column per function, or not finite; used as the site of a
            hidden layer.
    """

    pytree_data_fields = ("functions", "P")

    def __init__(self, functions: FunctionValues, P: ArrayLike) -> None:
        Q = functions.event_shape
        if not Q or np.ndim(P) != 2 or np.shape(P)[1] != Q[0]:
            raise ValueError(
                f"mix: expected weights of shape (P, Q) for values of Q functions, got weights {np.shape(P)} for "
                f"values {Q}: dgp.gp(..., outputs=Q) has Q functions, and P is the number of columns of y"
            )
        require_finite("weights of mix", P, "check the data the directions came from")
        self.functions, self.P = functions, jnp.asarray(P, functions.loc.dtype)
        squares = jnp.square(self.P).T
        spread, total = (None if a is None else a @ squares for a in (functions.spread, functions.total))
        super().__init__(self.mixed(functions.loc), functions.conditional_variance @ squares, spread, total=total)
        self._from(functions)

    def mixed(self, g: Array) -> Array:
        """Mixtures (..., P) of numbers (..., Q), one per function."""
        return g @ self.P.T

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        return self.mixed(self.functions.sample(key, sample_shape)), []

    def observed(self, mean: Array, slope: Array, scale: ArrayLike) -> dist.LowRankMultivariateNormal:
        r"""The distribution of all columns of :math:`y \sim N(a v + b, c^2)` together, the mixtures v integrated out.

        It is :math:`N(a P m + b,\; a P\,\mathrm{diag}(s) P^\top a + c^2)`, whose covariance is one of rank Q plus a
        diagonal.

        Args:
            mean: of y at the means of v, a P m + b (..., P).
            slope: a (..., P).
            scale: c, broadcasts against ``mean``.

        Example:
            >>> g = FunctionValues(jnp.zeros((1, 2)), jnp.ones((1, 2))).mix(jnp.array([[1.0, 0.0], [1.0, 1.0]]))
            >>> print(g.observed(g.loc, jnp.ones((1, 2)), 0.5).covariance_matrix)
            [[[1.25 1.  ]
              [1.   2.25]]]
        """
        factor = (slope[..., None] * self.P) * safe_sqrt(self.functions.variance)[..., None, :]
        diagonal = jnp.square(jnp.broadcast_to(scale, mean.shape))
        return dist.LowRankMultivariateNormal(mean, factor, diagonal, validate_args=False)

    def expand(self, batch_shape: Any) -> MixedValues:
        return MixedValues(self.functions.expand(batch_shape), self.P)

    def propagated(self) -> NoReturn:
        _refuse_site()

    def log_prob(self, value: Array, intermediates: Any = None) -> NoReturn:
        _refuse_site()

    def from_white(self, white: Array) -> NoReturn:
        _refuse_site()


def _refuse_site() -> NoReturn:
    raise ValueError(
        "mix: expected mixed values inside dgp.Likelihood, got a site that holds them: for a hidden layer draw the "
        'functions and mix the draw, g = numpyro.sample("g", f(x)); h = mean(x) + g @ P.T'
    )
