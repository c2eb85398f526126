"""Which engine has which blocks in its own cache, from what engines say of it. A hint: it may be behind.

Blocks go by the last 8 bytes of their hash (:func:`kvstrata.transfer.kv_events.events.tail`), which is all that vLLM
publishes by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstrata.proto.errors import Busy
from kvstrata.transfer.kv_events import events

ENGINES_MAX: Final = 256
#: Of one engine. Past it what was stored longest ago is forgotten.
BLOCKS_MAX: Final = 1 << 20
#: Kinds of (medium, KV cache group) that one engine may name.
PLACES_MAX: Final = 32


class Prefix(NamedTuple):
    """Leading blocks that an engine has: in any medium, and in its GPU."""

    blocks: int
    gpu_blocks: int


@dataclass(slots=True)
class _Engine:
    """Blocks by tail: a bit for each place that has one. ``places``: (medium, group) by bit."""

    places: dict[tuple[str, int], int] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)


class EngineIndex:
    """Takes events in, in order, an engine at a time. Not thread-safe."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._engines: dict[str, _Engine] = {}

    def add(self, name: str) -> None:
        """Raises :class:`Busy` past ``ENGINES_MAX``."""
        if name not in self._engines and len(self._engines) >= ENGINES_MAX:
            raise Busy(f"{ENGINES_MAX} engines are known, which is the bound: {name!r} is one more")
        self._engines.setdefault(name, _Engine())

    def blocks(self, name: str) -> int:
        return len(self._engines[name].blocks)

    def apply(self, name: str, said: Iterable[events.Event]) -> None:
        engine = self._engines[name]
        for event in said:
            match event:
                case events.BlockStored():
                    self._stored(engine, _bit(engine, event.medium, event.group_idx), event.block_hashes)
                case events.BlockRemoved():
                    _removed(engine, _mask(engine, event.medium, event.group_idx), event.block_hashes)
                case events.AllBlocksCleared():
                    engine.blocks.clear()

    def clear(self, name: str) -> None:
        """Nothing is known of this engine any more."""
        self._engines[name] = _Engine()

    def prefix(self, name: str, tails: Sequence[int]) -> Prefix:
        """How much of a chain an engine has. A block counts when any of its KV cache groups has it. O(blocks)."""
        engine = self._engines[name]
        gpu = sum(1 << bit for (medium, _), bit in engine.places.items() if medium == events.GPU)
        have, blocks, gpu_blocks = engine.blocks, 0, None
        for tail in tails:
            mask = have.get(tail, 0)
            if not mask:
                break
            if gpu_blocks is None and not mask & gpu:
                gpu_blocks = blocks
            blocks += 1
        return Prefix(blocks, blocks if gpu_blocks is None else gpu_blocks)

    def _stored(self, engine: _Engine, bit: int, hashes: Iterable[events.Hash]) -> None:
        blocks = engine.blocks
        for block_hash in hashes:
            tail = events.tail(block_hash)
            blocks[tail] = blocks.pop(tail, 0) | bit
        while len(blocks) > self._blocks_max:
            del blocks[next(iter(blocks))]

    def check(self) -> None:
        assert len(self._engines) <= ENGINES_MAX
        for name, engine in self._engines.items():
            assert len(engine.blocks) <= self._blocks_max and len(engine.places) <= PLACES_MAX, name
            assert sorted(engine.places.values()) == list(range(len(engine.places))), name
            assert all(0 < mask < 1 << PLACES_MAX for mask in engine.blocks.values()), name


def _bit(engine: _Engine, medium: str | None, group: int | None) -> int:
    """The bit of a place, a new one if need be. Past the bound, the last one stands for many."""
    place = (medium or events.GPU, group or 0)
    if place not in engine.places and len(engine.places) >= PLACES_MAX:
        return 1 << PLACES_MAX - 1
    return 1 << engine.places.setdefault(place, len(engine.places))


def _mask(engine: _Engine, medium: str | None, group: int | None) -> int:
    """The bits that a removal means: of one KV cache group, or of all where it names none."""
    wanted = medium or events.GPU
    bits = [bit for (where, of), bit in engine.places.items() if where == wanted and group in (None, of)]
    return sum(1 << bit for bit in bits)


def _removed(engine: _Engine, mask: int, hashes: Iterable[events.Hash]) -> None:
    blocks = engine.blocks
    for block_hash in hashes:
        tail = events.tail(block_hash)
        left = blocks.get(tail, 0) & ~mask
        if left:
            blocks[tail] = left
        else:
            blocks.pop(tail, None)
