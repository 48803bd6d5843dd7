"""Damaged and hostile input on every surface: a correct result, or a one-line error.

`SURFACES` lists the surfaces. The suite runs one case in `STEP`; `-m slow` runs all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from pydantic import ConfigDict, TypeAdapter

from fedsynth import PartitionSettings, PrivacySettings, Scaffold, resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.messages import Packed
from fedsynth.data.registry import dataset_spec
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.node import Node
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import CheckpointError, PrivacyError
from fedsynth.federation.context import public_context
from fedsynth.files import without_hash
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.ledger.ledger import repair_ledger
from fedsynth.privacy.releases import SAMPLERS, UNITS, Release
from fedsynth.results.checkpoint import POINTER, Checkpoint, CheckpointFolder
from fedsynth.validation import read_sections, to_toml
from tests.deployment.local_setup import Setup
from tests.fuzz import mutations
from tests.fuzz.mutations import HOSTILE, Fuzzer, altered, altered_json, json_bytes
from tests.message_examples import DTYPES, message_types, random_message
from tests.user_files import SPECIAL_KINDS, make_special_file

STEP = 11  # coprime to the numbers of kinds that the cases cycle through


# --------------------------------------------------------------------------------- config files
PLAIN = ("feddm", "fedavg", "fedkf", "fedhydra", "fedgen", "fedfm", "fedaf", "scaffold")
STRANGE = (
    *("1979-05-27T07:32:00Z", "07:32:00", "0x" + "f" * 5000, "9" * 400, "9" * 5000, "1e400"),
    *("-inf", "[" * 5000, "[" * 200 + "]" * 200, "{a=" * 300 + "1" + "}" * 300),
    *("'''\nx\n'''", '"\\u0000"', '"\\u202e"'),
)
TEXTS = 200  # cases with changed text; the others change one setting


def sections(method: str) -> dict[str, dict[str, Any]]:
    """Returns all settings of a private or a plain run."""
    private = {"privacy": {"noise_multiplier": 3.0, "epsilon": 50.0, "sample_rate": 0.5}}
    more = private if method in ("feddm", "fedavg", "fedfm") else {}
    return resolve({"run": {"method": method, "device": "cpu"}, **more}).to_mapping()


def in_toml(value: Any) -> str:
    if isinstance(value, str):
        return to_toml({"x": {"y": value.replace("\ud800", "\ufffd")}}).split("= ", 1)[1].strip()
    if value is None or isinstance(value, dict):
        return "{ x = 1 }"
    if isinstance(value, list):
        return "[[1], 'x']"
    return str(value).lower() if not isinstance(value, int) or value < 10**40 else "9" * 400


def with_hostile(settings: dict[str, dict[str, Any]], rng: random.Random) -> str:
    section = rng.choice(list(settings))
    settings[section][rng.choice(list(settings[section]))] = "@@"
    return to_toml(settings).replace('"@@"', rng.choice((*map(in_toml, HOSTILE), *STRANGE)))


def finite(settings: RunSettings) -> bool:
    """Returns whether all numbers are finite and no boolean replaces a number."""
    parts = (settings, settings.partition, settings.model, settings.method, settings.privacy)
    for part in filter(None, parts):
        for f in fields(part):
            value = getattr(part, f.name)
            if isinstance(value, bool) and "bool" not in str(f.type):
                return False
            if isinstance(value, int) and abs(value) >= 2**63:
                return False
            if isinstance(value, float) and not math.isfinite(value):
                return False
    return True


def read_settings(path: Path) -> None:
    """Reads settings, and asserts possible numbers and the round trip through TOML."""
    settings = resolve(read_sections(path))
    assert finite(settings), settings
    text = to_toml(settings.to_mapping())
    text.encode()
    assert resolve(tomllib.loads(text)) == settings, text


def configs(fuzzer: Fuzzer) -> None:
    """Changes the text, or sets values of another type, huge, not finite, or deeply nested."""
    path = fuzzer.folder / "config.toml"
    for number, rng in fuzzer.cases():
        settings = sections(rng.choice(PLAIN))
        if number < TEXTS:
            path.write_bytes(altered(to_toml(settings).encode(), rng))
        else:
            path.write_bytes(with_hostile(settings, rng).encode(errors="surrogateescape"))
        fuzzer.run(number, read_settings, path)


# -------------------------------------------------------------------------------------- options
INTEGERS = ("-1", "0", "1", "2", "7", *("9" * n for n in (6, 9, 12, 18, 19, 30, 400, 5000)))
FLOATS = ("0.5", "1e-5", "1e5", "1e12", "1e30", "1e308", "-1e308", "1e-308", "5e-324", "nan", "inf")
STRINGS = (
    *("", " ", "²", "١٢", "1_0", "x", "x/y", "../..", "x" * 5000, "x,y", ",", "=", "a=b", "None"),
    *("run.rounds=x", "~nobody-of-that-name/x", "\udcff", "\u202e", "\x1b[31m"),
    "none: this data set is public",
)
SETTINGS = (
    *("batch", "image_lr", "server_lr", "min_examples", "networks", "augment", "image_clip"),
    *("server_batch", "blur", "matching", "model.projection", "model.depth", "model.norm"),
    *("run.evaluate_every", "run.memory_gb", "run.seed", "run.precision", "run.participation"),
    *(f"partition.{f.name}" for f in fields(PartitionSettings) if f.name != "clients"),
    *(f"privacy.{f.name}" for f in fields(PrivacySettings) if f.name != "ledger"),
    *("data.dataset", "x", "", "a.b.c"),
)
TINY = (
    *("train", "--device=cpu", "--clients=2", "--rounds=1", "--width=8", "--ipc=1"),
    *("--set=iterations=1", "--set=server_epochs=1"),
)


def options_of_runs(fuzzer: Fuzzer) -> None:
    """Sets one setting of a short run, which is private in a third of the cases."""
    for number, rng in fuzzer.cases():
        word = rng.choice(rng.choice((INTEGERS, INTEGERS, FLOATS, FLOATS, STRINGS)))
        argument = f"--set={rng.choice(SETTINGS)}={word}"
        private = ["--dp-sigma=3"] if number % 3 == 0 else []
        args = (*TINY, *private, f"--output={fuzzer.folder / 'out'}", argument)
        fuzzer.run((number, argument[:60]), mutations.command, *args)


# ---------------------------------------------------------------------------------- checkpoints
METHOD = Scaffold()
DAMAGED_FILES = 150  # cases; the others change the JSON


def write_checkpoint(path: Path) -> Checkpoint:
    state = METHOD.initial_state({"weight": torch.arange(6.0).view(2, 3)})
    client_states = {k: {"h.weight": torch.full((2, 3), float(k))} for k in (0, 2)}
    rows = ({"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25, "participants": [0, 2]})
    valid = Checkpoint(rows, state, client_states)
    CheckpointFolder(path, "run").write(valid)
    return valid


def same_checkpoint(path: Path, valid: Checkpoint) -> bool:
    """Reads the checkpoint, and asserts that it equals the written one."""
    folder = CheckpointFolder(path, "run")
    checkpoint = folder.read(METHOD)
    assert checkpoint.rows == valid.rows
    arrays, expected = (
        [(name, array.tolist()) for name, array in state.arrays()]
        for state in (checkpoint.state, valid.state)
    )
    assert arrays == expected
    assert folder.clients == sorted(valid.client_states)
    for client, client_state in valid.client_states.items():
        assert torch.equal(folder.client_state(client)["h.weight"], client_state["h.weight"])
    return True


def checkpoints(fuzzer: Fuzzer) -> None:
    """No other round, state or client state than the written one is read."""
    path = fuzzer.folder / "checkpoint"
    valid = write_checkpoint(path)
    assert same_checkpoint(path, valid)
    contents = {file: file.read_bytes() for file in sorted(path.iterdir())}
    for number, rng in fuzzer.cases():
        file = path / POINTER
        if number < DAMAGED_FILES:
            file = rng.choice(list(contents))
            content = altered(contents[file], rng, *contents.values())
        else:
            content = json_bytes(altered_json(json.loads(without_hash(contents[file])), rng), rng)
        with mutations.replaced_content(file, content):
            fuzzer.run(number, same_checkpoint, path, valid)
        assert sorted(path.iterdir()) == list(contents)


@pytest.mark.parametrize("kind", SPECIAL_KINDS)
def test_special_files_in_checkpoints_are_rejected(tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path)
    for file in sorted(tmp_path.iterdir()):
        content = file.read_bytes()
        make_special_file(file, kind)
        with pytest.raises(CheckpointError):
            CheckpointFolder(tmp_path, "run").read(METHOD)
        file.rmdir() if kind == "folder" else file.unlink()
        file.write_bytes(content)


# -------------------------------------------------------------------------------------- ledgers
ROWS = [
    Release(n, "images", "residual", "residuals", 5.0, 0.1, 0.25, "poisson", 2, 7840)
    for n in (1, 2, 3)
]


def write_ledger(folder: Path) -> bytes:
    ledger = Ledger("north", folder / "good.jsonl", dataset="d", records="ab")
    for row in ROWS[:2]:
        ledger.charge(row)
    ledger.carry_over()
    ledger.charge(ROWS[2])
    return (folder / "good.jsonl").read_bytes()


def rehashed(lines: list[dict[str, Any]]) -> bytes:
    """Returns the lines with the chain of hashes of the ledger's format."""
    chain, content = "", b""
    for line in lines:
        entry = {key: value for key, value in line.items() if key != "chain"}
        text = chain + json.dumps(entry, sort_keys=True)
        chain = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
        content += json.dumps({**entry, "chain": chain}).encode() + b"\n"
    return content


