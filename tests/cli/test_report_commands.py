"""`fedsynth privacy report | verify | sign` and `train --sign-key`; reports of killed runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interrupted import interrupted_in_round

Call = Callable[..., Any]
FAST = "--clients 3 --width 4 --device cpu --set iterations=2 --set server_epochs=1 --set ipc=1"


@pytest.fixture
def trained(fedsynth: Call, tmp_path: Path) -> Callable[[str], Path]:
    """`trained("--dp-sigma 3")`: the folder of a run with these options."""

    def run(options: str) -> Path:
        output = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        done = fedsynth(f"train {FAST} --rounds 2 --output {output} {options}")
        assert done.code == 0, done.stderr
        (folder,) = output.iterdir()
        return folder

    return run


def test_reports_are_shown_and_verified(
    trained: Callable[[str], Path], fedsynth: Call, tmp_path: Path
) -> None:
    folder = trained("--dp-epsilon 4 --dp-mechanism features")
    shown = fedsynth(f"privacy report {folder}").stdout
    assert shown == (folder / "privacy_report.md").read_text()
    assert "class counts" in shown
    page = tmp_path / "page.html"
    assert fedsynth(f"privacy report {folder} --format html --output {page}").code == 0
    assert page.read_text() == (folder / "privacy_report.html").read_text()
    file = folder / "privacy_report.json"
    report = json.loads(fedsynth(f"privacy report {folder} --format json").stdout)
    assert report == json.loads(file.read_text())
    good = fedsynth(f"privacy verify {folder}")
    assert good.code == 0, good.stderr
    for text in ("does not show that", "were compared with the ledger files", "is not signed"):
        assert text in good.stdout

    report["guarantee"]["epsilon"] /= 2
    report["public_items"]["\x1b[2J"] = "<b>"
    file.write_text(json.dumps(report))
    bad = fedsynth(f"privacy verify {folder}")
    assert bad.code == 1
    assert "mismatch: guarantee.epsilon is" in bad.stdout
    for form in ("markdown", "json", "html"):
        text = fedsynth(f"privacy report {folder} --format {form}").stdout
        assert text.replace("\n", "").isprintable()
    assert "<b>" not in text

    report["public_items"] = {str(number): "" for number in range(200)}
    file.write_text(json.dumps(report))
    flood = fedsynth(f"privacy verify {folder}")
    assert (flood.code, len(flood.stdout.splitlines())) == (1, 41)
    assert "mismatches in total" in flood.stdout
    file.write_text('{"schema_version": 4, "unit": {}}')
    damaged = fedsynth(f"privacy report {folder}")
    assert (damaged.code, damaged.stderr.count("\n")) == (2, 1)
    assert "is damaged: " in damaged.stderr


def test_a_run_that_did_not_finish_can_be_reported(
    fedsynth: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupted_in_round(2, monkeypatch):
        folder = fedsynth(f"train {FAST} --rounds 3 --dp-sigma 3 --output {tmp_path}/out").folder
    waiting = fedsynth(f"privacy verify {folder}")
    assert (waiting.code, "no report yet" in waiting.stderr) == (2, True)
    shown = fedsynth(f"privacy report {folder}")
    assert (shown.code, "the run did not finish" in shown.stderr) == (0, True)
    assert fedsynth(f"privacy verify {folder}").code == 0


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Files of a private key and its public one."""
    pytest.importorskip("cryptography", reason="needs the extra fedsynth[sign]")
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    pem, none = forms.Encoding.PEM, forms.NoEncryption()
    private.write_bytes(key.private_bytes(pem, forms.PrivateFormat.PKCS8, none))
    public_form = forms.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem, public_form))
    return private, public


def test_a_run_is_signed_and_the_signature_checked(
    trained: Callable[[str], Path], keys: tuple[Path, Path], fedsynth: Call
) -> None:
    private, public = keys
    folder = trained(f"--dp-sigma 3 --sign-key {private}")
    verify = f"privacy verify {folder} --public-key {public}"
    good = fedsynth(verify)
    assert good.code == 0, good.stderr
    assert "the signature is valid for this key" in good.stdout
    assert "the signature of the run was not checked" in fedsynth(f"privacy verify {folder}").stdout
    (folder / "simulation_only" / "partition.txt").unlink()
    assert fedsynth(verify).code == 0
    (folder / "synthetic.png").write_bytes(b"another")  # no file that the report has a hash of
    assert fedsynth(f"privacy verify {folder}").code == 0
    bad = fedsynth(verify)
    assert bad.code == 1
    assert "mismatch: synthetic.png was changed after signing" in bad.stdout
    assert fedsynth(f"privacy sign {folder} --key {private}").code == 0
    assert fedsynth(verify).code == 0


def test_a_key_that_is_none_is_refused_before_the_run(
    keys: tuple[Path, Path], fedsynth: Call, tmp_path: Path
) -> None:
    private, public = keys
    train = f"train {FAST} --output {tmp_path / 'out'}"
    wrong = fedsynth(f"{train} --dp-sigma 3 --sign-key {public}")
    assert (wrong.code, "not a private Ed25519 key" in wrong.stderr) == (2, True)
    plain = fedsynth(f"{train} --sign-key {private}")
    assert (plain.code, "no differential privacy" in plain.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
