"""How a conditional, the function from v to the distribution of y in a ``Likelihood``, depends on v.

One call gives an example of the distribution. One trace of a second call, analysed by
:mod:`~numpyro_dgp.jaxprs.dependence`, gives how each parameter depends on v, and whether the density of one y depends
on several rows of v, so that rows cannot be integrated separately. This decides how v is integrated.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._checks import expect, expect_kind, expected, is_concrete
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.jaxprs.dependence import Dependence, explained
from numpyro_dgp.jaxprs.row_dependence import Rows, Several, mark, row_reasons, together
from numpyro_dgp.likelihoods.families import elementwise
from numpyro_dgp.likelihoods.several_conditionals import Part, grid_of
from numpyro_dgp.likelihoods.tails import CENSORED
from numpyro_dgp.math.quadrature import MOST_DIRECTIONS, GaussHermite, MonteCarlo, ProductGrid

__all__ = ["Reading", "Shared", "choose_rule", "read", "require_arguments", "shared_rows", "with_key"]

_ALL = "its parameters"

Rule = GaussHermite | MonteCarlo | ProductGrid


class Shared(NamedTuple):
    """How the density of one y depends on several rows of v.

    Args:
        how: a verb phrase.
        known: whether the dependence is certain; otherwise it comes from an operation that is not analysed.
    """

    how: str
    known: bool


def shared_rows(conditional: Callable[[Array], dist.Distribution], v: Array, batch_ndim: int) -> Shared | None:
    """Find out whether a density depends on several rows of v, from the jaxpr of its parameters.

    Args:
        conditional: from v to the distribution of y.
        v: function values; only shape and dtype matter.
        batch_ndim: how many of the first axes of v are rows.

    Returns:
        ``None`` where every density depends on one row.

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
    for name in [*sorted(named.keys() - {_ALL}), _ALL]:  # names are more informative
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
    """Rows of a parameter with ``event_dim`` event axes, by the axes of the densities."""
    if any(axis >= -event_dim for axis in rows.axes):
        return Several("one density for all of them", True)
    return Rows(tuple(axis + event_dim for axis in rows.axes), rows.which)


# Folders of libraries: a warning points to the first line of code outside of them.
_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(numpyro.__file__).parent))


class Reading(NamedTuple):
    """How a conditional depends on v.

    Args:
        example: the distribution at one v.
        kinds: how each parameter of one entry of y depends on v, by name; empty where ``mixes`` is set.
        mixes: why the likelihood does not factorise over the entries of v, a verb phrase; ``None`` if it does.
        shared: how an entry of y depends on several rows of v, where ``mixes`` is set and it does or may.
        parts: how it depends on the values of each function, where ``mixes`` is set.
        grid: integrates it where ``mixes`` is set and an entry of y depends on few entries of v.
    """

    example: dist.Distribution
    kinds: dict[str, Dependence]
    mixes: str | None = None
    shared: Shared | None = None
    parts: tuple[Part, ...] = ()
    grid: ProductGrid | None = None

    @property
    def family(self) -> str:
        """The name of the distribution of one entry of y, as written in a program."""
        return type(elementwise(self.example)).__name__.removesuffix("Logits").removesuffix("Probs")


def _refuse_site(msg: dict[str, Any]) -> NoReturn:
    """Raise for a site inside a conditional, which runs again outside the program's handlers."""
    what = "numpyro.prng_key()" if msg["type"] == "prng_key" else f"{msg['type']} {msg['name']!r}"
    raise expected(
        "a conditional without sites of its own", what, "draw or create it in the program before, and use its value"
    )


