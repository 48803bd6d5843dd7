"""Published numbers, the presets of their tables, runs of cells, and comparisons."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest

from fedsynth import Observer, RunSettings, load_preset, resolve
from fedsynth.data.partition import count_matrix, partition
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import OutputError, UnknownNameError
from fedsynth.experiments import comparison, presets
from fedsynth.experiments import runner as runner_module
from fedsynth.experiments.comparison import (
    ABOVE,
    NONE,
    WITHIN,
    format_number,
    jobs_of,
    lines,
    measured,
    verdict,
)
from fedsynth.experiments.presets import Number, PresetError, preset, preset_names, published
from fedsynth.experiments.rows import curve_of, settings_hash
from fedsynth.experiments.runner import Job, Runner, rows_by_hash
from fedsynth.files import claim
from fedsynth.models.registry import count_parameters
from fedsynth.results import checkpoint
from fedsynth.results.checkpoint import LoopCheckpoints
from fedsynth.results.file_names import CONFIG, INCOMPLETE, LOCK
from fedsynth.results.finished import unfinished_runs
from fedsynth.results.run_folder import RunFolder
from fedsynth.validation import to_toml
from tests.data.conftest import OfficialFiles
from tests.raising import raises

CHOSEN = "not given in the paper: chosen"
OCA = "fedavg (oca)"


def test_every_table_has_preset_with_all_numbers() -> None:
    names = {(preset(name).source, preset(name).table): name for name in preset_names()}
    tables = {(row["source"], row["table"]) for row in published()}
    for source, table in tables:
        rows = [row for row in published() if (row["source"], row["table"]) == (source, table)]
        cells = preset(names[source, table]).cells
        numbers: Any = [number.value for cell in cells for number in cell.numbers]
        assert sorted(numbers) == sorted(float(row["value"]) for row in rows), table
    missing = {(paper, table) for paper, table, _ in presets.not_covered()}
    assert ("FedHydra", "Table 10") in missing
    digits = preset("fedbn:digits").cells[0].numbers
    assert [number.domain for number in digits][-2:] == ["mnist-m", "average"]
    assert not missing & {(source.split()[0], table) for source, table in tables}


def test_cells_are_valid_runs_or_state_reason() -> None:
    runnable = 0
    cells = [(preset(name), cell) for name in preset_names() for cell in preset(name).cells]
    for table, cell in cells:
        if reason := table.refusal(cell):
            assert len(reason) > 20
            with raises(PresetError, "preset.invalid"):
                table.settings(cell)
            continue
        settings = table.settings(cell, seed=3)
        assert isinstance(settings, RunSettings)
        assert settings.seed == 3
        assert settings.rounds == int(cell.rounds or settings.rounds)
        assert settings.partition.clients == int(cell.clients or settings.partition.clients)
        runnable += 1
    assert runnable > 700


def test_preset_values_have_sources() -> None:
    blocks = [block for name in preset_names() for block in preset(name).blocks]
    for block in blocks:
        assert block.sections or block.variant
        assert block.source.strip()
        if "chosen" in block.source and not block.source.startswith("not given in the "):
            assert ":" in block.source  # the source, and the choice from it
    reasons = [block for block in blocks if block.source == CHOSEN]
    assert sum(bool(block.why) for block in reasons) > 0.8 * len(reasons)


@pytest.mark.parametrize(
    ("name", "filters", "expected"),
    [
        (
            "feddm:table2",
            {"dataset": "cifar100", "alpha": 0.01, "method": "feddm"},
            {"method.ipc": 5, "method.iterations": 1000, "run.rounds": 20, "model.width": 128},
        ),
        (
            "fedaf:table1",
            {"dataset": "fashion-mnist", "alpha": 0.02, "method": "fedaf"},
            {"method.image_lr": 0.2, "method.global_weight": 2.0, "model.norm": "batch"},
        ),
        (
            "fedprox:synthetic",
            {"dataset": "synthetic(1,1)", "method": "fedprox", "note": "90 %"},
            {"method.mu": 1.0, "method.stragglers": 0.9, "method.local_epochs": 20},
        ),
        ("feddm:sec4.5", {"note": "ipc 3"}, {"method.ipc": 3}),
        ("feddm:figure2", {"dataset": "cifar100", "method": "feddm"}, {"method.ipc": 5}),
        (
            "feddm:figure3",
            {"note": "sigma 3", "method": "feddm"},
            {
                "privacy.noise_multiplier": 3.0,
                "privacy.clip": 5.0,
                "privacy.mechanism": "paper",
                "partition.alpha": 0.5,
            },
        ),
        (
            "feddm:figure3",
            {"note": "sigma 5", "method": "scaffold"},
            {"privacy.noise_multiplier": 5.0, "privacy.clip": 5.0, "method.batch": 256},
        ),
        (
            "feddm:figure4",
            {"method": "feddm"},
            {"model.name": "resnet18", "model.norm": "batch", "method.ipc": 10, "run.rounds": 20},
        ),
        ("feddm:figure8", {"method": "fednova"}, {"partition.alpha": 50.0, "method.batch": 256}),
        (
            "feddm:figure9",
            {"method": "feddm"},
            {"partition.clients": 50, "partition.alpha": 0.5, "method.ipc": 3},
        ),
        ("feddm:figure11", {"note": "ipc 5"}, {"method.ipc": 5, "method.server_epochs": 500}),
        (
            "fedkf:figure7",
            {"dataset": "cifar10", "clients": 50, "alpha": 0.01, "note": "C = 0.2", "method": OCA},
            {"run.participation": 0.2, "partition.local_test": 0.2, "method.final": "oca"},
        ),
        (
            "fedkf:figure7",
            {"dataset": "emnist-letters", "clients": 20, "alpha": 1, "note": "C = 1"},
            {"run.participation": 1.0, "model.name": "lenet5", "method.lr": 0.01},
        ),
        (
            "fedkf:figure8",
            {"dataset": "cifar100", "note": "C = 0.05", "method": OCA},
            {"run.participation": 0.05, "partition.clients": 20, "partition.alpha": 0.1},
        ),
        ("fedaf:table4", {"method": "fedaf without cdc", "alpha": 0.1}, {"method.local_weight": 0}),
        (
            "fedprox:text",
            {"dataset": "sent140-glove", "method": "fedprox", "note": "50 %"},
            {"method.mu": 0.01, "method.lr": 0.3, "model.width": 256, "partition.clients": 772},
        ),
        (
            "fedfa:images",
            {"dataset": "office_caltech", "method": "fedrobust"},
            {"method.shift": "channels", "model.name": "alexnet", "run.rounds": 400},
        ),
        (
            "fedfa:prostate",
            {"method": "fedharmo"},
            {"data.dataset": "prostate-mri", "model.name": "unet", "method.batch": 16},
        ),
        (
            "fedfa:ablations",
            {"dataset": "office_caltech", "note": "stages 1,5"},
            {
                "method.stages": "1,5",
                "method.parts": "augmentation",
                "method.augmentation": "fedfa",
            },
        ),
        (
            "fedfa:ablations",
            {"dataset": "prostate_mri", "method": "fedfa-l + moex"},
            {"method.augmentation": "moex", "method.with_fedfa": True, "model.name": "unet"},
        ),
        (
            "moon:scalability",
            {"method": "moon (mu = 10)", "clients": 100, "rounds": 500},
            {"method.mu": 10.0, "run.participation": 0.2, "model.name": "resnet50"},
        ),
        (
            "fedfm:temperature",
            {"dataset": "cifar100", "note": "10.0"},
            {"method.temperature": 10.0},
        ),
    ],
)
def test_presets_match_papers(name: str, filters: dict[str, Any], expected: dict[str, Any]) -> None:
    (cell,) = preset(name).select(**filters)
    sections = preset(name).settings(cell).to_mapping()
    selected = {key: sections[key.partition(".")[0]][key.partition(".")[2]] for key in expected}
    assert selected == expected


@pytest.mark.parametrize(
    ("figure", "printed", "filters"),
    [
        ("feddm:figure2", "feddm:sec4.2", {"dataset": "cifar10", "method": "scaffold"}),
        ("feddm:figure11", "feddm:sec4.5", {"note": "ipc 3"}),
        ("fedkf:figure6", "fedkf:table12", {"dataset": "cifar10", "method": OCA}),
    ],
)
def test_curves_are_those_of_printed_runs(
    figure: str, printed: str, filters: dict[str, Any]
) -> None:
    assert load_preset(figure, **filters) == load_preset(printed, **filters)


def test_printed_upload_sizes_follow_from_models_and_partitions() -> None:
    """FedDM's App. C. With 50 clients, 3.1e6 numbers need three images per class, not five."""
    table = preset("feddm:app-c")
    spec, labels = dataset_spec("cifar10"), np.repeat(np.arange(10), 5000)
    for cell in table.select(method="fedavg"):
        settings = table.settings(cell)
        floats = int(cell.clients) * count_parameters(settings.model, spec, 10)
        assert float(f"{floats:.1e}") == cell.numbers[0].value
    (cell,) = table.select(method="feddm")
    settings = table.settings(cell)
    images = []
    for seed in range(4):
        parts = partition(labels, replace(settings.partition, seed=seed), classes=10)
        pairs = count_matrix(labels, parts, 10) >= settings.method.min_examples  # type: ignore[attr-defined]
        images.append(int(pairs.sum()) * settings.method.ipc)  # type: ignore[attr-defined]
    printed = (cell.numbers[0].value or 0) / math.prod(spec.image_shape)
    assert min(images) < printed < max(images) < 1.1 * printed
    assert min(images) * 5 / 3 > 1.5 * printed


