"""A pool for the client's tests: a real master socket with a dict behind it, and nodes that are dicts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import FingerprintMismatch, KVError, NotLeader, Unavailable
from kvstrata.proto.keys import Namespace, split_hashes
from kvstrata.proto.status import BlockStatus, HintKind, PlaceState
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint, Fetch, Fetched, Landing, Named, Push, Pushed
from kvstrata.transfer.connection import expect
from kvstrata.transfer.frames import Frame, Late
from kvstrata.transfer.gpu.staging import Staging
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.regions import BlockView, Region
from kvstrata.transfer.server import ChannelServer, Reply
from kvstrata.transfer.sessions import ServerConnection, Session

Key = tuple[Namespace, str, bytes]


def packed(count: int, first: int = 0, width: int = 16) -> bytes:
    return b"".join((first + i + 1).to_bytes(8, "big") * (width // 8) for i in range(count))


def split(data: bytes, width: int = 16) -> list[bytes]:
    return list(split_hashes(data, width))


def plain(namespace: Namespace) -> Namespace:
    return Namespace.from_spec(namespace.to_spec())


# -------------------------------------------------------------------- nodes


@dataclass
class FakeNode:
    """A node as a dict. ``fails``: raised by every call. ``answers``: hash -> status instead of the truth."""

    node_id: str
    incarnation: int = 1
    local: bool = True
    blocks: dict[Key, bytes] = field(default_factory=dict)
    fails: KVError | None = None
    answers: dict[bytes, BlockStatus] = field(default_factory=dict)
    fetches: list[int] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)
    hold: threading.Event | None = None
    touched: int = 0
    epochs: list[int] = field(default_factory=list)
    hints: list[tuple[HintKind, bytes, float]] = field(default_factory=list)
    on_ssd: set[bytes] = field(default_factory=set)
    reading: list[bytes] = field(default_factory=list)
    read_ahead_max: int = 1 << 30
    room: int = 1 << 30
    calls: list[tuple[str, list[bytes]]] = field(default_factory=list)
    durable: bool = False
    slow: bool = False  #: at work until a fetch's deadline
    pending: tuple[Landing, ...] = ()  #: what its answers of PENDING wait for

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.node_id, self.incarnation, "127.0.0.1:1", "", boot_id() if self.local else "elsewhere")

    def read(self, name: bytes) -> int:
        """Where a block is as a fetch finds it: in memory once it was read ahead, and after it."""
        tier = int(name in self.on_ssd and name not in self.reading)
        self.on_ssd.discard(name)
        self.reading = [other for other in self.reading if other != name]
        return tier

    def read_ahead(self, namespace: Namespace, salt: str, name: bytes) -> BlockStatus:
        """What a prefetch is told of one block: ``read_ahead_max`` are read at a time, until they are fetched."""
        if (namespace, salt, name) not in self.blocks:
            return BlockStatus.MISSING
        if name not in self.on_ssd:
            return BlockStatus.LOADED
        if name not in self.reading and len(self.reading) >= self.read_ahead_max:
            return BlockStatus.NO_ROOM
        self.reading.append(name)
        return BlockStatus.IN_FLIGHT

    def put(self, namespace: Namespace, salt: str, hashes: bytes, rows: Sequence[bytes]) -> None:
        for name, row in zip(split(hashes, namespace.hash_bytes), rows, strict=True):
            self.blocks[(plain(namespace), salt, name)] = row


class FakePeer:
    transport = "fake"

    def __init__(self, node: FakeNode, endpoint: Endpoint) -> None:
        self.node, self.endpoint, self.closed, self.upkeeps = node, endpoint, False, 0

    def fetch(self, request: Fetch) -> Fetched:
        node = self._enter(len(request.blocks))
        status, tier, moved = [], [], 0
        names = split(request.hashes, request.namespace.hash_bytes)
        node.calls.append(("fetch", names))
        if node.slow:
            time.sleep(max(0.0, request.deadline - time.monotonic()))
            raise Late("still at work when the deadline passed")
        node.epochs.append(request.epoch)
        for i, name in enumerate(names):
            data = node.blocks.get((plain(request.namespace), request.salt, name))
            known = BlockStatus.MISSING if data is None else BlockStatus.LOADED
            status.append(node.answers.get(name, known if i < node.room else BlockStatus.NO_ROOM))
            tier.append(node.read(name))
            if status[-1] == BlockStatus.LOADED and data is not None:
                _scatter(request.blocks, i, data)
                moved += len(data)
        return Fetched(np.array(status, np.uint8), np.array(tier, np.uint8), 77, moved, node.pending)

    def push(self, request: Push) -> Pushed:
        node = self._enter(0)
        node.pushes.append(request)
        status = []
        for i, name in enumerate(split(request.hashes, request.namespace.hash_bytes)):
            key = (plain(request.namespace), request.salt, name)
            status.append(node.answers.get(name, BlockStatus.STORED))
            if status[-1] == BlockStatus.STORED:
                if key in node.blocks:
                    status[-1] = BlockStatus.ALREADY_PRESENT
                node.blocks[key] = _gather(request.blocks, i)
        return Pushed(np.array(status, np.uint8), 0, np.full(len(status), node.durable), node.pending)

    def prefetch(self, blocks: Named) -> npt.NDArray[np.uint8]:
        node = self._enter(0)
        node.touched += 1
        node.epochs.append(blocks.epoch)
        names = split(blocks.hashes, blocks.namespace.hash_bytes)
        node.calls.append(("prefetch", names))
        return np.array([node.read_ahead(plain(blocks.namespace), blocks.salt, name) for name in names], np.uint8)

    def hint(self, blocks: Named, kind: HintKind, ttl_s: float) -> int:
        node = self._enter(0)
        node.hints.append((kind, blocks.hashes, ttl_s))
        names = split(blocks.hashes, blocks.namespace.hash_bytes)
        return sum((plain(blocks.namespace), blocks.salt, name) in node.blocks for name in names)

    def view(self, namespace: Namespace, salt: str, hashes: bytes, deadline: float, epoch: int = 0) -> FakeLease:
        node = self._enter(0)
        node.epochs.append(epoch)
        rows = [node.blocks.get((plain(namespace), salt, name)) for name in split(hashes, namespace.hash_bytes)]
        return FakeLease([None if row is None else np.frombuffer(row, np.uint8) for row in rows])

    def _enter(self, blocks: int) -> FakeNode:
        self.node.fetches.append(blocks)
        if self.node.hold is not None:
            assert self.node.hold.wait(10)
        if self.node.fails is not None:
            raise self.node.fails
        if self.node.incarnation != self.endpoint.incarnation:
            raise Unavailable("restarted")
        return self.node

    def reachable(self) -> bool:
        """A node that refuses a call is there, as over a real connection."""
        return not isinstance(self.node.fails, Unavailable)

    def upkeep(self) -> None:
        self.upkeeps += 1

    def close(self) -> None:
        self.closed = True


class FakeLease:
    def __init__(self, arrays: Sequence[npt.NDArray[np.uint8] | None]) -> None:
        self.arrays, self.closed = arrays, False

    def valid(self) -> bool:
        return not self.closed

    def close(self) -> None:
        self.closed = True


def _scatter(blocks: BlockView, index: int, data: bytes) -> None:
    at = 0
    for start, length in blocks.table[index].tolist():
        blocks.region.bytes[start : start + length] = np.frombuffer(data, np.uint8, length, at)
        at += length


def _gather(blocks: BlockView, index: int) -> bytes:
    return b"".join(blocks.region.bytes[a : a + n].tobytes() for a, n in blocks.table[index].tolist())


class FakeChoice:
    """Takes the place of :class:`TransportChoice`."""

    nodes: dict[str, FakeNode]

    def __init__(self, spec: str, identity: Identity) -> None:
        self.peers: list[FakePeer] = []
        self.staging = Staging(self.register, self.unregister)

    def connect(self, endpoint: Endpoint) -> FakePeer:
        if endpoint.node_id not in self.nodes:
            raise Unavailable(f"no transport reaches {endpoint.node_id}")
        self.peers.append(FakePeer(self.nodes[endpoint.node_id], endpoint))
        return self.peers[-1]

    def register(self, region: Region) -> None: ...
    def unregister(self, region: Region) -> None: ...
    def close(self) -> None: ...

    def rail_health(self) -> dict[str, object]:
        return {}


# -------------------------------------------------------------------- the master


class FakeMaster:
    """Answers from ``where`` (key -> node id) over a real socket. ``place_at``: node ids in turns of ``stripe``."""

    def __init__(self, nodes: dict[str, FakeNode], listen: str = "127.0.0.1:0") -> None:
        self.nodes = nodes
        self.where: dict[Key, str] = {}
        #: Other nodes that have a block too, in the order in which they are named when the first is to be avoided.
        self.also: dict[Key, list[str]] = {}
        self.leads: bool | None = None
        self.leader = ""
        self.leader_epoch = 0
        self.refusals = 0
        self.present: npt.NDArray[np.bool_] | None = None
        self.place_at: list[str] = list(nodes)
        self.stripe = 4
        self.in_flight: set[bytes] = set()
        self.not_yet = False
        self.refuses: KVError | None = None
        self.delay_s = 0.0
        self.garbage = False
        self.reports: list[pb.MissReport] = []
        self.asked: list[pb.Lookup] = []
        self.placed: list[pb.Place] = []
        self.stands_ms = 0
        self.strict_epoch = False
        self.lookups = 0
        self.removed: list[bytes] = []
        self.unreached: list[str] = []
        self.epoch = 3
        self.incarnation = int.from_bytes(os.urandom(8), "little")
        self._handles: list[Namespace] = []
        self.loops = Loops()
        handlers = {
            Kind.PING: lambda *_: Reply(Kind.PONG),
            Kind.OPEN_NAMESPACE: self._open,
            Kind.LOOKUP: self._lookup,
            Kind.PLACE: self._place,
            Kind.MISS_REPORT: self._report,
            Kind.REMOVE: self._remove,
        }
        self.server = ChannelServer(handlers, self._hello, lambda _: None, self.loops)
        self.address = self.server.listen_tcp(listen)

    def _hello(self, _: Session) -> pb.HelloOk:
        return pb.HelloOk(
            role="master",
            cluster_id="c",
            incarnation=self.incarnation,
            software="fake",
            leading=bool(self.leads),
            leader=self.leader,
            epoch=self.leader_epoch,
        )

    def _open(self, _: ServerConnection, frame: Frame) -> Reply:
        self._trouble()
        spec = Namespace.from_spec(expect(pb.OpenNamespace, frame, Kind.OPEN_NAMESPACE).spec)
        if any(n.group == spec.group and n.block_bytes != spec.block_bytes for n in self._handles):
            raise FingerprintMismatch(f"group {spec.group} is known with another layout")
        if spec not in self._handles:
            self._handles.append(spec)
        handle = self._handles.index(spec) + 1000 * (self.incarnation % 1000 + 1)
        return Reply(Kind.NAMESPACE_HANDLE, pb.NamespaceHandle(handle=handle, epoch=self.epoch).SerializeToString())

    def _namespace(self, handle: int) -> Namespace:
        index = handle - 1000 * (self.incarnation % 1000 + 1)
        if not 0 <= index < len(self._handles):
            raise FingerprintMismatch(f"namespace handle {handle} is unknown")
        return self._handles[index]

    def _trouble(self) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.refuses is not None:
            raise self.refuses

    def _keys(self, ns: int, salt: str, hashes: bytes) -> list[Key]:
        namespace = self._namespace(ns)
        return [(namespace, salt, name) for name in split(hashes, namespace.hash_bytes)]

    def _lookup(self, _: ServerConnection, frame: Frame) -> Reply:
        self._trouble()
        self.lookups += 1
        if self.garbage:
            return Reply(
                Kind.LOOKUP_OK, pb.LookupOk(run_code=b"\1\0", run_length=b"\xff\xff\xff\xff").SerializeToString()
            )
        message = expect(pb.Lookup, frame, Kind.LOOKUP)
        names = list(self.nodes)
        keys = self._keys(message.ns, message.salt, message.hashes)
        self.asked.append(message)
        codes = [self._code(names, key, message.avoid) for key in keys]
        hit = next((i for i, code in enumerate(codes) if not code), len(codes))
        reply = pb.LookupOk(
            not_yet=self.not_yet,
            hit_blocks=hit,
            shard_hit_blocks=hit,
            run_code=np.array(codes, np.uint16).tobytes(),
            run_length=np.ones(len(codes), np.uint32).tobytes(),
            nodes=[_ref(node) for node in self.nodes.values()],
            replicas=max((1 + len(self.also.get(key, ())) for key in keys if key in self.where), default=0),
        )
        if self.present is not None:
            reply.present = np.packbits(self.present, bitorder="little").tobytes()
            reply.hit_blocks = int(self.present.argmin()) if not self.present.all() else len(codes)
        return Reply(Kind.LOOKUP_OK, reply.SerializeToString())

    def _code(self, names: list[str], key: Key, avoid: Sequence[str]) -> int:
        if key not in self.where:
            return 0
        holders = [self.where[key], *self.also.get(key, ())]
        node = next((name for name in holders if name not in avoid), holders[0])
        return 1 + 4 * names.index(node) + (key[2] in self.nodes[node].on_ssd)

    def _place(self, _: ServerConnection, frame: Frame) -> Reply:
        self._trouble()
        message = expect(pb.Place, frame, Kind.PLACE)
        self._must_lead()
        self.placed.append(message)
        if self.strict_epoch and message.epoch != self.epoch:
            raise FingerprintMismatch(f"weights of epoch {message.epoch}, the pool is at {self.epoch}: open it again")
        names = list(self.nodes)
        place_at = [name for name in self.place_at if name not in message.avoid] or self.place_at
        codes, states = [], []
        for i, key in enumerate(self._keys(message.ns, message.salt, message.hashes)):
            if key in self.where:
                codes.append(1 + 4 * names.index(self.where[key]))
                states.append(PlaceState.PRESENT)
            elif not place_at:
                codes.append(0)
                states.append(PlaceState.NOWHERE)
            else:
                codes.append(1 + 4 * names.index(place_at[i // self.stripe % len(place_at)]))
                states.append(PlaceState.IN_FLIGHT if key[2] in self.in_flight else PlaceState.NEW)
        reply = pb.PlaceOk(
            run_code=np.array(codes, np.uint16).tobytes(),
            run_state=np.array(states, np.uint8).tobytes(),
            run_length=np.ones(len(codes), np.uint32).tobytes(),
            nodes=[_ref(node) for node in self.nodes.values()] if self.place_at else [],
            stands_ms=self.stands_ms,
        )
        return Reply(Kind.PLACE_OK, reply.SerializeToString())

    def _must_lead(self) -> None:
        if self.leads is False:
            self.refusals += 1
            told = f"the leader is {self.leader}" if self.leader else "there is none now"
            raise NotLeader(f"this master does not lead: {told}")

    def _report(self, _: ServerConnection, frame: Frame) -> None:
        self.reports.append(expect(pb.MissReport, frame, Kind.MISS_REPORT))

    def _remove(self, _: ServerConnection, frame: Frame) -> Reply:
        self._trouble()
        message = expect(pb.Remove, frame, Kind.REMOVE)
        self._must_lead()
        found = [k for k in self._keys(message.ns, message.salt, message.hashes) if self.where.pop(k, None)]
        reply = pb.RemoveOk(removed=len(found), unreached=self.unreached)
        return Reply(Kind.REMOVE_OK, reply.SerializeToString())

    def learn(self) -> None:
        """Take up what the nodes hold now."""
        holders: dict[Key, list[str]] = {}
        for node in self.nodes.values():
            for key in node.blocks:
                holders.setdefault(key, []).append(node.node_id)
        self.where = {key: names[0] for key, names in holders.items()}
        self.also = {key: names[1:] for key, names in holders.items() if len(names) > 1}

    def stop(self) -> None:
        self.server.stop(0.1)
        self.loops.stop()


def _ref(node: FakeNode) -> pb.NodeRef:
    e = node.endpoint
    return pb.NodeRef(node_id=e.node_id, incarnation=e.incarnation, channel=e.channel, boot_id=e.boot_id)
