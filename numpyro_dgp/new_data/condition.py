"""``condition``: condition fitted functions on new rows, with fixed hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from numpyro_dgp._checks import expect
from numpyro_dgp._typing import Array
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.new_data.continued_fit import Continued
from numpyro_dgp.new_data.fitted_layers import OpenLayer
from numpyro_dgp.optim.natural import NaturalGradient
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["condition"]


def condition(
    posterior: Posterior,
    rng_key: Array,
    *args: Any,
    num_steps: int = 100,
    num_particles: int = 1,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Posterior:
    r"""Condition the fitted functions on new rows, with fixed hyperparameters and inducing points.

    Natural-gradient steps of sizes 1, 2/3, 1/2, 2/5, ... for q(v) of the last layers only. With a Gaussian likelihood
    the first step goes to the optimum: in natural parameters

    .. math:: \theta_\mathrm{new} = \theta_\mathrm{old} + \sum_n \theta_n,

    where :math:`\theta_n` is that of the likelihood of a row. With one layer this is exact, and further steps change
    nothing. In a deep program the layers below stay, and the steps average over their draws.

    It works with traced data inside ``jax.jit`` and ``jax.vmap``: fantasies, posteriors given many values of rows that
    are not observed yet, are ``jax.vmap(lambda y: dgp.condition(fitted, key, X, y).predict(key, X_new).mean)(ys)``.

    Args:
        posterior: the fitted program, as for :func:`update`; q(v) of the last layers are ``Full()``.
        rng_key: PRNG key.
        *args: arguments of the model for the new rows, observations included.
        num_steps: natural-gradient steps; one is enough for one layer with a Gaussian likelihood.
        num_particles: draws of the hidden layers in a step.
        progress_bar: show a progress bar.
        **kwargs: keyword arguments of the model.

    Returns:
        The posterior of the program given the rows of the fit and the new ones.

    Raises:
        ValueError: as :func:`update`; last layers whose q(v) is not ``Full()``: each independent entry would be
            updated as if the others were known; latents with a variational distribution for every row.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> prior = {"f_auto_loc": jnp.zeros(5), "f_auto_scale_tril": jnp.eye(5)}  # no rows so far
        >>> fitted = dgp.Posterior(model, dgp.guides.InducingPoint(model), prior)
        >>> X, key = jnp.array([[0.5]]), jax.random.key(0)
        >>> after = dgp.condition(fitted, key, X, jnp.array([1.0]), num_steps=1, progress_bar=False)
        >>> print(f"{after.predict(key, X).mean[0]:.2f}")  # 1 / (1 + 0.1**2)
        0.99

    Source: Bui et al. (2017), section 3; Salimbeni (2020), section 3.2, for the step.
    """

    def chosen(guide: Guide, layers: Mapping[str, OpenLayer]) -> Any:
        for name, layer in layers.items():
            gaussian = layer.record.gaussian
            expect(
                layer.record.is_inner_layer or (gaussian is not None and not gaussian.diagonal),
                f"a q(v) of layer {name!r} that is Full()",
                f"one {('with other parameters' if gaussian is None else 'of independent numbers, Diagonal()')}",
                "fit with dgp.guides.InducingPoint(model), or call dgp.update",
            )
        return NaturalGradient(guide, lambda step: 2 / (step + 2), optax.set_to_zero())

    job = Continued(num_steps, chosen, None, num_particles, 1.0, progress_bar, moves=False)
    return job.run(posterior, rng_key, args, kwargs)
