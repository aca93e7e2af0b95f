r"""Importance weighting: several values of every latent in one run of a guide and its model, and their weights.

With K values :math:`w^{(k)}` of the latents of one datum, drawn from q or the nodes of a rule with weights
:math:`\nu_k`, and :math:`\mathcal L_n(w) = E_{q(f)} \log p(y_n \mid f(w))`, the data term of that datum is

.. math:: \log \sum_k \omega_k, \qquad \omega_k = \tfrac1K e^{\mathcal L_n(w^{(k)})}\, p(w^{(k)}) / q(w^{(k)})
          \quad\text{or, at a node,}\quad \omega_k = \nu_k\, e^{\mathcal L_n(w^{(k)})} .

The K values, here called replicates, lie along a new first batch dimension, left of all plates. The layers above are
drawn jointly over that dimension.

``ReplicatedValues`` are those of a layer per datum, all from one draw of its function.

Source: Salimbeni (2020), equations 4.8 and 5.11.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from numpyro.distributions.util import scale_and_mask
from numpyro.primitives import Messenger

from numpyro_dgp._checks import expected
from numpyro_dgp._fields import Checked, count, flag
from numpyro_dgp._repr import brief
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.checks import another_loss
from numpyro_dgp.analysis.sites import Message, Trace, is_function_values, is_row_by_row, log_prob, unwrap
from numpyro_dgp.functions.function_values import FunctionValues, follows
from numpyro_dgp.guides.record import SiteRecord, record_of

__all__ = ["ReplicatedValues", "ReplicateLatents", "Importance", "ImportanceWeights", "importance_weights"]


@dataclasses.dataclass(frozen=True)
class Importance(Checked):
    r"""Importance weighting of the latents of every datum, in ``dgp.ELBO``.

    Args:
        num_samples: K, the number of samples of the latents of a datum.
        doubly_reparameterised: whether the gradients of the proposals lack their term of mean zero, whose noise hides
            the others where K is large (Tucker et al., 2019). It costs a second run without gradients.

    Raises:
        ValueError: K is not a positive integer.

    Example:
        >>> from numpyro_dgp import guides
        >>> guides.MeanField(lambda: None, importance=guides.Importance(5)).importance
        Importance(num_samples=5)

    Source: Salimbeni (2020), equation 5.11; Tucker et al. (2019).
    """

    num_samples: int = count(hint="5")
    doubly_reparameterised: bool = flag()

    __repr__ = brief


class ReplicatedValues(FunctionValues):
    """Values of batch shape (K, ..., N), dependent over the first axis as the values of one function are.

    Importance weighting compares K latent values of one datum. The functions of the layers above must be the same draw
    for all K values: independent draws do not give a bound. Process noise is independent between the K values.

    Args:
        values: what ``f(x)`` returned for K inputs per datum.

    Source: Salimbeni (2020), section 5.2.3.
    """

    def __init__(self, values: FunctionValues) -> None:
        c, belief_variance = values.conditional_variance, values.belief_variance
        super().__init__(values.loc, c, belief_variance, values.event_dim, origin=values.origin)
        self.follows_model = True

    def sample_with_intermediates(self, key: Any, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        return self.sample(key, sample_shape), []

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        draw = self._draw
        for _ in sample_shape:
            draw = jax.vmap(draw)
        return draw(jax.random.split(key, sample_shape) if sample_shape else key)

    def _draw(self, key: Array) -> Array:
        function_key, noise_key = jax.random.split(key)
        x = jnp.broadcast_to(self.inputs, (*self.batch_shape, self.inputs.shape[-1]))
        drawn = jnp.moveaxis(self.function.draw(function_key, jnp.moveaxis(x, 0, -2)), -2, 0).reshape(self.loc.shape)
        if self.noise is None:
            return drawn
        return drawn + self.noise * jax.random.normal(noise_key, drawn.shape, drawn.dtype)


class ReplicateLatents(Messenger):
    """Draws several values (replicates) of every latent with replicates in its record, and the layers above jointly.

    Args:
        fn: guide or model.
        nesting: gives the number of batch dimensions that plates take.
        drawn: the trace of the guide, when ``fn`` is the model that takes its values.
        weights: normalised weights of the replicates of every latent, from an earlier run, for doubly reparameterised
            gradients: the gradient that reaches a replicate is multiplied by its weight, and its density is constant.

    Raises:
        ValueError: when it runs: a program whose arrays above the latent do not fit it with several values.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        nesting: Callable[[], int],
        drawn: Trace | None = None,
        weights: dict[str, Array] | None = None,
    ) -> None:
        self.nesting, self.drawn, self.weights, self.active = nesting, drawn, weights or {}, False
        super().__init__(fn)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if self.active and isinstance(exc_value, TypeError):  # as JAX reports shapes that do not fit
            raise expected(
                "a program that accepts several values of a latent along a new first dimension",
                f"an error above it ({exc_value})",
                "before jnp.concatenate widen X to h, X = jnp.broadcast_to(X, (*h.shape[:-1], X.shape[-1]))",
                at="importance weighting",
            ) from exc_value

    def process_message(self, msg: Message) -> None:
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        site = msg if self.drawn is None else self.drawn.get(msg["name"], msg)
        record = record_of(site)
        if record.num_replicates is not None:
            self.active = True
            self._replicate(msg, record)
        elif self.active and self.drawn is None and len(msg["fn"].batch_shape) > self.nesting():
            self._join(msg)

    def _replicate(self, msg: Message, record: SiteRecord) -> None:
        fn, nesting = msg["fn"], self.nesting()
        # If the inputs of a latent already have a dimension of replicates, the latent shares that dimension.
        batch = fn.batch_shape[max(0, len(fn.batch_shape) - nesting) :]
        batch = (1,) * (nesting - len(batch)) + batch
        if record.rule is None:
            msg["fn"] = fn.expand((record.num_replicates, *batch))
            if msg["name"] in self.weights:
                self._weigh_gradient(msg)
            return
        points = record.rule.nodes(fn.event_shape[0], unwrap(fn).dtype).points  # type: ignore[attr-defined]
        points = points.reshape(-1, *(1,) * nesting, points.shape[-1])
        msg["fn"] = fn.expand((len(points), *batch))
        msg["value"] = jnp.broadcast_to(points, msg["fn"].shape())

    def _weigh_gradient(self, msg: Message) -> None:
        """Draw the value in this handler, so that its gradient can be weighted while its density has none."""
        value = msg["fn"](rng_key=msg["kwargs"]["rng_key"])
        weight = self.weights[msg["name"]]
        weight = weight.reshape(weight.shape + (1,) * msg["fn"].event_dim)
        msg["value"] = weight * value + jax.lax.stop_gradient((1 - weight) * value)
        msg["fn"] = jax.lax.stop_gradient(msg["fn"])

    def _join(self, msg: Message) -> None:
        values: Any = unwrap(msg["fn"])
        if follows(values) and is_row_by_row(values):
            msg["fn"] = ReplicatedValues(values)
        elif is_function_values(values):
            raise expected(
                f"hidden layer {msg['name']!r} to follow the model",
                f"a {type(values).__name__}",
                "give it guides.Propagate(), and draw it with f(x), not f.joint(x)",
                at="importance weighting",
            )


