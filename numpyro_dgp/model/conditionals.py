"""How a conditional, the function from v to the distribution of y in a ``Likelihood``, depends on v.

One call gives an example of the distribution; one trace of a second call, read by
:mod:`~numpyro_dgp.algebra.dependence`, says how each parameter depends on v. This decides how v is integrated.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpyro
import numpyro.distributions as dist
from numpyro.primitives import Messenger

from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.dependence import Dependence, explained
from numpyro_dgp.algebra.quadrature import GaussHermite, MonteCarlo
from numpyro_dgp.model.censoring import CENSORED
from numpyro_dgp.model.shared_rows import Shared, shared_rows

__all__ = ["Reading", "choose_rule", "elementwise", "read", "with_key"]

# Folders of libraries: a warning points to the first line of code outside of them.
_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(numpyro.__file__).parent))


class Reading(NamedTuple):
    """How a conditional depends on v.

    Args:
        example: the distribution at one v.
        kinds: how each parameter of one number of y depends on v, by name; empty where ``mixes`` is set.
        mixes: why y is not made of numbers that each have their own number of v, a verb phrase; ``None`` if it is.
        shared: how an entry of y sees several rows of v, where ``mixes`` is set and it does or may.
    """

    example: dist.Distribution
    kinds: dict[str, Dependence]
    mixes: str | None = None
    shared: Shared | None = None

    @property
    def family(self) -> str:
        """The name of the distribution of one number of y, as a program writes it."""
        return type(elementwise(self.example)).__name__.removesuffix("Logits").removesuffix("Probs")


class _NoSites(Messenger):
    """Refuses sites inside a conditional, which runs again outside the program's handlers."""

    def process_message(self, msg: dict[str, Any]) -> None:
        what = "numpyro.prng_key()" if msg["type"] == "prng_key" else f"{msg['type']} {msg['name']!r}"
        raise ValueError(
            f"Likelihood: expected a conditional without sites of its own, got {what}: draw or create it in the "
            "program before, and use its value"
        )


def elementwise(d: dist.Distribution) -> dist.Distribution:
    """``d`` without ``to_event``: one distribution per number."""
    while isinstance(d, dist.Independent):
        d = d.base_dist
    return d


def read(conditional: Callable[[Array], dist.Distribution], v: Array, event_dim: int) -> Reading:
    """Find out how a conditional depends on v: call it once, and trace it once unless its shapes are enough.

    Args:
        conditional: from v to the distribution of y; it may close over tracers.
        v: function values (..., N, P), or (..., N) of a scalar function.
        event_dim: 1 if v has a column per output, else 0.

    Raises:
        ValueError: sites inside the conditional, something else than a function that returns a distribution, or a
            density that sees several rows of v.

    Example:
        >>> import jax.numpy as jnp
        >>> read(lambda v: dist.Normal(2 * v, 0.1), jnp.zeros(3), event_dim=0).kinds["loc"].name
        'AFFINE'
        >>> read(lambda v: dist.Categorical(logits=v), jnp.zeros((3, 2)), event_dim=1).mixes
        'mixes the 2 outputs of f'
        >>> read(lambda v: dist.Normal(v, jnp.cumsum(jnp.exp(v))), jnp.zeros(3), event_dim=0)
        Traceback (most recent call last):
        ValueError: Likelihood: expected a conditional in which every y sees one row of v, got Normal, which takes ...
    """
    if isinstance(conditional, dist.Distribution) or not callable(conditional):
        raise ValueError(
            f"Likelihood: expected a function from v to the distribution of y, got a {type(conditional).__name__}: for "
            "example lambda v: dist.Normal(v, 0.1)"
        )
    with _NoSites():
        example = conditional(v)
    if not isinstance(example, dist.Distribution):
        raise ValueError(
            f"Likelihood: expected conditional(v) to return a NumPyro distribution, got {type(example).__name__}: for "
            "example lambda v: dist.Normal(v, 0.1)"
        )
    numbers = elementwise(example)
    if numbers.batch_shape != v.shape or numbers.event_shape != ():
        return _mixed(conditional, v, event_dim, example, _of_shapes(numbers, v.shape, event_dim))
    with _NoSites():
        try:
            named, every = explained(lambda u: _parameters(elementwise(conditional(u))), v)
        except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
            raise ValueError(
                "Likelihood: expected a conditional of JAX operations on v, got one that turns v into a NumPy array or "
                "a Python number: jnp.exp(v) instead of np.exp(v), jnp.where instead of if"
            ) from error
    for name, leaves in [*named.items(), ("its parameters", every)]:
        for kind, cause in leaves:
            if kind is Dependence.MIXED:
                how = f"takes {name} from v by {cause}, which is not known to act number by number"
                return _mixed(conditional, v, event_dim, example, how)
    return Reading(example, {name: leaves[0].kind for name, leaves in named.items() if len(leaves) == 1})


