"""What a client says of itself: masters, nodes, loops, counts, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from kvstrata.client.counters import Counters
from kvstrata.client.directory import Directory
from kvstrata.client.memory import RegisteredMemory
from kvstrata.client.peers import Known, Peers
from kvstrata.client.security.fetched import FetchedTickets
from kvstrata.transfer.loops import Loop


def health_report(
    directory: Directory,
    peers: Peers,
    loop: Loop,
    counters: Counters,
    memory: RegisteredMemory,
    open_now: Mapping[str, int],
    rails: Mapping[str, object],
    tickets: FetchedTickets | None = None,
) -> dict[str, object]:
    """A dict of plain values, fit for JSON: what this client knows now. ``open_now``: what is under way, by name.
    ``rails``: what the client has to reach nodes one-sidedly. ``tickets``: None where it shows none.
    """
    masters = directory.health()
    nodes = [_node(known) for known in peers.all()]
    problems = [f"master {m['address']}: {m['reason'] or 'not reached yet'}" for m in masters if not m["reachable"]]
    problems += [f"node {n['node_id']}: {n['problem']}" for n in nodes if not n["reachable"]]
    problems += [f"node {n['node_id']}: rails: {n['rails_problem']}" for n in nodes if n["rails_problem"]]
    problems += memory.problems()
    problems += tickets.problems() if tickets is not None else []
    if loop.problem():
        problems.append(loop.problem())
    loops = [loop] if tickets is None else [loop, tickets.loop]
    return {
        "healthy": not problems,
        "problems": problems,
        "masters": masters,
        "nodes": nodes,
        "loop_age_seconds": {each.name: each.age_s() for each in loops},
        "blocks": counters.snapshot(),
        "blocks_by_index": counters.by_index,
        "regions": memory.totals(),
        "staging": memory.staging(),
        "rails": dict(rails),
        "ticket": tickets.health() if tickets is not None else {},
        **open_now,
    }


def _node(known: Known) -> dict[str, object]:
    peer, endpoint = known.peer, known.endpoint
    reachable = peer is not None and peer.reachable()
    rails = _rails(peer)
    report = rails.rail_health() if rails is not None else {}
    return {
        "node_id": endpoint.node_id,
        "incarnation": endpoint.incarnation,
        "address": endpoint.channel,
        "transport": peer.transport if peer is not None else "",
        "rails": report,
        "rails_problem": report.get("problem", "") if rails is not None and rails.only else "",
        "reachable": reachable,
        "breaker": "none" if peer is None else "closed" if reachable else "open",
        "problem": "" if reachable else known.problem or "unreachable: it is probed until it answers",
    }


class _Rails(Protocol):
    """What a peer over rails tells of them; ``only``: nothing else will do."""

    only: bool

    def rail_health(self) -> dict[str, object]: ...


def _rails(peer: object) -> _Rails | None:
    """The peer over rails, whatever is put in front of it."""
    while peer is not None and not hasattr(peer, "rail_health"):
        peer = getattr(peer, "inner", None)
    return cast("_Rails | None", peer)
