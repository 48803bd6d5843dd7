"""--model, --method and --features FILE.py:NAME: a user's own code, by name, and by hash
afterwards; and that nothing but what is named on the command line is ever executed."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth import FedAvg, register_method
from fedsynth.errors import SettingError
from fedsynth.features.registry import _OWN as _OWN_FEATURES
from fedsynth.federation.outputs.verification import verify_run
from fedsynth.methods import _OWN, method_class
from fedsynth.own_code import load_own
from tests.interrupted import interrupted_in_round

Train = Callable[..., Any]
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
    before = dict(_OWN), dict(_OWN_FEATURES)
    yield
    for registry, names in zip((_OWN, _OWN_FEATURES), before, strict=True):
        registry.clear()
        registry.update(names)


def test_a_run_with_both_records_them_and_verifies(
    code: Path, train: Train, fedsynth: Callable[..., Any]
) -> None:
    method, model = f"{code / 'mine.py'}:Mine", f"{code / 'net.py'}:Net"
    local = ("--set", "local_epochs=1", "--set", "batch=128", "--dp-sigma", "3")
    done = train("real", "--method", method, "--model", model, *local)
    if done.code:  # `real`'s tiny options are not this method's
        done = fedsynth(
            *("train", "--output", str(code / "out"), "--rounds", "1", "--clients", "2"),
            *("--device", "cpu", "--method", method, "--model", model, *local),
        )
    assert done.code == 0, done.stderr
    folder = done.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["settings"]["lr"] == 0.5
    assert {key: one["file"] for key, one in summary["sources"].items()} == {
        "method": "mine.py",
        "model": "net.py",
    }
    assert (folder / "sources" / "net.py").read_text() == NET
    assert str(code) not in (folder / "summary.json").read_text().replace(str(folder.parent), "")

    again = fedsynth("privacy", "verify", str(folder), "--method", method, "--model", model)
    assert (again.code, again.stdout[:10]) == (0, "the report")
    _OWN.clear()
    forgotten = fedsynth("privacy", "verify", str(folder))
    assert forgotten.code == 1
    assert "is mine of 'mine.py:Mine@" in forgotten.stdout
    assert "it has to be given again" in forgotten.stdout
    (code / "mine.py").write_text(METHOD + "# changed\n")
    changed = fedsynth("privacy", "verify", str(folder), "--method", method, "--model", model)
    assert changed.code == 1
    assert "and what was given is another: mine.py:Mine@" in changed.stdout


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


@pytest.mark.parametrize(
    ("text", "why"),
    [("Net = 1 +", "SyntaxError"), ("raise SystemExit(0)", "SystemExit"), ("\0", "null bytes")],
)
def test_a_file_that_fails_is_one_line(code: Path, text: str, why: str) -> None:
    (code / "net.py").write_text(text)
    with pytest.raises(SettingError, match=why) as caught:
        load_own("model", "name", f"{code / 'net.py'}:Net")
    assert "\n" not in str(caught.value)


def test_a_file_that_changed_is_no_file_of_the_run(
    code: Path, fedsynth: Callable[..., Any]
) -> None:
    """Catches: a summary whose hash nobody compares."""
    method = f"{code / 'mine.py'}:Mine"
    done = fedsynth(
        *("train", "--output", str(code / "out"), "--rounds", "1", "--clients", "2", "--device"),
        *("cpu", "--model", "linear", "--method", method, "--dp-sigma", "3"),
        *("--set", "local_steps=1"),
    )
    assert done.code == 0, done.stderr
    summary = json.loads((done.folder / "summary.json").read_text())
    summary["sources"]["method"]["sha256"] = "0" * 64
    (done.folder / "summary.json").write_text(json.dumps(summary))
    assert [p for p in verify_run(done.folder).problems if "mine.py is another" in p]


def test_what_a_config_names_is_never_executed(code: Path, fedsynth: Callable[..., Any]) -> None:
    """Catches: a run folder from anybody that runs a program when it is read."""
    (code / "evil.py").write_text("open(__file__ + '.ran', 'w')\nclass Net: pass\n")
    places = (("model", "name"), ("run", "method"), ("method", "features"), ("model", "features"))
    for section, key in places:
        config = code / f"{section}-{key}.toml"
        config.write_text(f'[{section}]\n{key} = "{code / "evil.py"}:Net"\n')
        done = fedsynth("train", "--config", str(config), "--output", str(code / "out"))
        assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert not (code / "evil.py.ran").exists()


def test_a_killed_run_goes_on_with_its_own_file_alone(
    code: Path, fedsynth: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: --resume that cannot be, or goes on with another file."""
    method = f"{code / 'mine.py'}:Mine"
    run = ("train", "--output", str(code / "out"), "--clients", "2", "--device", "cpu", "--rounds")
    args = ("2", "--model", "linear", "--method", method, "--set", "local_steps=1")
    whole = fedsynth(*run, *args)
    accuracy = json.loads((whole.folder / "summary.json").read_text())["test_accuracy"]
    shutil.rmtree(code / "out")
    with interrupted_in_round(2, monkeypatch):
        assert fedsynth(*run, *args).code == 130
    (left,) = (code / "out").iterdir()
    _OWN.clear()
    alone = fedsynth("train", "--resume", str(left))
    assert alone.code == 2
    assert "--method is mine of 'mine.py:Mine@" in alone.stderr
    (code / "mine.py").write_text(METHOD + "# changed\n")
    other = fedsynth("train", "--resume", str(left), "--method", method)
    assert other.code == 2
    assert "and what was given is another" in other.stderr
    (code / "mine.py").write_text(METHOD)
    done = fedsynth("train", "--resume", str(left), "--method", method)
    assert done.code == 0, done.stderr
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["test_accuracy"] == accuracy


