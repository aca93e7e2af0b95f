r"""``StateSpace``: a function of one column is represented by its Markov states at given times.

The whitened values are the shocks between these times, :math:`s_1 = F_1 v_1` and :math:`s_j = \Phi_j s_{j-1} + F_j v_j`
with :math:`F_j F_j^\top = Q_j`. A value between :math:`t_i` and :math:`t_{i+1}` depends on the state at the former and
on the next shock only,

.. math:: E[f(x) \mid v] = h^\top \Phi(x - t_i)\, s_i + a^\top v_{i+1}, \qquad
          a = F_{i+1}^{-1} \Phi(t_{i+1} - x)\, Q(x - t_i)\, h, \qquad
          \operatorname{Var}[f(x) \mid v] = h^\top Q(x - t_i)\, h - a^\top a,

in which :math:`Q = P_\infty` before the first time and :math:`a = 0` after the last.

``StateSpaceNormal`` is exact regression on a series with times of any spacing in O(N).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, is_concrete, require_finite, require_positive, violated
from numpyro_dgp._data import own_numbers
from numpyro_dgp._fields import Checked, count
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.drawn_from_white import DrawnFromWhite
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.random_function import Moments
from numpyro_dgp.functions.weights import InducingPrior, Weights, matvec, whitened_values
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.kernels.per_output import Kernels, covariances, every, shared, stacked, variances
from numpyro_dgp.kernels.state_space_forms import StateSpaceForm
from numpyro_dgp.math.kalman import Observed, log_evidence, prior_states, shock_factors, smoothed
from numpyro_dgp.math.linalg import einsum, jitter, matmul
from numpyro_dgp.means import Mean

__all__ = ["StateFunction", "StateSpace", "StateSpaceNormal", "States", "checked_times", "merged", "passing"]


class _Place(NamedTuple):
    """Where inputs (N,) lie among the times.

    Args:
        last: number of the last time before each, -1 where there is none.
        row: h' Phi(x - t_i), the slope of the value by the state there (d, N).
        ahead: a, the slope of the value by the next shock (N, d).
        left: the variance that is left given both (N,).
    """

    last: Array
    row: Array
    ahead: Array
    left: Array


@pytree
class States:
    """The states of one kernel at given times, and their shocks.

    Args:
        form: of the kernel.
        times: t (M,), in order.
        time: that passes before each of them (M,).
        factors: F (M, d, d).
        inverses: of these (M, d, d).
    """

    form: StateSpaceForm
    times: Array
    time: Array
    factors: Array
    inverses: Array

    def place(self, x: Array) -> _Place:
        """Where inputs (N,) lie."""
        form, M = self.form, len(self.times)
        h, P = form.observation(), form.covariance()  # P the stationary covariance
        last = jnp.searchsorted(self.times, x, side="right") - 1  # the number of t_i, -1 before all
        following, first, end = jnp.minimum(last + 1, M - 1), last < 0, last + 1 == M
        # By selection: at a time itself, the slope of a maximum with zero would be half of that of the difference.
        since = jnp.where(first, 0, x - self.times[jnp.maximum(last, 0)])
        until = jnp.where(end, 0, self.times[following] - x)
        # Q(x - t_i) h (d, N), P h before t_1; a = F^-1 Phi(t_{i+1} - x) Q(x - t_i) h (N, d).
        seen = jnp.where(first, matmul(P, h)[:, None], einsum("ijn,j->in", form.noise(since), h))
        ahead = einsum("nij,jkn,kn->ni", self.inverses[following], form.transition(until), seen)
        ahead = jnp.where(end[:, None], 0, ahead)  # no shock after t_M
        row = jnp.where(first, 0, einsum("i,ijn->jn", h, form.transition(since)))  # h' Phi(x - t_i)
        left = jnp.maximum(matmul(h, seen) - jnp.square(ahead).sum(-1), 0)  # h' Q h - a'a
        return _Place(last, row, ahead, left)

    def features(self, x: Array) -> Array:
        """The covariances of values at inputs (N,) with all shocks: (N, M, d)."""
        form, place = self.form, self.place(x)
        number = jnp.arange(len(self.times))
        # Cov[f(x), v_j] = h' Phi(x - t_j) F_j for t_j <= x, a for the next shock, then zero.
        passed = number <= place.last[:, None]
        since = jnp.where(passed, x[:, None] - self.times, 0)
        rows = einsum("i,ijnm->nmj", form.observation(), form.transition(since))
        before = matmul(rows[..., None, :], self.factors)[..., 0, :]
        known = jnp.where(passed[..., None], before, 0)
        return jnp.where((number == place.last[:, None] + 1)[..., None], place.ahead[:, None], known)

    def values(self, place: _Place, v: Array) -> Array:
        """Means (N,) at inputs given shocks (M, d), from one state and one shock each."""
        shocks = matmul(self.factors, v[..., None])[..., 0]  # F_j v_j (M, d)
        states = prior_states(self.form, self.time, shocks[0], shocks.T)
        following = jnp.minimum(place.last + 1, len(v) - 1)
        # h' Phi(x - t_i) s_i + a' v_{i+1}
        known = (place.row * states[:, jnp.maximum(place.last, 0)]).sum(0)
        return known + (place.ahead * v[following]).sum(-1)

    def shocks(self, states: Array) -> Array:
        """v (M, d, num) of states (d, M, num)."""
        # F_j v_j = s_j - Phi_j s_{j-1}, F_1 v_1 = s_1
        steps = einsum("ijm,jmn->imn", self.form.transition(self.time[1:]), states[:, :-1])
        moved = jnp.concatenate([states[:, :1], states[:, 1:] - steps], 1)
        return matmul(self.inverses, jnp.moveaxis(moved, 0, 1))


@pytree
class StateFunction(InducedFunction):
    """A function represented by whitened Markov states at given times; made by ``dgp.gp``.

    Args:
        kernels: one kernel, or one per output.
        states: of the one kernel, or of each.
        v: the weights: known, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of the whitened values.
    """

    kernels: Kernels
    states: tuple[States, ...]
    v: Weights
    outputs: int | None = static()
    mean: Mean
    site: str | None = static(default=None)

    @property
    def size(self) -> int:
        return self.states[0].factors.shape[0] * self.states[0].factors.shape[1]

    @property
    def dims(self) -> int:
        return 1

    @property
    def dense(self) -> bool:
        return True

    @property
    def times(self) -> Array:
        """The times of the states (M,)."""
        return self.states[0].times

    def features(self, rows: Array) -> Array:
        return stacked(self.kernels, [s.features(rows[:, 0]).reshape(len(rows), self.size) for s in self.states])

    def prior_variance(self, rows: Array) -> Array:
        return variances(self.kernels, rows)

    def conditional_variance(self, rows: Array, A: Array) -> Array:
        return self._conditional_variance(rows, [s.place(rows[:, 0]) for s in self.states])

    def _conditional_variance(self, rows: Array, places: list[_Place]) -> Array:
        """Var[f | states around an input], with the variance of the kernel that the states lack."""
        prior = self.prior_variance(rows)
        forms = [s.form for s in self.states]
        # h' P h, the variance of the states: less than k(x, x) where waves of a kernel are left out.
        held = stacked(
            self.kernels, [matmul(matmul(f.covariance(), f.observation()), f.observation())[None] for f in forms]
        )
        left = stacked(self.kernels, [p.left for p in places]) + jnp.maximum(prior - held, 0)
        return jnp.maximum(left, jitter(left.dtype, self.states[0].form.size) * prior)

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        return covariances(self.kernels, x, y)

    def moments(self, rows: Array) -> Moments:
        if not self.v.known:
            return super().moments(rows)
        places = [s.place(rows[:, 0]) for s in self.states]
        if self.v.whole is not None:
            loc = self._draw(self.v.whole, self._through(places), rows)
            return loc, jnp.zeros_like(loc), None, None
        loc = self._through(places)(self.by_output(self.v.loc))
        conditional = jnp.atleast_2d(self._conditional_variance(rows, places)).T
        return loc, jnp.broadcast_to(conditional, loc.shape), None, None

    def _through(self, places: list[_Place]) -> Callable[[Array], Array]:
        """The linear map from whitened values (P, M d) to means at inputs (N, P), in time linear in both."""

        def values(v: Array) -> Array:
            shocks = v.reshape(len(v), len(self.times), -1)
            if shared(self.kernels):
                return jax.vmap(self.states[0].values, in_axes=(None, 0), out_axes=1)(places[0], shocks)
            each = zip(self.states, places, shocks, strict=True)
            return jnp.stack([s.values(place, shock) for s, place, shock in each], -1)

        return values

    def held(self) -> StateFunction:
        kernels, states = jax.lax.stop_gradient((self.kernels, self.states))
        return dataclasses.replace(self, kernels=kernels, states=states)

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        at_rows, whitened = [], []
        for s in self.states:
            where = jnp.concatenate([s.times, rows[:, 0]])
            drawn = s.form.random_states(key, where, weights.shape[-1])  # (d, M + N, num), at times and rows
            M = len(s.times)
            at_rows.append(einsum("i,inm->nm", s.form.observation(), drawn[:, M:]))
            whitened.append(s.shocks(drawn[:, :M]).reshape(self.size, -1))
        return matvec(weights, stacked(self.kernels, at_rows)), matvec(weights, stacked(self.kernels, whitened)).T


def checked_times(times: ArrayLike, *, in_order: bool = True) -> Any:
    """Times (N,) or (N, 1) as (N,): an array of NumPy in the precision that they have, where they are known.

    Raises:
        ValueError: other shapes, NaN, and times that are not in order.
    """
    found = own_numbers("times", times)
    shape = np.shape(found)
    if len(shape) == 2 and shape[1] == 1:
        found = found[:, 0]
    elif len(shape) != 1:
        raise expected(
            "times of shape (N,) or (N, 1)", shape, "for more than one input column use dgp.Points or dgp.Grid"
        )
    expect(shape[0], "times of at least one point", "none", "check how the data were selected")
    require_finite("times", found, "leave out the rows without a time")
    if in_order and violated(lambda t: t[1:] >= t[:-1], found):
        raise expected(
            "times in order", _first_wrong(np.asarray(found)), "i = np.argsort(times); times, y = times[i], y[i]"
        )
    return np.asarray(found) if is_concrete(found) else found


def _first_wrong(times: np.ndarray) -> str:
    n = int(np.flatnonzero(times[1:] < times[:-1])[0])
    return f"{times[n + 1]:g} after {times[n]:g} at index {n + 1}"


def passing(times: Any, dtype: Any) -> Array:
    """The time that passes before each of the times (N,), zero before the first; NaN where traced ones go back."""
    library: Any = np if isinstance(times, np.ndarray) else jnp
    before = library.concatenate([times[:1], times[:-1]])
    # The times themselves are compared: the difference of equal ones, computed with them, may round below zero.
    steps = library.where(times >= before, library.maximum(times - before, 0), library.nan)
    return jnp.asarray(steps, dtype)


def merged(times: Any, others: Any) -> tuple[Any, Any]:
    """Both times in order, and the place of each: first those of ``times``, then of ``others``."""
    library: Any = np if isinstance(times, np.ndarray) and isinstance(others, np.ndarray) else jnp
    both = library.concatenate([times, others])
    order = library.argsort(both, stable=True)
    places = library.argsort(order, stable=True)  # the inverse permutation
    return both[order], places


@pytree
class StateSpace(Checked):
    r"""Inducing states: a function of one input column is represented by itself and its derivatives at given times.

    A kernel with d states (:class:`~numpyro_dgp.functions.StateSpaceNormal` lists them) has M d whitened values, the
    shocks from each state to the next. Given them, a value depends on the states around it only, and no matrix of the
    times is factorised: the layer opens in O(M d^3), and draws of v or of whole functions become values at N inputs in
    O((M + N) d^2). Gaussian q(v), inside ``dgp.ELBO``, build the features of all rows, N M d numbers, as ``Points`` do;
    for Matern 1/2 both are the same layer. With all inputs among the times the layer is the exact process, up to the
    jitter.

    What the waves of a ``Periodic`` kernel leave out stays in the variance of f(x) given v, so that the layer's bound
    is a bound for the kernel itself.

    Args:
        times: t (M,) or (M, 1), in order.
        order: waves of a ``Periodic`` kernel.

    Raises:
        ValueError: times that are not in order, NaN or not one column; ``order`` that is not a positive integer. Where
            the layer is opened, kernels without a state space, or of several outputs with different numbers of states.

    Example:
        >>> import numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.Matern32(), dgp.StateSpace(jnp.linspace(0, 10, 21)))
        >>> f(jnp.zeros((7, 1))).batch_shape, f.v.loc.shape
        ((7,), (42,))

    Source: Hartikainen and Sarkka (2010); inducing states, Adam et al. (2020).
    """

    times: ArrayLike
    order: int = count(8, static=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "times", checked_times(self.times))

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> StateFunction:
        """Open the site of layer ``name`` and return its random function."""
        dtype = jnp.result_type(jnp.asarray(self.times[:1]), float)  # type: ignore[index]
        states = tuple(self._states(k, dtype) for k in every(kernels))
        sizes = [s.form.size for s in states]
        expect(
            len(set(sizes)) <= 1,
            "equally many states of all kernels",
            sizes,
            "open a layer per kernel",
            at=f"gp {name!r}",
        )
        M = len(states[0].times) * sizes[0]
        v, site = whitened_values(name, InducingPrior((M,) if outputs is None else (outputs, M), dtype))
        return StateFunction(kernels, states, v, outputs, mean, site)

    def _states(self, kernel: Kernel, dtype: Any) -> States:
        form = kernel.cast(dtype).state_space(self.order)
        time = passing(self.times, dtype)
        Q: Array = jnp.moveaxis(form.noise(time), -1, 0).at[0].set(form.covariance())  # Q_j (M, d, d), Q_1 = P
        factors, inverses = shock_factors(Q)
        return States(form, jnp.asarray(self.times, dtype), time, factors, inverses)


class StateSpaceNormal(DrawnFromWhite):
    r"""Values of a process of one input column at given times, exactly: :math:`y \sim N(m,\, k(t, t) + \sigma^2 I)`.

    ``log_prob`` is the log evidence of exact regression, by a Kalman filter in O(N d^3) for a kernel with d states; no
    matrix of the data is built. Times may have any spacing and may repeat, which takes the place of gaps on a grid:
    missing values are left out, or marked in ``observed`` to be predicted. With ``noise=None`` it is the process
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
        >>> d = dgp.functions.StateSpaceNormal(dgp.kernels.Matern32(1.0, 2.0), t, noise=0.1)
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
        self.times = checked_times(times)
        self.present = np.flatnonzero(_mask(observed, len(self.times)))
        dtype = jnp.result_type(jnp.asarray(self.times[:1]), float)
        self.kernel, self.order, self.noisy = as_kernel(kernel).cast(dtype), order, noise is not None
        form = self._form()
        if noise is None:
            h = form.observation()
            variance = jitter(dtype, 1) * matmul(matmul(form.covariance(), h), h)  # a jitter times h' P h
        else:
            require_positive("noise", noise)
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
            # y_n = m + h' s_n + sigma e_n, with s_1 = F_1 w_1 and s_n = Phi_n s_{n-1} + F_n w_n.
            shocks = matmul(later, white[:, :d, None])[..., 0].T
            values = matmul(form.observation(), prior_states(form, time, matmul(first, white[0, :d]), shocks))
            return values + jnp.sqrt(self.noise_variance) * white[:, d] if self.noisy else values

        flat = jax.vmap(path)(white.reshape(-1, *self.white_shape))
        return self.loc + flat.reshape(*white.shape[:-2], -1)

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        residual = self._residual(value)
        time = passing(self.times[self.present], self.loc.dtype)  # unobserved times do not enter

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
            known, where = merged(known, checked_times(times, in_order=False))
        places = where[self.present]
        zeros = jnp.zeros(len(known), dtype)
        time, present = passing(known, dtype), zeros.at[places].set(1)
        noise = (zeros + 1).at[places].set(self.noise_variance)

        def moments(residual: Array) -> tuple[Array, Array]:
            return smoothed(self._form(), Observed(time, zeros.at[places].set(residual), noise, present))

        # The variance is the same for all sets of observations.
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
    expect(
        is_concrete(observed),
        "observed to be known when the program is compiled",
        "a traced array",
        "make the mask outside of the program, and do not pass it as an argument of the model",
    )
    given = np.asarray(observed)
    if given.shape != (size,) or given.dtype != bool or not given.any():
        raise expected(
            f"observed to be a mask of shape ({size},) that is True at some of the times",
            f"{given.dtype} of shape {given.shape} with {int(np.count_nonzero(given))} True",
            f"of indices make one, mask = np.zeros({size}, bool); mask[indices] = True",
        )
    return given
