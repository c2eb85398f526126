"""What happens to the master, and what it then wants done: events in, commands out. Plain data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstrata.proto.keys import Namespace

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
class NodeUsage:
    """A node's report on itself, each second."""

    dram_bytes_used: int = 0
    dram_bytes_free: int = 0
    blocks: int = 0
    ssd_bytes_used: int = 0
    clients: int = 0
    leases: int = 0
    reservations: int = 0
    loop_age_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks of one tenant that a node has in one tier. ``hashes`` is packed."""

    namespace: Namespace
    salt: str
    tier: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that came to a tier of a node (``added``) or left it."""

    added: bool
    namespace: Namespace
    salt: str
    tier: int
    hashes: bytes


# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Attach:
    facts: NodeFacts


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
    """A node refused what the directory had promised; its delta ``delta_seq`` will tell the truth."""

    handle: int
    salt: str
    hashes: bytes
    node_id: str
    incarnation: int
    delta_seq: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Sent a few times a second."""


Event = (
    Attach | SnapshotPart | DeltaBatch | CommandDone | StatusReport | Detach | LinkLost | Heartbeat | MissReport | Tick
)

# ---------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class SendAttached:
    """First answer on a stream. ``epochs`` lists (group, weight epoch) of groups past epoch 0."""

    session: int
    epochs: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SendResync:
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendAck:
    session: int
    seq: int


@dataclass(frozen=True, slots=True)
class SendRemove:
    session: int
    command: int
    namespace: Namespace
    salt: str
    hashes: bytes


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End the stream: whatever it says from now on is ignored."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class SaveNode:
    """Make a roster row durable. ``gone``: it left on purpose; nobody waits for it after a restart."""

    node_id: str
    dram_bytes: int
    ssd_bytes: int
    gone: bool


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
class Report:
    """A line for the operator's log."""

    event: str
    fields: Mapping[str, object]


Send = SendAttached | SendResync | SendAck | SendRemove
Save = SaveNode | SaveGroup | SaveTombstone
Command = Send | Save | CloseSession | Report
