"""The guide in which q(v) of every layer is at its optimum, given all other posteriors and parameters."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_dgp._checks import expect, expected, is_concrete
from numpyro_dgp._data import indexable, own
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import ALL_ROWS, WHOLE_DATA, require
from numpyro_dgp.analysis.observations_apart import require_observations_apart
from numpyro_dgp.analysis.program import inspect_program
from numpyro_dgp.analysis.sites import Message, is_row_by_row, site_kind, unwrap
from numpyro_dgp.functions.function_values import follows
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.guides.collapsed.at_means import matrix_belief, run_at_means, values_of_projections
from numpyro_dgp.guides.collapsed.following_layers import FollowedLayer, closed_form, followed_layers
from numpyro_dgp.guides.collapsed.gaussian_uses import (
    Gaussian,
    Use,
    is_projected,
    optimal_belief,
    with_conditional_variance,
)
from numpyro_dgp.guides.guide import INIT, Guide
from numpyro_dgp.guides.handler import GuideConfig, GuideHandler
from numpyro_dgp.guides.record import SiteRecord, attach, record_of
from numpyro_dgp.guides.rules.by_kind import Other, Rules
from numpyro_dgp.guides.rules.model_conditional import Prior, Propagate
from numpyro_dgp.guides.rules.pointwise import Normal
from numpyro_dgp.guides.rules.rule import Rule
from numpyro_dgp.guides.rules.structured import LinearValues
from numpyro_dgp.kernels.expectations import Integrate

__all__ = ["Collapsed"]


class _Solution(NamedTuple):
    """The optimum for one set of data."""

    beliefs: dict[str, Belief]
    followed: dict[str, FollowedLayer]
    bound: Array
    sites: tuple[str, ...]
    drawn: dict[str, Any]
    kinds: dict[str, str]


class Collapsed(Guide):
    r"""Every q(v) at its optimum in closed form, with Gaussian posteriors of hidden layers and latents.

    .. math:: q = \prod_\ell q^*(v^\ell) \prod_n N(h^\ell_n;\, t^\ell_n, \mathrm{diag}\, \Omega^\ell_n)

    With one layer this is Titsias' bound, with Gaussian latents the Bayesian GPLVM, with hidden layers (which need
    process noise, ``f(x, noise=s)``) the mean-field deep bound. ``dgp.ELBO()`` evaluates it without drawing hidden
    layers, so that ``dgp.optim.minimize`` can be used; only hyperparameters with a variational distribution are drawn.
    It needs all data at once, a Gaussian likelihood, and layers whose input columns are data, latents or hidden values.

    ``hidden=GivenInducing()`` gives hidden layers :math:`q(h_n \mid v) = N(T_n v + t_n, \Omega_n)` with the weights T
    at their optimum too, and :math:`\Omega` at most the variance of the process noise: as many parameters, and the
    larger bound. ``JointOutputs()`` is the same with a dense :math:`\Omega_n` (P, P) and one q(v) for all outputs of a
    layer together, which the layer above sees through the whole covariance of :math:`h_n`; its start ``scale`` is
    relative to the process noise. ``GivenBelow()`` is
    :math:`q(h_{np} \mid x_n) = N(G_{np}^\top x_n + t_{np}, \Omega_{np})` with parameters G. The optimal q(v) then
    has :math:`\langle h\, a(x) \rangle` in place of :math:`\langle h \rangle \langle a(x) \rangle`. Where the inputs x
    are data it is ``Normal()``, with more parameters.

    Values of a ``dgp.projection`` of the data are Gaussian inputs too, under a Gaussian q of its matrix with
    parameters, ``sites={"A": Full()}`` or ``Diagonal()``.

    Like the likelihood, a hidden layer enters by :math:`E[\log N(h; f(x), s^2)]` and not by the larger
    :math:`\log p(h \mid v, x)` that other guides use. Where the process has variance given its inducing values, the
    bound is lower than theirs: the price of the closed form above other hidden layers. Where the inputs of a layer are
    data it need not be paid: ``hidden_density="marginal"`` takes :math:`\log p(h \mid v, x)` there, in which
    :math:`k(x, x) - a a^\top + s^2` replaces :math:`s^2`. The bound is never lower for it, at the same cost.

    Inducing values have no parameters: at new inputs their optimum is computed again from the data of the fit, which
    :meth:`on` binds to the guide: ``dgp.Posterior(model, guide.on(X, y), params)``.

    Args:
        model: the program.
        hidden: rule for hidden values, ``Normal()`` (default), ``Delta()``, ``GivenBelow()``, ``GivenInducing()`` or
            ``JointOutputs()``; of the last two with their default weights.
        hidden_density: how hidden layers at known inputs enter: ``"bound"`` (default), or ``"marginal"`` for
            :math:`\log p(h \mid v, x)`.
        latent: rule for latents per datum; ``Normal()`` by default.
        other: rule for hyperparameters, ``Delta()`` (default) or ``Normal()``, or a NumPyro autoguide class.
        integrate: how expectations of kernels are taken: ``None`` for closed forms (RBF, Linear, Polynomial, Constant,
            those of a linear map, sums and products), ``GaussHermite(n)`` or ``MonteCarlo(n, key)`` for any kernel.
        sites: rules for single sites by name.
        prefix: part of the names of parameters.
        init_loc_fn: NumPyro init strategy for sites that are not function values.

    Raises:
        ValueError: a rule for hidden values without a closed form; when called, predictions without data, or a program
            outside this class: minibatches, another likelihood, mixed outputs, a hidden layer without process noise,
            ``GivenInducing()`` for a function that is used twice, inputs computed from Gaussian values, a projection of
            such values, without a rule for its matrix or used twice, or a layer that depends on the inducing values of
            another, ``dgp.Points(f(Z).loc)``.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model)
        >>> svi = numpyro.infer.SVI(model, guide, dgp.optim.NaturalGradient(guide, 1.0, optax.sgd(0.0)), dgp.ELBO())
        >>> loss = svi.run(jax.random.key(0), 2, X, y, progress_bar=False).losses[1]  # the optimum of q(v)
        >>> collapsed = dgp.ELBO().loss(jax.random.key(0), {}, model, dgp.guides.Collapsed(model), X, y)
        >>> print(f"{loss:.2f} {collapsed:.2f}")
        -18.30 -18.30

    Source: Titsias (2009), Titsias and Lawrence (2010); Chamberlin (2016), sections 2.5, 4.3, 4.4 and 4.6; for
    projections Titsias and Lazaro-Gredilla (2013).
    """

    defaults = Rules(inducing=Prior(), hidden=Normal())
    is_collapsed = True
    data: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        hidden: Rule | None = None,
        hidden_density: Literal["bound", "marginal"] = "bound",
        latent: Rule | None = None,
        other: Other | None = None,
        integrate: Integrate = None,
        sites: Mapping[str, Rule] | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = INIT,
    ) -> None:
        expect(
            hidden_density in ("bound", "marginal"),
            'hidden_density="bound" or "marginal"',
            repr(hidden_density),
            'the default is "bound"',
        )
        rules: Any = {"hidden": hidden, "latent": latent, "other": other, "sites": sites}
        super().__init__(model, **rules, prefix=prefix, init_loc_fn=init_loc_fn)
        by_kind = self.config.rules._replace(hidden=closed_form("hidden", self.config.rules.hidden))
        by_name = {name: closed_form(name, rule) for name, rule in self.config.sites.items()}
        self.config = dataclasses.replace(self.config, rules=by_kind, sites=by_name)
        self.integrate, self.hidden_density = integrate, hidden_density

    def on(self, *args: Any, **kwargs: Any) -> Collapsed:
        """The guide with the data that q(v) is computed from: ``dgp.Posterior(model, guide.on(X, y), params)``.

        It keeps copies of NumPy arrays: what is written to them later does not change predictions.

        Args:
            *args: arguments of the model, observations included.
            **kwargs: its keyword arguments.
        """
        require_observations_apart(self.model, args, kwargs)
        bound = copy.copy(self)
        bound.data = indexable(own((args, kwargs)))
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Draw every latent site of ``model(*args, **kwargs)``; returns ``{name: value}``."""
        args, kwargs = indexable((args, kwargs))
        on_data = not self.predicted and bool(inspect_program(self.model, args, kwargs).observed_plates)
        data = (args, kwargs) if on_data else self.data
        if data is None:
            raise expected(
                "the data that q(v) is computed from",
                "a call without observations",
                "bind them for predictions, dgp.Posterior(model, guide.on(X, y), params)",
            )
        companion = {} if self.companion is None else self.companion(*data[0], **data[1])
        solution = self._solve(*data, companion)
        if on_data:
            _require_resolved(solution.bound)
            # Objectives leave out the sites that the integrated part of the bound accounts for.
            record = SiteRecord("", "other", integrates=solution.sites)
            with each_message(lambda msg: attach(msg, record)):
                numpyro.deterministic(f"_{self.config.prefix}_integrated", solution.bound)
        with _Optimal(self.config, args, kwargs, companion, self.predicted, solution, on_data) as values:
            self.model(*args, **kwargs)
        return values

    def _solve(self, args: tuple[Any, ...], kwargs: dict[str, Any], companion: dict[str, Any]) -> _Solution:
        """Run the other rules and the model on data and maximise over every q(v)."""
        key = numpyro.prng_key()
        hidden = handlers.block(hide_fn=lambda msg: msg["type"] != "param")
        seeded, rules = handlers.seed(rng_seed=key), _Rules(self.config, args, kwargs, companion)
        checked = require(ALL_ROWS, WHOLE_DATA)
        with hidden, handlers.trace() as guide_sites, seeded, rules, checked:
            self.model(*args, **kwargs)
        known, values = _posteriors(guide_sites)
        values |= companion
        program = partial(self.model, *args, **kwargs)
        sites, uses, columns, known = run_at_means(program, key, guide_sites, known, values)
        if self.hidden_density == "marginal":
            uses = with_conditional_variance(uses, columns, sites)
        return self._optimum(sites, known, uses, columns, guide_sites)

    def _optimum(
        self,
        sites: dict[str, Message],
        known: dict[str, Gaussian],
        uses: dict[str, Use],
        columns: dict[str, Any],
        guide_sites: dict[str, Message],
    ) -> _Solution:
        followed, known = followed_layers(sites, guide_sites, uses, columns, known, self.integrate)
        beliefs: dict[str, Belief] = {layer.inducing: layer.belief for layer in followed.values()}
        bound = sum((layer.bound for layer in followed.values()), jnp.zeros(()))
        done = [*uses, *beliefs]
        for name, site in sites.items():
            if site["type"] != "sample" or site_kind(site) != "inducing" or name in beliefs:
                continue
            # E[log p] = c + b'v - v' Phi v / 2, summed over all uses of the function.
            mine = [use.quadratic(columns[n], known, self.integrate) for n, use in uses.items()
                    if use.function.site == name]  # fmt: skip
            if not mine:
                continue
            total = mine[0]
            for more in mine[1:]:
                total = total.plus(more)
            # A prior that counts beta times: E[log p] - beta KL = beta (E[log p] / beta - KL).
            beta = 1.0 if site["scale"] is None else site["scale"]
            total = total.over(beta)
            beliefs[name] = optimal_belief(total, scalar=len(unwrap(site["fn"]).event_shape) == 1)
            bound = bound + beta * total.bound().sum()
            done.append(name)
        for name, use in uses.items():
            if name not in followed and name in known and is_row_by_row(guide_sites[name]["fn"]):
                # H[q(h_n)] = log(2 pi e Omega_n) / 2; E[log N(h; f, s^2)] is in the quadratic of v.
                entropy = 0.5 * jnp.log(2 * jnp.pi * jnp.e * use.target_variance)
                bound = bound + (use.weights * entropy).sum()
        # Sites with a posterior that does not depend on draws are drawn anew.
        anew = {*beliefs, *known, *values_of_projections(guide_sites)}
        drawn = {n: s["value"] for n, s in guide_sites.items() if s["type"] == "sample" and n not in anew}
        kinds = {n: record_of(guide_sites[n]).kind for n in drawn}
        return _Solution(beliefs, followed, bound, tuple(done), drawn, kinds)


