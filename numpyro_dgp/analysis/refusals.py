"""Handlers that raise an error for programs for which an algorithm would give a wrong result in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro.primitives import Messenger

from numpyro_dgp._checks import current_trace
from numpyro_dgp.analysis.sites import Message, unwrap
from numpyro_dgp.likelihoods.likelihood import Likelihood

__all__ = ["all_rows", "fixed_parameters", "initialised", "unmasked", "untransformed", "whole_data"]


class whole_data(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which a plate that takes a random part of its rows is an error.

    Args:
        fn: the program; without it, use the handler in a ``with`` statement.
        owner: the function that needs all rows, for the message.

    Raises:
        ValueError: when a program runs that subsamples.

    Example:
        >>> import numpyro
        >>> def program():
        ...     with numpyro.plate("data", 100, subsample_size=10):
        ...         pass
        >>> numpyro.handlers.seed(whole_data(program, owner="minimize"), 0)()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: minimize: expected a program over all data, got plate 'data' that takes 10 of 100 rows: ...
    """

    def __init__(self, fn: Callable[..., Any] | None = None, *, owner: str) -> None:
        self.owner = owner
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "plate":
            return
        size, subsample_size = msg["args"]
        if subsample_size is not None and subsample_size != size:
            raise ValueError(
                f"{self.owner}: expected a program over all data, got plate {msg['name']!r} that takes "
                f"{subsample_size} of {size} rows: call the model without its batch argument"
            )


class all_rows(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which a ``dgp.minibatch`` of fewer rows than it counts is an error: no other batch follows, and
    each of these rows would count several times.

    Args:
        owner: the function that needs all rows, for the message.

    Raises:
        ValueError: when a program runs that has such a minibatch.
    """

    def __init__(self, *, owner: str) -> None:
        self.owner = owner
        super().__init__()


class fixed_parameters(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which a ``numpyro.param`` without a value is an error: a sampler would freeze it where it starts.

    Handlers inside this one, such as ``numpyro.handlers.substitute``, may give it a value.

    Args:
        fn: the program; without it, use the handler in a ``with`` statement.
        owner: the sampler, for the message.

    Raises:
        ValueError: when a program runs that has such a parameter.

    Example:
        >>> import numpyro
        >>> fixed_parameters(lambda: numpyro.param("noise", 0.1), owner="SGHMC")()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: SGHMC: expected a value for every numpyro.param, got none for 'noise', which MCMC would freeze ...
    """

    def __init__(self, fn: Callable[..., Any] | None = None, *, owner: str) -> None:
        self.owner = owner
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "param" and msg["value"] is None:
            raise ValueError(
                f"{self.owner}: expected a value for every numpyro.param, got none for {msg['name']!r}, which MCMC "
                "would freeze at its initial value: pass params=svi_result.params, make it random with "
                "handlers.lift(model, prior={...}), or write it as a numpyro.sample site"
            )


class initialised(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which a ``numpyro.param`` without an initial value is an error: a program would compute with None.

    One that gets its value further down, as those of ``numpyro.contrib.module`` do, is none. Make the handler where the
    program is run.

    Raises:
        ValueError: when a program has run that has such a parameter, or has failed because of it.

    Example:
        >>> import numpyro
        >>> with initialised():  # doctest: +ELLIPSIS
        ...     numpyro.param("noise") + 1.0
        Traceback (most recent call last):
        ValueError: expected an initial value of numpyro.param 'noise', got none: write numpyro.param('noise', 1.0, ...
    """

    def __init__(self) -> None:
        self._missing: set[str] = set()
        super().__init__()

    def postprocess_message(self, msg: Message) -> None:
        if msg["type"] == "param":
            (self._missing.add if msg["value"] is None else self._missing.discard)(msg["name"])

    def __exit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc, traceback)
        if self._missing and (exc is None or isinstance(exc, TypeError | ValueError | AttributeError)):
            name = min(self._missing)
            raise ValueError(
                f"expected an initial value of numpyro.param {name!r}, got none: write numpyro.param({name!r}, 1.0, "
                "...), since programs are inspected before a fit; init_params and params take its place where they "
                "are given"
            ) from exc


class unmasked(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which ``obs_mask=`` beside a ``Likelihood`` is an error: NumPyro would make unobserved rows of y
    latent variables, and exp(``log_prob``) of a ``Likelihood`` is no density of y.

    Raises:
        ValueError: when a program runs that has such a site.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dgp.functions.function_values import FunctionValues
        >>> y = Likelihood(FunctionValues(jnp.zeros(2), jnp.ones(2), event_dim=0), lambda v: dist.Normal(v, 0.5))
        >>> with numpyro.handlers.seed(rng_seed=0), unmasked():  # doctest: +ELLIPSIS
        ...     numpyro.sample("y", y, obs=jnp.zeros(2), obs_mask=jnp.array([True, False]))
        Traceback (most recent call last):
        ValueError: site 'y': expected a Likelihood that is told which entries are observed, got obs_mask=, which ...
    """

    def __init__(self) -> None:
        self._likelihoods: set[str] = set()
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or not isinstance(unwrap(msg["fn"]), Likelihood):
            return
        name = msg["name"]
        self._likelihoods.add(name)
        stem = name.removesuffix("_unobserved")
        if stem != name and f"{stem}_observed" in self._likelihoods:  # what NumPyro calls the two
            raise ValueError(
                f"site {stem!r}: expected a Likelihood that is told which entries are observed, got obs_mask=, which "
                f"would infer the rest as a latent site {name!r}: write numpyro.sample({stem!r}, dgp.Likelihood(f(x), "
                "conditional, observed=mask), obs=y), where missing entries count nothing; posterior.predict gives all"
            )


class untransformed(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler under which a sample site inside a JAX transformation (``lax.scan``, ``vmap``, ``jit``, ...) is an error.

    The body of such a transformation is run once, however often it is computed. Handlers see one site, which has one
    value where a program means several, or a value that is lost when the transformation ends. ``scan`` and ``cond`` of
    ``numpyro.contrib.control_flow`` tell the handlers, and are no error. Make the handler where the program is run.

    Raises:
        ValueError: when a program runs that has such a site.

    Example:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> def program():
        ...     return jax.lax.fori_loop(0, 3, lambda i, s: s + numpyro.sample("e", dist.Normal()), 0.0)
        >>> with numpyro.handlers.seed(rng_seed=0), untransformed():  # doctest: +ELLIPSIS
        ...     program()
        Traceback (most recent call last):
        ValueError: site 'e': expected sites outside JAX transformations, got one inside ...
    """

    def __init__(self) -> None:
        self._outside = current_trace()
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and current_trace() != self._outside:
            raise ValueError(f"site {msg['name']!r}: {TRANSFORMED}")


TRANSFORMED = (
    "expected sites outside JAX transformations, got one inside lax.scan, fori_loop, map, vmap, cond, checkpoint or "
    "jit, where it has one value for all steps, or one that is lost to the program: draw all values at once, in a "
    "numpyro.plate or as h = numpyro.sample('h', f(x)), write a Python loop with a name for every step, or, for NUTS "
    "and the guides of NumPyro, use numpyro.contrib.control_flow.scan"
)
