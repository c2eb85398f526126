"""One case on real engines: every turn sent, timed, and accounted for."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.cli.paged_replay.closed_loop import ClosedLoop
from kvstrata.cli.paged_replay.engine_child import EngineChild
from kvstrata.cli.paged_replay.messages import FirstToken, Ready, Served, unpack
from kvstrata.cli.paged_replay.options import CaseName
from kvstrata.cli.paged_replay.plan import Plan, Turn
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.proto.errors import ProtocolError, Unavailable
from kvstrata.proto.logs import get_logger

#: One request may take this long, queue included: far beyond any sensible one, so that it means a stuck engine.
REQUEST_S = 900.0
POLL_S = 1.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one turn. Seconds are measured here, from before sending it. ``error`` empty: it was served."""

    index: int
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    local_tokens: int = 0
    external_tokens: int = 0
    lookup_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    engine_s: float = 0.0
    output: tuple[int, ...] = ()
    error: str = ""

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.local_tokens - self.external_tokens


@dataclass(slots=True)
class CaseRun:
    """All outcomes in the order of the turns' indices, each engine's counters, and what was lost."""

    name: CaseName
    outcomes: list[Outcome]
    seconds: float = 0.0
    ready: Ready = field(default_factory=lambda: Ready(0))
    counters: list[dict[str, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def counted(self, name: str) -> float:
        """A counter of all engines together."""
        return sum(counters.get(name, 0.0) for counters in self.counters)


class Case:
    """Runs a plan on engine processes of its own. Close it, also after an error."""

    def __init__(self, name: CaseName, plan: Plan, configs: Sequence[EngineConfig], salt: str, folder: Path) -> None:
        """Raises ``ConfigError`` or :class:`Unavailable` when an engine cannot start."""
        self._plan = plan
        self._run = CaseRun(name, [Outcome(turn.index, error="it was never sent") for turn in plan.turns])
        self._sent_at: dict[int, float] = {}
        self._first_at: dict[int, float] = {}
        self._serving: dict[int, EngineChild] = {}
        self._engines: list[EngineChild] = []
        self._selector = selectors.DefaultSelector()
        folder.mkdir()
        try:
            for number, config in enumerate(configs):
                self._engines.append(EngineChild(number, config, salt, folder))
            for engine in self._engines:
                self._run.ready = engine.await_ready()
                self._selector.register(engine, selectors.EVENT_READ, engine)
        except BaseException:
            self.close()
            raise

    def run(self, concurrency: int, progress: Callable[[], None]) -> CaseRun:
        """Serve every turn; ``progress()`` after each. A failed one is an outcome with an error."""
        loop = ClosedLoop(self._plan.sessions, concurrency)
        started = time.monotonic()
        while not loop.finished:
            ended = [turn for turn in loop.due(time.monotonic()) if not self._send(turn)]
            ended += [] if ended else self._receive(loop)
            for turn in ended:
                loop.ended(turn, time.monotonic())
                progress()
        self._run.seconds = time.monotonic() - started
        alive = [engine for engine in self._engines if not engine.lost]
        for engine in alive:
            engine.finish()
        self._run.counters = [engine.summary() for engine in alive]
        return self._run

    def close(self) -> None:
        """End the engines; those that do not end in time are killed."""
        for engine in self._engines:
            engine.stop()
        self._selector.close()

    def _send(self, turn: Turn) -> bool:
        """Send it to its engine, or the next that lives; False when it ended at once, with an error."""
        for step in range(len(self._engines)):
            engine = self._engines[(turn.engine + step) % len(self._engines)]
            if engine.lost:
                continue
            self._serving[turn.index] = engine
            self._sent_at[turn.index] = time.monotonic()
            try:
                engine.send(turn)
            except Unavailable as error:
                self._lose(engine, str(error))
                self._fail(turn, f"{engine.child.name} took no request: {error}")
                return False
            return True
        self._fail(turn, "no engine is left")
        return False

    def _receive(self, loop: ClosedLoop) -> list[Turn]:
        """Wait for what engines say, or until a turn is due; the turns that ended."""
        next_at = loop.next_at()
        wait_s = POLL_S if next_at is None else max(0.0, min(POLL_S, next_at - time.monotonic()))
        in_flight = {turn.index: turn for turn in loop.in_flight}
        ended: dict[int, Turn] = {}
        for key, _ in self._selector.select(wait_s):
            engine: EngineChild = key.data
            try:
                message = engine.receive()
                if isinstance(message, FirstToken):
                    self._first_at[message.index] = time.monotonic()
                elif isinstance(message, Served) and message.index in in_flight:
                    self._serve(message)
                    ended[message.index] = in_flight[message.index]
                else:
                    raise ProtocolError(f"{engine.child.name} sent {message.kind!r} about nothing it was asked")
            except (Unavailable, ProtocolError) as error:
                self._lose(engine, str(error))
        for turn in in_flight.values():
            engine = self._serving[turn.index]
            if not engine.lost and time.monotonic() - self._sent_at[turn.index] > REQUEST_S:
                self._lose(engine, f"request {turn.index} has not ended in {REQUEST_S:g} s")
            if engine.lost and turn.index not in ended:
                self._fail(turn, f"{engine.child.name} was lost: {self._run.faults[-1]}")
                ended[turn.index] = turn
        return list(ended.values())

    def _serve(self, served: Served) -> None:
        now, sent_at = time.monotonic(), self._sent_at[served.index]
        self._run.outcomes[served.index] = Outcome(
            index=served.index,
            ttft_s=self._first_at.get(served.index, now) - sent_at,
            total_s=now - sent_at,
            prompt_tokens=served.prompt_tokens,
            local_tokens=served.local_tokens,
            external_tokens=served.external_tokens,
            lookup_s=served.lookup_s,
            load_s=served.load_s,
            compute_s=served.compute_s,
            engine_s=served.engine_s,
            output=tuple(unpack(served.body)),
            error=served.error,
        )

    def _fail(self, turn: Turn, why: str) -> None:
        self._run.outcomes[turn.index] = Outcome(turn.index, error=why)

    def _lose(self, engine: EngineChild, why: str) -> None:
        self._selector.unregister(engine)
        loss = engine.lose(why)
        self._run.faults.append(loss)
        _log.error("engine_lost", engine=engine.number, error=loss)
