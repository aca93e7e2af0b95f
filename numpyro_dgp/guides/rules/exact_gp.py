"""A rule for the values of an exact process."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dgp._checks import expect
from numpyro_dgp._repr import brief
from numpyro_dgp.functions.joint_values import JointValues, WhitenedValues
from numpyro_dgp.guides.rules.rule import Rule, SiteContext, require_rows, require_site
from numpyro_dgp.math.gaussians import opper_archambeau

__all__ = ["OpperArchambeau"]


@dataclasses.dataclass(frozen=True)
class OpperArchambeau(Rule):
    r"""Values of an exact scalar process by 2 N numbers, :math:`\alpha` and :math:`\lambda`.

    .. math:: q(f(X)) = N\bigl(m(X) + k(X, X)\, \alpha,\; (k(X, X)^{-1} + \mathrm{diag}(\lambda)^2)^{-1}\bigr)

    The optimum over all Gaussians has this form when the likelihood factorises over data. It begins at
    :math:`\alpha = 0` and :math:`\lambda_n^{-2} = \tfrac1N \sum_m k(x_m, x_m)`, in all units of the values alike.

    Raises:
        ValueError: the site does not hold the values of an exact scalar process.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> model = lambda X: numpyro.sample("v", dgp.gp("f", dgp.kernels.RBF(), None)(X))  # values, no data yet
        >>> guide = dgp.guides.InducingPoint(model, exact=dgp.guides.OpperArchambeau())
        >>> dgp.testing.parameter_shapes(guide, jnp.linspace(0, 1, 20)[:, None])
        {'v_auto_alpha': (20,), 'v_auto_lambda': (20,)}

    Source: Opper and Archambeau (2009); Hensman (2016).
    """

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        require_site(JointValues, self, site, "the values of an exact process")
        fn: Any = site.fn
        expect(
            fn.event_dim == 1 and not fn.batch_shape,
            f"values of one scalar function at {site.name!r}",
            f"event shape {fn.event_shape}",
            "use guides.Full() for several outputs",
        )
        alpha = site.param("alpha", lambda: jnp.zeros_like(fn.loc))
        # lambda^-2 = mean k(x, x)
        lam = site.param("lambda", lambda: jnp.full_like(fn.loc, 1 / jnp.sqrt(fn.variance.mean())))
        require_rows(self, site, alpha.shape, fn.loc.shape)
        # L (shift + root e) with L L' = k(X, X): shift = L' alpha, root root' = (I + L' diag(lambda)^2 L)^-1
        shift, root = opper_archambeau(fn.factor()[0], alpha, lam)
        return WhitenedValues(fn, shift[None], root[None])
