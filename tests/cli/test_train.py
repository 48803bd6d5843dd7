"""`fedsynth train` and its private values; plans, reports, audits and ledgers of `privacy …`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth.cli.options import from_preset, merged
from fedsynth.cli.progress import show_steps
from fedsynth.config.resolve import resolve
from fedsynth.data.files import read_tensors
from fedsynth.federation.run_data import data_set_id
from fedsynth.files import claim
from fedsynth.formatting import format_epsilon
from fedsynth.privacy import Ledger, Release, epsilon, read_ledger
from fedsynth.privacy.audit_bounds import down
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.results import run_messages
from fedsynth.results.file_names import LOCK
from fedsynth.results.run_messages import LONG_STAGE, StderrObserver, round_line
from tests.cli.conftest import LOCAL, Call, call_train
from tests.quick_runs import interrupt_in_round
from tests.user_files import make_image_folder, write_declaration

PAPER = "feddm --dp-sigma 3 --dp-mechanism paper"
CASES = {  # line: mechanism
    "feddm": "",
    "fedavg": "",
    "feddm --dp-epsilon 4": "residual",
    PAPER: "paper",
    "fedavg --dp-sigma 3 --set batch=719": "dp-sgd",
}
FILES = {"config.toml", "metrics.jsonl", "summary.json", "model.safetensors"} | {
    f"simulation_only/{name}" for name in ("README.txt", "partition.txt", "partition.png")
}
IMAGES = {"synthetic.safetensors", "synthetic.png", "synthetic_by_round/round-00001.png"}
PRIVACY = {
    *(f"privacy_report.{e}" for e in ("json", "md", "html")),
    *("ledger/client-000.jsonl", "ledger/client-001.jsonl", "privacy_start.json"),
    "simulation_only/rounds.jsonl",
}
SECONDS = re.compile(r"\d\.\d+ ?s\b|\btime\b|seconds")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Returns a cache of runs: each case, with accuracy on local splits, runs at its first use."""
    runs: dict[str, Any] = {}

    def outcome(line: str) -> Any:
        if line not in runs:
            folder = tmp_path_factory.mktemp("runs") / "new" / "folder"
            runs[line] = call_train(folder, f"{line} --local-test 0.2")
        return runs[line]

    return outcome


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", CASES)
def test_run_writes_and_prints_expected_results(outcomes: Callable[[str], Any], line: str) -> None:
    run, method, private = outcomes(line), line.split()[0], "--dp" in line
    assert run.code == 0, run.stderr
    files = {p.relative_to(run.folder).as_posix() for p in run.folder.rglob("*") if p.is_file()}
    expected = FILES | (PRIVACY if private else set()) | (IMAGES if method == "feddm" else set())
    assert files == expected
    assert "round 1/1 · test accuracy" in run.stderr
    assert "round 1/1" not in run.stdout
    assert run.stdout.splitlines()[-1] == f"run folder: {run.folder}"
    assert ("privacy budget" in run.stdout) == private

    summary = run.summary
    row = read_json(run.folder / "metrics.jsonl")
    config = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
    assert summary["method"] == config["run"]["method"] == method
    assert (summary["rounds"], summary["test_accuracy"]) == (1, row["test_accuracy"])
    assert summary["upload_bytes"] == row["upload_bytes"] >= 4 * row["upload_floats"] > 0
    assert ("privacy" in config) == ("differential_privacy" in summary) == private
    shared = [run.folder / name for name in files if "simulation_only" not in name]
    # AMP and WLP are exact functions of private data
    assert any(b'"wlp"' in path.read_bytes() for path in shared) != private
    assert ("local" in summary) == ("WLP" in run.stderr + run.stdout) != private


