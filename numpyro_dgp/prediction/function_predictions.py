"""Predictions of whole functions: draws of them, and their values at several inputs together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

from numpyro_dgp._checks import require_count, require_key
from numpyro_dgp._typing import Array
from numpyro_dgp.fitted import Fit
from numpyro_dgp.prediction import quantities
from numpyro_dgp.prediction.joint_functions import jointly_of
from numpyro_dgp.prediction.joint_mixture import JointMixture
from numpyro_dgp.prediction.predictor import Predictor
from numpyro_dgp.prediction.quantity import Options, Quantity

__all__ = ["FunctionPredictions"]


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionPredictions(Fit):
    """A fitted program, the compiled programs of its predictions, and predictions of whole functions."""

    def predict_jointly(
        self, key: Array, *args: Any, num_samples: int | None = None, num_features: int = 1024, **kwargs: Any
    ) -> JointMixture:
        """Joint moments of the function under the observed ``Likelihood`` at the rows of a call: a mixture over draws.

        As :meth:`predict_function`, with the covariances between rows: variances are the same. Given each draw, the
        layers below are whole functions, the same at every call with this key and differentiable in the inputs, and
        the last layer is Gaussian: with v integrated out where the guide has a Gaussian q(v), otherwise given a draw
        of v, from the guide or the chain. One layer with a Gaussian q(v) and fixed hyperparameters is one Gaussian, S
        times. A function that is below itself is known given a draw, with covariances of zero. It can be called with
        tracers, inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_samples: S; with ``samples``, that many of them, evenly spaced. 100 by default, or all draws if
                ``samples`` has fewer.
            num_features: random functions in each prior draw of a layer below, as for :meth:`functions`.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict_function`, exact processes and those of ``dgp.Neighbours``, several values of
                one function under the ``Likelihood``, or a kernel below the last layer without random features.
        """
        require_count("Posterior.predict_jointly", "num_features", num_features, "1024")
        quantity = Quantity(jointly_of, settings=(num_features,))
        found: JointMixture = self._predictor(quantity, key, Options(num_samples, every=True), args, kwargs)
        return found

    def functions(
        self,
        key: Array,
        *,
        num_samples: int | None = None,
        num_features: int = 1024,
        batch_size: int | None = None,
        progress_bar: bool = True,
    ) -> Callable[..., dict[str, Array]]:
        """Draws of whole functions, consistent across inputs.

        Args:
            key: PRNG key; it fixes the draws.
            num_samples: S; 10 by default, or all draws if ``samples`` has fewer.
            num_features: random functions in each prior draw; the covariance is exact for any number of them, and the
                distribution is Gaussian in the limit of many.
            batch_size: rows predicted at a time, for results in NumPy arrays; all together by default.
            progress_bar: show a progress bar over batches.

        Returns:
            A function of the model's arguments, giving ``{site: values (S, N, ...)}`` for every hidden layer and for
            the function under the observed site. The same inputs give the same values in every call.

        Raises:
            ValueError: numbers that are not positive; by the function, a kernel without random features.
        """
        require_key("Posterior", key)
        require_count("Posterior.functions", "num_features", num_features, "1024")
        options = Options(num_samples, batch_size, progress_bar, default=10)
        quantity = Quantity(quantities.functions_of, settings=(num_features,))
        return lambda *args, **kwargs: self._predictor(quantity, key, options, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled and copied without its compiled programs."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def _predictor(self) -> Predictor:
        """Its programs go with this object; what they compile to is shared with others."""
        return Predictor(self)
