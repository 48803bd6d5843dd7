"""Tests that tampering with a run folder is detected, also if the rest of the report is consistent.

docs/verification.md states the limit: if *all* files of a folder are rewritten, its ledgers too,
only a signature reveals it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedsynth import resolve, simulate
from fedsynth.data.files import read_tensors
from fedsynth.privacy import Ledger, read_ledger
from fedsynth.privacy.releases import ADJACENCIES
from fedsynth.privacy.report import build as sections
from fedsynth.privacy.report.figures import Event, schema_problems
from fedsynth.privacy.report.file import hash_of_files, stated_rows
from fedsynth.privacy.report.pages import render_html, render_markdown
from fedsynth.results import private_run
from fedsynth.results.charges import rebuild_plan
from fedsynth.results.file_names import SERVER_LEDGER
from fedsynth.results.report_facts import (
    exported_files,
    privacy_section,
    provenance,
    report_facts,
)
from fedsynth.results.verification import verify_run
from fedsynth.validation import to_toml
from tests.deployment.local_setup import Setup
from tests.quick_runs import folder_of, quick_sections
from tests.user_files import make_special_file

NAME, START = "privacy_report.json", "privacy_start.json"
MODEL, IMAGES, RESUMPTIONS = "model.safetensors", "synthetic.safetensors", "resumed.json"
LEDGER = "ledger/client-000.jsonl"
ENDED = Event(kind="ended", rounds_done=1, why="x")
AGAIN = Event(kind="resumed", rounds_done=1).to_json()
CHARGES, ENDED_EARLY, METRICS, SEAL = (
    "ledger.missing",
    "rounds_done",
    "metrics.jsonl",
    "ledger.files",
)
Report = dict[str, Any]
Tamper = Callable[[Path], Any]
P = ParamSpec("P")


def settings(method: str = "feddm", **privacy: Any) -> dict[str, Any]:
    return quick_sections(method, privacy={"noise_multiplier": 1.0, **privacy})


def run(output: Path, sections: dict[str, Any], **values: Any) -> Path:
    return folder_of(simulate(resolve(sections), output=output, **values))


def codes(folder: Path, **values: Any) -> list[str]:
    return [problem.code for problem in verify_run(folder, **values).problems]


def verify(folder: Path, **values: Any) -> list[str]:
    return [problem.text for problem in verify_run(folder, **values).problems]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run with ε above 10, which causes a warning, and an unreached cap."""
    return run(tmp_path_factory.mktemp("runs"), settings(epsilon=50.0, sample_rate=1.0))


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / finished.name))


def tampering(change: Callable[Concatenate[Path, P], Any]) -> Callable[P, Tamper]:
    """Returns a function of the arguments after the folder that returns a folder's change."""
    return lambda *values, **named: lambda folder: change(folder, *values, **named)


@tampering
def write(folder: Path, name: str, content: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))


@tampering
def all_of(folder: Path, *tampers: Tamper) -> None:
    for tamper in tampers:
        tamper(folder)


def report_of(folder: Path) -> Any:
    return json.loads((folder / NAME).read_text())


def pages(folder: Path, report: Report) -> None:
    """Writes the report, and matching pages if its schema is valid."""
    (folder / NAME).write_text(json.dumps(report, ensure_ascii=False) + "\n")
    if not schema_problems(report):
        (folder / "privacy_report.md").write_text(render_markdown(report))
        (folder / "privacy_report.html").write_text(render_html(report))


def fit_figures(folder: Path) -> None:
    """Recomputes all figures from the report's rows, δ and adjacency, and rewrites the pages."""
    report = report_of(folder)
    if report["guarantee"] is not None and report["adjacency"] in ADJACENCIES:
        rows, facts = stated_rows(report), (report["guarantee"]["delta"], report["adjacency"])
        report["guarantee"] = sections.guarantee(rows, *facts).to_json()
        worst = report["guarantee"]["worst_client"]
        report["accountant"] = sections.accountant(rows, worst, *facts).to_json()
    pages(folder, report)


def fit_hashes(folder: Path) -> None:
    pages(folder, {**report_of(folder), "files": exported_files(folder)})


def note_again(folder: Path) -> None:
    """Appends the hash of changed files to each ledger."""
    for path in sorted((folder / "ledger").iterdir()):
        old = read_ledger(path)
        ledger = Ledger(old.client, path, dataset=old.dataset)
        ledger._note({"entry": "files", "sha256": hash_of_files(exported_files(folder))})


