"""Answers as they travel: run-length coded location codes, and only the nodes that they name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvstrata.master.content.lookups import LookedUp
from kvstrata.master.directory.holders import Codes
from kvstrata.master.messages import NodeFacts
from kvstrata.master.placement import Placed
from kvstrata.proto import channel_pb2 as pb

Runs = npt.NDArray[np.int64]


def lookup_ok(answer: LookedUp, shard_count: int, nodes: Mapping[int, NodeFacts]) -> pb.LookupOk:
    """Encode a lookup. ``nodes`` maps the codes' slots to facts."""
    found = answer.found
    starts, lengths = runs_of(found.codes)
    codes, refs = renumbered(found.codes[starts], nodes)
    return pb.LookupOk(
        not_yet=answer.not_yet,
        hit_blocks=found.hit_blocks,
        shard_hit_blocks=found.shard_hit_blocks,
        present=np.packbits(found.present, bitorder="little").tobytes() if shard_count > 1 else b"",
        run_code=codes.tobytes(),
        run_length=lengths.astype("<u4").tobytes(),
        nodes=refs,
        replicas=found.replicas,
    )


def place_ok(placed: Placed, nodes: Mapping[int, NodeFacts]) -> pb.PlaceOk:
    """Encode a placement: a run has one code and one state."""
    starts, lengths = runs_of(placed.codes.astype(np.uint32) << np.uint32(8) | placed.states)
    codes, refs = renumbered(placed.codes[starts], nodes)
    return pb.PlaceOk(
        run_code=codes.tobytes(),
        run_state=placed.states[starts].tobytes(),
        run_length=lengths.astype("<u4").tobytes(),
        nodes=refs,
    )


def runs_of(values: npt.NDArray[np.unsignedinteger]) -> tuple[Runs, Runs]:
    """(first positions, lengths) of the runs of equal values."""
    if not values.size:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    starts = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
    return starts, np.diff(starts, append=len(values))


def renumbered(codes: Codes, nodes: Mapping[int, NodeFacts]) -> tuple[Codes, list[pb.NodeRef]]:
    """Codes whose slots are indices into the returned references."""
    slots = np.unique((codes[codes != 0] - np.uint16(1)) >> np.uint16(2))
    if not slots.size:
        return codes, []
    index = np.searchsorted(slots, (codes - np.uint16(1)) >> np.uint16(2)).astype(np.uint16)
    tiers = (codes - np.uint16(1)) & np.uint16(3)
    renumbered_codes = np.where(codes != 0, np.uint16(1) + np.uint16(4) * index + tiers, np.uint16(0))
    return renumbered_codes.astype("<u2"), [node_ref(nodes[slot]) for slot in slots.tolist()]


def node_ref(facts: NodeFacts) -> pb.NodeRef:
    """How to reach a node."""
    return pb.NodeRef(
        node_id=facts.node_id,
        incarnation=facts.incarnation,
        channel=facts.channel,
        unix_path=facts.unix_path,
        boot_id=facts.boot_id,
    )
