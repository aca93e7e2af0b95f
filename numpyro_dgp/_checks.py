"""Checks of user input. Each raises ``ValueError``: what was expected, what came, what to try, after the name of the
public function or class that was called.

A check looks at values only when they are concrete. Under ``jit``, ``grad`` or ``vmap`` the values
are tracers and only shapes are checked, so checking costs nothing in a compiled step. A program that is compiled by
:func:`with_checks` also returns whether any check failed on a traced value.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._typing import ArrayLike

__all__ = [
    "MISSING",
    "caller",
    "current_trace",
    "expect",
    "expect_kind",
    "expected",
    "inside_transformation",
    "is_concrete",
    "is_count",
    "kept",
    "nearest",
    "require_call",
    "require_count",
    "require_finite",
    "require_finite_leaves",
    "require_inputs",
    "require_key",
    "require_keywords",
    "require_levels",
    "require_noise",
    "require_params",
    "require_positive",
    "require_scalar",
    "require_squares",
    "taking_the_loss",
    "violated",
    "with_checks",
    "without_checks",
    "with_nearest",
]

_OF_HANDLERS = "process_message", "postprocess_message", "__exit__"  # which NumPyro calls
_OF_LINE_SEARCHES = "value_fn", "grad_fn", "obj_fn", "grad"
_DEEPER = "depth.weighted_posterior"  # the class of a result, with methods to call

MISSING = (
    "drop or impute rows with missing inputs; of observations with gaps, y, observed = dgp.likelihoods.missing(y) "
    "gives what dgp.Likelihood(..., observed=observed) takes"
)


def caller() -> str:
    """The public name that was called from outside of the package, as ``fit`` or ``Posterior.predict``.

    It is looked up on the stack when a message is written, so that no function passes its name on. Functions of a
    submodule have its name in front, as ``design.maximise``; a function that opens a layer is named with it, as
    ``gp 'f'``. Empty if there is none.
    """
    package = sys.modules["numpyro_dgp"]
    parts = {n.removeprefix("numpyro_dgp."): m for n, m in sys.modules.items() if n.startswith("numpyro_dgp.")}
    names = {n: getattr(m, "__all__", ()) for n, m in parts.items() if n[0] != "_" and ("." not in n or n == _DEEPER)}
    public = {*package.__all__}.union(*names.values())
    frames = [frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_filename != "<string>"]
    modules = [frame.f_globals.get("__name__", "").split(".") for frame in frames]
    for frame, module, outer in zip(frames, modules, [*modules[1:], [""]], strict=True):
        if module[0] != package.__name__ or outer[0] == package.__name__ or frame.f_code.co_name in _OF_HANDLERS:
            continue
        local = frame.f_locals
        root, *method = frame.f_code.co_qualname.split(".<locals>")[0].split(".")
        if method:
            own = local.get("self", local.get("cls"))
            bases = (own if isinstance(own, type) else type(own)).__mro__
            if any(base.__name__ in public for base in bases):
                name = bases[0].__name__
                return name if method[0].startswith("_") else f"{name}.{method[0]}"
        elif getattr(vars(package).get(root), "__module__", "") == frame.f_globals["__name__"]:
            site = local["name"] if "name" in inspect.getargs(frame.f_code).args else None
            return f"{root} {site!r}" if isinstance(site, str) else root
        elif part := next((n for n in sorted(names, key=lambda n: n != module[1]) if root in names[n]), None):
            return f"{part}.{root}"
    return ""


def expected(what: str, got: object, do: str = "", at: str | None = None) -> ValueError:
    """The error of a wrong call, to be raised: ``"at: expected what, got got: do"``.

    Args:
        what: what was expected.
        got: what came.
        do: what to try.
        at: the site or the layer that it is about; :func:`caller` by default.
    """
    where = caller() if at is None else at
    return ValueError(f"{where}: " * bool(where) + f"expected {what}, got {got}" + f": {do}" * bool(do))


def expect(met: Any, what: str, got: object, do: str = "", at: str | None = None) -> None:
    """Raise the error :func:`expected` unless ``met`` is true."""
    if not met:
        raise expected(what, got, do, at)


def expect_kind(value: Any, kinds: Any, what: str, do: str = "", at: str | None = None) -> None:
    """Raise the error :func:`expected` unless ``value`` is an instance of one of ``kinds``."""
    if not isinstance(value, kinds):
        raise expected(what, type(value).__name__, do, at)


def is_concrete(*values: Any) -> bool:
    """Whether no leaf of ``values`` is a tracer or a shape placeholder."""
    leaves = jax.tree.leaves(values)
    return not any(isinstance(v, jax.core.Tracer | jax.ShapeDtypeStruct) for v in leaves)


# JAX moved it from the one module to the other.
_trace_state = getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state


def current_trace() -> Any:
    """An object that identifies the JAX transformation being traced; equal for the same one."""
    return _trace_state(convention="numpyro")


_OUTSIDE = current_trace()  # where modules are imported


def inside_transformation() -> bool:
    """Whether this runs inside ``jax.jit``, ``vmap``, ``grad`` or the like, where functions may hold traced values."""
    return bool(current_trace() != _OUTSIDE)


_CHECKS: ContextVar[tuple[Any, list[Any], bool] | None] = ContextVar("_CHECKS", default=None)
"""The transformation that is being traced by ``with_checks``, the outcomes of checks in it so far, and that of a check
whose values it cannot have."""


def violated(rule: Callable[..., Any], *values: ArrayLike) -> bool:
    """Whether known values break a rule. Traced values are left to :func:`with_checks`.

    Args:
        rule: from arrays, of NumPy or of JAX, to whether each entry keeps it, by operators that both have.
        *values: its arguments.
    """
    if is_concrete(*values):
        return not np.all(rule(*map(np.asarray, values)))
    if (checks := _CHECKS.get()) is not None:
        trace, outcomes, hidden = checks
        # A transformation inside of the traced one, as of a loop, keeps its values to itself.
        outcomes.append(jnp.all(rule(*map(jnp.asarray, values))) if current_trace() == trace else hidden)
    return False


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def without_checks() -> AbstractContextManager[None]:
    """Context without traced checks, for programs that are traced for their shapes only."""
    return _set(_CHECKS, None)


def with_checks(function: Callable[..., Any], hidden: bool = False) -> Callable[..., tuple[Any, Any]]:
    """``function`` with all checks of traced values in it, to be compiled: returns ``(sound, result)``.

    Where ``sound`` is false a check failed, or its values could not be had: calling ``function`` without compiling it
    raises the error, or gives the warning.

    Args:
        function: the function.
        hidden: the outcome of a check whose values cannot be had, inside a loop.
    """

    def checked(*args: Any) -> tuple[Any, Any]:
        outcomes: list[Any] = []
        with _set(_CHECKS, (current_trace(), outcomes, hidden)):
            result = function(*args)
        return jnp.all(jnp.array(outcomes, bool)), result

    return checked


def kept(rule: Callable[..., Any], value: Any, *others: ArrayLike) -> Any:
    """``value``; where it is traced, NaN in those rows (..., D) in which an entry breaks the rule.

    Args:
        rule: from arrays to whether each entry keeps it.
        value: its first argument (..., D).
        *others: its other arguments.
    """
    if is_concrete(value):
        return value
    return jnp.where(rule(value, *map(jnp.asarray, others)).all(-1, keepdims=True), value, jnp.nan)


def is_count(value: Any) -> bool:
    """Whether ``value`` is a positive integer."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value > 0)


