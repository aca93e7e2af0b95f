"""A rule for inducing values with a non-Gaussian posterior: a normalising flow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.example_libraries import stax
from numpyro.distributions import constraints
from numpyro.distributions.flows import InverseAutoregressiveTransform
from numpyro.distributions.transforms import ComposeTransform, Transform
from numpyro.nn import AutoregressiveNN

from numpyro_dgp._checks import expect, expect_kind, expected
from numpyro_dgp._fields import count, kind_of
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.weights import InducingPrior
from numpyro_dgp.guides.rules.inducing_values import Diagonal, Full
from numpyro_dgp.guides.rules.joint_inducing import MarkovInducing
from numpyro_dgp.guides.rules.low_rank_inducing import LowRank
from numpyro_dgp.guides.rules.rule import Rule, SiteContext, require_site
from numpyro_dgp.guides.rules.strata import Flowed

__all__ = ["Flow", "SinhArcsinh"]

Base = Full | Diagonal | LowRank | MarkovInducing


class SinhArcsinh(Transform):
    r"""Skewness :math:`\gamma` and tails :math:`\delta > 0` of single numbers:
    :math:`T(\epsilon) = \sinh(\delta \operatorname{arcsinh}(\epsilon) + \gamma)`.

    At :math:`\gamma = 0`, :math:`\delta = 1` it is the identity.

    Args:
        skewness: :math:`\gamma` (n,).
        log_tails: :math:`\log \delta` (n,).

    Source: Jones and Pewsey (2009).
    """

    domain = constraints.real_vector
    codomain = constraints.real_vector

    def __init__(self, skewness: Array, log_tails: Array) -> None:
        self.skewness, self.log_tails = skewness, log_tails

    def __call__(self, x: Array) -> Array:
        return jnp.sinh(self._angle(x))

    def _inverse(self, y: Array) -> Array:
        # sinh((arcsinh(y) - gamma) / delta)
        return jnp.sinh((jnp.arcsinh(y) - self.skewness) * jnp.exp(-self.log_tails))

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        # T'(e) = delta sqrt((1 + y^2) / (1 + e^2))
        log_slope = self.log_tails + 0.5 * (jnp.log1p(jnp.square(y)) - jnp.log1p(jnp.square(x)))
        return log_slope.sum(-1)

    def _angle(self, x: Array) -> Array:
        return jnp.exp(self.log_tails) * jnp.arcsinh(x) + self.skewness

    def tree_flatten(self) -> Any:
        return (self.skewness, self.log_tails), (("skewness", "log_tails"), {})


@dataclasses.dataclass(frozen=True)
class Flow(Rule):
    r"""A normalising flow: a Gaussian whose standard normal numbers are first mapped by a fitted bijection; joint over
    outputs.

    .. math:: v = m + R\, T(\epsilon), \qquad
              \log q(v) = \log N(\epsilon; 0, I) - \log\lvert\det T'(\epsilon)\rvert - \log\lvert\det R\rvert

    T starts as the identity, so that q(v) starts as ``base``, ``Full()`` by default. Each of its ``depth`` blocks bends
    single numbers (a sinh-arcsinh map: skewness, tails) and then shifts and
    scales each number by a network of the numbers before it (NumPyro's inverse autoregressive flow; the order is
    reversed from block to block). It is continuous and starts from one Gaussian, and separates modes badly: for
    these there is :class:`MixtureOfGaussians`.

    Nothing is integrated out: v is drawn once for all data, and the divergence is log q - log p of the draw. Gradients
    are noisier than those of a Gaussian q(v); ``antithetic=True`` evaluates the bound at :math:`\epsilon` and
    :math:`-\epsilon`, ``ELBO(num_particles=...)`` at more. Natural gradients need a Gaussian.

    Hidden units do not get a gradient in the very first step, because the last weights of the networks start at zero.

    Args:
        bijector: a function from the number n of values to T, a ``numpyro.distributions.transforms.Transform`` of
            vectors (n,), or of single numbers. It runs inside the guide, so that it may call ``numpyro.param``. The
            transform needs an inverse where densities of given values are asked for (``dgp.diagnostics.to_arviz``). By
            default the blocks above.
        base: rule of the Gaussian: ``Full()``, ``Diagonal()``, ``LowRank(...)``, or ``MarkovInducing(below=...)`` for
            means that depend on the draw of the layer below.
        depth: number of blocks.
        hidden: units of a network's hidden layer; by default twice the number of values, at least 8.
        antithetic: evaluate each draw with its mirror image, at twice the cost.

    Raises:
        ValueError: a depth or a number of units that is not a positive integer, another base, a bijector that is no
            function or does not return a transform of all real numbers, or a site that does not hold inducing values.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model, inducing=dgp.guides.Flow(antithetic=True))
        >>> shapes = dgp.testing.parameter_shapes(guide, X, y)
        >>> shapes["f_auto_flow_0_skewness"], shapes["f_auto_flow_0_0"]  # a bend of each number; a network
        ((5,), (5, 10))

    Source: Rezende and Mohamed (2015); Kingma et al. (2016), for the autoregressive part.
    """

    bijector: Callable[[int], Transform] | None = None
    base: Base = kind_of(Full, Diagonal, LowRank, MarkovInducing)
    depth: int = count(2)
    hidden: int | None = count(None, "50")
    antithetic: bool = False

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(
            self.bijector is None or callable(self.bijector),
            "bijector to be a function of the number of values",
            type(self.bijector).__name__,
            "lambda n: transform, or leave it out",
        )

    def follows(self, name: str, order: tuple[str, ...]) -> str | None:
        return self.base.follows(name, order)

    def __call__(self, site: SiteContext) -> Flowed:
        require_site(InducingPrior, self, site, "inducing values")
        base, size = self.base(site), math.prod(site.fn.event_shape)
        transform = self._blocks(site, size) if self.bijector is None else self.bijector(size)
        expect_kind(transform, Transform, "the bijector to return a numpyro.distributions.transforms.Transform")
        domain: Any = transform.domain
        while isinstance(domain, type(constraints.real_vector)):
            domain = domain.base_constraint
        if not isinstance(domain, type(constraints.real)):
            raise expected(
                "the bijector to return a transform of all real numbers",
                f"{type(transform).__name__} of {transform.domain}",
                "begin with a positive one, ComposeTransform([ExpTransform(), ...])",
            )
        return Flowed(base, transform, (1, -1) if self.antithetic else (1,))

    def _blocks(self, site: SiteContext, size: int) -> Transform:
        parts: list[Transform] = []
        zeros = lambda: jnp.zeros(size, site.fn.dtype)  # noqa: E731
        for block in range(self.depth):
            bend = (site.param(f"flow_{block}_{name}", zeros) for name in ("skewness", "log_tails"))
            parts.append(SinhArcsinh(*bend))
            if size > 1:
                parts.append(InverseAutoregressiveTransform(self._network(site, block, size)))
        return ComposeTransform(parts)

    def _network(self, site: SiteContext, block: int, size: int) -> Callable[[Array], Any]:
        """From vectors (..., n) to shifts and logarithms of scales, both zero at the start."""
        order = jnp.arange(size)[:: -1 if block % 2 else 1]
        units = max(2 * size, 8) if self.hidden is None else self.hidden
        init, apply = AutoregressiveNN(size, [units], permutation=order, nonlinearity=stax.Tanh)
        leaves, tree = jax.tree.flatten(init(jax.random.key(block), (size,))[1])
        last = len(leaves) - 2  # the weights and the bias of the last layer
        starts = [leaf.astype(site.fn.dtype) * (number < last) for number, leaf in enumerate(leaves)]
        found = [site.param(f"flow_{block}_{number}", partial(jnp.asarray, leaf)) for number, leaf in enumerate(starts)]

        def network(x: Array) -> Any:
            with jax.default_matmul_precision("highest"):
                return apply(jax.tree.unflatten(tree, found), x)

        return network
