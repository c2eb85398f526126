"""Keeps virtual time across real engine processes: one request at a time, in the schedule's order.

The order is what makes a run reproducible from its seed. An engine that dies fails the request it had,
is reported, and its later requests go to the next engine that lives.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.messages import Finish, Outcome, Pipe, Ready, Setup, Work
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.processes import READY_S, Child, stop_all
from kvstrata.cli.replay.schedule import Schedule, Turn
from kvstrata.proto.errors import ProtocolError, Unavailable
from kvstrata.proto.logs import get_logger

#: Real seconds one request may take: far above the client's own deadlines, so that it means a stuck engine.
REQUEST_S = 120.0
#: The directory shows a stored block within this time (some 5 ms as a rule); an engine asks again until then.
SETTLE_S = 0.25
#: A block that was stored longer ago than this is taken to be in the directory, or evicted again.
SETTLED_AFTER_S = 0.25
STAGING_BYTES = 64 << 20
ENGINE_COMMAND = (sys.executable, "-m", "kvstrata.cli.replay.engine")

_log = get_logger(__name__)

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Measured:
    """What the real processes did: an outcome a turn, in the schedule's order, and what went wrong."""

    outcomes: list[Outcome]
    seconds: float = 0.0
    engines_lost: list[str] = field(default_factory=list)


class Coordinator:
    """Starts the engine processes of a replay and hands them its turns. Close it, also after an error."""

    def __init__(
        self,
        schedule: Schedule,
        options: ReplayOptions,
        masters: str,
        group: str,
        engine_command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        """``engine_command`` starts an engine; the number of its socket follows. Raises :class:`Unavailable` when one
        cannot start or reach the pool."""
        self._schedule = schedule
        self._engines: list[_EngineProcess] = []
        self._stored_at = np.full(schedule.unique_blocks, -np.inf)
        longest = max((len(turn.blocks) for turn in schedule.turns), default=1)
        staging_blocks = max(1, min(longest, STAGING_BYTES // options.block_bytes))
        try:
            for engine in range(options.engines):
                setup = Setup(
                    engine=engine,
                    masters=masters,
                    group=group,
                    block_bytes=options.block_bytes,
                    block_tokens=options.block_tokens,
                    private_blocks=options.private_blocks,
                    staging_blocks=staging_blocks,
                    settle_s=SETTLE_S,
                )
                self._engines.append(_EngineProcess(setup, engine_command))
            for process in self._engines:
                process.await_ready()
        except BaseException:
            self.close()
            raise

    def run(self, progress: Progress | None = None, enough: Callable[[], bool] = lambda: False) -> Measured:
        """Serve every turn, or as many as until ``enough`` says so; a failed one is an outcome with an error."""
        measured = Measured([])
        started = time.perf_counter()
        for turn in self._schedule.turns:
            measured.outcomes.append(self._serve(turn, measured))
            if progress is not None:
                progress(turn.index + 1, len(self._schedule.turns))
            if enough():
                break
        measured.seconds = time.perf_counter() - started
        return measured

    def close(self) -> None:
        """End the engines; those that do not end in time are killed."""
        for process in self._engines:
            process.finish()
        stop_all([process.child for process in self._engines])
        self._engines = []

    def _serve(self, turn: Turn, measured: Measured) -> Outcome:
        process = self._engine_for(turn)
        if process is None:
            return Outcome(index=turn.index, error="no engine is left")
        stored_at = self._stored_at[turn.blocks]
        recent = np.flatnonzero(stored_at > time.monotonic() - SETTLED_AFTER_S)
        work = Work(
            index=turn.index,
            salt=turn.salt,
            hit_limit=turn.hit_limit,
            settled=min(int(recent[-1]) + 1, turn.hit_limit) if len(recent) else 0,
            body=turn.blocks.tobytes() + self._schedule.hashes[turn.blocks].tobytes(),
        )
        try:
            outcome = process.serve(work)
            self._note_stored(turn.blocks, outcome)
        except (Unavailable, ProtocolError) as error:
            loss = process.lose(str(error))
            measured.engines_lost.append(loss)
            _log.error("engine_lost", engine=process.setup.engine, error=loss)
            return Outcome(index=turn.index, error=loss)
        return outcome

    def _engine_for(self, turn: Turn) -> _EngineProcess | None:
        for step in range(len(self._engines)):
            process = self._engines[(turn.engine + step) % len(self._engines)]
            if not process.lost:
                return process
        return None

    def _note_stored(self, blocks: npt.NDArray[np.int32], outcome: Outcome) -> None:
        stored = np.frombuffer(outcome.body, dtype=bool)
        if outcome.error:
            return
        if len(stored) != len(blocks):
            raise ProtocolError(f"the outcome of request {outcome.index} is about {len(stored)} blocks")
        # What was waited for once, and seen or not, is not waited for again.
        self._stored_at[blocks] = -np.inf
        self._stored_at[blocks[stored]] = time.monotonic()


class _EngineProcess:
    """One engine stand-in and the pipe to it."""

    def __init__(self, setup: Setup, engine_command: Sequence[str]) -> None:
        self.setup = setup
        self.lost = False
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*engine_command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self.child = Child(f"engine {setup.engine}", process)
        self._pipe = Pipe(ours)
        # All engines start at once; each finds its set-up waiting.
        self._pipe.send(setup, READY_S)

    def await_ready(self) -> None:
        try:
            ready = self._pipe.receive(Ready, READY_S)
        except Unavailable as error:
            raise Unavailable(f"{self.child.name} did not start: {self.child.died() or error}") from None
        if ready.error:
            raise Unavailable(f"{self.child.name} cannot use the pool at {self.setup.masters}: {ready.error}")

    def serve(self, work: Work) -> Outcome:
        self._pipe.send(work, REQUEST_S)
        outcome = self._pipe.receive(Outcome, REQUEST_S)
        if outcome.index != work.index:
            raise ProtocolError(f"{self.child.name} answered request {outcome.index}, not {work.index}")
        return outcome

    def lose(self, why: str) -> str:
        """Give the engine up; returns what to report."""
        self.lost = True
        death = self.child.died()
        self.child.stop()
        return death or f"{self.child.name}: {why}"

    def finish(self) -> None:
        """Ask it to end; closing the pipe says the same to one that does not listen."""
        try:
            self._pipe.send(Finish(), 1.0)
        except Unavailable as error:
            _log.debug("engine_not_told", engine=self.setup.engine, error=str(error))
        self._pipe.close()
