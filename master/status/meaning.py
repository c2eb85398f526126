"""What each reason of a miss means to an operator, and what to do about it."""

from __future__ import annotations

from typing import Final

from kvstrata.master.content.misses import COUNTED, MissReason

#: By reason: what it means, and what to do when it is many.
MEANING: Final[dict[MissReason, tuple[str, str]]] = {
    MissReason.NEVER_STORED: ("never stored", "new prompts; nothing to do"),
    MissReason.EVICTED_ROOM: ("evicted, node full", "add memory or SSD, or nodes"),
    MissReason.EVICTED_QUOTA: ("evicted, tenant at its limit", "raise the tenant's limit"),
    MissReason.LOWERED: ("evicted, limit lowered", "a tenant's limit or share went down"),
    MissReason.DEVICE: ("its device failed", "see devices of nodes"),
    MissReason.CORRUPT: ("bytes did not match", "see kvstrata node check --scrub"),
    MissReason.REMOVED: ("removed by a client", "nothing to do"),
    MissReason.DROPPED: ("dropped by an operator", "nothing to do"),
    MissReason.EPOCH: ("of earlier weights", "passes as blocks are stored anew"),
    MissReason.HINTED: ("let go by its owner", "nothing to do"),
    MissReason.ORPHANED: ("its prefix had left", "add memory or SSD, or raise limits"),
    MissReason.EVICTED: ("left, reason not told", "a node of an earlier version: upgrade it"),
    MissReason.NODE_LOST: ("its node was lost", "bring the node back, or ask for replicas"),
    MissReason.SURPLUS: ("its other replicas were lost", "bring nodes back"),
    MissReason.IN_FLIGHT: ("being stored right now", "nothing to do"),
    MissReason.NOT_YET: ("a node is not back yet", "passes when all nodes have attached"),
    MissReason.UNROUTABLE: ("its node does not answer", "see nodes that are suspected"),
    MissReason.SHARD_MISSING: ("another rank's shard is missing", "all ranks must store; see kvstrata why"),
    MissReason.LOAD_FAILED: ("a load failed there", "see the node's health and kvstrata why"),
}
assert set(MEANING) == set(COUNTED)


def meanings() -> dict[str, dict[str, str]]:
    """By label, for the page."""
    return {reason.label: {"means": means, "do": do} for reason, (means, do) in MEANING.items()}
