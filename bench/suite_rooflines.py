"""Rooflines of bench/run.py in a process of their own, which is open while ours takes turns with them."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Case, Round
from rooflines import echo_round, memcpy_round, socket_round
from suite_scale import Turn
from transfer_shapes import Shape, Worker, serve

#: What a lookup's answer has beside a byte a block: a bare echo gives the same.
ANSWER_BYTES = 32


def rooflines(pipe: Connection) -> None:
    """The main of a :class:`transfer_shapes.Worker`."""
    serve(pipe, {"memcpy": _memcpy, "memcpy+xxh3": _hashed, "socket": _socket, "socket+xxh3": _verified, "echo": _echo})


def turns_of(worker: Worker, kind: str, shape: Shape, calls: int, note: str = "") -> dict[str, Turn]:
    """Copies and sockets, plain and hashed, each way."""

    def turn(system: str) -> Turn:
        return lambda: {
            Case(kind, op, shape.blocks, shape.block_bytes, note): worker.round(system, op, shape, calls)
            for op in ("store", "load")
        }

    return {name: turn(name) for name in ("memcpy", "memcpy+xxh3", "socket", "socket+xxh3")}


def _pieces(shape: Shape) -> tuple[int, int, list[int] | None]:
    order = shape.order() if hasattr(shape, "order") else None
    return shape.piece_bytes, shape.blocks * shape.pieces, order


def _memcpy(op: str, shape: Shape, calls: int) -> Round:
    size, count, order = _pieces(shape)
    return memcpy_round(size, count, hashed=False, calls=calls, order=order)


def _hashed(op: str, shape: Shape, calls: int) -> Round:
    size, count, order = _pieces(shape)
    return memcpy_round(size, count, hashed=True, calls=calls, order=order)


def _socket(op: str, shape: Shape, calls: int) -> Round:
    size, count, order = _pieces(shape)
    return socket_round(size, count, op, hashed=False, calls=calls, order=order)


def _verified(op: str, shape: Shape, calls: int) -> Round:
    size, count, order = _pieces(shape)
    return socket_round(size, count, op, hashed=True, calls=calls, order=order)


def _echo(hashes: int, hash_bytes: int, calls: int) -> Round:
    return echo_round(hashes * hash_bytes, ANSWER_BYTES + hashes, calls)
