"""A fit to new rows that starts at an earlier fit, whose layers represent the earlier rows.

Latents of new rows start at the best of several draws from the prior, parameters at the earlier fit, also of a program
with other inducing points.

``StreamingBound`` is the evidence lower bound of new rows, with the earlier fit in place of the earlier rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_dgp._checks import (
    expect,
    expect_kind,
    expected,
    inside_transformation,
    is_concrete,
    require_call,
    require_count,
    require_key,
    require_keywords,
    with_nearest,
)
from numpyro_dgp._compiled import Compiled, one_thread
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.calls import inspect_call
from numpyro_dgp.analysis.checks import ALL_ROWS, require
from numpyro_dgp.analysis.sites import scaled_log_prob, site_kind
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.rules.rule import Rule
from numpyro_dgp.guides.run import Run
from numpyro_dgp.inference.checkpoints import CheckpointFile
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import split_arguments, steps_of
from numpyro_dgp.inference.fit_loop import Steps, run_steps
from numpyro_dgp.inference.fit_start import require_compiling_itself, start_of_fit
from numpyro_dgp.inference.program_sites import Rebuild, SitesOfFit, sites_of_fit
from numpyro_dgp.math.linalg import cholesky
from numpyro_dgp.new_data.fitted_layers import FittedLayer, OpenLayer, fitted_layers, functions_of, open_layers
from numpyro_dgp.predict.fitted import Target
from numpyro_dgp.predict.posterior import Posterior

__all__ = ["Continued", "StreamingBound", "best_of_prior", "kept_parameters", "moved_parameters", "require_same_layers"]

_DRAWS = 200


def best_of_prior(fit: Posterior, rng_key: Array, rebuild: Rebuild, arrays: list[Array]) -> dict[str, Array]:
    """Of every row the draw of its latents from the prior that makes its observations most probable, by site.

    Args:
        fit: the functions and all else that is shared by rows.
        rng_key: PRNG key.
        rebuild: the arguments of the program, observations included, from ``arrays``.
        arrays: those of them that are arrays.
    """
    args, kwargs = rebuild(arrays)
    call = inspect_call(fit.model, None, args, kwargs)
    target = Target(None, tuple(frozenset(f.name for f in call.sites[y]["cond_indep_stack"]) for y in call.candidates))

    def one(key: Array, arrays: list[Array]) -> tuple[dict[str, Array], Array]:
        args, kwargs = rebuild(arrays)
        sites = fit.trace(target, key, {}, args, kwargs)
        drawn = {name: site for name, site in sites.items() if site["type"] == "sample" and site_kind(site) == "latent"}
        latents = {name: site for name, site in drawn.items() if call.program.is_predicted(site, target.plates)}
        observed = [site for site in sites.values() if site["type"] == "sample" and site["is_observed"]]
        score = sum((_by_row(scaled_log_prob(site)) for site in observed), jnp.zeros(()))
        return {name: site["value"] for name, site in latents.items()}, score

    values, scores = jax.jit(lambda keys, arrays: jax.lax.map(lambda key: one(key, arrays), keys))(
        jax.random.split(rng_key, _DRAWS), arrays
    )
    best = scores.argmax(0)
    return {name: jnp.take_along_axis(v, best[None, :, None], 0)[0] for name, v in values.items() if v.ndim == 3}


def _by_row(terms: Array) -> Array:
    """Sums over all axes but the last, that of the rows."""
    return terms.reshape(-1, terms.shape[-1]).sum(0)


def kept_parameters(fitted: Mapping[str, Any], prefix: str, program: SitesOfFit) -> dict[str, Array]:
    """The parameters of a fit that a program has too, in the same shape, without those of single rows.

    Args:
        fitted: all parameters of the fit.
        prefix: of the names of those that belong to sites.
        program: sites of the guide and model that get the new rows.

    Raises:
        ValueError: a parameter of the fit that the program does not have and that belongs to none of its sites.
    """
    known = program.parameters
    stems = tuple(f"{name}_{prefix}_" for name in program.model)
    if lost := {name for name in fitted if name not in known and not name.startswith(stems)}:
        raise expected(
            "every parameter of the fit in the program of this guide",
            f"none for {with_nearest(lost, known)}",
            "pass the program of the fit with other inducing points, and nothing renamed",
        )
    return {
        name: value
        for name, value in fitted.items()
        if name in known and not known[name].per_row and np.shape(value) == known[name].value.shape
    }


def require_layers(fitted: Mapping[str, OpenLayer], program: SitesOfFit, guide: Guide) -> None:
    """Raise unless a program has the layers of a fit, and its guide has parameters for them."""
    if fitted.keys() - program.model.keys():
        _refuse_layers(fitted, [name for name, site in program.model.items() if site.kind == "sample"])
    for name in fitted:
        expect(
            any(parameter.startswith(f"{name}_{guide.prefix}_") for parameter in program.parameters),
            f"a guide with parameters for q(v) of {name!r}",
            f"{type(guide).__name__}, which computes it from the rows of a call alone",
            "dgp.update(..., guide=dgp.guides.InducingPoint(model))",
        )


def require_same_layers(fitted: Mapping[str, OpenLayer], layers: Mapping[str, OpenLayer]) -> None:
    """Raise unless two programs have layers of the same names, widths and numbers of outputs."""
    if fitted.keys() != layers.keys():
        _refuse_layers(fitted, layers)
    for name, layer in layers.items():
        ours, theirs = ((f.function.dims, f.function.outputs) for f in (layer, fitted[name]))
        expect(ours == theirs, f"layer {name!r} with columns and outputs {theirs}", ours, "change only inducing points")


def moved_parameters(fitted: Mapping[str, OpenLayer], layers: Mapping[str, OpenLayer]) -> dict[str, Array]:
    """Parameters of Gaussian q(v) at which the functions of ``layers`` are those of the fit at their inducing points.

    Posteriors of other kinds start as they do in every fit.
    """
    found = {}
    for name, layer in layers.items():
        record = layer.record
        if record.gaussian is None or layer.belief is None:
            continue
        loc, covariance = fitted[name].function.whitened_values_of(layer.function)
        if record.gaussian.diagonal:
            scale = jnp.sqrt(jnp.diagonal(covariance, axis1=-2, axis2=-1))
        else:
            scale = cholesky(covariance, f"the covariance of q(v) of {name!r} at its new inducing points")
        shape = layer.belief.loc.shape
        found[f"{record.param_prefix}_loc"] = loc.reshape(shape)
        found[f"{record.param_prefix}_{record.gaussian.scale}"] = scale.reshape(*shape, *scale.shape[2:])
    return found


def _refuse_layers(fitted: Mapping[str, OpenLayer], got: Collection[str]) -> NoReturn:
    raise expected(
        f"a program with the layers of the fit, {sorted(fitted)}",
        sorted(got),
        "only inducing points may be others; dgp.initial.deepen adds layers",
    )


class StreamingBound(ELBO):
    r"""The bound of new rows; the ratio of a layer's posterior to its prior replaces the likelihood of earlier rows.

    .. math:: \mathcal L = E_q[\log p(y_\mathrm{new} \mid f)] - \sum_\ell \mathrm{KL}[q(v^\ell) \,\|\, p(v^\ell)]
              + \lambda \sum_\ell E_q\Bigl[\log \frac{q_\mathrm{old}(u^\ell)}{p_\mathrm{old}(u^\ell)}\Bigr], \qquad
              u^\ell = f^\ell(Z^\ell_\mathrm{old}) .

    Both densities of the last term are those of the earlier fit, with its hyperparameters; the values u are those of
    the function now. They are Gaussian under q, so that the term has a closed form and adds no noise.

    Args:
        fitted: the layers of the earlier fit, by site.
        num_particles: as in :class:`~numpyro_dgp.ELBO`.
        memory: :math:`\lambda`.

    Source: Bui et al. (2017), equation 6, here for each layer of a program.
    """

    def __init__(self, fitted: Mapping[str, FittedLayer], num_particles: int = 1, *, memory: float = 1.0) -> None:
        super().__init__(num_particles)
        self.fitted = dict(fitted)
        self.memory = jnp.asarray(memory)  # an array, so that compiled steps are for any

    def _of_run(self, found: Run) -> Array:
        functions = functions_of(found.model)
        ratios = [layer.log_ratio(functions[name]) for name, layer in self.fitted.items()]
        ratio = jnp.sum(jnp.stack(ratios))
        return super()._of_run(found) + self.memory.astype(ratio.dtype) * ratio


@dataclasses.dataclass(frozen=True)
class Continued:
    """The settings of a continued fit.

    Args:
        num_steps: steps of the optimiser.
        optimizer: gives it, from the guide and the layers of the program.
        program: the model and guide to go on with; ``None`` for those of the fit.
        num_particles: draws of the hidden layers in a step.
        memory: weight of the previous posterior.
        progress_bar: show a progress bar.
        moves: whether hyperparameters, and parameters of single rows, are optimised too.
        rows_only: whether only parameters of single rows are optimised; they start at the best of draws from the prior.
    """

    num_steps: int
    optimizer: Callable[[Guide, Mapping[str, OpenLayer]], Any]
    program: tuple[Callable[..., Any], Guide] | None
    num_particles: int
    memory: float
    progress_bar: bool
    moves: bool = True
    rows_only: bool = False

    def run(self, posterior: Posterior, rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Posterior:
        """The posterior after the rows of ``args`` and ``kwargs``."""
        _require_fit(posterior, None if self.program is None else self.program[1])
        if self.moves:
            require_compiling_itself(rng_key, args, kwargs)
        require_key(rng_key)
        require_count("num_steps", self.num_steps, "1000")
        require_count("num_particles", self.num_particles, "1")
        old: Any = posterior.guide
        model, guide = self.program or (posterior.model, _without_starts(old))
        require_keywords(("num_steps", "num_particles", "optimizer", "memory", "progress_bar"), model, kwargs)
        require_call(model, args, kwargs, "as in the fit, (posterior, key, X, y)")
        arrays, rebuild = split_arguments(args, kwargs)
        with require(ALL_ROWS):
            fitted = layers = open_layers(posterior.model, old, posterior.seeded, rebuild, arrays)
        bound = StreamingBound(fitted_layers(fitted, bounded=self.moves), self.num_particles, memory=self.memory)
        with require(ALL_ROWS):
            sites = sites_of_fit(SVI(model, guide, optax.identity(), bound), rebuild, arrays)
        self._require_shared(sites)
        require_layers(fitted, sites, guide)
        start = kept_parameters(posterior.params, old.prefix, sites)
        if self.program is not None:
            start = {name: value for name, value in start.items() if name not in {f"{site}_Z" for site in fitted}}

            def seeded(program: Callable[..., Any], key: Array) -> Callable[..., Any]:
                seeded: Callable[..., Any] = handlers.substitute(handlers.seed(program, key), data=start)
                return seeded

            layers = open_layers(model, guide, seeded, rebuild, arrays)
            require_same_layers(fitted, layers)
            start |= moved_parameters(fitted, layers)
        optimizer = self.optimizer(guide, layers)
        own = set[str]()
        if self.rows_only:
            own = {name for name, site in sites.parameters.items() if site.per_row}
            if not own:
                return Posterior(model, guide, start, site=posterior.site, options=posterior.options)
            fit = Posterior(model, guide, start, site=posterior.site, options=posterior.options)
            found = best_of_prior(fit, rng_key, rebuild, arrays)
            named = {f"{name}_{guide.prefix}_loc": value for name, value in found.items()}
            start |= {name: named[name] for name in own & named.keys()}
            labels = {True: optimizer, False: optax.set_to_zero()}
            optimizer = optax.multi_transform(labels, lambda params: {name: name in own for name in params})
        svi = SVI(model, guide, optimizer, bound)
        result = self._fit(svi, rng_key, rebuild, arrays, start)
        params = result.params
        if self.rows_only:  # what stays, as it was: constraints round
            params = params | {name: value for name, value in start.items() if name not in own}
        return Posterior(model, guide, params, site=posterior.site, options=posterior.options)

    def _fit(
        self, svi: SVI, rng_key: Array, rebuild: Rebuild, arrays: list[Array], start: dict[str, Array]
    ) -> SVIRunResult:
        """``dgp.fit``, compiled once for all fits that go on with as many rows of the same program."""
        compiled = Compiled(steps_of(svi.update, rebuild))

        def advance(state: SVIState, step: int, count: int) -> tuple[SVIState, np.ndarray]:
            state, losses = compiled(state, arrays, jnp.asarray(count))
            return state, np.asarray(losses)[:count]

        @one_thread
        def evaluate(state: SVIState, step: int) -> Array:
            args, kwargs = rebuild(arrays)
            return svi.evaluate(state, *args, **kwargs)

        state, _ = start_of_fit(svi, rng_key, rebuild, arrays, start)
        if not is_concrete(arrays, state) or inside_transformation():
            args, kwargs = rebuild(arrays)
            state = jax.lax.fori_loop(0, self.num_steps, lambda _, s: svi.update(s, *args, **kwargs)[0], state)
            return SVIRunResult(svi.get_params(state), state, jnp.zeros(0))
        steps = Steps(advance, evaluate)
        return run_steps(svi, state, self.num_steps, steps, CheckpointFile(None), self.progress_bar)

    def _require_shared(self, sites: SitesOfFit) -> None:
        own = sorted(name for name, site in sites.parameters.items() if site.per_row)
        if own and not self.moves:
            raise expected(
                "parameters that all rows share", f"{own[0]!r} with values of every row", "call dgp.update instead"
            )


def _without_starts(guide: Guide) -> Guide:
    """The guide without initial means, which are those of the rows of the fit; what rows share has its value."""

    def free(rule: Any) -> Rule:
        return rule if getattr(rule, "loc", None) is None else dataclasses.replace(rule, loc=None)

    return guide.with_rules(free)


def _require_fit(posterior: Any, guide: Any) -> None:
    example = "dgp.Posterior(model, dgp.guides.InducingPoint(model), result.params)"
    expect_kind(posterior, Posterior, "a Posterior", example)
    expect(
        posterior.samples is None,
        "a Posterior with a guide",
        "one with draws of MCMC, which hold no q(v) to go on from",
        f"fit a guide, {example}, or run the chain on all rows",
    )
    for which in (posterior.guide, posterior.guide if guide is None else guide):
        expect(
            adapted(which).has_rules,
            "a guide of dgp.guides",
            f"{type(which).__name__}, of which it is not known what belongs to which layer",
            example,
        )
        expect(
            which.companion is None,
            "points for hyperparameters",
            f"{type(which.companion).__name__} for them",
            "other=dgp.guides.Delta(), the default",
        )
