"""`fedsynth runs`: run folders beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsynth.cli.errors import one_line_errors
from fedsynth.cli.settings_options import read_config
from fedsynth.errors import SettingError

QUIET = (
    "run.method",
    "run.device",
    "data.data_root",
    "privacy.ledger",
    "privacy.epsilon",
)  # said elsewhere, or no matter for a result


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders of such; default: runs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Finished runs beside each other: in what their settings differ, and what came out.

    Example: `for mu in 0.01 0.1 1; do fedsynth train --method fedprox --set mu=$mu; done; fedsynth runs`.
    """
    with one_line_errors():
        given = folders or [Path("runs")]
        found = [run for folder in given for run in run_folders(folder)]
        if not found:
            raise SettingError(f"no finished run in {', '.join(str(folder) for folder in given)}")
        rows = compared(found)
        if as_json:
            print(json.dumps(rows, indent=2, ensure_ascii=False))
        else:
            _print(rows)


def run_folders(folder: Path) -> list[Path]:
    """A finished run's folder itself, or those right below it, by time: the stamp in the name, and within a second the summary's file."""
    if (folder / "summary.json").is_file():
        return [folder]
    found = [path for path in folder.glob("*/summary.json") if path.parent.suffix != ".incomplete"]
    return [
        path.parent
        for path in sorted(found, key=lambda path: (path.parent.name[:15], path.stat().st_mtime_ns))
    ]


def compared(folders: list[Path]) -> list[dict[str, Any]]:
    """A row for each run. Of its settings those that differ: the method's between runs of the same method, all others between all runs."""
    read = [(folder, _summary(folder), _settings(folder)) for folder in folders]
    rows = []
    for folder, summary, settings in read:
        method = summary.get("method")
        differ = {}
        for key, value in settings.items():
            alike = [
                s
                for _, other, s in read
                if not key.startswith("method.") or other.get("method") == method
            ]
            if key not in QUIET and any(s.get(key, value) != value for s in alike):
                differ[key.removeprefix("method.").removeprefix("run.")] = value
        local, private = summary.get("local", {}), summary.get("differential_privacy", {})
        rows.append(
            {
                "run": folder.name,
                "method": method,
                "dataset": summary.get("dataset"),
                "settings": differ,
                "rounds": summary.get("rounds"),
                "test_accuracy": summary.get("test_accuracy"),
                **({"amp": local["amp"], "wlp": local["wlp"]} if local else {}),
                **({"epsilon": private.get("epsilon")} if private else {}),
                "upload_bytes": summary.get("upload_bytes"),
                "seconds": summary.get("seconds"),
            }
        )
    return rows


def _summary(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"cannot read {folder / 'summary.json'}: {error}") from None
    if not isinstance(found, dict):
        raise SettingError(f"{folder / 'summary.json'} is no run's summary")
    return found


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.toml"
    sections = read_config(path) if path.is_file() else {}
    return {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
    }


def _print(rows: list[dict[str, Any]]) -> None:
    """Aligned columns, as wide as they are: nothing is cut."""
    from fedsynth.privacy.report_text import up

    percent = {"test_accuracy": "accuracy", "amp": "AMP", "wlp": "WLP"}
    shown = [key for key in percent if any(row.get(key) is not None for row in rows)]
    private = any("epsilon" in row for row in rows)
    table = [
        [
            "method",
            *(percent[key] for key in shown),
            *(["ε"] if private else []),
            "MB up",
            "s",
            "run",
            "settings that differ",
        ]
    ]
    for row in rows:
        values = ["–" if row.get(key) is None else f"{100 * row[key]:.2f} %" for key in shown]
        spent = ["–" if row.get("epsilon") is None else up(row["epsilon"])] if private else []
        seconds = "–" if row["seconds"] is None else f"{row['seconds']:.1f}"
        differ = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
        table.append(
            [
                str(row["method"]),
                *values,
                *spent,
                f"{(row['upload_bytes'] or 0) / 1e6:.2f}",
                seconds,
                row["run"],
                differ,
            ]
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
