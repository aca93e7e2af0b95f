"""Tempered training: an optimiser under which the divergences count little at first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from numpyro.optim import _NumPyroOptim, optax_to_numpyro

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._repr import brief
from numpyro_dgp.inference.elbo import tempered

__all__ = ["Tempered"]


class Tempered(_NumPyroOptim):
    r"""An optimiser that multiplies the divergences of ``dgp.ELBO`` by a temperature which depends on the step.

    .. math:: \mathcal L_t = \sum_n E_q \log p(y_n \mid f(h_n))
              - \beta_t \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)]

    With :math:`\beta_t` that rises to one (KL warm-up) layers find a use before their divergence prices them out, and
    the fit ends with the bound itself. Losses of steps with another temperature are no bounds; ``svi.evaluate`` and
    ``dgp.ELBO().loss`` have no temperature. What is multiplied are the divergences of all latent sites, those of
    hyperparameters and latents too; the importance weights of latents (``num_samples``) are left as they are.

    Args:
        optimizer: from optax or NumPyro, or a :class:`NaturalGradient`.
        temperature: from the number of the step to :math:`\beta_t`, not negative, such as
            ``optax.linear_schedule(0.0, 1.0, 500)``; or a number, for all steps.

    Raises:
        ValueError: another kind of optimiser; a temperature that is negative or not finite at step 0; in the first
            step, an objective without temperature, such as ``Trace_ELBO``, or a guide that has integrated its
            divergences (``Collapsed``).

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> from numpyro_dgp.optim import Tempered
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> optimizer = Tempered(optax.adam(0.05), optax.linear_schedule(0.0, 1.0, 100))
        >>> svi = SVI(model, dgp.guides.InducingPoint(model), optimizer, dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 300, X, X[:, 0] ** 2, progress_bar=False)
        >>> bool(svi.evaluate(result.state, X, X[:, 0] ** 2) < 0)
        True

    Source: Sonderby et al. (2016), section 2.3.
    """

    __repr__ = brief

    def __init__(
        self,
        optimizer: optax.GradientTransformation | _NumPyroOptim,
        temperature: float | Callable[[Any], Any],
    ) -> None:
        if isinstance(optimizer, optax.GradientTransformation):
            optimizer = optax_to_numpyro(optimizer)
        if not isinstance(optimizer, _NumPyroOptim):
            raise ValueError(
                f"Tempered: expected an optimiser of optax, NumPyro or dgp.optim, got {type(optimizer).__name__}: "
                "Tempered(optax.adam(0.01), optax.linear_schedule(0.0, 1.0, 500))"
            )
        self.optimizer, self.temperature = optimizer, temperature
        self.schedule: Callable[[Any], Any] = temperature if callable(temperature) else lambda _: temperature
        first: Any = self.schedule(0)
        if is_concrete(first) and (np.shape(first) or not _is_number(first) or not 0 <= first < np.inf):
            raise ValueError(
                f"Tempered: expected a temperature that is finite and not negative, got {first!r} at step 0: "
                "optax.linear_schedule(0.0, 1.0, 500), for instance"
            )
        super().__init__(lambda: (optimizer.init_fn, optimizer.update_fn, optimizer.get_params_fn))

    def init(self, params: Any) -> Any:
        """The optimiser's own state."""
        return self.optimizer.init(params)

    def update(self, g: Any, state: Any, value: Any = None) -> Any:
        """The optimiser's own step, on a gradient."""
        return self.optimizer.update(g, state, value=value)

    def get_params(self, state: Any) -> Any:
        """The unconstrained parameters."""
        return self.optimizer.get_params(state)

    def eval_and_update(
        self, fn: Callable[[Any], tuple], state: Any, forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Any, Any], Any]:
        """The tempered loss and the state after one step on it."""
        return self._step(self.optimizer.eval_and_update, fn, state, forward_mode_differentiation)

    def eval_and_stable_update(
        self, fn: Callable[[Any], tuple], state: Any, forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Any, Any], Any]:
        """The same; where the loss or its gradient is not finite, the state stays and the loss is NaN."""
        return self._step(self.optimizer.eval_and_stable_update, fn, state, forward_mode_differentiation)

    def _step(self, update: Callable[..., Any], fn: Callable[[Any], tuple], state: Any, forward: bool) -> Any:
        loss, readers = tempered(fn, jnp.asarray(self.schedule(state[0])))
        found = update(loss, state, forward)
        if not readers:
            raise ValueError(
                "Tempered: expected an objective with a temperature, dgp.ELBO() or dgp.PredictiveObjective(), got "
                "another: it would have ignored the schedule"
            )
        return found


def _is_number(value: Any) -> bool:
    return np.issubdtype(np.asarray(value).dtype, np.number)
