"""One paged engine's process, as the coordinator sees it: a pipe, a pid, and how it ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from kvstrata.cli.paged_replay.messages import KINDS, Begin, Prompt, Ready, Summary, pack
from kvstrata.cli.paged_replay.plan import Turn
from kvstrata.cli.replay.messages import Finish, Message, Pipe
from kvstrata.cli.replay.processes import Child, die_with_parent
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.proto.errors import ConfigError, Unavailable
from kvstrata.proto.logs import get_logger

#: Loading a model and allocating its cache, on a busy machine.
READY_S = 120.0
SEND_S = 60.0
#: The rest of a frame whose first bytes are there.
FRAME_S = 60.0
#: An engine that was told to finish ends its stores first.
SUMMARY_S = 30.0

_log = get_logger(__name__)


class EngineChild:
    """Starts at once; :meth:`await_ready` before the first :meth:`send`. Finish or lose it, then stop it."""

    def __init__(self, number: int, config: EngineConfig, salt: str, folder: Path) -> None:
        """``folder`` takes its log and its temporary files: they go with the folder."""
        self.number = number
        self.lost = False
        ours, theirs = socket.socketpair()
        log = folder / f"engine-{number}.log"
        one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs, log.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstrata.cli.paged_replay.engine_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                preexec_fn=die_with_parent,
                env={**os.environ, **one_thread, "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(folder)},
            )
        self.child = Child(f"engine {number}", process, log)
        self._pipe = Pipe(ours, KINDS)
        # All engines start at once; each finds its set-up waiting.
        self._pipe.send(Begin(number, msgspec.to_builtins(config), salt), SEND_S)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def await_ready(self) -> Ready:
        """Raises :class:`ConfigError` for what the engine was asked to be, ``Unavailable`` when it did not start."""
        try:
            ready = self._pipe.receive(Ready, READY_S)
        except Unavailable as error:
            why = self.child.died() or str(error)
            raise Unavailable(f"{self.child.name} did not start: {why}. {self.child.last_words()}".strip()) from None
        if ready.error:
            raise ConfigError(f"{self.child.name} cannot serve: {ready.error}")
        return ready

    def send(self, turn: Turn) -> None:
        self._pipe.send(Prompt(turn.index, turn.output_tokens, pack(turn.tokens)), SEND_S)

    def receive(self) -> Message:
        """One message; call it when the descriptor is readable."""
        return self._pipe.receive_any(FRAME_S)

    def finish(self) -> None:
        """Ask it to end; :meth:`summary` waits for it."""
        try:
            self._pipe.send(Finish(), SEND_S)
        except Unavailable as error:
            _log.warning("engine_not_told", engine=self.number, error=str(error))

    def summary(self) -> dict[str, float]:
        """Its counters, when it has closed its connector and ended; empty (and logged) when it gives none."""
        try:
            counters = self._pipe.receive(Summary, SUMMARY_S).counters
            self.child.process.wait(SUMMARY_S)
        except (Unavailable, subprocess.TimeoutExpired) as error:
            _log.warning("engine_did_not_end_well", engine=self.number, error=str(error))
            return {}
        return counters

    def lose(self, why: str) -> str:
        """Give the engine up; returns what to report."""
        self.lost = True
        try:
            self.child.process.wait(1.0)  # a closed pipe comes a moment before the exit status
        except subprocess.TimeoutExpired:
            _log.debug("engine_lost_but_alive", engine=self.number)
        death = self.child.died() or f"{self.child.name}: {why}"
        self.stop()
        return death

    def stop(self) -> None:
        """End it now if it has not ended."""
        self._pipe.close()
        self.child.stop()
