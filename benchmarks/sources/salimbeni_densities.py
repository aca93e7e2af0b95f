"""Conditional densities with latents: the experiments of Salimbeni (2020), chapter 4, on data at hand.

``python benchmarks/sources/salimbeni_densities.py --part trips`` compares a process with latents to a plain one, kernel
density estimates and mixture density networks on simulated trips, whose true density is known (table 4.1, where the
data are taxi trips). ``few-shot``: digits of classes of which four images are known (figure 4.5). ``images``: digits
given their label, compared with a variational autoencoder (table 4.2). ``ones``: a hundred ones from a single latent,
by the collapsed bound, natural gradients and Adam (figures 4.7 and 4.8). Densities of regression sets (figure 4.6) are
rows of ``salimbeni_latents.py``.

Digits are the 1797 of scikit-learn, 8 by 8 pixels; ``--digits FILE.npz`` takes larger ones, in a file as of
``digits.py``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax.scipy.special import logsumexp
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.densities import log_mean_exp
from numpyro_dgp.optim import NaturalGradient, log_linear, minimize

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import digits
import gplvm

positive = dist.constraints.positive
LogDensity = Callable[[jax.Array, jax.Array], jax.Array]  # of ends (N,), from where they begin and the ends (N, 2)
STATION = jnp.array([0.5, -0.5])


def fit(
    model: Callable[..., None],
    guide: Any,
    data: tuple[Any, ...],
    rows: int,
    options: Any,
    natural: float = 0.1,
    rate: float = 0.02,
    rise: int = 40,
) -> dgp.Posterior:
    """Natural gradients for q(v) and Adam for the rest, as there: sizes rise in so many steps, and fall by a cosine."""
    fall, ramp = optax.cosine_decay_schedule(1.0, options.steps), log_linear(1e-4, natural, rise)
    adam = optax.adam(lambda n: rate * fall(n) * jnp.minimum(1.0, (n + 1) / rise))
    svi = SVI(model, guide, NaturalGradient(guide, lambda n: ramp(n) * fall(n), adam), dgp.ELBO())
    batch = options.batch if options.batch < rows else None
    result = dgp.fit(svi, jax.random.key(options.seed), options.steps, *data, batch, progress_bar=False)
    return dgp.Posterior(model, guide, result.params)


# Table 4.1: where trips end, given where they begin.


def trips(num: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Beginnings uniform in a square; ends at the station, on the same avenue, or at walking distance."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (num, 2))
    station = np.asarray(STATION) + 0.1 * rng.normal(size=(num, 2))
    avenue = np.column_stack([x[:, 0] + 0.03 * rng.normal(size=num), rng.uniform(-1, 1, num)])
    radius, angle = 0.4 + 0.05 * rng.normal(size=num), rng.uniform(0, 2 * np.pi, num)
    walk = x + radius[:, None] * np.column_stack([np.cos(angle), np.sin(angle)])
    kind = rng.choice(3, num, p=[0.4, 0.3, 0.3])[:, None]
    return jnp.asarray(x, jnp.float32), jnp.asarray(np.choose(kind, [station, avenue, walk]), jnp.float32)


def true_density(x: jax.Array, y: jax.Array) -> jax.Array:
    """Log densities (N,) of ends."""
    station = dist.Normal(STATION, 0.1).to_event(1).log_prob(y)
    inside = jnp.where(jnp.abs(y[:, 1]) < 1, -math.log(2.0), -jnp.inf)
    avenue = dist.Normal(x[:, 0], 0.03).log_prob(y[:, 0]) + inside
    radius = jnp.linalg.norm(y - x, axis=1)
    walk = dist.Normal(0.4, 0.05).log_prob(radius) - jnp.log(2 * math.pi * radius)
    return logsumexp(jnp.stack([station, avenue, walk]), axis=0, b=jnp.array([0.4, 0.3, 0.3])[:, None])


def conditional(X: jax.Array, outputs: int, latent: int, num_inducing: int) -> Callable[..., None]:
    """y = f(x, w) + noise, with a function for each output."""
    Z = dgp.initial.kmeans(np.asarray(X), min(num_inducing, len(np.unique(X, axis=0))))
    rng = np.random.default_rng(0)
    Z = np.concatenate([Z, rng.normal(size=(num_inducing - len(Z), X.shape[1]))])
    Z = np.concatenate([Z, rng.normal(size=(num_inducing, latent))], 1).astype(np.float32)

    def model(X: jax.Array, y: Any = None, batch: int | None = None) -> None:
        scales = numpyro.param("scales", jnp.full(Z.shape[1], math.sqrt(Z.shape[1])), constraint=positive)
        variance, noise = (numpyro.param(n, v, constraint=positive) for n, v in (("variance", 1.0), ("noise", 0.1)))
        f = dgp.gp("f", dgp.kernels.RBF(variance, scales), dgp.Points(Z, learn=True), outputs=outputs)
        with numpyro.plate("data", len(X), subsample_size=batch) as rows:
            h = dgp.latent("w", X[rows], latent) if latent else X[rows]
            likelihood = dgp.Likelihood(f(h), lambda v: dist.Normal(v, noise).to_event(1))
            numpyro.sample("y", likelihood, obs=None if y is None else y[rows])

    return model


def log_kernels(points: jax.Array, y: jax.Array, width: Any) -> jax.Array:
    """Log of isotropic Gaussian kernels (S, N) at the points."""
    return dist.Normal(points[:, None], width).to_event(1).log_prob(y[None])


def kernel_estimates(X: jax.Array, y: jax.Array) -> dict[str, LogDensity]:
    """Of all ends, with the width that is best on rows left out, and of those of the 50 nearest beginnings."""
    apart = jnp.where(jnp.eye(len(y), dtype=bool), -jnp.inf, 0.0)
    left_out = jax.jit(lambda width: logsumexp(log_kernels(y, y, width) + apart, axis=0).mean())
    width = max(np.geomspace(0.02, 0.5, 20), key=lambda w: float(left_out(w)))

    def of_neighbours(x_test: jax.Array, y_test: jax.Array) -> jax.Array:
        near = jnp.argsort(jnp.linalg.norm(x_test[:, None] - X[None], axis=-1), axis=1)[:, :50]
        of_one = lambda rows, one: logsumexp(log_kernels(y[rows], one[None], width)[:, 0])  # noqa: E731
        return jax.vmap(of_one)(near, y_test) - math.log(50)

    return {
        "KDE of all ends": lambda _, y_test: log_mean_exp(log_kernels(y, y_test, width)),
        "KDE of 50 neighbours": of_neighbours,
    }


def network(key: jax.Array, sizes: list[int]) -> list[tuple[jax.Array, jax.Array]]:
    """Weights of a fully connected network."""
    keys = jax.random.split(key, len(sizes))
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=False)
    return [(jax.random.normal(k, (a, b)) / math.sqrt(a), jnp.zeros(b)) for k, a, b in pairs]


def apply(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """Its outputs, with tanh units between."""
    for W, b in weights[:-1]:
        x = jnp.tanh(x @ W + b)
    return x @ weights[-1][0] + weights[-1][1]


def descend(loss: Callable[..., jax.Array], params: Any, data: tuple[jax.Array, ...], options: Any) -> Any:
    """Adam on minibatches of ``loss(params, key, *rows)``."""
    adam = optax.adam(optax.cosine_decay_schedule(0.005, options.steps))

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        rows = jax.random.randint(key, (min(options.batch, len(data[0])),), 0, len(data[0]))
        change, state = adam.update(jax.grad(loss)(params, key, *(a[rows] for a in data)), state)
        return (optax.apply_updates(params, change), state), None

    keys = jax.random.split(jax.random.key(options.seed), options.steps)
    return jax.jit(lambda p: jax.lax.scan(step, (p, adam.init(p)), keys)[0][0])(params)


def mixture_network(k: int, X: Any, y: Any, options: Any) -> LogDensity:
    """Bishop's mixture density network: weights, means and scales of k Gaussians from a network of three layers."""

    def log_density(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        weights, means, scales = jnp.split(apply(params, x), [k, 3 * k], axis=1)
        means, scales = (a.reshape(len(x), k, 2) for a in (means, jax.nn.softplus(scales) + 1e-3))
        of_parts = dist.Normal(means, scales).to_event(1).log_prob(y[:, None])
        return logsumexp(jax.nn.log_softmax(weights) + of_parts, axis=1)

    start = network(jax.random.key(0), [X.shape[1], 50, 50, 5 * k])
    found = descend(lambda p, _, x, y: -log_density(p, x, y).mean(), start, (X, y), options)
    return lambda x, y: log_density(found, x, y)


def compare_trips(options: argparse.Namespace) -> None:
    """Mean negative log densities of test rows."""
    X_test, y_test = trips(options.test, 1)
    sizes = [100] if options.smoke else options.rows
    table: dict[str, list[float]] = {}
    for num in sizes:
        X, y = trips(num, 0)
        densities: dict[str, LogDensity] = {"true density": true_density}
        for name, inputs, latent in (("latent alone", 0.0, 2), ("GP", 1.0, 0), ("inputs and latent", 1.0, 2)):
            model = conditional(inputs * X, 2, latent, options.num_inducing)
            guide = dgp.guides.InducingPoint(model, **({"latent": dgp.guides.Amortised()} if latent else {}))
            posterior = fit(model, guide, (inputs * X, y), num, options)
            of_rows = posterior.using(num_samples=1000 if latent else 1).log_density
            densities[name] = lambda x, y, of_rows=of_rows, inputs=inputs: of_rows(jax.random.key(2), y, inputs * x)
        densities |= kernel_estimates(X, y)
        densities |= {f"mixture network, {k}": mixture_network(k, X, y, options) for k in (1, 5, 10, 50)}
        for name, density in densities.items():
            table.setdefault(name, []).append(-float(density(X_test, y_test).mean()))
    print("| model | " + " | ".join(f"{num} rows" for num in sizes) + " |\n|---|" + "---|" * len(sizes))
    for name, values in table.items():
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    if options.figure:
        shown = ("true density", "GP", "inputs and latent", "KDE of 50 neighbours", "mixture network, 5")
        draw_trips({name: densities[name] for name in shown}, options.figure)


def draw_trips(densities: dict[str, LogDensity], path: Path) -> None:
    """Figure 4.4: where a trip ends that begins at either of two places."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    line = jnp.linspace(-1.6, 1.6, 48)
    ends = jnp.stack(jnp.meshgrid(line, line), -1).reshape(-1, 48, 2)
    figure, axes = plt.subplots(2, len(densities), figsize=(11, 4.6), layout="constrained", sharex=True, sharey=True)
    for row, place in zip(axes, jnp.array([[-0.6, 0.3], [0.2, 0.6]]), strict=True):
        for ax, density in zip(row, densities.values(), strict=True):
            found = [density(jnp.broadcast_to(place, part.shape), part) for part in ends]  # which bounds the memory
            ax.pcolormesh(line, line, np.exp(np.stack(found)), cmap="Greys", vmin=0, vmax=2)
            ax.plot(*place, "C1o", ms=4)
            ax.set(xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    for ax, name in zip(axes[0], densities, strict=True):
        ax.set_title(name, fontsize=10)
    figure.savefig(path, dpi=100)


# Figure 4.5 and table 4.2: digits given their label.


def load(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W), with numbers from 0 to 1, and labels, in a random order."""
    if options.digits:
        X, y, X_test, y_test = digits.load_file(options.digits)
        images, labels = np.concatenate([X, X_test]), np.concatenate([y, y_test])
    else:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=False).images / 16, load_digits().target
    order = np.random.default_rng(options.seed).permutation(len(images))
    return images[order].astype(np.float32), labels[order]


