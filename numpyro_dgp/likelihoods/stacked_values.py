r"""Values of several functions side by side, or of one function at several inputs of a row, for one likelihood.

The outcome of a duel depends on :math:`f(a) - f(b)`. The two values are correlated through q(v) and through their
conditional covariance given v. Values :math:`v_1, \ldots, v_k` of a row are therefore written in terms of independent
innovations :math:`c_i`,

.. math:: v_i = c_i + \sum_{j<i} \lambda_{ij}\, (c_j - m_j), \qquad c_i \sim N(m_i, d_i),

with :math:`\Lambda\, \mathrm{diag}(d)\, \Lambda^\top` their covariance and :math:`\Lambda` lower triangular with ones
on the diagonal: every rule for independent values then applies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, is_concrete
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.joint_values import JointValues
from numpyro_dgp.functions.random_function import FeatureFunction
from numpyro_dgp.likelihoods.several_conditionals import Split
from numpyro_dgp.math.linalg import safe_sqrt

__all__ = ["CorrelatedValues", "SeveralValues", "side_by_side"]


class SeveralValues(FunctionValues):
    """Values of several functions at the same rows, which are independent given their inducing values.

    Args:
        parts: values of each function, all of one batch shape.
    """

    pytree_data_fields: tuple[str, ...] = ("parts",)
    pytree_aux_fields = ("split",)

    parts: tuple[FunctionValues, ...] = ()  # type: ignore[assignment]

    def __init__(self, parts: Sequence[FunctionValues]) -> None:
        self.parts = tuple(parts)
        self.split = Split([part.event_shape[0] if part.event_dim else None for part in parts])
        found = [part.belief_variance for part in parts]
        added = [jnp.zeros_like(part.loc) if a is None else a for part, a in zip(parts, found, strict=True)]
        super().__init__(
            self.split.whole([part.loc for part in parts]),
            self.split.whole([part.conditional_variance for part in parts]),
            None if all(a is None for a in found) else self.split.whole(added),
            total=self.split.whole([part.variance for part in parts]),
        )

    @property
    def by_function(self) -> tuple[FunctionValues, ...]:
        return self.parts

    def of_columns(self, conditional: Callable[..., Any]) -> Callable[[Array], Any]:
        return lambda v: conditional(*self.split.parts(v))

    def expand(self, batch_shape: tuple[int, ...]) -> SeveralValues:
        return SeveralValues([part.expand(batch_shape) for part in self.parts])

    def mix(self, W: object) -> NoReturn:
        raise expected(
            "values of one function",
            "several",
            "mix in the conditional, lambda g, s: dist.Normal(g @ W.T, s).to_event(1)",
        )


def side_by_side(values: Sequence[FunctionValues | JointValues]) -> FunctionValues:
    """The values that a likelihood integrates: those of one function, or of several together with their correlations.

    Args:
        values: of one or more functions at the same rows.

    Raises:
        ValueError: mixtures among several, different numbers of rows, or values at one input twice, of a function that
            has no covariances between the inputs of a row.
    """
    parts = [f_x.marginals() for f_x in values]
    if len(parts) == 1:
        return parts[0]
    expect(
        not any(part.correlated_outputs for part in parts),
        "functions that are not mixed",
        "f(x).mix(W)",
        "mix in the conditional, lambda g, s: dist.Normal(g @ W.T, jnp.exp(s)).to_event(1)",
    )
    shapes = [part.batch_shape for part in parts]
    try:
        batch = np.broadcast_shapes(*shapes)
    except ValueError:
        batch = ()
    rows = {math.prod(shape[-1:]) for shape in shapes}
    expect(
        len(rows) <= 1 and batch,
        "values of all functions at the same rows",
        f"batch shapes {shapes}",
        "call each function on N inputs, (f(x), g(x))",
    )
    return _correlated(SeveralValues([part if part.batch_shape == batch else part.expand(batch) for part in parts]))


Entries = dict[tuple[int, int], Array]


class CorrelatedValues(SeveralValues):
    r"""Values of several functions, some at several inputs, written in the independent innovations c.

    Args:
        values: of each function at each input, their own means and variances.
        variances: d, of each.
        weights: :math:`\lambda`, by the numbers of the two values.
    """

    pytree_data_fields = ("values", "weights")

    def __init__(self, values: Sequence[FunctionValues], variances: Sequence[Array], weights: Entries) -> None:
        self.values, self.weights = tuple(values), weights
        super().__init__(
            [
                FunctionValues(part.loc, d, event_dim=part.event_dim, origin=part.origin)
                for part, d in zip(values, variances, strict=True)
            ]
        )

    @property
    def correlated_parts(self) -> frozenset[int]:  # type: ignore[override]
        return frozenset(i for i, _ in self.weights)

    def marginals(self) -> SeveralValues:
        """The marginal distributions of the values."""
        return SeveralValues(self.values)

    def of_innovations(self, conditional: Callable[..., Any]) -> Callable[..., Any]:

        def of_c(*c: Array) -> Any:
            beyond = [own - part.loc for own, part in zip(c, self.parts, strict=True)]
            v = list(c)
            for (i, j), weight in self.weights.items():
                v[i] = v[i] + weight * beyond[j]  # v_i = c_i + sum_j lambda_ij (c_j - m_j)
            return conditional(*v)

        return of_c

    def expand(self, batch_shape: tuple[int, ...]) -> CorrelatedValues:
        values = [part.expand(batch_shape) for part in self.values]
        variances = [part.expand(batch_shape).variance for part in self.parts]
        weights = {(i, j): jnp.broadcast_to(a, values[i].loc.shape) for (i, j), a in self.weights.items()}
        return CorrelatedValues(values, variances, weights)


def _correlated(several: SeveralValues) -> SeveralValues:
    """The same values with the correlations between values, slopes and sums of one function."""
    variances, weights = [part.variance for part in several.parts], Entries()
    for numbers in _of_one_function(several.parts):
        parts = [several.parts[n] for n in numbers]
        if all(isinstance(part.function, FeatureFunction) for part in parts):
            _in_turn(numbers, _covariances(parts), variances, weights)
        else:
            _require_other_inputs(parts)
    return CorrelatedValues(several.parts, variances, weights) if weights else several


def _of_one_function(parts: Sequence[FunctionValues]) -> list[list[int]]:
    """Indices of values that depend on the same inducing values, where several do."""
    same: dict[Any, list[int]] = {}
    for n, part in enumerate(parts):
        same.setdefault(n if part.function is None else id(part.function if part.v is None else part.v), []).append(n)
    return [numbers for numbers in same.values() if len(numbers) > 1]


def _require_other_inputs(parts: Sequence[FunctionValues]) -> None:
    """Raise for equal known inputs of one function."""
    for part, other in itertools.combinations(parts, 2):
        a, b = part.inputs, other.inputs
        if part.function is other.function and (a is b or (is_concrete(a, b) and np.array_equal(a, b))):
            raise expected(
                "values of different functions or at different inputs",
                f"those of {part.function.site!r} at one input twice, as if independent",
                "use one of them twice, dgp.Likelihood(f(x), lambda v: ...)",
            )


def _covariances(parts: Sequence[FunctionValues]) -> Entries:
    """Of each value of a row with those before it (..., P), or (...,).

    Process noise is drawn for each value, and has none.
    """
    functions: list[Any] = [part.function for part in parts]
    batch, v = parts[0].batch_shape, functions[0].v
    rows = [
        jnp.broadcast_to(part.inputs, (*batch, part.inputs.shape[-1])).reshape(-1, part.inputs.shape[-1])
        for part in parts
    ]
    features = [f.features(x) for f, x in zip(functions, rows, strict=True)]
    A = jnp.stack([each if each.ndim == 3 else each[None] for each in features], -2)  # (P, N, k, M)
    added = None if v.known else jax.vmap(v.feature_covariance, in_axes=1, out_axes=1)(A)  # a_i' Sigma a_j (P, N, k, k)
    found = Entries()
    for i, j in itertools.combinations(range(len(parts)), 2):
        # Cov[v_i, v_j] = k(x_i, x_j) - a_i' a_j + a_i' Sigma a_j (P, N)
        C = _prior_of_rows(functions[i], functions[j], rows[i], rows[j]) - (A[..., i, :] * A[..., j, :]).sum(-1)
        C = (C if added is None else C + added[..., i, j]).T
        found[j, i] = C.reshape(*batch, -1) if functions[0].outputs is not None else C.reshape(batch)
    return found


def _prior_of_rows(f: Any, g: Any, x: Array, y: Array) -> Array:
    """Covariances under the prior at every row (N, C) of x and that of y: (P, N), P = 1 where outputs share them."""
    of_row = jax.vmap(lambda a, b: _prior_between(f, g, a[None], b[None])[:, 0, 0], out_axes=1)
    return of_row(x, y)


def _prior_between(f: Any, g: Any, x: Array, y: Array) -> Array:
    """Covariances of f at rows x with g at rows y, both functionals of one function, or that itself: (P, N, N')."""
    covariance = f.of_values.covariance
    # L_x L_y k(x, y)
    return f.applied(lambda s: g.applied(lambda t: covariance(s, t).mT, y).mT, x)


def _in_turn(numbers: Sequence[int], C: Entries, variances: list[Array], weights: Entries) -> None:
    """Write the weights of one function's values, and their variances given those before.

    Covariances that rounding makes larger than the two variances allow are cut: both may be nearly zero, at an inducing
    input, where C is a difference of larger numbers.
    """
    # C = Lambda diag(d) Lambda', row by row:
    # lambda_ij d_j = C_ij - sum_{m<j} lambda_im lambda_jm d_m.
    whole = {n: variances[n] for n in numbers}
    smallest = 10 * jnp.finfo(variances[numbers[0]].dtype).eps
    for i, n in enumerate(numbers):
        for j, before in enumerate(numbers[:i]):
            d = variances[before]
            cross = C[i, j] - sum(weights[n, m] * weights[before, m] * variances[m] for m in numbers[:j])
            largest = safe_sqrt(d * variances[n])
            cross = jnp.clip(cross, -largest, largest)
            known = d > smallest * whole[before]  # else it is determined by those before it
            weights[n, before] = cross / jnp.where(known, d, jnp.inf)
            # d_i = C_ii - sum_j lambda_ij^2 d_j
            variances[n] = jnp.maximum(variances[n] - jnp.square(weights[n, before]) * d, 0.0)
