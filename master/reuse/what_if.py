"""What each tenant's hit rate would be with another quota, live, from a sample of its lookups.

See :mod:`kvstrata.master.reuse.distances` for how. This keeps the tenants apart and bounded, and hears a lookup
once, however often a scheduler polls with it or its ranks ask the same.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata.master.directory.probing import Keys
from kvstrata.master.reuse.distances import Hashes, ReuseDistances

#: Tenants that are sampled; a new one replaces one that has been idle for ``IDLE_S``, or is not sampled.
SALTS_MAX: Final = 128
IDLE_S: Final = 300.0
HALF_LIFE_S: Final = 3600.0
#: A lookup with the same tail as one of the last few of its tenant, this soon after it, is that lookup again:
#: schedulers ask again within 20 ms, and the ranks of one engine ask side by side.
POLLS_KEPT: Final = 32
POLL_S: Final = 0.25
#: Quotas that a row tells of, as multiples of the one there is.
FACTORS: Final = (0.5, 1.0, 2.0, 4.0)


class Prediction(NamedTuple):
    """The hit rate, 0 to 1, that lookups would have with ``nbytes``, which is ``factor`` times the quota."""

    factor: float
    nbytes: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Asked:
    """Lookups of one tenant since it is sampled, each counted once, and the sampled references among them."""

    blocks_asked: int = 0
    blocks_hit: int = 0
    references: int = 0


@dataclass(slots=True)
class _Poll:
    group: int
    tail: int
    blocks: int
    at: float


@dataclass(slots=True)
class _Tenant:
    distances: ReuseDistances
    used_at: float
    asked: int = 0
    hit: int = 0
    polls: deque[_Poll] = field(default_factory=lambda: deque(maxlen=POLLS_KEPT))


class WhatIf:
    """At most ``salts_max`` tenants of some 0.4 MB. Not thread-safe. ``now`` is monotonic seconds."""

    def __init__(self, rng: random.Random, *, salts_max: int = SALTS_MAX, half_life_s: float = HALF_LIFE_S) -> None:
        self._salts_max = salts_max
        self._half_life_s = half_life_s
        # Secret, so that nobody can choose keys that are all sampled, or none.
        self._seeds = [rng.getrandbits(64) for _ in range(3)]
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self.turned_away = 0

    def __len__(self) -> int:
        return len(self._tenants)

    def asked(
        self, group: int, salt: str, keys: Keys, present: npt.NDArray[np.bool_], block_bytes: int, now: float
    ) -> None:
        """A lookup of a chain u64[n, 2], and which blocks the pool has. ``block_bytes``: of all shards together."""
        tenant = self._tenant(salt, now) if len(keys) else None
        if tenant is None or self._polled(tenant, group, keys, now):
            return
        tenant.asked += len(keys)
        tenant.hit += int(present.sum())
        tenant.distances.asked(self._mixed(group, keys), present, block_bytes, now, group)

    def stored(self, group: int, salt: str, keys: Keys, block_bytes: int, now: float) -> None:
        """Blocks of a chain, in order, for which a place was asked."""
        tenant = self._tenant(salt, now) if len(keys) else None
        if tenant is not None:
            tenant.distances.stored(self._mixed(group, keys), block_bytes, now, group)

    def predict(self, salt: str, sizes: list[int]) -> list[float]:
        """Hit rates, by block, of these many bytes of cache; empty for a tenant that has not asked."""
        tenant = self._tenants.get(salt)
        if tenant is None or not tenant.asked:
            return []
        return tenant.distances.predict(sizes)

    def predict_row(self, salt: str, nbytes: int) -> list[Prediction]:
        """Predictions for 0.5, 1, 2 and 4 times ``nbytes``: the tenant's quota or, without one, what it uses."""
        sizes = [int(factor * nbytes) for factor in FACTORS]
        rates = self.predict(salt, sizes)
        return [Prediction(*row) for row in zip(FACTORS, sizes, rates, strict=True)] if rates else []

    def asked_by(self, salt: str) -> Asked:
        """What the tenant has asked for; zeros when it is not sampled."""
        tenant = self._tenants.get(salt)
        if tenant is None:
            return Asked()
        return Asked(tenant.asked, tenant.hit, tenant.distances.references)

    def forget(self, salt: str | None, group: int | None = None) -> None:
        """The blocks of a tenant (None: of all) in a group (None: in all) are gone: dropped, or of older weights.

        A tenant whose blocks are gone altogether starts anew. Of a group, the blocks are forgotten, and not how often
        such were used again."""
        for name in list(self._tenants) if salt is None else [salt]:
            if group is None:
                self._tenants.pop(name, None)
            elif name in self._tenants:
                self._tenants[name].distances.forget(group)

    # ------------------------------------------------------------------ inside

    def _tenant(self, salt: str, now: float) -> _Tenant | None:
        tenant = self._tenants.get(salt)
        if tenant is None:
            if len(self._tenants) >= self._salts_max:
                idlest = next(iter(self._tenants))
                if now - self._tenants[idlest].used_at < IDLE_S:
                    self.turned_away += 1
                    return None
                del self._tenants[idlest]
            tenant = self._tenants[salt] = _Tenant(ReuseDistances(now, half_life_s=self._half_life_s), now)
        else:
            self._tenants.move_to_end(salt)
        tenant.used_at = now
        return tenant

    def _polled(self, tenant: _Tenant, group: int, keys: Keys, now: float) -> bool:
        """True when this lookup was heard before; the polling may go on for as long as it likes."""
        tail = int(keys[-1, 0])
        for poll in tenant.polls:
            if poll.tail == tail and poll.group == group and poll.blocks == len(keys) and now - poll.at < POLL_S:
                poll.at = now
                return True
        tenant.polls.append(_Poll(group, tail, len(keys), now))
        return False

    def _mixed(self, group: int, keys: Keys) -> Hashes:
        """u64[n], even however the keys were made: multiply and fold, twice (after splitmix64)."""
        first, second, third = self._seeds
        start = np.uint64((first ^ (group * 0x9E3779B97F4A7C15)) & ((1 << 64) - 1))
        mixed = (keys[:, 0] ^ start) * np.uint64(second | 1)
        mixed ^= mixed >> np.uint64(32)
        mixed ^= keys[:, 1]
        mixed *= np.uint64(third | 1)
        mixed ^= mixed >> np.uint64(29)
        return mixed * np.uint64(0xBF58476D1CE4E5B9)

    def check(self) -> None:
        """Assert the bounds and every tenant's samples."""
        assert len(self._tenants) <= self._salts_max
        used = [tenant.used_at for tenant in self._tenants.values()]
        assert used == sorted(used), "the least recently used is not the first"
        for tenant in self._tenants.values():
            assert 0 <= tenant.hit <= tenant.asked and len(tenant.polls) <= POLLS_KEPT
            tenant.distances.check()
