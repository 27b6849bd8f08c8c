"""Lazy package namespaces that import a module when one of its names is first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Sequence[str], names: Sequence[str]) -> Callable[[str], Any]:
    """Creates a package's `__getattr__` (PEP 562).

    Args:
        package: Name of the package.
        modules: Modules in search order, those with the fewest imports first.
        names: Public names, the package's `__all__`.
    """

    def getattribute(name: str) -> Any:
        for module in modules if name in names else ():
            found = getattr(import_module(f"{package}.{module}"), name, None)
            if found is not None:
                return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattribute
