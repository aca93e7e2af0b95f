"""One step on several devices, run by test_streaming in processes of their own: prints what they found as JSON.

``python sharded.py ROWS`` has eight devices in one process; ``python sharded.py ROWS PORT PROCESS`` is one of two
processes with two devices each.
"""

import json
import re
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI

import numpyro_dgp as dgp

ROWS, *HOST = map(int, sys.argv[1:])
jax.config.update("jax_enable_x64", True)
if HOST:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{HOST[0]}", 2, HOST[1])
rng = np.random.default_rng(0)
X = rng.normal(size=(3 * ROWS, 3))
y = np.sin(X[:, 0])


def program(X, y=None):
    f = dgp.gp("f", dgp.kernels.RBF(), dgp.Points(X_SOME), outputs=3, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(), dgp.Points(X_SOME))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.1)), obs=y)


X_SOME = X[:20]
model = dgp.minibatch(program, data=len(X))
guide = dgp.guides.InducingPoint(model)
svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
stream = dgp.Stream((X, y), ROWS, block=8, window=50)
found = {}
if not HOST:
    batch = tuple(map(jnp.asarray, stream.batch(0)))
    params = svi.get_params(svi.init(jax.random.key(0), *batch))
    step = jax.jit(jax.value_and_grad(lambda p, *b: dgp.ELBO().loss(jax.random.key(1), p, model, guide, *b)))
    loss, gradient = step(params, *batch)
    mesh = Mesh(np.asarray(jax.devices()), ("rows",))
    shared = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("rows")))
    other_loss, other_gradient = step(shared, *sharded)
    found["loss"] = abs(float(other_loss / loss) - 1)
    flat, other = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in (gradient, other_gradient))
    found["gradient"] = float(abs(flat - other).max() / abs(flat).max())
    compiled = step.lower(shared, *sharded).compile().as_text()
    found["collectives"] = sorted(set(re.findall(r"\b(all-\w+|collective-\w+|reduce-scatter)\(", compiled)))
    found["alone"] = dgp.fit_stream(svi, jax.random.key(0), 5, stream, progress_bar=False).losses.tolist()
result = dgp.fit_stream(svi, jax.random.key(0), 5, stream, devices=jax.devices(), progress_bar=False)
found["together"] = result.losses.tolist()
again = dgp.fit_stream(svi, jax.random.key(0), 5, stream, devices=jax.devices(), progress_bar=False)
found["again"] = again.losses.tolist()
other = dgp.fit_stream(svi, jax.random.key(1), 5, stream, devices=jax.devices(), progress_bar=False)
found["other seed"] = other.losses.tolist()
if not HOST:
    with tempfile.TemporaryDirectory() as folder:
        for steps in (3, 5):
            resumed = dgp.fit_stream(
                svi,
                jax.random.key(0),
                steps,
                stream,
                devices=jax.devices(),
                checkpoint=f"{folder}/fit.npz",
                progress_bar=False,
            )
    found["resumed"] = resumed.losses.tolist()
    # What was fitted on all devices goes on at one: a fit, predictions by it, new data.
    params = result.params
    moved = dgp.fit(svi, jax.random.key(0), 2, X[:40], y[:40], init_params=params, progress_bar=False)
    start = jax.tree.map(np.asarray, params)
    alone = dgp.fit(svi, jax.random.key(0), 2, X[:40], y[:40], init_params=start, progress_bar=False)
    found["from its parameters"] = np.abs(moved.losses / alone.losses - 1).max().item()
    own = dgp.guides.InducingPoint(program)
    predicted = [dgp.Posterior(program, own, p).predict(jax.random.key(0), X[:5]).mean for p in (params, start)]
    found["predicted"] = np.abs(predicted[0] - predicted[1]).max().item()
    posterior = dgp.Posterior(program, own, params)
    dgp.update(posterior, jax.random.key(0), X[:4], y[:4], num_steps=2, progress_bar=False)
found["devices"] = jax.device_count()
print(json.dumps(found))
