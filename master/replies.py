"""Answers as they travel: run-length coded location codes, and only the nodes that they name."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import numpy.ma  # np.unique does when it is first called: 15 ms and a full garbage collection, of somebody's first call
import numpy.typing as npt

from kvstrata.master.content.lookups import LookedUp
from kvstrata.master.directory.holders import Codes
from kvstrata.master.directory.probing import FEW
from kvstrata.master.messages import NodeFacts
from kvstrata.master.placement import Placed
from kvstrata.proto import channel_pb2 as pb

Runs = npt.NDArray[np.int64]

#: For so long a writer need not ask again where the pool has one node: so late it may hear of a second one. That a node
#: takes no more blocks it says itself.
STANDS_MS: Final = 1000


def lookup_ok(answer: LookedUp, shard_count: int, nodes: Mapping[int, NodeFacts]) -> pb.LookupOk:
    """Encode a lookup. ``nodes`` maps the codes' slots to facts."""
    found = answer.found
    if len(found.codes) <= FEW:
        runs = [(code, 0, len(list(run))) for code, run in groupby(found.codes.tolist())]
        run_code, run_length, _, refs = _packed(runs, nodes)
    else:
        starts, lengths = runs_of(found.codes)
        run_code, run_length, _, refs = _encoded(found.codes[starts], None, lengths, nodes)
    return pb.LookupOk(
        not_yet=answer.not_yet,
        hit_blocks=found.hit_blocks,
        shard_hit_blocks=found.shard_hit_blocks,
        present=np.packbits(found.present, bitorder="little").tobytes() if shard_count > 1 else b"",
        run_code=run_code,
        run_length=run_length,
        nodes=refs,
        replicas=found.replicas,
    )


def place_ok(placed: Placed, nodes: Mapping[int, NodeFacts], *, standing: bool = False) -> pb.PlaceOk:
    """Encode a placement: a run has one code and one state. ``standing``: the writer may be told that it stands."""
    answer = _place_ok(placed, nodes)
    if standing and placed.sole is not None:
        if not answer.nodes:  # nothing was asked but whether it still stands
            answer.nodes.append(node_ref(nodes[placed.sole]))
        answer.stands_ms = STANDS_MS
    return answer


def _place_ok(placed: Placed, nodes: Mapping[int, NodeFacts]) -> pb.PlaceOk:
    if len(placed.codes) <= FEW:
        blocks = zip(placed.codes.tolist(), placed.states.tolist(), strict=True)
        runs = [(code, state, len(list(run))) for (code, state), run in groupby(blocks)]
        run_code, run_length, run_state, refs = _packed(runs, nodes)
        return pb.PlaceOk(run_code=run_code, run_state=run_state, run_length=run_length, nodes=refs)
    starts, lengths = runs_of(placed.codes.astype(np.uint32) << np.uint32(8) | placed.states)
    run_code, run_length, run_state, refs = _encoded(placed.codes[starts], placed.states[starts], lengths, nodes)
    return pb.PlaceOk(run_code=run_code, run_state=run_state, run_length=run_length, nodes=refs)


def _encoded(
    codes: Codes, states: npt.NDArray[np.uint8] | None, lengths: Runs, nodes: Mapping[int, NodeFacts]
) -> tuple[bytes, bytes, bytes, list[pb.NodeRef]]:
    """As :func:`_packed`, however many runs there are; ``states`` None: none are asked for."""
    if len(codes) <= FEW:
        of_runs = [0] * len(codes) if states is None else states.tolist()
        return _packed(list(zip(codes.tolist(), of_runs, lengths.tolist(), strict=True)), nodes)
    named, refs = renumbered(codes, nodes)
    return named.tobytes(), lengths.astype("<u4").tobytes(), b"" if states is None else states.tobytes(), refs


def _packed(
    runs: Sequence[tuple[int, int, int]], nodes: Mapping[int, NodeFacts]
) -> tuple[bytes, bytes, bytes, list[pb.NodeRef]]:
    """(code, state, length) of few runs as they travel: codes, lengths and states, and the nodes that they name."""
    slots = sorted({(code - 1) >> 2 for code, _, _ in runs if code})
    codes = [1 + 4 * slots.index((code - 1) >> 2) + (code - 1 & 3) if code else 0 for code, _, _ in runs]
    lengths = struct.pack(f"<{len(runs)}I", *(length for _, _, length in runs))
    states = bytes(state for _, state, _ in runs)
    return struct.pack(f"<{len(runs)}H", *codes), lengths, states, [node_ref(nodes[slot]) for slot in slots]


def runs_of(values: npt.NDArray[np.unsignedinteger]) -> tuple[Runs, Runs]:
    """(first positions, lengths) of the runs of equal values."""
    if not values.size:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    ends = np.concatenate((np.flatnonzero(values[1:] != values[:-1]) + 1, [len(values)]))
    starts = np.concatenate(([0], ends[:-1]))
    return starts, ends - starts


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
