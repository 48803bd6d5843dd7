"""Damaged and hostile input on every surface: a result as promised, or one line of an error.

`SURFACES` lists them. In the suite one case in `STEP` runs, with `-m slow` all of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import struct
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from fedsynth import Scaffold, resolve, simulate
from fedsynth.config.settings import RunSettings
from fedsynth.core.messages import Packed
from fedsynth.data.registry import dataset_spec
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.node import Node
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import CheckpointError
from fedsynth.federation.context import public_context
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.ledger.lines import repair_ledger
from fedsynth.privacy.releases import SAMPLERS, UNITS, Release
from fedsynth.results.checkpoint import POINTER, Checkpoint, CheckpointFolder
from fedsynth.validation import read_sections, to_toml
from tests.deployment.place import Place
from tests.fuzz.mutations import (
    HOSTILE,
    Faults,
    altered,
    altered_json,
    command,
    json_bytes,
    replaced_content,
)
from tests.message_examples import DTYPES, field_types, message_types, random_message
from tests.special_files import SPECIAL_KINDS, make_special_file

STEP = 11  # shares no factor with the numbers of kinds that cases take in turn


# --------------------------------------------------------------------------------- config files
PLAIN = ("feddm", "fedavg", "fedkf", "fedhydra", "fedgen", "fedfm", "fedaf", "scaffold")
STRANGE = (
    *("1979-05-27T07:32:00Z", "07:32:00", "0x" + "f" * 5000, "9" * 400, "9" * 5000, "1e400"),
    *("-inf", "[" * 5000, "[" * 200 + "]" * 200, "{a=" * 300 + "1" + "}" * 300),
    *("'''\nx\n'''", '"\\u0000"', '"\\u202e"'),
)
TEXTS = 200  # cases whose text is changed; in the others one setting is


def sections(method: str) -> dict[str, dict[str, Any]]:
    """All settings of a private or a plain run."""
    private = {"privacy": {"noise_multiplier": 3.0, "epsilon": 50.0, "sample_rate": 0.5}}
    more = private if method in ("feddm", "fedavg", "fedfm") else {}
    return resolve({"run": {"method": method, "device": "cpu"}, **more}).to_mapping()


def in_toml(value: Any) -> str:
    """A hostile value as TOML says it."""
    if isinstance(value, str):
        return to_toml({"x": {"y": value.replace("\ud800", "\ufffd")}}).split("= ", 1)[1].strip()
    if value is None or isinstance(value, dict):
        return "{ x = 1 }"
    if isinstance(value, list):
        return "[[1], 'x']"
    return str(value).lower() if not isinstance(value, int) or value < 10**40 else "9" * 400


def with_one(given: dict[str, dict[str, Any]], rng: random.Random) -> str:
    """The sections as TOML, with one hostile value."""
    section = rng.choice(list(given))
    given[section][rng.choice(list(given[section]))] = "@@"
    return to_toml(given).replace('"@@"', rng.choice((*map(in_toml, HOSTILE), *STRANGE)))


def finite(settings: RunSettings) -> bool:
    """All numbers are finite, and none is a truth value where a number stands."""
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


def settings_read(path: Path) -> RunSettings:
    """Settings of the file, if what is written of them is read as the same."""
    settings = resolve(read_sections(path))
    text = to_toml(settings.to_mapping())
    text.encode()
    assert resolve(tomllib.loads(text)) == settings, text
    return settings


def configs(bench: Faults) -> None:
    """Changes of the text, and settings of another type, huge, not finite, or deeply nested."""
    path = bench.folder / "config.toml"
    for number, rng in bench.cases():
        given = sections(rng.choice(PLAIN))
        if number < TEXTS:
            path.write_bytes(altered(to_toml(given).encode(), rng))
        else:
            path.write_bytes(with_one(given, rng).encode(errors="surrogateescape"))
        made = bench.of(number, settings_read, path)
        bench.unless(made is None or finite(made), number, f"made {made}")


# -------------------------------------------------------------------------------------- options
WHOLE = ("-1", "0", "1", "2", "7", *("9" * n for n in (6, 9, 12, 18, 19, 30, 400, 5000)))
REAL = ("0.5", "1e-5", "1e5", "1e12", "1e30", "1e308", "-1e308", "1e-308", "5e-324", "nan", "inf")
WORDS = (
    *("", " ", "²", "١٢", "1_0", "x", "x/y", "../..", "x" * 5000, "x,y", ",", "=", "a=b", "None"),
    *("run.rounds=x", "~nobody-of-that-name/x", "\udcff", "\u202e", "\x1b[31m"),
    "none: this data set is public",
)
TRAIN = (
    *("method", "rounds", "seed", "precision", "memory-gb", "participation", "dataset"),
    *("partition", "clients", "alpha", "classes-per-client", "min-size", "subset", "local-test"),
    *("model", "client-models", "width", "depth", "norm", "ipc", "matching", "set", "config"),
    *("data-root", "device"),
)
PRIVATE = (
    *("dp-epsilon", "dp-sigma", "dp-clip", "dp-delta", "dp-max-records", "dp-mechanism"),
    *("dp-sample-rate", "dp-nominal-size", "dp-adjacency", "dp-unit"),
)
SETTINGS = (
    *("method.batch", "method.image_lr", "method.server_lr", "method.min_examples"),
    *("method.networks", "method.augment", "method.image_clip", "model.projection"),
    *("run.evaluate_every", "partition.missing_classes", "partition.dominant_share"),
    *("privacy.user_records", "privacy.max_request_norm", "privacy.four_sums"),
    *("method.server_batch", "method.blur", "partition.seed", "run.memory_gb", "run.seed"),
)
TINY = (
    *("train", "--device", "cpu", "--clients", "2", "--rounds", "1", "--width", "8"),
    *("--set", "iterations=1"),
)
PLAN = "privacy plan --mechanism=residual"
OTHER = tuple(tuple(line.split()) for line in (
    f"{PLAN} --epsilon", f"{PLAN} --epsilon 8 --rounds", f"{PLAN} --epsilon 8 --n",
    "privacy plan --epsilon 8 --method", f"{PLAN} --sigma", f"{PLAN} --sigma 3 --delta",
    f"{PLAN} --sigma 3 --clients", f"{PLAN} --sigma 3 --sample-rate", f"{PLAN} --sigma 3 --set",
    "privacy report", "privacy report --ledger", "privacy verify", "privacy verify x --ledger",
    "privacy verify x --public-key", "privacy sign x --key", "privacy repair",
    "privacy carry-over .", "privacy carry-over", "runs", "methods show", "distill --models",
    "distill --models x --arch", "distill --models x --student", "distill --models x --width",
    "distill --models x --depth", "distill --models x --seed", "distill --models x --set",
    "distill --models x --dataset", "partition --clients", "partition --alpha",
    "partition --picture", "partition --set", "privacy audit --run", "privacy audit --canaries",
))  # fmt: skip


def word(option: str, rng: random.Random) -> str:
    """A hostile value; for --set often one of a setting."""
    chosen = rng.choice(rng.choice((WHOLE, WHOLE, REAL, REAL, WORDS)))
    if option == "set" and rng.random() < 0.9:
        return f"{rng.choice(SETTINGS)}={chosen}"
    return chosen


def try_command(bench: Faults, number: int, args: list[str]) -> None:
    bench.of((number, [a[:60] for a in args[-4:]]), command, *args)


def options_of_runs(bench: Faults) -> None:
    """A tiny run with one hostile option: what is accepted is run."""
    for number, rng in bench.cases():
        private = number % 3 == 0
        option = rng.choice(TRAIN + PRIVATE + ("set",) * 20 if private else TRAIN + ("set",) * 12)
        short = ["--ipc=1", "--set=server_epochs=1"]
        given = f"--{option}={word(option, rng)}"
        if option == "ipc":
            short = short[1:]
        sigma = ["--dp-sigma=3"] if private and option not in ("dp-sigma", "dp-epsilon") else []
        output = f"--output={bench.folder / 'out'}"
        if option == "rounds" and given[-3:].isdigit():
            output = "--dry-run"  # a number of rounds may be meant
        try_command(bench, number, [*TINY, *short, *sigma, output, given])


def options_of_other_commands(bench: Faults) -> None:
    for number, rng in bench.cases():
        *start, last = OTHER[number % len(OTHER)]
        value = word(last.removeprefix("--"), rng)
        end = [f"{last}={value}"] if last.startswith("--") else [last, value]
        try_command(bench, number, [*start, *end])


# -------------------------------------------------------------------- reports and files of a run
def meaning(report: bytes) -> Any:
    """What must follow from the run's files, all but which versions made it; floating-point numbers
    to five digits."""
    found = json.loads(
        report, parse_int=str, parse_float=lambda text: f"{round(float(text), 11) + 0.0:.5g}"
    )
    if isinstance(found.get("provenance"), dict):
        found["provenance"] = found["provenance"].get("config")
    if isinstance(found.get("accountant"), dict):
        found["accountant"].pop("library", None)
    return found


def reports(bench: Faults) -> None:
    """`privacy verify` refuses each change of the report's JSON that has a meaning; each form of a
    damaged report is text, and nothing in it is taken for HTML."""
    settings = {
        "run": {"rounds": 2, "device": "cpu"},
        "partition": {"clients": 2},
        "model": {"width": 8},
        "method": {"iterations": 1, "server_epochs": 1, "ipc": 2},
        "privacy": {"noise_multiplier": 3.0},
    }
    run = simulate(resolve(settings), output=bench.folder, quiet=True).folder
    file = run / "privacy_report.json"
    good = file.read_bytes()
    for number, rng in bench.cases():
        content = json_bytes(altered_json(json.loads(good), rng), rng)
        form = ("verify", "markdown", "verify", "html", "verify", "json")[number % 6]
        show = ["privacy", "report", str(run), "--format", form]
        words = ["privacy", "verify", str(run)] if form == "verify" else show
        with replaced_content(file, content):
            done = bench.of(number, command, *words)
        if done is None:
            continue
        if form == "verify" and done[0] == 0:
            same = meaning(good) == meaning(content)
            bench.unless(same, number, f"accepted {content[:3000]!r}")
        bench.unless("\x1b" not in done[1], number, "steers a terminal")
        script = form == "html" and "<script" in done[1]
        bench.unless(not script, number, "has a script")


# ---------------------------------------------------------------------------------- checkpoints
METHOD = Scaffold()
DAMAGED_FILES = 150  # cases; the others change the JSON


def write_checkpoint(path: Path) -> Checkpoint:
    state = METHOD.initial_state({"weight": torch.arange(6.0).view(2, 3)})
    memories = {k: {"h.weight": torch.full((2, 3), float(k))} for k in (0, 2)}
    rows = ({"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25, "participants": [0, 2]})
    good = Checkpoint(rows, state, memories)
    CheckpointFolder(path, "run").write(good, frozenset(memories))
    return good


def same_checkpoint(path: Path, good: Checkpoint) -> bool:
    """Reads the checkpoint, which must be as it was written."""
    folder = CheckpointFolder(path, "run")
    found = folder.read(METHOD)
    assert found.rows == good.rows
    expected = dict(good.state.arrays())
    stated = dict(found.state.arrays())
    assert stated.keys() == expected.keys()
    assert all(torch.equal(stated[name], value) for name, value in expected.items())
    assert folder.clients == sorted(good.memories)
    for client, memory in good.memories.items():
        assert torch.equal(folder.memory(client)["h.weight"], memory["h.weight"])
    return True


def checkpoints(bench: Faults) -> None:
    """Never another round, state or memory than was written."""
    path = bench.folder / "checkpoint"
    good = write_checkpoint(path)
    assert same_checkpoint(path, good)
    contents = {file: file.read_bytes() for file in sorted(path.iterdir())}
    for number, rng in bench.cases():
        file = path / POINTER
        if number < DAMAGED_FILES:
            file = rng.choice(list(contents))
            content = altered(contents[file], rng, *contents.values())
        else:
            content = json_bytes(altered_json(json.loads(contents[file]), rng), rng)
        with replaced_content(file, content):
            bench.of(number, same_checkpoint, path, good)
        assert sorted(path.iterdir()) == list(contents)


@pytest.mark.parametrize("kind", SPECIAL_KINDS)
def test_a_special_file_in_a_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
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
    """The lines with a chain of hashes as the format describes it, computed here."""
    chain = ""
    made = b""
    for line in lines:
        entry = {key: value for key, value in line.items() if key != "chain"}
        text = chain + json.dumps(entry, sort_keys=True)
        chain = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
        made += json.dumps({**entry, "chain": chain}).encode() + b"\n"
    return made


def sound(row: Release) -> bool:
    """A row's values can be what they say, by their meaning alone."""
    numbers = (row.noise_multiplier, row.sensitivity, row.sample_rate)
    whole = (row.round, row.steps, row.dimension)
    return (
        all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
        and all(type(n) is int and 0 <= n < 2**63 for n in whole)
        and row.noise_multiplier >= 0
        and row.sensitivity > 0
        and 0 < row.sample_rate <= 1
        and row.sampler in SAMPLERS
        and row.unit in UNITS
        and all(type(t) is str for t in (row.quantity, row.mechanism, row.clipped))
    )


