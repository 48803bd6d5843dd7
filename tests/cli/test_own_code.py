"""--model, --method and --features FILE.py:NAME: a user's own code, by name, and by hash
afterwards; and that nothing but what is named on the command line is ever executed."""

from __future__ import annotations

import json
import os
import py_compile
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.features.registry import _CUSTOM as CUSTOM_FEATURES
from fedsynth.methods import _CUSTOM
from fedsynth.own_code import load_own
from tests.interrupted import interrupted_in_round

Call = Callable[..., Any]
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


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of a user's own files."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "mine.py").write_text(METHOD)
    (tmp_path / "enc.py").write_text(FEATURES)
    (tmp_path / "helper.py").write_text("RATE = 0.5\n")
    return tmp_path


@pytest.fixture(autouse=True)
def registered() -> Any:
    """Forgets methods that a test has registered, as a new process would."""
    before = dict(_CUSTOM), dict(CUSTOM_FEATURES)
    yield
    for registry, names in zip((_CUSTOM, CUSTOM_FEATURES), before, strict=True):
        registry.clear()
        registry.update(names)


def forget() -> None:
    _CUSTOM.clear()
    CUSTOM_FEATURES.clear()


def base(code: Path, rounds: int = 1) -> str:
    return f"train --output {code / 'out'} --rounds {rounds} --clients 2 --device cpu"


def test_a_run_with_both_records_them_and_verifies(code: Path, fedsynth: Call) -> None:
    both = f"--method {code / 'mine.py'}:Mine --model {code / 'net.py'}:Net"
    done = fedsynth(f"{base(code)} {both} --set local_epochs=1 --set batch=128 --dp-sigma 3")
    assert done.code == 0, done.stderr
    folder = done.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["settings"]["lr"] == 0.5
    files = {key: one["file"] for key, one in summary["sources"].items()}
    assert files == {"method": "mine.py", "model": "net.py"}
    assert (folder / "sources" / "net.py").read_text() == NET
    assert str(code) not in (folder / "summary.json").read_text().replace(str(folder.parent), "")

    again = fedsynth(f"privacy verify {folder} {both}")
    assert (again.code, again.stdout[:10]) == (0, "the report")
    forget()
    forgotten = fedsynth(f"privacy verify {folder}")
    assert forgotten.code == 1
    assert "is mine, which was defined in the custom file 'mine.py:Mine@" in forgotten.stdout
    assert "name that file again" in forgotten.stdout
    (code / "mine.py").write_text(METHOD + "# changed\n")
    changed = fedsynth(f"privacy verify {folder} {both}")
    assert changed.code == 1
    assert "but the code that you named is mine.py:Mine@" in changed.stdout


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
        done = fedsynth(f"train --config {config} --output {code / 'out'}")
        assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert not (code / "evil.py.ran").exists()


@pytest.mark.parametrize(
    ("line", "option", "name", "text"),
    [
        (
            "--model linear --method {mine} --set local_steps=1",
            "--method {mine}",
            "mine.py",
            "run.method is mine, which was defined in the custom file 'mine.py:Mine@",
        ),
        (
            "--method fedstats --set features={enc}",
            "--features {enc}",
            "enc.py",
            "name that file again (model.features=PATH/enc.py:rows",
        ),
    ],
)
def test_a_killed_run_is_resumed_with_its_own_file_only(
    line: str,
    option: str,
    name: str,
    text: str,
    code: Path,
    fedsynth: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: --resume that cannot be, or uses another file."""
    own = {"mine": f"{code / 'mine.py'}:Mine", "enc": f"{code / 'enc.py'}:rows"}
    line, option = line.format(**own), option.format(**own)
    whole = fedsynth(f"{base(code, 2)} {line}")
    accuracy = json.loads((whole.folder / "summary.json").read_text())["test_accuracy"]
    shutil.rmtree(code / "out")
    with interrupted_in_round(2, monkeypatch):
        assert fedsynth(f"{base(code, 2)} {line}").code == 130
    (left,) = (code / "out").iterdir()
    forget()
    without = fedsynth(f"train --resume {left}")
    assert (without.code, without.stderr.count("\n")) == (2, 1)
    assert text in without.stderr
    content = (code / name).read_text()
    (code / name).write_text(content + "# changed\n")
    other = fedsynth(f"train --resume {left} {option}")
    assert other.code == 2
    assert re.search("code that you named is|has other settings", other.stderr)
    (code / name).write_text(content)
    done = fedsynth(f"train --resume {left} {option}")
    assert done.code == 0, done.stderr
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["test_accuracy"] == accuracy


@pytest.mark.parametrize(
    ("option", "name"),
    [("--features", "enc.py:rows"), ("--model", "net.py:Net"), ("--method", "mine.py:Mine")],
)
def test_a_run_without_an_own_file_takes_none_when_it_is_resumed(
    option: str, name: str, code: Path, fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a file that changes the run, or that is left out without an error."""
    with interrupted_in_round(2, monkeypatch):
        assert fedsynth(f"{base(code, 2)} --method fedstats").code == 130
    (left,) = (code / "out").iterdir()
    done = fedsynth(f"train --resume {left} {option} {code / name}")
    assert (done.code, "fedsynth: error: " in done.stderr) == (2, True)


def test_a_feature_map_from_a_file(code: Path, fedsynth: Call) -> None:
    """Catches: a map that no other command knows again, or one that changed unseen."""
    features = f"{code / 'enc.py'}:rows"
    done = fedsynth(f"{base(code, 2)} --dp-epsilon 8 --method fedavg --features {features}")
    assert done.code == 0, done.stderr
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["sources"]["features"]["file"] == "enc.py"
    assert (done.folder / "sources" / "enc.py").read_text() == FEATURES
    report = (done.folder / "privacy_report.md").read_text()
    assert "the feature map enc.py:rows@" in report

    forget()
    forgotten = fedsynth(f"privacy verify {done.folder}")
    assert forgotten.code == 1
    assert "enc.py:rows@" in forgotten.stdout
    again = fedsynth(f"privacy verify {done.folder} --features {features}")
    assert (again.code, again.stdout[:10]) == (0, "the report")
    forget()
    (code / "enc.py").write_text(FEATURES + "# changed\n")
    assert fedsynth(f"privacy verify {done.folder} --features {features}").code == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "which fails: ZeroDivisionError: division by zero"),
        ("cols = 3", "names 'rows', which"),
        (FEATURES.replace("x.mean(dim=(1, 3))", "x.mean(dim=(1, 3)).bernoulli()"), "draws random"),
    ],
)
def test_a_file_that_makes_no_feature_map_is_one_line(
    text: str, words: str, code: Path, fedsynth: Call
) -> None:
    (code / "enc.py").write_text(text + "\n")
    features = f"--method fedstats --set features={code / 'enc.py'}:rows"
    done = fedsynth(f"{base(code)} {features} --dp-epsilon 8")
    assert (done.code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert words in done.stderr
