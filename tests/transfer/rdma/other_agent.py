"""A process with an agent and patterned memory, for tests to read from, to be read by, to stop and to kill.

It speaks lines of JSON on stdin and stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.transfer.rdma.engine import Pieces
from kvstrata.transfer.rdma.found import find_rails
from kvstrata.transfer.rdma.owner import open_engine
from kvstrata.transfer.rdma.pattern import pattern
from kvstrata.transfer.rdma.rails import RailMode, RailOptions

ROOT = Path(__file__).resolve().parents[3]
CMA = RailOptions(RailMode.CMA)


def main() -> None:
    """``argv``: bytes of memory, and the seed of its pattern. The first line says where it is and what its agent is."""
    engine = open_engine("other", find_rails(CMA), CMA)
    memory = pattern(int(sys.argv[2]), int(sys.argv[1])).copy()
    registered = engine.register(memory.ctypes.data, memory.nbytes)
    _say({"metadata": engine.metadata().hex(), "address": memory.ctypes.data})
    scratch = np.zeros(memory.nbytes, np.uint8)
    engine.register(scratch.ctypes.data, scratch.nbytes)
    for line in sys.stdin:
        asked = json.loads(line)
        match asked["do"]:
            case "read":
                engine.stir()
                peer = engine.add_peer(bytes.fromhex(asked["metadata"]))
                scratch[:] = 0
                target, source, length = (np.array(asked[name], np.int64) for name in ("target", "source", "length"))
                job = engine.read(peer, Pieces(target + scratch.ctypes.data, length), Pieces(source, length))
                job.wait(time.monotonic() + 20)
                _say({"state": job.state.value, "problem": job.problem, "bytes": scratch.tobytes().hex()})
            case "read on":
                peer = engine.add_peer(bytes.fromhex(asked["metadata"]))
                whole = np.array([memory.nbytes])
                remote = Pieces(np.array([asked["source"]]), whole)
                while True:
                    job = engine.read(peer, Pieces(np.array([scratch.ctypes.data]), whole), remote)
                    job.wait(time.monotonic() + 20)
                    _say({"state": job.state.value})
            case "health":
                _say(engine.health())
            case "end":
                registered.close()
                engine.close()
                return


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class Other:
    """Such a process, from the outside."""

    def __init__(self, nbytes: int, seed: int) -> None:
        command = [sys.executable, "-m", "tests.transfer.rdma.other_agent", str(nbytes), str(seed)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )
        told = self.answer()
        self.metadata, self.address = bytes.fromhex(told["metadata"]), int(told["address"])

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def tell(self, do: str, **more: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()

    def ask(self, do: str, **more: object) -> dict[str, Any]:
        self.tell(do, **more)
        return self.answer()

    def stop(self) -> None:
        """Stopped when it returns: each thread of it."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass


if __name__ == "__main__":
    main()
