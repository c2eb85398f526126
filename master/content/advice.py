"""What the reasons of a miss mean to an operator, and what can be done about each."""

from __future__ import annotations

from typing import Final

from kvstrata.master.content.misses import MissReason
from kvstrata.proto.status import BlockStatus

TEXTS: Final[dict[MissReason, str]] = {
    MissReason.NEVER_STORED: "nothing is remembered of it: it was never stored here, or so long ago that it is "
    "forgotten. If it should have been: do writer and reader use the same engine settings, tenant and tokens?",
    MissReason.EVICTED_ROOM: "its node was full, and it was its turn. More memory or SSD, or a floor for this "
    "tenant (`kvstrata tenant set --dram-floor`), keeps such blocks.",
    MissReason.EVICTED_QUOTA: "its tenant's share was full, and newer blocks of the tenant took its place. A higher "
    "limit (`kvstrata tenant set --dram`) keeps such blocks; `kvstrata tenant get` predicts by how much.",
    MissReason.LOWERED: "its tenant's limit, or that node's part of it, was lowered, and usage was brought under it.",
    MissReason.DEVICE: "the device that it was on failed. `kvstrata health` names it: replace it.",
    MissReason.CORRUPT: "its bytes did not match their checksum, and it was discarded. More of these from one device "
    "mean that the device, or the memory of that host, goes bad.",
    MissReason.REMOVED: "a client removed it.",
    MissReason.DROPPED: "its tenant or namespace was dropped by an operator.",
    MissReason.EPOCH: "its weights are of the past: the namespace's weight epoch was bumped after it was stored, or "
    "the asker's handle is of an earlier epoch (then the engine must open the namespace again).",
    MissReason.HINTED: "its owner had said that it may leave first (a drop hint), and room was needed.",
    MissReason.SURPLUS: "it was let go of as a surplus replica, and the nodes that had the others have lost it since.",
    MissReason.ORPHANED: "blocks had left that it is of no use without: before it in its chain, or of a sister shard.",
    MissReason.EVICTED: "it left its node, which did not say why (a node of an earlier version, or word was lost).",
    MissReason.NODE_LOST: "the only node that had it went away. What was on its SSD returns when it does.",
    MissReason.IN_FLIGHT: "a writer was sent off with it, and it has not arrived yet.",
    MissReason.NOT_YET: "this master had just started, and a node that may have it had not come back. Ask again.",
    MissReason.UNROUTABLE: "the only node that has it may not be read from now: it is silent, slow, or joining. "
    "`kvstrata node list` says which.",
    MissReason.SHARD_MISSING: "some ranks' shards of it are there and others are not, so it is of no use.",
    MissReason.LOAD_FAILED: "a reader went to the node that was named and did not get it: it had left in that moment, "
    "its bytes did not match, or the node was not reached. The engine computed it.",
    MissReason.PARTIAL_BLOCK: "every whole block asked for was there. Tokens past the last whole block are not stored "
    "until their block is full, so they are computed.",
    MissReason.OTHER_SALT: "the same tokens are there, but for another tenant (cache salt). Tenants never share "
    "blocks: if these should, give them one salt.",
    MissReason.OTHER_FINGERPRINT: "the same hash is there in another namespace: model, revision, dtype, layout, block "
    "size or parallelism differ between its writer and this reader.",
    MissReason.REFUSED_AT_STORE: "a node would not take it when it was to be stored: the tenant was at its limit with "
    "everything in use, or the node was full. `kvstrata tenant get` shows what was refused.",
}

#: Of a load that failed: how, where the reader said so.
LOADS: Final[dict[BlockStatus, str]] = {
    BlockStatus.EVICTED: "it had left its node in that moment.",
    BlockStatus.CORRUPT: "its bytes did not match their checksum, and were not used. More of these from one device "
    "mean that the device, or the memory of that host, goes bad.",
    BlockStatus.READ_ERROR: "its node's SSD did not give it back. `kvstrata health` names the device.",
    BlockStatus.NO_ROOM: "it was on SSD, and its node had no memory free to read it into: everything there was being "
    "read, or the tenant's share of memory is smaller than what one load asks for.",
    BlockStatus.LEASE_LOST: "its copy took longer than its lease: the reader's host or the network is overloaded.",
    BlockStatus.NODE_LOST: "the reader could not reach the node.",
}
#: Of a store that failed: how, where the writer said so.
STORES: Final[dict[BlockStatus, str]] = {
    BlockStatus.QUOTA: "its tenant was at its limit on that node, and all that it had there was in use. "
    "`kvstrata tenant get` shows what was refused; a higher limit takes it.",
    BlockStatus.FULL: "the node was full, and nothing there could leave: all of it was in use, or within floors.",
    BlockStatus.REFUSED: "the node refused it: its log says why.",
    BlockStatus.ABORTED: "the write was given up half-way.",
    BlockStatus.LATE: "the write was not done by its deadline.",
    BlockStatus.NODE_LOST: "the writer could not reach the node.",
    BlockStatus.CORRUPT: "its bytes changed on their way, and were not taken.",
}


def text_of(reason: MissReason, status: BlockStatus | None) -> str:
    """What a reason means; with a client's ``status``, what it was that failed."""
    told = {MissReason.LOAD_FAILED: LOADS, MissReason.REFUSED_AT_STORE: STORES}.get(reason, {})
    if status is None or status not in told:
        return TEXTS[reason]
    return told[status] + (" The engine computed it." if reason is MissReason.LOAD_FAILED else "")
