"""``StreamingBound``: the evidence lower bound of new rows, with a fit in place of the rows before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._typing import Array
from numpyro_dgp.guides.run import Run
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.new_data.fitted_layers import FittedLayer, functions_of

__all__ = ["StreamingBound"]


class StreamingBound(ELBO):
    r"""The bound of new rows, where what earlier rows said of a layer is the ratio of its posterior to its prior.

    .. math:: \mathcal L = E_q[\log p(y_\mathrm{new} \mid f)] - \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)]
              + \lambda \sum_\ell E_q\Bigl[\log \frac{q_\mathrm{old}(u^\ell)}{p_\mathrm{old}(u^\ell)}\Bigr], \qquad
              u^\ell = f^\ell(Z^\ell_\mathrm{old}) .

    Both densities of the last term are those of the earlier fit, with its hyperparameters; the values u are those of
    the function now. They are Gaussian under q, so that the term has a closed form and adds no noise.

    Args:
        fitted: the layers of the earlier fit, by site.
        num_particles: as in :class:`~numpyro_dgp.ELBO`.
        memory: :math:`\lambda`.

    Source: Bui et al. (2017), equation 6, here for each layer of a program.
    """

    def __init__(self, fitted: Mapping[str, FittedLayer], num_particles: int = 1, *, memory: float = 1.0) -> None:
        super().__init__(num_particles)
        self.fitted = dict(fitted)
        self.memory = jnp.asarray(memory)  # an array, so that compiled steps are for any

    def _of_run(self, found: Run, temperature: Array | None) -> Any:
        functions = functions_of(found.model)
        ratios = [layer.log_ratio(functions[name]) for name, layer in self.fitted.items()]
        ratio = jnp.sum(jnp.stack(ratios))
        return super()._of_run(found, temperature) + self.memory.astype(ratio.dtype) * ratio
