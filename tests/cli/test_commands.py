"""Commands, the installed script, runs on a user's images, and user errors of one line."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedsynth as library
from fedsynth.cli.application import PACKAGE
from fedsynth.data.images import normalise
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import DataFilesMissingError
from fedsynth.experiments.runner import Outcome, Runner
from fedsynth.federation.context import choose_speed
from fedsynth.federation.protocol import Observer
from fedsynth.formatting import format_epsilon
from fedsynth.methods import METHODS, method_class
from fedsynth.models.registry import ModelSettings
from fedsynth.results import run_messages
from fedsynth.results.saved_model import Architecture, write_model
from fedsynth.validation import read_sections
from tests.cli.conftest import Call
from tests.fuzz.mutations import CommandFailedError, command, time_limit
from tests.quick_runs import quick_sections
from tests.user_files import make_image_folder, make_special_file, write_image

SCRIPT = Path(sysconfig.get_path("scripts")) / "fedsynth"


def test_partition_prints_examples_per_client(fedsynth: Call, train: Call) -> None:
    result = fedsynth("partition --clients 3").ok
    lines = result.stdout.splitlines()
    assert sum(int(line.split()[1]) for line in lines[1:4]) == 1438
    assert result.stdout != fedsynth("partition --clients 3 --seed 1").stdout
    table = (train("real").folder / "simulation_only" / "partition.txt").read_text(encoding="utf-8")
    assert fedsynth("partition --clients 2").stdout.startswith(table.rstrip())


def test_methods_are_listed_and_their_settings_explained(fedsynth: Call) -> None:
    listed = fedsynth("methods")
    classes = {name: method_class(name) for name in sorted(METHODS)}
    lines = [f"{name:10} {cls.summary} ({cls.reference})" for name, cls in classes.items()]
    assert listed.stdout.splitlines() == lines
    feddm = fedsynth("methods show feddm").stdout
    for text in ("ipc = 10", "residual, gradient, features, paper", "images: released"):
        assert text in feddm
    first = "uploads in a first exchange (FeatureSums):\n  sums: released\n  counts: released"
    assert first in fedsynth("methods show fedfm").stdout
    assert "refused: the clients send real images" in fedsynth("methods show real").stdout
    assert fedsynth("methods show examples/own_method.py:FedAdam").stdout.count("server_lr")
    assert ">>>" not in feddm  # examples are for the Python interface


def test_runs_command_compares_runs(train: Call, fedsynth: Call) -> None:
    output = train("fedprox --model linear --set mu=0.1").output
    train("fedprox --model linear --set mu=0.5 --local-test 0.2")
    train("fedavg --model linear --dp-epsilon 8 --set weight_decay=0.1")
    (output / "20990101-000000-fedavg-digits.incomplete").mkdir()
    absent = fedsynth(f"runs {output}/absent --json")
    code_and_message = {
        "code": "files.run",
        "message": absent.stderr[len("fedsynth: error: ") : -1],
    }
    assert json.loads(absent.stdout) == {"error": code_and_message}
    rows = json.loads(fedsynth(f"runs {output} --json").stdout)
    assert [row["method"] for row in rows] == ["fedprox", "fedprox", "fedavg"]
    assert [row["settings"].get("mu") for row in rows] == [0.1, 0.5, None]
    # another method's weight decay is another setting
    assert "weight_decay" not in rows[2]["settings"]
    # equal settings are omitted
    assert all("clients" not in key for row in rows for key in row["settings"])
    for row in rows:
        summary = json.loads((output / row["run"] / "summary.json").read_text())
        for key in ("test_accuracy", "upload_bytes", "differential_privacy"):
            assert row.get(key) == summary.get(key)
    lines = fedsynth(f"runs {output}").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["fedprox", "fedprox", "fedavg"]
    assert f"{100 * rows[1]['local']['amp']:.2f} %" in lines[2]
    assert lines[2].endswith("mu=0.5")


def test_damaged_summaries_are_rejected(fedsynth: Call, tmp_path: Path) -> None:
    summary = tmp_path / "broken" / "summary.json"
    summary.parent.mkdir()
    for text in ("{", "[]"):
        summary.write_text(text)
        fedsynth(f"runs {tmp_path}").assert_refused("")
    summary.write_text('{"method": "a", "test_accuracy": null}')
    assert "accuracy" not in fedsynth(f"runs {tmp_path}").ok.stdout


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("student")
    method = library.FedStats(ipc=2, drawn_ipc=4)
    settings = library.RunSettings(method, rounds=3, privacy=library.PrivacySettings(epsilon=20.0))
    run = library.simulate(settings, output=root / "runs", quiet=True)
    library.export_run(str(run.folder), root / "share", with_model=True)
    return root / "share"


def test_student_trains_on_exported_set(
    share: Path, fedsynth: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_messages, "PRINT_SECONDS", 0)
    model_file = tmp_path / "mine.safetensors"
    options = f"--model linear --steps 20 --copies 1 --dataset digits --output {model_file}"
    run = fedsynth(f"student {share} {options}").ok
    assert "trained on: 60 images, soft labels\n" in run.stdout
    epsilon = format_epsilon(library.load_synthetic(share).epsilon or 0.0)
    assert f"guarantee: ε = {epsilon} at δ = 1e-05, as for the synthetic images" in run.stdout
    assert " % of 359 real test images" in run.stdout
    assert "training step 5/20, about 0:00:0" in run.stderr
    assert re.search(r"training: 20 steps in \d+\.\d s\n", run.stdout)
    _, test = library.load_dataset("digits")
    with torch.no_grad():
        x = torch.as_tensor(normalise(test.images, test.spec))
        scores = library.load_model(model_file)(x).double().softmax(dim=1)
    pairs = []  # of a positive and a negative example
    for label, of_label in enumerate(scores.T):
        belongs = test.labels == label
        difference = of_label[belongs][:, None] - of_label[~belongs]
        pairs.append(difference.sign().mean() / 2 + 0.5)
    assert f"AUROC: {100 * sum(pairs) / 10:.2f} %" in run.stdout
    for options, text in {
        "--output .": ". is a folder",
        "--labels sof": "labels cannot be 'sof'",
        "--teacher nowhere": "nowhere is not a model file",
        "--dataset 'synthetic(1,1)'": "data.dataset=synthetic(1,1) does not have the synthetic set's image shape",
        "--dataset digits --test-data x": "and data.test_folder are both set",
        f"--test-data {make_image_folder(tmp_path / 'scans', ('a',))}": "does not have (0, 1",
    }.items():
        fedsynth(f"student {share} {options}").assert_refused(text)


def test_fidelity_compares_set_with_real_images(
    share: Path, fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_messages, "PRINT_SECONDS", 0)
    run = fedsynth(f"fidelity {share} --dataset digits --features {share}").ok
    assert re.match(r"FID: [\d.]+\nKID: .* over subsets of 60 images\n", run.stdout)
    assert "compared: 60 synthetic and 359 real images, " in run.stdout
    assert "real images 359/359, about" in run.stderr
    fedsynth(f"fidelity {share} --features pixels").assert_refused("--test-data or --dataset")


DISTILL = (
    "distill --width 4 --depth 2 --set server_epochs=2 --set generator_steps=2 "
    "--set generator_width=4 --set generator_batch=8"
)


def made_model(path: Path, name: str, seed: int, data: str = "digits") -> Path:
    architecture = Architecture(dataset_spec(data), ModelSettings(name, width=4, depth=2))
    write_model(path, architecture.network(seed), architecture)
    return path


def test_distill_combines_different_architectures(
    tmp_path: Path, fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_messages, "PRINT_SECONDS", 0)
    first = made_model(tmp_path / "a.safetensors", "convnet", 1)
    second = made_model(tmp_path / "b.safetensors", "resnet8", 2)
    model_file = tmp_path / "out" / "student.safetensors"
    run = fedsynth(
        f"{DISTILL} {first} {second} --student cnn1 --evaluate "
        f"--method fedhydra --set stratification_steps=2 --output {model_file}"
    ).ok
    assert run.stdout.count("test accuracy") == 3
    assert re.search(r" 1/2, about 0:00:0", run.stderr)
    assert "batch-norm loss cannot use the models of clients 0, 1" in run.stdout
    again = fedsynth(f"{DISTILL} {model_file} --output {tmp_path}/second.safetensors").ok
    assert "batch-norm" not in again.stdout
    images = tmp_path / "real"
    for name in ("3", "7"):
        write_image(images / name / "1.png", 1)
    tested = fedsynth(f"{DISTILL} {model_file} --test-data {images} --output {tmp_path}/third").ok
    assert tested.stdout.count("test accuracy") == 2
    student = library.load_model(tmp_path / "second.safetensors")
    assert student.state_dict().keys() == library.load_model(model_file).state_dict().keys()


def test_invalid_model_files_are_rejected(
    tmp_path: Path, fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken").write_bytes(b"nonsense")
    made_model(Path("other"), "linear", 1, "mnist")
    state = load_file(made_model(Path("a"), "convnet", 1))
    with safe_open("a", framework="pt") as file:
        facts = file.metadata()
    values = {torch.float32: float("nan"), torch.complex64: 1, torch.int32: 1, torch.float64: 1e300}
    for dtype, value in values.items():
        weights = {key: torch.full_like(old, value, dtype=dtype) for key, old in state.items()}
        save_file(weights, str(dtype).removeprefix("torch."), facts)
    for options, text in {
        "a other": "files must have the image shape",
        "a --student convent": "did you mean convnet",
        "broken": "cannot be used",
        "float32": "contains NaN or infinite",
        "complex64": "complex64",
        "int32": "int32",
        "float64": "contains NaN or infinite",
        "a --set crop=2": "method.crop must be between 0 and 0.5",
    }.items():
        fedsynth(f"{DISTILL} {options} --output s").assert_refused(text)
    fedsynth("distill a --method feddm").assert_refused(
        "run.method=feddm does not support distillation"
    )


def test_reproduce_lists_settings_and_sources(fedsynth: Call) -> None:
    assert "feddm:table2" in fedsynth("reproduce").stdout
    table = fedsynth("reproduce --list feddm:table2 --alpha 0.1").stdout
    for text in ("method.iterations=1000", "Sec. 4.1, Hyperparameters", "67.38 ± 0.32"):
        assert text in table
    refused = fedsynth("reproduce fedkf:table4")
    assert refused.code == 2
    assert "none of the selected table cells of fedkf:table4 can run" in refused.stderr


def test_reproduce_runs_changed_cell(fedsynth: Call, tmp_path: Path) -> None:
    line = f"reproduce {CELL} --output {tmp_path / 'found'}"
    changes = "--set run.rounds=2 --set local_epochs=1"
    first = fedsynth(f"{line} {changes}").ok
    assert "changed: no verdict" in first.stdout
    second = fedsynth(f"{line} {changes}")
    assert "existing" in second.stderr
    assert "unfinished" not in second.stderr
    whole = fedsynth(f"{line} --time-budget 0")
    assert "not run" in whole.stdout
    assert "not begun" in whole.stderr


def test_claims_are_not_judged_with_changed_methods(fedsynth: Call, tmp_path: Path) -> None:
    """Regression: another method of the claims, which lacks the setting, ended the command."""
    line = f"reproduce feddm:table2 --edition small --method feddm --output {tmp_path / 'found'}"
    changed = fedsynth(f"{line} --time-budget 0 --set image_dtype=uint8").ok
    assert "not run" in changed.stdout
    assert "ahead" not in changed.stdout
    assert "claims are not judged" in changed.stderr
    assert "ahead" not in fedsynth(f"{line} --time-budget 0").stdout  # no run is finished


def test_reproduce_reports_failed_runs_and_ineffective_options(
    fedsynth: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the exit code was 0, and the options had no effect."""
    for options in ("--edition small", "--seeds 2", "--set local_epochs=1", "--method fedavg"):
        fedsynth(f"reproduce {options}").assert_refused("Name one of the tables")
    fedsynth("reproduce feddm:table3 --edition small").assert_refused("has no smaller editions")
    outcomes = [Outcome("failed", "no file", DataFilesMissingError("no file")), Outcome("existing")]
    monkeypatch.setattr(Runner, "run", lambda self, jobs: iter(outcomes))
    refused = fedsynth(f"reproduce {CELL} --output {tmp_path / 'found'}")
    assert refused.code == 1
    assert "1 of 2 runs failed" in refused.stderr


