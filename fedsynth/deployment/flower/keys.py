"""Creates keys for a federation: the server's key and certificate, and the nodes' keys.

The keys are for trials, and for federations whose parties exchange the files by hand. The
certificate is self-signed, and the nodes trust only this certificate. The keys use NIST curves
because Flower requires them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsynth.data.partition_settings import MAX_CLIENTS
from fedsynth.errors import SettingError
from fedsynth.files import write_whole
from fedsynth.validation import check_number

VALIDITY = timedelta(days=365)
# Without these usages, nodes refuse certificates that the server's key has signed.
UNUSED = (
    "content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign "
    "encipher_only decipher_only"
)


def make_keys(folder: Path, clients: int, hosts: Sequence[str] = ()) -> None:
    """Writes a federation's keys and its server's certificate to a folder.

    The files are server.crt and server.key, and for each client client-NNN and client-NNN.pub.

    Args:
        folder: the folder for the files. It is created if it does not exist, and it must not
            contain any of these files.
        clients: the number of clients.
        hosts: the names and addresses of the server, in addition to 127.0.0.1 and localhost.

    Raises:
        SettingError: if the number of clients is out of range, or a host name is invalid.
        OSError: if the files cannot be written, or if one already exists.
    """
    check_number(None, "clients", clients, 1, MAX_CLIENTS, integer=True)
    server_key = ec.generate_private_key(ec.SECP256R1())
    pkcs8 = server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    private = {"server.key": pkcs8}
    public = {"server.crt": _certificate(server_key, hosts)}
    for number in range(clients):
        name = f"client-{number:03d}"
        key = ec.generate_private_key(ec.SECP384R1())
        public_key = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        private[name] = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public[f"{name}.pub"] = public_key + f" {name}\n".encode()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for files, mode in ((private, 0o600), (public, 0o644)):
        for name, content in files.items():
            (folder / name).touch(mode, exist_ok=False)
            write_whole(folder / name, content)


def _certificate(key: ec.EllipticCurvePrivateKey, hosts: Sequence[str]) -> bytes:
    """Creates a server's self-signed PEM certificate for the given names and addresses."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedsynth server")])
    issued_at = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=issued_at - timedelta(hours=1),
        not_valid_after=issued_at + VALIDITY,
    )
    extensions: dict[x509.ExtensionType, bool] = {  # True: critical
        x509.BasicConstraints(ca=False, path_length=None): True,
        x509.KeyUsage(digital_signature=True, **dict.fromkeys(UNUSED.split(), False)): True,
        x509.SubjectAlternativeName(list(map(_host, ("127.0.0.1", "localhost", *hosts)))): False,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]): False,
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()): False,
    }
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _host(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    with suppress(ValueError):
        return x509.DNSName(name)
    raise SettingError(None, "host", f"must be a host name or an IP address, got {name!r:.80}")