def directions(side: int, number: int) -> np.ndarray:
    """Principal directions of Matern-5/2 images with a lengthscale of one pixel, scaled by standard deviations."""
    pixels = np.stack(np.meshgrid(*[np.arange(float(side))] * 2), -1).reshape(-1, 2)
    values, vectors = np.linalg.eigh(np.asarray(dgp.kernels.Matern52(1.0, 1.0)(pixels, pixels)))
    return (vectors * np.sqrt(values))[:, ::-1][:, :number].astype(np.float32)


def labelled(
    side: int, latent: int, noise: float | None, images: int, options: argparse.Namespace
) -> Callable[..., None]:
    """y = P f(A x, w) + noise for one-hot x: A has a prior, P is learned, and so is the noise unless it is given.

    Of P only the scale is learned where there are no more images than functions: any P would pass through all images,
    and the bound has no maximum as the noise goes to zero.
    """
    start, columns = directions(side, min(options.functions, side * side)), 5
    Z = np.random.default_rng(0).normal(size=(options.num_inducing, columns + latent)).astype(np.float32)

    def model(labels: jax.Array, y: Any = None, batch: int | None = None) -> None:
        if images > start.shape[1]:
            P = numpyro.param("P", 0.3 * start)
        else:
            P = numpyro.param("scale", 0.3, constraint=positive) * start
        centre = numpyro.param("centre", jnp.full(side * side, 0.3))
        scales = numpyro.param("scales", jnp.full(Z.shape[1], math.sqrt(Z.shape[1])), constraint=positive)
        sigma = numpyro.param("noise", 0.2, constraint=positive) if noise is None else noise
        A = numpyro.sample("A", dist.Normal(jnp.zeros((10, columns)), 1.0).to_event(2))
        f = dgp.gp("f", dgp.kernels.RBF(1.0, scales), dgp.Points(Z, learn=True), outputs=start.shape[1])
        with numpyro.plate("data", len(labels), subsample_size=batch) as rows:
            values = f(dgp.latent("w", A[labels[rows]], latent)).mix(P)
            likelihood = dgp.Likelihood(values, lambda v: dist.Normal(centre + v, sigma).to_event(1))
            numpyro.sample("y", likelihood, obs=None if y is None else y[rows])

    return model


