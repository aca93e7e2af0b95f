"""Errors for distributions of function values that are used as if they were arrays."""

from __future__ import annotations

from typing import Any, NoReturn

from numpyro_dgp._shown import brief
from numpyro_dgp.model.fields_in_order import FieldsInOrder

__all__ = ["NotAnArray"]


class _Shape:
    """What ``fn.shape`` is: a method, as of every distribution, and not the tuple of numbers that arrays have."""

    def __init__(self, owner: NotAnArray) -> None:
        self.owner = owner

    def __call__(self, sample_shape: tuple[int, ...] = ()) -> tuple[int, ...]:
        return tuple(sample_shape) + self.owner.batch_shape + self.owner.event_shape

    def __iter__(self) -> NoReturn:
        self.owner.refuse_array()

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


class NotAnArray(FieldsInOrder):
    """A distribution that says what to do where a program computes with it: draw it, or integrate it."""

    __repr__ = brief

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return _Shape(self)

    def refuse_array(self, *others: Any) -> NoReturn:
        """Raise the error.

        Args:
            *others: what it was combined with.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"f(x): expected an array in this place, got the distribution {type(self).__name__}: draw it, "
            'h = numpyro.sample("h", f(x)), or integrate it, dgp.Likelihood(f(x), lambda v: dist.Normal(v, 0.1))'
        )

    __jax_array__ = __getitem__ = refuse_array
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse_array
    __lt__ = __le__ = __gt__ = __ge__ = refuse_array
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = refuse_array
