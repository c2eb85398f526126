"""One check of the node at a time, as its channel answers it: invariants, then blocks read back, then its health."""

from __future__ import annotations

import hashlib
import json
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, Unavailable
from kvstrata.proto.status import Tier
from kvstrata.proto.wire import Kind
from kvstrata.storage.checking.pieces import PieceCheck
from kvstrata.storage.checking.scrub import Bad, Scrub
from kvstrata.storage.checking.scrubber import Pace, Scrubber
from kvstrata.storage.serving.messages import parsed, reply
from kvstrata.storage.ssd.base import SsdStore
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.moves import TierMoves
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.server import Handler, Reply
from kvstrata.transfer.sessions import ServerConnection

#: Up to so many blocks the whole of ``check()`` runs in one go: about 100 ms under the lock.
WHOLE_BLOCKS: Final = 50_000
#: Between two pieces others have the lock.
BREATH_S: Final = 0.0005
#: A scrub that names no rate leaves most of a device, and of a core, to readers.
RATE: Final = 200 << 20
DEADLINE_S: Final = 60.0
DEADLINE_MAX_S: Final = 24 * 3600.0
#: Named in an answer; the others are counted.
PROBLEMS_MAX: Final = 50
BAD_MAX: Final = 100
#: A pause looks up this often, for the node's end and for whether the asker is still there.
LOOK_S: Final = 0.1
STOP_S: Final = 5.0


@dataclass(slots=True)
class Ask:
    """What a check is to do, bounded: ``rate`` in bytes a second, ``until`` in monotonic seconds."""

    scrub: bool = False
    scrub_bytes: int = 0
    rate: int = RATE
    until: float = float("inf")
    gone: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class Found:
    """What a check came to, JSON-ready by :meth:`told`."""

    complete: bool = True
    whole: bool = True  #: all of check(), at one moment
    blocks: int = 0
    longest_hold_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    problems_left_out: int = 0
    scrubbed: dict[str, dict[str, int]] = field(default_factory=dict)
    bad: list[dict[str, Any]] = field(default_factory=list)
    bad_left_out: int = 0

    def add_bad(self, bad: list[Bad]) -> None:
        named = bad[: BAD_MAX - len(self.bad)]
        self.bad.extend(_row(each) for each in named)
        self.bad_left_out += len(bad) - len(named)

    def told(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "state": {
                "whole": self.whole,
                "blocks": self.blocks,
                "longest_hold_ms": round(self.longest_hold_s * 1e3, 1),
                "problems": self.problems,
                "problems_left_out": self.problems_left_out,
            },
            "scrub": self.scrubbed,
            "bad": self.bad,
            "bad_left_out": self.bad_left_out,
        }


