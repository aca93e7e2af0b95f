"""Standardised data, inducing inputs by k-means, layers that start as the identity, weights of outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, is_concrete, require_finite, require_inputs, require_positive
from numpyro_dgp._data import as_array, as_numbers, known_numbers, require_apart, warn_of_units
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike, pytree
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.kernels.convolutional import Patches
from numpyro_dgp.means import LinearMean, Mean, ZeroMean, pca

__all__ = ["LayerStart", "Standardizer", "inducing_patches", "kmeans", "layers", "mixing"]

_KMEANS_ROWS = 20_000


@pytree
class Standardizer:
    """An affine change of units: ``(value - loc) / scale``, and back.

    Differences are taken in double precision before anything is rounded to the precision of JAX, so that times in
    seconds since 1970, or values around a large offset, keep their distances. Tables (pandas, polars), lists and whole
    numbers are converted once, in double precision.

    Under ``jit`` values arrive in the precision of JAX, and what it has rounded is lost: standardise data before.

    Args:
        loc: subtracted, in the original units.
        scale: divided by, positive, in the original units.

    Raises:
        ValueError: a ``loc`` that is not finite, a ``scale`` that is not positive; values that are not numbers or have
            other columns; :meth:`fit` gets NaN or infinite values; in standard units most of the distinct values of a
            column would be equal in the precision of JAX.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.initial import Standardizer
        >>> units = Standardizer.fit(np.array([[1.0], [3.0]]))
        >>> print(units(5.0), units.inverse(3.0), units.inverse_scale(0.5))
        [3.] [5.] [0.5]
    """

    loc: ArrayLike
    scale: ArrayLike

    def __post_init__(self) -> None:
        for name, given in (("loc", self.loc), ("scale", self.scale)):
            value = as_numbers(name, given)
            require_finite(name, value, "Standardizer.fit(values) finds both")
            object.__setattr__(self, name, value)
        require_positive("scale", self.scale, "Standardizer.fit(values) finds one")

    @classmethod
    def fit(cls, values: ArrayLike, *, keep: Sequence[int] = (), weights: ArrayLike | None = None) -> Standardizer:
        """From the mean and standard deviation of the rows of ``values`` (N, ...); constant columns keep their scale.

        Constant are columns that differ by rounding errors of double precision only, or by less than 1e-38, which is
        not a positive number in the precision of JAX.

        Args:
            values: the data.
            keep: columns that stay as they are, such as labels of categories or angles.
            weights: how many times each row counts (N,), once by default.

        Raises:
            ValueError: values that are not numbers or not known, no rows, NaN or infinite values, columns to keep that
                are not there, weights that are not one per row, negative or all zero.
        """
        rows = known_numbers("data to standardise", values)
        require_finite("data to standardise", rows, "drop or impute the rows with missing values")
        expect(rows.ndim and len(rows), "values of shape (N, ...)", rows.shape, "it needs the rows of all data")
        rows = rows.astype(float)
        if weights is None:
            loc, scale = rows.mean(0), rows.std(0)
        else:
            counts = known_numbers("weights", weights)
            if counts.shape != rows.shape[:1] or not ((counts >= 0) & np.isfinite(counts)).all() or not counts.any():
                raise expected(
                    f"weights of shape {rows.shape[:1]}, none of them negative and one positive",
                    f"shape {counts.shape}",
                    "how many times each row counts",
                )
            rows, counts = rows[counts > 0], counts[counts > 0]
            loc = np.average(rows, 0, counts)
            scale = np.sqrt(np.average(np.square(rows - loc), 0, counts))
        varies = scale > np.maximum(1e-12 * np.abs(rows).max(0), np.finfo(np.float32).tiny)
        # Of a constant column the first value is taken: the mean may differ from it by rounding.
        loc, scale = np.where(varies, loc, rows[0]), np.where(varies, scale, 1.0)
        if kept := _columns("keep", keep, rows):
            loc[..., kept], scale[..., kept] = 0.0, 1.0
        return cls(loc, scale)

    def __call__(self, values: ArrayLike) -> Array:
        """To standard units: an array of JAX, in the precision of ``values`` or the default one, whichever is lower."""
        given = self._checked(values)
        dtype = (
            jnp.result_type(given) if jnp.issubdtype(jnp.result_type(given), jnp.floating) else jnp.result_type(float)
        )
        if not is_concrete(given, self.loc, self.scale):
            return _difference(given, self.loc, dtype) / jnp.asarray(self.scale, dtype)
        exact = (np.asarray(given, float) - np.asarray(self.loc, float)) / np.asarray(self.scale, float)
        found = exact.astype(dtype)
        require_apart("standardised values", np.broadcast_to(np.asarray(given), found.shape), found)
        return jnp.asarray(found)

    def inverse(self, values: ArrayLike) -> Any:
        """Back to the original units: a NumPy array in double precision, or an array of JAX where values are traced."""
        given = self._checked(values)
        if not is_concrete(given, self.loc, self.scale):
            return jnp.asarray(given) * self.scale + self.loc
        return np.asarray(given, float) * np.asarray(self.scale, float) + np.asarray(self.loc, float)

    def inverse_scale(self, values: ArrayLike) -> Array:
        """Standard deviations back to the original units."""
        return jnp.asarray(self._checked(values)) * self.scale

    def _checked(self, values: ArrayLike) -> Any:
        given = as_numbers("values to standardise", values)
        shape, columns = np.shape(given), np.shape(self.loc)
        fits = len(shape) < len(columns) or all(b in (1, a) for a, b in zip(shape[::-1], columns[::-1], strict=False))
        if not fits:
            raise expected(
                f"values of shape (N, {', '.join(map(str, columns))}), as those it was fitted to",
                shape,
                "fit one Standardizer for inputs and one for targets",
            )
        return given


def _columns(name: str, columns: Sequence[int], rows: np.ndarray) -> list[int]:
    """Numbers of columns of ``rows``, counted from 0, checked."""
    width = rows.shape[-1] if rows.ndim > 1 else 0
    given = list(columns) if np.iterable(columns) else [columns]
    expect(
        all(isinstance(d, int | np.integer) and not isinstance(d, bool) and 0 <= d < width for d in given),
        f"{name} to be numbers of columns, counted from 0, of values of shape {rows.shape}",
        repr(columns),
        f"{name}=[0] is the first",
    )
    return sorted({int(d) for d in given})


def _difference(values: Array, loc: ArrayLike, dtype: Any) -> Array:
    """``values - loc`` under ``jit``: what a float does not hold of whole numbers and of ``loc``, a second does."""
    values, rest = jnp.asarray(values), jnp.zeros((), dtype)
    if jnp.issubdtype(values.dtype, jnp.integer) and values.dtype.itemsize >= 4:
        # v = h + r, r < 2^12: of 32-bit numbers single precision holds h, of 20 bits, exactly.
        rest = (values & 0xFFF).astype(dtype)
        values = values - (values & 0xFFF)
    if not is_concrete(loc):
        return values.astype(dtype) - loc + rest
    first = np.asarray(loc, float).astype(dtype)
    # (h - first) + (r - (loc - first)), first being loc as a float holds it
    return values.astype(dtype) - first + (rest - (np.asarray(loc, float) - first.astype(float)).astype(dtype))


def kmeans(X: ArrayLike, num_inducing: int, *, seed: int = 0, labels: Sequence[int] = ()) -> np.ndarray:
    """Inducing inputs (M, D): the centres of k-means clusters of the rows of ``X``, by SciPy.

    Beyond 20 000 rows a random 20 000 of them are clustered. A mean of labels is no label: with ``labels`` two rows are
    further apart by a standard deviation of the other columns for each label in which they differ, and of every cluster
    the row nearest to its centre is taken.

    Args:
        X: inputs (N, D).
        num_inducing: M, at most the number of distinct rows.
        seed: of the random start.
        labels: columns that hold labels of categories.

    Returns:
        Inducing inputs (M, D), in the units of ``X``.

    Raises:
        ValueError: more inducing points than distinct rows, NaN or infinite inputs, or columns that are not there.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.initial import kmeans
        >>> print(sorted(kmeans(np.array([[0.0], [0.1], [5.0], [5.1]]), 2)[:, 0].round(2).tolist()))
        [0.05, 5.05]
        >>> kmeans(np.array([[0.1, 2.0], [0.2, 1.0], [0.2, 2.0], [0.3, 2.0]]), 1, labels=[1])
        array([[0.2, 2. ]])

    Source: Salimbeni (2020), section 2.4.
    """
    X = known_numbers("inputs X", X)
    require_inputs(X)
    require_finite("inputs X", X, "drop or impute the rows with missing values")
    X = X if X.dtype.kind == "f" else X.astype(float)
    expect(
        isinstance(seed, int | np.integer) and seed >= 0, "seed to be an integer, zero or more", repr(seed), "seed=0"
    )
    rng = np.random.default_rng(seed)
    distinct, named = np.unique(X, axis=0), _columns("labels", labels, X)
    expect(
        isinstance(num_inducing, int) and 1 <= num_inducing <= len(distinct),
        f"between 1 and {len(distinct)} inducing points, the number of distinct rows of X",
        num_inducing,
        "more cannot add anything; for an exact process use inducing=None",
    )
    if len(distinct) == num_inducing:
        return distinct
    rows = X if len(X) <= _KMEANS_ROWS else X[rng.choice(len(X), _KMEANS_ROWS, replace=False)]
    if not named:
        return _clusters(rows.astype(float), num_inducing, rng)[0].astype(X.dtype)
    found = _central_rows(rows, num_inducing, named, rng)
    others = rng.permutation(distinct)  # where clusters are empty, rows that have not been taken
    _, first = np.unique(np.concatenate([found, others]), axis=0, return_index=True)
    return np.concatenate([found, others])[np.sort(first)[:num_inducing]]


def _clusters(rows: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Centres of clusters of ``rows``, and the number of the cluster of every row."""
    from scipy.cluster.vq import kmeans2  # imported here, since it takes 0.05 s

    with warnings.catch_warnings():  # an empty cluster keeps its last centre, which is good enough here
        warnings.filterwarnings("ignore", message="One of the clusters is empty")
        return kmeans2(rows, count, minit="++", seed=rng)


