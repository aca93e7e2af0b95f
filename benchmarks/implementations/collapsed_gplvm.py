"""The Bayesian GP latent-variable model with the optimal q(u) in closed form, by L-BFGS.

RBF kernel, Gaussian posteriors of the latent inputs, statistics of the kernel under them in closed form.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy.optimize import minimize


def collapsed_gplvm(
    Y: jax.Array, start: np.ndarray, Z: np.ndarray, variance: float, noise: float, steps: int
) -> np.ndarray:
    """The bound per datum with the optimal q(u) in closed form (Titsias and Lawrence, 2010), by iteration of L-BFGS."""
    (N, P), M = Y.shape, len(Z)
    free = {
        "variance": jnp.log(variance),
        "noise": jnp.log(noise),
        "scales": jnp.zeros(start.shape[1]),
        "Z": jnp.asarray(Z),
    }
    free |= {"mean": jnp.asarray(start), "deviation": jnp.full(start.shape, math.log(0.1))}
    flat, unravel = ravel_pytree(free)

    def loss(x: jax.Array) -> jax.Array:
        p = unravel(x)
        variance, s2, l2 = jnp.exp(p["variance"]), jnp.exp(2 * p["noise"]), jnp.exp(2 * p["scales"])
        mean, spread, Z = p["mean"], jnp.exp(2 * p["deviation"]), p["Z"]
        half = jnp.square(mean[:, None] - Z) / (l2 + spread[:, None])
        psi1 = variance * jnp.exp(-0.5 * half.sum(-1) - 0.5 * jnp.log1p(spread / l2).sum(-1)[:, None])
        middle, apart = 0.5 * (Z[:, None] + Z), jnp.square(Z[:, None] - Z) / (4 * l2)
        away = jnp.square(mean[:, None, None] - middle) / (l2 + 2 * spread[:, None, None])
        log_psi2 = -(away + apart).sum(-1) - 0.5 * jnp.log1p(2 * spread / l2).sum(-1)[:, None, None]
        psi2 = variance**2 * jnp.exp(log_psi2).sum(0)
        K = variance * jnp.exp(-2 * apart.sum(-1)) + 1e-10 * variance * jnp.eye(M)
        L = jnp.linalg.cholesky(K)
        inner = jnp.linalg.solve(L, jnp.linalg.solve(L, psi2).T) / s2
        B = jnp.linalg.cholesky(jnp.eye(M) + inner)
        c = jax.scipy.linalg.solve_triangular(B, jnp.linalg.solve(L, psi1.T @ Y), lower=True) / s2
        bound = -0.5 * N * P * jnp.log(2 * jnp.pi * s2) - P * jnp.log(jnp.diag(B)).sum() - 0.5 * (Y**2).sum() / s2
        bound += 0.5 * (c**2).sum() - 0.5 * P * (N * variance / s2 - jnp.trace(inner))
        kl = 0.5 * (spread + mean**2 - 1 - jnp.log(spread)).sum()
        return -(bound - kl) / N

    slope = jax.jit(jax.value_and_grad(loss))
    losses: list[float] = []
    minimize(
        lambda x: tuple(np.asarray(a, float) for a in slope(jnp.asarray(x))),
        np.asarray(flat),
        jac=True,
        method="L-BFGS-B",
        callback=lambda intermediate_result: losses.append(float(intermediate_result.fun)),
        options={"maxiter": steps, "maxfun": 10 * steps},
    )
    return -np.asarray(losses)
