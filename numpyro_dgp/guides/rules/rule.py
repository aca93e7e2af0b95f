"""Rules: a rule is called at a latent site while the program runs, and returns its variational distribution.

The parameters of that distribution are ``numpyro.param`` sites called ``"<site>_<prefix>_<parameter>"``, created
inside the plates of the site, so that parameters per datum are subsampled with the data.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_dgp._checks import caller, expect, expected
from numpyro_dgp._fields import Checked
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.site_distribution import declared
from numpyro_dgp.math.quadrature import Nodes

__all__ = ["GaussianParameters", "Rule", "SiteContext", "initial_scale", "require_site"]

# An inner layer starts almost deterministic, so that the first steps fit a shallow model. The code published with
# Salimbeni (2020) has 1e-5; in the logarithm that is a thousand steps of Adam away from the prior, and 1e-2 serves as
# well (docs/numerics.md).
INNER_SCALE = 1e-2


@dataclasses.dataclass(frozen=True)
class SiteContext:
    """A latent site of the program, as it is passed to a rule.

    Args:
        name: of the site, with the prefixes of scopes inside the program.
        fn: the model's distribution at the site, given all values drawn before it.
        prefix: goes into the names of parameters.
        in_plate: whether the site lies in a plate.
        rows_in_event: axes of rows of function values that ``to_event`` made part of the event.
        is_inner: whether it holds the inducing values of an inner layer.
        initial: gives the initial value of the site, over all data.
        data: gives the inputs and observations in the plates of the site, as columns, for the rows of the minibatch.
        below: gives the draw of the inducing values of the layer below, for rules that define ``follows``; ``None``
            where they name no site.
        at_rows: gives the values of the layer's function wherever the program calls it, in a run at other rows, for
            rules that set ``follows_layers``. It takes the name of the argument that holds the inputs (``None`` for the
            first), a function from these inputs to other rows, and one from the message of a latent to its value there.
        require_sound: looks at the program where its parameters are created.

    Raises:
        ValueError: a parameter is created for a program in which what all rows share depends on observations.

    Example:
        >>> import numpyro_dgp as dgp
        >>> class Show(dgp.guides.Prior):
        ...     def __call__(self, site):
        ...         print(site.name, site.prefix, type(site.fn).__name__, site.in_plate, site.is_inner())
        ...         return super().__call__(site)
        >>> model, X, y = dgp.testing.toy(2)
        >>> shapes = dgp.testing.parameter_shapes(dgp.guides.MeanField(model, inducing=Show(), hidden=Show()), X, y)
        f auto InducingPrior False True
        g auto InducingPrior False False
        h auto FunctionValues True False
    """

    name: str
    fn: dist.Distribution
    prefix: str
    in_plate: bool
    rows_in_event: int
    is_inner: Callable[[], bool]
    initial: Callable[[], Array]
    data: Callable[[], Array]
    below: Callable[[], Array | None]
    at_rows: Callable[[str | None, Callable[[Array], Array], Callable[[dict[str, Any]], Array]], list[Any]]
    require_sound: Callable[[], None]

    __repr__ = brief

    def param(
        self, name: str, init: Callable[[], Array], *, event_dim: int | None = None, constraint: Any = constraints.real
    ) -> Array:
        """A variational parameter; ``init`` runs only when it is created."""

        def start(_: Any) -> Array:
            self.require_sound()
            return init()

        kwargs = {"event_dim": event_dim + self.rows_in_event} if self.in_plate and event_dim is not None else {}
        return numpyro.param(f"{self.name}_{self.prefix}_{name}", start, constraint=constraint, **kwargs)


class GaussianParameters(NamedTuple):
    """Which parameters of a rule are the mean and the scale of a Gaussian, for natural gradients.

    Args:
        scale: name of the parameter that holds triangular factors, or standard deviations; ``"loc"`` holds means.
        diagonal: whether it holds standard deviations.

    Example:
        >>> from numpyro_dgp.guides import Diagonal, Full
        >>> Full().gaussian
        GaussianParameters(scale='scale_tril', diagonal=False)
        >>> Diagonal().gaussian
        GaussianParameters(scale='scale', diagonal=True)
    """

    scale: str
    diagonal: bool


class Rule(Checked):
    """From a latent site to its variational distribution: a subclass defines ``__call__(site)``.

    A rule is a frozen dataclass of its settings. A guide also reads these attributes and methods of it:

    ==================  ==========================================================================================
    ``follows_model``   the distribution is the model's own, at any inputs, and has no parameters
    ``gaussian``        its parameters are those of a Gaussian, for natural gradients
    ``num_nodes``       it is a quadrature rule of that many nodes for a latent per datum, given by ``nodes``
    ``follows``         the site of the inducing values that its distribution depends on, ``site.below()``
    ``follows_layers``  it depends on the inducing values of all layers below, through ``site.at_rows(...)``
    ``only_for``        the one argument of a guide that takes it, in addition to ``sites``
    ==================  ==========================================================================================

    Example:
        A rule for a hidden layer whose values stay near the inputs of the layer, whatever its function is:

        >>> import dataclasses, numpyro, jax.numpy as jnp, numpyro_dgp as dgp
        >>> from numpyro.distributions import constraints
        >>> from numpyro_dgp.functions.function_values import FunctionValues
        >>> @dataclasses.dataclass(frozen=True)
        ... class NearInputs(dgp.extend.Rule):
        ...     start: float = 0.1
        ...     def __call__(self, site):
        ...         scale = site.param("scale", lambda: jnp.array(self.start), constraint=constraints.positive)
        ...         return FunctionValues(jnp.broadcast_to(site.fn.inputs, site.fn.shape()), scale**2)
        >>> model, X, y = dgp.testing.toy(2)
        >>> guide = dgp.guides.InducingPoint(model, sites={"h": NearInputs(0.01)})
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     bool(abs(guide(X, y)["h"] - X).max() < 0.05)
        True
    """

    follows_model: ClassVar[bool] = False
    gaussian: ClassVar[GaussianParameters | None] = None
    num_nodes: ClassVar[int | None] = None
    follows_layers: ClassVar[bool] = False
    only_for: ClassVar[str | None] = None

    __repr__ = brief

    def __call__(self, site: SiteContext) -> dist.Distribution:
        """The variational distribution of a site."""
        raise NotImplementedError

    def follows(self, name: str, order: tuple[str, ...]) -> str | None:
        """The inducing site that the inducing values at ``name`` depend on; its values are then drawn, not integrated.

        Args:
            name: of the site.
            order: all inducing sites, in the order of the program.
        """
        return None

    def nodes(self, dim: int, dtype: Any) -> Nodes:
        """Points (K, dim) and log weights (K,) of a rule with ``num_nodes``."""
        raise NotImplementedError


def initial_scale(scale: float | None, site: SiteContext) -> float:
    """Initial standard deviation of a Gaussian over inducing values, relative to the prior."""
    if scale is not None:
        return scale
    return INNER_SCALE if site.is_inner() else 1.0


def require_rows(rule: Rule, site: SiteContext, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise for parameters of an exact process at other rows, or above several values of a latent at once.

    Args:
        rule: the rule.
        site: the values of an exact process.
        got: the shape of a parameter with one number per value.
        expected: its shape at the rows of this call.

    Raises:
        ValueError: the shapes differ.
    """
    expect(
        len(expected) <= len(got) or expected[-1] != got[-1],
        f"the exact process at {site.name!r} to have one value at each row",
        f"parameters of shape {got} where this call needs {expected}",
        "use dgp.Points for the layer, or guides.InducingPoint() with latent=guides.Normal()",
        f"rule {type(rule).__name__}",
    )
    expect(
        got == expected,
        f"the exact process at {site.name!r} at the rows of the fit",
        f"shape {got} where this call needs {expected}",
        "for other rows call f.condition(X, v), with the inputs X of the fit, at those of the call",
        f"rule {type(rule).__name__}",
    )


def warn_of_rows(name: str) -> None:
    """Warn that values of an exact process are used at rows that may not be those of the fit.

    Args:
        name: of the site of the values.
    """
    warnings.warn(
        f"{caller()}: expected the rows of the fit, in their order, in a call without observations, since the values "
        f"of the exact process at {name!r} are known there only: at other inputs of equal number they are wrong; for "
        "those keep the inputs X of the fit outside the model and call f.condition(X, v)",
        stacklevel=4,
    )


def require_site(kind: type | tuple[type, ...], rule: Rule, site: SiteContext, what: str) -> None:
    """Raise for a site to which a rule does not apply.

    Args:
        kind: classes that the model's distribution there may be of.
        rule: the rule.
        site: the site.
        what: a word for ``kind`` in the message.

    Raises:
        ValueError: a distribution of another class.
    """
    if not isinstance(site.fn, kind):
        advice = declared(site.fn).suggested_rule
        raise expected(
            f"site {site.name!r} to be {what}",
            type(site.fn).__name__,
            f"choose another rule for it in sites={{{site.name!r}: {advice}}}",
            f"rule {type(rule).__name__}",
        )
