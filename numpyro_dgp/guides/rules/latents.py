"""Rules for latents per datum: an amortised Gaussian, and the optimal q(w) by quadrature.

The networks are small, and their weights are parameters of the site.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._fields import count
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, pytree
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.weights import StandardNormal
from numpyro_dgp.guides.rules.model_conditional import Prior
from numpyro_dgp.guides.rules.rule import Rule, SiteContext
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.math.quadrature import GaussHermite, Nodes, white_nodes

__all__ = ["Amortised", "Quadrature", "TanhNetwork", "tanh_network"]


@pytree
class TanhNetwork:
    """Layers of tanh units, linear in the first and in the last step.

    Args:
        weights: of every step, (inputs, outputs).
        biases: of every step, (outputs,).
    """

    weights: tuple[Array, ...]
    biases: tuple[Array, ...]

    def __call__(self, rows: Array) -> Array:
        """From rows (..., inputs) to rows (..., outputs)."""
        for i, (W, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            rows = matmul(jnp.tanh(rows) if i else rows, W) + b
        return rows


def tanh_network(site: SiteContext, widths: Sequence[int], dtype: jnp.dtype) -> TanhNetwork:
    """A network with the parameters ``W0``, ``b0``, ``W1``, ... of a site.

    Args:
        site: whose parameters they are.
        widths: of the rows that go in, of the hidden layers, and of the rows that come out.
        dtype: of the parameters.
    """
    weights, biases = [], []
    for i, shape in enumerate(itertools.pairwise(widths)):
        weights.append(site.param(f"W{i}", partial(_glorot, shape, dtype)))
        biases.append(site.param(f"b{i}", partial(jnp.zeros, shape[1:], dtype)))
    return TanhNetwork(tuple(weights), tuple(biases))


def _glorot(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    # variance 2 / (inputs + outputs)
    return math.sqrt(2 / sum(shape)) * jax.random.normal(numpyro.prng_key(), shape, dtype)


def _dimensions(rule: Rule, site: SiteContext) -> int:
    """Columns of a latent site."""
    expect(
        site.fn.event_dim == 1 and not site.fn.support.is_discrete and site.in_plate,
        f"site {site.name!r} to be a vector of latents per datum",
        f"a {type(site.fn).__name__} of event shape {site.fn.event_shape}",
        f"draw it by dgp.latent in the data plate, or pass sites={{{site.name!r}: dgp.guides.Normal()}}",
        f"rule {type(rule).__name__}",
    )
    return site.fn.event_shape[0]


@dataclasses.dataclass(frozen=True)
class Amortised(Rule):
    r"""A Gaussian whose parameters a network computes from the datum: :math:`q(w_n) = N(\mu_n, \sigma_n^2)`.

    .. math:: [\mu_n, \rho_n] = \mathrm{network}([x_n, y_n]), \qquad \sigma_n = \log(1 + e^{\rho_n - 3})

    The arguments of the network are the inputs of ``dgp.latent`` and the observations in the plates of the site, as
    columns, zero where they are masked. It is not called where there are no observations.

    Args:
        network: from rows of these columns to rows (..., 2 dim). It runs in the guide and may have parameters:
            ``numpyro.param``, or ``numpyro.contrib.module.flax_module`` and ``eqx_module``. By default a small network
            with tanh units.
        hidden: widths of the hidden layers of the default network.

    Raises:
        ValueError: widths that are not positive integers, a site that is not a vector per datum, or a network whose
            output has another shape.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 10).reshape(5, 2)))
        ...     with numpyro.plate("data", len(X)):
        ...         x = dgp.latent("w", X, 1)
        ...         numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> guide = dgp.guides.InducingPoint(model, latent=dgp.guides.Amortised(hidden=(10,)))
        >>> shapes = dgp.testing.parameter_shapes(guide, jnp.zeros((20, 1)), jnp.zeros(20))
        >>> {name: shape for name, shape in shapes.items() if name.startswith("w_auto")}
        {'w_auto_W0': (2, 10), 'w_auto_b0': (10,), 'w_auto_W1': (10, 2), 'w_auto_b1': (2,)}

    Source: Salimbeni (2020), sections 4.2.1 and 5.2.5.
    """

    network: Callable[[Array], Array] | None = None
    hidden: tuple[int, ...] = (20, 20)

    __repr__ = brief

    def __post_init__(self) -> None:
        if not isinstance(self.hidden, list | tuple) or not all(isinstance(n, int) and n > 0 for n in self.hidden):
            raise expected("hidden=(20, 20), widths of layers", repr(self.hidden))

    def __call__(self, site: SiteContext) -> dist.Distribution:
        dim = _dimensions(self, site)
        rows = site.data()
        widths = [rows.shape[-1], *self.hidden, 2 * dim]
        network = tanh_network(site, widths, rows.dtype) if self.network is None else self.network
        out = network(rows)  # [mu, rho] (..., 2 dim)
        expected = (*rows.shape[:-1], 2 * dim)
        expect(
            jnp.shape(out) == expected,
            f"the network of site {site.name!r} to map rows of shape {rows.shape} to {expected}",
            jnp.shape(out),
            f"the first {dim} columns are means, the others scales",
        )
        scale = jax.nn.softplus(out[..., dim:] - 3)  # log(1 + e^(rho - 3)), 0.05 at rho = 0
        return FunctionValues(out[..., :dim], jnp.square(scale))


@dataclasses.dataclass(frozen=True)
class Quadrature(Prior):
    r"""The optimal q(w), free in form, by Gauss-Hermite quadrature; for one or two latent columns.

    .. math:: q(w_n) \propto e^{\mathcal L_n(w_n)}\, p(w_n), \qquad
              \log \int e^{\mathcal L_n(w_n)}\, p(w_n)\, dw_n \approx \log \sum_k \nu_k\, e^{\mathcal L_n(w^{(k)})}

    with the nodes :math:`w^{(k)}` and weights :math:`\nu_k` of the rule.

    **The sum is a bound only where the nodes resolve the integrand.** 100 nodes are 0.3 apart. Where the
    posterior of w is narrower, as with noise of a tenth of how far the function varies over w, the sum may be above
    the evidence, and a fit moves the function to where nodes are. Compare the loss of a fit with that of four times as
    many nodes; where they differ, take ``Normal()`` with importance weights (``dgp.guides.ImportanceWeighted``).

    ``dgp.ELBO()`` evaluates that bound, which is above the one of any other q(w). Layers above are drawn jointly over
    the nodes. ``guide.sample_posterior`` draws w from this q(w). Under NumPyro's own objectives the rule acts as
    :class:`Prior`, which gives a bound too, but a loose one.

    Args:
        size: number of nodes per column.

    Raises:
        ValueError: more than two columns, a prior that is not standard normal, a size that is not a positive integer.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro_dgp as dgp
        >>> import numpyro.distributions as dist
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 10).reshape(5, 2)))
        ...     with numpyro.plate("data", len(X)):
        ...         x = dgp.latent("w", X, 1)
        ...         numpyro.sample("y", dgp.Likelihood(f(x), lambda v: dist.Normal(v, 1.0)), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> params = {"f_auto_loc": jnp.ones(5), "f_auto_scale_tril": jnp.eye(5)}
        >>> def loss(size):
        ...     guide = dgp.guides.InducingPoint(model, latent=dgp.guides.Quadrature(size))
        ...     return dgp.ELBO().loss(jax.random.key(0), params, model, guide, X, X[:, 0])
        >>> print(f"{loss(10):.1f} {loss(20):.1f}")  # no draws: equal up to the error of the quadrature
        36.0 36.0

    Source: Salimbeni (2020), equation 4.8, with the sum over data outside the logarithm.
    """

    size: int = count(100)

    __repr__ = brief

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        return self.size

    def __call__(self, site: SiteContext) -> dist.Distribution:
        dim = _dimensions(self, site)
        if dim > 2 or not isinstance(site.fn, StandardNormal):
            raise expected(
                f"at most two standard normal columns at site {site.name!r}",
                f"{dim} of a {type(site.fn).__name__}",
                f"draw dgp.latent({site.name!r}, X, 1), or use guides.Normal() with ImportanceWeighted",
            )
        return site.fn

    def nodes(self, dim: int, dtype: Any) -> Nodes:
        """Points (K, dim) and log weights (K,) of the product rule."""
        return white_nodes(GaussHermite(self.size), dim, dtype)
