"""The import direction: arrows only point up (docs/design.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import numpyro_dgp

ROOT = Path(numpyro_dgp.__file__).parent
LAYERS = {
    0: ["_typing", "_checks", "streams"],
    1: [
        "linalg",
        "whitening",
        "distances",
        "quadratic",
        "projected",
        "kernels",
        "means",
        "gaussians",
        "covariances",
        "coordinates",
        "quadrature",
        "jaxprs",
        "structure",
        "row_dependence",
        "spectra",
        "circulant",
        "ring_features",
        "ring_windows",
        "subsampled",
        "langevin",
        "tilted",
        "blocks",
        "expectations",
        "collapsed",
        "following",
        "nested",
        "coupled",
        "markov",
    ],
    2: [
        "beliefs",
        "values",
        "copies",
        "conditionals",
        "inducing",
        "induced",
        "functions",
        "exact",
        "ring_beliefs",
        "ring_functions",
        "grids",
        "ring_optimum",
        "ring_series",
        "rings",
        "closed_forms",
        "likelihood",
        "robustmax",
        "primitives",
        "initial",
        "projections",
        "mixing",
    ],
    3: ["guides", "objectives", "optim", "sampling", "sghmc", "streaming", "training"],
    4: ["densities", "draws", "predict", "diagnostics", "plots", "testing"],
}
LAYER = {name: layer for layer, names in LAYERS.items() for name in names}
# What each layer may import from outside.
ALLOWED = {0: {"jax", "numpy"}, 1: {"jax", "numpy", "scipy"}}
ALLOWED[2] = ALLOWED[1] | {"numpyro"}
ALLOWED[3] = ALLOWED[2] | {"optax", "tqdm"}
ALLOWED[4] = ALLOWED[3] | {"arviz_base", "arviz_stats", "arviz", "matplotlib", "pandas", "pytest", "xarray"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            yield node.module


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if name != "__init__":
            yield name, path


def test_every_module_has_a_layer():
    assert {name for name, _ in modules()} == set(LAYER)


def test_arrows_only_point_up():
    for name, path in modules():
        for imported in imports(path):
            package, *rest = imported.split(".")
            if package == "numpyro_dgp":
                assert rest, f"{path.name} imports the whole package"
                assert LAYER[rest[0]] <= LAYER[name], f"{path.name} (S{LAYER[name]}) imports {imported}"
            elif package not in sys.stdlib_module_names:
                assert package in ALLOWED[LAYER[name]], f"{path.name} (S{LAYER[name]}) imports {imported}"
            if imported.startswith("numpyro.infer") or package == "optax":
                assert LAYER[name] >= 3, f"{path.name} (S{LAYER[name]}) imports {imported}"


def test_sample_first_appears_in_the_second_layer():
    for name, path in modules():
        if LAYER[name] < 2:
            assert "numpyro.sample" not in path.read_text().replace("numpyro_dgp", "")


def test_no_cycles_within_a_layer():
    graph = {}
    for name, path in modules():
        tree = ast.parse(path.read_text())
        top = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module.startswith("numpyro_dgp.")]
        graph.setdefault(name, set()).update(n.module.split(".")[1] for n in top)

    def reaches(start, goal, seen):
        return any(n == goal or (n not in seen and reaches(n, goal, seen | {n})) for n in graph[start] - {start})

    assert not [name for name in graph if reaches(name, name, set())]


def test_files_are_short():
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 270, f"{path.name} is long: split it by concept"


def test_import_needs_no_optional_package():
    """``import numpyro_dgp`` must work where ArviZ and matplotlib are missing."""
    optional = ["arviz", "arviz_base", "arviz_stats", "matplotlib", "pandas", "sklearn", "xarray"]
    program = f"import sys; sys.modules.update(dict.fromkeys({optional})); import numpyro_dgp"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
