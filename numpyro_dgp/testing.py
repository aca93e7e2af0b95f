"""Conformance checks for your own kernels, likelihoods, guides and whole inferences, and a small program to try them
with.

A check raises an ``AssertionError`` that names the property that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO

from numpyro_dgp._checks import expect, expected, require_count, require_finite, require_inputs
from numpyro_dgp._repr import public_dir
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.diagnostics.rank_test import judge
from numpyro_dgp.diagnostics.replications import Inference, Quantities, Replications, joined, replicate
from numpyro_dgp.diagnostics.simulation import Simulated
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.functions.points import Points
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.kernels import RBF, Kernel, as_kernel
from numpyro_dgp.likelihoods.closed_forms import Form
from numpyro_dgp.likelihoods.integrals import Strategy
from numpyro_dgp.likelihoods.likelihood import Likelihood
from numpyro_dgp.math.quadrature import GaussHermite, MonteCarlo
from numpyro_dgp.primitives import gp

__all__ = ["assert_calibrated", "check_guide", "check_kernel", "check_likelihood", "parameter_shapes", "toy"]
__dir__ = public_dir(globals())


_DEPENDENT = 0.2
"""Correlation of neighbouring posterior samples above which their ranks are not uniform."""

_UNFINISHED = 0.5
"""Share of fits that have not converged above which they are a likely reason of an alarm."""


def toy(num_layers: int = 1) -> tuple[Callable[..., None], Array, Array]:
    """A small program and data for it, to try a guide, an objective or a diagnostic with.

    Args:
        num_layers: 1 for y = f(x) + noise, or 2 for y = g(h) + noise, where h holds two columns of values f(x) with
            process noise. Sites are ``"f"``, ``"g"``, ``"h"`` and ``"y"``.

    Returns:
        The program ``model(X, y=None)``, inputs (20, 1) and observations (20,).

    Raises:
        ValueError: another number of layers.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy(2)
        >>> dgp.testing.parameter_shapes(dgp.guides.InducingPoint(model), X, y)["f_auto_loc"]
        (2, 5)
    """
    expect(num_layers in (1, 2), "num_layers to be 1 or 2", repr(num_layers), "write a deeper program yourself")

    def shallow(X: Array, y: Array | None = None) -> None:
        f = gp("f", RBF(), Points(jnp.linspace(0, 1, 5)[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)

    def deep(X: Array, y: Array | None = None) -> None:
        f = gp("f", RBF(), Points(jnp.linspace(0, 1, 5)[:, None]), outputs=2)
        g = gp("g", RBF(), Points(jnp.linspace(-1, 1, 8).reshape(4, 2)))
        with numpyro.plate("data", len(X)):
            h = numpyro.sample("h", f(X, noise=0.1))
            numpyro.sample("y", Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)

    X = jnp.linspace(0, 1, 20)[:, None]
    return shallow if num_layers == 1 else deep, X, jnp.square(X[:, 0])


def parameter_shapes(guide: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters that a guide has for arguments of its program, by name.

    Args:
        guide: the guide.
        *args: arguments of the program.
        **kwargs: its keyword arguments.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> dgp.testing.parameter_shapes(dgp.guides.MeanField(model), X, y)
        {'f_auto_loc': (5,), 'f_auto_scale': (5,)}
    """
    with handlers.trace() as sites, handlers.seed(rng_seed=0):
        guide(*args, **kwargs)
    return {name: jnp.shape(site["value"]) for name, site in sites.items() if site["type"] == "param"}


def _require(condition: Any, promise: str) -> None:
    if not bool(jnp.all(jnp.asarray(condition))):
        raise AssertionError(f"expected {promise}")


def _close(a: ArrayLike, b: ArrayLike, scale: float = 1.0) -> Array:
    a, b = jnp.asarray(a), jnp.asarray(b)
    size = 1 + jnp.abs(b).max()
    return jnp.abs(a - b) <= scale * size * jnp.finfo(a.dtype).eps ** 0.5