@tampering
def edit_json(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content, ensure_ascii=False) + "\n")


def set_at(content: Any, path: str, value: Any) -> None:
    """Changes the value at a path such as `scope/0/status`."""
    *first, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in first:
        content = content[key]
    content[last] = value


def changed(name: str, path: str, value: Any) -> Tamper:
    return edit_json(name, lambda content: set_at(content, path, value))


def edit(change: Callable[[Report], Any]) -> Tamper:
    """Changes the report, with matching figures and pages."""
    return all_of(edit_json(NAME, change), fit_figures)


def put(path: str, value: Any) -> Tamper:
    """Changes a value of the report, with matching figures and pages."""
    return edit(lambda report: set_at(report, path, value))


@tampering
def config(folder: Path, section: str, **values: Any) -> None:
    """Changes config.toml, with a matching hash in the report."""
    content = tomllib.loads((folder / "config.toml").read_text())
    table = {**content.get(section, {}), **values}
    content[section] = {key: value for key, value in table.items() if value is not None}
    (folder / "config.toml").write_text(to_toml(content))
    changed(NAME, "provenance/config", provenance(resolve(content))["config"])(folder)
    pages(folder, report_of(folder))


@tampering
def text(folder: Path, name: str, old: str, new: str) -> None:
    content = (folder / name).read_text()
    assert old in content
    (folder / name).write_text(content.replace(old, new, 1))


@tampering
def delete(folder: Path, name: str) -> None:
    (folder / name).unlink()


@tampering
def first_lines(folder: Path, name: str, number: int) -> None:
    lines = (folder / name).read_text().splitlines(keepends=True)[:number]
    (folder / name).write_text("".join(lines))
    if not lines:
        (folder / name).unlink()


@tampering
def pipe(folder: Path, name: str) -> None:
    make_special_file(folder / name, "pipe")


