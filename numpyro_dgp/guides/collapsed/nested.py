r"""The guide of nested variational compression, a deep bound without parameters for hidden values.

Layers :math:`h^\ell = f^\ell(h^{\ell-1}) + \epsilon^\ell` with process noise s, and y above the last of them. Let
:math:`g(h) = m(h) + a(h)^\top v` be the mean of a layer given its inducing values. The hidden values of a layer are
Gaussian given v alone, :math:`N(\langle g \rangle, s^2)`, with expectations over the layer below. Each output of each
hidden layer then adds

.. math:: -\frac{1}{2 s^2} \sum_n \Bigl( \langle k(h, h) \rangle - \mathrm{tr} \langle a\, a^\top \rangle
          + E_{q(v)} \mathrm{var}_{h}[g(h)] \Bigr) ,

and the likelihood :math:`E_{q(v)} \langle \log N(y; f(h), \sigma^2) \rangle`.

Source: Hensman and Lawrence (2014). The notes listed with it lack the variance :math:`a^\top \Sigma\, a` of y in
their last formula, and factors 1/2 in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, unwrap
from numpyro_dgp.bounds.collapsed import Observations, Quadratic
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.guides.collapsed.at_means import AtMeans
from numpyro_dgp.guides.collapsed.closed_form import ClosedForm, Part
from numpyro_dgp.guides.collapsed.following_layers import GivenValues
from numpyro_dgp.guides.collapsed.gaussian_uses import Column, Gaussian, Use
from numpyro_dgp.guides.guide import INIT
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.guides.rules.by_kind import Other
from numpyro_dgp.guides.rules.rule import Rule
from numpyro_dgp.kernels.expectations import Integrate
from numpyro_dgp.math.linalg import einsum

__all__ = ["Nested"]


class Nested(ClosedForm):
    r"""Nested variational compression: Gaussian q(v) with parameters, and hidden values that follow from them.

    .. math:: q = \prod_\ell q(v^\ell) \prod_n q(h^\ell_n \mid v^\ell), \qquad
              q(h^\ell_n \mid v^\ell) = N\bigl(\langle m(h) + a(h)^\top v^\ell \rangle,\; s^2\bigr),

    where :math:`\langle \cdot \rangle` is the expectation over :math:`q(h^{\ell-1}_n)`, Gaussian with the mean
    :math:`\langle g \rangle` at the mean of v and the variance :math:`\langle a \rangle^\top \Sigma \langle a \rangle +
    s^2`. ``dgp.ELBO()`` evaluates

    .. math:: \sum_n E_{q(v)} \langle \log N(y_n; f(h_n), \sigma^2) \rangle
              - \sum_{\ell, n} \frac{1}{2 s^2} \Bigl( \langle k(h, h) \rangle - \mathrm{tr} \langle a\, a^\top \rangle
              + E_{q(v)} \mathrm{var}[m(h) + a(h)^\top v] \Bigr) - \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)]

    without draws. Every term is a sum over data, so that minibatches by plates work. With one layer it is the bound of
    :class:`~numpyro_dgp.guides.InducingPoint`. Hidden layers need process noise s, ``f(x, noise=s)``, the likelihood is
    Gaussian, and the input columns of layers are data, latents and hidden values. Only hyperparameters with a
    variational distribution are drawn.

    Hidden layers enter by :math:`E[\log N(h; f(x), s^2)]`: the bound is low where the process has variance given its
    inducing values, compared with s². NumPyro's ``Trace_ELBO``, which takes :math:`\log p(h \mid v, x)`, is higher.

    At new inputs hidden values are drawn from the model given v, as under ``InducingPoint``.

    Args:
        model: the program.
        inducing: rule for inducing values, ``Full()`` (default), ``Diagonal()`` or ``LowRank(J)``.
        latent: rule for latents per datum; ``Normal()`` by default.
        other: rule for hyperparameters, ``Delta()`` (default) or ``Normal()``, or a NumPyro autoguide class.
        integrate: how expectations of kernels are taken: ``None`` for closed forms (RBF, Linear, Polynomial, Constant,
            their sums and products), ``GaussHermite(n)`` or ``MonteCarlo(n, key)`` for any kernel.
        sites: rules for single sites by name.
        prefix: part of the names of parameters.
        init_loc_fn: NumPyro init strategy for sites that are not function values.

    Raises:
        ValueError: when called with data: a rule for inducing values that is not Gaussian or depends on other layers, a
            rule for hidden values, a hidden layer without process noise, a function that is used in a hidden layer and
            elsewhere, another likelihood, or inputs computed from Gaussian values.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_dgp as dgp, optax
        >>> def model(X, y=None):
        ...     Z = dgp.Points(jnp.linspace(-1.0, 1.0, 5)[:, None])
        ...     f, g = dgp.gp("f", dgp.kernels.RBF(), Z, outputs=1), dgp.gp("g", dgp.kernels.RBF(), Z)
        ...     with numpyro.plate("data", len(X)):
        ...         h = numpyro.sample("h", f(X, noise=0.2))
        ...         numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> X = jnp.linspace(-1.0, 1.0, 20)[:, None]
        >>> guide = dgp.guides.Nested(model)
        >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.02), dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 500, X, jnp.sin(3 * X[:, 0]), progress_bar=False)
        >>> sorted(result.params)
        ['f_auto_loc', 'f_auto_scale_tril', 'g_auto_loc', 'g_auto_scale_tril']

    Source: Hensman and Lawrence (2014).
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        inducing: Rule | None = None,
        latent: Rule | None = None,
        other: Other | None = None,
        integrate: Integrate = None,
        sites: Mapping[str, Rule] | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = INIT,
    ) -> None:
        rules: Any = {"inducing": inducing, "latent": latent, "other": other, "sites": sites}
        super().__init__(model, **rules, prefix=prefix, init_loc_fn=init_loc_fn)
        self.integrate = integrate

    def _require(self, guide_sites: dict[str, Message]) -> None:
        for name, site in guide_sites.items():
            if site["type"] != "sample":
                continue
            record, fn = record_of(site), unwrap(site["fn"])
            expect(
                record.kind != "hidden" or not record.is_variational,
                f"no rule for hidden layer {name!r}",
                "one",
                "its values follow from q(v); guides.Collapsed() and guides.InducingPoint() take rules",
            )
            expect(
                record.kind != "inducing" or (isinstance(fn, Belief) and not record.follows),
                f"a Gaussian for {name!r} by itself, guides.Full(), Diagonal() or LowRank()",
                f"{type(fn).__name__} given {record.follows}" if record.follows else type(fn).__name__,
                "guides.InducingPoint() draws from others",
            )

    def _part(self, guide_sites: dict[str, Message], run: AtMeans) -> Part:
        bound, hidden, known = jnp.zeros(()), {}, dict(run.known)
        for name, use in run.uses.items():
            belief: Any = unwrap(guide_sites[use.function.site]["fn"])
            use = _at_means(use, run.columns[name], known)
            if name not in guide_sites:
                # E_q(v) <log N(y; f(h), sigma^2)>
                data = use.quadratic(run.columns[name], known, self.integrate)
                bound = bound + _expected(data, belief)
                continue
            _require_alone(name, use, run.uses)
            penalty, hidden[name], known[name] = _hidden(use, run.columns[name], known, belief, self.integrate)
            bound = bound - penalty
        return Part(bound, tuple(run.uses), hidden)


