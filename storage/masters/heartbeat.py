"""The sidecar: a small process that tells every master each second that its node is alive.

It shares nothing with the node but a page of memory, in which the node's main loop leaves the time, and a
pipe. So a node whose interpreter is held up, or whose disk hangs, stays known to be alive, with the age
of its progress beside it; and when the node dies, the pipe ends and the masters hear of it at once.

Run as ``python -m kvstrata.storage.masters.heartbeat PAGE_FD PARENT_PID`` with one JSON line on stdin:
``{"node_id", "incarnation", "masters", "ticket_keys"}``, the last one the path of the ticket keys or null. A line
``quit`` ends it quietly. Imports are kept light.
"""

from __future__ import annotations

import ctypes
import io
import json
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import KVError, ProtocolError
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity

if TYPE_CHECKING:
    from kvstrata.transfer.security.tickets import TicketSource

PERIOD_S: Final = 1.0
ANSWER_S: Final = 1.0
#: How long a dying node's sidecar tries to tell its masters.
LAST_WORDS_S: Final = 2.0
PAGE_BYTES: Final = 4096
PR_SET_PDEATHSIG: Final = 1
_MONOTONIC_NS: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Task:
    """Who beats, and where."""

    node_id: str
    incarnation: int
    masters: tuple[str, ...]
    ticket_keys: Path | None = None

    @classmethod
    def parse(cls, line: str) -> Task:
        fields = json.loads(line)
        keys = fields.get("ticket_keys")
        return cls(fields["node_id"], fields["incarnation"], tuple(fields["masters"]), Path(keys) if keys else None)


class Beater:
    """Beats to one master, on a thread of its own: a master that hangs holds up no other."""

    def __init__(
        self, task: Task, master: str, page: mmap.mmap, dying: threading.Event, tickets: TicketSource | None = None
    ) -> None:
        self._task = task
        self._master = master
        self._page = page
        self._dying = dying
        self._identity = Identity.new("heartbeat", task.node_id, tickets)
        self._connection: Connection | None = None
        self.thread = threading.Thread(target=self._run, name=f"beat-{master}", daemon=True)

    def _run(self) -> None:
        while True:
            started = time.monotonic()
            dying = self._dying.is_set()
            self._beat(dying)
            if dying:
                return
            self._dying.wait(max(0.0, PERIOD_S - (time.monotonic() - started)))

    def _beat(self, dying: bool) -> None:
        try:
            if self._connection is None or self._connection.broken:
                self._connection = Connection.open(self._master, self._identity, silence_s=ANSWER_S, accept=_a_master)
            self._connection.refresh(time.monotonic() + ANSWER_S)
            beat = pb.Heartbeat(
                node_id=self._task.node_id,
                incarnation=self._task.incarnation,
                progress_age_ms=self._progress_age_ms(),
                dying=dying,
            )
            frame = self._connection.call(Kind.HEARTBEAT, beat.SerializeToString(), time.monotonic() + ANSWER_S)
            expect(pb.HeartbeatOk, frame, Kind.HEARTBEAT_OK)
        except KVError:  # it is tried again in a second, for ever; the node's own link logs what is wrong
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _progress_age_ms(self) -> int:
        moved_ns: int = _MONOTONIC_NS.unpack_from(self._page)[0]
        return min(0xFFFFFFFF, max(0, (time.monotonic_ns() - moved_ns) // 1_000_000))


def _a_master(hello: pb.HelloOk) -> None:
    if hello.role != "master":
        raise ProtocolError(f"a {hello.role or 'stranger'} answers where a master was")


def main(page_fd: int, parent: int) -> None:
    """Beat until told to quit, or until the parent is gone."""
    signals = _follow(parent)
    orders = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115  it is for life
    task = Task.parse(orders.readline().decode())
    page = mmap.mmap(page_fd, PAGE_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    dying = threading.Event()
    tickets = _tickets(task.ticket_keys, task.node_id) if task.ticket_keys is not None else None
    beaters = [Beater(task, master, page, dying, tickets) for master in task.masters]
    for beater in beaters:
        beater.thread.start()
    if _told_to_quit(orders, signals, parent):
        return
    dying.set()
    until = time.monotonic() + LAST_WORDS_S
    for beater in beaters:
        beater.thread.join(max(0.0, until - time.monotonic()))


def _tickets(keys: Path, node_id: str) -> TicketSource:
    from kvstrata.transfer.security.key_file import KeyFile
    from kvstrata.transfer.security.minted import node_tickets

    return node_tickets(KeyFile(keys), node_id)


def _follow(parent: int) -> int:
    """Have a signal sent when the parent dies, though somebody else may hold its end of the pipe.

    Returns a descriptor that becomes readable with each signal.
    """
    signals, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # Both may also go to the whole group of a terminal or a container: the parent says when to quit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the parent was gone before this began")
    return signals


def _told_to_quit(orders: io.RawIOBase, signals: int, parent: int) -> bool:
    """Block until the parent says quit (True) or has died (False)."""
    while True:
        ready, _, _ = select.select([orders.fileno(), signals], [], [])
        if orders.fileno() in ready:
            return orders.readline().strip() == b"quit"
        os.read(signals, 64)
        if os.getppid() != parent:
            return False


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