class NodeChecks:
    """Over one state and its lock. ``changed`` is called when blocks were withdrawn, ``health`` says how the node is.

    ``moves`` and ``store`` when the node has an SSD.
    """

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        *,
        changed: Callable[[], None] = lambda: None,
        health: Callable[[], Mapping[str, Any]] = dict,
        moves: TierMoves | None = None,
        store: SsdStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._lock = lock
        self._health = health
        self._moves = moves
        self._clock = clock
        self._scrubber = Scrubber(lock, changed, store, clock)
        self._one = threading.Lock()
        self._stopping = threading.Event()
        self._starts: dict[Tier, tuple[int, int]] = {}

    def handlers(self) -> dict[int, Handler]:
        """By frame kind, for the channel server, which sends progress while a handler is at work."""
        return {Kind.NODE_CHECK: self._check}

    def _check(self, connection: ServerConnection, frame: Frame) -> Reply:
        message = parsed(pb.NodeCheck, frame)
        seconds = min(message.deadline_ms / 1e3, DEADLINE_MAX_S) if message.deadline_ms else DEADLINE_S
        ask = Ask(
            scrub=message.scrub,
            scrub_bytes=message.scrub_bytes,
            rate=message.bytes_per_second or RATE,
            until=self._clock() + seconds,
            gone=lambda: _hung_up(connection),
        )
        return reply(Kind.NODE_CHECK_OK, pb.NodeCheckOk(json=json.dumps(self.run(ask))))

    def run(self, ask: Ask) -> dict[str, Any]:
        """Check, JSON-ready. Ends by ``ask.until``, after the batch under way; ``complete`` says whether it is all.

        Raises :class:`Busy` while another check runs, :class:`Unavailable` when the node stops.
        """
        if self._stopping.is_set():
            raise Unavailable("the node is stopping")
        if not self._one.acquire(blocking=False):
            raise Busy("this node is being checked already: wait for that check to end")
        began = self._clock()
        try:
            found = Found()
            self._look_at_state(found, ask)
            if ask.scrub:
                self._read_back(found, ask)
        finally:
            self._one.release()
        health = dict(self._health())
        told = ("node_id", "incarnation", "healthy", "problems", "loop_age_seconds")
        return {
            **found.told(),
            "seconds": round(self._clock() - began, 3),
            "health": {name: health[name] for name in told if name in health},
        }

    # ------------------------------------------------------------------ invariants

    def _look_at_state(self, found: Found, ask: Ask) -> None:
        with self._lock:
            blocks = sum(inventory.visible for inventory in self._state.tiers())
        if blocks <= WHOLE_BLOCKS:
            found.blocks = blocks
            self._hold(found, self._whole)
            return
        found.whole = False
        pieces = PieceCheck(self._state, self._moves)
        while self._hold(found, pieces.step):
            if self._over(ask):
                found.complete = False
                break
            time.sleep(BREATH_S)
        found.blocks = pieces.blocks

    def _whole(self) -> bool:
        self._state.check()
        if self._moves is not None:
            self._moves.check()
        return False

    def _hold(self, found: Found, look: Callable[[], bool]) -> bool:
        """Look with the lock held; what ``look`` says, True when it found something wrong."""
        with self._lock:
            began = time.monotonic()
            try:
                return look()
            except (AssertionError, LookupError) as error:
                if len(found.problems) < PROBLEMS_MAX:
                    found.problems.append(_reason(error))
                else:
                    found.problems_left_out += 1
                return True
            finally:
                found.longest_hold_s = max(found.longest_hold_s, time.monotonic() - began)

    # ------------------------------------------------------------------ bytes

    def _read_back(self, found: Found, ask: Ask) -> None:
        for scrub in self._scrubs(ask.scrub_bytes):
            row = found.scrubbed[scrub.tier.name.lower()] = {"blocks": 0, "bytes": 0, "bad": 0}
            pace = Pace(ask.rate, self._clock)
            while True:
                if not self._pause(pace, ask):
                    found.complete = False
                    break
                read = self._scrubber.one(scrub)
                if read is None:
                    break
                nbytes, bad = read
                pace.spend(nbytes)
                found.add_bad(bad)
                row["bad"] += len(bad)
            row["blocks"], row["bytes"] = scrub.blocks, scrub.bytes
            self._starts[scrub.tier] = scrub.next_start

    def _scrubs(self, limit_bytes: int) -> list[Scrub]:
        """A round a tier, each from where the last one ended: bounded ones cover everything in the end."""
        state = self._state
        scrubs = [
            Scrub(state.inventory, state.leases, limit_bytes=limit_bytes, start=self._starts.get(Tier.DRAM, (0, 0)))
        ]
        if self._moves is not None and self._moves.ssd.inventory.arena.slabs:
            books = self._moves.ssd
            start = self._starts.get(Tier.SSD, (0, 0))
            scrubs.append(Scrub(books.inventory, books.leases, self._moves, limit_bytes=limit_bytes, start=start))
        return scrubs

    def _pause(self, pace: Pace, ask: Ask) -> bool:
        """Wait until more may be read; False when there is no time left, or nobody to do it for."""
        while not self._over(ask):
            wait_s = pace.wait_s()
            if not wait_s:
                return True
            self._stopping.wait(min(wait_s, LOOK_S))
        return False

    def _over(self, ask: Ask) -> bool:
        return self._stopping.is_set() or self._clock() >= ask.until or ask.gone()

    # ------------------------------------------------------------------ end

    def stop(self) -> None:
        """End the check under way; waits for its batch. Before the node's memory goes."""
        self._stopping.set()
        if self._one.acquire(timeout=STOP_S):
            self._one.release()


def _hung_up(connection: ServerConnection) -> bool:
    """Whether the peer has closed its end: nobody waits for the answer."""
    poll = select.poll()
    poll.register(connection.stream.sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _reason(error: Exception) -> str:
    """An assertion's text; where it has none, which line it was."""
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_qualname} line {trace.tb_lineno}" if trace is not None else "somewhere"
    return f"{type(error).__name__} in {where}"


def _row(bad: Bad) -> dict[str, Any]:
    """A bad block by name. Salts may be secrets of their tenants: a digest tells them apart."""
    block, namespace = bad.block, bad.block.shelf.entry.namespace
    return {
        "hash": block.hash.hex(),
        "tier": bad.tier.name.lower(),
        "group": namespace.group,
        "shard": namespace.shard,
        "salt_digest": hashlib.blake2b(block.shelf.salt.encode(), digest_size=8).hexdigest(),
        "status": bad.status.name.lower(),
    }
