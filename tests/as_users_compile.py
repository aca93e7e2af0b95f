"""Compiled results beside those of one operation after the other, in a process that compiles as a user's does.

``python as_users_compile.py PART`` prints, as JSON, how many arrays it compared and a line for each that differs.
``test_compiled_is_eager.py`` runs it: the tests around it are compiled without most of XLA's optimisations, which is
where the two can differ. XLA computes cheap expressions again in every loop that needs them, there perhaps with a fused
multiply-add, so that one number has several roundings in one program.

Allowed is rounding: ``UNITS`` units in the last place of the largest entry, times what the function does to them.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer import SVI, Predictive
from numpyro.infer.util import log_density
from programs import random_params

import numpyro_dgp as dgp
from numpyro_dgp.diagnostics.comparison import bounds_of
from numpyro_dgp.diagnostics.ratios import draw
from numpyro_dgp.functions.function_values import FunctionValues
from numpyro_dgp.kernels.expectations import psi1, psi2
from numpyro_dgp.math.peaked_integral import log_expectation

KEY = jax.random.key(0)
UNITS = 200
found = {"compared": 0, "different": []}


def compare(name, function, *args, amplified=1.0):
    """``function`` compiled and not: every array within rounding, NaN nowhere."""
    with jax.disable_jit():
        eager = function(*args)
    compiled = jax.jit(lambda *args: function(*args))(*args)
    require_same(name, compiled, eager, amplified)


def require_same(name, compiled, eager, amplified):
    places, _ = jax.tree_util.tree_flatten_with_path(eager)
    for (path, b), a in zip(places, jax.tree.leaves(compiled), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        eps = np.finfo(b.dtype).eps if np.issubdtype(b.dtype, np.floating) else 0  # counts and labels are equal
        allowed = UNITS * amplified * eps * (np.abs(b).max() + 1e-30)
        found["compared"] += 1
        error = np.abs(a.astype(float) - b).max()
        if not error <= allowed:
            place = jax.tree_util.keystr(path)
            found["different"].append(f"{name}{place} {b.dtype}: {error:.1e} apart, {allowed:.1e} allowed")


def in_both_precisions(run):
    for x64 in (False, True):
        jax.config.update("jax_enable_x64", x64)
        run()


# Kernels.


def kernels(columns):
    """The kernels of ``test_kernels.py`` for so many columns, and those whose constants XLA folds into a product."""
    from test_kernels import OWN

    K = dgp.kernels
    table = {name: kernel for name, kernel in OWN.items() if name != "active-dims" or columns == 3}
    table = {
        name: jax.tree.map(lambda leaf: leaf[:columns] if np.ndim(leaf) == 1 else leaf, kernel)
        for name, kernel in table.items()
    }
    table |= {cls.__name__: cls(1.3, 0.4) for cls in (K.RBF, K.Matern12, K.Matern32, K.Matern52, K.RationalQuadratic)}
    table |= {"ErrorFunction": K.ErrorFunction(1.3, 0.7, 0.4), "arc-cosine-1 twice": K.ArcCosine(order=1, depth=2)}
    if columns > 1:  # places, and the log factor of their lengthscales
        table |= {"VaryingLengthscale": K.VaryingLengthscale(K.Matern32(1.3, 0.4), columns - 1)}
        table |= {"full precision": K.Transformed(K.RBF(1.3), 2 * np.eye(columns) - 0.4)}
    if columns == 1:
        table |= {"Brownian": K.Brownian(1.3, 0.2), "IntegratedBrownian": K.IntegratedBrownian(1.3, 0.2)}
    return table


def smooth_enough(name):
    """Whether k(x, x') has slopes where x = x'."""
    return name not in ("white", "matern12", "Matern12", "product", "arc-cosine-0", "Brownian")


def amplification(name, X):
    """Distances are sums of squares, whose root has half of the digits where an angle is zero."""
    eps = float(jnp.finfo(X.dtype).eps)
    return {"arc-cosine-0": 0.05 / eps**0.5, "arc-cosine-1": 5.0, "arc-cosine-2": 5.0}.get(name.split()[0], 1.0)


def check_kernel(name, kernel, N, columns, wide=True):
    """As constants of the program and as arguments of it, of one array and of two with equal rows."""
    X = jnp.asarray(np.random.default_rng(N).normal(size=(N, columns)), float)
    label, amplified = f"{name} {N}x{columns} ", amplification(name, X)

    def values(kernel, X, Z):
        cross = kernel(X, X), kernel(X, Z), kernel(Z, X)
        return {"gram": kernel.gram(X), "cross": cross, "diagonal": kernel.diag(X)}

    def slopes(kernel, X, Z):
        one = jnp.ones_like(X)
        by_x = lambda Z: jax.jvp(lambda X: kernel(X, Z), (X,), (one,))[1]  # noqa: E731
        by_parameters = jax.jvp(lambda k: (kernel.gram(X), k(X, Z)), (kernel,), (kernel,))[1]
        return {"by x": by_x(Z), "by both": jax.jvp(by_x, (Z,), (jnp.ones_like(Z),))[1], "by itself": by_parameters}

    Z = X[: (N + 1) // 2] + 0
    compare(label + "constant ", lambda X, Z: values(kernel, X, Z), X, Z, amplified=amplified)
    if not wide:
        return
    compare(label + "as an argument ", values, kernel, X, Z, amplified=amplified)
    if N == 300:
        return
    if name not in ("white", "arc-cosine-1 twice"):
        compare(label + "features", lambda X: kernel.features(KEY, X, 6), X, amplified=20 * amplified)
    if smooth_enough(name):
        # The slopes of order n are of order n - 1.
        amplified = amplification(name.replace("cosine-1", "cosine-0"), X)
        compare(label + "slopes ", lambda X, Z: slopes(kernel, X, Z), X, Z, amplified=10 * amplified)


def few_kernels():
    for name, kernel in kernels(1).items():
        if name in ("Matern32", "Matern52"):
            check_kernel(name, kernel, 40, 1, wide=False)


def many_kernels():
    for columns in (1, 2, 3):
        for name, kernel in kernels(columns).items():
            for N in (4, 50, 300):
                check_kernel(name, kernel, N, columns)
    low_rank = dgp.kernels.Transformed(dgp.kernels.RBF(1.3), np.array([[0.9, -0.5, 0.2]]))
    X = jnp.asarray(np.random.default_rng(0).normal(size=(40, 3)), float)
    for variance in (0.3 * jnp.ones_like(X), 0.3 * jnp.eye(3) + 0.1 * X[:, :, None] * X[:, None]):
        moments = lambda kernel, X, V=variance: (psi1(kernel, X, V, X[:7]), psi2(kernel, X, V, X[:7]))  # noqa: E731
        compare(f"moments of a low-rank precision {variance.ndim}", moments, low_rank, X)


# Programs: rounding is amplified by the condition of k(Z, Z) with its jitter or noise, here a few thousand at most.
CONDITION = 100.0
RANDOM = 6


def data(N):
    rng = np.random.default_rng(N)
    X = np.sort(rng.uniform(-4, 4, (N, 1)), 0)
    return jnp.asarray(X, float), jnp.asarray(np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=N), float)


def program_of(kernel, Z, learned=False):
    """A function above inducing inputs, those of the call where Z is None, with a lengthscale known or learned."""

    def program(X, y=None):
        scale = numpyro.param("scale", 0.4, constraint=dist.constraints.positive) if learned else 0.4
        f = dgp.gp("f", kernel(1.3, scale), dgp.Points(X if Z is None else Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dgp.Likelihood(f(X), lambda v: dist.Normal(v, 0.2)), obs=y)

    return program


def check_bound(name, model, guide, params, *args, slopes=True, **kwargs):
    """A loss and its gradient."""

    def loss(params, *args):
        return dgp.ELBO().loss(KEY, params, model, guide, *args, **kwargs)

    loss = jax.value_and_grad(loss) if slopes else loss
    compare(name + " loss", loss, params, *args, amplified=CONDITION)


def check_density(name, model, values, *args, **kwargs):
    """A log joint density, the potential of NUTS, and its gradient where there is something to differentiate by."""
    floating = {name: value for name, value in values.items() if jnp.issubdtype(value.dtype, jnp.floating)}

    def density(floating, *args):
        return log_density(handlers.seed(model, KEY), args, kwargs, values | floating)[0]

    compare(
        name + " density", jax.value_and_grad(density) if floating else density, floating, *args, amplified=CONDITION
    )


def check_predictions(name, posterior, X, y):
    def predicted():
        mixture = posterior.using(num_samples=2).predict(KEY, X)
        return mixture.mean, mixture.variance, posterior.using(num_samples=2).log_density(KEY, y, X)

    with jax.disable_jit():
        eager = predicted()
    require_same(name + " predictions", predicted(), eager, CONDITION)


def few_programs():
    X, y = data(40)
    model = program_of(dgp.kernels.Matern52, None)
    check_bound("collapsed", model, dgp.guides.Collapsed(model), {}, X, y, slopes=False)


def two_layers(X, y=None):
    Z = jnp.linspace(-4.0, 4.0, 5)[:, None]
    f = dgp.gp("f", dgp.kernels.RBF(1.0, 2.0), dgp.Points(Z), outputs=1, mean=dgp.means.IdentityMean())
    g = dgp.gp("g", dgp.kernels.RBF(1.0, 1.5), dgp.Points(Z))
    with numpyro.plate("data", len(X)):
        h = numpyro.sample("h", f(X, noise=0.3))
        numpyro.sample("y", dgp.Likelihood(g(h), lambda v: dist.Normal(v, 0.2)), obs=y)


def closed_forms():
    """Guides that hand a part of the bound to ``dgp.ELBO``."""
    X, y = data(6)
    for guide in (dgp.guides.Nested(two_layers), dgp.guides.Markov(two_layers)):
        check_bound(type(guide).__name__, two_layers, guide, random_params(two_layers, guide, X, y), X, y)


def many_programs():
    """One layer; inducing inputs are the inputs, equal to them or others, lengthscales known or learned."""
    K = dgp.kernels
    X, y = data(40)
    cases = [
        (K.Matern52, "same", False), (K.Matern52, "equal", False), (K.Matern52, "equal", True),
        (K.Matern12, "equal", False), (K.Matern32, "same", True), (K.Matern32, "others", False),
    ]  # fmt: skip
    for kernel, where, learned in cases:
        name = f"{kernel.__name__} {where} {'learned' if learned else 'constant'} "
        Z = {"same": None, "equal": X + 0, "others": X[::2] + 0.05}[where]
        model = program_of(kernel, Z, learned)
        params = {"scale": jnp.asarray(0.4)} if learned else {}
        collapsed, guide = dgp.guides.Collapsed(model), dgp.guides.InducingPoint(model)
        check_bound(name + "collapsed", model, collapsed, params, X, y)
        check_bound(name + "guide", model, guide, random_params(model, guide, X, y), X, y)
        check_density(name + "for_mcmc", dgp.for_mcmc(model, params), {}, X, y)
        if Z is not None:
            check_predictions(name, dgp.Posterior(model, collapsed.on(X, y), params), X[:10], y[:10])


def dependent_programs():
    """A collapsed bound of a projection and of values given it, which the last layer sees beside each other."""
    X, y = data(4)
    R, Z, G = dgp.kernels.RBF, X[::2], dgp.guides

    def program(X, y=None):
        A = dgp.projection("A", 1, 1)
        f = dgp.gp("f", R(0.5, 0.8), dgp.Points(Z), outputs=1)
        g = dgp.gp("g", R(1.1, 0.9), dgp.Points(jnp.hstack([Z, Z])))
        with numpyro.plate("data", len(X)):
            z = numpyro.sample("z", A(X))
            x = jnp.concatenate([z, numpyro.sample("h", f(z, noise=0.3))], -1)
            numpyro.sample("y", dgp.Likelihood(g(x), lambda v: dist.Normal(v, 0.2)), obs=y)

    guide = G.Collapsed(program, sites={"A": G.Full(), "h": G.GivenBelow()})
    check_bound("dependent", program, guide, random_params(program, guide, X, y), X, y, slopes=False)


def random_programs():
    """Losses, densities and predictions of random programs, with inducing inputs that are rows of X where they fit."""
    from program_checks import Case, random_case

    for seed in range(RANDOM):
        program, guide = random_case(seed)
        case = Case(program, guide)
        X, *others, Z = case.args
        first = list(program.functions).index(program.first)
        if program.functions[program.first].form == "points" and X.shape[-1] == Z[first].shape[-1]:
            rows = X.reshape(-1, X.shape[-1])
            Z = [rows[: len(z)] if i == first and len(rows) >= len(z) else z for i, z in enumerate(Z)]
        args, name = (X, *others, Z), f"random {seed} {guide}"
        check_bound(name, program.model, case.guide, case.params, *args, keep=case.keep)
        check_density(name, program.all_rows, case.values, *args, keep=case.keep, whole=True)
        if not program.is_exact:
            fewer = program.data(rows=2)
            guide = case.guide.on(*args, keep=case.keep) if case.name == "collapsed" else case.guide
            predict = Predictive(program.model, guide=guide, params=case.params, num_samples=2)
            draw = lambda X, X2, Z: predict(KEY, X, None, X2, None, Z)["y"]  # noqa: E731
            compare(name + " predictions", draw, fewer[0], fewer[2], Z, amplified=CONDITION)


def few_densities():
    """The adaptive integral of densities far narrower than p(v), and its slopes; rows of few intervals and of many."""
    v, variance, y = (jnp.asarray(a) for a in ([0.3, -1.0, 2.0, 0.1], [0.5, 1.0, 0.2, 3.0], [4.0, -1.0, 2.2, 0.0]))

    def density(v, variance, y):
        return log_expectation(lambda t: dist.StudentT(2.5, t, 0.05).log_prob(y), v, variance)

    compare("density", density, v, variance, y)
    compare("slopes", jax.grad(lambda *args: density(*args).sum(), (0, 1, 2)), v, variance, y)


def few_losses():
    """Robust losses and their slopes, and a step of the sampler that learns a parameter."""
    loc, variance, y = (jnp.asarray(a) for a in ([0.3, -1.0, 2.0], [0.5, 1.0, 0.2], [4.0, -1.0, 2.2]))
    for rule in (dgp.likelihoods.Robust(beta=1.5), dgp.likelihoods.Robust(gamma=1.2)):

        def score(loc, variance, y, rule=rule):
            f_x = FunctionValues(loc, variance, event_dim=0)
            return dgp.Likelihood(f_x, lambda v: dist.Normal(v, 0.3), integrate=rule).log_prob(y).sum()

        compare(repr(rule), jax.value_and_grad(score, (0, 1)), loc, variance, y)

    X, y = data(40)
    program = program_of(dgp.kernels.Matern52, X[::4], learned=True)
    kernel = dgp.mcmc.SGHMC(program, optim=optax.adam(0.01), window=3)
    start = kernel.init(KEY, 5, None, (X, y), {})

    def step(z, velocity):
        found = kernel.sample(start._replace(z=z, velocity=velocity), (X, y), {})
        return found.z, found.velocity, found.learning.recent

    compare("SGHMC", step, start.z, start.velocity, amplified=CONDITION)


def diagnostics():
    """What they compile themselves: densities of draws, bounds, annealed runs, replications and matched moments."""
    model, X, y = dgp.testing.toy(2)
    guide = dgp.guides.InducingPoint(model, other=dgp.guides.Normal())
    svi = SVI(model, guide, optax.adam(0.01), dgp.ELBO())
    posterior = dgp.Posterior(model, guide, svi.get_params(svi.init(KEY, X, y)))
    shallow, *_ = dgp.testing.toy()
    chains = dgp.Posterior(shallow, samples={"f": jax.random.normal(KEY, (4, 5))})
    odd = y + 5.0 * (jnp.arange(len(y)) == 4)  # a datum that decides the posterior
    exact = dgp.Posterior(shallow, dgp.guides.Collapsed(shallow).on(X, odd), {})
    tree = dgp.diagnostics.to_arviz(exact, KEY, X, odd, num_samples=200)
    before = dgp.diagnostics.loo(tree)
    assert (before.pareto_k > before.good_k).any()
    short = {"num_chains": 2, "num_temperatures": 3, "num_leapfrogs": 2}
    of = dgp.diagnostics
    runs = {
        "draws": lambda: draw(posterior, KEY, 4, 3, (X, y), {}),
        # New data have the root of a conditional variance near zero, which rounding moves by more than densities.
        "draws of chains": lambda: draw(chains, KEY, None, 3, (X, y), {})._replace(replicated={}),
        "bounds": lambda: bounds_of([posterior], KEY, (X[:4], y[:4])),
        "evidence": lambda: [part for part in of.evidence(posterior, KEY, X, y, **short) if part is not None],
        "replications": lambda: of.sbc(svi, KEY, X, num_replications=5, num_steps=2).ranks,
    }
    if X.dtype == np.float64:  # each step of matching depends on whether k fell in the last
        runs["matched"] = lambda: np.asarray(of.loo_moment_match(before, tree, exact, KEY, X, odd).elpd_i)
    for name, run in runs.items():
        compiled = run()
        with jax.disable_jit():
            eager = run()
        rounded = [jax.tree.map(lambda a: jnp.asarray(a, X.dtype), part) for part in (compiled, eager)]  # of the host
        require_same(name, *rounded, CONDITION)


PARTS = {
    "few": (few_kernels, few_programs, few_densities, few_losses),
    "kernels": (many_kernels,),
    "programs": (many_programs, closed_forms, dependent_programs),
    "random": (random_programs,),
    "diagnostics": (diagnostics,),
}
if __name__ == "__main__":
    for part in sys.argv[1:]:
        for run in PARTS[part]:
            in_both_precisions(run)
    print(json.dumps(found))
