r"""Linear projections of the inputs whose matrix is uncertain.

With whitened entries :math:`v_{pd} \sim N(0, 1)` and a belief :math:`q(v_p) = N(m_p, \Sigma_p)` about each row,

.. math::
    z = m(x) + \Pi x, \quad \Pi_{pd} = \sigma_d v_{pd}, \qquad
    q(z_p) = N\bigl(m(x)_p + m_p^\top (\sigma \odot x),\; (\sigma \odot x)^\top \Sigma_p (\sigma \odot x)\bigr)

Given :math:`\Pi`, z is deterministic. A bound that is a sum over data needs only the marginals above.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_finite, require_inputs, require_positive, violated
from numpyro_dgp._typing import Array, ArrayLike, pytree, static
from numpyro_dgp.functions.function_inputs import mean_values
from numpyro_dgp.functions.function_values import Origin
from numpyro_dgp.functions.joint_values import Determined, DeterminedJoint
from numpyro_dgp.functions.weights import InducingPrior, Weights, matvec, whitened_values
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.math.row_blocks import in_blocks
from numpyro_dgp.means import Mean, as_mean

__all__ = ["Projection", "projection"]


@pytree
class Projection:
    r"""A random linear function; made by ``dgp.projection``.

    Args:
        scale: prior standard deviations :math:`\sigma` of the entries, per input column (D,).
        v: the whitened entries: known, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of the entries.
    """

    scale: Array
    v: Weights
    outputs: int | None = static()
    mean: Mean
    site: str | None = static(default=None)

    def __call__(self, x: ArrayLike) -> Determined:
        """Projected inputs, each on its own.

        Args:
            x: inputs (..., D).

        Returns:
            A distribution with batch shape ``x.shape[:-1]`` and event shape (P,), or () for a scalar function.

        Raises:
            ValueError: inputs of another width, NaN or infinite inputs.
        """
        x = self._inputs(x)
        # z = m(x) + v (sigma x), with the variance (sigma x)' Sigma_p (sigma x).
        rows = (x * self.scale).reshape(-1, x.shape[-1])
        feature_variance = self.v.feature_variances()
        belief_variance = None if feature_variance is None else in_blocks(feature_variance, rows)
        return self._values(x, matvec(self._entries(), rows), belief_variance)

    def columns(self, labels: ArrayLike) -> Determined:
        """Projected one-hot inputs: column ``labels`` of the matrix, gathered instead of multiplied out.

        Args:
            labels: integers (...,) from 0 to D - 1; the input is 1 in that column and 0 in the others.

        Returns:
            A distribution with batch shape ``labels.shape`` and event shape (P,), or () for a scalar function.

        Raises:
            ValueError: labels that are not integers from 0 to D - 1.
        """
        D = len(self.scale)
        if not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
            raise expected("integer labels", jnp.result_type(labels), "call the projection itself on rows of numbers")
        if violated(lambda labels: (labels >= 0) & (labels < D), labels):
            raise expected(
                f"labels from 0 to {D - 1}",
                f"{np.min(labels)} to {np.max(labels)}",
                "number the classes from 0, and open the projection with inputs= their number",
            )
        labels = jnp.asarray(labels)
        belief_variance = self.v.variance
        if belief_variance is not None:
            # x = e_d: sigma_d^2 var v_pd
            belief_variance = jnp.square(self.scale[labels])[..., None] * self._rows(belief_variance).T[labels]
        loc = self.scale[labels][..., None] * self._entries().T[labels]  # sigma_d v_pd
        return self._values(jax.nn.one_hot(labels, D, dtype=loc.dtype), loc, belief_variance)

    def joint(self, x: ArrayLike) -> DeterminedJoint:
        """Projected inputs with their correlations over the last batch dimension of ``x`` (..., N, D).

        Returns:
            A distribution with batch shape ``x.shape[:-2]`` and event shape (N, P), or (N,).
        """
        x = self._inputs(x)
        each, scaled = self(x), (x * self.scale).reshape(-1, *x.shape[-2:])
        shape = (*x.shape[:-2], self.outputs or 1, x.shape[-2], x.shape[-2])
        belief_covariance = jax.vmap(self.v.feature_covariance)(scaled)  # (sigma x_n)' Sigma_p (sigma x_n')
        belief_covariance = None if belief_covariance is None else belief_covariance.reshape(shape)
        event_dim = 1 if self.outputs is None else 2
        none = jnp.zeros(shape, each.loc.dtype)  # given Pi, z has no variance
        return DeterminedJoint(each.loc, none, belief_covariance, event_dim, origin=Origin(self, x))

    def draw(self, key: Array, x: Array) -> Array:
        r"""Draws of :math:`m(x) + \Pi x`, one matrix for the last batch dimension of ``x`` (..., K, D): (..., K, P)."""
        v = self.v.sample(key, x.shape[:-2]).reshape(*x.shape[:-2], -1, len(self.scale))  # (..., P, D), one for K rows
        return matmul(x * self.scale, v.mT) + self.mean(x)

    def _values(self, x: Array, loc: Array, belief_variance: Array | None) -> Determined:
        shape = x.shape[:-1] if self.outputs is None else (*x.shape[:-1], self.outputs)
        loc = loc.reshape(shape) + mean_values(self.mean, x, self.outputs)
        belief_variance = None if belief_variance is None else belief_variance.reshape(shape)
        event_dim = 0 if self.outputs is None else 1
        return Determined(loc, jnp.zeros_like(loc), belief_variance, event_dim, origin=Origin(self, x))

    def _entries(self) -> Array:
        """Whitened entries (P, D): a draw of them, or their mean under a belief."""
        return self._rows(self.v.loc)

    def _rows(self, entries: Array) -> Array:
        return entries.reshape(-1, len(self.scale))

    def _inputs(self, x: ArrayLike) -> Array:
        require_inputs(x)
        expect(
            np.shape(x)[-1] == len(self.scale),
            f"inputs with D = {len(self.scale)} columns",
            f"shape {np.shape(x)}",
            "open it with inputs=X.shape[1]; for integer labels use its method columns",
        )
        require_finite("inputs of a projection", x, "drop, impute or mask the rows with missing values")
        return jnp.asarray(x, jnp.result_type(x, float))


def projection(
    name: str,
    inputs: int,
    outputs: int | None,
    scale: ArrayLike = 1.0,
    *,
    mean: Callable[[Array], ArrayLike] | ArrayLike | None = None,
) -> Projection:
    r"""A linear projection of the inputs, :math:`z = m(x) + \Pi x`, with a Gaussian prior on the matrix :math:`\Pi`.

    For many input columns, or for labels as one-hot rows: a layer above has P input columns, and the matrix is
    integrated out instead of fitted. It opens one sample site, ``name``: the whitened entries :math:`v`, event shape
    (P, D), or (D,) for a scalar function, :math:`\Pi_{pd} = \sigma_d v_{pd}`. Guides treat them as the inducing values
    of a layer. Call it outside every plate, and the projection inside: ``z = numpyro.sample("z", project(x))``.

    The rows of :math:`\Pi` are independent in every guide. ``Full()`` holds a (D, D) matrix for each of them; for many
    columns give the site ``Diagonal()``. In ``dgp.ELBO`` each z is drawn from its own Gaussian instead of one
    :math:`\Pi` for all data: the bound is a sum over data, so that its mean is the same and its variance smaller.

    MCMC needs ``dgp.for_mcmc(model)``, which makes ``"z"`` a deterministic site; NUTS on the bare program stops with
    an error, because a continuous site without variance has no density.

    Args:
        name: name of the site.
        inputs: D, columns of the inputs.
        outputs: P, columns of the projection; ``None`` for a scalar function.
        scale: :math:`\sigma`, prior standard deviation of the entries, in units of z per unit of x: a number, or one
            per input column (D,). Its dtype is that of the site.
        mean: m, a mean function such as ``dgp.means.pca(X, P)``, or a number; zero by default.

    Returns:
        The random projection.

    Raises:
        ValueError: counts that are not positive integers, or a scale of the wrong shape or not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro_dgp as dgp
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     project = dgp.projection("projection", 50, 2)
        ...     with numpyro.plate("data", 7):
        ...         z = numpyro.sample("z", project(jnp.ones((7, 50))))
        ...         x = dgp.latent("w", z, 1)
        >>> z.shape, x.shape
        ((7, 2), (7, 3))

    Source: Salimbeni (2020), section 4.2.3.
    """
    for what, count in (("inputs", inputs), ("outputs", 1 if outputs is None else outputs)):
        expect(
            isinstance(count, int) and count >= 1,
            f"{what} to be a positive integer",
            repr(count),
            "inputs is the number of columns of X, outputs that of the layer above, or None",
            at=f"projection {name!r}",
        )
    require_positive("scale", scale)
    scales = jnp.asarray(scale, jnp.result_type(scale, float))
    expect(
        scales.shape in ((), (inputs,)),
        f"scale to be a number or of shape ({inputs},)",
        scales.shape,
        "one value per input column",
        at=f"projection {name!r}",
    )
    shape = (inputs,) if outputs is None else (outputs, inputs)
    v, site = whitened_values(name, InducingPrior(shape, scales.dtype))
    return Projection(jnp.broadcast_to(scales, (inputs,)), v, outputs, as_mean(mean), site)
