"""The plates that are open where a distribution is made."""

from __future__ import annotations

from numpyro.handlers import block
from numpyro.primitives import _PYRO_STACK, plate

__all__ = ["plates_around", "require_one_row"]


def plates_around() -> list[plate]:
    """The plates of this program that are open here, the innermost first."""
    found = []
    for handler in reversed(_PYRO_STACK):
        if isinstance(handler, block):  # a run of its own, within the plates of another
            break
        if isinstance(handler, plate):
            found.append(handler)
    return found


def require_one_row(batch_shape: tuple[int, ...]) -> None:
    """Refuse a likelihood of several rows in a plate of one: NumPyro would broadcast the plate.

    Args:
        batch_shape: of the likelihood.

    Raises:
        ValueError: such a plate is open.
    """
    for around in plates_around():
        dim = around.dim
        if dim is None or around.subsample_size != 1 or len(batch_shape) < -dim or batch_shape[dim] == 1:
            continue
        raise ValueError(
            f"Likelihood: expected 1 row, as many as plate {around.name!r} has, got f(x) at {batch_shape[dim]}: "
            "hidden values of the rows of a fit, as in mcmc.get_samples(), are not for other data; predict by "
            "dgp.Posterior(model, samples=mcmc.get_samples()) or dgp.Posterior(model, guide, params), which draw them "
            "anew; in a plate that takes some rows use X[i] and y[i]"
        )
