"""Placement's choice of nodes as it reads on paper: over lists, one by one. What is quick must choose the same."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from kvstrata.master.candidates import FULL_WEIGHT, HEADROOM, Candidate, ramp_at
from kvstrata.master.liveness import NodeState
from kvstrata.master.nodes import Nodes
from kvstrata.master.placement import STRIPE_NODES_MAX
from kvstrata.master.tenants.quotas import Quotas


def free_share(one: Candidate) -> float:
    return one.free / one.capacity if one.capacity else 0.0


def weight(one: Candidate) -> float:
    return one.ramp * (one.free + FULL_WEIGHT * one.capacity + 1)


def rows(nodes: Nodes, quotas: Quotas, salt: str, avoid: Collection[int], now: float) -> list[Candidate]:
    """The nodes that a tenant's new blocks may go to."""
    rooms = quotas.rooms(salt)
    found = []
    for node in nodes:
        if node.state is not NodeState.ACTIVE or node.leaving:
            continue
        assert node.attachment is not None and node.attachment.slot is not None and node.active_since is not None
        reported = node.dram_bytes if node.usage is None else node.usage.dram_bytes_free
        free, capacity = max(0, reported - node.placed_bytes), node.dram_bytes
        if (room := rooms.get(node.node_id)) is not None:
            free, capacity = min(free, room.free), min(capacity, room.share)
        ramp = ramp_at(now - node.active_since)
        found.append(Candidate(node.attachment.slot, node.attachment.facts.boot_id, free, capacity, ramp))
    return fewer(found, avoid)


def fewer(found: list[Candidate], avoid: Collection[int]) -> list[Candidate]:
    found = [one for one in found if one.capacity] or found
    return [one for one in found if one.slot not in avoid] or found


def chosen(found: Sequence[Candidate], boot_id: str, runs: int, rng: random.Random) -> list[int]:
    """The slot of the node that each run of a call goes to."""
    return [one.slot for one in in_turns(stripe(found, boot_id, runs, rng), runs)]


def stripe(found: Sequence[Candidate], boot_id: str, runs: int, rng: random.Random) -> list[Candidate]:
    if len(found) == 1:
        return list(found)
    pool, near = found, with_headroom(found, boot_id)
    if near:
        pool = near if rng.random() * max(one.ramp for one in found) < max(one.ramp for one in near) else found
    chosen: list[Candidate] = []
    while len(chosen) < min(runs, STRIPE_NODES_MAX, len(pool)):
        chosen.append(two_choices([one for one in pool if one not in chosen], rng))
    return chosen


def in_turns(among: Sequence[Candidate], runs: int) -> list[Candidate]:
    """Each by its weight, evenly spread."""
    credit = [0.0] * len(among)
    turns = []
    for _ in range(runs):
        credit = [have + weight(one) for have, one in zip(credit, among, strict=True)]
        best = credit.index(max(credit))
        credit[best] -= sum(map(weight, among))
        turns.append(among[best])
    return turns


def with_headroom(found: Sequence[Candidate], boot_id: str) -> list[Candidate]:
    emptiest = max(map(free_share, found))
    return [
        one
        for one in found
        if boot_id and one.boot_id == boot_id and free_share(one) >= min(HEADROOM, emptiest - HEADROOM)
    ]


def two_choices(found: Sequence[Candidate], rng: random.Random) -> Candidate:
    if len(found) == 1:
        return found[0]
    one, other = rng.choices(found, weights=[weight(each) for each in found], k=2)
    return one if free_share(one) * one.ramp >= free_share(other) * other.ramp else other
