"""A master in the simulation: the shipped hub, channel handlers and converters, in a process of its own."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvstrata.master import messages as m
from kvstrata.master.channel import Endpoints, MasterChannel
from kvstrata.master.converters import attach_of, events_of, message_of, stamped
from kvstrata.master.hub import Hub
from kvstrata.master.leadership.campaign import Campaign
from kvstrata.master.outbox import Outbox
from kvstrata.master.service import BREATH_S
from kvstrata.master.state import MasterState
from kvstrata.master.stores.base import LeaderRecord
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import KVError, NotLeader, Unavailable
from kvstrata.proto.keys import split_hashes
from kvstrata.proto.wire import Kind
from kvstrata.transfer.frames import Frame
from tests.sim.clock import Process, SimLoops, Steps
from tests.sim.network import End
from tests.sim.oracle import Clearing
from tests.sim.shared_store import StoreClient
from tests.sim.wires import Answer, Ask, FakeConnection, Hello, Progress, Session, failure

if TYPE_CHECKING:
    from tests.sim.world import World

GRACE_S = 5.0
CONFIRM_S = 2.0


class MasterHost:
    """``up`` while its process lives; its store is the world's."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.starts = 0
        self.hub: Hub | None = None
        self.process = Process(world.scheduler, name, 0.0)
        self.process.alive = False

    @property
    def up(self) -> bool:
        return self.process.alive and self.hub is not None

    def start(self) -> None:
        world = self.world
        self.starts += 1
        self.process = world.process(self.name)
        self.process.worked = partial(world.checks.worked, self)
        self.hub = None
        self.streams: dict[SyncStream, None] = {}
        self._open()

    def _open(self) -> None:
        world, process = self.world, self.process
        self.store = store = StoreClient(
            world.store, lambda: self.name not in world.store_cuts, shared=len(world.master_names) > 1
        )
        try:
            self.hub = self._hub(store)
        except Unavailable:
            process.after(1.0, self._open)  # whoever supervises it starts it again
            return
        self.loops = SimLoops(process, self.deliver)
        self.hub.start(self.loops)
        self.channel = MasterChannel(self.hub, Endpoints(self.name, self.name, self.name))
        self.channel._incarnation = self.starts << 8 | world.master_names.index(self.name)
        self.handlers = self.channel.handlers()
        if store.shared:
            self.campaign = Campaign(self.hub, store, self._record, process.clock, self._answers)
            self.campaign.start(self.loops)
        world.network.listen(self.name, process, self._accept)
        world.network.listen(f"{self.name}/sync", process, lambda end: SyncStream(self, end))

    def _hub(self, store: StoreClient) -> Hub:
        rng = random.Random(f"{self.world.seed}/{self.name}/{self.starts}")
        return Hub(store, rng, GRACE_S, self.process.clock)

    def _record(self) -> LeaderRecord:
        assert self.hub is not None
        return LeaderRecord(self.hub.master_id, channel=self.name, grpc=self.name, http=self.name)

    def _answers(self, address: str) -> bool:
        """As a probe would find it, at once."""
        other = self.world.masters[address].process
        return other.alive and not other.stopped and not self.world.network.apart(self.name, address)

    def kill(self) -> None:
        self.process.kill()

    def deliver(self) -> None:
        """Send what the hub has put into its sessions' outboxes."""
        for stream in list(self.streams):
            stream.pass_on()

    # ------------------------------------------------------------------ the channel

    def _accept(self, end: End) -> None:
        client = end.peer.process
        session = Session(self.world.session_of(client), client.name, self.world.host_of(client))
        end.said = lambda ask: self._asked(end, session, ask)
        end.say(Hello(self.name, self.channel._incarnation))

    def _asked(self, end: End, session: Session, ask: Ask) -> None:
        try:
            if callable(ask.kind):
                self._admin(end, ask)
            elif ask.kind == Kind.REMOVE:
                self._remove(end, ask)
            else:
                reply = self.handlers[ask.kind](FakeConnection(session), Frame(ask.kind, ask.request, ask.message, 0))  # type: ignore[arg-type]
                if reply is not None:
                    end.say(Answer(ask.request, reply.message, at=self.world.now))
        except KVError as error:
            end.say(failure(ask.request, error))
        self.deliver()

    def _remove(self, end: End, ask: Ask) -> None:
        """As :meth:`ClientCalls.remove`, which waits in a thread."""
        assert self.hub is not None
        request = pb.Remove.FromString(ask.message)
        opened = self.hub.read(lambda state, now: state.namespaces.by_handle(request.ns))
        hashes = frozenset(split_hashes(request.hashes, opened.namespace.hash_bytes))
        clearing = Clearing("a removal", opened.namespace.group, self.world.now, request.salt, hashes)
        removal = self.hub.order(
            lambda state, now: state.remove(opened.namespace, request.salt, request.hashes, now), durable=False
        )
        done = lambda left: pb.RemoveOk(removed=removal.removed, unreached=left).SerializeToString()  # noqa: E731
        self.process.start(self._confirmed(end, ask, removal.command, removal.awaited, clearing, done))

    def _admin(self, end: End, ask: Ask) -> None:
        """An operator's order: a function of the hub that gives (command, awaited nodes, what it clears)."""
        command, awaited, clearing = ask.kind(self)
        if clearing is None:
            end.say(Answer(ask.request, b"", at=self.world.now))
            return
        self.process.start(self._confirmed(end, ask, command, awaited, clearing, lambda left: ",".join(left).encode()))

    def _confirmed(
        self,
        end: End,
        ask: Ask,
        command: int,
        awaited: frozenset[str],
        clearing: Clearing,
        done: Callable[[list[str]], bytes],
    ) -> Steps:
        """Wait as the hub does, then answer. Acknowledged is what names no node that was not reached."""
        hub, world = self.hub, self.world
        assert hub is not None
        world.oracle.clearings.append(clearing)
        until = self.process.clock() + CONFIRM_S
        while True:
            if not hub.read(lambda state, now: state.ordered(command)):
                end.say(failure(ask.request, NotLeader("deposed before all nodes had confirmed")))
                return
            left = hub.read(lambda state, now: state.unconfirmed(command))
            here = hub.read(partial(_here, awaited.intersection(left)))
            if not left or not here or self.process.clock() >= until:
                break
            end.say(Progress())
            yield 0.02
        if left and not hub.durable():
            end.say(failure(ask.request, Unavailable("the state store cannot remember it")))
            return
        clearing.answered_at = world.now
        if not left:
            clearing.done_at = world.now
        world.tell(
            f"{self.name}: {clearing.what} is acknowledged" + (f", not reached: {', '.join(left)}" if left else "")
        )
        end.say(Answer(ask.request, done(left), at=world.now))

    def check(self) -> None:
        assert self.hub is not None
        self.hub.read(lambda state, now: state.check())


