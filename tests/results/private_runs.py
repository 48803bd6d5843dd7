"""Folders of tiny private runs, and the problems that verification finds in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate
from tests.quick_settings import folder_of, quick_sections


def settings(method: str = "feddm", **privacy: Any) -> dict[str, Any]:
    """Returns the sections of a run of two rounds."""
    return quick_sections(method, privacy={"noise_multiplier": 1.0, **privacy})


def run(output: Path, sections: dict[str, Any], **values: Any) -> Path:
    return folder_of(simulate(resolve(sections), output=output, **values))


def verify(folder: Path, **values: Any) -> list[str]:
    return verify_run(folder, **values).problems
