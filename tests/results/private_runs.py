"""Folders of tiny private runs, and the problems that verification finds in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.results.verification import verify_run
from fedsynth.simulation.simulate import simulate

FAST = {"local_epochs": 1, "batch": 128}


def settings(method: str = "feddm", clients: int = 3, **privacy: Any) -> dict[str, Any]:
    """Returns the sections of a run of two rounds."""
    options = {"iterations": 3, "ipc": 1, "server_epochs": 1} if method == "feddm" else dict(FAST)
    return {
        "run": {"method": method, "rounds": 2, "device": "cpu"},
        "partition": {"clients": clients},
        "model": {"width": 4, "depth": 2},
        "method": options,
        "privacy": {"noise_multiplier": 1.0, **privacy},
    }


def run(output: Path, sections: dict[str, Any], **values: Any) -> Path:
    folder = simulate(resolve(sections), output=output, **values).folder
    assert folder is not None
    return folder


def verify(folder: Path, **values: Any) -> list[str]:
    return verify_run(folder, **values).problems
