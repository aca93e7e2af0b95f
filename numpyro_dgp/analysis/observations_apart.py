"""Programs in which values shared by all data are computed from the observations, as by ``m = y.mean()``.

A prediction has no observations: at new rows such a program is another one than that of the fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_dgp._checks import expected, without_checks
from numpyro_dgp._data import indexable
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import OUTSIDE_TRANSFORMATIONS, require
from numpyro_dgp.analysis.coupling import mark_rows, ones_of
from numpyro_dgp.analysis.sites import Message, Trace, each_values_of, is_likelihood, site_kind, unwrap
from numpyro_dgp.jaxprs.row_dependence import Rows, Several, mark, result_reasons

__all__ = ["require_observations_apart"]


def _values_apart(observed: dict[str, list[Array]]) -> each_message:
    """Handler that gives parameters and latents values that depend on nothing, and observed sites too, whose
    observations it notes: what depends on the value of a site is no matter of this module."""

    def place(msg: Message) -> None:
        if msg["type"] == "sample" and msg["value"] is None and site_kind(msg) in ("latent", "other", "observed"):
            msg["value"] = ones_of(msg["fn"])

    def cut(msg: Message) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            observed[msg["name"]] = [jnp.asarray(leaf) for leaf in jax.tree.leaves(msg["value"])]
        elif msg["type"] != "param":
            return
        msg["value"] = jax.tree.map(jnp.ones_like, msg["value"])

    return each_message(place, cut)


def require_observations_apart(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if something that all rows share depends on observations; a program that cannot be traced is not looked at.

    Priors of values that a fit gives, starting points of parameters, masks and weights may depend on them, and so may
    the density of a row on single observations, as in an autoregression.

    Args:
        model: the program.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        ValueError: such a program.
    """
    leaves, treedef = jax.tree.flatten(indexable((args, kwargs)))
    numbers = [i for i, a in enumerate(leaves) if isinstance(a, jax.Array | np.ndarray) and np.ndim(a) > 0]

    def run(key: Array, followed: Container[int]) -> tuple[dict[str, dict[str, list[Array]]], dict[str, list[Array]]]:
        marked = [mark(str(i), jnp.asarray(a), 1) if i in followed else a for i, a in enumerate(leaves)]
        again, options = jax.tree.unflatten(treedef, marked)
        observed: dict[str, list[Array]] = {}
        with (
            handlers.block(),
            handlers.trace() as sites,
            _values_apart(observed),
            mark_rows(),
            handlers.seed(rng_seed=key),
            require(OUTSIDE_TRANSFORMATIONS),
        ):
            model(*again, **options)
        return _computed(sites), observed

    for followed in (numbers, *([i] for i in numbers)):  # some are settings with values that the program needs
        try:
            with without_checks(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                closed, shapes = jax.make_jaxpr(partial(run, followed=followed), return_shape=True)(jax.random.key(0))
        except Exception:  # a later run of the program raises the error
            continue
        _require(*result_reasons(closed.jaxpr, shapes))
        if followed is numbers:
            return


Facts = dict[str, list[dict[str, Rows | Several]]]


def _require(facts: dict[str, Facts], observed: Facts) -> None:
    labels = {label for of in observed.values() for fact in of for label in fact}
    # What is also an input, row by row, is known at new rows too.
    labels -= {n for of in facts.values() for fact in of["inputs"] for n, why in fact.items() if isinstance(why, Rows)}
    for name, of in facts.items():
        for what, fact in ((what, fact) for what, several in of.items() for fact in several):
            for label in sorted(labels & fact.keys()):
                why = fact[label]
                if what == "function" or (isinstance(why, Several) and why.known):
                    _refuse(name, what, min(n for n, of in observed.items() if any(label in f for f in of)))


def _refuse(name: str, what: str, observed: str) -> NoReturn:
    which = {"function": "the function", "inputs": "the inputs of the function"}.get(what, "a mean, scale or variance")
    raise expected(
        "a program in which only observed values depend on the observations",
        f"{which} computed from those of {observed!r}",
        "predictions have no observations; compute it outside the model, dgp.initial.Standardizer.fit(y)",
        at=f"site {name!r}",
    )


def _computed(sites: Trace) -> dict[str, dict[str, list[Array]]]:
    """By site of data or of a layer, the arrays of its distribution: those of its functions, inputs, and the rest."""
    found: dict[str, dict[str, list[Array]]] = {}
    for name, site in sites.items():
        if site["type"] != "sample" or site_kind(site) not in ("observed", "hidden", "exact"):
            continue
        fn: Any = unwrap(site["fn"])
        every = each_values_of(site["fn"])
        rest = [every, fn.conditional(jnp.zeros_like(fn.f_x.loc))] if is_likelihood(fn) else [fn]
        found[name] = {
            "function": _numbers([each.function for each in every]),
            "inputs": _numbers([each.inputs for each in every]),
            "rest": _numbers(rest),
        }
    return found


def _numbers(tree: Any) -> list[Array]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array | np.ndarray | float)]
