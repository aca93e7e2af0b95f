r"""``fit_best``: programs of one, two and three layers, weighted by their leave-one-out densities or their evidence.

**Several runs.** Where several hidden layers explain the data, one long run ends at one or two of them, and more
samples do not help; independent shorter runs end at several. Estimates of their evidence differ by more than their
errors, so weights by evidence or by stacking would keep mostly one run. Short runs therefore get equal weights.

All runs enter predictions. Evidence and leave-one-out densities are those of the first run: the points of a short run
are similar to each other, which makes its leave-one-out densities too optimistic.

**Leave-one-out densities.** Let u be all latents when the last layer is integrated out. Given a draw of u, a row has
the density

.. math:: p(y_n \mid y_{-n}, u) = p(y \mid u) / p(y_{-n} \mid u),

two integrals over the last layer, the second with the row masked. Draws of :math:`p(u \mid y)` with weights
:math:`1 / p(y_n \mid y_{-n}, u)` represent :math:`p(u \mid y_{-n})`, so that

.. math:: p(y_n \mid y_{-n}) = \bigl(E\, [1 / p(y_n \mid y_{-n}, u)]\bigr)^{-1}, \qquad u \sim p(u \mid y).

Source: Verge et al. (2015) and Yao et al. (2022), for runs that do not mix; Gelfand et al. (1992) for the mean of
inverses; Vehtari et al. (2016) for integrating what is Gaussian first.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.special import logsumexp

from numpyro_dgp._checks import expect, expect_kind, expected, require_count, require_key
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.program import inspect_program, run_on_shapes
from numpyro_dgp.analysis.sites import Message, mask_rows
from numpyro_dgp.depth.integrated_fit import Density, IntegratedFit, Numbers, fit_integrated
from numpyro_dgp.depth.weighted_posterior import (
    Depth,
    WeightedPosterior,
    arguments_of,
    as_depths,
    key_of,
    stacking_weights,
    weighed_by_evidence,
)
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.inference.fit_start import require_compiling_itself
from numpyro_dgp.mcmc.for_mcmc import for_mcmc
from numpyro_dgp.mcmc.population import each, evenly
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["fit_best", "left_out", "log_densities_given_draws", "require_rows", "with_further_runs"]


def with_further_runs(
    fit: IntegratedFit,
    model: Callable[..., Any],
    rng_key: Array,
    args: tuple[Any, ...],
    num_draws: int,
    num_sweeps: int,
    num_runs: int,
) -> IntegratedFit:
    """The same fit, predicting by as many draws of R runs: half of them its own, half those of R - 1 short runs.

    Each of these has ``num_draws / R`` points. A point of largest density has no runs, and stays alone. Runs that find
    nothing have no share.

    Args:
        fit: of the program, one run.
        model: the program.
        rng_key: PRNG key.
        args: of the program, observations included.
        num_draws: of all runs together.
        num_sweeps: of moves of each chain at each temperature.
        num_runs: R.
    """
    first = fit.posterior.samples
    if not first or num_runs == 1:
        return fit
    points = -(-num_draws // num_runs)
    more = fit_integrated(model, rng_key, args, points, num_sweeps, num_runs - 1, False)
    assert more.ended is not None
    others = more.posterior.samples or {}
    found = np.flatnonzero(np.repeat(np.isfinite(more.ended.log_evidence), points))
    own = evenly(len(next(iter(first.values()))), -(-num_draws // 2))
    added = found[evenly(len(found), num_draws // 2)]
    joined = {name: jnp.concatenate([u[own], others[name][added]]) for name, u in first.items()}
    return fit._replace(posterior=Posterior(model, samples=joined))


def _axes_of_rows(site: Message, rows: int) -> list[int]:
    """The batch axes of a site that are as long as there are rows, counted from the end."""
    shape = site["fn"].batch_shape
    return [i - len(shape) for i, size in enumerate(shape) if size == rows]


def require_rows(model: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raise unless it is plain what the rows of the observations of a program are.

    Raises:
        ValueError: no observed site, or one with several axes, of the length of the first argument.
    """
    arrays, rebuild = split_arguments(args, {})
    rows, sites = len(args[0]), run_on_shapes(model, rebuild(arrays)[0], {})[0]
    observed = {name: site for name, site in sites.items() if site["type"] == "sample" and site["is_observed"]}
    axes = {name: _axes_of_rows(site, rows) for name, site in observed.items()}
    shapes = {name: tuple(site["fn"].batch_shape) for name, site in observed.items()}
    expect(
        any(axes.values()) and not any(len(found) > 1 for found in axes.values()),
        f"observations in a numpyro.plate of the {rows} rows of the inputs, so that each can be left out",
        f"observed sites with the batch shapes {shapes}",
        'write the plate, or weigh="evidence"',
    )


