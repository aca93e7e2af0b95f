"""Thompson sampling: maximise a posterior draw of the whole function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import expect, expected, require_count, require_finite, require_key
from numpyro_dgp._data import as_array
from numpyro_dgp._fields import count, flag
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.posterior_acquisition import PosteriorAcquisition
from numpyro_dgp.predict.fitted import Fit

__all__ = ["ThompsonSampling", "draws_held", "function_draws", "observed_site", "of_observed"]


_FUNCTIONS = 50
"""Default number of draws of the function of a posterior."""


def function_draws(
    emulator: Any, key: Array, batch_size: int, example: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """A function from rows (N, D) to the values of all draws there, (S, N).

    Args:
        emulator: a posterior, from which S functions are drawn (by default 50); or a function from rows (N, D) to
            values (N,) or draws (S, N).
        key: PRNG key of the draws of a posterior.
        batch_size: how many rows at a time.
        example: two rows.

    Raises:
        ValueError: another emulator, more draws than a chain has, or, when the function is called, values of another
            shape, or NaN.
    """
    require_key(key)
    require_count("batch_size", batch_size, "1024")
    if hasattr(emulator, "functions"):
        held, count = draws_held(emulator), emulator.options.num_samples or _FUNCTIONS
        if held is not None and count > held:
            raise expected(
                f"at most {held} draws of the function, as many as the chain has",
                count,
                f"posterior.using(num_samples={held}), or a chain with more draws",
            )
        draws = emulator.using(num_samples=count).functions(key)
        site = observed_site(emulator, (as_array("inputs", example),), {})

        def values(X: Array) -> Any:
            return of_observed(site, draws(X))

    elif callable(emulator):
        values = emulator
    else:
        raise expected(
            "a posterior or a function of X", type(emulator).__name__, "dgp.Posterior(model, guide, result.params)"
        )

    def at(rows: np.ndarray) -> np.ndarray:
        size = min(batch_size, len(rows))
        blocks = []
        for start in range(0, len(rows), size):
            # Beyond the end, copies of the last row: all blocks have one shape, and one compiled program.
            index = np.minimum(np.arange(start, start + size), len(rows) - 1)
            found = np.atleast_2d(np.asarray(values(as_array("inputs", rows[index]))))
            expect(
                not np.iscomplexobj(found), "a function with real values", found.dtype, "take .real, or jnp.abs of it"
            )
            expect(
                found.ndim == 2 and found.shape[1] == size,
                f"a function with values of shape ({size},), or draws (S, {size}), at {size} rows",
                found.shape,
                "of several outputs take one, lambda X: draws(X)['y'][..., 0]",
            )
            if found.dtype == bool:  # an event, whose mean is a probability
                found = found.astype(float)
            blocks.append(found[:, : len(rows) - start])
        together = np.concatenate(blocks, 1)
        require_finite("values of the functions", together, "check the fit: NaN in its losses?")
        return together

    return at


def draws_held(emulator: Any) -> int | None:
    """How many draws the chain of a posterior has, of a mixture the shortest; ``None`` if there is none."""
    samples = [program.samples for program in _programs(emulator)]
    return min((len(next(iter(values.values()))) for values in samples if values), default=None)


def observed_site(emulator: Any, args: Any, kwargs: Any) -> str | None:
    """The observed site of a posterior in a call; ``None`` if it is not known."""
    programs = _programs(emulator)
    return programs[0].call(args, kwargs).observed if programs else None


def _programs(emulator: Any) -> Sequence[Fit]:
    """The fitted programs of a posterior; none of another object with its methods."""
    return getattr(emulator, "programs", ())


def of_observed(site: str | None, found: Mapping[str, Array]) -> Array:
    """The function under the observed site, among the values of all layers.

    Raises:
        ValueError: the site is not known, and there are several functions.
    """
    if site is None and len(found) == 1:
        (site,) = found
    if site is None or site not in found:
        raise expected(
            "the function under an observed dgp.Likelihood",
            f"functions of {', '.join(found)}",
            "choose one, draws = posterior.functions(key); lambda X: draws(X)['f']",
        )
    return found[site]


@dataclasses.dataclass(frozen=True, eq=False)
class ThompsonSampling(PosteriorAcquisition):
    r"""A draw of the function, or one for every point of a batch.

    .. math:: \alpha(x) = \pm \sum_{j=1}^q f_j(x_j), \qquad f_1 \dots f_q \sim p(f \mid \text{data})

    Its optimum is the optimum of every draw at once: where the posterior variance is small the draws agree, elsewhere
    they differ, so that a batch explores. The sign is minus where small values are good. Each draw is a whole
    function, the same at every call.

    Args:
        posterior: a ``Posterior``, what ``dgp.fit_best`` gives, or anything with the methods ``using`` and
            ``functions``; of a chain, q of its draws, chosen by the key, of a mixture q of those of its programs. The
            number of draws is that of the points, whatever the options.
        key: PRNG key; it fixes the draws. Another round takes another key.
        minimise: whether small values are good.
        num_features: random functions in each prior draw.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`; ``num_features`` that is not positive; where it is called, a
            kernel without random features, or more points than a chain has draws.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
        >>> model, _, _ = dgp.testing.toy()
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.ones((5, 5))})
        >>> draw = dgp.design.ThompsonSampling(posterior, jax.random.key(0))
        >>> print(draw(jnp.array([[0.0]])).round(3))  # small values are good
        -1.0

    Source: Thompson (1933).
    """

    minimise: bool = flag(True, "True where small values are good", kw_only=True)
    num_features: int = count(1024, kw_only=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._is_single and self.posterior.samples is not None:
            samples = self.posterior.samples
            order = jax.random.permutation(self.key, len(next(iter(samples.values()))))
            shuffled = {name: jnp.asarray(values)[order] for name, values in samples.items()}
            object.__setattr__(self, "posterior", dataclasses.replace(self.posterior, samples=shuffled))

    @property
    def _method(self) -> str:
        return "functions"

    @property
    def _is_single(self) -> bool:
        """Whether the posterior is that of one program, and no mixture."""
        return any(program is self.posterior for program in _programs(self.posterior))

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        rows = self.points(x)
        q, held = len(rows), draws_held(self.posterior)
        if held is not None and q > held:
            raise expected(f"at most {held} points x, the draws of the chain", q, "a smaller batch, or a longer chain")
        # A mixture gives its programs in order, each with its share: q of all are chosen.
        number = q if self._is_single or held is None else held
        posterior = self.posterior.using(num_samples=number, progress_bar=False)
        draws = posterior.functions(self.key, num_features=self.num_features)
        site = observed_site(self.posterior, (rows, *args), kwargs)
        values = of_observed(site, draws(rows, *args, **kwargs))
        if values.ndim == 3 or self.output is not None:
            values = values[..., self.column(values)]
        chosen = np.arange(q) if number == q else jax.random.permutation(self.key, number)[:q]
        total = values[chosen, np.arange(q)].sum()  # sum_j f_j(x_j)
        return -total if self.minimise else total
