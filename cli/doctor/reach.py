"""What is asked of any daemon: its hello, how far it is, its version, its HTTP and its clock."""

from __future__ import annotations

import email.utils
import statistics
import time
from collections.abc import Iterator
from typing import Final

from kvstrata.cli.doctor.rows import Row, Verdict
from kvstrata.client.security.credentials import Credentials
from kvstrata.client.security.https import request
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import KVError, Unauthenticated
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import SOFTWARE, Identity, is_loopback
from kvstrata.transfer.security.tickets import TicketSource
from kvstrata.transfer.security.tls import DAY_S, SOON_S

CALL_S: Final = 2.0
PINGS: Final = 9
#: HTTP dates are whole seconds.
SKEW_S: Final = 2.0
#: A round trip that takes longer is far for blocks, and near silence for a client.
FAR_S: Final = 0.05


def greet(address: str) -> tuple[pb.HelloOk, float]:
    """(its hello, the median round trip in seconds). Raises :class:`Unavailable` and refusals."""
    with connected(address) as connection:
        times = []
        for _ in range(PINGS):
            began = time.monotonic()
            connection.call(Kind.PING, b"", began + CALL_S)
            times.append(time.monotonic() - began)
        return connection.hello, statistics.median(times)


class connected:
    """A connection for a few calls; without ``tickets`` a secured daemon answers pings alone."""

    def __init__(self, address: str, tickets: TicketSource | None = None) -> None:
        self._address = address
        self._identity = Identity.new("admin", tickets=tickets)

    def __enter__(self) -> Connection:
        self._connection = Connection.open(
            self._address,
            self._identity,
            silence_s=CALL_S,
            connect_s=CALL_S,
            hello_only=self._identity.tickets is None,
        )
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def near(area: str, what: str, ping_s: float, more: str = "") -> Row:
    found = ", ".join(part for part in (f"round trip {ping_s * 1e3:.2f} ms", more) if part)
    if ping_s > FAR_S:
        advice = "far for a pool: peers that are silent for 250 ms count as dead"
        return Row(area, what, Verdict.WARNING, found, advice)
    return Row(area, what, Verdict.OK, found)


def same_version(area: str, what: str, software: str) -> Iterator[Row]:
    if software != SOFTWARE:
        found = f"runs {software or 'an unknown version'}, this is {SOFTWARE}"
        yield Row(area, f"{what}: version", Verdict.WARNING, found, "upgrade the older one")


def who_may_call(area: str, name: str, address: str, hello: pb.HelloOk) -> Row:
    """Whether the channel at ``address`` asks for tickets, and what that means where it can be reached."""
    what = f"{name}: tickets"
    if hello.challenge:
        return Row(area, what, Verdict.OK, "the channel asks for a ticket")
    if is_loopback(address):
        return Row(area, what, Verdict.NOT_APPLICABLE, "off: reached from this host alone")
    advice = "tickets and tokens: docs/security.md; until then let nobody else reach the ports"
    return Row(area, what, Verdict.WARNING, f"off: whoever reaches {address} can read and write", advice)


def http(area: str, name: str, endpoint: str) -> Iterator[Row]:
    """Is it served, and does its wall clock agree with ours?"""
    what = f"{name}: HTTP"
    if not endpoint:
        yield Row(area, what, Verdict.NOT_APPLICABLE, "none")
        return
    began = time.time()
    try:
        answer = request(
            Credentials.given(), "GET", endpoint, "/healthz", deadline=time.monotonic() + CALL_S, shows_token=False
        )
    except Unauthenticated as error:
        yield Row(area, what, Verdict.PROBLEM, str(error), "see docs/security.md on certificates")
        return
    except KVError as error:
        advice = "is the port open? metrics and health are read there"
        yield Row(area, what, Verdict.WARNING, str(error), advice)
        return
    status, date = answer.status, answer.headers.get("Date", "")
    if status == 200:
        yield Row(area, what, Verdict.OK, f"{endpoint} answers")
    else:
        yield Row(area, what, Verdict.PROBLEM, f"{endpoint}/healthz answers {status}", "its body says why")
    yield from certificate(area, name, answer.certificate_ends, began)
    yield from skew(area, name, date, began, time.time())


def certificate(area: str, name: str, ends: float | None, now: float) -> Iterator[Row]:
    """``ends`` and ``now`` in Unix seconds; None: no TLS."""
    if ends is None:
        return
    left_s = ends - now
    verdict = Verdict.OK if left_s > SOON_S else Verdict.WARNING
    advice = "" if left_s > SOON_S else "replace its files: they are read again without a restart"
    yield Row(area, f"{name}: certificate", verdict, f"good for {left_s / DAY_S:.0f} more days", advice)


def skew(area: str, name: str, date: str, began: float, ended: float) -> Iterator[Row]:
    """``date``: of an answer that came between two wall times of ours. Nothing counts on it but people and logs."""
    what = f"{name}: wall clock"
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        yield Row(area, what, Verdict.NOT_APPLICABLE, "it does not say what time it is")
        return
    ahead = theirs + 1.0 - began if theirs + 1.0 < began else max(0.0, theirs - ended)
    if abs(ahead) > SKEW_S:
        found = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
        advice = "let NTP set both: leases do not need it, logs and `kvstrata why` are read by it"
        yield Row(area, what, Verdict.WARNING, found, advice)
    else:
        yield Row(area, what, Verdict.OK, "agrees with this machine's")
