"""Gibbs sampling of programs: Gaussian blocks by elliptical slices, the rest by NUTS.

The blocks of sites that ``dgp.mcmc.Gibbs`` moves together, and their updates: defaults, and choices of the user.

The state of chains of ``dgp.mcmc.Gibbs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import initialize_model

from numpyro_dgp._checks import expect, expect_kind, expected, with_nearest
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.weights import StandardNormal
from numpyro_dgp.mcmc.block_moves import Block, BlockTarget, Move, Priors, Update
from numpyro_dgp.mcmc.for_mcmc import Collapse, prepared
from numpyro_dgp.mcmc.gaussian_blocks import Latents, latents, priors_at
from numpyro_dgp.mcmc.program_kernel import ProgramKernel, first_position, for_chains, split_keys
from numpyro_dgp.mcmc.slices import EllipticalSlice
from numpyro_dgp.mcmc.trajectories import BlockNUTS

__all__ = ["Gibbs", "GibbsState", "PlannedBlock", "planned", "require_updates"]

_Chosen: TypeAlias = dict[tuple[str, ...], Update]


class PlannedBlock(NamedTuple):
    """Sites that move together.

    Args:
        sites: their names.
        update: how they move.
        gaussian: whether the move needs their priors.
        standard: whether these are standard normal whatever the values of other sites.
    """

    sites: tuple[str, ...]
    update: Update
    gaussian: bool
    standard: bool


def require_updates(blocks: Any, rest: Any) -> _Chosen:
    """The blocks of the user by their sites; raise unless they are updates by site."""
    expect_kind(
        blocks, Mapping | None, "blocks as a dict of updates by site", 'blocks={"h": dgp.mcmc.EllipticalSlice()}'
    )
    chosen = {(sites,) if isinstance(sites, str) else tuple(sites): update for sites, update in (blocks or {}).items()}
    for sites, update in chosen.items():
        _require_update(f"for the block {' + '.join(map(repr, sites))}", update)
    _require_update("as rest", rest)
    expect(
        not isinstance(rest, EllipticalSlice),
        "rest to be an update of any site",
        "EllipticalSlice, which needs Gaussian priors",
        "dgp.mcmc.BlockNUTS() or dgp.mcmc.Slice()",
    )
    return chosen


def _require_update(where: str, update: Any) -> None:
    if isinstance(update, type) or not isinstance(update, Update):
        got = f"the class {update.__name__}" if isinstance(update, type) else type(update).__name__
        raise expected(
            f"an update {where}", got, "dgp.mcmc.BlockNUTS(), Slice(), or for Gaussian sites EllipticalSlice()"
        )


def planned(found: Latents, chosen: _Chosen, rest: Update) -> dict[str, PlannedBlock]:
    """The blocks of a sweep in their order, by the names of their sites.

    Args:
        found: its latent sites.
        chosen: updates by the sites of a block, from the user.
        rest: the update of sites that are in no block.

    Raises:
        ValueError: blocks that do not fit the program.
    """
    updates = _named(found, chosen)
    taken = {name for sites in updates for name in sites}
    for name in found.moved:
        if name not in taken:
            updates[(name,)] = EllipticalSlice()
            taken.add(name)
    others = tuple(name for name in found.names if name not in taken)
    blocks = {"rest": PlannedBlock(others, rest, gaussian=False, standard=False)} if others else {}
    for sites in sorted(updates, key=lambda sites: found.names.index(sites[0])):
        update = updates[sites]
        sliced = isinstance(update, EllipticalSlice)
        if sliced:
            _require_gaussian(found, sites)
        standard = found.standard.issuperset(sites)
        blocks["+".join(sites)] = PlannedBlock(sites, update, gaussian=sliced, standard=standard)
    return blocks


def _named(found: Latents, chosen: _Chosen) -> _Chosen:
    """Updates by latent sites: a layer's name means its non-centred values."""
    updates: _Chosen = {}
    seen: set[str] = set()
    for given, update in chosen.items():
        whites = {name: f"{name}_white" for name in given if name not in found.names}
        sites = tuple(whites.get(name, name) for name in given)
        if integrated := found.integrated.intersection(given):
            raise expected(
                "blocks of latent sites",
                f"{min(integrated)!r}, which is integrated out",
                "leave it out, or pass collapse=False",
            )
        if unknown := [name for name in given if whites.get(name, name) not in found.names]:
            raise expected(
                "blocks of latent sites", with_nearest(unknown, found.names), f"they are {list(found.names)}"
            )
        if twice := sorted(seen.intersection(sites)) or [name for name in sites if sites.count(name) > 1]:
            raise expected("every site in one block", f"{twice[0]!r} in two", "leave one out")
        seen |= set(sites)
        updates[sites] = update
    return updates


