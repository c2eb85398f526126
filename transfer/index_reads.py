"""Reads of a node's blocks by its shared index: found and copied without asking, and checked after the copy.

The node gives a slot another generation, and takes the block's row away, before it lets anybody write to the slot;
and it takes a scope's word away before it says that the scope is gone. So bytes are the block's when after the copy
the row and the generation are what they were before it, and the read is of a moment at which the block could be
found when the scope's word stands too. A node that has stopped, hangs or has died changes no words any more: it is
believed only while its beat is fresh, its end of the connection is held, and its breaker is closed.

Whatever fails any of it is asked for as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvstrata.proto.errors import KVError, Refused, Unauthenticated
from kvstrata.proto.keys import Namespace
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Fetch, Fetched, Mask
from kvstrata.transfer.checksums import Sampler, block_checksum
from kvstrata.transfer.copier import copy_few, copy_into
from kvstrata.transfer.grants import Places
from kvstrata.transfer.link import NodeLink
from kvstrata.transfer.regions import BlockView
from kvstrata.transfer.shared_index import Row, SharedIndex
from kvstrata.transfer.slabs import Slab, SlabMap
from kvstrata.transfer.tracing import TRACING

log = get_logger(__name__)

#: Tenants whose scopes are remembered.
SCOPES_MAX: Final = 4096
#: How often a client that shows tickets asks whether it may still read; and how long it is between two attempts.
ASK_S: Final = 1.0
#: A client that shows tickets reads by the index for so long without having asked: who asks may be held up.
UNASKED_S: Final = 5.0

_LOADED: Final = int(BlockStatus.LOADED)

_Tenant = tuple[Namespace, str, int]
Ask = Callable[[Fetch], Fetched]


class IndexReads:
    """Of one node. Thread-safe. ``tampered`` is called with blocks after their copy, before they are checked."""

    def __init__(
        self, link: NodeLink, slabs: SlabMap, sampler: Sampler, *, asks: bool, tampered: Callable[[BlockView], None]
    ) -> None:
        """``asks``: this client shows tickets, so that what it may read can change."""
        self._link = link
        self._slabs = slabs
        self._sampler = sampler
        self._asks = asks
        self._tampered = tampered
        self._index: SharedIndex | None = None
        self._refused = False
        self._closed = False
        self._wanted = False
        self._asked_at = 0.0
        self._scopes: dict[_Tenant, int] = {}

    # ------------------------------------------------------------------ what may be read

    def learn(self, request: Fetch, scope: int) -> None:
        """The answer to a request named the tenant's scope: its blocks can be found from here on."""
        if not scope or self._refused or self._closed:
            return
        tenant = (request.namespace, request.salt, request.epoch)
        if self._scopes.get(tenant) != scope:
            if len(self._scopes) >= SCOPES_MAX:
                self._scopes.clear()
            self._scopes[tenant] = scope
        index = self._index
        self._wanted = index is None or index.behind or not self._slabs.alive()

    def upkeep(self) -> None:
        """Map what is wanted; and ask again whether this client may read, where that can change."""
        wanted = not self._closed and (self._wanted or (self._asks and self._index is not None))
        if wanted and self._link.channel.breaker.closed and time.monotonic() >= self._asked_at + ASK_S:
            self._map()

    def _map(self) -> None:
        index, self._asked_at = self._index, time.monotonic()
        try:
            self._index = self._slabs.map_index(index)
            self._wanted = False
            if self._closed:  # meanwhile
                self._index = None
        except KVError as error:
            self._index = None
            self._refused = isinstance(error, Refused) and not isinstance(error, Unauthenticated)
            self._wanted = not self._refused
            say = log.info if self._refused else log.debug
            say("a node is asked for each block", node=self._link.endpoint.node_id, reason=str(error))

    def close(self) -> None:
        """Let go of the index: its memory goes with it, and does not wait for a garbage collection."""
        self._closed, self._index = True, None

    # ------------------------------------------------------------------ reading

    def fetch(self, request: Fetch, ask: Ask, *, few: bool) -> Fetched:
        """What can be found, and the rest by ``ask``. ``few``: blocks are few, in one piece each; nobody watches."""
        index = self._index
        scope = self._scopes.get((request.namespace, request.salt, request.epoch)) if index is not None else None
        now = time.monotonic()
        if scope is None or index is None or now > request.deadline or not index.in_force(scope):
            return ask(request)
        if self._asks and now > self._asked_at + UNASKED_S:
            return ask(request)
        try:
            if few:
                return self._few(index, scope, request) or ask(request)
            loaded = self._many(index, scope, request)
        except _Mismatch:
            return ask(replace(request, verify="always"))
        except KVError as error:  # a slab that cannot be mapped now
            log.debug("not read by the index", node=self._link.endpoint.node_id, reason=str(error))
            return ask(request)
        return self._with_rest(request, loaded, ask)

    def _stands(self, index: SharedIndex, scope: int) -> bool:
        return index.in_force(scope) and self._link.channel.breaker.closed and self._slabs.alive()

    def _few(self, index: SharedIndex, scope: int, request: Fetch) -> Fetched | None:
        """All of it, in plain numbers; None when any of it cannot be had."""
        blocks, packed, width = request.blocks, request.hashes, request.namespace.hash_bytes
        nbytes, base = blocks.block_bytes, blocks.region.address
        found: list[tuple[Row, Slab]] = []
        for position in range(len(packed) // width):
            row = index.find(packed[position * width : (position + 1) * width], scope)
            if row is None:
                return None
            slab = self._slabs.get(row.slab)
            slab.check(row.slot, row.offset, nbytes)
            found.append((row, slab))
        starts = zip(blocks.table[:, 0, 0].tolist(), found, strict=True)
        copy_few([(base + start, slab.address + row.offset) for start, (row, slab) in starts], nbytes)
        for position in self._sampler.choose(len(found), request.verify):
            if block_checksum(blocks, position) != found[position][0].checksum:
                raise _Mismatch
        for row, slab in found:
            if row.words[row.at] != row.digest or slab.generations[row.slot] != row.generation:
                return None
        if not self._stands(index, scope):
            return None
        self._link.touched(request.namespace, request.salt, packed, request.epoch)
        count = len(found)
        status = np.frombuffer(bytearray((_LOADED,)) * count, np.uint8)
        return Fetched(status, np.zeros(count, np.uint8), 0, count * nbytes, by_index=count)

    def _many(self, index: SharedIndex, scope: int, request: Fetch) -> Mask:
        """bool[n]: which blocks are in place."""
        loaded = np.zeros(len(request.blocks), np.bool_)
        width = request.namespace.hash_bytes
        with TRACING.span("kvstrata.find"):
            found = index.find_all(request.hashes, width, scope)
        count = len(found.positions)
        if not count:
            return loaded
        blocks = request.blocks if count == len(loaded) else request.blocks[found.positions]
        places = Places(found.rows)
        slabs = self._slabs.ensure({slab for slab, _ in places.by_slab()})
        with TRACING.span("kvstrata.copy"):
            copy_into(blocks, places.addresses(slabs, blocks.block_bytes))
        self._tampered(blocks)
        with TRACING.span("kvstrata.verify"):
            for position in self._sampler.choose(count, request.verify):
                if block_checksum(blocks, position) != int(found.rows["checksum"][position]):
                    raise _Mismatch
            stands = np.ones(count, np.bool_)
            stands[index.changed(found)] = False
            stands[places.changed(self._slabs.get)] = False
            if not self._stands(index, scope):
                return loaded
        loaded[found.positions[stands]] = True
        return loaded

    def _with_rest(self, request: Fetch, loaded: Mask, ask: Ask) -> Fetched:
        count = int(np.count_nonzero(loaded))
        if not count:
            return ask(request)
        width = request.namespace.hash_bytes
        if count == len(loaded):
            self._link.touched(request.namespace, request.salt, request.hashes, request.epoch)
            status = np.full(count, _LOADED, np.uint8)
            return Fetched(status, np.zeros(count, np.uint8), 0, count * request.namespace.block_bytes, by_index=count)
        hashes = np.frombuffer(request.hashes, np.dtype((np.void, width)))
        self._link.touched(request.namespace, request.salt, hashes[loaded].tobytes(), request.epoch)
        rest = np.flatnonzero(~loaded)
        asked = ask(replace(request, hashes=hashes[rest].tobytes(), blocks=request.blocks[rest]))
        status, tier = np.full(len(loaded), _LOADED, np.uint8), np.zeros(len(loaded), np.uint8)
        status[rest], tier[rest] = asked.status, asked.tier
        moved = asked.bytes_moved + count * request.namespace.block_bytes
        return replace(asked, status=status, tier=tier, bytes_moved=moved, by_index=count)


class _Mismatch(Exception):
    """A sampled block is not what its row says: all of the call is asked for, and verified."""