def log_densities_given_draws(
    model: Callable[..., Any], rng_key: Array, args: tuple[Any, ...], at: Mapping[str, Array]
) -> Array:
    r"""The log densities :math:`\log p(y_n \mid y_{-n}, u_s)` (S, N).

    Args:
        model: the program.
        rng_key: PRNG key.
        args: of the program, observations included.
        at: S draws of its unconstrained numbers, by site.
    """

    def counting(counted: Array, *args: Any) -> Any:
        def mask(msg: Message) -> None:
            if msg["type"] == "sample" and msg["is_observed"]:
                for axis in _axes_of_rows(msg, len(counted)):
                    mask_rows(msg, counted, axis)

        with each_message(mask):
            return model(*args)

    arrays, rebuild = split_arguments(args, {})
    structure, rows, count = inspect_program(model, args, {}), len(args[0]), len(next(iter(at.values())))

    def run(key: Array, at: Numbers, arrays: list[Array]) -> Array:
        given = rebuild(arrays)[0]
        program = for_mcmc(counting)
        flat = jax.vmap(lambda numbers: ravel_pytree(numbers)[0])(at)
        counted = ~jnp.eye(rows + 1, rows, dtype=bool)  # all but one, and all

        def log_likelihood(pair: tuple[Array, Array]) -> Array:
            draw, kept = pair
            # log p(y | u) of the rows that count
            return Density(program, (counted[kept], *given), key, structure)(flat[draw])[1]

        draws, kept = (a.reshape(-1) for a in jnp.meshgrid(jnp.arange(count), jnp.arange(rows + 1), indexing="ij"))
        found = each(log_likelihood, (draws, kept), len(draws)).reshape(count, rows + 1)
        return found[:, -1:] - found[:, :-1]  # log p(y | u) - log p(y_-n | u)

    given = rng_key, dict(at), arrays
    return Compiled(run).at(*given)(*given)


def left_out(model: Callable[..., Any], rng_key: Array, args: tuple[Any, ...], at: Mapping[str, Array]) -> np.ndarray:
    r"""The log densities :math:`\log p(y_n \mid y_{-n})` (N,), by draws, or by one point.

    Arguments are those of :func:`log_densities_given_draws`.
    """
    given = np.asarray(log_densities_given_draws(model, rng_key, args, at), float)
    return math.log(len(given)) - logsumexp(-given, axis=0)  # -log mean_s 1 / p(y_n | y_-n, u_s)


