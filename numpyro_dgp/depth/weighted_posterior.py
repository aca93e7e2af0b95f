"""Mixtures of fitted programs, weighted by stacking of held-out predictions or by the evidence.

A family has one program per number of layers, or per pair of layers and columns of hidden layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_dgp._checks import expect, is_count, require_finite, require_key
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import JointMixture, Mixture, MomentsOnly
from numpyro_dgp.depth.integrated_fit import IntegratedFit
from numpyro_dgp.predict.fitted import Options
from numpyro_dgp.predict.posterior import Posterior
from numpyro_dgp.predict.predictor import Quantity
from numpyro_dgp.predict.quantities import Levels, predictive_of

__all__ = [
    "Depth",
    "WeightedPosterior",
    "arguments_of",
    "as_depths",
    "evidence_weights",
    "key_of",
    "stacking_weights",
    "weighed_by_evidence",
]

_STEPS = 100_000


def stacking_weights(log_densities: Any, *, least_gain: float | None = None, tol: float = 1e-6) -> np.ndarray:
    r"""The weights whose mixture predicts held-out observations best.

    .. math:: \max_w \; \tfrac1N \sum_n \log \sum_k w_k\, p_k(y_n \mid y_{-n}), \qquad w_k \ge 0,\; \sum_k w_k = 1

    It is a concave problem. Each step multiplies :math:`w_k` by
    :math:`g_k = \tfrac1N \sum_n p_k(y_n) / \sum_j w_j p_j(y_n)`, the gradient, which never lowers the mean. What is
    missing to the maximum is at most :math:`\log \max_k g_k`, since the logarithm is concave, and the steps stop there.

    With few rows the maximum overfits. By the rule of one standard error a program takes part only if

    .. math:: \sum_n \delta_{nk} \ge c \Bigl[\textstyle\sum_n (\delta_{nk} - \bar\delta_k)^2\Bigr]^{1/2},
              \qquad \delta_{nk} = \log p_k(y_n \mid y_{-n}) - \log p_1(y_n \mid y_{-n}).

    Args:
        log_densities: of held-out observations, by each program (N, K), the simplest first.
        least_gain: c, standard errors that a program has to be better by than the first; by default none has to.
        tol: nats per observation that the maximum may be missed by.

    Returns:
        Weights (K,).

    Raises:
        ValueError: no matrix, or one with numbers that are not finite.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.depth.weighted_posterior import stacking_weights
        >>> print(stacking_weights(np.log([[0.9, 0.1], [0.1, 0.9]])), stacking_weights(np.log([[0.9, 0.1]])).round(3))
        [0.5 0.5] [1. 0.]
        >>> print(stacking_weights(np.log([[0.9, 0.1], [0.1, 0.9]]), least_gain=1.0))
        [1. 0.]

    Source: Yao et al. (2018b), section 3; Breiman et al. (1984), chapter 3, for one standard error.
    """
    found = np.asarray(log_densities, float)
    expect(
        found.ndim == 2 and found.size,
        "log densities of shape (N, K), a row for each held-out observation",
        f"shape {found.shape}",
        "np.stack([posterior.log_density(key, y, X) for posterior in posteriors], -1)",
    )
    require_finite("log densities", found, "a fit whose predictions are NaN cannot be weighed")
    gain = found - found[:, :1]  # delta_nk
    # sd sqrt(N) = [sum (delta - mean)^2]^1/2
    least = -math.inf if least_gain is None else least_gain * gain.std(0) * math.sqrt(len(gain))
    counted = gain.sum(0) >= least
    # A factor of all densities of a row leaves the maximum where it is.
    densities = np.exp(found[:, counted] - found[:, counted].max(1, keepdims=True))
    weights = np.full(counted.sum(), 1 / counted.sum())
    for _ in range(_STEPS):
        slope = (densities / (densities * weights).sum(1, keepdims=True)).mean(0)  # g_k
        if np.log(slope.max()) <= tol:
            break
        weights = weights * slope  # sum_k w_k g_k = 1
    every = np.zeros(len(counted))
    every[counted] = weights / weights.sum()
    return every


def evidence_weights(log_evidence: Any, log_prior: Any = 0.0, least_odds: float = 0.0) -> np.ndarray:
    r"""The posterior probabilities of programs in Occam's window.

    .. math:: w_k \propto \begin{cases} q_k & \text{if } q_k \ge c\, \max_j q_j \text{ and } q_k \ge \max_{j < k} q_j \\
              0 & \text{otherwise} \end{cases}, \qquad q_k = \pi_k\, p_k(y)

    The window excludes programs that are improbable compared with the most probable one, and those that are less
    probable than a simpler one.

    Args:
        log_evidence: :math:`\log p_k(y)`, with all parameters integrated (K,); each program contains those before it.
        log_prior: :math:`\log \pi_k`, up to a constant (K,); by default all are equally probable.
        least_odds: c; 0, the default, for no window: all programs have a weight.

    Returns:
        Weights (K,).

    Raises:
        ValueError: numbers that are not finite.

    Example:
        >>> from numpyro_dgp.depth.weighted_posterior import evidence_weights
        >>> print(evidence_weights([-10.0, -12.0]).round(3))
        [0.881 0.119]
        >>> print(evidence_weights([-10.0, -9.0, -9.5], least_odds=0.05).round(3))
        [0.269 0.731 0.   ]

    Source: Madigan and Raftery (1994), for both rules of the window; Yao et al. (2018b), for alternatives to stacking.
    """
    found = np.asarray(log_evidence, float)
    require_finite("log_evidence", found, "a fit whose evidence is NaN cannot be weighed")
    found = found + log_prior
    odds = np.exp(found - found.max())  # q_k / max_j q_j
    least = np.maximum(least_odds, np.maximum.accumulate(odds)) if least_odds else 0.0  # max(c, max_j<=k q_j)
    weights = np.where(odds < least, 0.0, odds)
    return weights / weights.sum()


Depth = int | tuple[int, int]
"""A number of layers, or a pair: it, and the columns of hidden layers."""


def as_depths(depths: Any) -> tuple[Depth, ...]:
    """Depths in a tuple, the shallowest first.

    Args:
        depths: numbers of layers, pairs of these with columns, or one number.

    Raises:
        ValueError: none, something else among them, one with fewer layers than the one before, or one twice.
    """
    given = tuple(depths) if np.iterable(depths) else (depths,)
    numbers = [tuple(d) if np.iterable(d) else (d,) for d in given]
    known = all(len(d) in (1, 2) and all(is_count(n) for n in d) for d in numbers)
    expect(
        given and known and len(set(numbers)) >= len(numbers) and numbers == sorted(numbers, key=lambda d: d[0]),
        "depths as ascending numbers of layers, or pairs of one with the columns of hidden layers",
        repr(given),
        "depths=(1, 2, 3), or depths=(1, (2, 1), 2)",
    )
    return tuple(int(d[0]) if len(d) == 1 else (int(d[0]), int(d[1])) for d in numbers)


def arguments_of(depth: Depth) -> tuple[int, ...]:
    """What the family is called with: layers, and columns if these are given.

    Args:
        depth: of a program.
    """
    return depth if isinstance(depth, tuple) else (depth,)


def key_of(key: Array, depth: Depth) -> Array:
    """A key for each program.

    Args:
        key: for all.
        depth: of the program.
    """
    layers, *columns = arguments_of(depth)
    return jax.random.fold_in(key, layers + 1000 * sum(columns))


_DRAWS = 100
"""Default number of draws where no program has samples: weights are rounded to multiples of its inverse."""


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedPosterior:
    r"""What :func:`fit_best` returns: the mixture of fitted programs,

    .. math:: p(y \mid x) = \sum_k w_k\, p_k(y \mid x),

    with the methods of ``dgp.Posterior`` that predict y and the function under it. Of S draws each program gives a
    whole number next to :math:`w_k S`; in :meth:`log_density` and :meth:`probs` the weights are exact. What only one
    program has, such as its hidden layers, is in ``parts[k].posterior``.

    Args:
        parts: fitted programs by their depth, each with ``posterior``, ``log_evidence`` and ``error``.
        weights: by depth; they add up to one.
        held_out: mean log density of held-out observations by depth, where weights come from these.
        options: numbers of draws and of rows; :meth:`using` gives them.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> from numpyro_dgp.depth import integrated_fit, weighted_posterior
        >>> model, X, _ = dgp.testing.toy()
        >>> posteriors = [dgp.Posterior(model, samples={"f": jnp.full((100, 5), v)}) for v in (0.0, 1.0)]
        >>> parts = {i: integrated_fit.IntegratedFit(p, 0.0, 0.0, 5) for i, p in enumerate(posteriors, 1)}
        >>> mixture = weighted_posterior.WeightedPosterior(parts, {1: 0.75, 2: 0.25})
        >>> print(mixture.predict(jax.random.key(0), X[:1]).mean.round(2))  # 0.75 * 0 + 0.25 * 1
        [0.25]
    """

    parts: Mapping[Depth, IntegratedFit]
    weights: Mapping[Depth, float]
    held_out: Mapping[Depth, float] = dataclasses.field(default_factory=dict)
    options: Options = dataclasses.field(default_factory=Options)

    @property
    def programs(self) -> list[Posterior]:
        """The fitted programs that have a weight."""
        return [part.posterior for depth, part in self.parts.items() if self.weights[depth] > 0]

    def using(
        self, *, num_samples: int | None = None, batch_size: int | None = None, progress_bar: bool | None = None
    ) -> WeightedPosterior:
        """The same mixture with other options, as ``dgp.Posterior.using``.

        Args:
            num_samples: S, draws of all programs together; of each one in :meth:`log_density` and :meth:`probs`. By
                default as many as each program with a weight has draws, where none has any 100, or 1 if only one has a
                weight; 10 of :meth:`functions`; in :meth:`log_density` and :meth:`probs` the defaults of each program.
            batch_size: rows predicted at a time.
            progress_bar: show a progress bar over batches.

        Returns:
            A copy; what is not given here stays as it is.

        Raises:
            ValueError: numbers that are not positive integers.
        """
        return dataclasses.replace(self, options=self.options.using(num_samples, batch_size, progress_bar))

    def predict(self, key: Array, *args: Any, **kwargs: Any) -> Mixture:
        """Moments of y at new inputs, a mixture over draws; arguments are those of ``dgp.Posterior.predict``.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            **kwargs: ``X_variance``, and keyword arguments of the model.
        """
        return self._mixture(key, lambda part, k: part.predict(k, *args, **kwargs))

    def predict_function(self, key: Array, *args: Any, **kwargs: Any) -> Mixture:
        """Moments of the function under the observed site, as ``dgp.Posterior.predict_function``.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            **kwargs: ``X_variance``, and keyword arguments of the model.
        """
        return self._mixture(key, lambda part, k: part.predict_function(k, *args, **kwargs))

    def predict_jointly(self, key: Array, *args: Any, **kwargs: Any) -> JointMixture:
        """Joint moments of the function at the rows of a call, as ``dgp.Posterior.predict_jointly``: what the
        acquisitions of ``dgp.design`` ask of a posterior.

        Args:
            key: PRNG key; it fixes the draws.
            *args: arguments of the model without observations.
            **kwargs: ``num_features``, and keyword arguments of the model.
        """
        return self._mixture(key, lambda part, k: part.predict_jointly(k, *args, **kwargs))

    def sample(self, key: Array, *args: Any, **kwargs: Any) -> Array:
        """Draws of y at new inputs (S, N, ...), as ``dgp.Posterior.sample``; in no order.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            **kwargs: keyword arguments of the model.
        """
        return jnp.concatenate([part.sample(k, *args, **kwargs) for part, k in self._shares(key)])

    def log_density(self, key: Array, y: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """Log predictive density of each observation (N,), as ``dgp.Posterior.log_density``.

        Args:
            key: PRNG key.
            y: observations.
            *args: arguments of the model without observations.
            **kwargs: ``X_variance``, and keyword arguments of the model.
        """
        found, weights = self._of_each(key, lambda part, k: part.log_density(k, y, *args, **kwargs))
        return logsumexp(found, axis=0, b=weights)

    def probs(self, key: Array, *args: Any, **kwargs: Any) -> Array:
        """Probabilities of the K labels of y at new inputs (N, K), as ``dgp.Posterior.probs``.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            **kwargs: ``X_variance``, and keyword arguments of the model.

        Raises:
            ValueError: an invalid key, or as ``dgp.Posterior.probs``.
        """
        found, weights = self._of_each(key, lambda part, k: part.probs(k, *args, **kwargs))
        return (weights * found).sum(0)

    def quantile(
        self, key: Array, q: ArrayLike, *args: Any, X_variance: ArrayLike | None = None, **kwargs: Any
    ) -> Array:
        """Quantiles of y, as ``dgp.Posterior.quantile``: where y is neither Gaussian nor a label, by 50 draws of y for
        each draw.

        Args:
            key: PRNG key.
            q: levels between 0 and 1, a number or an array.
            *args: arguments of the model without observations.
            X_variance: variances of the inputs, where they are known with an error.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: an invalid key, levels that are not between 0 and 1, a y without order, or one that
                is Gaussian, or a label, by some programs only.
        """
        levels, quantity = Levels.of(q), Quantity(predictive_of)
        found = [part._predictor(quantity, k, part.options, args, kwargs, X_variance) for part, k in self._shares(key)]
        expect(
            len({type(each) for each in found}) <= 1,
            "a y of one kind by all programs, Gaussian given each draw, a label or another",
            "different kinds",
            "take quantiles of posterior.sample(key, X)",
        )
        return levels(jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *found))

    def functions(self, key: Array, *, num_features: int = 1024) -> Callable[..., dict[str, Array]]:
        """Draws of whole functions, as ``dgp.Posterior.functions``: of the sites that all programs
        have which get a draw.

        Args:
            key: PRNG key; it fixes the draws.
            num_features: random functions in each prior draw.
        """
        drawn = [part.functions(k, num_features=num_features) for part, k in self._shares(key, 10)]

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
            lines.append(f"{depth!s:>6}   {evidence:>20}   {held:>20}   {self.weights[depth]:6.3f}")
        return "\n".join(lines)

    def _mixture(self, key: Array, predict: Callable[[Posterior, Array], Any]) -> Any:
        found = [predict(part, k) for part, k in self._shares(key)]
        kind = MomentsOnly if any(isinstance(m, MomentsOnly) for m in found) else type(found[0])
        return kind(*(jnp.concatenate(arrays) for arrays in zip(*found, strict=True)))

    def _of_each(self, key: Array, predict: Callable[[Posterior, Array], Array]) -> tuple[Array, Array]:
        """What every posterior with a weight predicts (K, ...), and the weights, to be multiplied with it."""
        require_key(key)
        depths = [d for d, w in self.weights.items() if w > 0]
        keys = jax.random.split(key, len(self.parts))
        parts = [self._posterior(d, self.options.num_samples) for d in depths]
        found = jnp.stack([predict(part, k) for part, k in zip(parts, keys, strict=False)])
        weights = jnp.asarray([self.weights[d] for d in depths], found.dtype)
        return found, weights.reshape(-1, *[1] * (found.ndim - 1))

    def _shares(self, key: Array, default: int | None = None) -> list[tuple[Posterior, Array]]:
        """The posteriors with nonzero weight, each with its number of draws and its key."""
        require_key(key)
        num_samples = self.options.num_samples or default
        if num_samples is None:
            given = [program.samples for program in self.programs]
            draws = (len(next(iter(values.values()))) for values in given if values)
            num_samples = min(draws, default=1 if len(given) == 1 else _DRAWS)
        weights = np.array([self.weights[depth] for depth in self.parts])
        # w_k S, rounded so that they add up to S
        counts = np.diff(np.round(np.concatenate([[0.0], np.cumsum(weights)]) * num_samples).astype(int))
        keys = jax.random.split(key, len(self.parts))
        every = zip(self.parts, keys, counts, strict=True)
        return [(self._posterior(depth, int(n)), k) for depth, k, n in every if n]

    def _posterior(self, depth: Depth, num_samples: int | None) -> Posterior:
        """One of the programs with the options of the mixture."""
        return self.parts[depth].posterior.using(
            num_samples=num_samples, batch_size=self.options.batch_size, progress_bar=self.options.progress_bar
        )


def weighed_by_evidence(
    parts: Mapping[Depth, IntegratedFit], layer_odds: float, least_odds: float
) -> WeightedPosterior:
    """Fitted programs with the posterior probabilities of their depths as weights.

    Args:
        parts: by depth.
        layer_odds: the prior probability of a program over that of one with a layer less.
        least_odds: of Occam's window, as in :func:`evidence_weights`.
    """
    log_prior = math.log(layer_odds) * np.array([arguments_of(depth)[0] for depth in parts])  # d log rho
    weights = evidence_weights([part.log_evidence for part in parts.values()], log_prior, least_odds)
    return WeightedPosterior(parts, dict(zip(parts, map(float, weights), strict=True)))
