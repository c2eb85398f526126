"""Rooflines of bench/run.py in a process of their own, which is open while ours takes turns with them."""

from __future__ import annotations

import sys
from functools import partial
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
    rounds = {"memcpy": partial(_memcpy, False), "memcpy+xxh3": partial(_memcpy, True)}
    rounds |= {"socket": partial(_socket, False), "socket+xxh3": partial(_socket, True)}
    serve(pipe, {**rounds, "echo": _echo})


def turns_of(worker: Worker, kind: str, shape: Shape, calls: int, note: str = "") -> dict[str, Turn]:
    """Copies and sockets, plain and hashed, each way."""

    def turn(system: str) -> Turn:
        return lambda: {
            Case(kind, op, shape.blocks, shape.block_bytes, note): worker.round(system, op, shape, calls)
            for op in ("store", "load")
        }

    return {name: turn(name) for name in ("memcpy", "memcpy+xxh3", "socket", "socket+xxh3")}


def _memcpy(hashed: bool, _: str, shape: Shape, calls: int) -> Round:
    pieces = shape.blocks * shape.pieces
    return memcpy_round(shape.piece_bytes, pieces, hashed=hashed, calls=calls, order=shape.order())


def _socket(hashed: bool, op: str, shape: Shape, calls: int) -> Round:
    pieces = shape.blocks * shape.pieces
    return socket_round(shape.piece_bytes, pieces, op, hashed=hashed, calls=calls, order=shape.order())


def _echo(hashes: int, hash_bytes: int, calls: int) -> Round:
    return echo_round(hashes * hash_bytes, ANSWER_BYTES + hashes, calls)