def is_possible(row: Release) -> bool:
    numbers = (row.noise_multiplier, row.sensitivity, row.sample_rate)
    integers = (row.round, row.steps, row.dimension)
    return (
        all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
        and all(type(n) is int and 0 <= n < 2**63 for n in integers)
        and row.noise_multiplier >= 0
        and row.sensitivity > 0
        and 0 < row.sample_rate <= 1
        and row.sampler in SAMPLERS
        and row.unit in UNITS
        and all(type(t) is str for t in (row.quantity, row.mechanism, row.clipped))
    )


def rows_of(path: Path) -> tuple[Release, ...]:
    """Reads a ledger, and asserts possible rows."""
    ledger = read_ledger(path)
    assert len(ledger.lines.chains) == len(ledger.releases) + 1
    ledger.history().to_json()
    assert all(map(is_possible, ledger.releases)), ledger.releases
    return ledger.releases


def read_changed_ledger(path: Path, repair: bool, prefixes: list[list[Any]]) -> None:
    """Asserts that only a prefix of complete lines is accepted as the ledger. After a repair, the
    file contains charged rows only, or is unchanged."""
    original = path.read_bytes()
    try:
        if repair:
            repair_ledger(path)
        rows = rows_of(path)
    except PrivacyError:
        assert path.read_bytes() == original
        raise
    assert [json.loads(line) for line in path.read_bytes().splitlines()] in prefixes
    assert list(rows) == ROWS[: len(rows)]


