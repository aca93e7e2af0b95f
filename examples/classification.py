"""Handwritten digits: one and two layers, softmax and robust-max.

Scikit-learn's 1797 images of 8 by 8 pixels, four fifths for training. A function per class; two likelihoods say what
its values mean: softmax, integrated by Monte Carlo because it mixes outputs, and robust-max, which needs one integral
over one number. It prints accuracy and test log density, beside logistic regression, and draws how far the
probabilities can be trusted and the digits that two layers find hardest.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI

import numpyro_dgp as dgp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CLASSES = 10
LIKELIHOODS = {"softmax": lambda v: dist.Categorical(logits=v), "robust-max": lambda v: dgp.likelihoods.RobustMax(v)}
NAMES = {1: "GP", 2: "GP-GP"}
MODELS = [(1, "robust-max"), (1, "softmax"), (2, "robust-max"), (2, "softmax")]


def load(seed: int) -> tuple[np.ndarray, ...]:
    """Pixels from 0 to 1 and classes; training rows, then test rows."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.float32(digits.data / 16.0)
    X, X_test, y, y_test = train_test_split(
        pixels, digits.target, test_size=0.2, stratify=digits.target, random_state=seed
    )
    return X, y, X_test, y_test


def make_model(X: np.ndarray, depth: int, likelihood: str, num_inducing: int, width: int = 15) -> Callable[..., None]:
    """Layers start on the principal directions of the pixels; ``width`` of them between the layers."""
    starts = dgp.initial.layers(X, [width] * (depth - 1), num_inducing)

    def model(X: Any, y: Any = None, batch_size: int | None = None) -> None:
        functions = []
        for i, (Z, mean, _) in enumerate(starts):
            typical = math.sqrt(float(np.var(Z, axis=0).sum()))
            scale = numpyro.sample(f"lengthscale{i}", dist.LogNormal(math.log(typical), 1.0))
            variance = numpyro.sample(f"variance{i}", dist.LogNormal(0.0 if i < depth - 1 else 2.0, 1.0))
            outputs = CLASSES if i == depth - 1 else width
            kernel = dgp.kernels.RBF(variance, scale)
            functions.append(dgp.gp(f"f{i}", kernel, dgp.Points(Z, learn=True), outputs=outputs, mean=mean))
        with numpyro.plate("digits", len(X), subsample_size=batch_size) as rows:
            h = X[rows]
            for i, f in enumerate(functions[:-1]):
                h = numpyro.sample(f"h{i}", f(h))
            observed = dgp.Likelihood(
                functions[-1](h), LIKELIHOODS[likelihood], integrate=dgp.likelihoods.MonteCarlo(20)
            )
            numpyro.sample("y", observed, obs=None if y is None else y[rows])

    return model


def reliability(p: np.ndarray, y: np.ndarray, bins: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Mean probability of the chosen class and the part that is right, in bins of equal counts."""
    confidence, right = p.max(1), p.argmax(1) == y
    groups = np.array_split(np.argsort(confidence), bins)
    return np.array([confidence[g].mean() for g in groups]), np.array([right[g].mean() for g in groups])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--draws", type=int, default=50, help="for predictions")
    parser.add_argument("--seed", type=int, default=0, help="of the division into training and test rows")
    parser.add_argument("--out", type=Path, default=Path("classification_output"))
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few rows, to see that it runs")
    arguments = parser.parse_args()
    X, y, X_test, y_test = load(arguments.seed)
    if arguments.smoke:
        X, y, X_test, y_test = X[:100], y[:100], X_test[:50], y_test[:50]
        arguments.steps, arguments.batch, arguments.num_inducing, arguments.draws = 5, 20, 12, 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    images = X_test.reshape(-1, 8, 8)
    X, X_test = X - X.mean(0), X_test - X.mean(0)

    from sklearn.linear_model import LogisticRegression

    found = {"logistic regression": LogisticRegression(C=10.0, max_iter=2000).fit(X, y).predict_proba(X_test)}
    for depth, likelihood in MODELS[-1:] if arguments.smoke else MODELS:
        model = make_model(X, depth, likelihood, arguments.num_inducing)
        guide = dgp.guides.InducingPoint(model)
        svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.02, arguments.steps)), dgp.ELBO())
        data = jnp.asarray(X), jnp.asarray(y), arguments.batch
        params = dgp.fit(svi, jax.random.key(0), arguments.steps, *data, progress_bar=False).params
        posterior = dgp.Posterior(model, guide, params)
        p = posterior.using(num_samples=arguments.draws).probs(jax.random.key(1), X_test)
        found[f"{NAMES[depth]}, {likelihood}"] = np.asarray(p)

    print(f"{'model':22s}{'accuracy':>10s}{'errors':>8s}{'log density':>13s}")
    for name, p in found.items():
        right = p.argmax(1) == y_test
        log_density = np.log(p[np.arange(len(p)), y_test])
        error = log_density.std(ddof=1) / math.sqrt(len(p))
        print(f"{name:22s}{right.mean():10.3f}{(~right).sum():8d}{log_density.mean():9.3f} ({error:.3f})")

    figure = plt.figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.5])
    ax = left.subplots()
    for name, p in found.items():
        ax.plot(*reliability(p, y_test), "o-", ms=3, lw=1, label=name)
    ax.axline((1, 1), slope=1, color="0.3", lw=0.8, ls="--")
    ax.set(xlabel="probability of the chosen class", ylabel="part that is right", title="a sixth of the digits per dot")
    ax.legend(frameon=False, fontsize=8)
    p = found["GP-GP, softmax"]
    hardest = np.argsort(p[np.arange(len(p)), y_test])[:8]
    right.suptitle("where GP-GP with softmax gives the true class least")
    panels = right.subplots(2, 8, sharey="row", height_ratios=[1, 2])
    panels[1, 0].set_ylabel("class")
    for column, n in zip(panels.T, hardest, strict=True):
        column[0].imshow(images[n], cmap="gray_r")
        column[0].set(title=f"a {y_test[n]}", xticks=[], yticks=[])
        colours = ["C0" if c == y_test[n] else "0.6" for c in range(CLASSES)]
        column[1].barh(np.arange(CLASSES), p[n], color=colours)
        column[1].set(xlim=(0, 1), xticks=[0, 1], yticks=np.arange(CLASSES), xlabel="p", ylim=(9.6, -0.6))
    figure.savefig(arguments.out / "classification.png", dpi=90)
    print(f"figure in {arguments.out}")


if __name__ == "__main__":
    main()
