"""What the regressor and the classifier share: settings, checks, the fit, and what it hands out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from numpyro_dgp import guides, kernels
from numpyro_dgp._checks import nearest, require_count, require_squares
from numpyro_dgp._typing import Array
from numpyro_dgp.guides import Guide
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.stationary import Stationary
from numpyro_dgp.layer_starts import Standardizer
from numpyro_dgp.predict import Posterior
from numpyro_dgp.sklearn.layered_program import LayeredProgram, Outcome, starts_of
from numpyro_dgp.sklearn.recipe import default_num_inducing, default_num_steps, train
from numpyro_dgp.sklearn.same_draws import SameDraws

__all__ = ["DeepGPEstimator"]


class DeepGPEstimator(BaseEstimator):
    """The base of both estimators: ``_fit`` on standardised data, and predictions from it."""

    def __init__(
        self,
        layers: int = 2,
        *,
        num_inducing: int | None = None,
        kernel: Any = "Matern52",
        guide: Any = "InducingPoint",
        num_steps: int | None = None,
        learning_rate: float = 0.05,
        batch_size: int = 1000,
        num_samples: int = 100,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.layers = layers
        self.num_inducing = num_inducing
        self.kernel = kernel
        self.guide = guide
        self.num_steps = num_steps
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.num_samples = num_samples
        self.random_state = random_state
        self.verbose = verbose

    def _fit(self, X: np.ndarray, y: Array, outcome: Outcome, weights: np.ndarray | None) -> None:
        """Fit to inputs (N, D) in their own units and observations in those of the program."""
        owner = type(self).__name__
        self._require_settings(owner)
        kernel = _named(owner, "kernel", self.kernel, kernels, _takes_lengthscales)
        guide = _named(owner, "guide", self.guide, guides, _is_guide)
        start, fit, draws = check_random_state(self.random_state).randint(np.iinfo(np.int32).max, size=3).tolist()
        self.units_X_ = Standardizer.fit(X, weights=weights)
        inputs = self.units_X_(X)
        num_inducing = self.num_inducing or default_num_inducing(len(X))
        self.model_ = LayeredProgram(starts_of(inputs, self.layers, num_inducing, start), kernel, outcome)
        self.guide_ = guide(self.model_)
        result, data = train(
            self.model_,
            self.guide_,
            inputs,
            y,
            weights,
            num_steps=self.num_steps or default_num_steps(len(X)),
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            seed=fit,
            progress_bar=bool(self.verbose),
        )
        self.params_, self.losses_ = result.params, np.asarray(result.losses)
        fitted = self.guide_.on(*data) if isinstance(self.guide_, Guide) else self.guide_
        self.posterior_ = Posterior(self.model_, fitted, self.params_)
        self._predictions = SameDraws(self.posterior_, draws, self.num_samples)

    def _counted(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        """The rows with a weight, and their weights (N,), ``None`` where all count once."""
        if sample_weight is None:
            return X, y, None
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if not (weights >= 0).all() or (weights > 0).sum() < 2:
            raise ValueError(
                f"{type(self).__name__}.fit: expected sample_weight that is not negative, and positive for two rows at "
                f"least, got {(weights < 0).sum()} negative and {(weights > 0).sum()} positive: a weight is how many "
                "times a row counts"
            )
        kept = weights > 0
        return X[kept], y[kept], weights[kept]

    def _inputs(self, X: Any) -> Array:
        """New inputs in standard units, checked against those of the fit.

        Args:
            X: inputs (N, D).

        Raises:
            ValueError: other columns than in the fit, NaN, text, inputs so far away that their squares are infinite.
        """
        check_is_fitted(self)
        given = validate_data(self, X, reset=False, dtype=np.float64)
        with np.errstate(over="ignore"):  # what is infinite in the precision of JAX is refused
            inputs = self.units_X_(given)
        require_squares("X, standardised as in the fit,", inputs)
        return inputs

    def _require_settings(self, owner: str) -> None:
        counts = {"layers": "2", "batch_size": "1000", "num_samples": "100"}
        counts |= {name: f"{name}=None" for name in ("num_inducing", "num_steps") if getattr(self, name) is not None}
        for name, hint in counts.items():
            require_count(owner, name, getattr(self, name), hint)
        rate = self.learning_rate
        if not isinstance(rate, int | float | np.number) or not 0 < rate < np.inf:
            raise ValueError(f"{owner}: expected a positive learning_rate, got {rate!r}: try 0.05")


def _is_guide(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Guide) and _needs(value) == {"model"}


def _takes_lengthscales(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Stationary)


def _needs(value: Callable[..., Any]) -> set[str]:
    """Arguments that a callable cannot do without."""
    given = inspect.signature(value).parameters.values()
    return {p.name for p in given if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _named(owner: str, name: str, value: Any, module: Any, fits: Callable[[Any], bool]) -> Callable[..., Any]:
    """What a setting means: a function is itself, and a text the name of one in a module."""
    if isinstance(value, Kernel | Guide):
        made = type(value).__name__
        raise ValueError(
            f"{owner}: expected {name} to be the name of one, or a function that makes it, got a {made} that is made "
            f"already, which has no program or hyperparameters of this fit: {name}={made!r}"
        )
    if callable(value):
        return value
    names = [n for n in module.__all__ if fits(getattr(module, n))]
    if value not in names:
        near = nearest(value, names) if isinstance(value, str) else None
        hint = f"{name}={near!r}" if near else f"or a function, as dgp.{name}s has them"
        raise ValueError(f"{owner}: expected {name} to be one of {', '.join(names)}, got {value!r}: {hint}")
    return getattr(module, value)
