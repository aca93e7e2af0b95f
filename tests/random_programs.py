"""Random well-formed programs: what one is made of, the program itself, its data, and the strategy that draws one."""

import dataclasses
from contextlib import ExitStack

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from hypothesis import strategies as st

import numpyro_dgp as dgp

KERNELS = {
    "rbf": dgp.kernels.RBF(0.8, 1.1),
    "matern": dgp.kernels.Matern52(0.7, 1.3),
    "sum": dgp.kernels.Matern32(0.5, 0.9) + dgp.kernels.Linear(0.3),
    "product": dgp.kernels.RBF(1.1, 1.5) * dgp.kernels.RationalQuadratic(0.7, 1.2),
}
MEANS = {"zero": None, "constant": dgp.means.Constant(0.3), "identity": dgp.means.Identity()}
LIKELIHOODS = {
    "normal": lambda v: dist.Normal(v, 0.4),
    "affine": lambda v: dist.Normal(0.5 * v - 0.2, 0.6),
    "student": lambda v: dist.StudentT(5.0, v, 0.5),
    "bernoulli": lambda v: dist.Bernoulli(logits=v),
    "poisson": lambda v: dist.Poisson(jnp.exp(0.3 * v)),
    "noisy": lambda v: dist.Normal(v, 0.3 + 0.2 * jnp.tanh(v) ** 2),
}


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the program; without ``width`` a scalar one, with ``others`` a list of kernels."""

    width: int | None
    kernel: str
    mean: str
    noise: float | None
    points: int
    others: bool

    def kernels(self):
        """One kernel, or one for each output."""
        if not self.others or self.width is None:
            return KERNELS[self.kernel]
        return [KERNELS[self.kernel], *[KERNELS["rbf"]] * (self.width - 1)]


@dataclasses.dataclass(frozen=True)
class Program:
    """Hidden layers above each other and a function above them, under one or two observed sites.

    The second site has rows of its own, without groups or mask, and shares all functions.
    """

    columns: int
    rows: int
    groups: int | None
    hidden: tuple[Function, ...]
    last: Function
    latent: bool
    mask: bool
    likelihood: str
    drawn: bool
    second: str | None
    scale: bool
    seed: int

    @property
    def functions(self):
        """All functions by the names of their sites."""
        return {f"f{level}": f for level, f in enumerate(self.hidden)} | {"g": self.last}

    @property
    def is_deterministic(self):
        """Whether ``dgp.ELBO`` has nothing to draw."""
        return not (self.hidden or self.latent or self.drawn)

    @property
    def plates(self):
        return () if self.groups is None else (self.groups,)

    def data(self, rows=None):
        """Inputs, observations, the same of the second site, and inducing inputs of every function."""
        rng = np.random.default_rng(self.seed)
        event = () if self.last.width is None else (self.last.width,)
        widths = [self.columns + self.latent, *(f.width for f in self.hidden)]
        Z = [rng.uniform(-2, 2, (f.points, w)) for f, w in zip(self.functions.values(), widths, strict=True)]
        second = rng.uniform(-1.5, 1.5, (3, self.columns)), rng.integers(0, 2, (3, *event)).astype(float)
        shape = (*self.plates, rows or self.rows)
        y = rng.integers(0, 2, (*shape, *event)).astype(float)
        X = rng.uniform(-1.5, 1.5, (*shape, self.columns))
        return jnp.array(X), jnp.array(y), *map(jnp.array, second), [jnp.array(z) for z in Z]

    def model(self, X, y, X2, y2, Z, *, keep=None, flipped=False):
        """``keep`` masks rows; ``flipped`` puts the first layer's kernels in reverse order."""
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3)) if self.scale else 1.0
        functions = []
        for (name, f), z in zip(self.functions.items(), Z, strict=True):
            kernel = f.kernels()
            if flipped and name == "f0" and isinstance(kernel, list):
                kernel = kernel[::-1]
            functions.append(dgp.gp(name, kernel, dgp.Points(z), outputs=f.width, mean=MEANS[f.mean]))

        def observe(x, y, suffix, likelihood):
            if self.latent:
                x = dgp.latent(f"w{suffix}", x, 1)
            for level, f in enumerate(self.hidden):
                x = numpyro.sample(f"h{level}{suffix}", functions[level](x, noise=f.noise))

            def conditional(v):
                fn = LIKELIHOODS[likelihood](scale * v)
                return fn if self.last.width is None else fn.to_event(1)

            v = functions[-1](x)
            drawn = self.drawn and numpyro.sample(f"v{suffix}", v)
            fn = conditional(drawn) if self.drawn else dgp.Likelihood(v, conditional)
            numpyro.sample(f"y{suffix}", fn, obs=y)

        with ExitStack() as plates:
            if self.groups is not None:
                plates.enter_context(numpyro.plate("groups", self.groups, dim=-2))
            plates.enter_context(numpyro.plate("data", X.shape[-2], dim=-1))
            if self.mask and keep is not None:
                plates.enter_context(numpyro.handlers.mask(mask=keep))
            observe(X, y, "", self.likelihood)
        if self.second:
            with numpyro.plate("others", len(X2)):
                observe(X2, y2, "_2", self.second)


@st.composite
def programs(draw):
    """A program of one to three layers."""
    columns = draw(st.integers(1, 2))
    latent = draw(st.booleans())
    below, hidden = columns + latent, []
    for _ in range(draw(st.integers(0, 2))):
        hidden.append(draw(functions(st.integers(1, 2), below)))
        below = hidden[-1].width
    return Program(
        columns=columns,
        rows=draw(st.integers(3, 6)),
        groups=draw(st.sampled_from([None, None, 2])),
        hidden=tuple(hidden),
        last=draw(functions(st.sampled_from([None, None, 1, 2]), below)),
        latent=latent,
        mask=draw(st.booleans()),
        likelihood=draw(st.sampled_from(sorted(LIKELIHOODS))),
        drawn=draw(st.booleans()),
        second=draw(st.none() | st.sampled_from(sorted(LIKELIHOODS))),
        scale=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def functions(draw, widths, below):
    """A function of inputs with ``below`` columns."""
    width = draw(widths)
    means = ["zero", "constant"] + ["identity"] * (width == below)
    return Function(
        width=width,
        kernel=draw(st.sampled_from(sorted(KERNELS))),
        mean=draw(st.sampled_from(means)),
        noise=draw(st.sampled_from([None, 0.2])),
        points=draw(st.integers(2, 4)),
        others=draw(st.booleans()),
    )
