r"""Layers under Gaussian likelihoods only: inducing values are integrated out in closed form and drawn afterwards.

The log density of such observations is quadratic in the whitened inducing values v of the layer, whose prior is
standard normal, so that

.. math:: \log \int N(v; 0, I)\, e^{c + b^\top v - \frac12 v^\top \Phi v}\, dv
          = c + \tfrac12 b^\top (I + \Phi)^{-1} b - \tfrac12 \log\lvert I + \Phi\rvert , \qquad
          p(v \mid y, \dots) = N\bigl((I + \Phi)^{-1} b,\, (I + \Phi)^{-1}\bigr) .

With ``Likelihood(f(x), ...)`` as it is by default, the integral is Titsias' bound given the inputs of the layer; with
``collapse="marginal"`` it is the FITC density. Either way it is the integral of the density that the program has when v
is sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.program import with_traceable
from numpyro_dgp.analysis.sites import (
    Message,
    Trace,
    declared_kind,
    hide,
    is_likelihood,
    masks_around,
    site_kind,
    unwrap,
)
from numpyro_dgp.bounds.collapsed import Quadratic
from numpyro_dgp.functions.function_values import MixedValues
from numpyro_dgp.guides.collapsed.gaussian_uses import arrays_of, is_dense, optimal_belief, use_of_likelihood
from numpyro_dgp.jaxprs.row_dependence import mark, row_dependence

__all__ = ["Integrate", "integrated_in", "layers_to_integrate"]

# The site of the integral over the inducing values of a layer has the name of theirs with this at the end.
_FACTOR = "_integrated"


class Integrate(Messenger):
    """Handler that integrates inducing values out, with the likelihoods that depend on them.

    Args:
        layers: the sites of the inducing values.
    """

    def __init__(self, layers: frozenset[str]) -> None:
        self.layers = layers
        self.quadratics: dict[str, Quadratic] = {}
        self.scalar: dict[str, bool] = {}
        self.position: list[Array] = []
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample":
            return
        name, fn = msg["name"], unwrap(msg["fn"])
        if name in self.layers:
            # (Phi, b, c) do not depend on it
            msg["value"] = jnp.zeros(fn.event_shape, fn.dtype)  # type: ignore[attr-defined]
            self.scalar[name] = len(fn.event_shape) == 1
            hide(msg)
        elif is_likelihood(fn) and (layer := _layer(fn)) in self.layers:
            use = use_of_likelihood(fn, msg)
            found = use.quadratic((None,) * use.inputs.shape[-1], {}, None)
            # log p(y | v) = c + b'v - v' Phi v / 2, summed over likelihoods
            before = self.quadratics.get(layer)
            self.quadratics[layer] = found if before is None else before.plus(found)
            hide(msg)

    def postprocess_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and not msg["is_observed"] and msg["name"] not in self.layers:
            self.position.append(jnp.asarray(msg["value"]))

    def __enter__(self) -> Callable[[], None]:  # type: ignore[override]
        super().__enter__()
        return self.finish

    def finish(self) -> None:
        """Add the integrals to the density of the program, and draws of the inducing values to its sites. The density
        is zero where the noise is so small that the integral is lost in rounding.

        The random key of a draw is made of the values of all other random sites: new at every position of a chain, and
        the same each time that the program runs at that position.

        Raises:
            ValueError: there is no other random site, so that all draws would be one.
        """
        if self.quadratics and not self.position:
            raise expected(
                f"sites to sample next to the integrated {sorted(self.quadratics)}",
                "a condition on all of them from outside of the prepared program",
                "condition the program first, dgp.for_mcmc(handlers.condition(model, data={...}))",
            )
        for i, (name, total) in enumerate(self.quadratics.items()):
            key = jax.random.fold_in(_key_of(self.position), i)
            numpyro.factor(name + _FACTOR, total.resolved_bound().sum())  # log int N(v; 0, I) p(y | v) dv
            numpyro.deterministic(name, optimal_belief(total, self.scalar[name]).sample(key))  # v ~ p(v | y)


def integrated_in(sites: Trace) -> frozenset[str]:
    """The sites of inducing values that the program of a trace integrates."""
    return frozenset(name for name in sites if name + _FACTOR in sites)


def _key_of(arrays: list[Array]) -> Array:
    """A PRNG key that is a hash of the bits of all numbers."""
    wide = [a if a.dtype.itemsize >= 4 else a.astype(jnp.float32) for a in arrays]
    words = jnp.concatenate([jax.lax.bitcast_convert_type(a, jnp.uint32).reshape(-1) for a in wide])
    factors = jax.random.bits(jax.random.key(0), (2, words.size), jnp.uint32)
    # sum_i c_i w_i mod 2^32, twice
    return jax.random.wrap_key_data((factors * words).sum(1, dtype=jnp.uint32), impl="threefry2x32")


def _mark_inducing(msg: Message) -> None:
    """Mark inducing values, so that what depends on them can be followed through the program."""
    if msg["type"] == "sample" and msg["value"] is None and site_kind(msg) == "inducing":
        fn: Any = unwrap(msg["fn"])
        msg["value"] = mark(msg["name"], jnp.zeros(msg["fn"].shape(), fn.dtype), 0)


def layers_to_integrate(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    params: Mapping[str, Array],
    collapse: bool | Literal["auto"],
) -> tuple[frozenset[str], bool]:
    """The sites of inducing values to integrate, and whether the program observes anything in this call.

    Args:
        model: the program; it runs on shapes only.
        args: its arguments.
        kwargs: its keyword arguments.
        params: values of its ``numpyro.param`` sites.
        collapse: the argument of ``for_mcmc``.

    Raises:
        ValueError: ``collapse=True``, and the program observes data but has no layer that can be integrated.
    """
    inspected = with_traceable(lambda args, kwargs: _readings(model, args, kwargs, params), args, kwargs)
    if inspected is None:
        expect(
            collapse is not True,
            "collapse=True for a program that can be traced",
            "one that needs the values of its arguments",
            "pass rows as JAX arrays, and settings by functools.partial",
        )
        return frozenset(), True
    sites, facts = inspected
    samples = {name: site for name, site in sites.items() if site["type"] == "sample"}
    inducing = [name for name, site in samples.items() if declared_kind(site["fn"]) == "inducing"]
    readers = {n: [by for by, of in facts.items() if any(n in fact for fact in of)] for n in inducing}
    obstacles = {name: _obstacle(name, samples, readers[name]) for name in inducing}
    layers = frozenset(name for name, obstacle in obstacles.items() if obstacle is None)
    on_data = any(site["is_observed"] for site in samples.values())
    if layers and not [name for name, site in samples.items() if not site["is_observed"] and name not in layers]:
        why = "nothing else is left to sample, its posterior is the Gaussian of dgp.guides.Collapsed(model)"
        obstacles, layers = dict.fromkeys(layers, why), frozenset()
    if collapse is True and on_data and not layers:
        which = "; ".join(f"{name!r}: {obstacle}" for name, obstacle in obstacles.items())
        raise expected(
            "collapse=True for a program with a layer of dgp.Points that only Gaussian likelihoods depend on",
            which or "no inducing values",
            'leave collapse="auto", or write dgp.Likelihood(f(h), lambda v: dist.Normal(v, noise))',
            "for_mcmc",
        )
    return layers if collapse else frozenset(), on_data


def _readings(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], params: Mapping[str, Array]
) -> tuple[Trace, dict[str, list[Any]]]:
    """A trace of the program, and which inducing values every site reads, by :func:`_read_by`."""
    found: list[Trace] = []

    def run() -> dict[str, list[Array]]:
        given = handlers.substitute(data=dict(params))
        with (
            handlers.block(),
            handlers.trace() as sites,
            given,
            each_message(_mark_inducing),
            handlers.seed(rng_seed=0),
        ):
            model(*args, **kwargs)
        found.append(sites)
        return {name: _read_by(site) for name, site in sites.items()}

    facts = row_dependence(run)
    return found[0], facts


def _read_by(site: Message) -> list[Array]:
    """The arrays that the density or the value of a site is computed from, except the values of a function on which a
    likelihood depends linearly."""
    if site["type"] != "sample":
        return [] if site["type"] == "plate" else arrays_of(site["value"])
    fn: Any = unwrap(site["fn"])
    seen: list[Any] = [site["value"] if site["is_observed"] else None, site["scale"]]
    if not is_likelihood(fn):
        return arrays_of([seen, site["fn"]])
    form = fn.normal_form()
    if form is None or isinstance(fn.f_x, MixedValues) or not is_dense(fn.f_x.function):
        return arrays_of([seen, site["fn"], fn.conditional(fn.f_x.loc)])
    fixed = dataclasses.replace(fn.f_x.function, v=None)
    masks = [masked._mask for masked in masks_around(site["fn"])]
    return arrays_of([seen, form, fixed, fn.f_x.inputs, fn.f_x.noise, fn.observed, masks])


def _layer(likelihood: Any) -> str | None:
    """The site of the inducing values of the function under a likelihood."""
    function = likelihood.f_x.function
    return None if function is None else function.site


def _obstacle(name: str, samples: Trace, readers: list[str]) -> str | None:
    prior = samples[name]
    if prior["is_observed"] or prior["scale"] is not None or prior["fn"] is not unwrap(prior["fn"]):
        return "its inducing values are observed, scaled or masked"
    likelihoods = {
        n: site for n, site in samples.items() if is_likelihood(site["fn"]) and _layer(unwrap(site["fn"])) == name
    }
    for by, site in likelihoods.items():
        if (reason := _not_gaussian(by, site)) is not None:
            return reason
    if readers:
        return f"{readers[0]!r} depends on it"
    return None if likelihoods else "no likelihood depends on it"


def _not_gaussian(name: str, site: Message) -> str | None:
    """Why the log density at a likelihood is not known to be quadratic in inducing values."""
    fn: Any = unwrap(site["fn"])
    function: Any = fn.f_x.function
    if not site["is_observed"]:
        return f"{name!r} is not observed"
    if isinstance(fn.f_x, MixedValues):
        return f"the likelihood at {name!r} depends on mixtures of its outputs"
    if fn.normal is None or fn.is_loss:
        found = fn if fn.is_loss else fn.family
        return f"the likelihood at {name!r} is {found}, and not dist.Normal(a * v + b, scale)"
    if not is_dense(function):
        return f"it is on a {type(function).__name__} and not on dgp.Points"
    if np.shape(site["value"]) != fn.f_x.loc.shape or site["fn"].batch_shape != fn.f_x.batch_shape:
        return f"{name!r} has several observations of one value"
    return None
