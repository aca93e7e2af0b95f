"""How ``benchmarks/mcmc.py`` samples a program, and what chains are worth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from implementations.mcmc_target import Target, Values
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS, SVI, init_to_sample, init_to_uniform, init_to_value
from numpyro.infer.mcmc import MCMCKernel

import numpyro_dgp as dgp

STEPS = ("num_steps",)
SWEEPS = ("evaluations", "gradients")


class Start(NamedTuple):
    """Values that chains begin at, and the fit that they come from, if there is one."""

    values: Values
    guide: Any = None
    params: Any = None

    @property
    def strategy(self) -> Callable[..., Any]:
        return init_to_value(values=self.values) if self.values else init_to_uniform


class Sampler(NamedTuple):
    """A kernel, its fields that count evaluations of the density (one a step if there are none), and steps a draw."""

    kernel: MCMCKernel
    counts: tuple[str, ...]
    thinning: int = 1


class RefusedError(ValueError):
    """A sampler that does not apply to a program."""


def start_of(target: Target, steps: int, anywhere: bool = False) -> Start:
    """The median of a fitted guide, or the start that the program has; or none."""
    if anywhere:
        return Start({})
    if target.start is not None:
        return Start(target.start)
    guide = dgp.guides.InducingPoint(target.model, other=dgp.guides.Normal())
    optimiser = optax.adam(optax.cosine_decay_schedule(0.02, steps))
    svi = SVI(target.model, guide, optimiser, dgp.ELBO())
    params = svi.run(jax.random.key(0), steps, *target.data, progress_bar=False).params
    return Start(guide.median(params, *target.data), guide, params)


def nuts(collapse: bool, in_guide: bool = False, dense: bool = False) -> Callable[[Target, Start], Sampler]:
    """``dense`` is a full mass matrix for the hyperparameters and the first of the Gaussian sites."""

    def build(target: Target, start: Start) -> Sampler:
        if not in_guide:
            program = dgp.for_mcmc(target.model, collapse=collapse)
            mass = [(*target.hyperparameters, target.gaussian[0])] if dense else False
            return Sampler(NUTS(program, init_strategy=start.strategy, dense_mass=mass), STEPS)
        if start.guide is None:
            raise RefusedError("chains do not start from a guide here")
        program = dgp.for_mcmc(target.model, start.params, guide=start.guide, collapse=collapse)
        return Sampler(NUTS(program, init_strategy=init_to_sample()), STEPS)

    return build


def gibbs(repeat: int = 1, rest: Any = None) -> Callable[[Target, Start], Sampler]:
    def build(target: Target, start: Start) -> Sampler:
        blocks = {name: dgp.mcmc.EllipticalSlice(repeat=repeat) for name in target.gaussian}
        rest_of = dgp.mcmc.BlockNUTS() if rest is None else rest
        return Sampler(dgp.mcmc.Gibbs(target.model, blocks=blocks, rest=rest_of, init_strategy=start.strategy), SWEEPS)

    return build


def sghmc(target: Target, start: Start) -> Sampler:
    return Sampler(dgp.mcmc.SGHMC(target.model, step_size=0.01, init_strategy=start.strategy), (), thinning=20)


def stock(target: Target, start: Start) -> Sampler:
    """NumPyro's NUTS on the program written by hand, from the same hyperparameters."""
    return Sampler(NUTS(target.model, init_strategy=start.strategy), STEPS)


SAMPLERS: dict[str, Callable[[Target, Start], Sampler]] = {
    "bare": nuts(False),
    "collapsed": nuts(True),
    "collapsed, dense mass": nuts(True, dense=True),
    "guide": nuts(False, in_guide=True),
    "collapsed, guide": nuts(True, in_guide=True),
    "Gibbs": gibbs(),
    "Gibbs, 4 ellipses": gibbs(4),
    "Gibbs, 4 ellipses, slice": gibbs(4, dgp.mcmc.Slice()),
    "SGHMC": sghmc,
    "stock, dense": stock,
}


class Run(NamedTuple):
    """How long, how many and how: draws of each chain after those of its warm-up."""

    draws: int
    warmup: int
    chains: int
    vectorized: bool
    seed: int


def run_chains(sampler: Sampler, data: tuple[jax.Array, ...], how: Run) -> tuple[Values, dict[str, jax.Array], float]:
    """Draws by chain, extra fields by chain, and seconds of a compiled run, warm-up included.

    The last state leaves the compiled program too: that of ``dgp.mcmc.SGHMC`` raises an error if the chain has
    run away.
    """

    def run(key: jax.Array, *data: jax.Array) -> tuple[Values, dict[str, jax.Array], Any]:
        thinning = sampler.thinning
        warmup, total = how.warmup * thinning, how.draws * thinning
        mcmc = MCMC(sampler.kernel, num_warmup=warmup, num_samples=total, thinning=thinning, progress_bar=False)
        mcmc.run(key, *data, extra_fields=(*sampler.counts, "diverging"))
        return mcmc.get_samples(), mcmc.get_extra_fields(), mcmc.last_state

    keys = jax.random.split(jax.random.key(how.seed), how.chains)
    if how.vectorized:
        compiled = jax.jit(jax.vmap(run, (0, *[None] * len(data)))).lower(keys, *data).compile()
        began = time.perf_counter()
        samples, fields, _ = jax.block_until_ready(compiled(keys, *data))
        return samples, fields, time.perf_counter() - began
    compiled = jax.jit(run).lower(keys[0], *data).compile()
    began = time.perf_counter()
    found = [jax.block_until_ready(compiled(key, *data))[:2] for key in keys]
    seconds = time.perf_counter() - began
    samples, fields = jax.tree.map(lambda *parts: jnp.stack(parts), *found)
    return samples, fields, seconds


def worth(target: Target, samples: Values) -> dict[str, Any]:
    """R-hat and the smallest effective sample size of hyperparameters and of function values, and the slowest one."""
    values = target.logarithms(samples)
    function = jax.jit(lambda s: jax.lax.map(lambda chain: jax.lax.map(target.function, chain), s))
    parts = {"hyper": values, "function": {"function": np.asarray(function(samples))}}
    found: dict[str, Any] = {}
    for part, mine in parts.items():
        sizes = {name: float(np.min(effective_sample_size(v))) for name, v in mine.items()}
        found[f"r_hat_{part}"] = max(float(np.max(split_gelman_rubin(v))) for v in mine.values())
        found[f"ess_{part}"] = min(sizes.values())
    found["slowest"] = min(values, key=lambda name: float(np.min(effective_sample_size(values[name]))))
    return found


def measure(name: str, target: Target, start: Start, how: Run) -> dict[str, Any]:
    """One row of the table."""
    load = os.getloadavg()[0]
    if name == "stock, dense":
        if target.dense is None:
            raise RefusedError("no dense program is written for it")
        target = target.dense
    sampler = SAMPLERS[name](target, start)
    try:
        samples, fields, seconds = run_chains(sampler, target.data, how)
    except ValueError as error:
        if not str(error).startswith(("for_mcmc:", "Gibbs:", "SGHMC:")):
            raise
        raise RefusedError(str(error)) from error
    counted = sum(float(fields[count].sum()) for count in sampler.counts)
    num = how.draws * how.chains
    steps = counted if sampler.counts else float(num * sampler.thinning)
    flat = jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), samples)
    return {
        "per_draw": steps / num,
        "seconds": seconds,
        "divergences": int(fields["diverging"].sum()),
        "load": load,
        **worth(target, samples),
        **target.score(target.thinned(flat), jax.random.key(5)),
    }
