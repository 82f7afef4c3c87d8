"""Packages whose names are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def exports(
    package: str, modules: Mapping[str, str], submodules: Sequence[str] = ()
) -> tuple[Callable, Callable, list[str]]:
    """What a package's `__getattr__`, `__dir__` and `__all__` are.

    Args:
        package: its `__name__`.
        modules: the public names of each of its modules, apart by spaces.
        submodules: modules that are public themselves.

    Returns:
        The three.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name):
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names():
        return sorted({*vars(sys.modules[package]), *homes, *submodules})

    return get, names, sorted(homes)
