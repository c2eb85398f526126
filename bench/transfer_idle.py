"""What an attached node and an attached client cost while nothing is asked of them: CPU of the whole process trees."""

from __future__ import annotations

import multiprocessing as mp
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Final

import psutil

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from transfer_pool import Way, pool

START_S: Final = 60.0
#: After the last transfer, before the clock runs: whoever looks more often for a while has stopped by then.
SETTLE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Idle:
    """Per cent of a core over ``seconds``, by a node and by one client of it that has stored and loaded once."""

    rails: str
    transport: str
    seconds: float
    node_percent: float
    client_percent: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def idle(dram: str, rails: str, transport: str, seconds: float) -> Idle:
    """One pool, one client, and then silence."""
    context = mp.get_context("spawn")
    with pool(dram, rails) as running:
        ours, theirs = context.Pipe()
        client = context.Process(target=_attached, args=(theirs, running.master, transport))
        client.start()
        theirs.close()
        try:
            if not ours.poll(START_S):
                raise SystemExit("the idle client did not start")
            reached = ours.recv()
            time.sleep(SETTLE_S)
            watched = [psutil.Process(running.node_pid), psutil.Process(client.pid)]
            before, began = [cpu_s(process) for process in watched], time.monotonic()
            time.sleep(seconds)
            took_s = time.monotonic() - began
            node, engine = (
                round(100 * (cpu_s(process) - spent) / took_s, 2)
                for process, spent in zip(watched, before, strict=True)
            )
            return Idle(rails, reached, round(took_s, 1), node, engine)
        finally:
            ours.close()
            client.join(START_S)
            if client.is_alive():
                client.kill()


def cpu_s(process: psutil.Process) -> float:
    """Of a process and its children, in seconds."""
    return float(sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)]))


def _attached(pipe: Connection, master: str, transport: str) -> None:
    way = Way("idle", master, transport)
    pipe.send(way.reached)
    try:
        pipe.recv()
    except EOFError:
        pass
    way.close()
