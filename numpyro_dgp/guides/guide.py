"""A guide is the model's own program, run under a handler that replaces distributions.

Because the handler meets a site where it happens, a rule sees everything drawn before it: the function, its
inputs, the layer below. Structured posteriors are therefore rules, not model classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import ndtri
from numpyro import handlers
from numpyro.infer import init_to_median
from numpyro.infer.autoguide import AutoGuide

from numpyro_dgp._checks import is_concrete, require_count
from numpyro_dgp._typing import Array
from numpyro_dgp.guides.handler import Replace
from numpyro_dgp.guides.rules.latents import Quadrature
from numpyro_dgp.guides.rules.rules import Rule
from numpyro_dgp.guides.run import marginal, resample, run
from numpyro_dgp.model.program import (
    Message,
    full_plates,
    site_kind,
    unwrap,
)

__all__ = ["Guide"]


class Guide:
    """A variational posterior over the latent sites of ``model``: one rule per kind of site.

    It takes the model's arguments, draws every latent site and returns them in a dict, so that it works
    wherever a NumPyro guide does. At test inputs (called without observations) sites that have one value per
    datum are left to the model, which draws them from their prior; hidden layers follow their posterior functions.

    Args:
        model: the program.
        inducing: rule for whitened inducing values.
        hidden: rule for values of hidden layers.
        exact: rule for values of exact processes.
        latent: rule for other sites inside plates.
        other: rule for every other site, or a NumPyro autoguide class such as ``AutoMultivariateNormal``
            (any callable from a model to a guide), applied to all of them together.
        sites: rules for single sites by name.
        prefix: goes into parameter names, ``"<site>_<prefix>_<parameter>"``.
        init_loc_fn: NumPyro init strategy for sites that are not function values.
        num_samples: K, importance samples of the latents of every datum in ``dgp.ELBO``; ``None`` for the plain bound.
        doubly_reparameterised: whether their proposals learn by doubly reparameterised gradients.

    Raises:
        ValueError: on the first call, when ``sites`` names a site that the model does not have.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        inducing: Rule,
        hidden: Rule,
        exact: Rule,
        latent: Rule,
        other: Rule | Callable[[Callable[..., Any]], Any],
        sites: Mapping[str, Rule] | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = partial(init_to_median, num_samples=1000),
        num_samples: int | None = None,
        doubly_reparameterised: bool = False,
    ) -> None:
        if num_samples is not None:
            require_count(type(self).__name__, "num_samples", num_samples, "5")
        self.num_samples, self.doubly_reparameterised = num_samples, doubly_reparameterised
        self.model, self.prefix, self.init_loc_fn = model, prefix, init_loc_fn
        self.sites: dict[str, Rule] = dict(sites or {})
        self.rules: dict[str, Rule] = {"inducing": inducing, "hidden": hidden, "exact": exact, "latent": latent}
        for name, rule in [*self.rules.items(), *self.sites.items()]:
            if not isinstance(rule, Rule):
                raise ValueError(
                    f"{type(self).__name__}: expected a rule for {name!r}, got {type(rule).__name__}: "
                    "for example dgp.guides.Normal(), an instance"
                )
        self.companion: Any = None
        if isinstance(other, Rule):
            self.rules["other"] = other
        else:
            exposed = handlers.block(model, hide_fn=self._is_not_other)
            self.companion = other if isinstance(other, AutoGuide) else other(exposed)
        self._observed: set[str] = set()
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Draw every latent site of ``model(*args, **kwargs)``; returns ``{name: value}``."""
        drawn = {} if self.companion is None else self.companion(*args, **kwargs)
        handler = Replace(self, args, kwargs, drawn)
        with handler as values:
            self.model(*args, **kwargs)
        if is_concrete(args, kwargs) and (handler.observes or self._arguments is None):
            self._arguments = (args, kwargs)
        return values

    def sample_posterior(
        self, rng_key: Array, params: dict[str, Array], *args: Any, sample_shape: tuple[int, ...] = (), **kwargs: Any
    ) -> dict[str, Array]:
        """Draws of the latent sites, each with leading shape ``sample_shape``.

        Latents that have importance weights or quadrature nodes, and the layers above them, are drawn from the
        posterior that those imply, datum by datum.

        Args:
            rng_key: PRNG key.
            params: parameters, from ``svi_result.params``.
            *args: arguments of the model.
            sample_shape: shape of independent draws.
            **kwargs: keyword arguments of the model.
        """

        weighs = any(isinstance(rule, Quadrature) for rule in [*self.rules.values(), *self.sites.values()])

        def draw(key: Array) -> dict[str, Array]:
            values = handlers.substitute(handlers.seed(self, key), data=params)(*args, **kwargs)
            if self.num_samples is None and not weighs:
                return values
            found = run(key, key, params, self.model, self, args, kwargs)
            return values | resample(jax.random.fold_in(key, 1), found)

        for _ in sample_shape:
            draw = jax.vmap(draw)
        return draw(jax.random.split(rng_key, sample_shape) if sample_shape else rng_key)

    def median(self, params: dict[str, Array]) -> dict[str, Array]:
        """Medians of the sites that have a variational distribution of their own: ``{site: median}``.

        Raises:
            ValueError: the guide has not been called yet.
        """
        others = {} if self.companion is None else self.companion.median(params)
        return others | {name: value[0] for name, value in self._quantiles(params, [0.5]).items()}

    def quantiles(self, params: dict[str, Array], quantiles: Any) -> dict[str, Array]:
        """Quantiles of the sites that have a variational distribution of their own.

        Hidden layers that follow the model have none, nor have inducing values that follow others: draw them with
        :meth:`sample_posterior`.

        Args:
            params: parameters, from ``svi_result.params``.
            quantiles: probabilities (Q,).

        Returns:
            ``{site: values (Q, ...)}``.

        Raises:
            ValueError: the guide has not been called yet.
        """
        others = {} if self.companion is None else self.companion.quantiles(params, quantiles)
        return others | self._quantiles(params, quantiles)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the latest call on data, outside compiled programs.

        Raises:
            ValueError: the guide has not been called yet.
        """
        if self._arguments is None:
            raise ValueError(
                f"{type(self).__name__}: expected a guide that has run, got one never called: "
                "run SVI first, or call the guide once on the data under handlers.seed"
            )
        return self._arguments

    def _quantiles(self, params: dict[str, Array], quantiles: Any) -> dict[str, Array]:
        args, kwargs = self.arguments()
        program = full_plates(marginal(handlers.substitute(handlers.seed(self, 0), data=params)))
        with handlers.block():
            sites = handlers.trace(program).get_trace(*args, **kwargs)
        own = {name: site for name, site in sites.items() if site.get("own") and not site.get("follows")}
        return {name: _quantiles(unwrap(site["fn"]), quantiles) for name, site in own.items()}

    def _is_not_other(self, msg: Message) -> bool:
        """Whether an autoguide for the other sites must not see this one."""
        return msg["type"] == "sample" and self._rule_name(msg) != "other"

    def _rule_name(self, msg: Message) -> str:
        if msg["name"] in self._observed:
            return "observed"
        return "named" if msg["name"] in self.sites else site_kind(msg)

    def _rule(self, msg: Message) -> Rule | None:
        name = self._rule_name(msg)
        return self.sites[msg["name"]] if name == "named" else self.rules.get(name)


def _quantiles(fn: dist.Distribution, quantiles: Any) -> Array:
    if isinstance(fn, dist.Delta):
        return jnp.stack([fn.v] * len(quantiles))
    base = fn.base_dist if isinstance(fn, dist.TransformedDistribution) else fn
    q = jnp.asarray(quantiles, base.loc.dtype).reshape(-1, *(1,) * base.loc.ndim)
    values = base.loc + jnp.sqrt(base.variance) * ndtri(q)
    for transform in getattr(fn, "transforms", []):
        values = jax.vmap(transform)(values)
    return values
