"""Keys and certificates for a federation: its own CA, the server's certificate, nodes' keys.

For trials, and for federations whose parties exchange these files by hand. The CA's own key is
discarded: another certificate needs a new CA. The curves are NIST's, as Flower requires.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedsynth.data.partition_settings import MOST_CLIENTS
from fedsynth.deployment.flower.processes import FlowerError
from fedsynth.errors import OutputError, SettingError
from fedsynth.validation import check_number

try:
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
except ImportError:
    raise FlowerError("keys need the extra: pip install 'fedsynth[flower]'") from None

DAYS = 365
MAX_DAYS = 36_525
"""A century; X.509 has no dates after the year 9999."""
UNUSED = (
    "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
    "encipher_only decipher_only"
)
"""The uses that a CA's key does not have."""
Extension = tuple[x509.ExtensionType, bool]
"""An extension of a certificate, and whether it is critical."""


def make_keys(folder: Path, clients: int, hosts: tuple[str, ...] = (), days: int = DAYS) -> None:
    """Writes ca.crt, server.crt, server.key, and for each client client-NNN and client-NNN.pub.

    Args:
        folder: created if missing; it must not contain any of these files.
        clients: the number of clients.
        hosts: names and addresses of the server, in addition to this machine's own.
        days: the validity of the certificates.

    Raises:
        SettingError: a number out of range, or an invalid host name.
        OutputError: the files cannot be written, or one exists.
    """
    check_number(None, "clients", clients, 1, MOST_CLIENTS, integer=True)
    check_number(None, "days", days, 1, MAX_DAYS, integer=True)
    server = ec.generate_private_key(ec.SECP256R1())
    authority, certificate = _certificates(server, hosts, days)
    private = {"server.key": _private(server, PrivateFormat.PKCS8)}
    public = {"ca.crt": _pem(authority), "server.crt": _pem(certificate)}
    for number in range(clients):
        name = f"client-{number:03d}"
        key = ec.generate_private_key(ec.SECP384R1())
        shared = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        private[name] = _private(key, PrivateFormat.OpenSSH)
        public[f"{name}.pub"] = shared + f" {name}\n".encode()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for files, mode in ((private, 0o600), (public, 0o644)):
            for name, content in files.items():
                descriptor = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
    except OSError as error:
        raise OutputError(f"cannot write keys into {folder}: {error.strerror or error}") from None


def _certificates(
    server: ec.EllipticCurvePrivateKey, hosts: Sequence[str], days: int
) -> tuple[x509.Certificate, x509.Certificate]:
    """Returns the certificates of a new CA and of the server."""
    authority = ec.generate_private_key(ec.SECP256R1())
    signs = dict.fromkeys(("key_cert_sign", "crl_sign"), True)
    unused = dict.fromkeys(UNUSED.split(), False)
    of_authority: list[Extension] = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (x509.KeyUsage(**signs, **unused), True),
        (x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), False),
    ]
    names = [_host(host) for host in ("127.0.0.1", "localhost", *hosts)]
    of_server: list[Extension] = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(names), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    ]
    issuer = _name("fedsynth federation")
    return (
        _signed(issuer, authority, issuer, authority, days, of_authority),
        _signed(_name("fedsynth server"), server, issuer, authority, days, of_server),
    )


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    authority: ec.EllipticCurvePrivateKey,
    days: int,
    extensions: Sequence[Extension],
) -> x509.Certificate:
    issued_at = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=issued_at - timedelta(hours=1),
        not_valid_after=issued_at + timedelta(days=days),
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(authority, hashes.SHA256())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise SettingError(
            None, "host", f"must be a name or an address, got {name!r:.80}"
        ) from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())
