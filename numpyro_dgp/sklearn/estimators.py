"""Regression and classification with scikit-learn's interface."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import Predictive
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d, validate_data

from numpyro_dgp._checks import expect, expected, require_count, require_levels
from numpyro_dgp.functions.layer_starts import Standardizer
from numpyro_dgp.sklearn.base_estimator import DeepGPEstimator
from numpyro_dgp.sklearn.layered_program import BernoulliOutcome, CategoricalOutcome, NormalOutcome, StudentTOutcome

__all__ = ["DeepGPClassifier", "DeepGPRegressor"]

_LIKELIHOODS: dict[str, Any] = {"normal": NormalOutcome, "student-t": StudentTOutcome}


class DeepGPRegressor(RegressorMixin, DeepGPEstimator):
    r"""Regression by a deep Gaussian process, for pipelines and searches of scikit-learn.

    .. math:: y = f_L(\dots f_2(f_1(x)) \dots) + \varepsilon, \qquad f_\ell \sim \mathrm{GP}(m_\ell, k_\ell)

    with inner layers that begin as the identity, kernels with a lengthscale for every input column, and noise
    :math:`\varepsilon` whose standard deviation is fitted for every output. X and y are standardised inside; all that
    goes in and comes out is in their own units. The fit is variational, with inducing points; natural gradients for the
    last layer and Adam for the rest.

    Predictions are mixtures over draws of the hidden layers. The draws are fixed by the fit, and are the same at every
    row, so that predictions do not depend on which rows are asked for together.

    It computes in the precision of JAX: single, unless ``numpyro.enable_x64()`` was called before, which simulators
    without noise may want.

    Args:
        layers: number of layers; 1 is a Gaussian process.
        num_inducing: M, inducing points of every layer; by default 100, and 200 beyond 2000 rows. Never more than there
            are distinct rows.
        kernel: name of a kernel in ``dgp.kernels``, such as ``"RBF"``, or a function of a variance and lengthscales
            (D,).
        guide: name of a guide in ``dgp.guides``, such as ``"MeanField"``, or a function from the program to its guide.
        likelihood: ``"normal"``, or ``"student-t"`` for outliers, with fitted degrees of freedom.
        num_steps: steps of the fit; by default as many as rows, 1000 at least and 5000 at most.
        learning_rate: of Adam in the first step; it falls to zero by a cosine.
        batch_size: rows of a minibatch, where there are more.
        num_samples: S, draws of the hidden layers in predictions.
        random_state: a number makes fits repeatable.
        verbose: show a progress bar.

    Attributes:
        model_: the program, a function of ``(X, y)`` in standard units.
        guide_: its guide.
        params_: parameters of the fit.
        posterior_: the :class:`~numpyro_dgp.Posterior`, which takes X in standard units.
        units_X_: :class:`~numpyro_dgp.initial.Standardizer` of X: ``units_X_(X)`` is what the program sees.
        units_y_: that of y.
        losses_: minus the bound in every step.

    Raises:
        ValueError: by ``fit``, NaN, infinite values or text in the data, fewer than two rows, invalid settings.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.sklearn import DeepGPRegressor
        >>> X = np.linspace(0, 6, 40)[:, None]
        >>> found = DeepGPRegressor(layers=1, num_steps=200, random_state=0).fit(X, 10 + np.sin(X[:, 0]))
        >>> mean, std = found.predict([[1.5], [4.5]], return_std=True)
        >>> print(mean.round(0), bool(std.max() < 0.5), found.score(X, 10 + np.sin(X[:, 0])) > 0.9)
        [11.  9.] True True

    Source: Salimbeni (2020), section 2.3.
    """

    def __init__(
        self,
        layers: int = 2,
        *,
        num_inducing: int | None = None,
        kernel: Any = "Matern52",
        guide: Any = "InducingPoint",
        likelihood: Literal["normal", "student-t"] = "normal",
        num_steps: int | None = None,
        learning_rate: float = 0.05,
        batch_size: int = 1000,
        num_samples: int = 100,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            layers,
            num_inducing=num_inducing,
            kernel=kernel,
            guide=guide,
            num_steps=num_steps,
            learning_rate=learning_rate,
            batch_size=batch_size,
            num_samples=num_samples,
            random_state=random_state,
            verbose=verbose,
        )
        self.likelihood = likelihood

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DeepGPRegressor:
        """Fit to inputs X (N, D) and targets y, (N,) or (N, P) for several outputs.

        Args:
            X: inputs, or a table of numbers.
            y: targets.
            sample_weight: how many times each row counts (N,): 2 as a row that is there twice, 0 as one that is left
                out; once each by default.

        Raises:
            ValueError: as the class.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        if not isinstance(self.likelihood, str) or self.likelihood not in _LIKELIHOODS:
            raise expected(
                f"likelihood to be one of {', '.join(_LIKELIHOODS)}", repr(self.likelihood), "student-t allows outliers"
            )
        X, y, weights = self._counted(X, np.asarray(y, float), sample_weight)
        self._tail = y.shape[1:]
        columns = y.reshape(len(y), *(() if y[0].size == 1 else self._tail))
        self.units_y_ = Standardizer.fit(columns, weights=weights)
        outputs = columns.shape[1] if columns.ndim > 1 else None
        self._fit(X, self.units_y_(columns), _LIKELIHOODS[self.likelihood](outputs), weights)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means of y at new inputs, and its standard deviations, noise included, with ``return_std=True``.

        Args:
            X: inputs (N, D).
            return_std: whether to give standard deviations too.

        Returns:
            Means, (N,) or (N, P) as y of the fit; with ``return_std`` a pair of such arrays.

        Raises:
            ValueError: other columns than in the fit, NaN, text, inputs so far away that their squares are infinite.
        """
        inputs = self._inputs(X)
        mean, variance = self._predictions.moments(inputs)
        mean = self._own_shape(self.units_y_.inverse(mean))
        if not return_std:
            return mean
        return mean, self._own_shape(np.sqrt(np.asarray(variance, float)) * np.asarray(self.units_y_.scale))

    def predict_quantiles(self, X: Any, q: Any = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of y at new inputs: those of the mixture over draws.

        Args:
            X: inputs (N, D).
            q: levels between 0 and 1.

        Returns:
            Quantiles (Q, N) or (Q, N, P), one row for each level.

        Raises:
            ValueError: no levels, a table of them, or levels that are not between 0 and 1; as :meth:`predict`.
        """
        inputs, levels = self._inputs(X), np.atleast_1d(q)
        expect(levels.ndim <= 1 and levels.size, "q to be one or more levels", f"shape {np.shape(q)}", "q=[0.05, 0.95]")
        require_levels(levels)
        found = self._predictions.quantile(inputs, tuple(levels.tolist()))
        return np.stack([self._own_shape(self.units_y_.inverse(row)) for row in found])

    def log_density(self, X: Any, y: Any) -> np.ndarray:
        """Log predictive density (N,) of observations, in units of y; of several outputs their joint density.

        Args:
            X: inputs (N, D).
            y: observations, (N,) or (N, P).

        Raises:
            ValueError: y of another shape than in the fit, or of other rows than X, NaN, text; as :meth:`predict`.
        """
        inputs = self._inputs(X)
        own = np.shape(self.units_y_.loc)
        if np.shape(y) not in [(len(inputs), *tail) for tail in ([own] if own else [(), (1,)])]:
            raise expected(
                f"y of shape {(len(inputs), *own)}, a row for every row of X with the outputs of the fit",
                f"shape {np.shape(y)}",
                "give y as in fit(X, y), at these rows",
            )
        given = check_array(y, ensure_2d=False, dtype=np.float64)
        units = np.log(np.asarray(self.units_y_.scale, float)).sum()
        rows = given.reshape(len(given), *own)
        return np.asarray(self._predictions.log_density(inputs, self.units_y_(rows)), float) - units

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at new inputs: whole functions, the same at all rows, with independent noise.

        Draws without noise are ``posterior_.using(num_samples=S).functions(key)``, a function of inputs in standard
        units.

        Args:
            X: inputs (N, D).
            n_samples: the number of draws, S.
            random_state: a number makes draws repeatable.

        Returns:
            Draws (N, S), or (N, P, S) where y of the fit had a second axis.

        Raises:
            ValueError: as :meth:`predict`, or an invalid number of draws.
        """
        inputs = self._inputs(X)
        require_count("n_samples", n_samples, "10")
        key = jax.random.key(check_random_state(random_state).randint(np.iinfo(np.int32).max))
        function_key, settings_key, noise_key = jax.random.split(key, 3)
        functions = self.posterior_.using(num_samples=n_samples).functions(function_key)(inputs)["y"]
        draws = Predictive(self.posterior_.guide, params=self.params_, num_samples=n_samples)(settings_key, inputs[:1])
        outcome = self.model_.outcome
        settings = {name: draws[name] for name in outcome.names}

        def draw(key: Any, values: Any, settings: Any) -> Any:
            return outcome.given(values, **settings).sample(key)

        found = jax.vmap(draw)(jax.random.split(noise_key, n_samples), jnp.asarray(functions), settings)
        own = [self._own_shape(row) for row in self.units_y_.inverse(found)]
        return np.stack(own, -1)

    def _own_shape(self, values: Any) -> np.ndarray:
        return np.asarray(values, float).reshape(len(values), *self._tail)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class DeepGPClassifier(ClassifierMixin, DeepGPEstimator):
    r"""Classification by a deep Gaussian process, for pipelines and searches of scikit-learn.

    .. math:: p(y = k \mid x) = \mathrm{softmax}_k\bigl(f_L(\dots f_1(x) \dots)\bigr)

    with a function per class; of two classes, with one function whose values are log odds. Layers, training and
    predictions are those of :class:`DeepGPRegressor`.

    Args:
        layers: number of layers; 1 is a Gaussian process.
        num_inducing: M, inducing points of every layer; by default 100, and 200 beyond 2000 rows. Never more than there
            are distinct rows.
        kernel: name of a kernel in ``dgp.kernels``, or a function of a variance and lengthscales (D,).
        guide: name of a guide in ``dgp.guides``, or a function from the program to its guide.
        num_steps: steps of the fit; by default as many as rows, 1000 at least and 5000 at most.
        learning_rate: of Adam in the first step; it falls to zero by a cosine.
        batch_size: rows of a minibatch, where there are more.
        num_samples: S, draws of the hidden layers in predictions.
        random_state: a number makes fits repeatable.
        verbose: show a progress bar.

    Attributes:
        classes_: the labels, in order.
        model_: the program, a function of ``(X, y)`` with X in standard units and y the numbers of labels.
        guide_: its guide.
        params_: parameters of the fit.
        posterior_: the :class:`~numpyro_dgp.Posterior`, which takes X in standard units.
        units_X_: :class:`~numpyro_dgp.initial.Standardizer` of X.
        losses_: minus the bound in every step.

    Raises:
        ValueError: by ``fit``, NaN, infinite values or text in X, targets that are no classes, a single class, settings
            that are none.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.sklearn import DeepGPClassifier
        >>> X = np.linspace(-1, 1, 40)[:, None]
        >>> y = np.where(abs(X[:, 0]) < 0.5, "inside", "outside")
        >>> found = DeepGPClassifier(layers=1, num_steps=200, random_state=0).fit(X, y)
        >>> print(found.predict([[0.0], [0.9]]), found.predict_proba([[0.0]]).shape)
        ['inside' 'outside'] (1, 2)

    Source: Salimbeni (2020), section 3.4.5.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DeepGPClassifier:
        """Fit to inputs X (N, D) and labels y (N,), numbers or text.

        Args:
            X: inputs, or a table of numbers.
            y: labels.
            sample_weight: how many times each row counts (N,): 2 as a row that is there twice, 0 as one that is left
                out; once each by default.

        Raises:
            ValueError: as the class.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        X, y, weights = self._counted(X, y, sample_weight)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise expected(
                "at least two classes", f"one class, {self.classes_.tolist()}", "give rows of another class too"
            )
        outcome = BernoulliOutcome() if len(self.classes_) == 2 else CategoricalOutcome(len(self.classes_))
        self._fit(X, jnp.asarray(labels), outcome, weights)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (N, K) of the classes at new inputs, averaged over draws, in the order of ``classes_``.

        Args:
            X: inputs (N, D).

        Raises:
            ValueError: other columns than in the fit, NaN, text, inputs so far away that their squares are infinite.
        """
        inputs = self._inputs(X)
        found = np.asarray(self._predictions.probs(inputs), float)
        return found / found.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The class (N,) of the largest probability at new inputs.

        Args:
            X: inputs (N, D).

        Raises:
            ValueError: as :meth:`predict_proba`.
        """
        p = self.predict_proba(X)
        return self.classes_[p.argmax(1)]
