"""Tickets: issued for a token, proved on the channel, never shown there. No clock, socket or file is read here.

::

    master (HTTPS)    claims, secret = HMAC(ticket key, claims)          to the holder of a token
    channel           Hello(nonce)            -> HelloOk(challenge)
                      Prove(claims, HMAC(secret, "client" greeting))
                                              -> ProveOk(HMAC(secret, "server" greeting))

The greeting is a hash of both hellos, byte for byte as they went over the wire: so challenge and nonce are in it, and
who each side said that it is. Who has the ticket key works the secret out from the claims, so nothing but the key has
to be known to a verifier; and a proof is good for one connection alone, so one that was overheard is worth nothing, and
one that was asked for in another's name neither. The answer's proof shows the holder that the other side has the key,
and is no stranger on a node's port. (The shape is Kerberos' ticket with its
session key, and the challenge of RFC 2104's keyed hash; Needham and Schroeder, CACM 1978.)
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ConfigError, InvalidArgument, TicketExpired, TicketNotYetValid, Unauthenticated
from kvstrata.transfer.security.rights import Rights, Role

NONCE_BYTES: Final = 16
CHALLENGE_BYTES: Final = 32
KEY_BYTES: Final = 32
CLAIMS_BYTES_MAX: Final = 64 << 10
#: A ticket is good for so long, and is exchanged for a fresh one at half of it.
LIFE_S: Final = 600.0
#: A ticket is taken for so long after its end, for clocks that differ.
SKEW_S: Final = 60.0
#: And for so long before it was issued: a host's clock may be behind the master's by this, and ahead of it by half of a
#: ticket's life and ``SKEW_S``, as a ticket is replaced by then.
BEHIND_S: Final = 300.0
_KEY_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class TicketSource(Protocol):
    """Where a connecting side has its ticket from. ``current`` is cheap, is asked before each call, and returns the
    same object while the ticket is the same; it raises :class:`Unauthenticated` or :class:`Unavailable` when there is
    none. ``refused`` tells it that somebody did not take a ticket of its: it sees to a fresh one, in its own time."""

    def current(self) -> pb.Ticket: ...

    def refused(self, ticket: pb.Ticket) -> None: ...


@dataclass(frozen=True, slots=True, repr=False)
class TicketKeys:
    """Secrets by id. ``signs`` is the one that new tickets are made with; all of them are believed.

    Rotation without downtime: add a key to every process, then let it sign, then take the old one away once the
    tickets made with it have run out.
    """

    secrets: Mapping[str, bytes]
    signs: str

    @classmethod
    def parse(cls, text: str) -> TicketKeys:
        """Lines ``ID:HEX`` of 32 bytes, the first one signs; ``#`` begins a comment. Raises :class:`ConfigError`
        naming the line, never its content."""
        secrets: dict[str, bytes] = {}
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            name, _, digits = (part.strip() for part in line.partition(":"))
            try:
                secret = bytes.fromhex(digits)
            except ValueError:
                secret = b""
            if not _KEY_ID.fullmatch(name) or len(secret) != KEY_BYTES or name in secrets:
                raise ConfigError(
                    f"line {number} of the ticket keys is not ID:HEX with {KEY_BYTES} bytes and an id of its own: "
                    "`kvstrata auth init` makes such a file"
                )
            secrets[name] = secret
        if not secrets:
            raise ConfigError("there is no ticket key in the file: `kvstrata auth init` makes one")
        return cls(secrets, next(iter(secrets)))


def issue(keys: TicketKeys, rights: Rights, now: float, life_s: float = LIFE_S) -> pb.Ticket:
    """A ticket with these rights, for ``life_s`` from ``now`` (Unix seconds)."""
    claims = pb.TicketClaims(
        key=keys.signs,
        subject=rights.subject,
        role=rights.role.value,
        salts=rights.salts,
        groups=rights.groups,
        issued_ms=int(now * 1e3),
        expires_ms=int((now + life_s) * 1e3),
        serial=os.urandom(8),
    ).SerializeToString()
    return pb.Ticket(claims=claims, secret=_mac(keys.secrets[keys.signs], claims))


def greeting_of(hello: bytes, answer: bytes) -> bytes:
    """What proofs of one connection are about: the messages of its Hello and HelloOk as they were sent."""
    lengths = len(hello).to_bytes(8, "big") + len(answer).to_bytes(8, "big")
    return hashlib.sha256(b"kvstrata greeting" + lengths + hello + answer).digest()


def prove(ticket: pb.Ticket, greeting: bytes) -> pb.Prove:
    """The holder's side: what to send after a hello that was answered with a challenge."""
    return pb.Prove(claims=ticket.claims, mac=_mac(ticket.secret, b"kvstrata client" + greeting))


def check_answer(ticket: pb.Ticket, greeting: bytes, answer: pb.ProveOk) -> None:
    """Raises :class:`Unauthenticated` when the other side has not got the ticket key, or heard another greeting."""
    if not hmac.compare_digest(answer.mac, _mac(ticket.secret, b"kvstrata server" + greeting)):
        raise Unauthenticated("who answers there does not have the pool's ticket keys: is it one of the pool?")


@dataclass(frozen=True, slots=True)
class Verified:
    """A good proof: what its ticket allows, what to answer, and the id of the key that the ticket was made with."""

    rights: Rights
    answer: pb.ProveOk
    key: str


def verify(keys: TicketKeys, proof: pb.Prove, greeting: bytes, now: float) -> Verified:
    """The verifier's side. Raises :class:`TicketExpired`, :class:`TicketNotYetValid`, or :class:`Unauthenticated` that
    names no detail."""
    if len(proof.claims) > CLAIMS_BYTES_MAX or len(greeting) != hashlib.sha256().digest_size:
        raise Unauthenticated("the ticket is not good here")
    try:
        claims = pb.TicketClaims.FromString(proof.claims)
    except DecodeError as error:
        raise Unauthenticated("the ticket is not good here") from error
    key = keys.secrets.get(claims.key, b"\0" * KEY_BYTES)
    secret = _mac(key, proof.claims)
    good = hmac.compare_digest(proof.mac, _mac(secret, b"kvstrata client" + greeting))
    if not good or claims.key not in keys.secrets:
        raise Unauthenticated("the ticket is not good here")
    ahead_s = claims.issued_ms / 1e3 - now
    if ahead_s > BEHIND_S:
        raise TicketNotYetValid(
            f"the clock there is {ahead_s:.0f} s behind that of the master that gave the ticket: set the hosts' clocks"
        )
    if expired(claims.expires_ms / 1e3, now):
        raise TicketExpired("the ticket has run out")
    try:
        rights = Rights(
            claims.subject, Role(claims.role), tuple(claims.salts), tuple(claims.groups), claims.expires_ms / 1e3
        )
    except (ValueError, InvalidArgument) as error:  # a master of a later version knows a role that this one does not
        raise Unauthenticated("the ticket is not good here") from error
    return Verified(rights, pb.ProveOk(mac=_mac(secret, b"kvstrata server" + greeting)), claims.key)


def expired(expires: float, now: float) -> bool:
    """Whether a ticket (Unix seconds) has run out, with slack for clocks that differ."""
    return now > expires + SKEW_S


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)
