"""A rank's process, as the executor holds it: started, spoken to, known dead at once, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from typing import Final

import msgspec

from kvstrata.engine_adapter.paged.ranks.collective import RankGroup
from kvstrata.engine_adapter.paged.ranks.rank_messages import EXIT_FAILED, FrameSocket, RankFds
from kvstrata.proto.logs import get_logger

#: What a rank wrote last, for an error's text.
LAST_LINES: Final = 30
LINE_CHARACTERS_MAX: Final = 500
#: A rank reads whenever it does not compute, and nothing is sent to it while it does.
SEND_S: Final = 30.0
#: Numbers of threads are read by BLAS libraries when they are loaded.
_THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

_log = get_logger(__name__)


class RankProcess:
    """``channel``: frames to and from it. ``pidfd``: readable when it has ended. ``wake_fd``: readable when it has
    an outcome to fetch. What it prints goes to this process's stderr, and its last lines are kept."""

    def __init__(self, rank: int, group: RankGroup, threads: int) -> None:
        self.rank = rank
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        ours, theirs = socket.socketpair()
        fds = RankFds(channel=theirs.fileno(), wake=self.wake_fd, memory=group.memory_fd, peers=group.peer_fds(rank))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstrata.engine_adapter.paged.ranks.rank", msgspec.json.encode(fds).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[fds.channel, fds.wake, fds.memory, *fds.peers.values()],
                start_new_session=True,  # Ctrl-C reaches the executor alone, which ends its ranks
                env=os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads)),
            )
        except OSError:
            ours.close()
            os.close(self.wake_fd)
            raise
        finally:
            theirs.close()
        self.pidfd = os.pidfd_open(self._process.pid)
        self.channel = FrameSocket(ours, self.name, SEND_S)
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._pump = threading.Thread(target=self._pass_on, name=f"kvstrata-rank-{rank}-output", daemon=True)
        self._pump.start()

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    def died(self) -> str:
        """How it ended, empty while it lives."""
        code = self._process.poll()
        if code is None:
            return ""
        if code < 0:
            return f"{self.name} was ended by {signal.Signals(-code).name}"
        return f"{self.name} exited with code {code}"

    @property
    def vanished(self) -> bool:
        """It has ended, and not by a failure that it reported."""
        return self._process.poll() not in (None, EXIT_FAILED)

    def last_words(self) -> str:
        """The end of what it printed; of a dead one, all of that has been read."""
        if self._process.poll() is not None:
            self._pump.join(1.0)
        return "\n".join(self._lines)

    def drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def terminate(self) -> None:
        self._process.terminate()

    def end(self, timeout_s: float) -> None:
        """Wait for its end, kill it past the timeout; reaps it and closes what belongs to it. Idempotent."""
        if self.pidfd < 0:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            if timeout_s:
                _log.warning("rank_killed", rank=self.rank, pid=self.pid, timeout_s=timeout_s)
            self._process.kill()
            self._process.wait()
        self._pump.join(1.0)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.channel.close()
        os.close(self.wake_fd)
        os.close(self.pidfd)
        self.wake_fd = self.pidfd = -1

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip("\n")[:LINE_CHARACTERS_MAX]
            self._lines.append(text)
            # With stderr gone there is nobody to tell, and the rank must still be able to write.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{text}\n")
