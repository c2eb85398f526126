"""Messages of the lookup socket: scheduler side (DEALER) to the worker side of rank 0 (ROUTER), over ZMQ IPC.

msgpack, one message a frame. An answer may come late or never; the scheduler side keeps the deadline.
"""

from __future__ import annotations

from typing import Final

import msgspec

LOOKUP_BYTES_MAX: Final = 1 << 24


class LookupAsk(msgspec.Struct, frozen=True, kw_only=True):
    """``hashes``: packed, one entry a KV cache group (empty for a group that is not asked about). ``request``: the
    engine's name of the request, under which the pool's master remembers the question. ``trace``: a traceparent that
    spans of the answer come under. ``groups``: not about blocks, but under which names the ranks store."""

    lookup_id: int
    cache_salt: str
    hashes: list[bytes]
    prefetch: bool = False  #: also make what is found ready to be loaded
    request: str = ""
    trace: str = ""
    groups: bool = False


class LookupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``present``: one byte a hash and group, 1 where the pool has it (on every shard). ``answered`` False: the
    pool could not be asked. ``not_yet``: its directory is being rebuilt, ask again. ``groups``: the namespace groups of
    what is pooled, where they were asked for."""

    lookup_id: int
    present: list[bytes]
    answered: bool = True
    not_yet: bool = False
    groups: list[str] = []
