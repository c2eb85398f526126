"""What a read does at one node: copy blocks out, or lease them for a view."""

from __future__ import annotations

import numpy as np

from kvstrata.client import moving
from kvstrata.client.asked import Asked
from kvstrata.client.counters import Counters
from kvstrata.client.landed_ranges import LandedRanges
from kvstrata.client.outcomes import WHOLE_CALL
from kvstrata.client.plan import Where
from kvstrata.client.reading import Attempt
from kvstrata.client.results import NO_TIER
from kvstrata.client.view import View
from kvstrata.proto.errors import Refused
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Fetch, Fetched, Peer, Verify
from kvstrata.transfer.regions import BlockView


def copying(
    asked: Asked, blocks: BlockView, verify: Verify, counters: Counters, ranges: LandedRanges | None = None
) -> Attempt:
    """Block i of the call into row i of ``blocks``; ``ranges`` hears of byte ranges as they come."""
    namespace, salt = asked.namespace, asked.salt

    def fetch(peer: Peer, where: Where | None, hashes: bytes) -> Fetched:
        into = blocks if where is None else blocks[where]
        request = Fetch(namespace, salt, hashes, into, asked.attempt_deadline, verify, namespace.epoch)
        return moving.fetch(peer, request, counters) if ranges is None else ranges.fetch(peer, request, where, counters)

    return fetch


def viewing(asked: Asked, view: View, refusals: list[Refused]) -> Attempt:
    """Leases go to ``view``; nodes whose transport has no views add to ``refusals``."""

    def lease(peer: Peer, where: Where | None, hashes: bytes) -> Fetched:
        positions = np.arange(asked.count)[slice(None) if where is None else where].tolist()
        try:
            held = peer.view(asked.namespace, asked.salt, hashes, asked.attempt_deadline, asked.namespace.epoch)
        except WHOLE_CALL:
            raise
        except Refused as error:
            refusals.append(error)
            return _all(len(positions), BlockStatus.REFUSED, NO_TIER)
        view.add(held, positions)
        status = [BlockStatus.MISSING if block is None else BlockStatus.LOADED for block in held.arrays]
        return Fetched(np.array(status, np.uint8), np.zeros(len(status), np.uint8))

    return lease


def _all(count: int, status: BlockStatus, tier: int) -> Fetched:
    return Fetched(np.full(count, status, np.uint8), np.full(count, tier, np.uint8))