def read(conditional: Callable[..., dist.Distribution], f_x: FunctionValues) -> Reading:
    """Find out how a conditional depends on v: call it once, and trace it once unless its shapes are enough.

    Args:
        conditional: from v, of every function, to the distribution of y; it may close over tracers.
        f_x: function values (..., N, P), or (..., N) of a scalar function.

    Raises:
        ValueError: sites inside the conditional, something else than a function that returns a distribution, or a
            density that depends on several rows of v.

    Example:
        >>> import jax.numpy as jnp
        >>> f_x = FunctionValues(jnp.zeros(3), jnp.ones(3), event_dim=0)
        >>> read(lambda v: dist.Normal(2 * v, 0.1), f_x).kinds["loc"].name
        'AFFINE'
        >>> read(lambda v: dist.Categorical(logits=v), FunctionValues(jnp.zeros((3, 2)), jnp.ones((3, 2)))).mixes
        'mixes the 2 outputs of f'
        >>> read(lambda v: dist.Normal(v, jnp.cumsum(jnp.exp(v))), f_x)
        Traceback (most recent call last):
        ValueError: expected a conditional in which every y depends on one row of v, got Normal, which takes ...
    """
    expect(
        not isinstance(conditional, dist.Distribution) and callable(conditional),
        "a function from v to the distribution of y",
        f"a {type(conditional).__name__}",
        "for example lambda v: dist.Normal(v, 0.1)",
    )
    several: Any = f_x.by_function
    values = [part.loc for part in several]
    invalid: ValueError | None = None  # of NumPyro, whose message does not mention the range of function values
    with each_message(_refuse_site):
        try:
            example = _called(conditional, values, f_x)
        except ValueError as error:
            if "distribution got invalid" not in str(error):
                raise
            invalid = error
            with numpyro.validation_enabled(False):
                example = _called(conditional, values, f_x)
    expect_kind(example, dist.Distribution, "conditional(v), a NumPyro distribution", "lambda v: dist.Normal(v, 0.1)")
    numbers = elementwise(example)
    found = [_part(conditional, values, f, part.event_dim, numbers) for f, part in enumerate(several)]
    parts = tuple(part for part, _ in found)
    for v, part in zip(values, parts, strict=True):
        _require_ranges(conditional, values, v, numbers, part.kinds)
    if invalid is not None:
        raise invalid
    if len(parts) == 1 and parts[0].own:
        return Reading(example, dict(parts[0].kinds))
    if len(parts) > 1:
        mixes = f"depends on {len(parts)} functions together"
    else:
        mixes = found[0][1] or _of_shapes(numbers, values[0].shape, f_x.event_dim)
    with each_message(_refuse_site):
        whole = f_x.of_columns(conditional)
        shared = shared_rows(lambda u: elementwise(whole(u)), f_x.loc, f_x.loc.ndim - f_x.event_dim)
    entries = math.prod(numbers.batch_shape[len(numbers.batch_shape) - example.event_dim + numbers.event_dim :])
    grid = grid_of(parts, entries) if shared is None else None
    reading = Reading(example, {}, mixes, shared, parts, grid)
    if shared is not None and shared.known:
        raise expected(
            "a conditional in which every y depends on one row of v",
            f"{reading.family}, which {shared.how}",
            'draw them together outside the plate, v = numpyro.sample("v", f.joint(X)), and observe y given v',
        )
    return reading


def require_arguments(conditional: Callable[..., Any], count: int) -> None:
    """Raise unless a conditional, where it is a function, can be called with the values of so many functions."""
    if isinstance(conditional, dist.Distribution) or not callable(conditional):
        return
    try:
        inspect.signature(conditional).bind(*[None] * count)
    except TypeError as error:
        names = ", ".join(["v", "w", "u"][:count] if count <= 3 else [f"v{i}" for i in range(1, count + 1)])
        raise expected(
            f"a conditional of {count} argument(s), the values of each function",
            f"one that cannot be called with these ({error})",
            f"lambda {names}: dist.Normal(v, 0.1); for two functions dgp.Likelihood((f(X), g(X)), lambda v, w: ...)",
        ) from error
    except ValueError:  # a callable that has no signature
        return


def _called(conditional: Callable[..., Any], values: list[Array], f_x: FunctionValues) -> Any:
    try:
        return conditional(*values)
    except (ValueError, TypeError) as error:
        if "broadcast" not in str(error):
            raise
        rows = f_x.batch_shape
        raise expected(
            f"arrays of shape {rows} or () in the conditional, one number per row of f(x)",
            f"others ({error})",
            "pass values of these rows, in a subsampled plate noise[i] with X[i]",
        ) from error


_INSTEAD = {"probs": "logits=v, or probs=jax.nn.sigmoid(v) (jax.nn.softmax(v) of several)"}


def _require_ranges(
    conditional: Callable[..., Any],
    values: list[Array],
    v: Array,
    numbers: dist.Distribution,
    kinds: Mapping[str, Dependence],
) -> None:
    """Raise where a constrained parameter, such as a probability, is v itself or a v + b, which are unconstrained."""
    for name, constraint in numbers.arg_constraints.items():
        itself = getattr(numbers, name, None) is v and not _is_any_number(constraint)
        if itself or (kinds.get(name) is Dependence.AFFINE and _leaves(conditional, values, v, name, constraint)):
            family = type(numbers).__name__.removesuffix("Logits").removesuffix("Probs")
            raise expected(
                f"{name} of {family} in its range, {constraint}, at every value of the function, which is any number",
                "v itself" if itself else "a line in v",
                f"write {_INSTEAD.get(name, f'{name}=jnp.exp(v)')}",
            )


def _is_any_number(constraint: Any) -> bool:
    while isinstance(constraint, type(constraints.real_vector)):
        constraint = constraint.base_constraint
    return constraint is constraints.real or isinstance(constraint, type(constraints.dependent))


