"""Damaged model files for `distill --models`, in a process of its own (a signal must be seen): each
is refused in one line, or holds exactly what its own header declares."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save

from fedsynth.data.registry import dataset_spec
from fedsynth.federation.distill import _network, _read
from tests.fuzz.mutations import Faults, altered, altered_json, generator, json_bytes

CASES = 200


def good() -> bytes:
    network = _network("linear", (8, 1, ""), dataset_spec("digits"), 0)
    return save({name: value.contiguous() for name, value in network.state_dict().items()})


def damaged(number: int) -> bytes:
    rng = generator(number)
    content = good()
    if number % 2:
        return altered(content, rng)
    length = int.from_bytes(content[:8], "little")
    header = json_bytes(altered_json(json.loads(content[8 : 8 + length]), rng), rng)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def work(folder: Path) -> None:
    """The cases, one after another; prints the faults."""
    torch.set_num_threads(1)
    faults = Faults()
    path = folder / "model.safetensors"
    spec = dataset_spec("digits")
    for number in range(CASES):
        (folder / "CASE").write_text(str(number))
        path.write_bytes(damaged(number))
        made = faults.of(number, lambda: _read(path, _network("linear", (8, 1, ""), spec, 0)))
        if made is not None:
            sent = path.read_bytes()
            length = int.from_bytes(sent[:8], "little")
            header = json.loads(sent[8 : 8 + length])
            for name, value in made.state_dict().items():
                start, end = header[name]["data_offsets"]
                raw = sent[8 + length + start : 8 + length + end]
                kind = header[name]["dtype"]
                same = kind == "F32" and raw == value.numpy().tobytes()
                faults.unless(same, number, f"{name} is read as other numbers ({kind})")
    print(json.dumps([faults.found, faults.refused, faults.accepted]))


def test_damaged_models(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.test_models", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    case = (tmp_path / "CASE").read_text() if (tmp_path / "CASE").exists() else "none"
    assert done.returncode == 0, (
        f"ended with {done.returncode} at case {case}: {done.stderr[-800:]}"
    )
    found, refused, accepted = json.loads(done.stdout)
    assert found == []
    assert refused + accepted == CASES
    assert refused > CASES / 3
    assert accepted > 10


if __name__ == "__main__":
    work(Path(sys.argv[1]))
