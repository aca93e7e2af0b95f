"""Gaps of low-rank Gaussians to the optimal one, of one layer under a Gaussian likelihood: KL[q || optimum] in nats.

The table in the docstring of ``guides.LowRank``: ``python benchmarks/low_rank_gaps.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import numpyro_dgp as dgp
from numpyro_dgp.math.gaussians import log_determinant, log_determinant_low_rank, signed

M, N, NOISE, RANKS = 80, 200, 0.3, (1, 5, 10, 20)
KERNELS = {"RBF, 0.1": dgp.kernels.RBF(1.0, 0.1), "Matern12, 0.2": dgp.kernels.Matern12(1.0, 0.2)}


def gap(kernel: dgp.kernels.Kernel, rank: int, precision: bool) -> float:
    """The smallest that L-BFGS finds, from a start that is almost diagonal."""
    rng = np.random.default_rng(0)
    X, Z = jnp.array(np.sort(rng.uniform(0, 1, (N, 1)), 0)), jnp.linspace(0, 1, M)[:, None]
    L = jnp.linalg.cholesky(kernel.gram(Z) + 1e-10 * jnp.eye(M))
    A = jnp.linalg.solve(L, kernel(Z, X)).T
    optimum = jnp.eye(M) + A.T @ A / NOISE**2

    def divergence(numbers: jax.Array) -> jax.Array:
        scale, U = jnp.exp(numbers[:M]), numbers[M:].reshape(M, rank)
        F, sign = signed(scale, U, precision)
        trace = (jnp.diagonal(optimum) * scale**2).sum() + sign * (F * (optimum @ F)).sum()
        log_determinants = log_determinant_low_rank(scale, U, precision) + log_determinant(jnp.linalg.cholesky(optimum))
        return 0.5 * (trace - M) - log_determinants

    value = jax.jit(jax.value_and_grad(divergence))
    start = np.concatenate([np.zeros(M), 0.1 * rng.normal(size=M * rank) / np.sqrt(M)])
    return minimize(
        lambda x: [*map(np.asarray, value(x))], start, jac=True, options={"maxiter": 400}, method="L-BFGS-B"
    ).fun


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for name, kernel in KERNELS.items():
        for precision in (True, False):
            gaps = (f"{gap(kernel, rank, precision):6.1f}" for rank in RANKS)
            print(f"{name}; {'precision' if precision else 'covariance'}".ljust(28), *gaps, flush=True)