def require_count(name: str, value: Any, hint: str) -> None:
    """Raise unless ``value`` is a positive integer."""
    if not is_count(value):
        got = f"an array of shape {np.shape(value)}" if np.size(value) > 10 else repr(value)
        raise expected(f"{name} to be a positive integer", got, f"try {hint}")


def require_finite(what: str, value: ArrayLike, hint: str) -> None:
    """Raise unless every entry of ``value`` is finite."""
    if is_concrete(value) and (dtype := np.asarray(value).dtype).kind in "OUSmM":
        raise expected(f"{what} to be numbers", f"dtype {dtype}", hint)
    if violated(_is_finite, value):
        bad = ~_is_finite(np.asarray(value))
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise expected(f"finite {what}", f"{int(bad.sum())} NaN or infinite value(s), the first at index {where}", hint)


def _is_finite(value: Any) -> Any:
    return abs(value) < np.inf


def require_squares(what: str, value: ArrayLike) -> None:
    """Raise if numbers are so large that their squared distances overflow: every covariance would be zero or NaN."""
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(value, float))
    limit = float(jnp.finfo(dtype).max) ** 0.5 / 100
    if violated(lambda v: abs(v) < limit, value):
        raise expected(
            f"{what} with squared distances below {float(jnp.finfo(dtype).max):.1g}, the largest {dtype}",
            f"{float(np.abs(np.asarray(value)).max()):.3g}",
            "units = dgp.initial.Standardizer.fit(values); values = units(values)",
        )


