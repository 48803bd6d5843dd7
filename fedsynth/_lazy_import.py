"""Lazy imports: a package imports a module only when one of the module's names is first used.

The exported names are listed as imports that type checkers follow (`from module import Name as
Name`). These imports are not executed: their file is read as text when the package is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

Exports = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def lazy_exports(package: str, file: str, more: Mapping[str, str] | None = None) -> Exports:
    """Returns `__all__`, `__getattr__` and `__dir__` for a package that imports its names lazily.

    Args:
        package: the name of the package.
        file: the `__init__.py` of the package, which re-exports the names.
        more: additional names, each with the module that defines it.
    """
    modules = {**exported_names(Path(file)), **(more or {})}
    names = sorted(modules)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return names, load, lambda: names


def exported_names(file: Path) -> dict[str, str]:
    """Maps each name that a Python file exports to the module that defines the name.

    The order is that of the file. Only imports written `from module import Name as Name` are read,
    because type checkers regard them as exports.
    """
    modules = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if alias.asname == alias.name:
                    modules[alias.name] = node.module
    return modules
