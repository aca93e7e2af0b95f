r"""``Likelihood``, the distribution of y with the last function integrated out.

Source: Hensman et al. (2015) for the bound on u; Salimbeni (2020), equations 1.25-1.27 and 2.14-2.18.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from numpyro_dgp._checks import require_finite
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.algebra.dependence import Dependence, dependence
from numpyro_dgp.algebra.quadrature import GaussHermite, MonteCarlo
from numpyro_dgp.model.closed_forms import closed_form
from numpyro_dgp.model.function_values import FunctionValues, MixedValues
from numpyro_dgp.model.joint_values import JointValues
from numpyro_dgp.model.mixing import log_marginal

__all__ = ["Likelihood"]


class _NoSites(Messenger):
    """Refuses sites inside a conditional, which runs again outside the program's handlers."""

    def process_message(self, msg: dict[str, Any]) -> None:
        raise ValueError(
            f"Likelihood: expected a conditional without sites of its own, got {msg['type']} {msg['name']!r}: draw or "
            "create it in the program before, and use its value"
        )


def _elementwise(d: dist.Distribution) -> dist.Distribution:
    """``d`` without ``to_event``: one distribution per number."""
    while isinstance(d, dist.Independent):
        d = d.base_dist
    return d


class Likelihood(dist.Distribution):
    r"""The distribution of observations y whose parameters are function values v = f(x).

    .. math:: \texttt{log\_prob}(y) = E_{p(v)}[\log p(y \mid v)]
              \qquad \texttt{log\_marginal}(y) = \log E_{p(v)}[p(y \mid v)]

    ``sample`` draws v, then y. With the default ``collapse="bound"``, exp(``log_prob``) is *not*
    normalised in y: it bounds the joint density of the full Gaussian process from below, so that inducing points
    stay a device of inference and do not change the model. NUTS, stock ELBOs and ``dgp.ELBO`` then all
    target one bound. Scores and LOO use ``log_marginal``, which is normalised.

    How the expectation is taken is read off ``conditional``: in closed form for ``Normal`` with a mean affine in
    v, and for ``Poisson``, ``Exponential`` and ``Gamma`` with a rate log-affine in v; by Gauss-Hermite quadrature when
    each number of y depends on its own number of v; by Monte Carlo otherwise.

    Args:
        f_x: what ``f(x)`` returned, batch shape (..., N) and event shape (P,) or ().
        conditional: from v, of the shape of a draw of ``f_x``, to the distribution of y. Any NumPyro
            distribution; ``to_event(1)`` when y has P columns.
        integrate: ``GaussHermite(n)`` or ``MonteCarlo(n)`` instead of the automatic choice.
        collapse: ``"bound"``, or ``"marginal"`` to make ``log_marginal`` the density: then the program is a proper
            model of its own, conditionally independent given u (FITC).

    Raises:
        ValueError: ``f_x`` is not the distribution ``f(x)``, ``conditional`` does not return a distribution,
            Gauss-Hermite for a conditional that mixes outputs, sites inside the conditional, or observations of the
            wrong shape.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_dgp.model.function_values import FunctionValues
        >>> f_x = FunctionValues(jnp.zeros(3), jnp.ones(3), event_dim=0)
        >>> y = Likelihood(f_x, lambda v: dist.Normal(v, 0.5))
        >>> print(y.log_prob(jnp.zeros(3)).round(3), y.log_marginal(jnp.zeros(3)).round(3))
        [-2.226 -2.226 -2.226] [-1.031 -1.031 -1.031]
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("f_x", "rule")
    pytree_aux_fields = ("conditional", "collapse", "factorised", "closed")

    def __init__(
        self,
        f_x: FunctionValues | JointValues,
        conditional: Callable[[Array], dist.Distribution],
        *,
        integrate: GaussHermite | MonteCarlo | None = None,
        collapse: Literal["bound", "marginal"] = "bound",
    ) -> None:
        if not isinstance(f_x, FunctionValues | JointValues):
            raise ValueError(
                f"Likelihood: expected the distribution f(x), got {type(f_x).__name__}: pass g(h) itself; for a draw "
                'v = numpyro.sample("v", g(h)) write numpyro.sample("y", dist.Normal(v, noise)) instead'
            )
        if collapse not in ("bound", "marginal"):
            raise ValueError(f'Likelihood: expected collapse="bound" or "marginal", got {collapse!r}')
        if isinstance(f_x, MixedValues) and collapse == "marginal":
            raise ValueError(
                'Likelihood: expected collapse="bound" for mixed values, got "marginal": their outputs are correlated; '
                "scores of them, Posterior.log_density, see that"
            )
        self.f_x = f_x.marginals() if isinstance(f_x, JointValues) else f_x
        self.conditional, self.collapse = conditional, collapse
        v = self.f_x.loc
        with _NoSites():
            example = conditional(v)
        if not isinstance(example, dist.Distribution):
            raise ValueError(
                f"Likelihood: expected conditional(v) to return a NumPyro distribution, got "
                f"{type(example).__name__}: for example lambda v: dist.Normal(v, 0.1)"
            )
        self.factorised = self._factorises(example)
        if isinstance(self.f_x, MixedValues) and not self.factorised:  # marginals of the mixtures do not suffice
            mixed = self.f_x
            self.f_x, self.conditional = mixed.functions, lambda g: conditional(mixed.mixed(g))
            v = self.f_x.loc
        self.closed = closed_form(self._numbers, v) if self.factorised else (None, None)
        self.rule = self._choose_rule(integrate)
        super().__init__(example.batch_shape, example.event_shape)

    def _numbers(self, v: Array) -> dist.Distribution:
        return _elementwise(self.conditional(v))

    def _factorises(self, example: dist.Distribution) -> bool:
        v, numbers = self.f_x.loc, _elementwise(example)
        if numbers.batch_shape != v.shape or numbers.event_shape != ():
            return False
        return max(dependence(lambda u: jax.tree.leaves(self._numbers(u)), v)) <= Dependence.ELEMENTWISE

    def _choose_rule(self, integrate: GaussHermite | MonteCarlo | None) -> GaussHermite | MonteCarlo:
        if isinstance(integrate, GaussHermite) and not self.factorised:
            raise ValueError(
                "Likelihood: expected a conditional that treats every output on its own for GaussHermite, got one "
                "that mixes outputs: use integrate=dgp.MonteCarlo(n)"
            )
        rule = integrate or (GaussHermite() if self.factorised else MonteCarlo())
        if isinstance(rule, MonteCarlo) and rule.key is None and numpyro.primitives._PYRO_STACK:
            return MonteCarlo(rule.size, numpyro.prng_key())
        return rule

    @property
    def support(self) -> constraints.Constraint:
        return self.conditional(self.f_x.loc).support

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        v_key, y_key = jax.random.split(key)
        v = self.f_x.sample(v_key, sample_shape)
        if not sample_shape:
            return self.conditional(v).sample(y_key)
        flat = v.reshape(-1, *v.shape[len(sample_shape) :])
        draws = jax.vmap(lambda k, u: self.conditional(u).sample(k))(jax.random.split(y_key, len(flat)), flat)
        return draws.reshape(*sample_shape, *draws.shape[1:])

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        value = self._observations(value)
        f = self.f_x
        if self.collapse == "bound":
            return self._expected_log_prob(value, f.loc, f.variance)
        if f.spread is None:
            return self._log_marginal(value, f.loc, f.conditional_variance)
        # q(u) stays outside the logarithm, so that the bound remains one.
        nodes = self.rule.nodes(f.loc, f.spread)
        return nodes.mean(jax.vmap(lambda m: self._log_marginal(value, m, f.conditional_variance))(nodes.points))

    def log_marginal(self, value: ArrayLike) -> Array:
        r"""The normalised log density :math:`\log E[p(y \mid v)]` of each observation."""
        y = self._observations(value)
        if isinstance(self.f_x, MixedValues):
            return log_marginal(self, y)
        return self._log_marginal(y, self.f_x.loc, self.f_x.variance)

    @property
    def mean(self) -> Array:
        return self._moments()[0]

    @property
    def variance(self) -> Array:
        first, second = self._moments()
        return second - jnp.square(first)

    def _moments(self) -> tuple[Array, Array]:
        nodes = self.rule.nodes(self.f_x.loc, self.f_x.variance)
        means, variances = jax.vmap(lambda v: (self.conditional(v).mean, self.conditional(v).variance))(nodes.points)
        centre = nodes.mean(means)
        return centre, nodes.mean(variances + jnp.square(means - centre)) + jnp.square(centre)

    def _expected_log_prob(self, y: Array, loc: Array, variance: Array) -> Array:
        own = getattr(self.conditional(loc), "expected_log_prob", None)
        if own is not None:
            return own(y, loc, variance)
        if self.closed[0] is not None:
            return self._sum_events(self.closed[0](y, loc, variance))
        nodes = self.rule.nodes(loc, variance)
        return self._sum_events(nodes.mean(self._log_probs(y, nodes.points)))

    def _log_marginal(self, y: Array, loc: Array, variance: Array) -> Array:
        own = getattr(self.conditional(loc), "log_marginal", None)
        if own is not None:
            return own(y, loc, variance)
        if self.closed[1] is not None:
            return self._sum_events(self.closed[1](y, loc, variance))
        nodes = self.rule.nodes(loc, variance)
        return self._sum_events(nodes.log_mean_exp(self._log_probs(y, nodes.points)))

    def _log_probs(self, y: Array, points: Array) -> Array:
        part = self._numbers if self.factorised else self.conditional
        return jax.vmap(lambda v: part(v).log_prob(y))(points)

    def _sum_events(self, values: Array) -> Array:
        if not self.factorised or not self.event_dim:
            return values
        return values.sum(tuple(range(-self.event_dim, 0)))

    def _observations(self, value: ArrayLike) -> Array:
        expected, shape = self.batch_shape + self.event_shape, np.shape(value)
        # Either may have batch dimensions of its own to the left: draws of y, or several values of v for one y.
        shared = min(len(expected), max(len(shape), self.event_dim + 1))
        if shape[-shared:] != expected[-shared:]:
            raise ValueError(
                f"Likelihood: expected observations y of shape {expected}, got {shape}: a scalar function "
                "(outputs=None) wants y of shape (N,); outputs=P wants (N, P) and conditional(...).to_event(1)"
            )
        require_finite("observations y", value, "drop the rows with missing values, or mask them")
        return jnp.asarray(value)
