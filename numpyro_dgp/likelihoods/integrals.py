r"""Strategies by which a likelihood integrates function values v out.

.. math:: E_{p(v)}[\log p(y \mid v)], \qquad \log E_{p(v)}[p(y \mid v)], \qquad E[y],\; E[y^2]

A *strategy* is a function of a :class:`Case`, the analysis of a conditional p(y | v). It returns an :class:`Integral`,
or ``None`` where it does not apply. A likelihood tries ``STRATEGIES`` in order, and takes each of the three quantities
from the first integral that provides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import expect_kind
from numpyro_dgp._typing import Array
from numpyro_dgp.likelihoods.around_peaks import around_peaks
from numpyro_dgp.likelihoods.closed_forms import ClosedForm, ClosedForms
from numpyro_dgp.likelihoods.conditionals import Reading
from numpyro_dgp.likelihoods.families import elementwise, follows
from numpyro_dgp.likelihoods.missing import of_entries, of_rows
from numpyro_dgp.likelihoods.outcomes import moments
from numpyro_dgp.likelihoods.several_conditionals import Given
from numpyro_dgp.likelihoods.tails import log_density
from numpyro_dgp.math.linalg import sum_event
from numpyro_dgp.math.quadrature import QuadratureRule

__all__ = ["STRATEGIES", "Case", "Integral", "Integrand", "Strategy", "integrals"]


class Case(NamedTuple):
    """The analysis of a conditional.

    Args:
        conditional: from v, all columns, to the distribution of y.
        reading: how y depends on v.
        closed: its closed forms, elementwise.
        given: of several functions, the closed forms given the others.
        own_methods: whether methods of the distribution of y take v: not those of several functions side by side.
        automatic: whether the program gave no rule, so that nodes may be placed where they are needed.
    """

    conditional: Callable[[Array], Any]
    reading: Reading
    closed: ClosedForms
    given: Given | None
    own_methods: bool = True
    automatic: bool = True


class Integrand(NamedTuple):
    """The arguments of an integral in addition to y and the Gaussians of v.

    Args:
        conditional: from v, all columns, to the distribution of y.
        rule: nodes or draws.
        observed: which entries of y are observed, or ``None`` for all.
        event_dim: of y.
        number_dim: event dimensions of one entry of y, that is of the distribution without ``to_event``.
    """

    conditional: Callable[[Array], Any]
    rule: QuadratureRule
    observed: Array | None
    event_dim: int
    number_dim: int

    def per_number(self, v: Array) -> Any:
        """The distribution of every entry of y."""
        return elementwise(self.conditional(v))

    def of_rows(self, values: Array) -> Array:
        """Values per y, zero where it is not observed."""
        return of_rows(values, self.observed, self.event_dim)

    def kept(self, values: Array) -> Array:
        """Values per entry of y, zero where it is not observed."""
        return of_rows(values, self.observed, self.number_dim)

    def total(self, values: Array) -> Array:
        """The sum over the observed entries of each y."""
        return sum_event(self.kept(values), self.event_dim - self.number_dim)

    def log_probs(self, y: Array, points: Array, variance: Array, form: ClosedForm | None = None) -> Array:
        """Log densities of every entry of y at points (K, ...) of v, or ``form`` in their place."""
        if form is None:
            return jax.vmap(lambda v: log_density(self.per_number(v), y))(points)
        return jax.vmap(lambda v: form(y, v, variance))(points)

    def log_probs_of_rows(self, y: Array, points: Array) -> Array:
        """Log densities of every y at points (K, ...) of v."""
        return jax.vmap(lambda v: of_entries(self.conditional(v), y, self.observed))(points)


Expectation = Callable[[Integrand, Array, Array, Array], Array]


class Integral(NamedTuple):
    """Expectations over v for each y; quantities that are not available are ``None``.

    Args:
        describe: its name in ``repr`` of the likelihood, from the integrand.
        expected_log_prob: E[log p(y | v)], from (the integrand, y, the means of v, their variances).
        log_marginal: log E[p(y | v)], likewise.
        moments: E[y] and the mean square of y, from (the integrand, the means of v, their variances).
        exact: whether it needs no rule.
        loss: whether ``expected_log_prob`` is another score in place of E[log p(y | v)], which bounds no evidence.
    """

    describe: Callable[[Integrand], str]
    expected_log_prob: Expectation | None = None
    log_marginal: Expectation | None = None
    moments: Callable[[Integrand, Array, Array], tuple[Array, Array]] | None = None
    exact: bool = False
    loss: bool = False


Strategy = Callable[[Case], Integral | None]


def integrals(case: Case, strategies: Iterable[Strategy] = ()) -> tuple[Integral, ...]:
    """The integrals for a conditional: of ``strategies``, and then those of this package.

    Raises:
        ValueError: a strategy that returns something else.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_dgp.functions.function_values import FunctionValues
        >>> from numpyro_dgp.likelihoods.conditionals import read
        >>> conditional = lambda v: dist.StudentT(4.0, v, 0.1)
        >>> reading = read(conditional, FunctionValues(jnp.zeros(3), jnp.ones(3), event_dim=0))
        >>> [i.moments is None for i in integrals(Case(conditional, reading, ClosedForms(), None))]  # adaptive, nodes
        [True, False]
    """
    found = [strategy(case) for strategy in (*strategies, *STRATEGIES)]
    for strategy, integral in zip(strategies, found, strict=False):
        expect_kind(
            integral,
            Integral | None,
            f"integrate={strategy!r} to return an Integral or None",
            "dgp.extend.Integral(describe, expected_log_prob, log_marginal)",
        )
    return tuple(integral for integral in found if integral is not None)


def own_methods(case: Case) -> Integral | None:
    """Methods ``expected_log_prob`` and ``log_marginal`` of the distribution of y itself."""

    def own(name: str, method: Callable[..., Array]) -> Expectation | None:
        if not (case.own_methods and follows(case.reading.example, name)):
            return None
        return lambda of, y, loc, variance: of.of_rows(method(of.conditional(loc), y, loc, variance))

    found = (
        own("expected_log_prob", lambda d, *args: d.expected_log_prob(*args)),
        own("log_marginal", lambda d, *args: d.log_marginal(*args)),
    )
    return Integral(lambda _: "own integral", *found, exact=True) if any(found) else None


def closed_form(case: Case) -> Integral | None:
    """Closed forms of every entry of y, :mod:`~numpyro_dgp.likelihoods.closed_forms`."""
    forms = _of_numbers(case.closed.expected_log_prob), _of_numbers(case.closed.log_marginal)
    return Integral(lambda _: "closed form", *forms, exact=True) if any(forms) else None


def conditionally_gaussian(case: Case) -> Integral | None:
    """A normal y of several functions, integrated over all of them."""
    given = case.given
    if given is None:
        return None
    in_all = given.moments

    def moments_of_y(of: Integrand, loc: Array, variance: Array) -> tuple[Array, Array]:
        assert in_all is not None
        mean, total = in_all(loc, variance)
        return mean, total + jnp.square(mean)  # E[y], Var[y] + E[y]^2

    return Integral(
        lambda _: "closed form",
        _of_numbers(given.altogether),
        None if in_all is None else _of_numbers(given.log_marginal),
        None if in_all is None else moments_of_y,
        exact=True,
    )


def around_location(case: Case) -> Integral | None:
    """Nodes around the v whose location is y, for log densities with a cusp or a steep slope there."""
    form = case.closed.around_location if case.automatic else None
    return None if form is None else Integral(lambda _: "48 nodes around the location", _of_numbers(form))


def adaptive(case: Case) -> Integral | None:
    """Adaptive quadrature of predictive densities, :mod:`~numpyro_dgp.likelihoods.around_peaks`."""
    peaks = around_peaks(case.conditional, case.reading, case.given) if case.automatic else None
    if peaks is None:
        return None
    factorised = case.reading.mixes is None

    def log_marginal(of: Integrand, y: Array, loc: Array, variance: Array) -> Array:
        rule = _at_means(of.rule, peaks.columns)
        form = partial(peaks.log_marginal, of.total)
        if factorised or rule.only_mean:
            found = form(y, loc, variance)
            return found if peaks.of_rows else of.total(found)
        return _log_mean_exp(of, y, rule, loc, variance, form)

    return Integral(lambda _: "nodes around the peak", log_marginal=log_marginal)


def by_rule(case: Case) -> Integral:
    """Quadrature or Monte Carlo over the functions without a closed form given the others."""
    given, factorised = case.given, case.reading.mixes is None
    columns = () if given is None else given.columns

    def describe(of: Integrand) -> str:
        if of.rule.random:
            return f"{of.rule.size} draws" + ("" if factorised else f": its conditional {case.reading.mixes}")
        return f"{_at_means(of.rule, columns).size} Gauss-Hermite nodes"

    def expected_log_prob(of: Integrand, y: Array, loc: Array, variance: Array) -> Array:
        rule = _at_means(of.rule, columns)
        nodes = rule.nodes(loc, variance)
        if rule.random and not factorised:
            return nodes.mean(of.log_probs_of_rows(y, nodes.points))
        form = given and given.expected_log_prob
        return of.total(nodes.mean(of.log_probs(y, nodes.points, variance, form)))  # sum_k w_k log p(y | v_k)

    def log_marginal(of: Integrand, y: Array, loc: Array, variance: Array) -> Array:
        rule = _at_means(of.rule, columns)
        if rule.random and not factorised:
            nodes = rule.nodes(loc, variance)
            return nodes.log_mean_exp(of.log_probs_of_rows(y, nodes.points))
        return _log_mean_exp(of, y, rule, loc, variance, given and given.log_marginal)  # log sum_k w_k p(y | v_k)

    def moments_of_y(of: Integrand, loc: Array, variance: Array) -> tuple[Array, Array]:
        nodes = of.rule.nodes(loc, variance)
        means, variances = jax.vmap(lambda v: moments(of.conditional(v)))(nodes.points)
        centre = nodes.mean(means)
        # E[y^2] = E[Var[y | v]] + Var[E[y | v]] + E[y]^2
        return centre, nodes.mean(variances + jnp.square(means - centre)) + jnp.square(centre)

    return Integral(describe, expected_log_prob, log_marginal, moments_of_y)


STRATEGIES: tuple[Strategy, ...] = (
    own_methods,
    closed_form,
    conditionally_gaussian,
    around_location,
    adaptive,
    by_rule,
)


def _of_numbers(form: ClosedForm | None) -> Expectation | None:
    """The sum of a closed form over the entries of each y."""
    return None if form is None else lambda of, y, loc, variance: of.total(form(y, loc, variance))


def _at_means(rule: QuadratureRule, columns: Iterable[range]) -> QuadratureRule:
    """A rule without the directions of ``columns``, which are integrated otherwise."""
    return reduce(lambda rule, each: rule.at_mean(each), columns, rule)


def _log_mean_exp(
    of: Integrand, y: Array, rule: QuadratureRule, loc: Array, variance: Array, form: ClosedForm | None
) -> Array:
    """log E[p(y | v)] over the nodes of a rule, for every entry of y, or jointly for entries that share a direction."""
    nodes = rule.nodes(loc, variance)
    log_probs = of.log_probs(y, nodes.points, variance, form)
    return rule.log_mean_exp(nodes, log_probs, of.event_dim - of.number_dim, of.kept)
