"""Distributions of the values of functions at all inputs of a call together: the rows are part of the event."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_dgp._typing import Array
from numpyro_dgp.functions.function_values import Values
from numpyro_dgp.functions.open_plates import require_outside

__all__ = ["ProcessValues"]


class ProcessValues(Values):
    """Values of P independent functions at N inputs together: event shape (N, P), or (N,) for a scalar function.

    A subclass says how they are correlated: :class:`~numpyro_dgp.functions.joint_values.JointValues` by covariances.

    Raises:
        ValueError: by :meth:`residual`, from which a density begins, for values of another shape than the event's; by
            :meth:`expand`, in a plate of their rows.
    """

    all_rows_together = True

    @property
    def site_kind(self) -> str:  # type: ignore[override]
        """``"exact"`` for values of a process without inducing values, else ``"hidden"``."""
        return "exact" if self.function is not None and self.function.site is None else "hidden"

    def expand(self, batch_shape: Any) -> Any:
        require_outside("f(x)", self.event_shape[0], self.batch_shape, tuple(batch_shape))
        return self._expanded(tuple(batch_shape))

    def _expanded(self, batch: tuple[int, ...]) -> Any:
        return super().expand(batch)

    def residual(self, value: Array) -> Array:
        """Values less their means, of values with the event shape: another would broadcast.

        Raises:
            ValueError: another shape.
        """
        shape = np.shape(value)
        if shape[-self.event_dim :] != self.event_shape:
            raise ValueError(
                f"f(x): expected observations y of shape {self.shape()}, got {shape}: a scalar function (outputs=None) "
                "wants y of shape (N,); outputs=P wants (N, P)"
            )
        return value - self.loc

    def to_output_major(self, value: Array) -> Array:
        """Values (..., N, P), or (..., N), as (..., P, N)."""
        return value.mT if self.event_dim == 2 else value[..., None, :]

    def to_value(self, rows: Array) -> Array:
        """Numbers (..., P, N) in the shape of values."""
        return rows.mT if self.event_dim == 2 else rows[..., 0, :]

    def precision_times(self, residual: Array) -> Array:
        """The inverse covariance given u times numbers of the shape of values."""
        raise NotImplementedError
