"""What every implementation offers for training on minibatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

RATE = 0.01  # of Adam


class Training(NamedTuple):
    """A model in training.

    ``update(X, y)`` does one step on a minibatch and returns its loss; ``predict(X, S)`` gives mean and variance of y
    given each of S draws of the hidden layers, (S, N) each.
    """

    update: Callable[[Any, Any], Any]
    predict: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