class _Rules(GuideHandler):
    """The rules of a guide; values of a projection follow its matrix."""

    def replace(self, msg: Message, rule: Rule | None) -> None:
        follows_matrix = is_projected(msg["fn"]) and msg["name"] not in self.config.sites
        super().replace(msg, Propagate() if follows_matrix else rule)


class _Optimal(_Rules):
    """Gives inducing sites their optimal q(v), and all other sites the values that it was computed from."""

    def __init__(
        self,
        config: GuideConfig,
        args: Any,
        kwargs: Any,
        drawn: Any,
        predicted: Any,
        solution: _Solution,
        on_data: bool,
    ) -> None:
        self.solution, self.on_data = solution, on_data
        super().__init__(config, args, kwargs, drawn, predicted)

    def replace(self, msg: Message, rule: Rule | None) -> None:
        name = msg["name"]
        if name in self.solution.beliefs:
            msg["fn"] = self.solution.beliefs[name]
            attach(msg, SiteRecord(name, "inducing", is_variational=True))
            return
        super().replace(msg, self.solution.followed.get(name, rule))
        if self.on_data or self.solution.kinds.get(name) == "other":
            msg["value"] = self.solution.drawn.get(name)


def _require_resolved(bound: Array) -> None:
    """Raise if a known bound is NaN, as ``Quadratic.bound`` is where it would be rounding error."""
    if is_concrete(bound) and np.isnan(bound):
        raise expected(
            "a bound that is not lost in rounding",
            f"NaN in {bound.dtype}",
            "run in float64, use fewer inducing points or a prior of the noise away from zero, or InducingPoint()",
        )