def rows_of(path: Path) -> tuple[Release, ...]:
    ledger = read_ledger(path)
    assert len(ledger.chains) == len(ledger.releases) + 1
    ledger.history().to_json()
    return ledger.releases


def repaired_rows(path: Path) -> tuple[Release, ...]:
    repair_ledger(path)
    return rows_of(path)


def changed_ledgers(bench: Faults) -> None:
    """A prefix of whole lines is all that may be taken for the ledger. What is left after a repair
    is a ledger of the rows that were charged, or the file as it was."""
    good = write_ledger(bench.folder)
    lines = [json.loads(line) for line in good.splitlines()]
    meant = [lines[:n] for n in range(1, len(lines) + 1)]
    path = bench.folder / "damaged.jsonl"
    for number, rng in bench.cases():
        repair = number % 3 == 0
        torn = good[: rng.randrange(1, len(good))] if repair else good
        before = torn if repair and rng.random() < 0.5 else altered(torn, rng)
        path.write_bytes(before)
        rows = bench.of(number, repaired_rows if repair else rows_of, path)
        if rows is None:
            bench.unless(path.read_bytes() == before, number, "changed what it refused")
        else:
            now = [json.loads(line) for line in path.read_bytes().splitlines()]
            bench.unless(now in meant, number, "read as other rows")
            bench.unless(list(rows) == ROWS[: len(rows)], number, f"read as {rows}")
        for copy in bench.folder.glob("damaged.jsonl.*"):
            copy.unlink()


