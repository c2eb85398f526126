"""What goes out when shares change: messages to nodes, each with a revision, and grants to the state store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvstrata.master import messages as m
from kvstrata.master.tenants.ledger import UNLIMITED
from kvstrata.master.tenants.tenancy import UNSENT, Member, Tenant, limit_or_none
from kvstrata.proto.status import Tier

#: Shares lapse on a node this long after the last word of its master ...
TTL_MS: Final = 30_000
#: ... so an idle link hears an empty word this often.
RENEW_S: Final = 8.0
#: (tenant, node) pairs that one flush writes out: the lock is held for some ten milliseconds.
ROWS_A_FLUSH: Final = 2000


class ShareMail:
    """Collects changes of ``tenants`` on ``nodes``, which are the owner's; :meth:`flush` sends and saves."""

    def __init__(
        self,
        emit: Callable[[m.Command], None],
        first_revision: int,
        tenants: Mapping[str | None, Tenant],
        nodes: Mapping[str, Member],
    ) -> None:
        self.saved_serial = 0
        self._emit = emit
        self._revision = first_revision
        self._tenants = tenants
        self._nodes = nodes
        self._outgoing: dict[str, set[str | None]] = {}
        self._forgetting: dict[str, set[str]] = {}
        self._saving: dict[str, None] = {}

    def next_revision(self) -> int:
        self._revision += 1
        return self._revision

    # ------------------------------------------------------------------ what there is to say

    def say(self, node_id: str, key: str | None) -> None:
        """Have the node told of this tenant's part; until it confirms, it may go by what it heard before."""
        self._outgoing.setdefault(node_id, set()).add(key)
        for ledger in self._tenants[key].ledgers.values():
            ledger.part(node_id).pending = UNSENT
        self._nodes[node_id].unconfirmed.add(key)

    def unsay(self, node_id: str) -> None:
        """Its link is gone, or new: what waits for it is void."""
        self._outgoing.pop(node_id, None)
        self._forgetting.pop(node_id, None)

    def forget(self, salt: str) -> None:
        """This tenant has no shares of its own any more, anywhere."""
        for node_id, member in self._nodes.items():
            member.unconfirmed.discard(salt)
            member.rising.discard(salt)
            self._outgoing.get(node_id, set()).discard(salt)
            if member.session is not None:
                self._forgetting.setdefault(node_id, set()).add(salt)
            member.stale(0.0)

    def save(self, node_id: str) -> None:
        """Have the node's grants saved, when it is its turn."""
        self._saving[node_id] = None

    def count_out(self, node_id: str) -> None:
        """The node is no longer one of ours."""
        self.unsay(node_id)
        self._saving.pop(node_id, None)
        self._emit(m.SaveGrants(node_id, ()))

    # ------------------------------------------------------------------ saying it

    def flush(self, now: float) -> None:
        """Grants to the store, changed shares to the nodes that are linked, a word to those that heard none."""
        if self._saving:
            self.saved_serial += 1
            for node_id in list(self._saving)[: max(1, ROWS_A_FLUSH // len(self._tenants))]:
                del self._saving[node_id]
                self._save(node_id)
        for node_id, member in self._nodes.items():
            keys = self._outgoing.pop(node_id, set())
            forgotten = self._forgetting.pop(node_id, set())
            if member.session is None or not (keys or forgotten or now - member.said_at >= RENEW_S):
                continue
            self._tell(node_id, member, keys, tuple(sorted(forgotten - {key for key in keys if key is not None})), now)

    def _tell(
        self, node_id: str, member: Member, keys: set[str | None], forgotten: tuple[str, ...], now: float
    ) -> None:
        assert member.session is not None
        if keys or forgotten:
            member.last_revision = self.next_revision()
        for key in keys:
            for ledger in self._tenants[key].ledgers.values():
                ledger.part(node_id).pending = member.last_revision
        member.said_at = now
        shares = tuple(self._tenants[key].share(node_id) for key in keys if key is not None)
        fallback = self._tenants[None].share(node_id) if None in keys else None
        self._emit(
            m.SendShares(member.session, member.last_revision, False, shares, forgotten, fallback, ttl_ms=TTL_MS)
        )

    def _save(self, node_id: str) -> None:
        member, shares, fallback = self._nodes[node_id], [], None
        for key, tenant in self._tenants.items():
            dram, ssd = tenant.ledgers[Tier.DRAM].parts.get(node_id), tenant.ledgers[Tier.SSD].parts.get(node_id)
            if dram is None or ssd is None or not (dram.peak or ssd.peak or dram.floor or ssd.floor or key is None):
                continue
            share = m.Share(key or "", limit_or_none(dram.peak), limit_or_none(ssd.peak), dram.floor, ssd.floor)
            if key is None:
                fallback = share
            elif dram.peak < UNLIMITED or ssd.peak < UNLIMITED or dram.floor or ssd.floor:
                shares.append(share)
        for key in member.rising:
            for ledger in self._tenants[key].ledgers.values():
                ledger.parts[node_id].rise_serial = self.saved_serial
        member.rising.clear()
        member.stale_since = None
        self._emit(m.SaveGrants(node_id, tuple(shares), fallback))