class ImportanceWeights(NamedTuple):
    """The weights of the replicates of the latents of some data.

    Args:
        log_weights: logarithms of :math:`\\omega_k`, (K, ...) over the plates of the latents.
        scale: of a minibatch.
        latents: the sites weighted.
        sites: the model's sites inside those plates, all of which the weights account for.
    """

    log_weights: Array
    scale: Any
    latents: tuple[str, ...]
    sites: frozenset[str]

    def normalised(self) -> Array:
        """Weights that sum to one over the replicates, (K, ...)."""
        return jax.nn.softmax(self.log_weights, axis=0)

    def bound(self) -> Array:
        r"""The sum over data of :math:`\log \sum_k \omega_k`, times the scale of the minibatch."""
        return jnp.sum(scale_and_mask(logsumexp(self.log_weights, axis=0), self.scale))


def importance_weights(guide_trace: Trace, model_trace: Trace, nesting: Callable[[], int]) -> list[ImportanceWeights]:
    """The weights of the latents of a run, one :class:`ImportanceWeights` for the latents of each set of plates.

    Raises:
        ValueError: latents or observations whose plates overlap without being the same; observations with a robust
            loss.
    """
    names = [name for name, site in guide_trace.items() if record_of(site).num_replicates is not None]
    groups: dict[frozenset[Any], list[str]] = {}
    for name in names:
        groups.setdefault(frozenset(guide_trace[name]["cond_indep_stack"]), []).append(name)
    return [_weigh(frames, latents, guide_trace, model_trace, nesting(), groups) for frames, latents in groups.items()]


