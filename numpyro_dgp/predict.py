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

from numpyro_dgp._checks import require_count, require_finite, require_key
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.densities import Mixture, log_mean_exp
from numpyro_dgp.draws import DrawFunctions, Whole, hidden_values, over_draws, sample_values
from numpyro_dgp.fitted import (
    RequireParameters,
    as_data,
    given_draw,
    require_arguments,
    require_draws,
    require_fit,
    require_own_functions,
    require_rules,
    require_unobserved,
    warn_rows_together,
)
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.run import marginal, traces
from numpyro_dgp.model.calls import Call, inspect_call
from numpyro_dgp.model.likelihood import Likelihood
from numpyro_dgp.model.outcomes import Range, labels, moments
from numpyro_dgp.model.program import inspect_program
from numpyro_dgp.model.random_function import RandomFunction
from numpyro_dgp.model.sites import Message, Trace, unwrap, values_of

__all__ = ["Posterior"]


@dataclasses.dataclass(frozen=True, eq=False)
class Posterior:
    """A fitted program: a model with a guide and its parameters, or with draws from MCMC.

    Its methods take what all data share from the fit, and predict at the rows of the arguments. What has one value per
    row there (hidden layers, latents) is drawn by the program given the shared values, with a guide as with draws of
    MCMC. This also holds for the rows of the fit, and for rows at which another site is observed, with a warning. Draws
    of the latents of the fit's own rows are ``guide.sample_posterior(key, params, X, y)``. Latents in plates that the
    predicted site is not in, such as those of another source of data, have their posterior if the call observes that
    source as the fit did, and otherwise their prior, with a warning.

    Args:
        model: the program.
        guide: its guide. From guides of other packages, such as NumPyro's autoguides, sites with one value per datum
            are ignored, as from ``samples``.
        params: parameters, from ``svi_result.params``.
        samples: draws of the latent sites, from ``mcmc.get_samples()`` or ``guide.sample_posterior``, instead of a
            guide. Sites with one value per datum are ignored: at new inputs the program draws them.
        site: the observed site; needed only when it is not a ``Likelihood``, or when there are several.

    Raises:
        ValueError: neither a guide nor samples, or both; or something else than a dict as params or samples.

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
        require_fit(self.model, self.guide, self.params, self.samples, self.site)

    def predict(self, key: Array, *args: Any, num_samples: int | None = None, **kwargs: Any) -> Mixture:
        """Moments of y at new inputs, a mixture over draws.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_samples: S; with ``samples``, that many of them, evenly spaced. 100 by default, or all draws if
                ``samples`` has fewer.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: NaN or infinite inputs, observations of the predicted site among the arguments, a model that
                subsamples or whose functions depend on the inputs, parameters or draws that are missing, or a
                distribution of y that has no mean.
        """
        return self._over_draws(self._moments, key, num_samples, args, kwargs)

    def log_density(self, key: Array, y: ArrayLike, *args: Any, num_samples: int | None = None, **kwargs: Any) -> Array:
        """Log predictive density of each observation, log mean over draws: shape (N,).

        Args:
            key: PRNG key.
            y: observations, of the shape of the observed site.
            *args: arguments of the model without observations.
            num_samples: S.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict`, or observations of the wrong shape or out of range (labels, counts).
        """
        require_finite("observations y", y, "drop the rows with missing values")
        self._range(args, kwargs).require("Posterior.log_density", y)
        return log_mean_exp(self._over_draws(self._density, key, num_samples, (jnp.asarray(y), *args), kwargs))

    def probs(self, key: Array, *args: Any, num_samples: int | None = None, **kwargs: Any) -> Array:
        r"""Probabilities of the K labels of y at new inputs, averaged over draws: shape (N, K).

        .. math:: p(y_n = k) = \tfrac1S \sum_s E[p(y_n = k \mid v_n) \mid s]

        for an observed site with one label per datum, such as ``Categorical``, ``Bernoulli`` or :class:`RobustMax`.
        Rows add up to one.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_samples: S.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict`, or an observed site that has no labels.

        Example:
            >>> import jax, numpyro, optax
            >>> import jax.numpy as jnp
            >>> import numpyro.distributions as dist
            >>> from numpyro.infer import SVI
            >>> import numpyro_dgp as dgp
            >>> def model(X, y=None):
            ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
            ...     with numpyro.plate("data", len(X)):
            ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Bernoulli(logits=4 * v)), obs=y)
            >>> X = jnp.linspace(0, 1, 20)[:, None]
            >>> guide = dgp.guides.InducingPoint(model)
            >>> result = SVI(model, guide, optax.adam(0.05), dgp.ELBO()).run(
            ...     jax.random.key(0), 300, X, jnp.array(X[:, 0] > 0.5, int), progress_bar=False)
            >>> p = dgp.Posterior(model, guide, result.params).probs(jax.random.key(1), jnp.array([[0.1], [0.9]]))
            >>> p.shape, p.argmax(1)
            ((2, 2), Array([0, 1], dtype=int32))
        """
        p = self._over_draws(self._probabilities, key, num_samples, args, kwargs).mean(0)
        return p / p.sum(-1, keepdims=True)

    def sample(self, key: Array, *args: Any, num_samples: int | None = None, **kwargs: Any) -> Array:
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

    def hidden(self, key: Array, *args: Any, num_samples: int | None = None, **kwargs: Any) -> dict[str, Array]:
        """Draws of the values of every hidden layer, independent across inputs: ``{site: (S, N, P)}``."""
        return self._over_draws(self._hidden, key, num_samples, args, kwargs)

    def functions(
        self, key: Array, *, num_samples: int | None = None, num_features: int = 1024
    ) -> Callable[..., dict[str, Array]]:
        """Draws of whole functions, consistent across inputs.

        Args:
            key: PRNG key; it fixes the draws.
            num_samples: S; 10 by default, or all draws if ``samples`` has fewer.
            num_features: random functions in each prior draw; the covariance is exact for any number, the shape of the
                distribution Gaussian for many.

        Returns:
            A function of the model's arguments, giving ``{site: values (S, N, ...)}`` for every hidden layer and for
            the function under the observed site. The same inputs give the same values in every call.

        Raises:
            ValueError: from a kernel without random features.
        """
        require_key("Posterior", key)
        # One function object for each number of features, so that a second call reuses the compiled program.
        paths = self._programs.setdefault(num_features, partial(self._paths, num_features))
        return lambda *args, **kwargs: self._over_draws(paths, key, num_samples, args, kwargs, default=10)

    def layers(self, key: Array, *args: Any, **kwargs: Any) -> dict[str, tuple[Any, Array]]:
        """Every layer's random function with one draw of the inputs (N, D) that reach it: ``{site: (f, inputs)}``.

        With Gaussian q(v), ``f(x)`` is the posterior of the layer at any x in the space of its inputs. An exact process
        is conditioned on a draw of its values, a layer with inducing values that other layers depend on is conditioned
        on a draw of these, and with MCMC every layer is conditioned on the first draw kept.
        """
        args, kwargs = jax.tree.map(as_data, (args, kwargs))
        require_arguments(key, jax.tree.leaves((args, kwargs)))
        found, sample = {}, {name: values[0] for name, values in self._thinned(1).items()}
        for name, site in self._trace(self._call(args, kwargs), key, sample, args, kwargs).items():
            values: Any = values_of(site["fn"]) if site["type"] == "sample" else None
            function = getattr(values, "function", None)
            if isinstance(function, RandomFunction):
                function = function.given(values.inputs, site["value"])
                found[name] = function, values.inputs.reshape(-1, values.inputs.shape[-1])
        return found

    def _moments(self, key: Array, sample: Any, args: Any, kwargs: Any) -> Mixture:
        return Mixture(*moments(self._observed(key, sample, args, kwargs)["fn"]))

    def _draw(self, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
        return self._observed(key, sample, args, kwargs)["value"]

    def _density(self, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
        y, *args = args
        return _log_density(unwrap(self._observed(key, sample, args, kwargs)["fn"]), y)

    def _probabilities(self, key: Array, sample: Any, args: Any, kwargs: Any) -> Array:
        fn = unwrap(self._observed(key, sample, args, kwargs)["fn"])
        values = labels("Posterior.probs", fn)
        y = jnp.broadcast_to(values.reshape(-1, *(1,) * len(fn.batch_shape)), (len(values), *fn.batch_shape))
        return jnp.moveaxis(jnp.exp(_log_density(fn, y)), 0, -1)

    def _hidden(self, key: Array, sample: Any, args: Any, kwargs: Any) -> dict[str, Array]:
        return hidden_values(self._trace(self._call(args, kwargs), key, sample, args, kwargs))

    def _paths(self, num_features: int, key: Array, sample: Any, args: Any, kwargs: Any) -> dict[str, Array]:
        draw_key, path_key = jax.random.split(key)
        call = self._call(args, kwargs)
        guide = self._guide(call)
        if isinstance(guide, Guide):
            sample = self.seeded(guide, draw_key)(*args, **kwargs)
        elif guide is not None:
            sample = sample_values(handlers.trace(self.seeded(guide, draw_key)).get_trace(*args, **kwargs))
        program = self.given(sample, self.seeded(self.model, draw_key), args, kwargs, call.plates)
        sites = handlers.trace(DrawFunctions(program, path_key, num_features)).get_trace(*args, **kwargs)
        last = sites[call.observed]
        f_x = getattr(unwrap(last["fn"]), "f_x", None)
        values = hidden_values(sites)
        return values if f_x is None else {**values, last["name"]: f_x.loc}

    def _observed(self, key: Array, sample: Any, args: Any, kwargs: Any) -> Message:
        """The observed site in one run of the model."""
        call = self._call(args, kwargs)
        return self._trace(call, key, sample, args, kwargs)[call.observed]

    def _trace(self, call: Call, key: Array, sample: Any, args: Any, kwargs: Any) -> Trace:
        """One run of the model: in marginal mode under the guide, or given one draw of MCMC."""
        guide_key, model_key = jax.random.split(key)
        guide, model = self._guide(call), self.seeded(self.model, model_key)
        if guide is None:
            return self._whole(self.given(sample, model, args, kwargs, call.plates), args, kwargs)
        integrated = marginal(self.seeded(guide, guide_key))
        if isinstance(guide, Guide):
            return traces(model, integrated, args, kwargs, lambda program, _: Whole(program))[1]
        # A guide of another package may have hidden values for the rows of the fit only.
        values = sample_values(handlers.trace(integrated).get_trace(*args, **kwargs))
        return self._whole(self.given(values, model, args, kwargs, call.plates), args, kwargs)

    def _whole(self, program: Callable[..., Any], args: Any, kwargs: Any) -> Trace:
        return handlers.trace(Whole(program)).get_trace(*args, **kwargs)

    def _call(self, args: Any, kwargs: Any) -> Call:
        """What a call at new inputs predicts; raises for a call that is not one."""
        call = inspect_call(handlers.substitute(self.model, data=dict(self.params)), self.site, args, kwargs)
        require_unobserved(call)
        require_own_functions(call)
        warn_rows_together(call)
        require_rules(self.guide, self.params, call.sites)
        require_draws(self.samples or {}, call.sites)
        return call

    def _guide(self, call: Call) -> Callable[..., Any] | None:
        """The guide at the rows that ``call`` predicts."""
        return self.guide.predicting(*call.plates) if isinstance(self.guide, Guide) else self.guide

    def seeded(self, program: Callable[..., Any], key: Array) -> Callable[..., Any]:
        """``program`` with random numbers, and the parameters of the fit."""
        data = dict(self.params)
        return RequireParameters(handlers.substitute(handlers.seed(program, key), data=data), data)

    def given(
        self,
        sample: Any,
        program: Callable[..., Any],
        args: Any,
        kwargs: Any,
        predicted: tuple[frozenset[str], ...] = (),
    ) -> Callable[..., Any]:
        """``program`` with those values of ``sample`` that are shared by all data.

        Args:
            sample: values by site.
            program: the model, with its random numbers.
            args: its arguments.
            kwargs: its keyword arguments.
            predicted: the plates of the sites that are predicted: then latents of other rows, observed in this call,
                are given too.
        """
        structure = inspect_program(self.model, args, kwargs)
        source = "samples" if self.guide is None else "a guide"
        return handlers.substitute(program, substitute_fn=given_draw(sample, source, structure, predicted))

    def _range(self, args: Any, kwargs: Any) -> Range:
        """The range of y in a call with such arguments."""
        shapes = str(jax.tree.map(lambda leaf: np.shape(leaf) or leaf, (args, kwargs)))
        if shapes not in self._ranges:
            call = self._call(args, kwargs)
            self._ranges[shapes] = call.ranges[call.observed]
        return self._ranges[shapes]

    def _over_draws(
        self,
        function: Callable[..., Any],
        key: Array,
        num_samples: int | None,
        args: Any,
        kwargs: Any,
        default: int = 100,
    ) -> Any:
        if num_samples is None:
            num_samples = default if self.samples is None else min(default, len(next(iter(self.samples.values()))))
        require_count("Posterior", "num_samples", num_samples, "100")
        leaves, treedef = jax.tree.flatten(jax.tree.map(as_data, (args, kwargs)))
        require_arguments(key, leaves)
        arrays = [leaf if np.ndim(leaf) else None for leaf in leaves]
        constants = tuple(None if np.ndim(leaf) else leaf for leaf in leaves)
        run = self._programs.get((function, num_samples, treedef, constants))
        if run is None:
            run = jax.jit(partial(over_draws, function, num_samples, treedef, constants))
            self._programs[function, num_samples, treedef, constants] = run
        return run(key, self._thinned(num_samples), arrays)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled and copied without its compiled programs."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def _programs(self) -> dict[Any, Callable[..., Any]]:
        """Compiled programs, kept by this object: JAX's global cache would keep this object and its data in memory."""
        return {}

    @cached_property
    def _ranges(self) -> dict[str, Range]:
        """The range of y, by the shapes of arguments."""
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


def _log_density(fn: Any, y: Array) -> Array:
    """The normalised log density of observations."""
    return fn.log_marginal(y) if isinstance(fn, Likelihood) else fn.log_prob(y)
