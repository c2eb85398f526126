"""Blocks of fresh names to a node and back, by one transport."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvstrata.cli.doctor.reach import CALL_S
from kvstrata.cli.doctor.rows import Row, Verdict
from kvstrata.proto.errors import KVError
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Endpoint, Fetch, Peer, Push, Transport
from kvstrata.transfer.regions import Region

TRIES: Final = 3
#: What the round trip stores, under names that nobody else has.
PROBE: Final = Namespace("kvstrata/doctor", 4096, 16)
SALT: Final = "kvstrata-doctor"
PROBE_BLOCKS: Final = 4

_LOADED, _STORED = int(BlockStatus.LOADED), int(BlockStatus.STORED)


def tried(transport: Transport, endpoint: Endpoint) -> Row:
    """A busy machine may be silent for a moment, and be well."""
    what = f"{endpoint.node_id}: round trip by {transport.name}"
    for _ in range(TRIES - 1):
        told = _there_and_back(what, transport.connect(endpoint))
        if told.verdict is not Verdict.PROBLEM:
            return told
    return _there_and_back(what, transport.connect(endpoint))


def _there_and_back(what: str, peer: Peer) -> Row:
    """Store blocks of fresh names, load them, compare every byte. They leave by themselves, as the coldest."""
    rng = np.random.default_rng()
    hashes = rng.bytes(PROBE_BLOCKS * PROBE.hash_bytes)
    source = Region(np.frombuffer(rng.bytes(PROBE_BLOCKS * PROBE.block_bytes), np.uint8).copy(), None)
    target = Region(np.zeros(source.nbytes, np.uint8), None)
    began = time.monotonic()
    until = began + CALL_S
    try:
        stored = peer.push(Push(PROBE, SALT, hashes, source.rows(PROBE), until)).status
        if not (stored == _STORED).all():
            return _not_stored(what, stored.tolist())
        loaded = peer.fetch(Fetch(PROBE, SALT, hashes, target.rows(PROBE), until, "always")).status
    except KVError as error:
        return Row("nodes", what, Verdict.PROBLEM, str(error), "see the node's log")
    finally:
        peer.close()
    took_ms = (time.monotonic() - began) * 1e3
    if not (loaded == _LOADED).all():
        return Row("nodes", what, Verdict.PROBLEM, f"stored, and not loaded: {_names(loaded.tolist())}", "see its log")
    if not (source.bytes == target.bytes).all():
        advice = "take the node out of service, and report this as a bug of kvstrata"
        return Row("nodes", what, Verdict.PROBLEM, "other bytes came back than were stored", advice)
    return Row("nodes", what, Verdict.OK, f"{PROBE_BLOCKS} blocks stored, loaded and compared in {took_ms:.1f} ms")


def _not_stored(what: str, statuses: list[int]) -> Row:
    quota = int(BlockStatus.QUOTA)
    if set(statuses) == {quota}:
        found = f"tenant {SALT} may store nothing"
        return Row("nodes", what, Verdict.NOT_APPLICABLE, found, f"kvstrata tenant set {SALT} --dram 1MiB, to try it")
    return Row("nodes", what, Verdict.PROBLEM, f"not stored: {_names(statuses)}", "see the node's log")


def _names(statuses: Iterable[int]) -> str:
    return ", ".join(sorted({BlockStatus(status).name.lower() for status in statuses}))
