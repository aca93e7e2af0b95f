"""Values that v determines: deterministic given the function, and uncertain only through a belief about it.

Those of a projection, and those of a function that is a finite sum of known functions, without process noise.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp

from numpyro_dgp._checks import violated
from numpyro_dgp._typing import Array
from numpyro_dgp.model.function_values import FunctionValues, Propagated, Values
from numpyro_dgp.model.joint_values import JointValues

__all__ = ["Determined", "DeterminedJoint", "require_following"]


class _AtLoc(Values):
    """Values that are at ``loc``, with the log density 0 there and minus infinity elsewhere."""

    spread: Array | None

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        if self.spread is not None:  # the function is uncertain: given it, prior and posterior are the same point
            return jnp.zeros(self.batch_shape, self.loc.dtype)
        near = _is_near(value, self.loc).all(tuple(range(-self.event_dim, 0)))
        return jnp.where(near, 0.0, -jnp.inf).astype(self.loc.dtype)

    def _validate_sample(self, value: Array) -> None:
        if violated(_is_near, value, self.loc):
            raise ValueError(
                f"expected values that a {type(self.function).__name__} determines, got others: they have no density, "
                "so that NUTS and the autoguides of NumPyro cannot move them; pass dgp.for_mcmc(model) in place of the "
                "model, which makes them deterministic, or give the layer process noise, f(x, noise=s)"
            )


def _is_near(value: Any, loc: Any) -> Any:
    return abs(value - loc) <= jnp.finfo(loc.dtype).eps ** 0.5 * (1 + abs(loc))


class Determined(_AtLoc, FunctionValues):
    """Values at each input on its own."""

    def propagated(self) -> PropagatedDetermined:
        return PropagatedDetermined(
            self.loc, self.conditional_variance, self.spread, self.event_dim, origin=self.origin
        )


class PropagatedDetermined(Determined, Propagated):
    """A guide's declaration that q of deterministic values equals the model's conditional."""


class DeterminedJoint(_AtLoc, JointValues):
    """As :class:`Determined`, with the correlations over the last batch dimension."""

    def from_white(self, white: Array) -> Array:
        return jnp.broadcast_to(self.loc, white.shape) if self.spread is None else super().from_white(white)

    def propagated(self) -> DeterminedJoint:
        return self


def require_following(owner: str, name: str, values: Any, q: Any) -> None:
    """Raise if a guide gives a distribution of their own to values that v determines: they have no density.

    Args:
        owner: of messages.
        name: of the site.
        values: the model's distribution there.
        q: the guide's.

    Raises:
        ValueError: such values, and a distribution that is not that of the model.
    """
    if isinstance(values, Determined | DeterminedJoint) and not isinstance(q, Propagated | DeterminedJoint):
        has_noise = "noise" in inspect.signature(type(values.function).__call__).parameters
        advice = (
            "take dgp.guides.InducingPoint(model), under which hidden layers follow the model"
            if owner == "Collapsed"
            else f"give the site the rule Propagate, sites={{{name!r}: dgp.guides.Propagate()}}"
            f"{', or the layer process noise, f(x, noise=s)' if has_noise else ''}"
        )
        raise ValueError(
            f"{owner}: expected a guide under which values that v determines follow the model, got a distribution of "
            f"its own for {name!r}, which a {type(values.function).__name__} gives no variance: {advice}"
        )
