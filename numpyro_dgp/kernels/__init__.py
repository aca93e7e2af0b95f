"""Covariance functions: frozen pytrees, called as ``k(X1, X2)``; see :class:`Kernel`."""

from numpyro_dgp.kernels.base import ActiveDims, Constant, FromCallable, Kernel, Product, Sum, as_kernel
from numpyro_dgp.kernels.categorical import Categorical, Embedding
from numpyro_dgp.kernels.nonstationary import ArcCosine, Linear, Polynomial, White
from numpyro_dgp.kernels.stationary import (
    RBF,
    Cosine,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
)
from numpyro_dgp.kernels.terms import Term

__all__ = [
    "RBF",
    "ActiveDims",
    "ArcCosine",
    "Categorical",
    "Constant",
    "Cosine",
    "Embedding",
    "FromCallable",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Sum",
    "Term",
    "White",
    "as_kernel",
]
