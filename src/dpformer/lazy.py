"""Names of a package that are imported on first use, so that importing the package loads nothing heavy."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, home: Mapping[str, str], submodules: Sequence[str] = ()) -> Callable[[str], Any]:
    """The `__getattr__` of a package.

    Args:
        package: its `__name__`.
        home: name → the submodule that defines it.
        submodules: submodules that are attributes themselves.
    """

    def attribute(name: str) -> Any:
        if name in home:
            return getattr(import_module(f"{package}.{home[name]}"), name)
        if name in submodules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
