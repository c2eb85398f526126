"""Who leads, as one master sees it: the store's lease, what nodes have heard, and time. No clock, no socket.

A master leads once the store has given it the lease, and goes on when the store falls silent: nodes obey the
greatest epoch that they have heard of, so that whoever takes the lease meanwhile takes the nodes with it. It steps
down the moment it hears of another leader: from the store, or from a node that obeys one.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from kvstrata.master.stores.base import LeaderRecord

#: A lease ends so long after it was taken or renewed last ...
TTL_S: Final = 2.0
#: ... and is looked at, or renewed, this often.
TURN_S: Final = 0.5
#: Without a leader for this long, health says so.
LEADERLESS_S: Final = 5.0


class Ask(Enum):
    """What to ask the store next."""

    CAMPAIGN = auto()  #: take the lease, or renew it
    RENEW = auto()  #: give the lease up and take it anew: its epoch is too small
    WATCH = auto()  #: who leads?


class Move(Enum):
    """What is to be done with an answer."""

    NONE = auto()
    LEAD = auto()  #: begin to lead, or go on in a greater epoch
    STEP_DOWN = auto()
    FOLLOW = auto()  #: another master leads, or nobody does any more


class Election:
    """``epoch`` is that of this master's lead; ``heard`` the greatest that anybody told of."""

    def __init__(self, master_id: str, now: float, ttl_s: float = TTL_S) -> None:
        self.leading = False
        self.epoch = 0
        self.heard = 0
        self.leader: LeaderRecord | None = None
        self.problem = ""  #: why the store does not answer
        self._master_id = master_id
        self._ttl_s = ttl_s
        self._answered_at = now
        self._leaderless_since: float | None = now
        self._hold_until = now
        self._too_small = False
        self._over = False

    # ------------------------------------------------------------------ what to do

    def ask(self, now: float) -> Ask:
        """What the store is to be asked at ``now``."""
        if self._over:
            return Ask.WATCH
        if now < self._hold_until and not self.leading:
            return Ask.WATCH  # also whose lease is too small: it ends by itself
        return Ask.RENEW if self._too_small else Ask.CAMPAIGN

    # ------------------------------------------------------------------ what happens

    def answered(self, record: LeaderRecord | None, now: float) -> Move:
        """The store says who leads."""
        self.problem, self._answered_at = "", now
        if record is None:
            return self._nobody(now)
        if record.master_id != self._master_id:
            return self._another(record)
        if self._over:
            return Move.NONE
        if record.epoch < self.heard:
            self._too_small = True  # nodes have obeyed somebody since
            return self._step_down(now)
        self._too_small = False
        self.leader, self._leaderless_since = record, None
        if self.leading and record.epoch == self.epoch:
            return Move.NONE
        if self.leading and record.epoch > self.epoch + 1:
            # The lease is this one's again, and was another's meanwhile: what that one did counts, and is in the store.
            self.heard = max(self.heard, record.epoch)
            return self._step_down(now)
        self.leading, self.epoch, self.heard = True, record.epoch, record.epoch
        return Move.LEAD

    def _nobody(self, now: float) -> Move:
        if self.leading:
            return self._step_down(now)
        changed = self.leader is not None
        self._leave_leaderless(now)
        return Move.FOLLOW if changed else Move.NONE

    def _another(self, record: LeaderRecord) -> Move:
        changed = self.leader is None or self.leader.master_id != record.master_id
        was_leading, self.leading, self._too_small = self.leading, False, False
        self.leader, self._leaderless_since = record, None
        self.heard = max(self.heard, record.epoch)
        if was_leading:
            return Move.STEP_DOWN
        return Move.FOLLOW if changed else Move.NONE

    def unreachable(self, why: str, now: float) -> None:
        """The store does not answer. Who leads goes on; who does not cannot begin to."""
        self.problem = why

    def told(self, epoch: int, contested: bool, now: float) -> Move:
        """A node has obeyed the leader of ``epoch``; ``contested``: of this very epoch, and it is another master."""
        self.heard = max(self.heard, epoch)
        if not self.leading or not (contested or epoch > self.epoch):
            return Move.NONE
        if contested:
            self.heard = max(self.heard, self.epoch + 1)  # two took this one: an epoch of its own comes next
        self._too_small = True
        return self._step_down(now)

    def probed(self, alive: bool, now: float) -> Move:
        """While the store is silent: whether the leader of last time answers."""
        if alive or self.leading or self.leader is None:
            return Move.NONE
        self._leave_leaderless(now)
        return Move.FOLLOW

    def failed(self, now: float) -> Move:
        """This master cannot lead: what it would lead by is not to be had."""
        self._hold_until = now + self._ttl_s
        return self._step_down(now)

    def hold(self, now: float, leases: int = 1) -> None:
        """The store has lost what it had, or may have: the leader comes first, if there is one, for it knows more. It
        has the time of so many ``leases`` for that."""
        self._hold_until = max(self._hold_until, now + leases * self._ttl_s)

    def resign(self, now: float) -> Move:
        """Never lead again: the process stops."""
        self._over = True
        return self._step_down(now)

    def _step_down(self, now: float) -> Move:
        was_leading, self.leading = self.leading, False
        if self.leader is not None and self.leader.master_id == self._master_id:
            self._leave_leaderless(now)
        return Move.STEP_DOWN if was_leading else Move.NONE

    def _leave_leaderless(self, now: float) -> None:
        self.leader = None
        if self._leaderless_since is None:
            self._leaderless_since = now

    # ------------------------------------------------------------------ asking

    def silent(self, now: float) -> bool:
        """Whether the store has said nothing for so long that whoever led then may be gone."""
        return now - self._answered_at >= self._ttl_s

    def problems(self, now: float) -> list[str]:
        """For health."""
        said = [f"the state store does not answer: {self.problem}"] if self.problem else []
        since = self._leaderless_since
        if since is not None and now - since >= LEADERLESS_S and not self._over:
            said.append(f"no master has led for {now - since:.0f} s: policies cannot be changed, nothing is balanced")
        return said

    def check(self) -> None:
        assert not self.leading or (self.leader is not None and self.leader.master_id == self._master_id)
        assert not self.leading or not (self._over or self._too_small)
        assert self.heard >= self.epoch
        assert (self.leader is None) == (self._leaderless_since is not None)