@pytest.mark.parametrize("line", [case for case in CASES if "--dp" in case])
def test_private_runs_report_epsilon_first(outcomes: Callable[[str], Any], line: str) -> None:
    run = outcomes(line)
    report = read_json(run.folder / "privacy_report.json")
    markdown = (run.folder / "privacy_report.md").read_text(encoding="utf-8")
    assert report["mechanism"] == CASES[line]
    if line == PAPER:
        assert report["guarantee"] is None
        for text in (markdown, run.stdout, run.stderr):
            assert "no differential privacy guarantee" in text.lower()
            assert not re.search(r"(ε|epsilon)\W{0,8}\d", text)
        for name in ("summary.json", "metrics.jsonl", "privacy_report.json"):
            assert not re.search(r'epsilon[^"]*": *\d', (run.folder / name).read_text())
        return
    epsilon = report["guarantee"]["epsilon"]
    assert report["verdict"]["formal"]
    assert run.summary["differential_privacy"]["epsilon"] == pytest.approx(epsilon)
    for text in (run.stderr, run.stdout, markdown):
        assert text.index("ε") < text.index("σ" if "σ" in text else "noise multiplier")
    assert 0 < epsilon < 10
    assert "--dp-epsilon" not in line or 3.6 < epsilon <= 4  # the noise is computed


def test_config_repeats_run(outcomes: Callable[[str], Any], fedsynth: Call, tmp_path: Path) -> None:
    first = outcomes("feddm")
    options = f"--config {first.folder / 'config.toml'} --output {tmp_path / 'out'}"
    rerun = fedsynth(f"train --json {options}")
    config, repeated = ((run.folder / "config.toml").read_bytes() for run in (first, rerun))
    assert config == repeated
    weights, metadata = read_tensors(first.folder / "model.safetensors")
    again = read_tensors(rerun.folder / "model.safetensors")
    assert again[1] == metadata  # safetensors writes it in any order
    torch.testing.assert_close(again[0], weights, rtol=0, atol=0)
    summaries = [first.summary, json.loads(rerun.stdout)]
    for summary in summaries:
        del summary["seconds"], summary["folder"]
    assert summaries[0] == summaries[1]


def test_preset_settings_are_printed(train: Call) -> None:
    # tiny runs set all other options
    run = train("scaffold")
    assert "settings from the preset of digits: model.depth=2\n" in run.stderr
    message = from_preset({"data": {}, "run": {"method": "MOON"}, "partition": {"clients": 3}})
    assert message.endswith(": run.rounds=3, model.width=32, model.depth=2, method.batch=32")
    assert from_preset({"data": {"dataset": "mnist"}, "run": {}}) == ""


def test_ignored_settings_of_other_methods_are_reported() -> None:
    fedprox, other = {"run": {"method": "fedprox"}}, {"run": {"method": "fedavg"}}
    notes: list[str] = []
    settings = {**fedprox, "method": {"mu": 1.0}}
    merged(settings, fedprox, notes.append)
    merged(fedprox, other, notes.append)
    assert notes == []
    assert "method" not in merged(settings, other, notes.append)
    assert "settings of fedprox in the config file are ignored" in notes[0]


def test_fedfm_weight_with_noisy_anchors_warns(train: Call) -> None:
    assert "warning: method.weight=50" in train("fedfm --dp-epsilon 8 --subset 0.2").stderr
    run = train("fedfm --dp-epsilon 8 --subset 0.2 --set weight=0.5")
    assert "warning: method.weight" not in run.stderr


def test_lost_clients_and_discarded_rounds_are_printed(train: Call) -> None:
    run = train("fedavg --client-failures 1 --seed 1")
    row = read_json(run.folder / "metrics.jsonl")
    needed = -(-len(row["lost"]) // 2)
    assert row["not_counted"] == {"exchange": "main", "uploads": 0, "needed": needed}
    assert "lost 0 (" in run.stderr
    assert "is discarded: 0 uploads, but " in run.stderr
    rejected = {**row, "rejected": {"2": "weight is -1"}}
    assert "rejected 2 (weight is -1)" in round_line(rejected, resolve({}))


@pytest.mark.parametrize("line", ["feddm --dp-epsilon 4", PAPER])
def test_private_runs_show_no_times(outcomes: Callable[[str], Any], train: Call, line: str) -> None:
    """Times depend on the data, so the run folder contains them only in simulation_only."""
    for run in (outcomes(line), train(f"{line} --json")):
        summary = (run.folder / "summary.json").read_text()
        for text in (run.stderr, run.stdout, summary):
            assert text
            assert not SECONDS.search(text.replace(str(run.output), "")), text
        assert '"seconds"' in (run.folder / "simulation_only" / "rounds.jsonl").read_text()
    assert re.search(r"· \d+\.\d s\n", outcomes("feddm").stderr)


def test_private_progress_is_printed_by_steps(capsys: pytest.CaptureFixture[str]) -> None:
    observer = StderrObserver(resolve({"privacy": {"noise_multiplier": 3.0}}), "")
    observer._printed -= 3600
    for total in (LONG_STAGE - 1, LONG_STAGE):
        for step in range(1, total + 1):
            observer.step(1, "condense", step, total)
    steps = [f"{n * LONG_STAGE // 10}/{LONG_STAGE}" for n in range(1, 11)]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"round 1/3 condense {step}" for step in steps]


