"""Random well-formed programs: what one is made of, the program itself, its data, and how a seed becomes one."""

import dataclasses
from contextlib import ExitStack

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_dgp as dgp

RBF, Matern32, Matern52 = dgp.kernels.RBF, dgp.kernels.Matern32, dgp.kernels.Matern52
KERNELS = {  # by the number of input columns
    "rbf": lambda D: RBF(0.8, 1.1),
    "matern": lambda D: Matern52(0.7, 1.3),
    "sum": lambda D: Matern32(0.5, 0.9) + dgp.kernels.Linear(0.3),
    "product": lambda D: RBF(1.1, 1.5) * dgp.kernels.RationalQuadratic(0.7, 1.2),
    "ard": lambda D: RBF(0.9, jnp.linspace(0.9, 1.6, D)),
    "additive": lambda D: RBF(0.6, 1.2).on(0) + Matern52(0.5, 1.4).on(D - 1),
}
SYMMETRIC = ("rbf", "matern", "sum", "product")  # in the columns of the inputs
MEANS = {"zero": None, "constant": dgp.means.Constant(0.3), "identity": dgp.means.Identity()}
LIKELIHOODS = {
    "normal": lambda v: dist.Normal(v, 0.4),
    "affine": lambda v: dist.Normal(0.5 * v - 0.2, 0.6),
    "student": lambda v: dist.StudentT(5.0, v, 0.5),
    "bernoulli": lambda v: dist.Bernoulli(logits=v),
    "binomial": lambda v: dist.Binomial(4, logits=v),
    "poisson": lambda v: dist.Poisson(jnp.exp(0.3 * v)),
    "negative binomial": lambda v: dist.NegativeBinomial2(jnp.exp(0.3 * v), 3.0),
    "noisy": lambda v: dist.Normal(v, 0.3 + 0.2 * jnp.tanh(v) ** 2),
    "categorical": lambda v: dist.Categorical(logits=v),
}
OUTCOMES = {"binomial": 5, "negative binomial": 4, "categorical": 3}  # how many there are in the data, if not two
LABELS = 3


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of ``dims`` columns; without ``width`` a scalar one, with ``others`` a list of kernels."""

    dims: int
    width: int | None
    kernel: str
    mean: str
    noise: float | None
    points: int
    others: bool
    form: str = "points"  # or "grid", or "exact"

    def kernels(self):
        """One kernel, or one for each output."""
        kernel = KERNELS[self.kernel](self.dims)
        return [kernel, *[KERNELS["rbf"](self.dims)] * (self.width - 1)] if self.others and self.width else kernel

    def open(self, name, z, kernels):
        size = (12,) * self.dims if self.kernel == "additive" or self.dims == 1 else (9,) * self.dims
        how = {"points": lambda: dgp.Points(z), "grid": lambda: dgp.Grid(-6.0, 6.0, size), "exact": lambda: None}
        return dgp.gp(name, kernels, how[self.form](), outputs=self.width, mean=MEANS[self.mean])


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
                x = jnp.concatenate([below, h], -1) if self.skip else h
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
                integrate = dgp.MonteCarlo(5) if likelihood == "categorical" else None
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


def random_program(seed):
    """A program of one to three layers."""
    rng = np.random.default_rng(seed)

    def pick(*options):
        return options[rng.integers(len(options))]

    columns = pick(1, 2)
    batch = pick(None, None, None, "plate", "arguments")
    groups = pick((), (), (2,), (2, 2))
    project = pick(0, 0, 0, 0, 1, 2)
    entering = project or columns
    depth, skip = pick(0, 1, 1, 2), pick(False, False, True)
    exact = pick(False, False, False, True) and batch != "arguments" and not groups and not project
    latent = 0 if exact and depth == 0 else pick(0, 0, 1, 2)
    latent_at = pick(*range(int(exact), depth + 1)) if latent else 0
    likelihood = pick(*LIKELIHOODS)
    mix = pick(False, False, False, True)

    def function(dims, width, form="points"):
        kernels = ("rbf", "matern", "ard", "additive") if form == "grid" else tuple(KERNELS)
        return Function(
            dims=dims,
            width=width,
            kernel=pick(*kernels),
            mean=pick("zero", "constant", *["identity"] * (width == dims)),
            noise=pick(None, 0.2),
            points=pick(2, 3, 4),
            others=pick(False, True) and form != "grid",
            form=form,
        )

    def form(dims):
        return pick("points", "points", "points", "grid") if dims < 3 else "points"

    functions, levels, dims = {}, [], entering
    for level in range(depth):
        dims += latent * (latent > 0 and latent_at == level)
        below = functions.get("f0")
        if level and below.form != "exact" and (below.dims, below.width) == (dims, dims) and pick(True, False):
            levels.append("f0")
        else:
            name = f"f{level}"
            functions[name] = function(dims, pick(1, 2), "exact" if exact and not level else form(dims))
            levels.append(name)
        dims = functions[levels[-1]].width + entering * skip
    dims += latent * (latent > 0 and latent_at == depth)
    width = 2 if mix else LABELS if likelihood == "categorical" else pick(None, None, 1, 2)
    if exact and not depth:
        functions["g"] = function(dims, width, "exact")
    else:
        functions["g"] = function(dims, width, form(dims))
    if pick(*[False] * 5, True):
        functions["part"] = function(entering, LABELS if mix else width)
    second = pick(*(kind for kind in LIKELIHOODS if kind != "categorical"))
    second = second if not exact and pick(False, False, True) else None
    lengths = functions["g"].form == "points" and pick(False, False, True)
    return Program(
        seed=seed,
        columns=columns,
        rows=pick(3, 4, 5, 6),
        groups=groups,
        functions=functions,
        levels=tuple(levels),
        latent=latent,
        latent_at=latent_at,
        skip=skip,
        project=project,
        mask=pick(False, True),
        likelihood=likelihood,
        drawn=(exact and not depth) or pick(False, False, True),
        mix=mix,
        second=second,
        scale=pick(False, True),
        lengths=lengths,
        batch=batch,
        follow=pick(False, True),
    )
