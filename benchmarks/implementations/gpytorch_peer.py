"""Training with GPyTorch, on a CUDA device where PyTorch has one."""

from __future__ import annotations

from collections.abc import Callable

import gpytorch
import numpy as np
import torch
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from implementations.training import RATE, Training

ROWS = 1000  # predicted at once
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(DeepGPLayer):
    """A layer whose outputs share the kernel and the inducing inputs."""

    def __init__(self, Z: torch.Tensor, outputs: int | None, lengthscale: float) -> None:
        batch = torch.Size([]) if outputs is None else torch.Size([outputs])
        distribution = CholeskyVariationalDistribution(len(Z), batch_shape=batch, mean_init_std=0.0)
        strategy = VariationalStrategy(self, Z.clone(), distribution, learn_inducing_locations=True)
        super().__init__(strategy, Z.shape[1], outputs)
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=Z.shape[1]))
        self.kernel.outputscale = 1.0
        self.kernel.base_kernel.lengthscale = lengthscale
        self.identity = outputs is not None

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        mean = torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
        if self.identity:  # output p has mean x_p
            columns = x if x.dim() == 2 else torch.diagonal(x, dim1=-3, dim2=-1)
            mean = columns.transpose(-1, -2)
        return gpytorch.distributions.MultivariateNormal(mean, self.kernel(x))


class Model(DeepGP):
    def __init__(self, Z: torch.Tensor, num_layers: int, lengthscale: float) -> None:
        super().__init__()
        widths = [Z.shape[1]] * (num_layers - 1) + [None]
        self.layers = torch.nn.ModuleList([Layer(Z, width, lengthscale) for width in widths])
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.likelihood.noise = 0.01

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        for layer in self.layers:
            x = layer(x)
        return x


def train(
    Z: np.ndarray,
    num_layers: int,
    dtype: str,
    num_data: int,
    *,
    lengthscale: float = 2.0,
    rate: Callable[[int], float] = lambda step: RATE,
) -> Training:
    """The model of ``ours.py``, trained by Adam at the rate ``rate(step)``."""
    kind = getattr(torch, dtype)
    torch.set_default_dtype(kind)
    torch.manual_seed(0)
    model = Model(torch.as_tensor(Z, dtype=kind), num_layers, lengthscale).to(DEVICE)
    for layer in model.layers[:-1]:
        strategy = layer.variational_strategy
        strategy._variational_distribution.chol_variational_covar.data.mul_(1e-2)
        strategy.variational_params_initialized.fill_(1)
    model.layers[-1].variational_strategy.variational_params_initialized.fill_(1)
    bound = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(model.likelihood, model, num_data))
    optimiser = torch.optim.Adam(model.parameters(), lr=rate(0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate(step) / rate(0))

    def tensor(a: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(a, dtype=kind, device=DEVICE)

    def update(X: np.ndarray, y: np.ndarray) -> torch.Tensor:
        model.train()
        optimiser.zero_grad()
        with gpytorch.settings.num_likelihood_samples(1):
            loss = -bound(model(tensor(X)), tensor(y))
        loss.backward()
        optimiser.step()
        scheduler.step()
        return loss.detach() * num_data

    def predict(X: np.ndarray, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
        model.eval()
        found = []
        with torch.no_grad(), gpytorch.settings.num_likelihood_samples(num_draws):
            for rows in tensor(X).split(ROWS):
                f = model(rows)
                found.append((f.mean, f.variance + model.likelihood.noise))
        means, variances = (torch.cat(parts, 1).cpu().numpy() for parts in zip(*found, strict=True))
        return means, variances

    return Training(update, predict)


def build(X: np.ndarray, y: np.ndarray, Z: np.ndarray, num_layers: int, dtype: str) -> Callable[[], float]:
    """A function that does one Adam step on the minibatch (X, y) and returns the loss before it."""
    update, _ = train(Z, num_layers, dtype, len(X))
    data = [torch.as_tensor(a, dtype=getattr(torch, dtype), device=DEVICE) for a in (X, y)]
    return lambda: float(update(*data))
