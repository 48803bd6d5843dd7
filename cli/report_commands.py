"""`fedsynth privacy report | verify | sign`: what a run folder says of its privacy, and whether it
holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsynth.cli.errors import OptionError, write_text
from fedsynth.cli.options import OwnFeatures, OwnMethod, OwnModel
from fedsynth.cli.own_code_options import own_code_alone
from fedsynth.cli.paths import path_argument, path_option

SHOWN = 40  # mismatches

Run = Annotated[
    Path,
    path_argument("A run folder, or its privacy_report.json.", metavar="RUN"),
]
LedgerFolder = Annotated[
    Path | None,
    path_option(
        "Folder of the ledger files (default: ledger/ in the run folder, or where config.toml "
        "keeps them).",
        "--ledger",
    ),
]


def report(
    run: Run,
    form: Annotated[str, typer.Option("--format", help="markdown, json or html.")] = "markdown",
    output: Annotated[
        Path | None,
        path_option("Write there, and not to the screen."),
    ] = None,
    ledger: LedgerFolder = None,
    method: OwnMethod = None,
    model: OwnModel = None,
    features: OwnFeatures = None,
) -> None:
    """Show a run's privacy budget report.

    A run that was killed has none yet: its report is built from its ledgers, and written into its
    folder.
    """
    from fedsynth.privacy.report_file import sound_report
    from fedsynth.privacy.report_pages import render_html, render_markdown
    from fedsynth.validation import check_choice

    check_choice(None, "format", form, ("markdown", "json", "html"))
    own_code_alone(method, model, features)
    _report_unfinished(run, ledger)
    found = sound_report(run)
    render = {"markdown": render_markdown, "html": render_html, "json": _json}
    text = render[form](found)
    if output is None:
        print(text, end="")
    else:
        write_text(output, text)


def _json(found: dict[str, Any]) -> str:
    """As JSON; characters that steer a terminal are escaped."""
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _report_unfinished(run: Path, ledger: Path | None) -> None:
    """Makes the report of a run that did not finish."""
    if not run.is_dir():
        return
    from fedsynth.federation.outputs.verification import is_unfinished, unfinished_report
    from fedsynth.privacy.report import write_report

    if is_unfinished(run):
        write_report(unfinished_report(run, ledger=ledger), run)
        print(
            "note: the run did not finish; its report was built from its ledgers and written into "
            f"{run}",
            file=sys.stderr,
        )


def verify(
    run: Run,
    ledger: LedgerFolder = None,
    public_key: Annotated[
        Path | None,
        path_option("Also check the run's signature, with this Ed25519 key in PEM."),
    ] = None,
    method: OwnMethod = None,
    model: OwnModel = None,
    features: OwnFeatures = None,
) -> None:
    """Build the report again from the run's settings and ledgers; exit code 1 and the differences
    if it says anything else.

    summary.json and metrics.jsonl must give the same ε. This checks bookkeeping. It does not attest
    that noise was added.
    """
    from fedsynth.federation.outputs.verification import verify_run
    from fedsynth.privacy.formatting import printable

    key = _public_key(public_key)
    own_code_alone(method, model, features)
    found = verify_run(run, ledger=ledger)
    problems, note = _signature(run if run.is_dir() else run.parent, key)
    problems = [*found.problems, *problems]
    for problem in problems[:SHOWN]:
        print(f"mismatch: {printable(problem)}")
    if len(problems) > SHOWN:
        print(f"and {len(problems) - SHOWN} mismatches more")
    if problems:
        raise typer.Exit(1)
    print(
        "the report is the one that follows from the run's settings and ledger rows, and "
        "summary.json and metrics.jsonl agree with it "
        "(bookkeeping only: this does not attest that noise was added)"
    )
    for text in (*found.notes, note):
        print(printable(text))


def _public_key(path: Path | None) -> Any:
    if path is None:
        return None
    from fedsynth.privacy.signing import read_public_key

    return read_public_key(path)


def _signature(folder: Path, key: Any) -> tuple[list[str], str]:
    """What the signature's check finds, and what it says if it finds nothing."""
    from fedsynth.privacy.signing import SIGNATURE, signature_problems

    if key is not None:
        return signature_problems(folder, key), "the signature is this key's, over these files"
    if (folder / SIGNATURE).exists():
        return [], "the run is signed; the signature was not checked (--public-key FILE)"
    return [], "the run is not signed: whoever can rewrite all its files can also make them agree"


def sign(
    run: Annotated[Path, path_argument("A run folder.", metavar="RUN")],
    key: Annotated[Path, path_option("A private Ed25519 key in PEM.")],
) -> None:
    """Sign all files of a run folder (but simulation_only/) by their hashes, into signature.json.

    Keys: `openssl genpkey -algorithm ed25519 -out key.pem`, `openssl pkey -in key.pem -pubout -out
    key.pub`.
    """
    signer(key, True)(run)


def signer(key: Path | None, private: bool) -> Callable[[Path], None]:
    """What signs a run folder with this key, which is read now; None signs nothing.

    Args:
        private: whether the run has differential privacy, and so a report to vouch for.
    """
    if key is None:
        return lambda folder: None
    if not private:
        raise OptionError(
            "--sign-key signs a run's privacy report and what belongs to it, and this run has no "
            "differential privacy"
        )
    from fedsynth.privacy.signing import read_private_key, sign_run

    private_key = read_private_key(key)

    def write(folder: Path) -> None:
        print(f"signed: {sign_run(folder, private_key)}", file=sys.stderr)

    return write