def _leaves(conditional: Callable[..., Any], values: list[Array], v: Array, name: str, constraint: Any) -> bool:
    """Whether a parameter that is a line in v leaves its range at large values, as far as the line is known."""
    if _is_any_number(constraint):
        return False
    for far in (-1e6, 1e6):
        with jax.ensure_compile_time_eval(), each_message(_refuse_site):
            moved = [jnp.full(u.shape, far, u.dtype) if u is v else u for u in values]
            try:
                found = getattr(elementwise(conditional(*moved)), name)
                if is_concrete(found) and not np.all(constraint(found)):
                    return True
            except ValueError:  # of the distribution, which checks its arguments
                return True
    return False


def _part(
    conditional: Callable[..., dist.Distribution],
    values: list[Array],
    f: int,
    event_dim: int,
    numbers: dist.Distribution,
) -> tuple[Part, str | None]:
    """How a conditional depends on the values of one function, and the reason where it may combine several of them."""
    v = values[f]
    columns = v.shape[-1] if event_dim else 1
    alone = event_dim and columns == 1 and len(values) > 1 and numbers.batch_shape[:-1] == v.shape[:-1]
    if numbers.event_shape != () or (numbers.batch_shape != v.shape and not alone):
        return Part(columns, False, {}), None
    with each_message(_refuse_site):
        try:
            named, every = explained(
                lambda u: _parameters(elementwise(conditional(*values[:f], u, *values[f + 1 :]))), v
            )
        except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
            raise expected(
                "a conditional of JAX operations on v",
                "one that turns v into a NumPy array or a Python number",
                "jnp.exp(v) instead of np.exp(v), jnp.where instead of if",
            ) from error
    for name, leaves in [*named.items(), ("its parameters", every)]:
        for kind, cause in leaves:
            if kind is Dependence.MIXED:
                how = f"takes {name} from v by {cause}, which is not known to act elementwise"
                return Part(columns, False, {}), how
    kinds = {name: leaves[0].kind for name, leaves in named.items() if len(leaves) == 1}
    return Part(columns, numbers.batch_shape == v.shape, kinds), None


def _parameters(d: dist.Distribution) -> tuple[dict[str, list[Any]], list[Any]]:
    """The named parameters of a distribution, and all arrays that it flattens into."""
    named = {name: jax.tree.leaves(d.__dict__.get(name)) for name in sorted(type(d).gather_pytree_data_fields())}
    if isinstance(d, CENSORED):
        named |= _parameters(d.base_dist)[0]
    return named, jax.tree.leaves(d)


def _of_shapes(d: dist.Distribution, shape: tuple[int, ...], event_dim: int) -> str:
    if event_dim and shape[-1] > 1 and d.batch_shape[: len(shape) - 1] == shape[:-1]:
        return f"mixes the {shape[-1]} outputs of f"
    return f"has batch shape {d.batch_shape} and event shape {d.event_shape} for function values of shape {shape}"


def choose_rule(reading: Reading, integrate: GaussHermite | MonteCarlo | None, *, exact: bool) -> Rule:
    """The rule for expectations without a closed form. Warns where it falls back on Monte Carlo.

    Args:
        reading: of the conditional.
        integrate: the rule given by the program, or ``None``.
        exact: whether all expectations have a closed form, so that no rule is needed.

    Raises:
        ValueError: no rule, or Gauss-Hermite where an entry of y depends on too many entries of v.
    """
    expect_kind(
        integrate,
        GaussHermite | MonteCarlo | None,
        "integrate=dgp.likelihoods.GaussHermite(n) or dgp.likelihoods.MonteCarlo(n)",
        "20 nodes are dgp.likelihoods.GaussHermite(20)",
    )
    if reading.mixes is None:
        return with_key(integrate or GaussHermite())
    if reading.grid is not None and not (integrate and integrate.random):
        return dataclasses.replace(reading.grid, nodes_each=None if integrate is None else integrate.size)
    if integrate is not None and not integrate.random:
        raise expected(
            f"entries of y that depend on at most {MOST_DIRECTIONS} entries of v for GaussHermite",
            f"{reading.family}, which {reading.mixes}",
            "use integrate=dgp.likelihoods.MonteCarlo(n)",
        )
    rule = with_key(integrate or MonteCarlo())
    if integrate is None and not exact:
        _warn(
            f"Likelihood: {reading.family} {reading.mixes}, so its expectation is taken by {rule.size} Monte-Carlo "
            "draws per step; pass integrate=dgp.likelihoods.MonteCarlo(n) to choose their number and silence this"
            + ("" if reading.shared is None else f". Rows are drawn one by one: it {reading.shared.how}")
        )
    return rule


def with_key(rule: Rule) -> Rule:
    """``rule``, with a key of the program for Monte Carlo; unchanged outside of a program or without a seed."""
    if not rule.random or rule.key is not None:
        return rule
    with each_message():  # a handler that does nothing: without any handler NumPyro warns that there is no seed
        return MonteCarlo(rule.size, numpyro.prng_key())


def _warn(message: str) -> None:
    """Warn about the line of the user's program: once per line, which is what Python's default filter does."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
