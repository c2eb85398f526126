"""What this machine can do at most: copies, hashes and plain sockets over the same pieces.

``memcpy_round``: numpy copies of the pieces, one thread; hashed: each piece copied, then hashed. ``socket_round``: one
request, then the pieces over one plain TCP socket from another process; hashed: each piece also hashed. ``echo_round``:
a request of as many bytes as a lookup has, and a short answer, over a unix socket.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Round, measure

Order = Sequence[int] | None
END_S: Final = 5.0


def memcpy_round(
    block_bytes: int,
    batch: int,
    *,
    hashed: bool,
    calls: int,
    order: Order = None,
    begin: Callable[[], None] = lambda: None,
) -> Round:
    """Copy ``batch`` pieces a call. ``order``: where piece i lies on one of both sides; as they come by default.
    ``begin`` returns when to begin, all being ready."""
    source, target = (_memory(side, batch * block_bytes).reshape(batch, block_bytes) for side in (0, 1))
    rows = [target[place] for place in (range(batch) if order is None else order)]

    def call() -> None:
        for index in range(batch):
            np.copyto(rows[index], source[index])
            if hashed:
                xxhash.xxh3_64_intdigest(rows[index])

    call()
    begin()
    return measure([call] * calls, calls * batch * block_bytes)


_memories: dict[int, npt.NDArray[np.uint8]] = {}


def _memory(side: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Kept from round to round, at a page's start, as slabs are; copies to 16 bytes behind it, where numpy's own memory
    begins, take longer."""
    if side not in _memories or len(_memories[side]) < nbytes:
        spare = np.zeros(nbytes + mmap.PAGESIZE, np.uint8)
        start = -spare.ctypes.data % mmap.PAGESIZE
        _memories[side] = spare[start : start + nbytes]
        _memories[side][:] = np.random.default_rng(side).integers(0, 256, nbytes, dtype=np.uint8)
    return _memories[side][:nbytes]


def socket_round(block_bytes: int, batch: int, op: str, *, hashed: bool, calls: int, order: Order = None) -> Round:
    """``load``: ask, then receive ``batch`` pieces. ``store``: send them, wait for a word."""
    with _peer(_serve, block_bytes * batch) as (sock, pid):
        rows = _memory(1, batch * block_bytes).reshape(batch, block_bytes)
        views = [memoryview(rows[place]) for place in (range(batch) if order is None else order)]
        call = _loader(sock, views, hashed) if op == "load" else _storer(sock, views, hashed)
        call()
        return measure([call] * calls, calls * batch * block_bytes, {"node": pid})


def echo_round(request_bytes: int, answer_bytes: int, calls: int) -> Round:
    """Latencies of a question and its answer between two Python processes over a unix socket."""
    with _peer(_echo, request_bytes, answer_bytes, family=socket.AF_UNIX) as (sock, pid):
        request, answer = bytes(request_bytes), memoryview(bytearray(answer_bytes))

        def call() -> None:
            sock.sendall(request)
            _receive(sock, answer)

        call()
        return measure([call] * calls, 0, {"master": pid})


def _loader(sock: socket.socket, views: list[memoryview], hashed: bool) -> Callable[[], None]:
    def call() -> None:
        sock.sendall(b"g")
        for view in views:
            got = 0
            while got < len(view):
                got += sock.recv_into(view[got:])
            if hashed:
                xxhash.xxh3_64_intdigest(view)

    return call


def _storer(sock: socket.socket, views: list[memoryview], hashed: bool) -> Callable[[], None]:
    def call() -> None:
        sock.sendall(b"p")
        for view in views:
            if hashed:
                xxhash.xxh3_64_intdigest(view)
            sock.sendall(view)
        sock.recv(1)

    return call


def _receive(sock: socket.socket, into: Any) -> bool:
    """False when the other side is gone."""
    got = 0
    while got < len(into):
        count = sock.recv_into(into[got:])
        if not count:
            return False
        got += count
    return True


@contextmanager
def _peer(
    serve: Callable[..., None], *given: int, family: socket.AddressFamily = socket.AF_INET
) -> Iterator[tuple[socket.socket, int]]:
    """A socket to a process that serves the other end, and its id."""
    if family == socket.AF_UNIX:
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        for sock in (ours, theirs):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    process = mp.get_context("fork").Process(target=_ended_by(serve), args=(ours, theirs, *given), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process.pid or 0
    finally:
        ours.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()


def _ended_by(serve: Callable[..., None]) -> Callable[..., None]:
    """The parent's end is closed in the child, so that it sees the parent's close."""

    def main(parents: socket.socket, own: socket.socket, *given: int) -> None:
        parents.close()
        serve(own, *given)

    return main


def _serve(connection: socket.socket, nbytes: int) -> None:
    buffer: Any = memoryview(bytearray(b"x" * nbytes))
    while word := connection.recv(1):
        if word == b"g":
            connection.sendall(buffer)
        elif _receive(connection, buffer):
            connection.sendall(b"k")


def _echo(connection: socket.socket, request_bytes: int, answer_bytes: int) -> None:
    request, answer = memoryview(bytearray(request_bytes)), bytes(answer_bytes)
    while _receive(connection, request):
        connection.sendall(answer)
