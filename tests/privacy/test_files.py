"""Tests of untrusted files, of which special, endless, large or deeply nested ones are rejected, and
of signatures of run folders with Ed25519 keys in PEM."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsynth import files
from fedsynth.errors import PrivacyError, SigningError
from fedsynth.privacy import signing
from fedsynth.privacy.signing import read_private_key, read_public_key, sign_run
from tests.raising import raises
from tests.user_files import SPECIAL_KINDS, make_special_file


@pytest.mark.parametrize("kind", SPECIAL_KINDS)
@pytest.mark.parametrize("read", [files.read_regular, files.load_json, files.load_toml])
def test_special_files_are_rejected(tmp_path: Path, kind: str, read: Any) -> None:
    with pytest.raises(OSError, match=r"regular file|bytes, but at most"):
        read(make_special_file(tmp_path / "special", kind))


def test_size_limit_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 1000)
    assert files.read_regular(path, 1000) == b"x" * 1000
    with pytest.raises(OSError, match="1,000 bytes, but at most 999 are allowed"):
        files.read_regular(path, 999)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * 100_000, "levels deep"),
        (".".join("a" * 100_000) + " = 1", "levels deep"),
        ("x = {" + " . ".join(['"a"'] * 100_000) + " = 1}", "levels deep"),
        ("x = " + "[" * (files.MAX_DEPTH + 1) + "]" * (files.MAX_DEPTH + 1), "levels deep"),
        ("x = 9223372036854775808", "64 bits"),
        ("x = " + "9" * 5000, "digits"),
        ("\x00", "TOML|Invalid"),
    ],
)
def test_malformed_toml_is_rejected_quickly(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        files.load_toml(path)
    assert time.monotonic() - start < 5
    path.write_text(f'# {"." * 100}\nmean = [{"0.5, " * 500}]\nname = "{"." * 200}"\n')
    assert len(files.load_toml(path)["mean"]) == 500  # dots that nest nothing


@pytest.mark.parametrize(("opening", "close"), ["[]", ('{"a":', "}")])
def test_json_depth_is_limited(opening: str, close: str) -> None:
    files.decode_json(opening * files.MAX_DEPTH + "0" + close * files.MAX_DEPTH)
    for depth in (files.MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match="levels deep"):
            files.decode_json(opening * depth + "0" + close * depth)
    assert len(files.decode_json(f"[{'[0],' * 1000}0]")) == 1001


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "full").touch()
    with pytest.raises(OSError, match=r"irectory"):
        files.write_whole(tmp_path / "there", b"x")  # a folder with files cannot be replaced
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_two_writers_of_a_file_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one writes the whole file while the first one does. Long names are possible."""
    file = tmp_path / ("ä" * 127)
    file.touch(0o600)
    sync = os.fsync
    begun: list[bool] = []

    def sync_after_another(descriptor: int) -> None:
        if not begun:
            begun.append(True)
            files.write_whole(file, b"other")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_after_another)
    files.write_whole(file, b"first")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"first"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_outputs_follow_links_and_keep_devices(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    files.write_output(tmp_path / "link", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"
    files.write_output(Path(os.devnull), b"x")
    assert Path(os.devnull).is_char_device()


# ---------------------------------------------------------------------------------- signatures


Keys = tuple[Path, Path]  # a private and a public one
PEM, PLAIN = forms.Encoding.PEM, forms.NoEncryption()


def private_pem(key: Any, encryption: Any = PLAIN) -> bytes:
    return key.private_bytes(PEM, forms.PrivateFormat.PKCS8, encryption)


def public_pem(key: Any) -> bytes:
    return key.public_key().public_bytes(PEM, forms.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(private_pem(key))
    public.write_bytes(public_pem(key))
    return private, public


@pytest.fixture
def run(tmp_path: Path, keys: Keys) -> Path:
    """Returns a signed folder."""
    folder = tmp_path / "run"
    for name in ("ledger/client-000.jsonl", "model.safetensors", "simulation_only/partition.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "privacy_report.json").write_text('{"schema_version": 4}')
    sign_run(folder, read_private_key(keys[0]))
    return folder


def problems(run: Path, keys: Keys) -> list[str]:
    return signing.signature_problems(run, read_public_key(keys[1]))


def test_signed_folders_have_no_problems(run: Path, keys: Keys) -> None:
    assert problems(run, keys) == []
    signed = json.loads((run / "signature.json").read_text())["files"]
    assert list(signed) == ["ledger/client-000.jsonl", "model.safetensors", "privacy_report.json"]
    (run / "simulation_only" / "partition.txt").write_text("is not covered")
    shutil.copytree(run, run.with_name("copy"))
    assert problems(run.with_name("copy"), keys) == []
    sign_run(run, read_private_key(keys[0]))  # the signature itself is not signed
    assert problems(run, keys) == []


FORGED = "is not a signature of these files with this key"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("model.safetensors", "x"), "tensors was changed after signing"),
        (("ledger/client-000.jsonl", None), "jsonl is missing, although it was signed"),
        (("certificate.pdf", ""), "certificate.pdf was added"),
        (("ledger/signature.json", "{}"), "ledger/signature.json"),
        (("signature.json", None), "the run is not signed"),
        ({"files": {}}, FORGED),
        ({"signature": "é"}, FORGED),
        ({"public_key": "x"}, "made with another key"),
        ({"algorithm": "none"}, "algorithm is invalid"),
        ({"fedsynth_signature": 2}, "fedsynth_signature is invalid"),
        ({"note": "x"}, "note is an unknown key"),
        ({"files": []}, "files is invalid"),
    ],
)
def test_changes_are_detected(run: Path, keys: Keys, change: Any, expected: str) -> None:
    if isinstance(change, dict):
        content = json.loads((run / "signature.json").read_text())
        (run / "signature.json").write_text(json.dumps({**content, **change}))
    elif change[1] is None:
        (run / change[0]).unlink()
    else:
        (run / change[0]).write_text(change[1])
    try:
        (problem,) = problems(run, keys)
    except PrivacyError as error:  # no valid signature
        problem = str(error)
    assert expected in problem


def test_links_cannot_be_signed(run: Path, keys: Keys, tmp_path: Path) -> None:
    key, link = read_private_key(keys[0]), run / "ledger" / "link"
    for target in (keys[0], tmp_path, tmp_path / "nothing"):
        link.symlink_to(target)
        for action in (lambda: sign_run(run, key), lambda: problems(run, keys)):
            with pytest.raises(OSError, match="ledger/link is a link, pipe or device"):
                action()
        link.unlink()
    with raises(PrivacyError, "files.privacy_report.json"):
        sign_run(tmp_path, key)


def test_invalid_keys_raise_one_line_errors(tmp_path: Path, keys: Keys) -> None:
    curve = ec.generate_private_key(ec.SECP256R1())
    secret = forms.BestAvailableEncryption(b"secret")
    encrypted = private_pem(Ed25519PrivateKey.generate(), secret)
    file = tmp_path / "file"
    for content in (b"", b"\xff", keys[1].read_bytes(), private_pem(curve), encrypted):
        file.write_bytes(content)
        with raises(SigningError, "signing.format"):
            read_private_key(file)
    for content in (b"", keys[0].read_bytes(), public_pem(curve)):
        file.write_bytes(content)
        with raises(SigningError, "signing.format"):
            read_public_key(file)


def test_missing_package_is_reported(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    for read, key in zip((read_private_key, read_public_key), keys, strict=True):
        with raises(SigningError, "signing.key"):
            read(key)