@pytest.mark.parametrize("private", [False, True])
def test_remaining_time_follows_mean_round(
    private: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 0.0
    monkeypatch.setattr(run_messages.time, "monotonic", lambda: clock)
    privacy = {"noise_multiplier": 3.0} if private else {}
    observer = StderrObserver(resolve({"run": {"rounds": 10}, "privacy": privacy}))
    observer.step(1, "train", 1, 10)
    for number, ended in ((1, 100_000.0), (2, 100_060.0)):
        clock = ended
        observer.round_ended({"round": number, "upload_bytes": 0})
    clock += 31.0
    observer.step(3, "train", 1, 10)
    times = [line for line in capsys.readouterr().err.splitlines() if "days" in line]
    if private:
        assert times == []
    else:
        assert "at this speed, the run takes another 10 days, 10:00:00" in times[0]
        assert times[1:] == ["round 3/10 train 1/10, about 4 days, 15:10:40 left"]


def test_remaining_time_of_steps_is_that_of_their_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 600.0, 640.0))
    monkeypatch.setattr(run_messages.time, "monotonic", lambda: next(clock))
    with show_steps() as show:
        show("first", 2, 2)
        show("second", 1, 2)
    assert capsys.readouterr().err.splitlines()[-1] == "second 1/2, about 0:00:40 left"


def plans(fedsynth: Call, line: str) -> Any:
    return json.loads(fedsynth(f"privacy plan {line} --json").stdout)


def test_plan_computes_sigma_for_each_mechanism(fedsynth: Call) -> None:
    """Every plan's ε equals the accountant's for its σ, q and releases, just below the budget."""
    line = "--dp-epsilon 3 --rounds 2 --set iterations=50 --dp-nominal-size 6000"
    entries = plans(fedsynth, line)
    assert [p["mechanism"] for p in entries] == ["residual", "gradient", "features"]
    residual, _, features = entries
    sigma, rate = residual["noise_multiplier"], residual["sample_rate"]
    row = Release(1, "x", "m", "c", sigma, 1.0, rate, "poisson", 100, 1)
    assert epsilon([row], 1e-5) == pytest.approx(residual["epsilon"]["2"], rel=1e-9)
    assert rate == pytest.approx(2560 / 6000)
    sigma = features["noise_multiplier"]
    rows = [
        Release(1, "x", "m", "c", sigma, 1.0, 1.0, "full", 32, 1),
        Release(1, "n", "m", "c", sigma * 3 / 4, 1.0, 1.0, "full", 2, 1),
    ]
    assert epsilon(rows, 1e-5) == pytest.approx(features["epsilon"]["2"], rel=1e-9)
    assert all(2.97 < p["epsilon"]["2"] <= 3 for p in entries)


def test_plan_shows_signal_to_noise_of_public_data(fedsynth: Call) -> None:
    """σ = 2, four clients of 100, 324 features of the digits: centre Σ norm 400, moments
    (with privacy without second ones) and steps 400/√10, over 2·√share⁻¹·√4·√D."""
    line = "--method fedstats --dp-sigma 2 --dp-nominal-size 100 --clients 4 --rounds 3 --dataset digits"
    (plan,) = plans(fedsynth, line)
    centre = 40 * 10**0.5 / (2 * (3 / 0.96) ** 0.5 * 2 * 3240**0.5)
    expected = [centre, 400 / (2 * 0.04**-0.5 * 2 * 324**0.5), centre]
    assert [row["signal_to_noise"] for row in plan["rows"]] == pytest.approx(expected)
    assert f"{expected[1]:.3g}" in fedsynth(f"privacy plan {line}").stdout
    assert "S/N" in fedsynth("privacy plan --dp-sigma 2 --rounds 1").stdout


