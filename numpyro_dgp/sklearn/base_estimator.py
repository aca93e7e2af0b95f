"""The base class of the regressor and the classifier: settings, checks and the fit. Numbers of inducing points and
steps depend on the number of rows. Predictions use the same random numbers at every row, so that they do not depend on
the other rows.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from numpyro_dgp import guides, kernels
from numpyro_dgp._checks import expect, expected, nearest, require_count, require_squares
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.layer_starts import Standardizer
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import fit
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.stationary import Stationary
from numpyro_dgp.optim.natural import NaturalGradient, log_linear
from numpyro_dgp.predict.posterior import Posterior
from numpyro_dgp.predict.predictor import round_up
from numpyro_dgp.sklearn.layered_program import LayeredProgram, Outcome, starts_of

__all__ = ["DeepGPEstimator", "SameDraws", "default_num_inducing", "default_num_steps", "filled_up"]

_RAMP = log_linear(1e-4, 0.2, 40)


def default_num_inducing(rows: int) -> int:
    """M for that many rows."""
    return 100 if rows <= 2000 else 200


def default_num_steps(rows: int) -> int:
    """Steps for that many rows."""
    return min(max(1000, rows), 5000)


def filled_up(rows: int) -> int:
    """The number of rows that a fit runs at, so that folds of nearly one size share a compiled program.

    Example:
        >>> [filled_up(n) for n in (10, 353, 354, 1000)]
        [16, 384, 384, 1024]
    """
    step = max(16, 2 ** (rows.bit_length() - 4))
    return -(-rows // step) * step


_BLOCK = 500


class SameDraws:
    """Predictions of a fit, row by row, from the same draws of the latent numbers at every row.

    The draws at a row have the distribution that they have in ``posterior.predict``; so has the mixture there. As
    functions of the row they are smooth, and a row is predicted alike alone, in any order and in any company.

    Args:
        posterior: the fit, with its number of draws.
        seed: of the draws.
    """

    def __init__(self, posterior: Posterior, seed: int) -> None:
        self.posterior, self.seed = posterior, seed
        self._programs: dict[Any, Compiled] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickled and copied without its compiled programs."""
        return {**vars(self), "_programs": {}}

    def moments(self, X: Array) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances (N, ...) of y at rows of X (N, D)."""
        mean, variance = self._at("predict", X)
        return mean, variance

    def log_density(self, X: Array, y: Array) -> np.ndarray:
        """Log densities (N,) of observations."""
        return self._at("log_density", X, y)

    def quantile(self, X: Array, q: tuple[float, ...]) -> np.ndarray:
        """Quantiles (Q, N, ...) of y."""
        return np.moveaxis(self._at("quantile", X, settings=q), 1, 0)

    def probs(self, X: Array) -> np.ndarray:
        """Probabilities (N, K) of labels."""
        return self._at("probs", X)

    def _at(self, method: str, *rows: Array, settings: tuple[Any, ...] = ()) -> Any:
        """A method of the posterior at every row, a block of rows at a time; blocks of few sizes share programs."""
        name = method, settings
        if name not in self._programs:
            of_row = partial(self._of_row, method, settings)
            self._programs[name] = Compiled(lambda params, key, *rows: jax.vmap(partial(of_row, params, key))(*rows))
        program, total = self._programs[name], len(rows[0])
        size = min(_BLOCK, round_up(total))
        key, found = jax.random.key(self.seed), []
        for start in range(0, total, size):
            index = np.minimum(np.arange(start, start + size), total - 1)
            block = program(dict(self.posterior.params), key, *(jnp.asarray(np.asarray(a)[index]) for a in rows))
            found.append(jax.tree.map(lambda a, stop=total - start: np.asarray(a)[:stop], block))
        return jax.tree.map(lambda *blocks: np.concatenate(blocks), *found)

    def _of_row(self, method: str, settings: tuple[Any, ...], params: Any, key: Array, x: Array, *others: Array) -> Any:
        posterior = dataclasses.replace(self.posterior, params=params)  # arguments, so that fits share the program
        before: tuple[Any, ...] = (np.array(settings),) if settings else tuple(other[None] for other in others)
        run: Callable[..., Any] = getattr(posterior, method)
        found = run(key, *before, x[None])
        if method == "predict":
            return found.mean[0], found.variance[0]
        return found[:, 0] if settings else found[0]


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
        self._require_settings()
        kernel = _named("kernel", self.kernel, kernels, _takes_lengthscales)
        guide = _named("guide", self.guide, guides, _is_guide)
        start, fit, draws = check_random_state(self.random_state).randint(np.iinfo(np.int32).max, size=3).tolist()
        self.units_X_ = Standardizer.fit(X, weights=weights)
        inputs = self.units_X_(X)
        num_inducing = self.num_inducing or default_num_inducing(len(X))
        self.model_ = LayeredProgram(starts_of(inputs, self.layers, num_inducing, start), kernel, outcome)
        self.guide_ = guide(self.model_)
        result, data = self._trained(inputs, y, weights, fit)
        self.params_, self.losses_ = result.params, np.asarray(result.losses)
        self.posterior_ = Posterior(self.model_, adapted(self.guide_).on(*data), self.params_)
        self._predictions = SameDraws(self.posterior_.using(num_samples=self.num_samples), draws)

    def _trained(
        self, X: Array, y: Array, weights: np.ndarray | None, seed: int
    ) -> tuple[SVIRunResult, tuple[Array, Array, Array]]:
        """Fit the program to inputs (N, D), observations (N, ...) and how many times each row counts (N,); step sizes
        fall to zero by a cosine.

        Gaussian q(v) of the last layer take natural steps, of size 0.2 after a ramp; all other parameters take steps of
        Adam.

        Returns:
            The fit, and the data that it ran at: rows are filled up.
        """
        num_steps, size = self.num_steps or default_num_steps(len(X)), filled_up(len(X))
        index = np.minimum(np.arange(size), len(X) - 1)
        known = jnp.arange(size) < len(X)
        counts = known if weights is None else known * jnp.asarray(weights[index], X.dtype)
        data = jnp.asarray(np.asarray(X)[index]), jnp.asarray(np.asarray(y)[index]), counts
        guide, rate, fall = self.guide_, self.learning_rate, optax.cosine_decay_schedule(1.0, num_steps)
        adam = optax.adam(lambda step: rate * fall(step))
        natural = isinstance(guide, Guide) and guide.config.rules.inducing.gaussian is not None
        optimizer = NaturalGradient(guide, lambda step: _RAMP(step) * fall(step), adam) if natural else adam
        svi = SVI(self.model_, guide, optimizer, ELBO())
        rows = self.batch_size if self.batch_size < size else None
        return fit(svi, jax.random.key(seed), num_steps, *data, rows, progress_bar=bool(self.verbose)), data

    def _counted(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        """The rows with a weight, and their weights (N,), ``None`` where all count once."""
        if sample_weight is None:
            return X, y, None
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if not (weights >= 0).all() or (weights > 0).sum() < 2:
            raise expected(
                "sample_weight that is not negative, and positive for two rows at least",
                f"{(weights < 0).sum()} negative and {(weights > 0).sum()} positive",
                "a weight is how many times a row counts",
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
        with np.errstate(over="ignore"):  # require_squares raises for what overflows
            inputs = self.units_X_(given)
        require_squares("X, standardised as in the fit,", inputs)
        return inputs

    def _require_settings(self) -> None:
        require_count("layers", self.layers, "2")
        require_count("batch_size", self.batch_size, "1000")
        require_count("num_samples", self.num_samples, "100")
        if self.num_inducing is not None:
            require_count("num_inducing", self.num_inducing, "num_inducing=None")
        if self.num_steps is not None:
            require_count("num_steps", self.num_steps, "num_steps=None")
        rate = self.learning_rate
        expect(isinstance(rate, int | float | np.number) and 0 < rate < np.inf, "learning_rate > 0", repr(rate), "0.05")


def _is_guide(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Guide) and _needs(value) == {"model"}


def _takes_lengthscales(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Stationary)


def _needs(value: Callable[..., Any]) -> set[str]:
    """Arguments that a callable cannot do without."""
    given = inspect.signature(value).parameters.values()
    return {p.name for p in given if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _named(name: str, value: Any, module: Any, fits: Callable[[Any], bool]) -> Callable[..., Any]:
    """What a setting means: a function is itself, and a text the name of one in a module."""
    if isinstance(value, Kernel | Guide):
        made = type(value).__name__
        raise expected(
            f"{name} to be the name of one, or a function that makes it",
            f"a {made} that is made already, which has no program or hyperparameters of this fit",
            f"{name}={made!r}",
        )
    if callable(value):
        return value
    names = [n for n in module.__all__ if fits(vars(module)[n])]
    if value not in names:
        near = nearest(value, names) if isinstance(value, str) else None
        hint = f"{name}={near!r}" if near else f"or a function, as dgp.{name}s has them"
        raise expected(f"{name} to be one of {', '.join(names)}", repr(value), hint)
    return vars(module)[value]
