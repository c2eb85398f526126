"""A client in the simulation: looks up, acquires, reads the bytes in its own time, and says what it was given.

What it decides by is the shipped client's (locations, plans, what a lease is worth); what it waits for is its own,
because the shipped one waits in threads.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from kvstrata.client.locations import RecentLocations, decode_lookup, decode_place
from kvstrata.client.plan import by_node, gather, positions_of, stripes
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import SLOT_ROW, BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.grants import LEASE_MARGIN_S
from tests.sim.clock import Broken, Future, Process, Steps, all_of
from tests.sim.oracle import BLOCK_BYTES, Key, Violation
from tests.sim.wires import Answer, Conn, code_of, greeted

if TYPE_CHECKING:
    from tests.sim.world import World

CALL_S = 1.0
_LOADED, _RESERVED, _STORED = int(BlockStatus.LOADED), int(BlockStatus.RESERVED), int(BlockStatus.STORED)
_MISSING, _EVICTED, _PRESENT = int(BlockStatus.MISSING), int(BlockStatus.EVICTED), int(BlockStatus.ALREADY_PRESENT)
_LOST, _LATE = int(BlockStatus.NODE_LOST), int(BlockStatus.LATE)


class ClientHost:
    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.starts = 0
        self.process = Process(world.scheduler, name, 0.0)
        self.process.alive = False
        self.rng = random.Random(f"{world.seed}/{name}")

    @property
    def up(self) -> bool:
        return self.process.alive

    def start(self) -> None:
        self.starts += 1
        self.process = self.world.process(self.name)
        self.recent = RecentLocations(clock=self.process.clock)
        self.conns: dict[str, Conn] = {}
        self.handles: dict[tuple[Conn, Namespace], int] = {}
        self.epochs: dict[Namespace, int] = {}
        self.current = self.rng.randrange(len(self.world.master_names))

    # ------------------------------------------------------------------ connections

    def _conn(self, address: str) -> Steps:
        conn = self.conns.get(address)
        if conn is None or not conn.open:
            end = yield self.world.network.connect(self.process, address, 0.25)
            conn = yield greeted(self.process, end)
            self.conns[address] = conn
        return conn

    def _opened(self, conn: Conn, namespace: Namespace) -> Steps:
        """The server's handle; the first epoch heard is what this client works under."""
        handle = self.handles.get((conn, namespace))
        if handle is None:
            message = pb.OpenNamespace(spec=namespace.to_spec()).SerializeToString()
            answer = yield conn.ask(Kind.OPEN_NAMESPACE, message, CALL_S)
            opened = pb.NamespaceHandle.FromString(answer.message)
            handle = self.handles[conn, namespace] = opened.handle
            if conn.hello.name in self.world.master_names:
                self.epochs.setdefault(namespace, opened.epoch)
        return handle

    def _master(self, namespace: Namespace, kind: Kind, build: Callable[[int], Any]) -> Steps:
        """Ask the master that served last, then each other one."""
        names = self.world.master_names
        start, problem = self.current, "no master"
        for step in range(len(names)):
            index = (start + step) % len(names)
            try:
                conn = yield from self._conn(names[index])
                handle = yield from self._opened(conn, namespace)
                answer = yield conn.ask(kind, build(handle).SerializeToString(), CALL_S)
            except Broken as error:
                problem = str(error)
                if code_of(error) == "FingerprintMismatch":
                    self.epochs.pop(namespace, None)
                    self.handles.pop((conn, namespace), None)
                    raise
                continue
            self.current = index
            return answer
        raise Broken(problem)

    def _node(self, endpoint: Endpoint, namespace: Namespace) -> Steps:
        """(connection, handle) of exactly this incarnation."""
        conn = yield from self._conn(endpoint.channel)
        if conn.hello.incarnation != endpoint.incarnation:
            raise Broken("another incarnation")
        handle = yield from self._opened(conn, namespace)
        return conn, handle

    def epoch(self, namespace: Namespace) -> int:
        return self.epochs.get(namespace, 0)

    # ------------------------------------------------------------------ reading

    def load(
        self, namespace: Namespace, salt: str, hashes: bytes, inline: bool, status: list[int] | None = None
    ) -> Steps:
        """Read a prefix, once where the last answer said, and what failed once more after a fresh lookup."""
        count = len(hashes) // namespace.hash_bytes
        status = status if status is not None else [0] * count
        self.world.oracle.reads += count
        epoch = self.epoch(namespace)
        hint = self.recent.find(namespace, salt, hashes, epoch=epoch)
        if hint is not None:
            yield from self._round(namespace, salt, hashes, hint[0], hint[1], status, inline, None)
        left = [i for i, each in enumerate(status) if each in (0, _EVICTED, _LOST)]
        if not left:
            return status
        try:
            located = yield from self.lookup(namespace, salt, hashes)
        except Broken:
            return status
        self.recent.remember(namespace, salt, hashes, located.codes, located.nodes, epoch=self.epoch(namespace))
        at = np.array(left, np.int64)
        yield from self._round(namespace, salt, hashes, located.codes, located.nodes, status, inline, at)
        return status

    def lookup(self, namespace: Namespace, salt: str, hashes: bytes) -> Steps:
        answer = yield from self._master(
            namespace,
            Kind.LOOKUP,
            lambda handle: pb.Lookup(ns=handle, salt=salt, hashes=hashes, epoch=self.epoch(namespace)),
        )
        return decode_lookup(pb.LookupOk.FromString(answer.message), len(hashes) // namespace.hash_bytes)

    def _round(
        self, namespace: Namespace, salt: str, hashes: bytes, codes: Any, nodes: Any, status: list[int], inline: bool,
        positions: Any,
    ) -> Steps:  # fmt: skip
        tasks: list[Future] = []
        for parts in by_node(codes, positions, 16):
            for part in parts:
                at = positions_of(part.where).tolist()
                piece = gather(hashes, namespace.hash_bytes, part.where)
                read = self._read(nodes[part.node], namespace, salt, piece, inline)
                task = self.process.start(read)
                task.then(lambda task=task, at=at: _enter(status, at, task))  # type: ignore[misc]
                tasks.append(task)
        yield all_of(tasks)

    def _read(self, node: Endpoint, namespace: Namespace, salt: str, hashes: bytes, inline: bool) -> Steps:
        """One node's part: a status each."""
        count = len(hashes) // namespace.hash_bytes
        try:
            conn, handle = yield from self._node(node, namespace)
            sent, epoch = self.process.clock(), self.epoch(namespace)
            message = pb.Acquire(
                ns=handle, salt=salt, hashes=hashes, mode=int(inline), deadline_ms=int(CALL_S * 1e3), epoch=epoch
            )
            answer = yield conn.ask(Kind.ACQUIRE, message.SerializeToString(), CALL_S)
        except Broken as error:
            if code_of(error) == "FingerprintMismatch":
                self.handles.clear()
                self.epochs.pop(namespace, None)
            return [_LATE if str(error) == "late" else _LOST] * count
        reply = pb.AcquireOk.FromString(answer.message)
        status = list(reply.status)
        keys = [Key(namespace.group, salt, hashes[i * 16 : i * 16 + 16]) for i in range(count)]
        got = [i for i in range(count) if status[i] == _LOADED]
        if inline:
            self._take(answer, reply, [keys[i] for i in got], epoch, node)
        else:
            held = yield from self._copy(conn, answer, reply, [keys[i] for i in got], epoch, sent)
            for position, ok in zip(got, held, strict=True):
                status[position] = _LOADED if ok else int(BlockStatus.LEASE_LOST)
        missed = [i for i in range(count) if status[i] == _MISSING]
        for position in missed:
            status[position] = _EVICTED
        if missed:
            gone = b"".join(keys[i].hash for i in missed)
            self.process.start(self._report(namespace, salt, gone, node, reply.delta_seq, epoch, BlockStatus.EVICTED))
        return status

    def _take(self, answer: Answer, reply: pb.AcquireOk, keys: list[Key], epoch: int, node: Endpoint) -> None:
        """Bytes that came with the answer: each is verified."""
        sums = array("Q", reply.checksum)
        for index, key in enumerate(keys):
            data = answer.raw[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            if xxhash.xxh3_64_intdigest(data) != sums[index]:
                raise Violation(f"INV-3: {key} was sent by {node.node_id} with a slot's bytes that changed on the way")
            self.world.oracle.read(key, epoch, data, answer.at, node.node_id)

    def _copy(self, conn: Conn, answer: Answer, reply: pb.AcquireOk, keys: list[Key], epoch: int, sent: float) -> Steps:
        """Bytes that are read in place, in two steps; they count if the lease stood and the slot is the same."""
        memory, rows = (
            conn.hello.memory,
            [SLOT_ROW.unpack_from(reply.rows, i * SLOT_ROW.size) for i in range(len(keys))],
        )
        slabs = memory.arena.slabs if keys else []
        halves: list[list[bytes]] = []
        for half in (0, 1):
            cut = [(offset + half * BLOCK_BYTES // 2, slabs[index].view) for index, _, offset, _, _ in rows]
            halves.append([bytes(view[start : start + BLOCK_BYTES // 2]) for start, view in cut])
            pause = self.rng.expovariate(1 / 0.02)
            yield pause if self.rng.random() < 0.97 or self.world.mended else pause + self.rng.uniform(0.5, 3.0)
        lapsed = self.process.clock() > sent + reply.lease_ms / 1e3 - LEASE_MARGIN_S
        held: list[bool] = []
        for key, row, first, second in zip(keys, rows, *halves, strict=True):
            same = slabs[row[0]].generations[row[1]] == row[3]
            ok = not lapsed and same
            held.append(ok)
            if not lapsed and not same and conn.open and not self.world.oracle.revoked(key, answer.at):
                raise Violation(f"INV-3: the slot of {key} on {conn.hello.name} was given away under a lease")
            if ok:
                if xxhash.xxh3_64_intdigest(first + second) != row[4]:
                    raise Violation(f"INV-3: {key} changed on {conn.hello.name} under a lease that stood")
                self.world.oracle.read(key, epoch, first + second, answer.at, conn.hello.name)
        if reply.lease and conn.open and self.rng.random() < 0.9:
            conn.tell(Kind.RELEASE, pb.Release(leases=array("Q", [reply.lease]).tobytes()).SerializeToString())
        return held

    def _report(
        self, namespace: Namespace, salt: str, hashes: bytes, node: Endpoint, delta_seq: int, epoch: int,
        status: BlockStatus, at_store: bool = False,
    ) -> Steps:  # fmt: skip
        try:
            conn = yield from self._conn(self.world.master_names[self.current])
            handle = yield from self._opened(conn, namespace)
        except Broken:
            return
        report = pb.MissReport(
            ns=handle, salt=salt, hashes=hashes, node_id=node.node_id, incarnation=node.incarnation,
            delta_seq=delta_seq, epoch=epoch, status=status, at_store=at_store,
        )  # fmt: skip
        conn.tell(Kind.MISS_REPORT, report.SerializeToString())

    # ------------------------------------------------------------------ writing

    def store(self, namespace: Namespace, salt: str, hashes: bytes, first: int, pull: bool) -> Steps:
        """Place, then send each run to its node; a status each."""
        width = namespace.hash_bytes
        count = len(hashes) // width
        status = [0] * count
        try:
            answer = yield from self._master(
                namespace,
                Kind.PLACE,
                lambda handle: pb.Place(ns=handle, salt=salt, hashes=hashes, epoch=self.epoch(namespace)),
            )
        except Broken as error:
            self.world.tell(f"  {self.name} cannot place: {error}")
            return [_LOST] * count
        placed = decode_place(pb.PlaceOk.FromString(answer.message), count)
        tasks: list[Future] = []
        for runs in stripes(placed.codes, placed.states, 16):
            for run in runs:
                where = run.where
                assert isinstance(where, slice)
                piece = gather(hashes, width, where)
                before = hashes[(where.start - 1) * width : where.start * width] if where.start else b""
                push = self._write(placed.nodes[run.node], namespace, salt, piece, before, first + where.start, pull)
                task = self.process.start(push)
                at = list(range(where.start, where.stop))
                task.then(lambda task=task, at=at: _enter(status, at, task))  # type: ignore[misc]
                tasks.append(task)
        yield all_of(tasks)
        held = np.array([each in (_STORED, _PRESENT) for each in status])
        if held.any():
            codes = np.where(held, placed.codes, 0).astype(np.uint16)
            epoch = self.epoch(namespace)
            self.recent.remember(namespace, salt, hashes, codes, placed.nodes, epoch=epoch, stored=True)
        return status

    def _write(
        self, node: Endpoint, namespace: Namespace, salt: str, hashes: bytes, parent: bytes, first: int, pull: bool
    ) -> Steps:
        world, width, epoch = self.world, namespace.hash_bytes, self.epoch(namespace)
        count = len(hashes) // width
        keys = [Key(namespace.group, salt, hashes[i * width : (i + 1) * width]) for i in range(count)]
        writes = [world.oracle.reserved(key, epoch, node.node_id, world.now) for key in keys]
        numbers = tuple(write.number for write in writes)
        raw = b"".join(write.data for write in writes)
        try:
            conn, handle = yield from self._node(node, namespace)
            message = pb.Reserve(
                ns=handle, salt=salt, hashes=hashes, parent=parent, first_index=first,
                deadline_ms=int(CALL_S * 1e3), epoch=epoch,
            ).SerializeToString()  # fmt: skip
            if pull:
                answer = yield conn.ask("push", message, CALL_S, raw, numbers)
                status = list(answer.message)
            else:
                status = yield from self._send(conn, message, raw, numbers)
        except Broken as error:
            if code_of(error) == "FingerprintMismatch":
                self.handles.clear()
                self.epochs.pop(namespace, None)
            world.tell(f"  {self.name} cannot write to {node.node_id}: {error}")
            status = [_LATE if str(error) == "late" else _LOST] * count
        for code in {each for each in status if each not in (_STORED, _PRESENT, int(BlockStatus.IN_FLIGHT))}:
            gone = b"".join(key.hash for key, each in zip(keys, status, strict=True) if each == code)
            self.process.start(self._report(namespace, salt, gone, node, 0, epoch, BlockStatus(code), at_store=True))
        return status

    def _send(self, conn: Conn, reserve: bytes, raw: bytes, numbers: tuple[int, ...]) -> Steps:
        """In two halves: reserve, and the bytes with their checksums."""
        answer = yield conn.ask(Kind.RESERVE, reserve, CALL_S, numbers=numbers)
        reply = pb.ReserveOk.FromString(answer.message)
        status = list(reply.status)
        granted = [i for i, each in enumerate(status) if each == _RESERVED]
        if not granted:
            return status
        pause = self.rng.expovariate(1 / 0.02)
        yield pause if self.rng.random() < 0.95 or self.world.mended else pause + self.rng.uniform(0.5, 3.0)
        if self.rng.random() < 0.03 and not self.world.mended:
            conn.tell(Kind.ABORT, pb.Abort(reservation=reply.reservation).SerializeToString())
            return [int(BlockStatus.ABORTED) if i in granted else each for i, each in enumerate(status)]
        pieces = [raw[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in granted]
        write = pb.Write(reservation=reply.reservation, checksums=self.world.checksums(pieces).tobytes())
        mine = tuple(numbers[i] for i in granted)
        answer = yield conn.ask(Kind.WRITE, write.SerializeToString(), CALL_S, b"".join(pieces), mine)
        for position, each in zip(granted, pb.CommitOk.FromString(answer.message).status, strict=True):
            status[position] = each
        return status

    # ------------------------------------------------------------------ the rest

    def prefetch(self, namespace: Namespace, salt: str, hashes: bytes) -> Steps:
        """Have a prefix read ahead."""
        try:
            located = yield from self.lookup(namespace, salt, hashes)
            for parts in by_node(located.codes, None, 16):
                conn, handle = yield from self._node(located.nodes[parts[0].node], namespace)
                piece = gather(hashes, namespace.hash_bytes, parts[0].where)
                message = pb.Acquire(
                    ns=handle, salt=salt, hashes=piece, mode=2, deadline_ms=1000, epoch=self.epoch(namespace)
                )
                yield conn.ask(Kind.ACQUIRE, message.SerializeToString(), CALL_S)
        except Broken:
            return

    def remove(self, namespace: Namespace, salt: str, hashes: bytes) -> Steps:
        try:
            yield from self._master(
                namespace,
                Kind.REMOVE,
                lambda handle: pb.Remove(ns=handle, salt=salt, hashes=hashes, deadline_ms=900),
            )
        except Broken:
            return

    def admin(self, order: Any, seconds: float = 3.0) -> Steps:
        """An operator's call: at whichever master takes it."""
        for name in self.world.master_names:
            try:
                conn = yield from self._conn(name)
                answer = yield conn.ask(order, b"", seconds)
            except Broken:
                continue
            return answer
        return None


def _enter(status: list[int], at: list[int], task: Future) -> None:
    if task.problem is None:
        for position, each in zip(at, task.value, strict=True):
            status[position] = each
