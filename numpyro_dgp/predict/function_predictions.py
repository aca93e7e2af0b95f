"""Predictions of whole functions: draws of them, and their values at several inputs together.

The function under the observed site at several inputs together, in one run of a fitted program.

All functions below the last one are draws of whole functions, consistent across inputs. The last one stays a
distribution: under a Gaussian q(v) its values are jointly Gaussian with v integrated out, and otherwise given a draw of
v.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers

from numpyro_dgp._checks import expect, expected, require_count, require_key
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.program import inspect_program
from numpyro_dgp.analysis.sites import Trace, unwrap
from numpyro_dgp.densities import JointMixture
from numpyro_dgp.functions.function_inputs import noise_covariance
from numpyro_dgp.functions.function_values import FunctionValues, MixedValues
from numpyro_dgp.functions.random_function import FeatureFunction
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.guides.run import marginal
from numpyro_dgp.likelihoods.stacked_values import SeveralValues
from numpyro_dgp.math.linalg import einsum, set_diagonal
from numpyro_dgp.predict import quantities
from numpyro_dgp.predict.draws import DrawFunctions, hidden_values, sample_values, trace_over_all_rows
from numpyro_dgp.predict.fitted import Fit, Target
from numpyro_dgp.predict.predictor import Predictor
from numpyro_dgp.predict.quantities import Quantity, observed_function

__all__ = ["FunctionPredictions", "jointly_of"]


def jointly_of(
    num_features: int, fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any
) -> JointMixture:
    """Joint moments of the function that the observed site is a ``Likelihood`` of."""
    if fit.data is None:
        sites = _functions_below(num_features, fit, target, key, sample, args, kwargs)
    else:
        sites = fit.trace(target, key, sample, args, kwargs)
        if below := hidden_values(sites):
            raise expected(
                "layers with inducing points below the last one",
                f"{sorted(below)[0]!r} of an exact process or above one, whose values are drawn row by row",
                "give the layers dgp.Points(X)",
            )
    f_x = observed_function(unwrap(sites[target.site or ""]["fn"]), target.site)
    covariances, priors = _covariances(f_x)
    one = f_x.event_dim == 0
    # The diagonal holds the variances of predict_function.
    covariances = set_diagonal(covariances, f_x.variance[None] if one else f_x.variance.mT)
    return JointMixture(f_x.loc, covariances[0], priors[0]) if one else JointMixture(f_x.loc, covariances, priors)


def _functions_below(
    num_features: int, fit: Fit, target: Target, key: Array, sample: Any, args: Any, kwargs: Any
) -> Trace:
    """A run with draws of whole functions below the last one."""
    draw_key, path_key = jax.random.split(key)
    guide = fit.guide_at(target)
    if guide is not None:
        integrated = marginal(fit.seeded(guide, draw_key, target))
        sample = sample_values(handlers.trace(integrated).get_trace(*args, **kwargs))
    drawn = {
        name: value.sample(jax.random.fold_in(path_key, i)) if isinstance(value, Belief) else value
        for i, (name, value) in enumerate(sample.items())
    }
    structure = inspect_program(fit.model, args, kwargs)
    kept = {name: sample[name] for name in structure.inducing if name in sample.keys() - structure.hidden}
    program = fit.given(drawn, fit.seeded(fit.model, draw_key, target), args, kwargs, target)
    return trace_over_all_rows(DrawFunctions(program, path_key, num_features, kept), args, kwargs)


def _covariances(f_x: FunctionValues) -> tuple[Array, Array]:
    """Covariances of function values and of those of their prior, each (P, N, N)."""
    if isinstance(f_x, MixedValues):
        # Cov (W g)_p = sum_q W_pq^2 C_q
        return tuple(einsum("pq,qnm->pnm", jnp.square(f_x.W), C) for C in _covariances(f_x.functions))  # type: ignore[return-value]
    if isinstance(f_x, SeveralValues):
        sites = [getattr(part.function, "site", None) for part in f_x.parts]
        expect(
            len(set(sites)) >= len(sites),
            "independent functions under the Likelihood",
            f"several values of {sites}",
            "two values of one function are correlated; give each function a layer of its own",
        )
        of_parts = [_covariances(part) for part in f_x.parts]
        return tuple(jnp.concatenate(parts) for parts in zip(*of_parts, strict=True))  # type: ignore[return-value]
    function, x, noise = f_x.function, f_x.inputs, f_x.noise
    if not isinstance(function, FeatureFunction) or f_x.batch_shape != x.shape[:-1] or x.ndim != 2:
        got = "values without one" if function is None else type(function).__name__
        raise expected(
            "a function with inducing values, such as on dgp.Points(Z), at N rows under the Likelihood",
            f"{got} at values of shape {f_x.batch_shape}",
            "its values have no joint covariance here",
        )
    # Cov[f(x)] (P, N, N), v integrated where q(v) is Gaussian
    joint, N = function.joint(x, noise=noise).covariance, len(x)
    prior = function.covariance(x) + noise_covariance(noise, N, joint.dtype)  # k(X, X) + s^2 I
    shape = function.outputs or 1, N, N
    return jnp.broadcast_to(joint, shape), jnp.broadcast_to(prior, shape)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionPredictions(Fit):
    """A fitted program, the compiled programs of its predictions, and predictions of whole functions."""

    def predict_jointly(self, key: Array, *args: Any, num_features: int = 1024, **kwargs: Any) -> JointMixture:
        """Joint moments of the function under the observed ``Likelihood`` at the rows of a call: a mixture over draws.

        As :meth:`predict_function`, with the covariances between rows: variances are the same. Given each draw, the
        layers below are whole functions, the same at every call with this key and differentiable in the inputs, and
        the last layer is Gaussian: with v integrated out where the guide has a Gaussian q(v), otherwise given a draw
        of v, from the guide or the chain. One layer with a Gaussian q(v) and fixed hyperparameters is one Gaussian, S
        times. A function that is below itself is known given a draw, with covariances of zero. It can be called with
        tracers, inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_features: random functions in each prior draw of a layer below, as for :meth:`functions`.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict_function`, exact processes and those of ``dgp.Neighbours``, several values of
                one function under the ``Likelihood``, or a kernel below the last layer without random features.
        """
        require_count("num_features", num_features, "1024")
        quantity = Quantity(jointly_of, settings=(num_features,), every=True)
        together = dataclasses.replace(self.options, batch_size=None)
        found: JointMixture = self._predictor(quantity, key, together, args, kwargs)
        return found

    def functions(self, key: Array, *, num_features: int = 1024) -> Callable[..., dict[str, Array]]:
        """Draws of whole functions, consistent across inputs; 10 by default, or all if ``samples`` has fewer.

        Args:
            key: PRNG key; it fixes the draws.
            num_features: random functions in each prior draw; the covariance is exact for any number of them, and the
                distribution is Gaussian in the limit of many.

        Returns:
            A function of the model's arguments, giving ``{site: values (S, N, ...)}`` for every hidden layer and for
            the function under the observed site. The same inputs give the same values in every call.

        Raises:
            ValueError: numbers that are not positive; by the function, a kernel without random features.
        """
        require_key(key)
        require_count("num_features", num_features, "1024")
        quantity = Quantity(quantities.functions_of, settings=(num_features,), num_samples=10)
        return lambda *args, **kwargs: self._predictor(quantity, key, self.options, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled and copied without its compiled programs."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def _predictor(self) -> Predictor:
        """Its programs go with this object; what they compile to is shared with others."""
        return Predictor(self)