def check_kernel(kernel: Kernel | Callable[[Array, Array], Array], X: ArrayLike) -> None:
    """Check a kernel at inputs ``X`` (N, D): symmetry, positive eigenvalues, diagonal, batches, gradients, pytree.

    Args:
        kernel: the kernel, or any callable ``k(X1, X2)``.
        X: inputs (N, D), distinct rows.

    Raises:
        AssertionError: the first property that does not hold.
        ValueError: no kernel, or inputs that are not at least two distinct rows of finite numbers.

    Example:
        >>> import numpy as np
        >>> from numpyro_dgp.kernels import RBF
        >>> from numpyro_dgp.testing import check_kernel
        >>> check_kernel(RBF() + 0.5, np.linspace(0, 1, 6)[:, None])  # nothing happens: all properties hold
        >>> check_kernel(lambda X1, X2: X1 - X2.T, np.linspace(0, 1, 6)[:, None])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        AssertionError: ...
    """
    k = as_kernel(kernel)
    require_inputs(X)
    require_finite("inputs X", X, "take rows of numbers")
    if np.ndim(X) != 2 or len(np.unique(np.asarray(X), axis=0)) != len(np.asarray(X)) or len(np.asarray(X)) < 2:
        raise expected(
            "at least two distinct inputs (N, D)",
            f"shape {np.shape(X)}, {len(np.unique(np.asarray(X).reshape(-1, np.shape(X)[-1]), axis=0))} distinct",
        )
    X = jnp.asarray(X, jnp.result_type(X, float))
    K = k(X, X)
    _require(K.shape == (len(X), len(X)), f"k(X, X) of shape ({len(X)}, {len(X)}), got {K.shape}")
    _require(K.dtype == X.dtype, f"the dtype of the inputs, {X.dtype}, got {K.dtype}")
    _require(_close(K, K.T), "a symmetric Gram matrix")
    _require(_close(jnp.diagonal(K), k.diag(X)), "diag(X) equal to the diagonal of k(X, X)")
    eigenvalues = np.linalg.eigvalsh(np.asarray(k.gram(X), float))
    tolerance = len(X) * float(jnp.finfo(X.dtype).eps) ** 0.75
    smallest = eigenvalues.min() / eigenvalues.max()
    _require(smallest >= -tolerance, f"no negative eigenvalue, got {smallest:.1e} times the largest")
    _require(_close(k(X, X[:2]), K[:, :2]), "entries that depend on their two inputs only")
    _require(_close(jax.jit(lambda k, X: k(X, X))(k, X), K), "the same values under jit, the kernel as an argument")
    leaves, treedef = jax.tree.flatten(k)
    _require(_close(jax.tree.unflatten(treedef, leaves)(X, X), K), "the same kernel after a pytree round trip")

    def total(k: Kernel, X: Array) -> Array:
        return k(X, X).sum() + k.diag(X).sum()

    for gradient in jax.tree.leaves(jax.grad(total, (0, 1))(k, X)):
        _require(jnp.isfinite(gradient), "finite gradients, also where inputs coincide")


