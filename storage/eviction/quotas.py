"""What each tenant may use of this node, and what it is guaranteed: shares of cluster-wide limits and floors.

The master gives shares; the node keeps them, also over a restart. Until any share has been loaded nothing is
known, and so nothing is limited. A share lapses when its master has been silent for its time to live: then
its tenant may replace its own blocks and no more, because the master may by now count on the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from kvstrata.proto.errors import ConfigError, InvalidArgument
from kvstrata.proto.keys import check_salt
from kvstrata.proto.status import Tier

FORMAT: Final = 1
_FIELDS: Final = ("dram_limit", "ssd_limit", "dram_floor", "ssd_floor")
_BYTES_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class NodeShare:
    """One tenant's part of this node, in bytes. A limit of None is no limit, of 0 denies; a floor is guaranteed."""

    salt: str
    dram_limit: int | None = None
    ssd_limit: int | None = None
    dram_floor: int = 0
    ssd_floor: int = 0

    def limit(self, tier: Tier) -> int | None:
        return self.ssd_limit if tier == Tier.SSD else self.dram_limit

    def floor(self, tier: Tier) -> int:
        return self.ssd_floor if tier == Tier.SSD else self.dram_floor


UNLIMITED: Final = NodeShare("")


class QuotaBook:
    """Shares by salt, for both tiers. Sans-IO, not thread-safe: its owner's lock covers it.

    ``revision`` is the master's number of what was applied last, ``version`` counts changes of any kind:
    who keeps something derived from the shares compares it.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.version = 0
        self.fallback = UNLIMITED
        self._shares: dict[str, NodeShare] = {}
        self._ttl_s = 0.0
        self._lapses_at = math.inf

    # ------------------------------------------------------------------ asking

    def limit(self, tier: Tier, salt: str, now: float) -> int | None:
        """Bytes the tenant may use of the tier by its share; None is no limit. See :meth:`lapsed` too."""
        return self._shares.get(salt, self.fallback).limit(tier)

    def floor(self, tier: Tier, salt: str) -> int:
        """Bytes that no other tenant takes from it. Salts without a share of their own have no floor."""
        share = self._shares.get(salt)
        return share.floor(tier) if share is not None else 0

    def floors(self, tier: Tier) -> dict[str, int]:
        """All floors of the tier by salt, as they are now; O(shares)."""
        return {salt: floor for salt, share in self._shares.items() if (floor := share.floor(tier))}

    def lapsed(self, now: float) -> bool:
        """True when the master has been silent for too long: limited tenants only replace what they have."""
        return now >= self._lapses_at

    def shares(self) -> list[NodeShare]:
        """Shares of salts that have one of their own."""
        return list(self._shares.values())

    # ------------------------------------------------------------------ the master speaks

    def apply(
        self,
        shares: Iterable[NodeShare],
        forgotten: Iterable[str],
        whole: bool,
        fallback: NodeShare | None,
        ttl_s: float,
        now: float,
        *,
        revision: int | None = None,
    ) -> None:
        """Take in what the master sent: ``whole`` replaces everything, else the named salts change.

        ``fallback`` None leaves it as it is, unless ``whole``: then nothing limits unknown salts. ``ttl_s``
        0: these shares never lapse.
        """
        if whole:
            self._shares.clear()
            self.fallback = UNLIMITED
        for salt in forgotten:
            self._shares.pop(salt, None)
        self._shares.update((share.salt, share) for share in shares)
        if fallback is not None:
            self.fallback = NodeShare("", fallback.dram_limit, fallback.ssd_limit)
        if revision is not None:
            self.revision = revision
        self.version += 1
        self._ttl_s = ttl_s
        self.renewed(now)

    def renewed(self, now: float) -> None:
        """The master was heard: shares stand for another time to live."""
        self._lapses_at = now + self._ttl_s if self._ttl_s > 0 else math.inf

    # ------------------------------------------------------------------ over a restart

    def to_json(self) -> dict[str, object]:
        """What outlives a restart: not how long ago the master was heard, since a new process counts afresh."""
        return {
            "format": FORMAT,
            "revision": self.revision,
            "ttl_s": self._ttl_s,
            "fallback": _written(self.fallback),
            "shares": {share.salt: _written(share) for share in self._shares.values()},
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, object], now: float | None = None) -> QuotaBook:
        """The book that :meth:`to_json` described. Raises :class:`ConfigError` when that is not what it is.

        Loaded shares hold until the master says otherwise; their time to live counts from the master's
        first word, or from ``now`` where one is given.
        """
        if saved.get("format") != FORMAT:
            raise ConfigError(f"saved shares are of format {saved.get('format')!r}, this version reads {FORMAT}")
        shares, fallback = saved.get("shares"), saved.get("fallback")
        ttl_s, revision = saved.get("ttl_s"), saved.get("revision")
        if not isinstance(shares, Mapping) or not isinstance(fallback, Mapping):
            raise ConfigError("saved shares: `shares` and `fallback` must be objects")
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 <= ttl_s < math.inf:
            raise ConfigError(f"saved shares: `ttl_s` is {ttl_s!r}, not a number of seconds")
        if isinstance(revision, bool) or not isinstance(revision, int) or not 0 <= revision <= _BYTES_MAX:
            raise ConfigError(f"saved shares: `revision` is {revision!r}, not a number")
        book = cls()
        book._shares = {str(salt): _read(str(salt), row) for salt, row in shares.items()}
        book.fallback = _read("", fallback)
        if book.fallback.dram_floor or book.fallback.ssd_floor:
            raise ConfigError("saved shares: the fallback has a floor, and floors are for known salts")
        book.revision = revision
        book.version = 1
        book._ttl_s = float(ttl_s)
        if now is not None:
            book.renewed(now)
        book.check()
        return book

    def check(self) -> None:
        """Assert that every share is one: whole bytes, none negative, no floor above its limit."""
        for salt, share in self._shares.items():
            assert share.salt == salt
            _assert_bytes(share)
        _assert_bytes(self.fallback)
        assert not self.fallback.dram_floor and not self.fallback.ssd_floor, "a floor for whoever comes"
        assert self._ttl_s >= 0


def share_problem(share: NodeShare) -> str:
    """Why a share cannot be; empty when it can."""
    for name in _FIELDS:
        amount = getattr(share, name)
        if amount is None and name.endswith("limit"):
            continue
        if isinstance(amount, bool) or not isinstance(amount, int) or not 0 <= amount <= _BYTES_MAX:
            return f"{name} of {share.salt!r} is {amount!r}, not a number of bytes"
    for tier in (Tier.DRAM, Tier.SSD):
        limit, floor = share.limit(tier), share.floor(tier)
        if limit is not None and floor > limit:
            return f"the {tier.name} floor of {share.salt!r}, {floor} bytes, is above its limit of {limit}"
    return ""


def _assert_bytes(share: NodeShare) -> None:
    problem = share_problem(share)
    assert not problem, problem


def _written(share: NodeShare) -> dict[str, int | None]:
    row = asdict(share)
    del row["salt"]
    return row


def _read(salt: str, row: object) -> NodeShare:
    if not isinstance(row, Mapping) or not set(row) <= set(_FIELDS):
        raise ConfigError(f"saved shares: the share of {salt!r} is {row!r}")
    try:
        check_salt(salt)
    except InvalidArgument as error:
        raise ConfigError(f"saved shares: {error}") from error
    share = NodeShare(salt, **row)
    problem = share_problem(share)
    if problem:
        raise ConfigError(f"saved shares: {problem}")
    return share
