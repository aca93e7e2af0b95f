"""Programs of any depth for the runs of a simulator, with priors in the units of the runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_dgp._checks import expect, expected, require_count, require_finite, require_noise
from numpyro_dgp._data import as_floats, known_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.input_space import Box, as_box
from numpyro_dgp.functions.points import Points
from numpyro_dgp.kernels import Kernel, Matern52
from numpyro_dgp.likelihoods.likelihood import Likelihood
from numpyro_dgp.means import ConstantMean, IdentityMean, LinearMean, Mean
from numpyro_dgp.primitives import gp

__all__ = ["emulator_family"]


def emulator_family(
    X: ArrayLike,
    y: ArrayLike,
    *,
    bounds: ArrayLike | Box | None = None,
    noise: float = 1e-4,
    kernel: Callable[[Array, Array], Kernel] = Matern52,
    last_kernel: Callable[[Array, Array], Kernel] | None = None,
    process_noise: float | None = None,
    follow: bool = True,
) -> Callable[..., Callable[..., None]]:
    r"""Programs of one, two, three, ... layers for the runs of a simulator: the family of ``dgp.fit_best``.

    With inputs in the unit cube, c the mean and u the standard deviation of y, a program of L layers is

    .. math::
        h_{L} = \frac{x - \text{low}}{\text{high} - \text{low}}, \qquad
        h_i = h_{i+1} + g_i(h_{i+1}), \quad i = L - 1, \dots, 1, \qquad
        y \sim N(c + u\, (m + g_0(h_1)),\; u^2 s^2),

    with Gaussian processes :math:`g_i`, each with a variance and a lengthscale for every column, and D outputs except
    the last. A program with a layer more contains the one with a layer less, as the case in which a variance is zero.

    Many simulators depend on their inputs through one or two combinations of these. ``family(L, K)`` is a program whose
    hidden layers have K columns each. The first of them is :math:`h_{L-1} = W^\top h_L + g_{L-1}(h_L)`: where its
    variance is zero, y is a function of K directions, the columns of W (an active subspace), else of K curved ones.
    A priori

    ================== ============================================== =========================================
    of                 hidden layers, i > 0                           last layer
    ================== ============================================== =========================================
    variance           log v = log(0.01) + 2.5 z                      log v = 1 + 6 z
    lengthscales       log l = log(0.5) + 1.5 z                       log l = log(K) / 2 + 2 z
    W                  z
    m                                                                 m = z
    noise                                                             log s = log(``noise``) + 2 z
    ================== ============================================== =========================================

    with standard normal numbers z, and K = D except in ``family(L, K)``. Hyperparameters are sampled on the log scale,
    so a MAP estimate is the mode of their logarithms. The inducing inputs of a layer are the runs, mapped through the
    layers below: the conditional variance there is zero, as runs without noise need it.

    Where the outputs of a simulator range over powers of ten, model their logarithm.

    Args:
        X: inputs of the runs (N, D). Append new ones at the end, for ``previous=`` of ``dgp.fit_best``.
        y: outputs (N,).
        bounds: lowest and highest values of the columns (D, 2), or a :class:`Box`; by default those of X.
        noise: the median that the standard deviation of the noise has a priori, in units of u: 1e-4 for simulators
            without noise, in double precision; 0.1 where runs are noisy.
        kernel: from a variance and lengthscales (D,) to the kernel of a layer.
        last_kernel: that of the last layer, if it is another.
        process_noise: standard deviation of noise of hidden values, in units of the cube, which guides with Gaussian
            hidden values need (1e-3); none by default.
        follow: whether the inducing inputs of a layer are where the layers below put the runs. ``dgp.guides.Collapsed``
            integrates these layers, and needs ``False``: the runs themselves.

    Returns:
        From the number of layers, and the columns of hidden ones if these are not D, to a program
        ``model(X, y=None)``, in the units of X and y. Its sites are ``log_noise``, ``mean`` (m), ``weights`` (W, of
        ``family(L, K)``), and for layer i ``log_variance{i}``, ``log_lengthscale{i}``, the function ``f{i}`` and, but
        for the last, i = 0, its values ``h{i}``.

    Raises:
        ValueError: inputs and outputs that do not belong together, are not finite or do not vary, runs out of bounds,
            columns of categories, noise below what the precision of JAX resolves; a number of layers or of columns
            that is not positive, columns of a program without hidden layers.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> X = dgp.design.latin_hypercube([[0.0, 5.0]], 10, jax.random.key(0))
        >>> y = 100 + 20 * jnp.sin(X[:, 0])
        >>> family = dgp.design.emulator_family(X, y, noise=0.01)
        >>> best = dgp.fit_best(family, jax.random.key(1), X, y, depths=(1,), num_draws=50)
        >>> print(abs(best.predict(jax.random.key(2), jnp.array([[2.5]])).mean - 100 - 20 * jnp.sin(2.5)) < 1)
        [ True]

    Source: Salimbeni (2020), sections 2.2 and 2.4, for layers with the identity as their mean; Constantine (2015),
    chapter 1, for functions of few directions.
    """
    data, values = _require_runs(X, y)
    box = _require_box(bounds, data)
    require_noise(noise)
    dtype = jnp.result_type(float)
    least = 10 * math.sqrt(jnp.finfo(dtype).eps)
    if noise < least:
        raise expected(
            f"noise of {least:.1g} or more in {dtype}, which resolves no less",
            f"{float(noise):g}",
            "numpyro.enable_x64() at the start, or noise=0.01",
        )
    # arrays, and not numbers, so that what is compiled for one set of runs serves all of these shapes
    low, shrink = jnp.asarray(box.low, dtype), jnp.asarray(1 / (box.high - box.low), dtype)
    centre, unit = jnp.asarray(values.mean(), dtype), jnp.asarray(values.std(), dtype)
    runs, D = as_floats("X", data), data.shape[1]

    def positive(name: str, log_median: float, log_sd: float, *shape: int) -> Array:
        return jnp.exp(numpyro.sample(name, dist.Normal(jnp.full(shape, log_median, dtype), log_sd).to_event()))

    def unit_cube(x: Array) -> Array:
        return (jnp.asarray(x, dtype) - low) * shrink

    def of_depth(depth: int, width: int | None = None) -> Callable[..., None]:
        require_count("the number of layers", depth, "1")
        if width is not None:
            require_count("the number of columns of hidden layers", width, "1")
            expect(
                depth != 1,
                "columns of hidden layers for two layers or more",
                f"family(1, {width}), which has none",
                f"family(1), or family(2, {width})",
            )
        K = D if width is None else width

        def model(X: Array, y: Array | None = None) -> None:
            s = positive("log_noise", math.log(noise), 2.0)  # s, in units of u
            mean = numpyro.sample("mean", dist.Normal(jnp.zeros((), dtype), 1.0))
            h, Z, layers, columns = unit_cube(X), unit_cube(runs), [], D
            below: Mean = IdentityMean()
            if width is not None:
                below = LinearMean(numpyro.sample("weights", dist.Normal(jnp.zeros((D, K), dtype), 1.0).to_event()))
            for i in range(depth - 1, 0, -1):
                inner = positive(f"log_variance{i}", math.log(0.01), 2.5)
                scales = positive(f"log_lengthscale{i}", math.log(0.5), 1.5, columns)
                layers.append(gp(f"f{i}", kernel(inner, scales), Points(Z), outputs=K, mean=below))
                Z = layers[-1](Z).loc if follow else Z
                below, columns = IdentityMean(), K
            outer = jnp.square(unit) * positive("log_variance0", 1.0, 6.0)
            scales = positive("log_lengthscale0", math.log(columns) / 2, 2.0, columns)
            last = gp("f0", (last_kernel or kernel)(outer, scales), Points(Z), mean=ConstantMean(centre + unit * mean))
            with numpyro.plate("data", len(X)):
                for i, f in zip(range(depth - 1, 0, -1), layers, strict=True):
                    h = numpyro.sample(f"h{i}", f(h, noise=process_noise))
                numpyro.sample("y", Likelihood(last(h), lambda v: dist.Normal(v, unit * s)), obs=y)

        return model

    return of_depth


def _require_runs(X: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and outputs, as they are."""
    data, values = known_numbers("X", X), known_numbers("y", y)
    expect(
        data.ndim == 2 and values.shape == data.shape[:1] and len(values) >= 2,
        "two runs or more, inputs X of shape (N, D) and outputs y of shape (N,)",
        f"{data.shape} and {values.shape}",
        "X[:, None] is one input, and each output has an emulator of its own",
    )
    require_finite("X", data, "leave out runs that are not known")
    require_finite("y", values, "leave out runs that failed")
    if not values.std() > 1e-9 * abs(values).max():
        raise expected(
            "outputs y that vary", f"{values[0]:g} from all runs", "run the simulator at inputs that are further apart"
        )
    return data, values


def _require_box(bounds: ArrayLike | Box | None, data: np.ndarray) -> Box:
    """The bounds of the inputs, which are those of the runs if none are given."""
    if bounds is not None:
        box = as_box(bounds)
        expect(
            not box.categories,
            "columns of numbers",
            f"categories={list(box.categories)}",
            "write a family with dgp.kernels.Categorical for labels, as the docstring of dgp.fit_best has one",
        )
        box.require_points("X", data)
        return box
    low, high = data.min(0), data.max(0)
    if not (low < high).all():
        d = int(np.argmin(low < high))
        raise expected(
            "columns of X that vary",
            f"{low[d]:g} in all rows of column {d}",
            "leave it out, or pass bounds=[[low, high], ...]",
        )
    return Box(np.stack([low, high], 1))
