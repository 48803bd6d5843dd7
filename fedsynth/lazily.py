"""Lazy imports: names that a package exports, whose modules are imported only on first use.

The names are written once, as imports that type checkers follow (`from module import Name as
Name`), in a file whose text is read when the package is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path


def homes(file: Path) -> dict[str, str]:
    """Returns each name that a Python file re-exports, and its module, in the file's order.

    Only `from module import Name as Name` counts, the form that type checkers read as a re-export.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if alias.asname == alias.name
    }