def check_likelihood(
    conditional: Callable[[Array], dist.Distribution],
    y: ArrayLike,
    *,
    outputs: int | None = None,
    num: int = 20_000,
    integrate: GaussHermite | MonteCarlo | Form | Strategy | None = None,
) -> None:
    """Check that ``Likelihood`` integrates a conditional correctly, against draws of v.

    Args:
        conditional: from v to the distribution of y.
        y: observations (N,) or (N, P).
        outputs: P of v, or ``None`` for a scalar function.
        num: number of draws.
        integrate: what ``Likelihood`` takes; ``MonteCarlo(20)`` for a conditional that mixes outputs.

    Raises:
        AssertionError: the first property that does not hold.
        ValueError: a conditional that is no function, observations that are not finite rows, or numbers that are not
            positive integers.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro_dgp.testing import check_likelihood
        >>> check_likelihood(lambda v: dist.Poisson(jnp.exp(v)), jnp.array([0, 1, 3]))
    """
    expect(
        callable(conditional) and not isinstance(conditional, dist.Distribution),
        "a function from v to a distribution",
        type(conditional).__name__,
        "for example lambda v: dist.Normal(v, 0.1)",
    )
    require_count("num", num, "the default")
    if outputs is not None:
        require_count("outputs", outputs, "None for a scalar function")
    expect(np.ndim(y) >= 1 and np.size(y), "observations y of shape (N,) or (N, P)", np.shape(y))
    require_finite("observations y", y, "take values that the distribution can have")
    y = jnp.asarray(y)
    shape = y.shape[:1] if outputs is None else (y.shape[0], outputs)
    key, loc_key = jax.random.split(jax.random.key(0))
    loc = 0.5 * jax.random.normal(loc_key, shape)
    f_x = FunctionValues(loc, jnp.full(shape, 0.3), event_dim=len(shape) - 1)
    with handlers.seed(rng_seed=1):
        likelihood = Likelihood(f_x, conditional, integrate=integrate)
    log_p = jax.vmap(lambda v: conditional(v).log_prob(y))(f_x.sample(key, (num,)))
    own = likelihood.rule.size if not likelihood.factorised else num
    error = 5 * log_p.std(0) * (num**-0.5 + own**-0.5) + 1e-2
    _require(jnp.abs(likelihood.log_prob(y) - log_p.mean(0)) < error, "log_prob equal to the mean of log p(y | v)")
    slack = 1e-3 + (0 if likelihood.factorised else 5 * log_p.std(0) * own**-0.5)
    _require(likelihood.log_marginal(y) >= likelihood.log_prob(y) - slack, "log E[p] >= E[log p]")
    _require(likelihood.sample(key).shape == y.shape, f"samples of the shape of y, {y.shape}")


