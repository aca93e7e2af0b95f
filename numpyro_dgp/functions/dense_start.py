"""A layer on ``dgp.Harmonics`` that begins at a dense layer of a trained network."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._checks import require_finite
from numpyro_dgp._data import as_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.functions.harmonics import HarmonicFunction, Harmonics
from numpyro_dgp.functions.weights import KnownWeights
from numpyro_dgp.kernels.nonstationary import ArcCosine
from numpyro_dgp.kernels.sphere import Zonal, extended
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.math.spherical_harmonics import degree_shares, harmonics
from numpyro_dgp.means import ZeroMean

__all__ = ["from_dense"]


def from_dense(harmonic: Harmonics, kernel: Any, weights: ArrayLike, bias: ArrayLike, readout: ArrayLike) -> Array:
    r"""Whitened values at which a layer on ``dgp.Harmonics`` is a trained dense layer, up to the degrees that it keeps.

    .. math:: \sum_h a_h\, (w_h \cdot x + b_h)_+^n = r(x) \sum_h a_h \lVert \tilde w_h \rVert^n
              \sum_l s_l\, P_l(\hat w_h \cdot \hat x)
              \quad\Rightarrow\quad
              v_l = \frac{s_l}{\sqrt{a_l}} \sum_h a_h \lVert \tilde w_h \rVert^n B_l(\hat w_h)

    with :math:`\tilde w_h = (w_{hd} / \sigma_d, b_h / \sigma_0)`, n the order of the kernel and :math:`s_l` the parts
    of the unit :math:`\tau_+^n`. What degrees that are not kept say of the network is lost.

    Args:
        harmonic: the representation of the layer.
        kernel: its kernel, :class:`~numpyro_dgp.kernels.ArcCosine` or :class:`~numpyro_dgp.kernels.Zonal`.
        weights: w (D, H), as Flax and Keras have them.
        bias: b (H,).
        readout: a (H, P), or (H,) for a scalar function.

    Returns:
        v (P, M), or (M,): ``init_params={"f_auto_loc": v}`` for a layer ``f`` under ``guides.InducingPoint``.

    Raises:
        ValueError: another kernel, arrays of other shapes, or numbers that are not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro_dgp as dgp
        >>> kernel, harmonic = dgp.kernels.ArcCosine(), dgp.Harmonics(columns=1, degrees=(0, 1, 2, 4, 6, 8))
        >>> v = dgp.initial.from_dense(harmonic, kernel, jnp.array([[2.0]]), jnp.array([1.0]), jnp.array([3.0]))
        >>> with numpyro.handlers.substitute(data={"f": v}), numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", kernel, harmonic)
        >>> print(f(jnp.array([[1.0], [-3.0]])).mean.round(1))  # 3 relu(2 x + 1)
        [ 9.  -0.1]

    Source: Dutordoir et al. (2021), section 3, for layers of networks as layers of deep Gaussian processes.
    """
    if not isinstance(kernel, ArcCosine | Zonal) or not isinstance(harmonic, Harmonics):
        raise ValueError(
            "from_dense: expected dgp.Harmonics with a kernel ArcCosine or Zonal, got "
            f"{type(harmonic).__name__} with {type(kernel).__name__}: from_dense(harmonic, kernel, weights, ...)"
        )
    given = {"weights": weights, "bias": bias, "readout": readout}
    w, b, a = (jnp.asarray(as_numbers(f"{name} of from_dense", value), float) for name, value in given.items())
    units = w.shape[-1] if w.ndim == 2 else None
    if w.ndim != 2 or w.shape[0] != harmonic.columns or b.shape != (units,) or a.ndim not in (1, 2) or len(a) != units:
        raise ValueError(
            f"from_dense: expected weights ({harmonic.columns}, H), bias (H,) and readout (H, P) or (H,), got "
            f"{w.shape}, {b.shape} and {a.shape}: transpose weights of PyTorch"
        )
    for name, value in given.items():
        require_finite(f"{name} of from_dense", value, "check the training of the network")
    scales = extended(jnp.ones((1, harmonic.columns)), kernel.weight_variances, kernel.bias_variance)
    units_at = jnp.concatenate([w, b[None]]).T / scales
    length = jnp.linalg.norm(units_at, axis=-1, keepdims=True)
    degrees, sphere = tuple(harmonic.degrees), harmonic.columns + 1  # type: ignore[arg-type]
    own = HarmonicFunction(
        kernel, harmonic.columns, sphere, degrees, KnownWeights(jnp.zeros(0)), None, ZeroMean()
    ).shares()
    unit = degree_shares(sphere, max(degrees), lambda angle: jnp.cos(angle) ** kernel.order, w.dtype, end=math.pi / 2)
    readout_2d = a.reshape(len(a), -1) * length**kernel.order * (length > 0)
    parts = []
    for share, degree in zip(own, degrees, strict=True):
        B = harmonics(sphere, degree, units_at / jnp.where(length > 0, length, jnp.inf))
        known = share > 1e-6 * own.sum() / len(own)
        ratio = jnp.where(known, unit[degree] / jnp.sqrt(share), 0)
        parts.append(ratio * matmul(readout_2d.T, B))
    v = jnp.concatenate(parts, -1)
    return v[0] if a.ndim == 1 else v
