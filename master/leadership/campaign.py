"""The loop that asks the store who leads, and has the hub act on the answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvstrata.master.hub import Hub
from kvstrata.master.leadership.election import TTL_S, TURN_S, Ask, Election, Move
from kvstrata.master.leadership.office import Office
from kvstrata.master.saved import Saved
from kvstrata.master.stores.base import LeaderRecord, StateStore
from kvstrata.proto.errors import KVError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.loops import Loop, Loops

log = get_logger(__name__)

TTL_MS: Final = int(TTL_S * 1000)
#: A master is listed for so long after it announced itself last.
LISTED_MS: Final = 5000
#: A turn that takes longer than this is a problem in health: the store hangs.
TURN_BOUND_S: Final = 15.0
#: An emptied store has no lease in it that a leader which stood still for a moment could come back to: it has the time
#: that the lease would have given it, and as much again.
EMPTIED_LEASES: Final = 2
#: One that never read more than what it finds leaves that time to those that did, and one lease's more to notice.
BEHIND_LEASES: Final = EMPTIED_LEASES + 1
#: How long the last known leader is listened for while the store is silent.
PROBE_S: Final = 0.5
#: How long a master that stops waits for a turn to end.
RESIGN_S: Final = 2.0


def answers(address: str) -> bool:
    """Whether a master answers at this channel address, within about ``PROBE_S``."""
    try:
        Connection.open(address, Identity.new("master"), connect_s=PROBE_S, silence_s=PROBE_S, hello_only=True).close()
    except KVError:
        return False
    return True


class Campaign:
    """For a store that masters share. ``me`` says where this master listens; :meth:`turn` is for one thread."""

    def __init__(
        self,
        hub: Hub,
        store: StateStore,
        me: Callable[[], LeaderRecord],
        clock: Callable[[], float] = time.monotonic,
        probe: Callable[[str], bool] = answers,
    ) -> None:
        self.election = Election(hub.master_id, clock())
        self._hub = hub
        self._office = Office(hub)
        self._store = store
        self._me = me
        self._clock = clock
        self._probe = probe
        self._saved: Saved | None = None  #: what the store had when it was read last
        self._seen = 0  #: the greatest revision
        self._looked = False  #: at the store, ever
        self._emptied = False  #: the store has less than this master has seen in it
        self._behind = False  #: the store has less than there was, and this master never read more
        self._lost = False  #: the store may lack what this master leads by
        self._was_leader = False  #: what it knew then may never have been saved
        self._loop: Loop | None = None
        self._turning = threading.Lock()
        hub.leader = self.leader
        hub.store_problem = lambda: self.election.problem
        hub.kept = self._kept
        hub.deposed = self._wake
        hub.journal.on_deposed = self._wake

    def start(self, loops: Loops) -> None:
        """Take a first turn, and go on turning."""
        self.turn()
        self._loop = loops.add(Loop("election", TURN_S, self.turn, bound_s=TURN_BOUND_S))

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def leader(self) -> str:
        """The channel address of another master that leads; "" when none is known to."""
        leader = self.election.leader
        return "" if leader is None or leader.master_id == self._hub.master_id else leader.channel

    def _kept(self) -> bool | None:
        """Is the store still the one that this master leads by? In one that was emptied, or is an older one, it has no
        lease of its epoch. None: it does not answer."""
        if not self.election.leading:
            return False
        try:
            holder = self._store.leader()
        except Unavailable:
            return None
        if holder is not None and (holder.master_id, holder.epoch) == (self._hub.master_id, self.election.epoch):
            return True
        self._wake()
        return False

    # ------------------------------------------------------------------ a turn

    def turn(self) -> None:
        """Ask the store, and act on what it says. Bounded by what the store's calls are."""
        with self._turning:
            self._turn()

    def _turn(self) -> None:
        standing = self._hub.standing()
        self._act(self.election.told(standing.heard, standing.contested, self._clock()), "a node obeys a later leader")
        try:
            self._look()
            record = self._asked()
            self._act(self.election.answered(record, self._clock()), "another master has the lease")
            self._keep_up()
        except Unavailable as error:
            self.election.unreachable(str(error), self._clock())
            self._listen()

    def _look(self) -> None:
        """Has the store lost what it had? It may have, unseen, before a first look: a master that knows more comes
        first, which it does within a lease's time."""
        revision = self._store.revision()
        if not self._looked:
            self.election.hold(self._clock())
        self._looked = True
        if revision < self._seen and not self._emptied:
            self._emptied = self._lost = True
            log.warning("the state store has lost data", revision=revision, seen=self._seen)
            self.election.hold(self._clock(), EMPTIED_LEASES)
        self._seen = max(self._seen, revision) if not self._emptied else self._seen
        if not (self.election.leading or self._emptied or self._behind):
            self._compare()

    def _compare(self) -> None:
        """Nobody leads: does the store know of the last one who did, as nodes do? Revisions do not show it to a master
        that has just started, or that stood still since there were none."""
        heard = self.election.heard
        if heard and self._store.leader() is None and self._store.load().leader_epoch < heard:
            self._behind = True
            log.warning("the state store knows nothing of a leader that nodes have obeyed", epoch=heard)
            self.election.hold(self._clock(), BEHIND_LEASES)

    def _asked(self) -> LeaderRecord | None:
        me = replace(self._me(), master_id=self._hub.master_id, epoch=self.election.heard)
        ask = self.election.ask(self._clock())
        if ask is not Ask.WATCH:
            self._store.announce(me, LISTED_MS)
        if ask is Ask.RENEW:
            self._store.resign(me)
        return self._store.leader() if ask is Ask.WATCH else self._store.campaign(me, TTL_MS)

    def _act(self, move: Move, why: str) -> None:
        if move is Move.STEP_DOWN:
            self._was_leader = True
            self._office.step_down(why)
        elif move is Move.LEAD:
            self._lead()
        elif move is Move.FOLLOW:
            log.info("another master leads", leader=self.leader() or "nobody")

    def _lead(self) -> None:
        epoch = self.election.epoch
        if self._hub.standing().leading:
            self._lost = True  # the lease was gone: so may be the rest
            self._office.lead_on(epoch)
            return
        try:
            saved = self._store.load()
        except KVError:
            self.election.failed(self._clock())
            self._give_up_lease()
            raise
        if self._saved is not None and (self._emptied or saved.revision < self._seen):
            self._lost = True
            saved = replace(self._saved, last_command=max(saved.last_command, self._saved.last_command))
        self._office.lead(saved, epoch)
        self._was_leader = self._behind = False

    def _give_up_lease(self) -> None:
        try:
            self._store.resign(replace(self._me(), master_id=self._hub.master_id))
        except Unavailable as error:
            log.warning("the lease is kept until it ends", reason=str(error))

    # ------------------------------------------------------------------ what the store has

    def _keep_up(self) -> None:
        """The leader gives a store back what it lost; the others read what the leader wrote."""
        if self.election.leading:
            if self._lost and self._office.reconcile(self._store.load()):
                self._lost = self._emptied = False
                self._seen = self._store.revision()
            return
        self._behind = self._behind and self.election.leader is None
        revision = self._store.revision()
        if self._emptied and (not revision or self.election.leader is None):
            return  # what was read before is all that is left of it
        if self._saved is not None and not self._was_leader and self._is_what_was_read(revision, self._saved):
            return
        saved = self._store.load()
        self._saved, self._seen = saved, saved.revision
        self._emptied = self._lost = False
        self._office.follow(saved, exact=self._was_leader)
        self._was_leader = False

    def _is_what_was_read(self, revision: int, saved: Saved) -> bool:
        """Revisions begin anew in an emptied store, and may come to the same; each lease has an epoch of its own."""
        leader = self.election.leader
        return revision == saved.revision and (leader is None or leader.epoch == saved.leader_epoch)

    def _listen(self) -> None:
        """Nobody can take the lease now; does the leader live?"""
        leader = self.leader()
        if leader and self.election.silent(self._clock()):
            self._act(self.election.probed(self._probe(leader), self._clock()), "")

    # ------------------------------------------------------------------ for people, and the end

    def problems(self) -> list[str]:
        """For health."""
        return self.election.problems(self._clock())

    def resign(self) -> None:
        """This process stops: write what waits, then let another master take the lease at once."""
        self._hub.journal.flush()
        if not self._turning.acquire(timeout=RESIGN_S):
            return  # the store hangs; the lease ends by itself
        try:
            self._act(self.election.resign(self._clock()), "this master stops")
            self._give_up_lease()
        finally:
            self._turning.release()
