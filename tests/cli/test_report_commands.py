"""`fedsynth privacy report | verify | sign` and `train --sign-key`; reports of killed runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.privacy.ledger import read_ledger

FAST = (
    *("--rounds", "2", "--clients", "3", "--width", "4", "--device", "cpu"),
    *("--set", "iterations=2", "--set", "server_epochs=1", "--set", "ipc=1"),
)


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})


def trained(output: Path, *words: str) -> Path:
    run = call("train", *FAST, "--output", str(output), *words)
    assert run.exit_code == 0, run.output
    (folder,) = output.iterdir()
    return folder


def test_reports_are_shown_and_verified(tmp_path: Path) -> None:
    folder = trained(tmp_path / "out", "--dp-epsilon", "4", "--dp-mechanism", "features")
    shown = call("privacy", "report", str(folder)).stdout
    assert shown == (folder / "privacy_report.md").read_text()
    assert "class counts" in shown
    page = tmp_path / "page.html"
    html = ("--format", "html", "--output", str(page))
    assert call("privacy", "report", str(folder), *html).exit_code == 0
    assert page.read_text() == (folder / "privacy_report.html").read_text()
    as_json = json.loads(call("privacy", "report", str(folder), "--format", "json").stdout)
    assert as_json == json.loads((folder / "privacy_report.json").read_text())
    good = call("privacy", "verify", str(folder))
    assert good.exit_code == 0, good.output
    for text in ("does not attest", "were compared with the ledger files", "is not signed"):
        assert text in good.stdout
    file = folder / "privacy_report.json"
    report = json.loads(file.read_text())
    report["guarantee"]["epsilon"] /= 2
    report["provenance"]["\x1b[2J"] = "<b>"
    file.write_text(json.dumps(report))
    bad = call("privacy", "verify", str(folder))
    assert bad.exit_code == 1
    assert "mismatch: guarantee.epsilon says" in bad.stdout
    for form in ("markdown", "json", "html"):
        text = call("privacy", "report", str(folder), "--format", form).stdout
        assert text.replace("\n", "").isprintable()
    assert "<b>" not in text


def test_a_flood_of_mismatches_is_cut(tmp_path: Path) -> None:
    folder = trained(tmp_path, "--dp-sigma", "3")
    file = folder / "privacy_report.json"
    report = json.loads(file.read_text())
    report["public_items"] = {str(number): "" for number in range(200)}
    file.write_text(json.dumps(report))
    bad = call("privacy", "verify", str(folder))
    assert bad.exit_code == 1
    assert len(bad.stdout.splitlines()) == 41
    assert "mismatches more" in bad.stdout


def test_what_cannot_be_reported_is_one_line(tmp_path: Path) -> None:
    folder = trained(tmp_path / "out", "--dp-sigma", "3")
    (folder / "privacy_report.json").write_text('{"schema_version": 3, "unit": {}}')
    empty = tmp_path / "empty"
    empty.mkdir()
    open_run = trained(tmp_path / "open")
    open_run = open_run.rename(f"{open_run}.incomplete")
    (open_run / "summary.json").unlink()
    for words, text in (
        (("report", str(empty)), "cannot read a privacy report"),
        (("verify", str(empty)), "cannot read a privacy report"),
        (("report", str(empty), "--format", "pdf"), "format"),
        (("report", str(folder)), "is damaged: verdict is missing"),
        (("report", str(open_run)), "had no differential privacy"),
        (("verify", str(open_run)), "fedsynth privacy report"),
        (("sign", str(empty), "--key", str(empty / "key")), "cannot read the key"),
        (("verify", str(folder), "--public-key", str(empty / "key")), "cannot read the key"),
    ):
        run = call("privacy", *words)
        assert run.exit_code == 2, run.output
        assert text in run.output
        assert "fedsynth: error:" in run.output
        assert "Traceback" not in run.output


def charged(output: Path) -> int:
    """The clients whose ledger, wherever it is, has a row."""
    files = output.glob("**/client-*.jsonl")
    return sum(len(path.read_bytes().splitlines()) > 1 for path in files)


def killed(output: Path, *words: str) -> Path:
    """A run in a process of its own, ended by SIGKILL in round 1, when all clients are charged."""
    slow = ("--rounds", "3", "--set", "server_epochs=100000")
    main = [sys.executable, "-c", "from fedsynth.cli.app import main; main()"]
    command = [*main, "train", *FAST[2:], *slow, "--output", str(output), *words]
    quick = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=quick, stdout=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 120
        while charged(output) < 3:
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (folder,) = output.glob("*.incomplete")
    return folder


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_that_was_killed_can_be_reported_and_verified(kept: bool, tmp_path: Path) -> None:
    """Its clients have released once; the server was still training, and no round ended."""
    words = ("--dp-ledger", str(tmp_path / "kept")) if kept else ()
    folder = killed(tmp_path, "--dp-sigma", "3", *words)
    files = sorted((tmp_path / "kept" if kept else folder / "ledger").glob("*.jsonl"))
    assert len(files) == 3
    assert not (folder / "privacy_report.json").exists()
    waiting = call("privacy", "verify", str(folder))
    assert waiting.exit_code == 2
    assert "did not finish and has no report yet" in waiting.output
    shown = call("privacy", "report", str(folder))
    assert shown.exit_code == 0, shown.output
    assert "the run did not finish" in shown.stderr
    assert "abandoned after 0 of 3 rounds" in shown.stdout
    report = json.loads((folder / "privacy_report.json").read_text())
    assert {name: head["rows"] for name, head in report["ledger_heads"].items()} == {
        path.stem: len(read_ledger(path).releases) for path in files
    }
    assert all(head["rows"] == 1 for head in report["ledger_heads"].values())
    assert report["guarantee"]["epsilon"] > 0
    assert call("privacy", "verify", str(folder)).exit_code == 0
    if kept:
        (tmp_path / "kept").rename(tmp_path / "moved")
        lost = call("privacy", "report", str(folder))
        assert (lost.exit_code, "--ledger" in lost.output) == (2, True)
        there = ("--ledger", str(tmp_path / "moved"))
        assert call("privacy", "report", str(folder), *there).exit_code == 0
        assert call("privacy", "verify", str(folder), *there).exit_code == 0


def keys(folder: Path) -> tuple[str, str]:
    pytest.importorskip("cryptography", reason="needs the extra fedsynth[sign]")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.generate()
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return str(private), str(public)


def test_a_run_is_signed_and_the_signature_checked(tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    folder = trained(tmp_path / "out", "--dp-sigma", "3", "--sign-key", private)
    good = call("privacy", "verify", str(folder), "--public-key", public)
    assert good.exit_code == 0, good.output
    assert "the signature is this key's" in good.stdout
    assert "the signature was not checked" in call("privacy", "verify", str(folder)).stdout
    (folder / "simulation_only" / "partition.txt").unlink()
    assert call("privacy", "verify", str(folder), "--public-key", public).exit_code == 0
    (folder / "synthetic.png").write_bytes(b"another")  # no file that the report has a hash of
    assert call("privacy", "verify", str(folder)).exit_code == 0
    bad = call("privacy", "verify", str(folder), "--public-key", public)
    assert bad.exit_code == 1
    assert "mismatch: synthetic.png was changed after signing" in bad.stdout
    again = call("privacy", "sign", str(folder), "--key", private)
    assert again.exit_code == 0, again.output
    assert call("privacy", "verify", str(folder), "--public-key", public).exit_code == 0


def test_a_folder_that_was_made_anew_as_a_whole_is_noticed_by_its_signature_alone(
    tmp_path: Path,
) -> None:
    """What no check of files against each other can find: all of them are another run's."""
    private, public = keys(tmp_path)
    folder = trained(tmp_path / "out", "--dp-sigma", "3", "--sign-key", private)
    forged = trained(tmp_path / "forged", "--dp-sigma", "30")
    (forged / "signature.json").write_bytes((folder / "signature.json").read_bytes())
    assert call("privacy", "verify", str(forged)).exit_code == 0
    bad = call("privacy", "verify", str(forged), "--public-key", public)
    assert bad.exit_code == 1
    assert "privacy_report.json was changed after signing" in bad.stdout


def test_a_key_that_is_none_is_refused_before_the_run(tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    output = ("--output", str(tmp_path / "out"))
    wrong = call("train", *FAST, *output, "--dp-sigma", "3", "--sign-key", public)
    assert (wrong.exit_code, "no private Ed25519 key" in wrong.output) == (2, True)
    plain = call("train", *FAST, *output, "--sign-key", private)
    assert (plain.exit_code, "no differential privacy" in plain.output) == (2, True)
    assert not (tmp_path / "out").exists()
