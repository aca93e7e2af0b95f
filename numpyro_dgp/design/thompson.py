"""Thompson sampling: a draw of the whole function says where it is best."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.posterior_acquisition import PosteriorAcquisition
from numpyro_dgp.fitted import Fit

__all__ = ["ThompsonSampling"]


@dataclasses.dataclass(frozen=True, eq=False)
class ThompsonSampling(PosteriorAcquisition):
    r"""A draw of the function, or one for every point of a batch.

    .. math:: \alpha(x) = \pm \sum_{j=1}^q f_j(x_j), \qquad f_1 \dots f_q \sim p(f \mid \text{data})

    Its optimum is the optimum of every draw at once: where the posterior is sure the draws agree, elsewhere they
    spread, so that a batch explores by itself. The sign is minus where small values are good. Each draw is a whole
    function, the same at every call.

    Args:
        posterior: a ``Posterior``, or anything with its methods ``functions`` and ``call``; of a chain, q of the draws
            that it holds, chosen by the key.
        key: PRNG key; it fixes the draws. Another round takes another key.
        minimise: whether small values are good.
        num_features: random functions in each prior draw.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`; a kernel without random features; ``num_samples``, which is the
            number of points here; more points than a chain has draws.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.array([[0.0]])))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> posterior = dgp.Posterior(model, samples={"f": jnp.ones((5, 1))})
        >>> draw = dgp.design.ThompsonSampling(posterior, jax.random.key(0))
        >>> print(draw(jnp.array([[0.0]])).round(3))
        -1.0

    Source: Thompson (1933).
    """

    minimise: bool = dataclasses.field(default=True, kw_only=True)
    num_features: int = dataclasses.field(default=1024, kw_only=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_samples is not None:
            raise ValueError(
                f"{self.owner}: expected as many draws as points, got num_samples={self.num_samples}: leave it out; a "
                "batch of q points x (q, D) takes q draws"
            )

        samples = getattr(self.posterior, "samples", None)
        if isinstance(self.posterior, Fit) and samples is not None:
            order = jax.random.permutation(self.key, len(next(iter(samples.values()))))
            shuffled = {name: jnp.asarray(values)[order] for name, values in samples.items()}
            object.__setattr__(self, "posterior", dataclasses.replace(self.posterior, samples=shuffled))

    @property
    def _method(self) -> str:
        return "functions"

    def __call__(self, x: ArrayLike, *args: Any, **kwargs: Any) -> Array:
        """The value at points x (q, D); further arguments are those of the program."""
        rows = self.points(x)
        settings = {"num_samples": len(rows), "num_features": self.num_features, "progress_bar": False}
        draws = self.posterior.functions(self.key, **settings)
        site = self.posterior.site or self.posterior.call((rows, *args), kwargs).observed
        values = draws(rows, *args, **kwargs)[site]
        if values.ndim == 3 or self.output is not None:
            values = values[..., self.column(values)]
        index = np.arange(len(rows))
        total = values[index, index].sum()
        return -total if self.minimise else total