def rehashed_ledgers(bench: Faults) -> None:
    """Impossible rows stay refused where their hashes are right."""
    content = write_ledger(bench.folder)
    good = [json.loads(line) for line in content.splitlines()]
    assert rehashed(good) == content
    path = bench.folder / "damaged.jsonl"
    for number, rng in bench.cases():
        changed = altered_json(good, rng)
        try:
            content = rehashed(changed)
        except (AttributeError, RecursionError, ValueError, TypeError):  # no lines of objects
            content = json_bytes(changed, rng)
        path.write_bytes(content)
        for row in bench.of(number, rows_of, path) or ():
            bench.unless(sound(row), number, f"took {row}")


# ------------------------------------------------------------------------------------- messages
NUMBERS = tuple(v for v in HOSTILE if isinstance(v, (int, float)))


def damaged_message(sent: bytes, rng: random.Random) -> bytes:
    """Damages bytes, the header of the file, or fedsynth's own header inside it."""
    where = rng.randrange(5)
    if where == 0:
        return altered(sent, rng)
    length = int.from_bytes(sent[:8], "little")
    header = json.loads(sent[8 : 8 + length])
    if where == 1:
        text = json_bytes(altered_json(header, rng), rng)
    else:
        own = json.loads(header["__metadata__"]["header"])
        if where == 2 and own["numbers"]:
            own["numbers"][rng.choice(list(own["numbers"]))] = rng.choice(NUMBERS)
            changed = json.dumps(own)
        else:
            changed = json_bytes(altered_json(own, rng), rng).decode(errors="replace")
        header["__metadata__"]["header"] = changed
        text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + sent[8 + length :]


