"""Covariance functions: frozen pytrees, called as ``k(X1, X2)``; see :class:`Kernel`."""

from numpyro_dgp._repr import public_dir
from numpyro_dgp.kernels.base import ActiveDims, Constant, Kernel, Product, Sum, as_kernel
from numpyro_dgp.kernels.brownian import Brownian, IntegratedBrownian
from numpyro_dgp.kernels.categorical import Categorical, Embedding
from numpyro_dgp.kernels.convolutional import Convolutional, Patches
from numpyro_dgp.kernels.nonstationary import (
    ArcCosine,
    ChangePoint,
    ErrorFunction,
    Linear,
    Polynomial,
    VaryingLengthscale,
    White,
)
from numpyro_dgp.kernels.per_group import PerGroup
from numpyro_dgp.kernels.periodic import Cosine, Periodic
from numpyro_dgp.kernels.sphere import Chordal, GreatCircle, Zonal
from numpyro_dgp.kernels.stationary import (
    RBF,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    SpectralMixture,
)
from numpyro_dgp.kernels.transformed import Transformed

__all__ = [
    "RBF",
    "ActiveDims",
    "ArcCosine",
    "Brownian",
    "Categorical",
    "ChangePoint",
    "Chordal",
    "Constant",
    "Convolutional",
    "Cosine",
    "Embedding",
    "ErrorFunction",
    "GreatCircle",
    "IntegratedBrownian",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Patches",
    "PerGroup",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "SpectralMixture",
    "Sum",
    "Transformed",
    "VaryingLengthscale",
    "White",
    "Zonal",
    "as_kernel",
]
__dir__ = public_dir(globals())