def test_final_models_of_one_training_share_run() -> None:
    """FedKF's two final models need only one training."""
    table = preset("fedkf:table5")
    aca, oca = (table.select(alpha=0.1, method=f"fedkf ({end})")[0] for end in ("aca", "oca"))
    assert table.settings(aca) == table.settings(oca)
    assert (table.variant(aca), table.variant(oca)) == ("aca", "oca")
    other = preset("fedkf:table8").select(dataset="emnist-letters", method="fedkf (oca)")[0]
    assert preset("fedkf:table8").settings(other) == table.settings(oca)
    assert settings_hash(table.settings(aca, 1)) != settings_hash(table.settings(aca, 0))
    faster: Changes = {"run": {"precision": "bf16"}}
    changes: tuple[Changes, ...] = ({}, faster, {"method": {"lr": 0.3}})
    marks = [jobs_of(table, [aca], [0], changes=change)[0].hash for change in changes]
    assert marks[0] == marks[1] != marks[2]
    methods = [cell.method for cell in table.select(alpha=0.1, method="fedkf")]
    assert methods == [f"{name} ({end})" for name in ("fedkf-", "fedkf") for end in ("aca", "oca")]
    assert presets.main_cell(preset("fedprox:synthetic")).method == "fedprox"


def test_settings_select_or_override_cells() -> None:
    settings = {"run": {"method": "scaffold", "rounds": 3}, "partition": {"alpha": 0.5}}
    sections, cell = presets.preset_sections(preset("feddm:table2"), settings)
    assert (cell.method, cell.dataset) == ("scaffold", "mnist")
    assert (sections["run"]["rounds"], sections["partition"]["alpha"]) == (3, 0.5)
    settings = {"data": {"dataset": "cifar10"}, "partition": {"alpha": 0.1}, "run": {"seed": 2}}
    sections, _ = presets.preset_sections(preset("feddm:table2"), settings)
    assert resolve(sections) == load_preset("feddm:table2", dataset="cifar10", alpha=0.1, seed=2)
    with pytest.raises(PresetError, match=r"no experiment with alpha 0\.3\. Use 0\.1, 0\.01"):
        load_preset("feddm:table2", alpha=0.3)
    with raises(UnknownNameError, "name.unknown"):
        load_preset("feddm:tabel2")
    with pytest.raises(PresetError, match=r"of fedkf:table4 cannot be run"):
        load_preset("fedkf:table4")


