"""What bench/transfer.py moves, and the process that a roofline runs in."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Round

Int64s = npt.NDArray[np.int64]

#: For one round of one roofline, and for a process to start or end.
ROUND_S: Final = 60.0
END_S: Final = 10.0
SEED: Final = 7
ROUND_BYTES: Final = 96 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """A call moves ``blocks`` blocks of ``pieces`` pieces each. Several pieces of a block lie as the layers of a paged
    cache do: piece j of all blocks, then piece j + 1 of all. ``scattered``: in an order of no pattern, as the pages of
    a cache that has run for a while."""

    name: str
    blocks: int
    block_bytes: int
    pieces: int = 1
    scattered: bool = False

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def piece_bytes(self) -> int:
        return self.block_bytes // self.pieces

    @property
    def calls(self) -> int:
        """How many a round: few, so that systems take turns often on a machine whose speed drifts."""
        return max(3, min(24, ROUND_BYTES // self.nbytes))

    def offsets(self) -> Int64s:
        """i64[blocks, pieces]: where a block's pieces lie in the engine's memory."""
        block, piece = np.arange(self.blocks)[:, None], np.arange(self.pieces)[None, :]
        offsets = np.asarray((piece * self.blocks + block) * self.piece_bytes, np.int64)
        order = self.order()
        return offsets if order is None else offsets.ravel()[order].reshape(self.blocks, self.pieces)

    def order(self) -> list[int] | None:
        """Of scattered pieces: where piece i lies, in pieces."""
        count = self.blocks * self.pieces
        return random.Random(self.blocks).sample(range(count), count) if self.scattered else None


SHAPES: Final = (
    Shape("64 x 64 KiB", 64, 64 << 10),
    Shape("1024 x 32 KiB", 1024, 32 << 10),
    Shape("16 x (64 x 32 KiB)", 16, 2 << 20, 64),
    Shape("64 x 2 MiB", 64, 2 << 20),
    Shape("1 x 64 MiB", 1, 64 << 20),
)
BYTES_MAX: Final = max(shape.nbytes for shape in SHAPES)


def random_bytes(nbytes: int = BYTES_MAX) -> npt.NDArray[np.uint8]:
    """The same in every process."""
    return np.random.default_rng(SEED).integers(0, 256, nbytes, dtype=np.uint8)


def engine_memory(nbytes: int = BYTES_MAX) -> npt.NDArray[np.uint8]:
    """u8[nbytes], private, in huge pages where the kernel gives them, and aligned as torch's memory and pinned
    memory are. numpy's big arrays begin 16 bytes into a page: copies to there run at half their speed."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class Memory:
    """What an engine's and a node's bytes lie in: :func:`engine_memory`, and a memfd, as slabs are (pages of 4 KiB, but
    with ``--hugepages``). What a kernel copies out of another process costs twice as much from small pages as from
    huge ones, so a roofline has to read the same kind."""

    def __init__(self, *, filled: bool) -> None:
        fd = os.memfd_create("kvstrata-bench")
        os.ftruncate(fd, BYTES_MAX)
        self.slab = np.frombuffer(mmap.mmap(fd, BYTES_MAX), np.uint8)
        os.close(fd)
        self.engine = engine_memory()
        for buffer in (self.slab, self.engine):
            buffer[:] = random_bytes() if filled else 1  # every page is there

    def remote(self, op: str) -> npt.NDArray[np.uint8]:
        """What a transfer reads: the node's memory in a load, the engine's in a store."""
        return self.slab if op == "load" else self.engine

    def local(self, op: str) -> npt.NDArray[np.uint8]:
        """What it writes."""
        return self.engine if op == "load" else self.slab


class Worker:
    """A process that runs rounds when asked. ``main(pipe, *given)`` says ("ready", ...) or ("no", why) first, then
    answers each request with a :class:`Round` or the text of what went wrong, and ends when the pipe does."""

    def __init__(self, main: Callable[..., None], *given: object) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, *given))
        self._process.start()
        theirs.close()
        self._asked: object = "start"
        word, *told = self._receive(ROUND_S)
        self.problem = "" if word == "ready" else str(told[0])
        self.told: list[Any] = told

    def round(self, *what: object) -> Round:
        self.ask(*what)
        return self.answer()

    def ask(self, *what: object) -> None:
        """The first part of :meth:`round`, so that several can be at work at once."""
        self._asked = what[0]
        self._pipe.send(what)

    def answer(self) -> Round:
        answer = self.attempt()
        if not isinstance(answer, Round):
            raise SystemExit(f"{self._asked}: {answer}")
        return answer

    def attempt(self) -> Round | str:
        """As :meth:`answer`, but what went wrong is returned."""
        answer: Round | str = self._receive(ROUND_S)
        return answer

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def _receive(self, seconds: float) -> Any:
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
        except EOFError:
            raise SystemExit("a roofline's process ended: its reason is above") from None
        self.close()
        raise SystemExit(f"a roofline's process did not answer within {seconds:g} s")

    def close(self) -> None:
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def serve(pipe: Connection, systems: dict[str, Callable[..., Round]], *told: object) -> None:
    """Answer (system, ...) until the pipe ends."""
    pipe.send(("ready", *told))
    while True:
        try:
            system, *given = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(systems[system](*given))
        except Exception as error:  # noqa: BLE001 - said by the process that asked
            pipe.send(f"{type(error).__name__}: {error}")
