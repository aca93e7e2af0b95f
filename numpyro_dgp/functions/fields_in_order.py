"""Distributions whose arrays have the same order in every process."""

from __future__ import annotations

import numpyro.distributions as dist

__all__ = ["FieldsInOrder"]


class FieldsInOrder(dist.Distribution):
    """A distribution whose arrays, as the leaves of a pytree, are in the order of their names.

    NumPyro takes the order of a set, which is another one in every process, unless ``PYTHONHASHSEED`` says which. A
    program that stacks, maps or branches over such distributions would be another program in the next process, and no
    checkpoint of it could be continued there.
    """

    @classmethod
    def gather_pytree_data_fields(cls) -> tuple[str, ...]:
        return tuple(sorted(super().gather_pytree_data_fields()))
