"""The layers of a fitted program with their posteriors, which represent the data of the fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dgp._checks import caller, expect, expected
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.calls import inspect_call, require_own_functions
from numpyro_dgp.analysis.program import ProgramFacts, full_plates, structure
from numpyro_dgp.analysis.sites import Message, Trace, site_kind, unwrap
from numpyro_dgp.functions.induced_function import FunctionalOf, InducedFunction
from numpyro_dgp.functions.weights import Belief
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.record import SiteRecord, record_of
from numpyro_dgp.guides.run import marginal, traces
from numpyro_dgp.inference.program_sites import Rebuild
from numpyro_dgp.math.gaussians import expected_log_ratio, narrower_than_prior
from numpyro_dgp.math.linalg import checked_factor
from numpyro_dgp.math.whitening import inverse_lower

__all__ = ["FittedLayer", "OpenLayer", "fitted_layers", "functions_of", "open_layers"]


class OpenLayer(NamedTuple):
    """A layer in a run of guide and model.

    Args:
        function: its random function, with q(v) integrated where there is a ``belief``.
        belief: q(v), where that is a Gaussian that depends on no other layer.
        record: of its site in the guide.
    """

    function: InducedFunction
    belief: Belief | None
    record: SiteRecord


class FittedLayer(NamedTuple):
    """A layer of a fit: its function, and of q(v) the mean (P, M) and the inverse of a triangular factor (P, M, M)."""

    function: InducedFunction
    loc: Array
    inverse: Array

    def log_ratio(self, function: InducedFunction) -> Array:
        r"""What ``function``, the layer now, expects of :math:`\log q(v) - \log p(v)` of the fit, in nats."""
        return expected_log_ratio(self.loc, self.inverse, *function.whitened_values_of(self.function)).sum()


def fitted_layers(layers: Mapping[str, OpenLayer], *, bounded: bool) -> dict[str, FittedLayer]:
    """The layers of a fit with the moments of their posteriors, which all have a ``belief``.

    Args:
        layers: by the names of their sites.
        bounded: whether q(v) is replaced by p(v) in directions in which it is wider, which noisy steps cause and data
            cannot. The ratio of the two is unbounded there, and fitted hyperparameters would follow it.
    """
    for layer in layers.values():
        jax.eval_shape(layer.function.whitened_values_of, layer.function)  # raises before anything is computed
    moments = {name: _moments(name, layer) for name, layer in layers.items()}
    if bounded:
        moments = {name: narrower_than_prior(*q) for name, q in moments.items()}
    return {name: FittedLayer(layers[name].function, loc, inverse_lower(root)) for name, (loc, root) in moments.items()}


def _moments(name: str, layer: OpenLayer) -> tuple[Array, Array]:
    belief: Any = layer.belief
    M = belief.loc.shape[-1]
    if belief.dense_root is not None:
        root = belief.dense_root.reshape(-1, M, M)
    else:
        covariance = belief.feature_covariance(jnp.eye(M, dtype=belief.loc.dtype))
        root = checked_factor(jnp.linalg.cholesky(covariance), f"the covariance of q(v) of {name!r}")
    return belief.loc.reshape(-1, M), root


def open_layers(
    model: Callable[..., Any],
    guide: Guide,
    seeded: Callable[[Callable[..., Any], Array], Callable[..., Any]],
    rebuild: Rebuild,
    arrays: list[Array],
) -> dict[str, OpenLayer]:
    """The layers of a program under a guide, by the names of their sites; of single rows nothing is computed.

    Args:
        model: the program.
        guide: its guide.
        seeded: gives a program random numbers and parameters.
        rebuild: the arguments of the program, observations included, from ``arrays``.
        arrays: those of them that are arrays.

    Raises:
        ValueError: no layers, or no observations; functions that are computed from the rows; a site shared by all rows
            whose posterior is neither a point nor a Gaussian q(v) on its own.
    """
    args, kwargs = rebuild(arrays)
    call = inspect_call(model, None, args, kwargs)
    require_own_functions(call)
    if not any(call.sites[name]["is_observed"] for name in call.candidates):
        raise expected(
            "the observations of the new rows",
            f"none at {', '.join(map(repr, call.candidates))}",
            f"pass them as in the fit, dgp.{caller()}(posterior, key, X, y)",
        )
    plates = tuple(frozenset(f.name for f in call.sites[name]["cond_indep_stack"]) for name in call.candidates)
    records: dict[str, SiteRecord] = {}

    def opened(arrays: list[Array]) -> dict[str, tuple[Any, Any]]:
        keys = jax.random.split(jax.random.key(0))
        programs = seeded(model, keys[0]), full_plates(marginal(seeded(guide.predicting(*plates), keys[1])))
        drawn, sites = traces(*programs, *rebuild(arrays), lambda program, _: full_plates(program))
        program = structure(sites)
        for name, site in sites.items():
            if site["type"] == "sample" and name in drawn:
                _require_known(drawn[name], site, program)
        found = {}
        for name, function in functions_of(sites).items():
            records[name] = record_of(drawn[name])
            belief = _belief(drawn[name])
            known: Any = function
            found[name] = (function if belief is None else dataclasses.replace(known, v=belief)), belief
        return found

    layers = {name: OpenLayer(f, belief, records[name]) for name, (f, belief) in Compiled(opened)(arrays).items()}
    expect(layers, "a program with layers that have inducing points", "none", "dgp.gp(name, kernel, dgp.Points(Z))")
    return layers


def functions_of(sites: Trace) -> dict[str, InducedFunction]:
    """The random functions with inducing values that the distributions of a run refer to, by the names of their sites.

    Raises:
        ValueError: a layer that none refers to.
    """
    found: dict[str, InducedFunction] = {}
    for site in sites.values():
        if site["type"] == "sample":
            for part in jax.tree.leaves(site["fn"], is_leaf=_is_function):
                if _is_function(part):
                    function = _base(part)
                    found.setdefault(str(function.site), function)
    layers = [name for name, site in sites.items() if site["type"] == "sample" and site_kind(site) == "inducing"]
    if lost := [name for name in layers if name not in found]:
        raise expected(
            "layers whose values are hidden sites or under a Likelihood",
            f"{lost[0]!r}, whose values are used in another way",
            "write numpyro.sample('h', f(x)) or dgp.Likelihood(f(x), ...)",
        )
    return found


def _base(function: InducedFunction) -> InducedFunction:
    """The function whose slope or sum this is, or itself."""
    return _base(function.function) if isinstance(function, FunctionalOf) else function


def _is_function(part: Any) -> bool:
    return isinstance(part, InducedFunction) and part.site is not None


def _belief(site: Message) -> Belief | None:
    fn = unwrap(site["fn"])
    return fn if isinstance(fn, Belief) and not record_of(site).follows else None


def _require_known(drawn: Message, site: Message, program: ProgramFacts) -> None:
    """Raise for a shared site whose posterior in the fit is not a point."""
    name, kind = site["name"], site_kind(site)
    expect(
        kind != "exact",
        "layers with inducing points",
        f"values without (inducing=None or dgp.Neighbours) at {name!r}, for rows of the fit only",
        "give the layer dgp.Points(Z)",
    )
    if not program.is_shared(site):
        return
    fn = unwrap(drawn["fn"])
    if kind == "inducing":
        expect(
            _belief(drawn) is not None,
            "a Gaussian q(v) of every layer by itself",
            f"{type(fn).__name__} at {name!r}, another kind or one that depends on other layers",
            "fit with dgp.guides.InducingPoint(model), with its rules Full(), Diagonal() or LowRank()",
        )
    elif not isinstance(fn, dist.Delta):
        raise expected(
            "points for shared sites other than the layers",
            f"a posterior at {name!r}",
            "fit with other=dgp.guides.Delta(), the default, or make it a numpyro.param",
        )
