r"""The possible values at the site of a layer's whitened inducing values.

The value at a layer's sample site is one of three things, and the layer handles all of them:

- an array: one draw of the whitened values :math:`v`, with :math:`u = L v`, :math:`k(Z, Z) = L L^\top`;
- a :class:`Belief`: a Gaussian :math:`q(v)`, which the layer integrates out (inside ``dgp.ELBO``);
- a :class:`FunctionDraw`: a draw of the whole function, consistent across inputs (``dgp.predict``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from numpyro.distributions import constraints, kl_divergence
from numpyro.primitives import Messenger

from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, pytree, static
from numpyro_dgp.functions.fields_in_order import FieldsInOrder
from numpyro_dgp.math.gaussians import kl_diagonal, kl_full, log_density, log_determinant
from numpyro_dgp.math.linalg import fused, matmul, solve_lower, times_transpose
from numpyro_dgp.math.quadratic_forms import quadratic_forms

__all__ = [
    "Belief",
    "DiagonalBelief",
    "FullBelief",
    "FunctionDraw",
    "InducingPrior",
    "StandardNormal",
    "project",
    "whitened_values",
]


class StandardNormal(FieldsInOrder):
    """Independent N(0, 1) numbers in a dtype of their own, whatever the global x64 flag says.

    Args:
        event_shape: of one draw.
        dtype: of the numbers.
        batch_shape: of independent draws.
        inputs: for latent columns, the inputs (..., D) that they are appended to.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields: tuple[str, ...] = ("inputs",)
    pytree_aux_fields: tuple[str, ...] = ("dtype",)

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
    def mean(self) -> Array:
        return jnp.zeros(self.shape(), self.dtype)

    @property
    def variance(self) -> Array:
        return jnp.ones(self.shape(), self.dtype)


class InducingPrior(StandardNormal):
    """The prior of whitened inducing values; guides recognise the sites of inducing values by this type."""

    suggested_rule = "dgp.guides.Full()"


class Belief(FieldsInOrder):
    r"""A Gaussian over whitened inducing values, event shape (P, M) or (M,).

    Subclasses say what the Gaussian adds to the covariance of the function at inputs whose whitened
    cross-covariance is :math:`A = k(x, Z) L^{-\top}`: the spread :math:`A \Sigma A^\top`.
    """

    loc: Array

    __repr__ = brief

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

    def spread(self, A: Array) -> Array:
        """Diagonal of the added covariance, shape (N, P), for A of shape (N, M) or (P, N, M)."""
        raise NotImplementedError

    def spreading(self) -> Callable[[Array], Array]:
        """:meth:`spread` for several A: what does not depend on A is computed once."""
        return self.spread

    def spread_covariance(self, A: Array) -> Array:
        """The added covariance (P, N, N)."""
        raise NotImplementedError

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.event_dim)

    @property
    def mean(self) -> Array:
        return self.loc


def project(u: Array, A: Array) -> Array:
    """Products of the rows of A, (N, M) or (P, N, M), with the rows of u, (P, M): shape (N, P)."""
    return matmul(A, u.T) if A.ndim == 2 else matmul(A, u[..., None])[..., 0].T


@fused
def _correlated(loc: Array, scale_tril: Array, white: Array) -> Array:
    return loc + matmul(scale_tril, white[..., None])[..., 0]


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
        return solve_lower(self.scale_tril, (value - self.loc)[..., None])[..., 0]

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        white = intermediates[0] if intermediates else self.white(value)
        density = log_density(white, log_determinant(self.scale_tril))
        return density.sum(-1) if self.event_dim == 2 else density

    @property
    def covariance(self) -> Array:
        """Covariances (P, M, M) or (M, M)."""
        return times_transpose(self.scale_tril)

    @property
    def variance(self) -> Array:
        return jnp.square(self.scale_tril).sum(-1)

    def spread(self, A: Array) -> Array:
        return self.spreading()(A)

    def spreading(self) -> Callable[[Array], Array]:
        S = self.covariance.reshape(-1, *self.scale_tril.shape[-2:])

        def spread(A: Array) -> Array:
            if A.ndim == 2:
                return quadratic_forms(S, A)
            return jax.vmap(lambda S_p, A_p: quadratic_forms(S_p[None], A_p)[:, 0], out_axes=1)(S, A)

        return spread

    def spread_covariance(self, A: Array) -> Array:
        half = matmul(A, self.scale_tril.reshape(-1, *self.scale_tril.shape[-2:]))
        return matmul(half, half.mT)


class DiagonalBelief(Belief):
    r"""Independent values: :math:`q(v_{pm}) = N(m_{pm}, \sigma_{pm}^2)`.

    Args:
        loc: means, (P, M) or (M,).
        scale: standard deviations :math:`\sigma` of the same shape; their signs are free.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.real}
    reparametrized_params = ["loc", "scale"]

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
        density = log_density(white, jnp.log(jnp.abs(self.scale)).sum(-1))
        return density.sum(-1) if self.event_dim == 2 else density

    @property
    def variance(self) -> Array:
        return jnp.square(self.scale)

    def spread(self, A: Array) -> Array:
        return project(self.variance.reshape(-1, A.shape[-1]), jnp.square(A))

    def spread_covariance(self, A: Array) -> Array:
        half = A * self.scale.reshape(-1, 1, A.shape[-1])
        return matmul(half, half.mT)


@kl_divergence.register(FullBelief, InducingPrior)
def _kl_full_belief(q: FullBelief, prior: InducingPrior) -> Array:
    return kl_full(q.loc, q.scale_tril).sum()


@kl_divergence.register(DiagonalBelief, InducingPrior)
def _kl_diagonal_belief(q: DiagonalBelief, prior: InducingPrior) -> Array:
    return kl_diagonal(q.loc, q.scale).sum()


@pytree
class FunctionDraw:
    r"""A draw of a whole function: whitened inducing values, and a random key for the function between them.

    Args:
        u: whitened inducing values, (P, M) or (M,).
        key: PRNG key of the prior draw that the inducing values correct.
        num_features: random functions in that prior draw.
    """

    u: Array
    key: Array
    num_features: int = static(default=1024)


class _FullName(Messenger):
    """Finds out the name of a site with the prefixes that handlers outside add to it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        self.messages.append(msg)

    @property
    def name(self) -> str:
        return self.messages[0]["name"]


def whitened_values(
    owner: str, name: str, prior: InducingPrior, what: str = "inducing values", outside: tuple[str, ...] = ()
) -> tuple[Array | Belief | FunctionDraw, str]:
    """Open the site ``name`` of whitened values; returns its value (see the module) and its full name.

    Args:
        owner: who opens it, for messages.
        name: of the site.
        prior: its distribution.
        what: what the values are, for messages.
        outside: names of plates that it is opened in and does not lie in.

    Raises:
        ValueError: inside a plate, where a function would get one copy per datum.
    """
    with (site := _FullName()):
        u = numpyro.sample(name, prior, infer={"block_plates": outside} if outside else None)
    shape = jnp.shape(u.u if isinstance(u, FunctionDraw) else u.loc if isinstance(u, Belief) else u)
    if shape != prior.event_shape:
        in_plate = len(shape) > len(prior.event_shape)
        raise ValueError(
            f"{owner}: expected {what} of shape {prior.event_shape}, got {shape}: "
            + (
                "open the layer outside every plate, and use outputs= for several independent functions; in a single "
                "plate of groups, a layer on dgp.Points(Z) is a function for each"
                if in_plate
                else "the guide, parameters or draws are those of another program, or of this one with other inducing "
                "inputs; make the guide from this model"
            )
        )
    return u, site.name
