"""What a user may say in ``kv_connector_extra_config``: known keys only, each with a default."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from kvstrata.engine_adapter.connector.access import PoolAccess
from kvstrata.engine_adapter.connector.config import LoadPolicy, PoolConfig
from kvstrata.proto.errors import InvalidArgument

MASTERS_VARIABLE: Final = "KVSTRATA_MASTER"
MASTERS_DEFAULT: Final = "127.0.0.1:7400"

Milliseconds = Annotated[int, msgspec.Meta(ge=1)]


class Settings(PoolAccess, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config``. All keys are optional.

    ``masters``: addresses of the pool's masters, comma-separated; else the variable ``KVSTRATA_MASTER``, else
    127.0.0.1:7400. ``transport``: auto, shm, rdma or tcp. ``verify``: whether loaded blocks are checked against their
    checksums.

    ``token_file``, ``tls_ca``, ``tls_cert``, ``tls_key``: what a secured pool wants to see, else the environment's;
    ``token``: the same in place, where everybody who sees the settings may have it.

    ``namespace``: replaces what is derived of the model's name and weights, for engines that are known to share KV;
    the rest of the fingerprint (types, layout, block size, hashes, shards) stays.

    ``kv_shards``: shards of heads that a block is cut into, over all ranks, so that engines of different
    tensor-parallel size share it; 0: one a rank.

    ``load_policy``: ``auto`` loads what is faster to load than to compute. ``load_deadline_ms``: a load ends by then,
    and what is not there is computed; also what a store may take. ``lookup_deadline_ms``: a lookup without an answer
    by then is a miss. ``save_decode_cache``: also store blocks that hold generated tokens.
    ``store_pending_blocks_max``: blocks held for stores under way; past it, blocks are not stored.
    ``reset_external``: a reset of the prefix cache that asks for the external one too ends what the pool has of this
    model, for all engines. ``fixed_weights``: the weights never change while this engine runs, so that such a reset,
    which vLLM also does to sleep and to pause, leaves the pool as it is. With neither, it is refused.
    """

    masters: str = ""
    transport: str = "auto"
    verify: Literal["always", "sample", "never"] = "sample"
    namespace: str = ""
    kv_shards: Annotated[int, msgspec.Meta(ge=0)] = 0
    load_policy: LoadPolicy = "auto"
    load_deadline_ms: Milliseconds = 5_000
    lookup_deadline_ms: Milliseconds = 200
    save_decode_cache: bool = True
    store_pending_blocks_max: Annotated[int, msgspec.Meta(ge=1)] = 8_192
    reset_external: bool = False
    fixed_weights: bool = False

    def pool_config(self, *, stores: bool, loads: bool) -> PoolConfig:
        """``stores`` and ``loads``: what vLLM's ``kv_role`` allows."""
        return PoolConfig(
            masters=self.masters,
            token=self.token,
            token_file=self.token_file,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            transport=self.transport,
            verify=self.verify,
            kv_shards=self.kv_shards,
            load_policy=self.load_policy if loads else "never",
            load_deadline_ms=self.load_deadline_ms,
            lookup_deadline_ms=self.lookup_deadline_ms,
            store=stores,
            store_decode=self.save_decode_cache,
            store_pending_blocks_max=self.store_pending_blocks_max,
        )


def read_settings(extra: Mapping[str, object]) -> Settings:
    """Raises :class:`InvalidArgument`, naming the key, for an unknown one and for a value of another type."""
    known = Settings.__struct_fields__
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InvalidArgument(f"kv_connector_extra_config has an unknown key {key!r}: {hint}")
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"kv_connector_extra_config: {error}") from error
    if settings.reset_external and settings.fixed_weights:
        raise InvalidArgument(
            "kv_connector_extra_config has reset_external and fixed_weights: say one, as weights change or do not"
        )
    if settings.masters:
        return settings
    masters = os.environ.get(MASTERS_VARIABLE, "") or MASTERS_DEFAULT
    return msgspec.structs.replace(settings, masters=masters)
