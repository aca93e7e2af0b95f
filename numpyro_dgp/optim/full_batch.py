"""L-BFGS and non-linear conjugate gradients for bounds over all data, by SciPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import SVI

from numpyro_dgp._checks import expect, expected, require_count, require_key, require_keywords
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import ALL_ROWS, WHOLE_DATA, require
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.inference.elbo import ELBO
from numpyro_dgp.inference.fit import split_arguments
from numpyro_dgp.inference.fit_start import require_svi, start_of_fit

__all__ = ["Minimum", "minimize"]

_NAMES = {"L-BFGS": "L-BFGS-B", "CG": "CG"}


class Minimum(NamedTuple):
    """The result of :func:`minimize`.

    Args:
        params: constrained parameters, as of ``SVIRunResult``.
        losses: the loss after every iteration, the initial one first.
        converged: whether a stopping criterion of the method was met.
        report: why it stopped, and after how many iterations and evaluations.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> svi = numpyro.infer.SVI(model, dgp.guides.InducingPoint(model), optax.sgd(0.0), dgp.ELBO())
        >>> minimum = dgp.optim.minimize(svi, jax.random.key(0), X, y, max_steps=3, progress_bar=False)
        >>> sorted(minimum.params), len(minimum.losses), minimum.converged
        (['f_auto_loc', 'f_auto_scale_tril'], 4, False)
    """

    params: dict[str, Array]
    losses: np.ndarray
    converged: bool
    report: str

    def __repr__(self) -> str:
        return brief(self)


@overload
def minimize(
    svi: SVI,
    rng_key: Array,
    *args: Any,
    method: Literal["L-BFGS", "CG"] = ...,
    max_steps: int = ...,
    tol: float | None = ...,
    init_params: dict[str, Array] | None = ...,
    progress_bar: bool = ...,
    **kwargs: Any,
) -> Minimum: ...
@overload
def minimize(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    rng_key: Array,
    /,
    *args: Any,
    method: Literal["L-BFGS", "CG"] = ...,
    max_steps: int = ...,
    tol: float | None = ...,
    init_params: dict[str, Array] | None = ...,
    progress_bar: bool = ...,
    **kwargs: Any,
) -> Minimum: ...
def minimize(  # type: ignore[misc]  # a model may have arguments called svi and rng_key
    svi: Any,
    rng_key: Any,
    *args: Any,
    method: Literal["L-BFGS", "CG"] = "L-BFGS",
    max_steps: int = 1000,
    tol: float | None = None,
    init_params: dict[str, Array] | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Minimum:
    """Minimise a loss over all data by a quasi-Newton method of SciPy.

    ``minimize(model, guide, key, X, y)`` is for ``dgp.ELBO()``, and ``minimize(svi, key, X, y)`` for the loss of an
    ``SVI``, whose optimiser is not used.

    Use it for losses without random draws: one layer, quadrature, collapsed bounds. Where the loss draws hidden layers,
    the same draws are used throughout: the minimum is then that of one sample of the bound, and needs many particles
    (``ELBO(num_particles=...)``) to be near that of the bound itself.

    Args:
        svi: a NumPyro ``SVI``; or a model and its guide, as two arguments.
        rng_key: PRNG key of the initial values and of the draws in the loss.
        *args: arguments of the model.
        method: limited-memory BFGS, or Polak-Ribiere conjugate gradients.
        max_steps: iterations at most.
        tol: SciPy's tolerance; by default the method's own.
        init_params: initial values of some parameters, constrained, by name.
        progress_bar: show progress.
        **kwargs: keyword arguments of the model.

    Returns:
        Parameters, losses and a report, as a :class:`Minimum`.

    Raises:
        ValueError: a model without a guide, another method, NaN or infinite data, a program that subsamples, initial
            values that cannot be those of the parameters, or a loss that is not finite at the start.

    Example:
        >>> import jax, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model)
        >>> minimum = dgp.optim.minimize(model, guide, jax.random.key(0), X, y, progress_bar=False)
        >>> minimum.converged, bool(minimum.losses[-1] < minimum.losses[0])
        (True, True)

    Source: Salimbeni (2020), section 3.4.1; Chamberlin (2016), section 2.5.
    """
    expect(method in _NAMES, 'method "L-BFGS" or "CG"', repr(method), 'try "L-BFGS"')
    svi, rng_key, args = _loss_of(svi, rng_key, args)
    require_key(rng_key)
    require_keywords(minimize.__kwdefaults__, svi.model, kwargs)
    require_count("max_steps", max_steps, "1000")
    expect(tol is None or tol > 0, "tol to be positive", repr(tol), "try None, the method's own")
    arrays, rebuild = split_arguments(args, kwargs)
    args, kwargs = rebuild(arrays)
    key, init_key = jax.random.split(rng_key)

    def over_all_data() -> Array:
        checked = require(ALL_ROWS, WHOLE_DATA)
        with handlers.block(), checked, handlers.seed(rng_seed=0), handlers.trace():
            svi.model(*args, **kwargs, **svi.static_kwargs)
        return jnp.zeros(())

    jax.eval_shape(over_all_data)
    state, _ = start_of_fit(svi, init_key, rebuild, arrays, init_params)
    flat, unravel = ravel_pytree(svi.optim.get_params(state.optim_state))

    @jax.jit
    def evaluate(x: Array, arrays: list[Array]) -> tuple[Array, Array]:
        args, kwargs = rebuild(arrays)

        def loss(x: Array) -> Array:
            return svi.loss.loss(
                key, svi.constrain_fn(unravel(x)), svi.model, svi.guide, *args, **kwargs, **svi.static_kwargs
            )

        return jax.value_and_grad(loss)(x)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        loss, slope = evaluate(jnp.asarray(x, flat.dtype), arrays)
        # A line search steps back from infinity, but not from NaN.
        return (float(loss), np.asarray(slope, np.float64)) if np.isfinite(loss) else (np.inf, np.zeros_like(x))

    start = objective(np.asarray(flat))[0]
    expect(
        np.isfinite(start),
        "a finite loss at the initial values",
        "one that is not",
        "pass other init_params, check the priors' scales, or run in float64",
    )
    import scipy.optimize  # imported here, since it takes 0.05 s

    losses = [start]
    with tqdm.tqdm(total=max_steps, disable=not progress_bar) as bar:

        def after(intermediate_result: scipy.optimize.OptimizeResult) -> None:
            losses.append(float(intermediate_result.fun))
            bar.update()
            bar.set_postfix_str(f"loss: {losses[-1]:.4f}", refresh=False)

        options = {"maxiter": max_steps} | ({"maxfun": 100 * max_steps} if method == "L-BFGS" else {})
        found = scipy.optimize.minimize(
            objective,
            np.asarray(flat, np.float64),
            jac=True,
            method=_NAMES[method],
            tol=tol,
            callback=after,
            options=options,
        )
    params = svi.constrain_fn(unravel(jnp.asarray(found.x, flat.dtype)))
    report = f"{method}: {found.message} ({found.nit} iterations, {found.nfev} evaluations, loss {found.fun:.6g})"
    return Minimum(params, np.asarray(losses), bool(found.success), report)


def _loss_of(first: Any, second: Any, others: tuple[Any, ...]) -> tuple[SVI, Any, tuple[Any, ...]]:
    """The ``SVI``, the key and the arguments of the model from those of ``minimize``."""
    if isinstance(first, SVI | type) or not callable(first):
        require_svi(first)
        return first, second, others
    if adapted(first).has_rules or not callable(second) or not others:
        raise expected(
            "a model, its guide and a key, or an SVI and a key",
            ", ".join(type(a).__name__ for a in (first, second, *others[:1])),
            "minimize(model, guide, jax.random.key(0), X, y)",
        )
    svi = SVI(first, second, optax.set_to_zero(), ELBO())
    require_svi(svi)
    return svi, others[0], others[1:]
