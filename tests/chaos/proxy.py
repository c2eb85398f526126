"""A TCP proxy that misbehaves on purpose: delay, stalls as of lost packets, resets, ends cut short, turned bits.

Loss on a TCP link shows to both ends as a pause of at least one retransmission time (200 ms on Linux); so
``loss`` makes each piece that passes wait that long with that probability. Faults may be set at any time.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import struct
import threading
import time
from types import TracebackType

PIECE_BYTES = 16 << 10
PIECES_MAX = 4096
RETRANSMIT_S = 0.2


class Proxy:
    """Listens on a free port of loopback and forwards to ``target``; :attr:`address` is where.

    ``delay_s`` each way, ``loss`` and ``flip`` a piece, ``reset_after`` and ``end_after`` bytes of a connection
    towards whoever asked (-1: never), ``hold`` stops all forwarding without closing anything.
    """

    def __init__(self, target: str, seed: int = 0) -> None:
        self.target = target
        self.delay_s = 0.0
        self.loss = 0.0
        self.flip = 0.0
        self.reset_after = -1
        self.end_after = -1
        self.connections = 0
        self._random = random.Random(seed)
        self._moving = threading.Event()
        self._moving.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self._closed = False
        self._spawn(self._accept)

    def hold(self) -> None:
        self._moving.clear()

    def go_on(self) -> None:
        self._moving.set()

    def heal(self) -> None:
        """No faults from now on."""
        self.delay_s = self.loss = self.flip = 0.0
        self.reset_after = self.end_after = -1
        self.go_on()

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            try:
                far = socket.create_connection((host, int(port)), 5)
            except OSError:
                near.close()
                continue
            for sock in (near, far):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._closed:
                    near.close()
                    far.close()
                    return
                self._open |= {near, far}
            self.connections += 1
            self._spawn(self._forward, near, far, False)
            self._spawn(self._forward, far, near, True)

    def _forward(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        """Read on one thread, deliver on another, so that a delay is one and does not add up."""
        pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(PIECES_MAX)
        self._spawn(self._deliver, pieces, sink, answers)
        due = 0.0
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                wait_s = self.delay_s + (RETRANSMIT_S if self._chance(self.loss) else 0.0)
                due = max(due, time.monotonic() + wait_s)
                pieces.put((due, self._turned(piece) if self._chance(self.flip) else piece))
        pieces.put((due, b""))
        self._end(source)

    def _deliver(self, pieces: queue.Queue[tuple[float, bytes]], sink: socket.socket, answers: bool) -> None:
        passed, alive = 0, True
        while True:
            due, piece = pieces.get()
            if not piece:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            self._moving.wait()
            if not alive:
                continue  # the reading side is not to wait for room
            bound = min((each for each in (self.reset_after, self.end_after) if answers and each >= 0), default=None)
            try:
                if bound is not None and passed + len(piece) > bound:
                    sink.sendall(piece[: max(0, bound - passed)])
                    self._end(sink, reset=self.reset_after == bound)
                    alive = False
                else:
                    sink.sendall(piece)
                    passed += len(piece)
            except OSError:
                alive = False
        self._end(sink)

    def _end(self, sock: socket.socket, *, reset: bool = False) -> None:
        with contextlib.suppress(OSError):
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        with self._lock:
            self._open.discard(sock)

    def _chance(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate

    def _turned(self, piece: bytes) -> bytes:
        turned = bytearray(piece)
        turned[self._random.randrange(len(turned))] ^= 1 << self._random.randrange(8)
        return bytes(turned)

    def reset_all(self) -> None:
        """Break every connection with a reset, now."""
        with self._lock:
            open_now = list(self._open)
        for sock in open_now:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self.go_on()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset_all()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