def changed_ledgers(fuzzer: Fuzzer) -> None:
    valid = write_ledger(fuzzer.folder)
    lines = [json.loads(line) for line in valid.splitlines()]
    prefixes = [lines[:n] for n in range(1, len(lines) + 1)]
    path = fuzzer.folder / "damaged.jsonl"
    for number, rng in fuzzer.cases():
        repair = number % 3 == 0
        torn = valid[: rng.randrange(1, len(valid))] if repair else valid
        path.write_bytes(torn if repair and rng.random() < 0.5 else altered(torn, rng))
        fuzzer.run(number, read_changed_ledger, path, repair, prefixes)
        for copy in fuzzer.folder.glob("damaged.jsonl.*"):
            copy.unlink()


def rehashed_ledgers(fuzzer: Fuzzer) -> None:
    """Impossible rows are rejected even with correct hashes."""
    content = write_ledger(fuzzer.folder)
    valid = [json.loads(line) for line in content.splitlines()]
    assert rehashed(valid) == content
    path = fuzzer.folder / "damaged.jsonl"
    for number, rng in fuzzer.cases():
        changed = altered_json(valid, rng)
        try:
            content = rehashed(changed)
        except (AttributeError, RecursionError, ValueError, TypeError):  # not lines of objects
            content = json_bytes(changed, rng)
        path.write_bytes(content)
        fuzzer.run(number, rows_of, path)


# ------------------------------------------------------------------------------------- messages
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
NUMBERS = tuple(v for v in HOSTILE if isinstance(v, (int, float)))


def damaged_message(sent: bytes, rng: random.Random) -> bytes:
    """Damages bytes, the header of the file, or fedsynth's own header inside it."""
    target = rng.randrange(5)
    if target == 0:
        return altered(sent, rng)
    length = int.from_bytes(sent[:8], "little")
    header = json.loads(sent[8 : 8 + length])
    if target == 1:
        text = json_bytes(altered_json(header, rng), rng)
    else:
        metadata = json.loads(header["__metadata__"]["header"])
        if target == 2 and metadata["values"]:
            metadata["values"][rng.choice(list(metadata["values"]))] = rng.choice(NUMBERS)
            changed = json.dumps(metadata)
        else:
            changed = json_bytes(altered_json(metadata, rng), rng).decode(errors="replace")
        header["__metadata__"]["header"] = changed
        text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + sent[8 + length :]


def checked_message(kind: type[Packed], sent: bytes) -> None:
    """Decodes a message, and asserts exactly the types, shapes and names of its header."""
    message = kind.from_bytes(sent)
    hints = get_type_hints(kind)
    for f in fields(message):
        value = getattr(message, f.name)
        assert not isinstance(value, bool), f.name
        TypeAdapter(hints[f.name], config=STRICT).validate_python(value)
    header = json.loads(sent[8 : 8 + int.from_bytes(sent[:8], "little")])
    declared = {n: (a["shape"], a["dtype"]) for n, a in header.items() if n != "__metadata__"}
    assert {n: (list(a.shape), DTYPES.get(a.dtype)) for n, a in message.arrays()} == declared