def _at_means(use: Use, columns: tuple[Column, ...], known: dict[str, Gaussian]) -> Use:
    """The use at the means of its Gaussian inputs."""
    rows = use.inputs.reshape(-1, use.inputs.shape[-1])
    for d, column in enumerate(columns):
        if column is not None:
            rows = rows.at[:, d].set(known[column[0]].loc.reshape(len(rows), -1)[:, column[1]])
    return dataclasses.replace(use, inputs=rows)


def _hidden(
    use: Use, columns: tuple[Column, ...], known: dict[str, Gaussian], belief: Belief, integrate: Integrate
) -> tuple[Array, Rule, Gaussian]:
    """The trace term of a hidden layer, the posterior of its values given v, and that with v integrated out."""
    N, P = use.target.shape

    def statistics(target: Array) -> tuple[Quadratic, Array]:
        at = dataclasses.replace(use, target=target, target_variance=jnp.zeros_like(target))
        return at.statistics(columns, known, integrate)

    A = statistics(jnp.zeros_like(use.target))[1]  # <a> (N, M), or (P, N, M)
    T = jnp.broadcast_to(A, (P, *A.shape[-2:]))
    shift = jnp.broadcast_to(use.function.mean_at(use.inputs).reshape(N, -1), (N, P))  # <m(h)>: m is affine
    mean = shift + einsum("pnm,pm->np", T, belief.loc.reshape(P, -1))  # <g> at the mean of v
    belief_variance = belief.feature_variance(A)  # <a>' Sigma <a>
    # With targets <g> at the mean of v, the expected square of the residual is E_q(v) var_h[g(h)] + <a>' Sigma <a>, and
    # the conditional variance is added: the trace term is the difference to the log density of the second alone.
    data = statistics(mean)[0]
    noise, weights = (jnp.broadcast_to(a, (N, P)) for a in (use.noise, use.weights))
    alone = Observations(jnp.zeros_like(mean), noise, weights=weights).log_density(belief_variance)
    variance = jnp.square(noise)
    return alone - _expected(data, belief), GivenValues(T, shift, variance), Gaussian(mean, belief_variance + variance)


def _expected(data: Quadratic, belief: Belief) -> Array:
    """The expected log density under q(v), summed over outputs."""
    loc = belief.loc.reshape(data.b.shape)
    return data.under(loc, belief.feature_covariance(jnp.eye(loc.shape[-1], dtype=loc.dtype))).sum()


def _require_alone(name: str, use: Use, uses: dict[str, Use]) -> None:
    others = [n for n, other in uses.items() if n != name and other.function.site == use.function.site]
    expect(
        not others,
        f"hidden layer {name!r} to be the only use of its function",
        f"uses at {others} too",
        "guides.InducingPoint() takes functions that are used twice",
    )
    if use.function.blocked:
        raise expected(
            f"hidden layer {name!r} opened outside of plates",
            f"a function for each of {use.function.groups} groups",
            "guides.InducingPoint() takes it",
        )