def test_train_uses_preset_of_table(fedsynth: Call, tmp_path: Path) -> None:
    line = f"train --output {tmp_path / 'out'} --preset"
    options = "--dataset 'synthetic(0,0)' --rounds 1 --set local_epochs=1 --seed 4"
    run = fedsynth(f"{line} fedprox:synthetic {options}").ok
    assert run.stderr.startswith("preset fedprox:synthetic (FedProx (arXiv 1812.06127), Figures")
    settings = library.resolve(read_sections(run.folder / "config.toml"))
    changes = {"run": {"rounds": 1}, "method": {"local_epochs": 1}}
    cell = {"dataset": "synthetic(0,0)", "method": "fedprox"}
    preset = library.load_preset("fedprox:synthetic", **cell, seed=4, changes=changes)
    assert settings == choose_speed(preset, torch.device("cpu"))
    fedsynth(f"{line} feddm:table2 --method moon").assert_refused("no experiment with method moon")


def test_installed_script_works_in_ascii_locale(tmp_path: Path) -> None:
    def script(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        env = {**os.environ, "PYTHONIOENCODING": "ascii"}
        return subprocess.run([SCRIPT, *arguments], capture_output=True, cwd=tmp_path, env=env)

    rejected = script("train", "--bogus")
    assert (rejected.returncode, rejected.stdout) == (2, b"")
    assert rejected.stderr.startswith(b"fedsynth: error: No such option: --bogus")
    assert rejected.stderr.count(b"\n") == 1
    ascii_only = script("train", "--help")
    assert ascii_only.returncode == 0, ascii_only.stderr
    assert b"--dp-epsilon" in ascii_only.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_runs_with_exit_code(number: int, code: int, tmp_path: Path) -> None:
    options = "--dp-sigma 3 --rounds 400 --set iterations=2 --subset 0.2 --device cpu"
    run = subprocess.Popen(
        [SCRIPT, "train", "--output", tmp_path, *options.split()],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # background jobs of a shell and their children ignore SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    lines = iter(run.stderr or [])
    assert any("round 2/400" in line for line in lines)
    run.send_signal(number)
    rest = "".join(lines)
    assert run.wait(60) == code
    (folder,) = tmp_path.iterdir()
    assert "of 400 rounds. Spent: ε = " in rest
    assert f"To resume: fedsynth train --resume {folder}" in rest


FAULTS = """
import resource
import numpy as np
from fedsynth.cli.application import keep_large_allocations

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.empty(10_000_000, dtype=np.float32).fill(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), keep_large_allocations() and faults() and faults())
"""


def python(code: str, *args: str, **more: Any) -> str:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, **more).stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc here")
def test_freed_memory_is_reused_without_faults() -> None:
    default, kept = map(int, python(FAULTS).split())
    assert kept < 0.3 * default


def test_garbage_is_collected_again_after_imports() -> None:
    """Collections are suspended in the block only, and later ones skip what it imported."""
    code = (
        "import gc; from fedsynth.cli.application import imports_without_gc\n"
        "try:\n"
        "    with imports_without_gc(): suspended = not gc.isenabled(); import absent\n"
        "except ImportError: print(suspended, gc.isenabled(), gc.get_freeze_count() > 1000)"
    )
    assert python(code).split() == ["True", "True", "True"]


@pytest.mark.parametrize("policy", [None, "active"])
def test_threads_wait_passively_by_default(policy: str | None) -> None:
    """The policy is set before the import of torch, which reads it."""
    code = (
        "import os, sys; from fedsynth.cli import app as a;"
        "a.app = lambda: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules); a.main()"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
    assert python(code, env=environment).split() == [policy or "PASSIVE", "False"]


def test_commands_that_train_nothing_import_no_heavy_libraries(train: Call) -> None:
    run = str(train("fedavg --dp-epsilon 8").folder)
    code = (
        "import atexit, sys; from fedsynth.cli.app import main;"
        "atexit.register(lambda: print(*sys.modules)); main()"
    )
    for heavy, line in (
        ("torch numpy scipy opacus torchvision", "train --help"),
        *(("torch", light) for light in ("methods", f"runs {run}", f"privacy report {run}")),
    ):
        loaded = python(code, *line.split()).splitlines()[-1].split()
        assert "fedsynth.cli.app" in loaded
        assert not {*heavy.split()} & {*loaded}, line


SHORT = (
    "--rounds 1 --width 4 --depth 2 --ipc 1 --device cpu --set iterations=1 --set server_epochs=1 "
    "--set min_examples=1"
)


N = 48
Y = np.arange(N) % 2
ALICE = [f"p{number // 3}" for number in range(N)]
SITES = np.where(np.arange(N) < 24, "north", "south")
VECTORS = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32) + Y[:, None]


def write_parquet(path: Path, **columns: Any) -> Path:
    features = {f"e{column}": VECTORS[:, column] for column in range(4)}
    pandas.DataFrame({**features, "diagnosis": Y, **columns}).to_parquet(path)
    return path


def sign(file: Path) -> str:
    text = file.read_text().replace('by = ""', 'by = "me"')
    return text.replace('date = ""', 'date = "2026-11-23"')


def write_arrays(path: Path, x: Any, **arrays: Any) -> Path:
    np.savez(path, x=x, y=np.arange(len(x)) % 2, **arrays)
    return path


def write_manifest(root: Path) -> Path:
    images = [path.relative_to(root).as_posix() for path in make_image_folder(root).rglob("*.png")]
    rows = [f"{path},{path.split('/')[1]},{path.split('/')[0]},{path[:7]}" for path in images]
    (root / "manifest.csv").write_text("\n".join(("path,label,site,patient_id", *rows)))
    return root


BYTES = np.arange(N * 64).astype(np.uint8).reshape(N, 8, 8)
# The data, options of `describe`, the number of proposed commands, and whether patients are known.
DESCRIBED: dict[str, tuple[Callable[[Path], Path], str, int, bool]] = {
    "sites": (lambda tmp: make_image_folder(tmp / "my scans"), "--image-size 8", 2, False),
    "one owner": (lambda tmp: make_image_folder(tmp / "scans", ()), "--image-size 8", 1, False),
    "manifest": (lambda tmp: write_manifest(tmp / "scans"), "--image-size 8", 2, True),
    "table": (
        lambda tmp: write_parquet(tmp / "t.parquet", case=ALICE),
        "--label-column diagnosis --user-column case --bounds=-4,4", 1, True,
    ),
    "patients at several sites": (
        lambda tmp: write_parquet(tmp / "t.parquet", patient_id=ALICE, ward=[*SITES[1:], "north"]),
        "--label-column diagnosis --site-column ward --feature-columns e0,e1", 1, True,
    ),
    "arrays": (
        lambda tmp: write_arrays(tmp / "a.npz", VECTORS, site=SITES, PatientID=ALICE),
        "--output other.toml", 2, True,
    ),
    "pixels": (lambda tmp: write_arrays(tmp / "a.npz", BYTES), "", 1, False),
    "series": (lambda tmp: write_arrays(tmp / "a.npz", np.ones((N, 2, 1, 16))), "", 1, False),
    "many": (lambda tmp: write_arrays(tmp / "a.npz", np.zeros((60_000, 1), np.uint8)), "", 1, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", DESCRIBED)
def test_proposed_commands_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedsynth: Call
) -> None:
    """Each runs as printed, on a copy of the data, because both have other ledgers."""
    write, options, count, has_patients = DESCRIBED[kind]
    for number in range(count):
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        described = fedsynth(f"data describe '{write(place)}' {options}").ok.stdout
        lines = re.findall(r"^  fedsynth (.*)$", described, re.MULTILINE)
        assert len(lines) == count
        assert all(("--dp-unit user" in line) == has_patients for line in lines)
        (file,) = (Path(line) for line in re.findall("written: (.*)", described))
        file.write_text(sign(file).replace("bounds = []", "bounds = [-4, 4]"))
        line = lines[number].partition("  #")[0]
        if kind == "patients at several sites":
            assert "users: 16, of whom 2 have records at several sites" in described
            train = line.replace("synthesize", "train --method fedstats").replace("--out share", "")
            refusal = "partition.kind=iid, partition.clients=1"
            assert refusal in fedsynth(train).stderr
            assert fedsynth(f"{train} --partition iid --clients 1 --dry-run").ok
        assert fedsynth(line).ok


def test_folder_becomes_exported_set(tmp_path: Path, fedsynth: Call) -> None:
    """The steps of the documentation: describe, sign, synthesize, load."""
    folder = make_image_folder(tmp_path / "scans")
    share = tmp_path / "share"
    runs = f"--output {tmp_path / 'runs'}"
    synthesize = f"synthesize --data {folder} --dp-epsilon 8 --out {share} {SHORT} {runs}"
    fedsynth(synthesize).assert_refused(f"Run fedsynth data describe {folder}, then")

    described = fedsynth(f"data describe {folder}").ok
    assert "sites 0: north, 1: south" in described.stdout
    toml = folder / "fedsynth.toml"
    assert f"written: {toml}" in described.stdout
    draft = toml.read_text()
    toml.write_text(draft.replace('person = "person"', 'person = "patient"'))
    fedsynth(f"data describe {folder}").assert_refused("replace this one with --overwrite")
    assert "patient" in toml.read_text()
    assert fedsynth(f"data describe {folder} --overwrite").ok
    assert toml.read_text() == draft
    assert fedsynth(f"data describe {folder}").ok  # which changes nothing

    assert "is not signed. " in fedsynth(synthesize).stderr
    toml.write_text(sign(toml))
    assert "is signed" in fedsynth(f"data describe {folder}").stderr
    planned = json.loads(fedsynth(f"{synthesize} --dry-run --json").stdout)
    assert not [path for path in (share, tmp_path / "runs") if path.exists()]
    open_run = fedsynth(f"synthesize --data {folder} --out {share} --dry-run")
    open_run.assert_refused("privacy.epsilon must be set")
    result = fedsynth(f"{synthesize} --responsible 'Klinikum Mitte'").ok
    assert "Klinikum Mitte" in (share / "privacy_report.md").read_text()
    ledger = json.loads((share / "privacy_report.json").read_text())["ledger"]
    assert ledger[0]["noise_multiplier"] == pytest.approx(planned["noise_multiplier"])
    assert f"you may share the folder {share}" in result.stderr
    synthetic = library.load_synthetic(share)
    assert synthetic.epsilon <= 8
    fedsynth(f"privacy verify {share}").assert_refused("Verify the run folder")

    (run_folder,) = (tmp_path / "runs").iterdir()
    assert fedsynth(f"export {run_folder} --out {tmp_path / 'again'}").ok
    second = library.load_synthetic(tmp_path / "again")
    assert second.images.equal(synthetic.images)
    assert (second.epsilon, second.spec) == (synthetic.epsilon, synthetic.spec)


def test_synthesize_continues_a_shared_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedsynth: Call
) -> None:
    """The commands of docs/periods.md."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/periods.md").read_text("utf-8")
    commands = re.findall("^fedsynth (synthesize .*)", page, re.MULTILINE)
    for seed, month in enumerate(("january", "february", "march")):
        for number in range(12):
            label = "ill" if number % 2 else "well"
            write_image(tmp_path / month / label / f"{number}.png", 100 * seed + number)
        assert fedsynth(f"data describe {month} --name scans").ok
        toml = tmp_path / month / "fedsynth.toml"
        text = re.sub("(?m)^ledger = .*", 'ledger = "../scans-ledger"', sign(toml))
        toml.write_text(text)
    small = " --set ipc=1 --set drawn_ipc=0 --set image_steps=1 --set features=pixels"
    for number, line in enumerate(commands):
        assert fedsynth(line + small * (number == 0)).ok
    report = (tmp_path / "share-3" / "privacy_report.md").read_text("utf-8")
    assert "period 3 of 12" in report
    refused = fedsynth("synthesize --continue share-3 --data march --dp-epsilon 9 --out share-4")
    refused.assert_refused("privacy.epsilon cannot be changed")


def test_train_prints_names_of_damaged_files(tmp_path: Path, fedsynth: Call) -> None:
    folder = make_image_folder(tmp_path / "scans")
    (folder / "north" / "ill" / "00.png").write_bytes(b"x")
    write_image(folder / "north" / "ill" / "big.png", 1, (20, 20))
    line = f"train --data {folder} --output {tmp_path / 'out'} {SHORT}"
    fedsynth(f"{line} --image-size 16").assert_refused("--skip-corrupt (data.skip_corrupt=True)")
    assert "--image-size 16x16" in fedsynth(f"{line} --skip-corrupt").stderr
    result = fedsynth(f"{line} --image-size 16 --skip-corrupt").ok
    assert "  north/ill/00.png (the file is not a JPEG, PNG, BMP, WEBP, TIFF file)" in result.stderr
    for path in result.folder.rglob("*"):  # file names are only printed
        assert path.is_dir() or b"00.png" not in path.read_bytes()


def test_simulate_prints_progress_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    settings = library.resolve(quick_sections("fedavg"))
    library.simulate(settings)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "round 2/2" in captured.err
    library.simulate(settings, quiet=True)
    library.simulate(settings, observer=Observer())
    assert capsys.readouterr() == ("", "")


def test_early_ends_print_epsilon_and_folder(train: Call) -> None:
    run = train("feddm --rounds 2 --dp-sigma 3 --dp-epsilon 1.5").ok
    spent = format_epsilon(run.summary["differential_privacy"]["epsilon"])
    line = run.stderr.splitlines()[-1]
    assert line.startswith("ended after 1 of 2 rounds: client")
    assert f". Spent: ε = {spent} at δ" in line
    assert line.endswith(f". The results are in {run.folder}")


CELL = "fedprox:synthetic --dataset 'synthetic(0,0)' --cell '90 %' --method fedprox"
LINES = (
    ("feddm --method feddmm", "unknown method 'feddmm'; did you mean feddm"),
    ("feddm --dataset mnits", "unknown data set 'mnits'; did you mean mnist"),
    ("feddm --set ipc", "--set must be KEY=VALUE or SECTION.KEY=VALUE, got 'ipc'"),
    ("feddm --bogus 3", "No such option: --bogus"),  # errors of the parser
    ("feddm --dp-sigma big", "'--dp-sigma'"),
    ("feddm --rounds 1.5", "'--rounds'"),
    ("feddm surplus", "surplus"),
    ("fedavg --client-models cnn1", "model.clients cannot be used with fedavg"),
    ("feddm --dataset mnist", "data.data_root"),
    (
        "feddm --dataset mnist --data-root {tmp}",
        "Run `fedsynth partition --dataset mnist --data-root DIR",
    ),
    ("feddm --output {tmp}/file/runs", "cannot write {tmp}/file/runs"),
    ("feddm --dp-sigma 1 --dp-ledger {tmp}/file", "cannot use ledger folder {tmp}/file"),
    ("feddm --config {tmp}/absent.toml", "cannot read the config file {tmp}/absent.toml"),
    ("fedavg --preset feddm:table2 --config c.toml", "--preset and --config both define"),
    ("fedavg --dp-ledger ''", "ledger must be a folder"),  # an unset variable
    ("fedavg --dp-sigma 3 --dp-ledger ' '", "ledger must be a folder"),
    ("feddm --resume {tmp}", "--method cannot be used with --resume"),
    ("privacy plan", "neither --dp-epsilon nor --dp-sigma is set"),
    (f"privacy audit --dp-sigma 1 --canaries {10**30}", "canaries must be at most 1e+07"),
    ("privacy audit --dp-sigma 1 --confidence 1e-320", "confidence must be in [0.5, 1)"),
    ("privacy audit --rounds 1", "Set --dp-sigma, --dp-epsilon, or --run"),
    ("server --insecure --port 99999", "'--port': Input should be less than or equal to"),
    ("deploy init A --spec /nothing.toml", "is not a data set specification"),
    (f"reproduce {CELL} --time-budget -1", "'--time-budget': Input should be greater than or"),
    (f"reproduce {CELL} --set method.nu=1", "unknown setting of fedprox 'nu'"),
)


@pytest.mark.parametrize(("line", "text"), LINES)
def test_user_errors_print_one_line(
    train: Call, fedsynth: Call, tmp_path: Path, line: str, text: str
) -> None:
    (tmp_path / "file").write_text("a file, and no folder")
    run = (train if line.split()[0] in METHODS else fedsynth)(line.format(tmp=tmp_path))
    run.assert_refused(text.format(tmp=tmp_path))
    assert not run.output.exists() or not list(run.output.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_missing_cuda_is_rejected(train: Call) -> None:
    train("feddm --device cuda").assert_refused("finds no CUDA device")


def test_invalid_configs_are_rejected(train: Call, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    for toml, text in {
        "[run\n": "is not valid TOML",
        "rounds = 3\n": "is outside of all sections",
        "[metod]\nipc = 1\n": "unknown section 'metod'; did you mean method",
    }.items():
        path.write_text(toml)
        train(f"feddm --config {path}").assert_refused(text)


def test_errors_of_all_settings_are_in_one_message(train: Call) -> None:
    """Regression: each error hides the next one until it is corrected."""
    line = "feddm --set ipcs=2 --set iterations=x --set model.depth=0 --set partition.alpha=-1"
    run = train(line)
    for text in ("of feddm 'ipcs'; did you mean ipc", "method.iterations", "model.depth"):
        run.assert_refused(text)
    run.assert_refused("fedsynth: error: partition.alpha must be")
    text = "method.image_lr must be at least 0, got -1.0. Also: method.image_momentum must be"
    train("feddm --set image_lr=-1 --set image_momentum=2").assert_refused(text)


READ = tuple(line.strip() for line in """
    train --config={}
    train --dp-sigma=3 --dp-ledger={}
    train --dp-ledger={}
    train --model={}:Net
    runs {}
    distill {}
    privacy report {}
    privacy verify {}
    privacy verify x --ledger={}
    privacy verify x --public-key={}
    privacy sign {} --key=x
    privacy sign x --key={}
    privacy repair {}
    privacy carry-over {} north
    privacy spent {}
    privacy audit --run={}
    sweep {}
    student {}
    fidelity {} --features=x
    deploy init A --spec={}
""".strip().splitlines())  # fmt: skip
PATHS = (*READ, "train --output={}", "train --data-root={} --dataset=mnist")


@pytest.mark.parametrize("line", PATHS)
def test_impossible_and_special_files_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """The home folder of an unknown user, a loop of links, and a name that is too long."""

    def error_of(name: str) -> str:
        with time_limit(20), pytest.raises(CommandFailedError) as caught:
            command(*(word.format(name) for word in line.split()))
        return str(caught.value)

    monkeypatch.chdir(tmp_path)
    assert "home" in error_of("~nobody-of-that-name/x.py")
    assert list(tmp_path.iterdir()) == []  # no folder was created
    error_of("x" * 5000)
    Path("loop").symlink_to("loop")
    error_of("loop")
    for kind in ("pipe", "device", "large") if line in READ else ():
        error_of(str(make_special_file(tmp_path / "x.py", kind)))


def test_non_utf8_names_are_rejected(train: Call, tmp_path: Path) -> None:
    """config.toml is UTF-8 and cannot contain the name."""
    result = train("fedavg --dp-sigma 3 --dp-ledger", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert (result.code, "utf-8" in result.stderr.lower()) == (2, True)
    assert not result.output.exists()


def test_only_bugs_print_tracebacks(fedsynth: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_runs = Mock()
    monkeypatch.setattr("fedsynth.results.finished.finished_runs", finished_runs)
    for error in (PermissionError(13, "Permission denied", "/x/y"), OSError(28, "No space left")):
        finished_runs.side_effect = error
        fedsynth("runs").assert_refused(error.args[1])
    finished_runs.side_effect = FileNotFoundError(2, "No usable temporary directory found in []")
    fedsynth("runs").assert_refused("Set TMPDIR to a folder with space")
    # bugs, and errors without a file or with a file of the package
    absent = FileNotFoundError(2, "No", str(PACKAGE / "absent.html"))
    for bug in (OSError(22, "Invalid argument"), absent, KeyError(1)):
        finished_runs.side_effect = bug
        with pytest.raises(type(bug)):
            fedsynth("runs")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_every_command_alike(
    number: signal.Signals, fedsynth: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_runs = Mock(side_effect=lambda _: signal.raise_signal(number))
    monkeypatch.setattr("fedsynth.results.finished.finished_runs", finished_runs)
    signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
    ended = fedsynth("runs")
    assert (ended.code, ended.stderr) == (128 + number, "fedsynth: terminated\n")
    assert signal.getsignal(number) == signal.SIG_DFL


RUN = "import sys; sys.argv = ['fedsynth', 'methods']; from fedsynth.cli.app import main; main()"


@pytest.mark.parametrize(
    ("shell", "code", "text"),
    [
        ("{} > /dev/full", 2, "No space left on device"),
        ("{} | true; exit ${{PIPESTATUS[0]}}", 141, ""),
        ("{} >&-", 0, ""),
    ],
)
def test_broken_streams_print_no_traceback(shell: str, code: int, text: str) -> None:
    line = shell.format(f'"{sys.executable}" -c "{RUN}"')
    run = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.count("\n")) == (code, 1 if text else 0), run.stderr
    assert text in run.stderr
