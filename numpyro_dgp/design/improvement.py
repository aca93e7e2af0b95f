r"""Acquisitions for an optimum: the expected improvement, the confidence bound, the knowledge gradient.

The expected improvement is the mean improvement of the points over the best value so far, b. It has a closed form for
one Gaussian value. For several, the improvements add up point by point, and each is integrated given draws of the
points before it:

.. math:: \bigl(b - \min_j f_j\bigr)_+ = \sum_j (m_{j-1} - f_j)_+, \qquad m_j = \min(m_{j-1}, f_j), \quad m_0 = b

.. math:: E\,(m_{j-1} - f_j)_+ = E\; s_j\, h\Bigl(\frac{m_{j-1} - \mu_{j \mid <j}}{s_j}\Bigr), \qquad
          h(z) = E[(z + \epsilon)_+] = \varphi(z) + z\, \Phi(z), \quad \epsilon \sim N(0, 1)

with :math:`f_j \mid f_{<j} \sim N(\mu_{j \mid <j}, s_j^2)` from the Cholesky factor of the covariance. All terms are
positive and smooth in the points, so that the logarithm of their mean over draws has useful derivatives far from any
improvement.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from numpyro_dgp._fields import checked, flag, nonnegative
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import JointMixture, lower_factors
from numpyro_dgp.design.posterior_acquisition import WithDraws, rows_of, standard_deviation, value
from numpyro_dgp.math.linalg import matmul, solve_lower

__all__ = [
    "ExpectedImprovement",
    "KnowledgeGradient",
    "LogExpectedImprovement",
    "UpperConfidence",
    "expected_gain",
    "largest",
    "log_expected_excess",
]

_TAIL = -4.0
_TERMS = 24


def log_expected_excess(z: Array) -> Array:
    r""":math:`\log h(z)`, with all digits and finite derivatives for any z whose square is finite.

    Below -4 the two terms of h cancel. There, with :math:`t = -z` and the continued fraction of Mills' ratio,
    :math:`\Phi(-t) / \varphi(t) = 1 / (t + r)`, :math:`r = 1 / (t + 2 / (t + 3 / (t + \dots)))`, nothing is subtracted:

    .. math:: h(-t) = \varphi(t)\, \frac{r}{t + r} .

    Args:
        z: numbers of any shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.design.improvement import log_expected_excess
        >>> print(log_expected_excess(jnp.array([0.0, -40.0])).round(3))  # log(1 / sqrt(2 pi)), and -800 - ...
        [  -0.919 -808.299]

    Source: Ament et al. (2023), section 4.1, for the logarithm; here by a continued fraction.
    """
    tail = z < _TAIL
    near, t = jnp.maximum(z, _TAIL), jnp.maximum(-z, -_TAIL)
    r = jnp.zeros_like(t)
    for k in range(_TERMS, 0, -1):
        r = k / (t + r)  # the continued fraction from its end
    far = -0.5 * (jnp.square(t) + math.log(2 * math.pi)) + jnp.log(r) - jnp.log(t + r)  # log phi(t) r / (t + r)
    density = jnp.exp(-0.5 * jnp.square(near)) / math.sqrt(2 * math.pi)  # phi(z)
    return jnp.where(tail, far, jnp.log(density + near * ndtr(near)))  # log(phi(z) + z Phi(z))


def largest(values: Array) -> Array:
    """The largest numbers along the last axis, by their places.

    The derivative of ``values.max(-1)`` looks for the entries that equal the maximum. XLA may compute these anew, with
    other rounding, so that there are none, and divides zero by zero.
    """
    place = jax.lax.stop_gradient(values).argmax(-1)
    return jnp.take_along_axis(values, place[..., None], -1)[..., 0]


@dataclasses.dataclass(frozen=True, eq=False)
class _Improvement(WithDraws):
    """The logarithm of the expected improvement.

    Args:
        best: the best value b.
        minimise: whether small values are good.
    """

    best: ArrayLike = value()
    minimise: bool = flag(True, "True where small values are good", kw_only=True)

    __repr__ = brief

    def logarithm(self, x: ArrayLike, args: Any, kwargs: Any) -> Array:
        found = self.jointly(x, None, args, kwargs)
        sign = 1 if self.minimise else -1
        means, L = sign * found.means, found.factors()
        S, q = means.shape
        white = self.white(S, q - 1, means.dtype)
        least = jnp.broadcast_to(sign * jnp.asarray(self.best, means.dtype), white.shape[:2])  # m_0 = b
        info, terms = jnp.finfo(means.dtype), []
        for j in range(q):
            centre = means[:, None, j] + (L[:, None, j, :j] * white[..., :j]).sum(-1)  # mu_j | <j
            gap = least - centre  # m_j-1 - mu_j | <j
            # A standard deviation below the rounding error of the difference counts as that.
            rounding = jax.lax.stop_gradient(info.eps * jnp.abs(gap)) + float(info.tiny)
            scale = jnp.maximum(L[:, None, j, j], rounding)
            terms.append(jnp.log(scale) + log_expected_excess(gap / scale))  # log s_j h(gap / s_j)
            if j + 1 < q:
                least = jnp.minimum(least, centre + scale * white[..., j])  # m_j = min(m_j-1, f_j)
        # log of the sum over points of the mean over S R draws
        return jax.scipy.special.logsumexp(jnp.stack(terms)) - jnp.log(float(white.shape[0] * white.shape[1]))


class ExpectedImprovement(_Improvement):
    r"""Expected improvement over the best value so far.

    .. math:: \mathrm{EI}(x) = \tfrac1S \sum_s E_s\bigl(b - \min_j f(x_j)\bigr)_+
              = \tfrac1S \sum_s \sigma_s\, h\Bigl(\frac{b - \mu_s}{\sigma_s}\Bigr)
              \text{ for one point}, \qquad h(z) = \varphi(z) + z\,\Phi(z)

    For one point it is in closed form given each of the S draws, for a batch the mean over quasi-random draws of all
    points but the last. Far from any improvement it is zero in floating-point
    numbers, with derivatives of zero: :class:`LogExpectedImprovement` is not.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``. Of its S draws,
            ``posterior.using(num_samples=S)``, one is exact for one layer with a Gaussian q(v) and fixed
            hyperparameters.
        key: PRNG key; it fixes all random numbers.
        best: b, the best value so far, in the units of the function under the ``Likelihood`` (those of y where y is
            ``Normal(v, noise)``); of noisy values, the best of the predicted means.
        minimise: whether small values are good.
        num_draws: quasi-random draws given each of them, for batches; a power of two.
        output: which column of a function of several outputs.

    Raises:
        ValueError: something else than a posterior, a key or one finite number; counts that are not positive; where it
            is called, points that are not (q, D), or several outputs without ``output``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 5))})
        >>> ei = dgp.design.ExpectedImprovement(posterior, jax.random.key(0), best=0.0)
        >>> print(f"{ei(jnp.array([[0.0]])):.2f} {ei(jnp.array([[9.0]])):.2f} {ei(jnp.array([[9.0], [-9.0]])):.2f}")
        0.00 0.40 0.68

    Source: Jones et al. (1998), equation 15; Ginsbourger et al. (2010) for batches.
    """

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        return jnp.exp(self.logarithm(x, args, kwargs))


class LogExpectedImprovement(_Improvement):
    r"""The logarithm of the expected improvement: the same optimum, with useful gradients everywhere.

    .. math:: \log \mathrm{EI}(x) = \log \tfrac1S \sum_s \sigma_s\, h\Bigl(\frac{b - \mu_s}{\sigma_s}\Bigr)
              \text{ for one point}

    It keeps its digits and finite derivatives at any number of standard deviations from an improvement, in single
    precision too. Batches as for :class:`ExpectedImprovement`, without smoothing.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes all random numbers.
        best: b, the best value so far, in the units of the function under the ``Likelihood``.
        minimise: whether small values are good.
        num_draws: quasi-random draws given each of them, for batches; a power of two.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 5))})
        >>> log_ei = dgp.design.LogExpectedImprovement(posterior, jax.random.key(0), best=-40.0)
        >>> print(f"{log_ei(jnp.array([[9.0]])):.0f}")  # the improvement itself is below the smallest number
        -808

    Source: Ament et al. (2023), section 4.1.
    """

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        return self.logarithm(x, args, kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class UpperConfidence(WithDraws):
    r"""Upper confidence bound: the mean plus a number of standard deviations.

    .. math:: \mathrm{UCB}(x) = \pm\mu(x) + \beta\, \sigma(x), \qquad
              E \max_j \Bigl( \pm\mu(x_j) + \beta \sqrt{\tfrac{\pi}{2}}\; |\gamma_j| \Bigr), \quad
              \gamma \sim N(0, \Sigma)

    for one point, and for a batch, by quasi-random draws. The sign is minus where small values are good, so that it is
    the lower bound with its sign turned. Mean and covariance are those of the mixture over draws.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes all random numbers.
        beta: number of standard deviations, at least zero.
        minimise: whether small values are good.
        num_draws: quasi-random draws, for batches; a power of two.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`, or a ``beta`` that is not finite or below zero.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.ones((1, 5))})
        >>> lower = dgp.design.UpperConfidence(posterior, jax.random.key(0), beta=2.0)
        >>> print(lower(jnp.array([[0.0]])).round(2), lower(jnp.array([[9.0]])).round(2))
        -1.0 2.0

    Source: Srinivas et al. (2010), where beta is the square of this one; Wilson et al. (2017) for batches.
    """

    beta: ArrayLike = nonnegative(2.0, "it is a number of standard deviations, such as 2.0")
    minimise: bool = flag(True, "True where small values are good", kw_only=True)

    __repr__ = brief

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        found = self.jointly(x, None, args, kwargs)
        mean = -found.mean if self.minimise else found.mean
        L = lower_factors(found.covariance, mean)
        if len(mean) == 1:
            return mean[0] + self.beta * L[0, 0]  # +-mu + beta sigma
        deviations = jnp.abs(matmul(self.white(1, len(mean), mean.dtype)[0], L.mT))  # |gamma|, gamma = L e
        return largest(mean + self.beta * math.sqrt(math.pi / 2) * deviations).mean()  # sqrt(pi/2) E|gamma_j| = sigma_j


_FAR = 50.0  # standard deviations, beyond which the expected excess is zero in both precisions


def expected_gain(a: Array, b: Array) -> Array:
    r""":math:`E \max_i (a_i + b_i Z) - \max_i a_i` with :math:`Z \sim N(0, 1)`, in closed form.

    Line i is the highest between :math:`l_i` and :math:`u_i`, where it meets others. With
    :math:`H(c) = \varphi(c) - |c|\, \Phi(-|c|)` and the line \* that is highest at zero,

    .. math:: \sum_{i:\, l_i < u_i} (b_i - b_*) \bigl(H(l_i) - H(u_i)\bigr),

    of which no term is negative.

    Args:
        a: values at zero (m,).
        b: slopes (m,).

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_dgp.design.improvement import expected_gain
        >>> print(expected_gain(jnp.zeros(2), jnp.array([0.0, 1.0])).round(4))  # E max(0, Z)
        0.3989

    Source: Frazier et al. (2009), section 3.1, whose sum is over the corners; here over the lines, without sorting.
    """
    steeper = b[:, None] > b[None, :]
    slope = jnp.where(b[:, None] == b[None, :], 1.0, b[:, None] - b[None, :])
    meets = (a[None, :] - a[:, None]) / slope  # of line i with line j
    # Line i is above flatter ones to the right of where they meet, above steeper ones to the left.
    low, high = largest(jnp.where(steeper, meets, -jnp.inf)), -largest(jnp.where(steeper.T, -meets, -jnp.inf))
    index = jnp.arange(len(a))
    # Of parallel lines the highest counts, of equal ones the first.
    above = (a[None, :] > a[:, None]) | ((a[None, :] == a[:, None]) & (index[None, :] < index[:, None]))
    highest = (low < high) & ~((b[:, None] == b[None, :]) & above).any(1)

    def corner(c: Array) -> Array:
        return jnp.exp(log_expected_excess(-jnp.minimum(jnp.abs(c), _FAR)))  # H(c) = phi(c) - |c| Phi(-|c|)

    return jnp.where(highest, (b - b[a.argmax()]) * (corner(low) - corner(high)), 0.0).sum()


@dataclasses.dataclass(frozen=True, eq=False)
class KnowledgeGradient(WithDraws):
    r"""The expected increase of the largest posterior mean over candidate points by observations at x.

    .. math:: \mathrm{KG}(x) = \tfrac1S \sum_s E_Z \max_{a \in A \cup x} \bigl(\pm\mu_s(a) + b_s(a)^\top Z\bigr)
              - \max_{a \in A \cup x} \pm\mu_s(a), \qquad
              b_s(a)^\top = c_s(a, x)\, L^{-\top}, \quad L L^\top = c_s(x, x) + \sigma^2 I

    with :math:`Z \sim N(0, I_q)`. For one point the expectation is in closed form; for a batch that over its last
    number is, and the others are quasi-random draws, in each of which the rise is that over the point which is best
    before: the same expectation, and none below zero. Each of the S Gaussians is treated as if it were the posterior,
    which is exact where there is one. It costs the square of the number of candidates.

    Args:
        posterior: a ``Posterior``, or anything with its method ``predict_jointly``.
        key: PRNG key; it fixes all random numbers.
        candidates: A, points (R, D) at which the optimum may be, a few dozen.
        noise: :math:`\sigma`, the standard deviation of the noise of an observation; 0.0 for a code without noise.
        minimise: whether small values are good.
        num_draws: quasi-random draws given each of them, for batches; a power of two.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`, candidates that are not points, or noise below zero.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((1, 5))})
        >>> kg = dgp.design.KnowledgeGradient(posterior, jax.random.key(0), jnp.array([[0.0], [9.0]]))
        >>> print(f"{kg(jnp.array([[0.0]])):.3f} {kg(jnp.array([[9.0]])):.3f}")
        0.000 0.399

    Source: Frazier et al. (2009), section 3.
    """

    candidates: Any = checked(rows_of)
    noise: ArrayLike = standard_deviation()
    minimise: bool = flag(True, "True where small values are good", kw_only=True)

    __repr__ = brief

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        rows = self.points(x)
        found = self.jointly(rows, self.candidates, args, kwargs)
        white = self.white(len(found.means), len(rows) - 1, found.means.dtype)
        block = max(1, len(white) // white.shape[1])
        return jax.lax.map(jax.checkpoint(self._gain), (found, white), batch_size=block).mean()

    def _gain(self, given: tuple[JointMixture, Array]) -> Array:
        (mean, C, _), white = given
        mean, q = -mean if self.minimise else mean, white.shape[-1] + 1
        noise = jnp.square(jnp.asarray(self.noise, C.dtype)) * jnp.eye(q, dtype=C.dtype)
        L = lower_factors(C[:q, :q] + noise, mean[:q])  # L L' = c(x, x) + sigma^2 I
        rises = solve_lower(L, C[:q]).T  # b(a)' = c(a, x) L^-T (q + R, q)
        before = mean + matmul(white, rises[:, :-1].T)  # mu + b' Z without the last number
        # Instead of the mean at its best, its value in the same draw is taken off: E before[best] = max mu.
        best = mean.argmax()
        return jax.vmap(lambda a: expected_gain(a, rises[:, -1]) + largest(a) - a[best])(before).mean()
