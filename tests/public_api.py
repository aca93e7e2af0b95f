"""The public names of the package and how they are called, as text. To store it: ``python tests/public_api.py``."""

import enum
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import numpyro_dgp as dgp

STORED = Path(__file__).with_name("public_api.txt")
# Public modules that are imported by name, because they need another package.
OPTIONAL = {"plots": "matplotlib", "sklearn": "sklearn"}
STORED_OPTIONAL = Path(__file__).with_name("public_api_optional.txt")


PLAIN = (bool, int, float, str, type(None))


def default(value):
    """A default value where its text is the same everywhere, else dots."""
    parts = value if isinstance(value, tuple) else (value,)
    return repr(value) if all(isinstance(part, PLAIN) for part in parts) else "..."


def signature(function):
    """Names, kinds and defaults of the arguments, without annotations: how it may be called."""
    if getattr(function, "_is_protocol", False):
        return ""  # nobody calls a protocol
    if inspect.isclass(function) and issubclass(function, enum.Enum):
        return ""  # whose signature is that of Python's class, which has another one from 3.12 on
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else Default(p.default))
        for p in parameters
        if p.name != "self"
    ]
    return str(inspect.Signature(plain))


class Default:
    """Stands for a default value in a signature."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return default(self.value)


def members(cls, public):
    """Methods and properties of a class that it or a public base class defines, with their signatures."""
    for name in sorted(dir(cls)):
        owner = next((c for c in cls.__mro__ if name in vars(c)), None)
        if name.startswith("_") or not (owner is cls or owner in public):
            continue
        value = inspect.getattr_static(cls, name)
        if isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
            yield f".{name}{signature(getattr(cls, name))}"
        elif isinstance(value, property):
            yield f".{name}"


def modules(module=dgp, prefix="dgp"):
    """The package and its public modules, with the names under which users have them."""
    yield prefix, module
    for name in sorted(module.__all__):
        if isinstance(value := getattr(module, name), ModuleType):
            yield from modules(value, f"{prefix}.{name}")


def optional_modules():
    """Those of ``OPTIONAL``, in the same form."""
    for name in OPTIONAL:
        yield f"dgp.{name}", importlib.import_module(f"numpyro_dgp.{name}")


def listing(places):
    """One line for every name in ``__all__`` of the modules, and for every member of a class."""
    names = {f"{prefix}.{name}": getattr(module, name) for prefix, module in places for name in module.__all__}
    public = {value for value in names.values() if inspect.isclass(value)}
    for where, value in sorted(names.items()):
        if inspect.isclass(value):
            yield f"class {where}{signature(value)}"
            yield from (f"    {where}{member}" for member in members(value, public))
        else:
            yield f"{where}{signature(value)}" if callable(value) else where


def text(places=None):
    """The whole listing, by default of the package and its public modules."""
    return "\n".join(listing(modules() if places is None else places)) + "\n"


if __name__ == "__main__":
    for path, lines in ((STORED, text()), (STORED_OPTIONAL, text(optional_modules()))):
        path.write_text(lines)
        print(f"{path}: {len(lines.splitlines())} lines")
