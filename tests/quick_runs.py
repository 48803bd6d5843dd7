"""Settings of quick runs, one method of each family, an observer of notes, and interruptions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedsynth import Observer, RunResult
from fedsynth.results.verification import verify_run
from fedsynth.simulation.run import Simulation

CONDENSED = {"iterations": 3, "ipc": 2, "server_epochs": 2}
GENERATED = {"local_epochs": 1, "server_epochs": 2, "generator_steps": 2}
AUTOENCODER = {"local_epochs": 1, "width": 4, "samples": 20}
QUICK_SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("feddm", "fedaf", "fedsum"), CONDENSED),
    "real": {"ipc": 2, "server_epochs": 2},
    "fedstats": {"features": "pixels"},
    "fedbe": {"local_epochs": 1, "server_steps": 3, "swa_start": 1, "cycle": 2, "proxy": "noise"},
    "feddf": {"local_epochs": 1, "server_steps": 3, "proxy": "noise"},
    **dict.fromkeys(("fedcvae-ens", "fedcvae-kd"), AUTOENCODER),
    "dense": GENERATED,
    "fedhydra": {**GENERATED, "stratification_steps": 2},
}
# One method of each family for tests of an engine; tests of the other methods are slow. An engine
# treats the methods of a family equally: plain averages, client states of clients, personal models,
# condensed sets, a first exchange, generators, distillation by the server, sums.
FAMILIES = (
    "fedavg", "scaffold", "solo", "feddm", "fedaf", "fedfm", "fedkf", "feddf", "fedstats",
)  # fmt: skip


def by_family(names: Iterable[str], quick: Iterable[str] = FAMILIES) -> list[Any]:
    """Returns the parameters of a test; all but the quick ones are marked as slow."""
    quick_names = set(quick)
    return [
        pytest.param(name, marks=[] if name in quick_names else pytest.mark.slow) for name in names
    ]


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


class NoteRecorder(Observer):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(str(text))


@contextmanager
def interrupt_in_round(number: int) -> Iterator[None]:
    """Interrupts runs in the block before this round's exchange."""
    play = Simulation.play

    def interrupted_play(self: Simulation, context: Any) -> Any:
        if context.round == number:
            raise KeyboardInterrupt
        return play(self, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "play", interrupted_play)
        yield
