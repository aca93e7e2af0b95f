"""``PredictiveObjective``, the predictive density of the training data, regularised: no bound of the evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.scipy.special import logsumexp
from numpyro.distributions.util import scale_and_mask

from numpyro_dgp._checks import require_positive
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, log_marginal
from numpyro_dgp.guides.record import follows_model, record_of
from numpyro_dgp.guides.run import Run
from numpyro_dgp.inference.elbo import ELBO, terms

__all__ = ["PredictiveObjective"]


class _Part(NamedTuple):
    """What one run contributes: log densities of observations by site, their scales, and the divergence."""

    log_densities: dict[str, Array]
    scales: dict[str, Any]
    divergence: Array


class PredictiveObjective(ELBO):
    r"""The log predictive density of the training data less a multiple of the divergence: it calibrates predictions and
    is no bound of the evidence.

    .. math:: \mathcal{O} = \frac{N}{B} \sum_n \log \frac1S \sum_{s=1}^S E_{q(f(h_n^{(s)}))}\, p(y_n \mid f(h_n^{(s)}))
              - \beta \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)]

    where n goes over the B rows of a minibatch and s over draws of the hidden layers. ``dgp.ELBO`` has the expectation
    outside of the logarithm. Here it is inside: the model is fitted by the density that it will predict with, and the
    posterior variance of the function becomes a learned variance of y that depends on the input. So q is a part of the
    predictor, and not a posterior: its bound, its evidence, its k-hat say nothing, and
    ``compare(..., predictive=("name",))`` leaves them out. It can be used in place of ``ELBO()`` wherever an objective
    is expected; predictions are those of every fit.

    With one layer there is nothing to draw. With several the logarithm of an average over S draws is biased downwards,
    less with more of them. The original has quadrature with learned nodes in place of the draws.

    Args:
        num_particles: the number of draws, S.
        regularisation: :math:`\beta`, positive; values below one are usual, and are to be chosen on validation data.
        vectorize_particles: as in :class:`ELBO`.
        quasi_random: as in :class:`ELBO`.

    Raises:
        ValueError: as :class:`ELBO`; a regularisation that is not positive; a guide that integrates
            observations itself (``Collapsed``, ``ImportanceWeighted``, ``Quadrature``) or that has a posterior of its
            own for every row (``MeanField``, latents under ``Normal``), which new rows do not have.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> from numpyro_dgp import PredictiveObjective
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> svi = SVI(model, dgp.guides.InducingPoint(model), optax.adam(0.05), PredictiveObjective(regularisation=0.3))
        >>> result = svi.run(jax.random.key(0), 200, X, X[:, 0] ** 2, progress_bar=False)
        >>> bool(result.losses[-1] < result.losses[0])
        True

    Source: Jankowiak et al. (2020a), section 3.2, for one layer; Jankowiak et al. (2020b), section 3, for several.
    """

    _adds_parts = False  # a predictive density is inside a logarithm

    def __init__(
        self,
        num_particles: int = 1,
        *,
        regularisation: float = 1.0,
        vectorize_particles: bool | Callable[..., Any] = True,
        quasi_random: bool = False,
    ) -> None:
        super().__init__(num_particles, vectorize_particles, quasi_random=quasi_random)
        require_positive("PredictiveObjective", "regularisation", regularisation, "0.3, for instance")
        self.regularisation = regularisation

    def _of_run(self, found: Run, temperature: Array | None) -> _Part:
        _require_predictive(found)
        _, divergence, observed = terms(found)
        return _Part(
            {site["name"]: log_marginal(site) for site in observed},
            {site["name"]: jnp.asarray(1.0 if site["scale"] is None else site["scale"]) for site in observed},
            divergence if temperature is None else temperature * divergence,
        )

    def _of_particles(self, parts: _Part) -> Array:
        log_densities = [
            scale_and_mask(logsumexp(values, axis=0, b=1 / len(values)), parts.scales[name][0]).sum()
            for name, values in parts.log_densities.items()
        ]
        return sum(log_densities, jnp.zeros(())) - self.regularisation * parts.divergence.mean()


def _require_predictive(found: Run) -> None:
    """Refuse a guide in which rows have something that predictions at new rows lack."""
    integrated = [name for site in found.guide.values() for name in record_of(site).integrates or ()]
    if integrated or found.groups:
        raise ValueError(
            "PredictiveObjective: expected a guide under which every row is observed given draws, got one that "
            "integrates or weights observations itself: use guides.InducingPoint, or dgp.ELBO() with this one"
        )
    rows = [set(site["cond_indep_stack"]) for site in found.model.values() if _is_observed(site)]
    for name, site in found.model.items():
        if site["type"] != "sample" or site["is_observed"] or follows_model(found.guide.get(name, site)):
            continue
        if any(plates and plates <= set(site["cond_indep_stack"]) for plates in rows):
            raise ValueError(
                f"PredictiveObjective: expected rows that are predicted as new rows are, got {name!r}, which has a "
                "posterior of its own for every row: use guides.InducingPoint(model), with latent=guides.Prior() for "
                "latents"
            )


def _is_observed(site: Message) -> bool:
    return site["type"] == "sample" and site["is_observed"]
