"""Damaged checkpoints: none is read as another round, state or memory than was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth import Scaffold
from fedsynth.errors import CheckpointError
from fedsynth.results.checkpoint import POINTER, Checkpoint, CheckpointFolder
from tests.fuzz.mutations import Faults, altered, altered_json, fuzzed, generator, json_bytes
from tests.special import SPECIAL, special_file

FILES, POINTERS = 150, 250
CASES = FILES + POINTERS
METHOD = Scaffold()


def written(path: Path) -> Checkpoint:
    state = METHOD.initial_state({"weight": torch.arange(6.0).view(2, 3)})
    memories = {k: {"h.weight": torch.full((2, 3), float(k))} for k in (0, 2)}
    rows = ({"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25, "participants": [0, 2]})
    good = Checkpoint(rows, state, memories)
    CheckpointFolder(path, "run").write(good, frozenset(memories))
    return good


def same(path: Path, good: Checkpoint) -> bool:
    """Whether the checkpoint is read, and as it was written."""
    folder = CheckpointFolder(path, "run")
    found = folder.read(METHOD)
    assert found is not None
    assert found.rows == good.rows
    expected = dict(good.state.arrays())
    stated = dict(found.state.arrays())
    assert stated.keys() == expected.keys()
    assert all(torch.equal(stated[name], value) for name, value in expected.items())
    assert folder.clients == sorted(good.memories)
    for client, memory in good.memories.items():
        assert torch.equal(folder.memory(client)["h.weight"], memory["h.weight"])
    return True


def damaged(path: Path, number: int) -> None:
    """One file of the checkpoint, or a value of its JSON, is another."""
    rng = generator(number)
    pointer = path / POINTER
    if number < FILES:
        files = sorted(path.iterdir())
        file = rng.choice(files)
        file.write_bytes(altered(file.read_bytes(), rng, *(one.read_bytes() for one in files)))
        return
    value: Any = altered_json(json.loads(pointer.read_text()), rng)
    pointer.write_bytes(json_bytes(value, rng))


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_special_file_in_a_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    written(tmp_path)
    for file in sorted(tmp_path.iterdir()):
        content = file.read_bytes()
        special_file(file, kind)
        with pytest.raises(CheckpointError):
            CheckpointFolder(tmp_path, "run").read(METHOD)
        file.rmdir() if kind == "folder" else file.unlink()
        file.write_bytes(content)


@fuzzed(CASES)
def test_a_damaged_checkpoint_is_refused_in_one_line(cases: range, tmp_path: Path) -> None:
    good = written(tmp_path / "good")
    assert same(tmp_path / "good", good)
    faults = Faults()
    for number in cases:
        path = tmp_path / "one"
        shutil.copytree(tmp_path / "good", path)
        damaged(path, number)
        faults.of(number, lambda path=path: same(path, good))
        shutil.rmtree(path)
    faults.check(cases, refused=0.8)
