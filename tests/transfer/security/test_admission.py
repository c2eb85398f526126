"""The accepting side of tickets and bounds, on real sockets: who is let in, to what, and what it costs the others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import Busy, Forbidden, TicketExpired, Unauthenticated, Unavailable
from kvstrata.proto.wire import Kind
from kvstrata.transfer import greeting
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.frames import FrameStream, Silence
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.security.admission import NEEDS, Admission
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.minted import MintedTickets
from kvstrata.transfer.security.rates import USUAL, Account, Bounds
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.security.tickets import BEHIND_S, LIFE_S, SKEW_S, greeting_of, issue, prove
from tests.transfer.security.doors import Clock, Door, Drip, failure, someone, write_keys
from tests.waiting import until

#: Frames that are never asked by the side that connects, once its hello is over.
ANSWERS = {kind for kind in Kind if kind.name.endswith("OK")} | {
    Kind.HELLO, Kind.FAILURE, Kind.PONG, Kind.PROGRESS, Kind.NAMESPACE_HANDLE
}  # fmt: skip


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return write_keys(tmp_path / "ticket-keys", "one")


@pytest.fixture
def open_door(keys: KeyFile) -> Iterator[Callable[..., Door]]:
    doors: list[Door] = []

    def start(bounds: Bounds | None = None, asks: bool = True) -> Door:
        doors.append(Door(keys if asks else None, bounds))
        return doors[-1]

    yield start
    for door in doors:
        door.stop()


@pytest.fixture
def door(open_door: Callable[..., Door]) -> Door:
    return open_door()


def enter(
    door: Door, keys: KeyFile, name: str = "engine", role: Role = Role.CLIENT, session: bytes = b""
) -> Connection:
    identity = Identity(session or os.urandom(16), tickets=MintedTickets(keys, someone(name, role)))
    return Connection.open(door.address, identity, silence_s=5.0)


def ended(stream: FrameStream) -> bool:
    """Whether the other side has closed, once what it still said is read."""
    try:
        while True:
            stream.receive()
    except Unavailable:
        return True
    except Silence:
        return False


# ------------------------------------------------------------------ the table


def test_every_kind_that_can_be_asked_has_its_need() -> None:
    assert set(NEEDS) == set(Kind) - ANSWERS


@pytest.mark.parametrize(
    ("role", "may"),
    [
        (Role.CLIENT, set(NEEDS) - {Kind.HEARTBEAT, Kind.NODE_CHECK}),
        (Role.NODE, set(NEEDS)),
        (Role.READ, {Kind.PING, Kind.PROVE, Kind.NODE_INFO}),
        (Role.OPERATE, {Kind.PING, Kind.PROVE, Kind.NODE_INFO, Kind.NODE_CHECK}),
        (Role.ADMIN, set(NEEDS) - {Kind.HEARTBEAT}),
    ],
)
def test_each_role_may_do_what_is_its_own_and_no_more(keys: KeyFile, role: Role, may: set[int]) -> None:
    admission, account = Admission(keys), Account(USUAL, 0.0)
    allowed = set()
    for kind in range(256):
        try:
            admission.admit(someone(role=role), account, kind, 0.0, ("one", keys.keys().secrets["one"]))
        except Forbidden as error:
            assert "engine has " + role in str(error)
        else:
            allowed.add(kind)
    assert allowed == may


# ------------------------------------------------------------------ who is let in


def test_whoever_proves_a_ticket_is_let_in_and_is_a_client_from_then_on(door: Door, keys: KeyFile) -> None:
    stream, hello, about = door.greeted()
    assert len(hello.challenge) == 32 and hello.node_id == "n1" and hello.channel == "127.0.0.1"
    stream.send(Kind.PING, 2)
    assert stream.receive()[:2] == (Kind.PONG, 2)
    assert not door.server.sessions and not door.seen, "nobody is a client before its ticket is proved"
    ticket = issue(keys.keys(), someone(), time.time())
    stream.send(Kind.PROVE, 3, prove(ticket, about).SerializeToString())
    assert stream.receive().kind == Kind.PROVE_OK
    (session,) = door.server.sessions.values()
    assert session.subject == "engine"
    stream.send(Kind.LOOKUP, 4)
    assert stream.receive().kind == Kind.LOOKUP_OK
    stream.close()
    until(lambda: door.ended == [session])


def test_without_a_ticket_nothing_is_answered(door: Door) -> None:
    kinds = sorted(set(NEEDS) - {Kind.PING, Kind.PROVE})
    for kind in kinds:
        stream, _, _ = door.greeted()
        stream.send(kind, 2)
        assert failure(stream) == "Unauthenticated", kind
        assert ended(stream), kind
    assert not door.seen and not door.server.sessions
    assert door.server.counts["unauthenticated"] == len(kinds)


@pytest.mark.parametrize(
    ("ticket_of", "code"),
    [
        (lambda keys, now: issue(keys, someone(), now - LIFE_S - SKEW_S - 5), "TicketExpired"),
        (lambda keys, now: issue(keys, someone(), now + BEHIND_S + 60), "TicketNotYetValid"),
        (lambda keys, now: pb.Ticket(claims=issue(keys, someone(), now).claims, secret=bytes(32)), "Unauthenticated"),
    ],
    ids=["run out", "from the future", "claims without their secret"],
)
def test_a_ticket_that_is_not_good_is_refused(
    door: Door, keys: KeyFile, ticket_of: Callable[..., pb.Ticket], code: str
) -> None:
    stream, _, about = door.greeted()
    ticket = ticket_of(keys.keys(), time.time())
    stream.send(Kind.PROVE, 2, prove(ticket, about).SerializeToString())
    assert failure(stream) == code
    assert ended(stream) and not door.server.sessions
    assert door.server.counts["expired" if code == "TicketExpired" else "unauthenticated"] == 1


def test_a_proof_that_was_overheard_is_worth_nothing_elsewhere(door: Door, keys: KeyFile) -> None:
    stream, _, about = door.greeted()
    proof = prove(issue(keys.keys(), someone(), time.time()), about).SerializeToString()
    stream.send(Kind.PROVE, 2, proof)
    assert stream.receive().kind == Kind.PROVE_OK
    thief, _, _ = door.greeted()
    thief.send(Kind.PROVE, 2, proof)
    assert failure(thief) == "Unauthenticated"
    assert len(door.server.sessions) == 1


@pytest.mark.parametrize(
    "message", [b"", b"\xff" * 40, os.urandom(4096), pb.Prove(claims=b"x" * 60_000).SerializeToString()]
)
def test_a_proof_of_garbage_is_refused(door: Door, message: bytes) -> None:
    stream, _, _ = door.greeted()
    stream.send(Kind.PROVE, 2, message)
    assert failure(stream) == "Unauthenticated"
    assert ended(stream)


def test_a_hello_without_a_nonce_cannot_be_proved_for(door: Door, keys: KeyFile) -> None:
    hello = Identity(os.urandom(16)).hello()
    hello.nonce = b""
    stream = door.dial()
    stream.send(Kind.HELLO, 1, hello.SerializeToString())
    about = greeting_of(hello.SerializeToString(), stream.receive().message)
    stream.send(Kind.PROVE, 2, prove(issue(keys.keys(), someone(), time.time()), about).SerializeToString())
    assert failure(stream) == "Unauthenticated"


# ------------------------------------------------------------------ sessions


def test_a_session_is_of_its_own_subject_and_nobody_sits_on_its_id(door: Door, keys: KeyFile) -> None:
    session = os.urandom(16)
    squatter = enter(door, keys, "engine-b", session=session)
    first = enter(door, keys, "engine-a", session=session)
    second = enter(door, keys, "engine-a", session=session)
    found = {each.subject: each for each in door.server.sessions.values()}
    assert {name: len(each.connections) for name, each in found.items()} == {"engine-a": 2, "engine-b": 1}
    assert session not in door.server.sessions and found["engine-a"].shown != found["engine-b"].shown
    squatter.close()
    until(lambda: door.ended == [found["engine-b"]])
    assert second.call(Kind.LOOKUP, b"").kind == Kind.LOOKUP_OK
    for connection in (first, second):
        connection.close()
    until(lambda: len(door.ended) == 2)


def test_a_fresh_ticket_is_proved_in_band_for_the_same_subject_alone(door: Door, keys: KeyFile) -> None:
    connection = enter(door, keys)
    connection.prove(issue(keys.keys(), someone(role=Role.READ), time.time()))
    with pytest.raises(Forbidden):
        connection.call(Kind.LOOKUP, b"")
    with pytest.raises(Unauthenticated):
        connection.prove(issue(keys.keys(), someone("another"), time.time()))
    (session,) = door.server.sessions.values()
    (served,) = session.connections
    assert served.rights.role is Role.READ, "a ticket of another one changes nothing"
    connection.close()


def test_what_was_begun_goes_on_when_the_ticket_has_run_out_and_nothing_new_begins(door: Door, keys: KeyFile) -> None:
    connection = enter(door, keys)
    door.clock.ahead = LIFE_S + SKEW_S / 2  # within the slack for clocks that differ
    assert connection.call(Kind.LOOKUP, b"").kind == Kind.LOOKUP_OK
    door.clock.ahead = LIFE_S + SKEW_S + 5
    with pytest.raises(TicketExpired):
        connection.call(Kind.LOOKUP, b"")
    assert connection.call(Kind.COMMIT, b"").kind == Kind.COMMIT_OK
    connection.tell(Kind.RELEASE, b"")
    assert connection.call(Kind.PING, b"").kind == Kind.PONG
    assert door.server.counts["expired"] == 1
    connection.prove(issue(keys.keys(), someone(), door.clock()))
    assert connection.call(Kind.LOOKUP, b"").kind == Kind.LOOKUP_OK
    connection.close()


@pytest.mark.parametrize("after", [("two",), ("two", "one")])
def test_a_ticket_ends_with_its_key(door: Door, keys: KeyFile, tmp_path: Path, after: tuple[str, ...]) -> None:
    connection = enter(door, keys)
    write_keys(tmp_path / "ticket-keys", *after)
    keys.refresh()
    if "one" in after:
        assert connection.call(Kind.LOOKUP, b"").kind == Kind.LOOKUP_OK, "it no longer signs, and is believed"
    else:
        with pytest.raises(TicketExpired, match="taken away"):
            connection.call(Kind.LOOKUP, b"")
        assert connection.call(Kind.COMMIT, b"").kind == Kind.COMMIT_OK
        connection.prove(issue(keys.keys(), someone(), time.time()))
        assert connection.call(Kind.LOOKUP, b"").kind == Kind.LOOKUP_OK
    connection.close()


def test_a_role_that_does_not_allow_a_call_gets_an_error_and_keeps_its_connection(door: Door, keys: KeyFile) -> None:
    connection = enter(door, keys)
    with pytest.raises(Forbidden, match="node"):
        connection.call(Kind.HEARTBEAT, b"")
    connection.tell(Kind.RELEASE, b"")
    assert connection.call(Kind.LOOKUP, b"").kind == Kind.LOOKUP_OK
    assert door.seen == [Kind.RELEASE, Kind.LOOKUP] and door.server.counts["forbidden"] == 1
    connection.close()


def test_a_one_way_message_that_is_refused_is_not_answered(door: Door, keys: KeyFile) -> None:
    connection = enter(door, keys, role=Role.READ)
    connection.tell(Kind.RELEASE, b"")
    assert connection.call(Kind.PING, b"").kind == Kind.PONG, "an answer would be taken for the next call's"
    assert Kind.RELEASE not in door.seen
    connection.close()


# ------------------------------------------------------------------ those who take their time, or too much


@pytest.mark.parametrize("at", ["nothing", "hello", "proof"])
def test_who_drips_ends_in_time(door: Door, keys: KeyFile, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "HELLO_S", 0.4)
    if at == "proof":
        stream, _, about = door.greeted()
        message = prove(issue(keys.keys(), someone(), time.time()), about).SerializeToString()
        kind = Kind.PROVE
    else:
        stream, kind, message = door.dial(), Kind.HELLO, Identity(os.urandom(16)).hello().SerializeToString()
    began = time.monotonic()
    data = wire.encode_header(kind, 2, len(message)) + message
    drip = Drip(stream, data if at != "nothing" else b"", 0.02)
    assert ended(stream)
    took = time.monotonic() - began
    drip.thread.join(5)
    assert drip.sent < len(data), "it was heard to its end"
    assert took < 3.0, "each byte bought it more time"


def test_who_never_proves_is_closed_though_it_pings(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "HELLO_S", 0.3)
    stream, _, _ = door.greeted()
    pinged = 0
    began = time.monotonic()
    with pytest.raises(Unavailable):
        while time.monotonic() < began + 5:
            stream.send(Kind.PING, 2)
            pinged += stream.receive().kind == Kind.PONG
    assert pinged and time.monotonic() < began + 3


@pytest.mark.parametrize("asks", [True, False])
def test_an_oversized_hello_is_not_read(open_door: Callable[..., Door], asks: bool) -> None:
    door = open_door(asks=asks)
    stream = door.dial()
    stream.sock.sendall(wire.encode_header(Kind.HELLO, 1, wire.MESSAGE_BYTES_MAX))
    assert failure(stream) == "ProtocolError"
    assert ended(stream)


@pytest.mark.parametrize("part", ["software", "role", "name", "host", "boot_id"])
def test_a_name_that_fills_lists_is_refused(door: Door, part: str) -> None:
    hello = Identity(os.urandom(16)).hello()
    setattr(hello, part, "x" * (greeting.NAME_CHARACTERS_MAX + 1))
    stream = door.dial()
    stream.send(Kind.HELLO, 1, hello.SerializeToString())
    assert failure(stream) == "ProtocolError"
    assert ended(stream)


def test_an_oversized_proof_is_not_read(door: Door) -> None:
    stream, _, _ = door.greeted()
    stream.sock.sendall(wire.encode_header(Kind.PROVE, 2, wire.MESSAGE_BYTES_MAX))
    assert failure(stream) == "ProtocolError"
    assert ended(stream)


def test_strangers_that_hang_about_keep_nobody_out(open_door: Callable[..., Door], keys: KeyFile) -> None:
    door = open_door(Bounds(unproved=3))
    inside = enter(door, keys)
    strangers = []
    for count in range(1, 4):
        strangers.append(door.greeted()[0])
        until(lambda count=count: door.server._greeter.unproved == count)  # type: ignore[misc]
    late = enter(door, keys)
    assert ended(strangers[0]), "the one that was longest about it makes room"
    for stranger in strangers[1:]:
        stranger.send(Kind.PING, 2)
        assert stranger.receive().kind == Kind.PONG
    for connection in (inside, late):
        assert connection.call(Kind.LOOKUP, b"").kind == Kind.LOOKUP_OK
        connection.close()


# ------------------------------------------------------------------ bounds of a client


def test_too_many_requests_are_refused_and_the_connection_stays(open_door: Callable[..., Door], keys: KeyFile) -> None:
    door = open_door(Bounds(requests_s=0.001, burst=4))
    session = os.urandom(16)
    first, second = enter(door, keys, session=session), enter(door, keys, session=session)
    other = enter(door, keys)
    for connection in (first, second):
        for _ in range(2):
            assert connection.call(Kind.LOOKUP, b"").kind == Kind.LOOKUP_OK
    for connection in (first, second):
        with pytest.raises(Busy, match="slow down"):
            connection.call(Kind.LOOKUP, b"")
        assert connection.call(Kind.COMMIT, b"").kind == Kind.COMMIT_OK, "what was begun is ended"
    assert other.call(Kind.LOOKUP, b"").kind == Kind.LOOKUP_OK, "it is nobody else's bound"
    assert door.server.counts["throttled"] == 2
    for connection in (first, second, other):
        connection.close()


@pytest.mark.parametrize("asks", [True, False])
def test_a_client_has_so_many_connections(open_door: Callable[..., Door], keys: KeyFile, asks: bool) -> None:
    door, session = open_door(Bounds(connections=2), asks=asks), os.urandom(16)

    def one_more(key: bytes) -> Connection:
        tickets = MintedTickets(keys, someone()) if asks else None
        return Connection.open(door.address, Identity(key, tickets=tickets), silence_s=5.0)

    held = [one_more(session), one_more(session)]
    with pytest.raises(Busy):
        one_more(session)
    held.pop().close()
    (of_it,) = door.server.sessions.values()
    until(lambda: len(of_it.connections) == 1)
    held.append(one_more(session))
    for connection in held:
        assert connection.call(Kind.PING, b"").kind == Kind.PONG
        connection.close()


def test_with_tickets_off_nothing_is_asked_for(open_door: Callable[..., Door]) -> None:
    door = open_door(asks=False)
    stream, hello, _ = door.greeted()
    assert not hello.challenge and len(door.server.sessions) == 1
    stream.send(Kind.HEARTBEAT, 2)
    assert stream.receive().kind == Kind.HEARTBEAT_OK
    stream.send(Kind.PROVE, 3, b"")
    assert failure(stream) == "Refused"


def test_clocks_are_what_the_owner_gives(keys: KeyFile) -> None:
    clock = Clock()
    admission = Admission(keys, clock=clock)
    about = greeting_of(b"hello", b"answer")
    proof = prove(issue(keys.keys(), someone(), time.time()), about).SerializeToString()
    assert admission.prove(proof, about)[0].subject == "engine"
    clock.ahead = LIFE_S + SKEW_S + 5
    with pytest.raises(TicketExpired):
        admission.prove(proof, about)


def test_a_key_that_others_have_read_already_is_looked_for_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, "one")
    admission = Admission(KeyFile(path, clock=lambda: 0.0))  # by itself it would never look again
    about = greeting_of(b"hello", b"answer")
    ticket = issue(write_keys(path, "two", "one").keys(), someone(), time.time())
    rights, _, signature = admission.prove(prove(ticket, about).SerializeToString(), about)
    assert rights.subject == "engine" and signature[0] == "two"
    stranger = issue(write_keys(tmp_path / "others", "three").keys(), someone(), time.time())
    with pytest.raises(Unauthenticated):
        admission.prove(prove(stranger, about).SerializeToString(), about)
