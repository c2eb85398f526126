"""A certificate authority of one's own: for pools where nobody hands out certificates yet. Needs ``cryptography``."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata.cli.secret_files import write_public, write_secret
from kvstrata.proto.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA_DAYS: Final = 3650
DAYS: Final = 397
#: Clocks of hosts may differ.
_SKEW: Final = datetime.timedelta(hours=1)
#: Names that every server's certificate has besides its own.
LOCAL: Final = ("localhost", "127.0.0.1", "::1")
CA_FILE: Final = "ca.pem"
CA_KEY_FILE: Final = "ca-key.pem"


def check_installed() -> None:
    """Raises :class:`ConfigError` with what to install."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError("certificates need the package cryptography: pip install 'kvstrata[encryption]'") from error


@dataclass(frozen=True, slots=True, repr=False)
class Authority:
    """Its certificate and its key."""

    certificate: x509.Certificate
    key: EllipticCurvePrivateKey

    @classmethod
    def new(cls, now: datetime.datetime) -> Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        key = _new_key()
        name = _name("kvstrata pool authority")
        usage = _usage(key_cert_sign=True, crl_sign=True, digital_signature=True)
        made = (
            _builder(name, name, key, now, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(made, key)

    @classmethod
    def read(cls, folder: Path) -> Authority:
        """Raises :class:`ConfigError` for what :meth:`write` did not write."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            certificate = x509.load_pem_x509_certificate((folder / CA_FILE).read_bytes())
            key = load_pem_private_key((folder / CA_KEY_FILE).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder} holds no authority that `kvstrata auth init` made: {error}") from error
        if not isinstance(key, EllipticCurvePrivateKey):
            raise ConfigError(f"{folder / CA_KEY_FILE} is not a key that `kvstrata auth init` made")
        return cls(certificate, key)

    def write(self, folder: Path) -> None:
        write_public(folder / CA_FILE, _pem(self.certificate))
        write_secret(folder / CA_KEY_FILE, _key_pem(self.key))

    def give(self, folder: Path, name: str, hosts: Sequence[str], now: datetime.datetime) -> None:
        """A certificate ``name``.pem and its key ``name``-key.pem, replaced in one step each. With ``hosts`` its holder
        may serve them; everybody may call with it."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = _new_key()
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        builder = (
            _builder(_name(f"kvstrata-{name}"), self.certificate.subject, key, now, DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        if hosts:
            names = [_alternative(host) for host in dict.fromkeys((*hosts, *LOCAL))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = builder.sign(self.key, hashes.SHA256())
        write_secret(folder / f"{name}-key.pem", _key_pem(key))
        write_public(folder / f"{name}.pem", _pem(made))


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _name(common: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, digital_signature: bool, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"--host {host!r} is neither a name nor an address") from error


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
