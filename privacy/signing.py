"""Signing of a run folder, and the check of its signature: the holder of the private key states
that these files belong together.

`signature.json` holds the SHA-256 of every file of the folder (the report, which has the ledgers'
chain hashes; the ledgers, the model, the synthetic set), and an Ed25519 signature over all of them
(RFC 8032; PyCA's `cryptography`, the extra `fedsynth[sign]`). The folder `simulation_only/` is left
out: it is not meant to leave the machine.

A signature shows who vouches for a run. It does not prove that the content is true.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsynth.privacy.errors import SigningError
from fedsynth.privacy.files import UnsuitableFileError, file_hash, plain_files, read_regular
from fedsynth.privacy.report.figures import Signature, schema_problems
from fedsynth.privacy.report.file import read_json, read_report

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SIGNATURE = "signature.json"
EXCLUDED = "simulation_only"
_PURPOSE = b"fedsynth run folder, schema 1\n"


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Returns an unencrypted Ed25519 private key in PEM (PKCS 8), as `openssl genpkey -algorithm
    ed25519` makes it.

    Raises:
        SigningError: it cannot be read, is not such a key, or `cryptography` is not installed.
    """
    key: Ed25519PrivateKey = _read_key(path, "private", password=None)
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """Returns an Ed25519 public key in PEM, as `openssl pkey -in KEY -pubout` makes it.

    Raises:
        SigningError: as `read_private_key`.
    """
    key: Ed25519PublicKey = _read_key(path, "public")
    return key


COMMANDS = {
    "private": "create one with openssl genpkey -algorithm ed25519 -out KEY",
    "public": "extract it from a private key with openssl pkey -in KEY -pubout -out PUBLIC",
}


def _read_key(path: Path, kind: str, **options: None) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SigningError("signing needs cryptography: pip install 'fedsynth[sign]'") from None
    try:
        key = getattr(serialization, f"load_pem_{kind}_key")(read_regular(path), **options)
    except OSError as error:
        raise SigningError(f"cannot read the key {path}: {error.strerror}") from None
    except TypeError:
        advice = "decrypt it first (openssl pkey -in KEY -out PLAIN)"
        raise SigningError(f"the key {path} is encrypted: {advice}") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, getattr(ed25519, f"Ed25519{kind.capitalize()}Key")):
        raise SigningError(f"{path} is not a {kind} Ed25519 key in PEM ({COMMANDS[kind]})")
    return key


def sign_run(folder: Path, key: Ed25519PrivateKey) -> Path:
    """Writes signature.json over all other files of a run folder with a privacy report; replaces an
    existing one.

    Raises:
        PrivacyError: there is no report.
        SigningError: a file cannot be read or written, or is not a regular file.
    """
    read_report(folder)
    files = file_hashes(folder)
    public = key.public_key().public_bytes_raw()
    content = {
        "fedsynth_signature": 1,
        "algorithm": "Ed25519",
        "public_key": base64.b64encode(public).decode(),
        "files": files,
        "signature": base64.b64encode(key.sign(_message(files))).decode(),
    }
    path = folder / SIGNATURE
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SigningError(f"cannot write {path}: {error.strerror}") from None
    return path


def signature_problems(folder: Path, key: Ed25519PublicKey) -> list[str]:
    """Returns why this key does not vouch for these files; an empty list if it does.

    Raises:
        PrivacyError: signature.json is damaged.
    """
    from cryptography.exceptions import InvalidSignature

    path = folder / SIGNATURE
    if not path.exists():
        return [f"{SIGNATURE} is missing: the run is not signed"]
    content = read_json(path, "signature")
    problems = schema_problems(content, Signature)
    if problems:
        return [f"{SIGNATURE}: {problem}" for problem in problems]
    if content["public_key"] != base64.b64encode(key.public_bytes_raw()).decode():
        return [f"{SIGNATURE} was made with another key"]
    try:
        signature = base64.b64decode(content["signature"], validate=True)
        key.verify(signature, _message(content["files"]))
    except (ValueError, InvalidSignature):
        return [f"{SIGNATURE} was not made with this key, or was changed afterwards"]
    signed, current = content["files"], file_hashes(folder)
    for name in {**signed, **current}:
        if name not in current:
            problems.append(f"{name} was signed but is missing")
        elif name not in signed:
            problems.append(f"{name} was added after signing")
        elif current[name] != signed[name]:
            problems.append(f"{name} was changed after signing")
    return problems


def file_hashes(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file of a run folder that a signature covers, by sorted path in
    the folder.

    Raises:
        SigningError: something is not a regular file, or cannot be read.
    """
    try:
        names = plain_files(folder, leave_out=(EXCLUDED, SIGNATURE))
        return {name: file_hash(folder / name) for name in names}
    except UnsuitableFileError as error:
        raise SigningError(f"a signature cannot cover {folder}: {error}") from None
    except OSError as error:
        raise SigningError(f"cannot read {error.filename}: {error.strerror}") from None


def _message(files: dict[str, str]) -> bytes:
    """Returns the bytes that are signed, the same for the same files."""
    return _PURPOSE + json.dumps(files, sort_keys=True, separators=(",", ":")).encode()
