"""Every guide with every representation, pair by pair: the table in ``docs/guide_families.md``."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp import guides as G

rng = np.random.default_rng(0)
N, NOISE = 12, 0.3
LINE, IMAGES = rng.uniform(-1, 1, (N, 1)), rng.normal(size=(N, 9))
Y = rng.normal(size=N)
PATCHES = dgp.kernels.Patches((3, 3), (2, 2))
MATERN, ZONAL = dgp.kernels.Matern32(0.5, 0.8), dgp.kernels.Zonal(dgp.kernels.Matern52(0.5, 0.7))
CONVOLVED = dgp.kernels.Convolutional(dgp.kernels.RBF(0.5), PATCHES)
# By column of the table: what a layer is held by, its kernel, inputs.
HELD = {
    "`Points`": (dgp.Points(np.linspace(-1, 1, 5)[:, None]), dgp.kernels.RBF(0.5, 0.8), LINE),
    "`PointsAndSlopes`": (dgp.functions.PointsAndSlopes.with_gradients(np.linspace(-1, 1, 3)[:, None]), MATERN, LINE),
    "`InducingPatches`": (dgp.functions.InducingPatches(rng.normal(size=(4, PATCHES.size))), CONVOLVED, IMAGES),
    "`Grid`": (dgp.Grid(-4.0, 4.0, 12), MATERN, LINE),
    "`Basis`": (dgp.Basis(-4.0, 4.0, 10), MATERN, LINE),
    "`StateSpace`": (dgp.StateSpace(np.linspace(-1, 1, 4)), MATERN, LINE),
    "`Harmonics`": (dgp.Harmonics(1, 4), ZONAL, LINE),
    "`Neighbours`": (dgp.Neighbours(LINE, num=3), MATERN, LINE),
    "exact": (None, MATERN, LINE),
}
AT_ROWS = ("`Neighbours`", "exact")  # values at all rows, outside of plates


def moved(X):
    """Inputs moved by a latent of each datum."""
    return X + 0.1 * dgp.latent("w", X, 1)[..., -1:]


def program(held, layers=1, noise=None, latent=False):
    inducing, kernel, inputs = HELD[held]
    width = inputs.shape[1]

    def at_rows(X, y=None):
        if latent:
            with numpyro.plate("data", N):
                X = moved(X)
        for name in "hv"[2 - layers :]:
            f = dgp.gp("f" + name, kernel, inducing, outputs=None if name == "v" else 1, mean=dgp.means.ZeroMean())
            X = numpyro.sample(name, f(X, noise=noise if name == "h" else None))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(X, NOISE), obs=y)

    def model(X, y=None):
        if layers == 2:
            f = dgp.gp("f", kernel, inducing, outputs=width, mean=dgp.means.IdentityMean())
        g = dgp.gp("g", kernel, inducing)
        with numpyro.plate("data", len(X)):
            if latent:
                X = moved(X)
            if layers == 2:
                X = numpyro.sample("h", f(X, noise=noise))
            numpyro.sample("y", dgp.Likelihood(g(X), lambda v: dist.Normal(v, NOISE)), obs=y)

    return at_rows if held in AT_ROWS else model


def with_rule(rule):
    """A rule for the inducing values, or the values at all rows, of every layer."""
    return lambda model, held: G.InducingPoint(model, **{"exact" if held in AT_ROWS else "inducing": rule})


def at_hidden(rule):
    return lambda model, held: G.InducingPoint(model, sites={"h": rule})


def with_natural_gradients(model, held):
    guide = G.InducingPoint(model)
    return guide, dgp.optim.NaturalGradient(guide, 0.5, optax.adam(0.01))


def markov(model, held):
    return G.InducingPoint(model, sites={"g": G.MarkovInducing(below="f"), "h": G.GivenInducing("free")})


ONE, DEEP, NOISY = {"layers": 1}, {"layers": 2}, {"layers": 2, "noise": 0.1}
LATENT = {"latent": True}
# By row of the table: a guide, or None for a chain, and the program.
ROWS = {
    "`InducingPoint`": (lambda m, h: G.InducingPoint(m), DEEP),
    "`Diagonal`": (with_rule(G.Diagonal()), ONE),
    "`LowRank`": (with_rule(G.LowRank(2)), ONE),
    "`FullJoint`": (with_rule(G.FullJoint()), ONE),
    "`MixtureOfGaussians`": (with_rule(G.MixtureOfGaussians(2)), ONE),
    "`Flow`": (with_rule(G.Flow()), ONE),
    "`GlobalInducing`": (lambda m, h: G.InducingPoint(m, inducing=G.GlobalInducing(4)), DEEP),
    "`MeanField`": (lambda m, h: G.MeanField(m), NOISY),
    "`MeanField` without process noise": (lambda m, h: G.MeanField(m), DEEP),
    "`GivenInducing`": (at_hidden(G.GivenInducing()), NOISY),
    "`JointOutputs`": (at_hidden(G.JointOutputs()), NOISY),
    "`GivenBelow`": (at_hidden(G.GivenBelow()), NOISY),
    "`MarkovInducing`": (markov, NOISY),
    "`ImportanceWeighted`": (lambda m, h: G.ImportanceWeighted(m, num_samples=3), LATENT | DEEP),
    "`Quadrature`": (lambda m, h: G.InducingPoint(m, latent=G.Quadrature(4)), LATENT),
    "`Collapsed`, one layer": (lambda m, h: G.Collapsed(m), ONE),
    "`Collapsed`, two layers": (lambda m, h: G.Collapsed(m), NOISY),
    "`Nested`, one layer": (lambda m, h: G.Nested(m), ONE),
    "`Nested`, two layers": (lambda m, h: G.Nested(m), NOISY),
    "`Markov`": (lambda m, h: G.Markov(m), NOISY),
    "`Circulant` and others of rings": (with_rule(G.Circulant()), DEEP),
    "`SparseFactor`": (with_rule(G.SparseFactor()), ONE),
    "`OpperArchambeau`": (with_rule(G.OpperArchambeau()), ONE),
    "natural gradients": (with_natural_gradients, DEEP),
    "`for_mcmc`: `NUTS`, `SGHMC`, autoguides": (None, DEEP),
}


def evaluate(held, row):
    """The loss of the pair, or the density that a chain moves in, traced and not computed."""
    make, options = ROWS[row]
    model, data = program(held, **options), (jnp.asarray(HELD[held][2]), jnp.asarray(Y))
    if make is None:
        chain = dgp.for_mcmc(model)
        with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
            chain(*data)
        params = {k: s["value"] for k, s in sites.items() if s["type"] == "sample" and not s["is_observed"]}
        return jax.eval_shape(lambda p: numpyro.infer.util.log_density(chain, data, {}, p)[0], params)
    guide = make(model, held)
    guide, optimiser = guide if isinstance(guide, tuple) else (guide, optax.adam(0.01))
    svi = SVI(model, guide, optimiser, dgp.ELBO())
    return jax.eval_shape(lambda *data: svi.evaluate(svi.init(jax.random.key(0), *data), *data), *data)


def table():
    """Cells of the table in the documentation, by row and column."""
    text = (Path(__file__).parents[1] / "docs" / "guide_families.md").read_text()
    lines = text.split("## Pairs")[1].split("\n\n| ")[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in (lines[0], *lines[2:])]
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[1:]}


def test_the_table_has_every_pair():
    found = table()
    assert list(found) == list(ROWS)
    assert all(list(row) == list(HELD) and set(row.values()) <= {"yes", "no"} for row in found.values())


FAST = ("`InducingPoint`", "`Circulant` and others of rings", "`SparseFactor`", "`OpperArchambeau`", "`LowRank`")


@pytest.mark.slow
@pytest.mark.parametrize("row", [row if row in FAST else pytest.param(row, marks=pytest.mark.long) for row in ROWS])
def test_pairs(row):
    """What the table says works has a loss; what it says does not is refused, and the message names what to take."""
    for held, cell in table()[row].items():
        if cell == "yes":
            found = evaluate(held, row)
            assert found.shape == (), held
        else:
            with pytest.raises(ValueError, match=r"guides\.|dgp\.latent|f\.joint|sites="):
                evaluate(held, row)
