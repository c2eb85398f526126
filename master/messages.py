"""What happens to the master, and what it then wants done: events in, commands out. Plain data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus

# ---------------------------------------------------------------------- parts


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself when it attaches."""

    node_id: str
    incarnation: int
    channel: str = ""
    unix_path: str = ""
    http: str = ""
    host: str = ""
    boot_id: str = ""
    dram_bytes: int = 0
    ssd_bytes: int = 0
    software: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What one tenant may use of the whole cluster, in bytes. None: no limit."""

    salt: str
    dram_limit: int | None = None
    ssd_limit: int | None = None
    dram_floor: int = 0
    ssd_floor: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """One tenant's part of one node, in bytes. None: no limit."""

    salt: str
    dram_limit: int | None = None
    ssd_limit: int | None = None
    dram_floor: int = 0
    ssd_floor: int = 0


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant holds of one node, and the bytes that its share has refused it since the last report."""

    salt: str
    dram_bytes: int = 0
    ssd_bytes: int = 0
    dram_wanted: int = 0
    ssd_wanted: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """One SSD of a node."""

    path: str
    state: str
    nbytes: int = 0
    bytes_used: int = 0
    problem: str = ""


#: One life of a node: its id and incarnation.
Process = tuple[str, int]


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """A node's report on itself, each second. ``tenants``: those that changed since the report before."""

    dram_bytes_used: int = 0
    dram_bytes_free: int = 0
    blocks: int = 0
    ssd_bytes_used: int = 0
    clients: int = 0
    leases: int = 0
    reservations: int = 0
    loop_age_seconds: Mapping[str, float] = field(default_factory=dict)
    ssd_bytes_free: int = 0
    tenants: tuple[TenantUsage, ...] = ()
    shares_revision: int = 0
    devices: tuple[Device, ...] = ()
    bytes_out: int = 0  #: to readers, since the node's start
    bytes_in: int = 0
    bytes_copied: int = 0  #: from other nodes
    leader_epoch: int = 0  #: as of :class:`Attach`
    leader_id: str = ""


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks of one tenant that a node has in one tier. ``hashes`` is packed."""

    namespace: Namespace
    salt: str
    tier: int
    hashes: bytes
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that came to a tier of a node (``added``) or left it, ``reason`` says why (a ``Departure``)."""

    added: bool
    namespace: Namespace
    salt: str
    tier: int
    hashes: bytes
    epoch: int = 0
    reason: int = 0
    cause: str = ""


# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Attach:
    """``shares``, ``epochs`` (group -> weight epoch) and the leader's epoch are what the node has persisted."""

    facts: NodeFacts
    shares: tuple[Share, ...] = ()
    epochs: tuple[tuple[str, int], ...] = ()
    leader_epoch: int = 0  #: the greatest that the node has obeyed, and whose
    leader_id: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Part of the inventory after delta ``cut_seq``."""

    session: int
    cut_seq: int
    holdings: tuple[Holding, ...]
    first: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """Numbered without gaps from 1 within an incarnation."""

    session: int
    seq: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class CommandDone:
    session: int
    command: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class CopyDone:
    """What became of a copy: ``status`` u8[n] of :class:`BlockStatus`, empty when all of it failed (``error``)."""

    session: int
    command: int
    status: bytes
    nbytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks of a draining node, hottest first; ``command`` is the drain's."""

    session: int
    command: int
    holdings: tuple[Holding, ...]
    last: bool = False
    bytes_total: int = 0


@dataclass(frozen=True, slots=True)
class Leaving:
    """The node will stop, and wants to be drained within ``budget_s`` first."""

    session: int
    budget_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StatusReport:
    session: int
    usage: NodeUsage


@dataclass(frozen=True, slots=True)
class Detach:
    """The node says goodbye: it is stopping on purpose."""

    session: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The sync stream of a session ended, for whatever reason."""

    session: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    node_id: str
    incarnation: int
    progress_age_s: float = 0.0
    dying: bool = False


@dataclass(frozen=True, slots=True)
class MissReport:
    """A node refused what the directory had promised; its delta ``delta_seq`` will tell the truth.

    ``status``: what it ended in for the reader, or for the writer (``at_store``); UNKNOWN from an earlier version,
    whose writers are known by a ``delta_seq`` of 0.
    """

    handle: int
    salt: str
    hashes: bytes
    node_id: str
    incarnation: int
    delta_seq: int
    epoch: int = 0
    status: BlockStatus = BlockStatus.UNKNOWN
    at_store: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Sent a few times a second."""


Event = (
    Attach
    | SnapshotPart
    | DeltaBatch
    | CommandDone
    | CopyDone
    | Offer
    | Leaving
    | StatusReport
    | Detach
    | LinkLost
    | Heartbeat
    | MissReport
    | Tick
)

