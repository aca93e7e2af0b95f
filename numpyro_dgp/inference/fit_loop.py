"""The loop that ``fit`` and ``fit_stream`` share: chunks of steps, checkpoints, losses that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
import tqdm
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_dgp._typing import Array
from numpyro_dgp.inference.checkpoints import Checkpoint

__all__ = ["CHUNK", "Advance", "Evaluate", "run_steps"]

CHUNK = 100
"""Steps whose losses are read from the device at once."""

Advance = Callable[[SVIState, int, int], tuple[SVIState, "Array | np.ndarray"]]
"""``(state, step, count)`` to the state after steps ``step, ..., step + count - 1`` and their losses."""

Evaluate = Callable[[SVIState, int], Any]
"""``(state, step)`` to the loss of that step, computed without ``jit``, so that checks have values and can raise."""


def run_steps(
    svi: SVI,
    start: SVIState,
    num_steps: int,
    advance: Advance,
    evaluate: Evaluate | None,
    checkpoint: Checkpoint,
    progress_bar: bool,
    place: Callable[[SVIState], SVIState] = lambda state: state,
) -> SVIRunResult:
    """Run a fit to its end, from the checkpoint if there is one.

    Args:
        svi: what is fitted.
        start: the state before the first step.
        num_steps: total number of steps, those in the checkpoint included. A checkpoint of more steps gives its state
            as it is and the first ``num_steps`` losses.
        advance: does at most :data:`CHUNK` steps. Called with the same arguments it must give the same results: the
            steps before a loss that is not finite are done again.
        evaluate: computes the loss of such a step again outside ``jit``, so that checks can raise the reason; ``None``
            if losses need not be finite.
        checkpoint: where to continue from and what to write.
        progress_bar: show a progress bar.
        place: puts a state on the devices of the fit.

    Raises:
        ValueError: a loss that is not finite, or a checkpoint of another fit.
    """
    state, saved = checkpoint.resume(start)
    state, losses, done = place(state), [saved] if len(saved) else [], len(saved)
    with tqdm.tqdm(total=num_steps, initial=done, disable=not progress_bar) as bar:
        while done < num_steps:
            until = checkpoint.next_write(done, num_steps)
            count, before = min(CHUNK, until - done), state
            state, found = advance(before, done, count)
            chunk = np.asarray(found)
            bad = np.flatnonzero(~np.isfinite(chunk))
            if evaluate is not None and len(bad):
                steps = int(bad[0])
                last = advance(before, done, steps)[0] if steps else before
                _explain(checkpoint.owner, evaluate, last, done + steps, chunk[steps])
            losses.append(chunk)
            done += count
            bar.update(count)
            bar.set_postfix_str(f"loss: {chunk.mean():.4f}", refresh=False)
            if done == until:
                checkpoint.write(state, np.concatenate(losses))
    return SVIRunResult(svi.get_params(state), state, jnp.asarray(np.concatenate(losses)[:num_steps]))


def _explain(owner: str, evaluate: Evaluate, state: SVIState, step: int, loss: Any) -> NoReturn:
    """Raise for a loss that is not finite, with the reason if a check finds one."""
    try:
        evaluate(state, step)
    except ValueError as error:
        raise ValueError(f"{owner}: the loss became {loss} at step {step + 1}: {error}") from error
    raise ValueError(
        f"{owner}: expected a finite loss, got {loss} at step {step + 1}: lower the learning rate, clip gradients "
        "(optax.clip_by_global_norm), bound the hyperparameters by priors, or run in float64"
    )
