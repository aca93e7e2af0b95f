"""Parameters that layers open for their inducing inputs, kept apart from those of the program."""

from __future__ import annotations

import numpyro
from numpyro.primitives import Messenger

from numpyro_dgp._typing import Array
from numpyro_dgp.model.sites import Message

__all__ = ["LearnedInputsApart", "learned_inputs"]


def learned_inputs(name: str, Z: Array) -> Array:
    """The inducing inputs of layer ``name`` as the parameter ``"<name>_Z"``, which starts at ``Z``."""
    found: Array = numpyro.param(f"{name}_Z", Z, of_layer=name)
    return found


class LearnedInputsApart(Messenger):
    """Handler that refuses a site of the program with the name of the inducing inputs of a layer.

    NumPyro gives all ``numpyro.param`` of one name the same value, whoever opens them.

    Raises:
        ValueError: two sites of one name, of which one has the inducing inputs of a layer.
    """

    def __init__(self) -> None:
        self._owners: dict[str, str | None] = {}
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] not in ("param", "sample", "deterministic"):
            return
        name, layer = msg["name"], msg["kwargs"].get("of_layer") if msg["type"] == "param" else None
        if (owner := self._owners.setdefault(name, layer)) != layer:
            raise ValueError(
                f"gp {layer or owner!r}: expected no other site of the program with the name of its learned inducing "
                f"inputs, got {name!r} for both, which would have one value: rename the site of the program, or the "
                "layer"
            )
