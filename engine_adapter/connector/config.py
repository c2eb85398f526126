"""What a connector is told of the shared pool. Travels to ranks as msgpack; an engine nests it in its own config."""

from __future__ import annotations

from typing import Literal

from kvstrata.engine_adapter.connector.access import PoolAccess

LoadPolicy = Literal["auto", "always", "never"]


class PoolConfig(PoolAccess, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared pool. ``masters`` empty: no pool at all."""

    masters: str = ""
    transport: str = "auto"
    verify: Literal["always", "sample", "never"] = "sample"
    load_policy: LoadPolicy = "auto"  #: auto: load what is faster to load than to compute
    layered_loads: LoadPolicy = "never"  #: beside the forward pass; auto: where what was measured says that it pays
    load_deadline_ms: int = 5_000  #: a load ends by then: what is not there is computed
    lookup_deadline_ms: int = 200  #: a lookup that has no answer by then is a miss
    kv_shards: int = 0  #: shards of heads that a block is cut into, over all ranks; 0: one a rank
    store: bool = True
    layered_stores: bool = False  #: beside the forward pass: layers go as they are written
    store_decode: bool = True  #: also blocks that hold generated tokens
    store_pending_blocks_max: int = 8_192  #: held for stores under way; past it, blocks are not offered (counted)
