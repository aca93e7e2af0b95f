"""Thompson sampling: a draw of the whole function says where it is best."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dgp._checks import require_count
from numpyro_dgp._shown import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.design.function_draws import draws_held, observed_site, of_observed
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
        posterior: a ``Posterior``, what ``dgp.fit_best`` gives, or anything with the method ``functions``; of a chain,
            q of the draws that it holds, chosen by the key, of a mixture q of as many as its programs hold.
        key: PRNG key; it fixes the draws. Another round takes another key.
        minimise: whether small values are good.
        num_features: random functions in each prior draw.
        output: which column of a function of several outputs.

    Raises:
        ValueError: as :class:`ExpectedImprovement`; ``num_features`` that is not positive; ``num_samples``, which is
            the number of points here; where it is called, a kernel without random features, or more points than a chain
            has draws.

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
        require_count(self.owner, "num_features", self.num_features, "1024")

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
        q, held = len(rows), draws_held(self.posterior)
        if held is not None and q > held:
            raise ValueError(
                f"{self.owner}: expected at most {held} points x, as many as the chain has draws, got {q}: a smaller "
                "batch, or a chain with more draws"
            )
        # A mixture gives its programs in order, each with its share: q of all are chosen.
        number = q if isinstance(self.posterior, Fit) or held is None else held
        settings = {"num_samples": number, "num_features": self.num_features, "progress_bar": False}
        draws = self.posterior.functions(self.key, **settings)
        site = observed_site(self.posterior, (rows, *args), kwargs)
        values = of_observed(self.owner, site, draws(rows, *args, **kwargs))
        if values.ndim == 3 or self.output is not None:
            values = values[..., self.column(values)]
        chosen = np.arange(q) if number == q else jax.random.permutation(self.key, number)[:q]
        total = values[chosen, np.arange(q)].sum()
        return -total if self.minimise else total
