"""What a client's spans say: see :mod:`kvstrata.transfer.tracing`."""

from __future__ import annotations

from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.results import LoadResult, Lookup, StoreResult
from kvstrata.proto.keys import salt_tag
from kvstrata.transfer.tracing import Span, set_counts


def told_lookup(span: Span, namespace: PoolNamespace, salt: str, found: Lookup, request: str) -> None:
    """What was asked, and how much of it there is."""
    _told(span, namespace, salt, len(found.present), found.reasons)
    span.set("answered", found.answered)
    if found.hit_blocks is not None:
        span.set("hit.prefix", found.hit_blocks)
    if request:
        span.set("request", request)


def told_load(span: Span, namespace: PoolNamespace, salt: str, result: LoadResult) -> None:
    """What was asked, what came of it, and from which tier."""
    _told(span, namespace, salt, len(result.status), result.reasons)
    span.set("bytes", result.bytes_moved)
    set_counts(span, "hit", result.by_tier())


def told_store(span: Span, namespace: PoolNamespace, salt: str, result: StoreResult) -> None:
    """What was offered, and what came of it."""
    _told(span, namespace, salt, len(result.status), result.reasons)
    span.set("bytes", result.bytes_moved)


def _told(span: Span, namespace: PoolNamespace, salt: str, blocks: int, reasons: dict[str, int]) -> None:
    span.set("group", namespace.group)
    span.set("salt", salt_tag(salt))
    span.set("blocks", blocks)
    set_counts(span, "status", reasons)
