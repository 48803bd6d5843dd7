"""Damaged model files for `distill --models`: each is refused in one line, or holds exactly what
its own header declares."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from safetensors.torch import save

from fedsynth.data.registry import dataset_spec
from fedsynth.federation.distill import _network, _read
from tests.fuzz.mutations import Faults, altered, altered_json, fuzzed, generator, json_bytes

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


@fuzzed(CASES)
def test_damaged_models(cases: range, tmp_path: Path) -> None:
    faults = Faults()
    path = tmp_path / "model.safetensors"
    spec = dataset_spec("digits")
    for number in cases:
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
    faults.check(cases, refused=0.33, accepted=0.05)
