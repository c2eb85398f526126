"""What an agent has in hand: peers, registered memory and transfers, and what may be freed when.

Sans-IO: no thread, clock or agent. A transfer that was posted holds its peer and its local memory until it has
settled; both can be asked away meanwhile, and are let go with the last transfer that names them.

::

    submit --> WAITING -- take --> POSTED -- settle --> DONE | FAILED
                  |                  |
                  +-- give_up, leave +-- leave: it stays, and so does the peer
                  v
               DROPPED
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstrata.transfer.memory import Memory
from kvstrata.transfer.rdma.engine import JobState, Pieces

#: Transfers that wait to be posted, all peers together.
WAITING_MAX: Final = 4096
#: Transfers posted to one peer, and their bytes (one may be larger): a peer that is stopped keeps no other one waiting.
POSTED_PER_PEER: Final = 16
POSTED_BYTES_PER_PEER: Final = 1 << 30
#: Pieces of one transfer.
PIECES_MAX: Final = 1 << 20
PEERS_MAX: Final = 4096

SETTLED: Final = frozenset((JobState.DONE, JobState.FAILED, JobState.DROPPED))


class Transfer:
    """A read. ``local`` and ``remote`` pair up piece by piece."""

    def __init__(self, peer: str, local: Pieces, remote: Pieces) -> None:
        self.peer = peer
        self.local = local
        self.remote = remote
        self.nbytes = int(local.length.sum())
        self.state = JobState.WAITING
        self.problem = ""
        self.holds: tuple[Held, ...] = ()
        self.seen = 0  # registrations that there were when ``holds`` was made


@dataclass(eq=False, slots=True)
class Held:
    """Registered memory. ``users``: transfers that lie in it and have not settled. Registrations may overlap, and the
    agent takes any: a transfer holds them all."""

    address: int
    nbytes: int
    memory: Memory
    handle: object
    users: int = 0
    closing: bool = False


@dataclass(eq=False, slots=True)
class Known:
    """A peer. ``leaving``: it was asked away, and is forgotten with the last of ``posted``."""

    waiting: OrderedDict[Transfer, None] = field(default_factory=OrderedDict)
    posted: OrderedDict[Transfer, None] = field(default_factory=OrderedDict)
    posted_bytes: int = 0
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Freed:
    """What an event has set free: transfers that have ended with it, memory that may go (once :meth:`Ledger.take_out`
    says so), a peer to forget."""

    settled: tuple[Transfer, ...] = ()
    memory: tuple[Held, ...] = ()
    peer: str = ""


class Ledger:
    """Not thread-safe: the owner's lock is held around each call."""

    def __init__(self) -> None:
        self.peers: OrderedDict[str, Known] = OrderedDict()
        self.memory: dict[Held, None] = {}
        self.registered = 0
        self.waiting = 0
        self.posted = 0

    # ---------------------------------------------------------------- memory

    def register(self, address: int, nbytes: int, memory: Memory, handle: object) -> Held:
        held = Held(address, nbytes, memory, handle)
        self.memory[held] = None
        self.registered += 1
        return held

    def close(self, held: Held) -> Freed:
        """No new transfer may need it; it comes back, now or with a later event, when none holds it. Safe twice."""
        if held not in self.memory or held.closing:
            return Freed()
        held.closing = True
        return Freed(memory=self._unused((held,)))

    def take_out(self, held: Held) -> bool:
        """Right before it is deregistered: False when a transfer has come to hold it since, or it was taken already."""
        if held not in self.memory or not self._unused((held,)):
            return False
        del self.memory[held]
        return True

    # ---------------------------------------------------------------- peers

    def meet(self, peer: str) -> None:
        """Known from now on, also when it was leaving."""
        self.peers.setdefault(peer, Known()).leaving = False

    def leave(self, peer: str) -> Freed:
        """Transfers that wait are dropped; it comes back as ``peer``, now or later, when none is posted. Safe twice."""
        known = self.peers.get(peer)
        if known is None:
            return Freed()
        known.leaving = True
        dropped = tuple(known.waiting)
        memory = [held for transfer in dropped for held in self._drop(transfer, "its peer was forgotten")]
        return Freed(dropped, tuple(memory), self._unneeded(peer))

    # ---------------------------------------------------------------- transfers

    def submit(self, transfer: Transfer) -> str:
        """Take a transfer in; why not, or ""."""
        known = self.peers.get(transfer.peer)
        if known is None or known.leaving:
            return f"agent {transfer.peer} is not known here"
        if self.waiting >= WAITING_MAX:
            return f"{WAITING_MAX} transfers wait already"
        if len(transfer.local.length) > PIECES_MAX:
            return f"{len(transfer.local.length)} pieces, and {PIECES_MAX} is the bound"
        if not self._hold(transfer):
            return "local memory that is not registered"
        self.waiting += 1
        known.waiting[transfer] = None
        return ""

    def take(self) -> Transfer | None:
        """The next to be posted, POSTED from now on; peers take turns."""
        for peer in list(self.peers) if self.waiting else ():
            known = self.peers[peer]
            transfer = next(iter(known.waiting), None)
            if transfer is not None and self._room(known, transfer.nbytes):
                self.peers.move_to_end(peer)
                del known.waiting[transfer]
                transfer.state = JobState.POSTED
                if transfer.seen != self.registered:
                    self._hold(transfer)
                known.posted[transfer] = None
                known.posted_bytes += transfer.nbytes
                self.waiting, self.posted = self.waiting - 1, self.posted + 1
                return transfer
        return None

    def give_up(self, transfer: Transfer) -> Freed:
        """Nobody waits for it any more: one that was not posted is dropped."""
        if transfer.state is not JobState.WAITING:
            return Freed()
        return Freed((transfer,), self._drop(transfer, "given up before it was posted"))

    def settle(self, transfer: Transfer, problem: str = "") -> Freed:
        """A posted one has ended: DONE, or FAILED with a ``problem``."""
        assert transfer.state is JobState.POSTED, transfer.state
        transfer.state, transfer.problem = (JobState.FAILED if problem else JobState.DONE), problem
        known = self.peers[transfer.peer]
        del known.posted[transfer]
        known.posted_bytes -= transfer.nbytes
        self.posted -= 1
        return Freed((transfer,), self._let_go(transfer), self._unneeded(transfer.peer))

    def drop_waiting(self) -> Freed:
        """All that is not posted."""
        dropped = tuple(transfer for known in self.peers.values() for transfer in known.waiting)
        memory = [held for transfer in dropped for held in self._drop(transfer, "the agent is closed")]
        return Freed(dropped, tuple(memory))

    def all_posted(self) -> list[Transfer]:
        return [transfer for known in self.peers.values() for transfer in known.posted]

    @property
    def unsettled(self) -> int:
        return self.waiting + self.posted

    # ---------------------------------------------------------------- inside

    @staticmethod
    def _room(known: Known, nbytes: int) -> bool:
        if not known.posted:
            return True
        return len(known.posted) < POSTED_PER_PEER and known.posted_bytes + nbytes <= POSTED_BYTES_PER_PEER

    def _hold(self, transfer: Transfer) -> bool:
        """Hold all registrations that a piece lies in; False, and none, when a piece lies in no open one."""
        pieces = transfer.local
        begin, end = pieces.address, pieces.address + pieces.length
        low, high = (int(begin.min()), int(end.max())) if len(begin) else (0, 0)
        found, inside = [], np.zeros(len(begin), np.bool_)
        for held in self.memory:
            last = held.address + held.nbytes
            if held.memory != pieces.memory or last <= low or held.address >= high:
                continue
            whole = held.address <= low and high <= last
            here = whole or (begin >= held.address) & (end <= last)
            if np.any(here):
                found.append(held)
                if not held.closing or held in transfer.holds:
                    inside |= here
        if not inside.all():
            return False
        for held in found:
            held.users += held not in transfer.holds
        transfer.holds, transfer.seen = tuple(found), self.registered
        return True

    def _drop(self, transfer: Transfer, problem: str) -> tuple[Held, ...]:
        transfer.state, transfer.problem = JobState.DROPPED, problem
        del self.peers[transfer.peer].waiting[transfer]
        self.waiting -= 1
        return self._let_go(transfer)

    def _let_go(self, transfer: Transfer) -> tuple[Held, ...]:
        holds, transfer.holds = transfer.holds, ()
        for held in holds:
            held.users -= 1
        return self._unused(holds)

    @staticmethod
    def _unused(memory: tuple[Held, ...]) -> tuple[Held, ...]:
        return tuple(held for held in memory if held.closing and not held.users)

    def _unneeded(self, peer: str) -> str:
        known = self.peers[peer]
        if not known.leaving or known.posted:
            return ""
        del self.peers[peer]
        return peer

    def check(self) -> None:
        """Raises AssertionError when an index and what it counts differ."""
        users: dict[Held, int] = {}
        waiting = posted = 0
        for name, known in self.peers.items():
            waiting, posted = waiting + len(known.waiting), posted + len(known.posted)
            assert not (known.leaving and known.waiting), name
            assert all(transfer.state is JobState.WAITING for transfer in known.waiting), name
            assert not known.leaving or known.posted, name
            assert known.posted_bytes == sum(transfer.nbytes for transfer in known.posted), name
            assert len(known.posted) <= POSTED_PER_PEER, name
            assert all(transfer.state is JobState.POSTED for transfer in known.posted), name
            for transfer in [*known.waiting, *known.posted]:
                assert transfer.peer == name
                for held in transfer.holds:
                    users[held] = users.get(held, 0) + 1
        assert (waiting, posted) == (self.waiting, self.posted)
        assert waiting <= WAITING_MAX
        assert users.keys() <= self.memory.keys()
        for held in self.memory:
            assert held.users == users.get(held, 0)
