"""The loop that ``fit`` and ``fit_stream`` share: chunks of steps, checkpoints, losses that are not finite."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_dgp._checks import caller, expect, expected, is_concrete
from numpyro_dgp._compiled import Compiled
from numpyro_dgp._numpyro import each_message
from numpyro_dgp._typing import Array
from numpyro_dgp.analysis.sites import Message, is_likelihood, unwrap
from numpyro_dgp.inference.checkpoints import CheckpointFile

__all__ = ["CHUNK", "Advance", "Evaluate", "Steps", "run_steps"]

CHUNK = 100
"""Steps whose losses are read from the device at once."""

_LAST = 5
"""Losses at the end that are all too large after a step that was too long."""

_OVERSHOT = 1e3
"""How often the lowest loss that is."""

Advance = Callable[[SVIState, int, int], tuple[SVIState, "Array | np.ndarray"]]
"""``(state, step, count)`` to the state after steps ``step, ..., step + count - 1`` and their losses."""

Evaluate = Callable[[SVIState, int], Any]
"""``(state, step)`` to the loss of that step, computed without ``jit``, so that checks have values and can raise."""


class Steps(NamedTuple):
    """The steps of a fit.

    Args:
        advance: does at most :data:`CHUNK` steps. Called with the same arguments it must give the same results: the
            steps before a loss that is not finite are done again.
        evaluate: computes the loss of such a step again outside ``jit``, so that checks can raise the reason.
        place: puts a state on the devices of the fit.
        skips: whether a step whose loss is not finite leaves the state as it is, so that the fit can go on.
    """

    advance: Advance
    evaluate: Evaluate
    place: Callable[[SVIState], SVIState] = lambda state: state
    skips: bool = False


def run_steps(
    svi: SVI, start: SVIState, num_steps: int, steps: Steps, checkpoint: CheckpointFile, progress_bar: bool
) -> SVIRunResult:
    """Run a fit to its end, from the checkpoint if there is one.

    Args:
        svi: what is fitted.
        start: the state before the first step.
        num_steps: total number of steps, those in the checkpoint included. A checkpoint of more steps gives its state
            as it is and the first ``num_steps`` losses.
        steps: what is done.
        checkpoint: where to continue from and what to write, reserved by the caller.
        progress_bar: show a progress bar.

    Raises:
        ValueError: a loss that is not finite, or, where such steps are skipped, no other; a step that made a parameter
            infinite or NaN; a checkpoint that is damaged or of another fit.
        KeyboardInterrupt: after an interruption; the message names the steps saved.
    """
    state, saved = checkpoint.resume(start)
    state, losses, done = steps.place(state), [saved] if len(saved) else [], len(saved)
    reached = state, done
    try:
        with tqdm.tqdm(total=num_steps, initial=done, disable=not progress_bar) as bar:
            while done < num_steps:
                until = checkpoint.next_write(done, num_steps)
                count, before = min(CHUNK, until - done), state
                state, found = steps.advance(before, done, count)
                chunk = np.asarray(found)
                bad = np.flatnonzero(~np.isfinite(chunk))
                if not steps.skips and len(bad):
                    sound = int(bad[0])
                    last = steps.advance(before, done, sound)[0] if sound else before
                    _explain(steps.evaluate, last, done + sound, chunk[sound])
                losses.append(chunk)
                done += count
                reached = state, done
                bar.update(count)
                bar.set_postfix_str(f"loss: {chunk.mean():.4f}", refresh=False)
                if done == until:
                    checkpoint.write(state, np.concatenate(losses))
    except KeyboardInterrupt as interrupt:
        state, done = reached
        interrupt.args = (_interrupted(checkpoint, state, done, num_steps, losses),)
        raise
    found_losses = np.concatenate(losses)
    params = Compiled(svi.constrain_fn)(svi.optim.get_params(state.optim_state))  # svi.get_params, in one program
    _require_finite(params, done)
    if steps.skips:
        _require_steps(steps.evaluate, state, found_losses)
    _warn_of_overshoot(found_losses)
    return SVIRunResult(params, state, jnp.asarray(found_losses[:num_steps]))


def _note_moving_range(found: dict[str, str], msg: Message) -> None:
    """Collect observed likelihoods whose support depends on v, by site."""
    fn: Any = unwrap(msg["fn"]) if msg["type"] == "sample" and msg["is_observed"] else None
    if fn is not None and is_likelihood(fn) and _moves(fn):
        found[msg["name"]] = fn.family


def _moves(fn: Any) -> bool:
    """Whether the support of y changes with the value of the function; a point mass counts as such."""
    if fn.family == "Delta":
        return True
    v = fn.f_x.loc
    ranges = [jax.tree.leaves(fn.per_number(u).support) for u in (jnp.zeros_like(v), jnp.ones_like(v))]
    return is_concrete(ranges) and any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*ranges, strict=True))


def _interrupted(
    checkpoint: CheckpointFile, state: SVIState, done: int, num_steps: int, losses: list[np.ndarray]
) -> str:
    """Save the state of an interrupted fit, and print where."""
    text = f"{caller()}: interrupted after {done} of {num_steps} steps"
    if done and checkpoint.write(state, np.concatenate(losses)[:done]):
        return f"{text}, which are saved in {checkpoint.path}: the same call continues there"
    return text


def _require_steps(evaluate: Evaluate, state: SVIState, losses: np.ndarray) -> None:
    """Raise if every step was skipped; warn if all of the last ones were."""
    sound = np.flatnonzero(np.isfinite(losses))
    if not len(sound):
        try:
            evaluate(state, len(losses) - 1)
            reason = "start from other init_params, or run in float64"
        except ValueError as error:
            reason = str(error)
        raise expected(
            "stable_update to skip some steps",
            (f"all {len(losses)} skipped, since no loss or gradient was finite; the parameters are where they started"),
            reason,
        )
    stuck = len(losses) - 1 - int(sound[-1])
    if stuck >= min(CHUNK, len(losses) // 2):
        warnings.warn(
            f"{caller()}: stable_update skipped each of the last {stuck} of {len(losses)} steps, since no loss or "
            "gradient was finite, and parameters have not changed since: lower the learning rate or clip gradients "
            "(optax.clip_by_global_norm)",
            RuntimeWarning,
            stacklevel=4,
        )


def _warn_of_overshoot(losses: np.ndarray) -> None:
    """Warn if the last losses are far above the lowest one, as after a step that was too large.

    Natural gradients of a loss with exponential tails leave the fit there: no number of its next steps is finite, and
    steps that are not finite are not taken.
    """
    finite = np.where(np.isfinite(losses), losses, np.inf)
    best = int(finite.argmin())
    end = finite[-min(_LAST, len(finite)) :].min()
    if np.isfinite(end) and end - finite[best] > _OVERSHOT * (1 + abs(finite[best])):
        warnings.warn(
            f"{caller()}: the fit ends at a loss of {end:.3g}, after {finite[best]:.3g} at step {best + 1}: a step was "
            "too long and the next ones did not lead back; lower the learning rate, or the step size of "
            "NaturalGradient, dgp.optim.log_linear(1e-4, 0.1, 1000)",
            stacklevel=4,
        )


def _require_finite(params: dict[str, Any], steps: int) -> None:
    """Raise if the last step, or one that ``stable_update`` accepted for its finite loss, made a parameter NaN or
    infinite."""
    for name, value in params.items():
        expect(
            all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(value)),
            f"finite parameters after {steps} steps",
            f"NaN or infinite values of {name!r}, which a step from a finite loss has made",
            "look at the learning rate and its schedule, or clip gradients (optax.clip_by_global_norm)",
        )


def _explain(evaluate: Evaluate, state: SVIState, step: int, loss: Any) -> NoReturn:
    """Raise for a loss that is not finite, with the reason where a check finds one."""
    moving: dict[str, str] = {}
    try:
        with each_message(after=partial(_note_moving_range, moving)):
            evaluate(state, step)
    except ValueError as error:
        raise ValueError(f"{caller()}: the loss became {loss} at step {step + 1}: {error}") from error
    for name, family in moving.items():
        raise expected(
            f"a density of {name!r} that is positive whatever the value of the function",
            f"a loss of {loss} at step {step + 1} with {family}, whose support depends on it",
            "use a distribution of y with noise, such as dist.Normal(v, 0.1)",
        )
    raise expected(
        "a finite loss", f"{loss} at step {step + 1}", "lower the learning rate, clip gradients, or run in float64"
    )