# ---------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class SendShares:
    """``whole`` replaces everything the node knew; else only the named salts change."""

    session: int
    revision: int
    whole: bool
    shares: tuple[Share, ...] = ()
    forgotten: tuple[str, ...] = ()
    fallback: Share | None = None
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class SendEpoch:
    """The node confirms ``command`` (unless 0) once no reader can be sent older weights' blocks."""

    session: int
    command: int
    group: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SendDrop:
    """Everything within a scope goes: group "" is every namespace, salt None every tenant."""

    session: int
    command: int
    group: str
    salt: str | None
    erase: bool = False


@dataclass(frozen=True, slots=True)
class SendAttached:
    """First answer on a stream. ``epochs`` lists (group, weight epoch) of groups past epoch 0.

    ``resume_seq``: deltas of the node's incarnation that are applied already; 0 asks for a snapshot.
    """

    session: int
    epochs: tuple[tuple[str, int], ...]
    shares: SendShares | None = None
    leading: bool = True
    leader_epoch: int = 0
    resume_seq: int = 0


@dataclass(frozen=True, slots=True)
class SendResync:
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendAck:
    session: int
    seq: int


@dataclass(frozen=True, slots=True)
class SendHint:
    """These blocks may leave first (:mod:`kvstrata.master.content.orphans`). Dropped when the node is slow to read."""

    session: int
    namespace: Namespace
    salt: str
    hashes: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class SendRemove:
    session: int
    command: int
    namespace: Namespace
    salt: str
    hashes: bytes


@dataclass(frozen=True, slots=True)
class SendCopy:
    """Take blocks from ``source``; ``tier`` is where they are to end up, ``reason`` a :class:`CopyReason`."""

    session: int
    command: int
    source: NodeFacts
    namespace: Namespace
    salt: str
    hashes: bytes
    epoch: int
    tier: int
    reason: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SendDrain:
    """Take no new blocks, and offer what is there; ``cancel``: stay after all. ``budget_s`` 0: no bound."""

    session: int
    command: int
    budget_s: float = 0.0
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class SendDrained:
    """The drain ``command`` is over: the node may stop. ``problem`` says why blocks were left behind."""

    session: int
    command: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SendSurplus:
    """Let these replicas go: others have the blocks. Not confirmed; dropped when the node is slow to read."""

    session: int
    namespace: Namespace
    salt: str
    hashes: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End the stream: whatever it says from now on is ignored."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class SaveNode:
    """Make a roster row durable. ``gone``: it left on purpose; nobody waits for it after a restart.

    ``draining``: it is to take no new blocks. ``removed`` deletes the row.
    """

    node_id: str
    dram_bytes: int
    ssd_bytes: int
    gone: bool
    draining: bool = False
    removed: bool = False


@dataclass(frozen=True, slots=True)
class SaveGroup:
    """Make a namespace group durable; ``namespace`` is any shard of it."""

    namespace: Namespace
    epoch: int


@dataclass(frozen=True, slots=True)
class SaveTombstone:
    """Make a removal durable until ``waiting`` is empty; an empty one deletes it."""

    command: int
    namespace: Namespace
    salt: str
    hashes: bytes
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Make a tenant's policy durable; ``policy`` None deletes it."""

    salt: str
    policy: TenantPolicy | None


@dataclass(frozen=True, slots=True)
class SaveFallback:
    """Make the policy of salts without one durable. ``deny``: they store nothing."""

    policy: TenantPolicy
    deny: bool


@dataclass(frozen=True, slots=True)
class SaveGrants:
    """Make what a node was granted durable, so that a new master does not grant it twice.

    ``fallback`` is what salts without a policy have there.
    """

    node_id: str
    shares: tuple[Share, ...]
    fallback: Share | None = None


@dataclass(frozen=True, slots=True)
class SaveScope:
    """Make a drop, or a bump (``epoch``), durable until ``waiting`` is empty; an empty one deletes it."""

    command: int
    group: str
    salt: str | None
    erase: bool
    epoch: int | None
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveReplicas:
    """Make a number of replicas durable: of a tenant (``salt``), a namespace group, or by default (neither).

    ``count`` 0 deletes it.
    """

    group: str
    salt: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """The blocks of a tenant (None: of all) under a group's number (None: under all) are no more, by an order."""

    group: int | None
    salt: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """A line for the operator's log."""

    event: str
    fields: Mapping[str, object]


Send = (
    SendAttached
    | SendResync
    | SendAck
    | SendHint
    | SendRemove
    | SendShares
    | SendEpoch
    | SendDrop
    | SendCopy
    | SendDrain
    | SendDrained
    | SendSurplus
)
Save = SaveNode | SaveGroup | SaveTombstone | SavePolicy | SaveFallback | SaveGrants | SaveScope | SaveReplicas
Command = Send | Save | CloseSession | Cleared | Report
