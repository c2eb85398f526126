"""The replay's engine stand-in over Mooncake Store: the same engine, private cache, bytes and checks; other calls.

``replay_mooncake.py PACKAGES FD``: ``PACKAGES`` is the site-packages of an environment that has Mooncake, ``FD`` the
socket to the coordinator. The set-up's ``masters`` is ``HOST:PORT`` of a ``mooncake_master`` (by TCP), or
``shm:HOST:PORT`` of a ``mooncake_client`` of this host (through shared memory).
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.engine import run
from kvstrata.cli.replay.messages import Pipe, Setup
from kvstrata.client import Client
from kvstrata.client.results import LoadResult, Lookup, StoreResult
from kvstrata.proto.errors import Unavailable
from kvstrata.proto.status import BlockStatus, Tier

SHM: Final = "shm:"
#: Memory that Mooncake keeps in each engine, beyond what the engine moves blocks through.
BUFFER_BYTES: Final = 64 << 20
#: What ``batch_put_from`` answers for a key that is there, and for one without room (``types.h`` of Mooncake).
_EXISTS: Final = -705
_NO_ROOM: Final = -200


@dataclass(frozen=True, slots=True)
class Rows:
    """Addresses of blocks in the engine's staging memory."""

    addresses: list[int]

    def __getitem__(self, which: slice) -> Rows:
        return Rows(self.addresses[which])


@dataclass(frozen=True, slots=True)
class Staging:
    """The memory that blocks move through."""

    bytes: npt.NDArray[np.uint8]
    block_bytes: int

    def rows(self, namespace: str) -> Rows:
        first = self.bytes.ctypes.data
        return Rows(list(range(first, first + self.bytes.nbytes, self.block_bytes)))


class MooncakeClient:
    """The calls of :class:`kvstrata.client.Client` that the engine makes, as one batched call of Mooncake's each."""

    def __init__(self, setup: Setup, store: Any) -> None:
        self._store = store
        self._block_bytes = setup.block_bytes
        self._shared = setup.masters.startswith(SHM)
        address = setup.masters.removeprefix(SHM)
        if self._shared:
            code = store.setup_dummy(2 * BUFFER_BYTES, BUFFER_BYTES, address)
        else:
            code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", address)
        if code:
            raise Unavailable(f"Mooncake at {address} answers {code}")

    def namespace(self, group: str, **_: int) -> str:
        return group

    def allocate(self, nbytes: int) -> Staging:
        if self._shared:
            address = self._store.alloc_from_mem_pool(nbytes)
            if not address:
                raise Unavailable(f"Mooncake has no {nbytes} bytes of shared memory for an engine")
            memory = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
        else:
            memory = np.zeros(nbytes, np.uint8)
        if code := self._store.register_buffer(memory.ctypes.data, nbytes):
            raise Unavailable(f"Mooncake does not take memory of {nbytes} bytes: {code}")
        return Staging(memory, self._block_bytes)

    def lookup(self, namespace: str, salt: str, hashes: bytes) -> Lookup:
        began = time.perf_counter()
        present = np.array(self._store.batch_is_exist(_keys(namespace, salt, hashes))) == 1
        hits = len(present) if present.all() else int(present.argmin())
        tiers = np.where(present, int(Tier.DRAM), 0).astype(np.uint8)
        return Lookup(hits, present, tiers, {}, seconds=time.perf_counter() - began)

    def load(self, namespace: str, salt: str, hashes: bytes, rows: Rows) -> LoadResult:
        began = time.perf_counter()
        sizes = [self._block_bytes] * len(rows.addresses)
        got = np.array(self._store.batch_get_into(_keys(namespace, salt, hashes), rows.addresses, sizes))
        status = np.where(got == self._block_bytes, BlockStatus.LOADED, BlockStatus.MISSING).astype(np.uint8)
        tiers = np.full(len(status), int(Tier.DRAM), np.uint8)
        return LoadResult.of(status, tiers, time.perf_counter() - began, 0)

    def store(
        self, namespace: str, salt: str, hashes: bytes, rows: Rows, *, parent: bytes | None, first_index: int
    ) -> StoreResult:
        began = time.perf_counter()
        sizes = [self._block_bytes] * len(rows.addresses)
        codes = self._store.batch_put_from(_keys(namespace, salt, hashes), rows.addresses, sizes)
        status = np.array([_status(code) for code in codes], np.uint8)
        return StoreResult.of(status, time.perf_counter() - began, 0)

    def close(self) -> None:
        self._store.close()


def _keys(namespace: str, salt: str, hashes: bytes) -> list[str]:
    digits = hashes.hex()
    return [f"{namespace}/{salt}/{digits[at : at + 32]}" for at in range(0, len(digits), 32)]


def _status(code: int) -> BlockStatus:
    if code == 0:
        return BlockStatus.STORED
    if code == _EXISTS:
        return BlockStatus.ALREADY_PRESENT
    return BlockStatus.FULL if code == _NO_ROOM else BlockStatus.REFUSED


def _quiet() -> None:
    """Python's lines go to stderr as ever; the library's, of which there is one a missing block, go nowhere."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def main(arguments: Sequence[str]) -> int:
    packages, descriptor = arguments
    _quiet()
    sys.path.append(packages)  # after ours: only what we do not have is taken from there
    from mooncake.store import MooncakeDistributedStore

    def client_of(setup: Setup) -> Client:
        return cast(Client, MooncakeClient(setup, MooncakeDistributedStore()))

    return run(Pipe(socket.socket(fileno=int(descriptor))), client_of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
