"""Re-blocking: from a trace's block ids to the pool's blocks, with chained hashes.

A pool block exists only when it is full. Its hash is blake2b-16 over its parent's hash and the trace ids
it covers, so that equal hashes mean equal prefixes, as with an engine's own chained hashes. Blocks also
get a small number each (per salt), which is what the simulator and the engines' private caches index by.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.traces import Request
from kvstrata.proto.errors import ConfigError

HASH_BYTES = 16

_SEED = b"kvstrata.replay"


@dataclass(frozen=True, slots=True)
class Blocking:
    """How trace blocks make pool blocks: ``ids_a_block`` ids each, or ``blocks_an_id`` blocks of one id.

    One of the two is 1. Raises :class:`ConfigError` when neither size divides the other.
    """

    trace_tokens: int
    block_tokens: int

    def __post_init__(self) -> None:
        large, small = max(self.trace_tokens, self.block_tokens), min(self.trace_tokens, self.block_tokens)
        if small < 1 or large % small:
            raise ConfigError(
                f"block_tokens is {self.block_tokens}, the trace's blocks have {self.trace_tokens} tokens: "
                f"choose a divisor or a multiple of {self.trace_tokens}"
            )

    @property
    def ids_a_block(self) -> int:
        return max(1, self.block_tokens // self.trace_tokens)

    @property
    def blocks_an_id(self) -> int:
        return max(1, self.trace_tokens // self.block_tokens)

    def full_blocks(self, tokens_in: int, ids: int) -> int:
        """Pool blocks that a prompt of ``tokens_in`` tokens and ``ids`` trace ids fills."""
        return min(tokens_in // self.block_tokens, ids * self.trace_tokens // self.block_tokens)


class BlockTable:
    """Every block seen so far: numbers from 0 in order of first appearance, and their hashes.

    The number stands for (salt, hash): two tenants with one prefix have one hash and two numbers.
    """

    def __init__(self, blocking: Blocking) -> None:
        self.blocking = blocking
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._hashes = bytearray()
        self._root_hash = hashlib.blake2b(b"%s/%d" % (_SEED, blocking.block_tokens), digest_size=HASH_BYTES).digest()
        self._roots: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._hashes) // HASH_BYTES

    def hashes(self) -> npt.NDArray[np.uint8]:
        """uint8 [blocks, 16]: row i is the hash of block i."""
        return np.frombuffer(bytes(self._hashes), dtype=np.uint8).reshape(-1, HASH_BYTES)

    def chain(self, salt: str) -> Chain:
        """A reader of one session's prompts: cheap where a prompt repeats the one before."""
        return Chain(self, self._roots.setdefault(salt, -1 - len(self._roots)))

    def child(self, parent: int, covered: bytes) -> int:
        """The number of the block that follows ``parent`` (or a salt's root, negative) and covers these ids."""
        key = (parent, covered)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self)
            above = self._root_hash if parent < 0 else self._hashes[parent * HASH_BYTES : (parent + 1) * HASH_BYTES]
            self._hashes += hashlib.blake2b(bytes(above) + covered, digest_size=HASH_BYTES).digest()
        return number


class Chain:
    """Turns the prompts of one session into block numbers, keeping the last one to chain only what changed."""

    def __init__(self, table: BlockTable, root: int) -> None:
        self._table = table
        self._root = root
        self._windows = np.empty((0, 1), dtype=np.int64)
        self._numbers = np.empty(0, dtype=np.int32)

    def numbers(self, request: Request) -> npt.NDArray[np.int32]:
        """int32 [full blocks]: the prompt's blocks, head first. O(changed blocks) in Python, the rest vectorised."""
        windows = self._cover(request)
        shared = self._shared(windows)
        numbers = np.empty(len(windows), dtype=np.int32)
        numbers[:shared] = self._numbers[:shared]
        parent = int(numbers[shared - 1]) if shared else self._root
        for position in range(shared, len(windows)):
            parent = self._table.child(parent, windows[position].tobytes())
            numbers[position] = parent
        self._windows, self._numbers = windows, numbers
        return numbers

    def _cover(self, request: Request) -> npt.NDArray[np.int64]:
        """int64 [full blocks, ids each]; where several blocks share an id, (id, part) tells them apart."""
        blocking = self._table.blocking
        ids = request.trace_ids()
        full = blocking.full_blocks(request.tokens_in, len(ids))
        if blocking.blocks_an_id == 1:
            return ids[: full * blocking.ids_a_block].reshape(full, blocking.ids_a_block)
        position = np.arange(full, dtype=np.int64)
        return np.stack((ids[position // blocking.blocks_an_id], position % blocking.blocks_an_id), axis=1)

    def _shared(self, windows: npt.NDArray[np.int64]) -> int:
        both = min(len(windows), len(self._windows))
        if both == 0:
            return 0
        differs = (windows[:both] != self._windows[:both]).any(axis=1)
        first = int(differs.argmax())
        return first if differs[first] else both
