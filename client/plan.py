"""Pure functions: which node serves which positions of a call, in pieces that fit one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto.keys import HASHES_MAX
from kvstrata.proto.status import PlaceState
from kvstrata.proto.wire import MESSAGE_BYTES_MAX

_NEW: Final = int(PlaceState.NEW)
_PRESENT: Final = int(PlaceState.PRESENT)
_SENT: Final = bytes((_NEW, _PRESENT))

Positions = npt.NDArray[np.int64]
Where = slice | Positions

#: Room in a message for everything that does not grow with the blocks.
MESSAGE_SLACK_BYTES: Final = 16 << 10
DESCRIPTOR_BYTES: Final = 16
CHECKSUM_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Positions of a call that one node serves in one message. ``where`` is a slice when they are a run."""

    node: int
    where: Where


def blocks_in_message(hash_bytes: int, pieces: int) -> int:
    """How many blocks of ``pieces`` descriptors each fit one message; at least 1."""
    each = hash_bytes + CHECKSUM_BYTES + DESCRIPTOR_BYTES * pieces
    return max(1, min(HASHES_MAX, (MESSAGE_BYTES_MAX - MESSAGE_SLACK_BYTES) // each))


def by_node(codes: npt.NDArray[np.uint16], positions: Positions | None, limit: int) -> list[list[Part]]:
    """Group positions with a location by node: one list of parts a node, nodes in order of first use.

    ``positions`` are those to serve (None: all of ``codes``); ``codes`` covers the whole call. Order
    within a node is kept; each part has at most ``limit`` positions.
    """
    chosen = codes if positions is None else codes[positions]
    if len(chosen) == 0:
        return []
    if len(codes) == 1:
        return [[Part((int(codes[0]) - 1) >> 2, slice(0, 1))]] if codes[0] else []
    nodes = (chosen.astype(np.int64) - 1) >> 2  # absent: -1
    first = int(nodes[0])
    if first >= 0 and (nodes == first).all():
        mine = np.arange(len(codes)) if positions is None else positions
        return [list(pieces_of_node(first, mine, limit))]
    names, where = np.unique(nodes, return_index=True)
    out = []
    for node in names[np.argsort(where)].tolist():
        if node >= 0:
            mine = np.flatnonzero(nodes == node)
            out.append(list(pieces_of_node(node, mine if positions is None else positions[mine], limit)))
    return out


def memory_first(parts: Sequence[Part], on_ssd: npt.NDArray[np.bool_], piece: int, last: int) -> list[Part]:
    """One node's parts in the order in which their bytes can come.

    Those in memory first, then those on SSD in their own order, in parts of at most ``piece`` blocks that taper to
    ``last`` (see :func:`tapered`). ``on_ssd`` covers the whole call. Without any on SSD: the parts as they are.
    """
    mine = np.concatenate([positions_of(part.where) for part in parts])
    late = mine[on_ssd[mine]]
    if not len(late):
        return list(parts)
    node = parts[0].node
    return [*pieces_of_node(node, mine[~on_ssd[mine]], piece), *tapered(node, late, piece, last)]


def tapered(node: int, positions: Positions, piece: int, last: int) -> Iterator[Part]:
    """``positions``, in order, in parts of at most ``piece``, each of half of what is left but no fewer than ``last``.

    Nothing overlaps with the copy of the final part, so it is small; the others are large, because each is a
    round trip.
    """
    while left := len(positions):
        count = min(piece, max(last, left // 2))
        yield from pieces_of_node(node, positions[:count], count)
        positions = positions[count:]


def stripes(codes: npt.NDArray[np.uint16], states: npt.NDArray[np.uint8], limit: int) -> list[list[Part]]:
    """What a store sends where: contiguous runs a node, one list a node.

    Runs are cut wherever the node changes, so that a position's index in its chain is its run's first
    plus its offset. Blocks in flight elsewhere, or placed nowhere, are in no run.
    """
    count = len(codes)
    packed = codes.tobytes()
    if codes.any() and packed == packed[: codes.itemsize] * count and not states.tobytes().translate(None, _SENT):
        node = (codes.item(0) - 1) >> 2  # most often, and always of one block
        return [[Part(node, slice(low, min(low + limit, count))) for low in range(0, count, limit)]]
    sends = (codes != 0) & ((states == _NEW) | (states == _PRESENT))
    nodes = np.where(sends, (codes.astype(np.int64) - 1) >> 2, -1)
    edges = np.flatnonzero(np.diff(nodes)) + 1
    out: dict[int, list[Part]] = {}
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(nodes)], strict=True):
        if start < stop and nodes[start] >= 0:
            runs = out.setdefault(int(nodes[start]), [])
            runs.extend(
                Part(int(nodes[start]), slice(low, min(low + limit, stop))) for low in range(start, stop, limit)
            )
    return list(out.values())


def gather(packed: bytes, hash_bytes: int, where: Where) -> bytes:
    """The hashes at ``where``, packed."""
    if isinstance(where, slice):
        return packed[where.start * hash_bytes : where.stop * hash_bytes]
    return np.frombuffer(packed, np.uint8).reshape(-1, hash_bytes)[where].tobytes()


def pieces_of(count: int, limit: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive pieces of at most ``limit``."""
    for start in range(0, count, limit):
        yield start, min(start + limit, count)


def positions_of(where: Where) -> Positions:
    """The positions as an array, i64."""
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where


def pieces_of_node(node: int, positions: Positions, limit: int) -> Iterator[Part]:
    """``positions``, in order, in parts of at most ``limit``."""
    for start in range(0, len(positions), limit):
        piece = positions[start : start + limit]
        low, high = int(piece[0]), int(piece[-1]) + 1
        yield Part(node, slice(low, high) if high - low == len(piece) else piece)
