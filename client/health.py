"""What a client says of itself: masters, nodes, loops, counts, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.client.counters import Counters
from kvstrata.client.directory import Directory
from kvstrata.client.memory import RegisteredMemory
from kvstrata.client.peers import Known, Peers
from kvstrata.transfer.loops import Loop


def health_report(
    directory: Directory,
    peers: Peers,
    loop: Loop,
    counters: Counters,
    memory: RegisteredMemory,
    open_now: Mapping[str, int],
) -> dict[str, object]:
    """A dict of plain values, fit for JSON: what this client knows now. ``open_now``: what is under way, by name."""
    masters = directory.health()
    nodes = [_node(known) for known in peers.all()]
    problems = [f"master {m['address']}: {m['reason'] or 'not reached yet'}" for m in masters if not m["reachable"]]
    problems += [f"node {n['node_id']}: {n['problem']}" for n in nodes if not n["reachable"]]
    if loop.problem():
        problems.append(loop.problem())
    return {
        "healthy": not problems,
        "problems": problems,
        "masters": masters,
        "nodes": nodes,
        "loop_age_seconds": {loop.name: loop.age_s()},
        "blocks": counters.snapshot(),
        "regions": memory.totals(),
        **open_now,
    }


def _node(known: Known) -> dict[str, object]:
    peer, endpoint = known.peer, known.endpoint
    reachable = peer is not None and peer.reachable()
    return {
        "node_id": endpoint.node_id,
        "incarnation": endpoint.incarnation,
        "address": endpoint.channel,
        "transport": peer.transport if peer is not None else "",
        "reachable": reachable,
        "breaker": "none" if peer is None else "closed" if reachable else "open",
        "problem": "" if reachable else known.problem or "unreachable: it is probed until it answers",
    }
