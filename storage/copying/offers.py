"""What a draining node offers, to the master that ordered the drain: everything it has, hottest first.

A drain begins when the node refuses new blocks. What is visible then is offered at once; what was being written
then follows when it is there, and ends the offer. A new attachment begins anew, when its master orders the drain
again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import Tier
from kvstrata.storage.copying.draining import DrainState
from kvstrata.storage.copying.worth import by_worth, in_turns
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.records import IN_FLIGHT, VISIBLE, Block, Shelf
from kvstrata.storage.state import NodeState

log = get_logger(__name__)

#: Hashes in one offer.
OFFER_HASHES: Final = 1 << 14
#: Offers that wait to be sent: the next is made when there are fewer.
AHEAD: Final = 4
TURN_S: Final = 0.1
#: And so often while the node is not drained: an order wakes the loop.
REST_S: Final = 1.0
#: A turn that takes longer is a problem in health: it sorts a million blocks in a few seconds.
BOUND_S: Final = 60.0

#: One shelf's blocks and their worth, the best first.
Ordered = tuple[list[float], list[Block]]


class Line(Protocol):
    """Where a master is told: the outgoing side of one attachment."""

    over: bool

    @property
    def waiting(self) -> int:
        """Messages that are not sent yet."""
        ...

    def tell(self, message: control.NodeMessage) -> None: ...


class Drains:
    """Carries out drain orders over one node's state and its lock. Methods may be called by any thread without it."""

    def __init__(self, state: NodeState, lock: threading.Lock, clock: Callable[[], float] = time.monotonic) -> None:
        self.wake: Callable[[], None] = lambda: None  #: runs a turn soon
        #: Set whenever a drain begins, ends or is cancelled.
        self.changed = threading.Event()
        self._state = state
        self._lock = lock
        self._clock = clock
        self._line: Line | None = None
        self._offers: Iterator[control.Offer | None] = iter(())
        self._problem = ""

    def problem(self) -> str:
        """Why a drain does not go on, or an empty string."""
        return self._problem

    # ------------------------------------------------------------------ what masters say

    def order(self, message: control.DrainCommand, line: Line) -> None:
        """Begin, begin anew for another attachment, or stay after all."""
        draining = self._state.draining
        self._problem = ""
        with self._lock:
            if message.cancel:
                was = draining.state
                draining.cancel()
                self._line = None
                if was is not DrainState.NONE:
                    log.info("drain cancelled: the node takes blocks again", was=was.value)
            else:
                draining.begin(message.command, message.budget_ms / 1e3, self._clock())
                self._line, self._offers = line, self._offering(message.command)
                log.info("draining", budget_seconds=message.budget_ms / 1e3)
        self.changed.set()
        self.wake()

    def over(self, message: control.Drained) -> None:
        """All is elsewhere, or cannot be."""
        with self._lock:
            known = self._state.draining.over(message.command, message.problem)
        if known:
            log.info("drained: the node may be stopped", problem=message.problem)
            self.changed.set()

    # ------------------------------------------------------------------ the loop

    def turn(self) -> float | None:
        """Offer as much as the line takes. For one thread. Seconds to the next, while the node is not drained."""
        with self._lock:
            line, offers = self._line, self._offers
        if line is None:
            return REST_S
        while not line.over and line.waiting < AHEAD:
            try:
                offer = next(offers, None)
            except Exception as error:
                self._problem = f"drain: what is here could not be offered: {type(error).__name__}: {error}"
                raise
            if offer is None:
                return None  # blocks that are being written are not there yet, or all is said
            with self._lock:
                if self._line is not line or self._offers is not offers:
                    return None
                draining = self._state.draining
                draining.bytes_total = max(draining.bytes_total, offer.bytes_total)
                draining.bytes_offered += sum(
                    len(part.hashes) // part.spec.hash_bytes * part.spec.block_bytes for part in offer.holdings
                )
            line.tell(control.NodeMessage(offer=offer))
        return None

    def _offering(self, command: int) -> Iterator[control.Offer | None]:
        """All offers of a drain; None while it has to wait. Takes the lock itself, a moment at a time."""
        dram, coming = self._look(self._state.inventory)
        ssd = self._below(dram) if self._state.ssd is not None else []
        below = {(_key(block.shelf), block.hash) for _, blocks in ssd for block in blocks} if coming else set()
        coming = [block for block in coming if (_key(block.shelf), block.hash) not in below]  # others are read from SSD
        total = sum(len(blocks) * blocks[0].shelf.entry.block_bytes for _, blocks in (*dram, *ssd) if blocks)
        total += sum(block.shelf.entry.block_bytes for block in coming)
        for tier, ordered in ((Tier.DRAM, dram), (Tier.SSD, ssd)):
            yield from _offers(command, tier, in_turns(ordered), total)
        while any(block.state == IN_FLIGHT for block in coming):
            yield None
        last = control.Offer(command=command, last=True, bytes_total=total)
        last.holdings.extend(_holding(Tier.DRAM, [block]) for block in coming if _stands(block))
        yield last

    def _look(self, inventory: Inventory) -> tuple[list[Ordered], list[Block]]:
        """(shelves in order of worth, blocks that are being written). What a block says may be a moment old."""
        now = self._clock()
        with self._lock:
            shelves = list(inventory.shelves.values())
        ordered: list[Ordered] = []
        coming: list[Block] = []
        for shelf in shelves:
            with self._lock:
                blocks = list(shelf.blocks.values())
            coming.extend(block for block in blocks if block.state == IN_FLIGHT)
            visible = [block for block in blocks if _stands(block)]
            ordered.append(by_worth(visible, lambda stamps: inventory.ages.idle_all_s(stamps, now)))
        return ordered, coming

    def _below(self, dram: Sequence[Ordered]) -> list[Ordered]:
        """What is on SSD only."""
        assert self._state.ssd is not None
        above: dict[tuple[int, str], set[bytes]] = {}
        for _, blocks in dram:
            if blocks:
                above[_key(blocks[0].shelf)] = {block.hash for block in blocks}
        only: list[Ordered] = []
        for worth, blocks in self._look(self._state.ssd)[0]:
            here = above.get(_key(blocks[0].shelf), set()) if blocks else set()
            kept = [row for row, block in enumerate(blocks) if block.hash not in here]
            only.append(([worth[row] for row in kept], [blocks[row] for row in kept]))
        return only


def _key(shelf: Shelf) -> tuple[int, str]:
    return shelf.entry.handle, shelf.salt


def _stands(block: Block) -> bool:
    return block.state == VISIBLE and not block.shelf.retired


def _offers(command: int, tier: Tier, runs: Iterator[list[Block]], total: int) -> Iterator[control.Offer]:
    offer = control.Offer(command=command, bytes_total=total)
    hashes = 0
    for run in runs:
        start = 0
        while start < len(run):
            part = run[start : start + OFFER_HASHES - hashes]
            offer.holdings.append(_holding(tier, part))
            start += len(part)
            hashes += len(part)
            if hashes >= OFFER_HASHES:
                yield offer
                offer, hashes = control.Offer(command=command, bytes_total=total), 0
    if hashes:
        yield offer


def _holding(tier: Tier, run: Sequence[Block]) -> control.Holding:
    shelf = run[0].shelf
    return control.Holding(
        spec=shelf.entry.namespace.to_spec(),
        salt=shelf.salt,
        tier=int(tier),
        hashes=b"".join(block.hash for block in run),
        epoch=shelf.epoch,
    )
