"""Handwritten digits by functions of pixels and of patches: errors and log density of test images, seconds of a fit.

``python benchmarks/digits.py`` takes scikit-learn's 1797 images of 8 by 8 pixels, four fifths for training; ``--canvas
12`` puts each somewhere on an empty image of 12 by 12. ``--data FILE.npz`` takes full-size images, such as MNIST, from
arrays X (N, H, W) or (N, H, W, C), y, X_test and y_test, numbers from 0 to 1 or to 255; use ``--patch 5`` for them and
larger ``--num-inducing``, ``--batch`` and ``--steps``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp
from numpyro_dgp.kernels import RBF, Convolutional


def load_digits(canvas: int, seed: int) -> tuple[Any, ...]:
    """Images (N, H, W), with numbers from 0 to 1, and labels: for training, then for testing."""
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.default_rng(seed)
    order = rng.permutation(len(digits.images))
    images = np.zeros((len(order), canvas, canvas), np.float32)
    for image, digit in zip(images, digits.images[order], strict=True):
        row, column = rng.integers(0, canvas - 7, 2)
        image[row : row + 8, column : column + 8] = digit / 16
    split = len(order) * 4 // 5
    return *(a[:split] for a in (images, digits.target[order])), *(a[split:] for a in (images, digits.target[order]))


def load_file(path: Path) -> tuple[Any, ...]:
    with np.load(path) as file:
        X, y, X_test, y_test = (file[name] for name in ("X", "y", "X_test", "y_test"))
    top = 255 if X.max() > 1 else 1
    return np.float32(X) / top, y.astype(int).ravel(), np.float32(X_test) / top, y_test.astype(int).ravel()


def scales(name: str, variance: float, lengthscale: float) -> RBF:
    """An RBF with priors around these values."""
    return RBF(
        numpyro.sample(f"{name}_variance", dist.LogNormal(math.log(variance), 1.0)),
        numpyro.sample(f"{name}_lengthscale", dist.LogNormal(math.log(lengthscale), 1.0)),
    )


def make_layers(
    name: str, X: np.ndarray, image: tuple[int, ...], classes: int, settings: argparse.Namespace
) -> Callable[[], Callable[[Any], Any]]:
    """One of ``MODELS``: opens its layers, and returns what gives the values of a function per class in the plate."""
    size, M = (settings.patch, settings.patch), settings.num_inducing
    if name == "pixels":
        Z = dgp.initial.kmeans(X, M)
        typical = math.sqrt(float(np.var(X, axis=0).sum()))
        return lambda: dgp.gp("f", scales("f", 5.0, typical), dgp.Points(Z), outputs=classes)
    patches = dgp.kernels.Patches(image, size, settings.stride, places=name == "patches with places")
    Z = dgp.initial.inducing_patches(X, patches, M)
    numbers = range(math.prod((*size, *image[2:])))

    def response(name: str, patches: dgp.kernels.Patches) -> Any:
        kernel = scales(name, 50.0, math.sqrt(len(numbers)) / 3)
        if not patches.places:
            return kernel
        side = numpyro.sample(f"{name}_places", dist.LogNormal(math.log(patches.image[0] / 2), 1.0))
        return kernel.on(*numbers) * RBF(1.0, side).on(patches.size - 2, patches.size - 1)

    def last(patches: dgp.kernels.Patches, Z: np.ndarray) -> Any:
        weights = numpyro.param("weights", jnp.ones(patches.count)) / patches.count
        kernel = Convolutional(response("f", patches), patches, weights)
        return dgp.gp("f", kernel, dgp.functions.InducingPatches(Z), outputs=classes)

    if name != "two layers":
        return lambda: last(patches, Z)
    C, few = settings.channels, patches(X[:500])
    above = dgp.kernels.Patches((*patches.grid, C), size)
    mean = dgp.means.pca(np.asarray(few).reshape(-1, patches.size), C)
    Z_above = dgp.initial.inducing_patches(np.asarray(mean(few)).reshape(len(few), -1), above, M)

    def two_layers() -> Callable[[Any], Any]:
        kernel = scales("hidden", 0.1, math.sqrt(len(numbers)) / 3)
        f = dgp.gp("h", kernel, dgp.Points(Z[: M // 2]), outputs=C, mean=mean)
        g = last(above, Z_above)

        def values(X: Any) -> Any:
            h = numpyro.sample("maps", f.joint(patches(X)) if settings.joint else f(patches(X)).to_event(1))
            return g(h.reshape(*h.shape[:-2], -1))

        return values

    return two_layers


MODELS = ["pixels", "patches", "patches with places", "two layers"]
LIKELIHOODS = {"robust-max": dgp.likelihoods.RobustMax, "softmax": lambda v: dist.Categorical(logits=v)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="file of full-size images")
    parser.add_argument("--canvas", type=int, default=8, help="side of the image that a digit is put on")
    parser.add_argument("--train", type=int, help="training images; default: all")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--likelihood", choices=LIKELIHOODS, default="robust-max")
    parser.add_argument("--patch", type=int, default=3, help="side of a patch")
    parser.add_argument("--stride", type=int, default=1, help="of the first layer")
    parser.add_argument("--channels", type=int, default=3, help="outputs of the hidden layer at a patch")
    parser.add_argument("--joint", action="store_true", help="patches of an image drawn jointly in the hidden layer")
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    found = load_digits(settings.canvas, settings.seed) if settings.data is None else load_file(settings.data)
    X, y, X_test, y_test = found
    image = X.shape[1:]
    X, X_test = (a.reshape(len(a), -1) for a in (X[: settings.train], X_test))
    data = jnp.asarray(X), jnp.asarray(y[: settings.train])
    classes = int(y.max()) + 1
    print(f"{len(X)} images {image}, {settings.steps} steps of {settings.batch}, on {jax.devices()[0].device_kind}")
    print("| model | wrong | log density | seconds |\n|---|---|---|---|")
    for name in settings.models:
        layers = make_layers(name, X, image, classes, settings)

        def model(X: Any, y: Any = None, batch: int | None = None, layers: Any = layers) -> None:
            values = layers()
            with numpyro.plate("images", len(X), subsample_size=batch) as i:
                labelled = dgp.Likelihood(values(X[i]), LIKELIHOODS[settings.likelihood])
                numpyro.sample("y", labelled, obs=None if y is None else y[i])

        guide = dgp.guides.InducingPoint(model)
        optimizer = optax.adam(optax.cosine_decay_schedule(0.03, settings.steps))
        svi = SVI(model, guide, optimizer, dgp.ELBO())
        start = time.perf_counter()
        result = dgp.fit(svi, jax.random.key(settings.seed), settings.steps, *data, settings.batch, progress_bar=False)
        seconds = time.perf_counter() - start
        posterior = dgp.Posterior(model, guide, result.params)
        probs = np.asarray(posterior.using(num_samples=20, progress_bar=False).probs(jax.random.key(1), X_test))
        density = np.log(probs[np.arange(len(probs)), y_test])
        error = density.std(ddof=1) / math.sqrt(len(density))
        wrong = (probs.argmax(1) != y_test).mean()
        print(f"| {name} | {100 * wrong:.1f} % | {density.mean():.3f} ({error:.3f}) | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
