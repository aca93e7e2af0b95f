"""The program of the estimators: layers that start as the identity, and the likelihood."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_dgp import means
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.layer_starts import LayerStart, layers
from numpyro_dgp.functions.points import Points
from numpyro_dgp.kernels import Kernel
from numpyro_dgp.likelihoods.likelihood import Likelihood
from numpyro_dgp.math.quadrature import MonteCarlo
from numpyro_dgp.primitives import gp

__all__ = [
    "BernoulliOutcome",
    "CategoricalOutcome",
    "LayeredProgram",
    "NormalOutcome",
    "Outcome",
    "StudentTOutcome",
    "starts_of",
]

_WIDEST = 30
_INNER_LOG_SD = 3.0


@dataclasses.dataclass(frozen=True)
class NormalOutcome:
    """Normal noise, with a standard deviation for every output.

    Args:
        outputs: number of outputs, ``None`` for y of shape (N,).
    """

    outputs: int | None = None
    names: ClassVar[tuple[str, ...]] = ("noise",)
    integrate: ClassVar[MonteCarlo | None] = None

    def __call__(self) -> dict[str, Array]:
        """Draw the hyperparameters."""
        return {"noise": _per_output("noise", dist.LogNormal(math.log(0.3), 1.5), self.outputs)}

    def given(self, v: Array, noise: Array) -> dist.Distribution:
        """The distribution of y given values v of the last function."""
        return _rows(dist.Normal(v, noise), self.outputs)


@dataclasses.dataclass(frozen=True)
class StudentTOutcome:
    """Student-t noise with fitted degrees of freedom, above 2, so that the variance is finite.

    Args:
        outputs: number of outputs, ``None`` for y of shape (N,).
    """

    outputs: int | None = None
    names: ClassVar[tuple[str, ...]] = ("noise", "tails")
    integrate: ClassVar[MonteCarlo | None] = None

    def __call__(self) -> dict[str, Array]:
        """Draw the hyperparameters."""
        noise = _per_output("noise", dist.LogNormal(math.log(0.3), 1.5), self.outputs)
        return {"noise": noise, "tails": _per_output("tails", dist.Gamma(2.0, 0.1), self.outputs)}

    def given(self, v: Array, noise: Array, tails: Array) -> dist.Distribution:
        """The distribution of y given values v of the last function."""
        return _rows(dist.StudentT(2 + tails, v, noise), self.outputs)


@dataclasses.dataclass(frozen=True)
class BernoulliOutcome:
    """Two classes, whose log odds are a scalar function."""

    outputs: ClassVar[None] = None
    names: ClassVar[tuple[str, ...]] = ()
    integrate: ClassVar[MonteCarlo | None] = None

    def __call__(self) -> dict[str, Array]:
        """No hyperparameters."""
        return {}

    def given(self, v: Array) -> dist.Distribution:
        """The distribution of y given values v of the last function."""
        return dist.Bernoulli(logits=v)


@dataclasses.dataclass(frozen=True)
class CategoricalOutcome:
    """Several classes with a function each; the softmax gives the probabilities.

    Args:
        outputs: number of classes.
    """

    outputs: int
    names: ClassVar[tuple[str, ...]] = ()
    integrate: ClassVar[MonteCarlo | None] = MonteCarlo()

    def __call__(self) -> dict[str, Array]:
        """No hyperparameters."""
        return {}

    def given(self, v: Array) -> dist.Distribution:
        """The distribution of y given values v of the last function."""
        return dist.Categorical(logits=v)


Outcome = NormalOutcome | StudentTOutcome | BernoulliOutcome | CategoricalOutcome


def _per_output(name: str, prior: dist.Distribution, outputs: int | None) -> Array:
    return numpyro.sample(name, prior if outputs is None else prior.expand([outputs]).to_event(1))


def _rows(fn: dist.Distribution, outputs: int | None) -> dist.Distribution:
    return fn if outputs is None else fn.to_event(1)


@dataclasses.dataclass(frozen=True, eq=False)
class LayeredProgram:
    """A program of layers, as an object that can be pickled: ``program(X, y)`` is what a function of them would be.

    Args:
        starts: the start of every layer.
        kernel: from a variance and lengthscales, one per input column, to the kernel of a layer.
        outcome: what y is given the last function.
    """

    starts: Sequence[LayerStart]
    kernel: Callable[[Array, Array], Kernel]
    outcome: Outcome

    def __call__(self, X: Any, y: Any = None, known: Any = True, batch_size: int | None = None) -> None:
        """Run the program.

        Args:
            X: inputs (N, D), in standard units.
            y: observations.
            known: which rows count (N,), or how many times each does; all once by default.
            batch_size: rows of a minibatch.
        """
        functions = [self._layer(i) for i in range(len(self.starts))]
        settings = self.outcome()
        with numpyro.plate("data", len(X), subsample_size=batch_size) as rows:
            counts = known if isinstance(known, bool) else known[rows]
            weighted = not isinstance(known, bool) and known.dtype != bool
            mask = counts > 0 if weighted else counts
            scale = handlers.scale(scale=jnp.where(mask, counts, 1.0)) if weighted else nullcontext()
            with handlers.mask(mask=mask), scale:
                h = X[rows]
                for i, f in enumerate(functions[:-1]):
                    h = numpyro.sample(f"h{i}", f(h))
                observed = Likelihood(
                    functions[-1](h), lambda v: self.outcome.given(v, **settings), integrate=self.outcome.integrate
                )
                numpyro.sample("y", observed, obs=None if y is None else y[rows])

    def _layer(self, i: int) -> Any:
        Z, mean, lengthscale = self.starts[i]
        last = i == len(self.starts) - 1
        log_sd = 1.5 if last else _INNER_LOG_SD
        variance = numpyro.sample(f"variance{i}", dist.LogNormal(0.0, log_sd))
        scales = dist.LogNormal(math.log(lengthscale), 1.0).expand([Z.shape[1]]).to_event(1)
        kernel = self.kernel(variance, numpyro.sample(f"lengthscale{i}", scales))
        outputs = self.outcome.outputs if last else self.starts[i + 1].Z.shape[1]
        return gp(f"f{i}", kernel, Points(Z, learn=True), outputs=outputs, mean=mean)


def starts_of(X: Array, layers_: int, num_inducing: int, seed: int) -> list[LayerStart]:
    """The start of every layer for standardised inputs.

    Args:
        X: inputs (N, D).
        layers_: number of layers.
        num_inducing: M, or the number of distinct rows where these are fewer.
        seed: of k-means.
    """
    width = X.shape[1] if X.shape[1] <= _WIDEST else min(_WIDEST, len(X) - 1)  # N rows have N - 1 principal directions
    distinct = [np.unique(np.asarray(X), axis=0)]
    if layers_ > 1 and width < X.shape[1]:
        distinct.append(np.unique(np.asarray(means.pca(X, width)(jnp.asarray(X))), axis=0))
    starts = layers(X, [width] * (layers_ - 1), min(num_inducing, *map(len, distinct)), seed=seed)
    # Arrays of JAX are arguments of a compiled program, so that fits from other starts share it.
    return [start._replace(Z=jnp.asarray(start.Z)) for start in starts]  # type: ignore[arg-type]
