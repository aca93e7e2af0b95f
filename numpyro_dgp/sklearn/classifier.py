"""Classification with scikit-learn's interface."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from numpyro_dgp._checks import expected
from numpyro_dgp.sklearn.base_estimator import DeepGPEstimator
from numpyro_dgp.sklearn.layered_program import BernoulliOutcome, CategoricalOutcome

__all__ = ["DeepGPClassifier"]


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
