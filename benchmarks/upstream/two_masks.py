"""A value that no line computes: the smallest program of the report in ``two_masks.md``."""

import jax
import jax.numpy as jnp


def root(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)


def program(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    s = root(jnp.square(x[:, None] / 0.4 - x / 0.4))
    return s[0, 0], (1 + s) * jnp.exp(-s)


x = jnp.linspace(-1, 1, 50) ** 3
compiled, eager = (jnp.diag(f(x)[1]).min() for f in (jax.jit(program), program))
print(f"JAX {jax.__version__}: smallest entry of the diagonal {compiled:.3f} compiled, {eager:.3f} otherwise")
