"""Guides for random programs: which ones a program can have, and what their bound is compared with."""

import dataclasses
from collections.abc import Callable

import numpyro_dgp as dgp
from numpyro_dgp import guides as G

CLOSED = ("rbf", "ard")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A guide.

    Args:
        make: from a program and its model, or the same under a handler.
        applies: whether a program can have it.
        objectives: "agree", or the bound of ``dgp.ELBO`` is "above" or "below" that of ``Trace_ELBO``; ``None`` if the
            second is of another distribution.
        turns: whether the family looks the same from inducing inputs in another order.
    """

    make: Callable
    applies: Callable = lambda program: True
    objectives: str | None = "agree"
    turns: bool = True


def _inducing_point(**options):
    """Latents of rows that come as arguments have no parameters of their own."""

    def make(program, model):
        rules = {"latent": G.Amortised(hidden=(3,))} if program.batch == "arguments" else {}
        return G.InducingPoint(model, **(rules | options), sites={"lengths": G.Normal()} if program.lengths else {})

    return make


def _hidden(rule):
    """A rule for every hidden layer that is drawn row by row."""
    return lambda program, model: G.InducingPoint(model, sites={name: rule for name in program.hidden})


def _markov(program, model):
    below = next(name for name, f in program.functions.items() if name != "part" and f.form != "exact")
    sites = {"g": G.MarkovInducing(below=below)} | {name: G.GivenInducing("free") for name in program.hidden}
    return G.InducingPoint(model, sites=sites)


def _mean_field(program, model, **options):
    sites = {f"z{suffix}": G.Propagate() for suffix in program.suffixes} if program.project else {}
    return G.MeanField(model, sites=sites, **options)


def _free(program):
    return bool(program.hidden) and program.is_noisy and program.batch != "arguments"


def _wide(program):
    return _free(program) and all(program.functions[n].width for n in program.levels)


def _layers(program):
    """Whether there is a layer with inducing values below the last one, which is integrated."""
    return _free(program) and not (program.is_exact and len(program.levels) == 1)


def _can_collapse(program):
    normal = all(kind in ("normal", "affine", None) for kind in (program.likelihood, program.second))
    points = all(f.form == "points" for f in program.functions.values())
    simple = not (program.mix or program.project or program.batch or "part" in program.functions)
    return normal and points and simple and program.is_noisy


def _collapsed(program, model):
    closed = all(f.kernel in CLOSED for f in program.functions.values())
    return G.Collapsed(model, integrate=None if closed else dgp.likelihoods.GaussHermite(5))


def _nested(program, model):
    closed = all(f.kernel in CLOSED for f in program.functions.values())
    return G.Nested(model, integrate=None if closed else dgp.likelihoods.GaussHermite(5))


def _once(program):
    """Whether no function has two uses."""
    return len(set(program.levels)) == len(program.levels) and not program.second


def _can_be_markov(program):
    kernels = {f.kernel for f in program.functions.values()}
    return _can_collapse(program) and _once(program) and kernels <= set(CLOSED)


GUIDES = {
    "full": Choice(_inducing_point()),
    "diagonal": Choice(_inducing_point(inducing=G.Diagonal()), turns=False),
    "hyperparameters": Choice(
        _inducing_point(other=G.Normal()),
        lambda p: p.scale or p.lengths or p.mix,
    ),
    "mean field": Choice(_mean_field, lambda p: p.is_noisy and p.batch != "arguments", turns=False),
    "mean field, full": Choice(
        lambda p, model: _mean_field(p, model, inducing=G.Full()), lambda p: p.is_noisy and p.batch != "arguments"
    ),
    "given inducing": Choice(_hidden(G.GivenInducing()), lambda p: bool(p.hidden) and p.batch != "arguments"),
    "given inducing, free": Choice(_hidden(G.GivenInducing("free")), _free, turns=False),
    "given inducing, rank": Choice(_hidden(G.GivenInducing(2)), _free, turns=False),
    "joint outputs": Choice(_hidden(G.JointOutputs()), _wide, turns=False),
    "joint outputs, rank": Choice(_hidden(G.JointOutputs(2)), _wide, turns=False),
    "given below": Choice(_hidden(G.GivenBelow()), _free),
    "Markov": Choice(_markov, _layers, turns=False),
    "amortised": Choice(_inducing_point(latent=G.Amortised(hidden=(3,))), lambda p: p.latent > 0),
    "importance": Choice(_inducing_point(importance=G.Importance(3)), lambda p: p.latent > 0, objectives="above"),
    "quadrature": Choice(_inducing_point(latent=G.Quadrature(15)), lambda p: p.latent == 1, objectives="above"),
    "collapsed": Choice(_collapsed, _can_collapse, objectives=None, turns=False),
    "nested": Choice(_nested, lambda p: _can_collapse(p) and _once(p), objectives="below"),
    "Markov, closed form": Choice(lambda p, model: G.Markov(model), _can_be_markov, objectives="below", turns=False),
}


def guides_of(program):
    """Names of the guides that a program can have."""
    return [name for name, choice in GUIDES.items() if choice.applies(program)]
