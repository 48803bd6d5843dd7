"""Clients' long-lived keys, which they exchange without their server: with them a client of a
secure sum knows that the keys it is passed on are the other clients' own."""

from __future__ import annotations

import re
from pathlib import Path

from fedsynth.errors import SettingError
from fedsynth.federation.secure_sums.client import Identities
from fedsynth.privacy.signing import read_private_key, read_public_key

_NAME = re.compile(r"client-([0-9]{3,9})\.pem")


def read_identities(own: Path, others: Path) -> Identities:
    """A client's own key, and everybody's public ones.

    Args:
        own: an Ed25519 private key, PEM.
        others: a folder of client-NNN.pem, Ed25519 public keys; the client's own may be among them.

    Raises:
        SettingError: the folder has no such file.
        SigningError: a file is no such key, or `cryptography` is not installed.
    """
    found = [match for path in sorted(others.glob("*")) if (match := _NAME.fullmatch(path.name))]
    if not found:
        raise SettingError(None, str(others), "has no client-NNN.pem, the other clients' keys")
    public = {int(match[1]): read_public_key(others / match[0]) for match in found}
    return Identities(read_private_key(own), public)
