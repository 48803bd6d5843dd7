"""Keys and certificates for a federation: a CA of its own, the server's certificate, nodes' keys.

For trials, and for federations whose parties exchange these files by hand. The CA's own key is
thrown away: whoever needs another certificate makes all anew. Elliptic curves of NIST, as Flower
asks for; everything is `cryptography`'s.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fedsynth.data.partition_settings import MOST_CLIENTS
from fedsynth.errors import OutputError, SettingError
from fedsynth.federation.flower.processes import FlowerError
from fedsynth.validation import check_number

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

DAYS = 365
MAX_DAYS = 36_525
"""A century; X.509 has no dates after the year 9999."""
CA, CERTIFICATE, KEY = "ca.crt", "server.crt", "server.key"


def node_key(folder: Path, number: int) -> Path:
    """A node's private key; its public one has `.pub` behind it."""
    return folder / f"client-{number:03d}"


def make_keys(folder: Path, clients: int, hosts: tuple[str, ...] = (), days: int = DAYS) -> None:
    """Writes ca.crt, server.crt, server.key, and for each client client-NNN and client-NNN.pub.

    Args:
        folder: made; it must not hold any of them.
        clients: how many.
        hosts: names and addresses of the server, beside this machine's own.
        days: that certificates are valid.

    Raises:
        SettingError: a number out of range, or a host that is no name.
        OutputError: the files cannot be written, or one is there.
    """
    check_number(None, "clients", clients, 1, MOST_CLIENTS, whole=True)
    check_number(None, "days", days, 1, MAX_DAYS, whole=True)
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric import ec

    authority = ec.generate_private_key(ec.SECP256R1())
    server = ec.generate_private_key(ec.SECP256R1())
    issuer = _name("fedsynth federation")
    own = _authority(authority, issuer, days)
    certificate = _server(server, authority, issuer, hosts, days)
    private = {KEY: _private(server)}
    public = {CA: _pem(own), CERTIFICATE: _pem(certificate)}
    for number in range(clients):
        key = ec.generate_private_key(ec.SECP384R1())
        name = node_key(folder, number).name
        private[name] = _private(key, openssh=True)
        public[f"{name}.pub"] = _public(key) + f" {name}\n".encode()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for files, mode in ((private, 0o600), (public, 0o644)):
            for name, content in files.items():
                made = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
                with os.fdopen(made, "wb") as file:
                    file.write(content)
    except OSError as error:
        raise OutputError(f"cannot write keys into {folder}: {error.strerror or error}") from None


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise FlowerError("keys need the extra: pip install 'fedsynth[flower]'") from None


def _name(common: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _authority(key: EllipticCurvePrivateKey, name: x509.Name, days: int) -> x509.Certificate:
    """The CA's own certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )


def _server(
    key: EllipticCurvePrivateKey,
    authority: EllipticCurvePrivateKey,
    issuer: x509.Name,
    hosts: tuple[str, ...],
    days: int,
) -> x509.Certificate:
    """The server's certificate, for this machine and the hosts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names = [_host(one) for one in ("127.0.0.1", "localhost", *hosts)]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return (
        _builder(_name("fedsynth server"), issuer, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(usage, critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority, hashes.SHA256())
    )


def _host(name: str) -> x509.GeneralName:
    from cryptography import x509

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


def _builder(
    name: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private(key: EllipticCurvePrivateKey, *, openssh: bool = False) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    form = PrivateFormat.OpenSSH if openssh else PrivateFormat.PKCS8
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _public(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
