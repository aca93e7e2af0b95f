"""What a training step computes, by guide and by likelihood, run by test_checkpoints in processes of their own with
different orders of sets: prints digests as JSON. ``python identities.py SOME`` does a part of them."""

import json
import sys
import zlib

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp.inference.fit_identity import digest

X = jnp.linspace(-1.0, 1.0, 6)[:, None]
Y = jnp.abs(jnp.sin(3 * X[:, 0])) / 2 + 0.1
Z = jnp.linspace(-1.0, 1.0, 3)[:, None]
CONDITIONALS = {
    "Normal": lambda v: dist.Normal(v, 0.1),
    "StudentT": lambda v: dist.StudentT(4.0, v, 0.1),
    "Gamma": lambda v: dist.Gamma(2.0, jnp.exp(v)),
    "Beta": lambda v: dist.BetaProportion(jax.nn.sigmoid(v), 5.0),
    "TruncatedNormal": lambda v: dist.TruncatedNormal(v, 0.3, low=0.0),
    "LogNormal": lambda v: dist.LogNormal(v, 0.3),
    "mixture": lambda v: dist.MixtureSameFamily(
        dist.Categorical(jnp.array([0.3, 0.7])), dist.Normal(v[..., None] + jnp.array([0.0, 1.0]), 0.2)
    ),
    "StudentT of two": lambda v: dist.StudentT(4.0, v[..., 0], jnp.exp(v[..., 1])),
}


def program(X, y=None, *, name="Normal", inducing=None, latents=0, wide=None):
    """Two layers, a hyperparameter, latents per row."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    columns = 1 + latents
    first = dgp.gp("f", dgp.kernels.RBF(1.0, scale), dgp.Points(jnp.tile(Z, (1, columns))), outputs=wide or 1)
    outputs = 2 if name.endswith("of two") else None
    points = dgp.Points(jnp.tile(Z, (1, wide or 1))) if inducing is None else inducing
    last = dgp.gp("g", dgp.kernels.RBF(), points, outputs=outputs)
    with numpyro.plate("data", len(X)):
        x = dgp.latent("w", X, latents) if latents else X
        h = numpyro.sample("h", first(x, noise=0.1))
        numpyro.sample("y", dgp.Likelihood(last(h), CONDITIONALS[name]), obs=y)


def of_process(X, y=None):
    v = numpyro.sample("v", dgp.gp("f", dgp.kernels.RBF(), None)(X))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=v), obs=y)


GUIDES = {
    "full": (G.InducingPoint, {}),
    "mixture": (lambda m: G.InducingPoint(m, inducing=G.MixtureOfGaussians(2)), {}),
    "reflected mixture": (lambda m: G.InducingPoint(m, inducing=G.MixtureOfGaussians(2, reflected=True)), {}),
    "diagonal mixture": (lambda m: G.InducingPoint(m, inducing=G.MixtureOfGaussians(2, of=G.Diagonal())), {}),
    "low-rank mixture": (lambda m: G.InducingPoint(m, inducing=G.MixtureOfGaussians(2, of=G.LowRank(1))), {}),
    "diagonal": (lambda m: G.InducingPoint(m, inducing=G.Diagonal()), {}),
    "low rank": (lambda m: G.InducingPoint(m, inducing=G.LowRank(1)), {}),
    "flow": (lambda m: G.InducingPoint(m, inducing=G.Flow()), {}),
    "joint": (lambda m: G.InducingPoint(m, inducing=G.FullJoint()), {}),
    "delta": (lambda m: G.InducingPoint(m, inducing=G.Delta(), other=G.Delta()), {}),
    "hyperparameters": (lambda m: G.InducingPoint(m, other=G.Normal()), {}),
    "autoguide": (lambda m: G.InducingPoint(m, other=AutoMultivariateNormal), {}),
    "mean field": (G.MeanField, {}),
    "joint outputs": (lambda m: G.InducingPoint(m, sites={"h": G.JointOutputs()}), {"wide": 2}),
    "given inducing": (lambda m: G.InducingPoint(m, sites={"h": G.GivenInducing()}), {}),
    "given below": (lambda m: G.InducingPoint(m, sites={"h": G.GivenBelow()}), {}),
    "Markov": (
        lambda m: G.InducingPoint(m, sites={"g": G.MarkovInducing(below="f"), "h": G.GivenInducing("free")}),
        {},
    ),
    "global": (lambda m: G.InducingPoint(m, inducing=G.GlobalInducing(3)), {}),
    "collapsed": (G.Collapsed, {}),
    "amortised": (lambda m: G.InducingPoint(m, latent=G.Amortised(hidden=(3,))), {"latents": 1}),
    "importance": (lambda m: G.ImportanceWeighted(m, num_samples=2), {"latents": 1}),
    "quadrature": (lambda m: G.InducingPoint(m, latent=G.Quadrature(3)), {"latents": 1}),
    "circulant": (lambda m: G.InducingPoint(m, sites={"g": G.Circulant()}), {"inducing": dgp.Grid(-6.0, 6.0, 8)}),
    "scaled": (lambda m: G.InducingPoint(m, sites={"g": G.ScaledCirculant()}), {"inducing": dgp.Grid(-6.0, 6.0, 8)}),
    "prior scaled": (lambda m: G.InducingPoint(m, sites={"g": G.ScaledPrior()}), {"inducing": dgp.Grid(-6.0, 6.0, 8)}),
    "product": (lambda m: G.InducingPoint(m, sites={"g": G.ScaledProduct()}), {"inducing": dgp.Grid(-6.0, 6.0, 8)}),
    "sites": (lambda m: G.InducingPoint(m, sites={"g": G.WhitenedSites()}), {"inducing": dgp.Grid(-6.0, 6.0, 8)}),
}
OF_PROCESSES = {"Opper-Archambeau": lambda m: G.InducingPoint(m, exact=G.OpperArchambeau())}


def identity(model, guide, y):
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO(2))
    state = jax.eval_shape(lambda: svi.init(jax.random.key(0), X, y))
    found = digest(jax.jit(svi.update).trace(state, X, y).jaxpr)
    return f"{found.operations}, {zlib.crc32(json.dumps(found.constants).encode())}"


def cases():
    for name, (make, settings) in GUIDES.items():
        model = lambda X, y=None, settings=settings: program(X, y, **settings)  # noqa: E731
        yield name, model, make(model), Y
    for name in CONDITIONALS:
        model = lambda X, y=None, name=name: program(X, y, name=name)  # noqa: E731
        yield f"conditional {name}", model, G.InducingPoint(model), Y
    for name, make in OF_PROCESSES.items():
        yield name, of_process, make(of_process), jnp.round(Y).astype(int)


if __name__ == "__main__":
    some = sys.argv[1:]
    found = {}
    for name, *case in cases():
        if not some or name in some:
            found[name] = identity(*case)
    print(json.dumps(found))