def _here(node_ids: frozenset[str], state: MasterState, now: float) -> list[str]:
    return state.attached(node_ids)


class SyncStream:
    """One node's stream at the master, event by event."""

    def __init__(self, host: MasterHost, end: End) -> None:
        self._host = host
        self._end = end
        self._session: int | None = None
        self._outbox: Outbox | None = None
        self._events: deque[m.Event] = deque()
        self._busy = False
        end.said, end.closed = self._said, self._lost

    def _said(self, data: bytes) -> None:
        host = self._host
        assert host.hub is not None
        message = control.NodeMessage.FromString(data)
        try:
            if self._session is None:
                self._session, self._outbox = host.hub.attach(attach_of(message.attach))
                host.streams[self] = None
            else:
                self._events.extend(events_of(message, self._session))
                self._pump()
        except KVError as error:
            host.world.tell(f"{host.name}: {self._end.peer.process.name} is refused: {error}")
            self._end.close(str(error))
            self._lost(str(error))
        host.deliver()

    def _pump(self) -> None:
        """Snapshots are taken in with a breath after each part."""
        host = self._host
        while self._events and not self._busy and self._session is not None:
            event = self._events.popleft()
            assert host.hub is not None
            host.hub.handle(event)
            if isinstance(event, m.SnapshotPart):
                self._busy = True
                host.process.after(BREATH_S, self._go_on)

    def _go_on(self) -> None:
        self._busy = False
        self._pump()
        self._host.deliver()

    def pass_on(self) -> None:
        outbox, hub = self._outbox, self._host.hub
        if outbox is None or hub is None or not (outbox._queue or outbox.closed):
            return
        while (said := outbox.get(0.0)) is not None:
            self._end.say(stamped(message_of(said[0], hub.cluster_id), said[1]).SerializeToString())
        if outbox.closed is not None:
            self._end.close(outbox.closed)
            self._lost(outbox.closed)

    def _lost(self, why: str) -> None:
        session, self._session = self._session, None
        self._host.streams.pop(self, None)
        if session is not None and self._host.hub is not None:
            self._host.hub.link_lost(session)
