"""Creates keys and certificates for a federation: a CA, the server's certificate and the nodes'
keys.

They are for trials, and for federations whose parties exchange these files by hand. The private key
of the CA is discarded, so a further certificate needs a new CA. The keys use NIST curves because
Flower requires them.
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
from fedsynth.validation import check_number

VALIDITY = timedelta(days=365)
CA_NAME = "fedsynth federation"
# The key usages that the certificate of the CA does not allow.
UNUSED = (
    "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
    "encipher_only decipher_only"
)
# The extensions of a certificate, each with a flag that tells whether it is critical.
Extensions = list[tuple[x509.ExtensionType, bool]]


def make_keys(folder: Path, clients: int, hosts: Sequence[str] = ()) -> None:
    """Writes the keys and certificates of a federation to a folder.

    The files are ca.crt, server.crt and server.key, and for each client client-NNN and
    client-NNN.pub.

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
    ca_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    pkcs8 = server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    private = {"server.key": pkcs8}
    public = {
        "ca.crt": _ca_certificate(ca_key),
        "server.crt": _server_certificate(server_key, ca_key, hosts),
    }
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
            (folder / name).write_bytes(content)


def _ca_certificate(key: ec.EllipticCurvePrivateKey) -> bytes:
    unused = dict.fromkeys(UNUSED.split(), False)
    extensions: Extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (x509.KeyUsage(key_cert_sign=True, crl_sign=True, **unused), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    ]
    return _certificate(CA_NAME, key, key, extensions)


def _server_certificate(
    key: ec.EllipticCurvePrivateKey, ca_key: ec.EllipticCurvePrivateKey, hosts: Sequence[str]
) -> bytes:
    names = list(map(_host, ("127.0.0.1", "localhost", *hosts)))
    extensions: Extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(names), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False),
    ]
    return _certificate("fedsynth server", key, ca_key, extensions)


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    extensions: Extensions,
) -> bytes:
    """Creates a certificate for a public key, signed by the CA, in PEM."""
    issued_at = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=_name(CA_NAME),
        subject_name=_name(subject),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=issued_at - timedelta(hours=1),
        not_valid_after=issued_at + VALIDITY,
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    with suppress(ValueError):
        return x509.DNSName(name)
    raise SettingError(None, "host", f"must be a host name or an IP address, got {name!r:.80}")