def fit_best(
    family: Callable[..., Callable[..., Any]],
    rng_key: Array,
    *args: Any,
    depths: Sequence[Depth] = (1, 2, 3),
    weigh: Literal["stacking", "evidence"] = "stacking",
    least_gain: float = 1.0,
    folds: int | None = None,
    layer_odds: float = 0.25,
    least_odds: float = 0.05,
    one_layer: Literal["mode", "draws"] = "mode",
    num_draws: int = 400,
    num_sweeps: int = 8,
    num_runs: int = 4,
    previous: WeightedPosterior | None = None,
) -> WeightedPosterior:
    r"""Fit programs of several depths and predict with their mixture, weighted by stacking or by evidence.

    .. math:: p(y \mid x) = \sum_d w_d\, p_d(y \mid x), \qquad
              w = \arg\max_w \sum_n \log \sum_d w_d\, p_d(y_n \mid y_{-n})
              \quad\text{or}\quad
              w_d \propto \rho^d\, p_d(y)

    Joint posterior samples of hyperparameters and hidden layers, and the evidence :math:`p_d(y)`, come from sequential
    Monte Carlo from the prior, with elliptical slice moves; the last layer is integrated out where its likelihood is
    Gaussian (:func:`dgp.for_mcmc`). The only approximation is the finite number of draws. Programs with a weight
    predict with further, shorter runs (``num_runs``): each may find another hidden layer that explains the data.

    By default the weights are those of stacking. The leave-one-out density of a row is :math:`(E_u [p(y_{-n} \mid u) /
    p(y \mid u)])^{-1}` over the draws u of a run: two integrals over the last layer for each row, without refits. A
    program has a weight only if it predicts rows better than the shallowest one by ``least_gain`` standard errors;
    without evidence for depth, predictions are those of a Gaussian process.

    With ``weigh="evidence"`` they are the posterior probabilities of the depths. The estimate of the evidence is
    unbiased, except for the adaptive choice of temperatures; with too few draws its logarithm is mostly too low, for
    deeper programs more than for one layer. Each further layer has the prior odds :math:`\rho`.
    Programs with less than ``least_odds`` of the probability of the most probable one, or less than a shallower one,
    have no weight (the two rules of Occam's window).

    One layer with a Gaussian likelihood predicts with its hyperparameters :math:`\theta` at the mode of :math:`p(y \mid
    \theta)\, p(\theta)\, \lvert d\theta / du \rvert`, with u their unconstrained values (logarithms of positive ones).
    For codes without noise that is more accurate than draws.

    The method is for small designs: each of three to ten temperatures needs ``num_draws`` sweeps of a few moves per
    site, each of which evaluates the program a few times, and every layer costs O(N^3).

    A search refits with a few more runs in every round. With ``previous``, the earlier fit, a second Monte Carlo run
    continues from its draws, along

    .. math:: \bigl[p_{\text{before}}(u)\, p(y_{\text{before}} \mid u)\bigr]^{1 - \beta}\,
              \bigl[p(u)\, p(y \mid u)\bigr]^{\beta}, \qquad 0 \le \beta \le 1,

    and of the two runs of each depth the one with more evidence is kept, because a run that misses a mode
    underestimates the evidence. Append new rows at the end: whitened values of inducing inputs at the data are kept,
    and the new ones start at draws from the prior. Scaling of the data and priors may change. Errors of the log
    evidence add up from fit to fit.

    Names of hyperparameters and layers are free; each depth is fitted separately. A hidden layer should be the identity
    plus a small Gaussian process, ``mean=dgp.means.IdentityMean()``. For codes with little noise place the inducing
    inputs at the data in every layer, ``Z = f(Z).loc`` above the layer ``f``, as in the example: the bound divides the
    conditional variance by the variance of the noise.

    Args:
        family: from the number of layers to the program of that depth, for pairs of ``depths`` from layers and columns,
            ``family(2, 1)``. What it learns are ``numpyro.sample`` sites.
        rng_key: PRNG key.
        *args: arguments of the programs, inputs first and observations last, as ``X, y``. Tables become arrays.
        depths: numbers of layers, ascending. Among them there may be pairs, of layers and columns of hidden layers:
            ``(1, (2, 1), 2)`` tries a hidden layer with one column too, for functions of one direction of the inputs,
            straight or curved (:func:`dgp.design.emulator_family`).
        weigh: by ``"stacking"`` of predictions of rows that are left out, or by ``"evidence"``.
        least_gain: of ``"stacking"``: a program has a weight only if its log density of left-out rows is above that of
            the shallowest program by this many standard errors.
        folds: of ``"stacking"``: the number of folds of cross-validation by refits, instead of leaving out single rows
            with the draws of one fit. Rows are those of the first and the last argument; others are the same in every
            fold.
        layer_odds: :math:`\rho`, of ``"evidence"``: the prior odds of a program against one with a layer less; 1 for
            equal prior probabilities.
        least_odds: of ``"evidence"``: the smallest probability of a program relative to the most probable one with a
            weight; 0 for weights of all programs, including those less probable than a shallower one.
        one_layer: how one layer with a Gaussian likelihood predicts: ``"mode"``, at the mode of its hyperparameters, or
            ``"draws"`` of them, for searches with uncertain lengthscales and for noisy data.
        num_draws: of each posterior, and points at each temperature. With few, runs may differ in the modes that they
            find: where the evidence matters, check it with another key.
        num_sweeps: of each of the ``num_draws / num_sweeps`` chains at each temperature. Every sweep gives a point, so
            that more sweeps make longer and fewer chains, at the same cost.
        num_runs: R, the number of Monte Carlo runs of each program with a weight. Half of the draws for predictions
            come from the other R - 1 runs, with ``num_draws / R`` points each and equal weights: draws of one run
            descend from few points and may all have the same one of several hidden layers that explain the data.
            Evidence, weights and the start of ``previous`` are those of the first run. Use 1 for about half the time,
            and in a search, where the other runs start at the prior and may miss what earlier rounds have found.
        previous: the result of ``fit_best`` for these depths, before the last rows were added.

    Returns:
        A mixture of posteriors, with the prediction methods of ``dgp.Posterior``, and the fits. Its ``repr`` is a table
        of evidence and weights.

    Raises:
        ValueError: a family that does not give programs or takes no columns, depths that do not ascend, another way to
            weigh or to predict by one layer, odds that are not positive or leave out all, a gain that is negative,
            fewer rows than folds, data that are not finite numbers, observations that do not have the rows of the
            inputs, other arguments with these rows together with folds; a program with ``numpyro.param`` sites, or
            whose observations have a robust loss; a previous fit of other depths or programs, or together with folds.

    Example:
        >>> import jax, numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> data = jnp.linspace(0, 1, 8)[:, None]
        >>> def family(depth):
        ...     def model(X, y=None):
        ...         noise, h, Z = numpyro.sample("noise", dist.LogNormal(-3.0, 1.0)), X, data
        ...         layers = []
        ...         for i in range(depth - 1, 0, -1):
        ...             variance = numpyro.sample(f"variance{i}", dist.LogNormal(-3.0, 1.0))
        ...             kernel = dgp.kernels.Matern52(variance, 0.5)
        ...             layers.append(dgp.gp(f"f{i}", kernel, dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean()))
        ...             Z = layers[-1](Z).loc  # where the data are, for the next layer
        ...         g = dgp.gp("f0", dgp.kernels.Matern52(1.0, 0.5), dgp.Points(Z))
        ...         with numpyro.plate("data", len(X)):
        ...             for i, f in enumerate(layers):
        ...                 h = numpyro.sample(f"h{depth - 1 - i}", f(h))
        ...             numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)
        ...     return model
        >>> y = jnp.sin(6 * data[:, 0])
        >>> options = {"depths": (1, 2), "num_draws": 30, "num_runs": 1}
        >>> best = dgp.fit_best(family, jax.random.key(0), data, y, **options)
        >>> sorted(best.weights), best.predict(jax.random.key(1), data[:3]).mean.shape
        ([1, 2], (3,))
        >>> data = jnp.concatenate([data, jnp.array([[0.1], [0.3]])])
        >>> y = jnp.sin(6 * data[:, 0])
        >>> best = dgp.fit_best(family, jax.random.key(2), data, y, previous=best, **options)

    Source: Chopin (2002), Dau and Chopin (2022) and Jasra et al. (2011) for the samplers, Verge et al. (2015) and
    Yao et al. (2022) for several runs, Sauer et al. (2023) for elliptical slices in deep Gaussian processes, Yao et al.
    (2018b) for stacking, Gelfand et al. (1992) for rows that are left out, Madigan and Raftery (1994) for the window.
    """
    require_key(rng_key)
    require_compiling_itself(rng_key, args)
    depths = as_depths(depths)
    _require_family(family, depths, args)
    expect(weigh in ("evidence", "stacking"), 'weigh="stacking" or "evidence"', repr(weigh), 'weigh="stacking"')
    expect(
        _is_number(least_gain) and 0 <= least_gain < math.inf,
        "least_gain of 0 or more standard errors",
        repr(least_gain),
        "1.0",
    )
    expect(
        _is_number(layer_odds) and 0 < layer_odds < math.inf,
        "layer_odds as a positive number",
        repr(layer_odds),
        "0.25, or 1.0 for programs that are equally probable",
    )
    expect(
        _is_number(least_odds) and 0 <= least_odds <= 1,
        "least_odds as a number from 0, for weights of all programs, to 1, for the most probable one only",
        repr(least_odds),
        "0.05",
    )
    expect(one_layer in ("mode", "draws"), 'one_layer="mode" or "draws"', repr(one_layer), 'one_layer="mode"')
    counts = {"num_draws": (num_draws, "400"), "num_sweeps": (num_sweeps, "8"), "num_runs": (num_runs, "4")}
    for name, (value, hint) in counts.items():
        require_count(name, value, hint)
    before = _require_previous(previous, depths, folds)
    if folds is not None:
        _require_folds(folds, weigh, args)
    programs = {depth: family(*arguments_of(depth)) for depth in depths}
    if wrong := [type(program).__name__ for program in programs.values() if not callable(program)]:
        raise expected("family(depth) to be a program", wrong[0], "define the model inside of family, and return it")
    arrays, rebuild = split_arguments(args, {})
    args = rebuild(arrays)[0]
    fold_key, fit_key = jax.random.split(rng_key)

    def fitted(key: Array, args: tuple[Any, ...]) -> dict[Depth, IntegratedFit]:
        keys = {depth: key_of(key, depth) for depth in depths}
        options = num_draws, num_sweeps, 1, one_layer == "mode"
        found = {d: fit_integrated(program, keys[d], args, *options) for d, program in programs.items()}
        for depth, part in before.items():
            going = fit_integrated(programs[depth], jax.random.fold_in(keys[depth], 1), args, *options, part)
            # what a run misses lowers its estimate
            found[depth] = max(found[depth], going, key=lambda fit: fit.log_evidence)
        return found

    by_rows = weigh == "stacking" and folds is None and len(programs) > 1
    if by_rows:
        for program in programs.values():
            require_rows(program, args)
    by_folds = None if folds is None else _folds_out(fitted, fold_key, args, folds, len(depths))
    parts = fitted(fit_key, args)

    held_out = by_folds
    if by_rows:
        held_out = np.stack([left_out(programs[d], fold_key, args, part.at) for d, part in parts.items()], 1)
    if weigh == "evidence":
        best = weighed_by_evidence(parts, layer_odds, least_odds)
    elif held_out is None:
        best = WeightedPosterior(parts, {depths[0]: 1.0})
    else:
        weights = stacking_weights(held_out, least_gain=least_gain)
        means = dict(zip(depths, map(float, held_out.mean(0)), strict=True))
        best = WeightedPosterior(parts, dict(zip(depths, map(float, weights), strict=True)), means)
    found = dict(parts)
    for depth, part in parts.items():
        if best.weights[depth] * num_draws >= 0.5:  # it gives a draw
            key = jax.random.fold_in(key_of(fit_key, depth), 2)
            found[depth] = with_further_runs(part, programs[depth], key, args, num_draws, num_sweeps, num_runs)
    return dataclasses.replace(best, parts=found)


