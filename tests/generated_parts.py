"""What random programs are made of: kernels, mean functions, likelihoods, and functions of these."""

import dataclasses

import jax.numpy as jnp
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
MEANS = {"zero": None, "constant": dgp.means.ConstantMean(0.3), "identity": dgp.means.IdentityMean()}
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
        how = {"points": lambda: dgp.Points(z), "grid": lambda: dgp.Grid(-9.0, 9.0, size), "exact": lambda: None}
        return dgp.gp(name, kernels, how[self.form](), outputs=self.width, mean=MEANS[self.mean])
