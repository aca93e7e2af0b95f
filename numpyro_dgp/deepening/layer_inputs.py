"""What the layers of a program get as inputs, and whether those of a fit get the same with new layers among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_dgp._typing import Array
from numpyro_dgp.model.other_rows import at_mean
from numpyro_dgp.model.sites import Message, each_values_of

__all__ = ["LayerInputs", "first_rows", "layer_inputs", "require_same_inputs"]


class LayerInputs(NamedTuple):
    """Where a layer is called, and its inducing inputs, ``None`` for layers without."""

    inputs: Array
    inducing: Array | None


def first_rows(msg: Message) -> Array | None:
    """The first rows of a plate, so that runs of several programs have the same."""
    if msg["type"] != "plate":
        return None
    size, subsample_size = msg["args"]
    return jnp.arange(subsample_size or size)


def layer_inputs(
    model: Callable[..., Any],
    params: Mapping[str, Array],
    values: Mapping[str, Array],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, list[LayerInputs]]:
    """By inducing site, the calls of its function, in a run at these values; other layers are at their means.

    Args:
        model: the program.
        params: values of its parameters.
        values: values of latent sites.
        args: arguments of the program.
        kwargs: its keyword arguments.
    """

    def value(msg: Message) -> Any:
        if msg["type"] != "sample" or msg["is_observed"]:
            return first_rows(msg)
        return values[msg["name"]] if msg["name"] in values else at_mean(msg)

    found: dict[str, list[LayerInputs]] = {}
    given = handlers.substitute(handlers.substitute(model, data=dict(params)), substitute_fn=value)
    with handlers.block(), handlers.trace() as sites, handlers.seed(rng_seed=0):
        given(*args, **kwargs)
    for site in sites.values():
        for drawn in each_values_of(site["fn"]) if site["type"] == "sample" else ():
            function: Any = getattr(drawn, "function", None)
            name: str | None = getattr(function, "site", None)
            if name is not None:
                found.setdefault(name, []).append(LayerInputs(drawn.inputs, function.inducing_inputs))
    return found


def require_same_inputs(
    deeper: Mapping[str, list[LayerInputs]], fitted: Mapping[str, list[LayerInputs]], old: Mapping[str, str]
) -> None:
    """Raise unless every layer of the fit sees in the deeper program what it saw in the fit.

    Args:
        deeper: inputs of the layers of the deeper program, with new layers at their means.
        fitted: those of the fitted one.
        old: names of the sites of the fit, by name in the deeper program.
    """
    new = ", ".join(repr(name) for name in deeper if name not in old)
    advice = f"give {new} mean=dgp.means.Identity() and as many outputs as inputs"
    for name in deeper.keys() & old.keys():
        for ours, theirs in zip(deeper[name], fitted[old[name]], strict=False):
            same = f"deepen: expected layer {name!r} to see what {old[name]!r} sees in the fitted program"
            if (shapes := [call.inputs.shape for call in (ours, theirs)])[0] != shapes[1]:
                raise ValueError(f"{same}, inputs of shape {shapes[1]}, got {shapes[0]}: {advice}")
            if (far := _distance(ours.inputs, theirs.inputs)) > 0:
                raise ValueError(
                    f"{same} when the new layer is at its mean, got inputs that differ by up to {far:.3g}: {advice}"
                )
            if ours.inducing is None or theirs.inducing is None:
                continue
            if ours.inducing.shape != theirs.inducing.shape or _distance(ours.inducing, theirs.inducing) > 0:
                raise ValueError(
                    f"deepen: expected layer {name!r} to have the inducing inputs of {old[name]!r} in the fitted "
                    f"program, shape {theirs.inducing.shape}, got others, shape {ours.inducing.shape}: pass the same "
                    "Z, or Points(Z, learn=True), which takes those of the fit"
                )


def _distance(ours: Array, theirs: Array) -> float:
    """The largest difference, zero if it is of the size of rounding."""
    far = float(jnp.max(jnp.abs(ours - theirs)))
    rounding = 100 * float(jnp.finfo(jnp.result_type(ours, theirs)).eps) * (1 + float(np.max(np.abs(theirs))))
    return far if jax.numpy.isnan(far) or far > rounding else 0.0