@tampering
def row(folder: Path, number: int, path: str, value: Any) -> None:
    """Changes a value of a round's row of metrics, with matching hashes."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    set_at(rows[number - 1], path, value)
    file.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    fit_hashes(folder)


@tampering
def tensors(
    folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], Any], **stated: str
) -> None:
    """Changes the tensors and the metadata of a file, with matching hashes."""
    loaded, facts = read_tensors(folder / name)
    change(loaded)
    save_file(loaded, folder / name, metadata={**facts, **stated})
    fit_hashes(folder)


def ended_after(rounds: int) -> Tamper:
    return all_of(
        first_lines("metrics.jsonl", rounds),
        changed("summary.json", "rounds", rounds),
        put("rounds_done", rounds),
    )


def hide_last_rows(report: Report) -> None:
    report["ledger_kept"] = True
    rows = {client: releases[:1] for client, releases in stated_rows(report).items()}
    report["ledger"] = [entry.to_json() for entry in sections.folded_ledger(rows)]


def remove_client(report: Report) -> None:
    for entry in report["ledger"]:
        entry["clients"].remove("client-002")
    del report["ledger_heads"]["client-002"]


def rewrite_ledger(folder: Path) -> None:
    """Reduces the steps of all clients consistently, unlike those of config.toml."""
    report = report_of(folder)
    for path in sorted((folder / "ledger").iterdir()):
        old = read_ledger(path)
        releases = old.releases  # read before the file is replaced
        path.unlink()
        ledger = Ledger(old.client, path, dataset=old.dataset)
        for release in releases:
            ledger.charge(replace(release, steps=1))
        report["ledger_heads"][old.client]["chain"] = ledger.history().chain
    for entry in report["ledger"]:
        entry["steps"] = 1
    pages(folder, report)
    fit_figures(folder)


def matrix(change: Callable[[Any], Any]) -> Tamper:
    key = "confusion_matrix"
    return edit_json("summary.json", lambda s: s.update({key: change(np.array(s[key])).tolist()}))


# values that are changed together and must all be named
REPORT_VALUES: dict[str, Any] = {
    "guarantee/worst_client": "client-001", "epsilon_cap": 15.0, "planned_rounds": 9,
    "rounds_done": 1, "verdict/formal": False, "verdict/reasons": ["a count was logged"],
    "verdict/warnings": ["all is well"], "shares": 2, "counted_shares": 2, "min_clients": 3,
    "simulated": False, "abandoned": True, "exported": True, "own_code": ["the model x"],
    "noise_multiplier": 10.0, "adjacency": "replace-one", "max_records": 10,
    "public_items/sample rate q": "0.01", "public_items/x": "y",
    "scope/1/status": "accounted", "events": [ENDED.to_json()], "randomness": "quantum",
    "published": [], "provenance/config": "0" * 32,
    "method": "fedavg", "unit/kind": "user", "unit/user_records": 1, "unit/person": "client",
    "run/responsible": "X", "ledger_heads/client-000/rows_before": 1, "ledger_kept": True,
    "files/config.toml": "0" * 64, "accountant/computation": "x", "accountant/rdp_epsilon": 0.1,
    **{f"guarantee/{path}": 0.01 for path in (
        *("delta", "epsilon", "best_guess_at_most", "epsilon_by_client/client-001"),
        *("epsilon_by_round/1/worst", "groups/1/epsilon", "epsilon_of_delta/2/epsilon"),
        *("epsilon_of_delta/0/delta", "attack_success/0/true_positive_rate_at_most"),
        "epsilon_of_each_release_alone/0/epsilon",
    )},
}  # fmt: skip
DP = "differential_privacy"
SUMMARY_VALUES: dict[str, Any] = {
    f"{DP}/epsilon": 0.1, f"{DP}/delta": 1e-9, f"{DP}/noise_multiplier": 9.0, f"{DP}/seal": 1,
    "epsilon": 0.1, "method": "fedavg", "folder": 1, "settings/iterations": 1, "seed": 31217,
    "upload_bytes": 31217, "sources": {"n_k": [312, 17]}, "test_accuracy": {"patients": [312, 17]},
    "models": {"n_k": {"test_accuracy": 0.5}},
}  # fmt: skip


def test_changed_values_are_detected(folder: Path) -> None:
    for path, value in REPORT_VALUES.items():
        changed(NAME, path, value)(folder)
    problems = codes(folder)
    for path in REPORT_VALUES:
        assert re.sub(r"/(\d+)(?=/)", r"[\1]", path).replace("/", ".") in problems


DEEP = "[" * 100_000 + "]" * 100_000
DAMAGED_SUMMARIES = ("[]", "\ud800", '{"a": 1, "a": 2}')
DAMAGED_METRICS = ("{}\n", f'{{"round": {DEEP}}}\n')
TAMPERINGS: list[tuple[Tamper, str]] = [
    (edit(hide_last_rows), "ledger[0].rounds"),
    (all_of(changed(NAME, "delta", 6e-4), put("guarantee/delta", 6e-4)), "delta"),
    (edit(remove_client), "ledger.clients"),
    (all_of(edit(remove_client), delete("ledger/client-002.jsonl")), "ledger.clients"),
    (delete("ledger/client-002.jsonl"), "ledger.clients"),
    (put("test_only_randomness", True), "verdict.formal"),
    (put("audit", "passed: proves ε ≤ 0.1"), "schema"),
    (put("ledger/0/noise_multiplier", 10.0), "ledger[0].noise_multiplier"),
    (all_of(put("mechanism", "gradient"), put("ledger/0/mechanism", "gradient")), "mechanism"),
    (edit(lambda report: report["scope"].pop(0)), "scope"),
    (put("provenance/seal", "1.0"), "provenance.seal"),
    (put("provenance/torch", "audited by X"), "schema"),
    (put("ledger_heads/client-000/rows", 1), "ledger.rows"),
    (put("ledger_heads/client-000/chain", None), "ledger.chain"),
    (edit(lambda report: report.pop("own_code")), "schema"),
    (text("privacy_report.md", "ε = ", "ε = 0."), "privacy_report.md"),
    (text("privacy_report.html", "<p>", "<p>Good. "), "privacy_report.html"),
    (
        lambda folder: shutil.copy(folder / LEDGER.replace("0.", "1."), folder / LEDGER),
        "ledger.file",
    ),
    (first_lines(LEDGER, 2), "ledger.rows"),
    (write(LEDGER, "[" * 100_000), "ledger.file"),
    (text(LEDGER, '"steps": 3', '"steps": 1'), "ledger.file"),
    (rewrite_ledger, CHARGES),
    (lambda folder: shutil.rmtree(folder / "ledger"), "ledger.folder"),
    (
        all_of(config("privacy", noise_multiplier=10.0), changed(START, "noise_multiplier", 10.0)),
        CHARGES,
    ),
    (config("privacy", noise_multiplier=None), "noise_multiplier"),
    (config("privacy", delta=6e-4), "guarantee.delta"),
    (config("privacy", clip=0.1), CHARGES),
    (config("privacy", ledger="/nowhere"), "ledger_kept"),
    (config("run", rounds=3), ENDED_EARLY),
    (config("run", participation=0.34), "ledger.foreign"),
    (config("partition", clients=2), "config.toml"),
    (config("partition", alpha=0.1), "ledger.data_set"),
    (text("config.toml", '"feddm"', '"mine"'), "config.toml"),
    (text("config.toml", '"digits"', '"mnist"'), "config.toml"),
    (text("config.toml", "[method]", "[method]\nx = 1"), "config.toml"),
    (text("config.toml", "[run]", "[run"), "files.config"),
    (changed(START, "ledgers/client-000/rows", 1), "ledger_heads.client-000.rows_before"),
    (changed(START, "ledgers/client-000/chain", "0"), "ledger.chain"),
    (changed(START, "data_set/train_size", 10), START),
    (changed(START, "data_set/mean", "x"), START),
    (changed(START, "test_images", "private"), "scope[2].access"),
    (changed(START, "schema_version", 2), f"files.{START}"),
    (changed(START, "run/date", "2020-01-01"), "run.date"),
    (changed(START, "warnings", ["rows mix"]), "verdict.warnings"),
    (row(1, "epsilon", 0.1), "metrics.jsonl.epsilon"),
    (row(1, "round", 2), METRICS),
    (row(1, "seconds", 1.5), METRICS),
    (row(1, "test_accuracy", {"n_k": 1}), METRICS),
    (row(2, "models", {"n_k": {"test_accuracy": 0.5}}), SEAL),
    (row(2, "models", {"aca": {"local": {"amp": 0.5}}}), SEAL),
    (row(2, "participants", [0, 2]), "metrics.jsonl.participants"),
    (row(1, "domain_accuracy", {"n_k=312": 0.5}), SEAL),
    (row(2, "lost", {"1": "n_k=312"}), "metrics.jsonl.lost"),
    (
        all_of(row(2, "client_upload_bytes", [1, 2, 3, 4]), row(2, "upload_bytes", 10)),
        SEAL,
    ),
    *(
        (changed("summary.json", path, value), "files.summary.json")
        for path, value in SUMMARY_VALUES.items()
    ),
    (all_of(changed("summary.json", "test_accuracy", 0.5), fit_hashes), SEAL),
    (
        all_of(changed("summary.json", f"{DP}/epsilon", 0.1), fit_hashes),
        f"summary.json.{DP}.epsilon",
    ),
    (matrix(np.transpose), "files.summary.json"),  # it has the same accuracy
    (matrix(lambda honest: honest - np.eye(10, dtype=int)), "files.summary.json"),
    (matrix(lambda honest: honest * 10**9), "files.summary.json"),
    (ended_after(0), ENDED_EARLY),
    (ended_after(1), ENDED_EARLY),
    (
        all_of(write(RESUMPTIONS, '{"after_rounds": [1]}'), put("events", [AGAIN])),
        "ledger.resumptions",
    ),
    (write(RESUMPTIONS, '{"after_rounds": [2]}'), RESUMPTIONS),
    (pipe("resumed.json"), "files.resumed.json"),
    (pipe("metrics.jsonl"), "files.run"),
    (pipe("summary.json"), "files.summary.json"),
    (
        all_of(write("artefacts.safetensors", "n_k = 312"), fit_hashes),
        SEAL,
    ),
    (write("sources/n_k.py", "312, 17, 4"), "sources.n_k.py"),
    *(
        (write(name, "312"), "files")
        for name in (
            "n_k.txt",
            ".n_k",
            "privacy_report.txt",
            "ledger/n_k.txt",
            "other/config.toml",
            f"{MODEL}2",
        )
    ),
    (lambda folder: (folder / "n_k").symlink_to("/dev/null"), "files"),
    (row(2, "upload_floats", 10**9), SEAL),
    (tensors(MODEL, lambda t: t.update({min(t): torch.zeros(3)})), SEAL),
    (
        tensors(MODEL, lambda t: t[min(t)][:1].add_(9)),
        SEAL,
    ),
    (tensors(MODEL, len, n_k="312"), SEAL),
    (all_of(write(MODEL, "x"), fit_hashes), SEAL),
    (all_of(write(MODEL, "x"), fit_hashes, note_again), SEAL),
    (tensors(IMAGES, lambda t: t.update(n_k=torch.tensor([312]))), SEAL),
    (tensors(IMAGES, lambda t: t["client"].fill_(312)), SEAL),
    (write(MODEL, "x"), "files.model.safetensors"),
    *((write("summary.json", content), "files.summary.json") for content in DAMAGED_SUMMARIES),
    *((write("metrics.jsonl", content), "files.run") for content in DAMAGED_METRICS),
    (
        write("metrics.jsonl", '{"round": 1, "epsilon": {}}\n{"round": 2, "epsilon": 1e999}\n'),
        "files.run",
    ),
    *((write(START, content), f"files.{START}") for content in ("\0", f'{{"ledgers": {DEEP}}}')),
    (
        write("config.toml", '[privacy]\nnoise_multiplier = 1e400\n[run]\nmethod = "feddm"'),
        "config.toml",
    ),
    (
        write("config.toml", "[model]\nwidth = 100000000000\n[privacy]\nnoise_multiplier = 1.0"),
        "config.toml",
    ),
    (write(RESUMPTIONS, '{"after_rounds": [1, 0]}'), f"files.{RESUMPTIONS}"),
    (write(IMAGES, "\0" * 100), "files.synthetic.safetensors"),
]


@pytest.mark.parametrize(("tamper", "code"), TAMPERINGS)
def test_tampering_is_detected(tamper: Tamper, code: str, folder: Path) -> None:
    tamper(folder)
    problems = verify_run(folder).problems
    assert code in [problem.code for problem in problems], problems
    assert all(len(problem.text) < 2000 for problem in problems)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the server's folder of a run over nodes."""
    setup = Setup(tmp_path_factory.mktemp("served"))
    return setup.serve(settings(sample_rate=1.0)).folder.path


