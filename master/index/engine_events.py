"""All engines' KV events, read in one loop into one :class:`EngineIndex`."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

from kvstrata.master.index.engine_feed import EngineFeed
from kvstrata.master.index.engine_index import EngineIndex, Prefix
from kvstrata.master.index.engine_source import EngineAddress, EngineSource
from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.kv_events.events import Event
from kvstrata.transfer.loops import Loop, Loops

log = get_logger(__name__)

POLL_MS: Final = 500
#: A turn ends within this when all is closed.
STOP_S: Final = 2.0
#: An engine that cannot be reached is forgotten after this.
EXPIRE_S: Final = 30.0
#: And is a problem in health after this.
UNREACHED_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """What is known of one engine at this moment. ``prefix``: of the chain that was asked about."""

    name: str
    live: bool
    age_s: float  #: since it last said something
    blocks: int
    prefix: Prefix


class EngineEvents:
    """Owns a thread among ``loops`` and the sockets; questions are thread-safe."""

    def __init__(self, engines: Sequence[EngineAddress], loops: Loops) -> None:
        names = [engine.name for engine in engines]
        if len(set(names)) != len(names):
            raise ConfigError(f"two engines with one name: {', '.join(sorted(names))}")
        self.index = EngineIndex()
        self._lock = threading.Lock()  #: of the index: held while one batch is applied, not while it is read
        self._turns = threading.Lock()  #: held in a turn, and for good when the sockets are gone
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sources: dict[str, EngineSource] = {}
        try:
            for engine in engines:
                self.index.add(engine.name)
                self._sources[engine.name] = EngineSource(self._context, engine, self._feed(engine))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._loop = loops.add(Loop("engine events", 0.0, self._turn, bound_s=10.0))

    def _feed(self, engine: EngineAddress) -> EngineFeed:
        name = engine.name

        def apply(said: Sequence[Event]) -> None:
            with self._lock:
                self.index.apply(name, said)

        return EngineFeed(apply, lambda: self._clear(name), replays=bool(engine.replay))

    def _clear(self, name: str) -> None:
        with self._lock:
            self.index.clear(name)

    def close(self) -> None:
        self._loop.stop(STOP_S)
        if not self._turns.acquire(timeout=STOP_S):
            log.error("the reader of engines' events did not end in time: its sockets stay open", seconds=2 * STOP_S)
            return
        for source in self._sources.values():
            source.close()
        self._context.destroy(linger=0)

    # ------------------------------------------------------------------ questions

    def states(self, tails: Sequence[int] = (), names: Collection[str] = ()) -> list[EngineState]:
        """Every engine, or those of ``names`` if there are any, and how much of a chain it has: nothing, for one that
        cannot be reached. O(engines, blocks)."""
        now = time.monotonic()
        with self._lock:
            return [
                EngineState(
                    name,
                    source.live,
                    now - source.heard_at,
                    self.index.blocks(name),
                    self.index.prefix(name, tails) if source.live else Prefix(0, 0),
                )
                for name, source in self._sources.items()
                if not names or name in names
            ]

    def problems(self) -> list[str]:
        now = time.monotonic()
        return [text for source in self._sources.values() for text in _problems(source, now)]

    def counts(self) -> dict[str, dict[str, int]]:
        """By engine, what became of its batches."""
        with self._lock:
            return {
                name: dict(source.feed.counts) | {"malformed": source.malformed}
                for name, source in self._sources.items()
            }

    # ------------------------------------------------------------------ the loop

    def _turn(self) -> None:
        if not self._turns.acquire(blocking=False):
            return  # closed
        try:
            self._read()
        finally:
            self._turns.release()

    def _read(self) -> None:
        poller = zmq.Poller()
        for source in self._sources.values():
            for socket in source.sockets:
                poller.register(socket, zmq.POLLIN)
        poller.poll(POLL_MS)
        now = time.monotonic()
        for name, source in self._sources.items():
            source.read()
            if not source.live and now - source.changed_at >= EXPIRE_S and self.index.blocks(name):
                self._clear(name)


def _problems(source: EngineSource, now: float) -> Iterator[str]:
    if not source.live and now - source.changed_at >= UNREACHED_S:
        yield f"engine {source.address.name}: its KV events at {source.address.events} cannot be reached"
    if source.problem:
        yield f"engine {source.address.name}: {source.problem}"
