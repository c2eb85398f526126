"""A CA for a test, and certificates of every kind: good, ended, for another host, of nobody."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """PEM files of one certificate."""

    cert: Path
    key: Path


class Authority:
    """Writes into ``folder``; ``ca`` is its own certificate."""

    def __init__(self, folder: Path, name: str = "test-ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        built = _builder(self._name, self._name, self._key, now - DAY, now + 100 * DAY)
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def pair(
        self, name: str, hosts: tuple[str, ...] = ("localhost", "127.0.0.1"), days: float = 50.0, file: str = ""
    ) -> Pair:
        """A certificate for ``name`` that ends in ``days``; a second one for ``file`` replaces the first, whole."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        end = now + days * DAY
        built = _builder(_name(name), self._name, key, min(now, end) - 2 * DAY, end)
        built = built.add_extension(x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False)
        signed = built.sign(self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{file or name}.crt", self._folder / f"{file or name}.key")
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _replace(pair.key, secret)
        _replace(pair.cert, signed.public_bytes(serialization.Encoding.PEM))
        return pair


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.chmod(0o600)
    new.replace(path)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )
