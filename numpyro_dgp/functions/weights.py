r"""Weights: the value at the site of a layer's whitened values v, with :math:`u = L v`, :math:`k(Z, Z) = L L^\top`.

The value at a layer's sample site has one of three types, with the common interface :class:`Weights`:

- an array, one draw of v: :class:`KnownWeights`;
- a Gaussian :math:`q(v)`, a :class:`Belief`, which the layer integrates out (inside ``dgp.ELBO``);
- a draw of the whole function, a :class:`FunctionDraw`, consistent across inputs (``posterior.functions``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpyro
from numpyro.distributions import constraints, kl_divergence

from numpyro_dgp._checks import expected
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.site_distribution import SiteDistribution
from numpyro_dgp.math.gaussians import expected_kl, kl_diagonal, kl_full, log_density, log_determinant
from numpyro_dgp.math.linalg import einsum, fused, matmul, solve_lower, sum_event, times_transpose
from numpyro_dgp.math.quadratic_forms import quadratic_forms

__all__ = [
    "Belief",
    "BlockBelief",
    "DiagonalBelief",
    "FullBelief",
    "FunctionDraw",
    "InducingPrior",
    "KnownWeights",
    "StandardNormal",
    "Weights",
    "in_block",
    "matvec",
    "whitened_values",
]


class StandardNormal(SiteDistribution):
    """Independent N(0, 1) numbers in a given dtype, independent of the global x64 flag.

    Args:
        event_shape: of one draw.
        dtype: of the numbers.
        batch_shape: of independent draws.
        inputs: for latent columns, the inputs (..., D) that they are appended to.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields: tuple[str, ...] = ("inputs",)
    pytree_aux_fields: tuple[str, ...] = ("dtype",)
    each_by_its_own = True
    of_latents = True

    __repr__ = brief

    def __init__(
        self, event_shape: tuple[int, ...], dtype: Any, batch_shape: tuple[int, ...] = (), inputs: Array | None = None
    ) -> None:
        self.dtype, self.inputs = jnp.dtype(dtype), inputs
        super().__init__(batch_shape, event_shape)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return jax.random.normal(key, self.shape(sample_shape), self.dtype)

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        flat = value.reshape(*value.shape[: value.ndim - self.event_dim], -1)
        return log_density(flat, jnp.zeros((), self.dtype))

    def expand(self, batch_shape: Any) -> StandardNormal:
        return type(self)(self.event_shape, self.dtype, tuple(batch_shape), self.inputs)

    @property
    def white_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal numbers behind a draw: they are the draw."""
        return self.shape()

    def from_white(self, white: Array) -> Array:
        """The draw that standard normal numbers give."""
        return white

    @property
    def mean(self) -> Array:
        return jnp.zeros(self.shape(), self.dtype)

    @property
    def variance(self) -> Array:
        return jnp.ones(self.shape(), self.dtype)


class InducingPrior(StandardNormal):
    """The prior of whitened inducing values, which guides recognise by ``site_kind``."""

    suggested_rule = "dgp.guides.Full()"
    site_kind = "inducing"
    of_latents = False


class Weights(Protocol):
    r"""The interface of the value at a layer's site: the mean m and the covariance :math:`\Sigma` of v.

    At inputs with the features A, the function has the mean :math:`A m`, and v adds :math:`A \Sigma A^\top` to its
    covariance. Known values add nothing: the methods return ``None``.
    """

    @property
    def loc(self) -> Array:
        """m, (P, M) or (M,); v itself where it is known."""

    @property
    def known(self) -> bool:
        r"""Whether v is known: :math:`\Sigma` is zero."""

    @property
    def whole(self) -> FunctionDraw | None:
        """The weights, where they are a draw of the whole function."""

    @property
    def dense_root(self) -> Array | None:
        r"""R with :math:`\Sigma_p = R_p R_p^\top`, (P, M, M) or (M, M), where the weights keep it."""

    @property
    def variance(self) -> Array | None:
        r"""The diagonal of :math:`\Sigma`, of the shape of ``loc``."""

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of v, of shape ``sample_shape + loc.shape``."""

    def feature_variances(self) -> Callable[[Array], Array] | None:
        r"""From features A, (N, M) or (P, N, M), to the diagonal of :math:`A \Sigma A^\top` (N, P)."""

    def feature_covariance(self, A: Array) -> Array | None:
        r""":math:`A \Sigma A^\top` (P, N, N) for features (N, M) or (P, N, M)."""

    def reshaped(self, shape: tuple[int, ...]) -> Weights:
        """The same weights with the values of L groups concatenated, as (P, L M) or (L M,)."""

    def moments_of_block(self, A: Array, groups: Array) -> tuple[Array, Array | None]:
        """Mean and :meth:`feature_variances` (N, P) of rows with features A (N, M) of the values of one group each."""


