"""FILE.py:NAME in options, config files and sweep files: only code that the user names is executed."""

from __future__ import annotations

import importlib
import os
import py_compile
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedsynth import register_method, register_model
from fedsynth.experiments.runner import run_sweep
from fedsynth.experiments.sweep import SweepError, read_sweep
from fedsynth.features.registry import _CUSTOM as CUSTOM_FEATURES
from fedsynth.methods import _CUSTOM
from fedsynth.own_code import LOADERS, SOURCES, load_own
from fedsynth.results.finished import finished_runs
from fedsynth.validation import to_toml
from tests.cli.conftest import Call
from tests.quick_runs import interrupt_in_round
from tests.raising import raises

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
DRAWN = """
import numpy as np
from fedsynth.features import FeatureMap

def rows(image_shape):
    scale = np.random.default_rng().random()
    return FeatureMap("rows", image_shape, 64, 8.0, 3.0, "random", lambda x: scale * x.flatten(1))
"""
FILES = {"net.py": NET, "mine.py": METHOD, "enc.py": FEATURES, "helper.py": "RATE = 0.5\n"}
OPTIONS = {
    "method": "--method {}/mine.py:Mine",
    "model": "--model {}/net.py:Net",
    "features": "--features {}/enc.py:rows",
}


def clear_registry() -> None:
    _CUSTOM.clear()
    CUSTOM_FEATURES.clear()


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    clear_registry()


def base(code: Path, rounds: int = 1) -> str:
    return f"train --output {code / 'out'} --rounds {rounds} --clients 2 --device cpu"


@pytest.mark.parametrize("kinds", [("method", "model"), ("features",)], ids=str)
def test_own_code_is_recorded(kinds: tuple[str, ...], code: Path, fedsynth: Call) -> None:
    options = " ".join(OPTIONS[kind].format(code) for kind in kinds)
    options += "" if "method" in kinds else " --method fedavg"
    run = fedsynth(f"{base(code)} {options} --set local_epochs=1 --set batch=128 --dp-sigma 3").ok
    folder, summary = run.folder, run.summary
    assert summary["settings"]["lr"] == 0.5 or "method" not in kinds
    assert set(summary["sources"]) == set(kinds)
    for source in summary["sources"].values():
        assert (folder / "sources" / source["file"]).read_text() == FILES[source["file"]]
    assert str(code) not in (folder / "summary.json").read_text().replace(str(folder.parent), "")

    verify = f"privacy verify {folder} " + options.replace("--method fedavg", "")
    assert fedsynth(verify).ok.stdout.startswith("the report")
    clear_registry()
    file = {"method": "mine.py:Mine@", "features": "enc.py:rows@"}[kinds[0]]
    unregistered = fedsynth(f"privacy verify {folder}")
    assert unregistered.code == 1
    assert file in unregistered.stdout
    clear_registry()
    changed = code / file.partition(":")[0]
    changed.write_text(changed.read_text() + "# changed\n")
    assert fedsynth(verify).code == 1


def test_partition_and_fidelity_load_own_encoders(code: Path, fedsynth: Call) -> None:
    assert "1438 examples" in fedsynth(f"partition --encoder {code}/enc.py:rows").ok.stdout
    clear_registry()
    run = fedsynth(f"{base(code)} --method feddm --set iterations=1 --set server_epochs=1").ok
    encoder = f"--encoder {code}/enc.py:rows --features pixels"
    measured = fedsynth(f"fidelity {run.folder} --dataset digits {encoder}").ok
    assert "160 synthetic" in measured.stdout


@pytest.mark.parametrize("same_time", [True, False], ids=["same-time", "unchecked"])
def test_hashed_source_is_executed(code: Path, same_time: bool) -> None:
    """Python's loader uses bytecode of the same size and time, or of the mode without a check."""
    file = code / "net.py"
    file.write_text(NET.replace("Net", "Bad"))
    mode = py_compile.PycInvalidationMode["TIMESTAMP" if same_time else "UNCHECKED_HASH"]
    py_compile.compile(str(file), invalidation_mode=mode)
    status = file.stat()
    file.write_text(NET)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    loaded, label = load_own("model", "name", f"{file}:Net")
    assert (loaded.__name__, SOURCES[label].text) == ("Net", NET)


