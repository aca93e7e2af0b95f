r"""Exact regression on a series with times of any spacing in O(N): ``StateSpaceNormal``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import is_concrete, require_positive
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.kalman import Observed, log_evidence, prior_states, shock_factors, smoothed
from numpyro_dgp.algebra.linalg import jitter, matmul
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.kernels.state_space_forms import StateSpaceForm
from numpyro_dgp.model.drawn_from_white import DrawnFromWhite
from numpyro_dgp.state_space.times import checked_times, merged, passing

__all__ = ["StateSpaceNormal"]


class StateSpaceNormal(DrawnFromWhite):
    r"""Values of a process of one input column at given times, exactly: :math:`y \sim N(m,\, k(t, t) + \sigma^2 I)`.

    ``log_prob`` is the log evidence of exact regression, by a Kalman filter in O(N d^3) for a kernel with d states; no
    matrix of the data is built. Times may have any spacing and may repeat, which takes the place of gaps on a grid:
    what is missing is left out, or marked in ``observed`` to be predicted. With ``noise=None`` it is the process
    itself, to use as a latent; under NUTS put ``dgp.for_mcmc(model)`` around the program, which samples it by
    independent N(0, 1) numbers (``NonCentered``), d per time.

    Kernels are ``Matern12`` (d = 1), ``Matern32`` (2), ``Matern52`` (3), ``Cosine`` (2), ``Periodic`` (2 ``order`` + 1)
    and ``Constant`` (1), sums of them, whose d add up, and products, whose d multiply. All but ``Periodic`` are exact;
    of that kernel, ``order`` waves are kept.

    Args:
        kernel: the kernel k.
        times: t (T,) or (T, 1), in order; equal ones are allowed.
        noise: standard deviation of Gaussian noise, a number or one per observed time; ``None`` for none.
        observed: which times have values, (T,) of bool; all by default. It must be known when the program is compiled:
            make it outside.
        loc: mean m, a number or one per observed time; of a mean function ``mean(times[:, None])``.
        order: waves of a ``Periodic`` kernel. Eight suffice for a lengthscale of one, for shorter ones it takes more.

    Values have shape (N,): the observed times in their order.

    Raises:
        ValueError: a kernel that has no state space; times that are not in order, NaN or not one column; noise that is
            not positive, one number or one per observed time; indices in place of a mask, or a mask that is traced or
            marks no time; a mean, or values, that are not one per observed time; NaN. Where values are traced, times
            that are not in order give NaN.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_dgp as dgp
        >>> t = jnp.array([0.0, 0.1, 0.1, 2.0])
        >>> d = dgp.StateSpaceNormal(dgp.kernels.Matern32(1.0, 2.0), t, noise=0.1)
        >>> y = jnp.array([1.0, 1.1, 0.9, -0.5])
        >>> print(f"{d.log_prob(y):.2f}")
        -1.84
        >>> mean, variance = d.posterior(y, jnp.array([1.0, 0.05]))  # at any times, in any order
        >>> print(np.array(mean).round(2), np.array(variance).round(3))
        [0.33 1.  ] [0.146 0.004]

    Source: Hartikainen and Sarkka (2010); Sarkka and Garcia-Fernandez (2021); Sarkka and Solin (2019), chapter 12.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("kernel", "times", "noise_variance", "present", "loc")
    pytree_aux_fields = ("order", "noisy")
    place, order_of_values = "time", "times"
    missing_values = "leave out what is missing, with its times"

    def __init__(
        self,
        kernel: Kernel,
        times: ArrayLike,
        noise: ArrayLike | None = None,
        observed: np.ndarray | None = None,
        loc: ArrayLike = 0.0,
        order: int = 8,
    ) -> None:
        self.times = checked_times("StateSpaceNormal", times)
        self.present = np.flatnonzero(_mask(observed, len(self.times)))
        dtype = jnp.result_type(jnp.asarray(self.times[:1]), float)
        self.kernel, self.order, self.noisy = as_kernel(kernel).cast(dtype), order, noise is not None
        form = self._form()
        if noise is None:
            h = form.observation()
            variance = jitter(dtype, 1) * matmul(matmul(form.covariance(), h), h)
        else:
            require_positive("StateSpaceNormal", "noise", noise)
            variance = jnp.square(
                jnp.asarray(self.one_per_place("noise", noise, len(self.present), np.ndim(noise) == 0), dtype)
            )
        self.noise_variance = jnp.broadcast_to(variance, self.present.shape)
        self.loc = jnp.asarray(self.one_per_place("loc", loc, len(self.present), np.ndim(loc) == 0), dtype)
        super().__init__((), (len(self.present),))

    @property
    def variance(self) -> Array:
        return self.kernel.diag(jnp.zeros((1, 1), self.loc.dtype))[0] + self.noise_variance

    @property
    def white_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal numbers behind a draw: d per observed time, and one for its noise."""
        return len(self.present), self._form().size + self.noisy

    def from_white(self, white: Array) -> Array:
        """The draw that standard normal numbers (..., N, d) give, or (..., N, d + 1) where there is noise."""
        form = self._form()
        d, time = form.size, passing(self.times[self.present], self.loc.dtype)
        first, _ = shock_factors(form.covariance())
        later, _ = shock_factors(jnp.moveaxis(form.noise(time), -1, 0))

        def path(white: Array) -> Array:
            shocks = matmul(later, white[:, :d, None])[..., 0].T
            values = matmul(form.observation(), prior_states(form, time, matmul(first, white[0, :d]), shocks))
            return values + jnp.sqrt(self.noise_variance) * white[:, d] if self.noisy else values

        flat = jax.vmap(path)(white.reshape(-1, *self.white_shape))
        return self.loc + flat.reshape(*white.shape[:-2], -1)

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        residual = self._residual(value)
        time = passing(self.times[self.present], self.loc.dtype)  # what is not observed says nothing

        def evidence(residual: Array) -> Array:
            observed = Observed(time, residual, self.noise_variance, jnp.ones_like(residual))
            return log_evidence(self._form(), observed)

        flat = jax.vmap(evidence)(residual.reshape(-1, *self.event_shape))
        return flat.reshape(residual.shape[:-1])

    def posterior(self, value: Array, times: ArrayLike | None = None) -> tuple[Array, Array]:
        """Mean and variance of the process without noise, at its own times or at others, in O(N).

        Args:
            value: observations (N,), or several sets of them (..., N).
            times: where (M,) or (M, 1), in any order; by default those of the distribution, not observed ones included.

        Returns:
            Mean (..., M), less ``loc``, and variance (M,). Noisy observations there have the variance plus the squared
            noise.

        Raises:
            ValueError: observations that are not one finite number per observed time, times that are NaN or not one
                column.
        """
        residual = self._residual(value)
        size, dtype, known = len(self.times), self.loc.dtype, self.times
        where: Any = np.arange(size)
        if times is not None:
            known, where = merged(known, checked_times("StateSpaceNormal.posterior", times, in_order=False))
        places = where[self.present]
        zeros = jnp.zeros(len(known), dtype)
        time, present = passing(known, dtype), zeros.at[places].set(1)
        noise = (zeros + 1).at[places].set(self.noise_variance)

        def moments(residual: Array) -> tuple[Array, Array]:
            return smoothed(self._form(), Observed(time, zeros.at[places].set(residual), noise, present))

        mean, variance = jax.vmap(moments, out_axes=(0, None))(residual.reshape(-1, *self.event_shape))
        wanted = where if times is None else where[size:]
        return mean[:, wanted].reshape(*residual.shape[:-1], -1), variance[wanted]

    def _form(self) -> StateSpaceForm:
        return self.kernel.state_space(self.order)

    def _residual(self, value: ArrayLike) -> Array:
        """Checked observations less their mean (..., N)."""
        return jnp.asarray(self.one_per_place("values", value, len(self.present)), self.loc.dtype) - self.loc


def _mask(observed: Any, size: int) -> np.ndarray:
    """Which times are observed."""
    if observed is None:
        return np.ones(size, bool)
    if not is_concrete(observed):
        raise ValueError(
            "StateSpaceNormal: expected observed to be known when the program is compiled, got a traced array: make "
            "the mask outside of the program, and do not pass it as an argument of the model"
        )
    given = np.asarray(observed)
    if given.shape != (size,) or given.dtype != bool or not given.any():
        raise ValueError(
            f"StateSpaceNormal: expected observed to be a mask of shape ({size},) that is True at some of the times, "
            f"got {given.dtype} of shape {given.shape} with {int(np.count_nonzero(given))} True: of indices make one, "
            f"mask = np.zeros({size}, bool); mask[indices] = True"
        )
    return given
