"""The pool as one rank sees it: loads, stores, lookups, and whether it answers.

Whatever is wrong with the pool ends here as a status, a reason and a log line; nothing of it is raised.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.client.fanout import Fanout
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.results import Lookup, reasons_of
from kvstrata.engine_adapter.connector.attachment import Attachment, Namespaces
from kvstrata.engine_adapter.connector.base import PoolState
from kvstrata.engine_adapter.connector.chunks import Chunk
from kvstrata.engine_adapter.connector.layered import LayeredLoad
from kvstrata.engine_adapter.connector.layered_store import LayeredStore
from kvstrata.engine_adapter.connector.layout import EngineMemory, PoolLayout
from kvstrata.engine_adapter.connector.pool_client import PoolClient
from kvstrata.engine_adapter.connector.readiness import Readiness, Verdict
from kvstrata.engine_adapter.connector.shards import LandedShards, worst
from kvstrata.proto.errors import (
    Closed,
    FingerprintMismatch,
    Forbidden,
    ForbiddenSalt,
    KVError,
    Unauthenticated,
    VersionMismatch,
)
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Landing
from kvstrata.transfer.gpu.runtime import Event
from kvstrata.transfer.loops import Loop

log = get_logger(__name__)

PROBE_PERIOD_S: Final = 0.1
CLOSE_S: Final = 1.0

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint8]
#: A call for one of the rank's shards, by its place among them.
ShardCall = Callable[[PoolClient, PoolNamespace, int], Codes]

#: Refusals that concern every block of this engine, not one job's.
_ALL_REFUSED: Final = (FingerprintMismatch, VersionMismatch, Unauthenticated, Forbidden, Closed)


class Pool:
    """Thread-safe. ``memory`` u8[layout.memory_bytes], zeroed, is registered and the engine's to use; or it is
    ``engine_memory``, registered.

    Where the rank has several shards of a block, each is a call, all at once, and a row is what its worst shard is.
    ``connect`` makes the client, see :class:`Attachment`. ``transfer_s``: what one call may take. ``callers``: threads
    that load and store at a time.
    """

    def __init__(
        self,
        layout: PoolLayout,
        rank: int,
        connect: Callable[[], PoolClient],
        *,
        transfer_s: float,
        callers: int,
        clock: Callable[[], float] = time.monotonic,
        engine_memory: EngineMemory | None = None,
    ) -> None:
        self.layout = layout
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._readiness = Readiness()
        self._attachment = Attachment(layout, rank, connect, engine_memory)
        self.memory: Bytes = self._attachment.memory
        # One thread each, the probe's too, so that none waits for another and all of a call have the same deadline.
        self._fanout = Fanout(max(1, (layout.shards_per_rank - 1) * (callers + 1)), "connector-shard")
        self._last = ("", bytes(layout.hash_bytes), 0)  # salt, hash and group that a probe asks for
        self._closed = False
        self._superseded = False
        self._loop = Loop("connector-probe", PROBE_PERIOD_S, self._turn, bound_s=4 * transfer_s + 5.0)
        self._turn()
        self._loop.start()

    # ------------------------------------------------------------------ calls

    @property
    def state(self) -> PoolState:
        return self._readiness.state

    @property
    def reason(self) -> str:
        """Why it is absent, or an empty string."""
        return self._readiness.reason

    @property
    def generation(self) -> int:
        """Of the engine's weights: grows with each :meth:`renew`."""
        return self._attachment.generation

    @property
    def superseded(self) -> bool:
        """The pool has refused a store because these weights, or this layout, are not what it has under the name."""
        return self._superseded

    def load(
        self, salt: str, chunk: Chunk, generation: int, pending: list[Landing], layers: LayeredLoad | None = None
    ) -> Codes:
        """Statuses u8[rows] (:class:`BlockStatus`) of the chunk's rows; where LOADED, the bytes are in place.

        ABORTED where ``generation`` is not that of now: the job is of older weights. ``layers`` hears of layers.
        ``pending`` gets what may still write to rows that are PENDING, or whose status hides that they are.
        """
        landed = None
        if layers is not None:
            landed = LandedShards(self.layout.shards_per_rank, layers.landed).landed
        return self._transfer(
            "load", salt, chunk, generation, partial(self._load, salt, chunk, pending, layers, landed)
        )

    def layer_ends(self, group: int) -> tuple[int, ...]:
        """Where each layer's pages end in a block of the group, in bytes."""
        return self._attachment.layer_ends(group)

    def store(
        self, salt: str, chunk: Chunk, generation: int, pending: list[Landing], writing: LayeredStore | None = None
    ) -> Codes:
        """Statuses u8[rows]; where STORED or ALREADY_PRESENT, the pool has the block. ABORTED, and ``pending``, as for
        :meth:`load`. ``writing``: the rows are still being written; ABORTED where that takes too long."""
        return self._transfer("store", salt, chunk, generation, partial(self._store, salt, chunk, pending, writing))

    def mark(self) -> Event | None:
        """See :meth:`Attachment.mark`."""
        return self._attachment.mark()

    def renew(self) -> None:
        """The engine's weights are new: the pool is absent until its namespaces have been opened anew, which begins
        at once. What was begun with the older ones can neither store under the new epoch nor count as loaded."""
        with self._lock:
            self._attachment.renew()
            self._superseded = False
            self._readiness.begin_anew("the engine's weights are new", self._clock())
        log.info("namespaces are opened anew: the engine's weights are new", rank=self._rank)
        self._loop.wake()

    def lookup(self, salt: str, group: int, hashes: bytes, request: str = "") -> Lookup | None:
        """What the directory says; None when it could not be asked. ``request``: the name of who asks."""
        generation = self.generation
        client, namespaces = self._attachment.client, self._attachment.namespaces(group, generation)
        if self.state is PoolState.ABSENT or client is None or not namespaces:
            return None
        try:
            found = client.lookup(namespaces[0], salt, hashes, request=request)  # it answers for all shards
        except KVError as error:
            self._refused("lookup", group, error, generation)
            return None
        if found.answered:
            return found
        self._ended(Verdict.LATE if "late" in found.reasons else Verdict.LOST, f"lookup: {_text(found.reasons)}")
        return None

    def prefetch(self, salt: str, group: int, hashes: bytes) -> None:
        """Make a coming load cheaper, in the background. Nobody waits for it."""
        generation = self.generation
        client, namespaces = self._attachment.client, self._attachment.namespaces(group, generation)
        if self.state is PoolState.ABSENT or client is None or not hashes:
            return
        try:
            for namespace in namespaces:
                client.prefetch(namespace, salt, hashes)
        except KVError as error:
            self._refused("prefetch", group, error, generation)

    def _transfer(self, what: str, salt: str, chunk: Chunk, generation: int, call: ShardCall) -> Codes:
        client, namespaces = self._attachment.client, self._attachment.namespaces(chunk.blocks.group, generation)
        if generation != self.generation:
            return np.full(chunk.stop - chunk.start, BlockStatus.ABORTED, np.uint8)
        if client is None or not namespaces:
            return np.full(chunk.stop - chunk.start, BlockStatus.NODE_LOST, np.uint8)
        try:
            status = self._all_shards(client, namespaces, call)
        except KVError as error:
            self._refused(what, chunk.blocks.group, error, generation)
            return np.full(chunk.stop - chunk.start, BlockStatus.REFUSED, np.uint8)
        if generation != self.generation:  # what came, or went, is of the older weights
            return np.full(chunk.stop - chunk.start, BlockStatus.ABORTED, np.uint8)
        verdict = verdict_of(status)
        if verdict is not Verdict.ANSWERED:
            self._last = (salt, chunk.hashes(self.layout.hash_bytes)[: self.layout.hash_bytes], chunk.blocks.group)
        self._ended(verdict, f"a transfer of {len(status)} blocks was {verdict.name.lower()}")
        return status

    def _all_shards(self, client: PoolClient, namespaces: Namespaces, call: ShardCall) -> Codes:
        """The call for each shard. Returns, or raises what one of them raised, when all have ended."""
        calls = [partial(call, client, namespace, index) for index, namespace in enumerate(namespaces)]
        return worst(self._fanout.run(calls))

    def _load(
        self,
        salt: str,
        chunk: Chunk,
        pending: list[Landing],
        layers: LayeredLoad | None,
        landed: Callable[[int, npt.NDArray[np.bool_]], None] | None,
        client: PoolClient,
        namespace: PoolNamespace,
        index: int,
    ) -> Codes:
        hashes, rows = chunk.hashes(namespace.hash_bytes), self._attachment.rows(chunk, index, namespace)
        if layers is None:
            result = client.load(namespace, salt, hashes, rows)
        else:
            result = client.load(namespace, salt, hashes, rows, parts=layers.ranges.ends, landed=landed)
        pending.extend(result.pending)
        return result.status

    def _store(
        self,
        salt: str,
        chunk: Chunk,
        pending: list[Landing],
        writing: LayeredStore | None,
        client: PoolClient,
        namespace: PoolNamespace,
        index: int,
    ) -> Codes:
        width = namespace.hash_bytes
        first = chunk.blocks.first_index + chunk.start
        rows, parent = self._attachment.rows(chunk, index, namespace), chunk.parent(width) or None
        if writing is None:
            result = client.store(namespace, salt, chunk.hashes(width), rows, parent, first)
        else:
            parts, written = writing.ranges.ends, writing.written
            result = client.store(
                namespace, salt, chunk.hashes(width), rows, parent, first, parts=parts, written=written
            )
        pending.extend(result.pending)
        return result.status

    # ------------------------------------------------------------------ readiness

    def _refused(self, what: str, group: int, error: KVError, generation: int) -> None:
        text = f"{type(error).__name__}: {error}"
        if what == "store" and isinstance(error, FingerprintMismatch):
            # The pool stays: an engine of older weights may add nothing, and finds nothing, until it is told that
            # its weights are new. It is said once; the blocks are counted.
            with self._lock:
                first = generation == self.generation and not self._superseded
                self._superseded |= first
            if first:
                log.warning("the pool takes no blocks of this engine", group=group, reason=text, rank=self._rank)
            return
        log.warning("pool refused a call", call=what, group=group, reason=text)
        if isinstance(error, _ALL_REFUSED) and not isinstance(error, ForbiddenSalt):
            self._ended(Verdict.REFUSED, text)

    def _ended(self, verdict: Verdict, reason: str) -> None:
        with self._lock:
            before = self._readiness.state
            probe = self._readiness.call_ended(verdict, reason, self._clock())
            now = self._readiness.state
        if now is not before:
            log.warning("pool absent: calls late or refused", reason=reason, rank=self._rank)
        if probe:
            self._loop.wake()

    def _turn(self) -> None:
        """One probe, if one is due."""
        with self._lock:
            if self._closed or not self._readiness.claim_probe(self._clock()):
                return
            generation = self.generation
        problem = "the probe failed"
        try:
            problem = self._probe()
        except ForbiddenSalt:
            problem = ""  # that tenant is not ours to ask about: an answer all the same
        except KVError as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                if generation != self.generation:
                    problem = problem or "the engine's weights are new"
                before, reason = self._readiness.state, self._readiness.reason
                self._readiness.probed(problem, self._clock())
        if not problem and before is PoolState.ABSENT:
            log.info("pool ready", rank=self._rank)
        elif problem and problem != reason:
            log.warning("pool absent: probe failed", reason=problem, rank=self._rank)

    def _probe(self) -> str:
        """Why the pool cannot be used now, or an empty string; raises :class:`KVError` likewise."""
        try:
            client = self._attachment.complete()
        except ForbiddenSalt as error:  # of a namespace: nothing of this engine's can be pooled
            return f"{type(error).__name__}: {error}"
        salt, wanted, group = self._last
        namespaces = self._attachment.namespaces(group) or self._attachment.any_namespaces()
        if not namespaces:
            return "no group of this engine's KV cache can be pooled"
        found = client.lookup(namespaces[0], salt, wanted)
        if not found.answered:
            return f"no master answers: {_text(found.reasons)}"
        return self._probe_data(client, namespaces, salt, wanted) if self._readiness.data_late else ""

    def _probe_data(self, client: PoolClient, namespaces: Namespaces, salt: str, wanted: bytes) -> str:
        region = client.register(np.zeros(len(namespaces) * namespaces[0].block_bytes, np.uint8))

        def load(client: PoolClient, namespace: PoolNamespace, index: int) -> Codes:
            return client.load(namespace, salt, wanted, region.rows(namespace)[index : index + 1]).status

        try:
            status = self._all_shards(client, namespaces, load)
        finally:
            client.unregister(region)
        return "" if verdict_of(status) is Verdict.ANSWERED else f"one block: {_text(reasons_of(status))}"

    # ------------------------------------------------------------------ life

    def health(self) -> dict[str, object]:
        """State, reason, the probe's age and failures, and the client's own report. Asks nobody."""
        client = self._attachment.client
        return {
            "state": self.state.name.lower(),
            "reason": self.reason,
            "probe_age_seconds": self._loop.age_s(),
            "probe_failures": self._loop.failures,
            "client": client.health() if client is not None and not self._closed else {},
        }

    def problem(self) -> str:
        """What is wrong with the probe itself, or an empty string. An absent pool is none."""
        return self._loop.problem()

    def close(self) -> None:
        """Bounded. No call may be under way any more. ``memory`` stays the caller's."""
        with self._lock:
            self._closed = True
        self._loop.stop(CLOSE_S)
        self._fanout.close()
        self._attachment.close()


def verdict_of(status: Codes) -> Verdict:
    """How a call with these block statuses ended as a whole."""
    late = (status == BlockStatus.LATE) | (status == BlockStatus.PENDING)
    if not len(status) or not (late | (status == BlockStatus.NODE_LOST)).all():
        return Verdict.ANSWERED
    return Verdict.LATE if late.any() else Verdict.LOST


def _text(reasons: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in reasons.items())
