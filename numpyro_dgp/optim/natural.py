r"""Natural gradients for Gaussian posteriors, together with any optax optimiser for the other parameters.

There are seven coordinate systems of a Gaussian, with the natural gradient in each.

A Gaussian :math:`N(m, \Sigma)` over n numbers, in batches of any shape, as a pair of arrays (..., n) and (..., n, n):

====================  =======================================================  =====================================
``"mean/sqrt"``       :math:`m,\; R` lower triangular                          :math:`R R^\top = \Sigma`
``"mean/cov"``        :math:`m,\; \Sigma`
``"mean/log"``        :math:`m,\; \log \Sigma`                                 the matrix logarithm
``"natural"``         :math:`\Sigma^{-1} m,\; -\tfrac12 \Sigma^{-1}`
``"natural/sqrt"``    :math:`\Sigma^{-1} m,\; F` lower triangular              :math:`F F^\top = \tfrac12 \Sigma^{-1}`
``"natural/log"``     :math:`\Sigma^{-1} m,\; \log(\tfrac12 \Sigma^{-1})`      the matrix logarithm
``"expectation"``     :math:`m,\; \Sigma + m m^\top`
====================  =======================================================  =====================================

With ``diagonal=True`` both arrays have one shape, entries are independent Gaussians, and the formulas hold elementwise.
The records of a guide name its Gaussian posteriors and their parameters.

Source: Salimbeni (2020), chapter 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.optim import _NumPyroOptim

from numpyro_dgp._checks import expect, expect_kind, expected, is_concrete, taking_the_loss
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.program import structure
from numpyro_dgp.analysis.sites import Message, Trace, site_kind
from numpyro_dgp.guides.any_guide import adapted
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.guides.record import record_of
from numpyro_dgp.math.matrix_ops import DenseOperations, DiagonalOperations

__all__ = [
    "Coordinates",
    "GaussianSite",
    "NaturalGradient",
    "Pair",
    "convert",
    "gaussian_sites",
    "log_linear",
    "natural_gradient",
    "natural_step",
    "require_coordinates",
    "sample",
]

Coordinates = Literal["mean/sqrt", "mean/cov", "mean/log", "natural", "natural/sqrt", "natural/log", "expectation"]
Pair = tuple[Array, Array]


def _to(target: Coordinates, m: Array, R: Array, ops: Any) -> Pair:
    """From mean and root to other coordinates."""
    if target == "mean/sqrt":
        return m, R
    if target == "expectation":
        return m, ops.gram(R) + ops.outer(m)  # m, Sigma + m m'
    if target.startswith("mean"):
        covariance = ops.gram(R)
        return m, ops.log(covariance) if target == "mean/log" else covariance
    back = ops.transpose(ops.inverse(R))  # R^-T: back back' = Sigma^-1
    first = ops.apply(back, ops.apply(ops.transpose(back), m))  # Sigma^-1 m
    half = 0.5 * ops.gram(back)  # Sigma^-1 / 2
    if target == "natural":
        return first, -half
    return first, ops.root(half) if target == "natural/sqrt" else ops.log(half)


def _from(source: Coordinates, first: Array, second: Array, ops: Any) -> Pair:
    """From other coordinates to mean and root, with a positive diagonal."""
    if source == "mean/sqrt":
        return first, ops.positive(second)
    if source == "expectation":
        return first, ops.root(second - ops.outer(first))  # m, root of (Sigma + m m') - m m'
    if source.startswith("mean"):
        return first, ops.root(ops.exp(second) if source == "mean/log" else second)
    half = {"natural": lambda a: -a, "natural/sqrt": ops.gram, "natural/log": ops.exp}[source](second)
    R = ops.inverse_root(2 * half)  # 2 half = Sigma^-1
    return ops.apply(R, ops.apply(ops.transpose(R), first)), R  # m = Sigma (Sigma^-1 m)


def require_coordinates(name: str) -> None:
    """Raise unless ``name`` is one of the coordinates."""
    if name not in get_args(Coordinates):
        names = ", ".join(get_args(Coordinates))
        raise expected(f"coordinates among {names}", repr(name), 'try "natural", or "mean/sqrt"')


def convert(pair: Pair, source: Coordinates, target: Coordinates, *, diagonal: bool = False) -> Pair:
    """The same Gaussians in other coordinates.

    The result is NaN where ``pair`` is not a Gaussian, for example where ``"mean/cov"`` holds a matrix that is not
    positive definite. Factors come back with a positive diagonal.

    Args:
        pair: two arrays (..., n) and (..., n, n); of one shape when diagonal.
        source: the coordinates of ``pair``.
        target: the coordinates wanted.
        diagonal: whether the entries are independent Gaussians.

    Raises:
        ValueError: unknown coordinates.

    Example:
        >>> import jax.numpy as jnp
        >>> first, second = convert((jnp.ones(1), jnp.full((1, 1), 0.5)), "mean/sqrt", "natural")
        >>> print(first, second)
        [4.] [[-2.]]

    Source: Salimbeni (2020), section 3.3.
    """
    for name in (source, target):
        require_coordinates(name)
    ops = DiagonalOperations if diagonal else DenseOperations
    return pair if source == target else _to(target, *_from(source, *pair, ops), ops)


def sample(
    key: Array, pair: Pair, source: Coordinates, sample_shape: tuple[int, ...] = (), *, diagonal: bool = False
) -> Array:
    r"""Draws :math:`m + R\epsilon` of Gaussians in any coordinates, shape ``sample_shape`` + (..., n).

    Args:
        key: PRNG key.
        pair: the Gaussians.
        source: the coordinates of ``pair``.
        sample_shape: shape of independent draws.
        diagonal: whether the entries are independent Gaussians.
    """
    m, R = convert(pair, source, "mean/sqrt", diagonal=diagonal)
    white = jax.random.normal(key, (*sample_shape, *m.shape), m.dtype)
    return m + (DiagonalOperations if diagonal else DenseOperations).apply(R, white)


def natural_gradient(
    natural: Pair, slope: Pair, coordinates: Coordinates, *, diagonal: bool = False
) -> tuple[Pair, Pair]:
    r"""A Gaussian and the natural gradient of a loss at it, both in the coordinates :math:`\xi`.

    .. math:: \tilde\nabla_\xi\, \mathrm{loss} = \frac{\partial \xi}{\partial \theta}\,
              \frac{\partial\, \mathrm{loss}}{\partial \eta^\top}

    One product with the Jacobian of the conversion from natural coordinates :math:`\theta`, in forward mode.

    Args:
        natural: the Gaussian in natural coordinates.
        slope: derivative of the loss by its expectation coordinates :math:`\eta`.
        coordinates: :math:`\xi`.
        diagonal: whether the entries are independent Gaussians.

    Source: Salimbeni (2020), equation 3.10.
    """
    # (d xi / d theta) (d loss / d eta)
    return jax.jvp(lambda t: convert(t, "natural", coordinates, diagonal=diagonal), (natural,), (slope,))


def natural_step(
    pair: Pair, gradient: Pair, step_size: Array, coordinates: Coordinates, *, diagonal: bool = False
) -> Pair:
    r"""One step along the natural gradient from N(m, R R'), in units of that Gaussian itself.

    With :math:`v = m + R \epsilon` the Gaussian over :math:`\epsilon` is standard normal, whatever m and R: nothing is
    ill-conditioned and no digits are lost where :math:`\Sigma` is small compared with m. Natural gradients do not
    change under
    such a map, and a straight line in the coordinates of :math:`\epsilon` is one in those of v for ``"mean/sqrt"``,
    ``"mean/cov"``, ``"natural"`` and ``"expectation"``. In the three others a step differs from one in the coordinates
    of v by terms of second order.

    Args:
        pair: mean and root with a positive diagonal, ``"mean/sqrt"``.
        gradient: derivatives of the loss by both.
        step_size: :math:`\gamma`, one per Gaussian, (...,); of the shape of the means when diagonal.
        coordinates: in which the step is straight.
        diagonal: whether the entries are independent Gaussians.

    Returns:
        Mean and root after the step; NaN where the step leaves the cone of positive-definite matrices.

    Source: Salimbeni (2020), equation 3.10; the derivative of a Cholesky factor is that of Murray (2016).
    """
    ops = DiagonalOperations if diagonal else DenseOperations
    (m, R), (slope_m, slope_R) = pair, gradient
    # e = R^-1 (v - m) has mean 0 and covariance V = I, where derivatives by (mean, V) are those by eta.
    slope = ops.apply(ops.transpose(R), slope_m), ops.slope_of_gram(R, slope_R)
    start = jnp.zeros_like(m), ops.like_identity(-0.5, R)  # N(0, I) in natural coordinates
    point, direction = natural_gradient(start, slope, coordinates, diagonal=diagonal)
    ends: tuple[tuple[int, ...], ...] = ((), ()) if diagonal else ((-1,), (-2, -1))  # axes of one Gaussian
    sizes = [jnp.expand_dims(step_size, axes) for axes in ends]
    moved = point[0] - sizes[0] * direction[0], point[1] - sizes[1] * direction[1]  # xi - gamma nabla
    shift, factor = convert(moved, coordinates, "mean/sqrt", diagonal=diagonal)
    # v = m + R (shift + factor e)
    return m + ops.apply(R, shift), ops.product(R, factor)


class GaussianSite(NamedTuple):
    """The parameters of a Gaussian posterior.

    Args:
        kind: of the site: ``inducing``, ``exact``, ``hidden``, ``latent`` or ``other``.
        is_inner: whether it holds the inducing values of an inner layer.
        loc: name of the parameter that holds means.
        scale: name of the parameter that holds triangular factors, or standard deviations.
        constraint: of that parameter.
        diagonal: whether it holds standard deviations.
        plate_scale: how much a minibatch multiplies the terms of this site.
    """

    kind: str
    is_inner: bool
    loc: str
    scale: str
    constraint: Any
    diagonal: bool
    plate_scale: float


def gaussian_sites(guide: Any, sites: Trace) -> dict[str, GaussianSite]:
    """The sites whose posterior is Gaussian (on the unconstrained scale), by name.

    For guides of this package, ``AutoNormal`` and ``AutoMultivariateNormal``. The last has one Gaussian over all sites,
    whose name here is that of its auxiliary site, ``"_<prefix>_latent"``. Other guides have none: the dict is empty.

    Args:
        guide: the guide.
        sites: messages of a run of it, by name.
    """
    guide = adapted(guide)
    return _of_companion(guide.companion) | (_of_rules(sites) if guide.has_rules else {})


def _of_companion(guide: Any) -> dict[str, GaussianSite]:
    if isinstance(guide, AutoNormal):
        return _of_autonormal(guide)
    return _of_joint(guide) if isinstance(guide, AutoMultivariateNormal) else {}


def _of_rules(sites: Trace) -> dict[str, GaussianSite]:
    found: dict[str, GaussianSite] = {}
    for name, site in sites.items():
        record = record_of(site)
        if not record.is_variational or record.gaussian is None:
            continue
        scale = f"{record.param_prefix}_{record.gaussian.scale}"
        found[name] = GaussianSite(
            kind=record.kind,
            is_inner=record.is_inner_layer,
            loc=f"{record.param_prefix}_loc",
            scale=scale,
            constraint=sites[scale]["kwargs"]["constraint"],
            diagonal=record.gaussian.diagonal,
            plate_scale=_plate_scale(site),
        )
    return found


def _of_autonormal(guide: AutoNormal) -> dict[str, GaussianSite]:
    sites = guide.prototype_trace
    inner = structure(sites).inner
    return {
        name: GaussianSite(
            kind=site_kind(sites[name]),
            is_inner=name in inner,
            loc=f"{name}_{guide.prefix}_loc",
            scale=f"{name}_{guide.prefix}_scale",
            constraint=guide.scale_constraint,
            diagonal=True,
            plate_scale=_plate_scale(sites[name]),
        )
        for name in guide._init_locs
    }


def _of_joint(guide: AutoMultivariateNormal) -> dict[str, GaussianSite]:
    prefix = guide.prefix
    constraint = guide.scale_tril_constraint
    return {
        f"_{prefix}_latent": GaussianSite(
            "inducing", False, f"{prefix}_loc", f"{prefix}_scale_tril", constraint, diagonal=False, plate_scale=1.0
        )
    }


def _plate_scale(site: dict[str, Any]) -> float:
    return 1.0 if site["scale"] is None else float(site["scale"])


Params = dict[str, Array]
Schedule = Callable[[Any], Any]

# A step is halved at most this often; after that the site is left unchanged.
_HALVINGS = 30
# The smallest step of a line search, as a share of the largest.
_SMALLEST = 1e-6


def _require_positive(what: str, value: float) -> None:
    expect(
        isinstance(value, int | float | np.number | np.ndarray | jax.Array)
        and not np.ndim(value)
        and 0 < value < jnp.inf,
        f"a positive {what}",
        repr(value),
        f"try {(5 if what == 'steps' else 0.1)}",
    )


def _require_step_size(schedule: Schedule, step: int) -> None:
    """Raise unless the step size of a step is a number that is not negative."""
    found = schedule(step)
    if not is_concrete(found):
        return
    value = np.asarray(found)
    expect(
        not value.shape and 0 <= value < np.inf,
        "a schedule of step sizes that are finite and not negative",
        f"{value} at step {step}",
        "try numpyro_dgp.optim.log_linear(1e-4, 0.1, 1000)",
    )


def log_linear(initial: float, final: float, steps: int) -> optax.Schedule:
    r"""A schedule of step sizes that changes by the same factor in every step.

    .. math:: \gamma_i = \mathrm{initial}\, (\mathrm{final} / \mathrm{initial})^{\min(i / \mathrm{steps},\, 1)}

    Args:
        initial: first step size.
        final: step size after ``steps`` steps.
        steps: number of steps until then.

    Returns:
        An optax schedule: a function from the step t to the step size.

    Raises:
        ValueError: a step size that is not positive, or fewer than one step.

    Example:
        >>> from numpyro_dgp.optim import log_linear
        >>> ramp = log_linear(1e-4, 1e-1, 3)
        >>> print([f"{float(ramp(t)):.4f}" for t in range(5)])
        ['0.0001', '0.0010', '0.0100', '0.1000', '0.1000']

    Source: Salimbeni (2020), section 3.4.2.
    """
    for what, value in (("initial", initial), ("final", final), ("steps", steps)):
        _require_positive(what, value)
    change = math.log(final / initial)
    return lambda t: initial * jnp.exp(change * jnp.minimum(t / steps, 1.0))


class State(NamedTuple):
    """The state of :class:`NaturalGradient`.

    Args:
        params: unconstrained parameters.
        inner: the state of the other optimiser.
        shortened: how many steps of each site were shortened.
        size: the step size that the last line search found; ``None`` without one.
    """

    params: Params
    inner: Any
    shortened: dict[str, Array]
    size: Array | None = None


class NaturalGradient(_NumPyroOptim):
    r"""Natural-gradient steps for Gaussian posteriors, any optax optimiser for everything else, in one backward pass.

    .. math:: \xi \leftarrow \xi + \gamma\, \frac{\partial \xi}{\partial \theta}\,
              \frac{\partial \mathcal L}{\partial \eta^\top}

    with the bound :math:`\mathcal L` and :math:`\theta` natural, :math:`\eta` expectation and :math:`\xi` the chosen
    coordinates. Under a Gaussian likelihood a step of size 1 in natural coordinates goes to the optimum. A step that
    would leave the cone of positive-definite matrices is halved, for the Gaussian concerned only, until it stays
    inside, and once more, so that at least half of the precision is left; :meth:`shortened` counts.

    Use it as the optimiser: ``SVI(model, guide, NaturalGradient(guide, 0.1, optax.adam(0.01)), ELBO())``.
    Steps for sites inside a plate are relative to the single datum: rows outside the minibatch are left unchanged.

    Args:
        guide: the guide that the ``SVI`` gets: one of ours, ``AutoNormal`` or ``AutoMultivariateNormal``.
        step_size: :math:`\gamma`, a number or an optax schedule such as :func:`log_linear`.
        optimizer: an optax optimiser for all other parameters. One that needs the loss gets it (``optax.polyak_sgd``,
            ``optax.contrib.reduce_on_plateau``).
        sites: ``"last"`` for the inducing values (or exact values) of layers under a likelihood, ``"all"``
            for all inducing, exact and hidden values and latents with Gaussian posteriors, or names of sites.
        coordinates: those in which the step is a straight line, see ``docs/natural_gradients.md``.
        line_search: whether to search the size of each step, for fits to all data. ``step_size`` is the largest. From
            twice the size of the step before, or the largest, it is halved until the loss, at the same draws, has
            fallen and rises again. If no size lowers the loss, the step is a millionth of the largest.

    Raises:
        ValueError: a guide whose Gaussians are not known, a step size that is not positive, unknown coordinates, no
            optax optimiser; in the first step, an optimiser that evaluates the loss itself (``optax.lbfgs``), or names
            of sites that have no Gaussian posterior in the guide; after a step whose size in the schedule was negative
            or not finite.

    Example:
        >>> import jax, numpyro, optax, numpyro_dgp as dgp
        >>> model, X, y = dgp.testing.toy()
        >>> guide = dgp.guides.InducingPoint(model)
        >>> optim = dgp.optim.NaturalGradient(guide, 1.0, optax.adam(0.01))
        >>> svi = numpyro.infer.SVI(model, guide, optim, dgp.ELBO())
        >>> result = dgp.fit(svi, jax.random.key(0), 3, X, y, progress_bar=False)
        >>> [f"{loss:.1f}" for loss in result.losses], optim.shortened(result.state)["f"].item()  # one step is enough
        (['1188.2', '-18.3', '-18.3'], 0)

    Source: Salimbeni (2020), equation 3.10 and section 3.4; section 3.4.1 for the line search.
    """

    __repr__ = brief

    def __init__(
        self,
        guide: Guide | AutoNormal | AutoMultivariateNormal,
        step_size: float | Schedule,
        optimizer: optax.GradientTransformation,
        *,
        sites: Literal["last", "all"] | Sequence[str] = "last",
        coordinates: Coordinates = "natural",
        line_search: bool = False,
    ) -> None:
        expect_kind(
            guide,
            Guide | AutoNormal | AutoMultivariateNormal,
            "one of dgp.guides, AutoNormal or AutoMultivariateNormal",
            "for example dgp.guides.InducingPoint(model)",
        )
        require_coordinates(coordinates)
        if not callable(step_size):
            _require_positive("step_size", step_size)
        expect_kind(
            optimizer, optax.GradientTransformation, "an optax optimiser for the other parameters", "optax.adam(0.01)"
        )
        expect_kind(line_search, bool, "line_search=True or False", "True for fits to all data")
        self.guide, self.step_size, self.sites, self.coordinates = guide, step_size, sites, coordinates
        self.line_search = line_search
        self.schedule: Schedule = step_size if callable(step_size) else lambda _: step_size
        _require_step_size(self.schedule, 0)
        self.optimizer = optimizer
        super().__init__(lambda: (self._init, _without_a_loss, lambda state: state.params))

    @staticmethod
    def shortened(state: Any) -> dict[str, Array]:
        """How many steps of each site were shortened so far: from ``svi_result.state``."""
        return state.optim_state[1].shortened

    def get_params(self, state: Any) -> Params:
        """The unconstrained parameters; outside ``jit``, after a check of the size of the step that led to them."""
        count, (params, *_) = state
        if is_concrete(count) and not np.ndim(count) and count > 0:
            _require_step_size(self.schedule, int(count) - 1)
        return params

    def eval_and_update(
        self, fn: Callable[[Any], tuple], state: Any, forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Any, Any], Any]:
        """The loss and the state after one step on it, as in NumPyro's optimisers."""
        found, gradient, chosen = self._differentiate(fn, state, forward_mode_differentiation)
        return found, self._step(chosen, gradient, state, found[0], fn)

    def eval_and_stable_update(
        self, fn: Callable[[Any], tuple], state: Any, forward_mode_differentiation: bool = False
    ) -> tuple[tuple[Any, Any], Any]:
        """The same; where the loss or its gradient is not finite, the state stays and the loss is NaN."""
        (loss, aux), gradient, chosen = self._differentiate(fn, state, forward_mode_differentiation)
        sound = jnp.isfinite(loss) & jnp.isfinite(ravel_pytree(gradient)[0]).all()
        moved = jax.lax.cond(sound, lambda: self._step(chosen, gradient, state, loss, fn), lambda: state)
        return (jnp.where(sound, loss, jnp.nan), aux), moved

    def _differentiate(
        self, fn: Callable[[Any], tuple], state: Any, forward: bool
    ) -> tuple[tuple[Any, Any], Params, dict[str, GaussianSite]]:
        """The loss with its gradient, and the Gaussian posteriors of the guide, which are found while it runs."""
        sites: Trace = {}

        def note(msg: Message) -> None:
            if msg["type"] == "param" or record_of(msg).is_variational:
                sites[msg["name"]] = msg

        with each_message(after=note):
            if forward:
                gradient, found = jax.jacfwd(lambda p: (fn(p)[0], fn(p)), has_aux=True)(self.get_params(state))
            else:
                found, gradient = jax.value_and_grad(fn, has_aux=True)(self.get_params(state))
        return found, gradient, self._choose(gaussian_sites(self.guide, sites))

    def _choose(self, found: dict[str, GaussianSite]) -> dict[str, GaussianSite]:
        if self.sites == "last":
            chosen = [n for n, s in found.items() if s.kind in ("inducing", "exact") and not s.is_inner]
        elif self.sites == "all":
            chosen = [n for n, s in found.items() if s.kind != "other"]
        else:
            chosen = [self.sites] if isinstance(self.sites, str) else list(self.sites)
        self._require_sites(chosen, found)
        return {name: found[name] for name in chosen}

    def _require_sites(self, chosen: Collection[str], found: Collection[str]) -> None:
        if not chosen or not set(chosen) <= set(found):
            raise expected(
                "names of sites with Gaussian posteriors",
                f"sites={self.sites!r}",
                f"the guide has {sorted(found) or 'none'}: give the site guides.Full() or Diagonal(), or use optax",
            )

    def _init(self, params: Params) -> State:
        # Only when the guide runs is it clear which Gaussians take natural steps. The other optimiser therefore has a
        # state for all parameters, and gets a gradient of zero for those that take natural steps.
        names = _with_mean_and_scale(params, self.guide.prefix)
        if self.sites not in ("last", "all"):
            self._require_sites([self.sites] if isinstance(self.sites, str) else self.sites, names)
        count = {name: jnp.zeros((), jnp.int32) for name in names}
        size = jnp.asarray(self.schedule(0), float) if self.line_search else None
        return State(params, self.optimizer.init(params), count, size)

    def _step(
        self,
        chosen: dict[str, GaussianSite],
        gradient: Params,
        state: Any,
        loss: Array,
        fn: Callable[[Any], tuple],
    ) -> Any:
        count, (params, inner, shortened, size) = state
        own = {name for site in chosen.values() for name in (site.loc, site.scale)}
        rest = {name: jnp.zeros_like(g) if name in own else g for name, g in gradient.items()}
        optimizer = optax.with_extra_args_support(self.optimizer)
        with taking_the_loss():
            updates, inner = optimizer.update(rest, inner, params, value=loss)

        def moved(step_size: Any) -> tuple[Params, dict[str, Array]]:
            """The Gaussians after a step, and which steps were shortened."""
            new, halved = {}, {}
            for name, site in chosen.items():
                new[site.loc], new[site.scale], halved[name] = _step(
                    site,
                    (params[site.loc], params[site.scale]),
                    (gradient[site.loc] / site.plate_scale, gradient[site.scale] / site.plate_scale),  # of one datum
                    step_size,
                    self.coordinates,
                )
            return new, halved

        step_size = self.schedule(count)
        if size is not None:
            step_size = size = _search(lambda s: fn({**params, **moved(s)[0]})[0], loss, size, step_size)
        new, halved = moved(step_size)
        new = {**optax.apply_updates(params, updates), **new}
        shortened = {**shortened, **{name: shortened[name] + found for name, found in halved.items()}}
        return count + 1, State(new, inner, shortened, size)


def _with_mean_and_scale(params: Params, prefix: str) -> list[str]:
    """Sites whose parameters have the names of a mean and a scale."""
    stems = [name.removesuffix("_loc") for name in params if name.endswith("_loc")]
    found = [stem for stem in stems if {f"{stem}_scale", f"{stem}_scale_tril"} & params.keys()]
    return [f"_{prefix}_latent" if stem == prefix else stem.removesuffix(f"_{prefix}") for stem in found]


def _without_a_loss(step: Array, gradient: Params, state: State) -> NoReturn:
    raise expected("to be used by SVI", "a call of update", "call eval_and_update(loss, state)")


def _search(loss_after: Callable[[Array], Array], loss: Array, last: Array, largest: Any) -> Array:
    """The size, in halves from twice the last one, after which the loss is lowest; the smallest if none lowers it."""
    largest = jnp.asarray(largest, last.dtype)
    smallest = _SMALLEST * largest

    def attempt(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        size, best, lowest, _ = carry
        found = loss_after(size)
        better = found < lowest  # not where it is NaN
        rises = ~better & (lowest < loss)
        return size / 2, jnp.where(better, size, best), jnp.where(better, found, lowest), rises

    start = jnp.minimum(2 * last, largest), smallest, loss, jnp.zeros((), bool)
    _, best, *_ = jax.lax.while_loop(lambda carry: (carry[0] >= smallest) & ~carry[3], attempt, start)
    return best


def _step(
    site: GaussianSite, free: Pair, gradient: Pair, step_size: Any, coordinates: Coordinates
) -> tuple[Array, Array, Array]:
    """One natural step of one site: new unconstrained parameters, and whether it was shortened."""
    diagonal = site.diagonal
    transform = biject_to(site.constraint)
    pair = free[0], transform(free[1])
    # d loss / dR = (d free / dR)' d loss / d free
    _, pull = jax.vjp(transform.inv, pair[1])
    slope = gradient[0], pull(gradient[1])[0]

    def finite(arrays: Pair) -> Array:
        """Of every Gaussian, whether its numbers are finite."""
        first, second = (jnp.isfinite(a) for a in arrays)
        return first & second if diagonal else first.all(-1) & second.all((-2, -1))

    def attempt(carry: tuple[Array, Array, Array, Array, Pair]) -> tuple[Array, Array, Array, Array, Pair]:
        # The first step that stays inside the cone may end close to its boundary, where the variance is enormous. Half
        # of that step keeps at least half of the precision.
        attempts, sizes, _, outside_before, _ = carry
        new = natural_step(pair, slope, sizes, coordinates, diagonal=diagonal)
        outside = ~finite(new)
        # Where the loss is not finite, shorter steps do not help.
        outside = jax.lax.cond(jnp.any(outside), lambda: outside & finite(slope) & ~jnp.isnan(sizes), lambda: outside)
        shorten = outside | outside_before
        sizes = jnp.where(shorten, jnp.where(attempts < _HALVINGS, 0.5 * sizes, 0.0), sizes)
        return attempts + 1, sizes, shorten, outside, new

    # A step size that is none makes the parameters NaN, and so the next loss, instead of a step that is not taken.
    step_size = jnp.where((step_size >= 0) & (step_size < jnp.inf), step_size, jnp.nan)
    # The first step is made inside the loop as well: then the compiled program holds one step, and computes the step
    # size once. Otherwise XLA would compute a schedule again for every number that it multiplies.
    full = jnp.full(free[0].shape if diagonal else free[0].shape[:-1], step_size, free[0].dtype)
    yes, no = jnp.ones_like(full, bool), jnp.zeros_like(full, bool)
    attempts, *_, (m, root) = jax.lax.while_loop(
        lambda carry: jnp.any(carry[2]) & (carry[0] <= _HALVINGS + 1),
        attempt,
        (jnp.zeros((), jnp.int32), full, yes, no, pair),
    )
    return m, transform.inv(root), jnp.minimum(attempts - 1, 1)
