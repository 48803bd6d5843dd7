"""The installed layout: one complete top-level package with quick start-up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fedsynth

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINKS = ("privacy", "cli")
# Packages import only packages before them.
PACKAGES = [
    "privacy", "data", "features", "models", "training", "core", "evaluation", "synthesizer",
    "methods", "config", "federation", "results", "sharing", "simulation", "deployment", "experiments",
    "reproduction", "cli",
]  # fmt: skip

SIBLINGS = (("deployment", "simulation"), ("reproduction", "deployment"))
IMPORT = re.compile(r"^\s*(?:from|import) (fedsynth\.[\w.]+)", re.MULTILINE)


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


def _package(module: str) -> str:
    """Returns the package of a dotted name; "" for modules at the top of fedsynth."""
    second = module.split(".")[1:2]
    return second[0] if second and (ROOT / "fedsynth" / second[0]).is_dir() else ""


def test_package_imports_have_one_direction() -> None:
    assert {_package(f"fedsynth.{name}") for name in PACKAGES} == set(PACKAGES)
    # the packages before it, and itself
    allowed = {name: {"", *PACKAGES[: n + 1]} for n, name in enumerate(PACKAGES)}
    allowed["privacy"] = {"", "privacy"}
    for package, sibling in SIBLINGS:
        allowed[package].remove(sibling)
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in PACKAGES
        for path in sorted((ROOT / "fedsynth" / package).glob("**/*.py"))
        for name in IMPORT.findall(path.read_text(encoding="utf-8"))
        if _package(name) not in allowed[package]
    ]
    assert upward == []


def test_version_is_defined_once() -> None:
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited[1] == fedsynth.__version__
