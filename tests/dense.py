"""Dense, slow and obvious versions of what the package computes, in NumPy."""

import numpy as np


def gram(k, X1, X2):
    """Gram matrix of a function of two rows, one pair at a time."""
    return np.array([[k(a, b) for b in X2] for a in X1])


def rbf(X1, X2, variance=1.0, lengthscale=1.0):
    difference = (X1[:, None] - X2[None]) / lengthscale
    return variance * np.exp(-0.5 * (difference**2).sum(-1))


def log_normal(y, mean, covariance):
    residual = y - mean
    sign, logdet = np.linalg.slogdet(covariance)
    assert sign > 0
    return -0.5 * (residual @ np.linalg.solve(covariance, residual) + logdet + len(y) * np.log(2 * np.pi))


def kl(m0, S0, m1, S1):
    inverse = np.linalg.inv(S1)
    logdet = np.linalg.slogdet(S1)[1] - np.linalg.slogdet(S0)[1]
    return 0.5 * (np.trace(inverse @ S0) + (m1 - m0) @ inverse @ (m1 - m0) - len(m0) + logdet)


def svgp(Kzz, Kzx, Kxx, m, S):
    """Posterior mean and covariance from unwhitened q(u) = N(m, S), Salimbeni (2020), equations 1.28-1.29."""
    W = np.linalg.solve(Kzz, Kzx).T
    return W @ m, Kxx + W @ (S - Kzz) @ W.T


def svgp_bound(y, noise, Kzz, Kzx, Kxx, m, S):
    """Hensman's bound with a Gaussian likelihood, from unwhitened q(u) = N(m, S)."""
    mean, covariance = svgp(Kzz, Kzx, Kxx, m, S)
    expected = -0.5 * ((y - mean) ** 2 + np.diag(covariance)) / noise**2 - 0.5 * np.log(2 * np.pi * noise**2)
    return expected.sum() - kl(m, S, np.zeros(len(m)), Kzz)


def titsias(y, noise, Kzz, Kzx, Kxx):
    """Collapsed bound, and the optimal unwhitened q(u) = N(m, S)."""
    Q = Kzx.T @ np.linalg.solve(Kzz, Kzx)
    bound = log_normal(y, np.zeros(len(y)), Q + noise**2 * np.eye(len(y))) - 0.5 * np.trace(Kxx - Q) / noise**2
    Sigma = np.linalg.inv(Kzz + Kzx @ Kzx.T / noise**2)
    return bound, Kzz @ Sigma @ Kzx @ y / noise**2, Kzz @ Sigma @ Kzz


def titsias_upper(y, noise, Kzz, Kzx, Kxx):
    """Titsias (2014): an upper bound on the evidence, from the trace of K - Q."""
    n = len(y)
    Q = Kzx.T @ np.linalg.solve(Kzz, Kzx)
    slack = np.trace(Kxx - Q)
    logdet = np.linalg.slogdet(Q + noise**2 * np.eye(n))[1]
    quadratic = y @ np.linalg.solve(Q + (slack + noise**2) * np.eye(n), y)
    return -0.5 * (quadratic + logdet + n * np.log(2 * np.pi))