def _folds_out(
    fitted: Callable[..., dict[Depth, IntegratedFit]], key: Array, args: tuple[Any, ...], folds: int, programs: int
) -> np.ndarray:
    """Log densities (N, K) of the rows of each fold by fits to the others."""
    X, *others, y = args
    X, y = np.asarray(X), np.asarray(y)
    rows = len(X)
    order = np.asarray(jax.random.permutation(key, rows))
    held_out = np.zeros((rows, programs))
    for fold in range(folds):
        out = np.sort(order[fold::folds])
        kept = np.delete(X, out, axis=0), *others, np.delete(y, out, axis=0)
        fit_key, score_key = jax.random.split(jax.random.fold_in(key, fold))
        for column, part in enumerate(fitted(fit_key, kept).values()):
            held_out[out, column] = part.posterior.log_density(score_key, y[out], X[out], *others)
    return held_out


def _is_number(value: Any) -> bool:
    return not np.ndim(value) and np.asarray(value).dtype.kind in "fiu"


def _require_folds(folds: int, weigh: str, args: tuple[Any, ...]) -> None:
    rows = len(args[0])
    require_count("folds", folds, "5")
    expect(weigh != "evidence", 'folds of weigh="stacking" only', f"folds={folds}", "leave folds out")
    expect(2 <= folds <= rows, f"from 2 to {rows} folds, one row in each at least", folds, "folds=5")
    others = jax.tree.leaves(args[1:-1], is_leaf=lambda value: isinstance(value, list))
    expect(
        not any((isinstance(value, list) or np.ndim(value)) and len(value) == rows for value in others),
        f"inputs and observations as the only arguments with {rows} rows for folds",
        ("another one as long between them, of which it is not known whether its rows are left out with theirs"),
        "close over it inside of family, make it columns of the inputs, or leave folds out",
    )


