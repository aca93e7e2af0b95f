"""Guides with names: combinations of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.importance import Importance
from numpyro_dgp.guides.rules.by_kind import Other, Rules
from numpyro_dgp.guides.rules.inducing_values import Diagonal
from numpyro_dgp.guides.rules.pointwise import Normal
from numpyro_dgp.guides.rules.rule import Rule

__all__ = ["ImportanceWeighted", "InducingPoint", "MeanField"]


class InducingPoint(Guide):
    r"""Doubly stochastic variational inference: Gaussian q(v), and hidden layers as in the model given v.

    .. math:: q = \prod_\ell q(v^\ell) \prod_n p(h^\ell_n \mid v^\ell, h^{\ell-1}_n)

    It has the rules that are the defaults of :class:`~numpyro_dgp.guides.Rules`: ``inducing=Full()``,
    ``hidden=Propagate()``, ``latent=Normal()``, ``exact=Full()``, ``other=Delta()``. Its arguments are those of
    :class:`~numpyro_dgp.guides.Guide`.

    Example:
        >>> import jax, optax
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> from numpyro_dgp.guides import InducingPoint
        >>> model, X, y = dgp.testing.toy()
        >>> guide = InducingPoint(model)
        >>> guide
        InducingPoint(model=shallow, inducing=Full(), hidden=Propagate(), latent=Normal(), exact=Full(), other=Delta())
        >>> svi = SVI(model, guide, optax.adam(0.05), dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 200, X, y, progress_bar=False)
        >>> sorted(result.params)
        ['f_auto_loc', 'f_auto_scale_tril']

    Source: Salimbeni (2020), section 2.3.
    """


class ImportanceWeighted(InducingPoint):
    r"""Importance-weighted inference of latents, with Gaussian q(v) of the inducing values: the bound

    .. math:: \sum_n E_{g,\, w_n^{(1)} \dots w_n^{(K)}} \log \frac1K \sum_k
              \frac{e^{\mathcal L_n(g, w_n^{(k)})}\, p(w_n^{(k)})}{q(w_n^{(k)})}
              - \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)], \qquad
              \mathcal L_n(g, w) = E_{q(f)} \log p(y_n \mid f(g(x_n, w)))

    evaluated by ``dgp.ELBO()``. It is never below the plain bound, K = 1, in expectation. The K values of a datum go
    through one draw of the inner functions g; the last function f is integrated. NumPyro's own objectives use K = 1.

    ``sample_posterior`` gives draws of the latents from the posterior that the bound implies: of K draws from q one is
    chosen with probability proportional to its weight (section 5.2.4). Predictions take latents from their prior.

    It is short for ``InducingPoint(model, importance=Importance(num_samples))``, which has more settings.

    Args:
        model: the program, with ``dgp.latent`` inside its data plate.
        num_samples: the number of samples, K.
        doubly_reparameterised: whether the proposals have doubly reparameterised gradients.
        inducing: ``Full()`` (default) or another rule for inducing values.
        latent: rule for the proposal q(w), ``Normal()`` (default), ``Amortised()`` or ``Prior()``.
        other: rule for hyperparameters, ``Delta()`` (default) or ``Normal()``, or a NumPyro autoguide class.
        sites: rules for single sites by name.

    Raises:
        ValueError: K is not a positive integer; in the first call, a model without latents per datum.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> from numpyro_dgp.guides import ImportanceWeighted
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 10).reshape(5, 2)))
        ...     with numpyro.plate("data", len(X)):
        ...         x = dgp.latent("w", X, 1)
        ...         numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> guide = ImportanceWeighted(model, num_samples=5, latent=dgp.guides.Amortised())
        >>> svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, X[:, 0] ** 2, progress_bar=False)
        >>> guide.sample_posterior(jax.random.key(1), result.params, X, X[:, 0] ** 2)["w"].shape
        (20, 1)

    Source: Salimbeni (2020), equation 5.11.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        num_samples: int,
        *,
        doubly_reparameterised: bool = False,
        inducing: Rule | None = None,
        latent: Rule | None = None,
        other: Other | None = None,
        sites: Mapping[str, Rule] | None = None,
    ) -> None:
        importance = Importance(num_samples, doubly_reparameterised)
        super().__init__(model, inducing=inducing, latent=latent, other=other, sites=sites, importance=importance)

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | vars(self.importance)


class MeanField(Guide):
    r"""Fully factorised: every inducing value and every hidden value has an independent Gaussian.

    .. math:: q = \prod_\ell \prod_{pm} N\bigl(v^\ell_{pm}; m^\ell_{pm}, (\sigma^\ell_{pm})^2\bigr)
              \prod_{np} N\bigl(h^\ell_{np}; t^\ell_{np}, \Omega^\ell_{np}\bigr)

    The hidden values are one pair of numbers per datum, created inside the data plate. Give such models process noise,
    ``f(x, noise=s)``: without it p(h | u, x) is nearly a point next to inducing inputs and the bound is poor.

    It differs from :class:`InducingPoint` in ``inducing=Diagonal()``, ``hidden=Normal()`` and ``exact=Normal()``. Its
    arguments are those of :class:`~numpyro_dgp.guides.Guide`.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy(2)
        >>> shapes = dgp.testing.parameter_shapes(dgp.guides.MeanField(model), X, y)
        >>> {name: shape for name, shape in shapes.items() if name.startswith("h_auto")}
        {'h_auto_loc': (20, 2), 'h_auto_scale': (20, 2)}

    Source: Chamberlin (2016), section 2.3 (there with the optimal q(v)).
    """

    defaults = Rules(inducing=Diagonal(), hidden=Normal(), exact=Normal())
