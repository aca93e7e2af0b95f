"""The surrogate of a search: fits of one program to a growing number of rows.

A compiled program is for one number of rows. A search that adds rows one by one would be compiled in every round;
padded to 64, 128, 256, ... rows, of which the rest is masked, it is compiled once per doubling. Under a guide of
NumPyro the last layer is integrated out, and the guide covers all other sites.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoGuide

from numpyro_dgp._checks import expect, expect_kind, expected
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import OUTSIDE_TRANSFORMATIONS, require
from numpyro_dgp.analysis.program import inspect_program, run_on_shapes
from numpyro_dgp.analysis.sites import Message, mask_rows
from numpyro_dgp.design.input_space import Box
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import fit
from numpyro_dgp.inference.program_sites import sites_of_fit
from numpyro_dgp.mcmc.for_mcmc import for_mcmc
from numpyro_dgp.optim.natural import GaussianSite, NaturalGradient, gaussian_sites
from numpyro_dgp.predict.posterior import Posterior

__all__ = [
    "Data",
    "IntegratedSurrogate",
    "KnownRows",
    "Surrogate",
    "filled_rows",
    "made_surrogate",
    "plates_of_rows",
    "require_maker",
    "takes_runs",
    "with_known_rows",
]

_FEWEST = 64


class KnownRows(handlers.mask):
    """Masks sites in the plates of the rows.

    Args:
        plates: their names.
        known: which rows count (N,).
    """

    def __init__(self, plates: frozenset[str], known: Array) -> None:
        self.plates = plates
        super().__init__(mask=known)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample":
            return
        for frame in msg["cond_indep_stack"]:
            if frame.name in self.plates:
                mask_rows(msg, self.mask, frame.dim)


def takes_runs(model: Callable[..., Any]) -> bool:
    """Whether a program has the argument ``runs``, the inputs of all evaluations."""
    return "runs" in inspect.signature(model).parameters


def with_known_rows(model: Callable[..., Any], plates: frozenset[str], runs: Array | None = None) -> Callable[..., Any]:
    """``model(X, y)`` as a program ``(X, y, known)``, in which rows that are not ``known`` (N,) do not count.

    Args:
        model: the program.
        plates: those of the rows.
        runs: the inputs (R, D) that a program with the argument ``runs`` gets, whatever rows it is called with.
    """
    more = {"runs": runs} if takes_runs(model) else {}

    def program(X: Any, y: Any = None, known: Any = None) -> Any:
        if known is None:
            return model(X, y, **more)
        with KnownRows(plates, known):
            return model(X, y, **more)

    return program


def filled_rows(X: np.ndarray, y: np.ndarray) -> tuple[Array, Array, Array]:
    """Rows with copies of the last one behind them, and which of them are known: (R, D), (R,), (R,)."""
    size = max(_FEWEST, 1 << (len(y) - 1).bit_length())
    rows = np.minimum(np.arange(size), len(y) - 1)
    dtype = jnp.result_type(float)
    return jnp.asarray(X[rows], dtype), jnp.asarray(y[rows], dtype), jnp.arange(size) < len(y)


def plates_of_rows(model: Callable[..., Any], box: Box) -> frozenset[str]:
    """The plates that have as many rows as X, found by two runs of ``model(X)`` on shapes.

    Raises:
        ValueError: no such plate, or a site outside of them that grows with the rows.
    """
    few, more = (_shapes(model, box, count) for count in (5, 7))
    plates = frozenset(name for name, size in few.plates.items() if (size, more.plates.get(name)) == (5, 7))
    outside = [name for name, (shape, frames) in few.sites.items()
               if name in more.sites and more.sites[name][0] != shape and not frames & plates]  # fmt: skip
    if outside or not plates:
        got = f"{outside[0]!r} outside of it" if plates else "none"
        raise expected(
            "a model(X, y) whose values of rows are all in a numpyro.plate of the rows",
            got,
            'rows that are not known yet are masked there, with numpyro.plate("data", len(X)): ...',
        )
    return plates


class _Shapes(NamedTuple):
    """Sizes of plates by name, and of every site the shape and the names of its plates."""

    plates: dict[str, int]
    sites: dict[str, tuple[tuple[int, ...], frozenset[str]]]


def _shapes(model: Callable[..., Any], box: Box, count: int) -> _Shapes:
    X = jnp.asarray(np.broadcast_to(box.low, (count, box.dims)), jnp.result_type(float))
    more = {"runs": X[:3]} if takes_runs(model) else {}
    sites = {name: site for name, site in run_on_shapes(model, (X,), more)[0].items() if site["type"] == "sample"}
    frames = {frame.name: frame.size for site in sites.values() for frame in site["cond_indep_stack"]}
    shapes = {
        name: (tuple(site["fn"].shape()), frozenset(frame.name for frame in site["cond_indep_stack"]))
        for name, site in sites.items()
    }
    return _Shapes(frames, shapes)


Params = Mapping[str, Any]


class Data(NamedTuple):
    """The data of a fit: rows, and masked rows behind them."""

    X: Array
    """Inputs (R, D)."""
    y: Array
    """Values (R,), in the units of the program."""
    known: Array
    """Which rows count (R,); the others are copies of the last that does."""


@dataclasses.dataclass(frozen=True, eq=False)
class Surrogate:
    """A program with a guide, fitted and conditioned at rows that are filled up.

    Args:
        model: the program ``(X, y)``.
        plates: of its rows.
        guide: makes a guide from a program.
        optimizer: of optax or NumPyro; ``None`` for natural steps where q(v) of the last layers are Gaussians, and Adam
            for all else.
        num_particles: draws of the hidden layers in a step.
        condition_steps: natural-gradient steps of a fit whose hyperparameters stay.
        example: data, of which only the shapes count.
    """

    model: Callable[..., Any]
    plates: frozenset[str]
    guide: Callable[[Callable[..., Any]], Any]
    optimizer: Any
    num_particles: int
    condition_steps: int
    example: Data

    def fit(self, params: Params | None, key: Array, num_steps: int, data: Data) -> dict[str, Any]:
        """Parameters after steps from ``params``, or from the start.

        Raises:
            ValueError: a loss that is not finite, as ``dgp.fit``.
        """
        return self._checked(self.svi, self._fitting, self._start(params, key, data), key, num_steps, data)

    def conditioned(self, params: Params, key: Array, data: Data, *, is_fitted: bool) -> Params:
        """What a posterior given ``data`` is made of.

        Here the parameters of a fit: unless it was to the same rows (``is_fitted``), with q(v) of the last layers by
        natural-gradient steps of sizes 1, 2/3, 1/2, ...; as they are for a guide that computes q(v) from the data, or
        whose q(v) are not ``Full()``.
        """
        params = self._start(params, key, data)
        if is_fitted or not self.is_exact_in_a_step:
            return params
        return self._checked(self._conditional, self._conditioning, params, key, self.condition_steps, data)

    def posterior(self, found: Params, data: Data) -> Posterior:
        """The posterior of what :meth:`conditioned` gives."""
        program, guide = self.at(data)
        return Posterior(program, guide.on(*data), found)

    def found(self, posterior: Posterior) -> Params:
        """What a posterior was made of."""
        return posterior.params

    def program(self, runs: Array) -> Callable[..., Any]:
        """The program ``(X, y, known)`` at the inputs (R, D) of all rows."""
        return with_known_rows(self.model, self.plates, runs)

    def at(self, data: Data) -> tuple[Callable[..., Any], Guide]:
        """The program and its guide for these rows."""
        program = self.program(data.X)
        return program, self.guide(program)

    def operations(self) -> core.ClosedJaxpr:
        """Those of a fit."""
        key = jax.random.key(0)
        start = jax.eval_shape(self._initial, key, self.example)
        return self._fitting.trace(start, key, jnp.asarray(1), self.example)

    def require_guide(self) -> None:
        """Raise unless the guide has parameters that all rows share, and nothing that it keeps between calls."""
        guide = self.at(self.example)[1]
        expect(
            guide.companion is None,
            "rules for all sites of the guide",
            f"{type(guide.companion).__name__} for hyperparameters, which keeps what it has met first",
            "other=dgp.guides.Delta() or Normal()",
        )
        parameters = sites_of_fit(
            self.svi(self.example), lambda arrays: (tuple(arrays), {}), [*self.example]
        ).parameters
        if own := sorted(name for name, site in parameters.items() if site.per_row):
            raise expected(
                "parameters that all rows share",
                f"{own[0]!r} with values of every row",
                "rows come one after the other; leave latents out, or give them a rule that computes q from the row",
            )

    @property
    def binds_data(self) -> bool:
        """Whether the guide computes q(v) from the data that are bound to it."""
        guide = self.at(self.example)[1]
        return guide.on() is not guide

    @property
    def takes_natural_steps(self) -> bool:
        """Whether q(v) of the last layers have the parameters of Gaussians."""
        return bool(self._last_gaussians)

    @property
    def is_exact_in_a_step(self) -> bool:
        """Whether a natural-gradient step of size 1 goes to the optimum, given one layer with Gaussian noise.

        Of a diagonal Gaussian it moves every number as if the others stayed, and overshoots.
        """
        return self.takes_natural_steps and not any(site.diagonal for site in self._last_gaussians)

    @cached_property
    def _last_gaussians(self) -> list[GaussianSite]:
        found: list[GaussianSite] = []
        guide = self.at(self.example)[1]

        def run(key: Array, data: Data) -> None:
            checked = require(OUTSIDE_TRANSFORMATIONS)
            with handlers.block(), handlers.trace() as sites, handlers.seed(rng_seed=key), checked:
                guide(*data)
            gaussians = gaussian_sites(guide, sites).values()
            found.extend(site for site in gaussians if site.kind == "inducing" and not site.is_inner)

        jax.eval_shape(run, jax.random.key(0), self.example)
        return found

    def svi(self, data: Data) -> SVI:
        """The steps of a fit."""
        program, guide = self.at(data)
        optimizer = self.optimizer
        if optimizer is None:
            adam = optax.adam(0.01)
            optimizer = NaturalGradient(guide, 0.1, adam) if self.takes_natural_steps else adam
        return SVI(program, guide, optimizer, ELBO(num_particles=self.num_particles))

    def _conditional(self, data: Data) -> SVI:
        program, guide = self.at(data)
        # Steps 2 / (t + 2) end at the mean of the single optima with weights t + 1.
        steps = NaturalGradient(guide, lambda step: 2 / (step + 2), optax.set_to_zero())
        return SVI(program, guide, steps, ELBO(num_particles=self.num_particles))

    @cached_property
    def _initial(self) -> Compiled:
        def initial(key: Array, data: Data) -> dict[str, Any]:
            svi = self.svi(data)
            params: dict[str, Any] = svi.get_params(svi.init(key, *data))
            return params

        return Compiled(initial)

    @cached_property
    def _shapes(self) -> Callable[[int], dict[str, Any]]:
        """Shapes of the parameters at a number of rows."""

        def shapes(rows: int) -> dict[str, Any]:
            like = jax.tree.map(lambda part: jax.ShapeDtypeStruct((rows, *part.shape[1:]), part.dtype), self.example)
            found: dict[str, Any] = jax.eval_shape(self._initial, jax.random.key(0), like)
            return found

        return cache(shapes)

    @cached_property
    def _fitting(self) -> Compiled:
        return Compiled(_steps(self.svi))

    @cached_property
    def _conditioning(self) -> Compiled:
        return Compiled(_steps(self._conditional))

    def _start(self, params: Params | None, key: Array, data: Data) -> Params:
        """Parameters to start from: where arrays have become longer with the rows, the old numbers come first."""
        shapes = self._shapes(len(data.y))
        if params is not None and all(np.shape(params[name]) == like.shape for name, like in shapes.items()):
            return params
        initial: dict[str, Any] = self._initial(key, data)
        if params is None:
            return initial
        return {name: _placed(jnp.asarray(params[name]), value) for name, value in initial.items()}

    def _checked(
        self, svi: Callable[[Data], SVI], program: Compiled, params: Any, key: Array, num_steps: int, data: Data
    ) -> dict[str, Any]:
        found, loss = program(params, key, jnp.asarray(num_steps), data)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((found, loss))):
            fit(svi(data), key, num_steps, *data, init_params=params, progress_bar=False)  # says at which step and why
            raise expected(
                f"a finite fit of {int(data.known.sum())} rows",
                "NaN or infinite parameters",
                "smaller steps, optimizer=optax.adam(0.001), priors that bound hyperparameters, or float64",
            )
        return found


def _placed(old: Array, new: Array) -> Array:
    """``new`` with the numbers of a smaller array of the same rank at the beginning of every axis."""
    return new.at[tuple(slice(length) for length in old.shape)].set(old)


def _steps(
    svi_at: Callable[[Data], SVI],
) -> Callable[[dict[str, Any], Array, Array, Data], tuple[dict[str, Any], Array]]:
    """A function of parameters, a key, a number of steps and data to new parameters and the last loss."""

    def run(params: Params, key: Array, num_steps: Array, data: Data) -> tuple[dict[str, Any], Array]:
        svi = svi_at(data)
        state = svi.init(key, *data, init_params=params)

        def body(_: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            state, loss = svi.update(carry[0], *data)
            return state, loss.astype(carry[1].dtype)

        state, loss = jax.lax.fori_loop(0, num_steps, body, (state, jnp.zeros((), jnp.result_type(float))))
        return svi.get_params(state), loss

    return run


_DRAWS = 100
"""Of the posterior, that predictions are made of."""


@dataclasses.dataclass(frozen=True, eq=False)
class IntegratedSurrogate(Surrogate):
    r"""A program of :func:`dgp.for_mcmc` under a guide of NumPyro, such as ``AutoNormal``.

    .. math:: q = q(u)\, p(v \mid u, y), \qquad
              \mathcal L = E_{q(u)}\Bigl[\log \int p(y, v, u)\, dv - \log q(u)\Bigr]

    with the inducing values v of the last layer, integrated where the likelihood is Gaussian, and all other numbers u.
    A posterior is made of draws of u and v, which new rows change through v alone until the next fit.
    """

    def conditioned(self, params: Params, key: Array, data: Data, *, is_fitted: bool) -> Params:
        """Draws of all sites that rows share."""
        found: Params = self._drawing(self._start(params, key, data), key, data)
        return found

    def posterior(self, found: Params, data: Data) -> Posterior:
        """The posterior of these draws."""
        return Posterior(self.program(data.X), samples=found)

    def found(self, posterior: Posterior) -> Params:
        """The draws."""
        assert posterior.samples is not None
        return posterior.samples

    def at(self, data: Data) -> tuple[Callable[..., Any], Any]:
        """The program with its last layer integrated, and a guide in which rows that are not known do not count."""
        program = for_mcmc(self.program(data.X))
        return program, with_known_rows(self.guide(program), self.plates)

    def require_guide(self) -> None:
        """Any guide of NumPyro will do: a new one is made for every fit, and rows keep their order."""

    @property
    def binds_data(self) -> bool:
        """Draws of v are computed from the data."""
        return True

    @property
    def takes_natural_steps(self) -> bool:
        """There are no parameters of v."""
        return False

    @cached_property
    def _drawing(self) -> Compiled:
        def draw(params: Params, key: Array, data: Data) -> Params:
            program, guide = self.at(data)
            guide_key, model_key = jax.random.split(key)
            given = handlers.substitute(handlers.seed(guide, guide_key), data=dict(params))
            with handlers.block():
                values = given(*data)  # u ~ q(u)
                run = handlers.substitute(handlers.seed(program, model_key), data=values)
                sites = handlers.trace(run).get_trace(*data)  # v ~ p(v | u, y)
            return inspect_program(self.program(data.X), tuple(data), {}).shared_values(sites)

        return Compiled(
            lambda params, key, data: jax.lax.map(lambda key: draw(params, key, data), jax.random.split(key, _DRAWS))
        )


def made_surrogate(
    model: Callable[..., Any],
    make_guide: Callable[[Callable[..., Any]], Any],
    box: Box,
    optimizer: Any,
    num_particles: int,
    condition_steps: int,
    refit_every_round: bool,
) -> Surrogate:
    """How a program is fitted and conditioned: by its guide, or with its last layer integrated under those of NumPyro.

    Raises:
        ValueError: a program without a plate of the rows, another guide, one that cannot be conditioned where not every
            round has a fit.
    """
    plates = plates_of_rows(model, box)
    example = Data(*filled_rows(np.broadcast_to(box.low, (2, box.dims)), np.zeros(2)))
    guide = make_guide(with_known_rows(model, plates, example.X))
    expect_kind(
        guide,
        Guide | AutoGuide,
        "guide to make a guide of dgp.guides",
        "guide=dgp.guides.InducingPoint, or a guide of NumPyro such as AutoNormal",
    )
    surrogate = (Surrogate if isinstance(guide, Guide) else IntegratedSurrogate)(
        model, plates, make_guide, optimizer, num_particles, condition_steps, example
    )
    surrogate.require_guide()
    expect(
        refit_every_round or surrogate.binds_data or surrogate.is_exact_in_a_step,
        "a guide whose q(v) of the last layers are Full() for rounds without a refit",
        f"{type(guide).__name__} with others",
        "refit_every=1, or guide=dgp.guides.InducingPoint",
    )
    return surrogate


def require_maker(guide: Any) -> None:
    """Raise unless ``guide`` is something that makes a guide from a program."""
    expect(
        not isinstance(guide, Guide),
        "guide to make a guide from a program",
        f"a {type(guide).__name__}, whose program has no way to leave rows out",
        (f"guide=dgp.guides.{type(guide).__name__}, or lambda model: dgp.guides.{type(guide).__name__}(model, ...)"),
    )
    expect(
        callable(guide) and (not inspect.isfunction(guide) or inspect.signature(guide).parameters),
        "guide to make a guide from a program",
        type(guide).__name__,
        "guide=dgp.guides.InducingPoint",
    )
