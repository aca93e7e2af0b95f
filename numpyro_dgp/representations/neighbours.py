"""Vecchia's approximation: a process whose values at the data are conditioned on their nearest neighbours."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import is_concrete, require_count, require_finite, require_squares
from numpyro_dgp._data import as_numbers
from numpyro_dgp._typing import ArrayLike, pytree, static
from numpyro_dgp.algebra.conditioning_sets import (
    ConditioningSets,
    conditioning_sets,
    coordinate_order,
    maxmin_order,
)
from numpyro_dgp.kernels.per_output import Kernels
from numpyro_dgp.means import Mean
from numpyro_dgp.model.function_inputs import checked_inputs, mean_values, require_noise
from numpyro_dgp.model.function_values import Origin
from numpyro_dgp.model.neighbour_values import NeighbourValues
from numpyro_dgp.representations.nearest import NearestFunction, conditionals, nuggets

__all__ = ["NeighbourFunction", "Neighbours"]

_ORDERS = ("maxmin", "coordinate", "random")


@pytree
class Neighbours:
    r"""Vecchia's approximation of a process at N data: each value given its nearest neighbours among those before it.

    .. math:: p(u) = \prod_i p(u_i \mid u_{c(i)}), \qquad p(u_i \mid u_{c(i)}) = N(b_i^\top u_{c(i)}, d_i)

    It is a Gaussian with a sparse precision, whatever ``num`` is. As with an exact process there are no inducing
    values: ``h = numpyro.sample("h", f(X))`` outside the data plate draws all values, and
    ``numpyro.sample("y", f(X, noise=s), obs=y)`` is regression on noisy values, each given its noisy neighbours. Row n
    of what f is called on belongs to row n of X. The sets c(i) are found here, once; for a hidden layer, whose inputs
    move, ``neighbours.refreshed(h)`` finds them anew. Time is O(N num³), memory O(N num²).

    Args:
        X: inputs (N, D) that say which rows are near to each other, by Euclidean distance: columns of different units
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
    num: int = static(default=25)
    order: Any = static(default="maxmin")
    sets: ConditioningSets = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if not is_concrete(self.X):
            raise ValueError(
                "Neighbours: expected inputs that are known when the program is compiled, got a traced array: make it "
                "outside of the program, near = dgp.Neighbours(X), and do not pass X as an argument of the model"
            )
        X = np.asarray(as_numbers("inputs of Neighbours", self.X))
        if X.ndim != 2 or len(X) < 2 or not X.shape[1]:
            raise ValueError(
                f"Neighbours: expected inputs of shape (N, D), two rows or more, got shape {X.shape}: a single input "
                "column is X[:, None]"
            )
        require_finite("inputs X of Neighbours", X, "drop, impute or mask the rows with missing values")
        require_squares("inputs X of Neighbours", X)
        require_count("Neighbours", "num", self.num, "25")
        order = _order(self.order, X)
        object.__setattr__(self, "X", X)
        object.__setattr__(self, "order", self.order if isinstance(self.order, str) else tuple(order.tolist()))
        object.__setattr__(self, "sets", conditioning_sets(X, order, self.num))

    def refreshed(self, h: ArrayLike) -> Neighbours:
        """Neighbours by other inputs of the same rows, such as a draw of the layer below.

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
        if is_concrete(h) and np.shape(h)[:1] != (len(self.X),):
            raise ValueError(
                f"Neighbours.refreshed: expected values of shape (N, D) at the N = {len(self.X)} rows of X, got "
                f"{np.shape(h)}: of draws take one, mcmc.get_samples()['h'][-1]"
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
        if x.shape[-2] != N:
            raise ValueError(
                f"f(x): expected inputs of shape (..., {N}, D), row n of them that of row n of the X of Neighbours(X), "
                f"got {x.shape}: at other rows condition on values at these, f.condition(X, v)(x_new)"
            )
        loc = mean_values(self.mean, x, self.outputs)
        loc = jnp.broadcast_to(loc, x.shape[:-1] + (() if self.outputs is None else (self.outputs,)))
        rows = jnp.moveaxis(x, -2, 0)
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
        """Refused, as are sums: values are known together only.

        Raises:
            ValueError: always.
        """
        _refuse("grad")

    def linear(self, x: ArrayLike, A: ArrayLike, **options: Any) -> NoReturn:
        """Refused, as are slopes: values are known together only.

        Raises:
            ValueError: always.
        """
        _refuse("linear")

    def given(self, x: ArrayLike, values: ArrayLike) -> NearestFunction:
        """The process conditioned on ``values`` at ``x``, as :meth:`condition`."""
        return self.condition(x, values)

    def condition(self, x: ArrayLike, values: ArrayLike, noise: ArrayLike | None = None) -> NearestFunction:
        """The process given its values at ``x``: a function to call on new inputs, each given its nearest values.

        Args:
            x: inputs (N, D) where the values are known.
            values: (N, P), or (N,) for a scalar function, for example the draw of ``f(x)``.
            noise: standard deviation of independent noise in the values, a number or one per output, where they are a
                draw of ``f(x, noise=noise)``. The function returned is without it.

        Raises:
            ValueError: values of another shape, NaN or infinite inputs or values, noise that is not positive.

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
        if x.ndim != 2 or np.shape(values) != expected:
            raise ValueError(
                f"condition: expected inputs (N, D) and values of shape {expected}, got inputs {x.shape} and values "
                f"{np.shape(values)}: a scalar function has values (N,), one with outputs=P values (N, P)"
            )
        require_finite("values given to condition", values, "leave out the rows where they are not known")
        residual = jnp.asarray(values, x.dtype) - mean_values(self.mean, x, self.outputs)
        residual = residual[:, None] if self.outputs is None else residual
        return NearestFunction(self.kernels, x, residual, noise, self.outputs, self.mean, self.num)


def _order(order: Any, X: np.ndarray) -> np.ndarray:
    """The rows of X in order."""
    N = len(X)
    if isinstance(order, str):
        if order not in _ORDERS:
            raise ValueError(
                f"Neighbours: expected order to be one of {', '.join(map(repr, _ORDERS))} or the row numbers 0 to "
                f"N - 1 in some order, got {order!r}: 'maxmin' is the default"
            )
        if order == "random":
            return np.random.default_rng(0).permutation(N)
        return maxmin_order(X) if order == "maxmin" else coordinate_order(X)
    found = np.asarray(order)
    if found.dtype.kind not in "iu" or not np.array_equal(np.sort(found.ravel()), np.arange(N)) or found.ndim != 1:
        raise ValueError(
            f"Neighbours: expected order to be one of {', '.join(map(repr, _ORDERS))} or the row numbers 0 to N - 1 = "
            f"{N - 1}, each once, got {found.dtype} of shape {found.shape}: np.argsort(X[:, 0]) is such an order"
        )
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(
        f"f.{name}: expected a layer with inducing values, got one of dgp.Neighbours: open it on dgp.Points(Z)"
    )
