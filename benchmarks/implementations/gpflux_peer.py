"""One training step with GPflux, compiled by ``tf.function``."""

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


def build(X: np.ndarray, y: np.ndarray, Z: np.ndarray, num_layers: int, dtype: str) -> Callable[[], float]:
    """A function that does one Adam step on the minibatch (X, y) and returns the loss before it."""
    gpflow.config.set_default_float(getattr(np, dtype))
    gpflow.config.set_default_jitter(1e-6 if dtype == "float64" else 1e-5)
    tf_keras.backend.set_floatx(dtype)
    X, y, Z = (np.asarray(a, dtype) for a in (X, y, Z))
    width, layers = X.shape[1], []
    for i in range(num_layers):
        last = i == num_layers - 1
        outputs = 1 if last else width
        kernel = gpflow.kernels.RBF(variance=1.0, lengthscales=[2.0] * width)
        layer = gpflux.layers.GPLayer(
            gpflow.kernels.SharedIndependent(kernel, output_dim=outputs),
            gpflow.inducing_variables.SharedIndependentInducingVariables(gpflow.inducing_variables.InducingPoints(Z)),
            num_data=len(X),
            mean_function=gpflow.functions.Zero() if last else gpflow.functions.Identity(),
            whiten=True,
        )
        if not last:
            layer.q_sqrt.assign(layer.q_sqrt * 1e-2)
        layers.append(layer)
    likelihood = gpflux.layers.LikelihoodLayer(gpflow.likelihoods.Gaussian(0.01))
    model = gpflux.models.DeepGP(layers, likelihood, num_data=len(X)).as_training_model()
    optimiser = tf_keras.optimizers.legacy.Adam(0.01)
    data = {"inputs": tf.constant(X), "targets": tf.constant(y[:, None])}

    @tf.function
    def update() -> tf.Tensor:
        with tf.GradientTape() as tape:
            model(data, training=True)
            loss = tf.add_n(model.losses)
        variables = model.trainable_variables
        optimiser.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return lambda: float(update()) * len(X)
