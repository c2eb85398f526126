"""Copies that a node was ordered to take: which wait, which run, what became of each block. Sans-IO.

An order is a run of blocks of one tenant in one namespace, from one source. It is taken piece by piece; what is
removed, dropped or outdated meanwhile is not taken any more, whatever the source still has: a source may hear of a
removal later than the target.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, CopyReason, Tier
from kvstrata.transfer.base import Endpoint

#: Orders that may wait; more are refused.
WAITING_MAX: Final = 256
#: Answers that are remembered for orders that come twice.
ANSWERED_MAX: Final = 1024

_UNKNOWN = int(BlockStatus.UNKNOWN)
_ABORTED = int(BlockStatus.ABORTED)

Answer = Callable[[control.CopyDone], None]


@dataclass(slots=True)
class CopyCounts:
    """Blocks and bytes that copies have moved since the node's start; never decreases."""

    taken: int = 0  #: blocks that came from other nodes
    taken_bytes: int = 0
    present: int = 0  #: here before, or being written
    missing: int = 0  #: the source had them no more
    corrupt: int = 0  #: arrived, and not what the source had
    no_room: int = 0  #: no room among what is colder, or in the tenant's share
    failed: int = 0  #: every other reason
    given: int = 0  #: blocks sent to other nodes
    given_bytes: int = 0
    given_from_ssd: int = 0
    surplus: int = 0  #: replicas let go of by order
    orders_refused: int = 0  #: too many waited, or they made no sense


@dataclass(eq=False, slots=True)
class Copy:
    """One order. ``number`` is (leader epoch, command). ``status`` u8[n] is UNKNOWN where undecided; ``next`` is the
    first block that no piece has named yet; ``why`` some blocks were not taken is for the log. Times are monotonic
    seconds."""

    number: tuple[int, int]
    source: Endpoint
    namespace: Namespace
    salt: str
    hashes: list[bytes]
    epoch: int
    tier: Tier
    reason: CopyReason
    deadline: float
    answer: Answer
    status: bytearray = field(init=False)
    next: int = 0
    nbytes: int = 0
    why: str = ""

    def __post_init__(self) -> None:
        self.status = bytearray(len(self.hashes))

    @property
    def over(self) -> bool:
        """Nothing of it is left to be tried."""
        return self.next >= len(self.hashes)

    def settle(self, status: BlockStatus) -> None:
        """All that is undecided ends so, and so does the order."""
        for position, known in enumerate(self.status):
            if known == _UNKNOWN:
                self.status[position] = status
        self.next = len(self.hashes)

    def done(self) -> control.CopyDone:
        """What its master is told."""
        return control.CopyDone(command=self.number[1], status=bytes(self.status), bytes=self.nbytes)


class CopyBook:
    """Not thread-safe: the node's lock covers it."""

    def __init__(self) -> None:
        self.counts = CopyCounts()
        self._waiting: deque[Copy] = deque()
        self._running: set[Copy] = set()
        self._numbers: set[tuple[int, int]] = set()
        self._answered: OrderedDict[tuple[int, int], control.CopyDone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def waits(self) -> bool:
        """Whether an order has a turn to come."""
        return bool(self._waiting)

    @property
    def running(self) -> int:
        """Orders of which a piece is being taken now."""
        return len(self._running)

    # ------------------------------------------------------------------ orders

    def take(self, copy: Copy) -> control.CopyDone | None:
        """Enter an order, the last in turn. An answer when it has one already: it came twice, or too many wait.

        One that comes again while it is under way is answered once.
        """
        answered = self._answered.get(copy.number)
        if answered is not None:
            return answered
        if copy.number in self._numbers:
            return None
        if len(self._waiting) >= WAITING_MAX:
            self.counts.orders_refused += 1
            return control.CopyDone(command=copy.number[1], error=f"busy: {WAITING_MAX} copies wait on this node")
        self._numbers.add(copy.number)
        self._waiting.append(copy)
        return None

    def next_turn(self) -> Copy | None:
        """The order whose next piece is to be taken now, for one thread; hand it back by :meth:`turn_over`."""
        if not self._waiting:
            return None
        copy = self._waiting.popleft()
        self._running.add(copy)
        return copy

    def turn_over(self, copy: Copy) -> control.CopyDone | None:
        """A piece is done. The answer, when it was the last; else the order goes on before others."""
        self._running.remove(copy)
        if not copy.over:
            self._waiting.appendleft(copy)
            return None
        self._numbers.remove(copy.number)
        done = self._answered[copy.number] = copy.done()
        while len(self._answered) > ANSWERED_MAX:
            self._answered.popitem(last=False)
        return done

    # ------------------------------------------------------------------ what happens meanwhile

    def removed(self, namespace: Namespace, salt: str, hashes: Collection[bytes]) -> None:
        """These blocks are not to be taken any more. Those that are being written are the reservations' business."""
        for copy in (*self._waiting, *self._running):
            if copy.namespace == namespace and copy.salt == salt:
                for position, key in enumerate(copy.hashes):
                    if copy.status[position] == _UNKNOWN and key in hashes:
                        copy.status[position] = _ABORTED

    def retired(self, group: str, salt: str | None) -> None:
        """Nothing of a group ("": of any) and a tenant (None: any) is to be taken any more."""
        for copy in (*self._waiting, *self._running):
            if group in ("", copy.namespace.group) and salt in (None, copy.salt):
                copy.settle(BlockStatus.ABORTED)

    def abandon(self, status: BlockStatus) -> list[Copy]:
        """Orders that wait end so, and are the caller's to answer; those under way end after their piece."""
        for copy in (*self._waiting, *self._running):
            copy.settle(status)
        left = list(self._waiting)
        self._waiting.clear()
        for copy in left:
            self._numbers.remove(copy.number)
        return left

    def check(self) -> None:
        """Assert that each order is in one place, and that nothing grows without a bound."""
        everything = [*self._waiting, *self._running]
        assert len(set(everything)) == len(everything)
        assert self._numbers == {copy.number for copy in everything}
        assert not self._numbers & self._answered.keys()
        assert len(self._answered) <= ANSWERED_MAX
        for copy in everything:
            assert len(copy.status) == len(copy.hashes)
            assert all(copy.status[: copy.next]) or copy in self._running, "a block that was passed over"
