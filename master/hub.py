"""The state, its lock, its clock, and whoever carries out its commands.

Every thread of the master comes through here: channel connections, sync streams, HTTP, the tick.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from kvstrata.master import messages as m
from kvstrata.master.journal import Journal
from kvstrata.master.leadership import succession
from kvstrata.master.leadership.sole import next_epoch
from kvstrata.master.leadership.standing import Standing
from kvstrata.master.metrics import Metrics
from kvstrata.master.outbox import NOBODY, Outbox, Stamp
from kvstrata.master.reuse.lookup_log import LookupLog
from kvstrata.master.reuse.what_if import WhatIf
from kvstrata.master.state import MasterState
from kvstrata.master.status.events import Events, Happening
from kvstrata.master.status.wording import happening_of
from kvstrata.master.stores.base import StateStore
from kvstrata.proto.errors import NotLeader, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.loops import Loop, Loops
from kvstrata.transfer.versions import RefusedVersions

log = get_logger(__name__)

T = TypeVar("T")

TICK_S: Final = 0.25
#: A store that refused a write is tried again after this.
RETRY_S: Final = 1.0
STALLED_DISK_S: Final = 10.0
#: Steps of sharing limits out that one tick makes at most, and the pause after each.
BALANCE_STEPS: Final = 10
BALANCE_BREATH_S: Final = 0.001
#: How often an order that waits for its nodes looks again, should a wake-up be missed.
REMOVE_POLL_S: Final = 0.05


class Hub:
    """Thread-safe face of :class:`MasterState`: whoever wants something of it brings a function, and the hub calls that
    under the lock and carries out the commands that it led to."""

    def __init__(
        self,
        store: StateStore,
        rng: random.Random,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.started_at = clock()
        self.cluster_id = store.cluster_id()
        self.master_id = secrets.token_hex(8)  #: new at each start
        self.journal = Journal(store)
        #: Where others reach this master.
        self.address: Callable[[], str] = lambda: ""
        #: Where the master is that leads instead of this one; "" when none is known to.
        self.leader: Callable[[], str] = lambda: ""
        #: Why a store that masters share does not answer; "" when it does.
        self.store_problem: Callable[[], str] = lambda: ""
        #: Whether a store that masters share still is the one that this master leads by; None: it does not say.
        self.kept: Callable[[], bool | None] = lambda: True
        #: Some node obeys a later leader.
        self.deposed: Callable[[], None] = lambda: None
        self.metrics = Metrics()
        #: What happened lately, for people.
        self.events = Events()
        #: Nodes and clients of versions that this master does not speak with.
        self.refused_versions = RefusedVersions()
        self._clock = clock
        self._lock = threading.Lock()
        self._confirmed = threading.Condition(self._lock)
        self._store = store
        saved = store.load()
        standing = Standing(leading=False, master_id=self.master_id, heard=saved.leader_epoch)
        if not store.shared:
            standing.lead(next_epoch(store, self.master_id, saved.leader_epoch))
        self._stamp = Stamp(standing.epoch, self.master_id) if standing.leading else NOBODY
        self._state = MasterState(clock(), rng, saved, grace_s, standing)
        self.lookup_log = LookupLog(WhatIf(random.Random(rng.getrandbits(64))))
        self._outboxes: dict[int, Outbox] = {}
        self._writer: Loop | None = None

    def start(self, loops: Loops) -> None:
        """Begin to tick, and to write what becomes durable; a slow disk holds up neither nodes nor clients."""
        loops.add(Loop("tick", TICK_S, self._tick))
        loops.add(Loop("what if", TICK_S, self._hear))
        self._writer = loops.add(Loop("journal", RETRY_S, self._write_out, bound_s=STALLED_DISK_S))

    def _tick(self) -> None:
        """Time passed. What is due of sharing limits out is done in steps, between which others have the lock."""
        self.handle(m.Tick())
        for _ in range(BALANCE_STEPS):
            with self._lock:
                commands = self._state.rebalance(self._clock())
                self._deliver(commands or [])
            if commands is None:
                break
            self._settle(commands)
            time.sleep(BALANCE_BREATH_S)

    def _write_out(self) -> None:
        with self._lock:
            quotas = self._state.quotas
            serial = quotas.saved_serial
        if self._written():
            with self._lock:
                ours = quotas is self._state.quotas  # else this master has ceased to lead meanwhile
                commands = self._state.grants_saved(serial, self._clock()) if ours else []
                self._deliver(commands)
            self._settle(commands)

    def _hear(self) -> None:
        self.lookup_log.hear()

    # ------------------------------------------------------------------ events

    def handle(self, event: m.Event) -> None:
        """Take an event in and carry out what follows."""
        with self._lock:
            commands = self._state.handle(event, self._clock())
            self._deliver(commands)
            if isinstance(event, m.CommandDone):
                self._confirmed.notify_all()
            deposed = self._state.standing.deposed
        self._settle(commands)
        if deposed:
            self.deposed()

    def attach(self, event: m.Attach) -> tuple[int, Outbox]:
        """Begin a session: its id, and where its commands will appear.

        Raises :class:`Unavailable` when the state will not have it.
        """
        outbox = Outbox()
        if not self._store.shared:
            self._outdo(event)
        with self._lock:
            commands = self._state.handle(event, self._clock())
            deposed = self._state.standing.deposed
            session = next((c.session for c in commands if isinstance(c, m.SendAttached)), None)
            if session is not None:
                self._outboxes[session] = outbox
            self._deliver(commands)
        self._settle(commands)
        if deposed:
            self.deposed()
        if session is None:
            refusal = next((c.reason for c in commands if isinstance(c, m.CloseSession)), "refused")
            raise Unavailable(f"node {event.facts.node_id} cannot attach: {refusal}")
        return session, outbox

    def link_lost(self, session: int) -> None:
        """The stream of ``session`` ended."""
        with self._lock:
            self._outboxes.pop(session, None)
        self.handle(m.LinkLost(session))

    def close_sessions(self, reason: str) -> None:
        """End every sync stream; the nodes look for another master, or wait for this one."""
        with self._lock:
            for outbox in self._outboxes.values():
                outbox.close(reason)

    def _deliver(self, commands: Sequence[m.Command]) -> None:
        """Hand commands to sessions and writes to the journal, under the lock: their order is that of events."""
        self.journal.add(command for command in commands if isinstance(command, m.Save))
        for command in commands:
            if isinstance(command, m.CloseSession):
                outbox = self._outboxes.pop(command.session, None)
                if outbox is not None:
                    outbox.close(command.reason)
            elif isinstance(command, m.Cleared):
                self.lookup_log.gone(command.group, command.salt)
            elif isinstance(command, m.Send):
                outbox = self._outboxes.get(command.session)
                if outbox is not None:
                    outbox.put(command, self._stamp)

    def _settle(self, commands: Iterable[m.Command]) -> None:
        """Have writes made, and log, outside the lock."""
        if self._writer is not None and any(isinstance(command, m.Save) for command in commands):
            self._writer.wake()
        for command in commands:
            if isinstance(command, m.Report):
                log.info(command.event, **command.fields)
                self.note(happening_of(command.event, command.fields))

    def note(self, happening: Happening) -> None:
        """Remember an event for operators. What the state reports is noted by itself."""
        self.events.note(happening, time.time())

    def ordered(self, happening: Happening) -> None:
        """An operator changed something: for the log, and among events."""
        log.info("ordered", what=happening.text)
        self.note(happening)

    # ------------------------------------------------------------------ orders to nodes

    def change(self, change: Callable[[MasterState, float], tuple[T, list[m.Command]]]) -> T:
        """Change the state under the lock, and carry out what follows. Raises what ``change`` does."""
        with self._lock:
            result, commands = change(self._state, self._clock())
            self._deliver(commands)
        self._settle(commands)
        return result

    def order(
        self,
        change: Callable[[MasterState, float], tuple[T, list[m.Command]]],
        *,
        durable: bool = True,
        or_none: bool = False,
    ) -> T:
        """As :meth:`change`, for what the leader alone may do; with ``or_none`` any master that knows of no leader.

        Raises :class:`NotLeader` when this master may not, and :class:`Unavailable` for a change that is worth
        nothing unless ``durable``, while a store that masters share does not answer.
        """

        def allowed(state: MasterState, now: float) -> tuple[T, list[m.Command]]:
            self._require_leader(or_none=or_none)
            problem = self.store_problem() if durable else ""
            if problem:
                raise Unavailable(f"nothing was changed, because it could not be kept: {problem}; try again later")
            return change(state, now)

        return self.change(allowed)

    def confirmations(self, command: int, awaited: frozenset[str], deadline: float) -> list[str]:
        """Wait until the ``awaited`` nodes have confirmed; returns all nodes that have not.

        A node is waited for while it is attached: one that falls silent leaves after ``OFFLINE_S``, nobody is
        sent there any more, and before it serves again it attaches and is told. ``deadline`` is monotonic time.
        Raises :class:`Unavailable` when this master is deposed meanwhile: what became of it the next leader knows.
        """
        with self._lock:
            while True:
                if not self._state.ordered(command):
                    raise Unavailable("deposed before all nodes had confirmed: the next leader tells them; ask again")
                unreached = self._state.unconfirmed(command)
                left = deadline - time.monotonic()
                if left <= 0 or not self._state.attached(awaited.intersection(unreached)):
                    return unreached
                self._confirmed.wait(min(left, REMOVE_POLL_S))

    def heartbeat(self, event: m.Heartbeat) -> bool:
        """True when this incarnation of the node is attached here."""
        self.handle(event)
        with self._lock:
            return self._state.membership.knows(event.node_id, event.incarnation)

    def copy_hot(self, enabled: bool) -> None:
        """Whether prefixes that a busy node is asked for most get a copy elsewhere, while this master leads."""
        with self._lock:
            self._state.replication.hot.enabled = enabled

    def durable(self) -> bool:
        """Have what was ordered written; False when it may not outlive this master."""
        if not self._written():
            return False
        with self._lock:
            return self._state.leading

    def _written(self) -> bool:
        """Write all that waits; True when it is in, and was not lost since. A store that has lost all gets what it had
        first: what is written to it before that looks like all there is to a master that starts."""
        if self.journal.waiting() and (self.kept() is False or not self.journal.flush()):
            return False
        return self.kept() is True

    def why_not_durable(self) -> str:
        """For :meth:`durable`."""
        with self._lock:
            if not self._state.leading:
                return "another master has taken over meanwhile; ask it"
        return self.journal.problem() or "the state store is slow, or was emptied: all else is written to it first"

    # ------------------------------------------------------------------ leading

    def require_leader(self) -> None:
        """Raises :class:`NotLeader` when this master does not lead."""
        with self._lock:
            self._require_leader()

    def _require_leader(self, *, or_none: bool = False) -> None:
        if not self._state.leading and not (or_none and not self.leader()):
            raise NotLeader(self._who_leads())

    def _who_leads(self) -> str:
        leader = self.leader()
        return "this master does not lead: " + (f"the leader is {leader}" if leader else "there is none now")

    def leads(self) -> tuple[bool, str]:
        """Whether this master leads, and where the leader's channel is; "" when none is known to lead."""
        with self._lock:
            leading = self._state.leading
        return leading, self.address() if leading else self.leader()

    def standing(self) -> Standing:
        """A copy: whether this master leads, and what it has heard."""
        with self._lock:
            return replace(self._state.standing)

    def succeed(self, change: Callable[[MasterState, float], list[m.Command]], epoch: int | None = None) -> None:
        """Change who leads: this master in ``epoch``, or another. What waits for the journal is as the leader's."""
        with self._lock:
            self._stamp = NOBODY if epoch is None else Stamp(epoch, self.master_id)
            if self._store.shared:
                self.journal.serve(self._stamp.epoch)
            commands = change(self._state, self._clock())
            self._deliver(commands)
            self._confirmed.notify_all()
        self._settle(commands)

    def _outdo(self, event: m.Attach) -> None:
        """The node has obeyed a master of which the store knows nothing: it was another file, or none."""
        with self._lock:
            heard = self._state.standing.outdone(event.leader_epoch, event.leader_id)
        if heard is not None:
            epoch = next_epoch(self._store, self.master_id, heard)
            self.succeed(lambda state, now: succession.go_on(state, epoch), epoch)

    # ------------------------------------------------------------------ health

    def read(self, question: Callable[[MasterState, float], T]) -> T:
        """Ask the state under the lock what leads to no command. The question must be quick and keep nothing."""
        with self._lock:
            return question(self._state, self._clock())

    def uptime_s(self) -> float:
        return self._clock() - self.started_at
