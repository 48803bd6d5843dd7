"""Every tampering with a run folder is noticed, also by one who makes the rest of the report fit.

What is beyond reach stands in docs/privacy.md: a folder of which *all* files were made anew, which
only a signature shows.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth.config_file import to_toml
from fedsynth.federation.outputs.report_context import provenance
from fedsynth.federation.outputs.verification import _same_refusal, verify_run
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.resolve import resolve
from fedsynth.privacy import report_sections as sections
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.releases import ADJACENCIES
from fedsynth.privacy.report import render_html, render_markdown
from tests.unfolded import unfolded

Report = dict[str, Any]
Tamper = Callable[[Path], None]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(output: Path, **privacy: Any) -> Path:
    """The folder of two tiny private rounds with three clients."""
    chosen = {
        "run": {"method": "feddm", "rounds": 2, "device": "cpu"},
        "partition": {"clients": 3},
        "model": {"width": 4, "depth": 2},
        "method": {"iterations": 3, "ipc": 1, "server_epochs": 1},
        "privacy": {"noise_multiplier": 1.0, **privacy},
    }
    folder = simulate(resolve(chosen), output=output).folder
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ε above 10, so that there is a warning, and a cap that is not reached."""
    return run(tmp_path_factory.mktemp("runs"), epsilon=50.0, sample_rate=1.0)


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / finished.name))


def found(folder: Path, **values: Any) -> list[str]:
    return verify_run(folder, **values).problems


def rewrite(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False) + "\n")


def pages(folder: Path, report: Report) -> None:
    """Writes the report, and pages that say what it says."""
    rewrite(folder / "privacy_report.json", report)
    (folder / "privacy_report.md").write_text(render_markdown(report))
    (folder / "privacy_report.html").write_text(render_html(report))


def computed(report: Report) -> None:
    """Makes all figures fit the report's own rows, δ and adjacency."""
    rows, promise, budget = unfolded(report), report["guarantee"], report["budget"]
    adjacency = next(name for name, words in ADJACENCIES.items() if words == report["adjacency"])
    promise = sections.guarantee(rows, promise["delta"], adjacency).to_json()
    report["guarantee"] = promise
    worst = promise["worst_client"]
    accountant = sections.accountant(rows, worst, promise["delta"], adjacency)
    report["accountant"] = accountant.to_json()
    report["budget"] = sections.budget(
        promise["epsilon"], budget["epsilon_cap"], budget["planned_rounds"], budget["rounds_done"]
    ).to_json()


def edit(change: Callable[[Report], Any]) -> Tamper:
    """A change of the report, after which its figures are computed again and its pages are made
    anew."""

    def tamper(folder: Path) -> None:
        report = json.loads((folder / "privacy_report.json").read_text())
        change(report)
        computed(report)
        pages(folder, report)

    return tamper


def at(content: Any, path: str) -> tuple[Any, Any]:
    """What holds the last key of a path such as `scope/0/status`, and that key."""
    *first, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in first:
        content = content[key]
    return content, last


