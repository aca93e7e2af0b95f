r"""Vecchia's approximation: a process whose values at the data are conditioned on their nearest neighbours.

At new inputs the process is conditioned on the nearest of its values. The joint density of the values is

.. math:: \log p(u) = \sum_i \log N\bigl(u_i - m(x_i);\; b_i^\top (u_{c(i)} - m(x_{c(i)})),\; d_i\bigr)

Posteriors over these values are Gaussians in the whitened coordinates of their prior.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from numpyro.distributions import kl_divergence

from numpyro_dgp._checks import expect, expected, is_concrete, require_finite, require_squares
from numpyro_dgp._data import as_numbers
from numpyro_dgp._fields import Checked, count
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.function_inputs import checked_inputs, mean_values, noise_variance, require_noise
from numpyro_dgp.functions.function_values import FunctionValues, Origin, ProcessValues
from numpyro_dgp.kernels.per_output import Kernels, covariances, every
from numpyro_dgp.math.linalg import einsum, jitter
from numpyro_dgp.math.vecchia import (
    ConditioningSets,
    conditional,
    conditioning_sets,
    coordinate_order,
    each_conditional,
    from_neighbours,
    in_order,
    maxmin_order,
    nearest,
    onto_neighbours,
    values_first,
    values_last,
)
from numpyro_dgp.means import Mean

__all__ = [
    "NearestFunction",
    "NeighbourFunction",
    "NeighbourValues",
    "Neighbours",
    "WhitenedNeighbours",
    "conditionals",
    "nuggets",
]


class NeighbourValues(ProcessValues):
    r"""Values of P independent functions, each value conditioned on C others that come before it in some order.

    Args:
        loc: means m(x) (..., N, P), or (..., N) for a scalar function.
        weights: :math:`b_i` (..., P, N, C), P = 1 where outputs share them.
        conditional_variance: :math:`d_i`, variances given the others (..., P, N).
        sets: the others.
        event_dim: 2 for vector-valued functions, 1 for scalar ones.
        origin: which function these are values of, and where.

    Source: Vecchia (1988); Katzfuss and Guinness (2021).
    """

    pytree_data_fields: tuple[str, ...] = ("weights", "conditional_variance", "sets")
    suggested_rule = "dgp.guides.SparseFactor()"

    def __init__(
        self,
        loc: Array,
        weights: Array,
        conditional_variance: Array,
        sets: ConditioningSets,
        event_dim: int = 2,
        origin: Origin | None = None,
    ) -> None:
        self.weights, self.conditional_variance, self.sets = weights, conditional_variance, sets
        super().__init__(loc, event_dim, origin)

    def whitened(self, residual: Array) -> Array:
        r"""The whitened residuals :math:`D^{-1/2} (I - B)\, r`, a priori N(0, 1): (..., P, N)."""
        return self._innovations(residual) / jnp.sqrt(self.conditional_variance)

    def correlated(self, v: Array) -> Array:
        r"""Residuals from standard normal numbers, :math:`(I - B)^{-1} D^{1/2} v` (..., P, N)."""
        # (I - B) u = D^1/2 v, solved for u in the order of the values.
        scaled = jnp.sqrt(self.conditional_variance) * v
        return values_last(in_order(self.sets, self._weights(scaled), values_first(scaled)))

    def from_white(self, white: Array) -> Array:
        return self.loc + self.to_value(self.correlated(self.to_output_major(white)))

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        if intermediates:
            v = self.to_output_major(intermediates[0])  # of a draw v is known: nothing is solved
        else:
            v = self.whitened(self.to_output_major(self.residual(value)))
        # log p(u) = sum_i log N(v_i; 0, 1) - log(d_i) / 2
        return (-0.5 * (jnp.square(v) + math.log(2 * math.pi)) - self.half_log_variance).sum((-2, -1))

    @property
    def half_log_variance(self) -> Array:
        """Half the logarithms of the variances given the others (..., P, N)."""
        return 0.5 * jnp.log(self.conditional_variance)

    def precision_times(self, residual: Array) -> Array:
        # C^-1 r = (I - B)' D^-1 (I - B) r
        scaled = self._innovations(self.to_output_major(residual)) / self.conditional_variance
        first = values_first(scaled)
        return self.to_value(values_last(first - onto_neighbours(self.sets, self._weights(scaled), first)))

    def _innovations(self, residual: Array) -> Array:
        """Residuals minus their conditional means given the neighbours (..., P, N)."""
        first = values_first(residual)
        return values_last(first - from_neighbours(self.sets, self._weights(residual), first))  # (I - B) r

    def _weights(self, values: Array) -> Array:
        """The weights with the values first, then their neighbours, for values (..., P, N)."""
        weights = jnp.broadcast_to(self.weights, (*values.shape[:-2], *self.weights.shape[-3:]))
        return jnp.moveaxis(weights, (-2, -1), (0, 1))  # (N, C, ..., P)

    def _expanded(self, batch: tuple[int, ...]) -> NeighbourValues:
        loc = jnp.broadcast_to(self.loc, batch + self.event_shape)
        weights = jnp.broadcast_to(self.weights, batch + self.weights.shape[-3:])
        variance = jnp.broadcast_to(self.conditional_variance, batch + self.conditional_variance.shape[-2:])
        found = type(self)(loc, weights, variance, self.sets, self.event_dim, self.origin)
        found.follows_model = self.follows_model
        return found


def nuggets(kernels: Kernels, x: Array, noise: ArrayLike | None) -> Array:
    """Variances of noise and jitter on values at x (..., N, D): shape (..., P), P = 1 where outputs share them.

    The jitter is that of the matrix of all values in double precision, relative to their mean variance, and in single
    precision that of a hundred.
    """
    prior = _variances(kernels, x).mean(-1)
    extra = noise_variance(noise, x.dtype)
    return extra + jitter(x.dtype, 100) * (prior + extra)  # s^2 + epsilon (mean k(x, x) + s^2)


def _variances(kernels: Kernels, x: Array) -> Array:
    """k(x, x) at rows (..., N, D): shape (..., P, N), P = 1 where outputs share it."""
    return jnp.stack([k.diag(x) for k in every(kernels)], -2)


def conditionals(kernels: Kernels, rows: Array, others: Array, present: Array, nugget: Array) -> tuple[Array, Array]:
    """Weights and variances of values given others.

    Args:
        kernels: one kernel, or one per output.
        rows: inputs of the values (N, ..., D).
        others: inputs of their neighbours (N, C, ..., D).
        present: which of these there are (N, C).
        nugget: variances of noise on all values (..., P).

    Returns:
        Weights (N, ..., P, C) and variances (N, ..., P), P = 1 where outputs share them.
    """

    def of_row(x: Array, others: Array, present: Array) -> tuple[Array, Array]:
        x, z = x[..., None, :], jnp.moveaxis(others, 0, -2)
        # k(x, x) (..., P) and k(z_c, z_c) (..., P, C); then k(x, z_c) (..., P, C) and
        # k(z_c, z_c') (..., P, C, C)
        prior, diagonal = _variances(kernels, x)[..., 0], _variances(kernels, z)
        cross, within = covariances(kernels, x, z)[..., 0, :], covariances(kernels, z, z)
        batch = jnp.broadcast_shapes(prior.shape, nugget.shape)
        cross = jnp.broadcast_to(cross, (*batch, cross.shape[-1]))
        return conditional(within, diagonal, cross, prior, jnp.broadcast_to(nugget, batch), present)

    # C (C + 1) numbers for each output: K_cc and k_c.
    size = others[0].size // others.shape[-1] * (others.shape[1] + 1) * nugget.shape[-1]
    return each_conditional(of_row, size, rows, others, present)


@pytree
class NearestFunction:
    r"""A Gaussian process given values at N inputs, returned by ``f.condition(x, values)`` for ``dgp.Neighbours``.

    .. math:: f(x) \sim N\bigl(m(x) + b^\top (u_{c} - m(x_{c})),\; d\bigr)

    with the ``num`` of the N inputs that are nearest to x as c. Given all N values, values at new inputs are
    independent of each other.

    Args:
        kernels: one kernel, or one per output.
        x: the inputs (N, D).
        residual: the values there less the mean function (N, P).
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        num: neighbours of a new input.
        noise: standard deviation of the noise in the values, a number or one per output; ``None`` for none.

    Source: Vecchia (1988); Sauer et al. (2023b).
    """

    kernels: Kernels
    x: Array
    residual: Array
    outputs: int | None = static()
    mean: Mean
    num: int = static()
    noise: ArrayLike | None = None

    @property
    def site(self) -> None:
        """Always ``None``: it opens no site."""
        return None

    def __call__(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> FunctionValues:
        """Values at each input on its own.

        Args:
            x: inputs (..., D).
            noise: standard deviation of Gaussian process noise, a number or one per output.

        Returns:
            A distribution with batch shape ``x.shape[:-1]`` and event shape (P,), or () for a scalar function.

        Raises:
            ValueError: inputs of another width, NaN or infinite inputs, noise that is not positive.
        """
        x = checked_inputs(x, self.x.shape[-1], noise)
        require_noise(noise, self.outputs, x.shape[:-1])
        rows = x.reshape(-1, x.shape[-1])
        index = nearest(self.x, rows, self.num)
        present = jnp.ones(index.shape, bool)
        # b = (K_cc + e I)^-1 k_c, d = k - k_c' b + e, with e the variance of noise and jitter.
        b, d = conditionals(self.kernels, rows, self.x[index], present, nuggets(self.kernels, self.x, self.noise))
        if self.noise is not None:  # the new values have none of it
            least = nuggets(self.kernels, self.x, None)
            d = jnp.maximum(d - noise_variance(self.noise, x.dtype), least)
        known = self.residual[index]  # u_c - m(x_c) (N, C, P)
        # b' (u_c - m(x_c))
        loc = einsum("npc,ncp->np", jnp.broadcast_to(b, (len(b), known.shape[-1], b.shape[-1])), known)
        shape = x.shape[:-1] if self.outputs is None else (*x.shape[:-1], self.outputs)
        return FunctionValues(
            loc.reshape(shape) + mean_values(self.mean, x, self.outputs),
            jnp.broadcast_to(d, loc.shape).reshape(shape) + noise_variance(noise, x.dtype),
            event_dim=0 if self.outputs is None else 1,
            origin=Origin(self, x, noise),
        )

    def joint(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> NeighbourValues:
        """The same independent values as one event of shape (N, P), or (N,), for x (..., N, D)."""
        each = self(x, noise=noise)
        N = each.batch_shape[-1]
        variance = each.variance[..., None] if self.outputs is None else each.variance
        variance = jnp.moveaxis(variance, -1, -2)
        # Neither neighbours nor an order: B = 0, and all values in one step.
        alone = ConditioningSets(np.zeros((N, 0), np.int32), np.arange(N, dtype=np.int32)[None])
        weights = jnp.zeros((*variance.shape, 0), variance.dtype)
        return NeighbourValues(each.loc, weights, variance, alone, 1 if self.outputs is None else 2, each.origin)

    def given(self, x: ArrayLike, values: ArrayLike, noise: ArrayLike | None = None) -> NearestFunction:
        """The function itself: given its values, those at new inputs are independent of others."""
        return self


_ORDERS = ("maxmin", "coordinate", "random")


@pytree
class Neighbours(Checked):
    r"""Vecchia's approximation of a process at N data: each value given its nearest neighbours among those before it.

    .. math:: p(u) = \prod_i p(u_i \mid u_{c(i)}), \qquad p(u_i \mid u_{c(i)}) = N(b_i^\top u_{c(i)}, d_i)

    It is a Gaussian with a sparse precision, whatever ``num`` is. As with an exact process there are no inducing
    values: ``h = numpyro.sample("h", f(X))`` outside the data plate draws all values, and
    ``numpyro.sample("y", f(X, noise=s), obs=y)`` is regression on noisy values, each given its noisy neighbours. Row n
    of what f is called on belongs to row n of X. The sets c(i) are found here, once; for a hidden layer, whose inputs
    move, ``neighbours.refreshed(h)`` finds them anew. Time is O(N num³), memory O(N num²).

    Args:
        X: inputs (N, D) that define which rows are neighbours, by Euclidean distance: columns of different units
            want to be divided by lengthscales first.
        num: neighbours of each value; with N - 1 the process is exact at the data, with N at new inputs too.
        order: ``"maxmin"``, each row as far as possible from those before it; ``"coordinate"``, sorted by columns;
            ``"random"``; or the numbers of the rows in an order of your own.

    Raises:
        ValueError: inputs that are not known, not finite or not two rows of columns at least; a number of neighbours
            that is not a positive integer; another order.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> X = jnp.linspace(0, 1, 50)[:, None]
        >>> f = dgp.gp("f", dgp.kernels.Matern32(1.0, 0.2), dgp.Neighbours(X, num=5))
        >>> exact = dgp.gp("f", dgp.kernels.Matern32(1.0, 0.2), None)
        >>> y = jnp.sin(6 * X[:, 0])
        >>> print(f(X, noise=0.1).log_prob(y).round(1), exact(X, noise=0.1).log_prob(y).round(1))
        31.2 31.4

    Source: Vecchia (1988); Guinness (2018) for the order and for noise; Sauer et al. (2023b) for hidden layers.
    """

    X: Any
    num: int = count(25, static=True)
    order: Any = static(default="maxmin")
    sets: ConditioningSets = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(
            is_concrete(self.X),
            "inputs that are known when the program is compiled",
            "a traced array",
            ("make it outside of the program, near = dgp.Neighbours(X), and do not pass X as an argument of the model"),
        )
        X = np.asarray(as_numbers("inputs X", self.X))
        expect(
            X.ndim == 2 and len(X) >= 2 and X.shape[1],
            "inputs of shape (N, D), two rows or more",
            f"shape {X.shape}",
            "a single input column is X[:, None]",
        )
        require_finite("inputs X", X, "drop, impute or mask the rows with missing values")
        require_squares("inputs X", X)
        order = _order(self.order, X)
        object.__setattr__(self, "X", X)
        object.__setattr__(self, "order", self.order if isinstance(self.order, str) else tuple(order.tolist()))
        object.__setattr__(self, "sets", conditioning_sets(X, order, self.num))

    def refreshed(self, h: ArrayLike) -> Neighbours:
        """Neighbours chosen by other inputs of the same rows, such as a draw of the layer below.

        ``near.refreshed(mcmc.get_samples()["h"][-1])``: between runs, for while a sampler or a fit goes on, the sets
        are part of its target.

        Args:
            h: inputs (N, D').

        Raises:
            ValueError: another number of rows, and as for ``X``.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro_dgp as dgp
            >>> X = jnp.linspace(0, 1, 6)[:, None]
            >>> near = dgp.Neighbours(X, num=1, order="coordinate")
            >>> print(near.sets.neighbours.T, near.refreshed(jnp.square(X - 0.75)).sets.neighbours.T)
            [[0 0 1 2 3 4]] [[1 2 5 4 4 3]]
        """
        expect(
            not is_concrete(h) or np.shape(h)[:1] == (len(self.X),),
            f"values of shape (N, D) at the N = {len(self.X)} rows of X",
            np.shape(h),
            "of draws take one, mcmc.get_samples()['h'][-1]",
        )
        return Neighbours(h, self.num, self.order)

    def open(self, name: str, kernels: Kernels, outputs: int | None, mean: Mean) -> NeighbourFunction:
        """The random function of layer ``name``; no site is opened."""
        return NeighbourFunction(kernels, outputs, mean, self.sets, self.num)


@pytree
class NeighbourFunction:
    """A Gaussian process whose values at the data are conditioned on neighbours, ``dgp.gp(..., dgp.Neighbours(X))``.

    Its values are drawn at all data at once, outside the data plate: ``v = numpyro.sample("v", f(X))``. Regression is
    ``numpyro.sample("y", f(X, noise=s), obs=y)``. At other inputs it is :meth:`condition`.

    Args:
        kernels: one kernel, or one per output.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        sets: the neighbours of every datum.
        num: how many at new inputs.
    """

    kernels: Kernels
    outputs: int | None = static()
    mean: Mean
    sets: ConditioningSets
    num: int = static()

    @property
    def site(self) -> None:
        """Always ``None``: it opens no site."""
        return None

    def __call__(self, x: ArrayLike, *, noise: ArrayLike | None = None) -> NeighbourValues:
        """Values at the inputs ``x`` (..., N, D) of the data: event shape (N, P), or (N,).

        With noise these are the noisy values, each given its noisy neighbours.

        Args:
            x: inputs, row n of which belongs to row n of the X of ``Neighbours(X)``.
            noise: standard deviation of Gaussian process noise, a number or one per output.

        Raises:
            ValueError: another number of rows, NaN or infinite inputs, or noise that is not positive.
        """
        x = checked_inputs(x, None, noise)
        require_noise(noise, self.outputs)
        N = len(self.sets.neighbours)
        expect(
            x.shape[-2] == N,
            f"inputs of shape (..., {N}, D), the rows of Neighbours(X)",
            x.shape,
            "elsewhere use f.condition(X, v)(x_new)",
            at="f(x)",
        )
        loc = mean_values(self.mean, x, self.outputs)
        loc = jnp.broadcast_to(loc, x.shape[:-1] + (() if self.outputs is None else (self.outputs,)))
        rows = jnp.moveaxis(x, -2, 0)
        # x_c (N, C, ..., D), b (N, ..., P, C), d (N, ..., P)
        others, present = rows[self.sets.neighbours], jnp.asarray(self.sets.present)
        weights, variance = conditionals(self.kernels, rows, others, present, nuggets(self.kernels, x, noise))
        return NeighbourValues(
            loc,
            jnp.moveaxis(weights, 0, -2),
            jnp.moveaxis(variance, 0, -1),
            self.sets,
            event_dim=1 if self.outputs is None else 2,
            origin=Origin(self, x, noise),
        )

    joint = __call__

    def grad(self, x: ArrayLike, column: int | None = None, **options: Any) -> NoReturn:
        """Not available, like sums: slopes depend on all values.

        Raises:
            ValueError: always.
        """
        _refuse("grad")

    def linear(self, x: ArrayLike, A: ArrayLike, **options: Any) -> NoReturn:
        """Not available, like slopes: sums depend on all values.

        Raises:
            ValueError: always.
        """
        _refuse("linear")

    def given(self, x: ArrayLike, values: ArrayLike, noise: ArrayLike | None = None) -> NearestFunction:
        """The process conditioned on ``values`` at ``x``, as :meth:`condition`."""
        return self.condition(x, values, noise=noise)

    def condition(self, x: ArrayLike, values: ArrayLike, *, noise: ArrayLike | None = None) -> NearestFunction:
        """The process given its values at ``x``: a function to call on new inputs, each given its nearest values.

        Args:
            x: inputs (N, D) where the values are known.
            values: (N, P), or (N,) for a scalar function, for example the draw of ``f(x)``.
            noise: standard deviation of the noise in the values, a number or one per output, as those of
                ``f(x, noise=s)`` have it; ``None`` for none. The function that is returned is f without noise.

        Raises:
            ValueError: values of another shape, NaN or infinite inputs or values, or noise that is not positive.

        Example:
            >>> import jax.numpy as jnp
            >>> import numpyro_dgp as dgp
            >>> x = jnp.array([[0.0], [1.0], [2.0]])
            >>> f = dgp.gp("f", dgp.kernels.RBF(), dgp.Neighbours(x, num=2))
            >>> given = f.condition(x, jnp.array([1.0, -1.0, 0.0]))
            >>> print(given(x).mean.round(2) + 0.0, given(jnp.zeros((5, 1))).batch_shape)
            [ 1. -1.  0.] (5,)
        """
        x = checked_inputs(x, None, noise)
        require_noise(noise, self.outputs)
        expected = x.shape[:-1] + (() if self.outputs is None else (self.outputs,))
        expect(
            x.ndim == 2 and np.shape(values) == expected,
            f"inputs (N, D) and values of shape {expected}",
            f"inputs {x.shape} and values {np.shape(values)}",
            "a scalar function has values (N,), one with outputs=P values (N, P)",
        )
        require_finite("values given to condition", values, "leave out the rows where they are not known")
        residual = jnp.asarray(values, x.dtype) - mean_values(self.mean, x, self.outputs)
        residual = residual[:, None] if self.outputs is None else residual
        return NearestFunction(self.kernels, x, residual, self.outputs, self.mean, self.num, noise)


def _order(order: Any, X: np.ndarray) -> np.ndarray:
    """The rows of X in order."""
    N = len(X)
    if isinstance(order, str):
        if order not in _ORDERS:
            raise expected(
                f"order to be one of {', '.join(map(repr, _ORDERS))} or the row numbers 0 to N - 1 in some order",
                repr(order),
                "'maxmin' is the default",
            )
        if order == "random":
            return np.random.default_rng(0).permutation(N)
        return maxmin_order(X) if order == "maxmin" else coordinate_order(X)
    found = np.asarray(order)
    if found.dtype.kind not in "iu" or not np.array_equal(np.sort(found.ravel()), np.arange(N)) or found.ndim != 1:
        raise expected(
            (f"order to be one of {', '.join(map(repr, _ORDERS))} or the row numbers 0 to N - 1 = {N - 1}, each once"),
            f"{found.dtype} of shape {found.shape}",
            "np.argsort(X[:, 0]) is such an order",
        )
    return found


def _refuse(name: str) -> NoReturn:
    raise expected("a layer with inducing values", "one of dgp.Neighbours", "open it on dgp.Points(Z)", at=f"f.{name}")


class WhitenedNeighbours(ProcessValues):
    r"""A Gaussian over values :math:`u = m(x) + (I - B)^{-1} D^{1/2} v` of a process conditioned on neighbours.

    .. math:: v_i = t_i + \sigma_i \epsilon_i + r_i^\top \epsilon_{c(i)}, \qquad \epsilon \sim N(0, I)

    so that the divergence from the prior, :math:`v \sim N(0, I)`, is in closed form:

    .. math:: \mathrm{KL} = \sum_i \tfrac12 (t_i^2 + \sigma_i^2 + \lVert r_i \rVert^2 - 1) - \log\sigma_i .

    Args:
        prior: the prior of the values.
        shift: t (P, N).
        scale: :math:`\sigma` (P, N), positive.
        weights: r (P, N, C), or ``None`` for independent numbers.
    """

    pytree_data_fields: tuple[str, ...] = ("prior", "shift", "scale", "weights")

    def __init__(self, prior: NeighbourValues, shift: Array, scale: Array, weights: Array | None = None) -> None:
        if weights is not None:
            weights = jnp.where(prior.sets.present, weights, 0.0)  # else its own row: r is zero there
        self.prior, self.shift, self.scale, self.weights = prior, shift, scale, weights
        # m(x) + (I - B)^-1 D^1/2 t
        super().__init__(prior.loc + prior.to_value(prior.correlated(shift)), prior.event_dim, prior.origin)

    def from_white(self, white: Array) -> Array:
        epsilon = self.to_output_major(white)
        # v_i = t_i + sigma_i eps_i + r_i' eps_c(i)
        v = self.shift + self.scale * epsilon
        if self.weights is not None:
            rows = values_first(epsilon)
            v = v + values_last(from_neighbours(self.prior.sets, self._rows(self.weights, epsilon), rows))
        return self.prior.loc + self.to_value(self.prior.correlated(v))

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = self._white(value) if not intermediates else self.to_output_major(intermediates[0])
        # log q(u) = sum_i log N(eps_i; 0, 1) - log sigma_i - log(d_i) / 2
        density = -0.5 * (jnp.square(white) + math.log(2 * math.pi)) - jnp.log(self.scale)
        return (density - self.prior.half_log_variance).sum((-2, -1))

    def _white(self, value: Array) -> Array:
        v = self.prior.whitened(self.to_output_major(value - self.prior.loc))
        # eps_i + (r_i / sigma_i)' eps_c(i) = (v_i - t_i) / sigma_i, value by value in their order.
        target = (v - self.shift) / self.scale
        if self.weights is None:
            return target
        weights = self._rows(-self.weights / self.scale[..., None], target)
        return values_last(in_order(self.prior.sets, weights, values_first(target)))

    def _rows(self, weights: Array, values: Array) -> Array:
        """Weights (P, N, C) with the values first, for values (..., P, N)."""
        return jnp.moveaxis(jnp.broadcast_to(weights, (*values.shape, weights.shape[-1])), (-2, -1), (0, 1))


@kl_divergence.register(WhitenedNeighbours, NeighbourValues)
def _kl_whitened(q: WhitenedNeighbours, p: Any) -> Array:
    # KL = sum_i (t_i^2 + sigma_i^2 + |r_i|^2 - 1) / 2 - log sigma_i
    square = jnp.square(q.shift) + jnp.square(q.scale) - 1.0
    if q.weights is not None:
        square = square + jnp.square(q.weights).sum(-1)
    return (0.5 * square - jnp.log(q.scale)).sum((-2, -1))
