"""When a certificate ends: the one field of X.509 that is read here (RFC 5280, section 4.1), from its DER."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from typing import Final

_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_END: Final = b"-----END CERTIFICATE-----"
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
#: Of times: by tag, how they are written.
_FORMATS: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


def not_after(pem: bytes) -> float:
    """The end of a chain's first certificate in Unix seconds; raises :class:`ValueError`."""
    start, end = pem.find(_BEGIN), pem.find(_END)
    if start < 0 or end < start:
        raise ValueError("there is no certificate in the file")
    der = ssl.PEM_cert_to_DER_cert(pem[start : end + len(_END)].decode("ascii"))
    fields = _elements(_inside(_inside(der)))
    if fields[0][0] == _VERSION:
        fields = fields[1:]
    validity = fields[3]  # after the serial number, the signature's algorithm and the issuer
    if validity[0] != _SEQUENCE:
        raise ValueError("a certificate without its validity")
    _, (tag, text) = _elements(validity[1])
    if tag not in _FORMATS:
        raise ValueError("a certificate whose end is not a time")
    return datetime.strptime(text.decode("ascii"), _FORMATS[tag]).replace(tzinfo=UTC).timestamp()


def _inside(der: bytes) -> bytes:
    """What is in the sequence that ``der`` begins with."""
    tag, value = _elements(der)[0]
    if tag != _SEQUENCE:
        raise ValueError("not a certificate")
    return value


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """(tag, value) of each element in a row of them."""
    found = []
    place = 0
    while place < len(der):
        tag, length = der[place], der[place + 1]
        place += 2
        if length & 0x80:
            count = length & 0x7F
            length = int.from_bytes(der[place : place + count], "big")
            place += count
        if place + length > len(der):
            raise ValueError("an element is cut short")
        found.append((tag, der[place : place + length]))
        place += length
    return found
