"""Rooflines of a transfer but NIXL: copies and plain sockets (bench/rooflines.py), and process_vm_readv of one process'
memory by another: one call for up to 1,024 pieces, one thread. It is what UCX does over CMA, so no CMA transfer can
be faster than it for pieces that do not touch."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import sys
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Round, measure
from rooflines import memcpy_round, socket_round
from transfer_shapes import END_S, Memory, Shape, serve

IOVECS_MAX: Final = 1024

_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]


def rooflines(pipe: Connection) -> None:
    """The main of a :class:`transfer_shapes.Worker`."""
    reader = VmReader()
    try:
        serve(pipe, {"memcpy": _memcpy, "memcpy+xxh3": _hashed, "socket": _socket, "vm_readv": reader.round})
    finally:
        reader.close()


def _memcpy(op: str, shape: Shape) -> Round:
    return memcpy_round(shape.piece_bytes, shape.blocks * shape.pieces, hashed=False, calls=shape.calls)


def _hashed(op: str, shape: Shape) -> Round:
    return memcpy_round(shape.piece_bytes, shape.blocks * shape.pieces, hashed=True, calls=shape.calls)


def _socket(op: str, shape: Shape) -> Round:
    return socket_round(shape.piece_bytes, shape.blocks * shape.pieces, op, hashed=False, calls=shape.calls)


class VmReader:
    """Reads the memory of a child. A load scatters to where the pieces lie, a store gathers from there."""

    def __init__(self) -> None:
        context = mp.get_context("fork")
        ours, theirs = context.Pipe()
        self._pipe = ours
        self._child = context.Process(target=_hold, args=(theirs, ours))
        self._child.start()
        theirs.close()
        self._addresses: dict[str, int] = ours.recv()
        self._memory = Memory(filled=False)

    def round(self, op: str, shape: Shape) -> Round:
        paged = shape.offsets().ravel()
        packed = np.arange(len(paged), dtype=np.int64) * shape.piece_bytes
        ours, theirs = (paged, packed) if op == "load" else (packed, paged)
        local, remote = (
            np.stack([base + offset, np.full(len(paged), shape.piece_bytes)], axis=1).astype(np.uint64)
            for base, offset in ((self._memory.local(op).ctypes.data, ours), (self._addresses[op], theirs))
        )
        pid = self._child.pid or 0

        def call() -> None:
            for start in range(0, len(local), IOVECS_MAX):
                mine, other = local[start : start + IOVECS_MAX], remote[start : start + IOVECS_MAX]
                _read(pid, mine, other)

        call()
        return measure([call] * shape.calls, shape.calls * shape.nbytes)

    def close(self) -> None:
        self._pipe.close()
        self._child.join(END_S)
        if self._child.is_alive():
            self._child.kill()


def _read(pid: int, local: np.ndarray, remote: np.ndarray) -> None:  # type: ignore[type-arg]
    got = _readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    wanted = int(local[:, 1].sum())
    if got != wanted:
        reason = os.strerror(ctypes.get_errno()) if got < 0 else f"{got} of {wanted} bytes"
        raise OSError(f"process_vm_readv: {reason}")


def _hold(pipe: Connection, parents: Connection) -> None:
    parents.close()
    memory = Memory(filled=True)
    pipe.send({op: memory.remote(op).ctypes.data for op in ("load", "store")})
    try:
        pipe.recv()
    except EOFError:
        pass