def _mixed(
    conditional: Callable[[Array], dist.Distribution], v: Array, event_dim: int, example: dist.Distribution, mixes: str
) -> Reading:
    with _NoSites():
        shared = shared_rows(lambda u: elementwise(conditional(u)), v, v.ndim - event_dim)
    reading = Reading(example, {}, mixes, shared)
    if shared is not None and shared.known:
        raise ValueError(
            f"Likelihood: expected a conditional in which every y sees one row of v, got {reading.family}, which "
            f"{shared.how}: the rows of f(x) are integrated one by one; draw them together, "
            'v = numpyro.sample("v", f.joint(X)) outside the plate, and observe numpyro.sample("y", '
            f"dist.{reading.family}(...), obs=y) given that draw"
        )
    return reading


def _parameters(d: dist.Distribution) -> tuple[dict[str, list[Any]], list[Any]]:
    """The named parameters of a distribution, and all arrays that it flattens into."""
    named = {name: jax.tree.leaves(d.__dict__.get(name)) for name in type(d).gather_pytree_data_fields()}
    if isinstance(d, CENSORED):
        named |= _parameters(d.base_dist)[0]
    return named, jax.tree.leaves(d)


def _of_shapes(d: dist.Distribution, shape: tuple[int, ...], event_dim: int) -> str:
    if event_dim and shape[-1] > 1 and d.batch_shape[: len(shape) - 1] == shape[:-1]:
        return f"mixes the {shape[-1]} outputs of f"
    return f"has batch shape {d.batch_shape} and event shape {d.event_shape} for function values of shape {shape}"


def choose_rule(
    reading: Reading, integrate: GaussHermite | MonteCarlo | None, *, exact: bool
) -> GaussHermite | MonteCarlo:
    """The rule for expectations without a closed form. Warns where it falls back on random draws unasked.

    Args:
        reading: of the conditional.
        integrate: the rule given by the program, or ``None``.
        exact: whether all expectations have a closed form, so that no rule is needed.

    Raises:
        ValueError: no rule, or Gauss-Hermite for numbers of y that do not have their own number of v.
    """
    if integrate is not None and not isinstance(integrate, GaussHermite | MonteCarlo):
        raise ValueError(
            f"Likelihood: expected integrate=dgp.GaussHermite(n) or dgp.MonteCarlo(n), got {type(integrate).__name__}: "
            "20 nodes are dgp.GaussHermite(20)"
        )
    if reading.mixes is None:
        return with_key(integrate or GaussHermite())
    if isinstance(integrate, GaussHermite):
        raise ValueError(
            "Likelihood: expected a conditional that treats every output on its own for GaussHermite, got "
            f"{reading.family}, which {reading.mixes}: use integrate=dgp.MonteCarlo(n)"
        )
    rule = with_key(integrate or MonteCarlo())
    if integrate is None and not exact:
        _warn(
            f"Likelihood: {reading.family} {reading.mixes}, so its expectation is taken by {rule.size} Monte-Carlo "
            "draws per step; say integrate=dgp.MonteCarlo(n) to choose their number and silence this"
            + ("" if reading.shared is None else f". Rows are drawn one by one: it {reading.shared.how}")
        )
    return rule


def with_key(rule: GaussHermite | MonteCarlo) -> GaussHermite | MonteCarlo:
    """``rule``, draws with a key of the program's; outside of a program, or if it has no seed, as they are."""
    if not isinstance(rule, MonteCarlo) or rule.key is not None:
        return rule
    with Messenger():  # a handler that does nothing: without any handler NumPyro warns that there is no seed
        return MonteCarlo(rule.size, numpyro.prng_key())


def _warn(message: str) -> None:
    """Warn about the line of the user's program: once per line, which is what Python's default filter does."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
