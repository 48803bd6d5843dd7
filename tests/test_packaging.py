"""The wheel has one complete top-level package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINKS = ("privacy", "cli")


def package_folders() -> Iterator[Path]:
    """Yields folders with an `__init__.py` below fedsynth/, through the two symlinks."""
    for folder, _, names in os.walk(ROOT / "fedsynth", followlinks=True):
        if "__init__.py" in names:
            yield Path(folder).relative_to(ROOT)


def test_wheel_contains_all_modules_tables_and_templates(tmp_path: Path) -> None:
    """The wheel is built from a copy with the installed setuptools, without network."""
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in package_folders())
    source, built = tmp_path / "fedsynth", tmp_path / "built"
    source.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("fedsynth", *LINKS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    arguments = f"-m build --wheel --no-isolation --outdir {built} {source}".split()
    subprocess.run([sys.executable, *arguments], check=True, timeout=300)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"fedsynth"}

    def files(pattern: str) -> set[str]:
        paths = [path for folder in package_folders() for path in (ROOT / folder).glob(pattern)]
        return {path.relative_to(ROOT).as_posix() for path in paths}

    assert {name for name in names if name.endswith(".py")} == files("*.py")
    patterns = ("*.csv", "*.toml", "tables/**/*.toml", "templates/*.j2", "py.typed")
    data = set().union(*map(files, patterns))
    assert len(data) > 34
    assert data <= names
