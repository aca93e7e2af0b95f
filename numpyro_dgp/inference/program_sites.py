"""The sites of a guide and a model, found by tracing on shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import SVI

from numpyro_dgp._checks import is_concrete
from numpyro_dgp._compiled import one_thread
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import OUTSIDE_TRANSFORMATIONS, require
from numpyro_dgp.analysis.sites import Message, Trace, each_values_of, unwrap
from numpyro_dgp.jaxprs.argument_indices import ArgumentIndices, Outside
from numpyro_dgp.likelihoods.observed_only import warn_unobserved

__all__ = ["ProgramSite", "Rebuild", "SitesOfFit", "sites_of_fit"]

Rebuild = Callable[[list[Array]], tuple[tuple[Any, ...], dict[str, Any]]]
"""A function of arrays that gives the arguments ``(args, kwargs)`` of a model, see ``split_arguments``."""


class ProgramSite(NamedTuple):
    """A site of a program, without its values.

    Args:
        kind: ``"sample"``, ``"observed"`` or ``"param"``.
        distribution: names of the distribution and of the kernels of its function; for a parameter, its constraint.
        value: shape and type of the value, a ``jax.ShapeDtypeStruct`` or a tree of them.
        plates: names and sizes of the plates around it.
        scale: how often it counts; ``None`` where the program computes that.
        per_row: whether it has a value for each row of a plate.
        auxiliary: whether it is a site that only the guide has.
        constraint: of a parameter.
    """

    kind: str
    distribution: str
    value: Any
    plates: dict[str, int]
    scale: float | None
    per_row: bool
    auxiliary: bool
    constraint: Any

    def __str__(self) -> str:
        leaves = [f"{leaf.dtype} {leaf.shape}" for leaf in jax.tree.leaves(self.value)]
        plates = f" in plates {self.plates}" if self.plates else ""
        scale = "" if self.scale in (None, 1.0) else f", counted {self.scale:.6g} times"
        return f"{self.kind} {self.distribution}, {' and '.join(leaves)}{plates}{scale}"


class SitesOfFit(NamedTuple):
    """The sites of the guide, and of the model that is run with the guide's values, by name.

    Args:
        guide: the guide's.
        model: the model's.
        outside: indices among known arguments that are outside of arrays.
    """

    guide: dict[str, ProgramSite]
    model: dict[str, ProgramSite]
    outside: tuple[Outside, ...] = ()

    @property
    def parameters(self) -> dict[str, ProgramSite]:
        """The ``numpyro.param`` sites of both."""
        return {name: site for name, site in (self.model | self.guide).items() if site.kind == "param"}


@one_thread
def sites_of_fit(svi: SVI, rebuild: Rebuild, arrays: list[Array]) -> SitesOfFit:
    """Run the guide and the model of ``svi`` on shapes only. The guide must have been initialised."""
    found: list[SitesOfFit] = []

    def run(key: Array, arrays: list[Array]) -> tuple[()]:
        args, kwargs = rebuild(arrays)
        kwargs = {**kwargs, **svi.static_kwargs}
        checked = require(OUTSIDE_TRANSFORMATIONS)
        with handlers.block(), handlers.trace() as guide, handlers.seed(rng_seed=key), checked:
            svi.guide(*args, **kwargs)
        if getattr(svi.loss, "multi_sample_guide", False):  # its sites have several values, the model takes one
            drawn = {n: s | {"value": s["value"][0]} if s["type"] == "sample" else s for n, s in guide.items()}
        else:
            drawn = guide
        replayed = handlers.replay(trace=drawn)
        with handlers.block(), handlers.trace() as model, replayed, handlers.seed(rng_seed=key), checked:
            svi.model(*args, **kwargs)
        warn_unobserved(model)
        found.append(SitesOfFit(_sites(guide), _sites(model)))
        return ()

    closed, leaves = jax.make_jaxpr(run)(jax.random.key(0), arrays), jax.tree.leaves(arrays)
    indices = ArgumentIndices(closed, [False, *(True for _ in leaves)])
    return found[0]._replace(outside=tuple(indices.outside([None, *leaves])) if is_concrete(leaves) else ())


def _sites(trace: Trace) -> dict[str, ProgramSite]:
    return {name: _site(msg) for name, msg in trace.items() if msg["type"] in ("sample", "param")}


def _site(msg: Message) -> ProgramSite:
    param = msg["type"] == "param"
    constraint = msg["kwargs"].get("constraint", dist.constraints.real) if param else None
    plates = {frame.name: frame.size for frame in msg["cond_indep_stack"]}
    scale = 1.0 if msg["scale"] is None else float(msg["scale"]) if is_concrete(msg["scale"]) else None
    return ProgramSite(
        kind="param" if param else "observed" if msg["is_observed"] else "sample",
        distribution=type(constraint).__name__.lstrip("_") if param else _name(msg["fn"]),
        value=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), msg["value"]),
        plates=plates,
        scale=scale,
        per_row=bool(plates) and (not param or msg["kwargs"].get("event_dim") is not None),
        auxiliary=bool(msg["infer"].get("is_auxiliary")) if not param else False,
        constraint=constraint,
    )


def _name(fn: dist.Distribution) -> str:
    """The class of a distribution; of values of a function, with the classes of its kernels."""
    fn = unwrap(fn)
    functions = [values.function for values in each_values_of(fn) if values.function is not None]
    structures = [str(jax.tree.structure(getattr(function, "kernels", None))) for function in functions]
    kernels = re.findall(r"CustomNode\((\w+)\[", " ".join(structures))
    return type(fn).__name__ + (f" of a function with kernel {' '.join(kernels)}" if kernels else "")
