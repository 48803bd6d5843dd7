"""The attacker reads all that a private run prints and writes, apart from `simulation_only/`.

Two data sets with nothing in common must give the same text and files, if the releases are equal.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from fedsynth import ImageData
from fedsynth.cli.app import app
from fedsynth.data.load import load_dataset
from fedsynth.federation import run_data
from fedsynth.files import plain_files
from tests.attacks.replay import Tape, recorded

pytestmark = pytest.mark.slow

TRAIN, TEST = load_dataset("digits")
CONDENSED = ["iterations=3", "ipc=2", "server_epochs=1"]
LOCAL = ["local_epochs=1"]
# The options of a run, and the settings of its method.
RUNS: dict[str, tuple[str, list[str]]] = {
    "residual": ("--method feddm", CONDENSED),
    "features": ("--method feddm --dp-mechanism features", CONDENSED),
    "cap": ("--method feddm --dp-epsilon 4", CONDENSED),
    "fedaf": ("--method fedaf", [*CONDENSED, "knowledge_from=first-exchange"]),
    "fedavg": ("--method fedavg --participation 0.5 --local-test 0.2", LOCAL),
    "fedfm": ("--method fedfm", LOCAL),
    "scaffold": ("--method scaffold", LOCAL),
    "fednova": ("--method fednova", ["local_epochs=2", "stragglers=0.5"]),
    "fedgen": ("--method fedgen", LOCAL),
}


def other_data() -> ImageData:
    """Returns other images in another number, of which no record is in the last three classes."""
    draws = np.random.default_rng(5)
    images = draws.integers(0, 256, (311, 1, 8, 8)).astype(np.uint8)
    labels = draws.integers(0, 7, 311)
    return ImageData(torch.from_numpy(images), torch.from_numpy(labels), TRAIN.spec)


def public_text(text: str, folder: Path) -> str:
    """Replaces times, places, random chains, and hashes of files whose contents are compared."""
    text = re.sub(r"\d{8}-\d{6}|\b[\d.]+ s\b", "TIME", text.replace(str(folder), "FOLDER"))
    text = re.sub(r'"(created|random)": "[^"]*"|\b[0-9a-f]{64}\b|\b[0-9a-f]{32}\b', "RANDOM", text)
    return text


def contents(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in plain_files(folder, leave_out=["simulation_only"]):
        file = folder / name
        if file.suffix == ".safetensors":  # its entries are in random order
            with safe_open(file, "np") as opened:
                found[name] = dict(opened.metadata() or {})
                found[name] |= {
                    key: opened.get_tensor(key).tobytes() for key in list(opened.keys())
                }
        elif file.suffix == ".png":
            found[name] = file.read_bytes()
        else:
            found[name] = public_text(file.read_text(), folder.parent)
    return found


def executed(folder: Path, options: list[str], replayed: Tape | None) -> tuple[Tape, str, Any]:
    """Returns the tape of a run, what it printed, and the contents of its folder."""
    wide = {"COLUMNS": "220"}
    with recorded(replayed) as tape:
        result = CliRunner().invoke(app, [*options, "--output", str(folder)], env=wide)
    assert result.exit_code == 0, result.output
    (run,) = folder.iterdir()
    return tape, public_text(result.output, folder), contents(run)


@pytest.mark.parametrize("name", RUNS)
def test_releases_determine_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, values = RUNS[name]
    common = "train --rounds 2 --clients 4 --dp-sigma 3 --partition dirichlet-plain"
    command = [*common.split(), *options.split()]
    for value in values:
        command += ["--set", value]
    tape, printed, written = executed(tmp_path / "a", command, None)
    data = (other_data(), TEST)
    monkeypatch.setattr(run_data, "load_dataset", lambda *arguments, **options: data)
    _, other_printed, other_written = executed(tmp_path / "b", command, tape)
    assert printed == other_printed
    assert written.keys() == other_written.keys()
    assert [key for key in written if written[key] != other_written[key]] == []