def _weigh(
    frames: frozenset[Any], latents: list[str], guide_trace: Trace, model_trace: Trace, nesting: int, groups: Any
) -> ImportanceWeights:
    first, scale = record_of(guide_trace[latents[0]]), guide_trace[latents[0]]["scale"]
    rule, replicates = first.rule, first.num_replicates or 1
    at_nodes = rule is not None
    if len(latents) > 1 and any(record_of(guide_trace[name]).rule is not None for name in latents):
        raise expected(
            f"one latent site in the plates of {latents[0]!r}",
            latents,
            "join them to one site, or use ImportanceWeighted",
        )
    if rule is not None:
        nodes = rule.nodes(guide_trace[latents[0]]["fn"].event_shape[0], guide_trace[latents[0]]["value"].dtype)
        total = nodes.log_weights.reshape(-1, *(1,) * nesting)
    else:
        total = jnp.asarray(-math.log(replicates))
    inside = []
    for name, site in model_trace.items():
        plates = frozenset(site["cond_indep_stack"]) if site["type"] == "sample" else frozenset()
        if not plates & frames or follows(unwrap(guide_trace.get(name, site)["fn"])):
            continue
        inside.append(name)
        extra = plates - frames
        _require_nested(name, latents, frames, plates, [g for g in groups if g != frames and g & plates])
        _require_whole(name, [model_trace[frame.name] for frame in extra])
        if site["is_observed"]:
            if (error := another_loss(site)) is not None:
                raise error
            relative = 1.0 if site["scale"] is None else site["scale"] / (1.0 if scale is None else scale)
            total = total + _over(relative * log_prob(site), extra)
        elif not (at_nodes and name in latents):
            total = total + _over(log_prob(site) - log_prob(guide_trace[name]), extra)
    return ImportanceWeights(total, scale, tuple(latents), frozenset(inside))


def _require_nested(name: str, latents: list[str], frames: Any, plates: Any, others: list[Any]) -> None:
    if not frames <= plates or others:
        raise expected(
            f"site {name!r} in all plates of the latents {latents} and in those of no others",
            f"plates {sorted(f.name for f in plates)}",
            "put latents and observations in the same plates",
            at="importance weighting",
        )


def _require_whole(name: str, plates: list[Message]) -> None:
    for plate in plates:
        size, subsample_size = plate["args"]
        if subsample_size not in (None, size):
            raise expected(
                f"all of {name!r} for every latent",
                f"plate {plate['name']!r} that takes {subsample_size} of {size} rows",
                "subsample the plates of the latents only",
                at="importance weighting",
            )


def _over(values: Array, extra: frozenset[Any]) -> Array:
    """Sums over plates beyond those of the latents, whose dimensions stay with size one."""
    axes = tuple(sorted(frame.dim for frame in extra if -frame.dim <= values.ndim))
    return values.sum(axes, keepdims=True) if axes else values
