"""Copies of policies on the nodes: what a leader takes back from them when the state store lost it with its leader.

Masters read every now and then what the leader saves. Should the leader and the store be gone before they have, or any
time later while the store was out of reach, the nodes still have it: each keeps the durable rows of tenants' policies,
of numbers of replicas and of drains, with the number of the last order in them, and shows them when it attaches.
Numbers grow from leader to leader, and a store knows the greatest that it has: what a node has of a later one is newer.
Only a leader whose store has lost something looks at that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kvstrata.master import messages as m
from kvstrata.master.membership import Membership
from kvstrata.master.replication.replication import Replication
from kvstrata.master.stores.redis_rows import policy_of, row_of
from kvstrata.master.tenants.quotas import Quotas
from kvstrata.master.tenants.tenancy import by_tier, check_amounts
from kvstrata.proto.keys import check_salt

#: More than this is not given to nodes: it would not fit into the message with which they attach.
COPY_BYTES_MAX: Final = 4 << 20
_DRAINING: Final = "draining"

#: A row's kind and name.
Key = tuple[str, str]


class PolicyCopies:
    """What this leader has of policies as rows, what of it changed, and what it ordered itself.

    ``as_of`` is the number of the last order that is in them; 0 before there was one.
    """

    def __init__(self) -> None:
        self.as_of = 0
        self._doubtful = False  #: there may have been later orders
        self._known = 0  #: what nodes have of later orders than this is newer, but for what was ordered here
        self._rows: dict[Key, str] = {}
        self._own: set[Key] = set()
        self._changed: dict[Key, str] = {}
        self._adopting = False

    def begin(self, writes: Iterable[m.Save], as_of: int, *, doubtful: bool) -> None:
        """A master begins to lead by these, which are all that was ordered up to the number ``as_of``. ``doubtful``:
        there may have been more, as the store has lost something."""
        self.as_of = self._known = as_of
        self._doubtful = doubtful
        self._rows = {key: value for key, value in filter(None, map(_row, writes)) if value}
        self._own.clear()
        self._changed.clear()

    # ------------------------------------------------------------------ what nodes are to have

    def saved(self, write: m.Save) -> None:
        """A row is to be durable."""
        row = _row(write)
        if row is None or row[1] == self._rows.get(row[0], ""):
            return
        key, value = row
        if value:
            self._rows[key] = value
        else:
            del self._rows[key]
        self._changed[key] = value
        if not self._adopting:
            self._own.add(key)

    @property
    def changed(self) -> bool:
        """Rows have changed that no node has heard of."""
        return bool(self._changed)

    def news(self, number: int) -> m.PolicyCopy:
        """What has changed, as an order of this number."""
        self.as_of = max(self.as_of, number)
        rows = tuple((kind, name, value) for (kind, name), value in self._changed.items())
        self._changed.clear()
        return m.PolicyCopy(self.as_of, rows, whole=False)

    def whole(self) -> m.PolicyCopy | None:
        """All of it, for a node that attaches; None when that is too much."""
        if sum(len(name) + len(value) for (_, name), value in self._rows.items()) > COPY_BYTES_MAX:
            return None
        return m.PolicyCopy(self.as_of, tuple((kind, name, value) for (kind, name), value in self._rows.items()))

    # ------------------------------------------------------------------ what nodes have

    def _newer(self, copy: m.PolicyCopy) -> dict[Key, str]:
        """The rows in which a node's copy differs, and which it knows better; "": there is none any more."""
        if copy.as_of <= self._known:
            return {}
        theirs = {(kind, name): value for kind, name, value in copy.rows}
        keys = (theirs.keys() | self._rows.keys()) - self._own
        return {key: theirs.get(key, "") for key in sorted(keys) if theirs.get(key, "") != self._rows.get(key, "")}

    def adopt(
        self, copy: m.PolicyCopy, quotas: Quotas, replication: Replication, membership: Membership, now: float
    ) -> int:
        """Take from a node's copy what it knows better; how many rows that was.

        Raises :class:`ValueError` and :class:`KVError` for rows that make no sense, before any is taken.
        """
        if not self._doubtful:
            return 0
        news = self._newer(copy)
        writes = [_write(kind, name, value) for (kind, name), value in news.items()]
        self._adopting = True
        try:
            for write in writes:
                _carry_out(write, quotas, replication, membership, now)
        finally:
            self._adopting = False
        self._known = max(self._known, copy.as_of)
        self.as_of = max(self.as_of, copy.as_of)
        return len(writes)

    def check(self) -> None:
        """Assert that orders are numbered past what is known, and that no row is empty."""
        assert self.as_of >= self._known, (self.as_of, self._known)
        assert all(self._rows.values()) and not self._adopting
        assert all(self._rows.get(key, "") == value for key, value in self._changed.items())


def policy_writes(quotas: Quotas, replication: Replication, membership: Membership) -> list[m.Save]:
    """The writes of all that nodes keep a copy of."""
    writes: list[m.Save] = [m.SavePolicy(salt, policy) for salt, policy in quotas.policies.items()]
    writes += replication.rules.rows()
    writes += [node.saved() for node in membership.nodes if node.draining]
    if quotas.denies or quotas.fallback != m.TenantPolicy(""):
        writes.append(m.SaveFallback(quotas.fallback, quotas.denies))
    return writes


def _row(write: m.Save) -> tuple[Key, str] | None:
    """A write as a row of the copy; None for what nodes keep no copy of."""
    if isinstance(write, m.SaveNode):
        return (_DRAINING, write.node_id), "1" if write.draining and not write.removed else ""
    if not isinstance(write, (m.SavePolicy, m.SaveFallback, m.SaveReplicas)):
        return None
    if write == m.SaveFallback(m.TenantPolicy(""), deny=False):
        return ("fallback", "one"), ""
    row = row_of(write)
    assert row is not None
    kind, name, value = row
    return (kind, name.decode()), value.decode()


def _write(kind: str, name: str, value: str) -> m.Save:
    """The write that gave a row. Raises :class:`ValueError` and :class:`KVError` when there is none."""
    if kind == _DRAINING:
        return m.SaveNode(name, 0, 0, gone=False, draining=bool(value))
    write: m.Save
    if value:
        write = policy_of(kind, name.encode(), value.encode())
    elif kind == "policies":
        write = m.SavePolicy(name, None)
    elif kind == "fallback":
        write = m.SaveFallback(m.TenantPolicy(""), deny=False)
    elif kind == "replicas":
        group, salt = msgspec.json.decode(name, type=tuple[str, str | None])
        write = m.SaveReplicas(group, salt, 0)
    else:
        raise ValueError(f"a row of {kind!r} is no policy")
    if isinstance(write, (m.SavePolicy, m.SaveFallback)) and write.policy is not None:
        check_salt(write.policy.salt)
        for tier, limit, floor in by_tier(write.policy):
            check_amounts(tier.name, limit, floor)
    return write


def _carry_out(write: m.Save, quotas: Quotas, replication: Replication, membership: Membership, now: float) -> None:
    match write:
        case m.SavePolicy(salt, None):
            quotas.remove_policy(salt, now)
        case m.SavePolicy(_, m.TenantPolicy() as policy):
            quotas.set_policy(policy, now)
        case m.SaveFallback():
            quotas.set_fallback(write.policy, write.deny, now)
        case m.SaveReplicas():
            replication.rules.set(write.group, write.salt, write.count)
            replication.scan.again()
        case m.SaveNode():
            replication.leavers.learned(write.node_id, draining=write.draining)
