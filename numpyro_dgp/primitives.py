"""The primitives of a program: ``gp`` makes a layer, ``latent`` adds a latent variable per datum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import jax.numpy as jnp
import numpyro

from numpyro_dgp._checks import expect, require_inputs
from numpyro_dgp._data import as_floats, as_numbers
from numpyro_dgp._typing import Array, ArrayLike
from numpyro_dgp.functions.basis import Basis, BasisFunction
from numpyro_dgp.functions.exact import Exact, ExactFunction
from numpyro_dgp.functions.neighbours import NeighbourFunction, Neighbours
from numpyro_dgp.functions.points import Points, SparseFunction
from numpyro_dgp.functions.random_function import Representation
from numpyro_dgp.functions.weights import StandardNormal
from numpyro_dgp.kernels import Kernel, as_kernel
from numpyro_dgp.kernels.per_output import Kernels
from numpyro_dgp.means import as_mean
from numpyro_dgp.rings.grid import Grid
from numpyro_dgp.rings.ring_function import RingFunction

__all__ = ["gp", "latent"]

KernelLike = Kernel | Callable[[Array, Array], Array]


@overload
def gp(
    name: str,
    kernel: KernelLike | Sequence[KernelLike],
    inducing: Points,
    *,
    outputs: int | None = ...,
    mean: Callable[[Array], ArrayLike] | ArrayLike | None = ...,
) -> SparseFunction: ...
@overload
def gp(
    name: str,
    kernel: KernelLike | Sequence[KernelLike],
    inducing: Grid,
    *,
    outputs: int | None = ...,
    mean: Callable[[Array], ArrayLike] | ArrayLike | None = ...,
) -> RingFunction: ...
@overload
def gp(
    name: str,
    kernel: KernelLike | Sequence[KernelLike],
    inducing: Basis,
    *,
    outputs: int | None = ...,
    mean: Callable[[Array], ArrayLike] | ArrayLike | None = ...,
) -> BasisFunction: ...
@overload
def gp(
    name: str,
    kernel: KernelLike | Sequence[KernelLike],
    inducing: Neighbours,
    *,
    outputs: int | None = ...,
    mean: Callable[[Array], ArrayLike] | ArrayLike | None = ...,
) -> NeighbourFunction: ...
@overload
def gp(
    name: str,
    kernel: KernelLike | Sequence[KernelLike],
    inducing: None,
    *,
    outputs: int | None = ...,
    mean: Callable[[Array], ArrayLike] | ArrayLike | None = ...,
) -> ExactFunction: ...
@overload
def gp(
    name: str,
    kernel: KernelLike | Sequence[KernelLike],
    inducing: Representation,
    *,
    outputs: int | None = ...,
    mean: Callable[[Array], ArrayLike] | ArrayLike | None = ...,
) -> Any: ...
def gp(
    name: str,
    kernel: KernelLike | Sequence[KernelLike],
    inducing: Representation | None,
    *,
    outputs: int | None = None,
    mean: Callable[[Array], ArrayLike] | ArrayLike | None = None,
) -> Any:
    r"""A Gaussian-process layer: a random function :math:`f \sim GP(m, k)`, independent over P outputs.

    It opens one sample site, ``name``: the whitened inducing values, event shape (P, M), or (M,) for a
    scalar function. The function returned is called on inputs inside the data plate and gives a NumPyro
    distribution: ``h = numpyro.sample("h", f(x))`` draws a hidden layer, ``dgp.Likelihood(f(x), ...)``
    integrates the last one. Call ``gp`` outside every plate; in a plate of L groups, a layer on ``dgp.Points`` is a
    function for each of them, called on inputs whose last column is the label of the group.

    Args:
        name: name of the site.
        kernel: k, a kernel or any callable ``k(X1, X2)``; or a sequence of P of them, one per output.
        inducing: how the function is represented: ``dgp.Points(Z)``, ``dgp.Grid(low, high, size)``,
            ``dgp.Basis(low, high, size)``, ``dgp.StateSpace(times)``, any other ``Representation``, or ``None`` for an
            exact process, which opens no site and whose values are drawn at all inputs at once, as are those of
            ``dgp.Neighbours(X)``, in which each depends on its nearest neighbours.
        outputs: P for a function with values (..., P); ``None`` for a scalar function with values (...,).
        mean: m, a mean function, any callable from (..., D) to (..., P), a number, or one per output (P,); zero by
            default.

    Returns:
        The random function.

    Raises:
        ValueError: an output count, a kernel or inducing inputs that do not fit together.

    Example:
        >>> import jax, numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 5)[:, None]), outputs=2)
        ...     with numpyro.plate("data", 7):
        ...         h = numpyro.sample("h", f(jnp.zeros((7, 1))))
        >>> h.shape
        (7, 2)

    Source: Salimbeni (2020), sections 1.2 and 2.2.
    """
    expect(isinstance(name, str), "a name of the site", repr(name), 'gp("f", kernel, inducing)')
    expect(
        outputs is None or (not isinstance(outputs, bool) and isinstance(outputs, int) and outputs >= 1),
        "outputs to be a positive integer or None",
        repr(outputs),
        "None for a scalar function",
        at=f"gp {name!r}",
    )
    kernels: Kernels
    if isinstance(kernel, list | tuple):
        expect(
            len(kernel) == (outputs or 1),
            f"one kernel per output, outputs={outputs}",
            f"{len(kernel)} kernels",
            "a single one is shared",
            at=f"gp {name!r}",
        )
        kernels = tuple(as_kernel(k) for k in kernel)
    else:
        kernels = as_kernel(kernel)
    representation = Exact() if inducing is None else inducing
    expect(
        hasattr(representation, "open") and not isinstance(representation, type),
        "inducing=dgp.Points(Z), another representation such as dgp.Grid(low, high, size), or None",
        type(inducing).__name__,
        "wrap an array of inducing inputs as dgp.Points(Z)",
        at=f"gp {name!r}",
    )
    return representation.open(name, kernels, outputs, as_mean(mean))


def latent(name: str, x: ArrayLike | None, dim: int) -> Array:
    r"""Latent inputs: :math:`w_n \sim N(0, I_{dim})` per datum, returned as :math:`[x_n, w_n]`.

    Call it inside the data plate. A layer above then has D + ``dim`` input columns, and the distribution of
    its output at one x need not be Gaussian.

    Args:
        name: name of the site; its value has shape (..., dim).
        x: inputs (..., N, D), of the data or of the layer below; leading dimensions broadcast. ``None`` for a model
            of latent inputs only (GPLVM); the plate has their number.
        dim: number of latent columns.

    Returns:
        Inputs (..., N, D + dim).

    Raises:
        ValueError: ``dim`` is not a positive integer, or inputs that are not rows of columns.

    Example:
        >>> import numpyro
        >>> import jax.numpy as jnp
        >>> import numpyro_dgp as dgp
        >>> with numpyro.handlers.trace() as sites, numpyro.handlers.seed(rng_seed=0), numpyro.plate("data", 7):
        ...     x = dgp.latent("w", jnp.zeros((7, 2)), 1)
        >>> x.shape, sites["w"]["value"].shape
        ((7, 3), (7, 1))

    Source: Salimbeni (2020), equation 4.4 and section 5.1.2.
    """
    expect(isinstance(dim, int) and dim >= 1, "a positive integer dim", repr(dim), "1 is usual", at=f"latent {name!r}")
    if x is None:
        return numpyro.sample(name, StandardNormal((dim,), jnp.result_type(float)))
    x = as_numbers("inputs x", x)
    require_inputs(x)
    x = as_floats("inputs x", x)
    w = numpyro.sample(name, StandardNormal((dim,), x.dtype, x.shape[:-1], x))
    batch = jnp.broadcast_shapes(x.shape[:-1], w.shape[:-1])
    return jnp.concatenate([jnp.broadcast_to(a, batch + a.shape[-1:]) for a in (x, w)], -1)
