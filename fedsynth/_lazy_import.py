"""Lazy imports: names that a package exports, whose modules are imported only on first use.

The names are written once, as imports that type checkers follow (`from module import Name as
Name`), in a file whose text is read when the package is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

Exports = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def lazy_exports(package: str, file: str, more: Mapping[str, str] | None = None) -> Exports:
    """Returns a package's `__all__`, `__getattr__` and `__dir__`.

    Args:
        package: its name.
        file: its `__init__.py`, which re-exports the names.
        more: names in addition, with their modules.
    """
    modules = {**exported_names(Path(file)), **(more or {})}
    names = sorted(modules)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return names, load, lambda: names


def exported_names(file: Path) -> dict[str, str]:
    """Returns each name that a Python file re-exports, and its module, in the file's order.

    Only `from module import Name as Name` counts, the form that type checkers read as a re-export.
    """
    modules = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if alias.asname == alias.name:
                    modules[alias.name] = node.module
    return modules
