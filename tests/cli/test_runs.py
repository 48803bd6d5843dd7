"""`fedsynth runs`: what differs between run folders, and what came out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[..., Any]


def test_runs_are_compared(train: Call, fedsynth: Call) -> None:
    output = train("fedprox --set mu=0.1").output
    train("fedprox --set mu=0.5 --local-test 0.2")
    train("fedavg --dp-epsilon 8 --set weight_decay=0.1")
    (output / "20990101-000000-fedavg-digits.incomplete").mkdir()
    found = fedsynth(f"runs {output} --json")
    assert found.code == 0, found.stderr
    rows = json.loads(found.stdout)
    assert [row["method"] for row in rows] == ["fedprox", "fedprox", "fedavg"]
    assert [row["settings"].get("mu") for row in rows] == [0.1, 0.5, None]
    # another method's weight decay is another setting
    assert "weight_decay" not in rows[2]["settings"]
    assert [row["settings"]["partition.local_test"] for row in rows] == [0.0, 0.2, 0.0]
    # the same everywhere
    assert all("clients" not in key for row in rows for key in row["settings"])
    summaries = [json.loads((output / row["run"] / "summary.json").read_text()) for row in rows]
    for row, summary in zip(rows, summaries, strict=True):
        assert row["test_accuracy"] == summary["test_accuracy"]
        assert row["upload_bytes"] == summary["upload_bytes"]
    assert rows[1]["local"]["amp"] == summaries[1]["local"]["amp"]
    assert (
        rows[2]["differential_privacy"]["epsilon"]
        == summaries[2]["differential_privacy"]["epsilon"]
    )
    assert "differential_privacy" not in rows[0]
    lines = fedsynth(f"runs {output}").stdout.splitlines()
    assert lines[0].split()[:5] == ["method", "accuracy", "AMP", "WLP", "ε"]
    assert [line.split()[0] for line in lines[1:]] == ["fedprox", "fedprox", "fedavg"]
    assert f"{100 * rows[1]['local']['amp']:.2f} %" in lines[2]
    assert lines[2].endswith("mu=0.5")
    one = json.loads(fedsynth(f"runs {output / rows[0]['run']} --json").stdout)
    assert [(row["run"], row["settings"]) for row in one] == [(rows[0]["run"], {})]


def test_damaged_and_missing_summaries(fedsynth: Call, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    for text in ("{", "[]"):
        (tmp_path / "broken" / "summary.json").write_text(text)
        wrong = fedsynth(f"runs {tmp_path}")
        assert (wrong.code, len(wrong.stderr.splitlines())) == (2, 1)
    (tmp_path / "broken" / "summary.json").write_text('{"method": "a", "test_accuracy": null}')
    shown = fedsynth(f"runs {tmp_path}")
    assert (shown.code, "accuracy" in shown.stdout) == (0, False)
