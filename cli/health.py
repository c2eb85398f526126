"""``kvstrata health`` and ``kvstrata node list``: what a master says of itself, its nodes and clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from kvstrata.cli.as_json import as_dict, rows
from kvstrata.cli.masters import DEFAULT_MASTER, Json, Master, ask
from kvstrata.cli.output import Exit, expected_errors, print_json, print_table, say
from kvstrata.cli.sizes import format_size

if TYPE_CHECKING:
    from kvstrata.proto import control_pb2 as control

node = typer.Typer(help="Storage nodes.", no_args_is_help=True)


def health(master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """Is the pool well? Exits 1 when it is not, 3 when nobody answers."""
    with expected_errors():
        with ask(master) as admin:
            report, nodes, clients = admin.health(), admin.nodes(), admin.clients()
        if as_json:
            print_json({"master": as_dict(report), "nodes": rows(nodes), "clients": rows(clients)})
        else:
            _say_health(report, nodes, clients)
        raise typer.Exit(Exit.OK if report.healthy else Exit.FAILED)


@node.command("list")
def node_list(master: Master = DEFAULT_MASTER, as_json: Json = False) -> None:
    """Every node the master knows: state, address, memory, SSD, blocks."""
    with expected_errors():
        with ask(master) as admin:
            nodes = admin.nodes()
        if as_json:
            print_json(rows(nodes))
        else:
            _node_table(nodes)


def _say_health(
    report: control.HealthReport, nodes: Sequence[control.NodeRow], clients: Sequence[control.ClientRow]
) -> None:
    state = "healthy" if report.healthy else "NOT healthy"
    ready = "ready" if report.ready else "not ready yet"
    say(
        f"{report.software} cluster {report.cluster_id}: {state}, {ready}, up {report.uptime_seconds:.0f} s, "
        f"{report.blocks} blocks, {report.nodes_active} of {report.nodes_total} nodes active"
    )
    role = "leads" if report.leading else f"follows {report.leader}" if report.leader else "follows nobody"
    say(f"  this master {role}, epoch {report.epoch}")
    for problem in report.problems:
        say(f"  problem: {problem}")
    for warning in report.warnings:
        say(f"  warning: {warning}")
    for software, count in sorted(report.refused_versions.items()):
        say(f"  refused {count} times: {software} speaks another protocol version; upgrade the older side")
    _node_table(nodes)
    table = [
        (c.name, c.host, c.pid, c.software, c.lookups, f"{c.idle_seconds:.0f} s", f"{c.connected_seconds:.0f} s")
        for c in clients
    ]
    if table:
        print_table("clients", ("name", "host", "pid", "software", "lookups", "idle", "connected"), table)


def _state(row: control.NodeRow) -> str:
    state = row.state if row.synced or row.state != "active" else f"{row.state} (loading)"
    if not row.drain.state:
        return state
    moved = f" {row.drain.bytes_moved / row.drain.bytes_total:.0%}" if row.drain.bytes_total else ""
    return f"{state}, {row.drain.state}{moved}"


def _node_table(nodes: Sequence[control.NodeRow]) -> None:
    table = [
        (
            n.node_id,
            _state(n),
            n.channel,
            f"{format_size(n.status.dram_bytes_used)} / {format_size(n.dram_bytes)}",
            f"{format_size(n.status.ssd_bytes_used)} / {format_size(n.ssd_bytes)}" if n.ssd_bytes else "-",
            n.blocks,
            n.status.clients,
            f"{n.heartbeat_age_seconds:.1f} s",
        )
        for n in nodes
    ]
    print_table("nodes", ("node", "state", "channel", "memory", "ssd", "blocks", "clients", "heartbeat"), table)
    devices = [
        (n.node_id, d.path, d.state, f"{format_size(d.bytes_used)} / {format_size(d.bytes)}", d.problem or "-")
        for n in nodes
        for d in n.status.devices
    ]
    if devices:
        print_table("devices", ("node", "path", "state", "used", "problem"), devices)
