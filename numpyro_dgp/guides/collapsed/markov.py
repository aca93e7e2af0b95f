r"""The guide of layers whose inducing values follow each other and whose hidden values follow them, in closed form.

.. math:: q = q(v^1) \prod_{\ell > 1} q(v^\ell \mid v^{\ell-1}) \prod_{\ell, n} q(h^\ell_n \mid v^\ell),

all Gaussian and linear. Then the inducing values of all layers and the hidden values of one datum are jointly Gaussian.
With :math:`v^\ell = m^\ell + F^\ell \epsilon` for one vector of N(0, 1) numbers, where every layer adds columns to F,
covariances are

.. math:: \operatorname{Cov}[v, v^-] = F F^{-\top}, \qquad \operatorname{Cov}[v, h^-_n] = F F^{-\top} T_n^{-\top},

and every term of the bound is an expectation of :mod:`numpyro_dgp.bounds.markov_layers`.

Source: Chamberlin (2016), sections 4.7, 4.9 and A.5. The mean of h there, :math:`A_n \mu^\# + B_n`, must be
:math:`A_n \mu + B_n`, and its divergences take the covariance of h for that of u.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro.distributions import kl_divergence

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, unwrap
from numpyro_dgp.bounds.collapsed import Observations
from numpyro_dgp.bounds.markov_layers import Coupled, Target, expected_density
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.guides.collapsed.at_means import AtMeans
from numpyro_dgp.guides.collapsed.closed_form import ClosedForm, Part
from numpyro_dgp.guides.collapsed.gaussian_uses import Column, Gaussian, Use, affine_mean, is_projected
from numpyro_dgp.guides.guide import INIT
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.guides.rules.by_kind import Other, Rules
from numpyro_dgp.guides.rules.joint_inducing import JointInducing, MarkovInducing
from numpyro_dgp.guides.rules.rule import Rule
from numpyro_dgp.guides.rules.structured import ConditionalValues, GivenInducing
from numpyro_dgp.math.gaussians import entropy, expected_kl
from numpyro_dgp.math.linalg import cholesky, einsum, matmul

__all__ = ["Markov"]


class Markov(ClosedForm):
    r"""Inducing values given those of the layer below, hidden values given the inducing values of their layer, and the
    bound in closed form.

    .. math:: q = \prod_\ell N(v^\ell;\, U v^{\ell-1} + t,\, W) \prod_{\ell, n} N(h^\ell_n;\, T_n v^\ell + t_n,\,
              \Omega_n)

    ``dgp.ELBO()`` draws no inducing and no hidden values; only hyperparameters with a variational distribution are
    drawn. The parameters are those of ``InducingPoint`` with the same rules, under which the v that others follow are
    drawn. Both have the same bound with two layers. Above other hidden layers a hidden layer enters here by
    :math:`E[\log N(h; f(h^-), s^2)]`, lower than :math:`\log p(h \mid v, h^-)` by the price of the variance that the
    process has given its inducing values. Minibatches by plates work.

    It needs hidden layers with process noise, ``f(x, noise=s)``, a Gaussian likelihood, layers whose input columns are
    data, latents or hidden values, and above hidden layers kernels with expectations in closed form (RBF, Linear,
    Polynomial, Constant, their sums and products). At new inputs hidden values are drawn from the model given v.

    Args:
        model: the program.
        inducing: rule for inducing values, ``MarkovInducing()`` (default) with any rank and conditional, which is the
            conditional alone in the first layer; or ``Full()``, ``Diagonal()``, ``LowRank(J)`` or ``FullJoint()`` for
            values that follow no others.
        hidden: rule for hidden values, ``GivenInducing("free")`` (default) or a rank; at known inputs also the model's
            weights or a function of the inputs.
        latent: rule for latents per datum; ``Normal()`` by default.
        other: rule for hyperparameters, ``Delta()`` (default) or ``Normal()``, or a NumPyro autoguide class.
        sites: rules for single sites by name.
        prefix: part of the names of parameters.
        init_loc_fn: NumPyro init strategy for sites that are not function values.

    Raises:
        ValueError: when called with data: rules without a closed form, a hidden layer without process noise, another
            likelihood, inputs computed from Gaussian values, or a kernel without closed form.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     Z = dgp.Points(jnp.linspace(-1.0, 1.0, 5)[:, None])
        ...     f, g = dgp.gp("f", dgp.kernels.RBF(), Z, outputs=1), dgp.gp("g", dgp.kernels.RBF(), Z)
        ...     with numpyro.plate("data", len(X)):
        ...         h = numpyro.sample("h", f(X, noise=0.2))
        ...         numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> X = jnp.linspace(-1.0, 1.0, 20)[:, None]
        >>> guide = dgp.guides.Markov(model)
        >>> dgp.testing.parameter_shapes(guide, X, X[:, 0])["g_auto_transition"]
        (5, 5)

    Source: Chamberlin (2016), sections 4.7, 4.9 and A.5, with :math:`\log p(h \mid v, x)` for
    :math:`\log N(h; f, \sigma^2)` at known inputs.
    """

    defaults = Rules(inducing=MarkovInducing(), hidden=GivenInducing("free"))

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        inducing: Rule | None = None,
        hidden: Rule | None = None,
        latent: Rule | None = None,
        other: Other | None = None,
        sites: Mapping[str, Rule] | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = INIT,
    ) -> None:
        rules: Any = {"inducing": inducing, "hidden": hidden, "latent": latent, "other": other, "sites": sites}
        super().__init__(model, **rules, prefix=prefix, init_loc_fn=init_loc_fn)

    def _require(self, guide_sites: dict[str, Message]) -> None:
        for name, site in guide_sites.items():
            if site["type"] != "sample":
                continue
            record, fn, rule = record_of(site), unwrap(site["fn"]), self.config.rule(site)
            if is_projected(fn):
                raise expected(
                    "layers on data, latents and hidden values",
                    f"values of a projection, {name!r}",
                    "guides.Collapsed(), Nested() and InducingPoint() take them",
                )
            if record.kind == "hidden" and not isinstance(fn, ConditionalValues):
                raise expected(f"a rule GivenInducing() for hidden layer {name!r}", rule, 'try GivenInducing("free")')
            if record.kind == "inducing":
                known = isinstance(fn, Belief | JointInducing) and len(record.follows) <= 1
                expect(
                    known,
                    f"MarkovInducing(), or a Gaussian, for the inducing values {name!r}",
                    rule,
                    "guides.InducingPoint() draws from others",
                )

    def _part(self, guide_sites: dict[str, Message], run: AtMeans) -> Part:
        bound, layers = jnp.zeros(()), _Layers(run.known)
        for name, site in guide_sites.items():
            if site["type"] != "sample" or record_of(site).kind != "inducing":
                continue
            beta = 1.0 if site["scale"] is None else site["scale"]
            prior = unwrap(run.sites[name]["fn"])
            bound = bound - beta * layers.open(name, site, guide_sites, prior)
        for name, use in run.uses.items():
            columns = run.columns[name]
            if name not in guide_sites:
                zero = jnp.zeros((len(use.target), 1), use.target.dtype)
                bound = bound + layers.density(use, columns, use.target, use.target_variance, None, zero)
                continue
            q, fn = (unwrap(sites[name]["fn"]) for sites in (guide_sites, run.sites))
            hidden = layers.follow(name, use, q)
            if all(column is None for column in columns):
                bound = bound - layers.divergence(use, hidden, fn)
                continue
            rule: Any = self.config.rule(guide_sites[name])
            expect(
                rule.weights == "free" or isinstance(rule.weights, int),
                f'free weights or a rank for hidden layer {name!r}, GivenInducing("free")',
                rule,
                "the model's weights and functions of the inputs are for layers at known inputs",
            )
            # E[log N(h; f(h^-), s^2)] + entropy of q(h | v)
            bound = bound + layers.density(use, columns, hidden.loc, hidden.variance(layers), hidden, hidden.own)
            bound = bound + (use.weights * entropy(hidden.own)).sum()
        inducing = [n for n, s in guide_sites.items() if s["type"] == "sample" and record_of(s).kind == "inducing"]
        return Part(bound, (*inducing, *run.uses), {})


class _Inducing(NamedTuple):
    """Inducing values of a layer: means m (P, M), and columns F (P, M, K) of the covariance of all opened so far."""

    mean: Array
    columns: Array
    apart: bool

    def covariance(self, other: _Inducing) -> Array:
        """Cov[v, v'] (P, M, P', M')."""
        K = min(self.columns.shape[-1], other.columns.shape[-1])
        return einsum("pmk,qrk->pmqr", self.columns[..., :K], other.columns[..., :K])

    @property
    def of_outputs(self) -> Array:
        """Cov[v_p] (P, M, M)."""
        return matmul(self.columns, self.columns.mT)


class _Hidden(NamedTuple):
    r"""Hidden values :math:`N(T v + t, \Omega)`: the site of v, T (P, N, M), marginal means (N, P), :math:`\Omega`."""

    inducing: str
    weights: Array
    loc: Array
    own: Array

    def variance(self, layers: _Layers) -> Array:
        """Var[h] = T Sigma T' + Omega."""
        T = self.weights
        return einsum("pnm,pml,pnl->np", T, layers.inducing[self.inducing].of_outputs, T) + self.own

    def with_values(self, v: _Inducing, layers: _Layers) -> Array:
        """Cov[h, v] (N, D, P, M) with the inducing values of any layer."""
        return einsum("qnr,qrpm->nqpm", self.weights, layers.inducing[self.inducing].covariance(v))

    def with_hidden(self, other: _Hidden, layers: _Layers) -> Array:
        """Cov[h, h'] (N, D, D') of the parts that depend on inducing values."""
        return einsum("nqpm,pnm->nqp", self.with_values(layers.inducing[other.inducing], layers), other.weights)


class _Inputs(NamedTuple):
    """Inputs of a layer: means (N, D), variances (N, D) or covariances (N, D, D), and covariances with v (N, P, M, D)
    and with the targets (N, P, D)."""

    loc: Array
    variance: Array
    with_values: Array
    with_targets: Array


class _Layers:
    """All layers met so far, which are jointly Gaussian."""

    def __init__(self, latents: dict[str, Gaussian]) -> None:
        self.latents = latents
        self.inducing: dict[str, _Inducing] = {}
        self.hidden: dict[str, _Hidden] = {}

    def open(self, name: str, site: Message, guide_sites: dict[str, Message], prior: Any) -> Array:
        """Add inducing values; returns E KL[q(v | v^-) || N(0, I)]."""
        q: Any = unwrap(site["fn"])  # at v^- = 0
        shape = (-1, q.event_shape[-1])
        mean, root = q.loc.reshape(shape), _root(q)
        K = sum(v.mean.size for v in self.inducing.values())  # columns of all before
        moved, trace = jnp.zeros((*mean.shape, K), mean.dtype), jnp.zeros((), mean.dtype)
        record = record_of(site)
        for below in record.follows:
            v, prefix = self.inducing[below], record.param_prefix
            U = guide_sites[f"{prefix}_transition"]["value"]
            if f"{prefix}_basis" in guide_sites:
                U = matmul(U, guide_sites[f"{prefix}_basis"]["value"])
            U = U.reshape(*mean.shape, -1)
            mean = mean + matmul(U, v.mean.reshape(-1))  # U m^- + t
            columns = matmul(U, v.columns.reshape(-1, v.columns.shape[-1]))  # U F^-
            trace = jnp.square(columns).sum()  # tr U Sigma^- U'
            moved = moved.at[..., : columns.shape[-1]].set(columns)
        apart = isinstance(q, Belief) and not record.follows
        self.inducing[name] = _Inducing(mean, jnp.concatenate([moved, root], -1), apart)
        # That at the mean of v^-, and half the trace of the covariance that U adds.
        return kl_divergence(q.around(mean.reshape(q.event_shape)), prior) + 0.5 * trace

    def follow(self, name: str, use: Use, q: Any) -> _Hidden:
        """Add hidden values with the posterior ``q``, whose means are at v = 0."""
        site, T = use.function.site, q.weights
        shift, own = (a.reshape(use.target.shape) for a in (q.loc, q.conditional_variance))
        mean = shift + einsum("pnm,pm->np", T, self.inducing[site].mean)  # T m + t
        self.hidden[name] = _Hidden(site, T, mean, own)
        return self.hidden[name]

    def divergence(self, use: Use, hidden: _Hidden, fn: Any) -> Array:
        """E KL[q(h | v) || p(h | v, x)] at known inputs, ``fn`` the model's distribution at v = 0."""
        A = use.function.features(use.inputs.reshape(-1, use.inputs.shape[-1]))
        A = jnp.broadcast_to(A, hidden.weights.shape)
        v, between = self.inducing[hidden.inducing], hidden.weights - A
        prior_mean, c = (a.reshape(hidden.loc.shape) for a in (fn.loc, fn.conditional_variance))
        # E[(T v + t - m(x) - a' v)^2] = gap^2 + (T - a') Sigma (T - a')'
        gap = hidden.loc - prior_mean - einsum("pnm,pm->np", A, v.mean)
        square = jnp.square(gap) + einsum("pnm,pml,pnl->np", between, v.of_outputs, between)
        return (use.weights * expected_kl(hidden.own, square, c)).sum()

    def density(
        self,
        use: Use,
        columns: tuple[Column, ...],
        loc: Array,
        variance: Array,
        target: _Hidden | None,
        own: Array,
    ) -> Array:
        """E[log N(t; kappa f(x) + ..., s^2)] of targets of these moments (N, P): observations, or hidden values."""
        f, (N, P) = use.function, loc.shape
        if f.blocked or f.at_points(None) is None:
            raise expected(
                f"values of layer {f.site!r} on dgp.Points",
                f"a {type(f).__name__}{' for each group' if f.blocked else ''}",
                "the closed form is for values on points; guides.InducingPoint() takes others",
            )
        x, v = self._inputs(use, columns, target), self.inducing[f.site]
        D, dtype = x.loc.shape[-1], x.loc.dtype
        noise, slope, weights = (jnp.broadcast_to(a, (N, a.shape[-1])) for a in (use.noise, use.slope, use.weights))
        w, offset = affine_mean(f.mean, D, P, dtype)
        S = slope[..., None] * w.T  # kappa w (N, P, D)
        with_values = jnp.zeros((N, *v.mean.shape), dtype)  # Cov[t_p, v_p]
        if target is not None:
            with_values = einsum("npqm,pq->npm", target.with_values(v, self), jnp.eye(P, dtype=dtype))
        # The target less kappa (w' x + w_0)
        V = x.variance if x.variance.ndim == 3 else x.variance[..., None] * jnp.eye(D, dtype=dtype)
        moved = einsum("npd,nde->npe", S, V)
        variance = variance + (moved * S).sum(-1) - 2 * (x.with_targets * S).sum(-1)
        loc = loc - slope * offset - einsum("npd,nd->np", S, x.loc)
        targets = Target(loc, x.with_targets - moved, with_values - einsum("npd,npmd->npm", S, x.with_values))
        alike = noise.shape[-1] == slope.shape[-1] == weights.shape[-1] == 1
        each = [a[:, 0] if alike else jnp.broadcast_to(a, (N, P)) for a in (noise, slope, weights)]
        data = Observations(loc, each[0], each[1], variance, each[2])
        coupled = Coupled(v.mean, v.of_outputs, jnp.moveaxis(x.with_values, 1, 0))

        def output(p: int | None, own: Coupled, target: Target, data: Observations) -> Array:
            kernel, Z, whiten = f.at_points(p)
            return expected_density(kernel, Z, whiten, x.loc, x.variance, own, target, data)

        shared: Any = None if alike else 1
        axes: Any = Observations(1, shared, shared, 1, shared)  # type: ignore[arg-type]
        if not f.outputs_differ:
            return jax.vmap(lambda *of_output: output(None, *of_output), (0, 1, axes))(coupled, targets, data).sum()
        total = jnp.zeros((), dtype)
        for p in range(P):
            one = jax.tree.map(lambda a: a[:, p], targets)  # noqa: B023
            at = [a if alike else a[:, p] for a in each]
            these = Observations(loc[:, p], at[0], at[1], variance[:, p], at[2])
            total = total + output(p, jax.tree.map(lambda a: a[p], coupled), one, these)  # noqa: B023
        return total

    def _inputs(self, use: Use, columns: tuple[Column, ...], target: _Hidden | None) -> _Inputs:
        """The moments of the inputs of a use."""
        rows = use.inputs.reshape(-1, use.inputs.shape[-1])
        (N, D), v, P = rows.shape, self.inducing[use.function.site], use.target.shape[-1]
        with_values = jnp.zeros((N, *v.mean.shape, D), rows.dtype)
        with_targets = jnp.zeros((N, P, D), rows.dtype)
        covariance = jnp.zeros((N, D, D), rows.dtype)
        places = [(d, column) for d, column in enumerate(columns) if column is not None]
        for d, (name, q) in places:
            if name not in self.hidden:
                covariance = covariance.at[:, d, d].set(self.latents[name].variance.reshape(N, -1)[:, q])
                continue
            h = self.hidden[name]
            rows = rows.at[:, d].set(h.loc[:, q])
            with_values = with_values.at[..., d].set(h.with_values(v, self)[:, q])
            if target is not None:
                with_targets = with_targets.at[..., d].set(target.with_hidden(h, self)[..., q])
            for e, (other, r) in places:
                if other in self.hidden:
                    covariance = covariance.at[:, d, e].set(h.with_hidden(self.hidden[other], self)[:, q, r])
            covariance = covariance.at[:, d, d].add(h.own[:, q])
        met = {self.hidden[name].inducing: name for _, (name, _) in places if name in self.hidden}
        names = {name for _, (name, _) in places if name in self.hidden}
        alone = len(met) == len(names) and all(self.inducing[site].apart for site in met)
        variance = jnp.diagonal(covariance, axis1=1, axis2=2) if alone else covariance
        return _Inputs(rows, variance, with_values, with_targets)


def _root(q: Any) -> Array:
    """Columns (P, M, K) of which the covariance of a Gaussian over inducing values is the sum of squares."""
    M = q.event_shape[-1]
    if isinstance(q, JointInducing):
        return q.scale_tril.reshape(-1, M, q.scale_tril.shape[-1])
    R = q.dense_root
    if R is None:
        R = cholesky(q.feature_covariance(jnp.eye(M, dtype=q.loc.dtype)), "the covariance of inducing values")
    R = R.reshape(-1, M, M)
    return einsum("pmk,pq->pmqk", R, jnp.eye(len(R), dtype=R.dtype)).reshape(len(R), M, -1)
