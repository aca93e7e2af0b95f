"""``InducingPatches``: a function of images is represented by the responses to patches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import expected
from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.points import Points, SparseFunction
from numpyro_dgp.functions.weights import Weights, matvec
from numpyro_dgp.kernels.convolutional import Convolutional, as_convolutional
from numpyro_dgp.kernels.per_output import Kernels, covariances, every, features, shared, variances
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.means import Mean, ZeroMean

__all__ = ["ConvolvedFunction", "InducingPatches"]


@pytree
class InducingPatches(Points):
    r"""Inducing patches: a sum over the patches of an image is represented by responses to M patches.

    For layers with a :class:`~numpyro_dgp.kernels.Convolutional` kernel, :math:`f(x) = \sum_r w_r\, g(x^{[r]}) + m(x)`.
    The layer's site holds the whitened values v of g at ``Z``, with :math:`g(Z) = L v`, :math:`L L^\top = k_g(Z, Z)`
    and

    .. math:: A(x) = \operatorname{Cov}[f(x), v] = \sum_r w_r\, k_g(x^{[r]}, Z)\, L^{-\top} .

    A patch has fewer pixels than an image, so that a hundred of them are more informative than a hundred
    images. A hidden layer
    with the responses of single patches as outputs is one with ``dgp.Points(Z)`` on ``patches(x)``.

    Args:
        Z: inducing patches (M, D), with their places where patches have places, or (P, M, D) for separate ones per
            output; :func:`~numpyro_dgp.initial.inducing_patches` finds some.
        learn: make ``Z`` a ``numpyro.param`` called ``"<name>_Z"``, optimised with everything else.

    Raises:
        ValueError: ``Z`` has another shape, or NaN or infinite entries; in ``dgp.gp``, a kernel that is not
            ``Convolutional``, or one whose patches have another size than those in ``Z``.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro
        >>> import numpyro_dgp as dgp
        >>> patches = dgp.kernels.Patches(image=(8, 8), patch=(3, 3))
        >>> images = np.random.default_rng(0).normal(size=(5, 64))
        >>> Z = dgp.initial.inducing_patches(images, patches, 20)
        >>> kernel = dgp.kernels.Convolutional(dgp.kernels.RBF(), patches)
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", kernel, dgp.functions.InducingPatches(Z), outputs=10)
        >>> f(images).batch_shape, f(images).event_shape
        ((5,), (10,))
        >>> f.responses(patches(images)).batch_shape  # of g, to every patch of every image
        (5, 36)

    Source: van der Wilk et al. (2017), section 3.3.
    """

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> ConvolvedFunction:  # type: ignore[override]
        """Open the sites of layer ``name`` and return its random function."""
        given = every(kernels)
        found = tuple(convolved for kernel in given if (convolved := as_convolutional(kernel)) is not None)
        if len(found) < len(given):
            other = next(kernel for kernel in given if as_convolutional(kernel) is None)
            raise expected(
                "a kernel dgp.kernels.Convolutional(kernel, patches), or a multiple of one",
                type(other).__name__,
                "for a sum of kernels of images open a layer each; a layer on single patches has dgp.Points(Z)",
                at=f"gp {name!r}",
            )
        patches = found[0].patches
        if any(kernel.patches != patches for kernel in found):
            raise expected(
                "kernels with the same patches for all outputs",
                f"{found[0].patches} and {next(k.patches for k in found if k.patches != patches)}",
                "give outputs with others another layer",
                at=f"gp {name!r}",
            )
        if self.Z.shape[-1] != patches.size:  # type: ignore[union-attr]
            raise expected(
                f"inducing patches Z of {patches.size} columns, the numbers of one of {patches}",
                self.Z.shape,  # type: ignore[union-attr]
                "dgp.initial.inducing_patches(images, patches, M)",
            )
        of_images = found[0] if shared(kernels) else found
        g = super().open(name, _responses(of_images), outputs, ZeroMean())
        return ConvolvedFunction(of_images, g.Z, g.whiten, g.v, outputs, mean, g.site)


def _responses(kernels: Any) -> Kernels:
    """The kernels of the responses to a patch."""
    return kernels.kernel if shared(kernels) else tuple(kernel.kernel for kernel in kernels)


@pytree
class ConvolvedFunction(InducedFunction):
    """A function of images that is represented by responses to patches; ``dgp.gp`` makes it.

    Args:
        kernels: a ``Convolutional`` kernel, or one per output.
        Z: inducing patches (M, D) or (P, M, D).
        whiten: the inverse Cholesky factor of the covariance of the responses, (M, M) or (P, M, M).
        v: the weights: known, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function, of images.
        site: name of the site of the whitened values.
    """

    kernels: Convolutional | tuple[Convolutional, ...]
    Z: Array
    whiten: Array
    v: Weights
    outputs: int | None = static()
    mean: Mean
    site: str | None = static(default=None)

    @property
    def responses(self) -> SparseFunction:
        """g, the response to a patch, a random function with the same v: call it on patches (..., D)."""
        kernels = _responses(self.kernels)
        return SparseFunction(kernels, self.Z, self.whiten, self.v, self.outputs, ZeroMean(), self.site)

    @property
    def size(self) -> int:
        return self.Z.shape[-2]

    @property
    def dims(self) -> int:
        return self._kernels[0].patches.pixels

    @property
    def _kernels(self) -> tuple[Convolutional, ...]:
        return every(self.kernels)  # type: ignore[return-value]

    @property
    def outputs_differ(self) -> bool:
        return self.responses.outputs_differ

    @property
    def dense(self) -> bool:
        return True

    def features(self, rows: Array) -> Array:
        kernels, size = self._kernels, self.outputs or 1
        if not self.outputs_differ:
            return matmul(kernels[0].with_responses(rows, self.Z), self.whiten.T)  # A = sum_r w_r k_g(x^[r], Z) L^-T
        kernels = kernels * size if shared(self.kernels) else kernels
        points = self.Z if self.Z.ndim == 3 else (self.Z,) * size
        cross = [kernel.with_responses(rows, Z) for kernel, Z in zip(kernels, points, strict=True)]
        return matmul(jnp.stack(cross), self.whiten.mT)

    def prior_variance(self, rows: Array) -> Array:
        return variances(self.kernels, rows)

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        return covariances(self.kernels, x, y)

    def held(self) -> ConvolvedFunction:
        kernels, Z, whiten = jax.lax.stop_gradient((self.kernels, self.Z, self.whiten))
        return dataclasses.replace(self, kernels=kernels, Z=Z, whiten=whiten)

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        values = matvec(weights, features(self.kernels, key, rows, weights.shape[-1]))
        # The same key, hence the same g: its whitened values, whatever patches it is called on.
        return values, self.responses.prior_draw(key, weights, self.Z[..., :1, :])[1]

    def whitened_values_of(self, other: InducedFunction) -> tuple[Array, Array]:
        """As :meth:`InducedFunction.whitened_values_of`; of the responses, whose weights must be those of the fit."""
        if not isinstance(other, ConvolvedFunction):
            return super().whitened_values_of(other)
        return self.responses.whitened_values_of(other.responses)
