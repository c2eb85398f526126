"""Where a request should go: who has most of its prefix, in its own cache, or from the pool near to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.client_calls import whole_hashes
from kvstrata.master.directory.directory import prefix_length
from kvstrata.master.directory.holders import HIDDEN, Holders, Ids
from kvstrata.master.directory.probing import Keys
from kvstrata.master.hub import Hub
from kvstrata.master.index.engine_events import EngineEvents, EngineState
from kvstrata.master.messages import NodeFacts
from kvstrata.master.state import MasterState
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace, check_salt, split_hashes
from kvstrata.proto.status import Tier
from kvstrata.transfer.kv_events.events import tail

#: What a block is worth: in the engine's own cache, on a node of its host, on another node.
OWN: Final = 1.0
NEAR: Final = 0.75
FAR: Final = 0.5
#: A fully loaded engine is worth so much of all blocks asked less.
LOADED: Final = 0.5
LOADS_MAX: Final = 1024

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Host:
    """Where an engine runs, as its pool client said."""

    name: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class _Found:
    """What is copied under the lock: ``present`` in all shards; of the asked one ``ids`` and the ``sets`` they name."""

    present: Bools
    ids: Ids
    sets: Mapping[int, Holders]
    facts: Mapping[int, NodeFacts]


class _Pool:
    """What the pool has of a chain. Blocks that the same nodes have count together: O(blocks, and holders of each set
    of them)."""

    def __init__(self, found: _Found) -> None:
        self.present, self.facts = found.present, found.facts
        unique, first, inverse = np.unique(found.ids, return_index=True, return_inverse=True)
        by_first = np.argsort(first)
        #: Where each set is first met, ascending; what follows names sets by their place in it.
        self._first = first[by_first]
        self._of_block = np.argsort(by_first)[inverse]
        self._blocks = np.bincount(self._of_block, minlength=len(unique))
        #: By slot: the sets that name it, ascending, with whether its memory and its SSD have them.
        self.held: dict[int, dict[int, int]] = {}
        for number, set_id in enumerate(unique[by_first].tolist()):
            for code in found.sets[set_id]:
                slot, tier = code >> 2, code & 3
                if slot in found.facts and tier != HIDDEN:
                    tiers = self.held.setdefault(slot, {})
                    tiers[number] = tiers.get(number, 0) | 1 << tier
        self._near: dict[str, Bools] = {}

    def on_host(self, boot_id: str) -> Bools:
        """Blocks that a node of this host has."""
        if boot_id not in self._near:
            near = np.zeros(len(self._first), dtype=np.bool_)
            for slot, sets in self.held.items():
                if boot_id and self.facts[slot].boot_id == boot_id:
                    near[list(sets)] = True
            self._near[boot_id] = near[self._of_block]
        return self._near[boot_id]

    def nodes(self) -> list[control.RouteNode]:
        return [self._node(slot) for slot in sorted(self.held)]

    def _node(self, slot: int) -> control.RouteNode:
        facts, sets = self.facts[slot], self.held[slot]
        dram = [number for number, tiers in sets.items() if tiers & 1 << Tier.DRAM]
        ssd = [number for number, tiers in sets.items() if tiers & 1 << Tier.SSD and not tiers & 1 << Tier.DRAM]
        return control.RouteNode(
            node_id=facts.node_id,
            prefix_blocks=self._prefix(sorted({*dram, *ssd})),
            dram_blocks=int(self._blocks[dram].sum()),
            ssd_blocks=int(self._blocks[ssd].sum()),
            host=facts.host,
            boot_id=facts.boot_id,
        )

    def _prefix(self, sets: Sequence[int]) -> int:
        """Blocks before the first one of another set."""
        other = next((number for number, mine in enumerate(sets) if mine != number), len(sets))
        return int(self._first[other]) if other < len(self._first) else len(self.present)


#: Of the engines of these names, where each runs; those of which it is not known are left out.
HostsOf = Callable[[Collection[str]], Mapping[str, Host]]


class Routing:
    """Answers from the directory and from engines' events."""

    def __init__(self, hub: Hub, engines: EngineEvents | None, hosts_of: HostsOf) -> None:
        self._hub = hub
        self._engines = engines
        self._hosts_of = hosts_of

    def route(self, query: control.RouteQuery) -> control.RouteAnswer:
        """Engines and nodes, best first. Raises :class:`InvalidArgument`; an unknown namespace has nothing.

        O(blocks asked, times engines)."""
        namespace = Namespace.from_spec(query.spec)
        check_salt(query.salt)
        whole_hashes(query.hashes, namespace.hash_bytes)
        _check_loads(query.loads)
        keys = fold(query.hashes, namespace.hash_bytes)
        pool = _Pool(self._hub.read(lambda state, now: _look(state, namespace, query.salt, keys)))
        tails = [tail(block_hash) for block_hash in split_hashes(query.hashes, namespace.hash_bytes)]
        states = self._states(query, tails)
        hosts = self._hosts_of({state.name for state in states}) if states else {}
        engines = [_engine(state, pool, hosts.get(state.name), query.loads) for state in states]
        engines.sort(key=lambda row: (row.state != "live", -row.score, row.load, row.name))
        nodes = sorted(pool.nodes(), key=lambda row: (-row.prefix_blocks, -row.dram_blocks, row.node_id))
        problem = "; ".join(self._engines.problems()) if self._engines is not None else _NO_ENGINES
        return control.RouteAnswer(
            asked=len(tails), pool_blocks=prefix_length(pool.present), engines=engines, nodes=nodes, problem=problem
        )

    def _states(self, query: control.RouteQuery, tails: list[int]) -> list[EngineState]:
        if self._engines is None:
            return []
        return self._engines.states(tails, set(query.engines))


_NO_ENGINES: Final = "no engine's events are read: start the master with --engine-events NAME=tcp://HOST:PORT"


def _engine(state: EngineState, pool: _Pool, host: Host | None, loads: Mapping[str, float]) -> control.RouteEngine:
    load, asked = loads.get(state.name, 0.0), len(pool.present)
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


def _check_loads(loads: Mapping[str, float]) -> None:
    if len(loads) > LOADS_MAX or any(not math.isfinite(load) or not 0 <= load <= 1 for load in loads.values()):
        raise InvalidArgument(f"loads are from 0 to 1, of at most {LOADS_MAX} engines")


def _look(state: MasterState, namespace: Namespace, salt: str, keys: Keys) -> _Found:
    group = state.namespaces.find(namespace)
    if group is None:
        return _Found(np.zeros(len(keys), dtype=np.bool_), np.zeros(len(keys), dtype=np.uint32), {0: ()}, {})
    directory = state.directory
    found = directory.lookup(group.number, namespace.shard, namespace.shard_count, salt, keys)
    return _Found(found.present, found.ids, directory.holder_sets(found.ids), state.membership.slot_facts)