def test_plan_uses_set_options(fedsynth: Call) -> None:
    line = "--method fedavg --rounds 2 --dataset digits"
    (plan,) = plans(fedsynth, f"{line} --set privacy.noise_multiplier=2 --set privacy.delta=6e-4")
    assert plan["delta"] == 6e-4
    (plain,) = plans(fedsynth, f"{line} --dp-sigma 2")
    assert (plain["delta"], plain["epsilon"]["2"] > plan["epsilon"]["2"]) == (1e-5, True)
    both = fedsynth(f"privacy plan {line} --dp-sigma 2 --set privacy.epsilon=1")
    assert "exceeds ε = 1 in round" in both.stderr
    by_user = "--dp-unit user --dp-nominal-size 20 --set report.person=patient"
    text = fedsynth(f"privacy plan {line} --dp-sigma 3 {by_user}").stdout
    assert "ε after round" in text
    assert "plan for one patient with all examples, δ" in text


def test_plan_takes_the_shape_of_own_data(fedsynth: Call, tmp_path: Path) -> None:
    """Regression: own data were planned as MNIST's. The run has the planned σ, and then no budget
    is left."""
    write_declaration(make_image_folder(tmp_path / "scans"))
    line = f"--data {tmp_path / 'scans'} --method fedavg --rounds 1 --dp-epsilon 3 {LOCAL}"
    (plan,) = plans(fedsynth, line)
    run = fedsynth(f"train {line} --model linear --output {tmp_path / 'out'}").ok
    report = json.loads((run.folder / "privacy_report.json").read_text())
    assert plan["noise_multiplier"] == report["noise_multiplier"]
    fedsynth(f"privacy plan {line}").assert_refused("privacy.epsilon=3 leaves too little")


def test_dry_run_only_prints_guarantee(train: Call, fedsynth: Call, tmp_path: Path) -> None:
    line = f"feddm --rounds 2 --dp-ledger {tmp_path / 'kept'} --dp-sigma"
    dry = train(f"{line} 3 --dry-run")
    as_json = json.loads(train(f"{line} 3 --dry-run --json").stdout)
    assert list(tmp_path.iterdir()) == []
    for more in ("--dry-run", ""):
        train(f"{line} 1 --dp-epsilon 0.1 {more}").assert_refused("above the cap")
    report = json.loads((train(f"{line} 3").folder / "privacy_report.json").read_text())
    spent = report["guarantee"]["epsilon"]
    assert f"ε = {format_epsilon(spent)} at" in dry.stdout
    assert as_json["epsilon"]["2"] == pytest.approx(spent)
    assert json.loads(fedsynth("train --dry-run --json").stdout) == {"guarantee": False}
    file = tmp_path / "kept" / "client-000.jsonl"
    below = train(f"feddm --dp-sigma 3 --dry-run --dp-ledger {file}/x")
    below.assert_refused(f"cannot use {file}: Not a directory")


def test_reports_are_printed_and_verified(train: Call, fedsynth: Call) -> None:
    folder = train("feddm --dp-epsilon 4 --dp-mechanism features").folder
    markdown = (folder / "privacy_report.md").read_text()
    assert fedsynth(f"privacy report {folder}").stdout == markdown
    file = folder / "privacy_report.json"
    report = read_json(file)
    verified = fedsynth(f"privacy verify {folder}").ok
    for text in ("does not show that", "were compared with the ledger files", "is not signed"):
        assert text in verified.stdout

    report["guarantee"]["epsilon"] /= 2
    report["public_items"]["\x1b[2J"] = "<b>"
    file.write_text(json.dumps(report))
    rejected = fedsynth(f"privacy verify {folder}")
    assert rejected.code == 1
    assert "mismatch: guarantee.epsilon is" in rejected.stdout
    text = fedsynth(f"privacy report {folder}").stdout
    assert text.replace("\n", "").isprintable()
    assert "<b>" not in text

    report["public_items"] = {str(number): "" for number in range(200)}
    file.write_text(json.dumps(report))
    flood = fedsynth(f"privacy verify {folder}")
    assert (flood.code, len(flood.stdout.splitlines())) == (1, 41)
    file.write_text('{"schema_version": 4, "unit": {}}')
    fedsynth(f"privacy report {folder}").assert_refused("is damaged: ")


