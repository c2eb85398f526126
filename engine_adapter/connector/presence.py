"""What the pool has of the blocks a scheduler asks about, group by group."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvstrata.client.results import Lookup, prefix
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.lookup_messages import LookupAnswer, LookupAsk
from kvstrata.proto.keys import split_hashes
from kvstrata.transfer.tracing import TRACING


class Directory(Protocol):
    """What is asked; see :class:`kvstrata.engine_adapter.connector.pool.Pool`."""

    @property
    def layout(self) -> PoolLayout: ...
    def lookup(self, salt: str, group: int, hashes: bytes, request: str = "") -> Lookup | None: ...
    def prefetch(self, salt: str, group: int, hashes: bytes) -> None: ...


def answer_lookup(pool: Directory, ask: LookupAsk) -> LookupAnswer:
    """Ask for every group that has hashes; ``answered`` False when one of them could not be asked.

    A block is present when every shard of it is: the directory ANDs them. What the groups are called is known without
    the pool.
    """
    if ask.groups:
        names = [group.fingerprint for group in pool.layout.groups if group.poolable]
        return LookupAnswer(lookup_id=ask.lookup_id, present=[], groups=names)
    nothing = LookupAnswer(lookup_id=ask.lookup_id, present=[b""] * len(ask.hashes), answered=False)
    if not _fits(ask, pool.layout):
        return nothing
    with TRACING.under(ask.trace):
        return _asked(pool, ask) or nothing


def _asked(pool: Directory, ask: LookupAsk) -> LookupAnswer | None:
    """None when it could not be asked."""
    present: list[bytes] = []
    not_yet = False
    for group, hashes in enumerate(ask.hashes):
        if not hashes:
            present.append(b"")
            continue
        found = pool.lookup(ask.cache_salt, group, hashes, ask.request)
        if found is None:
            return None
        not_yet |= found.hit_blocks is None
        present.append(found.present.astype(np.uint8).tobytes())
    if ask.prefetch and not not_yet:
        _prefetch(pool, ask, present)
    return LookupAnswer(lookup_id=ask.lookup_id, present=present, not_yet=not_yet)


def _fits(ask: LookupAsk, layout: PoolLayout) -> bool:
    return len(ask.hashes) <= len(layout.groups) and all(len(part) % layout.hash_bytes == 0 for part in ask.hashes)


def _prefetch(pool: Directory, ask: LookupAsk, present: list[bytes]) -> None:
    """Only what a load could want: the leading run, or, where a window is enough, whatever is there."""
    width = pool.layout.hash_bytes
    for group, (hashes, mask) in enumerate(zip(ask.hashes, present, strict=True)):
        there = np.frombuffer(mask, np.bool_)
        if not pool.layout.groups[group].window_tokens:
            pool.prefetch(ask.cache_salt, group, hashes[: (prefix(there) if len(there) else 0) * width])
        elif there.any():
            rows = [row for row, here in zip(split_hashes(hashes, width), there.tolist(), strict=True) if here]
            pool.prefetch(ask.cache_salt, group, b"".join(rows))