Changes = dict[str, dict[str, Any]]
SHORT: Changes = {"run": {"rounds": 10}, "method": {"local_epochs": 2}}
TABLE = preset("fedprox:synthetic")
CELLS = TABLE.select(dataset="synthetic(0,0)", note="50 %")[1:]  # FedProx, with mu = 0 and 1


def rounds_of(observer: Mock) -> list[int]:
    return [call.args[0]["round"] for call in observer.round_ended.mock_calls]


@pytest.fixture
def end_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The clock shows 0, and 1 after a call of this function."""
    clock = Mock(**{"monotonic.return_value": 0.0})
    monkeypatch.setattr(runner_module, "time", clock)
    return lambda: clock.configure_mock(**{"monotonic.return_value": 1.0})


def runner_in(folder: Path, deadline: float = math.inf, observer: Observer | None = None) -> Runner:
    watched = nullcontext(observer or Observer())
    return Runner(folder, deadline, report=lambda _: None, watch=lambda _: watched)


def run_jobs(
    folder: Path, jobs: list[Job], deadline: float = math.inf, observer: Observer | None = None
) -> list[str]:
    outcomes = list(runner_in(folder, deadline, observer).run(jobs))
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.status for outcome in outcomes]


def curves(folder: Path) -> dict[str, Any]:
    return {mark: row["curve"] for mark, row in rows_by_hash(folder).items()}


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return jobs_of(TABLE, CELLS, [0], changes=SHORT)


@pytest.fixture(scope="module")
def complete(jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert run_jobs(folder, jobs) == ["finished", "finished"]
    return folder


def test_rows_are_labelled_and_produced_once(complete: Path, jobs: list[Job]) -> None:
    rows = rows_by_hash(complete)
    assert set(rows) == {job.hash for job in jobs}
    row = rows[jobs[0].hash]
    assert row["key"].startswith("fedprox:synthetic synthetic(0,0) fedprox (mu = 0) 50 %")
    assert (row["seed"], row["rounds"]) == (0, 10)
    assert len(row["curve"]["test_accuracy"]) == 10
    assert {"commit", "version", "date", "machine", "torch"} <= set(row)
    assert run_jobs(complete, jobs) == ["existing", "existing"]


def test_interrupted_runs_without_a_new_setting_start_again(
    jobs: list[Job], tmp_path: Path, end_time: Callable[[], None]
) -> None:
    recorder = Mock(spec=Observer)
    recorder.round_ended.side_effect = lambda row: row["round"] == 3 and end_time()
    run_jobs(tmp_path, jobs[:1], deadline=1.0, observer=recorder)
    (run,) = unfinished_runs(runner_in(tmp_path).run_folder(jobs[0]))
    lines = (run / CONFIG).read_text().splitlines()
    (run / CONFIG).write_text("\n".join(line for line in lines if "drop_last" not in line))
    again = Mock(spec=Observer)
    assert run_jobs(tmp_path, jobs[:1], observer=again) == ["finished"]
    assert rounds_of(again)[0] == 1


def test_time_budget_stops_after_round(
    complete: Path, jobs: list[Job], tmp_path: Path, end_time: Callable[[], None]
) -> None:
    recorder = Mock(spec=Observer)
    recorder.round_ended.side_effect = lambda row: row["round"] == 3 and end_time()
    assert run_jobs(tmp_path, jobs, deadline=1.0, observer=recorder) == ["stopped", "not begun"]
    assert rounds_of(recorder) == [1, 2, 3]
    assert run_jobs(tmp_path, jobs, deadline=1.0) == ["not begun", "not begun"]
    assert unfinished_runs(runner_in(tmp_path).run_folder(jobs[0]))
    resumed = Mock(spec=Observer)
    assert run_jobs(tmp_path, jobs, observer=resumed) == ["finished", "finished"]
    assert rounds_of(resumed)[:2] == [4, 5]
    assert curves(tmp_path) == curves(complete)
    (tmp_path / "fedprox-synthetic.jsonl").unlink()  # a finished run without a row is kept
    repeated = Mock(spec=Observer)
    assert run_jobs(tmp_path, jobs, observer=repeated) == ["finished", "finished"]
    repeated.round_ended.assert_not_called()
    assert curves(tmp_path) == curves(complete)


def test_one_shot_methods_stop_within_round_and_share_training(
    tmp_path: Path, end_time: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time budget must end an hour of training, and other methods must not repeat it."""
    OfficialFiles(tmp_path, monkeypatch).write_idx("MNIST", ("train", "t10k"), sizes=(200, 40))
    speed = {"data": {"data_root": str(tmp_path)}}
    few = {"local_epochs": 2, "batch": 8}
    small = {"server_epochs": 1, "generator_steps": 2, "generator_batch": 4, "generator_width": 4}
    table, jobs = preset("fedhydra:table1"), []
    for method, more in (("fedavg", few), ("dense", {**few, **small})):
        cells = table.select(dataset="mnist", alpha=0.1, method=method)[:1]
        jobs += jobs_of(table, cells, [0], changes={"method": more}, speed=speed)
    monkeypatch.setattr(runner_module, "commit", lambda: "abc")
    monkeypatch.setattr(checkpoint, "STEP_SECONDS", 0.0)
    stops = Mock(spec=Observer, **{"step.side_effect": lambda *_: end_time()})
    assert run_jobs(tmp_path, jobs, deadline=1.0, observer=stops) == ["stopped", "not begun"]
    assert [call.args[1] for call in stops.step.mock_calls] == ["local training"]
    offer = create_autospec(LoopCheckpoints.offer, side_effect=LoopCheckpoints.offer)
    monkeypatch.setattr(LoopCheckpoints, "offer", offer)
    for job, kind in zip(jobs, ("trained", "distillation"), strict=True):
        offer.reset_mock()
        assert run_jobs(tmp_path, [job]) == ["finished"]
        assert {call.args[1].split("-")[0] for call in offer.call_args_list} == {kind}
    monkeypatch.setattr(runner_module, "commit", lambda: "abc+")
    assert runner_in(tmp_path).trained is None  # the code has uncommitted changes


