"""One layer with GPflow's sparse variational model, a step compiled by ``tf.function``."""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from collections.abc import Callable

import gpflow
import numpy as np
import tensorflow as tf
import tf_keras
from implementations.training import RATE


def use_precision(dtype: str) -> None:
    """Numbers and jitter of GPflow, here and under GPflux."""
    gpflow.config.set_default_float(getattr(np, dtype))
    gpflow.config.set_default_jitter(1e-6 if dtype == "float64" else 1e-5)


def build(
    X: np.ndarray, y: np.ndarray, Z: np.ndarray, num_layers: int, dtype: str, xla: bool = False
) -> Callable[[], float]:
    """A function that does one Adam step on the minibatch (X, y) and returns the loss before it."""
    if num_layers != 1:
        raise ValueError(f"gpflow: expected one layer, got {num_layers}")
    use_precision(dtype)
    model = gpflow.models.SVGP(
        gpflow.kernels.RBF(variance=1.0, lengthscales=[2.0] * X.shape[1]),
        gpflow.likelihoods.Gaussian(0.01),
        gpflow.inducing_variables.InducingPoints(np.asarray(Z, dtype)),
        num_data=len(X),
    )
    data = tf.constant(X, dtype), tf.constant(y[:, None], dtype)
    optimiser = tf_keras.optimizers.legacy.Adam(RATE)

    @tf.function(jit_compile=xla or None)
    def update(X: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = -model.maximum_log_likelihood_objective((X, y))
        variables = model.trainable_variables
        optimiser.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return lambda: float(update(*data))
