r"""Global inducing points: q(v) from pseudo-observations at pseudo-inputs propagated through the layers.

With pseudo-observations t of the function at inputs x of its layer, with precision :math:`\Lambda`, and features A,

.. math:: q(v) \propto N(v;\, 0, I)\; N(t;\, m(x) + A v,\, \Lambda^{-1})
          = N\bigl(\Sigma A^\top \Lambda\, (t - m(x)),\; \Sigma\bigr), \qquad \Sigma^{-1} = I + A^\top \Lambda A .

The inputs x of a layer are the pseudo-inputs propagated through the conditional means of the layers below, given their
drawn inducing values. Any deterministic function of these draws gives a valid density q(v | v below), so conditional
variance and process noise may be left out.
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

from numpyro_dgp._checks import expect, expected, is_concrete
from numpyro_dgp._fields import count, scale
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import unwrap
from numpyro_dgp.functions.layer_starts import kmeans
from numpyro_dgp.functions.weights import FullBelief, InducingPrior
from numpyro_dgp.guides.rules.inducing_values import row_scaled_tril
from numpyro_dgp.guides.rules.rule import Rule, SiteContext, initial_scale, require_site
from numpyro_dgp.math.gaussians import given_observations
from numpyro_dgp.math.linalg import matmul

__all__ = ["GlobalInducing"]


@dataclasses.dataclass(frozen=True)
class GlobalInducing(Rule):
    r"""Inducing values that depend on those of all layers below through propagated pseudo-inputs.

    .. math::
        q = \prod_\ell q(v^\ell \mid v^{<\ell}) \prod_n p(h^\ell_n \mid v^\ell, h^{\ell-1}_n), \qquad
        q(v^\ell_p \mid v^{<\ell}) \propto N(v^\ell_p;\, 0, I)\,
        N\bigl(t^\ell_p;\; m^\ell_p(\tilde X^{\ell-1}) + A^\ell(\tilde X^{\ell-1})\, v^\ell_p,\;
        (\Gamma^\ell_p \Gamma^{\ell\top}_p)^{-1}\bigr)

    with the features A of the layer. The pseudo-inputs :math:`\tilde X^0` (G, D), with the columns of X, stand in for
    X: the program itself runs on them, at the inducing values drawn so far, and every layer takes its mean, so that
    :math:`\tilde X^{\ell-1}` is what the layer is called with there. A layer that is called several times has its
    pseudo-observations at the first call. Learned are :math:`\tilde X^0`, and per layer the pseudo-observations
    :math:`t^\ell` (G, P) and the triangular roots :math:`\Gamma^\ell` (P, G, G) of their precisions; for a scalar
    function (G,) and (G, G). A latent per datum has a fitted pseudo-value for every pseudo-input.

    The draw of a lower layer thus moves the inputs at which the layer above is tied down. Features, and with them q(v),
    move with uncertain hyperparameters too, in a single layer as well. Under ``dgp.ELBO`` inducing values that others
    depend on are drawn, once for all data, and the rest is integrated out; every divergence
    :math:`\mathrm{KL}[q(v^\ell \mid v^{<\ell}) \,\|\, N(0, I)]` is in closed form given the draws. The draws make
    gradients noisier than those of ``InducingPoint``: take several, ``ELBO(num_particles=...)``.

    Parameters start at centres of the rows of X by k-means, :math:`t^\ell = m^\ell(\tilde X^{\ell-1})`, and
    :math:`\Gamma^\ell = I / s`.

    Other arguments with as many rows as X are taken for data, and cut or repeated to G rows; compute inducing inputs
    outside of the program. Open layers in the order in which values go through them. These Gaussians have no
    parameters in which natural gradients could be taken: use Adam.

    Args:
        num_inducing: the number of pseudo-inputs, G.
        inputs: name of the argument of the program that they replace; by default the first.
        diagonal: whether :math:`\Gamma` is diagonal: positive numbers (P, G), or (G,).
        scale: initial standard deviation s of pseudo-observations, relative to that of the function; by default 1e-2
            for inner layers, else 1.
        labels: columns of the argument that hold labels of categories; those of the pseudo-inputs are labels then, and
            stay as they are.

    Raises:
        ValueError: a number of pseudo-inputs that is not a positive integer, or a scale that is not positive; in a
            call, an argument that does not hold rows, fewer distinct rows than pseudo-inputs, rules with different
            numbers of them, columns of labels that it does not have, layers in another order, or inducing values of
            something that is no function with features.

    Example:
        >>> import jax, optax
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> from numpyro_dgp.guides import GlobalInducing, InducingPoint
        >>> model, X, y = dgp.testing.toy(2)
        >>> svi = SVI(model, InducingPoint(model, inducing=GlobalInducing(6)), optax.adam(0.01), dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, y, progress_bar=False)
        >>> result.params["auto_pseudo_inputs"].shape, result.params["f_auto_root"].shape
        ((6, 1), (2, 6, 6))

    Source: Ober and Aitchison (2021), where a layer is represented by its values at the pseudo-inputs themselves; here
    by the inducing values that the program gives it.
    """

    num_inducing: int = count(hint="50")
    inputs: str | None = None
    diagonal: bool = False
    scale: float | None = scale()
    labels: Sequence[int] = ()
    follows_layers = True

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "labels", tuple(np.atleast_1d(self.labels).tolist()))

    def __call__(self, site: SiteContext) -> FullBelief:
        require_site(InducingPrior, self, site, "inducing values")

        def pseudo_inputs(X: Array) -> Array:
            name = f"{site.prefix}_pseudo_inputs"
            found = numpyro.param(name, lambda _: _centres(X, self.num_inducing, self.labels))
            expect(
                len(found) == self.num_inducing,
                f"{self.num_inducing} pseudo-inputs at layer {site.name!r}",
                f"{len(found)} of {name!r}, which all layers share",
                "give all of them one num_inducing",
            )
            return found

        def pseudo_value(msg: dict[str, Any]) -> Array:
            fn = msg["fn"]
            name = f"{msg['name']}_{site.prefix}_pseudo_values"
            return numpyro.param(name, lambda _: fn.sample(jax.random.key(0)), constraint=unwrap(fn).support)

        values = site.at_rows(self.inputs, pseudo_inputs, pseudo_value)
        if not values or not hasattr(values[0].function, "features"):
            raise expected(
                f"layer {site.name!r} to be a function with features whose values the program draws or observes",
                type(values[0].function).__name__ if values else "none",
                f"give it sites={{{site.name!r}: guides.Full()}}",
            )
        function, rows = values[0].function, values[0].inputs.reshape(-1, values[0].inputs.shape[-1])
        if function.blocked:
            raise expected(
                f"layer {site.name!r} to be opened outside of plates",
                f"one for each of {function.groups} groups",
                f"give it sites={{{site.name!r}: guides.Full()}}",
            )
        A, mean = function.features(rows), function.mean_at(rows)
        t = site.param("pseudo_outputs", lambda: jnp.broadcast_to(mean, (len(rows), *site.fn.event_shape[:-1])))
        if t.shape[0] != len(rows):
            raise expected(
                f"{t.shape[0]} pseudo-inputs at layer {site.name!r}, as in the fit",
                len(rows),
                "its inputs have other rows than those of the program, X; name these, inputs='X'",
            )
        root = self._root(site, len(rows), jnp.mean(function.prior_variance(rows)))
        residual = (t - mean).reshape(len(rows), -1).T
        if self.diagonal:
            half, white = root[..., None] * A, root * residual
        else:
            half, white = matmul(root.mT, A), matmul(root.mT, residual[..., None])[..., 0]
        loc, scale_tril = given_observations(half, white, f"the precision of {site.name!r}")
        return FullBelief(loc.reshape(site.fn.event_shape), scale_tril.reshape(*site.fn.event_shape, -1))

    def _root(self, site: SiteContext, rows: int, variance: Array) -> Array:
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
        expect(
            count <= distinct,
            f"num_inducing of at most {distinct}, the distinct rows of the inputs",
            count,
            "more add nothing",
        )
        return kmeans(np.asarray(rows), count, labels=labels)

    values = centres(rows) if is_concrete(rows) else jax.pure_callback(centres, found, rows, vmap_method="sequential")
    return jnp.asarray(values).reshape(count, *X.shape[1:])
