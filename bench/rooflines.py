"""What this machine can do at most: copies, hashes and plain sockets over the same pieces.

``memcpy``: numpy copies of the pieces, one thread. ``memcpy+xxh3``: each piece copied, then hashed.
``tcp``: one request, then the pieces over one plain socket from another process; ``tcp+xxh3`` hashes them.
"""

from __future__ import annotations

import mmap
import multiprocessing as mp
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Round, calls_for, measure


def memcpy_round(block_bytes: int, batch: int, *, hashed: bool, calls: int = 0) -> Round:
    """Copy ``batch`` pieces a call. ``calls``: 0 for as many as :func:`cases.calls_for` says."""
    source, target = (_aligned(batch * block_bytes).reshape(batch, block_bytes) for _ in range(2))
    source[:] = np.random.default_rng(1).integers(0, 256, (batch, block_bytes), dtype=np.uint8)

    def call() -> None:
        for index in range(batch):
            np.copyto(target[index], source[index])
            if hashed:
                xxhash.xxh3_64_intdigest(target[index])

    call()
    count = calls or calls_for(block_bytes, batch)
    return measure([call] * count, count * batch * block_bytes)


def _aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """At a page's start, as slabs are; copies to 16 bytes behind it, where numpy's own memory begins, take longer."""
    spare = np.zeros(nbytes + mmap.PAGESIZE, np.uint8)
    start = -spare.ctypes.data % mmap.PAGESIZE
    return spare[start : start + nbytes]


def socket_round(block_bytes: int, batch: int, op: str, *, hashed: bool, calls: int = 0) -> Round:
    """``load``: ask, then receive ``batch`` pieces. ``store``: send them, wait for a word."""
    with _peer(block_bytes * batch) as sock:
        target = np.zeros((batch, block_bytes), np.uint8)
        views = [memoryview(row) for row in target]
        count = calls or calls_for(block_bytes, batch)
        call = _loader(sock, views, hashed) if op == "load" else _storer(sock, views, hashed)
        call()
        return measure([call] * count, count * batch * block_bytes)


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


@contextmanager
def _peer(nbytes: int) -> Iterator[socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    process = mp.get_context("fork").Process(target=_serve, args=(listener, nbytes), daemon=True)
    process.start()
    sock = socket.create_connection(listener.getsockname())
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield sock
    finally:
        sock.close()
        listener.close()
        process.join(5)


def _serve(listener: socket.socket, nbytes: int) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer: Any = memoryview(bytearray(nbytes))
    while word := connection.recv(1):
        if word == b"g":
            connection.sendall(buffer)
            continue
        got = 0
        while got < nbytes:
            got += connection.recv_into(buffer[got:])
        connection.sendall(b"k")
