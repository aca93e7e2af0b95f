"""The surrogate of a search, by the kind of guide that it is fitted with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpyro.infer.autoguide import AutoGuide

from numpyro_dgp.design.input_space import Box
from numpyro_dgp.design.integrated_surrogate import IntegratedSurrogate
from numpyro_dgp.design.padded_rows import filled_rows, plates_of_rows, with_known_rows
from numpyro_dgp.design.surrogate import Data, Surrogate
from numpyro_dgp.guides.guide import Guide

__all__ = ["made_surrogate", "require_maker"]


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
    plates = plates_of_rows("design.Search", model, box)
    example = Data(*filled_rows(np.broadcast_to(box.low, (2, box.dims)), np.zeros(2)))
    guide = make_guide(with_known_rows(model, plates, example.X))
    if not isinstance(guide, Guide | AutoGuide):
        raise ValueError(
            f"design.Search: expected guide to make a guide of dgp.guides, got {type(guide).__name__}: "
            "guide=dgp.guides.InducingPoint, or a guide of NumPyro such as AutoNormal"
        )
    surrogate = (Surrogate if isinstance(guide, Guide) else IntegratedSurrogate)(
        "design.Search", model, plates, make_guide, optimizer, num_particles, condition_steps, example
    )
    surrogate.require_guide()
    if not (refit_every_round or surrogate.binds_data or surrogate.is_exact_in_a_step):
        raise ValueError(
            "design.Search: expected a guide whose q(v) of the last layers are Full() for rounds without a refit, got "
            f"{type(guide).__name__} with others: refit_every=1, or guide=dgp.guides.InducingPoint"
        )
    return surrogate


def require_maker(guide: Any) -> None:
    """Raise unless ``guide`` is something that makes a guide from a program."""
    if isinstance(guide, Guide):
        raise ValueError(
            f"design.Search: expected guide to make a guide from a program, got a {type(guide).__name__}, whose "
            f"program has no way to leave rows out: guide=dgp.guides.{type(guide).__name__}, or "
            f"lambda model: dgp.guides.{type(guide).__name__}(model, ...)"
        )
    if not callable(guide) or (inspect.isfunction(guide) and not inspect.signature(guide).parameters):
        raise ValueError(
            f"design.Search: expected guide to make a guide from a program, got {type(guide).__name__}: "
            "guide=dgp.guides.InducingPoint"
        )
