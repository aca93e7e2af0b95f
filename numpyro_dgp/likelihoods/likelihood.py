r"""``Likelihood``, the distribution of y with the last function integrated out.

Source: Hensman et al. (2015) for the bound on u; Salimbeni (2020), equations 1.25-1.27 and 2.14-2.18.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._checks import MISSING, expect, expect_kind, expected, require_finite
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.functions.function_values import FunctionValues, ProcessValues
from numpyro_dgp.functions.joint_values import JointValues
from numpyro_dgp.functions.open_plates import require_rows_of_plates
from numpyro_dgp.functions.site_distribution import SiteDistribution
from numpyro_dgp.likelihoods.closed_forms import Form, closed_forms, normal_form
from numpyro_dgp.likelihoods.conditionals import choose_rule, read, require_arguments, with_key
from numpyro_dgp.likelihoods.families import elementwise
from numpyro_dgp.likelihoods.integrals import Case, Integral, Integrand, Strategy, closed_form, integrals
from numpyro_dgp.likelihoods.missing import are_entries, observed_entries, of_entries, with_entries
from numpyro_dgp.likelihoods.observed_only import ObservedOnly
from numpyro_dgp.likelihoods.outcomes import value_range
from numpyro_dgp.likelihoods.several_conditionals import given_others
from numpyro_dgp.likelihoods.stacked_values import side_by_side
from numpyro_dgp.math.quadrature import GaussHermite, MonteCarlo

__all__ = ["Likelihood", "require_site"]


def require_site(f_x: Any) -> None:
    """Raise if a likelihood would integrate values of a process without v over their prior, whatever y is.

    Raises:
        ValueError: such values.
    """
    expect(
        not f_x.of_prior,
        "values of a function with inducing points",
        "those of one without (inducing=None or dgp.Neighbours), integrated over their prior",
        'give the layer dgp.Points(X), or draw v = numpyro.sample("v", f(X)) outside the plate, y given v inside',
    )


class Likelihood(SiteDistribution):
    r"""The distribution of observations y whose parameters are function values v = f(x).

    .. math:: \texttt{log\_prob}(y) = E_{p(v)}[\log p(y \mid v)]
              \qquad \texttt{log\_marginal}(y) = \log E_{p(v)}[p(y \mid v)]

    ``sample`` draws v, then y. With the default ``collapse="bound"``, exp(``log_prob``) is *not*
    normalised in y: it bounds the joint density of the full Gaussian process from below, so that inducing points
    belong to inference and do not change the model. NUTS, NumPyro's ELBOs and ``dgp.ELBO`` then all have the same
    target. Scores and LOO use ``log_marginal``, which is normalised.

    The method of integration is chosen from ``conditional``, and ``repr`` shows it:

    - the distribution itself, if it has a method ``expected_log_prob(y, mean, variance)``, as :class:`RobustMax`;
    - a closed form for ``Normal``, ``LogNormal``, ``Laplace`` and ``VonMises`` with a location affine in v; for
      ``Poisson``, ``Exponential`` and ``Gamma`` with a rate log-affine in v; for ``Weibull`` with such a scale; for
      right-censored ``Exponential`` and ``Weibull``; except for subclasses that override ``log_prob``;
    - Gauss-Hermite quadrature, if each entry of y depends on at most three entries of v;
    - Monte Carlo otherwise, with a warning.

    Parameters of y may depend on several functions, ``Likelihood((f(x), g(x)), lambda v, s: dist.Normal(v,
    jnp.exp(s)))``. ``Normal`` has a closed form if its mean is affine in some functions, such as their sum, and its
    scale is constant or log-affine in another one; for any other scale that function alone is integrated over nodes.
    The tuple may contain the same function at several inputs, as in a pairwise-preference model,
    ``Likelihood((f(a), f(b)), lambda v, w: dist.Bernoulli(logits=v - w))``, or its derivatives and linear functionals;
    their correlations are taken into account.

    Args:
        f_x: what ``f(x)`` returned, batch shape (..., N) and event shape (P,) or (); or several of them in a tuple.
        conditional: from v, of the shape of a draw of ``f_x``, to the distribution of y; of several functions, from
            the values of each. Any NumPyro distribution works, with ``to_event(1)`` when y has P columns. The function
            is called several times and must be pure: draw random numbers outside of it.
        integrate: ``GaussHermite(n)``, n nodes per entry of v, or ``MonteCarlo(n)`` where there is no closed form. By
            default 20 nodes for one entry of v, 15 x 15 for two, 8 x 8 x 8 for three, 20 draws for more, and 48 nodes
            around the location for ``StudentT``, ``Cauchy`` and the like. ``log_marginal`` by default uses adaptive
            quadrature over one or two entries of v, because p(y | v) can be much narrower than p(v): error 1e-6 for
            one. Two entries without a closed form (``Gamma``, say) take about 50 000 evaluations of the density;
            ``GaussHermite(15)`` takes 225 and is enough where p(y | v) is as wide as p(v). A closed form of your own is
            a ``dgp.extend.Form``, another integral a function that returns a ``dgp.extend.Integral``
            (``docs/extending.md``); both come before those of this package. ``dgp.likelihoods.Robust(beta=1.5)`` puts a
            robust loss in place of the log density of a ``Normal``.
        collapse: ``"bound"``, or ``"marginal"`` to make ``log_marginal`` the density: then the program is another
            model, conditionally independent given u (FITC).
        observed: which entries of y are observed: booleans of the shape of y, or one per row. The others are masked in
            densities, whatever their values, and predicted like all entries. ``dgp.likelihoods.missing(data)`` returns
            y and this mask for data with gaps. ``None`` for all.

    Raises:
        ValueError: ``f_x`` is not the distribution ``f(x)``, or is that of an exact process; several functions at
            different rows; ``conditional`` does not return a distribution, combines rows of v (``v - v.mean()``) or has
            sites; Gauss-Hermite for a conditional that mixes more than three entries of v; observations of the wrong
            shape or out of range (labels, counts); ``observed`` of another shape, or for single entries of a
            distribution with one density per row, such as ``MultivariateNormal``; the mean or variance of a
            conditional that has none.

    Warns:
        UserWarning: the expectation uses Monte Carlo although ``integrate`` was not given; once per line of a program.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_dgp.functions.function_values import FunctionValues
        >>> from numpyro_dgp import Likelihood
        >>> from numpyro_dgp.likelihoods import MonteCarlo
        >>> f_x = FunctionValues(jnp.zeros(3), jnp.ones(3), event_dim=0)
        >>> y = Likelihood(f_x, lambda v: dist.Normal(v, 0.5))
        >>> print(y.log_prob(jnp.zeros(3)).round(3), y.log_marginal(jnp.zeros(3)).round(3))
        [-2.226 -2.226 -2.226] [-1.031 -1.031 -1.031]
        >>> y, Likelihood(f_x, lambda v: dist.StudentT(4.0, v, 0.5))
        (Likelihood(Normal, closed form), Likelihood(StudentT, 48 nodes around the location))
        >>> classes = FunctionValues(jnp.zeros((3, 4)), jnp.ones((3, 4)))
        >>> Likelihood(classes, lambda v: dist.Categorical(logits=v), integrate=MonteCarlo(50))
        Likelihood(Categorical, 50 draws: its conditional mixes the 4 outputs of f)
    """

    arg_constraints: dict[str, Any] = {}
    site_kind = "observed"
    pytree_data_fields = ("f_x", "rule", "observed")
    pytree_aux_fields = (
        "conditional",
        "collapse",
        "family",
        "mixes",
        "normal",
        "integrals",
        "number_dim",
        "outcomes",
    )

    def __init__(
        self,
        f_x: FunctionValues | JointValues | Sequence[FunctionValues | JointValues],
        conditional: Callable[..., dist.Distribution],
        *,
        integrate: GaussHermite | MonteCarlo | Form | Strategy | None = None,
        collapse: Literal["bound", "marginal"] = "bound",
        observed: ArrayLike | None = None,
    ) -> None:
        several = f_x if isinstance(f_x, tuple | list) else (f_x,)
        for values in several or (None,):
            expect_kind(
                values,
                FunctionValues | ProcessValues,
                "the distribution f(x)",
                'pass g(h) itself, or with a draw write numpyro.sample("y", dist.Normal(v, noise))',
            )
            require_site(values)
        expect(collapse in ("bound", "marginal"), 'collapse="bound" or "marginal"', repr(collapse))
        require_arguments(conditional, len(several))
        self.f_x = side_by_side(several)  # type: ignore[arg-type]
        expect(
            not self.f_x.correlated_outputs or collapse != "marginal",
            'collapse="bound" for mixed values',
            '"marginal"',
            "their outputs are correlated; scores of them, Posterior.log_density, see that",
        )
        conditional = self.f_x.of_innovations(conditional)
        reading = read(conditional, self.f_x)
        example, self.family, self.mixes = reading.example, reading.family, reading.mixes
        self.conditional, self.collapse = self.f_x.of_columns(conditional), collapse
        self.outcomes = value_range(example)
        self.observed = None if observed is None else observed_entries(observed, example)
        alone = len(several) == 1
        if self.f_x.correlated_outputs and not self.factorised:  # the marginals of the mixtures are not enough
            alone = False
            self.f_x, self.conditional = self.f_x.unmixed(conditional)
            reading = reading._replace(grid=None)
        elif collapse == "marginal" and self.f_x.belief_variance is not None:  # a grid within a grid
            reading = reading._replace(grid=None)
        numbers = elementwise(example)
        self.number_dim = numbers.event_dim
        rows = (integrate,) if isinstance(integrate, Form) else ()
        strategies: tuple[Strategy, ...] = (closed_form,) if rows else ()  # before methods of the distribution
        if callable(integrate) and not isinstance(integrate, type):
            strategies = (integrate,)
        rule: Any = None if rows or strategies else integrate
        closed, given = closed_forms(self.per_number, numbers, reading.kinds, rows), None
        if len(several) > 1:
            apart = lambda *v: elementwise(conditional(*v))  # noqa: E731
            given = given_others(apart, numbers, reading.parts, self.f_x.split, self.f_x.loc)
        self.normal = closed.normal
        case = Case(self.conditional, reading, closed, given, own_methods=alone, automatic=rule is None)
        self.integrals = integrals(case, strategies)
        expect(
            collapse == "bound" or not self._first("expected_log_prob").loss,
            'collapse="bound" with a loss in place of the log density',
            '"marginal"',
            "leave collapse or integrate out",
        )
        self.rule = choose_rule(reading, rule, exact=self._integral.exact and self._belief_variance is None)
        require_rows_of_plates(example.batch_shape)
        super().__init__(example.batch_shape, example.event_shape)

    @property
    def function_values(self) -> FunctionValues:
        return self.f_x

    @property
    def factorised(self) -> bool:
        """Whether each entry of y depends on its own entry of v; if not, ``mixes`` is the reason."""
        return self.mixes is None

    def _first(self, quantity: str) -> Any:
        """The first integral that provides a quantity."""
        return next(integral for integral in self.integrals if getattr(integral, quantity) is not None)

    @property
    def _integral(self) -> Integral:
        """That of ``log_prob``."""
        return self._first("expected_log_prob" if self.collapse == "bound" else "log_marginal")

    @property
    def is_loss(self) -> bool:
        """Whether ``log_prob`` is another score than the log density, which bounds no evidence."""
        return self._integral.loss

    @property
    def _belief_variance(self) -> Array | None:
        """Variances of a belief that ``log_prob`` integrates outside of the logarithm by quadrature."""
        return None if self.collapse == "bound" else self.f_x.belief_variance

    @property
    def _integrand(self) -> Integrand:
        return Integrand(self.conditional, self.rule, self.observed, self.event_dim, self.number_dim)

    def __repr__(self) -> str:
        integral = self.integrals[-1] if self._belief_variance is not None and self._integral.exact else self._integral
        return f"Likelihood({self.family}, {integral.describe(self._integrand)})"

    def per_number(self, v: Array) -> dist.Distribution:
        """The conditional without ``to_event``: where it is ``factorised``, a distribution per entry of v."""
        return elementwise(self.conditional(v))

    def normal_form(self) -> tuple[Array, Array, Array] | None:
        """Slope, offset and scale where ``log_prob`` is that of ``Normal(slope * v + offset, scale)``, else ``None``.

        They broadcast against v.
        """
        return None if self.normal is None or self.is_loss else normal_form(self.per_number, self.f_x.loc)

    def mask(self, mask: Any) -> dist.Distribution:
        """The distribution with entries of y masked, by ``mask`` of the shape of y, or rows.

        Raises:
            ValueError: a mask of numbers; NumPyro would treat every number except zero, NaN included, as True.
        """
        dtype = np.dtype(getattr(mask, "dtype", bool))
        expect(
            dtype.kind == "b",
            "a mask of booleans, True where y counts",
            dtype,
            "mask > 0.5 of one of 0 and 1; weights of rows are numpyro.handlers.scale(scale=weights)",
        )
        if not are_entries(mask, self.batch_shape, self.event_shape):
            return super().mask(mask)
        return self._observing(mask if self.observed is None else jnp.logical_and(mask, self.observed))

    def everywhere(self) -> Likelihood:
        """The distribution of all entries of y, as if all were observed."""
        return self._observing(None)

    def _observing(self, observed: ArrayLike | None) -> Likelihood:
        found = copy.copy(self)
        found.observed = None if observed is None else jnp.asarray(observed, bool)
        return found

    @property
    def support(self) -> constraints.Constraint:
        support = self.conditional(self.f_x.loc).support
        return ObservedOnly(support, "Likelihood") if self.collapse == "bound" else support

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
        if f.belief_variance is None:
            return self._log_marginal(value, f.loc, f.conditional_variance)
        # The expectation over q(u) is outside the logarithm: inside, the result would not be a lower bound.
        nodes = self.rule.nodes(f.loc, f.belief_variance)  # means given u, N(loc, belief_variance)
        return nodes.mean(jax.vmap(lambda m: self._log_marginal(value, m, f.conditional_variance))(nodes.points))

    def log_marginal(self, value: ArrayLike) -> Array:
        r"""The normalised log density :math:`\log E[p(y \mid v)]` of each observation.

        For mixed values, ``f(x).mix(W)``, it accounts for the correlations between outputs: in closed form for
        ``Normal``, by draws of the functions for other conditionals.
        """
        y, f = self._observations(value), self.f_x
        if not f.correlated_outputs:
            return self._log_marginal(y, f.loc, f.variance)
        if self.normal is not None:
            return f.log_prob_observed(y, *self.normal(f.loc), self.observed)
        functions, conditional = f.unmixed(self.conditional)
        nodes = with_key(self.rule if self.rule.random else MonteCarlo()).nodes(functions.loc, functions.variance)
        densities = jax.vmap(lambda g: of_entries(conditional(g), y, self.observed))(nodes.points)
        return nodes.log_mean_exp(densities)  # log sum_s p(y | W g_s) / S

    @property
    def mean(self) -> Array:
        return self._moments()[0]

    @property
    def variance(self) -> Array:
        first, second = self._moments()
        return second - jnp.square(first)  # E[y^2] - E[y]^2

    def _moments(self) -> tuple[Array, Array]:
        """Expectations of y and of its square."""
        return self._first("moments").moments(self._integrand, self.f_x.loc, self.f_x.variance)

    def _expected_log_prob(self, y: Array, loc: Array, variance: Array) -> Array:
        return self._first("expected_log_prob").expected_log_prob(self._integrand, y, loc, variance)

    def _log_marginal(self, y: Array, loc: Array, variance: Array) -> Array:
        return self._first("log_marginal").log_marginal(self._integrand, y, loc, variance)

    def require_shape(self, shape: tuple[int, ...]) -> None:
        """Raise unless observations have the shape of draws, except for batch dimensions to the left.

        Args:
            shape: of the observations.

        Raises:
            ValueError: another shape.
        """
        wanted = self.batch_shape + self.event_shape
        # y and v may each have additional batch dimensions to the left: draws of y, or several values of v for one y.
        shared = min(len(wanted), max(len(shape), self.event_dim + 1))
        if shape[-shared:] != wanted[-shared:]:
            several = not self.event_dim and len(wanted) > 1 and wanted[-1] == 1 and shape[:-1] == wanted[:-1]
            advice = (
                "for several y of one f(x) put their plate left of that of the rows, numpyro.plate(name, R, dim=-2), "
                "with f(x) of shape (N,) and y of shape (R, N)"
                if several
                else "a scalar function (outputs=None) wants y of shape (N,); outputs=P wants (N, P) and "
                "conditional(...).to_event(1)"
            )
            raise expected(f"observations y of shape {wanted}", shape, advice)

    def complete(self, value: ArrayLike) -> ArrayLike:
        """Observations with a possible value in place of each masked one."""
        return value if self.observed is None else with_entries(value, self.observed, self.conditional(self.f_x.loc))

    def _observations(self, value: ArrayLike) -> Array:
        self.require_shape(np.shape(value))
        value = self.complete(value)
        require_finite("observations y", value, MISSING)
        expect(not jnp.iscomplexobj(value), "real observations y", "complex numbers", "write y.real, or |y|")
        self.outcomes.require(value)
        if self.family == "Categorical" and not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise expected("labels y as integers", jnp.result_type(value), "write y.astype(int)")
        return jnp.asarray(value)
