"""``kvstrata health`` and ``kvstrata node list``: what a master says of itself, its nodes and clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.output import Exit, expected_errors, print_json, print_table
from kvstrata.cli.sizes import addresses_flag, format_size
from kvstrata.proto.errors import Unavailable

if TYPE_CHECKING:
    from kvstrata.client.admin import AdminClient

Master = Annotated[str, addresses_flag("--master", help="Channel address of a master.", envvar="KVSTRATA_MASTER")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_MASTER = "127.0.0.1:7400"

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
    """Every node the master knows: state, address, memory, blocks."""
    with expected_errors():
        with ask(master) as admin:
            nodes = admin.nodes()
        if as_json:
            print_json(rows(nodes))
        else:
            _node_table(nodes)


def ask(masters: str) -> AdminClient:
    """The first of comma-separated masters that answers; raises :class:`Unavailable` when none does."""
    from kvstrata.client.admin import AdminClient

    reasons = []
    for address in masters.split(","):
        try:
            return AdminClient(address)
        except Unavailable as error:
            reasons.append(str(error))
    raise Unavailable("; ".join(reasons))


def rows(messages: Any) -> list[dict[str, Any]]:
    return [as_dict(message) for message in messages]


def as_dict(message: Any) -> dict[str, Any]:
    """A protobuf message with its own field names and every default; 64-bit numbers as numbers."""
    from google.protobuf.json_format import MessageToDict

    plain = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {key: _numbers(value) for key, value in plain.items()}


def _numbers(value: Any) -> Any:
    """protobuf's JSON form writes 64-bit integers as strings: undo it below the top level, too."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, str) and value.isdigit() and len(value) < 21:
        return int(value)
    return value


def _say_health(report: Any, nodes: Any, clients: Any) -> None:
    state = "healthy" if report.healthy else "NOT healthy"
    ready = "ready" if report.ready else "not ready yet"
    typer.echo(
        f"{report.software} cluster {report.cluster_id}: {state}, {ready}, up {report.uptime_seconds:.0f} s, "
        f"{report.blocks} blocks, {report.nodes_active} of {report.nodes_total} nodes active"
    )
    for problem in report.problems:
        typer.echo(f"  problem: {problem}")
    _node_table(nodes)
    table = [
        (c.name, c.host, c.pid, c.software, c.lookups, f"{c.idle_seconds:.0f} s", f"{c.connected_seconds:.0f} s")
        for c in clients
    ]
    if table:
        print_table("clients", ("name", "host", "pid", "software", "lookups", "idle", "connected"), table)


def _node_table(nodes: Any) -> None:
    table = [
        (
            n.node_id,
            n.state if n.synced or n.state != "active" else f"{n.state} (loading)",
            n.channel,
            f"{format_size(n.status.dram_bytes_used)} / {format_size(n.dram_bytes)}",
            n.blocks,
            n.status.clients,
            f"{n.heartbeat_age_seconds:.1f} s",
        )
        for n in nodes
    ]
    print_table("nodes", ("node", "state", "channel", "memory", "blocks", "clients", "heartbeat"), table)