def wrong(made: Packed, sent: bytes) -> str:
    """How a decoded message differs from what its bytes declare; empty: it does not."""
    header = json.loads(sent[8 : 8 + int.from_bytes(sent[:8], "little")])
    hints = get_type_hints(type(made))
    declared = {name: one for name, one in header.items() if name != "__metadata__"}
    for f in fields(made):
        value = getattr(made, f.name)
        choices = field_types(hints[f.name])
        if isinstance(value, bool) or (type(value) is float and float not in choices):
            return f"{f.name} is {value!r}"
        if isinstance(value, int | float) and not math.isfinite(value):
            return f"{f.name} is {value!r}"
        if isinstance(value, Mapping) and not any(get_origin(c) for c in choices):
            return f"{f.name} is a mapping"
        if isinstance(value, Tensor) and Tensor not in choices:
            return f"{f.name} is a tensor"
        if value is None and NoneType not in choices:
            return f"{f.name} is missing"
    for name, tensor in made.arrays():
        one = declared.pop(name)
        if list(tensor.shape) != one["shape"] or DTYPES.get(tensor.dtype) != one["dtype"]:
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, declared {one}"
    return f"{sorted(declared)} were left out" if declared else ""


def messages(bench: Faults) -> None:
    """Exactly the types, shapes and names that its own header declares."""
    all_kinds = message_types()
    assert len(all_kinds) > 25
    for number, rng in bench.cases():
        kind = all_kinds[number % len(all_kinds)]
        case = f"{number} {kind.__name__}"
        sent = damaged_message(random_message(kind, rng).to_bytes(), rng)
        made = bench.of(case, kind.from_bytes, sent)
        fault = "" if made is None else wrong(made, sent)
        bench.unless(not fault, case, fault)


