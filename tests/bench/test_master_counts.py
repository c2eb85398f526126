"""A gate against slow growth: function calls of a master's handlers and of a node's announcement, for few blocks.

As in test_gate_counts.py: counted on CPython 3.11, with a little room; what to do when one fails is told there.
"""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from kvstrata.master import messages as m
from kvstrata.master.channel import Endpoints, MasterChannel
from kvstrata.master.hub import Hub
from kvstrata.master.stores.opening import open_store
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.security.rights import EVERYTHING
from tests.bench.counting import least_function_calls, slope
from tests.bench.test_gate_counts import bounded

FEW: Final = 16
NS: Final = Namespace("gate", block_bytes=4096, block_tokens=16)
#: Function calls for one block, and for each of a few more.
CALLS: Final = {"place": (246, 40.0), "announce": (190, 31.0), "lookup": (150, 7.5), "lookup, missed": (196, 6.5)}


class LoneMaster:
    """A master's handlers without sockets, and one node that has attached."""

    def __init__(self) -> None:
        self._hub = Hub(open_store(None), random.Random(1), grace_s=0.0)
        self._handlers = MasterChannel(self._hub, Endpoints()).handlers()
        owner = SimpleNamespace(key=b"s" * 16, hello=pb.Hello(boot_id="host"))
        self._connection = cast(Any, SimpleNamespace(owner=owner, rights=EVERYTHING))
        facts = m.NodeFacts("n", 1, channel="h:1", unix_path="/run/n", boot_id="host", dram_bytes=1 << 30)
        self._session, _ = self._hub.attach(m.Attach(facts))
        self._hub.handle(m.SnapshotPart(self._session, 0, (), True, True))
        opened = self._call(Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=NS.to_spec()))
        self._handle = pb.NamespaceHandle.FromString(opened).handle
        self._seq = self._chains = 0

    def _call(self, kind: Kind, message: Any) -> bytes:
        reply = self._handlers[kind](self._connection, Frame(kind, 1, message.SerializeToString(), 0))
        assert reply is not None
        return reply.message

    def chain(self, count: int) -> bytes:
        self._chains += 1
        return hashlib.shake_128(self._chains.to_bytes(8, "little")).digest(count * NS.hash_bytes)

    def place(self, hashes: bytes) -> None:
        self._call(Kind.PLACE, pb.Place(ns=self._handle, hashes=hashes))

    def announce(self, hashes: bytes) -> None:
        self._seq += 1
        self._hub.handle(m.DeltaBatch(self._session, self._seq, (m.Change(True, NS, "", 0, hashes),)))

    def lookup(self, hashes: bytes) -> int:
        return pb.LookupOk.FromString(self._call(Kind.LOOKUP, pb.Lookup(ns=self._handle, hashes=hashes))).hit_blocks


@pytest.mark.parametrize("what", CALLS)
def test_function_calls_of_a_master(what: str) -> None:
    master = LoneMaster()
    for _ in range(100):
        hashes = master.chain(FEW)
        master.place(hashes)
        master.announce(hashes)
    assert (master.lookup(hashes), master.lookup(master.chain(1))) == (FEW, 0)
    calls = {
        "place": lambda count: master.place(master.chain(count)),
        "announce": lambda count: master.announce(master.chain(count)),
        "lookup": lambda count: master.lookup(hashes[: count * NS.hash_bytes]),
        "lookup, missed": lambda count: master.lookup(master.chain(count)),
    }
    one, few = (least_function_calls(lambda count=count: calls[what](count), times=15) for count in (1, FEW))
    of_one, of_more = CALLS[what]
    bounded(f"{what}: one block", one, of_one, "function calls")
    bounded(f"{what}: each block more", slope(one, few, 1, FEW), of_more, "function calls")