Digits = tuple[jax.Array, jax.Array]  # labels and flat images


def fit_images(train: Digits, noise: float | None, options: Any) -> dgp.Posterior:
    """With a Gaussian q(A) and an amortised q(w).

    A natural step moves all mixed functions at once, each as if the others stayed. Where columns of P become parallel,
    steps that move a mean by more than 2 / functions of its way overshoot, and the fit diverges. While q(v) is wide,
    the first steps do, so that all sizes rise slowly.
    """
    model = labelled(math.isqrt(train[1].shape[1]), 2, noise, len(train[0]), options)
    guide = dgp.guides.InducingPoint(model, latent=dgp.guides.Amortised(), other=dgp.guides.Normal())
    return fit(model, guide, train, len(train[0]), options, natural=1 / options.functions, rate=0.005, rise=200)


def by_process(train: Digits, tests: list[Digits], noise: float | None, options: Any) -> list[float]:
    """Mean log densities of images; last, the noise variance."""
    posterior = fit_images(train, noise, options)
    densities = [log_density_of_images(posterior, *test, options.draws) for test in tests]
    return [*densities, float(posterior.params.get("noise", noise)) ** 2]


def log_density_of_images(posterior: dgp.Posterior, labels: jax.Array, y: jax.Array, draws: int) -> float:
    """Mean over images, fifty at a time, which bounds the memory."""
    of_rows = posterior.using(num_samples=draws).log_density
    parts = [slice(n, n + 50) for n in range(0, len(y), 50)]
    return float(np.concatenate([of_rows(jax.random.key(2), y[part], labels[part]) for part in parts]).mean())


