"""A fit to new rows that begins at a fit to others and has its layers in place of their rows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_dgp._checks import inside_transformation, is_concrete, require_count, require_key, require_keywords
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.compiled import Compiled, one_thread
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.inference.checkpoints import Checkpoint
from numpyro_dgp.inference.fit import split_arguments, steps_of
from numpyro_dgp.inference.fit_loop import run_steps
from numpyro_dgp.inference.fit_start import require_compiling_itself, start_of_fit
from numpyro_dgp.inference.program_sites import Rebuild, SitesOfFit, sites_of_fit
from numpyro_dgp.model.refusals import all_rows
from numpyro_dgp.new_data.fitted_layers import OpenLayer, fitted_layers, open_layers
from numpyro_dgp.new_data.latent_starts import best_of_prior
from numpyro_dgp.new_data.moved_layers import kept_parameters, moved_parameters, require_layers, require_same_layers
from numpyro_dgp.new_data.streaming_bound import StreamingBound
from numpyro_dgp.predict import Posterior

__all__ = ["Continued"]


@dataclasses.dataclass(frozen=True)
class Continued:
    """How a fit goes on.

    Args:
        owner: the function that the user has called, for messages.
        num_steps: steps of the optimiser.
        optimizer: gives it, from the guide and the layers of the program.
        program: the model and guide to go on with; ``None`` for those of the fit.
        num_particles: draws of the hidden layers in a step.
        memory: how much what is known counts.
        progress_bar: show a progress bar.
        moves: whether hyperparameters, and what single rows have, are learned too.
        rows_only: whether what single rows have is all that is learned; it starts at the best of draws from the prior.
    """

    owner: str
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
        owner = self.owner
        _require_fit(owner, posterior, None if self.program is None else self.program[1])
        if self.moves:
            require_compiling_itself(owner, rng_key, args, kwargs)
        require_key(owner, rng_key)
        require_count(owner, "num_steps", self.num_steps, "1000")
        require_count(owner, "num_particles", self.num_particles, "1")
        old: Any = posterior.guide
        model, guide = self.program or (posterior.model, _without_starts(old))
        require_keywords(owner, ("num_steps", "num_particles", "optimizer", "memory", "progress_bar"), model, kwargs)
        arrays, rebuild = split_arguments(args, kwargs)
        with all_rows(owner=owner):
            fitted = layers = open_layers(owner, posterior.model, old, posterior.seeded, rebuild, arrays)
        bound = StreamingBound(fitted_layers(fitted, bounded=self.moves), self.num_particles, memory=self.memory)
        with all_rows(owner=owner):
            sites = sites_of_fit(SVI(model, guide, optax.identity(), bound), rebuild, arrays)
        self._require_shared(sites)
        require_layers(owner, fitted, sites, guide)
        start = kept_parameters(owner, posterior.params, old.prefix, sites)
        if self.program is not None:
            start = {name: value for name, value in start.items() if name not in {f"{site}_Z" for site in fitted}}

            def seeded(program: Callable[..., Any], key: Array) -> Callable[..., Any]:
                seeded: Callable[..., Any] = handlers.substitute(handlers.seed(program, key), data=start)
                return seeded

            layers = open_layers(owner, model, guide, seeded, rebuild, arrays)
            require_same_layers(owner, fitted, layers)
            start |= moved_parameters(fitted, layers)
        optimizer = self.optimizer(guide, layers)
        own = set[str]()
        if self.rows_only:
            own = {name for name, site in sites.parameters.items() if site.per_row}
            if not own:
                return Posterior(model, guide, start, site=posterior.site)
            fit = Posterior(model, guide, start, site=posterior.site)
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
        return Posterior(model, guide, params, site=posterior.site)

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

        state, _ = start_of_fit(self.owner, svi, rng_key, rebuild, arrays, start)
        if not is_concrete(arrays, state) or inside_transformation():
            args, kwargs = rebuild(arrays)
            state = jax.lax.fori_loop(0, self.num_steps, lambda _, s: svi.update(s, *args, **kwargs)[0], state)
            return SVIRunResult(svi.get_params(state), state, jnp.zeros(0))
        no_file = Checkpoint(self.owner, None, self.num_steps)
        return run_steps(svi, state, self.num_steps, advance, evaluate, no_file, self.progress_bar)

    def _require_shared(self, sites: SitesOfFit) -> None:
        own = sorted(name for name, site in sites.parameters.items() if site.per_row)
        if own and not self.moves:
            raise ValueError(
                f"{self.owner}: expected parameters that all rows share, got {own[0]!r} with values of every row: "
                "call dgp.update, which learns those of the new rows"
            )


def _without_starts(guide: Guide) -> Guide:
    """The guide without initial means, which are those of the rows of the fit; what rows share has its value."""

    def free(rules: dict[str, Any]) -> dict[str, Any]:
        started = {name for name, rule in rules.items() if getattr(rule, "loc", None) is not None}
        return {n: dataclasses.replace(rule, loc=None) if n in started else rule for n, rule in rules.items()}

    found, choices = copy.copy(guide), guide.choices
    found.choices = dataclasses.replace(choices, rules=free(choices.rules), sites=free(choices.sites))
    return found


def _require_fit(owner: str, posterior: Any, guide: Any) -> None:
    example = "dgp.Posterior(model, dgp.guides.InducingPoint(model), result.params)"
    if not isinstance(posterior, Posterior):
        raise ValueError(f"{owner}: expected a Posterior, got {type(posterior).__name__}: {example}")
    if posterior.samples is not None:
        raise ValueError(
            f"{owner}: expected a Posterior with a guide, got one with draws of MCMC, which hold no q(v) to go on "
            f"from: fit a guide, {example}, or run the chain on all rows"
        )
    for which in (posterior.guide, posterior.guide if guide is None else guide):
        if not isinstance(which, Guide):
            raise ValueError(
                f"{owner}: expected a guide of dgp.guides, got {type(which).__name__}, of which it is not known what "
                f"belongs to which layer: {example}"
            )
        if which.companion is not None:
            raise ValueError(
                f"{owner}: expected points for hyperparameters, got {type(which.companion).__name__} for them: "
                "other=dgp.guides.Delta(), the default"
            )
