"""Predictions by several fitted programs, each with its weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_dgp._checks import require_count, require_levels
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.deepening.depth_weights import evidence_weights
from numpyro_dgp.deepening.integrated_fit import IntegratedFit
from numpyro_dgp.densities import Mixture, MomentsOnly
from numpyro_dgp.predict import Posterior
from numpyro_dgp.prediction.joint_mixture import JointMixture

__all__ = ["WeightedPosterior", "weighed_by_evidence"]

_DRAWS_OF_Y = 50


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedPosterior:
    r"""What :func:`fit_best` returns: the mixture of fitted programs,

    .. math:: p(y \mid x) = \sum_k w_k\, p_k(y \mid x),

    with the methods of ``dgp.Posterior``. Of S draws each program gives a whole number next to :math:`w_k S`; in
    :meth:`log_density` the weights are exact.

    Args:
        parts: fitted programs by their depth, each with ``posterior``, ``log_evidence`` and ``error``.
        weights: by depth; they add up to one.
        held_out: mean log density of held-out observations by depth, where weights come from these.

    Example:
        >>> import jax.numpy as jnp, numpyro, jax
        >>> import numpyro.distributions as dist, numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> posteriors = [dgp.Posterior(model, samples={"f": jnp.full((100, 5), v)}) for v in (0.0, 1.0)]
        >>> from numpyro_dgp.deepening.integrated_fit import IntegratedFit
        >>> from numpyro_dgp.deepening.weighted_posterior import WeightedPosterior
        >>> parts = {i: IntegratedFit(p, 0.0, 0.0, 5) for i, p in enumerate(posteriors, 1)}
        >>> mixture = WeightedPosterior(parts, {1: 0.75, 2: 0.25})
        >>> mixture.predict(jax.random.key(0), jnp.zeros((3, 1)), num_samples=20).means.shape
        (20, 3)
    """

    parts: Mapping[int, IntegratedFit]
    weights: Mapping[int, float]
    held_out: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def predict(self, key: Array, *args: Any, num_samples: int | None = None, **options: Any) -> Mixture:
        """Moments of y at new inputs, a mixture over draws; arguments are those of ``dgp.Posterior.predict``.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_samples: S; by default as many as each program with a weight has draws, or 1 where none has any.
            **options: further options, and keyword arguments of the model.
        """
        return self._mixture("predict", key, args, num_samples, options)

    def predict_function(self, key: Array, *args: Any, num_samples: int | None = None, **options: Any) -> Mixture:
        """Moments of the function under the observed site, as ``dgp.Posterior.predict_function``.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_samples: S; by default as many as each program with a weight has draws, or 1 where none has any.
            **options: further options, and keyword arguments of the model.
        """
        return self._mixture("predict_function", key, args, num_samples, options)

    def predict_jointly(self, key: Array, *args: Any, num_samples: int | None = None, **options: Any) -> JointMixture:
        """Joint moments of the function at the rows of a call, as ``dgp.Posterior.predict_jointly``: what the
        acquisitions of ``dgp.design`` ask of a posterior.

        Args:
            key: PRNG key; it fixes the draws.
            *args: arguments of the model without observations.
            num_samples: S; by default as many as each program with a weight has draws, or 1 where none has any.
            **options: further options, and keyword arguments of the model.
        """
        return self._mixture("predict_jointly", key, args, num_samples, options)

    def sample(self, key: Array, *args: Any, num_samples: int | None = None, **options: Any) -> Array:
        """Draws of y at new inputs (S, N, ...), as ``dgp.Posterior.sample``; in no order.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_samples: S; by default as many as each program with a weight has draws, or 1 where none has any.
            **options: further options, and keyword arguments of the model.
        """
        found = [p.sample(k, *args, num_samples=n, **options) for p, k, n in self._shares(key, num_samples)]
        return jnp.concatenate(found)

    def log_density(
        self, key: Array, y: ArrayLike, *args: Any, num_samples: int | None = None, **options: Any
    ) -> Array:
        """Log predictive density of each observation (N,), as ``dgp.Posterior.log_density``.

        Args:
            key: PRNG key.
            y: observations.
            *args: arguments of the model without observations.
            num_samples: draws of each program; all by default.
            **options: further options, and keyword arguments of the model.
        """
        keys = jax.random.split(key, len(self.parts))
        depths = [d for d, w in self.weights.items() if w > 0]
        found = [
            self.parts[d].posterior.log_density(k, y, *args, num_samples=num_samples, **options)
            for k, d in zip(keys, depths, strict=False)
        ]
        weights = jnp.asarray([self.weights[d] for d in depths], found[0].dtype)
        return logsumexp(jnp.stack(found), axis=0, b=weights.reshape(-1, *[1] * found[0].ndim))

    def quantile(self, key: Array, q: ArrayLike, *args: Any, num_samples: int | None = None, **options: Any) -> Array:
        """Quantiles of y, as ``dgp.Posterior.quantile``; by 50 draws of y for each draw where y is not Gaussian.

        Args:
            key: PRNG key.
            q: levels between 0 and 1, a number or an array.
            *args: arguments of the model without observations.
            num_samples: S; by default as many as each program with a weight has draws, or 1 where none has any.
            **options: further options, and keyword arguments of the model.

        Raises:
            ValueError: levels that are not between 0 and 1.
        """
        require_levels("WeightedPosterior.quantile", q)
        mixture = self.predict(key, *args, num_samples=num_samples, **options)
        if not isinstance(mixture, MomentsOnly):
            return mixture.quantile(q)
        keys = jax.random.split(key, _DRAWS_OF_Y)
        draws = jnp.concatenate([self.sample(k, *args, num_samples=num_samples, **options) for k in keys])
        return jnp.quantile(draws, jnp.asarray(q), axis=0, method="lower")

    def functions(self, key: Array, *, num_samples: int = 10, **options: Any) -> Callable[..., dict[str, Array]]:
        """Draws of whole functions, as ``dgp.Posterior.functions``: of the sites that all programs
        have which get a draw.

        Args:
            key: PRNG key; it fixes the draws.
            num_samples: S, draws of all parts together.
            **options: further options.
        """
        drawn = [p.functions(k, num_samples=n, **options) for p, k, n in self._shares(key, num_samples)]

        def functions(*args: Any, **kwargs: Any) -> dict[str, Array]:
            found = [function(*args, **kwargs) for function in drawn]
            shared = [name for name in found[0] if all(name in values for values in found)]
            return {name: jnp.concatenate([values[name] for values in found]) for name in shared}

        return functions

    def __repr__(self) -> str:
        """A table of the parts: evidence, held-out log densities, weights."""
        lines = ["layers   log evidence (error)   held-out log density   weight"]
        for depth, part in self.parts.items():
            held = f"{self.held_out[depth]:.3f}" if depth in self.held_out else ""
            evidence = f"{part.log_evidence:.2f} ({part.error:.2f})"
            lines.append(f"{depth:6d}   {evidence:>20}   {held:>20}   {self.weights[depth]:6.3f}")
        return "\n".join(lines)

    def _mixture(self, method: str, key: Array, args: Any, num_samples: int | None, options: dict[str, Any]) -> Any:
        found = [getattr(p, method)(k, *args, num_samples=n, **options) for p, k, n in self._shares(key, num_samples)]
        kind = MomentsOnly if any(isinstance(m, MomentsOnly) for m in found) else type(found[0])
        return kind(*(jnp.concatenate(arrays) for arrays in zip(*found, strict=True)))

    def _shares(self, key: Array, num_samples: int | None) -> list[tuple[Posterior, Array, int]]:
        """The posteriors that take part, with their keys and numbers of draws."""
        if num_samples is None:
            draws = [part.posterior.samples for depth, part in self.parts.items() if self.weights[depth] > 0]
            num_samples = min((len(next(iter(values.values()))) for values in draws if values), default=1)
        require_count("WeightedPosterior", "num_samples", num_samples, "100")
        weights = np.array([self.weights[depth] for depth in self.parts])
        counts = np.diff(np.round(np.concatenate([[0.0], np.cumsum(weights)]) * num_samples).astype(int))
        keys = jax.random.split(key, len(self.parts))
        every = zip(self.parts.values(), keys, counts, strict=True)
        return [(part.posterior, k, int(n)) for part, k, n in every if n]


def weighed_by_evidence(parts: Mapping[int, IntegratedFit], layer_odds: float, least_odds: float) -> WeightedPosterior:
    """Fitted programs with the posterior probabilities of their depths as weights.

    Args:
        parts: by depth.
        layer_odds: the prior probability of a program over that of one with a layer less.
        least_odds: of Occam's window, as in :func:`evidence_weights`.
    """
    log_prior = math.log(layer_odds) * np.array(list(parts))
    weights = evidence_weights([part.log_evidence for part in parts.values()], log_prior, least_odds)
    return WeightedPosterior(parts, dict(zip(parts, map(float, weights), strict=True)))