def _require_gaussian(found: Latents, sites: tuple[str, ...]) -> None:
    if others := [name for name in sites if name not in found.gaussian]:
        raise expected(
            "Gaussian priors for EllipticalSlice", repr(others[0]), "use dgp.mcmc.Slice() or dgp.mcmc.BlockNUTS()"
        )
    if len(sites) > 1 and (others := [name for name in sites if name not in found.standard]):
        raise expected(
            "standard normal sites where EllipticalSlice moves several together",
            f"{others[0]!r}, whose prior may depend on the others",
            "give it a block of its own",
        )


class GibbsState(NamedTuple):
    """State of ``dgp.mcmc.Gibbs``; names in ``extra_fields`` of ``MCMC.run``.

    Args:
        z: values in unconstrained space.
        potential_energy: negative log joint density there, as NUTS has it.
        blocks: the state of every block that moves, by the names of its sites joined by ``+``: ``"blocks.h_white"``.
        evaluations: of the density in the last sweep, without a gradient.
        gradients: evaluations of the density with its gradient in the last sweep.
        diverging: whether a trajectory of NUTS diverged.
        rng_key: for the next sweep.
    """

    z: Block
    potential_energy: Array
    blocks: dict[str, Any]
    evaluations: Array
    gradients: Array
    diverging: Array
    rng_key: Array


Blocks: TypeAlias = Mapping[str | tuple[str, ...], Update]


class _Run(NamedTuple):
    """The analysis of a program, made when a run begins."""

    blocks: dict[str, PlannedBlock]
    moves: dict[str, Move]
    potential: Callable[..., Callable[[Block], Array]]
    postprocess: Callable[..., Any]


