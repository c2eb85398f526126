"""Where a request should go: who has most of its prefix, in its own cache, or from the pool near to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.client_calls import whole_hashes
from kvstrata.master.directory.directory import TableKey, prefix_length
from kvstrata.master.directory.holders import HIDDEN
from kvstrata.master.directory.table import fold
from kvstrata.master.hub import Hub
from kvstrata.master.index.engine_events import EngineEvents, EngineState
from kvstrata.master.messages import NodeFacts
from kvstrata.master.state import MasterState
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import Namespace, check_salt, split_hashes
from kvstrata.proto.status import Tier
from kvstrata.transfer.kv_events.events import tail

#: What a block is worth: in the engine's own cache, on a node of its host, on another node.
OWN: Final = 1.0
NEAR: Final = 0.75
FAR: Final = 0.5
#: A fully loaded engine is worth so much of all blocks asked less.
LOADED: Final = 0.5
ENGINES_MAX: Final = 1024

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Host:
    """Where an engine runs, as its pool client said."""

    name: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class _Pool:
    """What the pool has of a chain: ``present`` in all shards, ``held`` by (slot, tier) in the asked one."""

    present: Bools
    held: Mapping[tuple[int, int], Bools]
    facts: Mapping[int, NodeFacts]

    def on_host(self, boot_id: str) -> Bools:
        """Blocks that a node of this host has."""
        near = np.zeros(len(self.present), dtype=np.bool_)
        for (slot, _), held in self.held.items():
            if boot_id and self.facts[slot].boot_id == boot_id:
                near |= held
        return near


class Routing:
    """Answers from the directory and from engines' events. ``host_of`` knows where the engine of a name runs."""

    def __init__(self, hub: Hub, engines: EngineEvents | None, host_of: Callable[[str], Host | None]) -> None:
        self._hub = hub
        self._engines = engines
        self._host_of = host_of

    def route(self, query: control.RouteQuery) -> control.RouteAnswer:
        """Engines and nodes, best first. Raises :class:`InvalidArgument`; an unknown namespace has nothing.

        O(blocks asked, times engines)."""
        namespace = Namespace.from_spec(query.spec)
        check_salt(query.salt)
        whole_hashes(query.hashes, namespace.hash_bytes)
        _check_loads(query.loads)
        pool = self._hub.read(lambda state, now: _pool(state, namespace, query.salt, query.hashes))
        tails = [tail(block_hash) for block_hash in split_hashes(query.hashes, namespace.hash_bytes)]
        engines = [self._engine(state, pool, query.loads) for state in self._states(query, tails)]
        engines.sort(key=lambda row: (row.state != "live", -row.score, row.load, row.name))
        nodes = sorted(_nodes(pool), key=lambda row: (-row.prefix_blocks, -row.dram_blocks, row.node_id))
        problem = "; ".join(self._engines.problems()) if self._engines is not None else _NO_ENGINES
        return control.RouteAnswer(
            asked=len(tails), pool_blocks=prefix_length(pool.present), engines=engines, nodes=nodes, problem=problem
        )

    def _states(self, query: control.RouteQuery, tails: list[int]) -> list[EngineState]:
        if self._engines is None:
            return []
        wanted = set(query.engines)
        return [state for state in self._engines.states(tails) if not wanted or state.name in wanted]

    def _engine(self, state: EngineState, pool: _Pool, loads: Mapping[str, float]) -> control.RouteEngine:
        host, load, asked = self._host_of(state.name), loads.get(state.name, 0.0), len(pool.present)
        own = state.prefix.blocks
        follow = prefix_length(pool.present[own:])
        near = int(np.count_nonzero(pool.on_host(host.boot_id if host else "")[own : own + follow]))
        score = OWN * own + NEAR * near + FAR * (follow - near) - LOADED * load * asked
        row = control.RouteEngine(
            name=state.name,
            own_blocks=own,
            gpu_blocks=state.prefix.gpu_blocks,
            pool_blocks=follow,
            near_blocks=near,
            load=load,
            score=score,
            state="live" if state.live else "cannot be reached",
            age_seconds=state.age_s,
            why=f"{own} of {asked} blocks in its own cache, {follow} more from the pool ({near} of them on its host)"
            + (f", load {load:.2f}" if load else ""),
        )
        if host is not None:
            row.host, row.boot_id = host.name, host.boot_id
        return row


_NO_ENGINES: Final = "no engine's events are read: start the master with --engine-events NAME=tcp://HOST:PORT"


def _check_loads(loads: Mapping[str, float]) -> None:
    if len(loads) > ENGINES_MAX or any(not math.isfinite(load) or not 0 <= load <= 1 for load in loads.values()):
        raise InvalidArgument(f"loads are from 0 to 1, of at most {ENGINES_MAX} engines")


def _pool(state: MasterState, namespace: Namespace, salt: str, hashes: bytes) -> _Pool:
    keys = fold(hashes, namespace.hash_bytes)
    group = state.namespaces.find(namespace)
    if group is None:
        return _Pool(np.zeros(len(keys), dtype=np.bool_), {}, {})
    directory, facts = state.directory, state.membership.slot_facts
    found = directory.lookup(group.number, namespace.shard, namespace.shard_count, salt, keys)
    ids = directory.known_ids(TableKey(group.number, namespace.shard, salt), keys)
    codes = {set_id: directory.holders_of(set_id) for set_id in np.unique(ids).tolist()}
    held: dict[tuple[int, int], Bools] = {}
    for slot, tier in {code for each in codes.values() for code in each}:
        if slot in facts and tier != HIDDEN:
            held[slot, tier] = np.isin(ids, [set_id for set_id, each in codes.items() if (slot, tier) in each])
    return _Pool(found.present, held, facts)


def _nodes(pool: _Pool) -> list[control.RouteNode]:
    rows = []
    nothing = np.zeros(len(pool.present), dtype=np.bool_)
    for slot in sorted({slot for slot, _ in pool.held}):
        dram, ssd = (pool.held.get((slot, tier), nothing) for tier in (Tier.DRAM, Tier.SSD))
        facts = pool.facts[slot]
        rows.append(
            control.RouteNode(
                node_id=facts.node_id,
                prefix_blocks=prefix_length(dram | ssd),
                dram_blocks=int(np.count_nonzero(dram)),
                ssd_blocks=int(np.count_nonzero(ssd & ~dram)),
                host=facts.host,
                boot_id=facts.boot_id,
            )
        )
    return rows
