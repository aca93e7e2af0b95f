"""A program of functions above each other, of any structure, and its data."""

import dataclasses
from contextlib import ExitStack

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from generated_parts import LABELS, LIKELIHOODS, OUTCOMES, RBF, Function

import numpyro_dgp as dgp


def beside(x, h):
    """Hidden values with the inputs beside them, also where there are several values for a latent below."""
    return jnp.concatenate([jnp.broadcast_to(x, (*h.shape[:-1], x.shape[-1])), h], -1)


@dataclasses.dataclass(frozen=True)
class Program:
    """Hidden layers above each other and a function above them, under one or two observed sites.

    The second site has rows of its own, without groups or mask, and shares all functions.

    Args:
        seed: of the data.
        columns: of X.
        rows: in the plate of the data.
        groups: sizes of the plates around it.
        functions: by name; "g" is the last, "part" is added to it.
        levels: the function of every hidden layer.
        latent: columns of a latent per datum; 0 for none.
        latent_at: the level that it enters at.
        skip: every layer but the first also gets X.
        project: columns that X is projected to; 0 for none.
        mask: leave out rows.
        likelihood: of the first observed site.
        drawn: the last function has a site of its own.
        mix: the likelihood gets mixtures of the last functions.
        second: likelihood of a second observed site.
        scale: hyperparameter that multiplies the last function.
        lengths: a plate of hyperparameters, the lengthscales of the last function.
        batch: "plate" to subsample, "arguments" for ``dgp.minibatch``.
        follow: what is drawn is also kept by ``numpyro.deterministic``.
    """

    seed: int
    columns: int
    rows: int
    groups: tuple[int, ...]
    functions: dict[str, Function]
    levels: tuple[str, ...]
    latent: int
    latent_at: int
    skip: bool
    project: int
    mask: bool
    likelihood: str
    drawn: bool
    mix: bool
    second: str | None
    scale: bool
    lengths: bool
    batch: str | None
    follow: bool

    @property
    def last(self):
        return self.functions["g"]

    @property
    def first(self):
        """Name of the function that the inputs enter."""
        return (*self.levels, "g")[0]

    @property
    def is_deterministic(self):
        """Whether ``dgp.ELBO`` has nothing to draw but hyperparameters."""
        hidden = self.levels or self.latent or self.drawn or self.project or "part" in self.functions
        return not (hidden or self.batch or self.is_estimated or self.lengths)

    @property
    def is_estimated(self):
        """Whether a likelihood is integrated by Monte Carlo: its log density is then random too."""
        return self.likelihood == "categorical" and not self.drawn

    @property
    def is_exact(self):
        return self.functions[self.first].form == "exact"

    @property
    def is_noisy(self):
        """Whether all hidden values have process noise."""
        return not self.drawn and all(self.functions[name].noise for name in self.levels)

    @property
    def suffixes(self):
        return ("", "_2") if self.second else ("",)

    @property
    def hidden(self):
        """Names of sites of hidden layers that are drawn row by row."""
        levels = range(int(self.is_exact), len(self.levels))
        return [f"h{level}{suffix}" for level in levels for suffix in self.suffixes]

    @property
    def model(self):
        if self.batch == "arguments":
            return dgp.minibatch(self.all_rows, data=2 * self.rows)
        return self.all_rows

    def data(self, rows=None):
        """Inputs, observations, the same of the second site, and inducing inputs of every function."""
        rng = np.random.default_rng(self.seed)
        Z = [rng.uniform(-2, 2, (f.points, f.dims)) for f in self.functions.values()]
        shape = (*self.groups, rows or self.rows)
        second = rng.uniform(-1.5, 1.5, (3, self.columns)), self._outcomes(rng, (3,), self.second or "normal")
        y = self._outcomes(rng, shape, self.likelihood)
        X = rng.uniform(-1.5, 1.5, (*shape, self.columns))
        return jnp.array(X), jnp.array(y), *map(jnp.array, second), [jnp.array(z) for z in Z]

    def _outcomes(self, rng, shape, likelihood):
        width = LABELS if self.mix else self.last.width
        event = () if width is None or likelihood == "categorical" else (width,)
        found = rng.integers(0, OUTCOMES.get(likelihood, 2), (*shape, *event))
        return found if likelihood in OUTCOMES else found.astype(float)

    def all_rows(self, X, y, X2, y2, Z, *, keep=None, flipped=False, whole=False):
        """``keep`` masks rows; ``flipped`` reverses the order of the first layer's kernels; ``whole`` takes all."""
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3)) if self.scale else 1.0
        functions = self._open(Z, flipped)
        if self.project:
            project = dgp.projection("project", self.columns, self.project, 0.8)
        W = None
        if self.mix:
            W = numpyro.sample("W", dist.Normal(0.0, 0.7).expand((LABELS, self.last.width)).to_event(2))
        start = None
        if self.is_exact:
            name = "h0" if self.levels else "v"
            start = numpyro.sample(name, functions[self.first](X, noise=self.functions[self.first].noise))

        def observe(x, y, suffix, likelihood, start=None):
            if self.project:
                x = numpyro.sample(f"z{suffix}", project(x))
            extra = numpyro.sample(f"a{suffix}", functions["part"](x, noise=0.2)) if "part" in functions else 0.0
            below = x
            for level, name in enumerate((*self.levels, "g")):
                if self.latent and level == self.latent_at:
                    x = dgp.latent(f"w{suffix}", x, self.latent)
                if name == "g":
                    break
                f, noise = functions[name], self.functions[name].noise
                h = start if level == 0 and self.is_exact else numpyro.sample(f"h{level}{suffix}", f(x, noise=noise))
                x = beside(below, h) if self.skip else h
                if self.follow:
                    numpyro.deterministic(f"kept{level}{suffix}", 2 * h)

            def conditional(v):
                fn = LIKELIHOODS[likelihood](scale * v + extra)
                return fn if self.last.width is None or likelihood == "categorical" else fn.to_event(1)

            if self.drawn:
                v = start if self.is_exact and not self.levels else numpyro.sample(f"v{suffix}", functions["g"](x))
                fn = conditional(v if W is None else v @ W.T)
            else:
                v = functions["g"](x)
                integrate = dgp.likelihoods.MonteCarlo(5) if likelihood == "categorical" else None
                fn = dgp.Likelihood(v if W is None else v.mix(W), conditional, integrate=integrate)
            numpyro.sample(f"y{suffix}", fn, obs=y)

        with ExitStack() as plates:
            for k, size in enumerate(self.groups):
                plates.enter_context(numpyro.plate(f"groups{k}", size, dim=k - len(self.groups) - 1))
            rows = X.shape[-2]
            size = rows - 1 if self.batch == "plate" and y is not None and not whole else None
            i = plates.enter_context(numpyro.plate("data", rows, subsample_size=size, dim=-1))
            if self.batch == "plate":
                X, y, start = (
                    None if a is None else a[(slice(None),) * len(self.groups) + (i,)] for a in (X, y, start)
                )
                keep = None if keep is None else keep[i]
            if self.mask and keep is not None:
                plates.enter_context(numpyro.handlers.mask(mask=keep))
            observe(X, y, "", self.likelihood, start)
        if self.second:
            with numpyro.plate("others", len(X2)):
                observe(X2, y2, "_2", self.second)

    def _open(self, Z, flipped):
        found = {}
        for (name, f), z in zip(self.functions.items(), Z, strict=True):
            kernels = f.kernels()
            if name == "g" and self.lengths:
                with numpyro.plate("columns", f.dims):
                    kernels = RBF(0.9, numpyro.sample("lengths", dist.LogNormal(0.0, 0.2)))
            if flipped and name == "f0" and isinstance(kernels, list):
                kernels = kernels[::-1]
            found[name] = f.open(name, z, kernels)
        return found
