"""A kernel for every group of rows: hyperparameters with one entry per group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expect_kind, expected
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.kernels.base import Kernel
from numpyro_dgp.kernels.categorical import is_label, require_labels

__all__ = ["PerGroup"]


@pytree
class PerGroup(Kernel):
    r"""Independent functions of groups, with hyperparameters per group:

    .. math:: k((x, g), (x', g')) = [g = g']\, k_g(x, x') .

    The label g = 0, ..., L - 1 is the last column of the inputs. ``jax.vmap`` makes kernels with one entry per group in
    every hyperparameter, and repeats those that groups share. Nothing is computed group by group, and compilation does
    not take longer with more of them.

    In a plate of L groups, ``dgp.gp(name, PerGroup(kernel), dgp.Points(Z))`` gives every group inducing values of its
    own, and a q(v) that factorises over groups.

    Args:
        kernel: a kernel whose hyperparameters have L entries along their first axis:
            ``jax.vmap(RBF)(variance, lengthscale)`` for numbers of shape (L,) each, or (L, D) for lengthscales of D
            columns; ``jax.vmap(lambda s: RBF(variance, s))(lengthscale)`` where groups share the variance.

    Raises:
        ValueError: something else, or hyperparameters with different numbers of groups; where it is called, a last
            column that holds no labels.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp, numpy as np
        >>> from numpyro_dgp.kernels import RBF, PerGroup
        >>> kernel = PerGroup(jax.vmap(RBF)(jnp.array([1.0, 2.0]), jnp.array([0.5, 1.0])))
        >>> X = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> print(np.array(kernel(X, X)).round(3))
        [[1.    0.135 0.    0.   ]
         [0.135 1.    0.    0.   ]
         [0.    0.    2.    1.213]
         [0.    0.    1.213 2.   ]]
    """

    kernel: Kernel

    def __post_init__(self) -> None:
        expect_kind(
            self.kernel,
            Kernel,
            "a kernel with hyperparameters (L,)",
            "jax.vmap(dgp.kernels.RBF)(variance, lengthscale)",
        )
        shapes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(self.kernel)}
        if len(shapes) != 1 or () in shapes:
            every = [np.shape(leaf) for leaf in jax.tree.leaves(self.kernel)]
            raise expected(
                "hyperparameters with one entry per group along their first axis",
                f"shapes {every}",
                "jax.vmap(lambda s: dgp.kernels.RBF(variance, s))(lengthscale) repeats what groups share",
            )

    @property
    def groups(self) -> int:
        """L, the number of groups."""
        return int(np.shape(jax.tree.leaves(self.kernel)[0])[0])

    def of(self, labels: Array) -> Kernel:
        """The kernels of groups (N,): hyperparameters with N entries along their first axis."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[labels], self.kernel)

    def check_inputs(self, X: Any) -> None:
        expect(
            np.shape(X)[-1] >= 2,
            "the label of the group as the last column",
            f"shape {np.shape(X)}",
            "jnp.column_stack([x, group])",
        )
        require_labels(X[..., -1:], (self.groups,), "the last column of its inputs")

    def evaluate(self, X1: Array, X2: Array) -> Array:
        self.check_inputs(X1)
        batch = jnp.broadcast_shapes(X1.shape[:-2], X2.shape[:-2])
        rows, columns = (jnp.broadcast_to(X, (*batch, *X.shape[-2:])).reshape(-1, *X.shape[-2:]) for X in (X1, X2))

        def covariances(row: Array, X: Array) -> Array:
            k = self.of(row[-1].astype(int)).evaluate(row[None, :-1], X[:, :-1])[0]
            return jnp.where(X[:, -1] == row[-1], k, 0) + self._nothing(row) + self._nothing(X)  # [g = g'] k_g(x, x')

        found = jax.vmap(jax.vmap(covariances, (0, None)))(rows, columns)
        return found.reshape(*batch, *found.shape[1:])

    def diagonal(self, X: Array) -> Array:
        def variance(row: Array) -> Array:
            return self.of(row[-1].astype(int)).diagonal(row[None, :-1])[0] + self._nothing(row)

        return jax.vmap(variance)(X.reshape(-1, X.shape[-1])).reshape(X.shape[:-1])

    def features(self, key: Array, X: Array, num: int) -> Array:
        own_key, key = jax.random.split(key)
        own = jax.random.normal(own_key, (self.groups, num), X.dtype)  # uncorrelates the functions of different groups

        def functions(row: Array) -> Array:
            label = row[-1].astype(int)
            return own[label] * self.of(label).features(key, row[None, :-1], num)[0] + self._nothing(row)

        return jax.vmap(functions)(X.reshape(-1, X.shape[-1])).reshape(*X.shape[:-1], num)

    def _nothing(self, X: Array) -> Array:
        """Zero for rows (..., D) with a label and NaN for others: traced values cannot raise."""
        return jnp.where(is_label(X[..., -1], self.groups), jnp.zeros((), X.dtype), jnp.nan)
