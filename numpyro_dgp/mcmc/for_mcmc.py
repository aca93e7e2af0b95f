"""Programs for MCMC: the non-centred form of hidden layers, and checks that a program can be sampled.

A warning where posterior samples of a layer are used as its values at other rows.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import Reparam
from numpyro.primitives import Messenger

from numpyro_dgp._checks import expect, expected, inside_transformation, require_params
from numpyro_dgp._data import indexable
from numpyro_dgp._numpyro import active
from numpyro_dgp._repr import brief, described
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import ALL_ROWS, FIXED_PARAMETERS, WHOLE_DATA, require
from numpyro_dgp.analysis.observations_apart import require_observations_apart
from numpyro_dgp.analysis.program import require_sound
from numpyro_dgp.analysis.sites import Message, Trace, declared_kind, is_function_values, row_shape, site_kind, unwrap
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.functions.weights import StandardNormal
from numpyro_dgp.inference.white_numbers import is_drawn_from_white
from numpyro_dgp.likelihoods.observed_only import observed_only
from numpyro_dgp.mcmc.guide_coordinates import numbers_behind, require_guide, run_in_coordinates
from numpyro_dgp.mcmc.integrated_layers import Integrate, layers_to_integrate

__all__ = [
    "Collapse",
    "NonCentered",
    "Prepared",
    "centred_program",
    "for_mcmc",
    "prepared",
    "rows_of_chain",
    "sampled_program",
]


class rows_of_chain(Messenger):  # noqa: N801 - a handler, named like NumPyro's
    """Handler that warns where NumPyro's ``Predictive`` substitutes values of layers in a run without observations.

    They are those of the rows of a chain. It takes them whatever the inputs are, if there are as many.
    """

    def __init__(self) -> None:
        self._given: list[str] = []
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or site_kind(msg) not in ("hidden", "exact"):
            return
        if any(_gives(h, msg) for h in active() if isinstance(h, handlers.substitute)):
            self._given.append(msg["name"])

    def __exit__(self, exc_type: Any, *exc: Any) -> None:
        super().__exit__(exc_type, *exc)
        if exc_type is None and self._given:
            warnings.warn(
                "for_mcmc: expected the rows of the chain, in their order, in a call without observations, since draws "
                f"of {', '.join(map(repr, self._given))} are values there only: at other inputs of equal number they "
                "are wrong; predict by dgp.Posterior(model, samples=mcmc.get_samples()), or for an exact process keep "
                "the inputs X of the chain outside the model and call f.condition(X, v)",
                stacklevel=4,
            )


def _gives(handler: handlers.substitute, msg: Message) -> bool:
    """Whether a handler is that of NumPyro's ``Predictive`` and has a value for a site.

    Others, such as those of samplers and their initial values, are not asked: they may draw, or add to a density.
    """
    of_predictive = getattr(handler.substitute_fn, "__qualname__", "").startswith("_predictive.")
    return of_predictive and handler.substitute_fn(msg) is not None


Collapse: TypeAlias = bool | Literal["auto"]


class NonCentered(Reparam):
    r"""Non-centred form of the values of a layer, or of a latent ``RingNormal`` or ``StateSpaceNormal``.

    .. math:: h = \mu + L\epsilon, \qquad \epsilon \sim N(0, I)

    with the mean :math:`\mu` and the covariance :math:`L L^\top` of the values given v and the layer below.

    Given these, hidden values have a tiny variance. In the centred form, a sampler moves them and the variables that
    they depend on only in tiny steps. In the non-centred form the chain has the site ``"<name>_white"``, a priori
    standard normal, and ``name`` becomes a deterministic site. Values of a ``dgp.projection`` have no variance and need
    no ``"<name>_white"``.

    ``handlers.reparam(model, config={"h": dgp.mcmc.NonCentered()})`` for one layer, ``dgp.for_mcmc(model)`` for all.

    Raises:
        ValueError: the site does not hold function values.

    Example:
        >>> import numpyro, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy(2)
        >>> program = numpyro.handlers.reparam(model, config={"h": dgp.mcmc.NonCentered()})
        >>> sites = numpyro.handlers.trace(numpyro.handlers.seed(program, 0)).get_trace(X, y)
        >>> [(name, site["type"]) for name, site in sites.items() if name.startswith("h")]
        [('h_white', 'sample'), ('h', 'deterministic')]
    """

    __repr__ = brief

    def __call__(self, name: str, fn: dist.Distribution, obs: Array | None) -> tuple[None, Array]:
        values: Any = unwrap(fn)
        expect(
            _is_computed(values) and obs is None,
            f"{name!r} to hold unobserved function values",
            f"{('an observed ' if obs is not None else 'a ')}{type(values).__name__}",
            "use it on hidden layers, and numpyro.infer.reparam.LocScaleReparam on other sites",
        )
        of_function = declared_kind(values) is not None
        values = values.expand(row_shape(fn)) if of_function else values
        if declared(values).determined:
            return None, values.loc
        shape = fn.event_shape if of_function else values.white_shape
        white = numpyro.sample(f"{name}_white", StandardNormal(shape, values.loc.dtype, fn.batch_shape))
        if white.shape != (*fn.batch_shape, *shape):
            raise expected(
                f"values of shape {(*fn.batch_shape, *shape)} for '{name}_white', one per datum",
                f"{white.shape}, those of the data of the chain",
                "predict by dgp.Posterior(model, samples=mcmc.get_samples()), which draws them anew for new data",
            )
        return None, values.from_white(white)  # mu + L e


def for_mcmc(
    model: Callable[..., Any],
    params: Mapping[str, Array] | None = None,
    *,
    noncentered: bool = True,
    collapse: Collapse = "auto",
    guide: Callable[..., Any] | None = None,
) -> Prepared:
    r"""Prepare ``model`` for MCMC: non-centred hidden layers, ``numpyro.param`` sites fixed at given values, the last
    layer integrated out.

    ``MCMC(NUTS(model))`` runs on the bare program too. ``for_mcmc`` adds the parameterisation that mixes, and raises
    errors for programs for which NUTS would silently sample the wrong distribution. A bare program cannot know whether
    NUTS or an autoguide runs it, so only ``dgp.diagnostics.to_arviz`` warns of centred chains.

    **Integrated layers.** The inducing values v of a layer under Gaussian likelihoods only, as in
    ``dgp.Likelihood(f(h), lambda v: dist.Normal(v, noise))``, are integrated out in closed form given all other sites,
    whose posterior is unchanged: the density of the program is

    .. math:: \log \int N(v; 0, I)\, e^{\mathcal L(v)}\, dv
              = c + \tfrac12 b^\top (I + \Phi)^{-1} b - \tfrac12 \log\lvert I + \Phi\rvert, \qquad
              \mathcal L(v) = c + b^\top v - \tfrac12 v^\top \Phi v ,

    with the log density :math:`\mathcal L(v)` of the observations. It is Titsias' bound where the likelihood has
    ``collapse="bound"``, and the FITC density where it has ``collapse="marginal"``. The site of v becomes
    deterministic, an exact draw from its posterior given the other sites, so that ``mcmc.get_samples()`` has the usual
    sites.

    **Coordinates of a guide.** With a fitted guide the program is sampled in the standard normal numbers
    :math:`\epsilon` that the guide draws its sites :math:`T(\epsilon)` from, with the density
    :math:`p(T(\epsilon), y)\, \lvert\det \partial T / \partial \epsilon\rvert`. The posterior is the same, and close to
    N(0, I) where the guide is good. The sites are ``"<name>_white"``; those of the program are deterministic. With
    ``NUTS(program, init_strategy=numpyro.infer.init_to_sample)`` chains start at draws of the guide.

    Args:
        model: the program.
        params: values for its ``numpyro.param`` sites, for example ``svi_result.params``; with a guide, for the
            parameters of the guide too.
        noncentered: put every layer's values in the form of :class:`NonCentered`. A guide has its own form.
        collapse: integrate layers out: wherever possible (``"auto"``), never (``False``), or at least one, with an
            error that names the obstacle (``True``).
        guide: a fitted guide of ``model`` made of Gaussians, such as ``dgp.guides.InducingPoint(model)``.

    Returns:
        A program for ``NUTS``, with the same arguments. It can be pickled, and ``MCMC`` objects with it, if ``model``
        can.

    Raises:
        ValueError: a model that is not a function or is prepared already, NaN in the parameters, a guide without
            parameters or without Gaussians, or invalid settings; when run, if a plate subsamples, a ``numpyro.param``
            site has no value, broadcasting or an index beyond the end of an array makes observations count several
            times, ``collapse=True`` and no layer can be integrated, or a handler around the prepared program conditions
            a site that it computes, such as an integrated layer, or ``dgp.minibatch`` counts more rows than
            there are; when NUTS runs it, if it observes nothing.

    Example:
        >>> import jax, numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS
        >>> import numpyro_dgp as dgp
        >>> def model(X, y=None):
        ...     noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0))
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X[::4]))
        ...     with numpyro.plate("data", len(X)):
        ...         numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, noise)), obs=y)
        >>> X = jnp.linspace(0, 1, 12)[:, None]
        >>> mcmc = MCMC(NUTS(dgp.for_mcmc(model)), num_warmup=20, num_samples=20, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), X, jnp.sin(X[:, 0]))
        >>> {name: draws.shape for name, draws in mcmc.get_samples().items()}
        {'f': (20, 3), 'noise': (20,)}

    Source: Titsias (2009) for the integral; Hoffman et al. (2019) for the coordinates of a guide.
    """

    expect(not isinstance(model, Prepared), "a program", "a prepared one", "call for_mcmc once, with all params")
    expect(callable(model), "a program, a function", type(model).__name__)
    expect(isinstance(collapse, bool) or collapse == "auto", 'collapse to be "auto", True or False', repr(collapse))
    params = require_params(params)
    if guide is not None:
        require_guide(guide, params)
        expect(noncentered, "guide= or noncentered=False", "both", "the coordinates are those of the guide")
    return Prepared(model, params, noncentered, collapse, guide)


def prepared(
    model: Callable[..., Any],
    params: Mapping[str, Array] | None = None,
    *,
    noncentered: bool = True,
    collapse: Collapse = "auto",
) -> Prepared:
    """:func:`for_mcmc`, unless the program is prepared already.

    Args:
        model: the program.
        params: the argument of ``for_mcmc``, as are the others.
        noncentered: see ``params``.
        collapse: see ``params``.

    Raises:
        ValueError: other settings than the default ones for a program that has its own.
    """
    if not isinstance(model, Prepared):
        return for_mcmc(model, params, noncentered=noncentered, collapse=collapse)
    if params is not None or noncentered is not True or collapse != "auto":
        what = "no params, noncentered or collapse for a program of for_mcmc, which has its own"
        raise expected(what, "some", "give them to for_mcmc")
    return model


def sampled_program(model: Callable[..., Any]) -> Callable[..., Any]:
    """The program whose sites have the posterior samples as values: ``model`` without integrated layers and without the
    coordinates of a guide."""
    return _changed(model, collapse=False, guide=None)


def centred_program(model: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`sampled_program` with the values of layers as sample sites, which posterior samples include too."""
    return _changed(model, collapse=False, guide=None, noncentered=False)