def require_finite_leaves(what: str, leaves: list[Any]) -> None:
    """Raise unless every floating array among ``leaves`` is finite."""
    for leaf in leaves:
        if np.ndim(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            require_finite(what, leaf, MISSING)


def _is_real(dtype: np.dtype) -> bool:
    return dtype.kind in "fiub" or jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


_POSITIVE = "give it a prior with positive support (LogNormal, HalfNormal, Gamma) or constraint=constraints.positive"


def require_positive(name: str, value: ArrayLike, advice: str = _POSITIVE) -> None:
    """Raise unless every entry of ``value`` is positive."""
    dtype = np.asarray(value).dtype if is_concrete(value) else getattr(value, "dtype", None)
    if dtype is not None and not _is_real(dtype):
        got = dtype if dtype.kind == "c" else type(value).__name__
        raise expected(f"{name} to be a positive number", got, "try 0.1")
    if violated(lambda v: v > 0, value):
        array = np.asarray(value)
        got = array if array.size <= 10 else f"{array[~(array > 0)][0]} in an array of shape {array.shape}"
        raise expected(f"{name} to be positive", got, advice)


def require_params(params: Any) -> dict[str, Any]:
    """Parameters of a fit as a dict, empty for ``None``; raise unless they are finite arrays by name."""
    expect(
        isinstance(params, Mapping | None), "params, a dict of arrays", type(params).__name__, "pass svi_result.params"
    )
    for name, value in (params or {}).items():
        for leaf in jax.tree.leaves(value):  # of a network, several arrays
            require_finite(f"params at {name!r}", leaf, "check the losses of the fit they come from")
    return dict(params or {})


def require_call(program: Callable[..., Any], args: Any, kwargs: Any, hint: str) -> None:
    """Raise unless a program can be called with arguments."""
    try:
        inspect.signature(program).bind(*args, **kwargs)
    except TypeError as error:
        raise expected(
            "the arguments of the model", f"{len(args)} positional and {sorted(kwargs)} ({error})", hint
        ) from error
    except ValueError:  # a callable that has no signature
        return


@contextmanager
def taking_the_loss() -> Iterator[None]:
    """Turn the error of an optax optimiser that needs more than gradients and the loss into one with advice."""
    try:
        yield
    except TypeError as error:
        missing = "required keyword-only" in str(error)
        if not missing or not any(f"'{name}'" in str(error) for name in _OF_LINE_SEARCHES):
            raise
        raise expected(
            "an optimiser that steps by a gradient and its loss",
            f"one that evaluates the loss at other parameters ({error})",
            "try optax.adam(0.01); for L-BFGS on all data, numpyro_dgp.optim.minimize(svi, key, X, y)",
        ) from error


def require_key(key: Any) -> None:
    """Raise unless ``key`` is a single PRNG key, of either kind that JAX has."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", ())
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if shape != () if typed else dtype != jnp.uint32 or shape != jax.eval_shape(jax.random.PRNGKey, 0).shape:
        got = f"{key!r}" if isinstance(key, int) else f"{type(key).__name__} of shape {shape}"
        raise expected("a PRNG key", got, "jax.random.key(0)")


def require_levels(q: ArrayLike) -> None:
    """Raise unless levels of quantiles lie between 0 and 1."""
    require_finite("levels", q, "0.9 is the level of the quantile that 90 % of y are below")
    if violated(lambda v: (v > 0) & (v < 1), q):
        wrong = next(v for v in np.ravel(q) if not 0 < v < 1)
        raise expected(
            "levels between 0 and 1", f"{wrong:.4g}", "0.9 is the level of the quantile that 90 % of y are below"
        )


def require_scalar(name: str, value: ArrayLike) -> None:
    """Raise unless ``value`` is a single number."""
    expect(
        not np.ndim(value),
        f"{name} to be a single number",
        f"shape {np.shape(value)}",
        "one value per input column belongs in lengthscale, one per output in a list of kernels",
    )


def require_noise(value: ArrayLike) -> None:
    """Raise unless ``value`` is one positive standard deviation of noise."""
    expect(
        not np.ndim(value),
        "noise to be a single number",
        f"shape {np.shape(value)}",
        "for noise per row use dgp.Likelihood with a layer on dgp.Grid or dgp.Points",
    )
    require_positive("noise", value)


def require_inputs(x: Any, dims: int | None = None) -> None:
    """Raise unless ``x`` has shape ``(..., N, D)``, with ``D == dims`` when ``dims`` is given."""
    shape = np.shape(x)
    expect(len(shape) >= 2, "inputs of shape (..., N, D)", f"shape {shape}", "a column is x[:, None], a row x[None, :]")
    expect(
        dims is None or shape[-1] == dims,
        f"inputs with D = {dims} columns (as in its inducing inputs)",
        f"shape {shape}",
        "check the number of outputs of the layer below",
    )


def nearest(name: str, given: Iterable[str]) -> str | None:
    """The given name most similar to ``name``, if any is similar."""
    return next(iter(difflib.get_close_matches(name, list(given), 1)), None)


def with_nearest(missing: Iterable[str], given: Iterable[str]) -> str:
    """Names, each with the most similar given one."""
    listed = []
    for name in sorted(missing):
        near = nearest(name, given)
        listed.append(f"{name!r} (nearest: {near!r})" if near else repr(name))
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")


def require_keywords(own: Iterable[str] | None, program: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a keyword argument is not one of the program's and is a near miss of one of ``own``, the owner's."""
    if not kwargs or own is None:
        return
    try:
        parameters = inspect.signature(program).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in kwargs.keys() - parameters.keys():
        expect(
            (near := nearest(name, own)) is None,
            "its own keyword arguments or the program's",
            f"{name!r} (nearest: {near!r})",
        )