def test_cut_row_is_made_again(complete: Path, jobs: list[Job], tmp_path: Path) -> None:
    shutil.copytree(complete, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "fedprox-synthetic.jsonl"
    file.write_bytes(file.read_bytes()[:-9])  # as after a power cut
    assert run_jobs(tmp_path, jobs) == ["existing", "finished"]
    assert rows_by_hash(tmp_path).keys() == rows_by_hash(complete).keys()


def test_rows_with_an_earlier_default_are_made_again(
    complete: Path, jobs: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: a row is named by a hash that leaves defaults out. A run that was stopped with
    the earlier default is not resumed."""
    shutil.copytree(complete, tmp_path, dirs_exist_ok=True)
    runner = replace(runner_in(tmp_path), report=print)
    [config] = runner.run_folder(jobs[0]).glob("*/config.toml")
    config.write_text(config.read_text().replace("momentum = ", "momentum = 1"))
    stopped = config.parent.with_name(f"x{INCOMPLETE}")
    stopped.mkdir()
    shutil.copy(config, stopped)
    assert [outcome.status for outcome in runner.run(jobs)] == ["finished", "existing"]
    assert (
        "its row is outdated, because method.momentum was 10.0 and is 0.0"
        in capsys.readouterr().out
    )
    assert len((tmp_path / "fedprox-synthetic.jsonl").read_text().splitlines()) == 3
    assert run_jobs(tmp_path, jobs) == ["existing", "existing"]


def test_runs_of_other_processes_are_skipped(jobs: list[Job], tmp_path: Path) -> None:
    runner = runner_in(tmp_path)
    runner.run_folder(jobs[1]).mkdir(parents=True)
    # its run folder does not exist yet
    with claim(runner.run_folder(jobs[1]) / LOCK, OSError()):
        assert run_jobs(tmp_path, jobs[1:]) == ["not begun"]
    folder = RunFolder(runner.run_folder(jobs[0]), "run")  # locked
    folder.write_config(to_toml(jobs[0].settings.to_mapping()))
    (outcome,) = runner.run(jobs[:1])
    assert (outcome.status, "another process" in outcome.text) == ("failed", True)
    folder.release()


def test_invalid_row_lines_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "feddm-table2.jsonl").write_text('{"settings": 1}\n')
    with raises(OutputError, "files.output"):
        rows_by_hash(tmp_path)


def test_verdict_compares_difference_with_deviation() -> None:
    assert format_number(70.123, 0.456) == "70.12 ± 0.46"
    assert format_number(0.00797, 0.0007) == "0.0080 ± 0.0007"
    assert (format_number(635040.0, None), format_number(None, None)) == ("635,040", "–")
    assert verdict(70.0, 0.3, [70.5, 71.3]) == WITHIN  # 0.9 apart, 2·√(0.3² + 0.566²) = 1.28
    assert verdict(70.0, 0.3, [71.2, 71.4]) == ABOVE  # 1.3 apart, 2·√(0.3² + 0.141²) = 0.66
    assert verdict(70.0, 0.3, [70.8]) == WITHIN  # one seed: published deviation, 2·0.3·√2 = 0.85
    assert verdict(70.0, 0.3, [70.9]) == ABOVE
    assert verdict(70.0, None, [70.0, 71.0]) == WITHIN  # none published: ours for both
    assert verdict(70.0, None, [70.0]) == NONE
    assert verdict(None, None, [70.0, 71.0]) == NONE


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"round": number, "seconds": 1.0, "client_upload_bytes": [2**20, 2**21], **more}


def local(amp: float) -> dict[str, Any]:
    return {"amp": amp, "fm": 0.01, "wlp": amp / 2, "client_accuracy": [amp, amp]}


def facts(rows: list[dict[str, Any]], domains: bool = False) -> dict[str, Any]:
    sizes = {"upload_floats": 7, "client_upload_bytes": 1.5 * 2**20}
    return {"curve": curve_of(rows, domains), **sizes}


def value(metric: str, run: dict[str, Any], **more: Any) -> float | None:
    number = Number(metric, more.pop("domain", ""), 1.0, None)
    return measured(number, run, **{"variant": "", "dataset": "mnist", **more})


def test_last_and_best_accuracies_and_metrics_of_variants_are_measured() -> None:
    run = facts([row(1, test_accuracy=0.5), row(2, test_accuracy=0.7), row(3, test_accuracy=0.6)])
    assert value("test_accuracy_pct", run) == pytest.approx(60)
    assert value("best_test_accuracy_pct", run) == pytest.approx(70)
    assert value("upload_floats_per_round", run) == 7
    assert value("upload_mb_per_client_per_round", run) == pytest.approx(1.5)
    assert value("amp_pct", run) is None
    models = {"aca": {"local": local(0.5)}, "oca": {"local": local(0.75)}}
    run = facts([row(1, test_accuracy=0.2, models=models), row(2)])
    assert run["curve"]["models.oca.local.amp"] == [0.75, None]
    assert value("amp_pct", run, variant="oca") == pytest.approx(75)
    assert value("wlp_pct", run, variant="aca") == pytest.approx(25)
    assert value("fm", run, variant="aca") == pytest.approx(0.01)
    plain = facts([row(1, local=local(0.25))])  # a method with one model
    assert value("amp_pct", plain, variant="aca") == pytest.approx(25)


def test_measures_on_request_are_measured() -> None:
    more = {"nmi": 0.4, "silhouette": -0.1, "dissimilarity": 3.5}
    first = row(1, client_model_accuracy=[0.1, None], **more)
    run = facts([first, row(2, client_model_accuracy=[0.2, 0.3], **more), row(3)])
    assert [value(name, run) for name in more] == list(more.values())
    name = "client_model_accuracy_pct"
    values = [value(name, run, domain=f"client {k}") for k in range(3)]
    assert values == [pytest.approx(20), pytest.approx(30), None]
    assert value("upload_mega_floats_per_round", run) == pytest.approx(7e-6)


def test_rounds_to_fedavg_accuracy_are_counted() -> None:
    def rows(*amps: float) -> list[dict[str, Any]]:
        return [row(k, models={"aca": {"local": local(a)}}) for k, a in enumerate(amps, 1)]

    fedavg, other = facts(rows(0.2, 0.4, 0.5)), facts(rows(0.3, 0.5, 0.4))
    name = "rounds_to_fedavg_100_round_amp"
    assert value(name, other, variant="aca", fedavg=fedavg) == 2
    assert value(name, facts(rows(0.1, 0.2)), variant="aca", fedavg=fedavg) == 3  # never
    assert value(name, other, variant="aca") is None
    target, faster = (
        [row(k, test_accuracy=a) for k, a in enumerate(v, 1)] for v in ((1, 3, 2), (0, 2))
    )
    reached = value("rounds_to_fedavg_accuracy", facts(faster), fedavg=facts(target))
    assert reached == 2


def test_domain_accuracies_of_test_set_and_local_splits() -> None:
    names = ("amazon", "caltech", "dslr", "webcam")
    accuracies = dict(zip(names, (0.1, 0.2, 0.3, 0.4), strict=True))
    common = facts([row(1, test_accuracy=0.3, domain_accuracy=accuracies)])
    office = {"dataset": "office-caltech-10"}
    assert value("test_accuracy_pct", common, domain="dslr", **office) == pytest.approx(30)
    assert value("test_accuracy_pct", common, domain="average", **office) == pytest.approx(25)
    splits = {**local(0.5), "client_accuracy": [0.5, 0.6, None, 0.8]}
    personal = facts([row(1, common_model_accuracy=0.1, local=splits)], domains=True)
    assert value("test_accuracy_pct", personal, domain="webcam", **office) == pytest.approx(80)
    assert value("test_accuracy_pct", personal, domain="dslr", **office) is None


def test_changed_runs_have_no_verdict() -> None:
    table = preset("feddm:table2")
    (line,) = lines(table, table.select(dataset="mnist", alpha=0.1, method="feddm"), [0], {})
    reproduced = replace(line, number=Number("", "", 90.0, 1.0), values={0: 90.0, 1: 90.1})
    assert (line.verdict, reproduced.verdict) == ("not run", WITHIN)
    changed = replace(reproduced, changes={"partition": {"alpha": 100.0}})
    assert changed.verdict == "changed: no verdict"
    curve = {"test_accuracy": [0.4, 0.3], "models.average.test_accuracy": [None, 0.5]}
    run = {"seed": 0, "curve": curve}
    assert (replace(line, runs=[run]).averaged.mean, line.averaged.mean) == (50.0, None)


CORE = ("feddm:table2", "fedaf:table1", "fedkf:table5", "fedhydra:table1", "fedhydra:table2")


@pytest.mark.parametrize("name", CORE)
def test_small_editions_hold_every_method_of_claims(name: str) -> None:
    """They have the table's cells at sizes for two cores, and five seeds."""
    table, small = preset(name), preset(name).edition("small")
    assert (small.seeds, small.name, small.reduced) == (5, f"{name}-small", True)
    runnable = [cell for cell in small.cells if not small.refusal(cell)]
    for cell in runnable:
        settings = small.settings(cell)
        assert settings.method == replace(table.settings(cell).method, **{
            key: value
            for block in small.blocks[len(table.blocks) :]
            if cell.fits(block.when)
            for key, value in block.sections.get("method", {}).items()
        })  # fmt: skip
        assert settings.partition.subset <= 0.1
        assert settings.rounds <= 40
    methods = {cell.method for cell in runnable}
    assert all({claim.ahead, *claim.of} <= methods for claim in small.claims)
    line = lines(small, runnable[:1], [0], {})[0]
    assert replace(line, values={0: 1.0}).verdict == "smaller: no verdict"
    with raises(UnknownNameError, "name.unknown"):
        table.edition("tiny")


def claim_rows(table: presets.Preset, accuracies: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the rows of runs on one data set and partition, with these accuracies by seed."""
    rows = {}
    for cell in table.select(dataset="mnist", alpha=0.1):
        for job in jobs_of(table, [cell], range(len(accuracies.get(cell.method, [])))):
            accuracy = accuracies[cell.method][job.entries["seed"]]
            seed = job.entries["seed"]
            run = {"curve": {"test_accuracy": [accuracy]}, "upload_floats": 1, "seed": seed}
            rows[job.hash] = {**run, "client_upload_bytes": 1}
    return rows


def test_claims_hold_if_interval_of_every_rival_excludes_zero() -> None:
    """Student's t for five seeds is 2.776: a deviation of 1 gives an interval of ±1.24."""
    table = preset("feddm:table2").edition("small")
    spread = [-0.0126, -0.0063, 0.0, 0.0063, 0.0126]  # of deviation 0.01
    rivals = {name: [0.5] * 5 for name in ("fedavg", "fedprox", "fednova", "scaffold")}

    def judged(shift: float, **more: list[float]) -> Any:
        values = {"feddm": [0.5 + shift + s for s in spread], **rivals, **more}
        return comparison.judgements(table, claim_rows(table, values))[0]

    assert judged(0.0130).verdict == comparison.HOLDS
    assert judged(0.0118).verdict == judged(-0.0118).verdict == comparison.UNRESOLVED
    assert judged(-0.0130).verdict == comparison.FAILS
    mixed = judged(0.0130, scaffold=[0.7] * 5)  # one rival is ahead
    assert (mixed.verdict, mixed.closest) == (comparison.FAILS, "scaffold")
    wide = judged(0.0130, scaffold=[0.7] * 5, fednova=[-0.9, 1.5, 0.1, 1.9, 0.5])
    assert (wide.verdict, wide.closest) == (comparison.FAILS, "scaffold")  # not the widest interval
    assert judged(0.0130, scaffold=[0.4]).verdict == comparison.UNRESOLVED  # a single seed
    assert mixed.data == "mnist dirichlet(0.1)"
    assert judged(0.0130).deciding_difference == "1.30 ± 1.24 (fedavg)"
    assert judged(0.0130, scaffold=[0.4]).deciding_difference == "10.04 (scaffold)"  # of seed 0
    assert mixed.published_difference == "0.35"  # 98.67 of FedDM, 98.32 of SCAFFOLD
    few = {"feddm": [0.5], **{name: [0.4] for name in rivals}, "fednova": [0.6]}
    single = comparison.judgements(table, claim_rows(table, few))[0]
    assert single.deciding_difference == "-10.00 (fednova)"
    assert single.published_difference == "0.63"
    smaller = replace(table, claims=(replace(table.claims[0], lower=True),))
    values = {"feddm": [0.4] * 5, **{name: [0.5, 0.51, 0.5, 0.51, 0.5] for name in rivals}}
    rows = claim_rows(table, values)
    assert comparison.judgements(smaller, rows)[0].verdict == comparison.HOLDS
    for run in rows.values():
        if run["curve"]["test_accuracy"] == [0.4]:
            run["curve"]["models.average.test_accuracy"] = [0.6]
    verdicts = [
        comparison.judgements(table, rows, averaged=averaged)[0].verdict
        for averaged in (False, True)
    ]
    assert verdicts == [comparison.FAILS, comparison.HOLDS]