def check_guide(
    model: Callable[..., Any], guide: Callable[..., Any], X: ArrayLike, y: ArrayLike, *, num: int = 500, **kwargs: Any
) -> None:
    """Check that a guide for ``model(X, y)`` has the properties of a NumPyro guide.

    It must draw every latent site and nothing else, give ``dgp.ELBO`` and ``Trace_ELBO`` the same expectation (weighted
    latents may give the former a higher one), have finite gradients, compile once, and predict at new inputs, also at a
    single one.

    Args:
        model: the program, called as ``model(X, y, **kwargs)``.
        guide: the guide.
        X: inputs (N, D).
        y: observations.
        num: draws of each objective.
        **kwargs: keyword arguments of the model.

    Raises:
        AssertionError: the first property that does not hold.
        ValueError: arguments that are no programs, data that do not fit together or are not finite, or a program that
            observes nothing.

    Example:
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> dgp.testing.check_guide(model, dgp.guides.InducingPoint(model), X, y)  # nothing happens: they all hold
    """
    expect(
        callable(model) and callable(guide),
        "a program and a guide of it, check_guide(model, guide, X, y)",
        f"{type(model).__name__} and {type(guide).__name__}",
    )
    require_count("num", num, "the default")
    expect(
        np.ndim(X) >= 1 and np.ndim(y) >= 1 and len(np.asarray(X)) >= 1,
        "inputs (N, D) and y",
        f"{np.shape(X)} and {np.shape(y)}",
    )
    X, y = jnp.asarray(X), jnp.asarray(y)
    svi = SVI(model, guide, optax.sgd(0.0), ELBO())
    params = svi.get_params(svi.init(jax.random.key(0), X, y, **kwargs))

    def given(program: Callable[..., Any], key: Array) -> Callable[..., Any]:
        return handlers.substitute(handlers.seed(program, key), data=params)

    guide_trace = handlers.trace(given(guide, jax.random.key(1))).get_trace(X, y, **kwargs)
    sites = handlers.trace(given(model, jax.random.key(1))).get_trace(X, y, **kwargs)
    latent = {n for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
    observed = [n for n, s in sites.items() if s["type"] == "sample" and s["is_observed"]]
    expect(observed, "a program that observes data", "none", 'numpyro.sample("y", ..., obs=y)')
    drawn = {n for n, s in guide_trace.items() if s["type"] == "sample" and not s["infer"].get("is_auxiliary")}
    _require(drawn == latent, f"a draw of the latent sites {sorted(latent)}, got {sorted(drawn)}")

    traces = 0

    def loss(objective: Any, params: dict[str, Array], key: Array) -> Array:
        nonlocal traces
        traces += 1
        return objective.loss(key, params, model, guide, X, y, **kwargs)

    compiled = jax.jit(lambda p, key: jax.value_and_grad(lambda p: loss(ELBO(), p, key))(p))
    for seed in range(3):
        _, gradient = compiled(params, jax.random.key(seed))
        for name, value in gradient.items():
            _require(jnp.isfinite(value), f"a finite gradient of {name!r} at the initial values")
    _require(traces == 1, f"one compilation for three steps, got {traces}")
    keys = jax.random.split(jax.random.key(2), num)
    ours = jax.lax.map(lambda key: loss(ELBO(), params, key), keys, batch_size=50)
    stock = jax.lax.map(lambda key: loss(Trace_ELBO(), params, key), keys, batch_size=50)
    slack = 5 * jnp.sqrt((ours.var() + stock.var()) / num) + 1e-3 * jnp.abs(ours.mean())
    gap = ours.mean() - stock.mean()
    tighter = any(record_of(s).num_replicates is not None for s in guide_trace.values())
    _require(
        gap > -slack if tighter else jnp.abs(gap) < slack,
        f"dgp.ELBO to {'be no lower than' if tighter else 'agree in expectation with'} Trace_ELBO, got "
        f"{ours.mean():.4g} and {stock.mean():.4g}",
    )
    for rows in (X[:1], X[:3], X):
        values = given(guide, jax.random.key(3))(rows)
        program = handlers.substitute(given(model, jax.random.key(4)), data=values)
        prediction = handlers.trace(program).get_trace(rows)[observed[0]]["value"]
        _require(len(prediction) == len(rows), f"{len(rows)} predictions at new inputs, got {len(prediction)}")


def assert_calibrated(
    inference: Inference,
    key: Array,
    *args: Any,
    budget: int = 400,
    level: float = 1e-3,
    tolerance: float = 1.4,
    num_steps: int | None = None,
    simulator: Callable[..., Any] | None = None,
    quantities: Quantities | None = None,
    **kwargs: Any,
) -> Simulated:
    r"""Assert that an inference recovers the truth: simulation-based calibration as a sequential test.

    Replications are those of :func:`~numpyro_dgp.diagnostics.sbc`, 25 at a time: draw parameters and data, fit, and
    rank the true values among posterior draws. Ranks :math:`r_{ij}` of quantities j are uniform if inference is exact.
    The test bets on the ranks of posteriors that are shifted by :math:`\delta` standard deviations and c times as wide,

    .. math:: E_n = \operatorname*{mean}_j\, \operatorname*{mean}_{\delta, c}\,
              \prod_{i \le n} \frac{p_{\delta c}(r_{ij})}{1 / (S + 1)} ,

    and fails once :math:`E_n \ge 1 / \mathrm{level}`. Under exact inference that happens, at any n and for all
    quantities together, with a probability of at most ``level`` (Ville's inequality).

    It passes early once four deviations are excluded for every quantity: ``1 / tolerance`` and ``tolerance`` times the
    right width, and a bias of :math:`\sqrt2 \log(\mathrm{tolerance})` standard deviations, 0.48 by default, either way.
    Under each of them that happens with a probability of at most ``level``, too. Where nothing is wrong it takes 70 to
    260 replications, more for more quantities. It passes also when the budget is used up. Smaller errors may remain
    unnoticed: ``tolerance=1.1`` looks for these, and takes a thousand replications and more.

    With the same key the outcome is the same, so that the assertion can stand in a test suite.

    Args:
        inference: an ``SVI``, whose fits take ``num_steps`` steps; or an ``MCMC`` of ``NUTS(dgp.for_mcmc(model))`` or
            ``dgp.mcmc.Gibbs(model)``, with ``thinning=`` that makes its samples nearly independent.
        key: PRNG key.
        *args: arguments of the program, without observations for data from the prior, or with all of them for data
            given these.
        budget: number of replications, at most.
        level: probability of a false alarm, at most.
        tolerance: the factor of width that is excluded before the test passes early.
        num_steps: steps of each fit of an ``SVI``, 1000 by default.
        simulator: the program that data and true values come from, with the same arguments and sites; by default the
            program that is fitted.
        quantities: what is ranked, from values by site; by default what ``sbc`` ranks.
        **kwargs: keyword arguments of the program.

    Returns:
        All ranks, as :class:`~numpyro_dgp.diagnostics.Simulated`.

    Raises:
        AssertionError: the inference is not calibrated. The message has the quantity, how its posterior deviates, and
            the number of replications.
        ValueError: as ``sbc``; a level that is no probability, a tolerance that is not above one.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> model, X, _ = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model)
        >>> step = dgp.optim.NaturalGradient(guide, 1.0, optax.adam(0.01))  # a single one gives the exact posterior
        >>> exact = numpyro.infer.SVI(model, guide, step, dgp.ELBO())
        >>> found = dgp.testing.assert_calibrated(exact, jax.random.key(0), X, num_steps=2)
        >>> len(found.ranks["log density"]) < 400  # it ended early
        True
        >>> narrow = numpyro.infer.SVI(model, dgp.guides.MeanField(model), optax.adam(0.1), dgp.ELBO())
        >>> dgp.testing.assert_calibrated(narrow, jax.random.key(0), X, num_steps=200)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        AssertionError: expected uniform ranks of true values, got others of ...

    Source: Talts et al. (2018); Ramdas et al. (2023) for sequential tests by betting.
    """
    expect(
        isinstance(level, float) and 0 < level < 1, "level to be a probability between 0 and 1", repr(level), "try 1e-3"
    )
    expect(tolerance > 1, "a tolerance above 1", tolerance, "1.4 is a posterior that is 1.4 times too narrow or wide")
    num_samples, batches = replicate(
        inference, key, args, kwargs, num_replications=budget, num_steps=num_steps, simulator=simulator,
        quantities=quantities,
    )  # fmt: skip
    done: list[Replications] = []
    for batch in batches:
        done.append(batch)
        ranks = joined([some.ranks for some in done])
        verdict = judge(ranks, num_samples, level, tolerance)
        if verdict.alarm is not None:
            advice = _advice(verdict.quantity, verdict.entry, done, num_samples)
            raise AssertionError(
                f"expected uniform ranks of true values, got others of {verdict.where} after "
                f"{verdict.alarm} replications: its posterior {verdict.deviation} (e-value "
                f"{np.exp(verdict.log_e):.2g}, limit {1 / level:.3g}){advice}"
            )
        if verdict.cleared is not None:
            break
    return Simulated.of(ranks, num_samples)


def _advice(quantity: str, entry: tuple[int, ...], done: list[Replications], num_samples: int) -> str:
    """What else the replications show that explains an alarm."""
    at: Any = (slice(None), *entry)
    ranks = np.concatenate([some.ranks[quantity][at] for some in done])
    if np.isin(ranks, (0, num_samples)).all():
        return "; all its ranks are 0 or S, as those of a point: give it a distribution, other=dgp.guides.Normal()"
    correlation = np.mean([some.autocorrelation[quantity][at].mean() for some in done])
    if correlation > _DEPENDENT:
        return f"; neighbouring samples have the correlation {correlation:.2f}: increase thinning= of the MCMC"
    unfinished = np.mean([some.unfinished.mean() for some in done])
    if unfinished > _UNFINISHED:
        return f"; the loss still fell at the end of {unfinished:.0%} of the fits: increase num_steps="
    return ""
