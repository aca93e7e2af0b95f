r"""A rule for inducing values: what pseudo-observations of the function, at pseudo-inputs sent through the layers, say.

With pseudo-observations t of the function at inputs x of its layer, with precision :math:`\Lambda`, and features A,

.. math:: q(v) \propto N(v;\, 0, I)\; N(t;\, m(x) + A v,\, \Lambda^{-1})
          = N\bigl(\Sigma A^\top \Lambda\, (t - m(x)),\; \Sigma\bigr), \qquad \Sigma^{-1} = I + A^\top \Lambda A .

The inputs x of a layer are the means, given the inducing values drawn below, of the layers that the pseudo-inputs go
through. Any function of these draws gives a density q(v | v below), so that the map needs no density of its own: the
open variance of a layer given v and its process noise are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import constraints

from numpyro_dgp._checks import is_concrete, require_count
from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.gaussians import given_observations
from numpyro_dgp.algebra.linalg import matmul
from numpyro_dgp.guides.rules.row_scaled import row_scaled_tril
from numpyro_dgp.guides.rules.rule import Rule, Site, initial_scale, require_scale, require_site
from numpyro_dgp.layer_starts import kmeans
from numpyro_dgp.model.beliefs import FullBelief, InducingPrior
from numpyro_dgp.model.sites import unwrap

__all__ = ["PseudoObservations"]


@dataclasses.dataclass(frozen=True)
class PseudoObservations(Rule):
    r"""Inducing values given pseudo-observations at pseudo-inputs that all layers share
    (:class:`~numpyro_dgp.guides.GlobalInducing`).

    Args:
        num_inducing: G, the number of pseudo-inputs.
        inputs: name of the argument of the program that they stand for; ``None`` for the first.
        diagonal: whether the precision is diagonal.
        scale: initial standard deviation of pseudo-observations, relative to that of the function; by default 1e-2 for
            inner layers, else 1.
        labels: columns of the argument that hold labels of categories.
    """

    num_inducing: int
    inputs: str | None = None
    diagonal: bool = False
    scale: float | None = None
    labels: Sequence[int] = ()
    follows_layers = True

    __repr__ = brief

    def __post_init__(self) -> None:
        require_count("GlobalInducing", "num_inducing", self.num_inducing, "50")
        require_scale("GlobalInducing", 1.0 if self.scale is None else self.scale)
        object.__setattr__(self, "labels", tuple(np.atleast_1d(self.labels).tolist()))

    def __call__(self, site: Site) -> FullBelief:
        require_site(InducingPrior, self, site, "inducing values")

        def pseudo_inputs(X: Array) -> Array:
            return numpyro.param(f"{site.prefix}_pseudo_inputs", lambda _: _centres(X, self.num_inducing, self.labels))

        def pseudo_value(msg: dict[str, Any]) -> Array:
            fn = msg["fn"]
            name = f"{msg['name']}_{site.prefix}_pseudo_values"
            return numpyro.param(name, lambda _: fn.sample(jax.random.key(0)), constraint=unwrap(fn).support)

        values = site.at_rows(self.inputs, pseudo_inputs, pseudo_value)
        if not values or not hasattr(values[0].function, "features"):
            raise ValueError(
                f"GlobalInducing: expected layer {site.name!r} to be a function with features whose values the program "
                f"draws or observes, got {type(values[0].function).__name__ if values else 'none'}: give it "
                f"sites={{{site.name!r}: guides.Full()}}"
            )
        function, rows = values[0].function, values[0].inputs.reshape(-1, values[0].inputs.shape[-1])
        if function.blocked:
            raise ValueError(
                f"GlobalInducing: expected layer {site.name!r} to be opened outside of plates, got one for each of "
                f"{function.groups} groups: give it sites={{{site.name!r}: guides.Full()}}"
            )
        A, mean = function.features(rows), function.mean_at(rows)
        t = site.param("pseudo_outputs", lambda: jnp.broadcast_to(mean, (len(rows), *site.fn.event_shape[:-1])))
        if t.shape[0] != len(rows):
            raise ValueError(
                f"GlobalInducing: expected {t.shape[0]} pseudo-inputs at layer {site.name!r}, as in the fit, got "
                f"{len(rows)}: its inputs have other rows than those of the program, X; name these, inputs='X'"
            )
        root = self._root(site, len(rows), jnp.mean(function.prior_variance(rows)))
        residual = (t - mean).reshape(len(rows), -1).T
        if self.diagonal:
            half, white = root[..., None] * A, root * residual
        else:
            half, white = matmul(root.mT, A), matmul(root.mT, residual[..., None])[..., 0]
        loc, scale_tril = given_observations(half, white, f"the precision of {site.name!r}")
        return FullBelief(loc.reshape(site.fn.event_shape), scale_tril.reshape(*site.fn.event_shape, -1))

    def _root(self, site: Site, rows: int, variance: Array) -> Array:
        """The root of the precision of every output, lower triangular (P, G, G), or its diagonal (P, G)."""

        def start() -> Array:
            scale = initial_scale(self.scale, site) * jnp.sqrt(variance)
            one = np.ones(rows) if self.diagonal else np.eye(rows)
            shape = (*site.fn.event_shape[:-1], *one.shape)
            return jnp.broadcast_to(jnp.asarray(one, variance.dtype) / scale, shape)

        if self.diagonal:
            return site.param("root", start, constraint=constraints.positive).reshape(-1, rows)
        root = site.param("root", start, constraint=row_scaled_tril)
        return jnp.tril(root).reshape(-1, rows, rows)


def _centres(X: Array, count: int, labels: Sequence[int]) -> Array:
    """Centres of the rows of X by k-means; where X is traced, as in a compiled first step, when that runs."""
    rows = jnp.asarray(X, jnp.result_type(X, float)).reshape(len(X), -1)
    found = jax.ShapeDtypeStruct((count, rows.shape[1]), rows.dtype)

    def centres(rows: Any) -> np.ndarray:
        distinct = len(np.unique(np.asarray(rows), axis=0))
        if count > distinct:
            raise ValueError(
                f"GlobalInducing: expected num_inducing of at most {distinct}, the number of distinct rows of the "
                f"inputs, got {count}: more cannot add anything"
            )
        return kmeans(np.asarray(rows), count, labels=labels)

    values = centres(rows) if is_concrete(rows) else jax.pure_callback(centres, found, rows, vmap_method="sequential")
    return jnp.asarray(values).reshape(count, *X.shape[1:])
