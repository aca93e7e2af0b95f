r"""Nested variational compression, a deep bound without posteriors of hidden values.

Layers :math:`h^\ell = f^\ell(h^{\ell-1}) + \epsilon^\ell`, :math:`h^0 = X`; y is the last of them. Let
:math:`g(h) = W^\top h + b + a(h)^\top v` be the mean of a layer given its inducing values, W the slope of its mean
function and :math:`a(h) = L^{-1} k(Z, h)`. The hidden values of layer :math:`\ell` are Gaussian given v alone,
:math:`N(\langle g \rangle, \sigma^2)`, with expectations over the layer below, and every such step lowers the bound by
a trace. Each output of each hidden layer adds

.. math:: -\frac{1}{2\sigma^2} \sum_n \Bigl( \langle k(h, h) \rangle - \mathrm{tr} \langle a\, a^\top \rangle
          + E_{q(v)} \mathrm{var}_{h}[g(h)] \Bigr) ,

the last layer adds :math:`E_{q(v)} \langle \log N(y; f(h), \sigma^2) \rangle`, and the divergences of all q(v) are
subtracted.

Source: Hensman and Lawrence (2014). The notes listed with it lack the variance :math:`a^\top \Sigma\, a` of y in
their last formula, and factors 1/2 in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.bounds.collapsed import Observations, Quadratic, from_features, with_features
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.expectations import Integrate
from numpyro_dgp.math.gaussians import kl_full
from numpyro_dgp.math.linalg import matmul, times_transpose
from numpyro_dgp.math.quadratic_forms import quadratic_forms
from numpyro_dgp.math.row_blocks import in_blocks
from numpyro_dgp.math.whitening import inverse_cholesky

__all__ = ["NestedLayer", "nested_bound"]


@pytree
class NestedLayer:
    r"""A layer with P independent outputs and an explicit Gaussian over its whitened inducing values.

    Args:
        kernel: k, shared by the outputs.
        Z: inducing inputs (M, D).
        loc: means m of v (P, M).
        scale_tril: triangular roots R of their covariances (P, M, M).
        noise: standard deviation :math:`\sigma`, a number.
        W: slope of a linear mean function (D, P).
        b: its offset, a number or (P,).

    Raises:
        ValueError: arrays that do not fit together.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.bounds import NestedLayer
        >>> from numpyro_dgp.kernels import RBF
        >>> layer = NestedLayer(RBF(), jnp.linspace(-1, 1, 3)[:, None], jnp.zeros((1, 3)), jnp.eye(3)[None], noise=0.1)
        >>> layer.loc.shape, layer.noise
        ((1, 3), 0.1)
    """

    kernel: Kernel
    Z: Array
    loc: Array
    scale_tril: Array
    noise: Array | float
    W: Array | None = None
    b: Array | float = 0.0

    def __post_init__(self) -> None:
        (M, D), P = np.shape(self.Z), np.shape(self.loc)[0]
        expected = {"loc": (P, M), "scale_tril": (P, M, M)} | ({} if self.W is None else {"W": (D, P)})
        found = {"loc": np.shape(self.loc), "scale_tril": np.shape(self.scale_tril)}
        found |= {} if self.W is None else {"W": np.shape(self.W)}
        expect(
            found == expected,
            f"shapes {expected} for Z of shape {(M, D)}",
            found,
            "each output has a row of loc",
        )


def nested_bound(layers: Sequence[NestedLayer], X: Array, y: Array, *, integrate: Integrate = None) -> Array:
    r"""The bound of nested variational compression, a number.

    Args:
        layers: from the first to the last.
        X: inputs (N, D), known exactly.
        y: observations (N, P).
        integrate: how expectations of kernels are computed: ``None`` for the closed form,
            ``dgp.likelihoods.GaussHermite(n)`` for n nodes per input column, or ``dgp.likelihoods.MonteCarlo(n, key)``.

    Returns:
        The bound, a number in nats.

    Raises:
        ValueError: widths of layers that do not fit together, or a kernel whose expectations have no closed form.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.kernels import RBF
        >>> from numpyro_dgp.bounds import NestedLayer, nested_bound
        >>> Z, m, R = jnp.linspace(-1, 1, 3)[:, None], jnp.zeros((1, 3)), jnp.eye(3)[None]
        >>> layers = [NestedLayer(RBF(), Z, m, R, 0.1), NestedLayer(RBF(), Z, m, R, 0.5)]
        >>> nested_bound(layers, Z, jnp.sin(Z)).shape
        ()

    Source: Hensman and Lawrence (2014).
    """
    _require_widths(layers, X, y)
    bound, inputs = -sum(kl_full(layer.loc, layer.scale_tril).sum() for layer in layers), (X, None)
    for layer in layers[:-1]:
        penalty, inputs = _hidden(layer, *inputs, integrate)
        bound = bound - penalty
    data, _ = _data(layers[-1], *inputs, y, integrate)
    return bound + data.expected(layers[-1].loc, layers[-1].scale_tril).sum()


def _hidden(layer: NestedLayer, loc: Array, variance: Array | None, integrate: Integrate) -> tuple[Array, tuple]:
    """The trace term of a hidden layer, and means and variances (N, P) of its values."""
    zero = jnp.zeros((len(loc), len(layer.loc)), loc.dtype)
    # At y = 0 the expected log density contains the expected square of g(h) and the conditional variance. The trace
    # term is its difference to the log density with the square of the mean of g(h) and the variance that q(v) adds.
    data, A = _data(layer, loc, variance, zero, integrate)
    mean = _mean(layer, loc) + matmul(A, layer.loc.T)  # <g> = W' <h> + b + <a>' m
    belief_variance = in_blocks(partial(quadratic_forms, times_transpose(layer.scale_tril)), A)  # <a>' Σ <a>
    known = Observations(zero, layer.noise).log_density(jnp.square(mean) + belief_variance)
    penalty = known - data.expected(layer.loc, layer.scale_tril).sum()
    return penalty, (mean, belief_variance + jnp.square(layer.noise))  # of q(h^l): <g>, <a>' Σ <a> + σ^2


def _data(
    layer: NestedLayer, loc: Array, variance: Array | None, y: Array, integrate: Integrate
) -> tuple[Quadratic, Array]:
    """The quadratics of targets y (N, P), Phi (M, M), b (P, M), c (P,), and expected features (N, M)."""
    whiten = inverse_cholesky(layer.kernel.gram(layer.Z), "k(Z, Z) of a layer")
    if variance is None:
        A, k = matmul(layer.kernel(loc, layer.Z), whiten.T), layer.kernel.diag(loc)
        one = lambda t: from_features(A, k, Observations(t, layer.noise))  # noqa: E731
        return jax.vmap(one, 1, _SHARED_PHI)(y - _mean(layer, loc)), A  # type: ignore[arg-type]
    W = jnp.zeros((loc.shape[-1], y.shape[-1]), loc.dtype) if layer.W is None else layer.W

    def output(t: Array, w: Array) -> tuple[Quadratic, Array]:
        # y - g(h) with the slope W on the side of y: y - b - w' h - a(h)' v
        tilt = None if layer.W is None else jnp.broadcast_to(-w, loc.shape)
        where = layer.kernel, layer.Z, whiten, loc, variance
        return with_features(*where, Observations(t, layer.noise), tilt=tilt, integrate=integrate)  # type: ignore[arg-type]

    return jax.vmap(output, 1, (_SHARED_PHI, None))(y - layer.b, W)  # type: ignore[arg-type]


# For ``jax.vmap`` over outputs: Phi has no axis of outputs, because it depends on the inputs only.
_SHARED_PHI = Quadratic(None, 0, 0, 0)  # type: ignore[arg-type]


def _mean(layer: NestedLayer, loc: Array) -> Array | float:
    return layer.b + (0.0 if layer.W is None else matmul(loc, layer.W))


def _require_widths(layers: Sequence[NestedLayer], X: Array, y: Array) -> None:
    widths = [np.shape(X)[-1], *(len(layer.loc) for layer in layers)]
    wanted = [*(np.shape(layer.Z)[-1] for layer in layers), np.shape(y)[-1]]
    expect(
        np.ndim(y) == 2 and len(y) == len(X) and widths == wanted,
        f"y of shape (N, P) and layers of widths {wanted}",
        f"y {np.shape(y)} for inputs {np.shape(X)} and widths {widths}",
        "the columns of Z are the outputs of the layer below",
    )
