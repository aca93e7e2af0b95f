"""Functions of groups: one random function per group of rows, opened in a plate of groups. q(v) then has one
independent block per group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import plate

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.function_inputs import checked_inputs
from numpyro_dgp.functions.induced_function import InducedFunction
from numpyro_dgp.functions.random_function import Moments
from numpyro_dgp.functions.weights import (
    InducingPrior,
    Weights,
    in_block,
    matvec,
    whitened_values,
)
from numpyro_dgp.kernels import Categorical, Kernel, PerGroup
from numpyro_dgp.kernels.categorical import is_label
from numpyro_dgp.kernels.per_output import Kernels, every, shared
from numpyro_dgp.math.linalg import einsum, matmul, rows_times
from numpyro_dgp.math.row_blocks import in_blocks
from numpyro_dgp.math.whitening import inverse_cholesky, residual_variance
from numpyro_dgp.means import Mean

__all__ = ["GroupedFunction", "open_in_plate"]


def open_in_plate(
    name: str, groups: plate, kernels: Kernels, Z: Array, outputs: int | None, mean: Mean
) -> GroupedFunction:
    """Open a layer on inducing inputs Z in a plate of groups: a function for each of them.

    The site of its whitened values, event shape (L, M) or (P L, M), lies outside of the plate: the values of different
    groups are independent as those of different outputs are, and guides treat them alike.

    Raises:
        ValueError: a plate that takes some groups at a time; a kernel or inducing inputs that do not fit the groups.
    """
    L, dims = groups.size, Z.shape[-1]
    expect(
        groups.subsample_size == L,
        "a plate of all groups",
        f"{groups.subsample_size} of {L} in plate {groups.name!r}",
        "leave subsample_size out there, and take some rows at a time in the plate of the rows",
    )
    if not shared(kernels):
        raise expected(
            f"one kernel in plate {groups.name!r}",
            len(every(kernels)),
            "kernels with one per group are dgp.kernels.PerGroup(jax.vmap(dgp.kernels.RBF)(variance, lengthscale))",
        )
    expect(
        Z.ndim != 3 or len(Z) == L,
        f"Z of shape (M, D), or ({L}, M, D) for the groups of plate {groups.name!r}",
        Z.shape,
    )
    (own,) = (labelled,) = every(kernels)
    if isinstance(labelled, PerGroup):
        expect(
            labelled.groups == L,
            f"hyperparameters of {L} groups, as plate {groups.name!r} has",
            labelled.groups,
            "draw them in the plate",
        )
        own = labelled.kernel
        K = jax.vmap(lambda k, z: k.gram(z), (0, 0 if Z.ndim == 3 else None))(own, Z)  # k_g(Z_g, Z_g) (L, M, M)
    else:
        # k((x, g), (x', g')) = k(x, x') [g = g']
        labelled = own.on(*range(dims)) * Categorical(L, correlation=0.0).on(dims)
        K = own.gram(Z)
    whiten = inverse_cholesky(K, f"k(Z, Z) of gp {name!r}")
    shape = (L * (outputs or 1), Z.shape[-2])
    v, site = whitened_values(name, InducingPrior(shape, Z.dtype), outside=(groups.name,))
    return GroupedFunction(labelled, own, Z, whiten, v, L, outputs, mean, site)


@pytree
class GroupedFunction(InducedFunction):
    r"""Independent functions of L groups, :math:`f(x, g) = f_g(x)`; made by ``dgp.gp`` in a plate of groups.

    It is called on inputs whose last column is the label of the group, 0 to L - 1. A row depends on the M whitened
    values of its group only: with :math:`L_g L_g^\top = k_g(Z_g, Z_g)`,

    .. math:: p(f(x, g) \mid v) = N\bigl(m(x, g) + a^\top v_g,\; k_g(x, x) - a^\top a\bigr), \qquad
              a = L_g^{-1} k_g(Z_g, x) .

    The mean function sees all columns, the label among them.

    Args:
        kernels: the kernel of inputs with labels.
        own: the kernel of the groups, with one entry per group in every hyperparameter, or one kernel for all.
        Z: inducing inputs, the same for all groups (M, D), or of each (L, M, D).
        whiten: :math:`L_g^{-1}`, (M, M) where groups share kernel and inducing inputs, else (L, M, M).
        v: the weights.
        groups: the number of groups, L.
        outputs: P functions of each group, or ``None`` for a scalar one.
        mean: the mean function.
        site: name of the site of v.
    """

    kernels: Kernel
    own: Kernel
    Z: Array
    whiten: Array
    v: Weights
    groups: int = static()
    outputs: int | None = static()
    mean: Mean
    site: str | None = static(default=None)

    def __post_init__(self) -> None:
        together = (self.size,) if self.outputs is None else (self.outputs, self.size)
        if self.v is not None:
            object.__setattr__(self, "v", self.v.reshaped(together))

    @property
    def size(self) -> int:
        return self.groups * self.Z.shape[-2]

    @property
    def dims(self) -> int:
        return self.Z.shape[-1] + 1

    @property
    def inducing_inputs(self) -> Array:
        Z = jnp.broadcast_to(self.Z, (self.groups, *self.Z.shape[-2:]))
        labels = jnp.broadcast_to(jnp.arange(self.groups, dtype=Z.dtype)[:, None, None], (*Z.shape[:-1], 1))
        return jnp.concatenate([Z, labels], -1).reshape(self.size, -1)

    @property
    def dense(self) -> bool:
        return True

    @property
    def blocked(self) -> bool:
        return True

    def blocks(self, rows: Array) -> tuple[Array, Array]:
        A, labels = self._blocks(rows)
        return jnp.where(is_label(rows[:, -1:], self.groups), A, jnp.nan), labels  # traced values cannot raise

    def _blocks(self, rows: Array) -> tuple[Array, Array]:
        x, labels = rows[:, :-1], rows[:, -1].astype(int)
        whiten = self.whiten.astype(jnp.result_type(rows, self.whiten))
        of_groups = self.kernels if isinstance(self.kernels, PerGroup) else None
        if self.Z.ndim == 2 and of_groups is None:
            return rows_times(self.own(x, self.Z).astype(whiten.dtype), whiten.T), labels  # a = L^-1 k(Z, x)

        def covariances(k: Kernel, x: Array, Z: Array) -> Array:
            return k(x[None], Z)[0]

        own = self.own if of_groups is None else of_groups.of(labels)
        Z = self.Z[labels] if self.Z.ndim == 3 else self.Z
        cross = jax.vmap(covariances, (None if of_groups is None else 0, 0, 0 if self.Z.ndim == 3 else None))(own, x, Z)
        return einsum("nij,nj->ni", whiten[labels], cross.astype(whiten.dtype)), labels  # a_n = L_g^-1 k_g(Z_g, x_n)

    def features(self, rows: Array) -> Array:
        """A (N, L M), zero at the values of other groups."""
        return in_block(*self.blocks(rows), self.groups)

    def prior_variance(self, rows: Array) -> Array:
        return self.kernels.diag(rows)

    def covariance(self, x: Array, y: Array | None = None) -> Array:
        return (self.kernels.gram(x) if y is None else self.kernels(x, y))[..., None, :, :]

    def conditional_variance(self, rows: Array, A: Array) -> Array:
        return residual_variance(self.prior_variance(rows), jnp.square(A).sum(-1), self.Z.shape[-2])  # k_g(x, x) - a'a

    def moments(self, rows: Array) -> Moments:
        if self.v.whole is not None:
            return super().moments(rows)
        # A row takes the (M, M) factors of its group.
        return in_blocks(self.block_moments(rows), rows, cells=self.Z.shape[-2] ** 2)

    def block_moments(self, rows: Array) -> Callable[[Array], Moments]:
        def moments(rows: Array) -> Moments:
            A, labels = self.blocks(rows)
            conditional = self.conditional_variance(rows, A)[:, None]
            loc, belief_variance = self.v.moments_of_block(A, labels)  # a' m_g and a' Sigma_g a (N, P)
            return loc, jnp.broadcast_to(conditional, loc.shape), belief_variance, None

        return moments

    def held(self) -> GroupedFunction:
        kernels, own, Z, whiten = jax.lax.stop_gradient((self.kernels, self.own, self.Z, self.whiten))
        return dataclasses.replace(self, kernels=kernels, own=own, Z=Z, whiten=whiten)

    def prior_draw(self, key: Array, weights: Array, rows: Array) -> tuple[Array, Array]:
        def values(x: Array) -> Array:
            return matvec(weights, self.kernels.features(key, x, weights.shape[-1]))

        at_points = values(self.inducing_inputs).T.reshape(-1, self.groups, self.Z.shape[-2], 1)
        return values(rows), matmul(self.whiten, at_points).reshape(-1, self.size)  # v_g = L_g^-1 f(Z_g)

    def whitened_values_of(self, other: InducedFunction) -> NoReturn:
        raise expected(
            "layers opened outside of plates",
            f"{self.site!r} in a plate of groups",
            ("open it outside, with dgp.kernels.PerGroup(...) and dgp.Points(Z) with the labels as last column of Z"),
        )

    def checked(self, x: ArrayLike, noise: ArrayLike | None = None) -> Array:
        if np.ndim(x) >= 2 and np.shape(x)[-1] != self.dims:
            raise expected(
                f"{self.dims - 1} column(s) and a label, for {self.site!r} in a plate of {self.groups} groups",
                f"shape {np.shape(x)}",
                "jnp.column_stack([x, group]); for one function open the layer outside every plate",
                at="f(x)",
            )
        found = checked_inputs(x, self.dims, noise)
        self.kernels.check_inputs(found)
        return found
