"""The engine stand-in: a real process with the real client, and computing that only takes virtual time.

For each request: what its private cache holds, then what the pool holds (looked up, loaded, every byte
verified), then the rest is "computed" and stored in the pool. Whatever goes wrong with the pool ends as
compute. Run as ``python -m kvstrata.cli.replay.engine FD``, where FD is the socket to the coordinator.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.blocks import HASH_BYTES
from kvstrata.cli.replay.chain_lru import ChainLRU
from kvstrata.cli.replay.messages import Finish, Outcome, Pipe, Ready, Setup, Work
from kvstrata.cli.replay.payload import PayloadStream
from kvstrata.client import Client
from kvstrata.proto.errors import KVError, ProtocolError, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus

#: Silence from the coordinator after which an engine gives up: a stopped coordinator leaves no engines behind.
COORDINATOR_SILENCE_S = 600.0
SEND_S = 30.0
SETTLE_POLL_S = 0.001
#: What the staging region holds before a load.
SCRUBBED = 0xA5

_log = get_logger(__name__)

Bools = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Tally:
    """What one request has done so far; becomes its :class:`Outcome`."""

    pool_blocks: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    wrong_bytes: int = 0
    unsettled: bool = False
    lookup_s: float = 0.0
    load_s: float = 0.0
    store_s: float = 0.0
    verify_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)

    def failed(self, call: str, error: KVError) -> None:
        """A call that the pool could not serve at all."""
        self.reasons[f"{call} {type(error).__name__}"] += 1
        _log.warning("pool_call_failed", call=call, error=str(error))


class Engine:
    """Serves requests one after the other, over a client that it does not own; has a private cache of its own."""

    def __init__(self, setup: Setup, client: Client) -> None:
        self._setup = setup
        self._client = client
        self._namespace = client.namespace(
            setup.group, block_bytes=setup.block_bytes, block_tokens=setup.block_tokens, hash_bytes=HASH_BYTES
        )
        # Shareable memory, as an engine's pinned staging ring would be: a node on this host pulls from it.
        region = client.allocate(setup.staging_blocks * setup.block_bytes)
        self._staging = region.bytes.reshape(setup.staging_blocks, setup.block_bytes)
        self._blocks = region.rows(self._namespace)
        self._payload = PayloadStream(setup.group.encode(), setup.block_bytes)
        self._private = ChainLRU(setup.private_blocks)

    def serve(self, work: Work) -> Outcome:
        """One request, start to end. Bounded by the client's deadlines; raises nothing for a pool that fails."""
        chain, hashes = _unpack(work)
        tally = _Tally()
        private = min(self._private.prefix(chain), work.hit_limit)
        present = self._look_up(work, hashes, private, tally)
        hit = self._load(work, hashes, private, present, tally)
        wanted = np.ones(len(hashes), dtype=bool)
        wanted[private:hit] = False
        # A prefix served from this engine's own memory looks cold to the pool: give back what it has dropped.
        # What the pool took a moment ago is on its way into the directory, and not dropped.
        wanted[:private] = ~present[:private]
        wanted[: min(private, work.settled)] = False
        stored = self._store(work, hashes, wanted, tally)
        self._private.touch(chain)
        return Outcome(
            index=work.index,
            private_blocks=private,
            pool_blocks=hit - private,
            loaded_bytes=tally.loaded_bytes,
            stored_bytes=tally.stored_bytes,
            wrong_bytes=tally.wrong_bytes,
            unsettled=tally.unsettled,
            lookup_s=tally.lookup_s,
            load_s=tally.load_s,
            store_s=tally.store_s,
            verify_s=tally.verify_s,
            reasons=dict(tally.reasons),
            tiers=dict(tally.tiers),
            body=stored.tobytes(),
        )

    def _look_up(self, work: Work, hashes: Hashes, private: int, tally: _Tally) -> Bools:
        """bool [n]: which blocks the directory shows. All False when it cannot be asked."""
        if not len(hashes):
            return np.zeros(0, dtype=bool)
        settle_until = time.perf_counter() + self._setup.settle_s
        present = np.zeros(len(hashes), dtype=bool)
        try:
            while True:
                started = time.perf_counter()
                found = self._client.lookup(self._namespace, work.salt, hashes.tobytes())
                tally.lookup_s = time.perf_counter() - started  # of the last one: waiting for it to settle is virtual
                if not found.answered:
                    tally.reasons.update(found.reasons)
                    return present
                if found.hit_blocks is not None:
                    present = found.present
                # The pool acknowledged these blocks milliseconds ago, which in virtual time is long ago: give
                # the directory the moment that it is allowed to need.
                if found.hit_blocks is not None and present[private : work.settled].all():
                    return present
                if time.perf_counter() > settle_until:
                    tally.unsettled = found.hit_blocks is not None
                    if not tally.unsettled:
                        tally.reasons["not_yet"] += 1
                    return present
                time.sleep(SETTLE_POLL_S)
        except KVError as error:
            tally.failed("lookup", error)
            return present

    def _load(self, work: Work, hashes: Hashes, private: int, present: Bools, tally: _Tally) -> int:
        """Load and verify the pool's part of the prefix; returns where the prefix ends now."""
        ahead = present[private : work.hit_limit]
        end = private + (len(ahead) if ahead.all() else int(ahead.argmin()))
        hit = private
        for start in range(private, end, len(self._staging)):
            part = hashes[start : min(end, start + len(self._staging))]
            loaded = self._load_part(work.salt, part, tally)
            if hit == start:
                hit += len(part) if loaded.all() else int(loaded.argmin())
        return hit

    def _load_part(self, salt: str, hashes: Hashes, tally: _Tally) -> Bools:
        # The right bytes may lie here from an earlier call: a load that moves nothing must not pass for one that does.
        self._staging[: len(hashes)] = SCRUBBED
        started = time.perf_counter()
        try:
            result = self._client.load(self._namespace, salt, hashes.tobytes(), self._blocks[: len(hashes)])
        except KVError as error:
            tally.failed("load", error)
            return np.zeros(len(hashes), dtype=bool)
        finally:
            tally.load_s += time.perf_counter() - started
        loaded = result.loaded
        tally.reasons.update(_misses(result.status[~loaded]))
        tally.tiers.update(result.by_tier())
        started = time.perf_counter()
        rows = self._staging[: len(hashes)]
        # Fancy indexing copies: only where there are holes.
        if not loaded.all():
            rows, hashes = rows[loaded], hashes[loaded]
        tally.loaded_bytes += rows.nbytes
        tally.wrong_bytes += self._payload.wrong_bytes(rows, salt, hashes)
        tally.verify_s += time.perf_counter() - started
        return loaded

    def _store(self, work: Work, hashes: Hashes, wanted: Bools, tally: _Tally) -> Bools:
        """Store each run of wanted blocks; returns which ones the pool holds because of it."""
        stored = np.zeros(len(hashes), dtype=bool)
        for first, end in _runs(wanted, len(self._staging)):
            part = hashes[first:end]
            parent = hashes[first - 1].tobytes() if first else None
            self._payload.fill(self._staging[: len(part)], work.salt, part)
            started = time.perf_counter()
            try:
                result = self._client.store(
                    self._namespace,
                    work.salt,
                    part.tobytes(),
                    self._blocks[: len(part)],
                    parent=parent,
                    first_index=first,
                )
            except KVError as error:
                tally.failed("store", error)
                continue
            finally:
                tally.store_s += time.perf_counter() - started
            stored[first:end] = result.stored
            fresh = int(np.count_nonzero(result.status == BlockStatus.STORED))
            tally.stored_bytes += fresh * self._setup.block_bytes
            tally.reasons.update(_misses(result.status[~stored[first:end]]))
        return stored


