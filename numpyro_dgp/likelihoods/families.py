"""The known family of a distribution, by its methods: a subclass that overrides the density is another family."""

from __future__ import annotations

from typing import Any

import numpyro.distributions as dist
from numpyro.distributions import kl_divergence

from numpyro_dgp._typing import Array

__all__ = ["elementwise", "follows", "is_family", "known_divergence", "of_numpyro"]

_WRAPPERS = dist.ExpandedDistribution, dist.MaskedDistribution, dist.Independent


def is_family(d: Any, *families: type, methods: tuple[str, ...] = ("log_prob",)) -> bool:
    """Whether a distribution is of one of some families, with the family's own methods.

    Args:
        d: a distribution.
        families: classes of distributions.
        methods: names that a subclass must not override; those that the family lacks are ignored.

    Example:
        >>> class Twice(dist.Normal):
        ...     def log_prob(self, value):
        ...         return 2 * super().log_prob(value)
        >>> is_family(dist.Normal(), dist.Normal), is_family(Twice(), dist.Normal)
        (True, False)
        >>> is_family(Twice(), dist.Normal, methods=("sample",))
        True
    """
    return any(
        isinstance(d, family) and all(getattr(type(d), m, None) is getattr(family, m, None) for m in methods)
        for family in families
    )


def elementwise(d: dist.Distribution) -> dist.Distribution:
    """``d`` without ``to_event``: one distribution per number."""
    while is_family(d, dist.Independent):
        d = d.base_dist  # type: ignore[attr-defined]
    return d


def of_numpyro(d: Any) -> bool:
    """Whether the density of a distribution is NumPyro's."""
    return str(type(d).log_prob.__module__).startswith("numpyro.")


def follows(d: Any, method: str, than: str = "log_prob") -> bool:
    """Whether a distribution has a method that was written for its density: not in a class above that of ``than``.

    Args:
        d: a distribution.
        method: a name.
        than: the method that it has to agree with.

    Example:
        >>> class Half(dist.Normal):
        ...     def expected_log_prob(self, y, mean, variance):
        ...         return self.log_prob(y) - 0.5 * variance / self.scale**2
        >>> class Other(Half):
        ...     def log_prob(self, value):
        ...         return 0.0 * value
        >>> follows(Half(), "expected_log_prob"), follows(Other(), "expected_log_prob")
        (True, False)
    """
    for cls in type(d).__mro__:
        if method in vars(cls):
            return True
        if than in vars(cls):
            return False
    return False


def known_divergence(q: Any, p: Any) -> Array:
    """The divergence of p from q that NumPyro or this package has in closed form for their families.

    Args:
        q: a distribution.
        p: another one.

    Raises:
        NotImplementedError: there is none, or a subclass overrides the density.
    """
    inner = _unwrapped(q), _unwrapped(p)
    for families in kl_divergence.ordering:
        if all(map(isinstance, inner, families)):
            if not all(map(_has_density_of, inner, families)):
                raise NotImplementedError
            break
    return kl_divergence(q, p)


def _unwrapped(d: Any) -> Any:
    while isinstance(d, _WRAPPERS):
        if not is_family(d, *_WRAPPERS):
            raise NotImplementedError
        d = d.base_dist
    return d


def _has_density_of(d: Any, family: type) -> bool:
    """Whether the density of an instance of a family is that of the family; of any distribution is its own."""
    ours = str(type(d).log_prob.__module__).startswith("numpyro_dgp.")
    return ours or family is dist.Distribution or is_family(d, family)
