"""Wrong calls of ``dgp.functions.StateSpaceNormal`` and ``dgp.StateSpace``."""

import jax
import numpy as np
import numpyro
from wrong_calls.wrong import Wrong

import numpyro_dgp as dgp

K = dgp.kernels
T = np.linspace(0, 7, 8)
Y = np.sin(T)
GAPS = np.where(T > 5, np.nan, T)
MASK = np.arange(8) % 2 == 0


def series(kernel=K.Matern12(), times=T, noise=0.1, **kwargs):
    return dgp.functions.StateSpaceNormal(kernel, times, noise, **kwargs)


def layer(kernel=K.Matern12(), outputs=None, **kwargs):
    with numpyro.handlers.seed(rng_seed=0):
        return dgp.gp("f", kernel, dgp.StateSpace(T, **kwargs), outputs=outputs)


IN_ORDER = r"{}: expected times in order, got 7 after 8 at index 1: i = np.argsort\(times\)"
IS_MASK = r"StateSpaceNormal: expected observed to be a mask of shape \(8,\).*got {}.*mask\[indices\] = True"
PER_TIME = r"StateSpaceNormal.*: expected {} of shape \({},\), one number per observed time, got {}"

WRONG = [
    # Times
    Wrong("times going back", lambda: series(times=8 - np.arange(8.0)), IN_ORDER.format("StateSpaceNormal")),
    Wrong("times of a layer going back", lambda: dgp.StateSpace(8 - T), "StateSpace: expected times in order"),
    Wrong("two columns", lambda: series(times=np.ones((8, 2))), r"shape \(N,\) or \(N, 1\), got \(8, 2\).*dgp.Points"),
    Wrong("one number", lambda: dgp.StateSpace(3.0), r"StateSpace: expected times of shape .*, got \(\)"),
    Wrong("no times", lambda: series(times=[]), "StateSpaceNormal: expected times of at least one point, got none"),
    Wrong("times are NaN", lambda: series(times=GAPS), "expected finite times"),
    Wrong(
        "times are dates",
        lambda: series(times=np.array(["2020", "2021"], "M8[D]")),
        "StateSpaceNormal: expected times to be numbers, got times",
    ),
    Wrong("new times are NaN", lambda: series().posterior(Y, [np.nan]), "expected finite times"),
    Wrong("new times of two columns", lambda: series().posterior(Y, np.ones((3, 2))), r"posterior: expected times of"),
    # Noise, mean, mask, values
    Wrong("noise of zero", lambda: series(noise=0.0), "expected noise to be positive, got 0.0"),
    Wrong("noise too short", lambda: series(noise=np.ones(3)), PER_TIME.format("noise", 8, r"\(3,\)")),
    Wrong("loc is a column", lambda: series(loc=Y[:, None]), PER_TIME.format("loc", 8, r"\(8, 1\)")),
    Wrong("values at all times", lambda: series(observed=MASK).log_prob(Y), PER_TIME.format("values", 4, r"\(8,\)")),
    Wrong("values are NaN", lambda: series().log_prob(GAPS), "finite values.*with its times"),
    Wrong("indices", lambda: series(observed=np.arange(3)), IS_MASK.format(r"int64 of shape \(3,\)")),
    Wrong("nothing observed", lambda: series(observed=T < 0), IS_MASK.format(r"bool of shape \(8,\) with 0 True")),
    Wrong(
        "mask traced", lambda: jax.jit(lambda m: series(observed=m).mean)(MASK), "observed to be known when the prog"
    ),
    # Kernels
    Wrong("no state space", lambda: series(K.RBF()), "RBF has no state space: expected a kernel of one input column"),
    Wrong("a sum with another", lambda: layer(K.Matern32() + K.RBF()), "RBF has no state space"),
    Wrong(
        "ARD", lambda: series(K.Matern32(1.0, [1.0, 2.0])), r"Matern32 has no state space with lengthscales of shape"
    ),
    Wrong("another column", lambda: series(K.Matern32().on(1)), r"kernel.on\(1,\) has no state space"),
    Wrong("two periods", lambda: series(K.Periodic(period=np.ones(2))), "Periodic has no state space with periods of"),
    Wrong("too few waves", lambda: series(K.Periodic(1.0, 0.2)), "order=8, which leaves .* at 0.2: pass"),
    Wrong("no waves", lambda: series(K.Periodic(), order=0), "expected order to be a positive"),
    Wrong(
        "order of a layer", lambda: dgp.StateSpace(T, order=1.5), "StateSpace: expected order to be a positive integer"
    ),
    Wrong("different states", lambda: layer([K.Matern12(), K.Matern32()], 2), r"equally many states.*got \[1, 2\]"),
]