def test_unfinished_runs_have_report_on_request(train: Call, fedsynth: Call) -> None:
    with interrupt_in_round(2):
        folder = train("feddm --rounds 3 --dp-sigma 3").folder
    fedsynth(f"privacy verify {folder}").assert_refused("no report yet")
    with claim(folder / LOCK, OSError()):
        fedsynth(f"privacy report {folder}").assert_refused("is still active")
    assert "the run did not finish" in fedsynth(f"privacy report {folder}").ok.stderr
    assert fedsynth(f"privacy verify {folder}").ok


def test_signatures_are_verified(train: Call, fedsynth: Call, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs the extra fedsynth[sign]")
    from tests.privacy import test_files as signing

    key = signing.Ed25519PrivateKey.generate()
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(signing.private_pem(key))
    public.write_bytes(signing.public_pem(key))
    folder = train("feddm --dp-sigma 3").folder
    sign = f"privacy sign {folder} --key"
    fedsynth(f"{sign} {public}").assert_refused("unencrypted private Ed25519")
    assert fedsynth(f"{sign} {private}").ok
    verify = f"privacy verify {folder} --public-key {public}"
    assert "the signature is valid for this key" in fedsynth(verify).ok.stdout
    assert "the signature was not checked" in fedsynth(f"privacy verify {folder}").stdout
    (folder / "synthetic.png").write_bytes(b"another")
    rejected = fedsynth(verify)
    assert rejected.code == 1
    assert "mismatch: synthetic.png was changed after signing" in rejected.stdout


OPEN = (
    "--method feddm --clients 2 --width 32 --set iterations=4 --set server_epochs=1 --ipc 2 "
    "--device cpu"
)
FEDDM = f"{OPEN} --rounds 1 --dp-sigma 1"
EXAMPLES = Path(__file__).parents[2] / "examples" / "audit_functions.py"


@pytest.mark.usefixtures("repeatable_noise")
def test_audit_prints_lower_bound_and_epsilon(fedsynth: Call) -> None:
    audit = fedsynth(f"privacy audit {FEDDM} --canaries 500").ok
    first, *bounds, second = audit.stdout.splitlines()
    assert "Steinke et al. (assumes nothing but (ε, δ)-DP)" in bounds[0]
    assert "Gaussian pair (assumes independent Gaussian scores)" in bounds[-1]
    assert first.startswith("ε = 10 claimed (δ = 1e-05) · audited lower bound ")
    assert "at 99.9 % confidence from 500 canaries, 200 guesses, " in first
    assert "cannot prove privacy" in second
    assert not audit.output.exists()


def test_refuted_claims_exit_with_code_1(fedsynth: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = SecretGenerator.normal
    monkeypatch.setattr(SecretGenerator, "normal", lambda *a: draw(*a[:2], a[2] / 9, *a[3:]))
    audit = fedsynth(f"privacy audit {OPEN} --rounds 1 --dp-sigma 9 --json")
    facts = json.loads(audit.stdout)
    assert audit.code == 1
    assert facts["fault"]
    assert facts["epsilon_lower_bound"] > facts["epsilon"] > 0
    assert "the claim is false" in audit.stderr


def test_functions_are_audited(fedsynth: Call, tmp_path: Path) -> None:
    command = f"privacy audit --function {EXAMPLES}:noisy_mean --dimension 20"
    page = tmp_path / "audit.html"
    audit = fedsynth(f"{command} --dp-sigma 1 --page {page}")
    assert audit.code == 1
    assert "opposed, Gaussian pair" in audit.stdout
    assert "<h1>Audit of noisy" in page.read_text(encoding="utf-8")
    correct = fedsynth(f"{command.replace('noisy_mean', 'gaussian_filter')} --dp-epsilon 9 --json")
    facts = json.loads(correct.ok.stdout)
    assert facts["epsilon"] == 9  # the noise is that of 4.4
    assert len(facts["bounds"]) == 8
    fedsynth(f"{command} --dp-sigma 1 --rounds 2").assert_refused(
        "does not use run.rounds. Remove these settings"
    )
    fedsynth(f"{command} --run x").assert_refused("is set with --function")
    fedsynth(f"privacy audit {FEDDM} --page x").assert_refused("--page is set without")
    fedsynth(command).assert_refused("sigma or epsilon must be set")


@pytest.mark.usefixtures("repeatable_noise")
def test_reports_accept_only_audits_of_same_settings(fedsynth: Call, tmp_path: Path) -> None:
    folder = fedsynth(f"train {FEDDM} --output {tmp_path / 'out'}").folder
    audit = f"privacy audit --run {folder}"
    file, config = folder / "privacy_report.json", folder / "config.toml"
    original = file.read_bytes()
    for option in ("--dp-clip 2", "--rounds 2"):
        fedsynth(f"{audit} {option}").assert_refused("the options contradict the settings")
    fedsynth(f"{audit} --config other.toml").assert_refused("both define all settings")
    settings = config.read_text()
    config.write_text(settings.replace("iterations = 4", "iterations = 2"))
    assert "does not match the settings in its report" in fedsynth(f"{audit} --canaries 20").stderr
    config.write_text(settings)
    assert file.read_bytes() == original
    assert "counts of its audit" not in fedsynth(f"privacy verify {folder}").ok.stdout
    assert fedsynth(f"{audit} --canaries 300 --guesses 100 --dp-sigma 1").ok
    entry = json.loads(file.read_text())["audit"]
    assert (entry["mechanism"], entry["canaries"], entry["guesses"]) == ("residual", 300, 100)
    command = f"fedsynth privacy audit --run {folder.name} --canaries 300 --guesses 100"
    assert entry["command"] == f"{command} --confidence 0.999"
    assert fedsynth(f"{audit} --canaries 20 --repeats 3").ok
    assert "--canaries 20 --guesses" in json.loads(file.read_text())["audit"]["command"]
    assert json.loads(file.read_text())["audit"]["command"].endswith("--repeats 3")
    assert fedsynth(f"{audit} --canaries 300 --guesses 100").ok
    for ending in ("md", "html"):
        assert "--canaries 300" in (folder / f"privacy_report.{ending}").read_text()
    assert "counts of its audit" in fedsynth(f"privacy verify {folder}").ok.stdout


def test_ledgers_record_runs_without_privacy(train: Call, tmp_path: Path) -> None:
    """After `--method real`, which publishes raw images, no run on the ledger can state an ε."""
    ledger = f"--dp-ledger {tmp_path / 'ledgers'}"
    dry, run = train(f"real {ledger} --dry-run"), train(f"real {ledger}")
    for text in (dry.stdout, run.stderr):
        assert "no later run on these data can state an ε. This cannot be undone" in text
    reason = "a round of real (none): a run on the same data without differential privacy"
    for budget in ("--dp-epsilon 8", "--dp-sigma 3 --dp-epsilon 100", "--dp-epsilon 8 --dry-run"):
        train(f"feddm {budget} {ledger}").assert_refused(reason)
    assert "no ε can be stated" in train(f"feddm --dp-sigma 3 {ledger} --dry-run").stdout
    noisy = train(f"feddm --dp-sigma 3 {ledger}")
    assert "no differential privacy guarantee: a ledger in" in noisy.stderr
    assert " ε " not in noisy.stderr.split("guarantee", 1)[1].replace("no ε can", "")


def test_spent_shows_every_ledger(fedsynth: Call, tmp_path: Path) -> None:
    row = Release(1, "images", "residual", "residuals", 5.0, 0.1, 1.0, "full", 2, 7840)
    folder = tmp_path / "ledgers"
    for name, count in (("north", 1), ("south", 2)):
        ledger = Ledger(name, folder / f"{name}.jsonl")
        for _ in range(count):
            ledger.charge(row)
    files = {file: file.read_bytes() for file in folder.iterdir()}
    line = f"privacy spent {folder} --dp-epsilon 3"
    north, south = fedsynth(line).ok.stdout.splitlines()
    for text, rows in ((north, [row]), (south, [row, row])):
        shown = float(re.search(r"ε = (\S+) spent at δ = 1e-05", text)[1])
        spent = epsilon(rows, 1e-5)
        assert spent <= shown <= spent * 1.001
        assert (
            f"charges: {len(rows)} · releases: {2 * len(rows)} · without a guarantee: none" in text
        )
        assert text.endswith(f"remaining below ε = 3: {down(max(0, 3 - spent), 4)}")
    replaced = fedsynth(f"{line} --dp-adjacency replace-one --dp-delta 1e-6").stdout
    assert f"ε = {epsilon([row], 1e-6, 'replace-one'):.3f}"[:7] in replaced
    assert files == {file: file.read_bytes() for file in folder.iterdir()}
    Ledger("south", folder / "south.jsonl").charge(replace(row, unaccounted="no noise"))
    north_later, south_later = fedsynth(line).stdout.splitlines()
    assert north_later == north
    assert "ε = ∞ spent" in south_later
    assert (
        "without a guarantee: images (residual): no noise · remaining below ε = 3: 0" in south_later
    )
    fedsynth(f"privacy spent {tmp_path}").assert_refused("contains no ledger")


def test_verify_takes_several_runs(train: Call, fedsynth: Call, tmp_path: Path) -> None:
    train("feddm --dp-sigma 3")
    runs = sorted(train("feddm --dp-sigma 3").ok.output.iterdir())
    both = f"privacy verify {runs[0]} {runs[1]}"
    lines = fedsynth(both).ok.stdout.splitlines()
    assert lines == [f"{run}: the report is correct" for run in runs]
    metrics = runs[0] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("upload_floats", "upload_float"))
    failed = fedsynth(f"{both} {tmp_path / 'absent'}")
    wrong, correct, absent = failed.stdout.splitlines()
    assert failed.code == 1
    assert f"{runs[0]}: mismatches: " in wrong
    assert correct == lines[1]
    assert "cannot read" in absent


def test_second_run_is_refused_in_two_different_lines(train: Call, tmp_path: Path) -> None:
    line = f"feddm --dp-ledger {tmp_path / 'kept'}"
    assert train(f"{line} --dp-epsilon 4").ok
    train(f"{line} --dp-epsilon 4").assert_refused("=4 leaves too little for a release of this run")
    refused = train(f"{line} --dp-sigma 5 --dp-epsilon 4")
    assert refused.code == 2
    assert refused.stderr.count("ended after 0 of 1 rounds") == 1
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("fedsynth: error: no round was completed, for the reason above")
    other = train(f"{line} --dp-sigma 5 --seed 7").stderr
    assert "belongs to data set and partition 'digits-" in other
    assert "number of clients, partition settings and seed" in other


def test_finished_runs_are_not_resumed(train: Call, fedsynth: Call) -> None:
    folder = train("fedavg").folder
    for name in (folder, f"{folder}.incomplete"):
        fedsynth(f"train --resume {name}").assert_refused(f"the run in {folder} cannot be resumed")
    fedsynth(f"train --resume {folder}x").assert_refused("contains no config.toml")


def test_carry_over_confirms_ledgers(train: Call, fedsynth: Call, tmp_path: Path) -> None:
    folder = tmp_path / "the ledgers"
    line = f"feddm --dp-sigma 3 --dp-ledger '{folder}'"
    row = Release(1, "images", "residual", "residuals", 5.0, 0.1, 1.0, "full", 2, 7840)
    dataset = data_set_id(resolve({"partition": {"clients": 2}}))
    names = ("client-000", "client-001")
    for name in names:
        Ledger(name, folder / f"{name}.jsonl", dataset=dataset).charge(row)
    command = f"fedsynth privacy carry-over '{folder}' client-000"
    train(line).assert_refused(f"run {command}")
    for name in names:
        confirmed = fedsynth(f"privacy carry-over '{folder}' {name}").ok
        assert "count for all records of" in confirmed.stdout
    assert train(line).ok
    assert len(read_ledger(folder / "client-001.jsonl").releases) == 2


def test_repair_removes_torn_line(fedsynth: Call, tmp_path: Path) -> None:
    path = tmp_path / "client-000.jsonl"
    Ledger("client-000", path).charge(Release(1, "images", "m", "c", 3.0, 1.0, 1.0, "full", 1, 1))
    complete = path.read_bytes()
    path.write_bytes(complete + b'{"round": 2, "qua')
    assert '\'{"round": 2, "qua\'' in fedsynth(f"privacy repair {path}").stdout
    assert path.read_bytes() == complete
