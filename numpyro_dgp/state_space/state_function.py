r"""Functions of one column that are represented by their Markov states at given times; ``dgp.StateSpace`` makes them.

The whitened values are the shocks between these times, :math:`s_1 = F_1 v_1` and :math:`s_j = \Phi_j s_{j-1} + F_j v_j`
with :math:`F_j F_j^\top = Q_j`. A value between :math:`t_i` and :math:`t_{i+1}` depends on the state at the former and
on the next shock only,

.. math:: E[f(x) \mid v] = h^\top \Phi(x - t_i)\, s_i + a^\top v_{i+1}, \qquad
          a = F_{i+1}^{-1} \Phi(t_{i+1} - x)\, Q(x - t_i)\, h, \qquad
          \operatorname{Var}[f(x) \mid v] = h^\top Q(x - t_i)\, h - a^\top a,

in which :math:`Q = P_\infty` before the first time and :math:`a = 0` after the last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.algebra.kalman import prior_states
from numpyro_dgp.algebra.linalg import einsum, jitter, matmul
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.kernels.per_output import Kernels, covariances, variances
from numpyro_dgp.kernels.state_space_forms import StateSpaceForm
from numpyro_dgp.means import Mean
from numpyro_dgp.model.beliefs import Belief, FunctionDraw, project
from numpyro_dgp.model.induced_function import InducedFunction
from numpyro_dgp.model.random_function import Moments

__all__ = ["StateFunction", "States"]


class _Place(NamedTuple):
    """Where inputs (N,) lie among the times.

    Args:
        last: number of the last time before each, -1 where there is none.
        row: h' Phi(x - t_i), what the state there says about the value (d, N).
        ahead: a, what the next shock says (N, d).
        left: the variance that is left given both (N,).
    """

    last: Array
    row: Array
    ahead: Array
    left: Array


@pytree
class States:
    """The states of one kernel at given times, and the shocks that they are made of.

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
        h, P = form.observation(), form.covariance()
        last = jnp.searchsorted(self.times, x, side="right") - 1
        following, first, end = jnp.minimum(last + 1, M - 1), last < 0, last + 1 == M
        # By selection: at a time itself, the slope of a maximum with zero would be half of that of the difference.
        since = jnp.where(first, 0, x - self.times[jnp.maximum(last, 0)])
        until = jnp.where(end, 0, self.times[following] - x)
        seen = jnp.where(first, matmul(P, h)[:, None], einsum("ijn,j->in", form.noise(since), h))
        ahead = einsum("nij,jkn,kn->ni", self.inverses[following], form.transition(until), seen)
        ahead = jnp.where(end[:, None], 0, ahead)
        row = jnp.where(first, 0, einsum("i,ijn->jn", h, form.transition(since)))
        left = jnp.maximum(matmul(h, seen) - jnp.square(ahead).sum(-1), 0)
        return _Place(last, row, ahead, left)

    def features(self, x: Array) -> Array:
        """The covariances of values at inputs (N,) with all shocks: (N, M, d)."""
        form, place = self.form, self.place(x)
        number = jnp.arange(len(self.times))
        passed = number <= place.last[:, None]
        since = jnp.where(passed, x[:, None] - self.times, 0)
        rows = einsum("i,ijnm->nmj", form.observation(), form.transition(since))
        before = matmul(rows[..., None, :], self.factors)[..., 0, :]
        known = jnp.where(passed[..., None], before, 0)
        return jnp.where((number == place.last[:, None] + 1)[..., None], place.ahead[:, None], known)

    def values(self, place: _Place, v: Array) -> Array:
        """Means (N,) at inputs given shocks (M, d), from one state and one shock each."""
        shocks = matmul(self.factors, v[..., None])[..., 0]
        states = prior_states(self.form, self.time, shocks[0], shocks.T)
        following = jnp.minimum(place.last + 1, len(v) - 1)
        known = (place.row * states[:, jnp.maximum(place.last, 0)]).sum(0)
        return known + (place.ahead * v[following]).sum(-1)

    def shocks(self, states: Array) -> Array:
        """v (M, d, num) of states (d, M, num)."""
        steps = einsum("ijm,jmn->imn", self.form.transition(self.time[1:]), states[:, :-1])
        moved = jnp.concatenate([states[:, :1], states[:, 1:] - steps], 1)
        return matmul(self.inverses, jnp.moveaxis(moved, 0, 1))


@pytree
class StateFunction(InducedFunction):
    """A function represented by whitened Markov states at given times; ``dgp.gp`` makes it.

    Args:
        kernels: one kernel, or one per output.
        states: of the one kernel, or of each.
        u: the value at the site of v: an array, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of the whitened values.
    """

    kernels: Kernels
    states: tuple[States, ...]
    u: Array | Belief | FunctionDraw
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

    def _stack(self, found: list[Array]) -> Array:
        """(P, ...) where outputs have kernels of their own, without the first axis where they share one."""
        return found[0] if isinstance(self.kernels, Kernel) else jnp.stack(found)

    def features(self, rows: Array) -> Array:
        return self._stack([s.features(rows[:, 0]).reshape(len(rows), self.size) for s in self.states])

    def prior_variance(self, rows: Array) -> Array:
        return variances(self.kernels, rows)

    def conditional_variance(self, rows: Array, A: Array) -> Array:
        return self._open(rows, [s.place(rows[:, 0]) for s in self.states])

    def _open(self, rows: Array, places: list[_Place]) -> Array:
        """The variance that is left, from the states around an input, with what the states lack of the kernel's."""
        prior = self.prior_variance(rows)
        forms = [s.form for s in self.states]
        held = self._stack([matmul(matmul(f.covariance(), f.observation()), f.observation())[None] for f in forms])
        left = self._stack([p.left for p in places]) + jnp.maximum(prior - held, 0)
        return jnp.maximum(left, jitter(left.dtype, self.states[0].form.size) * prior)

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        return covariances(self.kernels, x, y)

    def moments(self, rows: Array) -> Moments:
        if isinstance(self.u, Belief):
            return super().moments(rows)
        places = [s.place(rows[:, 0]) for s in self.states]
        if isinstance(self.u, FunctionDraw):
            loc = self._draw(self.u, self._through(places), rows)
            return loc, jnp.zeros_like(loc), None, None
        loc = self._through(places)(self.by_output(self.u))
        conditional = jnp.atleast_2d(self._open(rows, places)).T
        return loc, jnp.broadcast_to(conditional, loc.shape), None, None

    def _through(self, places: list[_Place]) -> Callable[[Array], Array]:
        """The linear map from whitened values (P, M d) to means at inputs (N, P), in time linear in both."""

        def values(v: Array) -> Array:
            shocks = v.reshape(len(v), len(self.times), -1)
            if isinstance(self.kernels, Kernel):
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
            drawn = s.form.random_states(key, where, weights.shape[-1])
            M = len(s.times)
            at_rows.append(einsum("i,inm->nm", s.form.observation(), drawn[:, M:]))
            whitened.append(s.shocks(drawn[:, :M]).reshape(self.size, -1))
        return project(weights, self._stack(at_rows)), project(weights, self._stack(whitened)).T
