"""A storage node in the simulation: the shipped state, tiers, handlers, orders and outboxes, in its own process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import wire
from kvstrata.proto.errors import KVError
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage.copying.bandwidth import Pace
from kvstrata.storage.copying.draining import DrainState
from kvstrata.storage.copying.offers import Drains
from kvstrata.storage.copying.source import CopySource
from kvstrata.storage.eviction.segmented_order import SegmentedOrder
from kvstrata.storage.identity import NodeIdentity
from kvstrata.storage.masters.commands import Commands, shares_told
from kvstrata.storage.masters.copy_orders import CopyOrders
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.masters.policies import PolicyFile
from kvstrata.storage.records import IN_FLIGHT, VISIBLE, Block, Shelf
from kvstrata.storage.report import NodeReport
from kvstrata.storage.serving.channel import NodeChannel
from kvstrata.storage.serving.published import Published
from kvstrata.storage.slab import slot_size
from kvstrata.storage.ssd.base import Removal, SlotHeader
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.eraser import Eraser
from kvstrata.storage.tiers.movers import header
from kvstrata.storage.tiers.moves import Move
from kvstrata.storage.tiers.ssd_tier import SsdTier
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.loops import Loop
from tests.sim.clock import Process, SimLoops, Steps
from tests.sim.copies import SimCopier
from tests.sim.links import SimLink, beat
from tests.sim.memory import HeapSlab, MemoryFolder, heap_arena, scribble
from tests.sim.network import End
from tests.sim.oracle import BLOCK_BYTES, Key, Violation
from tests.sim.wires import PROGRESS_S, Answer, Ask, FakeConnection, Hello, Progress, Session, failure
from tests.storage.memory_store import Disk, MemoryStore

if TYPE_CHECKING:
    from tests.sim.world import NodePlan, World

EXTENT_BYTES = 64 << 10
DEMOTE_BYTES = 4 * 8192
_STORED, _RESERVED = int(BlockStatus.STORED), int(BlockStatus.RESERVED)


class SimStore(MemoryStore):
    """``broken_writes``: for now nothing is taken."""

    broken_writes = False

    def write(self, items: Sequence[tuple[Block, SlotHeader, memoryview]]) -> list[bool]:
        return [False] * len(items) if self.broken_writes else super().write(items)

    def record(self, removals: Sequence[Removal]) -> bool:
        return not self.broken_writes and super().record(removals)


class SimDeltas(DeltaLog):
    """``gone`` is told what readers do not find any more, at once."""

    gone: Callable[[Shelf, list[bytes]], None] = staticmethod(lambda shelf, hashes: None)

    def record(self, added: bool, shelf: Shelf, hashes: list[bytes], *rest: Any) -> None:
        if not added:
            self.gone(shelf, hashes)
        super().record(added, shelf, hashes, *rest)


class NodeHost:
    """``disk`` and ``folder`` outlive its processes."""

    def __init__(self, world: World, name: str, plan: NodePlan) -> None:
        self.world = world
        self.name = name
        self.plan = plan
        self.disk = Disk()
        self.folder = MemoryFolder()
        self.starts = 0
        self.process = Process(world.scheduler, name, 0.0)
        self.process.alive = False
        self.ssd_delay = 0.0
        self.refuses = False
        self.rng = random.Random(f"{world.seed}/{name}")

    @property
    def up(self) -> bool:
        return self.process.alive

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        world = self.world
        self.starts += 1
        self.leaving = False
        self.incarnation = self.starts << 32 | self.rng.getrandbits(32)
        self.process = process = world.process(self.name)
        process.worked = partial(world.checks.worked, self)
        self.lock = threading.Lock()
        self.loops = SimLoops(process)
        self.moving: list[Move] = []
        self.sessions: dict[bytes, Session] = {}
        self.links: list[SimLink] = []
        policies = PolicyFile(self.folder)  # type: ignore[arg-type]
        quotas, epochs = policies.restored()
        kept = policies.fence()
        self.leader = kept.epoch, kept.leader_id
        self.arena = heap_arena(self.plan.slabs, slot_size(BLOCK_BYTES))
        store = SimStore(self.plan.extents, self.disk, extent_bytes=EXTENT_BYTES) if self.plan.extents else None
        self.store = store
        self._fit_store()
        deltas = SimDeltas(512, 16)
        deltas.gone = self._gone
        published = Published(1, self.arena.bytes_total)
        self.state = NodeState(
            self.arena,  # type: ignore[arg-type]
            quotas=quotas,
            deltas=deltas,
            ssd=store,
            order=SegmentedOrder,
            published=published,
        )
        for group, epoch in epochs.items():
            self.state.known.advance(group, epoch)
        self.ssd: SsdTier | None = None
        eraser = None
        if store is not None:
            self.ssd = SsdTier(store, self.state, self.lock, self.changed, policy=self.plan.policy, clock=process.clock)
            self.ssd.movers._await = lambda done, timeout: None  # type: ignore[method-assign]  # the host waits for it
            assert self.state.ssd is not None
            eraser = Eraser(self.state.ssd, self.ssd.moves.quarantine.let_go)
            self.ssd.recover()
        self.copier = SimCopier(self)
        self.drains = Drains(self.state, self.lock, process.clock)
        self.copies = CopyOrders(self.state, self.lock, self.copier.shipped, self.drains, self.changed, process.clock)
        self.commands = Commands(self.state, self.lock, policies, eraser, clock=process.clock)
        identity = NodeIdentity(self.name, self.incarnation)
        self.report = NodeReport(
            identity, self.state, self.lock, self.loops, self.commands, [], lambda: len(self.sessions), []
        )
        movers, moves = (self.ssd.movers, self.ssd.moves) if self.ssd is not None else (None, None)
        self.channel = NodeChannel(
            self.state,
            self.lock,
            changed=self.changed,
            clock=process.clock,
            movers=movers,
            copies=CopySource(self.state, self.lock, Pace(0), moves, process.clock),
        )
        self.handlers = self.channel.handlers()
        self._begin_work()

    def _begin_work(self) -> None:
        process, world = self.process, self.world
        world.network.listen(self.name, process, self._accept)
        self.moved_at = process.clock()
        orders = self.loops.add(Loop("commands", 0.2, self.commands.turn))
        self.commands.wake = orders.wake
        drain = self.loops.add(Loop("drain", 0.25, self.drains.turn))
        self.drains.wake = drain.wake
        process.every(0.2, self._tend)
        for master in world.master_names:
            self.links.append(SimLink(self, master))
        beat(self)

    def kill(self) -> None:
        """At once. What a device was writing may be there, in part; nobody was told that it is."""
        for move in self.moving:
            if not move.up and self.store is not None:
                pairs = zip(move.source, move.target, strict=True)
                written = [(to, header(to, of), of.bytes()) for of, to in pairs if of.state == VISIBLE]
                self.store.write(written[: self.rng.randint(0, len(written))])
        self.world.checks.gone(self, self.world.checks.held(self))
        self.process.kill()

    def _gone(self, shelf: Shelf, hashes: list[bytes]) -> None:
        group, salt = shelf.entry.namespace.group, shelf.salt
        self.world.checks.gone(self, {Key(group, salt, each) for each in hashes})

    def leave(self, budget_s: float) -> None:
        """Told to stop: asks to be drained within its budget (0: does not), says goodbye, and ends."""
        self.leaving = True
        self.process.start(self._leave(budget_s))

    def _leave(self, budget_s: float) -> Steps:
        asked: set[int] = set()
        until = self.process.clock() + budget_s
        while budget_s and self.process.clock() < until and self.state.draining.state is not DrainState.DRAINED:
            for link in self.links:
                line = link.link.line()
                if line is not None and id(line) not in asked:
                    asked.add(id(line))
                    line.tell(control.NodeMessage(leaving=control.Leaving(budget_ms=int(budget_s * 1e3), reason="sim")))
            yield 0.1
        self.world.checks.gone(self, self.world.checks.held(self))
        self.state.leave()
        for link in self.links:
            link.goodbye()
        yield 0.3
        self.kill()

    # ------------------------------------------------------------------ work

    def _tend(self) -> None:
        """What comes due, and what may go to the SSD."""
        self.moved_at = self.process.clock()
        with self.lock:
            self.state.expire(self.moved_at)
            if self.ssd is not None:
                self.ssd.moves.expire(self.moved_at)
        if self.ssd is not None:
            self._demote()

    def changed(self) -> None:
        for link in self.links:
            link.wake()

    def obeyed(self, epoch: int, leader_id: str) -> None:
        """An order was carried out: never one of an earlier leader than one before, nor of two leaders of an epoch."""
        last, last_id = self.leader
        if epoch < last or (epoch == last and leader_id != last_id):
            raise Violation(f"leaders: {self.name} obeys {leader_id} of epoch {epoch} after {last_id} of epoch {last}")
        self.leader = epoch, leader_id

    def acknowledged(self) -> None:
        acked = [link.link.acked_seq for link in self.links if link.link.catches_up(self.process.clock())]
        if acked:
            self.state.deltas.trim(min(acked))

    def attach(self) -> control.Attach:
        """As the shipped node describes itself."""
        ssd = self.state.ssd
        epochs = self.state.known.epochs.items()
        return control.Attach(
            node_id=self.name,
            incarnation=self.incarnation,
            channel=self.name,
            host=self.name,
            boot_id=self.plan.host,
            dram_bytes=self.arena.bytes_total,
            ssd_bytes=ssd.arena.bytes_total if ssd is not None else 0,
            shares=shares_told(self.state.quotas.shares()),
            epochs=[control.NamespaceEpoch(group=group, epoch=epoch) for group, epoch in epochs],
            software="sim",
            protocol=wire.PROTOCOL,
            leader_epoch=self.commands.fence.epoch,
            leader_id=self.commands.fence.leader_id,
        )

    # ------------------------------------------------------------------ moves

    def _demote(self) -> None:
        assert self.ssd is not None
        if sum(not move.up for move in self.moving) < 2:
            move = self.ssd.moves.demotions(DEMOTE_BYTES, self.process.clock())
            if move is not None:
                self._move(move)

    def _move(self, move: Move) -> None:
        """Bytes take their time; until they are there, the target holds rubbish."""
        assert self.ssd is not None
        movers = self.ssd.movers
        self.moving.append(move)
        if move.up:
            scribble([block for block in move.target if block.state == IN_FLIGHT])

        def perform() -> None:
            self.moving.remove(move)
            movers.perform(move)
            self.process.worked()

        self.process.after(self.ssd_delay + self.rng.uniform(0.001, 0.02), perform)

    def _moves_asked_for(self) -> None:
        if self.ssd is None:
            return
        movers = self.ssd.movers
        for queue in (movers._wanted, movers._ahead):
            while queue:
                self._move(queue.popleft())

    # ------------------------------------------------------------------ the channel

    def _accept(self, end: End) -> None:
        client = end.peer.process
        key = self.world.session_of(client)
        session = self.sessions.get(key)
        if session is None:
            session = self.sessions[key] = Session(
                key, client.name, self.world.host_of(client), self.world.role_of(client)
            )
        session.connections.add(end)
        end.said = lambda ask: self._asked(end, session, ask)
        end.closed = lambda why: self._left(end, session)
        end.say(Hello(self.name, self.incarnation, self))

    def _left(self, end: End, session: Session) -> None:
        session.connections.discard(end)
        if not session.connections and self.sessions.get(session.key) is session:
            session.over = True
            del self.sessions[session.key]
            self.channel.session_ended(session)  # type: ignore[arg-type]

    def _asked(self, end: End, session: Session, ask: Ask) -> None:
        if ask.kind == Kind.ACQUIRE:
            self._acquire(end, session, ask)
        elif ask.kind == "push":
            self._push(end, session, ask)
        else:
            self._handle(end, session, ask)

    def _handle(self, end: End, session: Session, ask: Ask, then: Callable[[], None] = lambda: None) -> None:
        """One shipped handler, start to end."""
        try:
            connection = FakeConnection(session, ask.raw)
            frame = Frame(int(ask.kind), ask.request, ask.message, len(ask.raw))
            reply = self.handlers[ask.kind](connection, frame)  # type: ignore[arg-type]
        except KVError as error:
            then()
            end.say(failure(ask.request, error))
            return
        then()
        self._moves_asked_for()
        if reply is None:
            return
        self._note(session, ask, reply.message)
        if not reply.raw:
            end.say(Answer(ask.request, reply.message, at=self.world.now))
            if reply.after is not None:
                reply.after()
            return
        self._send_bytes(end, ask, reply)

    def _send_bytes(self, end: End, ask: Ask, reply: Any) -> None:
        """Half of the bytes now, half in a moment; the shipped end of it when they are sent, or cannot be."""
        at, halves = self.world.now, []

        def half(which: int) -> None:
            halves.append([bytes(view[which * len(view) // 2 : (which + 1) * len(view) // 2]) for view in reply.raw])

        def rest() -> None:
            half(1)
            reply.after()
            raw = b"".join(a + b for a, b in zip(*halves, strict=True))
            end.say(Answer(ask.request, reply.message, raw, at))

        half(0)
        self.process.after(self.rng.uniform(0.0, 0.05), rest)

    def _note(self, session: Session, ask: Ask, message: bytes) -> None:
        """Tell the oracle what has been reserved and committed."""
        writes = [self.world.oracle.writes[number] for number in ask.numbers]
        if ask.kind == Kind.RESERVE:
            status = pb.ReserveOk.FromString(message)
            for write, each in zip(writes, status.status, strict=True):
                write.reserved_at, write.node = self.world.now, self.name
                del each
            reservation = self.state.find_reservation(session.key, status.reservation)
            if reservation is not None:
                scribble(reservation.blocks)
        elif ask.kind in (Kind.WRITE, Kind.COMMIT):
            for write, each in zip(writes, pb.CommitOk.FromString(message).status, strict=True):
                if each == _STORED:
                    write.committed_at = self.world.now

    def _acquire(self, end: End, session: Session, ask: Ask) -> None:
        """As the handler does, but that it does not wait in a thread for what is on SSD."""
        message = pb.Acquire.FromString(ask.message)
        read = None
        if self.ssd is not None and message.mode < 2:
            try:
                entry = self.state.entry(message.ns)
            except KVError as error:
                end.say(failure(ask.request, error))
                return
            width, packed = entry.width, message.hashes
            hashes = (
                [packed[i : i + width] for i in range(0, len(packed), width)] if message.epoch == entry.epoch else []
            )
            read = self.ssd.moves.begin_read(message.ns, message.salt, hashes, self.process.clock())
        if read is None:
            self._handle(end, session, ask)
            return
        for move in read.moves:
            self._move(move)
        until = self.process.clock() + 0.9 * message.deadline_ms / 1e3
        tiers, waits = self.ssd.moves, read  # type: ignore[union-attr]

        def look() -> None:
            if waits.waiting and self.process.clock() < until:
                end.say(Progress())
                self.process.after(min(0.01, PROGRESS_S), look)
            else:
                self._handle(end, session, ask, lambda: tiers.end_read(waits))

        look()

    def _push(self, end: End, session: Session, ask: Ask) -> None:
        """A pull of the node's: reserve, take the bytes in two steps, commit."""
        message = pb.Reserve.FromString(ask.message)
        writes = self.channel._writes
        try:
            asked = _write_ask(message)
            got = self.state.reserve(session.key, asked, self.process.clock())
        except KVError as error:
            end.say(failure(ask.request, error))
            return
        reservation = got.reservation
        if reservation is None:
            end.say(Answer(ask.request, bytes(got.status), at=self.world.now))
            return
        granted = [i for i, status in enumerate(got.status) if status == _RESERVED]
        mine = [self.world.oracle.writes[ask.numbers[i]] for i in granted]
        for write in mine:
            write.reserved_at, write.node = self.world.now, self.name
        scribble(reservation.blocks)
        self.state.start_moving(reservation)
        pieces = [ask.raw[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in granted]
        half = BLOCK_BYTES // 2

        def first() -> None:
            for block, piece in zip(reservation.blocks, pieces, strict=True):
                block.bytes()[:half] = piece[:half]
            self.process.after(self.rng.uniform(0.0, 0.05), second)

        def second() -> None:
            for block, piece in zip(reservation.blocks, pieces, strict=True):
                block.bytes()[half:] = piece[half:]
            sums = self.world.checksums(pieces)
            done, _ = writes._received(reservation, sums, [])
            self._moves_asked_for()
            for position, write, status in zip(granted, mine, done, strict=True):
                got.status[position] = status
                if status == _STORED:
                    write.committed_at = self.world.now
            self.changed()
            end.say(Answer(ask.request, bytes(got.status), at=self.world.now))

        self.process.after(self.rng.uniform(0.0, 0.05), first)

    # ------------------------------------------------------------------ faults and truth

    def disk_refuses(self, refuses: bool) -> None:
        """Its SSD takes no write and no record of a removal, for now."""
        self.refuses = refuses
        self._fit_store()

    def _fit_store(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.broken_writes = self.refuses

    def check(self) -> None:
        self.state.check()
        if self.ssd is not None:
            self.ssd.moves.check()

    def slab(self, index: int) -> HeapSlab:
        return self.arena.slabs[index]


def _write_ask(message: pb.Reserve) -> Any:
    from kvstrata.storage.serving.writes import _ask

    return _ask(message)
