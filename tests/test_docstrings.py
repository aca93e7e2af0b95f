"""Every public name is explained: its docstring has an example that runs, and says which errors it raises."""

import ast
import builtins
import doctest
import inspect
import re
from types import ModuleType

import pytest

import numpyro_dgp as dgp
from numpyro_dgp import bounds

MODULES = [module for name in dgp.__all__ if isinstance(module := getattr(dgp, name), ModuleType)]
PUBLIC = {
    f"{module.__name__}.{name}": value
    for module in [dgp, bounds, *MODULES]
    for name in module.__all__
    if inspect.isclass(value := getattr(module, name)) or inspect.isfunction(value)
}

# ``compare`` makes a ``Comparison``, and its example shows one; another would fit a program again.
WITHOUT_EXAMPLE = {"numpyro_dgp.diagnostics.Certificate", "numpyro_dgp.diagnostics.Comparison"}
# What a new part is written with has its examples in docs/extending.md, which builds one of each.
PARTS = {f"numpyro_dgp.extend.{name}" for name in dgp.extend.__all__}
# The base class checks nothing when it is made: its methods raise what stands in the table of its docstring.
WITHOUT_RAISES = {"numpyro_dgp.kernels.Kernel"}


def raises(value):
    """Whether the source of a class or function raises a ``ValueError``, itself or through a check."""
    return bool(re.search(r"raise ValueError|\brequire_\w+\(", inspect.getsource(value)))


def test_the_names_are_found():
    assert {"numpyro_dgp.gp", "numpyro_dgp.guides.Full", "numpyro_dgp.bounds.follow"} <= set(PUBLIC)
    assert len(PUBLIC) > 100
    assert PUBLIC.keys() >= WITHOUT_EXAMPLE | WITHOUT_RAISES


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - PARTS))
def test_has_an_example(name):
    text = PUBLIC[name].__doc__ or ""
    assert bool(doctest.DocTestParser().get_examples(text)) == (name not in WITHOUT_EXAMPLE)


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if raises(value)])
def test_says_which_errors_it_raises(name):
    text = inspect.cleandoc(PUBLIC[name].__doc__ or "")  # Python 3.13 and newer take the indentation away
    assert ("\nRaises:\n" in text) == (name not in WITHOUT_RAISES)


def borrowed(text):
    """Names that the examples of a docstring use without having made or imported them."""
    used, made = set(), set(dir(builtins))
    for example in doctest.DocTestParser().get_examples(text):
        for node in ast.walk(ast.parse(example.source)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
            elif isinstance(node, ast.alias):
                made.add(node.asname or node.name.split(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                made.add(node.name)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
    return used - made


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_can_be_copied(name):
    """They import what they use, and take nothing from the module that they stand in."""
    assert not borrowed(PUBLIC[name].__doc__ or "")


@pytest.mark.parametrize("name", PUBLIC)
def test_no_description_is_a_single_letter(name):
    """Sphinx reads "num_samples: S." as the first entry of a list A., B., ..."""
    assert not re.findall(r"^\s+\w+: [A-Za-z]\.(?:\s|$)", PUBLIC[name].__doc__ or "", re.MULTILINE)


@pytest.mark.slow
def test_the_collector_of_borrowed_names():
    assert borrowed(">>> import numpy as np\n>>> [np.sin(x) for x in y]\n>>> z = f(len(y))") == {"y", "f"}
