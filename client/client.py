"""The embedded client: what an engine calls. Thread-safe, bounded in time, and a miss is a value.

Calls raise only for a caller's mistake, a refusal of the whole call (another tenant's salt, a namespace
known with another layout, a version), or a client that is closed or belongs to the parent of a fork.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, get_args

import numpy as np

from kvstrata.client.arguments import (
    Hashes,
    check_blocks,
    check_text,
    checked_hashes,
    checked_parent,
    checked_parts,
    checked_request,
)
from kvstrata.client.asked import Asked
from kvstrata.client.attempts import copying, viewing
from kvstrata.client.counters import Counters
from kvstrata.client.directory import Directory
from kvstrata.client.fanout import Fanout
from kvstrata.client.health import health_report
from kvstrata.client.hinting import Hinter, checked_ttl
from kvstrata.client.keeper import start_keeper
from kvstrata.client.landed_ranges import LandedRanges
from kvstrata.client.locations import RecentLocations
from kvstrata.client.looking import Looker
from kvstrata.client.masters import parse_masters
from kvstrata.client.memory import RegisteredMemory
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.open_clients import OPEN, Metered
from kvstrata.client.outcomes import WHOLE_CALL, refused_late
from kvstrata.client.peers import Peers
from kvstrata.client.placing import Placer
from kvstrata.client.plan import blocks_in_message
from kvstrata.client.prefetching import Begun, Prefetch, Prefetcher
from kvstrata.client.reading import Reader
from kvstrata.client.results import NO_TIER, LoadResult, Lookup, Mask, RemoveResult, StoreResult, reasons_of
from kvstrata.client.security.credentials import Credentials
from kvstrata.client.security.fetched import FetchedTickets
from kvstrata.client.traced import told_load, told_store
from kvstrata.client.transfers import Transfer, Transfers
from kvstrata.client.view import View
from kvstrata.client.writing import Offered, Writer
from kvstrata.proto.errors import Closed, InvalidArgument, KVError, Refused
from kvstrata.proto.status import BlockStatus, HintKind
from kvstrata.transfer.base import Verify
from kvstrata.transfer.connection import CONNECT_S, SILENCE_S
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.loops import Loop
from kvstrata.transfer.regions import BlockView, Region
from kvstrata.transfer.select import TransportChoice
from kvstrata.transfer.traces import join_host
from kvstrata.transfer.tracing import TRACING

if TYPE_CHECKING:
    from kvstrata.client.metrics import ClientCollector

#: The constructor and ``namespace`` wait no longer than this for a master that does not answer.
GREET_S: Final = CONNECT_S + SILENCE_S
DEADLINE_MS_MAX: Final = 3_600_000
KEEPER_STOP_S: Final = 1.0


class _Part(Protocol):
    def close(self) -> None: ...


class Client:
    """A client of one pool.

    ``masters``: ``"HOST:PORT"``, several with commas.
    ``transport``: ``"auto"``, ``"shm"``, ``"tcp"``, ``"rdma"``, or ``"rdma-cma"`` (rdma between processes of one host,
    without a device). ``verify``: which blocks a load over shm or rdma checks against their checksums: ``"always"``,
    ``"sample"`` or ``"never"`` (tcp loads are always checked).
    ``transfer_deadline_ms`` bounds every call. ``name`` is what health shows for this process.

    A pool that asks who calls wants a ``token``, or a ``token_file`` that holds one and may be replaced at any time,
    and ``tls_ca``, the authority of its masters; ``tls_cert`` and ``tls_key`` where it believes certificates. By
    default they are the variables ``KVSTRATA_TOKEN_FILE``, ``KVSTRATA_TOKEN``, ``KVSTRATA_CA``, ``KVSTRATA_CERT`` and
    ``KVSTRATA_KEY``. A token goes to masters alone, and without TLS to those of this host only, but for ``insecure``.
    Raises :class:`Unauthenticated` for a token that the pool does not know, :class:`ConfigError` for files.

    A pool that is down does not stop the constructor: calls answer with misses until it is up.
    """

    def __init__(
        self,
        masters: str,
        token: str | None = None,
        transport: str = "auto",
        verify: Verify = "sample",
        transfer_deadline_ms: int = 2000,
        *,
        name: str = "",
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        insecure: bool = False,
    ) -> None:
        addresses = parse_masters(masters)
        join_host()
        if verify not in get_args(Verify):
            raise InvalidArgument(f"verify is {verify!r}: choose one of {', '.join(get_args(Verify))}")
        if not 0 < transfer_deadline_ms <= DEADLINE_MS_MAX:
            raise InvalidArgument(f"transfer_deadline_ms is {transfer_deadline_ms}: expected 1 to {DEADLINE_MS_MAX}")
        shown = Credentials.given(token, token_file, tls_ca, tls_cert, tls_key, insecure=insecure)
        self._tickets = FetchedTickets.shown_for(addresses, shown)
        identity = Identity.new(name=name, tickets=self._tickets)
        self._choice = TransportChoice(transport, identity)
        self._deadline_s = transfer_deadline_ms / 1e3
        self._verify: Verify = verify
        self._pid = os.getpid()
        self._closed = False
        self._counters = Counters()
        self._memory = RegisteredMemory(self._choice)
        self._directory = Directory(addresses, identity)
        self._peers = Peers(self._choice.connect, boot_id())
        self._recent = RecentLocations()
        self._fanout = Fanout()
        self._looker = Looker(self._directory, self._peers, self._recent, self._counters)
        self._reader = Reader(self._directory, self._peers, self._recent, self._fanout)
        placer = Placer(self._directory, self._peers.boot_id)
        self._writer = Writer(self._directory, placer, self._peers, self._recent, self._fanout, self._counters)
        self._prefetcher = Prefetcher(self._looker, self._peers, self._fanout)
        self._hinter = Hinter(self._looker, self._recent, self._peers, self._fanout)
        self._transfers = Transfers()
        self._views: set[View] = set()
        parts: tuple[_Part, ...] = (self._transfers, self._fanout, self._peers, placer, self._directory, self._choice)
        parts += (self._memory,) if self._tickets is None else (self._memory, self._tickets)
        self._greet(parts)
        self._metered = Metered(identity.name, self._counters, self._directory, self._peers, self._tickets)
        OPEN.add(self._metered)
        self._keeper = start_keeper(self._directory, self._peers, placer)
        # Neither the keeper nor the parts hold the client: one that is dropped without close ends here.
        self._end = weakref.finalize(self, _end, self._pid, self._keeper, parts, self._metered)

    def _greet(self, parts: tuple[_Part, ...]) -> None:
        """Be known to a master; a client that is refused leaves nothing behind."""
        if self._tickets is not None:
            self._tickets.start()
        try:
            self._directory.greet(time.monotonic() + GREET_S)
        except BaseException:
            for part in parts:
                part.close()
            raise

    # ------------------------------------------------------------------ memory and names

    def namespace(
        self,
        group: str,
        *,
        block_bytes: int,
        block_tokens: int,
        hash_bytes: int = 16,
        shard: int = 0,
        shard_count: int = 1,
    ) -> PoolNamespace:
        """One shard of one model's KV. ``group`` fingerprints all that makes the bytes interchangeable.

        What is returned is pinned to the group's weight epoch of now. Once the weights have changed (a bump of
        the epoch) it finds nothing, and its stores raise :class:`FingerprintMismatch`: an engine that has loaded
        the new weights opens the namespace again.

        Raises :class:`FingerprintMismatch` when a master knows the group with another layout; with no
        master reachable that shows at the first call instead.
        """
        self._check_usable()
        check_text("group", group)
        opened = PoolNamespace(group, block_bytes, block_tokens, hash_bytes, shard, shard_count)
        opened.validated()
        self._directory.open(opened, time.monotonic() + min(GREET_S, self._deadline_s))
        return opened

    def register(self, buffer: Any, *, staged: bool = False) -> Region:
        """Name memory for transfers: anything contiguous with a buffer or an array interface; no copy.

        Arrays on a GPU (cupy, torch, numba, DLPack) too, and a list of them, on one GPU, as one region that spans
        them all. Loads into them and stores from them come after what the calling thread's current stream has queued
        by then, and wait for it, not the stream for them. ``staged``: memory of a GPU goes by way of the host always,
        over RDMA too; for memory whose pages are exchanged under its addresses, which a network card would not notice.
        Raises :class:`InvalidArgument` for memory that cannot be named, :class:`Unavailable`, with what to install,
        when nothing here reaches the GPU.
        """
        self._check_usable()
        return self._memory.register(buffer, staged=staged)

    def allocate(self, nbytes: int) -> Region:
        """New zeroed memory that a node on this host maps: the fastest source of stores. ``region.bytes`` is it."""
        self._check_usable()
        return self._memory.allocate(nbytes)

    def unregister(self, region: Region) -> None:
        """Forget a region: later calls that name it raise :class:`Closed`. Safe twice.

        Over rdma it waits up to some seconds for transfers that name it. What has not settled then keeps the memory
        alive until it has; a buffer must not be unmapped by other means before.
        """
        self._check_usable()
        self._memory.unregister(region)

    # ------------------------------------------------------------------ asking

    def lookup(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes, *, request: str = "") -> Lookup:
        """Where the longest usable prefix of ``hashes`` is. Pins nothing, may be called any number of times.

        One round trip to a master. ``hit_blocks`` is None for "not yet", 0 with ``answered`` False when no
        master could be asked. ``request``: the caller's name of the request (at most 256 characters), under which
        ``kvstrata why`` finds what was asked and why it missed.
        """
        started = self._check_usable()
        packed = checked_hashes(namespace, cache_salt, hashes)
        if request:
            checked_request(request)
        return self._looker.look_up(namespace, cache_salt, packed, started, started + self._deadline_s, request)

    def exists(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> Mask:
        """bool[n]: which blocks the directory shows, holes and all. False everywhere when it cannot be asked."""
        return self.lookup(namespace, cache_salt, hashes).present

    def prefetch(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> Prefetch:
        """Have the hit prefix read from SSD into memory, in the background: see :class:`Prefetch`."""
        started = self._check_usable()
        asked = self._named(namespace, cache_salt, hashes, started)
        call = partial(self._prefetcher.begin, asked, started)
        future = self._transfers.submit(call, partial(Begun.shed, asked))
        return Prefetch(future, asked.deadline, self._prefetcher.ask)

    # ------------------------------------------------------------------ hints

    def keep(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes, ttl_s: float) -> int:
        """These blocks will be wanted again within ``ttl_s`` seconds (at most a day): evict others of the same
        tenant first. Best effort, charged to the tenant's own quota; returns the blocks that nodes marked.

        For an agent's prefix that is to survive its think time. Keeping again moves the end.
        """
        return self._hint(namespace, cache_salt, hashes, HintKind.KEEP, checked_ttl(ttl_s))

    def forget(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> int:
        """Take back what :meth:`keep` said: they leave when it is their turn. Returns the blocks unmarked."""
        return self._hint(namespace, cache_salt, hashes, HintKind.FORGET, 0.0)

    def drop(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> int:
        """These blocks will not be wanted again: they leave first when room is needed. Unlike :meth:`remove` they
        can be read until then. Returns the blocks moved."""
        return self._hint(namespace, cache_salt, hashes, HintKind.DROP, 0.0)

    def _hint(self, namespace: PoolNamespace, salt: str, hashes: Hashes, kind: HintKind, ttl_s: float) -> int:
        started = self._check_usable()
        asked = self._named(namespace, salt, hashes, started)
        return self._hinter.hint(asked, kind, ttl_s, started) if asked.count else 0

    def _named(self, namespace: PoolNamespace, salt: str, hashes: Hashes, started: float) -> Asked:
        packed = checked_hashes(namespace, salt, hashes)
        return self._asked(namespace, salt, packed, len(packed) // namespace.hash_bytes, 1, started)

    # ------------------------------------------------------------------ loading

    def load(
        self,
        namespace: PoolNamespace,
        cache_salt: str,
        hashes: Hashes,
        blocks: BlockView,
        *,
        parts: Sequence[int] = (),
        landed: Callable[[int, Mask], None] | None = None,
    ) -> LoadResult:
        """Read block i into row i of ``blocks``, wherever it is; every position is tried.

        Rows where ``loaded`` is False may hold garbage; those that are PENDING are not to be reused until the result
        has settled. Bounded by ``transfer_deadline_ms``.

        ``parts``: ends of byte ranges of a block, ascending, the last is ``block_bytes`` (a range: the pages of a
        group of layers). ``landed(k, mask)`` is called in order of k when range k of every block that can still come
        is in place, those of ``mask`` (bool[n]); from any thread, which must not block. It is early news, and not the
        answer: a lease or a checksum may still take a block back, and then ``loaded`` is False and whatever was made
        of its bytes has to be made again.
        """
        started = self._check_usable()
        packed = checked_hashes(namespace, cache_salt, hashes)
        count = check_blocks(namespace, packed, blocks, into=True)
        blocks = self._memory.ordered(blocks)
        ends = checked_parts(namespace, parts, landed, "landed") if len(parts) or landed is not None else ()
        ranges = LandedRanges(count, ends, landed) if landed is not None else None
        return self._load(namespace, cache_salt, packed, blocks, started, ranges)

    def load_async(
        self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes, blocks: BlockView
    ) -> Transfer[LoadResult]:
        """:meth:`load` in the background; mistakes raise at once. The deadline counts from now."""
        started = self._check_usable()
        packed = checked_hashes(namespace, cache_salt, hashes)
        count = check_blocks(namespace, packed, blocks, into=True)
        blocks = self._memory.ordered(blocks)
        shed = partial(self._shed_load, count)
        call = partial(self._load_later, namespace, cache_salt, packed, blocks, started)
        return Transfer(self._transfers.submit(call, shed), started + self._deadline_s)

    def _shed_load(self, count: int) -> LoadResult:
        """Too much is under way: nothing was tried, and all of it is late."""
        late, no_tier = np.full(count, BlockStatus.LATE, np.uint8), np.full(count, NO_TIER, np.uint8)
        result = LoadResult.of(late, no_tier, 0.0, 0)
        if count:
            self._counters.add("load", result.reasons)
        return result

    def _load_later(
        self, namespace: PoolNamespace, salt: str, packed: bytes, blocks: BlockView, started: float
    ) -> LoadResult:
        self._check_usable()
        return self._load(namespace, salt, packed, blocks, started)

    def _load(
        self,
        namespace: PoolNamespace,
        salt: str,
        packed: bytes,
        blocks: BlockView,
        started: float,
        ranges: LandedRanges | None = None,
    ) -> LoadResult:
        if not packed:
            return LoadResult.of(np.zeros(0, np.uint8), np.zeros(0, np.uint8), 0.0, 0)
        if not TRACING.on:
            result = self._read(namespace, salt, packed, blocks, started, ranges)
            self._counters.timings.add("load", result.seconds)
            return result
        with TRACING.span("kvstrata.load") as span:
            result = self._read(namespace, salt, packed, blocks, started, ranges)
            if span.recording:
                told_load(span, namespace, salt, result)
        self._counters.timings.add("load", result.seconds, span.trace_id)
        return result

    def _read(
        self,
        namespace: PoolNamespace,
        salt: str,
        packed: bytes,
        blocks: BlockView,
        started: float,
        ranges: LandedRanges | None,
    ) -> LoadResult:
        count, pieces, _ = blocks.table.shape
        asked = self._asked(namespace, salt, packed, count, pieces, started)
        attempt = copying(asked, blocks, self._verify, self._counters, ranges)
        fetched = self._reader.read(asked, attempt, None if ranges is None else ranges.over)
        if ranges is not None:
            ranges.finish(fetched.status)
        seconds = time.monotonic() - started
        result = LoadResult.of(fetched.status, fetched.tier, seconds, fetched.bytes_moved, fetched.pending)
        self._counters.add("load", result.reasons, result.bytes_moved, result.tiers.tobytes())
        if ranges is not None and ranges.problem is not None:
            if not fetched.pending:
                raise ranges.problem
            refused_late("load", ranges.problem)
        return result

    @contextmanager
    def view(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> Iterator[View]:
        """Read-only arrays over blocks in the memory of nodes on this host, None where missing; no copy.

        For CPU consumers. Good until the block ends and while ``view.valid()``; raises :class:`Refused`
        when the transport in use has no views.
        """
        started = self._check_usable()
        packed = checked_hashes(namespace, cache_salt, hashes)
        count = len(packed) // namespace.hash_bytes
        view = View(count)
        self._views.add(view)
        try:
            if count:
                self._fill(view, self._asked(namespace, cache_salt, packed, count, 1, started))
            yield view
        finally:
            view.close()
            self._views.discard(view)

    def _fill(self, view: View, asked: Asked) -> None:
        refusals: list[Refused] = []
        fetched = self._reader.read(asked, viewing(asked, view, refusals))
        reasons = reasons_of(fetched.status)
        self._counters.add("view", reasons, tiers=fetched.tier[fetched.status == BlockStatus.LOADED].tobytes())
        if refusals and "loaded" not in reasons:
            raise refusals[0]

    # ------------------------------------------------------------------ storing

    def store(
        self,
        namespace: PoolNamespace,
        cache_salt: str,
        hashes: Hashes,
        blocks: BlockView,
        parent: bytes | None = None,
        first_index: int = 0,
        *,
        parts: Sequence[int] = (),
        written: Callable[[int, float], bool] | None = None,
    ) -> StoreResult:
        """Offer row i of ``blocks`` as block i; blocks the pool has already are marked as used.

        ``parent``: the hash before the first block in its chain, ``first_index``: the first block's index
        there. ``blocks`` may be reused when it returns, but what is PENDING. Bounded by ``transfer_deadline_ms``.

        ``parts``, as of :meth:`load`: for blocks that are still being written, range after range. ``written(k,
        deadline)`` returns True when range k of every block is in memory, and False when it will not be by
        ``deadline`` (monotonic seconds), or the call is to be given up: then nothing is stored, and blocks are
        ABORTED. It may wait; it is asked by any threads, and may be asked again. For host memory.
        """
        started = self._check_usable()
        offered = self._offered(namespace, cache_salt, hashes, blocks, parent, first_index, started)
        if len(parts) or written is not None:
            if not blocks.region.memory.on_host:
                raise InvalidArgument("parts are for host memory: store blocks of a device when they are written")
            offered.parts, offered.written = checked_parts(namespace, parts, written, "written"), written
        return self._store(offered, started)

    def store_async(
        self,
        namespace: PoolNamespace,
        cache_salt: str,
        hashes: Hashes,
        blocks: BlockView,
        parent: bytes | None = None,
        first_index: int = 0,
    ) -> Transfer[StoreResult]:
        """:meth:`store` in the background; mistakes raise at once. The deadline counts from now."""
        started = self._check_usable()
        offered = self._offered(namespace, cache_salt, hashes, blocks, parent, first_index, started)
        shed = partial(self._shed_store, len(blocks))
        return Transfer(self._transfers.submit(partial(self._store, offered, started), shed), offered.deadline)

    def _shed_store(self, count: int) -> StoreResult:
        result = StoreResult.of(np.full(count, BlockStatus.LATE, np.uint8), 0.0, 0)
        if count:
            self._counters.add("store", result.reasons)
        return result

    def _offered(
        self,
        namespace: PoolNamespace,
        salt: str,
        hashes: Hashes,
        blocks: BlockView,
        parent: bytes | None,
        first_index: int,
        started: float,
    ) -> Offered:
        packed = checked_hashes(namespace, salt, hashes)
        check_blocks(namespace, packed, blocks, into=False)
        blocks = self._memory.ordered(blocks)
        before = checked_parent(namespace, parent, first_index)
        limit = blocks_in_message(namespace.hash_bytes, blocks.pieces)
        return Offered(namespace, salt, packed, blocks, started + self._deadline_s, before, first_index, limit)

    def _store(self, offered: Offered, started: float) -> StoreResult:
        if not len(offered.blocks):
            return StoreResult.of(np.zeros(0, np.uint8), 0.0, 0)
        self._check_usable()
        with TRACING.span("kvstrata.store") as span:
            pushed = self._writer.write(offered)
            seconds = time.monotonic() - started
            result = StoreResult.of(pushed.status, seconds, pushed.bytes_moved, pushed.durable, pushed.pending)
            if span.recording:
                told_store(span, offered.namespace, offered.salt, result)
        self._counters.add("store", result.reasons, pushed.bytes_moved)
        self._counters.timings.add("store", seconds, span.trace_id)
        return result

    def remove(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> RemoveResult:
        """Take blocks out of the pool for good, by way of a master. See :class:`RemoveResult`."""
        started = self._check_usable()
        packed = checked_hashes(namespace, cache_salt, hashes)
        self._recent.forget(namespace, cache_salt, epoch=namespace.epoch)
        if not packed:
            return RemoveResult(0)
        left_ms = max(1, int(self._deadline_s * 500))  # half for the nodes, half for the way back
        try:
            return self._directory.remove(namespace, cache_salt, packed, started + self._deadline_s, left_ms)
        except WHOLE_CALL:
            raise
        except KVError:
            return RemoveResult(0, answered=False)

    # ------------------------------------------------------------------ life

    def health(self) -> dict[str, object]:
        """Masters, nodes with transport and breaker, loop age, blocks by outcome, problems. Asks nobody."""
        self._check_usable()
        open_now = {"transfers_pending": self._transfers.pending, "views_open": len(self._views)}
        return health_report(
            self._directory,
            self._peers,
            self._keeper,
            self._counters,
            self._memory,
            open_now,
            self._choice.rail_health(),
            self._tickets,
        )

    def metrics(self) -> ClientCollector:
        """For a Prometheus registry: see :mod:`kvstrata.client.metrics`. Asks nobody, and outlives the client."""
        from kvstrata.client.metrics import collector_of

        self._check_usable()
        return collector_of(self._metered)

    def close(self) -> None:
        """Give everything back; later calls raise :class:`Closed`. Safe twice, bounded, safe with handles alive.

        Calls under way end by their own deadlines. In a forked child it does nothing to the parent's.
        """
        self._closed = True
        self._end()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ordered(self, blocks: BlockView) -> BlockView:
        """For a call that another thread makes: see :meth:`RegisteredMemory.ordered`."""
        self._check_usable()
        return self._memory.ordered(blocks) if isinstance(blocks, BlockView) else blocks

    def _asked(
        self, namespace: PoolNamespace, salt: str, packed: bytes, count: int, pieces: int, started: float
    ) -> Asked:
        limit = blocks_in_message(namespace.hash_bytes, pieces)
        return Asked(namespace, salt, packed, count, started + self._deadline_s, limit)

    def _check_usable(self) -> float:
        """Now, in monotonic seconds; raises :class:`Closed`."""
        if self._closed or os.getpid() != self._pid:
            self._refuse()
        return time.monotonic()

    def _refuse(self) -> NoReturn:
        if os.getpid() != self._pid:
            raise Closed("this client belongs to the parent process: open a new one after fork")
        raise Closed("the client is closed")


def _end(
    pid: int,
    keeper: Loop,
    parts: tuple[_Part, ...],
    metered: Metered,
) -> None:
    """The end of a client, once: by ``close``, when it is dropped, or when the process exits."""
    if os.getpid() != pid:
        return  # a forked child: its sockets are closed already, and all else is the parent's
    keeper.stop(KEEPER_STOP_S)
    try:
        for part in parts:
            part.close()
    finally:
        OPEN.close(metered)
