"""The connecting side of tickets, on real sockets: whom it believes, what it tells its caller, when it proves anew."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import TicketExpired, Unauthenticated, Unavailable
from kvstrata.proto.wire import Kind
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.frames import Disconnected, FrameStream
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.minted import MintedTickets
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.security.tickets import LIFE_S, SKEW_S, issue
from tests.transfer.security.doors import Door, Forced, someone, write_keys
from tests.waiting import until

CALL_S = 5.0


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return write_keys(tmp_path / "ticket-keys", "one")


@pytest.fixture
def open_door() -> Iterator[Callable[[KeyFile | None], Door]]:
    doors: list[Door] = []

    def start(keys: KeyFile | None) -> Door:
        doors.append(Door(keys))
        return doors[-1]

    yield start
    for door in doors:
        door.stop()


@pytest.fixture
def door(open_door: Callable[[KeyFile | None], Door], keys: KeyFile) -> Door:
    return open_door(keys)


def channel_to(door: Door, tickets: object, **more: bool) -> Channel:
    identity = Identity.new(tickets=tickets)  # type: ignore[arg-type]
    return Channel([door.address], identity, silence_s=CALL_S, self_probing=False, **more)


def lookup(channel: Channel) -> int:
    return channel.call(Kind.LOOKUP, b"", time.monotonic() + CALL_S).kind


def proofs(door: Door, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Subjects in the order in which they prove a ticket at the door."""
    seen: list[str] = []
    prove = door.admission.prove

    def counted(message: bytes, greeting: bytes) -> object:
        seen.append(pb.TicketClaims.FromString(pb.Prove.FromString(message).claims).subject)
        return prove(message, greeting)

    monkeypatch.setattr(door.admission, "prove", counted)
    return seen


# ------------------------------------------------------------------ whom it believes


def test_without_a_ticket_it_says_what_to_give(door: Door) -> None:
    with pytest.raises(Unauthenticated, match="token"):
        Connection.open(door.address, Identity.new(), silence_s=CALL_S)
    assert not door.server.sessions


def test_who_wants_the_hello_alone_proves_nothing(door: Door, keys: KeyFile) -> None:
    connection = Connection.open(door.address, Identity.new(), silence_s=CALL_S, hello_only=True)
    assert connection.hello.node_id == "n1"
    assert connection.call(Kind.PING, b"").kind == Kind.PONG
    connection.close()


def test_it_does_not_talk_to_who_asks_for_no_ticket(open_door: Callable[..., Door], keys: KeyFile) -> None:
    door = open_door(None)
    with pytest.raises(Unauthenticated, match="asks for no ticket"):
        Connection.open(door.address, Identity.new(tickets=MintedTickets(keys, someone())), silence_s=CALL_S)