@pytest.mark.parametrize("option", ["--features", "--set"])
def test_a_feature_map_of_one_s_own_by_its_file(
    option: str, code: Path, fedsynth: Callable[..., Any]
) -> None:
    """Catches: a map that no other command knows again, or one that changed unseen."""
    features = f"{code / 'enc.py'}:rows"
    given = {
        "--set": ("--method", "fedstats", "--set", f"features={features}"),
        "--features": ("--method", "fedavg", "--features", features),
    }[option]
    done = fedsynth(
        *("train", "--output", str(code / "out"), "--clients", "2", "--device", "cpu"),
        *("--rounds", "2", "--dp-epsilon", "8", *given),
    )
    assert done.code == 0, done.stderr
    summary = json.loads((done.folder / "summary.json").read_text())
    assert summary["sources"]["features"]["file"] == "enc.py"
    assert (done.folder / "sources" / "enc.py").read_text() == FEATURES
    report = (done.folder / "privacy_report.md").read_text()
    assert "the feature map enc.py:rows@" in report

    _OWN_FEATURES.clear()
    forgotten = fedsynth("privacy", "verify", str(done.folder))
    assert forgotten.code == 1
    assert "enc.py:rows@" in forgotten.stdout
    again = fedsynth("privacy", "verify", str(done.folder), "--features", features)
    assert (again.code, again.stdout[:10]) == (0, "the report")
    _OWN_FEATURES.clear()
    (code / "enc.py").write_text(FEATURES + "# changed\n")
    changed = fedsynth("privacy", "verify", str(done.folder), "--features", features)
    assert changed.code == 1


