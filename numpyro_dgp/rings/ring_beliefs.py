r"""Gaussian posteriors of the values on a ring that cost O(M log M), and their prior.

The sites of a layer on a ring hold whitened values v in Hartley's coordinates: :math:`u = H \Lambda^{1/2} v` are
the values on the grid, whose prior covariance is :math:`C = H \Lambda H` (``circulant``). All families are
:math:`q(v) = N(m, R R^\top)` with

.. math:: R = \Lambda^{-p}\, H \Gamma_2 H\, \mathrm{diag}(g)\, H \Gamma_1 H\, \Lambda^{q},

products of diagonal matrices of the sites (:math:`\Gamma`) and of the frequencies (g), here as covariances of u; a
:math:`\Gamma` without an index is the only one, or :math:`\Gamma_1` where there is :math:`\Gamma_2`, and
:math:`C_2 = \mathrm{circ}(g)`:

============================  =============  ==================  ==================================================
family                        p, q           used                covariance of the values on the grid
============================  =============  ==================  ==================================================
circulant                     1/2, 1/2       g                   :math:`\mathrm{circ}(g^2 \lambda)`
scaled prior                  1/2, 1/2       :math:`\Gamma_2`    :math:`\Gamma C \Gamma`
scaled circulant              1/2, 1/2       :math:`\Gamma_2`,   :math:`\Gamma\, \mathrm{circ}(g^2 \lambda)\, \Gamma`
                                             g
scaled product                1/2, 1/2       all                 :math:`\Gamma_2 C_2 \Gamma C \Gamma C_2 \Gamma_2`,
                                                                 Tebbutt (2016), equation 3.41
diagonal of whitened sites    0, 0           :math:`\Gamma_2`    :math:`C^{1/2} \Gamma^2 C^{1/2}`
diagonal of sites             1/2, 0         :math:`\Gamma_2`    :math:`\Gamma^2`
============================  =============  ==================  ==================================================
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from numpyro.distributions import kl_divergence

from numpyro_dgp._checks import expected
from numpyro_dgp._typing import Array
from numpyro_dgp.functions.weights import Belief, InducingPrior
from numpyro_dgp.math.gaussians import log_density
from numpyro_dgp.math.linalg import matmul
from numpyro_dgp.rings.circulant import Blocks, CirculantMatrix, even_part, hartley, split
from numpyro_dgp.rings.windows import Window

__all__ = ["RingBelief", "RingPrior", "require_room"]

# Most entries of one array, 16 GiB in double precision.
_MOST_NUMBERS = 2**31


def require_room(what: str, *sizes: int) -> None:
    """Raise where an array over all grid points would be too large: the families that need none are named."""
    if math.prod(sizes) > _MOST_NUMBERS:
        raise expected(
            f"a grid small enough for {what}",
            f"{' x '.join(map(str, sizes))} numbers",
            "use f(x) on grid.local(kernel), with Circulant() (data everywhere) or WhitenedSites() (data with gaps)",
        )


class RingPrior(InducingPrior):
    """The prior of the whitened values on a ring, with the spectrum and the sizes of the grid.

    Args:
        event_shape: (P, M) or (M,).
        spectrum: eigenvalues of the covariance of the values on the grid, (M,), or (P, M) where outputs differ.
        blocks: sizes of the grid, one tuple per component of the kernel.
    """

    pytree_data_fields = ("spectrum",)
    pytree_aux_fields = ("blocks",)

    def __init__(
        self, event_shape: tuple[int, ...], spectrum: Array, blocks: Blocks, batch_shape: tuple[int, ...] = ()
    ) -> None:
        self.spectrum, self.blocks = spectrum, blocks
        super().__init__(event_shape, spectrum.dtype, batch_shape)

    def expand(self, batch_shape: Any) -> RingPrior:
        return RingPrior(self.event_shape, self.spectrum, self.blocks, tuple(batch_shape))


class RingBelief(Belief):
    r"""A Gaussian of the families above.

    Args:
        prior: the prior it is a posterior of.
        loc: means m, (P, M) or (M,).
        outer: the diagonal of :math:`\Gamma_2`, of the shape of ``loc``, or ``None`` for the identity; signs are free.
        gain: g, likewise; only its even part in the frequency counts, so that the matrix is circulant.
        inner: the diagonal of :math:`\Gamma_1`, likewise.
        powers: p and q.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("loc", "outer", "gain", "inner", "spectrum")
    pytree_aux_fields = ("blocks", "powers")

    def __init__(
        self,
        prior: RingPrior,
        loc: Array,
        outer: Array | None = None,
        gain: Array | None = None,
        inner: Array | None = None,
        powers: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        self.loc, self.outer, self.inner = loc, outer, inner
        self.spectrum, self.blocks, self.powers = jnp.broadcast_to(prior.spectrum, loc.shape), prior.blocks, powers
        self.gain = None if gain is None else even_part(gain, self.blocks)
        super().__init__((), jnp.shape(loc), validate_args=False)

    def half(self, A: Array) -> Array:
        """A R for rows A, (N, M) or (P, N, M): shape (P, N, M)."""
        outer, gain, inner, spectrum = (
            None if x is None else x.reshape(-1, 1, x.shape[-1])
            for x in (self.outer, self.gain, self.inner, self.spectrum)
        )
        p, q = self.powers
        # A Lambda^-p H Gamma_2 H diag(g) H Gamma_1 H Lambda^q, factor by factor
        x = _at_sites(outer, A * spectrum**-p, self.blocks)  # type: ignore[operator]
        x = x if gain is None else x * gain
        return _at_sites(inner, x, self.blocks) * spectrum**q  # type: ignore[operator]

    def feature_variance(self, A: Array) -> Array:
        return jnp.square(self.half(A)).sum(-1).T  # |R' a_n|^2 (N, P)

    @property
    def is_local(self) -> bool:
        """Whether the grid points around an input determine its variance: all families except the product."""
        return self.inner is None

    def feature_variance_near(self, windows: tuple[Window, ...]) -> Array:
        r"""Diagonal of the added covariance (N, P) from the grid points around each input, where ``is_local``.

        With :math:`y = \Gamma_2 C^{-1/2 - p} k(Z, x)`, the weights, it is
        :math:`y^\top \mathrm{circ}(g^2 \lambda^{2q})\, y`; without an ``outer`` everything is circulant, and the
        weights that decay fastest (p = 0) do.
        """
        p, q = self.powers
        # Without Gamma_2 all factors commute: R = Lambda^(q - p) diag(g).
        p, q = (0.0, q - p) if self.outer is None else (p, q)
        size = self.loc.shape[-1]
        right = self.spectrum ** (2 * q) * (1 if self.gain is None else jnp.square(self.gain))
        rows = split(CirculantMatrix(right, self.blocks).row().reshape(-1, size), self.blocks)
        scales = None if self.outer is None else split(self.outer.reshape(-1, size), self.blocks)
        total: Any = 0
        for i, window in enumerate(windows):
            y = window.weights(p)
            y = y if scales is None else y * window.take(scales[i])
            independent = self.gain is None and q == 0
            # y' circ(g^2 lambda^2q) y
            total = total + (jnp.square(y).sum(-1) if independent else window.form(y, rows[i]))
        return total.T

    def feature_covariance(self, A: Array) -> Array:
        half = self.half(A)
        return matmul(half, half.mT)

    @property
    def variance(self) -> Array:
        eye = jnp.eye(self.loc.shape[-1], dtype=self.loc.dtype)
        return jnp.square(self.half(eye)).sum(-1).reshape(self.loc.shape)

    @property
    def covariance(self) -> Array:
        """Covariances of v, (P, M, M) or (M, M): for small M."""
        eye = jnp.eye(self.loc.shape[-1], dtype=self.loc.dtype)
        return self.feature_covariance(eye).reshape(*self.loc.shape, self.loc.shape[-1])

    def from_white(self, white: Array) -> Array:
        p, q = self.powers
        # m + Lambda^-p H Gamma_2 H diag(g) H Gamma_1 H Lambda^q eps
        x = white * self.spectrum**q
        x = _at_sites(self.inner, x, self.blocks)
        x = x if self.gain is None else x * self.gain
        x = _at_sites(self.outer, x, self.blocks)
        return self.loc + x * self.spectrum**-p

    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        if intermediates:
            (white,) = intermediates
        else:
            p, q = self.powers
            inverse = lambda x: None if x is None else 1 / x  # noqa: E731
            # eps = R^-1 (v - m); the inverse of H Gamma H is H Gamma^-1 H.
            x = _at_sites(inverse(self.outer), (value - self.loc) * self.spectrum**p, self.blocks)
            x = x if self.gain is None else x / self.gain
            white = _at_sites(inverse(self.inner), x, self.blocks) * self.spectrum**-q
        density = log_density(white, self.log_determinant())
        return density.sum(-1) if self.event_dim == 2 else density

    def log_determinant(self) -> Array:
        """log det R, shape (P,) or ()."""
        p, q = self.powers
        found = (q - p) * jnp.log(self.spectrum).sum(-1)  # |det H| = 1
        for factor in (self.outer, self.gain, self.inner):
            found = found + (0 if factor is None else jnp.log(jnp.abs(factor)).sum(-1))
        return found

    def squared_norm(self) -> Array:
        r""":math:`\mathrm{tr}(R R^\top)`, shape (P,) or (): O(M log M), or O(M^2 log M) where there is an ``inner``."""
        if self.inner is not None:
            require_room("its divergence", *2 * self.loc.shape[-1:])
            return self.variance.sum(-1)
        p, q = self.powers
        # tr(R R') = tr(C_l Gamma_2 C_r Gamma_2), C_l = H Lambda^-2p H, C_r = H diag(g^2 lambda^2q) H;
        # without Gamma_2 it is sum_k g_k^2 lambda_k^(2q - 2p).
        right = self.spectrum ** (2 * q) * (1 if self.gain is None else jnp.square(self.gain))
        if self.outer is None:
            return (right * self.spectrum ** (-2 * p)).sum(-1)
        left = CirculantMatrix(self.spectrum ** (-2 * p), self.blocks)
        return left.sandwich(self.outer, CirculantMatrix(right, self.blocks), self.outer)


def _at_sites(scale: Array | None, x: Array, blocks: Blocks) -> Array:
    """H diag(scale) H x."""
    return x if scale is None else hartley(scale * hartley(x, blocks), blocks)


@kl_divergence.register(RingBelief, InducingPrior)
def _kl_ring_belief(q: RingBelief, prior: InducingPrior) -> Array:
    """In the form of ``gaussians.kl_full``."""
    # (tr R R' + m'm - M) / 2 - log|det R|
    square = q.squared_norm() + jnp.square(q.loc).sum(-1) - q.loc.shape[-1]
    return (0.5 * square - q.log_determinant()).sum()
