"""How one tenant's bytes are split over nodes by demand. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: A share smaller than this is a sliver: it holds too few blocks to be worth a node's while.
GRAIN_MIN: Final = 64 << 20
#: ... and it should hold this many of the tenant's largest blocks.
BLOCKS_A_SHARE: Final = 16
#: What a node has counts this much beside its demand when few nodes are chosen: moving costs blocks.
INCUMBENT: Final = 0.5


@dataclass(frozen=True, slots=True)
class Claim:
    """One node's side of it: the bytes ``demand`` wants, ``held`` is its present part, ``capacity`` bounds it.

    ``rank`` settles ties, the same way each time, and differently for different tenants. ``least``: the bytes
    without which what the tenant has in the tier below cannot be read here; 0 where it has nothing there.
    """

    node_id: str
    demand: int
    held: int
    capacity: int
    rank: int = 0
    least: int = 0


def grain_of(block_bytes: int) -> int:
    """The smallest share worth having, for a tenant whose largest block is ``block_bytes``."""
    return max(GRAIN_MIN, least_of(block_bytes))


def least_of(block_bytes: int) -> int:
    """A share through which a tenant's blocks can be read from the tier below."""
    return BLOCKS_A_SHARE * block_bytes


def divide(total: int, claims: Sequence[Claim], grain: int) -> dict[str, int]:
    """Parts of ``total`` by node id, Σ = min(total, Σ capacity); each is 0 or (where there is room) >= ``grain``.

    Demands come first: met whole when they fit, else in proportion. What is left goes by capacity. A total
    for which a part on each node would be a sliver lives on few nodes: those that want and have most of it, and,
    with a little each, those that cannot read what they have below without it.
    """
    usable = [claim for claim in claims if claim.capacity > 0]
    parts = dict.fromkeys((claim.node_id for claim in claims), 0)
    if total <= 0 or not usable:
        return parts
    few = _few(total, usable, grain)
    readers = _readers(total, [claim for claim in usable if claim not in few], len(few), grain)
    chosen = [*few, *readers]
    each = (total - sum(claim.least for claim in readers)) // len(few)
    least = {claim.node_id: min(grain, each, claim.capacity) for claim in few}
    least.update((claim.node_id, claim.least) for claim in readers)
    parts.update(least)
    room = {claim.node_id: claim.capacity - least[claim.node_id] for claim in chosen}
    wants = {c.node_id: min(max(0, c.demand - least[c.node_id]), room[c.node_id]) for c in chosen}
    left = total - sum(least.values())
    _pour(min(left, sum(wants.values())), wants, wants, parts)
    left = total - sum(parts.values())
    room = {claim.node_id: claim.capacity - parts[claim.node_id] for claim in chosen}
    _pour(min(left, sum(room.values())), {c.node_id: c.capacity for c in chosen}, room, parts)
    return parts


def _few(total: int, claims: Sequence[Claim], grain: int) -> list[Claim]:
    """As many nodes as can have ``grain`` each, the most demanding first, and enough of them to hold it."""
    ranked = sorted(claims, key=lambda c: (-(c.demand + INCUMBENT * c.held), -c.held, c.rank, c.node_id))
    count = max(1, total // grain)
    while count < len(ranked) and sum(claim.capacity for claim in ranked[:count]) < total:
        count += 1
    return ranked[:count]


def _readers(total: int, others: Sequence[Claim], few: int, grain: int) -> list[Claim]:
    """Of the others, those that need a little: as many as leave the few at least as much each."""
    readers: list[Claim] = []
    spent = 0
    for claim in sorted(others, key=lambda c: (-c.demand, c.rank, c.node_id)):
        if not 0 < claim.least <= min(claim.capacity, grain):
            continue
        if spent + claim.least + few * claim.least > total:
            break
        readers.append(claim)
        spent += claim.least
    return readers


def _pour(amount: int, weights: Mapping[str, int], room: Mapping[str, int], into: dict[str, int]) -> None:
    """Add ``amount`` (at most Σ ``room``) to ``into`` by ``weights``; what a full one cannot take goes to others."""
    left = dict(room)
    while amount > 0 and any(left.values()):
        open_to = [node_id for node_id, free in left.items() if free > 0]
        total = sum(max(1, weights[node_id]) for node_id in open_to)
        pouring = amount
        for node_id in open_to:
            part = min(left[node_id], pouring * max(1, weights[node_id]) // total)
            into[node_id] += part
            left[node_id] -= part
            amount -= part
        if amount == pouring:  # too little to split: bytes that rounding left over
            for node_id in open_to:
                part = min(left[node_id], amount)
                into[node_id] += part
                left[node_id] -= part
                amount -= part