def changed(name: str, path: str, value: Any) -> Tamper:
    """One value of a JSON file, and nothing else."""

    def tamper(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        where, key = at(content, path)
        where[key] = value
        rewrite(folder / name, content)

    return tamper


def put(path: str, value: Any) -> Tamper:
    """One value of the report, with figures and pages that fit."""

    def change(report: Report) -> None:
        where, key = at(report, path)
        where[key] = value

    return edit(change)


def drop(path: str) -> Tamper:
    def change(report: Report) -> None:
        where, key = at(report, path)
        del where[key]

    return edit(change)


def config(section: str, **values: Any) -> Tamper:
    """A change of config.toml, with the report's hash of it made to fit."""

    def tamper(folder: Path) -> None:
        read = tomllib.loads((folder / "config.toml").read_text())
        read[section] = {k: v for k, v in {**read[section], **values}.items() if v is not None}
        (folder / "config.toml").write_text(to_toml(read))
        report = json.loads((folder / "privacy_report.json").read_text())
        report["provenance"]["config"] = provenance(resolve(read))["config"]
        pages(folder, report)

    return tamper


def text(name: str, old: str, new: str) -> Tamper:
    def tamper(folder: Path) -> None:
        content = (folder / name).read_text()
        assert old in content
        (folder / name).write_text(content.replace(old, new, 1))

    return tamper


def both(*tampers: Tamper) -> Tamper:
    def tamper(folder: Path) -> None:
        for one in tampers:
            one(folder)

    return tamper


def delete(name: str) -> Tamper:
    def tamper(folder: Path) -> None:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    return tamper


def hide_last_rows(report: Report) -> None:
    report["ledger_kept"] = True
    rows = {client: some[:1] for client, some in unfolded(report).items()}
    report["ledger"] = [entry.to_json() for entry in sections.folded_ledger(rows)]


def without_client(report: Report) -> None:
    for entry in report["ledger"]:
        entry["clients"].remove("client-002")
    del report["ledger_heads"]["client-002"]


def renamed_client(report: Report) -> None:
    for entry in report["ledger"]:
        entry["clients"] = [c.replace("client-000", "client-009") for c in entry["clients"]]
    report["ledger_heads"]["client-009"] = report["ledger_heads"].pop("client-000")


def renamed_mechanism(report: Report) -> None:
    report.update(json.loads(json.dumps(report).replace('"residual"', '"gradient"')))


def more_noise(report: Report) -> None:
    for entry in report["ledger"]:
        entry["noise_multiplier"] = 10.0
        entry["noise_standard_deviation"] = 10.0 * entry["sensitivity"]


def swapped_files(folder: Path) -> None:
    one = folder / "ledger" / "client-000.jsonl"
    other = folder / "ledger" / "client-001.jsonl"
    content = one.read_text()
    one.write_text(other.read_text())
    other.write_text(content)


def truncated(folder: Path) -> None:
    file = folder / "ledger" / "client-001.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def rewritten_ledger(folder: Path) -> None:
    """Fewer steps at every client, with sound chains, heads and figures: but config.toml plans
    other ones."""
    report = json.loads((folder / "privacy_report.json").read_text())
    for path in sorted((folder / "ledger").iterdir()):
        old = read_ledger(path)
        rows = old.releases
        path.unlink()
        made = Ledger(old.client, path, dataset=old.dataset)
        for row in rows:
            made.charge(replace(row, steps=1))
        report["ledger_heads"][old.client]["chain"] = made.history().chain
    for entry in report["ledger"]:
        entry["steps"] = 1
    computed(report)
    pages(folder, report)


def extra_ledger(folder: Path) -> None:
    Ledger("client-003", folder / "ledger" / "client-003.jsonl", dataset="x")


def no_rounds(folder: Path) -> None:
    """The run as if its cap had allowed no round."""
    (folder / "metrics.jsonl").unlink()
    changed("summary.json", "rounds", 0)(folder)
    put("budget/rounds_done", 0)(folder)


def fewer_rounds(folder: Path) -> None:
    """The run as if it had ended after round 1, in all files but the ledgers."""
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    changed("summary.json", "rounds", 1)(folder)
    put("budget/rounds_done", 1)(folder)


REPORT: dict[str, tuple[Tamper, str]] = {
    "last rows hidden behind a kept ledger": (edit(hide_last_rows), "the report lacks synthetic"),
    "δ": (put("guarantee/delta", 6e-4), "guarantee.delta says 0.0006"),
    "a client": (edit(without_client), "whom the report does not name"),
    "a client and its ledger": (
        both(edit(without_client), delete("ledger/client-002.jsonl")),
        "other clients than privacy_start.json",
    ),
    "the worst client renamed": (edit(renamed_client), "has no ledger of client-009"),
    "a client invented": (
        put("ledger_heads/x", {"rows": 0, "rows_before": 0, "chain": None}),
        "has no ledger of x",
    ),
    "the cap": (put("budget/epsilon_cap", 15.0), "budget.epsilon_cap says 15"),
    "no cap": (put("budget/epsilon_cap", None), "budget.epsilon_cap says None"),
    "planned rounds": (put("budget/planned_rounds", 9), "budget.planned_rounds says 9"),
    "rounds done": (put("budget/rounds_done", 1), "budget.rounds_done says 1"),
    "all assumptions": (put("verdict/assumptions", []), "verdict.assumptions has 0 entries"),
    "an assumption": (put("verdict/assumptions/0", "none"), "verdict.assumptions[0] says 'none'"),
    "the warning": (drop("verdict/warnings/0"), "verdict.warnings has 0 entries"),
    "the verdict's text": (put("verdict/text", "certified"), "verdict.text says 'certified'"),
    "no guarantee after all": (put("verdict/formal", False), "verdict.formal says False"),
    "the trust model": (put("trust_model/secure_aggregation", "yes"), "secure_aggregation says"),
    "an invented audit": (put("audit", "passed: proves ε ≤ 0.1"), "audit says 'passed"),
    "σ of the rows": (edit(more_noise), "the ledger file lacks synthetic"),
    "σ of the run": (put("noise_multiplier", 10.0), "noise_multiplier says 10"),
    "adjacency": (put("adjacency", ADJACENCIES["replace-one"]), "adjacency says"),
    "the bound on records": (put("max_records", 10), "max_records says 10"),
    "the data set": (put("data_set/train_size", 10), "data_set.train_size says 10"),
    "a public item": (put("public_items/sample rate q", "0.01"), "sample rate q says '0.01'"),
    "a public item more": (put("public_items/x", "y"), "public_items.x says 'y'"),
    "a row of the scope": (drop("scope/0"), "scope has"),
    "a scope row's status": (put("scope/1/status", "accounted"), "scope[1].status says"),
    "a deviation": (put("deviations", ["ended after 1 of 2 rounds: x"]), "deviations has 1"),
    "the randomness": (put("randomness", "quantum"), "randomness says 'quantum'"),
    "the paper's figure beside ours": (drop("published/0"), "published has 0 entries"),
    "the hash of config.toml": (put("provenance/config", "0" * 32), "provenance.config says"),
    "a seal among the versions": (put("provenance/torch", "audited by X"), "torch is no version"),
    "the mechanism's name": (edit(renamed_mechanism), "mechanism says 'gradient'"),
    "the method's name": (put("method", "fedavg"), "method says 'fedavg'"),
    "who is protected": (put("unit/protects", "EVERY PERSON"), "unit.protects says"),
    "what is not covered": (drop("not_covered/timing"), "not_covered.timing is missing"),
    "rows from before the run": (put("ledger_heads/client-000/rows_before", 1), "rows_before says"),
    "a head's rows": (put("ledger_heads/client-000/rows", 1), "the report speaks of 1"),
    "a head's chain hash": (put("ledger_heads/client-000/chain", None), "the chain hash"),
    "an unknown key": (put("certificate", "gold"), "certificate is no key"),
    "an unknown key further in": (put("scope/0/seal", "x"), "scope.0.seal is no key"),
    "the Markdown alone": (text("privacy_report.md", "ε = ", "ε = 0."), ".md does not say"),
    "the page alone": (text("privacy_report.html", "<p>", "<p>Good. "), ".html does not say"),
}
LEDGERS: dict[str, tuple[Tamper, str]] = {
    "files swapped": (swapped_files, "client-000.jsonl is the ledger of 'client-001'"),
    "the last row cut off": (truncated, "the ledger file has 1 rows, the report speaks of 2"),
    "a row edited": (text("ledger/client-000.jsonl", '"steps": 3', '"steps": 1'), "was edited"),
    "rewritten with sound chains": (rewritten_ledger, "by config.toml synthetic"),
    "one deleted": (delete("ledger/client-001.jsonl"), "has no ledger of client-001"),
    "all deleted": (delete("ledger"), "there is no ledger folder"),
    "one added": (extra_ledger, "has a ledger of client-003"),
}
DP = "differential_privacy"
OTHER_FILES: dict[str, tuple[Tamper, str]] = {
    "summary: ε": (changed("summary.json", f"{DP}/epsilon", 0.1), f"{DP}.epsilon says 0.1"),
    "summary: δ": (changed("summary.json", f"{DP}/delta", 1e-9), f"{DP}.delta says 1e-09"),
    "summary: σ": (changed("summary.json", f"{DP}/noise_multiplier", 9.0), "noise_multiplier says"),
    "summary: a seal": (changed("summary.json", f"{DP}/seal", 1), f"{DP}.seal says 1"),
    "summary: another ε": (changed("summary.json", "epsilon", 0.1), "epsilon is no key"),
    "summary: no privacy": (changed("summary.json", DP, None), f"{DP} says None"),
    "summary: method": (changed("summary.json", "method", "fedavg"), "summary.json: method says"),
    "summary: settings": (changed("summary.json", "settings/iterations", 1), "iterations says 1"),
    "metrics: ε": (text("metrics.jsonl", '"epsilon": ', '"epsilon": 0.1, "was": '), "round 1 says"),
    "metrics: no ε": (text("metrics.jsonl", '"epsilon": ', '"was": '), "round 1 says None"),
    "metrics: a round": (text("metrics.jsonl", '"round": 1', '"round": 2'), "is not of round 1"),
    "all rounds, everywhere": (no_rounds, "no cap explains the end there"),
    "the last round, everywhere": (fewer_rounds, "no cap explains the end there"),
    "config: σ": (
        config("privacy", noise_multiplier=10.0),
        "says σ = 1.0, and config.toml and the ledgers give 10",
    ),
    "config and start: σ": (
        both(
            config("privacy", noise_multiplier=10.0),
            changed("privacy_start.json", "noise_multiplier", 10.0),
        ),
        "by config.toml synthetic",
    ),
    "config: no σ": (config("privacy", noise_multiplier=None), "config.toml and the ledgers give"),
    "config: δ": (config("privacy", delta=6e-4), "guarantee.delta says 1e-05"),
    "config: the cap": (config("privacy", epsilon=60.0), "budget.epsilon_cap says 50"),
    "config: adjacency": (config("privacy", adjacency="zero-out"), "adjacency says"),
    "config: max_records": (config("privacy", max_records=5000), "max_records says"),
    "config: the clip": (config("privacy", clip=0.1), "by config.toml synthetic"),
    "config: the rate": (config("privacy", sample_rate=0.5), "by config.toml synthetic"),
    "config: a kept ledger": (config("privacy", ledger="/nowhere"), "ledger_kept says False"),
    "config: rounds": (config("run", rounds=3), "no cap explains the end there"),
    "config: participation": (
        config("run", participation=0.34),
        "which by config.toml is not charged",
    ),
    "config: clients": (config("partition", clients=2), "has 2 clients, and privacy_start.json 3"),
    "config: partition": (config("partition", alpha=0.1), "another data set's or partition's"),
    "config: iterations": (config("method", iterations=1), "by config.toml synthetic"),
    "config: method": (text("config.toml", '"feddm"', '"fedavg"'), "config.toml: unknown setting"),
    "config: unknown method": (text("config.toml", '"feddm"', '"mine"'), "a method of your own"),
    "config: data set": (text("config.toml", '"digits"', '"mnist"'), "names the data set 'mnist'"),
    "config: a setting that is none": (text("config.toml", "[method]", "[method]\nx = 1"), "'x'"),
    "config: a section that is none": (text("config.toml", "[privacy]", "[dp]"), "'dp'"),
    "config: no TOML": (text("config.toml", "[run]", "[run"), "not valid TOML"),
    "config: loose": (text("config.toml", "[run]", "x = 1\n[run]"), "outside every section"),
    "start: rows": (
        changed("privacy_start.json", "ledgers/client-000/rows", 1),
        "ledger_heads.client-000.rows_before says 0",
    ),
    "start: chain": (
        changed("privacy_start.json", "ledgers/client-000/chain", "0"),
        "first 0 rows are not those of privacy_start.json",
    ),
    "start: data set's size": (
        changed("privacy_start.json", "data_set/train_size", 10),
        "gives digits another train_size",
    ),
    "start: data set": (changed("privacy_start.json", "data_set/name", "x"), "names the data set"),
    "start: no data set": (changed("privacy_start.json", "data_set/mean", "x"), "specification"),
    "start: test images": (
        changed("privacy_start.json", "test_images", "private"),
        "metrics.jsonl: round 1 has an accuracy, and the test images are private",
    ),
    "start: none such": (changed("privacy_start.json", "test_images", "x"), "test_images is wrong"),
    "start: schema": (changed("privacy_start.json", "schema_version", 2), "is of schema 2"),
    "start: an unknown key": (changed("privacy_start.json", "x", 1), "x is no key"),
    **{
        f"{name}: deleted": (delete(name), f"{name} is missing")
        for name in (
            *("config.toml", "privacy_start.json", "metrics.jsonl", "summary.json"),
            *("model.safetensors", "synthetic.safetensors"),
            *("privacy_report.md", "privacy_report.html"),
        )
    },
}
TAMPERINGS = {
    **{f"report: {name}": one for name, one in REPORT.items()},
    **{f"ledgers: {name}": one for name, one in LEDGERS.items()},
    **OTHER_FILES,
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_tampering_is_noticed(name: str, folder: Path) -> None:
    tamper, words = TAMPERINGS[name]
    tamper(folder)
    problems = found(folder)
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"schema_version": 3', '"schema_version": 2', "schema 2"),
        ('"schema_version": 3', '"schema_version": NaN', "NaN is no number"),
        ('"epsilon_cap": 50.0', '"epsilon_cap": Infinity', "Infinity is no number"),
        ('"max_records"', '"method": "fedavg", "max_records"', "a key stands twice"),
        ("{", "", "is not a privacy report"),
    ],
)
def test_what_is_no_report_is_an_error(old: str, new: str, words: str, folder: Path) -> None:
    text("privacy_report.json", old, new)(folder)
    with pytest.raises(PrivacyError, match=words):
        verify_run(folder)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "name", ["summary.json", "metrics.jsonl", "privacy_start.json", "config.toml"]
)
@pytest.mark.parametrize(
    "content",
    [
        *("", "\n", "[]", "{}\n", "\ud800", "\0", '{"a": 1, "a": 2}\n'),
        *(f'{{"round": {DEEP}}}\n', '{"round": 1e999}\n', '{"round": [1]}\n'),
        '{"round": 1, "epsilon": {}}\n{"round": 2, "epsilon": 1' + "0" * 4000 + "}\n",
        *(f"x = {DEEP}", "[run]\nmethod = 5", "[run]\nrounds = 1" + "0" * 4000),
        '[privacy]\nnoise_multiplier = 1e400\n[run]\nmethod = "feddm"',
        "[model]\nwidth = 100000000000\n[privacy]\nnoise_multiplier = 1.0",
    ],
)
def test_damaged_files_are_a_mismatch_or_an_error_and_no_traceback(
    name: str, content: str, folder: Path
) -> None:
    (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    try:
        problems = found(folder)
    except PrivacyError as error:
        problems = [str(error)]
    assert problems
    assert all(len(problem) < 2000 for problem in problems)


def test_a_report_of_another_version_is_said_to_be_one(folder: Path) -> None:
    put("provenance/fedsynth", "0.0.9")(folder)
    assert found(folder) == []
    put("verdict/assumptions/0", "as it was said in 0.0.9")(folder)
    assert "made by fedsynth 0.0.9" in found(folder)[-1]


def test_a_run_without_a_guarantee_cannot_be_turned_into_a_formal_one(
    folder: Path, tmp_path: Path
) -> None:
    """The verdict, and also everything else, of the formal report of the same settings."""
    paper = run(tmp_path, mechanism="paper")
    report = json.loads((paper / "privacy_report.json").read_text())
    honest = json.loads((folder / "privacy_report.json").read_text())
    pages(paper, {**report, "verdict": honest["verdict"]})
    assert any("verdict.formal says True" in problem for problem in found(paper))
    pages(paper, honest)
    assert any("guarantee says {" in problem for problem in found(paper))


def test_a_kept_ledger_out_of_reach_is_said(tmp_path: Path) -> None:
    folder = run(tmp_path, ledger=str(tmp_path / "kept"))
    (tmp_path / "kept").rename(tmp_path / "moved")
    result = verify_run(folder)
    assert result.problems == []
    assert "no ledger file was compared" in result.notes[0]
    assert "moved" in verify_run(folder, ledger=tmp_path / "moved").notes[0]
    assert found(folder, ledger=tmp_path / "nowhere") == [
        f"there is no ledger folder {tmp_path / 'nowhere'}"
    ]
    edit(hide_last_rows)(folder)
    assert any("has 1 rows, and its ledger head 2" in problem for problem in found(folder))
    edit(lambda r: [head.update(rows=1) for head in r["ledger_heads"].values()])(folder)
    assert any("by config.toml synthetic" in problem for problem in found(folder))
    assert any("chain hash" in p for p in found(folder, ledger=tmp_path / "moved"))


def test_what_ends_a_run_before_its_last_round_is_the_cap(tmp_path: Path) -> None:
    folder = run(tmp_path, noise_multiplier=3.0, epsilon=3.0)
    report = json.loads((folder / "privacy_report.json").read_text())
    (stated,) = report["deviations"]
    for words in (
        stated.replace("after 1 of", "after 0 of"),
        stated.replace("client-000", "client-002"),
        stated.replace("above the cap 3", "above the cap 5"),
        re.sub(r"epsilon is [\d.]+", "epsilon is 1.2", stated),
        "the clients had enough",
        stated + " (checked)",
    ):
        assert words != stated
        pages(folder, {**report, "deviations": [words]})
        assert [p.split()[0] for p in found(folder)] == ["deviations[0]"], words
    pages(folder, {**report, "deviations": []})
    assert found(folder) == ["deviations has 0 entries, and should have 1"]


def test_a_refusal_is_the_same_but_for_rounding() -> None:
    said = (
        "ended after 1 of 2 rounds: client 'a': epsilon is 3.052 now and would be 4.612 with the "
        "planned release, "
        "above the cap 4 (delta 1e-05)"
    )
    assert _same_refusal(said.replace("3.052", "3.053"), said, exact=True)
    assert not _same_refusal(said.replace("3.052", "3.152"), said, exact=True)
    assert _same_refusal(said.replace("3.052", "3.152").replace("'a'", "'b'"), said, exact=False)
    assert not _same_refusal(said.replace("3.052", "little"), said, exact=False)
    assert not _same_refusal(said.replace("1 of", "0 of"), said, exact=False)


def test_fewer_steps_than_a_straggler_has_are_noticed(tmp_path: Path) -> None:
    """Who is late, and by how much, is drawn publicly. Old form: with stragglers any smaller number
    of steps passed, at any client."""
    chosen = {
        "run": {"method": "fedprox", "rounds": 2, "device": "cpu"},
        "partition": {"clients": 3},
        "model": {"width": 4, "depth": 2},
        "method": {"local_epochs": 4, "batch": 128, "stragglers": 0.7},
        "privacy": {"noise_multiplier": 3.0},
    }
    folder = simulate(resolve(chosen), output=tmp_path).folder
    assert folder is not None
    assert found(folder) == []
    rewritten_ledger(folder)
    assert sum("is charged, and the ledger has no such row" in text for text in found(folder)) == 6


def test_what_only_a_simulation_may_show_is_noticed(folder: Path) -> None:
    """Old form: whatever a row said passed, and a summary with figures of generated images did
    not."""
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["seconds"] = 1.5
    rows[1]["models"] = {"aca": {"test_accuracy": 0.5, "local": {"amp": 0.5}}}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (changed_file, *problems) = found(folder)
    assert changed_file.startswith("files.metrics.jsonl says ")  # another hash than the report's
    assert problems == [
        "metrics.jsonl: round 1 says seconds, which may not be shown",
        "metrics.jsonl: round 2 says local, which may not be shown",
    ]