OF_SERVER: dict[str, tuple[Tamper, str]] = {
    "shapes": (tensors(MODEL, lambda t: t.update({min(t): torch.zeros(3)})), SEAL),
    "values": (tensors(MODEL, lambda t: t[min(t)][:1].add_(9)), SEAL),
    "metadata": (tensors(MODEL, len, n_k="312"), SEAL),
    "images": (tensors(IMAGES, lambda t: t["client"].fill_(312)), SEAL),
    "metrics": (row(2, "test_accuracy", 0.5), SEAL),
    "summary": (all_of(changed("summary.json", "test_accuracy", 0.5), fit_hashes), SEAL),
    "a second note": (all_of(tensors(MODEL, len, n_k="312"), note_again), SEAL),
    "no ledger": (delete(SERVER_LEDGER), SEAL),
    "a client's ledger": (write(LEDGER, ""), "files"),
}


@pytest.mark.parametrize("name", OF_SERVER)
def test_tampering_with_a_servers_folder_is_detected(
    name: str, served: Path, tmp_path: Path
) -> None:
    """Regression: no ledger had the hash of the files of a run over a network."""
    folder = Path(shutil.copytree(served, tmp_path / served.name))
    assert codes(folder) == []
    tamper, code = OF_SERVER[name]
    tamper(folder)
    assert codes(folder) == [code]


