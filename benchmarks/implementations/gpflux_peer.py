"""Training with GPflux, a step compiled by ``tf.function``."""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from collections.abc import Callable

import gpflow
import gpflux
import numpy as np
import tensorflow as tf
import tf_keras
from implementations.gpflow_peer import use_precision
from implementations.training import RATE, Training


def train(Z: np.ndarray, num_layers: int, dtype: str, num_data: int, xla: bool = False) -> Training:
    """The model of ``ours.py``, trained by Adam; with ``xla`` a step is compiled by XLA."""
    use_precision(dtype)
    tf_keras.backend.set_floatx(dtype)
    Z = np.asarray(Z, dtype)
    width, layers = Z.shape[1], []
    for i in range(num_layers):
        last = i == num_layers - 1
        outputs = 1 if last else width
        kernel = gpflow.kernels.RBF(variance=1.0, lengthscales=[2.0] * width)
        layer = gpflux.layers.GPLayer(
            gpflow.kernels.SharedIndependent(kernel, output_dim=outputs),
            gpflow.inducing_variables.SharedIndependentInducingVariables(gpflow.inducing_variables.InducingPoints(Z)),
            num_data=num_data,
            mean_function=gpflow.functions.Zero() if last else gpflow.functions.Identity(),
            whiten=True,
        )
        if not last:
            layer.q_sqrt.assign(layer.q_sqrt * 1e-2)
        layers.append(layer)
    likelihood = gpflux.layers.LikelihoodLayer(gpflow.likelihoods.Gaussian(0.01))
    deep = gpflux.models.DeepGP(layers, likelihood, num_data=num_data)
    model, prediction = deep.as_training_model(), deep.as_prediction_model()
    optimiser = tf_keras.optimizers.legacy.Adam(RATE)

    @tf.function(jit_compile=xla or None)
    def update(X: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            model({"inputs": X, "targets": y[:, None]}, training=True)
            loss = tf.add_n(model.losses)
        variables = model.trainable_variables
        optimiser.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss * num_data

    @tf.function
    def one_draw(X: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        found = prediction(X)
        return found.y_mean[:, 0], found.y_var[:, 0]

    def predict(X: np.ndarray, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
        draws = [one_draw(tf.constant(X, dtype)) for _ in range(num_draws)]
        means, variances = np.asarray(draws).swapaxes(0, 1)
        return means, variances

    return Training(lambda X, y: update(tf.convert_to_tensor(X, dtype), tf.convert_to_tensor(y, dtype)), predict)


def build(
    X: np.ndarray, y: np.ndarray, Z: np.ndarray, num_layers: int, dtype: str, xla: bool = False
) -> Callable[[], float]:
    """A function that does one Adam step on the minibatch (X, y) and returns the loss before it."""
    update, _ = train(Z, num_layers, dtype, len(X), xla)
    data = tf.constant(X, dtype), tf.constant(y, dtype)
    return lambda: float(update(*data))
