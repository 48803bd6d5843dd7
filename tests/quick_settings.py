"""Settings of methods for quick tests: a few steps instead of the papers' values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedsynth import RunResult
from fedsynth.results.verification import verify_run

CONDENSED = {"iterations": 3, "ipc": 2, "server_epochs": 2}
GENERATED = {"local_epochs": 1, "server_epochs": 2, "generator_steps": 2}
QUICK_SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("feddm", "fedaf", "fedsum"), CONDENSED),
    "real": {"ipc": 2, "server_epochs": 2},
    "fedstats": {"features": "pixels"},
    "feddf": {"local_epochs": 1, "server_steps": 3, "proxy": "noise"},
    "dense": GENERATED,
    "fedhydra": {**GENERATED, "stratification_steps": 2},
}


def quick_settings(method: str) -> dict[str, Any]:
    return dict(QUICK_SETTINGS.get(method, {"local_epochs": 1}))


def quick_sections(method: str, /, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Two rounds on a fifth of the digits; the sections given add to this run's."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"method": method, "rounds": 2, "device": "cpu"},
        "partition": {"clients": 3, "subset": 0.2, "alpha": 1.0},
        "model": {"width": 4, "depth": 2, "norm": "batch" if method == "fedbn" else "instance"},
        "method": quick_settings(method),
    }
    for name, values in more.items():
        sections[name] = {**sections.get(name, {}), **values}
    return sections


def folder_of(result: RunResult) -> Path:
    """The folder of a run that wrote one."""
    assert result.folder is not None
    return result.folder


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rounds' metrics in a run's folder."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def verified(result: RunResult) -> Path:
    """The folder of a run, which verifies."""
    assert verify_run(folder_of(result)).problems == []
    return folder_of(result)
