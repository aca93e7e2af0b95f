"""Many chains that move together: NUTS, in which every step waits for the longest trajectory of all chains, against
ChEES-HMC of blackjax, in which all chains have trajectories of one length.

``pip install blackjax; python benchmarks/chees.py`` samples the program of ``benchmarks/mcmc.py`` with its last layer
integrated, both samplers from the same points: the median of a fit, with noise on the unconstrained scale. The cost is
counted in gradients: of a vectorised step, the number of chains times the longest trajectory. Effective sizes and R-hat
are those of what the data identify.
"""

from __future__ import annotations

import argparse
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from implementations.mcmc_programs import step, step_data
from implementations.mcmc_samplers import start_of
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import initialize_model

import numpyro_dgp as dgp


def nuts(
    program: Any, data: Any, starts: Any, options: argparse.Namespace
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Draws by site, and the gradients of every vectorised step in warm-up and afterwards."""
    mcmc = MCMC(
        NUTS(program),
        num_warmup=options.warmup,
        num_samples=options.draws,
        num_chains=options.chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.warmup(jax.random.key(1), *data, init_params=starts, extra_fields=("num_steps",), collect_warmup=True)
    before = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["num_steps"]).max(0)
    mcmc.run(jax.random.key(2), *data, extra_fields=("num_steps",))
    after = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["num_steps"])
    print(f"NUTS: mean trajectory {after.mean():.0f}, longest of {options.chains} chains {after.max(0).mean():.0f}")
    return mcmc.get_samples(), options.chains * before, options.chains * after.max(0)


def chees(
    program: Any, data: Any, starts: Any, options: argparse.Namespace
) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """As :func:`nuts`."""
    model = initialize_model(jax.random.key(0), program, model_args=data)
    unravel = ravel_pytree(model.param_info.z)[1]  # positions are rows of a matrix to blackjax
    starts = jax.vmap(lambda z: ravel_pytree(z)[0])(starts)

    def log_density(z: jax.Array) -> jax.Array:
        return -model.potential_fn(unravel(z))

    warmup = blackjax.chees_adaptation(
        log_density,
        options.chains,
        mass_matrix_estimation="diagonal",
        adaptation_info_fn=lambda state, info, adaptation: info.num_integration_steps,
    )
    (states, parameters), info = warmup.run(
        jax.random.key(1), starts, 0.05, optax.adam(0.05), options.warmup, max_sampling_steps=options.draws
    )
    step = jax.vmap(blackjax.dynamic_hmc(log_density, **parameters).step)

    @jax.jit
    def sample(key: jax.Array, states: Any) -> Any:
        def one(states: Any, key: jax.Array) -> Any:
            states, info = step(jax.random.split(key, options.chains), states)
            return states, (states.position, info.num_integration_steps, info.acceptance_rate)

        return jax.lax.scan(one, states, jax.random.split(key, options.draws))[1]

    positions, steps, accepted = sample(jax.random.key(2), states)
    print(f"ChEES: mean trajectory {np.mean(steps):.0f}, step size {float(parameters['step_size']):.2g}, "
          f"accepted {float(accepted.mean()):.2f}")  # fmt: skip
    flat = jnp.swapaxes(positions, 0, 1).reshape(-1, positions.shape[-1])
    values = jax.lax.map(lambda z: model.postprocess_fn(unravel(z)), flat, batch_size=100)
    before = np.asarray(info._wrapped_info)
    return values, options.chains * before.max(1), options.chains * np.asarray(steps).max(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[60, 200])
    parser.add_argument("--inducing", type=int, default=20)
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--steps", type=int, default=3000, help="of the fit")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.inducing, options.chains = [12], 4, 4
        options.warmup, options.draws, options.steps = 10, 8, 20
    numpyro.enable_x64()
    table = ["| rows | sampler | gradients in warm-up | of the draws | R-hat | smallest ESS | per 1000 gradients |",
             "|---|" + "---|" * 6]  # fmt: skip
    for rows in options.rows:
        target, test = step(rows, options.inducing, 0), step_data(20, 1)[0]
        model, data = target.model, target.data
        program = dgp.for_mcmc(model, collapse=True)
        median = start_of(target, options.steps).strategy
        start = initialize_model(jax.random.key(0), program, model_args=data, init_strategy=median).param_info.z
        leaves, tree = jax.tree.flatten(start)
        keys = jax.random.split(jax.random.key(3), len(leaves))
        starts = jax.tree.unflatten(
            tree,
            [z + 0.1 * jax.random.normal(k, (options.chains, *z.shape)) for z, k in zip(leaves, keys, strict=True)],
        )
        for name, sampler in {"NUTS": nuts, "ChEES": chees}.items():
            values, before, after = sampler(program, data, starts, options)
            posterior = dgp.Posterior(program, samples=values)
            found = dgp.diagnostics.convergence(posterior, *data, test=(test,), num_chains=options.chains)
            cost = after.sum()
            table.append(
                f"| {rows} | {name} | {before.sum()} | {cost} | {found.r_hat:.2f} | {found.ess:.0f} | "
                f"{1000 * found.ess / cost:.2f} |"
            )
            print(table[-1], flush=True)
    print("\n".join(table))


if __name__ == "__main__":
    main()
