"""Gauges and counters of copies, replicas and drains."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstrata.master.hub import Hub
from kvstrata.master.state import MasterState


def replication_metrics(hub: Hub) -> Iterable[Metric]:
    """For a scrape."""
    gauges, counters, blocks, unplaced = hub.read(lambda state, _: _numbers(state))
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"kvstrata_master_{name}", text, value=value)
    for name, text, value in counters:
        yield CounterMetricFamily(f"kvstrata_master_{name}", text, value=value)
    ended = CounterMetricFamily(
        "kvstrata_master_copied_blocks",
        "Blocks that nodes were told to copy, by what became of them",
        labels=["status"],
    )
    for status, count in blocks.items():
        ended.add_metric([status], count)
    yield ended
    nowhere = CounterMetricFamily(
        "kvstrata_master_unplaced_blocks", "Blocks that no node had room for a copy of, by reason", labels=["reason"]
    )
    for reason, count in unplaced.items():
        nowhere.add_metric([reason], count)
    yield nowhere


_Named = list[tuple[str, str, int]]


def _numbers(state: MasterState) -> tuple[_Named, _Named, dict[str, int], dict[str, int]]:
    replication = state.replication
    gauges = [
        ("copies", "Commands to copy that nodes have not answered", len(replication.copies)),
        ("replicas_wanting", "Replicas that are missing, at the last scan", replication.scan.wanting),
        ("replicas_surplus", "Replicas that are too many, at the last scan", replication.scan.surplus),
        ("nodes_leaving", "Nodes that are drained or being drained", sum(node.leaving for node in state.nodes)),
        ("replication_waiting", "Blocks that wait to be looked at for copies", replication.waiting),
    ]
    counters = [
        ("copied_bytes", "Bytes that nodes have copied by order", replication.copies.bytes_copied),
        ("trimmed_blocks", "Replicas that nodes were told to let go of", replication.trims.blocks),
        ("replication_dropped", "Blocks that were too many to wait; a scan finds them again", replication.dropped),
    ]
    return gauges, counters, dict(replication.copies.blocks), dict(replication.planner.unplaced)