def _unpack(work: Work) -> tuple[list[int], Hashes]:
    count, rest = divmod(len(work.body), 4 + HASH_BYTES)
    if rest or not 0 <= work.hit_limit <= count:
        raise ProtocolError(f"work {work.index} has a body of {len(work.body)} bytes")
    chain = np.frombuffer(work.body, dtype=np.int32, count=count).tolist()
    return chain, np.frombuffer(work.body, dtype=np.uint8, offset=4 * count).reshape(count, HASH_BYTES)


def _misses(status: npt.NDArray[np.uint8]) -> Counter[str]:
    """Statuses by name."""
    values, counts = np.unique(status, return_counts=True)
    return Counter({BlockStatus(value).name.lower(): int(n) for value, n in zip(values.tolist(), counts, strict=True)})


def _runs(wanted: Bools, longest: int) -> list[tuple[int, int]]:
    """(first, end) of each run of True, cut to at most ``longest``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False]))))
    return [
        (first, min(first + longest, int(end)))
        for start, end in edges.reshape(-1, 2)
        for first in range(int(start), int(end), longest)
    ]


def _client_of(setup: Setup) -> Client:
    return Client(setup.masters, verify="always")


def run(pipe: Pipe, client_of: Callable[[Setup], Client] = _client_of) -> int:
    """Serve the coordinator until it says finish (0), or goes away or the pool cannot be used (1)."""
    setup = pipe.receive(Setup, COORDINATOR_SILENCE_S)
    try:
        client = client_of(setup)
    except KVError as error:
        pipe.send(Ready(setup.engine, error=f"{type(error).__name__}: {error}"), SEND_S)
        return 1
    try:
        return _serve_all(pipe, setup, client)
    except Unavailable as error:
        _log.warning("coordinator_gone", engine=setup.engine, error=str(error))
        return 1
    finally:
        client.close()


def _serve_all(pipe: Pipe, setup: Setup, client: Client) -> int:
    try:
        engine = Engine(setup, client)
    except KVError as error:
        pipe.send(Ready(setup.engine, error=f"{type(error).__name__}: {error}"), SEND_S)
        return 1
    pipe.send(Ready(setup.engine), SEND_S)
    while not isinstance(work := pipe.receive_any(COORDINATOR_SILENCE_S), Finish):
        if not isinstance(work, Work):
            raise ProtocolError(f"expected work, got {work.kind!r}")
        pipe.send(_served(engine, work), SEND_S)
    return 0


def _served(engine: Engine, work: Work) -> Outcome:
    try:
        return engine.serve(work)
    except Exception as error:  # noqa: BLE001  A failed request is a result that the replay reports and exits with.
        _log.exception("request_failed", index=work.index)
        return Outcome(index=work.index, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(run(Pipe(socket.socket(fileno=int(sys.argv[1])))))
