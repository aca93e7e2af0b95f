"""Level sets: where the function is above a level, and where that is uncertain."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri

from numpyro_dgp._checks import expect
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.posterior_acquisition import WithDraws, value

__all__ = ["ContourEntropy"]

_MOST = 8


@dataclasses.dataclass(frozen=True, eq=False)
class ContourEntropy(WithDraws):
    r"""The entropy of whether the function is above a level, in nats.

    .. math:: H(x) = -p \log p - (1 - p) \log(1 - p), \qquad
              p(x) = P\bigl(f(x) < t\bigr) = \tfrac1S \sum_s \Phi\Bigl(\frac{t - \mu_s}{\sigma_s}\Bigr)

    It is largest, log 2, on the predicted contour wherever f is not known there. For a batch it is the entropy of all q
    answers together, :math:`-\sum_b p_b \log p_b` over their :math:`2^q` combinations, whose probabilities are
    estimated by drawing each value within its side, given those before it; these draws are smooth in the points.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes all random numbers.
        level: t, in the units of the function under the ``Likelihood``.
        num_draws: quasi-random draws given each of them, for batches; a power of two.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`; where it is called, more than eight points.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.ones((1, 5))})
        >>> entropy = dgp.design.ContourEntropy(posterior, jax.random.key(0), level=0.0)
        >>> print(entropy(jnp.array([[0.0]])).round(2), entropy(jnp.array([[9.0]])).round(2))
        0.0 0.69

    Source: Cole et al. (2023), section 3; Marques et al. (2018) for contour entropy; Geweke (1991) for the draws.
    """

    level: ArrayLike = value()

    __repr__ = brief

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        rows = self.points(x)
        expect(
            len(rows) <= _MOST,
            f"at most {_MOST} points, whose 2^q combinations are counted",
            len(rows),
            "take several batches",
        )
        found = self.jointly(rows, None, args, kwargs)
        means, L = found.means, found.factors()
        white = self.white(len(means), len(rows) - 1, means.dtype)
        tiny = float(jnp.finfo(means.dtype).tiny)
        draws = jnp.zeros((1, *white.shape[:2], 0), means.dtype)
        p = jnp.ones(draws.shape[:3], means.dtype)
        for j in range(len(rows)):
            centre = means[:, None, j] + (L[:, None, j, :j] * draws).sum(-1)  # E[f_j | f_<j]
            limit = (self.level - centre) / L[:, None, j, j]
            below, above = ndtr(limit), ndtr(-limit)  # P(f_j < t | f_<j), P(f_j > t | f_<j)
            if j + 1 < len(rows):
                part = ndtr(white[..., j])
                # normal numbers with f_j < t, with f_j > t
                sides = ndtri(jnp.maximum(part * below, tiny)), -ndtri(jnp.maximum(part * above, tiny))
                draws = jnp.concatenate([jnp.concatenate([draws, side[..., None]], -1) for side in sides])
            p = jnp.concatenate([p * below, p * above])  # p_b of 2^(j + 1) combinations b, first axis
        return jax.scipy.special.entr(jnp.maximum(p.mean((1, 2)), tiny)).sum()  # -sum_b p_b log p_b
