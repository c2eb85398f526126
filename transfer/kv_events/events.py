"""KV events and their encoding, as vLLM 0.32 has them: a batch is a msgpack array, an event a map with its type.

::

    [ts, [event, ...], data_parallel_rank]
    event: {"type": "BlockStored" | "BlockRemoved" | "AllBlocksCleared", field: value, ...}

Older versions wrote an event as an array that begins with its type; both are read. Hashes are bytes, or, as vLLM
publishes them by default, the last 8 bytes of a hash as an integer: :func:`tail` makes them comparable.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvstrata.proto.errors import InvalidArgument

#: Media of blocks: an engine's own memory, a host's memory, anything slower.
GPU: Final = "GPU"
CPU: Final = "CPU"
STORAGE: Final = "STORAGE"
#: Bytes of a payload that are read.
PAYLOAD_BYTES_MAX: Final = 16 << 20
_TAIL: Final = (1 << 64) - 1

Hash = bytes | int


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockStored"):
    """Consecutive blocks of one chain. ``extra_keys``: one entry a block, of what else its hash was made of.

    Fields stand in vLLM's order. ``token_ids`` is empty where the publisher does not know them.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag="BlockRemoved"):
    """These can be found no more in ``medium``. Ignore those you do not know."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag="AllBlocksCleared"):
    """Forget everything said before."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_KINDS: Final[dict[str, type[msgspec.Struct]]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
#: What a decoder of vLLM's must find, and older publishers left out.
_ABSENT: Final = {"lora_id": None, "medium": None, "lora_name": None, "parent_block_hash": None}


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one moment. ``ts``: Unix seconds."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()


def encode(batch: Batch) -> bytes:
    return _encoder.encode(batch)


def decode(payload: bytes) -> Batch:
    """A batch of any vLLM version; raises :class:`InvalidArgument`. Events of unknown types are left out."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidArgument(f"a batch of events has {len(payload)} bytes: at most {PAYLOAD_BYTES_MAX} are read")
    try:
        raw = msgspec.msgpack.decode(payload)
        fields = raw if isinstance(raw, dict) else dict(zip(Batch.__struct_fields__, raw, strict=False))
        events = [event for each in fields["events"] if (event := _event(each)) is not None]
        return Batch(float(fields["ts"]), events, fields.get("data_parallel_rank"))
    except (msgspec.MsgspecError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InvalidArgument(f"not a batch of KV events: {error}") from error


def _event(raw: Any) -> Event | None:
    if isinstance(raw, dict):
        kind, given = _KINDS.get(raw["type"]), {name: value for name, value in raw.items() if name != "type"}
    else:
        kind = _KINDS.get(raw[0])
        given = dict(zip(kind.__struct_fields__, raw[1:], strict=False)) if kind is not None else {}
    if kind is None:
        return None
    read: Event = msgspec.convert({"type": kind.__name__, **_ABSENT, **given}, kind)  # type: ignore[assignment]
    return read


def tail(block_hash: Hash) -> int:
    """The last 8 bytes of a hash as an integer: what vLLM publishes in place of it."""
    return block_hash & _TAIL if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
