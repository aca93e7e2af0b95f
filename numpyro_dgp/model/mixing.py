r"""Linear mixtures of independent functions, :math:`v = P g(x)`: correlated outputs of a last layer.

With :math:`g_q(x) \sim N(m_q, s_q)` the mixtures have marginals :math:`v_p \sim N((P m)_p, (P^{\circ 2} s)_p)`, which
is all that the expected log density of a likelihood that factorises over outputs needs. Draws and the log density of
several outputs together see their covariance :math:`P \,\mathrm{diag}(s) P^\top`. A shared kernel k gives the
outputs the covariance :math:`(P P^\top) \otimes k`, kernels of their own the linear model of coregionalisation,
:math:`\sum_q P_{pq} P_{p'q} k_q`. Source: Salimbeni (2020), sections 4.2.3 and 5.1.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.linalg import safe_sqrt
from numpyro_dgp.algebra.quadrature import MonteCarlo

if TYPE_CHECKING:
    from numpyro_dgp.model.likelihood import Likelihood

__all__ = ["log_marginal", "unmixed"]


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
