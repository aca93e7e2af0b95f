"""The handler ``minibatch``: call a program for all rows with a minibatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro.primitives import Messenger

from numpyro_dgp._checks import expect, expected, require_count
from numpyro_dgp._numpyro import active, of_this_run
from numpyro_dgp._repr import described
from numpyro_dgp.analysis.checks import ALL_ROWS, require
from numpyro_dgp.analysis.sites import Message

__all__ = ["minibatch"]


class minibatch(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    r"""Handler that scales the plates of a program from a minibatch to all rows.

    Every site in the plate is scaled by :math:`N / B`, with N given here and B the size of the plate in the program.
    For rows that are all in memory, ``numpyro.plate("data", N, subsample_size=B)`` does the same.

    Args:
        fn: the program.
        **rows: N of every plate concerned, by name.

    Raises:
        ValueError: not a program, no rows, or invalid numbers of rows; when a program runs: it has no such plate,
            the plate subsamples itself, is in another such handler or has more rows than N, or a guide keeps
            parameters per row in it.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dgp import minibatch
        >>> def model(y):
        ...     m = numpyro.sample("m", dist.Normal())
        ...     with numpyro.plate("data", len(y)):
        ...         numpyro.sample("y", dist.Normal(m), obs=y)
        >>> def density(program):
        ...     return numpyro.infer.util.log_density(program, (jnp.ones(5),), {}, {"m": jnp.ones(())})[0]
        >>> round(float(density(minibatch(model, data=1000)) - density(model)), 3)  # 995 more rows
        -914.344

    Source: Salimbeni (2020), equation 2.19.
    """

    def __init__(self, fn: Callable[..., Any] | None = None, **rows: int) -> None:
        self.rows = rows
        self._seen: list[set[str]] = []  # for every run in progress, the plates met so far
        expect(rows, "the number of rows of a plate", "none", "minibatch(model, data=1000)")
        for name, count in rows.items():
            whole = int(count) if isinstance(count, float) and count % 1 == 0 else count  # 1e9
            require_count(name, whole, "the number of all rows, len(X) or stream.num_rows")
        expect(
            fn is None or callable(fn),
            "a program",
            type(fn).__name__,
            "minibatch(model, data=1000), with the rows themselves as arguments of what it returns",
        )
        super().__init__(fn)

    def __repr__(self) -> str:
        return described(self, {"fn": self.fn, **self.rows})

    def __enter__(self) -> None:
        for other in of_this_run():
            twice = sorted(self.rows.keys() & other.rows.keys()) if isinstance(other, minibatch) else []
            expect(
                not twice,
                f"one such handler around the plates {twice}",
                "two, which would multiply how often a row counts",
                "wrap the program once",
            )
        self._seen.append(set())
        super().__enter__()

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        missing = [name for name in self.rows if name not in self._seen[-1]]
        self._seen.pop()
        if missing and exc_type is None:
            raise expected(
                f"a program with plates {sorted(self.rows)}",
                f"none named {missing}",
                "rename them, numpyro.plate(name, ...)",
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fn is None:  # used as a decorator: every program gets a separate handler
            (program,) = args
            return minibatch(program, **self.rows)
        return super().__call__(*args, **kwargs)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate" and msg["name"] in self.rows:
            self._check(msg["name"], *msg["args"])
        elif msg["type"] in ("sample", "param"):
            for frame in msg["cond_indep_stack"]:
                per_row = msg["type"] == "sample" or msg["kwargs"].get("event_dim") is not None
                if frame.name in self.rows and per_row:
                    self._scale(msg, self.rows[frame.name] / frame.size, frame.name)

    def _check(self, name: str, size: int, subsample_size: int | None) -> None:
        self._seen[-1].add(name)
        if subsample_size not in (None, size) or size > self.rows[name]:
            raise expected(
                f"plate {name!r} to hold a batch of at most {self.rows[name]} rows, passed as arguments",
                f"size {size} with subsample_size {subsample_size}",
                "leave subsampling to the arguments",
            )
        for other in active():
            if isinstance(other, require) and ALL_ROWS in other.checks and size != self.rows[name]:
                raise expected(
                    f"all {self.rows[name]} rows that dgp.minibatch counts in plate {name!r}",
                    f"{size}, each of which would count {self.rows[name] / size:.6g} times",
                    "pass the program itself, without dgp.minibatch, and a guide of it, with the same parameters",
                )

    def _scale(self, msg: Message, factor: float, plate: str) -> None:
        if msg["type"] == "param":
            raise expected(
                f"no parameters per row in plate {plate!r}",
                repr(msg["name"]),
                "rows change between batches; use guides.Amortised, or subsample inside the program",
            )
        msg["scale"] = factor if msg["scale"] is None else factor * msg["scale"]
