"""The names that authors of new representations, rules and kernels import.

``docs/extending.md`` builds one of each. Everything else that a new part needs is in ``dgp`` itself.
"""

from numpyro_dgp._repr import public_dir
from numpyro_dgp._typing import pytree, static
from numpyro_dgp.functions.function_values import FunctionValues, Origin, ProcessValues
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.joint_values import JointValues
from numpyro_dgp.functions.random_function import PointValues, RandomFunction, Representation
from numpyro_dgp.functions.weights import (
    Belief,
    FunctionDraw,
    InducingPrior,
    KnownWeights,
    Weights,
    matvec,
    whitened_values,
)
from numpyro_dgp.guides.rules.rule import GaussianParameters, Rule, SiteContext, initial_scale, require_site
from numpyro_dgp.guides.rules.structured import ConditionalValues
from numpyro_dgp.inference.streams import BatchSource
from numpyro_dgp.jaxprs.dependence import Dependence
from numpyro_dgp.kernels.sphere import ZonalKernel
from numpyro_dgp.kernels.state_space_forms import StateSpaceForm
from numpyro_dgp.kernels.terms import Term
from numpyro_dgp.likelihoods.closed_forms import ClosedForms, Form, with_slope
from numpyro_dgp.likelihoods.integrals import Integral
from numpyro_dgp.math.whitening import inverse_cholesky, residual_variance

__all__ = [
    "BatchSource",
    "Belief",
    "ClosedForms",
    "ConditionalValues",
    "Dependence",
    "Form",
    "FunctionDraw",
    "FunctionValues",
    "GaussianParameters",
    "InducedFunction",
    "InducingPrior",
    "Integral",
    "JointValues",
    "KnownWeights",
    "Origin",
    "PointValues",
    "ProcessValues",
    "RandomFunction",
    "Representation",
    "Rule",
    "SiteContext",
    "StateSpaceForm",
    "Term",
    "Weights",
    "ZonalKernel",
    "initial_scale",
    "inverse_cholesky",
    "residual_variance",
    "matvec",
    "pytree",
    "require_site",
    "static",
    "whitened_values",
    "with_slope",
]
__dir__ = public_dir(globals())
