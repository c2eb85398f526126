"""A refusal looks at names alone: whether a block is there changes nothing of what a node does to refuse it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ForbiddenSalt, InvalidArgument
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.storage.arena import dram_arena
from kvstrata.storage.serving.channel import NodeChannel
from kvstrata.storage.state import NodeState, WriteAsk
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.security.rights import Rights, Role
from kvstrata.transfer.server import Reply

NAMESPACE = Namespace("llama/allowed", 512, 16)
OTHER = Namespace("mistral/other", 512, 16)
#: Lease, inline, read ahead.
MODES = range(3)
KEY, ABSENT = bytes(16), bytes([1]) * 16
ENGINE = Rights("engine", Role.CLIENT, ("mine-*",), ("llama/*",))


class Recorder:
    """The state, with what is asked of it written down."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self._state, name)


@pytest.fixture
def world() -> Iterator[tuple[NodeChannel, Recorder, dict[str, int]]]:
    """A node with KEY stored for everybody's tenant in both namespaces."""
    arena = dram_arena(1 << 20, 1 << 18)
    state = NodeState(arena)
    handles = {}
    for namespace in (NAMESPACE, OTHER):
        handle, epoch = state.open_namespace(namespace)
        handles[namespace.group] = handle
        for salt in ("mine-1", "theirs"):
            got = state.reserve(b"s" * 16, WriteAsk(handle, salt, KEY, b"", 0, 5000, epoch), 0.0)
            assert got.reservation is not None
            state.commit(b"s" * 16, got.reservation.id, [0], None, 0.0)
    recorder = Recorder(state)
    copies = SimpleNamespace(answer=lambda message: Reply(Kind.ACQUIRE_OK))
    channel = NodeChannel(recorder, threading.Lock(), clock=lambda: 1.0, copies=copies)  # type: ignore[arg-type]
    recorder.asked.clear()
    yield channel, recorder, handles
    arena.close()


def peer(rights: Rights) -> Any:
    hello = SimpleNamespace(role="node", boot_id="", name="engine", session=b"e" * 16)
    return SimpleNamespace(
        rights=rights, local=False, owner=SimpleNamespace(key=b"e" * 16, hello=hello, pid=0, pidfd=-1, over=False)
    )


def ask(channel: NodeChannel, kind: int, message: Message, rights: Rights = ENGINE) -> Any:
    return channel.handlers()[kind](peer(rights), Frame(kind, 1, message.SerializeToString(), 0))


def messages(handle: int, salt: str, key: bytes) -> list[tuple[int, Message]]:
    reserve = pb.Reserve(ns=handle, salt=salt, hashes=key, deadline_ms=1000)
    return [
        *((Kind.ACQUIRE, pb.Acquire(ns=handle, salt=salt, hashes=key, mode=mode, deadline_ms=1000)) for mode in MODES),
        (Kind.RESERVE, reserve),
        (Kind.PULL, pb.Pull(reserve=reserve, region=1, pieces=1, descriptors=bytes(16))),
        (Kind.HINT, pb.Hint(ns=handle, salt=salt, hashes=key, kind=1, ttl_ms=1000)),
    ]


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize(
    ("salt", "group"), [("theirs", "llama/allowed"), ("mine-1", "mistral/other"), ("", "llama/allowed")]
)
def test_a_refusal_is_the_same_whether_the_block_is_there_or_not(world: Any, which: int, salt: str, group: str) -> None:
    channel, recorder, handles = world
    told = []
    for key in (KEY, ABSENT):
        kind, message = messages(handles[group], salt, key)[which]
        recorder.asked.clear()
        with pytest.raises(ForbiddenSalt) as caught:
            ask(channel, kind, message)
        told.append((recorder.asked.copy(), str(caught.value)))
    assert told[0] == told[1]
    assert told[0][0] == ["entry"], "nothing but the name of the namespace is looked at"
    recorder._state.check()


def test_what_may_be_touched_is_found(world: Any) -> None:
    channel, _, handles = world
    for which in (0, 1, 2, 5):
        kind, message = messages(handles["llama/allowed"], "mine-1", KEY)[which]
        reply = ask(channel, kind, message)
        if reply.after is not None:
            reply.after()
    reserved = ask(channel, *messages(handles["llama/allowed"], "mine-2", KEY)[3])
    assert pb.ReserveOk.FromString(reserved.message).reservation


def test_a_namespace_that_may_not_be_touched_is_not_opened(world: Any) -> None:
    channel, recorder, _ = world
    with pytest.raises(ForbiddenSalt):
        ask(channel, Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=OTHER.to_spec()))
    assert recorder.asked == []
    ask(channel, Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=NAMESPACE.to_spec()))


def test_copies_are_for_those_who_proved_that_they_are_nodes(world: Any) -> None:
    """The hello says "node"; the ticket does not."""
    channel, recorder, handles = world
    kind = Kind.ACQUIRE
    message = pb.Acquire(ns=handles["llama/allowed"], salt="mine-1", hashes=KEY, mode=3, deadline_ms=1000)
    with pytest.raises(InvalidArgument, match="for nodes"):
        ask(channel, kind, message)
    assert recorder.asked == []
    node = Rights("node-2", Role.NODE, ("*",), ("*",))
    assert ask(channel, kind, message, node).kind == Kind.ACQUIRE_OK
    with pytest.raises(ForbiddenSalt):
        ask(channel, kind, message, Rights("node-2", Role.NODE, ("theirs",), ("*",)))
