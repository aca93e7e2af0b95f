r"""A rule for inducing values with a multimodal posterior: a mixture of Gaussians.

With :math:`q(v) = \sum_k \pi_k q_k(v)` a bound is a sum over components, because an expectation is linear in q:

.. math:: \mathcal L = \sum_k \pi_k \Bigl( E_{q_k}[\log p(y \mid v)] - \mathrm{KL}[q_k \,\|\, p]
              - E_{q_k} \Bigl[\log \frac{q(v)}{q_k(v)}\Bigr] \Bigr)

The first two terms are those of a Gaussian posterior, computed as for one. The last has no closed form and is estimated
by one draw from every component: without bias, by reparameterised draws, with an exact derivative by
:math:`\pi`. Its value is between :math:`\log \pi_k` and zero on average over components; where they do not overlap it
is :math:`\log \pi_k` for every draw. Bounding it instead (by Jensen's inequality) would lower the bound by up to the
amount that the mixture is to gain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._fields import count, kind_of, positive
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.weights import Belief, InducingPrior
from numpyro_dgp.guides.rules.inducing_values import Diagonal, Full
from numpyro_dgp.guides.rules.low_rank_inducing import LowRank
from numpyro_dgp.guides.rules.rule import Rule, SiteContext, initial_scale, require_site
from numpyro_dgp.guides.rules.strata import BeliefMixture

__all__ = ["MixtureOfGaussians"]


@dataclasses.dataclass(frozen=True)
class MixtureOfGaussians(Rule):
    r"""A mixture over the inducing values of a layer, joint over its outputs: several modes.

    .. math:: q(v) = \sum_{k=1}^K \pi_k \prod_p N(v_p; m_{kp}, \Sigma_{kp})

    ``dgp.ELBO`` evaluates the bound once for every component, in closed form where that of one Gaussian is, and adds up
    with the weights :math:`\pi`; only the entropy of the mixture is estimated by draws. A step costs K times
    that of one Gaussian, with several such layers the product of their K. Train with ``dgp.ELBO``:
    ``Trace_ELBO`` has the same value, but its gradient by :math:`\pi` lacks the part that goes through the choice of a
    component. Predictions and draws choose a component by :math:`\pi`.

    Equal components would stay equal. Their means start ``apart`` standard deviations away from the usual start, in
    directions that differ.

    A mixture gains at most :math:`\log K` over the best of its components where these do not overlap. One layer is
    independent of the others in q: a symmetry that turns two layers together is only represented where they are joined
    otherwise (:class:`MarkovInducing`).

    Args:
        components: the number of Gaussians, K.
        of: the rule of one component: ``Full()``, ``Diagonal()`` or ``LowRank(...)``.
        reflected: give every component its mirror image :math:`N(-m_k, \Sigma_k)` with the same weight and no
            parameters; the bound is then evaluated 2 K times. For likelihoods that do not change with the sign of the
            function, and hidden layers whose sign the layer above does not identify.
        apart: distance of the means from zero at the start, in initial standard deviations.

    Raises:
        ValueError: a number of components that is not a positive integer, another rule as a component, a distance that
            is not positive, or a site that does not hold inducing values.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> def model(X, y=None):  # y does not identify the sign of f
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 3)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v**2, 0.1)), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.MixtureOfGaussians(2))
        >>> svi = SVI(model, guide, optax.adam(0.05), dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 100, X, jnp.ones(20), progress_bar=False)
        >>> one, other = (result.params[f"f_auto_{k}_loc"] for k in range(2))
        >>> bool(one[0] * other[0] < 0)  # f(0) is 1 in one component and -1 in the other
        True

    Source: Jaakkola and Jordan (1998), for mixtures as posteriors.
    """

    components: int = count(2)
    of: Full | Diagonal | LowRank = kind_of(Full, Diagonal, LowRank)
    reflected: bool = False
    apart: float = positive(0.5, "it separates components at the start")

    __repr__ = brief

    def __call__(self, site: SiteContext) -> BeliefMixture:
        require_site(InducingPrior, self, site, "inducing values")
        size = math.prod(site.fn.event_shape)
        total = self.components * (1 + self.reflected)

        def component(k: int) -> Belief:
            settings = {**vars(site), "prefix": f"{site.prefix}_{k}"}

            def moved(loc: Array) -> Array:
                if total == 1:
                    return loc
                step = self.apart * initial_scale(self.of.scale, site)
                # m_k = m + apart sigma_0 d_k
                return loc + step * _direction(k / total, size).reshape(loc.shape).astype(loc.dtype)

            q: Any = self.of(_Component(**settings, moved=moved))
            return q

        parts = tuple(component(k) for k in range(self.components))
        logits = jnp.zeros(self.components, site.fn.dtype)
        if self.components > 1:
            logits = site.param("logits", lambda: logits)
        if self.reflected:
            # N(-m_k, Sigma_k) with the logit of N(m_k, Sigma_k): each has half of pi_k.
            parts, logits = (*parts, *(q.around(-q.loc) for q in parts)), jnp.concatenate([logits, logits])
        return BeliefMixture(parts, logits)


@dataclasses.dataclass(frozen=True)
class _Component(SiteContext):
    """A site for the rule of one component, with other initial means."""

    moved: Callable[[Array], Array]

    def param(self, name: str, init: Callable[[], Array], **settings: Any) -> Array:
        start = (lambda: self.moved(init())) if name == "loc" else init
        return super().param(name, start, **settings)


def _direction(turn: float, size: int) -> Array:
    """Numbers of about one (size,): opposite for half a ``turn``, and for no other two turns nearly the same."""
    golden = (3 - math.sqrt(5)) / 2  # of a turn: its multiples never come near each other
    return jnp.cos(2 * math.pi * (turn + golden * jnp.arange(size)) + 0.7)  # cos(x + pi) = -cos x