def by_autoencoder(train: Digits, tests: list[Digits], noise: float | None, options: Any) -> list[float]:
    """The same by a conditional variational autoencoder: networks in place of the process, fitted to a bound too."""
    P = train[1].shape[1]
    keys = jax.random.split(jax.random.key(1), 3)
    start = {"to_w": network(keys[0], [P + 10, 100, 4]), "to_y": network(keys[1], [12, 100, P]), "noise": jnp.log(0.2)}

    def image(params: Any, labels: jax.Array, w: jax.Array) -> Any:
        sigma = jnp.exp(params["noise"]) if noise is None else noise
        return dist.Normal(apply(params["to_y"], jnp.concatenate([jnp.eye(10)[labels], w], -1)), sigma).to_event(1)

    def loss(params: Any, key: jax.Array, labels: jax.Array, y: jax.Array) -> jax.Array:
        mean, spread = jnp.split(apply(params["to_w"], jnp.concatenate([jnp.eye(10)[labels], y], 1)), 2, axis=1)
        q = dist.Normal(mean, jax.nn.softplus(spread) + 1e-3).to_event(1)
        w, prior = q.rsample(key), dist.Normal(jnp.zeros(2), 1.0).to_event(1)
        return (q.log_prob(w) - prior.log_prob(w) - image(params, labels, w).log_prob(y)).mean()

    found = descend(loss, start, train, options)
    draws = jax.random.normal(keys[2], (1000, 2))

    def density(labels: jax.Array, y: jax.Array) -> jax.Array:
        at = lambda w: image(found, labels, jnp.broadcast_to(w, (len(labels), 2))).log_prob(y)  # noqa: E731
        return log_mean_exp(jax.lax.map(at, draws)).mean()

    return [
        *(float(density(*test)) for test in tests),
        math.exp(2 * float(found["noise"])) if noise is None else noise**2,
    ]


