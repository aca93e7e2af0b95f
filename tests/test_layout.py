"""The house: which folder may import which, no circle at any depth, one name for one file (docs/design.md)."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import numpyro_dgp

ROOT = Path(numpyro_dgp.__file__).parent
DESIGN = ROOT.parent / "docs" / "design.md"

# Files that every place may import.
SHARED = ["_typing", "_repr", "_checks", "_data", "_fields", "_compiled"]
# A place, which is a folder or a file beside them, imports those of the floors below and those to its left;
# docs/design.md shows the same table.
FLOORS = {
    "mathematics": "jaxprs math kernels means bounds densities",
    "programs": "_numpyro functions likelihoods analysis rings primitives",
    "inference": "guides.rules guides guides.collapsed inference mcmc optim predict new_data",
    "applications": "depth design diagnostics plots sklearn extend testing",
}
FLOOR = {place: floor for floor, places in FLOORS.items() for place in places.split()}
ORDER = list(FLOOR)
# What a floor may import from outside, beside JAX, NumPy and SciPy.
OUTSIDE = {
    "mathematics": "numpyro",
    "programs": "numpyro",
    "inference": "numpyro numpyro.infer optax tqdm",
    "applications": "numpyro numpyro.infer optax tqdm matplotlib pandas xarray arviz_base arviz_stats sklearn",
}


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imports(name):
    """Every import of a file at any depth, under ``TYPE_CHECKING`` too: the module or the outside package."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {name}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module


def place(name):
    """The folder of a module, or the file beside the folders; ``names`` for what only collects public names."""
    parts = name.split(".")[1:]
    if not parts or name in ("numpyro_dgp.guides", "numpyro_dgp.initial"):
        return "names"
    folder = ".".join(parts[:2])
    return folder if folder in FLOOR else parts[0]


INSIDE = {name: {i for i in imports(name) if i.split(".")[0] == "numpyro_dgp" and i != name} for name in FILES}


def test_every_place_is_in_the_table():
    assert {place(name) for name in FILES} == {*FLOOR, "names", *SHARED}


@pytest.mark.smoke
def test_arrows_go_down_or_to_the_left():
    for name, found in INSIDE.items():
        here = place(name)
        if here == "names":
            continue
        allowed = {here, *SHARED, *ORDER[: ORDER.index(here)]} if here in FLOOR else set(SHARED)
        for imported in found:
            assert imported != "numpyro_dgp", f"{name} imports the whole package"
            there = place(imported)
            there = "guides" if there == "names" else there  # dgp.guides collects names of its folders
            assert there in allowed, f"{name} ({here}) imports {imported}"


def test_outside_packages():
    for name in FILES:
        allowed = {"jax", "numpy", "scipy", *OUTSIDE.get(FLOOR.get(place(name)), "").split()}
        for imported in imports(name):
            package = imported.split(".")[0]
            if package == "numpyro" and imported.startswith("numpyro.infer"):
                package = "numpyro.infer"
            if package != "numpyro_dgp" and package not in sys.stdlib_module_names:
                assert package in allowed, f"{name} imports {imported}"


