"""scikit-learn's interface: deep GPs for regression and classification, without writing a program.

``DeepGPRegressor().fit(X, y).predict(X_new, return_std=True)`` standardises the data, builds a program of ``dgp.gp``
layers, fits it under a guide by ``dgp.fit``, and predicts by ``dgp.Posterior``. All of these are attributes of the
fitted estimator: ``model_``, ``guide_``, ``posterior_``. ``import numpyro_dgp`` does not import this module, which
needs scikit-learn.
"""

try:
    from sklearn.utils.validation import validate_data  # noqa: F401  (new in scikit-learn 1.6)
except ImportError as error:
    raise ImportError(
        "numpyro_dgp.sklearn: expected scikit-learn 1.6 or newer, got none or an older one: pip install "
        "'numpyro-dgp[sklearn]'"
    ) from error

from numpyro_dgp._repr import public_dir
from numpyro_dgp.sklearn.estimators import DeepGPClassifier, DeepGPRegressor

__all__ = ["DeepGPClassifier", "DeepGPRegressor"]
__dir__ = public_dir(globals())
