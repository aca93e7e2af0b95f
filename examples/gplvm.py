"""Digits from one latent number each (GPLVM): the collapsed bound, natural gradients, Adam and importance weighting.

100 handwritten ones of scikit-learn's set, 8 by 8 pixels, no inputs: y = g(w) + noise with w ~ N(0, 1) per digit and a
function per pixel. One program, four ways of inference from the same start. It prints a table and draws, for each, the
mean image along w and the posterior of every digit's w. After Salimbeni (2020), section 4.4 and figure 4.7.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI
from scipy.stats import spearmanr

import numpyro_dgp as dgp
from numpyro_dgp import plots
from numpyro_dgp.optim import NaturalGradient, log_linear, minimize

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Digits(NamedTuple):
    """Pixels that vary, centred, in units of their common standard deviation; where they are; how far each 1 leans."""

    y: jax.Array
    varies: np.ndarray
    centre: np.ndarray
    scale: float
    slant: np.ndarray


def ones(num: int) -> Digits:
    """The first ``num`` ones, and the slope of the line through their ink."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images[digits.target == 1][:num]
    row, column = np.mgrid[:8, :8]
    ink = images / images.sum((1, 2), keepdims=True)
    at_row, at_column = ((ink * place).sum((1, 2), keepdims=True) for place in (row, column))
    slant = (ink * (row - at_row) * (column - at_column)).sum((1, 2)) / (ink * (row - at_row) ** 2).sum((1, 2))
    flat = images.reshape(len(images), -1)
    varies = flat.std(0) > 0
    scale = float(flat[:, varies].std())
    y = (flat - flat.mean(0))[:, varies] / scale
    return Digits(jnp.asarray(y), varies, flat.mean(0), scale, slant)


def model(y: Any = None, num: int | None = None, Z: Any = None, pixels: int = 1) -> None:
    """One latent per digit; kernel and noise are learned, and the inducing inputs."""
    positive = dist.constraints.positive
    variance, scale, noise = (
        numpyro.param(name, value, constraint=positive)
        for name, value in (("variance", 1.0), ("scale", 1.0), ("noise", 0.3))
    )
    g = dgp.gp("g", dgp.kernels.RBF(variance, scale), dgp.Points(Z, learn=True), outputs=pixels)
    with numpyro.plate("data", num):
        w = dgp.latent("w", None, dim=1)
        numpyro.sample("y", dgp.Likelihood(g(w), lambda v: dist.Normal(v, noise).to_event(1)), obs=y)


def fit(name: str, digits: Digits, start: np.ndarray, arguments: argparse.Namespace) -> tuple[Any, Any, float]:
    """Guide, parameters and bound per digit."""
    y, (N, P) = digits.y, digits.y.shape
    Z = dgp.initial.kmeans(start, arguments.num_inducing)
    data, keys = (y, N, Z, P), jax.random.split(jax.random.key(0), 3)
    latent = dgp.guides.Normal(0.1, loc=start)
    if name == "collapsed":
        guide: Any = dgp.guides.Collapsed(model, latent=latent)
        svi = SVI(model, guide, optax.sgd(0.0), dgp.ELBO())
        params = minimize(svi, keys[0], *data, max_steps=arguments.steps, progress_bar=False).params
    else:
        guide = dgp.guides.InducingPoint(model, latent=latent)
        if name == "importance weighting":
            guide = dgp.guides.ImportanceWeighted(model, num_samples=10, latent=latent)
        optimizer: Any = optax.adam(optax.cosine_decay_schedule(0.02, arguments.steps))
        if name != "Adam":
            last = arguments.steps // 10
            held = [optax.constant_schedule(0.3), log_linear(0.3, 0.003, last)]
            optimizer = NaturalGradient(guide, optax.join_schedules(held, [arguments.steps - last]), optimizer)
        svi = SVI(model, guide, optimizer, dgp.ELBO())
        params = svi.run(keys[0], arguments.steps, *data, progress_bar=False).params

    @jax.jit
    def bound(key: jax.Array, params: Any, y: jax.Array) -> jax.Array:
        return -dgp.ELBO().loss(key, params, model, guide, y, *data[1:])

    draws = jax.lax.map(lambda key: bound(key, params, y), jax.random.split(keys[1], 200))
    return guide.on(*data), params, float(draws.mean()) / N


def images(guide: Any, params: Any, digits: Digits, Z: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Mean images along w (len(w), 8, 8)."""
    posterior = dgp.Posterior(model, guide, params)
    g, _ = posterior.layers(jax.random.key(2), None, len(w), Z, digits.y.shape[1])["y"]
    flat = np.tile(digits.centre, (len(w), 1))
    flat[:, digits.varies] += digits.scale * np.asarray(g(jnp.asarray(w)[:, None]).mean)
    return flat.reshape(-1, 8, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num", type=int, default=100, help="digits")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--num-inducing", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("gplvm_output"))
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few digits, to see that it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.num, arguments.steps, arguments.num_inducing = 20, 10, 5
    arguments.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", True)  # the closed form of the collapsed bound wants double precision
    digits = ones(arguments.num)
    left = np.linalg.svd(np.asarray(digits.y), full_matrices=False)[0]
    start = left[:, :1] * np.sqrt(len(left))  # the first principal component, in units of its standard deviation
    Z = dgp.initial.kmeans(start, arguments.num_inducing)
    methods: list[str] = ["collapsed", "natural gradients", "Adam", "importance weighting"]
    w = np.linspace(-2, 2, 9)
    figure, axes = plt.subplots(len(methods), len(w), figsize=(len(w), 1.15 * len(methods)), layout="constrained")
    space, panels = plt.subplots(2, 2, figsize=(9, 7), sharex=True, sharey=True, layout="constrained")
    print(f"{'inference':22s}{'bound per digit':>16s}{'noise':>8s}{'order':>8s}{'slant':>8s}")
    orders: dict[str, np.ndarray] = {}
    for name, row, panel in zip(methods, axes, panels.flat, strict=True):
        guide, params, bound = fit(name, digits, start, arguments)
        orders[name] = np.asarray(params["w_auto_loc"])[:, 0]
        order = abs(spearmanr(orders[name], orders["collapsed"]).statistic)
        slant = abs(spearmanr(orders[name], digits.slant).statistic)
        print(f"{name:22s}{bound:16.3f}{float(params['noise']):8.3f}{order:8.3f}{slant:8.3f}", flush=True)
        sign = np.sign(spearmanr(orders[name], digits.slant).statistic) or 1.0
        for ax, image, place in zip(row, images(guide, params, digits, Z, sign * w), w, strict=True):
            ax.imshow(image, cmap="gray_r")
            ax.set(xticks=[], yticks=[])
            if name == methods[-1]:
                ax.set(xlabel=f"w = {place:g}")
        row[0].set_ylabel(name.replace(" ", "\n"), fontsize=7)
        data = digits.y, len(digits.y), Z, digits.y.shape[1]
        draws = guide.sample_posterior(jax.random.key(3), params, *data, sample_shape=(200,))["w"]
        plots.latent_space(sign * draws, colours=digits.slant, label="slant, columns per row", ax=panel)
        panel.set(title=name, xlabel="w", ylabel="digit")
        panel.label_outer()
    figure.savefig(arguments.out / "digits.png", dpi=120)
    space.savefig(arguments.out / "latents.png", dpi=100)
    print("order, slant: rank correlations of w with w of the collapsed bound and with the slant of the digits")
    print(f"figures are in {arguments.out}")


if __name__ == "__main__":
    main()
