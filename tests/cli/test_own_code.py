"""--model, --method and --features FILE.py:NAME: a user's own code, by name, and by hash
afterwards; and that nothing but what is named on the command line is ever executed."""

from __future__ import annotations

import json
import os
import py_compile
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedsynth.features.registry import _CUSTOM as CUSTOM_FEATURES
from fedsynth.methods import _CUSTOM
from fedsynth.own_code import load_own
from tests.cli.conftest import Call
from tests.interruption import interrupt_in_round

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, image_shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(image_shape[1] * image_shape[2], classes))
"""
METHOD = """
from dataclasses import dataclass
from helper import RATE
from fedsynth import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine"
    summary = "FedAvg at another rate"
    lr: float = RATE
"""
FEATURES = """
from fedsynth.features import FeatureMap

def rows(image_shape):
    return FeatureMap(
        "rows", image_shape, 8, 3.0, 3.0, "pixels are in [0, 1]", lambda x: x.mean(dim=(1, 3))
    )
"""
FILES = {"net.py": NET, "mine.py": METHOD, "enc.py": FEATURES, "helper.py": "RATE = 0.5\n"}
OPTIONS = {
    "method": "--method {}/mine.py:Mine",
    "model": "--model {}/net.py:Net",
    "features": "--features {}/enc.py:rows",
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of a user's own files."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def forget() -> None:
    """Forgets what was registered, as a new process would."""
    _CUSTOM.clear()
    CUSTOM_FEATURES.clear()


@pytest.fixture(autouse=True)
def registered() -> Any:
    yield
    forget()


def base(code: Path, rounds: int = 1) -> str:
    return f"train --output {code / 'out'} --rounds {rounds} --clients 2 --device cpu"


@pytest.mark.parametrize("kinds", [("method", "model"), ("features",)], ids=str)
def test_own_files_are_recorded(kinds: tuple[str, ...], code: Path, fedsynth: Call) -> None:
    """Catches: code that no other command knows again, or that changed unseen."""
    own = " ".join(OPTIONS[kind].format(code) for kind in kinds)
    own += "" if "method" in kinds else " --method fedavg"
    done = fedsynth(f"{base(code)} {own} --set local_epochs=1 --set batch=128 --dp-sigma 3")
    assert done.code == 0, done.stderr
    folder = done.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["settings"]["lr"] == 0.5 or "method" not in kinds
    assert set(summary["sources"]) == set(kinds)
    for source in summary["sources"].values():
        assert (folder / "sources" / source["file"]).read_text() == FILES[source["file"]]
    assert str(code) not in (folder / "summary.json").read_text().replace(str(folder.parent), "")

    verify = f"privacy verify {folder} " + own.replace("--method fedavg", "")
    again = fedsynth(verify)
    assert (again.code, again.stdout[:10]) == (0, "the report")
    forget()
    file = {"method": "mine.py:Mine@", "features": "enc.py:rows@"}[kinds[0]]
    forgotten = fedsynth(f"privacy verify {folder}")
    assert forgotten.code == 1
    assert file in forgotten.stdout
    forget()
    changed = code / file.partition(":")[0]
    changed.write_text(changed.read_text() + "# changed\n")
    assert fedsynth(verify).code == 1


@pytest.mark.parametrize("times", [True, False], ids=["of the same time", "unchecked"])
def test_the_text_that_was_hashed_is_what_runs(code: Path, times: bool) -> None:
    """Python's loader takes a cached file of the same size and time, or one that says that it
    needs no check."""
    file = code / "net.py"
    file.write_text(NET.replace("Net", "Bad"))
    checked = py_compile.PycInvalidationMode.TIMESTAMP
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(file), invalidation_mode=checked if times else unchecked)
    before = file.stat()
    file.write_text(NET)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    made, source = load_own("model", "name", f"{file}:Net")
    assert (made.__name__, source.text) == ("Net", NET)


def test_what_a_config_names_is_never_executed(code: Path, fedsynth: Call) -> None:
    """Catches: a run folder from anybody that runs a program when it is read."""
    (code / "evil.py").write_text("open(__file__ + '.ran', 'w')\nclass Net: pass\n")
    places = (("model", "name"), ("run", "method"), ("method", "features"), ("model", "features"))
    for section, key in places:
        config = code / f"{section}-{key}.toml"
        config.write_text(f'[{section}]\n{key} = "{code / "evil.py"}:Net"\n')
        fedsynth(f"train --config {config} --output {code / 'out'}").assert_refused("")
    assert not (code / "evil.py.ran").exists()


@pytest.mark.parametrize(
    ("line", "kind", "name"),
    [
        ("--model linear {method} --set local_steps=1", "method", "mine.py"),
        ("--method fedstats {features}", "features", "enc.py"),
    ],
)
def test_a_killed_run_is_resumed_with_its_own_file_only(
    line: str, kind: str, name: str, code: Path, fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: --resume that cannot be, or uses another file."""
    option = OPTIONS[kind].format(code)
    line = f"{base(code, 2)} {line.format(**{kind: option})}"
    whole = fedsynth(line)
    accuracy = json.loads((whole.folder / "summary.json").read_text())["test_accuracy"]
    shutil.rmtree(code / "out")
    with interrupt_in_round(2, monkeypatch):
        assert fedsynth(line).code == 130
    (left,) = (code / "out").iterdir()
    forget()
    fedsynth(f"train --resume {left}").assert_refused(name)
    content = (code / name).read_text()
    (code / name).write_text(content + "# changed\n")
    other = fedsynth(f"train --resume {left} {option}")
    assert other.code == 2
    assert re.search("file that you named is|other settings", other.stderr)
    (code / name).write_text(content)
    done = fedsynth(f"train --resume {left} {option}")
    assert done.code == 0, done.stderr
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["test_accuracy"] == accuracy


def test_resuming_adds_no_file(code: Path, fedsynth: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a file that changes the run, or that is left out without an error."""
    with interrupt_in_round(2, monkeypatch):
        assert fedsynth(f"{base(code, 2)} --method fedstats").code == 130
    (left,) = (code / "out").iterdir()
    for option in OPTIONS.values():
        done = fedsynth(f"train --resume {left} {option.format(code)}")
        assert (done.code, "fedsynth: error: " in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "which fails with ZeroDivisionError: division by zero"),
        ("cols = 3", "names 'rows', but"),
        (FEATURES.replace("x.mean(dim=(1, 3))", "x.mean(dim=(1, 3)).bernoulli()"), "draws random"),
    ],
)
def test_a_file_without_a_feature_map(text: str, words: str, code: Path, fedsynth: Call) -> None:
    (code / "enc.py").write_text(text + "\n")
    options = f"--method fedstats {OPTIONS['features'].format(code)} --dp-epsilon 8"
    fedsynth(f"{base(code)} {options}").assert_refused(words)
