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
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp

from numpyro_dgp._checks import MISSING, require_count, require_finite, require_key
from numpyro_dgp._compiled import one_thread
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.analysis.calls import require_conditionals
from numpyro_dgp.analysis.sites import each_values_of
from numpyro_dgp.densities import JointMixture, Mixture, log_mean_exp
from numpyro_dgp.functions.random_function import RandomFunction
from numpyro_dgp.predict import quantities
from numpyro_dgp.predict.fitted import Fit, Target, as_data, require_arguments
from numpyro_dgp.predict.predictor import Predictor, Quantity

__all__ = ["Posterior"]


@dataclasses.dataclass(frozen=True, eq=False)
class Posterior(Fit):
    """A fitted program: a model with a guide and its parameters, or with posterior samples of MCMC.

    Methods take the sites that all data share from the fit, and predict at the rows of their arguments. Sites with one
    value per row (hidden layers, latents) are drawn by the program given the shared values, also at the rows of the
    fit; posterior draws of latents at the rows of the fit are ``guide.sample_posterior(key, params, X, y)``. Latents in
    plates without the predicted site, such as those of another source of data, are drawn from their posterior if the
    call observes that source as the fit did, and otherwise from their prior, with a warning.

    Args:
        model: the program.
        guide: its guide. From guides of other packages, such as NumPyro's autoguides, sites with one value per datum
            are ignored, as from ``samples``.
        params: parameters, from ``svi_result.params``.
        samples: posterior samples of the latent sites, from ``mcmc.get_samples()`` or ``guide.sample_posterior``,
            instead of a guide. Sites with one value per datum are ignored: at new inputs the program draws them.
        site: the observed site; needed only when it is not a ``Likelihood``, or when there are several.
        data: arguments of the fit, set by :meth:`on`.
        options: numbers of draws and of rows, set by :meth:`using`.

    Raises:
        ValueError: neither a guide nor samples, or both; params or samples that are not a dict.

    Example:
        >>> import jax, optax
        >>> from numpyro.infer import SVI
        >>> import numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model)
        >>> result = SVI(model, guide, optax.adam(0.05), dgp.ELBO()).run(
        ...     jax.random.key(0), 300, X, y, progress_bar=False)
        >>> posterior = dgp.Posterior(model, guide, result.params)
        >>> posterior.predict(jax.random.key(1), X[:3]).mean.shape
        (3,)
    """

    __repr__ = brief

    def __getstate__(self) -> dict[str, Any]:
        """Pickled and copied without its compiled programs."""
        return {name: value for name, value in vars(self).items() if name != "_predictor"}

    @cached_property
    def _predictor(self) -> Predictor:
        """The predictor of this object; compiled code is shared between posteriors."""
        return Predictor(self)

    def using(
        self, *, num_samples: int | None = None, batch_size: int | None = None, progress_bar: bool | None = None
    ) -> Self:
        """A copy with other options, ``posterior.using(num_samples=500).predict(key, X)``.

        They hold for all of its predictions. Compiled programs are shared by both, so that it costs nothing.

        Args:
            num_samples: S, draws of the latent variables; of ``samples`` that many, evenly spaced. By default 100, and
                10 of :meth:`functions`; all draws if ``samples`` has fewer; one where all would be the same.
            batch_size: rows predicted at a time, for results in NumPy arrays; by default all together, as
                :meth:`predict_jointly` and :meth:`layers` always do.
            progress_bar: show a progress bar over batches; by default it is shown.

        Returns:
            A copy; what is not given here stays as it is.

        Raises:
            ValueError: numbers that are not positive integers.

        Example:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import numpyro_dgp as dgp
            >>> model, X, y = dgp.testing.toy()
            >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((100, 5))})
            >>> few = posterior.using(num_samples=10, batch_size=1000, progress_bar=False)
            >>> few.sample(jax.random.key(0), X).shape
            (10, 20)
        """
        found = dataclasses.replace(self, options=self.options.using(num_samples, batch_size, progress_bar))
        vars(found)["_predictor"] = self._predictor
        return found

    def predict(self, key: Array, *args: Any, X_variance: ArrayLike | None = None, **kwargs: Any) -> Mixture:
        """Mean and variance of y at new inputs, a mixture over posterior samples.

        Where y is Gaussian given each draw, the mixture has quantiles; where it is not, only a mean and a variance, and
        :meth:`quantile` has quantiles.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            X_variance: variances of the inputs, the first argument, where they are known with an error: a shape that
                broadcasts to theirs. The mixture is over the inputs too.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: NaN or infinite inputs, observations of the predicted site among the arguments, a model that
                subsamples or whose functions depend on the inputs, parameters or draws that are missing, a
                distribution of y that has no mean, an index among the arguments that is outside of its array, as of a
            group that the fit has not seen, or a batch size with rows that are not predicted independently.

        Warns:
            UserWarning: a mean or variance that is infinite or NaN; inputs at which a representation is not valid, such
                as those outside of a ``Basis``.
        """
        found = self._predictor(_MOMENTS, key, self.options, args, kwargs, X_variance)
        quantities.warn_infinite(found)
        return found

    def log_density(
        self, key: Array, y: ArrayLike, *args: Any, X_variance: ArrayLike | None = None, **kwargs: Any
    ) -> Array:
        """Log predictive density of each observation, the log of the mean over posterior samples: shape (N,).

        Args:
            key: PRNG key.
            y: observations, of the shape of the observed site.
            *args: arguments of the model without observations.
            X_variance: as for :meth:`predict`.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict`, or observations of the wrong shape or out of range (labels, counts).
        """
        require_finite("observations y", y, MISSING)
        self._predictor.range(args, kwargs).require(y)
        return self._predictor(_DENSITIES, key, self.options, (jnp.asarray(y), *args), kwargs, X_variance)

    def probs(self, key: Array, *args: Any, X_variance: ArrayLike | None = None, **kwargs: Any) -> Array:
        r"""Probabilities of the K labels of y at new inputs, averaged over posterior samples: shape (N, K).

        .. math:: p(y_n = k) = \tfrac1S \sum_s E[p(y_n = k \mid v_n) \mid s]

        for an observed site with one label per datum, such as ``Categorical``, ``Bernoulli`` or :class:`RobustMax`.
        Rows add up to one.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            X_variance: as for :meth:`predict`.
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
        return self._predictor(_PROBABILITIES, key, self.options, args, kwargs, X_variance)

    def sample(self, key: Array, *args: Any, **kwargs: Any) -> Array:
        """Draws of y at new inputs, one per posterior sample: shape (S, N, ...).

        Draws at different inputs are independent: use them for the distribution at each input, not for curves.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict`.
        """
        return self._predictor(_DRAWS, key, self.options, args, kwargs)

    def quantile(
        self, key: Array, q: ArrayLike, *args: Any, X_variance: ArrayLike | None = None, **kwargs: Any
    ) -> Array:
        """Quantiles of each entry of y at new inputs, for any real-valued y.

        They are those of the mixture over draws: in closed form where y is Gaussian given each draw, or one of a few
        labels in order. Else they are quantiles of 50 draws of y for each of the S draws, values that y can take:
        counts are whole. The probability below such a quantile is q up to 0.7 / sqrt(50 S) at most, 0.01 by default.

        Args:
            key: PRNG key.
            q: levels between 0 and 1, a number or an array, such as ``[0.05, 0.95]`` for an interval of 90 %.
            *args: arguments of the model without observations.
            X_variance: as for :meth:`predict`.
            **kwargs: keyword arguments of the model.

        Returns:
            Quantiles (N, ...), for an array q behind the axes of q.

        Raises:
            ValueError: as :meth:`predict`, levels that are not between 0 and 1, or a y without order: classes, angles.

        Example:
            >>> import jax, numpyro
            >>> import jax.numpy as jnp
            >>> import numpyro.distributions as dist
            >>> import numpyro_dgp as dgp
            >>> def model(X, y=None):
            ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]))
            ...     with numpyro.plate("data", len(X)):
            ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Poisson(5 * jnp.exp(v))), obs=y)
            >>> posterior = dgp.Posterior(model, samples={"f": jnp.zeros((100, 5))})
            >>> print(posterior.quantile(jax.random.key(0), [0.05, 0.95], jnp.array([[0.0], [1.0]])))
            [[2 2]
             [9 9]]
        """
        levels = quantities.Levels.of(q)
        quantity = Quantity(quantities.predictive_of, finish=levels, leading=len(levels.shape))
        return self._predictor(quantity, key, self.options, args, kwargs, X_variance)

    def predict_function(self, key: Array, *args: Any, X_variance: ArrayLike | None = None, **kwargs: Any) -> Mixture:
        """Moments of the function under the observed ``Likelihood``, without the noise of y: a mixture over draws.

        It is Gaussian given each draw whatever the distribution of y, so that it has quantiles:
        ``posterior.predict_function(key, X).interval(0.9)`` is a band around the function.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            X_variance: as for :meth:`predict`.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict`, or an observed site that is not a ``Likelihood``.
        """
        return self._predictor(_FUNCTION, key, self.options, args, kwargs, X_variance)

    def predict_jointly(self, key: Array, *args: Any, num_features: int = 1024, **kwargs: Any) -> JointMixture:
        """Joint moments of the function under the observed ``Likelihood`` at the rows of a call: a mixture over draws.

        As :meth:`predict_function`, with the covariances between rows: variances are the same. Given each draw, the
        layers below are whole functions, the same at every call with this key and differentiable in the inputs, and
        the last layer is Gaussian: with v integrated out where the guide has a Gaussian q(v), otherwise given a draw
        of v, from the guide or the chain. One layer with a Gaussian q(v) and fixed hyperparameters is one Gaussian, S
        times. A function that is below itself is known given a draw, with covariances of zero. It can be called with
        tracers, inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            num_features: random functions in each prior draw of a layer below, as for :meth:`functions`.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict_function`, exact processes and those of ``dgp.Neighbours``, several values of
                one function under the ``Likelihood``, or a kernel below the last layer without random features.
        """
        require_count("num_features", num_features, "1024")
        quantity = Quantity(quantities.jointly_of, settings=(num_features,), every=True)
        together = dataclasses.replace(self.options, batch_size=None)
        found: JointMixture = self._predictor(quantity, key, together, args, kwargs)
        return found

    def functions(self, key: Array, *, num_features: int = 1024) -> Callable[..., dict[str, Array]]:
        """Draws of whole functions, consistent across inputs; 10 by default, or all if ``samples`` has fewer.

        Args:
            key: PRNG key; it fixes the draws.
            num_features: random functions in each prior draw; the covariance is exact for any number of them, and the
                distribution is Gaussian in the limit of many.

        Returns:
            A function of the model's arguments, giving ``{site: values (S, N, ...)}`` for every hidden layer and for
            the function under the observed site. The same inputs give the same values in every call.

        Raises:
            ValueError: numbers that are not positive; by the function, a kernel without random features.
        """
        require_key(key)
        require_count("num_features", num_features, "1024")
        quantity = Quantity(quantities.functions_of, settings=(num_features,), num_samples=10)
        return lambda *args, **kwargs: self._predictor(quantity, key, self.options, args, kwargs)

    def hidden(self, key: Array, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Draws of the values of every hidden layer, independent across inputs: ``{site: (S, N, P)}``.

        Args:
            key: PRNG key.
            *args: arguments of the model without observations.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict`.
        """
        return self._predictor(_HIDDEN, key, self.options, args, kwargs)

    @one_thread
    def layers(self, key: Array, *args: Any, **kwargs: Any) -> dict[str, tuple[Any, Array]]:
        """Every layer's random function with one draw of the inputs (N, D) that reach it: ``{site: (f, inputs)}``.

        With Gaussian q(v), ``f(x)`` is the posterior of the layer at any x in the space of its inputs. An exact process
        is conditioned on a draw of its values, a layer with inducing values that other layers depend on is conditioned
        on a draw of these, and with MCMC every layer is conditioned on the first draw kept.

        A call with all observations, ``posterior.layers(key, X, y)``, is one at the rows of the fit, in their order:
        hidden values and latents of single rows are then drawn from the posterior that the fit has for these rows, as
        in ``guide.sample_posterior(key, params, X, y)``. Without observations the program draws them given what all
        data share. Exact processes have values at the rows of the fit only.

        Args:
            key: PRNG key.
            *args: arguments of the model: those of the fit, or without observations.
            **kwargs: keyword arguments of the model.

        Raises:
            ValueError: as :meth:`predict`; observations with a guide that has several weighted values of latents; at
                the rows of the fit, values of the fit for another number of rows.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro_dgp as dgp
            >>> model, X, _ = dgp.testing.toy(2)
            >>> samples = {"f": jnp.ones((1, 2, 5)), "g": jnp.zeros((1, 4)), "h": jnp.ones((1, 20, 2))}
            >>> layers = dgp.Posterior(model, samples=samples).layers(jax.random.key(0), X)
            >>> {name: inputs.shape for name, (f, inputs) in layers.items()}
            {'h': (20, 1), 'y': (20, 2)}
            >>> f, inputs = layers["h"]
            >>> print(f(inputs[:1]).mean.round(2))  # at the first inducing input
            [[1. 1.]]
        """
        args, kwargs = jax.tree.map(as_data, (args, kwargs))
        require_arguments(key, jax.tree.leaves((args, kwargs)))
        found, sample = {}, {name: values[0] for name, values in self._predictor.thinned(1).items()}
        call = self.call(args, kwargs, or_of_fit=True)
        require_conditionals(call, below=False)
        target = Target(None, call.plates, of_fit=bool(call.candidates) and not call.predicted)
        for name, site in self.trace(target, key, sample, args, kwargs).items():
            every = each_values_of(site["fn"]) if site["type"] == "sample" else ()
            for values in every:
                function = values.function
                if isinstance(function, RandomFunction):
                    function = function.given(values.inputs, site["value"], values.noise)
                    inputs = values.inputs.reshape(-1, values.inputs.shape[-1])
                    found[name if len(every) == 1 else str(function.site)] = function, inputs
        return found


def _mean_probabilities(p: Array) -> Array:
    p = p.mean(0)
    return p / p.sum(-1, keepdims=True)  # quadrature may miss one by a little


_MOMENTS = Quantity(quantities.moments_of)  # mu_s and sigma_s^2
_DENSITIES = Quantity(quantities.densities_of, finish=log_mean_exp, observations=1)  # log (1/S) sum_s p_s(y)
_PROBABILITIES = Quantity(quantities.probabilities_of, finish=_mean_probabilities)  # (1/S) sum_s p_s(y = k)
_FUNCTION = Quantity(quantities.function_of)
_DRAWS = Quantity(quantities.draws_of)
_HIDDEN = Quantity(quantities.hidden_of, needs_site=False)