def test_files_import_their_own_neighbours(tmp_path: Path) -> None:
    """Two copies of a file may lie beside different modules with the same name."""
    defaults = []
    for folder, rate in (("a", "0.5"), ("b", "0.25"), ("a", "0.5")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(METHOD)
        (tmp_path / folder / "helper.py").write_text(f"RATE = {rate}\n")
        defaults.append(load_own("run", "method", f"{tmp_path}/{folder}/mine.py:Mine")[0]().lr)
    assert defaults == [0.5, 0.25, 0.5]
    (tmp_path / "net.py").write_text(NET)
    load_own("model", "name", f"{tmp_path}/net.py:Net")
    assert sys.modules["helper"].RATE == 0.5  # which the first file may import again


def test_code_named_in_run_folder_is_never_executed(code: Path, fedsynth: Call) -> None:
    """Reading a foreign run folder must not run a program."""
    (code / "evil.py").write_text("open(__file__ + '.ran', 'w')\nclass Net: pass\n")
    config = code / "config.toml"
    for (section, key), (option, _) in LOADERS.items():
        method = {"features": "fedstats", "matching": "feddm"}.get(key, "fedavg")
        sections = {"run": {"method": method}}
        sections.setdefault(section, {})[key] = f"{code}/evil.py:Net"
        config.write_text(to_toml(sections))
        hint = f"Load it with {option} {code}/evil.py:Net"
        for command in (f"train --config {config}", f"train --config {code}"):
            fedsynth(f"{command} --output {code / 'out'}").assert_refused(hint)
        fedsynth(f"sweep {config} --dry-run").assert_refused("Copy the settings that you trust")
    assert not (code / "evil.py.ran").exists()


def test_config_and_sweep_files_name_own_code(
    code: Path, fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of a sweep are processes of their own, in which the code must be loaded, too."""
    grid = f"""
        [run]
        rounds = 1
        device = "cpu"
        [partition]
        clients = 2
        [method]
        local_steps = 1
        [grid]
        method = ["fedavg", "{code}/mine.py:Mine"]
        "model.name" = ["{code}/net.py:Net"]
        [grid."{code}/mine.py:Mine"]
        lr = [0.1]
    """
    (code / "skew.toml").write_text(grid)
    assert fedsynth(f"sweep {code}/skew.toml --output {code}/sweep").code == 0
    configs = [folder / "config.toml" for folder in finished_runs([code / "sweep"])]
    methods = {tomllib.loads(config.read_text())["run"]["method"] for config in configs}
    assert methods == {"fedavg", "mine"}

    clear_registry()
    config = code / "mine.toml"
    config.write_text(f'[run]\nmethod = "{code}/mine.py:Mine"\n[method]\nlocal_steps = 1\n')
    run = fedsynth(f"{base(code)} --config {config} --model linear").ok
    assert run.summary["settings"]["lr"] == 0.5
    (code / "deploy.toml").write_text(f'[run]\nmethod = "{code}/mine.py:Mine"\n')
    deploy = fedsynth(f"deploy init {code}/app --config {code}/deploy.toml")
    deploy.assert_refused("owners run only the installed package")

    clear_registry()
    monkeypatch.syspath_prepend(str(code))
    register_method(importlib.import_module("mine").Mine)
    named = code / "named.toml"
    named.write_text(grid.replace(f"{code}/mine.py:Mine", "mine"))
    sweep = replace(read_sweep(named), output=code / "named")
    assert run_sweep(sweep, print) == []
    register_model("tiny", torch.nn.Identity())
    named.write_text('[model]\nname = "tiny"\n')
    with raises(SweepError, "sweep.invalid"):
        read_sweep(named)


def test_client_models_name_own_code(code: Path, fedsynth: Call) -> None:
    option = f"--client-models {code}/net.py:Net,linear"
    line = f"{base(code)} --method feddf --model linear {option} --set local_steps=1"
    run = fedsynth(f"{line} --set server_steps=1 --set proxy=noise").ok
    assert run.summary["sources"]["client model 0"]["file"] == "net.py"


@pytest.mark.parametrize(
    ("line", "kind", "name"),
    [
        ("--model linear {method} --set local_steps=1", "method", "mine.py"),
        ("--method fedstats {features}", "features", "enc.py"),
    ],
)
def test_resume_needs_same_code(
    line: str, kind: str, name: str, code: Path, fedsynth: Call
) -> None:
    option = OPTIONS[kind].format(code)
    line = f"{base(code, 2)} {line.format(**{kind: option})}"
    complete = fedsynth(line)
    accuracy = complete.summary["test_accuracy"]
    shutil.rmtree(code / "out")
    with interrupt_in_round(2):
        interrupted = fedsynth(line)
    (folder,) = (code / "out").iterdir()
    assert interrupted.code == 130
    assert f"fedsynth train --resume {folder} {option}" in interrupted.stderr.replace("\n", " ")
    clear_registry()
    fedsynth(f"train --resume {folder}").assert_refused(name)
    content = (code / name).read_text()
    (code / name).write_text(content + "# changed\n")
    changed = fedsynth(f"train --resume {folder} {option}")
    assert changed.code == 2
    assert re.search("the loaded code is|does not match this run's settings", changed.stderr)
    (code / name).write_text(content)
    for other in OPTIONS:  # a file that the run did not use must not be ignored
        if other != kind:
            result = fedsynth(f"train --resume {folder} {option} {OPTIONS[other].format(code)}")
            assert (result.code, "fedsynth: error: " in result.stderr) == (2, True)
    resumed = fedsynth(f"train --resume {folder} {option}").ok
    assert resumed.summary["test_accuracy"] == accuracy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "which failed with ZeroDivisionError: division by zero"),
        ("cols = 3", "names 'rows', which"),
        (FEATURES.replace("x.mean(dim=(1, 3))", "x.mean(dim=(1, 3)).bernoulli()"), "draws random"),
        (DRAWN, "returns a different map at each call"),
    ],
)
def test_invalid_feature_maps_fail(text: str, message: str, code: Path, fedsynth: Call) -> None:
    (code / "enc.py").write_text(text + "\n")
    options = f"--method fedstats {OPTIONS['features'].format(code)} --dp-epsilon 8"
    fedsynth(f"{base(code)} {options}").assert_refused(message)
