"""``fit_best``: programs of one, two and three layers, weighed by what the data say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from numpyro_dgp._checks import require_count, require_key, require_positive
from numpyro_dgp._typing import Array
from numpyro_dgp.deepening.depth_weights import evidence_weights, stacking_weights
from numpyro_dgp.deepening.integrated_fit import IntegratedFit, Settings, fit_integrated
from numpyro_dgp.deepening.weighted_posterior import WeightedPosterior
from numpyro_dgp.inference.fit_start import require_compiling_itself

__all__ = ["fit_best"]


def fit_best(
    family: Callable[[int], Callable[..., Any]],
    rng_key: Array,
    *args: Any,
    depths: Sequence[int] = (1, 2, 3),
    weigh: Literal["evidence", "stacking"] = "evidence",
    folds: int = 5,
    num_steps: int = 1000,
    learning_rate: float = 0.04,
    num_particles: int = 2,
    num_draws: int = 100,
    tries: int = 200,
) -> WeightedPosterior:
    r"""Fit programs of several depths and predict with their mixture, weighed by what the data say of each.

    .. math:: p(y \mid x) = \sum_d w_d\, p_d(y \mid x), \qquad
              w_d \propto e^{\mathcal L_d}
              \quad\text{or}\quad
              w = \arg\max_w \sum_n \log \sum_d w_d\, p_d(y_n \mid y_{-n})

    Hyperparameters and hidden layers have Gaussian posteriors, independent number by number, and the last layer is
    integrated given these where its likelihood is Gaussian (:func:`dgp.for_mcmc`): with one layer nothing is
    approximated but the posterior of the hyperparameters. :math:`\mathcal L_d` is the bound of the evidence with
    all of them integrated, and these bounds can be compared between programs. A deeper program gets weight only
    where its bound says so, and what its posterior lacks lowers its bound, not that of one layer.

    A program starts at the fit of the one before: sites of the same name at the same posterior, whitened values of new
    layers at their prior. So name a layer by its place from the top. A hidden layer should be the identity and a small
    Gaussian process, ``mean=dgp.means.Identity()``. Of codes with little noise the inducing inputs belong at the data
    in every layer, ``Z = f(Z).loc`` above the layer ``f``, as in the example: what inducing points do not explain is
    divided by the variance of the noise.

    Args:
        family: from the number of layers to the program of that depth. What it learns are ``numpyro.sample`` sites.
        rng_key: PRNG key.
        *args: arguments of the programs, inputs first and observations last, as ``X, y``.
        depths: numbers of layers, ascending.
        weigh: by ``"evidence"``, or by ``"stacking"`` of predictions of held-out rows, for which all programs are
            fitted ``folds`` times more.
        folds: of ``"stacking"``.
        num_steps: of Adam, for each program.
        learning_rate: of the first step; it falls to zero by a cosine.
        num_particles: draws of the bound in a step.
        num_draws: of each posterior that are kept.
        tries: draws of new hyperparameters from their prior. Fits start at the best three, and the one with the largest
            bound is kept.

    Returns:
        A posterior with the methods of ``dgp.Posterior``, and the fits. Printed, it is a table of their bounds and
        weights.

    Raises:
        ValueError: a family that does not give programs, depths that do not ascend, another way to weigh, fewer rows
            than folds, observations that do not have the rows of the inputs; a program with ``numpyro.param`` sites.

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
        ...             layers.append(dgp.gp(f"f{i}", kernel, dgp.Points(Z), outputs=1, mean=dgp.means.Identity()))
        ...             Z = layers[-1](Z).loc  # where the data are, for the next layer
        ...         g = dgp.gp("f0", dgp.kernels.Matern52(1.0, 0.5), dgp.Points(Z))
        ...         with numpyro.plate("data", len(X)):
        ...             for i, f in enumerate(layers):
        ...                 h = numpyro.sample(f"h{depth - 1 - i}", f(h))
        ...             numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, noise)), obs=y)
        ...     return model
        >>> y = jnp.sin(6 * data[:, 0])
        >>> best = dgp.fit_best(family, jax.random.key(0), data, y, depths=(1, 2), num_steps=100)
        >>> sorted(best.weights), best.predict(jax.random.key(1), data[:3]).mean.shape
        ([1, 2], (3,))

    Source: Yao et al. (2018b) for stacking.
    """
    require_key("fit_best", rng_key)
    require_compiling_itself("fit_best", rng_key, args)
    depths = _require_family(family, args, depths)
    if weigh not in ("evidence", "stacking"):
        raise ValueError(f'fit_best: expected weigh="evidence" or "stacking", got {weigh!r}: weigh="evidence"')
    for name, value, hint in (
        ("folds", folds, "5"),
        ("num_steps", num_steps, "1000"),
        ("num_particles", num_particles, "2"),
        ("num_draws", num_draws, "100"),
        ("tries", tries, "200"),
    ):
        require_count("fit_best", name, value, hint)
    require_positive("fit_best", "learning_rate", learning_rate, "0.04")
    rows = len(args[0])
    if weigh == "stacking" and not 2 <= folds <= rows:
        raise ValueError(f"fit_best: expected from 2 to {rows} folds, one row in each at least, got {folds}: folds=5")
    settings = Settings(num_steps, learning_rate, num_particles, num_draws, tries)
    programs = {depth: family(depth) for depth in depths}
    if wrong := [type(program).__name__ for program in programs.values() if not callable(program)]:
        raise ValueError(
            f"fit_best: expected family(depth) to be a program, a function of the arguments, got {wrong[0]}: define "
            "the model inside of family, and return it"
        )
    fold_key, fit_key = jax.random.split(rng_key)
    parts = _fit_all(programs, fit_key, args, settings)
    if weigh == "evidence":
        weights = evidence_weights([part.bound for part in parts.values()])
        return WeightedPosterior(parts, dict(zip(depths, map(float, weights), strict=True)))
    order = np.asarray(jax.random.permutation(fold_key, rows))
    held_out = np.zeros((rows, len(depths)))
    for fold in range(folds):
        out = np.sort(order[fold::folds])
        kept = tuple(_without(value, out, rows) for value in args)
        key, score_key = jax.random.split(jax.random.fold_in(fold_key, fold))
        for column, part in enumerate(_fit_all(programs, key, kept, settings).values()):
            *inputs, y = (value[out] if _has_rows(value, rows) else value for value in args)
            held_out[out, column] = part.posterior.log_density(score_key, y, *inputs)
    weights = stacking_weights(held_out)
    means = dict(zip(depths, map(float, held_out.mean(0)), strict=True))
    return WeightedPosterior(parts, dict(zip(depths, map(float, weights), strict=True)), means)


def _fit_all(
    programs: dict[int, Callable[..., Any]], rng_key: Array, args: tuple[Any, ...], settings: Settings
) -> dict[int, IntegratedFit]:
    """The programs one after the other, each from the fit of the one before."""
    found: dict[int, IntegratedFit] = {}
    below = None
    for depth, program in programs.items():
        found[depth] = below = fit_integrated(program, jax.random.fold_in(rng_key, depth), args, settings, below)
    return found


def _has_rows(value: Any, rows: int) -> bool:
    return bool(np.ndim(value)) and len(value) == rows


def _without(value: Any, out: np.ndarray, rows: int) -> Any:
    return np.delete(np.asarray(value), out, axis=0) if _has_rows(value, rows) else value


def _require_family(family: Any, args: tuple[Any, ...], depths: Any) -> tuple[int, ...]:
    if not callable(family):
        raise ValueError(
            f"fit_best: expected family, a function from the number of layers to a program, got "
            f"{type(family).__name__}: fit_best(lambda depth: ..., key, X, y)"
        )
    depths = tuple(depths) if np.iterable(depths) else (depths,)
    counts = all(isinstance(d, int | np.integer) and d > 0 for d in depths)
    if not depths or not counts or list(depths) != sorted(set(depths)):
        raise ValueError(f"fit_best: expected depths as ascending numbers of layers, got {depths!r}: depths=(1, 2, 3)")
    if len(args) < 2 or not np.ndim(args[0]) or not np.ndim(args[-1]) or len(args[0]) != len(args[-1]):
        shapes = [np.shape(value) for value in args]
        raise ValueError(
            f"fit_best: expected inputs first and observations last, with as many rows, got arguments of shapes "
            f"{shapes}: fit_best(family, key, X, y)"
        )
    return depths
