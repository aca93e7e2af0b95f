"""The guide in which pseudo-inputs go through all layers, and pseudo-observations there say what each layer is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpyro_dgp._checks import known_keywords
from numpyro_dgp.guides.guide import INIT, Other
from numpyro_dgp.guides.presets import InducingPoint
from numpyro_dgp.guides.rules.inducing_values import Full
from numpyro_dgp.guides.rules.pseudo_observations import PseudoObservations
from numpyro_dgp.guides.rules.rule import Rule
from numpyro_dgp.guides.rules.single_numbers import Delta, Normal

__all__ = ["GlobalInducing"]


class GlobalInducing(InducingPoint):
    r"""Inducing values that depend on those of all layers below, by pseudo-inputs that go through the program.

    .. math::
        q = \prod_\ell q(v^\ell \mid v^{<\ell}) \prod_n p(h^\ell_n \mid v^\ell, h^{\ell-1}_n), \qquad
        q(v^\ell_p \mid v^{<\ell}) \propto N(v^\ell_p;\, 0, I)\,
        N\bigl(t^\ell_p;\; m^\ell_p(\tilde X^{\ell-1}) + A^\ell(\tilde X^{\ell-1})\, v^\ell_p,\;
        (\Gamma^\ell_p \Gamma^{\ell\top}_p)^{-1}\bigr)

    with the features A of the layer. The pseudo-inputs :math:`\tilde X^0` (G, D), with the columns of X, stand in for
    X: the program itself runs on them, at the inducing values drawn so far, and every layer takes its mean, so that
    :math:`\tilde X^{\ell-1}` is what the layer is called with there. A layer that is called several times has its
    pseudo-observations at the first call. Learned are :math:`\tilde X^0`, and per layer the pseudo-observations
    :math:`t^\ell` (G, P) and the triangular roots :math:`\Gamma^\ell` (P, G, G) of their precisions; for a scalar
    function (G,) and (G, G). A latent per datum has a learned pseudo-value for every pseudo-input.

    The draw of a lower layer thus moves the inputs at which the layer above is tied down. Under ``dgp.ELBO`` inducing
    values that others depend on are drawn, once for all data, and the rest is integrated out; every divergence
    :math:`\mathrm{KL}[q(v^\ell \mid v^{<\ell}) \,\|\, N(0, I)]` is in closed form given the draws. The draws make
    gradients noisier than those of ``InducingPoint``: take several, ``ELBO(num_particles=...)``.

    Parameters start at centres of the rows of X by k-means, :math:`t^\ell = m^\ell(\tilde X^{\ell-1})`, and
    :math:`\Gamma^\ell = I / s`.

    Other arguments with as many rows as X are taken for data, and cut or repeated to G rows; compute inducing inputs
    outside of the program. Open layers in the order in which values go through them. These Gaussians have no
    parameters in which natural gradients could be taken: use Adam.

    Args:
        model: the program.
        num_inducing: the number of inducing points, G.
        inputs: name of the argument that the pseudo-inputs stand for; by default the first.
        diagonal: whether :math:`\Gamma` is diagonal: positive numbers (P, G), or (G,).
        scale: initial standard deviation s of pseudo-observations, relative to that of the function; by default 1e-2
            for inner layers, else 1.
        labels: columns of the argument that hold labels of categories; those of the pseudo-inputs are labels then, and
            stay as they are.
        latent: rule for latents per datum; ``Normal()`` by default.
        other: rule for hyperparameters, ``Delta()`` (default) or ``Normal()``, or a NumPyro autoguide class.
        exact: rule for exact layers; ``Full()`` by default.
        sites: rules for single sites by name.
        prefix: part of the names of parameters.
        init_loc_fn: NumPyro init strategy for sites that are not function values.
        num_samples: K, importance samples of the latents of every datum; ``None`` for the plain bound.
        doubly_reparameterised: whether their proposals have doubly reparameterised gradients.

    Raises:
        ValueError: a number of pseudo-inputs that is not a positive integer, a scale that is not positive, arguments
            that it does not have, ``inducing`` and ``hidden`` among them; in a call, an argument that does not hold
            rows, fewer distinct rows than pseudo-inputs, columns of labels that it does not have, layers in another
            order, or inducing values of something that is no function with features.

    Example:
        >>> import jax, numpyro, optax
        >>> import jax.numpy as jnp
        >>> import numpyro.distributions as dist
        >>> import numpyro_dgp as dgp
        >>> from numpyro.infer import SVI
        >>> from numpyro_dgp.guides import GlobalInducing
        >>> def model(X, y=None):
        ...     f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(jnp.linspace(0, 1, 5)[:, None]), outputs=2)
        ...     g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(jnp.linspace(-1, 1, 8).reshape(4, 2)))
        ...     with numpyro.plate("data", len(X)):
        ...         h = numpyro.sample("h", f(X))
        ...         numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)
        >>> X = jnp.linspace(0, 1, 20)[:, None]
        >>> svi = SVI(model, GlobalInducing(model, num_inducing=6), optax.adam(0.01), dgp.ELBO())
        >>> result = svi.run(jax.random.key(0), 20, X, X[:, 0] ** 2, progress_bar=False)
        >>> result.params["auto_pseudo_inputs"].shape, result.params["f_auto_root"].shape
        ((6, 1), (2, 6, 6))

    Source: Ober and Aitchison (2021), where a layer is represented by its values at the pseudo-inputs themselves; here
    by the inducing values that the program gives it.
    """

    @known_keywords(
        inducing="pseudo-observations say what they are here; give one layer a rule of its own by sites={'f': ...}",
        hidden="hidden layers follow the model here; give one layer a rule of its own by sites={'h': ...}",
    )
    def __init__(
        self,
        model: Callable[..., Any],
        *,
        num_inducing: int,
        inputs: str | None = None,
        diagonal: bool = False,
        scale: float | None = None,
        labels: Sequence[int] = (),
        latent: Rule = Normal(),
        other: Other = Delta(),
        exact: Rule = Full(),
        sites: Mapping[str, Rule] | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = INIT,
        num_samples: int | None = None,
        doubly_reparameterised: bool = False,
    ) -> None:
        super().__init__(
            model,
            inducing=PseudoObservations(num_inducing, inputs, diagonal, scale, labels),
            latent=latent,
            other=other,
            exact=exact,
            sites=sites,
            prefix=prefix,
            init_loc_fn=init_loc_fn,
            num_samples=num_samples,
            doubly_reparameterised=doubly_reparameterised,
        )

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | vars(self.choices.rules["inducing"])
