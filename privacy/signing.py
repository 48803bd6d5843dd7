"""Signs run folders, and checks their signatures.

With a signature, the holder of a private key states that the files of a run folder belong together.
`signature.json` contains the SHA-256 of every file in the folder, such as the report, the ledgers,
the model and the synthetic images. It also contains an Ed25519 signature over all hashes (RFC
8032). Signing needs the package `cryptography`, which the extra `fedsynth[sign]` installs. The
folder `simulation_only/` is not signed, because it is not meant to leave the machine.

A signature shows who vouches for a run. It does not prove that the content is true.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsynth.errors import SigningError
from fedsynth.files import file_hash, plain_files, read_regular, write_whole
from fedsynth.privacy.report.figures import Signature
from fedsynth.privacy.report.file import read_part, read_report

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

SIGNATURE = "signature.json"
EXCLUDED = "simulation_only"
_PURPOSE = b"fedsynth run folder, schema 1\n"


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Reads an unencrypted Ed25519 private key from a PEM file (PKCS 8).

    The command `openssl genpkey -algorithm ed25519` creates such a key.

    Raises:
        SigningError: the file is not such a key, or `cryptography` is not installed.
        OSError: the file cannot be read.
    """
    key: Ed25519PrivateKey = _read_key(path, "private", password=None)
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """Reads an Ed25519 public key from a PEM file.

    The command `openssl pkey -in KEY -pubout` extracts it from a private key.

    Raises:
        SigningError: the file is not such a key, or `cryptography` is not installed.
        OSError: the file cannot be read.
    """
    key: Ed25519PublicKey = _read_key(path, "public")
    return key


def _read_key(path: Path, kind: str, **options: None) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SigningError("signatures need cryptography: pip install 'fedsynth[sign]'") from None
    try:
        key = getattr(serialization, f"load_pem_{kind}_key")(read_regular(path), **options)
    except (TypeError, ValueError, UnsupportedAlgorithm):  # TypeError: the key is encrypted
        key = None
    if not isinstance(key, getattr(ed25519, f"Ed25519{kind.capitalize()}Key")):
        raise SigningError(
            f"{path} is not an unencrypted {kind} Ed25519 key in PEM format. Create one with "
            "openssl genpkey (private) or openssl pkey (public)"
        ).with_code("signing.format")
    return key


def sign_run(folder: Path, key: Ed25519PrivateKey) -> Path:
    """Signs all files of a run folder and writes the signature to signature.json.

    An existing signature.json is replaced. The folder must contain a privacy report.

    Returns:
        The path of signature.json.

    Raises:
        PrivacyError: the folder has no report.
        OSError: a file cannot be read or written, or is not a regular file.
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
    write_whole(path, f"{json.dumps(content, indent=1)}\n".encode())
    return path


def signature_problems(folder: Path, key: Ed25519PublicKey) -> list[str]:
    """Checks a run folder's signature, and returns a list of problems.

    The list is empty if signature.json was made with this key and no file was changed, added or
    removed since.

    Raises:
        PrivacyError: signature.json cannot be read or is damaged.
        OSError: a file of the folder cannot be read or is not a regular file.
    """
    from cryptography.exceptions import InvalidSignature

    path = folder / SIGNATURE
    if not path.exists():
        return [f"{SIGNATURE} is missing, so the run is not signed"]
    stated = read_part(path, "signature", Signature)
    if stated.public_key != base64.b64encode(key.public_bytes_raw()).decode():
        return [f"{SIGNATURE} was made with another key than the given public key"]
    try:
        key.verify(base64.b64decode(stated.signature, validate=True), _message(stated.files))
    except (ValueError, InvalidSignature):
        return [f"{SIGNATURE} is not a signature of these files with this key"]
    signed, current = stated.files, file_hashes(folder)
    problems = []
    for name in {**signed, **current}:
        if name not in current:
            problems.append(f"{name} is missing, although it was signed")
        elif name not in signed:
            problems.append(f"{name} was added after signing")
        elif current[name] != signed[name]:
            problems.append(f"{name} was changed after signing")
    return problems


def file_hashes(folder: Path) -> dict[str, str]:
    """Computes each signed file's SHA-256 in a run folder.

    Returns:
        A mapping from the path of each file in the folder to its hash, sorted by path.

    Raises:
        OSError: an entry of the folder is not a regular file or cannot be read.
    """
    names = plain_files(folder, leave_out=(EXCLUDED, SIGNATURE))
    return {name: file_hash(folder / name) for name in names}


def _message(files: dict[str, str]) -> bytes:
    """Returns the bytes to sign, computed only from file names and hashes."""
    return _PURPOSE + json.dumps(files, sort_keys=True, separators=(",", ":")).encode()
