"""The state before the first step of a fit, from one compiled program.

``svi.init`` runs guide and model operation by operation, and JAX compiles each of these. As one program, of which only
parameters are asked, no values of functions are computed.
"""

from __future__ import annotations

import inspect
from typing import Any

from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from numpyro_dgp._checks import is_concrete, with_checks
from numpyro_dgp._typing import Array
from numpyro_dgp.algebra.compiled import Compiled, one_thread
from numpyro_dgp.guides.guide import Guide
from numpyro_dgp.inference.program_sites import Rebuild

__all__ = ["has_no_state", "initial_state"]


def has_no_state(svi: SVI) -> bool:
    """Whether the guide keeps nothing between its calls. NumPyro's autoguides set themselves up in their first one."""
    guide = svi.guide
    return guide.companion is None if isinstance(guide, Guide) else inspect.isfunction(guide)


def initial_state(
    svi: SVI, rng_key: Array, rebuild: Rebuild, arrays: list[Array], init_params: dict[str, Array] | None
) -> SVIState:
    """``svi.init(rng_key, *args, init_params=init_params, **kwargs)``, compiled where that is possible.

    Without compilation run guides with a state, programs that need the values of their arguments, those whose
    parameters' constraints are computed from arrays, and those of which a check fails, which raises its error then.

    Args:
        svi: what is fitted.
        rng_key: PRNG key.
        rebuild: the arguments of the model, from ``arrays``.
        arrays: those of them that are arrays.
        init_params: initial values of some parameters, or ``None``.
    """

    def init(key: Array, arrays: list[Array], params: Any) -> SVIState:
        args, kwargs = rebuild(arrays)
        return svi.init(key, *args, init_params=params, **kwargs)

    if has_no_state(svi):
        try:
            checked, state = Compiled(with_checks(init))(rng_key, arrays, init_params)
            sound = bool(checked)
        except Exception:  # whatever it is, the program without compilation raises it again, or needs values
            sound = False
        if sound and is_concrete(svi.constrain_fn.args):
            return state
    with one_thread:
        return init(rng_key, arrays, init_params)
