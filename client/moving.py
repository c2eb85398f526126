"""Bytes of a call to and from one node: moved by its peer, counted, and in a span where somebody traces."""

from __future__ import annotations

from kvstrata.client.counters import Counters
from kvstrata.client.results import reasons_of
from kvstrata.transfer.base import Fetch, Fetched, Peer, Push, Pushed
from kvstrata.transfer.tracing import TRACING, Span, set_counts


def fetch(peer: Peer, request: Fetch, counters: Counters) -> Fetched:
    """``peer.fetch``."""
    if TRACING.on:
        with TRACING.span("kvstrata.fetch") as span:
            fetched = peer.fetch(request)
            if span.recording:
                _told(span, peer, reasons_of(fetched.status), fetched.bytes_moved)
    else:
        fetched = peer.fetch(request)
    counters.moved("load", peer.transport, fetched.bytes_moved)
    return fetched


def push(peer: Peer, request: Push, counters: Counters) -> Pushed:
    """``peer.push``."""
    if TRACING.on:
        with TRACING.span("kvstrata.push") as span:
            pushed = peer.push(request)
            if span.recording:
                _told(span, peer, reasons_of(pushed.status), pushed.bytes_moved)
    else:
        pushed = peer.push(request)
    counters.moved("store", peer.transport, pushed.bytes_moved)
    return pushed


def _told(span: Span, peer: Peer, reasons: dict[str, int], nbytes: int) -> None:
    span.set("node", peer.endpoint.node_id)
    span.set("transport", peer.transport)
    span.set("blocks", sum(reasons.values()))
    span.set("bytes", nbytes)
    set_counts(span, "status", reasons)
