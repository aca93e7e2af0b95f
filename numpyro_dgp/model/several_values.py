"""Values of several functions side by side, for a likelihood that sees them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import Array
from numpyro_dgp.model.function_values import FunctionValues, MixedValues
from numpyro_dgp.model.joint_values import JointValues

__all__ = ["SeveralValues", "Split", "of_columns", "side_by_side"]


class Split:
    """Where the values of each function are among the columns of all of them.

    Args:
        outputs: of each function, ``None`` for a scalar one.

    Example:
        >>> import jax.numpy as jnp
        >>> [part.shape for part in Split((2, None)).parts(jnp.zeros((5, 3)))]
        [(5, 2), (5,)]
    """

    def __init__(self, outputs: Sequence[int | None]) -> None:
        ends = np.cumsum([1 if P is None else P for P in outputs]).tolist()
        self.columns = [range(end - (P or 1), end) for end, P in zip(ends, outputs, strict=True)]
        self.scalar = [P is None for P in outputs]

    def parts(self, v: Array) -> list[Array]:
        """The values of each function (..., P) or (...,), from all columns."""
        return [
            v[..., own[0]] if scalar else v[..., own[0] : own[-1] + 1]
            for own, scalar in zip(self.columns, self.scalar, strict=True)
        ]

    def whole(self, parts: Sequence[Array]) -> Array:
        """All columns, from the values of each function."""
        wide = [part[..., None] if scalar else part for part, scalar in zip(parts, self.scalar, strict=True)]
        return jnp.concatenate(wide, -1)


class SeveralValues(FunctionValues):
    """Values of several functions at the same rows, which are independent given their inducing values.

    Args:
        parts: values of each function, all of one batch shape.
    """

    pytree_data_fields: tuple[str, ...] = ("parts",)
    pytree_aux_fields = ("split",)

    def __init__(self, parts: Sequence[FunctionValues]) -> None:
        self.parts = tuple(parts)
        self.split = Split([part.event_shape[0] if part.event_dim else None for part in parts])
        spreads = [jnp.zeros_like(part.loc) if part.spread is None else part.spread for part in parts]
        super().__init__(
            self.split.whole([part.loc for part in parts]),
            self.split.whole([part.conditional_variance for part in parts]),
            None if all(part.spread is None for part in parts) else self.split.whole(spreads),
            total=self.split.whole([part.variance for part in parts]),
        )

    def expand(self, batch_shape: tuple[int, ...]) -> SeveralValues:
        return SeveralValues([part.expand(batch_shape) for part in self.parts])

    def mix(self, W: object) -> NoReturn:
        raise ValueError(
            "mix: expected values of one function, got several: mix inside the likelihood, "
            "dgp.Likelihood((g(x), s(x)), lambda g, s: dist.Normal(g @ W.T, jnp.exp(s)).to_event(1))"
        )


def of_columns(conditional: Callable[..., Any], f_x: FunctionValues) -> Callable[[Array], Any]:
    """A conditional of the values of each function, as one of all columns of ``f_x``."""
    return (lambda v: conditional(*f_x.split.parts(v))) if isinstance(f_x, SeveralValues) else conditional


def side_by_side(values: Sequence[FunctionValues | JointValues]) -> FunctionValues:
    """The values that a likelihood integrates: those of one function, or of several together.

    Args:
        values: of one or more functions at the same rows.

    Raises:
        ValueError: mixtures among several, or different numbers of rows.
    """
    parts = [f_x.marginals() for f_x in values]
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, MixedValues) for part in parts):
        raise ValueError(
            "Likelihood: expected functions that are not mixed among several, got f(x).mix(W): mix inside the "
            "conditional, dgp.Likelihood((g(x), s(x)), lambda g, s: dist.Normal(g @ W.T, jnp.exp(s)).to_event(1))"
        )
    shapes = [part.batch_shape for part in parts]
    try:
        batch = np.broadcast_shapes(*shapes)
    except ValueError:
        batch = ()
    rows = {math.prod(shape[-1:]) for shape in shapes}
    if len(rows) > 1 or not batch:
        raise ValueError(
            f"Likelihood: expected values of all functions at the same rows, got batch shapes {shapes}: call each "
            "function on N inputs, (f(x), g(x))"
        )
    return SeveralValues([part if part.batch_shape == batch else part.expand(batch) for part in parts])