def circle(graph):
    """A circle of imports, or nothing."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        found = next((c for other in sorted(graph.get(name, ())) if (c := visit(other))), [])
        path.pop()
        done.add(name)
        return found

    return next((c for name in graph if (c := visit(name))), [])


def test_no_circle_between_files():
    assert circle(INSIDE) == []


def test_the_longest_chain_of_imports():
    """How many files build on each other, at most; those that only collect names do not count."""
    depth = {}

    def length(name):
        if name not in depth:
            below = (length(other) for other in INSIDE[name] if FILES[other].name != "__init__.py")
            depth[name] = 1 + max(below, default=0)
        return depth[name]

    assert max(length(name) for name in FILES if FILES[name].name != "__init__.py") <= 19
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_circle_between_places():
    graph = {}
    for name, found in INSIDE.items():
        graph.setdefault(place(name), set()).update({place(i) for i in found} - {place(name)})
    graph.pop("names")
    assert circle({here: there - {"names"} for here, there in graph.items()}) == []


def test_no_private_names_across_files():
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("numpyro_dgp"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{name} imports {private} from {node.module}"


def test_no_layer_asks_what_its_weights_are():
    """What differs between known values, Gaussians and draws of functions, they say by methods of ``Weights``."""
    kinds = {"KnownWeights", "FunctionDraw", "FullBelief", "DiagonalBelief", "BlockBelief"}
    for name, tree in TREES.items():
        if name == "numpyro_dgp.functions.weights":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                asked = {leaf.id for leaf in ast.walk(node.args[1]) if isinstance(leaf, ast.Name)} & kinds
                assert not asked, f"{name} asks for {asked}: a method of Weights"


def test_the_design_page_shows_the_same_table():
    rows = re.findall(r"^\| (\w+) \| ((?:`[\w./]+` ?)+) \|$", DESIGN.read_text(), re.MULTILINE)
    shown = {floor: " ".join(re.findall(r"`([\w./]+?)/?`", places)).replace("/", ".") for floor, places in rows}
    assert shown == FLOORS


def test_sites_first_appear_in_the_model():
    for name, path in FILES.items():
        if FLOOR.get(place(name), "mathematics") == "mathematics" and name != "numpyro_dgp":
            assert "numpyro.sample" not in path.read_text().replace("numpyro_dgp", "")


def test_one_name_for_one_file():
    names = [path.name for path in FILES.values() if path.name != "__init__.py"]
    assert sorted(set(names)) == sorted(names)
    assert len(list(ROOT.glob("*.py"))) <= 16


def test_one_file_knows_the_list_of_handlers():
    assert [name for name, path in FILES.items() if "_PYRO_STACK" in path.read_text()] == ["numpyro_dgp._numpyro"]


@pytest.mark.parametrize("pattern", [r"^r?\"\"\"S\d:", r"\bid\(\w+\)"])
def test_gone(pattern):
    """No layer numbers in docstrings, nothing compared by its address."""
    assert not [name for name, path in FILES.items() if re.search(pattern, path.read_text(), re.MULTILINE)]


@pytest.mark.smoke
def test_import_needs_no_optional_package():
    """``import numpyro_dgp`` must work where ArviZ and matplotlib are missing."""
    optional = ["arviz", "arviz_base", "arviz_stats", "matplotlib", "pandas", "sklearn", "xarray"]
    program = f"import sys; sys.modules.update(dict.fromkeys({optional})); import numpyro_dgp"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def in_a_process(program):
    """What a program prints that knows the package as ``dgp``."""
    command = [sys.executable, "-c", f"import sys, numpyro_dgp as dgp\n{program}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.smoke
def test_import_loads_neither_applications_nor_samplers():
    loaded = {place(name) for name in in_a_process("print(*(n for n in sys.modules if n.startswith('numpyro_dgp')))")}
    assert loaded >= {"kernels", "functions", "guides", "inference", "predict"}
    assert not loaded & {"mcmc", "new_data", *FLOORS["applications"].split()}


@pytest.mark.smoke
def test_applications_load_when_they_are_asked_for():
    assert in_a_process("print(dgp.fit_best.__module__)") == ["numpyro_dgp.depth.fit_best"]
    assert in_a_process("from numpyro_dgp import update; print(update.__name__)") == ["update"]
    assert in_a_process("import numpyro_dgp.design; print(dgp.design.loop.__name__)") == ["loop"]
    assert in_a_process("import pickle; print(pickle.loads(pickle.dumps(dgp.fit_best)) is dgp.fit_best)") == ["True"]
    assert in_a_process("from numpyro_dgp import *; print(design.__name__)") == ["numpyro_dgp.design"]
    with pytest.raises(AttributeError, match="'numpyro_dgp' has no attribute 'fit_worst'"):
        _ = numpyro_dgp.fit_worst


def test_a_small_door():
    assert len(numpyro_dgp.__all__) <= 40
    assert {*dir(numpyro_dgp)} >= {*numpyro_dgp.__all__}
    assert all(hasattr(numpyro_dgp, name) for name in numpyro_dgp.__all__)
