"""What users see of objects and modules: short texts without addresses, ``dir`` without imported names."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoNormal
from public_api import OPTIONAL, modules

import numpyro_dgp as dgp
from numpyro_dgp._repr import brief
from numpyro_dgp.design import Box, LogExpectedImprovement, Search

G, K = dgp.guides, dgp.kernels
X = np.linspace(0, 1, 1000)[:, None]
PROTOCOLS = [dgp.extend.RandomFunction, dgp.extend.Representation, dgp.extend.BatchSource, dgp.extend.Weights]


def toy(X, y=None):
    f = dgp.gp("f", K.RBF(), dgp.Points(X[:5]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.1)), obs=y)


def schedule(step):
    return 0.1


GUIDE = "inducing=Full(), hidden=Propagate(), latent=Normal(), exact=Full(), other=Delta()"
SHOWN = [
    (G.InducingPoint(toy), f"InducingPoint(model=toy, {GUIDE})"),
    (
        G.InducingPoint(toy, sites={"f": G.Diagonal(0.1)}, other=AutoNormal, importance=G.Importance(3)),
        "InducingPoint(model=toy, inducing=Full(), hidden=Propagate(), latent=Normal(), exact=Full(), "
        "other=AutoNormal, sites={'f': Diagonal(scale=0.1)}, importance=Importance(num_samples=3))",
    ),
    (
        G.MeanField(toy, prefix="p", hidden=G.Normal(0.2)),
        "MeanField(model=toy, inducing=Diagonal(), hidden=Normal(scale=0.2), latent=Normal(), exact=Normal(), "
        "other=Delta(), prefix='p')",
    ),
    (
        G.ImportanceWeighted(toy, num_samples=5),
        "ImportanceWeighted(model=toy, num_samples=5, inducing=Full(), latent=Normal(), other=Delta())",
    ),
    (
        G.Nested(toy, inducing=G.Diagonal()),
        "Nested(model=toy, inducing=Diagonal(), latent=Normal(), other=Delta())",
    ),
    (
        G.Collapsed(toy).on(X, X[:, 0]),
        "Collapsed(model=toy, hidden=Normal(), latent=Normal(), other=Delta())",
    ),
    (
        G.InducingPoint(toy, inducing=G.GlobalInducing(7, diagonal=True)),
        "InducingPoint(model=toy, inducing=GlobalInducing(num_inducing=7, diagonal=True), hidden=Propagate(), "
        "latent=Normal(), exact=Full(), other=Delta())",
    ),
    (
        G.Amortised(lambda x: x, hidden=(4,)),
        "Amortised(network=<lambda>, hidden=(4,))",
    ),
    (dgp.ELBO(), "ELBO()"),
    (dgp.ELBO(8), "ELBO(num_particles=8)"),
    (
        dgp.optim.NaturalGradient(G.MeanField(toy), schedule, optax.adam(0.1), sites=["f"]),
        "NaturalGradient(guide=MeanField(model=toy, inducing=Diagonal(), hidden=Normal(), latent=Normal(), "
        "exact=Normal(), other=Delta()), step_size=schedule, "
        "optimizer=GradientTransformationExtraArgs(init=init_fn, update=update_fn), sites=['f'])",
    ),
    (
        dgp.mcmc.Gibbs(toy, blocks={"f": dgp.mcmc.Slice(2.0)}, collapse=False),
        "Gibbs(model=for_mcmc(model=toy, collapse=False), blocks={('f',): Slice(width=2.0)})",
    ),
    (
        dgp.mcmc.SGHMC(toy, {"s": jnp.ones(3)}, step_size=0.1),
        "SGHMC(model=toy, params={'s': [1, 1, 1]}, step_size=0.1)",
    ),
    (dgp.for_mcmc(toy, noncentered=False), "for_mcmc(model=toy, noncentered=False)"),
    (dgp.mcmc.NonCentered(), "NonCentered()"),
    (dgp.minibatch(toy, data=1000), "minibatch(data=1000, fn=toy)"),
    (
        dgp.Posterior(toy, G.MeanField(toy), {"f_auto_loc": jnp.zeros(5), "noise": jnp.array(0.25)}),
        "Posterior(model=toy, guide=MeanField(model=toy, inducing=Diagonal(), hidden=Normal(), latent=Normal(), "
        "exact=Normal(), other=Delta()), params={'f_auto_loc': [0, 0, 0, 0, 0], 'noise': 0.25})",
    ),
    (
        dgp.Posterior(toy, samples={f"s{i}": np.zeros(9) for i in range(9)}),
        "Posterior(model=toy, samples={'s0': float64[9], 's1': float64[9], 's2': float64[9], 's3': float64[9], "
        "'s4': float64[9], 's5': float64[9], ... 3 more})",
    ),
    (dgp.densities.Mixture(jnp.zeros((3, 4)), jnp.ones((3, 4))), "Mixture(means=float64[3,4], variances=float64[3,4])"),
    (
        dgp.densities.JointMixture(np.zeros((3, 4)), np.ones((3, 4, 4)), np.ones((3, 4, 4))),
        "JointMixture(means=float64[3,4], covariances=float64[3,4,4], prior_covariances=float64[3,4,4])",
    ),
    (dgp.Stream((X, X[:, 0]), 5), "Stream(arrays=(float64[1000,1], float64[1000]), batch_size=5)"),
    (K.RBF(1.0, np.ones(3)) + K.Matern52(lengthscale=jnp.array(0.5)) * 2.0,
     "Sum(left=RBF(lengthscale=[1, 1, 1]), right=Product(left=Matern52(lengthscale=0.5), "
     "right=Constant(variance=2.0)))"),
    (K.as_kernel(lambda a, b: a @ b.T), "FromCallable(function=<lambda>)"),
    (dgp.means.LinearMean(np.eye(2), np.zeros(2)), "LinearMean(W=[[1, 0], [0, 1]], b=[0, 0])"),
    (dgp.Points(jnp.zeros((4, 1))), "Points(Z=[[0], [0], [0], [0]])"),
    (dgp.Points(jnp.zeros((9, 1))), "Points(Z=float64[9,1])"),
    (dgp.likelihoods.RobustMax(jnp.zeros((3, 4))), "RobustMax(batch_shape=(3,), event_shape=())"),
    (dgp.initial.Standardizer.fit(X), "Standardizer(loc=[0.5], scale=[0.288964])"),
    (Box([[0.0, 1.0]]), "Box(bounds=[[0, 1]])"),
    (
        Search(toy, G.InducingPoint, [[0.0, 1.0]], lambda posterior, seen, key: None, q=2),
        "Search(model=toy, guide=InducingPoint, bounds=Box(bounds=[[0, 1]]), acquisition=<lambda>, q=2)",
    ),
    (
        LogExpectedImprovement(dgp.Posterior(toy, samples={"f": X}), jax.random.key(0), best=jnp.array(2.5)),
        "LogExpectedImprovement(posterior=Posterior(model=toy, samples={'f': float64[1000,1]}), key=key<fry>[], "
        "best=2.5)",
    ),
    (dgp.Basis(np.array([-1.5, 0.0]), 2.0, 5), "Basis(low=[-1.5, 0], high=2.0, size=(5, 5))"),
    (
        dgp.diagnostics.coverage(np.linspace(0, 1, 101), [0.5, 0.9]),
        "Coverage(levels=[0.5, 0.9], share=[0.50495, 0.90099], error=[0.0497519, 0.0298511])",
    ),
    (
        dgp.diagnostics.Simulated.of({"f": np.arange(20)}, 19),
        "Simulated(ranks={'f': int64[20]}, num_samples=19, symmetry={'f': 1}, uniform={'f': 1})",
    ),
    (dgp.means.ConstantMean(jnp.array([1, 2])), "ConstantMean(value=[1, 2])"),
    (dgp.means.ConstantMean(np.zeros(0)), "ConstantMean(value=float64[0])"),
    (dgp.means.ConstantMean(jax.random.split(jax.random.key(0))), "ConstantMean(value=key<fry>[2])"),
    (dgp.means.ConstantMean(np.array(["a", "b"])), "ConstantMean(value=<U1[2])"),
    (dgp.means.ConstantMean(np.array([True, False])), "ConstantMean(value=[True, False])"),
    (dgp.Checkpoint("fit.npz", 100), "Checkpoint(path='fit.npz', every=100)"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), SHOWN, ids=lambda value: value.split("(")[0] if type(value) is str else "")
def test_repr(value, text):
    assert repr(value) == text


@pytest.mark.smoke
def test_repr_computes_nothing():
    """Traced and deleted arrays have no values, and text of large ones is short."""
    seen = []

    @jax.jit
    def traced(lengthscale, Z):
        kernel = K.RBF(lengthscale=lengthscale)
        with numpyro.handlers.seed(rng_seed=0):
            f = dgp.gp("f", kernel, dgp.Points(Z))
        seen.extend([repr(kernel), repr(f), repr(f(Z)), repr(f.grad(Z).function)])
        return f(Z).mean

    with jax.checking_leaks():
        traced(0.3, jnp.zeros((2, 1)))
    assert seen[0] == "RBF(lengthscale=float64[])"
    assert seen[2] == "FunctionValues(batch_shape=(2,), event_shape=())"
    assert not any("Tracer" in text or " at 0x" in text for text in seen), seen
    gone = jnp.array(1.0)
    kernel = K.RBF(gone)
    gone.delete()
    assert repr(kernel) == "RBF(variance=float64[])"
    few = jnp.ones(3)
    kernel = K.RBF(lengthscale=few)
    few.delete()
    assert repr(kernel) == "RBF(lengthscale=float64[3])"
    shapes = jax.eval_shape(lambda: K.RBF(jnp.array(2.0)))
    assert repr(shapes) == "RBF(variance=float64[], lengthscale=float64[])"


def test_objects_of_users():
    """Classes that are no dataclasses, containers, long strings, and what has a text with an address."""

    class Walk(K.Kernel):
        def __init__(self, steps, scale=1.0):
            self._steps, self.scale = steps, scale

    class Thing:
        __repr__ = brief

        def __init__(self, name, *, of=(), steps=10):
            self.name, self.of, self.steps = name, of, steps

    assert repr(Walk(5)) == "Walk(steps=5)"
    assert repr(Thing("a" * 99, of=[Walk(1, np.float32(0.1)), object(), dist.Normal(jnp.zeros(3), 1.0)])) == (
        f"Thing(name='{'a' * 60}...', of=[Walk(steps=1, scale=0.1), <object>, "
        "Normal(batch_shape=(3,), event_shape=())])"
    )


def shows_public_names_only(module):
    shown = dir(module)
    assert [name for name in shown if not name.startswith("__")] == sorted(
        name for name in module.__all__ if not name.startswith("__")
    ), module.__name__
    assert {"__doc__", "__file__", "__name__"} <= {*shown}
    assert all(hasattr(module, name) for name in shown)


@pytest.mark.smoke
def test_dir_has_public_names_only():
    places = dict(modules()).values()
    assert len(places) > 10
    for module in places:
        shows_public_names_only(module)


@pytest.mark.parametrize(("name", "needs"), OPTIONAL.items())
def test_so_has_dir_of_modules_that_need_more(name, needs):
    """The smoke tests, which are run without these packages, import this file."""
    pytest.importorskip(needs)
    shows_public_names_only(importlib.import_module(f"numpyro_dgp.{name}"))


def test_every_public_class_has_a_text_of_its_own():
    """None of them inherits the text with an address, but for protocols."""
    for _, module in modules():
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and value not in PROTOCOLS:
                assert value.__repr__ not in (object.__repr__, dist.Distribution.__repr__), f"{module.__name__}.{name}"
