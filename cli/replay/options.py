"""What a replay is asked to do. Checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvstrata.proto.errors import ConfigError
from kvstrata.storage.eviction.setting import EvictionOrder
from kvstrata.storage.slab import slot_size

ENGINES_MAX = 64
NODES_MAX = 32
TENANTS_MAX = 10_000
#: Blocks of one prompt move through a staging region; a block larger than this needs another tool.
REPLAY_BLOCK_BYTES_MAX = 64 << 20
#: The default pool holds this many blocks even when the private caches hold next to none.
POOL_BLOCKS_MIN = 64

Routing = Literal["round-robin", "sticky"]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Units are in the names; ``trace`` None is the seeded generator, ``masters`` None starts a pool of our own.

    ``pool_bytes`` None is 8 times what the engines hold privately; ``pool_ssd_bytes`` is an SSD tier beside it, and
    ``eviction`` its order, of a pool of our own. ``sessions`` keeps the
    first so many sessions of the trace, ``scale`` the first such fraction of those. Raises :class:`ConfigError`.
    """

    trace: Path | None = None
    engines: int = 4
    nodes: int = 2
    routing: Routing = "round-robin"
    private_tokens: int = 500_000
    pool_bytes: int | None = None
    pool_ssd_bytes: int = 0
    eviction: EvictionOrder = EvictionOrder.SEGMENTED
    block_tokens: int = 512
    bytes_per_token: int = 4
    sessions: int | None = None
    scale: float = 1.0
    think_cap_s: float = 60.0
    session_start_s: float = 30.0
    seed: int = 0
    tenants: int = 1
    masters: str | None = None
    json: bool = False

    def __post_init__(self) -> None:
        _within("engines", self.engines, 1, ENGINES_MAX)
        _within("nodes", self.nodes, 1, NODES_MAX)
        _within("private_tokens", self.private_tokens, 0, 1 << 40)
        _within("block_tokens", self.block_tokens, 1, 1 << 20)
        _within("bytes_per_token", self.bytes_per_token, 1, 1 << 20)
        _within("block bytes", self.block_bytes, 1, REPLAY_BLOCK_BYTES_MAX)
        _within("seed", self.seed, 0, (1 << 63) - 1)
        _within("tenants", self.tenants, 1, TENANTS_MAX)
        _within("think_cap_s", self.think_cap_s, 0, 1e9)
        _within("session_start_s", self.session_start_s, 0, 1e9)
        if self.sessions is not None:
            _within("sessions", self.sessions, 1, 1 << 31)
        if self.pool_bytes is not None:
            _within("pool_bytes", self.pool_bytes, slot_size(self.block_bytes), 1 << 50)
        if self.pool_ssd_bytes:
            _within("pool_ssd_bytes", self.pool_ssd_bytes, 1 << 20, 1 << 50)
            if self.masters is not None:
                raise ConfigError("pool_ssd_bytes is for a pool that the replay starts, not for a running one")
        if not 0 < self.scale <= 1:
            raise ConfigError(f"scale is {self.scale}: it must be above 0 and at most 1")
        if self.routing not in ("round-robin", "sticky"):
            raise ConfigError(f"routing is {self.routing!r}: choose round-robin or sticky")

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token

    @property
    def private_blocks(self) -> int:
        """Blocks in one engine's private cache."""
        return self.private_tokens // self.block_tokens

    @property
    def pool_blocks(self) -> int:
        """Blocks that the pool is asked to hold; a pool of our own is given at least that much memory."""
        if self.pool_bytes is not None:
            return self.pool_bytes // slot_size(self.block_bytes)
        return max(POOL_BLOCKS_MIN, 8 * self.engines * self.private_blocks)


def _within(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{what} is {value}: it must be between {low} and {high}")
