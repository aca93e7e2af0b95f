"""Whether the density of one y sees several rows of v, so that rows cannot be integrated one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpyro.distributions as dist

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.row_dependence import Rows, Several, mark, row_reasons, together

__all__ = ["Shared", "shared_rows"]


_ALL = "its parameters"


class Shared(NamedTuple):
    """How the density of one y sees several rows of v.

    Args:
        how: a verb phrase.
        known: whether it does for certain; otherwise an operation is not known.
    """

    how: str
    known: bool


def shared_rows(conditional: Callable[[Array], dist.Distribution], v: Array, batch_ndim: int) -> Shared | None:
    """Find out whether a density sees several rows of v, from the jaxpr of its parameters.

    Args:
        conditional: from v to the distribution of y.
        v: function values; only shape and dtype matter.
        batch_ndim: how many of the first axes of v are rows.

    Returns:
        ``None`` where every density is known to see one row.

    Example:
        >>> import jax.numpy as jnp
        >>> v = jnp.zeros(3)
        >>> shared_rows(lambda v: dist.Normal(v - v.mean(), 0.1), v, 1)
        Shared(how='takes loc from several rows of v by reduce_sum', known=True)
        >>> shared_rows(lambda v: dist.Normal(v[::-1], 0.1), v, 1) is None
        True
    """
    kinds: dict[str, int] = {}
    in_place: list[tuple[int, ...]] = []

    def parameters(u: Array) -> dict[str, list[Any]]:
        d = conditional(mark("v", u, batch_ndim))
        if len(d.batch_shape) in (batch_ndim, u.ndim):
            in_place.append(tuple(axis - len(d.batch_shape) for axis in range(batch_ndim) if u.shape[axis] > 1))
        fields = type(d).gather_pytree_data_fields()
        kinds.update({name: getattr(c, "event_dim", 0) for name, c in d.arg_constraints.items() if name in fields})
        return {name: jax.tree.leaves(d.__dict__.get(name)) for name in fields} | {_ALL: jax.tree.leaves(d)}

    unsure, seen = None, None
    named = row_reasons(parameters, v)
    for name in [*sorted(named.keys() - {_ALL}), _ALL]:  # names say more
        for fact in named[name]:
            rows = fact.get("v")
            if isinstance(rows, Rows) and name in kinds:
                own = _by_batch(rows, kinds[name])
                if isinstance(own, Rows) and in_place and sorted(own.axes) != sorted(in_place[0]) and own.axes:
                    own = Several("a change of their axis", True)
                rows = seen = own if seen is None else together(own, seen, "different parameters")
            if isinstance(rows, Several):
                found = Shared(f"takes {name} from several rows of v by {rows.cause}", rows.known)
                if found.known:
                    return found
                unsure = unsure or Shared(f"takes {name} from v by {rows.cause}, which may combine rows", False)
    return unsure


def _by_batch(rows: Rows, event_dim: int) -> Rows | Several:
    """Rows of a parameter with ``event_dim`` axes of its own, by the axes of the densities."""
    if any(axis >= -event_dim for axis in rows.axes):
        return Several("one density for all of them", True)
    return Rows(tuple(axis + event_dim for axis in rows.axes), rows.which)