# --------------------------------------------------------------------------- frames to a client
RUN = "0123456789abcdef"


def proposed(private: bool) -> Proposal:
    given = {
        "run": {"method": "fedavg", "rounds": 3, "device": "cpu"},
        "partition": {"clients": 1, "subset": 0.03},
        "model": {"name": "linear"},
        "method": {"local_steps": 1},
        "privacy": {"noise_multiplier": 3.0, "sample_rate": 1.0} if private else {},
    }
    return Proposal(RUN, resolve(given), dataset_spec("digits"))


def conversation(proposal: Proposal) -> list[Frame]:
    """All that a server asks a client, in order."""
    settings = proposal.settings
    context = public_context(settings, proposal.spec, torch.device("cpu"))
    model = context.architecture.state_dict()
    message, _ = settings.method.exchange_types("main")
    sent = message(parameters=model, weight=1.0).to_bytes()
    private = settings.privacy is not None
    step = {
        "participants": [0],
        "sizes": None,
        "noise_multiplier": 3.0 if private else None,
        "phase": "main",
    }
    asked = [
        ("join", {"proposal": proposal.to_json(), "last_round": 0}, b""),
        ("step", {**step, "round": 1}, sent),
        ("step", {**step, "round": 2}, sent),
    ]
    return [
        Frame(kind, {**facts, "number": number}, payload)
        for number, (kind, facts, payload) in enumerate(asked, 1)
    ]