class Belief(SiteDistribution):
    r"""A Gaussian over whitened inducing values, event shape (P, M) or (M,).

    Subclasses compute what the Gaussian adds to the covariance of the function at inputs with the whitened
    cross-covariance :math:`A = k(x, Z) L^{-\top}`, :math:`A \Sigma A^\top`.
    """

    loc: Array
    known, whole, dense_root = False, None, None
    each_by_its_own = False
    """Whether each number of a draw depends on one standard normal number, the one at its place."""

    __repr__ = brief

    @property
    def white_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal numbers behind a draw."""
        return self.shape()

    def from_white(self, white: Array) -> Array:
        """The draw that standard normal numbers give."""
        raise NotImplementedError

    def white(self, value: Array) -> Array:
        """The standard normal numbers that give a draw."""
        raise NotImplementedError

    def around(self, loc: Array) -> Belief:
        """The Gaussian of the same covariance around other means."""
        raise NotImplementedError

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        white = jax.random.normal(key, self.shape(sample_shape), self.loc.dtype)
        return self.from_white(white), [white]

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.sample_with_intermediates(key, sample_shape)[0]

    def feature_variance(self, A: Array) -> Array:
        """Diagonal of the added covariance, shape (N, P), for A of shape (N, M) or (P, N, M)."""
        raise NotImplementedError

    def feature_variances(self) -> Callable[[Array], Array]:
        """:meth:`feature_variance` for several A: what does not depend on A is computed once."""
        return self.feature_variance

    def feature_covariance(self, A: Array) -> Array:
        """The added covariance (P, N, N)."""
        raise NotImplementedError

    def reshaped(self, shape: tuple[int, ...]) -> Belief:
        """The same belief about values of shape (P, L M), or (L M,), where its own are (P L, M)."""
        return BlockBelief(self, shape)

    def moments_of_block(self, A: Array, groups: Array) -> tuple[Array, Array]:
        """Mean and :meth:`feature_variance` (N, P) of rows that see one block each.

        Args:
            A: their features of that block (N, M).
            groups: its number (N,).
        """
        blocks = self.loc.shape[-1] // A.shape[-1]
        return _of_block(self.loc, A, groups), self.feature_variance(in_block(A, groups, blocks))

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    @property
    def mean(self) -> Array:
        return self.loc


def matvec(v: Array, A: Array) -> Array:
    """Products of the rows of A, (N, M) or (P, N, M), with the rows of v, (P, M): shape (N, P)."""
    return matmul(A, v.T) if A.ndim == 2 else matmul(A, v[..., None])[..., 0].T


@fused
def _correlated(loc: Array, scale_tril: Array, white: Array) -> Array:
    return loc + matmul(scale_tril, white[..., None])[..., 0]  # m_p + R_p eps_p


class FullBelief(Belief):
    r"""Full covariance per output: :math:`q(v_p) = N(m_p, R_p R_p^\top)`.

    Args:
        loc: means, (P, M) or (M,).
        scale_tril: lower triangular factors R, (P, M, M) or (M, M); the signs of the diagonal are free.
    """

    arg_constraints = {"loc": constraints.real, "scale_tril": constraints.real}
    reparametrized_params = ["loc", "scale_tril"]

    def __init__(self, loc: Array, scale_tril: Array) -> None:
        self.loc, self.scale_tril = loc, scale_tril
        super().__init__((), jnp.shape(loc), validate_args=False)

    def from_white(self, white: Array) -> Array:
        return _correlated(self.loc, self.scale_tril, white)

    def around(self, loc: Array) -> FullBelief:
        return FullBelief(loc, self.scale_tril)

    def white(self, value: Array) -> Array:
        return solve_lower(self.scale_tril, (value - self.loc)[..., None])[..., 0]  # R^-1 (v - m)

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = intermediates[0] if intermediates else self.white(value)
        density = log_density(white, log_determinant(self.scale_tril))  # log N(eps; 0, I) - log|R|
        return density.sum(-1) if self.event_dim == 2 else density

    @property
    def dense_root(self) -> Array:  # type: ignore[override]
        return self.scale_tril

    @property
    def covariance(self) -> Array:
        """Covariances (P, M, M) or (M, M)."""
        return times_transpose(self.scale_tril)

    @property
    def variance(self) -> Array:
        return jnp.square(self.scale_tril).sum(-1)  # diag(R R')

    def feature_variance(self, A: Array) -> Array:
        return self.feature_variances()(A)

    def feature_variances(self) -> Callable[[Array], Array]:
        S = self.covariance.reshape(-1, *self.scale_tril.shape[-2:])

        def feature_variance(A: Array) -> Array:
            if A.ndim == 2:
                return quadratic_forms(S, A)  # a_n' Sigma_p a_n (N, P)
            return jax.vmap(lambda S_p, A_p: quadratic_forms(S_p[None], A_p)[:, 0], out_axes=1)(S, A)

        return feature_variance

    def feature_covariance(self, A: Array) -> Array:
        half = matmul(A, self.scale_tril.reshape(-1, *self.scale_tril.shape[-2:]))  # A R: A Sigma A' = (A R) (A R)'
        return matmul(half, half.mT)


class DiagonalBelief(Belief):
    r"""Independent values: :math:`q(v_{pm}) = N(m_{pm}, \sigma_{pm}^2)`.

    Args:
        loc: means, (P, M) or (M,).
        scale: standard deviations :math:`\sigma` of the same shape; their signs are free.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.real}
    reparametrized_params = ["loc", "scale"]
    each_by_its_own = True

    def __init__(self, loc: Array, scale: Array) -> None:
        self.loc, self.scale = loc, scale
        super().__init__((), jnp.shape(loc), validate_args=False)

    def from_white(self, white: Array) -> Array:
        return self.loc + self.scale * white

    def around(self, loc: Array) -> DiagonalBelief:
        return DiagonalBelief(loc, self.scale)

    def white(self, value: Array) -> Array:
        return (value - self.loc) / self.scale

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = intermediates[0] if intermediates else self.white(value)
        density = log_density(white, jnp.log(jnp.abs(self.scale)).sum(-1))  # log N(eps; 0, I) - sum_m log|sigma_m|
        return density.sum(-1) if self.event_dim == 2 else density

    @property
    def variance(self) -> Array:
        return jnp.square(self.scale)

    def feature_variance(self, A: Array) -> Array:
        return matvec(self.variance.reshape(-1, A.shape[-1]), jnp.square(A))  # sum_m a_nm^2 sigma_pm^2

    def feature_covariance(self, A: Array) -> Array:
        half = A * self.scale.reshape(-1, 1, A.shape[-1])  # A diag(sigma)
        return matmul(half, half.mT)


