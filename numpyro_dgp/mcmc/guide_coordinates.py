r"""A program in the coordinates of a fitted guide.

A guide of Gaussians draws its sites from standard normal numbers, :math:`z = T(\epsilon)`, one site after the other.
The density of the program in these coordinates is

.. math:: p(T(\epsilon), y)\, \lvert \det \partial T / \partial \epsilon \rvert
          = N(\epsilon; 0, I)\, \frac{p(T(\epsilon), y)}{q(T(\epsilon))} ,

which is standard normal if the guide is the exact posterior. For any guide, its distribution is the posterior of the
program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import AutoContinuous, AutoDelta
from numpyro.primitives import Messenger

from numpyro_dgp._checks import expect, expected
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import FIXED_PARAMETERS, WHOLE_DATA, require
from numpyro_dgp.analysis.sites import Message, Trace, total_log_prob, unwrap
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.functions.weights import StandardNormal
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.guides.record import follows_model, record_of
from numpyro_dgp.guides.rules.pointwise import Delta, Normal
from numpyro_dgp.guides.rules.rule import Rule, SiteContext
from numpyro_dgp.inference.white_numbers import Coordinates, coordinates_of, is_drawn_from_white
from numpyro_dgp.mcmc.integrated_layers import Integrate

__all__ = ["LOG_RATIO", "numbers_behind", "require_guide", "run_in_coordinates"]

Program = Callable[..., Any]
LOG_RATIO = "guide_ratio"
"""The site of the log density of a program over that of the guide, both at the values of the numbers."""
# Standard deviation, on the unconstrained scale, of the coordinates of a site that the guide has a point for.
_POINT_SCALE = 0.1


def require_guide(guide: Any, params: Mapping[str, Array]) -> None:
    """Raise a ``ValueError`` unless a program can be sampled in the coordinates of ``guide``."""
    expect(
        callable(guide) and not isinstance(guide, type),
        "the guide of a fit",
        type(guide).__name__,
        "for_mcmc(model, guide=guide, params=result.params)",
    )
    expect(
        not adapted(guide).is_collapsed,
        "a guide that draws inducing values by parameters of its own",
        "Collapsed",
        "use for_mcmc(model, collapse=True), or a guide such as dgp.guides.InducingPoint(model)",
    )
    expect(
        not isinstance(adapted(guide).companion, AutoDelta),
        "a guide of Gaussians",
        "AutoDelta",
        "use guides.Delta() or AutoNormal",
    )
    expect(params, "the parameters of the guide", "none", "for_mcmc(model, guide=guide, params=result.params)")


def run_in_coordinates(
    model: Program,
    guide: Program,
    params: Mapping[str, Array],
    layers: frozenset[str],
    insist: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """One run of ``model`` in the coordinates of ``guide``.

    It opens a site for the numbers of every site of the guide, a factor with the rest of the density, and
    deterministic sites with the values of the sites of the program.

    Args:
        model: the program.
        guide: the guide.
        params: parameters of both.
        layers: sites of inducing values that are integrated, where the guide draws them on their own.
        insist: whether it is an error if it does not.
        args: arguments of both.
        kwargs: keyword arguments of both.
    """
    run, passes_on = partial(_run_guide, guide, params, args, kwargs), _passes_on(guide)
    shapes: dict[str, Any] = {}
    together: set[str] = set()

    def find_shapes() -> None:
        sites, found = run(_FromWhite({}, passes_on))
        shapes.update(found)
        together.update(layers & sites.keys() - found.keys())

    jax.eval_shape(find_shapes)
    if insist and together:
        raise expected(
            f"a guide that draws {sorted(together)} on their own for collapse=True",
            f"{type(guide).__name__}, which draws all sites together",
            "use dgp.guides.InducingPoint, or leave collapse out",
        )
    layers = layers - together
    white = {
        name: numpyro.sample(f"{name}_white", StandardNormal(shape, dtype))
        for name, (shape, dtype) in shapes.items()
        if name not in layers
    }
    sites, _ = run(_FromWhite(white, passes_on))
    drawn = {name: site for name, site in sites.items() if site["type"] == "sample" and name not in layers}
    values = {name: site["value"] for name, site in drawn.items()}
    with _alone(params), handlers.trace() as sites, handlers.substitute(data=values), handlers.seed(rng_seed=0):
        with Integrate(layers) as finish:
            model(*args, **kwargs)
        finish()
    _require_drawn(sites, values)
    # Where q is the model's own conditional, p / q is one.
    same = {name for name, site in drawn.items() if follows_model(site)}
    # log p(T(e), y)
    log_p = sum(total_log_prob(site) for name, site in sites.items() if site["type"] == "sample" and name not in same)
    log_q = sum(total_log_prob(site) for name, site in drawn.items() if name not in same)  # log q(T(e))
    numpyro.factor(LOG_RATIO, log_p - log_q)  # the white sites have N(e; 0, I)
    for name, site in sites.items():
        latent = site["type"] == "sample" and not site["is_observed"]
        if latent or site["type"] == "deterministic":
            numpyro.deterministic(name, site["value"])


def numbers_behind(
    guide: Program,
    params: Mapping[str, Array],
    layers: frozenset[str],
    values: Mapping[str, Array],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Array]:
    """The standard normal numbers from which a guide draws given values of its sites, by the sites that
    :func:`run_in_coordinates` opens.

    Args:
        guide: the guide.
        params: its parameters.
        layers: sites of inducing values that are integrated, which need no values.
        values: one draw of the sites of the program.
        args: arguments of the guide.
        kwargs: its keyword arguments.

    Raises:
        ValueError: a site with fewer values than numbers.
    """
    numbers = _ToWhite(values, layers, _passes_on(guide))
    _run_guide(guide, params, args, kwargs, numbers)
    return {f"{name}_white": white for name, white in numbers.white.items() if name not in layers}


@contextmanager
def _alone(params: Mapping[str, Array]) -> Iterator[None]:
    """A separate run, in which ``numpyro.param`` sites have the values ``params``."""
    with handlers.block(), require(WHOLE_DATA, FIXED_PARAMETERS), handlers.substitute(data=dict(params)):
        yield


def _run_guide(
    guide: Program, params: Mapping[str, Array], args: Any, kwargs: Any, numbers: _FromWhite
) -> tuple[Trace, dict[str, Any]]:
    """Its trace, and shape and dtype of the numbers that each of its sites is drawn from."""
    program = adapted(guide).with_rules(lambda rule: _AroundPoint() if isinstance(rule, Delta) else rule)
    with _alone(params), handlers.trace() as drawn, numbers as shapes, handlers.seed(rng_seed=0):
        program(*args, **kwargs)
    return drawn, shapes


def _passes_on(guide: Program) -> bool:
    return isinstance(adapted(guide).companion, AutoContinuous)


class _FromWhite(Messenger):
    """Handler that computes the value of every sample site of a guide from standard normal numbers. In a ``with``
    statement, it returns shape and dtype of the numbers by site.

    Args:
        white: the numbers by site; zeros where there are none.
        passes_on: whether sites of points hold what one of NumPyro's autoguides has drawn at another site.
    """

    def __init__(self, white: Mapping[str, Array], passes_on: bool) -> None:
        self.white, self.passes_on = dict(white), passes_on
        self.shapes: dict[str, tuple[tuple[int, ...], Any]] = {}
        super().__init__()

    def __enter__(self) -> dict[str, tuple[tuple[int, ...], Any]]:  # type: ignore[override]
        super().__enter__()
        return self.shapes

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["value"] is not None:
            return
        name, fn = msg["name"], unwrap(msg["fn"])
        if declared(fn).determined:
            msg["value"] = jnp.broadcast_to(fn.loc, msg["fn"].shape())
            return
        if isinstance(fn, dist.Delta) and self.passes_on and not record_of(msg).name:
            msg["value"] = fn.v
            return
        found = coordinates_of(msg["fn"])
        if found is None:
            raise expected(
                "a guide of Gaussians",
                f"{type(fn).__name__} at {name!r}",
                f"give that site dgp.guides.Normal(), sites={{{name!r}: dgp.guides.Normal()}}, or leave guide= out",
            )
        self.shapes[name] = found.shape, found.dtype
        white = self.numbers(msg, found)
        msg["value"] = found.value(white)
        if is_drawn_from_white(msg["fn"]):
            msg["intermediates"] = [white]

    def numbers(self, msg: Message, found: Coordinates) -> Array:
        """Those of a site."""
        return self.white.get(msg["name"], jnp.zeros(found.shape, found.dtype))


class _ToWhite(_FromWhite):
    """Handler that sets every sample site of a guide to a given value; ``white`` collects the standard normal numbers
    of it.

    Args:
        values: by site.
        layers: sites that stay at zeros.
        passes_on: as above.
    """

    def __init__(self, values: Mapping[str, Array], layers: frozenset[str], passes_on: bool) -> None:
        self.values, self.layers = values, layers
        super().__init__({}, passes_on)

    def numbers(self, msg: Message, found: Coordinates) -> Array:
        name = msg["name"]
        if name in self.layers:
            return super().numbers(msg, found)
        if math.prod(found.shape) > math.prod(msg["fn"].shape()):
            raise expected(
                f"samples= of a program without {type(unwrap(msg['fn'])).__name__}",
                f"one at {name!r}, whose values do not determine the numbers that they are drawn from",
                "leave samples= out, the bound from below needs none",
            )
        self.white[name] = found.white(jnp.asarray(self.values[name], found.dtype))
        return self.white[name]


def _require_drawn(sites: Trace, values: Mapping[str, Array]) -> None:
    latent = [n for n, site in sites.items() if site["type"] == "sample" and not site["is_observed"]]
    expect(
        not (missing := [name for name in latent if name not in values]),
        "a guide with a value for every latent site of the program",
        f"none for {missing}",
        "pass the guide that was fitted to this program",
    )
    expect(
        not (observed := [name for name in values if name in sites and sites[name]["is_observed"]]),
        "a guide without values for what the program observes",
        f"some for {observed}",
        "pass the guide that was fitted to the program with its conditions",
    )


@dataclasses.dataclass(frozen=True)
class _AroundPoint(Rule):
    """A Gaussian on the unconstrained scale around the point of ``Delta``."""

    def __call__(self, site: SiteContext) -> dist.Distribution:
        loc = biject_to(site.fn.support).inv(Delta()(site).v)  # type: ignore[attr-defined]
        given = {"loc": loc, "scale": jnp.full_like(loc, _POINT_SCALE)}
        return Normal()(_Given(**vars(site), given=given))


@dataclasses.dataclass(frozen=True)
class _Given(SiteContext):
    """A site with values for the parameters of its rule."""

    given: dict[str, Array]

    def param(self, name: str, init: Any, **options: Any) -> Array:
        return self.given[name]
