"""What clients ask and report: where blocks are, where to store them, and what they did not get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master import messages as m
from kvstrata.master.content.chronicle import Chronicle
from kvstrata.master.content.lookups import (
    NO_REASONS,
    REQUEST_CHARACTERS_MAX,
    Asked,
    LookedUp,
    RequestLog,
    left,
    nothing_found,
    reasons_of,
)
from kvstrata.master.content.misses import MissReason
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.leadership.standing import Standing
from kvstrata.master.membership import Membership
from kvstrata.master.namespaces import Namespaces, Opened
from kvstrata.master.naming import Naming
from kvstrata.master.placement import Placed, Placement
from kvstrata.master.replication.replication import Replication
from kvstrata.master.takers import limited
from kvstrata.proto.errors import FingerprintMismatch
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus

#: A miss report hides a replica for at most this many deltas to come, whatever it claims.
DELTA_LAG_MAX: Final = 4096
#: What hides a replica: its node has it no more, or cannot read it (UNKNOWN: from a client that does not say).
_GONE: Final = frozenset({BlockStatus.UNKNOWN, BlockStatus.MISSING, BlockStatus.EVICTED, BlockStatus.READ_ERROR})


class Questions:
    """Part of the master's state. Answers at once; a tenant's first question where to store may lead to shares."""

    def __init__(
        self,
        directory: Directory,
        namespaces: Namespaces,
        naming: Naming,
        membership: Membership,
        placement: Placement,
        replication: Replication,
        chronicle: Chronicle,
        counts: Counter[str],
        standing: Standing,
    ) -> None:
        self.requests = RequestLog()
        self._directory = directory
        self._namespaces = namespaces
        self._naming = naming
        self._membership = membership
        self._placement = placement
        self._replication = replication
        self._chronicle = chronicle
        self._counts = counts
        self._standing = standing

    def lookup(
        self,
        namespace: Namespace,
        group: int,
        salt: str,
        keys: Keys,
        boot_id: str,
        now: float,
        epoch: int | None = None,
        avoid: Collection[m.Process] = (),
    ) -> LookedUp:
        """Where blocks are. Pins nothing, renews nothing.

        ``group`` is a group's number, ``epoch`` the weight epoch of the asker's handle: of another epoch than
        the current one nothing is found. Nodes in ``avoid`` are named only for blocks that no other has.
        """
        if self._past(group, epoch):
            return nothing_found(len(keys), MissReason.EPOCH)
        shunned = self._membership.slots_of(avoid)
        found = self._directory.lookup(group, namespace.shard, namespace.shard_count, salt, keys, boot_id, shunned)
        if found.hit_blocks == len(keys):
            return LookedUp(found, False, NO_REASONS)
        if self._membership.recovering(now):
            missing = len(keys) - int(np.count_nonzero(found.present))
            return LookedUp(found, True, np.full(missing, MissReason.NOT_YET, dtype=np.uint8))
        table = TableKey(group, namespace.shard, salt)
        reasons, missing_keys = reasons_of(self._directory, table, keys, found)
        gone, gone_keys = left(reasons, missing_keys)
        if gone.size:
            coming = self._coming(table, gone_keys, now)
            reasons[gone[coming]] = MissReason.IN_FLIGHT
        return LookedUp(found, False, reasons)

    def asked(self, opened: Opened, salt: str, hashes: bytes, now: float) -> None:
        """What a lookup was about: worth being copied first when a node is lost. O(1)."""
        table = TableKey(opened.group.number, opened.namespace.shard, salt)
        self._replication.asked(table, opened.namespace.hash_bytes, hashes, now)

    def note_lookup(self, request: str, opened: Opened, salt: str, keys: Keys, answer: LookedUp, now: float) -> None:
        """Remember a lookup by the name of the request that it was for."""
        name = request[:REQUEST_CHARACTERS_MAX]
        table = TableKey(opened.group.number, opened.namespace.shard, salt)
        hit = answer.found.hit_blocks
        reason = MissReason(int(answer.reasons[0])) if len(answer.reasons) else None
        self.requests.note(Asked(name, opened.group.name, table, keys, hit, reason, now))

    def place(
        self,
        namespace: Namespace,
        group: int,
        salt: str,
        keys: Keys,
        boot_id: str,
        now: float,
        epoch: int | None = None,
        avoid: Collection[m.Process] = (),
        writer: int = 0,
    ) -> Placed:
        """Where to store blocks: there already, in flight, or a node; one in ``avoid`` when there is no other.
        ``writer``: see :meth:`Placement.place`.

        Raises :class:`FingerprintMismatch` for a handle of another weight epoch than the current one.
        """
        if self._past(group, epoch):
            current = self._namespaces.named(namespace.group).epoch
            raise FingerprintMismatch(
                f"group {namespace.group!r} is at weight epoch {current}, and this handle is of another: "
                "open the namespace again"
            )
        shunned = self._membership.slots_of(avoid)
        present = self._directory.codes(TableKey(group, namespace.shard, salt), keys, boot_id, shunned)
        quotas, takers = self._membership.quotas, self._membership.takers
        if self._standing.leading:
            quotas.seen(salt, namespace.block_bytes, now)
        everybody = takers.candidates(now)
        candidates = limited(everybody, quotas.rooms_along(salt, takers.node_ids), shunned)
        scope = self._naming.scope(TableKey(group, namespace.shard, salt))
        placed = self._placement.place(keys, scope, present, candidates, boot_id, now, writer)
        for code, count in placed.new_blocks().items():
            node, nbytes = takers.node((code - 1) >> 2), count * namespace.block_bytes
            node.sent(nbytes)
            quotas.placed(salt, node.node_id, nbytes)
        sole = self._membership.sole() if self._standing.leading else None
        return placed if sole is None else Placed(placed.codes, placed.states, sole)

    # ------------------------------------------------------------------ what is on its way, and what did not come

    def in_flight(self, table: TableKey, key: Keys, now: float) -> bool:
        """Whether a writer was sent off with a block (u64[1, 2]) that has not arrived."""
        return bool(self._coming(table, key, now)[0])

    def _coming(self, table: TableKey, keys: Keys, now: float) -> npt.NDArray[np.bool_]:
        return self._placement.in_flight(keys, self._naming.scope(table), self._membership.routable, now)

    def miss(self, event: m.MissReport, now: float) -> None:
        """A client did not get, or could not store, what it was told of."""
        opened = self._namespaces.by_handle(event.handle)
        if event.epoch != opened.group.epoch:
            self._counts["miss_reports_of_other_epochs"] += 1
            return
        table, keys = self._naming.where(opened.namespace, event.salt, event.hashes)
        node = self._membership.nodes.get(event.node_id)
        if node is not None:
            self._note_miss(event, table, keys, now)
        gone = event.status in _GONE
        if gone or event.at_store:
            # A writer whose node refused says so too, and nobody need wait for what is not coming.
            self._placement.fulfilled(keys, self._naming.scope(table))
        if not gone or event.at_store or node is None or node.attachment is None:
            return
        attachment = node.attachment
        if attachment.slot is None or not self._membership.knows(event.node_id, event.incarnation):
            return
        if event.delta_seq > attachment.applied_seq:
            until = min(event.delta_seq, attachment.applied_seq + DELTA_LAG_MAX)
            self._counts["hidden_blocks"] += self._directory.hide(attachment.slot, table, keys, until)

    def _note_miss(self, event: m.MissReport, table: TableKey, keys: Keys, now: float) -> None:
        seen = event.status if event.status is not BlockStatus.UNKNOWN else None
        told = "" if seen is None else f": {seen.name.lower()}"
        if event.at_store or (seen is None and event.delta_seq == 0):
            what, why = f"not stored{told}", MissReason.REFUSED_AT_STORE
        else:
            what, why = f"not loaded{told} (delta {event.delta_seq})", MissReason.LOAD_FAILED
        self._chronicle.note(now, what, event.node_id, self._naming.about(table), keys, why, status=seen)

    def _past(self, group: int, epoch: int | None) -> bool:
        """Whether a handle is of another weight epoch than its group."""
        known = self._namespaces.by_number(group)
        return known is None or epoch not in (None, known.epoch)
