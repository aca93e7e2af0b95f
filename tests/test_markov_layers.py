"""The closed form of Markov inducing values against quadrature, with thin couplings and joint outputs."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from programs import X, Y, Z, agree, bound, draws_of_bound, random_params

import numpyro_dgp as dgp
from numpyro_dgp import guides as G
from numpyro_dgp import kernels as k
from numpyro_dgp.functions.weights import InducingPrior
from numpyro_dgp.guides.rules.joint_inducing import JointInducing
from numpyro_dgp.math.quadrature import white_nodes

N, M, P = 4, 3, 2
POINTS = jnp.linspace(-1, 1, M)[:, None]
NOISE, SCALE = {"h": 0.4, "m": 0.5, "y": 0.3}, 0.7
KERNELS = {"f": k.RBF(0.5, 0.9), "e": k.RBF(0.7, 1.2) + k.Linear(0.1), "g": k.RBF(1.1, 0.9)}
rng = np.random.default_rng(4)
INPUTS, TARGETS = jnp.array(rng.normal(size=(N, 1))), jnp.array(rng.normal(size=(N, 2)))
WIDE = jnp.array(rng.normal(size=(M, 3)))
BELOW = {"f": None, "e": "f", "g": "e"}
SLOPE = jnp.array(0.5 * rng.normal(size=(3, P)))


def normal(*shape, scale=0.4):
    return jnp.asarray(scale * rng.normal(size=shape))


def beside(X, y=None, batch=None):
    """Three layers, data beside the hidden values, a linear mean, affine observations, a row without y, a scale."""
    keep = jnp.arange(len(X)) != 1
    f = dgp.gp("f", KERNELS["f"], dgp.Points(POINTS), outputs=P, mean=dgp.means.LinearMean(jnp.ones((1, P))))
    with handlers.scale(scale=0.9):
        e = dgp.gp("e", KERNELS["e"], dgp.Points(WIDE), outputs=P, mean=dgp.means.LinearMean(SLOPE, 0.1))
    g = dgp.gp("g", KERNELS["g"], dgp.Points(WIDE), outputs=2)
    with numpyro.plate("data", len(X), subsample_size=batch) as i, handlers.scale(scale=SCALE):
        h = numpyro.sample("h", f(X[i], noise=NOISE["h"]))
        m = numpyro.sample("m", e(jnp.concatenate([X[i], h], -1), noise=NOISE["m"]))
        conditional = lambda v: dist.Normal(0.8 * v + 0.1, NOISE["y"]).to_event(1)  # noqa: E731
        with handlers.mask(mask=keep[i]):
            values = g(jnp.concatenate([X[i], m], -1))
            numpyro.sample("y", dgp.Likelihood(values, conditional), obs=None if y is None else y[i])


def joint_gaussian(params, transitions, conditionals):
    """Mean and covariance of (v_f, v_e, v_g, h, m) of every datum, from its definition by linear maps of noise."""
    sizes = {"f": P * M, "e": P * M, "g": 2 * M, "h": P, "m": P}
    start = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    at = {n: slice(start[n], start[n] + sizes[n]) for n in sizes}
    total = sum(sizes.values())
    mean, root = np.zeros((N, total)), np.zeros((N, total, total))
    for name, below in BELOW.items():
        mean[:, at[name]] = params[f"{name}_auto_loc"].reshape(-1)
        root[:, at[name], at[name]] = np.linalg.cholesky(conditionals[name])
        if below:
            U = transitions[name]
            mean[:, at[name]] += mean[:, at[below]] @ U.T
            root[:, at[name]] += U @ root[:, at[below]]
    for name, layer in (("h", "f"), ("m", "e")):
        for p in range(P):
            v, here = slice(start[layer] + p * M, start[layer] + (p + 1) * M), start[name] + p
            T = params[f"{name}_auto_weights"][:, p]
            T = T if T.shape[-1] == M else T @ params[f"{name}_auto_basis"][p]
            mean[:, here] = params[f"{name}_auto_shift"][:, p] + (T * mean[:, v]).sum(1)
            root[:, here] = np.einsum("nm,nmk->nk", T, root[:, v])
            root[:, here, here] = params[f"{name}_auto_scale"][:, p]
    return mean, root @ root.transpose(0, 2, 1), at


def by_quadrature(params, transitions, conditionals):
    """The bound with Gauss-Hermite nodes over hidden values, and everything else given them by dense conditioning."""
    mean, C, at = joint_gaussian(params, transitions, conditionals)
    x, y = np.asarray(INPUTS), np.asarray(TARGETS)
    white, log_weights = (np.asarray(a) for a in white_nodes(dgp.likelihoods.GaussHermite(24), P, jnp.float64))
    w, total = np.exp(log_weights), 0.0
    for name, below in BELOW.items():
        beta = 0.9 if name == "e" else 1.0
        m, W = mean[0, at[name]], conditionals[name]
        total -= beta * dense.kl(m, W, np.zeros(len(m)), np.eye(len(m)))
        if below:
            U = transitions[name]
            total -= beta * 0.5 * np.trace(U @ C[0, at[below], at[below]] @ U.T)
    L = {n: np.linalg.cholesky(np.asarray(KERNELS[n].gram(Z)) + 1e-10 * float(KERNELS[n].diag(Z).mean()) * np.eye(M))
         for n, Z in (("f", POINTS), ("e", WIDE), ("g", WIDE))}  # fmt: skip
    A = np.linalg.solve(L["f"], KERNELS["f"](POINTS, x)).T
    c = np.asarray(KERNELS["f"].diag(x)) - (A**2).sum(1) + NOISE["h"] ** 2
    for n in range(N):
        for p in range(P):
            form = np.zeros(mean.shape[1])
            form[at["h"].start + p], form[p * M : (p + 1) * M] = 1.0, -A[n]
            square = (form @ mean[n] - x[n, 0]) ** 2 + form @ C[n] @ form
            own = params["h_auto_scale"][n, p] ** 2  # in square too
            total -= SCALE * 0.5 * (square / c[n] - 1 + np.log(c[n] / own))
            total += SCALE * 0.5 * np.log(2 * np.pi * np.e * params["m_auto_scale"][n, p] ** 2)
        for layer, inputs, target in (("e", "h", "m"), ("g", "m", "y")):
            if target == "y" and n == 1:
                continue
            V = C[n, at[inputs], at[inputs]]
            z = mean[n, at[inputs]] + white @ np.linalg.cholesky(V).T
            B = np.linalg.solve(V, C[n, at[inputs]]).T
            given = mean[n] + (z - mean[n, at[inputs]]) @ B.T
            left = C[n] - B @ V @ B.T
            rows = np.hstack([np.tile(x[n], (len(z), 1)), z])
            a = np.linalg.solve(L[layer], KERNELS[layer](WIDE, rows)).T
            open_ = np.asarray(KERNELS[layer].diag(rows)) - (a**2).sum(1)
            kappa, offset, noise = (0.8, 0.1, NOISE["y"]) if target == "y" else (1.0, 0.0, NOISE["m"])
            for p in range(P):
                v = slice(at[layer].start + p * M, at[layer].start + (p + 1) * M)
                prior = rows @ np.asarray(SLOPE)[:, p] + 0.1 if layer == "e" else 0.0
                form = np.zeros((len(z), mean.shape[1]))
                form[:, v] = -kappa * a
                centre = (form * given).sum(1) - kappa * prior - offset
                if target == "m":
                    form[:, at["m"].start + p] = 1.0
                    centre = (form * given).sum(1) - prior
                else:
                    centre = centre + y[n, p]
                square = centre**2 + np.einsum("sa,ab,sb->s", form, left, form) + kappa**2 * open_
                total += SCALE * (-0.5 * w @ square / noise**2 - np.log(np.sqrt(2 * np.pi) * noise))
    return total


def block(roots):
    return np.asarray(jax.scipy.linalg.block_diag(*(np.tril(R) @ np.tril(R).T for R in roots)))


def low_rank(scale, factor):
    inverse = np.linalg.inv(np.eye(M) + factor @ np.swapaxes(factor, 1, 2))
    return np.asarray(jax.scipy.linalg.block_diag(*(scale[..., None] * inverse * scale[:, None])))


CASES = {
    "dense": ({}, {}),
    "one Gaussian over all outputs": ({"e": G.MarkovInducing(conditional=G.FullJoint())}, {}),
    "low rank": (
        {"e": G.MarkovInducing(rank=2, conditional=G.LowRank(1)), "g": G.MarkovInducing("e", conditional=G.Diagonal())},
        {"m": G.GivenInducing(2)},
    ),
}


def case(name):
    """A guide, its parameters, and the bound by quadrature."""
    inducing, hidden = CASES[name]
    guide = G.Markov(beside, sites=inducing | hidden)
    params = random_params(beside, guide, INPUTS, TARGETS, scale=0.2)
    for each in params:
        if each.endswith(("_weights", "_shift", "_transition")):
            params[each] = params[each] + 0.2 * jax.random.normal(jax.random.key(len(each)), params[each].shape)
    p = {n: np.asarray(v) for n, v in params.items()}
    transitions, conditionals = {}, {}
    for n in "feg":
        if f"{n}_auto_transition" in p:
            U = p[f"{n}_auto_transition"].reshape(-1, p[f"{n}_auto_transition"].shape[-1])
            transitions[n] = U @ p[f"{n}_auto_basis"] if f"{n}_auto_basis" in p else U
        if f"{n}_auto_factor" in p:
            conditionals[n] = low_rank(p[f"{n}_auto_scale"], p[f"{n}_auto_factor"])
        elif f"{n}_auto_scale" in p:
            conditionals[n] = np.diag(p[f"{n}_auto_scale"].reshape(-1) ** 2)
        else:
            R = p[f"{n}_auto_scale_tril"]
            conditionals[n] = block(R if R.ndim == 3 else R[None])
    return guide, params, by_quadrature(p, transitions, conditionals)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_against_quadrature(name):
    guide, params, reference = case(name)
    value = jax.jit(lambda p: bound(dgp.ELBO(), p, beside, guide, INPUTS, TARGETS))(params)
    np.testing.assert_allclose(value, reference, rtol=1e-8)


@pytest.mark.slow
def test_the_parameters_are_those_of_the_drawn_guide():
    guides = G.Markov(beside), G.InducingPoint(beside, inducing=G.MarkovInducing(), hidden=G.GivenInducing("free"))
    ours, drawn = (dgp.testing.parameter_shapes(guide, INPUTS, TARGETS) for guide in guides)
    assert ours == drawn
    assert ours["e_auto_transition"] == (P, M, P * M)


@pytest.mark.slow
def test_minibatches():
    guide, params, _ = case("low rank")
    whole = jax.jit(lambda p: bound(dgp.ELBO(), p, beside, guide, INPUTS, TARGETS))(params)
    draws = draws_of_bound(dgp.ELBO(), params, beside, guide, INPUTS, TARGETS, 2, num=400)
    assert agree(draws, np.full(2, whole))
    assert len(np.unique(np.round(draws, 8))) == 6  # pairs of 4 rows: guide and model see the same ones


@pytest.mark.slow
def test_fit_and_predict_in_closed_form():
    guide = G.Markov(three)
    natural = dgp.optim.NaturalGradient(guide, 0.1, optax.adam(0.01))
    result = SVI(three, guide, natural, dgp.ELBO()).run(jax.random.key(0), 20, X, Y, progress_bar=False)
    assert result.losses[-1] < result.losses[0]
    drawn = G.InducingPoint(three, inducing=G.MarkovInducing(), hidden=G.GivenInducing("free"))
    posteriors = (dgp.Posterior(three, each, result.params).using(num_samples=3) for each in (guide, drawn))
    np.testing.assert_array_equal(*(p.sample(jax.random.key(1), X[:4]) for p in posteriors))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sites": {"m": G.GivenInducing()}}, "expected free weights or a rank for hidden layer 'm'"),
        ({"hidden": G.Normal()}, r"expected a rule GivenInducing\(\) for hidden layer 'h'"),
        ({"inducing": G.MixtureOfGaussians(2)}, "or a Gaussian, for the inducing values 'f'"),
    ],
)
def test_bad_rules_of_the_closed_form(settings, message):
    with pytest.raises(ValueError, match=f"Markov.*: .*{message}"):
        SVI(three, G.Markov(three, **settings), optax.sgd(0.0), dgp.ELBO()).init(jax.random.key(0), X, Y)


def three(X, y=None):
    f = dgp.gp("f", k.RBF(0.5, 0.9), dgp.Points(Z), outputs=2, mean=dgp.means.LinearMean(jnp.ones((1, 2), X.dtype)))
    e = dgp.gp("e", k.RBF(0.5, 1.2), dgp.Points(jnp.hstack([Z, Z**2 - 1])), outputs=2)
    g = dgp.gp("g", k.RBF(1.1, 0.9), dgp.Points(jnp.hstack([Z, jnp.cos(3 * Z)])))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.2))
        m = numpyro.sample("m", e(h, noise=0.2))
        numpyro.sample("y", dgp.Likelihood(g(m), lambda v: dist.Normal(v, 0.3)), obs=y)


@pytest.mark.slow
def test_one_gaussian_over_all_outputs():
    """Density, divergence and draws against NumPyro's own multivariate normal."""
    loc, R = normal(P, M), jnp.tril(normal(P * M, P * M), -1) + 0.5 * jnp.eye(P * M)
    q, prior = JointInducing(loc, R), InducingPrior((P, M), loc.dtype)
    dense = dist.MultivariateNormal(loc.reshape(-1), scale_tril=R)
    v, (white,) = q.sample_with_intermediates(jax.random.key(0), (5,))
    np.testing.assert_allclose(q.log_prob(v), dense.log_prob(v.reshape(5, -1)), rtol=1e-10)
    np.testing.assert_allclose(q.log_prob(v, [white]), q.log_prob(v), rtol=1e-10)
    np.testing.assert_allclose(q.white(v), white, rtol=1e-8)
    np.testing.assert_allclose(q.variance.reshape(-1), dense.variance, rtol=1e-10)
    standard = dist.MultivariateNormal(jnp.zeros(P * M), jnp.eye(P * M))
    np.testing.assert_allclose(dist.kl_divergence(q, prior), dist.kl_divergence(dense, standard), rtol=1e-10)


