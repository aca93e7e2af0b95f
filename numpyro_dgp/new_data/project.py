"""``project``: infer the latents of new rows under a fixed fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from numpyro_dgp._typing import Array
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.new_data.continued_fit import Continued
from numpyro_dgp.new_data.fitted_layers import OpenLayer
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["project"]


def project(
    posterior: Posterior,
    rng_key: Array,
    *args: Any,
    num_steps: int = 500,
    guide: Guide | None = None,
    num_particles: int = 10,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Posterior:
    r"""Infer the latents of new rows, as for unseen y in a GPLVM, under a fixed fit.

    Of every new row it maximises

    .. math:: E_{q(w_n)} E_{q(f)} \log p(y_n \mid f(w_n)) - \mathrm{KL}[q(w_n) \,\|\, p(w_n)]

    by q(w_n), with q(f), hyperparameters and inducing inputs of the fit. Such bounds have several maxima: each row
    starts at the best of 200 draws from the prior. Entries of y that are not known may be missing, by
    :func:`~numpyro_dgp.likelihoods.missing` in the program. :func:`update` updates the layers too.

    Args:
        posterior: the fitted program, as for :func:`update`.
        rng_key: PRNG key.
        *args: arguments of the model for the new rows, observations included.
        num_steps: steps of Adam, whose rate falls to zero by a cosine.
        guide: a guide to go on with, for posteriors of ``Collapsed(model).on(...)``; by default that of the fit. A
            guide that reads latents off y (``Amortised``) or knows their optimum (``Quadrature``) takes no step.
        num_particles: draws in a step.
        progress_bar: show a progress bar.
        **kwargs: keyword arguments of the model.

    Returns:
        The fit with the latents of these rows: ``found.guide.sample_posterior(key, found.params, y)["w"]`` draws them,
        ``found.layers(key, y)`` has the functions with draws of their inputs there.

    Raises:
        ValueError: as :func:`update`.

    Example:
        >>> import jax, numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> Z = jnp.linspace(-2, 2, 5)[:, None]
        >>> def model(y):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(Z), outputs=2)
        ...     with numpyro.plate("data", len(y)):
        ...         w = dgp.latent("w", None, dim=1)
        ...         numpyro.sample("y", dgp.Likelihood(f(w), lambda v: dist.Normal(v, 0.1).to_event(1)), obs=y)
        >>> params = {"f_auto_loc": jnp.ones((2, 5)), "f_auto_scale_tril": jnp.tile(0.1 * jnp.eye(5), (2, 1, 1))}
        >>> posterior, y = dgp.Posterior(model, dgp.guides.InducingPoint(model), params), jnp.ones((3, 2))
        >>> found = dgp.project(posterior, jax.random.key(0), y, num_steps=50, progress_bar=False)
        >>> found.params["w_auto_loc"].shape
        (3, 1)

    Source: Titsias and Lawrence (2010), section 3.3.
    """

    def chosen(guide: Guide, layers: Mapping[str, OpenLayer]) -> Any:
        return optax.adam(optax.cosine_decay_schedule(0.05, num_steps))

    program = None if guide is None else (posterior.model, guide)
    job = Continued(num_steps, chosen, program, num_particles, 1.0, progress_bar, rows_only=True)
    return job.run(posterior, rng_key, args, kwargs)
