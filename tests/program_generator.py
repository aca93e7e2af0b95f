"""How a seed becomes a random program."""

import numpy as np
from generated_parts import KERNELS, LABELS, LIKELIHOODS, Function
from generated_programs import Program


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