def relabel(folder: Path) -> None:
    """Makes the folder of a simulation one of a run over a network, with a report that fits."""
    changed(START, "simulated", False)(folder)
    run = private_run.read_run(folder)
    histories = [read_ledger(path).history() for path in sorted((folder / "ledger").iterdir())]
    plan = rebuild_plan(run, {history.client: history.releases for history in histories})
    promise = privacy_section(plan, histories, simulated=False).to_json()
    changed("summary.json", DP, promise)(folder)
    facts = report_facts(plan, len(run.rows), [], run.start, files=exported_files(folder))
    pages(folder, sections.build_report(facts, histories, run.start.ledgers))


def test_relabelled_simulations_are_detected(folder: Path) -> None:
    """Regression: a folder that claimed to be that of a network escaped the seal of its files."""
    tensors(MODEL, lambda t: t[min(t)][:1].add_(9))(folder)
    relabel(folder)
    assert sorted(codes(folder)) == ["files"] * 3 + [SEAL]
    shutil.rmtree(folder / "ledger")
    assert codes(folder) == [SEAL]


def test_missing_files_are_named(folder: Path) -> None:
    pages = ["privacy_report.md", "privacy_report.html"]
    for name in (IMAGES, "metrics.jsonl", "summary.json", MODEL, *pages, START, "config.toml"):
        (folder / name).unlink()
        assert f"{name} is missing" in verify(folder)