def compare_images(options: argparse.Namespace) -> None:
    """Log densities per image, for training and test rows, with the noise variance fixed at 0.025 and learned."""
    images, labels = load(options)
    flat = images.reshape(len(images), -1)
    kept, test = slice(options.test, None), slice(0, options.test)
    print("| images of a label | method | noise variance | test | train |\n|---|---|---|---|---|")
    for num in [2] if options.smoke else options.numbers:
        rows = np.concatenate([np.flatnonzero(labels[kept] == c)[:num] for c in range(10)])
        train = jnp.asarray(labels[kept][rows]), jnp.asarray(flat[kept][rows])
        some = np.random.default_rng(0).permutation(len(rows))[: options.test]
        tests = [(jnp.asarray(labels[test]), jnp.asarray(flat[test])), tuple(a[some] for a in train)]
        for method in (by_process, by_autoencoder):
            for noise in (math.sqrt(0.025), None):
                outside, inside, variance = method(train, tests, noise, options)
                how = f"{variance:.4f}, {'learned' if noise is None else 'fixed'}"
                name = method.__name__.removeprefix("by_")
                print(f"| {num} | {name} | {how} | {outside:.1f} | {inside:.1f} |", flush=True)


def few_shot(options: argparse.Namespace) -> None:
    """Log densities per pixel of images of labels 5 to 9, of which four images each are known."""
    images, labels = load(options)
    flat = images.reshape(len(images), -1)
    four = np.concatenate([np.flatnonzero(labels == c)[:4] for c in range(5, 10)])
    others = np.flatnonzero(labels < 5)[:20] if options.smoke else np.flatnonzero(labels < 5)
    rest = np.setdiff1d(np.flatnonzero(labels >= 5), four)
    test = rest[: options.test]
    rows_of = {
        "four images of a label": four,
        "and all of five other labels": np.concatenate([four, others]),
        "all images of all labels": np.concatenate([four, others, rest[options.test :]]),
    }
    drawn = {}
    print("| known | log density per pixel | noise variance |\n|---|---|---|")
    for name, rows in rows_of.items():
        train = jnp.asarray(labels[rows]), jnp.asarray(flat[rows])
        posterior = fit_images(train, None, options)
        outside = jnp.asarray(labels[test]), jnp.asarray(flat[test])
        density = log_density_of_images(posterior, *outside, options.draws) / flat.shape[1]
        print(f"| {name} | {density:.3f} | {float(posterior.params['noise']) ** 2:.4f} |", flush=True)
        of_labels = posterior.using(num_samples=8).predict(jax.random.key(3), jnp.arange(5, 10))
        drawn[name] = np.swapaxes(np.asarray(of_labels.means), 0, 1)
    if options.figure:
        true = np.stack([flat[test][labels[test] == c][0] for c in range(5, 10)])
        draw_images(true, drawn, images.shape[1], options.figure)