def test_a_killed_run_on_one_s_own_features_goes_on(
    code: Path, fedsynth: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = f"{code / 'enc.py'}:rows"
    with interrupted_in_round(2, monkeypatch):
        cut = fedsynth(
            *("train", "--output", str(code / "out"), "--clients", "2", "--device", "cpu"),
            *("--rounds", "2", "--method", "fedstats", "--set", f"features={features}"),
        )
    assert cut.code == 130
    (left,) = (code / "out").iterdir()
    _OWN_FEATURES.clear()
    alone = fedsynth("train", "--resume", str(left))
    assert (alone.code, alone.stderr.count("\n")) == (2, 1)
    assert "given again (--features PATH/enc.py:rows" in alone.stderr
    (code / "enc.py").write_text(FEATURES + "# changed\n")
    other = fedsynth("train", "--resume", str(left), "--features", features)
    assert other.code == 2
    assert "and what was given is another: enc.py:rows@" in other.stderr
    (code / "enc.py").write_text(FEATURES)
    done = fedsynth("train", "--resume", str(left), "--features", features)
    assert done.code == 0, done.stderr


@pytest.mark.parametrize(
    ("option", "name"),
    [("--features", "enc.py:rows"), ("--model", "net.py:Net"), ("--method", "mine.py:Mine")],
)
def test_a_run_without_one_s_own_file_takes_none_when_it_goes_on(
    option: str,
    name: str,
    code: Path,
    fedsynth: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a file that is executed and then left out without a word."""
    with interrupted_in_round(2, monkeypatch):
        cut = fedsynth(
            *("train", "--output", str(code / "out"), "--clients", "2", "--device", "cpu"),
            *("--rounds", "2", "--method", "fedstats"),
        )
    assert cut.code == 130
    (left,) = (code / "out").iterdir()
    for file in code.glob("*.py"):
        file.write_text("open(__file__ + '.ran', 'w')\n" + file.read_text())
    done = fedsynth("train", "--resume", str(left), option, str(code / name))
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert f"{option} is " in done.stderr
    assert "has no such file of its own" in done.stderr
    assert not list(code.glob("*.ran"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows = 3", "must be a function from an image shape"),
        ("def rows(shape): return 3", "makes int, and should make a"),
        ("def rows(): return 3", "fails for images of shape (1, 8, 8): TypeError"),
        ("def rows(shape): return open('nowhere')", "FileNotFoundError"),
        (
            FEATURES.replace("x.mean(dim=(1, 3))", "x.mean(dim=(1, 3)).bernoulli()"),
            "the same image",
        ),
        (
            FEATURES.replace("x.mean(dim=(1, 3))", "x.mean(dim=(0, 1, 3)).expand(len(x), 8)"),
            "mixes",
        ),
    ],
)
def test_a_file_that_makes_no_feature_map_is_one_line(
    text: str, words: str, code: Path, fedsynth: Callable[..., Any]
) -> None:
    (code / "enc.py").write_text(text + "\n")
    done = fedsynth(
        *("train", "--output", str(code / "out"), "--method", "fedstats", "--rounds", "1"),
        *("--set", f"features={code / 'enc.py'}:rows", "--dp-epsilon", "8"),
    )
    assert (done.code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert words in done.stderr


def test_images_are_not_moved_through_a_map_without_derivative(
    code: Path, fedsynth: Callable[..., Any]
) -> None:
    """Catches: images that stay where they started, without a word."""
    plain = "lambda x: x.mean(dim=(1, 3))"
    (code / "enc.py").write_text(FEATURES.replace(plain, "lambda x: x.mean(dim=(1, 3)).detach()"))
    features = f"features={code / 'enc.py'}:rows"
    run = ("train", "--output", str(code / "out"), "--method", "fedstats", "--rounds", "1")
    done = fedsynth(*run, "--set", features, "--set", "ipc=4", "--dp-epsilon", "20")
    assert (done.code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "--ipc must be 0: the feature map has no derivative" in done.stderr
    drawn = fedsynth(*run, "--set", features, "--set", "drawn_ipc=4", "--dp-epsilon", "20")
    assert drawn.code == 0, drawn.stderr


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("{}/nothing.py:Net", "which cannot be read: No such file"),
        ("{}/net.py:Nett", "names 'Nett', which"),
        ("{}/broken.py:Net", "which fails: ZeroDivisionError: division by zero"),
        ("{}/net.py:nn", "must be a module, or a class or function|must take image_shape"),
    ],
)
def test_files_that_cannot_be_used_are_one_line(
    code: Path, fedsynth: Callable[..., Any], given: str, text: str
) -> None:
    import re

    (code / "broken.py").write_text("1 / 0\n")
    done = fedsynth("train", "--method", "fedavg", "--model", given.format(code))
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert re.search(text, done.stderr)
    assert "--model" in done.stderr


def test_a_class_that_is_no_method_is_refused(code: Path, fedsynth: Callable[..., Any]) -> None:
    done = fedsynth("train", "--method", f"{code / 'net.py'}:Net")
    assert done.code == 2
    assert "--method must be a class that inherits fedsynth.Method" in done.stderr
    with pytest.raises(SettingError, match="that no method of the package has, got 'fedavg'"):
        register_method(FedAvg)
    assert method_class("fedavg") is FedAvg