def _require_family(family: Any, depths: tuple[Depth, ...], args: tuple[Any, ...]) -> None:
    expect(
        callable(family),
        "family, a function from the number of layers to a program",
        type(family).__name__,
        "fit_best(lambda depth: ..., key, X, y)",
    )
    if (pair := next((d for d in depths if isinstance(d, tuple)), None)) is not None:
        try:
            inspect.signature(family).bind(*pair)
        except TypeError as error:
            raise expected(
                f"a family of two numbers, layers and columns of hidden ones, for the pair {pair} among depths",
                f"one that does not take them ({error})",
                "def family(depth, width=None), or dgp.design.emulator_family(X, y)",
            ) from error
    if len(args) < 2 or not np.ndim(args[0]) or not np.ndim(args[-1]) or len(args[0]) != len(args[-1]):
        shapes = [np.shape(value) for value in args]
        raise expected(
            "inputs first and observations last, of equal length", f"shapes {shapes}", "fit_best(family, key, X, y)"
        )


def _require_previous(previous: Any, depths: tuple[Depth, ...], folds: int | None) -> Mapping[Depth, IntegratedFit]:
    """The parts to go on from: none without a fit before."""
    if previous is None:
        return {}
    expect_kind(
        previous, WeightedPosterior, "previous, a result of fit_best", "fit_best(family, key, X, y, previous=best)"
    )
    expect(folds is None, "no folds with previous", f"folds={folds}, which are fits to less data")
    known = {depth: part for depth, part in previous.parts.items() if part.ended is not None}
    if missing := [depth for depth in depths if depth not in known]:
        raise expected(
            f"previous with all depths, {depths}",
            f"one without {missing}",
            f"depths={tuple(known)}, or leave previous out",
        )
    return {depth: known[depth] for depth in depths}