class Stranger:
    """Listens like a node and asks for a ticket, but has not got the ticket keys: it takes any proof."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            stream = FrameStream(sock, CALL_S)
            try:
                hello = stream.receive()
                ok = pb.HelloOk(role="node", node_id="n1", challenge=os.urandom(32))
                stream.send(Kind.HELLO_OK, hello.request, ok.SerializeToString())
                proof = stream.receive()
                stream.send(Kind.PROVE_OK, proof.request, self._answer)
                self.asked.append(stream.receive().kind)
            except Unavailable:
                continue
            finally:
                stream.close()

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(CALL_S)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("answer", [b"", pb.ProveOk(mac=bytes(32)).SerializeToString()])
def test_a_stranger_on_the_port_is_told_nothing(keys: KeyFile, answer: bytes) -> None:
    stranger = Stranger(answer)
    try:
        with pytest.raises(Unauthenticated, match="ticket keys"):
            Connection.open(stranger.address, Identity.new(tickets=MintedTickets(keys, someone())), silence_s=CALL_S)
    finally:
        stranger.stop()
    assert stranger.asked == []


class Relay(Stranger):
    """A stranger that passes everything on to a door of the pool, and says in its hello to be another node."""

    def __init__(self, door: Door, **claims: object) -> None:
        self._door = door
        self._claims = claims
        self.at_the_door: list[int] = []
        super().__init__(b"")

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            victim, real = FrameStream(sock, CALL_S), self._door.dial()
            try:
                hello = victim.receive()
                self.asked.append(hello.kind)
                real.send(hello.kind, hello.request, hello.message)
                ok = pb.HelloOk.FromString(real.receive().message)
                for name, value in self._claims.items():
                    setattr(ok, name, value)
                victim.send(Kind.HELLO_OK, hello.request, ok.SerializeToString())
                proof = victim.receive()
                self.asked.append(proof.kind)
                real.send(proof.kind, proof.request, proof.message)
                self.at_the_door.append(real.receive().kind)
            except Unavailable:
                continue
            finally:
                victim.close()
                real.close()


def test_a_proof_made_to_a_stranger_opens_no_other_door(door: Door, keys: KeyFile) -> None:
    relay = Relay(door, node_id="gone", incarnation=99)
    try:
        with pytest.raises((Unauthenticated, Unavailable)):
            Connection.open(relay.address, Identity.new(tickets=MintedTickets(keys, someone())), silence_s=CALL_S)
        until(lambda: relay.at_the_door == [Kind.FAILURE])
        assert not door.server.sessions
    finally:
        relay.stop()


def test_to_who_is_not_the_peer_that_is_meant_nothing_is_proved(door: Door, keys: KeyFile) -> None:
    def the_one_that_is_gone(hello: pb.HelloOk) -> None:
        if hello.incarnation != 99:
            raise Disconnected("another process")

    relay = Relay(door)
    channel = Channel(
        [relay.address],
        Identity.new(tickets=MintedTickets(keys, someone())),
        silence_s=CALL_S,
        accept=the_one_that_is_gone,
    )
    try:
        with pytest.raises(Unavailable, match="another process"):
            lookup(channel)
    finally:
        channel.close()
        relay.stop()
    assert relay.asked == [Kind.HELLO]


def test_a_server_with_other_keys_and_this_side_do_not_believe_each_other(
    open_door: Callable[..., Door], keys: KeyFile, tmp_path: Path
) -> None:
    door = open_door(write_keys(tmp_path / "others", "two"))
    tickets = Forced(keys, someone())
    with pytest.raises(Unauthenticated):
        Connection.open(door.address, Identity.new(tickets=tickets), silence_s=CALL_S)
    assert tickets.refusals == 1, "the source has to hear of it: the pool's keys may have changed"


def test_without_a_ticket_to_show_nobody_is_connected_to(door: Door) -> None:
    class Dry:
        def current(self) -> pb.Ticket:
            raise Unavailable("no master gave a ticket")

        def refused(self, ticket: pb.Ticket) -> None:
            raise AssertionError("it was never shown")

    channel = channel_to(door, Dry())
    for _ in range(2):
        with pytest.raises(Unavailable, match="no master gave"):
            lookup(channel)
    assert channel.breaker.closed, "that is not the peer's fault"
    assert door.hellos == 0
    channel.close()


# ------------------------------------------------------------------ a channel of many connections


def test_a_refusal_opens_the_breaker_and_every_call_says_why_until_it_is_mended(
    open_door: Callable[..., Door], keys: KeyFile, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    door = open_door(write_keys(theirs, "two"))
    channel = channel_to(door, MintedTickets(keys, someone()))
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            lookup(channel)
    assert not channel.breaker.closed and "not good here" in channel.breaker.reason
    assert door.hellos == 1, "the breaker keeps calls from it"
    write_keys(theirs, "two", "one")
    until(channel.probe)
    assert lookup(channel) == Kind.LOOKUP_OK
    channel.close()


def test_a_node_that_does_not_believe_is_one_that_is_lost(
    open_door: Callable[..., Door], keys: KeyFile, tmp_path: Path
) -> None:
    door = open_door(write_keys(tmp_path / "others", "two"))
    channel = channel_to(door, MintedTickets(keys, someone()), strangers_are_lost=True)
    for _ in range(2):
        with pytest.raises(Unavailable, match="not good here"):
            lookup(channel)
    assert not channel.probe()
    channel.close()


def test_a_fresh_ticket_is_proved_once_on_each_connection_before_its_next_call(
    door: Door, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = proofs(door, monkeypatch)
    tickets = Forced(keys, someone())
    channel = channel_to(door, tickets)
    for _ in range(3):
        assert lookup(channel) == Kind.LOOKUP_OK
    assert len(seen) == 1
    tickets.now = issue(keys.keys(), someone(), time.time())
    for _ in range(3):
        assert lookup(channel) == Kind.LOOKUP_OK
    assert len(seen) == 2 and door.hellos == 1, "in band: the connection is the same"
    channel.close()


def test_a_ticket_that_ran_out_on_the_way_is_proved_anew_and_the_call_made_once_more(
    door: Door, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = proofs(door, monkeypatch)
    tickets = Forced(keys, someone())
    tickets.now = issue(keys.keys(), someone(), time.time())
    channel = channel_to(door, tickets)
    assert lookup(channel) == Kind.LOOKUP_OK
    door.clock.ahead = LIFE_S + SKEW_S + 5
    monkeypatch.setattr(tickets, "_clock", door.clock)
    assert lookup(channel) == Kind.LOOKUP_OK
    assert (tickets.refusals, len(seen), door.seen) == (1, 2, [Kind.LOOKUP, Kind.LOOKUP])
    channel.close()


def test_a_ticket_that_ran_out_and_has_no_successor_is_said_to_have_run_out(door: Door, keys: KeyFile) -> None:
    class Old(Forced):
        def refused(self, ticket: pb.Ticket) -> None:
            self.refusals += 1

    tickets = Old(keys, someone())
    tickets.now = issue(keys.keys(), someone(), time.time())
    channel = channel_to(door, tickets)
    assert lookup(channel) == Kind.LOOKUP_OK
    door.clock.ahead = LIFE_S + SKEW_S + 5
    with pytest.raises(TicketExpired):
        lookup(channel)
    with channel.exchange(Kind.COMMIT, b"", time.monotonic() + CALL_S) as (_, frame):
        assert frame.kind == Kind.COMMIT_OK, "what was begun under it is ended"
    channel.close()


def test_who_asked_for_no_ticket_and_says_that_it_has_run_out_is_not_believed(
    open_door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    door = open_door(None)

    def rogue(*_: object) -> None:
        raise TicketExpired("the ticket has run out")

    monkeypatch.setattr(door.admission, "admit", rogue)
    channel = channel_to(door, None)
    with pytest.raises(Unauthenticated, match="asked for none"):
        lookup(channel)
    with pytest.raises(Unauthenticated), channel.exchange(Kind.LOOKUP, b"", time.monotonic() + CALL_S):
        pass
    assert not channel.breaker.closed
    channel.close()


def test_a_one_way_message_goes_under_a_fresh_ticket(
    door: Door, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = proofs(door, monkeypatch)
    tickets = Forced(keys, someone())
    channel = channel_to(door, tickets)
    channel.tell(Kind.RELEASE, b"", time.monotonic() + CALL_S)
    tickets.now = issue(keys.keys(), someone(), time.time())
    channel.tell(Kind.RELEASE, b"", time.monotonic() + CALL_S)
    until(lambda: door.seen == [Kind.RELEASE] * 2)
    assert len(seen) == 2
    channel.close()


def test_while_no_fresh_ticket_is_to_be_had_the_proved_one_stands(door: Door, keys: KeyFile) -> None:
    class Gone(Forced):
        gone = False

        def current(self) -> pb.Ticket:
            if self.gone:
                raise Unavailable("no master gave a ticket")
            return super().current()

    tickets = Gone(keys, someone())
    channel = channel_to(door, tickets)
    assert lookup(channel) == Kind.LOOKUP_OK
    tickets.gone = True
    assert lookup(channel) == Kind.LOOKUP_OK
    channel.close()


def test_a_connection_that_was_replaced_has_proved_its_ticket(
    door: Door, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = proofs(door, monkeypatch)
    tickets = Forced(keys, someone())
    channel = channel_to(door, tickets)
    assert lookup(channel) == Kind.LOOKUP_OK
    (session,) = door.server.sessions.values()
    (connection,) = session.connections
    connection.stream.sock.shutdown(socket.SHUT_RDWR)
    until(lambda: not door.server.sessions)
    assert lookup(channel) == Kind.LOOKUP_OK and lookup(channel) == Kind.LOOKUP_OK
    assert len(seen) == 2
    tickets.now = issue(keys.keys(), someone(), time.time())
    assert lookup(channel) == Kind.LOOKUP_OK, "proved against the challenge of the new connection"
    assert len(seen) == 3
    channel.close()


def test_keys_are_rotated_under_traffic_and_no_call_fails(
    open_door: Callable[..., Door], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add a key everywhere, let it sign, take the old one away once its tickets have run out."""
    here, there = tmp_path / "here", tmp_path / "there"
    mine, theirs = write_keys(here, "one"), write_keys(there, "one")
    door = open_door(theirs)
    channel = channel_to(door, MintedTickets(mine, someone()))
    stop, problems, calls = threading.Event(), [], [0]

    def call() -> None:
        while not stop.is_set():
            try:
                assert lookup(channel) == Kind.LOOKUP_OK
                calls[0] += 1
            except Exception as error:  # noqa: BLE001
                problems.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for names in (("one", "two"), ("two", "one"), ("two",)):
        for path, file in ((there, theirs), (here, mine)):
            write_keys(path, *names)
            file.refresh()
        so_far = calls[0]
        until(lambda so_far=so_far: calls[0] > so_far + 20 or bool(problems))  # type: ignore[misc]
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not problems
    channel.close()


def test_the_role_of_a_node_is_minted_for_nodes(door: Door, keys: KeyFile) -> None:
    connection = Connection.open(
        door.address, Identity.new("heartbeat", tickets=MintedTickets(keys, someone("n2", Role.NODE))), silence_s=CALL_S
    )
    assert connection.call(Kind.HEARTBEAT, b"").kind == Kind.HEARTBEAT_OK
    connection.close()


def test_nobody_listens(keys: KeyFile) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(Disconnected):
        Connection.open(address, Identity.new(tickets=MintedTickets(keys, someone())))