def damaged_frame(frame: Frame, rng: random.Random) -> bytes:
    """A frame's bytes, its JSON header, or its message."""
    match rng.randrange(4):
        case 0:
            return altered(frame.to_bytes(), rng)
        case 1 if frame.payload:
            return replace(frame, payload=altered(frame.payload, rng)).to_bytes()
    given = {"kind": frame.kind, "facts": dict(frame.facts)}
    header = json_bytes(altered_json(given, rng), rng)
    return len(header).to_bytes(8, "little") + header + frame.payload


def answered(node: Node, sent: bytes) -> Frame:
    return Frame.from_bytes(node.answer(RUN, sent))


def frames(bench: Faults, private: bool) -> None:
    """The conversation as it should be, with one damaged frame before each of its frames: a client
    answers it with a frame, and the right one as usual."""
    proposal = proposed(private)
    other_run: list[Node] = []

    def asked() -> Iterator[tuple[Node, Frame]]:
        for number in count():
            node = Place(bench.folder / str(number)).node(0)
            for frame in conversation(proposal):
                if node not in other_run:
                    yield node, frame

    def charges(node: Node) -> int:
        file = node.home / "client-000.jsonl"
        return len(read_ledger(file).releases) if private and file.exists() else 0

    for (number, rng), (node, frame) in zip(bench.cases(), asked(), strict=False):
        sent = damaged_frame(frame, rng)
        before = charges(node)
        answer = bench.of(number, answered, node, sent)
        if answer is None:
            continue
        known = answer.kind in ("answer", "refusal", "error")
        bench.unless(known, number, f"answers {answer.kind}")
        bench.unless(answer.facts["client"] == 0, number, "another client answers")
        text = str(answer.facts.get("text", ""))
        bench.unless("\n" not in text and len(text) < 2000, number, f"says {text[:200]!r}")
        fair = charges(node) == before or (answer.kind == "answer" and frame.kind == "step")
        bench.unless(fair, number, f"{frame.kind}: charged, and gave {answer.kind}")
        if frame.kind == "join" and answer.kind == "answer":
            other_run.append(node)  # perhaps with other settings, which it then keeps
            continue
        right = answered(node, frame.to_bytes())
        # a step that a private client began is never begun again
        done = private and frame.kind == "step" and answer.kind != "error"
        bench.unless(
            right.kind == ("error" if done else "answer") or answer.kind == "answer",
            number,
            f"after {sent[:200]!r} ({answer.kind}), {frame.kind} gives {right}",
        )


# ------------------------------------------------------------------------------------- the table
@dataclass(frozen=True)
class Surface:
    """One kind of input; `refused` and `accepted` are the least shares of its cases."""

    cases: int
    play: Callable[[Faults], None]
    refused: float = 0.0
    accepted: float = 0.0


SURFACES = {
    "config": Surface(600, configs, refused=0.33, accepted=0.01),
    "option of a run": Surface(110, options_of_runs, accepted=0.1),
    "option of another command": Surface(105, options_of_other_commands),
    "report": Surface(300, reports),
    "checkpoint": Surface(400, checkpoints, refused=0.8),
    "ledger": Surface(300, changed_ledgers, refused=0.33, accepted=0.05),
    "rehashed ledger": Surface(300, rehashed_ledgers, accepted=0.05),
    "message": Surface(600, messages, refused=0.33, accepted=0.02),
    "frame": Surface(150, functools.partial(frames, private=False)),
    "private frame": Surface(150, functools.partial(frames, private=True)),
}


@pytest.mark.parametrize("step", [STEP, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SURFACES)
def test_damaged_input_is_refused_in_one_line_or_read_as_promised(
    name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names that are taken for paths must not hit this folder
    surface = SURFACES[name]
    bench = Faults(tmp_path, range(0, surface.cases, step))
    surface.play(bench)
    bench.check(surface.refused, surface.accepted)