def draw_images(true: np.ndarray, drawn: dict[str, np.ndarray], side: int, path: Path) -> None:
    """Figure 4.5: an image of each label that was not seen, and beside it images of that label by each fit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 2.6), layout="constrained")
    blocks = {"test": true[:, None], **drawn}
    widths = [block.shape[1] for block in blocks.values()]
    parts = figure.subfigures(1, len(blocks), width_ratios=widths)
    for part, (name, block) in zip(parts, blocks.items(), strict=True):
        part.suptitle(name, fontsize=8)
        for row, values in zip(part.subplots(*block.shape[:2], squeeze=False), block, strict=True):
            for ax, image in zip(row, values.reshape(-1, side, side), strict=True):
                ax.imshow(image, cmap="gray_r", vmin=0, vmax=1)
                ax.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=110)


# Figures 4.7 and 4.8: a hundred ones.


def compare_ones(options: argparse.Namespace) -> None:
    """The program of ``examples/gplvm.py`` in units of pixels; log densities per pixel of the ones left out."""
    jax.config.update("jax_enable_x64", True)  # the closed form of the collapsed bound wants double precision
    images, labels = load(options)
    ones = np.asarray(images[labels == 1], float).reshape((labels == 1).sum(), -1)
    num = 20 if options.smoke else 100
    centre = ones[:num].mean(0)
    y, y_test = (jnp.asarray(part - centre) for part in (ones[:num], ones[num:][: options.test]))
    left = np.linalg.svd(np.asarray(y), full_matrices=False)[0]
    place = left[:, :1] * math.sqrt(num)  # the first principal component, in units of its standard deviation
    Z = dgp.initial.kmeans(place, min(options.num_inducing, 20))
    P, w = y.shape[1], np.linspace(-2, 2, 9)
    data, latent = (y, num, Z, P), dgp.guides.Normal(0.1, loc=place)
    runs = {"collapsed": None, "natural 0.1, Adam 0.001": 0.001, "Adam 0.001": 0.001, "Adam 0.02": 0.02}
    curves, means = {}, {}
    print("| inference | bound per digit | test density per pixel | noise |\n|---|---|---|---|")
    for name, rate in runs.items():
        if rate is None:
            guide: Any = dgp.guides.Collapsed(gplvm.model, latent=latent)
            found: Any = minimize(
                gplvm.model, guide, jax.random.key(0), *data, max_steps=options.steps, progress_bar=False
            )
        else:
            guide = dgp.guides.InducingPoint(gplvm.model, latent=latent)
            adam: Any = optax.adam(rate)
            optimizer = NaturalGradient(guide, log_linear(1e-4, 0.1, 5), adam) if "natural" in name else adam
            svi = SVI(gplvm.model, guide, optimizer, dgp.ELBO())
            found = svi.run(jax.random.key(0), options.steps, *data, progress_bar=False)
        curves[name] = -np.asarray(found.losses) / num
        posterior = dgp.Posterior(gplvm.model, guide.on(*data), found.params).using(num_samples=500)
        density = posterior.log_density(jax.random.key(1), y_test, None, len(y_test), Z, P).mean() / P
        g, _ = posterior.layers(jax.random.key(2), None, len(w), Z, P)["y"]
        means[name] = centre + np.asarray(g(jnp.asarray(w)[:, None]).mean)
        noise = float(found.params["noise"])
        print(f"| {name} | {curves[name][-100:].mean():.1f} | {float(density):.3f} | {noise:.3f} |", flush=True)
    if options.figure:
        draw(curves, means, images.shape[1], options.figure)


def draw(curves: dict[str, np.ndarray], means: dict[str, np.ndarray], side: int, path: Path) -> None:
    """Mean images along w, and the bound during training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10, 3.4), layout="constrained")
    above, beside = figure.subfigures(1, 2, width_ratios=(3, 2))
    for axes, (name, flat) in zip(above.subplots(len(means), 9), means.items(), strict=True):
        for ax, image in zip(axes, flat.reshape(-1, side, side), strict=True):
            ax.imshow(image, cmap="gray_r", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
        axes[0].set_ylabel(name.replace(", ", ",\n"), rotation=0, ha="right", va="center", fontsize=8)
    ax = beside.subplots()
    for name, curve in curves.items():
        ax.plot(np.arange(1, len(curve) + 1), curve, label=name, lw=1.2)
    ax.set(xscale="log", xlabel="steps", ylabel="bound per digit", ylim=(min(-200, 0), None))
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


PARTS = {"trips": compare_trips, "few-shot": few_shot, "images": compare_images, "ones": compare_ones}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--digits", type=Path, help="file of full-size images")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--functions", type=int, default=50, help="that are mixed to images")
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 5000], help="training rows of trips")
    parser.add_argument("--numbers", type=int, nargs="+", default=[2, 16, 128], help="training images of a label")
    parser.add_argument("--test", type=int, default=500, help="test rows")
    parser.add_argument("--draws", type=int, default=500, help="of the latent, for test densities of images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="file of the figure of trips, few-shot or ones")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few rows, to see that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.num_inducing, options.functions, options.test, options.draws = 20, 10, 10, 20, 10
    for name in options.part:
        PARTS[name](options)


if __name__ == "__main__":
    main()