RULES = {
    "alone": {"e": G.FullJoint()},
    "given the layer below": {"e": G.MarkovInducing("f", conditional=G.FullJoint()), "g": G.MarkovInducing("e", 2)},
    "low rank": {"e": G.MarkovInducing("f", conditional=G.LowRank(2))},
}


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.long
def test_same_bound_as_with_everything_drawn(name):
    guide = G.InducingPoint(three, sites=RULES[name] | {"h": G.GivenInducing("free"), "m": G.GivenInducing("free")})
    params = random_params(three, guide, X, Y, scale=0.2)
    for each in params:
        if each.endswith(("_weights", "_shift", "_transition")):
            params[each] = params[each] + 0.1 * jax.random.normal(jax.random.key(len(each)), params[each].shape)
    ours = draws_of_bound(dgp.ELBO(), params, three, guide, X, Y)
    assert agree(ours, draws_of_bound(Trace_ELBO(), params, three, guide, X, Y, num=6000))


@pytest.mark.long
def test_block_diagonal_roots_are_those_of_single_outputs():
    """Drawn or integrated, a joint Gaussian without correlations between outputs is ``Full()``."""
    single, joint = (G.InducingPoint(three, sites={"e": rule}) for rule in (G.Full(), G.FullJoint()))
    params = random_params(three, single, X, Y, scale=0.2)
    wide = params | {"e_auto_scale_tril": jax.scipy.linalg.block_diag(*params["e_auto_scale_tril"])}
    np.testing.assert_allclose(
        bound(Trace_ELBO(), wide, three, joint, X, Y), bound(Trace_ELBO(), params, three, single, X, Y), rtol=1e-10
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_fit_and_predict(dtype):
    sites = {"e": G.MarkovInducing("f", conditional=G.FullJoint())}
    guide, x, y = G.InducingPoint(three, sites=sites), X.astype(dtype), Y.astype(dtype)
    result = SVI(three, guide, optax.adam(0.01), dgp.ELBO(2)).run(jax.random.key(0), 200, x, y, progress_bar=False)
    assert result.losses[-20:].mean() < result.losses[:20].mean()
    assert result.params["e_auto_scale_tril"].shape == (16, 16)
    posterior = dgp.Posterior(three, guide, result.params)
    assert np.isfinite(posterior.using(num_samples=5).predict(jax.random.key(1), x[:4]).mean).all()
    assert posterior.using(num_samples=5).sample(jax.random.key(1), x[:4]).shape == (5, 4)
    assert posterior.using(num_samples=3).functions(jax.random.key(2))(x[:4])["y"].shape == (3, 4)


@pytest.mark.slow
def test_bad_rules():
    with pytest.raises(ValueError, match="FullJoint: expected scale to be positive, got -1"):
        G.FullJoint(-1.0)
    guide = G.InducingPoint(three, sites={"h": G.FullJoint()})
    svi = SVI(three, guide, optax.sgd(0.0), dgp.ELBO())
    with pytest.raises(ValueError, match="rule FullJoint: expected site 'h' to be inducing values"):
        svi.init(jax.random.key(0), X, Y)
