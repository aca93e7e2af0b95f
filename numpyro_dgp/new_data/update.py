"""``update``: continue a fitted program with new rows, without the rows of the fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optax

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import Array
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.new_data.continued_fit import Continued
from numpyro_dgp.new_data.fitted_layers import OpenLayer
from numpyro_dgp.optim.natural import NaturalGradient
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["update"]


def update(
    posterior: Posterior,
    rng_key: Array,
    *args: Any,
    num_steps: int = 1000,
    optimizer: Any = None,
    guide: Guide | None = None,
    memory: float = 1.0,
    num_particles: int = 1,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Posterior:
    r"""Continue a fitted program with new rows; the rows of the fit are no longer needed.

    The posterior of a layer represents the earlier rows: the ratio of q(u) to the prior p(u), for the function values
    u = f(Z) at the inducing inputs and with the hyperparameters of the fit, replaces their likelihood. The bound of
    the new rows is

    .. math:: \mathcal L = E_q[\log p(y_\mathrm{new} \mid f)] - \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)]
              + \lambda \sum_\ell E_q\Bigl[\log \frac{q_\mathrm{old}(u^\ell)}{p_\mathrm{old}(u^\ell)}\Bigr] .

    For one layer with a Gaussian likelihood and unchanged hyperparameters and inducing points this is the posterior of
    all rows, in any order. In all other cases it is an approximation: the rows of the fit cannot be re-evaluated with
    other hyperparameters, and the layers of a deep program are represented independently.

    All parameters continue to be optimised: hyperparameters, inducing inputs (``learn=True``), q(v) of all layers.
    Latents are those of the new rows. :func:`condition` keeps hyperparameters fixed.

    To change the inducing points, pass ``guide=`` for the same program with another ``dgp.Points(Z)``. Then q(v)
    starts at the posterior of the fit there, and learned inducing inputs start at the Z of the program.

    Args:
        posterior: the fitted program, with a guide of this package under which every layer has a Gaussian q(v) by
            itself and hyperparameters are points: ``InducingPoint``, ``MeanField``, ``ImportanceWeighted``, or
            ``Collapsed(model).on(X, y)`` with a ``guide=`` to go on with.
        rng_key: PRNG key.
        *args: arguments of the model for the new rows, observations included.
        num_steps: steps of the optimiser.
        optimizer: of optax or NumPyro; by default ``optim.NaturalGradient(guide, 0.1, optax.adam(0.01))`` where the
            last layers have Gaussian parameters, and else ``optax.adam(0.01)``.
        guide: another guide, of the program to go on with; by default that of the fit.
        memory: :math:`\lambda` in (0, 1], the weight of earlier rows. With 0.9, rows of k updates ago have the weight
            :math:`0.9^k`, so that a function that changes over time is followed.
        num_particles: draws of the hidden layers in a step.
        progress_bar: show a progress bar.
        **kwargs: keyword arguments of the model.

    Returns:
        The posterior of the program after the new rows, for predictions or the next update.

    Raises:
        ValueError: a posterior without a guide of this package; layers whose posteriors are not independent Gaussians,
            or hyperparameters whose posteriors are not points; a guide of a program with other layers; no
            observations; whatever ``dgp.fit`` raises.

    Example:
        >>> import jax, optax
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> model, X, y = dgp.testing.toy()
        >>> y, guide = y, dgp.guides.InducingPoint(model)
        >>> svi = SVI(model, guide, optax.adam(0.05), dgp.ELBO())
        >>> result = dgp.fit(svi, jax.random.key(0), 200, X[:10], y[:10], progress_bar=False)
        >>> fitted = dgp.Posterior(model, guide, result.params)
        >>> after = dgp.update(fitted, jax.random.key(1), X[10:], y[10:], num_steps=100, progress_bar=False)
        >>> error = [abs(p.predict(jax.random.key(2), X).mean - y).max() for p in (fitted, after)]
        >>> bool(error[1] < 0.1 < error[0])
        True

    Source: Bui et al. (2017), section 3.
    """
    expect(guide is None or callable(guide), "guide= to be a function", type(guide).__name__, "leave it out")
    if isinstance(memory, str) or np.ndim(memory) or not 0 < memory <= 1:
        raise expected("memory above 0 and up to 1", repr(memory), "1 keeps what is known, 0.9 forgets a tenth")
    program = None if guide is None else (adapted(guide).model or posterior.model, guide)

    def chosen(guide: Guide, layers: Mapping[str, OpenLayer]) -> Any:
        if optimizer is not None:
            return optimizer
        known = all(layer.record.gaussian is not None for layer in layers.values() if not layer.record.is_inner_layer)
        return NaturalGradient(guide, 0.1, optax.adam(0.01)) if known else optax.adam(0.01)

    job = Continued(num_steps, chosen, program, num_particles, memory, progress_bar)
    return job.run(posterior, rng_key, args, kwargs)
