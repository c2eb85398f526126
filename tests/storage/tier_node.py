"""A node of two tiers driven by hand: moves are begun and ended when the test says, bytes are real."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from kvstrata.proto.status import Tier
from kvstrata.storage.eviction.orders import LruOrder, Order
from kvstrata.storage.eviction.quotas import NodeShare
from kvstrata.storage.records import VISIBLE, Block
from kvstrata.storage.serving.published import Published
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.movers import header
from kvstrata.storage.tiers.moves import Move, Read, TierBooks, TierMoves
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.storage.tiers.write_budget import WriteBudget

from .conftest import Node, key
from .memory_store import MemoryStore


class TierNode(Node):
    """``moves`` over a :class:`NodeState` with an SSD in memory."""

    def __init__(
        self,
        slabs: int = 4,
        extents: int = 8,
        *,
        block_bytes: int = 4096,
        policy: SsdPolicy = SsdPolicy.DEMOTE,
        daily_writes: int | None = None,
        store: MemoryStore | None = None,
        order: Callable[[], Order] = LruOrder,
    ) -> None:
        super().__init__(slabs, block_bytes)
        self.store_ = store or MemoryStore(extents)
        published = Published(1, self.arena.bytes_total)
        self.state = NodeState(self.arena, ssd=self.store_, order=order, published=published)
        assert self.state.ssd is not None
        self.ssd = self.state.ssd
        self.handle = self.state.open_namespace(self.namespace)[0]
        state = self.state
        self.moves = TierMoves(
            TierBooks(state.inventory, state.leases, state.reservations),
            self.ssd,
            state.counts,
            policy=policy,
            budget=WriteBudget(daily_writes, self.now),
            limit=lambda salt, now: state.quotas.limit(Tier.DRAM, salt, now),
        )
        state.inventory.evicted = self.moves.evicted

    # ------------------------------------------------------------------ moves

    def demote(self, nbytes: int = 1 << 20, *, everything: bool = True) -> list[bytes]:
        """One batch from choice to flush; the hashes that are durable now."""
        move = self.moves.demotions(nbytes, self.now, everything=everything)
        if move is None:
            return []
        done = self.finish(move)
        return [block.hash for block, ok in zip(move.source, done, strict=True) if ok]

    def finish(self, move: Move, works: bool = True) -> list[bool]:
        """Move the bytes, either way, and end the move."""
        if move.up:
            statuses = self.store_.read(move.source, [block.bytes() for block in move.target])
            self.moves.promoted(move, statuses, self.now)
            done = [status == 3 for status in statuses]
        else:
            items = [(to, header(to, of), of.bytes()) for of, to in zip(move.source, move.target, strict=True)]
            flushed = self.store_.write(items) if works else [False] * len(items)
            done = self.moves.demoted(move, flushed, self.now)
        self.check()
        return done

    def begin_read(self, numbers: range | list[int], salt: str = "") -> Read | None:
        return self.moves.begin_read(self.handle, salt, [key(n) for n in numbers], self.now)

    def read(self, numbers: range | list[int], salt: str = "") -> list[Block]:
        """A reader from asking to leasing; the blocks that it may read. The caller's lease ends by deadline."""
        read = self.begin_read(numbers, salt)
        for move in read.moves if read is not None else []:
            self.finish(move)
        got = self.acquire(numbers, salt=salt)
        if read is not None:
            self.moves.end_read(read)
        self.check()
        return list(got.blocks)

    # ------------------------------------------------------------------ what is where

    def on_ssd(self, numbers: range | list[int], salt: str = "") -> list[int]:
        shelf = self.ssd.shelves.get((self.handle, salt))
        blocks = shelf.blocks if shelf is not None else {}
        return [n for n in numbers if (b := blocks.get(key(n))) is not None and b.state == VISIBLE]

    def make_room(self, numbers: range, salt: str = "") -> None:
        """Store others until these have left DRAM, as a busy node does."""
        others = itertools.count(1 << 20)
        while self.present(numbers, salt):
            self.now += 1.0
            self.state.expire(self.now)
            self.store([next(others)])

    def share(self, salt: str, dram: int | None = None, ssd: int | None = None) -> None:
        self.state.quotas.apply([NodeShare(salt, dram, ssd)], [], False, None, 0.0, self.now)

    def remove(self, numbers: range | list[int], salt: str = "") -> int:
        from .conftest import keys

        return self.state.remove(self.namespace, salt, keys(numbers), self.now)

    def check(self) -> None:
        self.state.check()
        self.moves.check()

    def assert_quiet(self) -> None:
        """Nothing is held by anybody."""
        self.now += 1000.0
        self.state.expire(self.now)
        self.moves.expire(self.now)
        self.check()
        assert not self.moves.moving and not self.moves.ahead_bytes
        assert not len(self.state.leases) and not len(self.state.reservations) and not self.state.sessions
        assert not len(self.moves.ssd.leases) and not len(self.moves.ssd.reservations)
        for inventory in self.state.tiers():
            assert all(block.state == VISIBLE and not block.leases for block in inventory.blocks())


MakeTiers = Callable[..., TierNode]