def _posteriors(guide_sites: dict[str, Message]) -> tuple[dict[str, Gaussian], dict[str, Any]]:
    """Gaussian posteriors of hidden layers and latents, and a value for every latent site: means where Gaussian."""
    known: dict[str, Gaussian] = {}
    values: dict[str, Any] = {}
    matrices = values_of_projections(guide_sites)
    for name, site in guide_sites.items():
        if site["type"] != "sample" or is_projected(site["fn"]):
            continue
        fn, record, value = unwrap(site["fn"]), record_of(site), site["value"]
        kind = record.kind
        if name in matrices:
            values[name] = matrix_belief(name, site)
            continue
        expect(
            kind != "inducing" or not record.is_variational,
            "no rule for inducing values",
            f"one for {name!r}",
            "theirs is the optimum; guides.MeanField() has rules for both",
        )
        if kind == "hidden" and not (record.is_variational and (is_row_by_row(fn) or isinstance(fn, dist.Delta))):
            raise expected(
                f"a mean-field rule for hidden layer {name!r}, guides.Normal() or guides.Delta()",
                "one that follows the model" if follows(fn) else type(fn).__name__,
                "guides.InducingPoint() has hidden layers that do",
            )
        if kind in ("hidden", "latent") and is_row_by_row(fn):
            loc = jnp.broadcast_to(fn.loc, value.shape)
            known[name] = Gaussian(loc, jnp.broadcast_to(fn.variance, value.shape))
            if isinstance(fn, LinearValues):  # its mean depends on values before it
                known[name] = known[name]._replace(slopes=fn.slopes)
                continue
            value = loc
        elif kind == "hidden":
            known[name] = Gaussian(value, jnp.zeros_like(value))
        values[name] = jnp.zeros_like(value) if kind == "inducing" else value
    return known, values