def _central_rows(rows: np.ndarray, count: int, labels: list[int], rng: np.random.Generator) -> np.ndarray:
    """Of at most ``count`` clusters of ``rows``, in each the row nearest to the centre."""
    numbers = np.delete(rows, labels, axis=1).astype(float)
    sd = numbers.std(0).mean() if numbers.size else 1.0
    codes = [rows[:, d, None] == np.unique(rows[:, d]) for d in labels]
    # Rows that differ in one label are |sqrt(1/2) s (e_a - e_b)| = s apart.
    places = np.hstack([numbers, *(math.sqrt(0.5) * (sd or 1.0) * code for code in codes)])
    centres, cluster = _clusters(places, count, rng)
    distance = np.square(places - centres[cluster]).sum(1)
    order = np.lexsort((distance, cluster))  # cluster by cluster, nearest to the centre first
    return rows[order[np.unique(cluster[order], return_index=True)[1]]]


def inducing_patches(images: ArrayLike, patches: Patches, num_inducing: int, *, seed: int = 0) -> np.ndarray:
    """Inducing patches (M, D): the centres of k-means clusters of patches, by :func:`kmeans`.

    Of many images, a random few are looked at. Patches with places are clustered in units in which pixels together, and
    places together, have unit variance.

    Args:
        images: (N, H W C), or what a layer below gives there, in the units in which the layer sees it.
        patches: which patches an image has.
        num_inducing: M, at most the number of distinct patches.
        seed: of the random start.

    Returns:
        Inducing patches (M, D).

    Raises:
        ValueError: as :func:`kmeans`; images of another size.

    Example:
        >>> import numpy as np
        >>> import numpyro_dgp as dgp
        >>> images = np.random.default_rng(0).normal(size=(10, 64))
        >>> dgp.initial.inducing_patches(images, dgp.kernels.Patches((8, 8), (3, 3)), 20).shape
        (20, 9)
    """
    images = known_numbers("images of initial.inducing_patches", images)
    require_inputs(images)
    patches.require_images(images)
    rng = np.random.default_rng(seed)
    few = min(len(images), max(1, 10 * _KMEANS_ROWS // patches.count))
    rows = np.asarray(patches(rng.permutation(images)[:few])).reshape(-1, patches.size)
    scale, places = np.ones(patches.size, rows.dtype), patches.size - 2 * patches.places
    for columns in (slice(places), slice(places, None)) if patches.places else ():
        scale[columns] = rows[:, columns].std() or 1.0
    return kmeans(rows / scale, num_inducing, seed=seed) * scale


class LayerStart(NamedTuple):
    """Initial values of a layer.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp import initial
        >>> last = initial.layers(np.linspace(0, 1, 20)[:, None], [], 5)[-1]
        >>> last.Z.shape, last.mean, last.lengthscale
        ((5, 1), ZeroMean(), 1.0)
    """

    Z: np.ndarray
    """Inducing inputs (M, D)."""
    mean: Mean
    """Mean function from D inputs to the width of the layer."""
    lengthscale: float
    """sqrt(D), the typical distance between standardised inputs."""

    def __repr__(self) -> str:
        return brief(self)


def layers(
    X: ArrayLike, widths: Sequence[int], num_inducing: int, *, seed: int = 0, labels: Sequence[int] = ()
) -> list[LayerStart]:
    r"""Starting points of a deep model: one :class:`LayerStart` per hidden layer, then one for the last.

    Inner layers start as the identity, a projection on principal directions, or a padded copy
    (:func:`numpyro_dgp.means.pca`); the data are sent through these means, and the inducing inputs of each layer are
    k-means centres of the data at that layer. The mean of the last layer is zero.

    Args:
        X: inputs (N, D), standardised.
        widths: output dimensions of the hidden layers; empty for a shallow model.
        num_inducing: the number of inducing points, M.
        seed: of k-means.
        labels: columns of ``X`` that hold labels of categories, as in :func:`kmeans`. The mean of the first layer does
            not see them; the first layer is the only one that does.

    Returns:
        Initial values of every layer, the last one included.

    Raises:
        ValueError: as :func:`kmeans` and :func:`numpyro_dgp.means.pca`; nothing but labels below a hidden layer.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.initial import layers
        >>> starts = layers(np.random.default_rng(0).normal(size=(100, 4)), [2], 10)
        >>> [start.Z.shape for start in starts], starts[1].lengthscale
        ([(10, 4), (10, 2)], 1.4142135623730951)

    Source: Salimbeni (2020), sections 2.4 and 5.2.5.
    """
    inputs = known_numbers("inputs X", X)
    require_inputs(inputs)
    as_array("inputs X", inputs)  # the layers are computed in the precision of JAX
    warn_of_units("inputs", inputs)
    starts, named = [], _columns("labels", labels, inputs)
    for width in [*widths, None]:
        mean = ZeroMean() if width is None else _mean(inputs, width, named)
        Z = kmeans(inputs, num_inducing, seed=seed, labels=named)
        starts.append(LayerStart(Z, mean, math.sqrt(inputs.shape[1])))
        inputs, named = np.asarray(mean(jnp.asarray(inputs))), []
    return starts


def _mean(inputs: np.ndarray, width: int, labels: list[int]) -> Mean:
    """The mean function of an inner layer, which ignores the columns of labels."""
    if not labels:
        return pca(inputs, width)
    numbers = np.delete(np.arange(inputs.shape[1]), labels)
    expect(
        len(numbers), "a numeric column below a hidden layer", "none", "embed the labels in the first layer, widths=[]"
    )
    W = np.zeros((inputs.shape[1], width), inputs.dtype if inputs.dtype.kind == "f" else float)
    W[numbers] = np.asarray(pca(inputs[:, numbers], width)(jnp.eye(len(numbers))))
    return LinearMean(W)


def mixing(coordinates: ArrayLike, kernel: Kernel | Callable[[Array, Array], Array], functions: int) -> np.ndarray:
    r"""Initial weights for ``f(x).mix`` when outputs have coordinates, such as pixels, and neighbours are correlated.

    The columns of W are the first Q eigenvectors of the covariance that the kernel gives the places of the outputs,
    largest first, each times the root of its eigenvalue. So :math:`W W^\top` is the best approximation of that
    covariance of rank Q.

    Args:
        coordinates: the place of every output, one row each (P, D).
        kernel: k, between places.
        functions: Q, at most P.

    Returns:
        Weights W (P, Q).

    Raises:
        ValueError: coordinates that are not a finite matrix, or a number of functions that is not between 1 and P.

    Example:
        >>> import numpy as np
        >>> import numpyro_dgp as dgp
        >>> from numpyro_dgp.initial import mixing
        >>> pixels = np.stack(np.meshgrid(np.arange(4.0), np.arange(4.0)), -1).reshape(-1, 2)
        >>> mixing(pixels, dgp.kernels.Matern52(), 5).shape
        (16, 5)

    Source: Salimbeni (2020), section 4.4.
    """
    coordinates = known_numbers("coordinates of the outputs", coordinates)
    require_inputs(coordinates)
    require_finite("coordinates of the outputs", coordinates, "give every output a place")
    rows = jnp.asarray(coordinates, jnp.result_type(coordinates, float))
    expect(
        isinstance(functions, int) and 1 <= functions <= len(rows),
        f"between 1 and {len(rows)} functions, the number of outputs",
        repr(functions),
        "fewer functions than outputs is the point of mixing them",
    )
    values, vectors = np.linalg.eigh(np.asarray(as_kernel(kernel)(rows, rows), float))
    weights = vectors * np.sqrt(np.maximum(values, 0.0))  # K = U diag(s) U', W = U diag(s)^1/2
    return weights[:, ::-1][:, :functions].astype(rows.dtype)
