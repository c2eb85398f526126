"""What stands around the scheduler side in tests: a clock, the engine's block pool, requests, a lookup client."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout
from kvstrata.engine_adapter.connector.lookups import LookupEnd, LookupReason

HASH_BYTES = 16


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CountingHolder:
    """References on block ids; never below 0."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def hold(self, block_ids: Sequence[int]) -> None:
        self.counts.update(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.counts[block] > 0, f"block {block} released more often than held"
            self.counts[block] -= 1

    def held(self) -> dict[int, int]:
        return {block: count for block, count in self.counts.items() if count}


@dataclass
class FakeRequest:
    """``content`` names the tokens: requests of equal content share a prefix, and hashes."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int = 0
    content: str = "text"
    cache_salt: str = ""
    trace: str = ""
    hash_tokens: int = 4
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or self.num_tokens
        self.grow(0)

    def grow(self, tokens: int) -> None:
        self.num_tokens += tokens
        self.block_hashes = [
            hashlib.blake2b(f"{self.cache_salt}/{self.content}/{index}".encode(), digest_size=HASH_BYTES).digest()
            for index in range(self.num_tokens // self.hash_tokens)
        ]


@dataclass
class Asked:
    lookup_id: int
    cache_salt: str
    hashes: list[bytes]
    prefetch: bool
    request: str
    trace: str


class FakeLookups:
    """Remembers questions; :meth:`answer` makes the next poll bring an end."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.open: dict[int, Asked] = {}
        self.closed = False
        self._ends: list[LookupEnd] = []

    def ask(
        self, cache_salt: str, hashes: Sequence[bytes], *, prefetch: bool, request: str = "", trace: str = ""
    ) -> int:
        asked = Asked(len(self.asked) + 1, cache_salt, list(hashes), prefetch, request, trace)
        self.asked.append(asked)
        self.open[asked.lookup_id] = asked
        return asked.lookup_id

    def answer(self, have: set[bytes], reason: LookupReason = LookupReason.ANSWERED, lookup_id: int = 0) -> None:
        """End one lookup (the newest by default): what is in ``have`` is present."""
        asked = self.open.pop(lookup_id or max(self.open))
        answered = reason is LookupReason.ANSWERED
        present = tuple(
            bytes(answered and packed[at : at + HASH_BYTES] in have for at in range(0, len(packed), HASH_BYTES))
            for packed in asked.hashes
        )
        self._ends.append(LookupEnd(asked.lookup_id, present, reason))

    def end(self, *present: bytes) -> None:
        """Answer the newest lookup with these bytes."""
        lookup_id = max(self.open)
        del self.open[lookup_id]
        self._ends.append(LookupEnd(lookup_id, present, LookupReason.ANSWERED))

    def poll(self) -> list[LookupEnd]:
        ends, self._ends = self._ends, []
        return ends

    def fileno(self) -> int:
        return -1

    def stats(self) -> dict[str, float]:
        return {"lookups": float(len(self.asked))}

    def close(self) -> None:
        self.closed = True


def full_layout(ranks: int = 1, num_blocks: int = 1000) -> PoolLayout:
    """One group, blocks of 4 tokens, 64 bytes each."""
    return _layout(ranks, num_blocks, 4, GroupLayout(fingerprint="full", block_tokens=4, layers=1))


def window_layout(ranks: int = 1, num_blocks: int = 1000) -> PoolLayout:
    """A full group of blocks of 4 tokens, and one of 8 with a window of 9: hits are multiples of 8."""
    return _layout(
        ranks,
        num_blocks,
        8,
        GroupLayout(fingerprint="full", block_tokens=4, layers=1),
        GroupLayout(fingerprint="window", block_tokens=8, layers=1, window_tokens=9),
    )


def _layout(ranks: int, num_blocks: int, aligned: int, *groups: GroupLayout) -> PoolLayout:
    return PoolLayout(
        groups=groups,
        num_blocks=num_blocks,
        num_tensors=1,
        page_bytes=64,
        parts=2,
        hash_block_tokens=4,
        hash_bytes=HASH_BYTES,
        aligned_tokens=aligned,
        shard_count=ranks,
    )
