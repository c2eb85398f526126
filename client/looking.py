"""Lookups: the directory's answer as the caller's result, counted, and remembered for the load that follows."""

from __future__ import annotations

import time

import numpy as np

from kvstrata.client.counters import Counters
from kvstrata.client.directory import Directory
from kvstrata.client.locations import Located, RecentLocations
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.outcomes import WHOLE_CALL, unanswered
from kvstrata.client.peers import Peers
from kvstrata.client.results import NO_TIER, Lookup
from kvstrata.client.traced import told_lookup
from kvstrata.proto.errors import KVError
from kvstrata.transfer.tracing import TRACING


class Looker:
    """Thread-safe."""

    def __init__(self, directory: Directory, peers: Peers, recent: RecentLocations, counters: Counters) -> None:
        self._directory = directory
        self._peers = peers
        self._recent = recent
        self._counters = counters

    def look_up(
        self, namespace: PoolNamespace, salt: str, packed: bytes, started: float, deadline: float, request: str = ""
    ) -> Lookup:
        """Raises only refusals of the whole call; a directory that cannot be asked is a result."""
        if not TRACING.on:
            found = self.locate(namespace, salt, packed, started, deadline, request)[0]
            self._counters.timings.add("lookup", found.seconds, "", request)
            return found
        with TRACING.span("kvstrata.lookup") as span:
            found = self.locate(namespace, salt, packed, started, deadline, request)[0]
            if span.recording:
                told_lookup(span, namespace, salt, found, request)
            self._counters.timings.add("lookup", found.seconds, span.trace_id, request)
            return found

    def locate(
        self, namespace: PoolNamespace, salt: str, packed: bytes, started: float, deadline: float, request: str = ""
    ) -> tuple[Lookup, Located | None]:
        """The same, with where the blocks are; None when nothing was asked, or nobody answered."""
        count = len(packed) // namespace.hash_bytes
        if not count:
            return nothing_asked(), None
        located = None
        try:
            located = self._directory.lookup(namespace, salt, packed, deadline, request, self._peers.lost())
        except WHOLE_CALL:
            raise
        except KVError as error:
            found = _unanswered(count, unanswered(error).name.lower(), time.monotonic() - started)
        else:
            codes, nodes, replicas = located.codes, located.nodes, located.replicas
            self._recent.remember(namespace, salt, packed, codes, nodes, epoch=namespace.epoch, replicas=replicas)
            found = _answered(located, time.monotonic() - started)
        shown = found.tiers if found.reasons.get("present") == count else found.tiers[found.present]
        self._counters.add("lookup", found.reasons, tiers=shown.tobytes())
        return found, located


def nothing_asked(*, answered: bool = True) -> Lookup:
    return Lookup(0, np.zeros(0, bool), np.zeros(0, np.uint8), {}, answered=answered)


def _unanswered(count: int, reason: str, seconds: float) -> Lookup:
    nowhere = np.full(count, NO_TIER, np.uint8)
    return Lookup(0, np.zeros(count, bool), nowhere, {reason: count}, answered=False, seconds=seconds)


def _answered(located: Located, seconds: float) -> Lookup:
    count = len(located.codes)
    present = located.present.tobytes().count(1)
    reasons = {"present": present} if present else {}
    if present < count:
        reasons["not_yet" if located.not_yet else "missing"] = count - present
    hit = None if located.not_yet else located.hit_blocks
    return Lookup(hit, located.present, located.tiers(), reasons, located.shard_hit_blocks, True, seconds)
