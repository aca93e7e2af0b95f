r"""Predictions from a fitted program: mixtures, densities, draws of y and of whole functions.

One draw s of all variables below the last function gives a density :math:`p_s(y)`. The prediction is the mixture over
draws, whose mean, variance and log density are

.. math:: \bar\mu = \tfrac1S \sum_s \mu_s, \qquad
          \bar\sigma^2 = \tfrac1S \sum_s \sigma_s^2 + \operatorname{var}_s \mu_s, \qquad
          \log p(y) = \log \tfrac1S \sum_s p_s(y) .

Leaving out the variance of the means is the usual mistake (Salimbeni, 2020, equations 2.20 and 2.21).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_dgp._checks import require_count, require_finite, require_finite_leaves
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import Mixture, log_mean_exp
from numpyro_dgp.draws import DrawFunctions, Whole, hidden_values, over_draws, sample_values
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.run import marginal, traces
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.program import inspect_program
from numpyro_dgp.model.random_function import RandomFunction
from numpyro_dgp.model.sites import Message, Trace, unwrap

__all__ = ["Posterior"]


@dataclasses.dataclass(frozen=True, eq=False)
class Posterior:
    """A fitted program: a model with a guide and its parameters, or with draws from MCMC.

    Args:
        model: the program.
        guide: its guide. From guides of other packages, such as NumPyro's autoguides, sites with one value per datum
            are ignored, as from ``samples``.
        params: parameters, from ``svi_result.params``.
        samples: draws of the latent sites, from ``mcmc.get_samples()`` or ``guide.sample_posterior``, instead of a
            guide. Sites with one value per datum are ignored: at new inputs the program draws them.
        site: the observed site; needed only when it is not a ``Likelihood``, or when there are several.

    Raises:
        ValueError: neither a guide nor samples, or both.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> import numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> guide = dgp.guides.InducingPoint(model)
        >>> result = SVI(model, guide, optax.adam(0.05), dgp.ELBO()).run(
        ...     jax.random.key(0), 300, X, X[:, 0] ** 2, progress_bar=False)
        >>> posterior = dgp.Posterior(model, guide, result.params)
        >>> posterior.predict(jax.random.key(1), X[:3]).mean.shape
        (3,)
    """

    model: Callable[..., Any]
    guide: Callable[..., Any] | None = None
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    samples: Mapping[str, Array] | None = None
    site: str | None = None

    def __post_init__(self) -> None:
        if (self.guide is None) == (self.samples is None):
            raise ValueError(
                "Posterior: expected a guide with params, or samples, and not both: "
                "Posterior(model, guide, result.params) or Posterior(model, samples=mcmc.get_samples())"
            )

    def predict(self, key: Array, *args: Any, num_samples: int = 100, **kwargs: Any) -> Mixture:
        """Moments of y at new inputs, a mixture over draws.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_samples: S; with ``samples``, that many of them, evenly spaced.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: NaN or infinite inputs, or a model that subsamples.
        """
        return self._over_draws(self._moments, key, num_samples, args, kwargs)

    def log_density(self, key: Array, y: ArrayLike, *args: Any, num_samples: int = 100, **kwargs: Any) -> Array:
        """Log predictive density of each observation, log mean over draws: shape (N,).

        Args:
            key: PRNG key.
            y: observations, of the shape of the observed site.
            *args: arguments of the model without observations.
            num_samples: S.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict`, or observations of the wrong shape.
        """
        require_finite("observations y", y, "drop the rows with missing values")
        return log_mean_exp(self._over_draws(self._density, key, num_samples, (jnp.asarray(y), *args), kwargs))

    def sample(self, key: Array, *args: Any, num_samples: int = 100, **kwargs: Any) -> Array:
        """Draws of y at new inputs, one for every draw of the latent variables: shape (S, N, ...).

        Draws at different inputs are independent: use them for the distribution at each input, not for curves.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_samples: S.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict`.
        """
        return self._over_draws(self._draw, key, num_samples, args, kwargs)

    def hidden(self, key: Array, *args: Any, num_samples: int = 100, **kwargs: Any) -> dict[str, Array]:
        """Draws of the values of every hidden layer, independent across inputs: ``{site: (S, N, P)}``."""
        return self._over_draws(self._hidden, key, num_samples, args, kwargs)

    def functions(
        self, key: Array, *, num_samples: int = 10, num_features: int = 1024
    ) -> Callable[..., dict[str, Array]]:
        """Draws of whole functions, consistent across inputs.

        Args:
            key: PRNG key; it fixes the draws.
            num_samples: S.
            num_features: random functions in each prior draw; the covariance is exact for any number, the shape of the
                distribution Gaussian for many.

        Returns:
            A function of the model's arguments, giving ``{site: values (S, N, ...)}`` for every hidden layer and for
            the function under the observed site. The same inputs give the same values in every call.

        Raises:
            ValueError: from a kernel without random features.
        """
        # One function object for each number of features, so that a second call reuses the compiled program.
        paths = self._programs.setdefault(num_features, partial(self._paths, num_features))
        return lambda *args, **kwargs: self._over_draws(paths, key, num_samples, args, kwargs)

    def layers(self, key: Array, *args: Any, **kwargs: Any) -> dict[str, tuple[Any, Array]]:
        """Every layer's random function with one draw of the inputs (N, D) that reach it: ``{site: (f, inputs)}``.

        With Gaussian q(v), ``f(x)`` is the posterior of the layer at any x in the space of its inputs. An exact process
        is conditioned on a draw of its values, a layer with inducing values that other layers depend on is conditioned
        on a draw of these, and with MCMC every layer is conditioned on the first draw kept.
        """
        found, sample = {}, {name: values[0] for name, values in self._thinned(1).items()}
        for name, site in self._trace(key, sample, args, kwargs).items():
            fn = unwrap(site["fn"]) if site["type"] == "sample" else None
            values: Any = getattr(fn, "f_x", fn)
            function = getattr(values, "function", None)
            if isinstance(function, RandomFunction):
                function = function.given(values.inputs, site["value"])
                found[name] = function, values.inputs.reshape(-1, values.inputs.shape[-1])
        return found

    def _moments(self, key: Array, sample: Any, args: Any, kwargs: Any) -> Mixture:
        fn = self._observed(self._trace(key, sample, args, kwargs), args, kwargs)["fn"]
        return Mixture(fn.mean, fn.variance)

    def _draw(self, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
        return self._observed(self._trace(key, sample, args, kwargs), args, kwargs)["value"]

    def _density(self, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
        y, *args = args
        fn = unwrap(self._observed(self._trace(key, sample, args, kwargs), args, kwargs)["fn"])
        return fn.log_marginal(y) if isinstance(fn, Likelihood) else fn.log_prob(y)

    def _hidden(self, key: Array, sample: Any, args: Any, kwargs: Any) -> dict[str, Array]:
        return hidden_values(self._trace(key, sample, args, kwargs))

    def _paths(self, num_features: int, key: Array, sample: Any, args: Any, kwargs: Any) -> dict[str, Array]:
        draw_key, path_key = jax.random.split(key)
        if isinstance(self.guide, Guide):
            sample = self.seeded(self.guide, draw_key)(*args, **kwargs)
        elif self.guide is not None:
            sample = sample_values(handlers.trace(self.seeded(self.guide, draw_key)).get_trace(*args, **kwargs))
        program = self.given(sample, self.seeded(self.model, draw_key), args, kwargs)
        sites = handlers.trace(DrawFunctions(program, path_key, num_features)).get_trace(*args, **kwargs)
        last = self._observed(sites, args, kwargs)
        f_x = getattr(unwrap(last["fn"]), "f_x", None)
        values = hidden_values(sites)
        return values if f_x is None else {**values, last["name"]: f_x.loc}

    def _trace(self, key: Array, sample: Any, args: Any, kwargs: Any) -> Trace:
        """One run of the model: in marginal mode under the guide, or given one draw of MCMC."""
        guide_key, model_key = jax.random.split(key)
        model = self.seeded(self.model, model_key)
        if self.guide is None:
            return self._whole(self.given(sample, model, args, kwargs), args, kwargs)
        guide = marginal(self.seeded(self.guide, guide_key))
        if isinstance(self.guide, Guide):
            return traces(model, guide, args, kwargs, lambda program, _: Whole(program))[1]
        # A guide of another package may have hidden values for the rows of the fit only.
        values = sample_values(handlers.trace(guide).get_trace(*args, **kwargs))
        return self._whole(self.given(values, model, args, kwargs), args, kwargs)

    def _whole(self, program: Callable[..., Any], args: Any, kwargs: Any) -> Trace:
        return handlers.trace(Whole(program)).get_trace(*args, **kwargs)

    def seeded(self, program: Callable[..., Any], key: Array) -> Callable[..., Any]:
        """``program`` with random numbers, and the parameters of the fit."""
        return handlers.substitute(handlers.seed(program, key), data=dict(self.params))

    def given(self, sample: Any, program: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
        """``program`` with those values of ``sample`` that are shared by all data."""
        structure = inspect_program(self.model, args, kwargs)

        def value(msg: Message) -> Any:
            return sample.get(msg["name"]) if msg["type"] == "sample" and structure.is_shared(msg) else None

        return handlers.substitute(program, substitute_fn=value)

    def _observed(self, sites: Trace, args: Any, kwargs: Any) -> Message:
        """The observed site: the one named, a likelihood, or the one draw that nothing else depends on."""
        samples = {name: site for name, site in sites.items() if site["type"] == "sample"}
        found = [samples[self.site]] if self.site in samples else []
        if self.site is None:
            found = [site for site in samples.values() if isinstance(unwrap(site["fn"]), Likelihood)]
        if self.site is None and not found:
            ends = inspect_program(self.model, args, kwargs).ends
            found = [site for name, site in samples.items() if name in ends]
        if len(found) != 1:
            raise ValueError(
                f"Posterior: expected one observed site, found {[s['name'] for s in found]}: name it, Posterior(..., "
                f"site=...); the program has {list(samples)}"
            )
        return found[0]

    def _over_draws(self, function: Callable[..., Any], key: Array, num_samples: int, args: Any, kwargs: Any) -> Any:
        require_count("Posterior", "num_samples", num_samples, "100")
        leaves, treedef = jax.tree.flatten((args, kwargs))
        require_finite_leaves("inputs", leaves)
        arrays = [jnp.asarray(leaf) if np.ndim(leaf) else None for leaf in leaves]
        constants = tuple(None if np.ndim(leaf) else leaf for leaf in leaves)
        run = self._programs.get((function, num_samples, treedef, constants))
        if run is None:
            run = jax.jit(partial(over_draws, function, num_samples, treedef, constants))
            self._programs[function, num_samples, treedef, constants] = run
        return run(key, self._thinned(num_samples), arrays)

    @cached_property
    def _programs(self) -> dict[Any, Callable[..., Any]]:
        """Compiled programs, kept by this object: JAX's global cache would keep this object and its data in memory."""
        return {}

    def _thinned(self, num_samples: int) -> dict[str, Array]:
        """``num_samples`` of the MCMC draws, evenly spaced; empty for a guide."""
        if self.samples is None:
            return {}
        total = len(next(iter(self.samples.values())))
        if num_samples > total:
            raise ValueError(
                f"Posterior: expected num_samples of at most {total}, the number of MCMC draws, got {num_samples}"
            )
        index = np.linspace(0, total - 1, num_samples).astype(int)
        return {name: jnp.asarray(value)[index] for name, value in self.samples.items()}