def _changed(model: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """A prepared program with other settings; others as they are."""
    return dataclasses.replace(model, **settings) if isinstance(model, Prepared) else model


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """The result of :func:`for_mcmc`; its fields are the arguments."""

    model: Callable[..., Any]
    params: dict[str, Array]
    noncentered: bool
    collapse: Collapse
    guide: Callable[..., Any] | None

    def __repr__(self) -> str:
        return described(self, vars(self), of=for_mcmc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = indexable((args, kwargs))
        program = require_sound(self.model, args, kwargs)
        observes = program is None or bool(program.observed_plates)
        if observes and not inside_transformation():  # once, where a chain begins
            require_observations_apart(handlers.substitute(self.model, data=self.params), args, kwargs)
        forgotten = frozenset() if program is None or observes else program.ends
        given = handlers.substitute(data=self.params)
        observed = observed_only(forgotten)
        rows = (ALL_ROWS, WHOLE_DATA) if observes else (WHOLE_DATA,)
        with require(*rows, FIXED_PARAMETERS), observed, given:
            if self.collapse is False and self.guide is None:
                with _ConditionsInside():
                    return self._run(args, kwargs, observes)
            layers, on_data = layers_to_integrate(self.model, args, kwargs, self.params, self.collapse)
            with _ConditionsInside(layers):
                if on_data and self.guide is not None:
                    insist = self.collapse is True
                    return run_in_coordinates(self.model, self.guide, self.params, layers, insist, args, kwargs)
                with Integrate(layers) as finish:
                    result = self._run(args, kwargs, observes)
                finish()
                return result

    def position_of(
        self, values: Mapping[str, Array], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Array]:
        """The position of one draw of the sites, in the coordinates of the guide.

        Args:
            values: by site.
            args: arguments of the program.
            kwargs: its keyword arguments.
        """
        assert self.guide is not None
        layers, _ = layers_to_integrate(self.model, args, kwargs, self.params, self.collapse)
        return numbers_behind(self.guide, self.params, layers, values, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], observes: bool) -> Any:
        rows = nullcontext() if observes else rows_of_chain()
        with handlers.reparam(config=_noncenter if self.noncentered else {}), rows:
            return self.model(*args, **kwargs)


class _ConditionsInside(Messenger):
    """Handler that raises where an outer handler conditions a site that is computed instead of sampled: an integrated
    layer, or non-centred values. NumPyro would ignore the condition.

    Draws of a chain, which hold these numbers too, may be conditions, and anything may be substituted, as NumPyro does.

    Args:
        layers: the sites of inducing values that are integrated.

    Raises:
        ValueError: when a program has run that has such a site.
    """

    def __init__(self, layers: frozenset[str] = frozenset()) -> None:
        self.layers = layers
        self.sites: Trace = {}
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] in ("sample", "deterministic"):
            self.sites[msg["name"]] = msg

    def __exit__(self, exc_type: Any, *exc: Any) -> None:
        super().__exit__(exc_type, *exc)
        if exc_type is not None:
            return
        latent = {n for n, site in self.sites.items() if site["type"] == "sample" and not site["is_observed"]}
        values = {n: site["value"] for n, site in self.sites.items() if site["type"] == "deterministic"}
        behind = {n.removesuffix("_white") for n in latent if n.endswith("_white")}
        together = bool(behind - values.keys())  # a guide that draws all sites as one
        computed = [n for n in values if together or n in behind or n in self.layers]
        if found := [n for n in computed if _is_conditioned(n, values[n])]:
            raise expected(
                "conditions on sites that the program samples",
                f"one on {', '.join(map(repr, found))}, which it computes from other sites",
                "condition the program first, dgp.for_mcmc(handlers.condition(model, data={...}))",
            )


def _is_conditioned(name: str, value: Array) -> bool:
    """Whether handlers outside of the program make an observation of a latent site with this value."""
    msg: Message = dict(type="sample", name=name, fn=dist.Delta(value), args=(), value=value, is_observed=False)
    msg |= {"kwargs": {"rng_key": None, "sample_shape": ()}, "scale": None, "cond_indep_stack": [], "infer": {}}
    for handler in active():
        if isinstance(handler, handlers.condition | handlers.scope | handlers.block) and not msg.get("stop"):
            handler.process_message(msg)
    return bool(msg["is_observed"])


def _noncenter(msg: Message) -> Reparam | None:
    return NonCentered() if not msg["is_observed"] and _is_computed(unwrap(msg["fn"])) else None


def _is_computed(fn: Any) -> bool:
    """Whether values are those of a function, or of a process whose every value depends on several white numbers."""
    return is_function_values(fn) or (is_drawn_from_white(fn) and not fn.each_by_its_own)
