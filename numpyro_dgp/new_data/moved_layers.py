"""Where the parameters of a program with new rows start, at a fit of the same program or of one with other inducing
points."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import with_nearest
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.linalg import cholesky
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.inference.program_sites import SitesOfFit
from numpyro_dgp.new_data.fitted_layers import OpenLayer

__all__ = ["kept_parameters", "moved_parameters", "require_same_layers"]


def kept_parameters(owner: str, fitted: Mapping[str, Any], prefix: str, program: SitesOfFit) -> dict[str, Array]:
    """The parameters of a fit that a program has too, in the same shape, without those of single rows.

    Args:
        owner: the function that asks, for messages.
        fitted: all parameters of the fit.
        prefix: of the names of those that belong to sites.
        program: sites of the guide and model that get the new rows.

    Raises:
        ValueError: a parameter of the fit that the program does not have and that belongs to none of its sites.
    """
    known = program.parameters
    stems = tuple(f"{name}_{prefix}_" for name in program.model)
    if lost := {name for name in fitted if name not in known and not name.startswith(stems)}:
        raise ValueError(
            f"{owner}: expected every parameter of the fit in the model= of this call, got none for "
            f"{with_nearest(lost, known)}: pass the program of the fit with other inducing points, and nothing renamed"
        )
    return {
        name: value
        for name, value in fitted.items()
        if name in known and not known[name].per_row and np.shape(value) == known[name].value.shape
    }


def require_layers(owner: str, fitted: Mapping[str, OpenLayer], program: SitesOfFit, guide: Guide) -> None:
    """Raise unless a program has the layers of a fit, and its guide has parameters for them."""
    if fitted.keys() - program.model.keys():
        _refuse_layers(owner, fitted, [name for name, site in program.model.items() if site.kind == "sample"])
    for name in fitted:
        if not any(parameter.startswith(f"{name}_{guide.prefix}_") for parameter in program.parameters):
            raise ValueError(
                f"{owner}: expected a guide with parameters for q(v) of {name!r}, got {type(guide).__name__}, which "
                "computes it from the rows of a call alone: dgp.update(..., guide=dgp.guides.InducingPoint(model))"
            )


def require_same_layers(owner: str, fitted: Mapping[str, OpenLayer], layers: Mapping[str, OpenLayer]) -> None:
    """Raise unless two programs have layers of the same names, widths and numbers of outputs."""
    if fitted.keys() != layers.keys():
        _refuse_layers(owner, fitted, layers)
    for name, layer in layers.items():
        ours, theirs = ((f.function.dims, f.function.outputs) for f in (layer, fitted[name]))
        if ours != theirs:
            raise ValueError(
                f"{owner}: expected layer {name!r} with the input columns and outputs of the fit, {theirs}, got "
                f"{ours}: only inducing points may be others"
            )


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
        found[f"{record.stem}_loc"] = loc.reshape(shape)
        found[f"{record.stem}_{record.gaussian.scale}"] = scale.reshape(*shape, *scale.shape[2:])
    return found


def _refuse_layers(owner: str, fitted: Mapping[str, OpenLayer], got: Collection[str]) -> NoReturn:
    raise ValueError(
        f"{owner}: expected a model= with the layers of the fit, {sorted(fitted)}, got {sorted(got)}: only inducing "
        "points may be others; dgp.initial.deepen adds layers"
    )
