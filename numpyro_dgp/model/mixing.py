r"""Linear mixtures of independent functions, :math:`v = P g(x)`: correlated outputs of a last layer.

With :math:`g_q(x) \sim N(m_q, s_q)` the mixtures have marginals :math:`v_p \sim N((P m)_p, (P^{\circ 2} s)_p)`, which
is all that the expected log density of a likelihood that factorises over outputs needs. Draws and the log density of
several outputs together see their covariance :math:`P \,\mathrm{diag}(s) P^\top`. A shared kernel k gives the
outputs the covariance :math:`(P P^\top) \otimes k`, kernels of their own the linear model of coregionalisation,
:math:`\sum_q P_{pq} P_{p'q} k_q`. Source: Salimbeni (2020), sections 4.2.3 and 5.1.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_dgp._checks import require_finite
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import safe_sqrt
from numpyro_dgp.algebra.quadrature import MonteCarlo
from numpyro_dgp.model.function_values import FunctionValues

if TYPE_CHECKING:
    from numpyro_dgp.model.likelihood import Likelihood

__all__ = ["MixedValues", "log_marginal", "unmixed"]


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


def unmixed(likelihood: Likelihood) -> Likelihood:
    """The same distribution of y as a likelihood of the functions, whose conditional mixes them itself."""
    f_x: Any = likelihood.f_x
    conditional, rule = likelihood.conditional, likelihood.rule
    integrate = rule if isinstance(rule, MonteCarlo) else None
    return type(likelihood)(f_x.functions, lambda g: conditional(f_x.mixed(g)), integrate=integrate)


def log_marginal(likelihood: Likelihood, y: ArrayLike) -> Array:
    r"""The normalised log density :math:`\log E[p(y \mid v)]` of a likelihood, correlations of mixed values included.

    With a ``Normal`` conditional :math:`N(y; a v + b, c^2)` it is that of
    :math:`N(a P m + b,\; a P\,\mathrm{diag}(s) P^\top a + c^2)`, a Gaussian with a covariance of rank Q plus a
    diagonal. Other conditionals are integrated by Monte Carlo over the functions.

    Args:
        likelihood: of mixed values.
        y: observations.
    """
    f_x: Any = likelihood.f_x
    if likelihood.closed[1] is None:
        return unmixed(likelihood).log_marginal(y)
    mean, slope = jax.jvp(lambda v: likelihood._numbers(v).loc, (f_x.loc,), (jnp.ones_like(f_x.loc),))
    scale = jnp.broadcast_to(likelihood._numbers(f_x.loc).scale, mean.shape)
    factor = (slope[..., None] * f_x.P) * safe_sqrt(f_x.functions.variance)[..., None, :]
    return dist.LowRankMultivariateNormal(mean, factor, jnp.square(scale), validate_args=False).log_prob(jnp.asarray(y))