class Gibbs(ProgramKernel):
    r"""Gibbs sampling of a deep GP, block by block, a kernel for ``numpyro.infer.MCMC``.

    It samples the program ``dgp.for_mcmc(model)``, in which inducing values that only Gaussian likelihoods depend on,
    dist.Normal(a * v + b, scale), are integrated and drawn exactly (unless nothing else is left to move). A sweep moves
    everything else:

    1. ``rest``, the sites that are in no block (hyperparameters), move by NUTS given all others;
    2. every block that is Gaussian a priori moves by an elliptical slice: the inducing values of a layer, its
       non-centred hidden values, latents, values of exact layers.

    With exact layers (``inducing=None``) under ``numpyro.sample("y", g(h, noise=s), obs=y)`` this is the scheme of
    Sauer et al. (2023). The target and the sites of the draws are those of NUTS on ``dgp.for_mcmc(model)``.

    Args:
        model: the program, or ``dgp.for_mcmc`` of it, which then takes ``params``, ``noncentered`` and ``collapse``.
        params: values for its ``numpyro.param`` sites, for example ``svi_result.params``.
        blocks: updates by site, or by several sites that move together; a layer may be given by the name of its hidden
            values. Sites not named here are blocks as above.
        rest: the update of all sites that are no blocks, :class:`~numpyro_dgp.mcmc.BlockNUTS` or
            :class:`~numpyro_dgp.mcmc.Slice`.
        noncentered: put the values of layers in the form of :class:`NonCentered`. With ``False``, hyperparameters of a
            layer move given its values: for exact layers only, those of sparse layers would hardly move.
        collapse: integrate layers, as in :func:`for_mcmc`: wherever that is possible (``"auto"``), nowhere (``False``),
            or at least one of them (``True``).
        init_strategy: NumPyro's, for example ``init_to_value(values=guide.median(params, X, y))``.

    Raises:
        ValueError: a model that is no function, blocks that are no updates, or as :func:`for_mcmc`; when run, a
            block of no latent site, of an integrated layer or with a site of another one, an ``EllipticalSlice`` of a
            site without a Gaussian prior, a discrete site, a program without observations.

    Example:
        >>> import jax, numpyro, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> dgp.mcmc.Gibbs(model, blocks={"f": dgp.mcmc.Slice()}, collapse=False)
        Gibbs(model=for_mcmc(model=shallow, collapse=False), blocks={('f',): Slice()})
        >>> mcmc = numpyro.infer.MCMC(dgp.mcmc.Gibbs(model), num_warmup=0, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), X, y)
        >>> mcmc.get_samples()["f"].shape
        (20, 5)

    Source: Murray et al. (2010); Sauer et al. (2023).
    """

    def __init__(
        self,
        model: Callable[..., Any],
        params: Mapping[str, Array] | None = None,
        *,
        blocks: Blocks | None = None,
        rest: Update = BlockNUTS(),
        noncentered: bool = True,
        collapse: Collapse = "auto",
        init_strategy: Callable[..., Any] = init_to_uniform,
    ) -> None:
        super().__init__(model, init_strategy)
        self._program = prepared(model, params, noncentered=noncentered, collapse=collapse)
        self._blocks, self._rest = require_updates(blocks, rest), rest
        self._run: _Run | None = None

    __repr__ = brief

    @property
    def model(self) -> Callable[..., Any]:
        """The program that is sampled, that of :func:`for_mcmc`."""
        return self._program

    def get_diagnostics_str(self, state: GibbsState) -> str:
        moves = {} if self._run is None else self._run.moves
        return "; ".join(f"{label}: {move.describe(state.blocks[label])}" for label, move in moves.items())

    def postprocess_fn(self, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None) -> Callable[..., Any]:
        return self._begun().postprocess(*model_args, **(model_kwargs or {}))

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Block | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> GibbsState:
        kwargs = model_kwargs or {}
        rng_key, init_key, start_key = split_keys(rng_key, 3)
        blocks = planned(latents(self._bound(model_args, kwargs)), self._blocks, self._rest)
        found = initialize_model(
            init_key,
            self._program,
            init_strategy=self._init_strategy,
            dynamic_args=True,
            model_args=model_args,
            model_kwargs=kwargs,
        )
        moves = {label: block.update.open() for label, block in blocks.items()}
        self._run = _Run(blocks, moves, found.potential_fn, found.postprocess_fn)
        z = first_position(init_params, found.param_info.z)
        start = partial(self._start, num_warmup=num_warmup, args=model_args, kwargs=kwargs)
        return for_chains(start, rng_key, rng_key, start_key, z)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: handlers.seed(self._program, 0)(*args, **kwargs)

    def _begun(self) -> _Run:
        if self._run is None:
            raise expected("init before anything else", "no state", "run it by numpyro.infer.MCMC")
        return self._run

    def _start(
        self, rng_key: Array, start_key: Array, z: Block, num_warmup: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GibbsState:
        run, states = self._begun(), {}
        for (label, block), key in zip(run.blocks.items(), jax.random.split(start_key, len(run.blocks)), strict=True):
            own = {name: z[name] for name in block.sites}
            states[label] = run.moves[label].start(key, own, num_warmup, self._given(label, z, args, kwargs))
        zero = jnp.zeros((), int)
        return GibbsState(z, run.potential(*args, **kwargs)(z), states, zero, zero, jnp.array(False), rng_key)

    def step(self, state: GibbsState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GibbsState:
        """One sweep."""
        run = self._begun()
        rng_key, *keys = jax.random.split(state.rng_key, len(run.moves) + 1)
        z, states = dict(state.z), dict(state.blocks)
        energy = run.potential(*args, **kwargs)(z)
        evaluations, gradients, diverging = jnp.ones((), int), jnp.zeros((), int), jnp.array(False)
        for (label, move), key in zip(run.moves.items(), keys, strict=True):
            own = {name: z[name] for name in run.blocks[label].sites}
            given = self._given(label, z, args, kwargs)
            states[label], own, energy = move.move(key, states[label], own, energy, given)
            z |= own
            evaluations, gradients = evaluations + states[label].evaluations, gradients + states[label].gradients
            diverging = diverging | getattr(states[label], "diverging", False)
        return GibbsState(z, energy, states, evaluations, gradients, diverging, rng_key)

    def _given(self, label: str, z: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockTarget:
        """The target of a block at the values of the others in z."""
        run = self._begun()
        block = run.blocks[label]
        priors: Priors
        if not block.gaussian:
            priors = {}
        elif block.standard:
            priors = {name: StandardNormal(z[name].shape, z[name].dtype) for name in block.sites}
        else:
            priors = priors_at(self._bound(args, kwargs), run.postprocess(*args, **kwargs)(z), block.sites)
        potential = run.potential(*args, **kwargs)
        return BlockTarget(lambda own: potential(z | own), priors)