def test_verification_opens_files_for_reading_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Auditors cannot open files for writing; root can, so the flags are checked."""
    opened = Mock(side_effect=os.open)
    monkeypatch.setattr(os, "open", opened)
    assert verify(folder) == []
    assert opened.call_count > 5
    assert not any(call.args[1] & (os.O_RDWR | os.O_WRONLY) for call in opened.mock_calls)


def test_other_versions_are_named_and_their_pages_not_compared(folder: Path) -> None:
    put("provenance/jinja2", "2.0")(folder)
    text("privacy_report.md", "ε = ", "ε is ")(folder)
    changed(NAME, "provenance/fedsynth", "0.0.9")(folder)
    result = verify_run(folder)
    assert result.problems == []
    assert "were not compared: jinja2 2.0 rendered" in " ".join(result.notes)
    put("randomness", "as it was in 0.0.9")(folder)
    assert "the run used fedsynth 0.0.9" in verify(folder)[-1]


def test_forged_guarantees_are_detected(folder: Path, tmp_path: Path) -> None:
    """Copies the verdict, and then all of the formal report of the same settings."""
    paper = run(tmp_path, settings(mechanism="paper"))
    formal = report_of(folder)
    pages(paper, {**report_of(paper), "verdict": formal["verdict"]})
    assert any("verdict.formal is True" in problem for problem in verify(paper))
    pages(paper, formal)
    assert any("guarantee is {" in problem for problem in verify(paper))


def test_inaccessible_ledgers_are_reported(tmp_path: Path) -> None:
    folder = run(tmp_path, settings(ledger=str(tmp_path / "kept")))
    (tmp_path / "kept").rename(tmp_path / "moved")
    result = verify_run(folder)
    assert result.problems == []
    assert "no ledger was compared" in result.notes[0]
    assert "moved" in verify_run(folder, ledger=tmp_path / "moved").notes[0]
    (problem,) = verify(folder, ledger=tmp_path / "nowhere")
    assert problem == f"the ledger folder {tmp_path}/nowhere does not exist"
    edit(hide_last_rows)(folder)
    assert "contains 1 rows, but ledger_heads states 2" in " ".join(verify(folder))
    edit(lambda r: [head.update(rows=1) for head in r["ledger_heads"].values()])(folder)
    assert CHARGES in codes(folder)
    assert any("chain hash" in p for p in verify(folder, ledger=tmp_path / "moved"))


def test_early_end_requires_reached_cap(tmp_path: Path) -> None:
    folder = run(tmp_path, settings(noise_multiplier=3.0, epsilon=3.0))
    assert verify(folder) == []
    assert "ended after 1 of 2 rounds" in (folder / "privacy_report.md").read_text()
    report = report_of(folder)
    (event,) = report["events"]
    assert (event["kind"], event["rounds_done"], event["client"]) == ("ended", 1, "client-000")
    for key, value in (
        *(("rounds_done", 0), ("client", "client-002"), ("epsilon", 1.2), ("epsilon_next", 3.1)),
        *(("why", "the clients had enough"), ("kind", "absent"), ("epsilon", None)),
    ):
        pages(folder, {**report, "events": [{**event, key: value}]})
        assert codes(folder) == [f"events[0].{key}"], key
    pages(folder, {**report, "events": []})
    assert verify(folder) == ["events has 0 entries, but 1 are expected"]


def test_reduced_straggler_steps_are_detected(tmp_path: Path) -> None:
    """Stragglers and their passes are drawn publicly."""
    method = {"local_epochs": 4, "stragglers": 0.7}
    folder = run(tmp_path, {**settings("fedprox", noise_multiplier=3.0), "method": method})
    assert verify(folder) == []
    row(1, "stragglers", {"0": 1, "1": 312})(folder)
    assert "metrics.jsonl.stragglers.1" in codes(folder)
    rewrite_ledger(folder)
    assert codes(folder).count(CHARGES) == 6
