"""A node's link to one master, on simulated time: the shipped link's ears and the shipped outbox's mouth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.wire import Kind
from kvstrata.storage.masters.attach import BACKOFF_MAX_S, BACKOFF_MIN_S, MasterLink
from kvstrata.storage.masters.outbox import ATTACH_S, BATCH_MIN_S, Outbox
from tests.sim.clock import Broken, Future, Steps
from tests.sim.network import End
from tests.sim.wires import greeted

if TYPE_CHECKING:
    from tests.sim.node_host import NodeHost

#: As a node's outbox does it when nobody wakes it, only less often.
POLL_S = 0.25
ORDERS = frozenset({"remove", "drop", "shares", "copy", "surplus", "drain"})


class SimLink:
    """Attached, or trying to be, for as long as the node's process lives."""

    def __init__(self, node: NodeHost, master: str) -> None:
        self.master = master
        self._node = node
        self._process = node.process
        self._saying = False
        self._woken = False
        self._more = False  #: woken while it says something
        self._leaving = False
        self._end: End | None = None
        self._outbox: Outbox | None = None
        self.link = MasterLink(
            master,
            node.state,
            node.lock,
            node.commands,
            lambda host: node.attach(),
            node.report.node_status,
            node.acknowledged,
            node.copies,
        )
        self._process.start(self._live())
        self._process.every(POLL_S, self._say)

    def wake(self) -> None:
        """There is something new to say."""
        if not self._woken:
            self._woken = True
            self._process.after(BATCH_MIN_S, self._say)

    def goodbye(self) -> None:
        """The node stops: no new session, and a last word in this one."""
        self._leaving = True
        if self._outbox is not None:
            self._outbox.detach("the node is stopping")
            self.wake()

    def _live(self) -> Steps:
        backoff = BACKOFF_MIN_S
        network = self._node.world.network
        while not self._leaving:
            attaches = self.link._attaches
            try:
                end = yield network.connect(self._process, f"{self.master}/sync", 1.0, keepalive=True)
                yield self._session(end)
            except Broken:
                pass
            if self.link._attaches > attaches:
                backoff = BACKOFF_MIN_S
            yield backoff
            backoff = min(2 * backoff, BACKOFF_MAX_S)

    def _session(self, end: End) -> Future:
        node, over = self._node, Future()
        outbox = Outbox(node.state, node.lock, node.attach(), node.report.node_status)

        def lost(why: str) -> None:
            if outbox is not self._outbox:
                return
            if self.link.attached:
                self.link._lost_at = self._process.clock()
            self.link.attached = False
            outbox.end()
            self._outbox = self.link._outbox = None
            self._saying = False
            over.resolve()

        def give_up() -> None:
            if not outbox.attached.is_set():
                end.close("no answer to the attach")
                lost("no answer to the attach")

        end.said = lambda data: self._heard(data, outbox)
        end.closed = lost
        self._end, self._outbox, self.link._outbox = end, outbox, outbox
        self._saying = False
        end.say(outbox.opening().SerializeToString())
        self._process.after(ATTACH_S, give_up)
        return over

    def _heard(self, data: bytes, outbox: Outbox) -> None:
        message = control.MasterMessage.FromString(data)
        refused, body = self._node.commands.fence.refused, message.WhichOneof("body")
        checks = self._node.world.checks
        had = checks.held(self._node) if body == "surplus" else set()
        self.link._heard(message, outbox)
        if body in ORDERS and self._node.commands.fence.refused == refused:
            self._node.obeyed(message.leader_epoch, message.leader_id)
        if had:
            checks.let_go(self._node, had - checks.held(self._node))
        self.wake()

    def _say(self) -> None:
        """What is due, message by message, with time for others in between."""
        self._woken = False
        outbox, end = self._outbox, self._end
        self._more = self._saying
        if outbox is None or end is None or self._saying or outbox.over or not outbox.attached.is_set():
            return
        self._saying = True
        self._next(outbox.turn(self._process.clock()), outbox, end)

    def _next(self, due: Iterator[control.NodeMessage], outbox: Outbox, end: End) -> None:
        if outbox is not self._outbox:
            return
        message = next(due, None)
        if message is not None:
            end.say(message.SerializeToString())
            self._process.after(0.0003, lambda: self._next(due, outbox, end))
            return
        self._saying = False
        if outbox.over:
            end.close("goodbye")
        elif self._more:
            self.wake()


def beat(node: NodeHost) -> None:
    """The node's heartbeat process: it lives on while the node stands still, and tells of its death."""
    world = node.world
    process = world.process(f"{node.name}-beat")
    main = node.process

    def life(master: str) -> Steps:
        conn = None
        while True:
            dying = not main.alive
            try:
                if conn is None or not conn.open:
                    end = yield world.network.connect(process, master, 0.25)
                    conn = yield greeted(process, end)
                age = 1000 * (process.clock() - process.skew_to(main) - node.moved_at)
                message = pb.Heartbeat(
                    node_id=node.name, incarnation=incarnation, progress_age_ms=max(0, int(age)), dying=dying
                )
                yield conn.ask(Kind.HEARTBEAT, message.SerializeToString(), 1.0)
            except Broken:
                conn = None
            if dying:
                return
            if main.alive:
                yield 1.0

    incarnation = node.incarnation
    for master in world.master_names:
        process.start(life(master))

    def last_words() -> None:
        for master in world.master_names:
            process.start(life(master))
        process.after(2.0, process.kill)

    if node.plan.last_words:
        main.ends.append(last_words)
    else:
        main.ends.append(process.kill)