def messages(fuzzer: Fuzzer) -> None:
    all_kinds = message_types()
    assert len(all_kinds) > 25
    for number, rng in fuzzer.cases():
        kind = all_kinds[number % len(all_kinds)]
        sent = damaged_message(random_message(kind, rng).to_bytes(), rng)
        fuzzer.run(f"{number} {kind.__name__}", checked_message, kind, sent)


# --------------------------------------------------------------------------- frames to a client
RUN = "0123456789abcdef"
PROPOSAL = {
    "run": {"method": "fedavg", "rounds": 3, "device": "cpu"},
    "partition": {"clients": 1, "subset": 0.03},
    "model": {"name": "linear"},
    "method": {"local_steps": 1},
    "privacy": {"noise_multiplier": 3.0, "sample_rate": 1.0},
}


def conversation() -> Iterator[Frame]:
    """Yields all frames of a server to a private client, in order."""
    proposal = Proposal(RUN, resolve(PROPOSAL), dataset_spec("digits"))
    context = public_context(proposal.settings, proposal.spec, torch.device("cpu"))
    sent = proposal.settings.method.request(
        parameters=context.architecture.state_dict(), weight=1.0
    ).to_bytes()
    step = {"participants": [0], "sizes": None, "noise_multiplier": 3.0, "exchange": "main"}
    yield Frame("join", {"proposal": proposal.to_json(), "last_round": 0, "number": 1}, b"")
    yield Frame("step", {**step, "round": 1, "number": 2}, sent)
    yield Frame("step", {**step, "round": 2, "number": 3}, sent)


def damaged_frame(frame: Frame, rng: random.Random) -> bytes:
    """Damages a frame's bytes, its JSON header, or its message."""
    match rng.randrange(4):
        case 0:
            return altered(frame.to_bytes(), rng)
        case 1 if frame.payload:
            return replace(frame, payload=altered(frame.payload, rng)).to_bytes()
    header = json_bytes(altered_json([frame.kind, dict(frame.facts)], rng), rng)
    return len(header).to_bytes(8, "little") + header + frame.payload


def frames(fuzzer: Fuzzer) -> None:
    """Sends a damaged frame before each frame of a valid conversation: a client answers each of
    them with a frame, and the valid ones as usual."""
    other_run: list[Node] = []

    def requests() -> Iterator[tuple[Node, Frame]]:
        for number in count():
            node = Setup(fuzzer.folder / str(number)).node(0)
            for frame in conversation():
                if node not in other_run:
                    yield node, frame

    def charges(node: Node) -> int:
        file = node.home / "client-000.jsonl"
        return len(read_ledger(file).releases) if file.exists() else 0

    def exchange(node: Node, frame: Frame, sent: bytes) -> None:
        previous = charges(node)
        answer = Frame.from_bytes(node.answer(RUN, sent))
        assert answer.kind in ("answer", "refusal", "error")
        assert answer.facts["client"] == 0
        text = str(answer.facts.get("text", ""))
        assert "\n" not in text
        assert len(text) < 2000
        assert charges(node) == previous or (answer.kind == "answer" and frame.kind == "step")
        if frame.kind == "join" and answer.kind == "answer":
            other_run.append(node)  # possibly with other settings
            return
        reply = Frame.from_bytes(node.answer(RUN, frame.to_bytes()))
        # a private client never repeats a step
        repeated = frame.kind == "step" and answer.kind != "error"
        valid = reply.kind == ("error" if repeated else "answer") or answer.kind == "answer"
        assert valid, (sent[:200], answer.kind, frame.kind, reply)

    for (number, rng), (node, frame) in zip(fuzzer.cases(), requests(), strict=False):
        fuzzer.run(number, exchange, node, frame, damaged_frame(frame, rng))


# ------------------------------------------------------------------------------------- the table
# The number of cases, their function, and the least shares of refused and accepted ones.
SURFACES: dict[str, tuple[int, Callable[[Fuzzer], None], float, float]] = {
    "config": (600, configs, 0.33, 0.01),
    "option": (110, options_of_runs, 0.0, 0.1),
    "checkpoint": (400, checkpoints, 0.8, 0.0),
    "ledger": (300, changed_ledgers, 0.33, 0.05),
    "rehashed ledger": (300, rehashed_ledgers, 0.0, 0.05),
    "message": (600, messages, 0.33, 0.02),
    "frame": (150, frames, 0.0, 0.0),
}


@pytest.mark.parametrize("step", [STEP, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SURFACES)
def test_damaged_input_is_rejected_or_read_correctly(
    name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names may become paths in the current folder
    cases, play, refused, accepted = SURFACES[name]
    fuzzer = Fuzzer(tmp_path, range(0, cases, step))
    play(fuzzer)
    fuzzer.check(refused, accepted)
