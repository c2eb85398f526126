"""Same-host transport: the client copies out of the node's sealed slabs; the node pulls stores.

A load is one copy of what the node's shared index says is where; what is not there is one channel round trip
(acquire) and one copy, with no node CPU for the bytes. A store is one
round trip in which the node copies out of memory the client registered (a memfd it maps, or
``process_vm_readv``), while the client hashes the same bytes, and one to commit; small stores carry
their checksums and commit in the first. Memory the node can neither map nor read is staged.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, InvalidArgument, KVError, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import SLOT_ROW, BlockStatus, HintKind
from kvstrata.transfer.base import Endpoint, Fetch, Fetched, Mask, Named, Push, Pushed, StatusArray
from kvstrata.transfer.checksums import Sampler, block_checksum
from kvstrata.transfer.copier import copy_few, copy_into, copy_range
from kvstrata.transfer.grants import LEASE_MARGIN_S, Granted
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.index_reads import IndexReads
from kvstrata.transfer.link import NodeLink, settle, undecided
from kvstrata.transfer.pulling import pull
from kvstrata.transfer.ranges import all_written, cut, tell_whole
from kvstrata.transfer.regions import BlockView, Region
from kvstrata.transfer.slabs import SlabMap
from kvstrata.transfer.stage import Stage
from kvstrata.transfer.tracing import TRACING
from kvstrata.transfer.views import ShmLease

_LOADED = int(BlockStatus.LOADED)
_CORRUPT = int(BlockStatus.CORRUPT)
_LEASE_LOST = int(BlockStatus.LEASE_LOST)

#: Up to so many blocks of together so many bytes arrays cost more than they save.
FEW_BLOCKS: Final = 16
FEW_BYTES: Final = 1 << 20


class ShmTransport:
    """Reaches nodes of this boot whose unix socket is visible from here, and may be connected to by this user."""

    name = "shm"

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._boot_id = boot_id()
        self._peers: weakref.WeakSet[ShmPeer] = weakref.WeakSet()

    def reaches(self, endpoint: Endpoint) -> bool:
        here = bool(endpoint.unix_path) and endpoint.boot_id == self._boot_id
        return here and os.access(endpoint.unix_path, os.W_OK, effective_ids=True)

    def connect(self, endpoint: Endpoint) -> ShmPeer:
        peer = ShmPeer(endpoint, self._identity)
        self._peers.add(peer)
        return peer

    def register(self, region: Region) -> None:
        """Nothing now: each node is told of a region when a store first names it."""

    def unregister(self, region: Region) -> None:
        for peer in list(self._peers):
            peer.forget(region)

    def close(self) -> None:
        self._peers.clear()


class ShmPeer:
    """One node on this host."""

    transport = "shm"

    def __init__(self, endpoint: Endpoint, identity: Identity) -> None:
        self.endpoint = endpoint
        self.link = NodeLink(endpoint, [f"unix:{endpoint.unix_path}"], identity)
        self.slabs = SlabMap(endpoint.unix_path, identity, endpoint.incarnation)
        self.tamper: Callable[[BlockView, int], None] | None = None
        self._sampler = Sampler()
        self.index = IndexReads(
            self.link, self.slabs, self._sampler, asks=identity.tickets is not None, tampered=self._tampered
        )
        self._methods: dict[int, str] = {}
        self._stage = Stage()
        self._views: set[ShmLease] = set()

    # ------------------------------------------------------------------ reading

    def fetch(self, request: Fetch) -> Fetched:
        """By the node's index where that has the blocks; what it has not, and reads in ranges, by asking."""
        if request.parts:
            return self._ask(request)
        return self.index.fetch(request, self._ask, few=self._few(request))

    def _ask(self, request: Fetch) -> Fetched:
        count = len(request.blocks.table)
        status, tier, sequence = undecided(count), np.zeros(count, np.uint8), 0
        try:
            reply, sent = self.link.acquire(
                request.namespace, request.salt, request.hashes, request.deadline, request.epoch
            )
            if self._few(request) and _all_granted(reply, count):
                fetched = self._copy_few(request, reply, sent)
                self.index.learn(request, reply.scope)
                return fetched
            granted = Granted(reply, sent, count)
            status, sequence = granted.status, granted.delta_seq
            if granted.count:
                tier[granted.positions] = granted.tier
                self._copy_out(request, granted, status)
            self.index.learn(request, reply.scope)
        except KVError as error:
            settle(status, error)
        moved = int(np.count_nonzero(status == _LOADED)) * request.namespace.block_bytes
        return Fetched(status, tier, sequence, moved)

    def _few(self, request: Fetch) -> bool:
        """Whether arrays cost more here than they save: so little is copied as it is, and nobody watches."""
        count, pieces, _ = request.blocks.table.shape
        little = count == 1 or (count <= FEW_BLOCKS and count * request.blocks.block_bytes <= FEW_BYTES)
        watched = self.tamper is not None or request.parts or (TRACING.on and TRACING.trace_id())
        return pieces == 1 and little and not watched

    def _copy_few(self, request: Fetch, reply: pb.AcquireOk, sent: float) -> Fetched:
        """As :meth:`_copy_out` of all that was asked for, in one piece each, in plain numbers."""
        blocks, nbytes = request.blocks, request.blocks.block_bytes
        verdict, slots = bytearray(reply.status), list(SLOT_ROW.iter_unpack(reply.rows))
        try:
            pairs, words = [], []
            for start, (index, slot, offset, _, _) in zip(blocks.table[:, 0, 0].tolist(), slots, strict=True):
                slab = self.slabs.get(index)
                slab.check(slot, offset, nbytes)
                words.append(slab.generations)
                pairs.append((blocks.region.address + start, slab.address + offset))
            copy_few(pairs, nbytes)
            for position in self._sampler.choose(len(slots), request.verify):
                if block_checksum(blocks, position) != slots[position][4]:
                    verdict[position] = _CORRUPT
            late = time.monotonic() > sent + reply.lease_ms / 1e3 - LEASE_MARGIN_S
            for position, (_, slot, _, generation, _) in enumerate(slots):
                if late or words[position][slot] != generation:
                    verdict[position] = _LEASE_LOST
        finally:
            self.link.give_back(reply.lease)
        tier = np.frombuffer(bytearray(reply.tier), np.uint8)
        return Fetched(np.frombuffer(verdict, np.uint8), tier, reply.delta_seq, verdict.count(_LOADED) * nbytes)

    def _acquire(self, namespace: Namespace, salt: str, hashes: bytes, deadline: float, epoch: int) -> Granted:
        reply, sent = self.link.acquire(namespace, salt, hashes, deadline, epoch)
        return Granted(reply, sent, len(hashes) // namespace.hash_bytes)

    def _copy_out(self, request: Fetch, granted: Granted, status: StatusArray) -> None:
        """Copy and check what was granted. Raises :class:`KVError`; none of it counts as loaded then."""
        whole = granted.count == len(request.blocks)
        blocks = request.blocks if whole else request.blocks[granted.positions]
        status[granted.positions] = BlockStatus.UNKNOWN
        try:
            slabs = self.slabs.ensure(set(granted.slab.tolist()))
            ranges = cut(blocks, request.parts)
            if len(ranges) > 1:
                with TRACING.span("kvstrata.copy"):
                    self._copy_ranges(request, granted, ranges, granted.addresses(slabs, blocks.block_bytes))
            else:
                with TRACING.span("kvstrata.copy"):
                    copy_into(blocks, granted.addresses(slabs, blocks.block_bytes))
                self._tampered(blocks)
            with TRACING.span("kvstrata.verify"):
                self._check(request, granted, blocks, status)
            if len(ranges) == 1:
                tell_whole(request, status)
        finally:
            self.link.give_back(granted.lease)

    def _copy_ranges(
        self, request: Fetch, granted: Granted, ranges: list[BlockView], source: npt.NDArray[np.int64]
    ) -> None:
        """Range after range of all blocks; each is told of where slots are unchanged under a lease that stands."""
        stands = np.ones(granted.count, np.bool_)
        for part, blocks in enumerate(ranges):
            copy_range(blocks, source)
            source = source + blocks.block_bytes
            if not part:
                self._tampered(blocks)
            stands[self.changed(granted)] = False
            if time.monotonic() > granted.expires:
                stands[:] = False
            if request.landed is not None:
                told = np.zeros(len(request.blocks), np.bool_)
                told[granted.positions] = stands
                request.landed(part, told)

    def _tampered(self, blocks: BlockView) -> None:
        if self.tamper is not None:
            for index in range(len(blocks)):
                self.tamper(blocks, index)

    def _check(self, request: Fetch, granted: Granted, blocks: BlockView, status: StatusArray) -> None:
        """The bytes count only if the lease still stood, the slots are unchanged, and samples match."""
        verdict = np.full(granted.count, _LOADED, np.uint8)
        for index in self._sampler.choose(granted.count, request.verify):
            if block_checksum(blocks, index) != int(granted.checksum[index]):
                verdict[index] = BlockStatus.CORRUPT
        changed = self.changed(granted)
        if time.monotonic() > granted.expires:
            verdict[:] = BlockStatus.LEASE_LOST
        elif changed:
            verdict[changed] = BlockStatus.LEASE_LOST
        status[granted.positions] = verdict

    def changed(self, granted: Granted) -> list[int]:
        """See :meth:`Granted.changed`."""
        return granted.changed(self.slabs.get)

    def view(self, namespace: Namespace, salt: str, hashes: bytes, deadline: float, epoch: int = 0) -> ShmLease:
        """Lease blocks and hand out read-only arrays over them, without copying."""
        granted = self._acquire(namespace, salt, hashes, deadline, epoch)
        try:
            arrays = self._shown(granted, namespace.block_bytes)
        except KVError:
            self.link.give_back(granted.lease)
            raise
        lease = ShmLease(self, granted, arrays)
        self._views.add(lease)
        return lease

    def _shown(self, granted: Granted, block_bytes: int) -> list[npt.NDArray[np.uint8] | None]:
        """The granted slots, in place; None for what was not granted. Raises :class:`KVError`."""
        arrays: list[npt.NDArray[np.uint8] | None] = [None] * len(granted.status)
        if granted.count:
            slabs = self.slabs.ensure(set(granted.slab.tolist()))
            granted.addresses(slabs, block_bytes)  # all of them are in their slabs
            rows = zip(granted.positions.tolist(), granted.slab.tolist(), granted.offset.tolist(), strict=True)
            for position, slab, offset in rows:
                arrays[position] = slabs[slab].bytes[offset : offset + block_bytes]
        return arrays

    def prefetch(self, blocks: Named) -> StatusArray:
        return self.link.prefetch(blocks)

    def hint(self, blocks: Named, kind: HintKind, ttl_s: float) -> int:
        return self.link.hint(blocks, kind, ttl_s)

    # ------------------------------------------------------------------ writing

    def push(self, request: Push) -> Pushed:
        status, durable = undecided(len(request.blocks)), np.zeros(len(request.blocks), bool)
        try:
            method = self.method(request.blocks.region)
            if method:
                self.pull(request, status, durable)
            elif not all_written(request):
                status[:] = BlockStatus.ABORTED
            else:
                self._stage.push(self, request, status, durable)
        except KVError as error:
            settle(status, error)
        moved = int(np.count_nonzero(status == BlockStatus.STORED)) * request.namespace.block_bytes
        return Pushed(status, moved, durable)

    def pull(self, request: Push, status: StatusArray, durable: Mask) -> None:
        """Let the node take the blocks; fills ``status`` and ``durable``."""
        try:
            pull(self.link, request, status, durable)
        except InvalidArgument as error:
            if "region" not in str(error):
                raise
            self._methods.pop(request.blocks.region.id, None)  # the node forgot our session: a broken link
            self.method(request.blocks.region)
            pull(self.link, request, status, durable)

    def method(self, region: Region) -> str:
        """How the node reads a region: asked once a region, "" means staging."""
        method = self._methods.get(region.id)
        if method is None:
            method = self._methods[region.id] = self.slabs.register(region)
        return method

    def forget(self, region: Region) -> None:
        if self._methods.pop(region.id, ""):
            try:
                self.slabs.unregister(region)
            except (Unavailable, Busy):
                return  # the node drops regions with the session

    # ------------------------------------------------------------------ upkeep

    def reachable(self) -> bool:
        return self.link.channel.breaker.closed

    def upkeep(self) -> None:
        self.index.upkeep()  # first: whether this client may still read is not to wait for anything
        self.link.upkeep()
        for lease in list(self._views):
            lease.renew_if_due()

    def drop_view(self, lease: ShmLease) -> None:
        self._views.discard(lease)

    def close(self) -> None:
        for lease in list(self._views):
            lease.close()
        self.link.close()
        self.slabs.close()
        self.index.close()
        self._stage.close()


def _all_granted(reply: pb.AcquireOk, count: int) -> bool:
    """Whether the answer gives all ``count`` blocks, and describes them."""
    granted = reply.status.count(_LOADED) == len(reply.status) == count == len(reply.tier)
    return granted and len(reply.rows) == count * SLOT_ROW.size
