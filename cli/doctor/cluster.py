"""Checks of a running cluster from here: every master by each of its ports, every node by each transport."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstrata.cli.doctor.nodes import node
from kvstrata.cli.doctor.reach import CALL_S, greet, http, near, same_version, who_may_call
from kvstrata.cli.doctor.rows import Check, Row, Verdict
from kvstrata.client.admin import AdminClient
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Forbidden, KVError, Refused, Unauthenticated
from kvstrata.transfer.identity import SOFTWARE
from kvstrata.transfer.security.tickets import TicketSource

BOUND_S: Final = 15.0


@dataclass(slots=True)
class Roster:
    """What the masters that answer know: other masters by channel, nodes by id, and who else runs what."""

    masters: list[str] = field(default_factory=list)
    nodes: dict[str, control.NodeRow] = field(default_factory=dict)
    clients: list[control.ClientRow] = field(default_factory=list)
    told: bool = False  #: some master said which nodes it knows


def roster(masters: Sequence[str]) -> Roster:
    """Ask each; those that do not answer are rows of their own later."""
    found = Roster(list(dict.fromkeys(masters)))
    for address in masters:
        try:
            with AdminClient(address, timeout_s=CALL_S) as admin:
                listed = admin.nodes()
                found.told = True
                for node in listed:
                    found.nodes.setdefault(node.node_id, node)
                found.clients.extend(admin.clients())
                _other_masters(admin, found)
        except KVError:
            continue  # its own check says why
    return found


def _other_masters(admin: AdminClient, found: Roster) -> None:
    """A master of an earlier version knows no others."""
    try:
        listed = admin.masters()
    except Refused:
        return
    for row in listed.masters:
        if not row.self and row.channel not in found.masters:
            found.masters.append(row.channel)


def checks(found: Roster, *, round_trip: bool, tickets: TicketSource | None = None) -> list[Check]:
    """Every master and every node; ``round_trip`` stores, loads and removes blocks on each node. ``tickets``: what to
    prove to nodes."""
    addresses = ",".join(found.masters)
    masters = [
        Check("masters", address, lambda address=address: master(address), BOUND_S)  # type: ignore[misc]
        for address in found.masters
    ]
    nodes = [
        Check("nodes", row.node_id, lambda row=row: node(row, round_trip, tickets, addresses), BOUND_S)  # type: ignore[misc]
        for row in found.nodes.values()
    ]
    return [*masters, *nodes, Check("cluster", "nodes and clients", lambda: who_is_there(found))]


# ---------------------------------------------------------------- masters


def master(address: str) -> Iterator[Row]:
    try:
        hello, ping_s = greet(address)
    except KVError as error:
        yield Row("masters", address, Verdict.PROBLEM, str(error), "start it, or take it out of --master; see its log")
        return
    if hello.role != "master":
        found, advice = f"is a {hello.role or 'stranger'}, not a master", "give a master's channel"
        yield Row("masters", address, Verdict.PROBLEM, found, advice)
        return
    yield near("masters", f"{address}: channel", ping_s, "leads" if hello.leading else "")
    yield from same_version("masters", address, hello.software)
    yield who_may_call("masters", address, address, hello)
    yield from _grpc(address)
    yield from http("masters", address, hello.http)


def _grpc(address: str) -> Iterator[Row]:
    what = f"{address}: gRPC"
    try:
        with AdminClient(address, timeout_s=CALL_S) as admin:
            began = time.monotonic()
            report = admin.health()
            took_s = time.monotonic() - began
    except (Unauthenticated, Forbidden) as error:
        advice = "give a token that may look: --token-file, or KVSTRATA_TOKEN_FILE"
        yield Row("masters", what, Verdict.PROBLEM, str(error), advice)
        return
    except KVError as error:
        advice = "is the port open between here and there? nodes need it to attach"
        yield Row("masters", what, Verdict.PROBLEM, str(error), advice)
        return
    for warning in report.warnings:
        yield Row("masters", f"{address}: health", Verdict.WARNING, warning, "see docs/security.md")
    if not report.healthy or report.problems:
        found = "; ".join(report.problems) or "it calls itself unhealthy"
        yield Row("masters", what, Verdict.PROBLEM, found, "kvstrata health says more")
    elif not report.ready:
        missing = "nodes of its roster have not come back: wait, start them, or take them off"
        advice = missing if report.leading or report.leader else "no master leads: can they reach their state store?"
        yield Row("masters", what, Verdict.WARNING, "not ready yet", advice)
    else:
        found = f"healthy, {report.nodes_active} of {report.nodes_total} nodes active, {took_s * 1e3:.1f} ms"
        yield Row("masters", what, Verdict.OK, found)


def who_is_there(found: Roster) -> Iterator[Row]:
    what = "nodes and clients"
    others = sorted({f"{client.name} ({client.software})" for client in found.clients if client.software != SOFTWARE})
    count = f"{len(found.nodes)} nodes and {len(found.clients)} clients known to the masters that answer"
    if others:
        told = f"{count}; of other versions: {', '.join(others)}"
        yield Row("cluster", what, Verdict.WARNING, told, "upgrade the older ones")
    elif not found.told:
        yield Row(
            "cluster", what, Verdict.NOT_APPLICABLE, "no master told which nodes there are", "see the masters' rows"
        )
    elif not found.nodes:
        yield Row("cluster", what, Verdict.WARNING, count, "start storage nodes with --master HOST:PORT of the masters")
    else:
        yield Row("cluster", what, Verdict.OK, count)
