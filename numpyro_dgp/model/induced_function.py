"""The base class of random functions with inducing values."""

from __future__ import annotations

from numpyro_dgp.model.random_function import FeatureFunction

__all__ = ["InducedFunction"]


class InducedFunction(FeatureFunction):
    r"""A random function that is represented by whitened values v; subclasses define its features.

    A subclass is a frozen pytree (``_typing.pytree``) with the fields below and five members of its own: ``size``,
    ``dims``, :meth:`features`, :meth:`prior_variance` and :meth:`covariance`. Importance weights also need
    :meth:`held`, draws of whole functions :meth:`prior_draw`. :meth:`conditional_variance` and
    :meth:`block_moments` can be overridden by what is more accurate or faster.

    Args:
        kernels: one kernel, or one per output.
        u: the value at the site of v: an array, a ``Belief`` or a ``FunctionDraw``.
        outputs: P, or ``None`` for a scalar function.
        mean: the mean function.
        site: name of the site of v.

    Raises:
        ValueError: where it is called, inputs of another width, NaN or infinite inputs, noise that is not positive.
    """