class BlockBelief(Belief):
    r"""A Gaussian over L independent blocks of M values each, as one over L M values: :math:`q(v) = \prod_{pg}
    q(v_{pg})`.

    Args:
        blocks: the belief about the blocks, event shape (P L, M).
        shape: of the values together, (P, L M) or (L M,).
    """

    pytree_data_fields: tuple[str, ...] = ("blocks",)
    blocks: Belief

    def __init__(self, blocks: Belief, shape: tuple[int, ...]) -> None:
        self.blocks = blocks
        super().__init__((), shape, validate_args=False)

    @property
    def loc(self) -> Array:  # type: ignore[override]
        return self.blocks.loc.reshape(self.event_shape)

    @property
    def variance(self) -> Array:
        return self.blocks.variance.reshape(self.event_shape)

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        draw = self.blocks.sample(key, sample_shape)
        return draw.reshape(*draw.shape[: len(sample_shape)], *self.event_shape), []

    def reshaped(self, shape: tuple[int, ...]) -> Belief:
        return self

    def _by_block(self, A: Array) -> Array:
        """Features (N, L M) or (P, N, L M) as those of the blocks (P L, N, M)."""
        count, size = self.blocks.event_shape
        outputs = math.prod(self.event_shape[:-1])
        split = A.reshape(-1, A.shape[-2], count // outputs, size)  # (P, N, L, M), or P = 1 where shared
        split = jnp.broadcast_to(split, (outputs, *split.shape[1:]))
        return jnp.moveaxis(split, 2, 1).reshape(count, A.shape[-2], size)

    def feature_variance(self, A: Array) -> Array:
        # a' Sigma_p a = sum_g a_g' Sigma_pg a_g: (N, P L), summed over the blocks.
        found = self.blocks.feature_variance(self._by_block(A))
        return found.reshape(len(found), math.prod(self.event_shape[:-1]), -1).sum(-1)

    def feature_covariance(self, A: Array) -> Array:
        found = self.blocks.feature_covariance(self._by_block(A))
        return found.reshape(math.prod(self.event_shape[:-1]), -1, *found.shape[1:]).sum(1)

    def moments_of_block(self, A: Array, groups: Array) -> tuple[Array, Array]:
        mean, M = _of_block(self.loc, A, groups), A.shape[-1]
        if self.blocks.dense_root is not None:
            root = self.blocks.dense_root.reshape(math.prod(self.event_shape[:-1]), -1, M, M)
            return mean, jnp.square(einsum("ni,pnij->pnj", A, root[:, groups])).sum(-1).T  # |R_pg' a_n|^2
        if self.blocks.each_by_its_own:
            return mean, _of_block(self.variance, jnp.square(A), groups)  # sum_m a_nm^2 sigma_pgm^2
        return super().moments_of_block(A, groups)


def in_block(A: Array, groups: Array, count: int) -> Array:
    """Features (N, M) of rows that see one block each as those of all of them (N, L M), which are zero elsewhere."""
    return (jax.nn.one_hot(groups, count, dtype=A.dtype)[..., None] * A[:, None]).reshape(len(A), -1)


@kl_divergence.register(FunctionValues, StandardNormal)
def _kl_values_prior(q: FunctionValues, p: StandardNormal) -> Array:
    return sum_event(expected_kl(q.variance, jnp.square(q.loc), 1.0), q.event_dim)


@kl_divergence.register(FullBelief, InducingPrior)
def _kl_full_belief(q: FullBelief, prior: InducingPrior) -> Array:
    return kl_full(q.loc, q.scale_tril).sum()  # sum_p KL[N(m_p, R_p R_p') || N(0, I)]


@kl_divergence.register(DiagonalBelief, InducingPrior)
def _kl_diagonal_belief(q: DiagonalBelief, prior: InducingPrior) -> Array:
    return kl_diagonal(q.loc, q.scale).sum()  # sum_p KL[N(m_p, diag(sigma_p^2)) || N(0, I)]


@pytree
class KnownWeights:
    """Known values v: one draw of them.

    Args:
        loc: v, (P, M) or (M,).
    """

    loc: Array
    known, whole, dense_root, variance = True, None, None, None

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return jnp.broadcast_to(self.loc, (*sample_shape, *self.loc.shape))

    def feature_variances(self) -> None:
        return None

    def feature_covariance(self, A: Array) -> None:
        return None

    def reshaped(self, shape: tuple[int, ...]) -> KnownWeights:
        return self if self.loc.shape == shape else dataclasses.replace(self, loc=self.loc.reshape(shape))

    def moments_of_block(self, A: Array, groups: Array) -> tuple[Array, None]:
        return _of_block(self.loc, A, groups), None


@pytree
class FunctionDraw(KnownWeights):
    r"""A draw of a whole function: whitened inducing values, and a random key for the function between them.

    Args:
        loc: whitened inducing values v, (P, M) or (M,).
        key: PRNG key of the prior draw that the inducing values correct.
        num_features: random functions in that prior draw.
    """

    key: Array
    num_features: int = static(default=1024)

    @property
    def whole(self) -> FunctionDraw:  # type: ignore[override]
        return self


def _of_block(v: Array, A: Array, groups: Array) -> Array:
    """A v for rows that see one block each (N, P)."""
    M = A.shape[-1]
    return einsum("nm,pnm->np", A, v.reshape(math.prod(v.shape[:-1]), -1, M)[:, groups])  # v_pg' a_n, g = groups[n]


def whitened_values(
    name: str, prior: InducingPrior, what: str = "inducing values", outside: tuple[str, ...] = ()
) -> tuple[Weights, str]:
    """Open the site ``name`` of whitened values; returns its value as weights, and its full name.

    Args:
        name: of the site.
        prior: its distribution.
        what: what the values are, for messages.
        outside: names of plates that it is opened in and does not lie in.

    Raises:
        ValueError: inside a plate, where a function would get one copy per datum.
    """
    messages: list[dict[str, Any]] = []
    with each_message(messages.append):
        value = numpyro.sample(name, prior, infer={"block_plates": outside} if outside else None)
    v: Weights = value if isinstance(value, Belief | KnownWeights) else KnownWeights(jnp.asarray(value))
    shape = jnp.shape(v.loc)
    if shape != prior.event_shape:
        if len(shape) > len(prior.event_shape):
            advice = (
                "open the layer outside every plate, and use outputs= for several independent functions; in a single "
                "plate of groups, a layer on dgp.Points(Z) is a function for each"
            )
        else:
            advice = (
                "the guide, parameters or draws are those of another program, or of this one with other inducing "
                "inputs; make the guide from this model"
            )
        raise expected(f"{what} of shape {prior.event_shape}", shape, advice)
    return v, messages[0]["name"]  # with the prefixes that handlers outside add to it
