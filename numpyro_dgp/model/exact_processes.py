"""Values of processes without inducing values, ``inducing=None`` or ``dgp.Neighbours``, where these are needed."""

from __future__ import annotations

from typing import Any

from numpyro_dgp.model.joint_values import WhitenedValues
from numpyro_dgp.model.process_values import ProcessValues

__all__ = ["require_site"]


def require_site(f_x: Any) -> None:
    """Raise if a likelihood would integrate values of a process without v: over their prior, whatever is observed.

    Raises:
        ValueError: such values.
    """
    is_prior = isinstance(f_x, ProcessValues) and not isinstance(f_x, WhitenedValues)
    function = f_x.function if is_prior else None
    if function is not None and function.site is None and not hasattr(function, "u"):
        raise ValueError(
            "Likelihood: expected values of a function with inducing points, got those of one without "
            "(inducing=None or dgp.Neighbours), which would be integrated over their prior, whatever y is: draw them "
            'outside the plate, v = numpyro.sample("v", f(X)), and write numpyro.sample("y", dist.Normal(v, noise)) '
            'inside; with Gaussian noise numpyro.sample("y", f(X, noise=noise)) does both; or give the layer '
            "dgp.Points(X)"
        )
