"""Checks of one node: every transport that may reach it from here, and what it says of itself."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from kvstrata.cli.doctor import rails
from kvstrata.cli.doctor.reach import CALL_S, connected, greet, http, near, same_version, who_may_call
from kvstrata.cli.doctor.round_trip import tried
from kvstrata.cli.doctor.rows import Row, Verdict
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Forbidden, KVError, Unauthenticated
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint, Transport
from kvstrata.transfer.connection import expect
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.security.tickets import TicketSource
from kvstrata.transfer.shm import ShmTransport
from kvstrata.transfer.slabs import SlabMap
from kvstrata.transfer.tcp import TcpTransport


def node(
    row: control.NodeRow, round_trip: bool, tickets: TicketSource | None = None, masters: str = ""
) -> Iterator[Row]:
    """``tickets``: what to prove to it, and ``masters``, where another process gets its own."""
    name = row.node_id
    if row.state != "active":
        advice = "start it, or look at its log; kvstrata node remove takes a node that is gone off the roster"
        yield Row("nodes", name, Verdict.PROBLEM, f"its master calls it {row.state}", advice)
    elif not row.synced:
        yield Row("nodes", name, Verdict.WARNING, "its master is loading what it has", "wait")
    told = yield from _by_tcp(row, tickets)
    here = row.boot_id == boot_id()
    yield from _by_shm(row, tickets) if here else [_elsewhere(row)]
    if told is not None:
        yield who_may_call("nodes", name, row.channel, told[0])
        yield from rails.of_node(endpoint_of(row), *told, round_trip=round_trip, masters=masters)
    yield from http("nodes", name, row.http)
    if round_trip:
        yield from _round_trips(row, here, tickets)


def endpoint_of(row: control.NodeRow) -> Endpoint:
    return Endpoint(row.node_id, row.incarnation, row.channel, row.unix_path, row.boot_id)


def _by_tcp(
    row: control.NodeRow, tickets: TicketSource | None
) -> Generator[Row, None, tuple[pb.HelloOk, dict[str, Any]] | None]:
    """Its hello, and what it says of itself; None when it cannot be asked."""
    what = f"{row.node_id}: tcp"
    try:
        hello, ping_s = greet(row.channel)
        health = _node_info(row.channel, tickets)
    except (Unauthenticated, Forbidden) as error:
        advice = "give the token of a role that may look: --token-file, or KVSTRATA_TOKEN_FILE"
        yield Row("nodes", what, Verdict.PROBLEM, f"{row.channel}: {error}", advice)
        return None
    except KVError as error:
        advice = "is it running, and its port open between here and there?"
        yield Row("nodes", what, Verdict.PROBLEM, f"{row.channel}: {error}", advice)
        return None
    if hello.node_id != row.node_id:
        found = f"{row.channel} is {hello.role} {hello.node_id or 'of no name'}"
        yield Row("nodes", what, Verdict.PROBLEM, found, "two daemons claim one address: look at --listen of both")
        return None
    yield near("nodes", what, ping_s)
    if hello.incarnation != row.incarnation:
        found, advice = "it was restarted, and its master has not heard of it", "wait for it to attach, or see its log"
        yield Row("nodes", what, Verdict.WARNING, found, advice)
    yield from same_version("nodes", row.node_id, hello.software)
    for problem in health.get("problems", []):
        yield Row("nodes", row.node_id, Verdict.PROBLEM, str(problem), "see the node's log")
    alone = [str(link.get("master")) for link in health.get("masters", []) if not link.get("attached")]
    if alone:
        found = f"not attached to {', '.join(alone)}"
        yield Row("nodes", row.node_id, Verdict.WARNING, found, "look at those masters from the node's host")
    return hello, health


def _by_shm(row: control.NodeRow, tickets: TicketSource | None) -> Iterator[Row]:
    """The node's socket, and one slab of it mapped as an engine maps it."""
    what = f"{row.node_id}: shm"
    if not row.unix_path or not Path(row.unix_path).exists():
        found = f"its socket {row.unix_path or '(none)'} cannot be seen from here"
        advice = "mount the node's --data directory into this container at the same path; tcp works meanwhile"
        yield Row("nodes", what, Verdict.WARNING, found, advice)
        return
    try:
        hello, ping_s = greet(f"unix:{row.unix_path}")
        slabs = SlabMap(row.unix_path, Identity.new("admin", tickets=tickets), hello.incarnation)
        try:
            nbytes = len(slabs.get(0).bytes)
        finally:
            slabs.close()
    except Forbidden as error:
        advice = "an engine's token maps memory, and may not look at nodes; a token of the role admin may do both"
        yield Row("nodes", what, Verdict.NOT_APPLICABLE, f"its socket answers; mapping: {error}", advice)
        return
    except KVError as error:
        advice = "run engines as the user of the node (the socket has mode 600); tcp works meanwhile"
        yield Row("nodes", what, Verdict.WARNING, str(error), advice)
        return
    yield near("nodes", what, ping_s, f"a slab of {nbytes >> 20} MiB mapped")


def _elsewhere(row: control.NodeRow) -> Row:
    return Row("nodes", f"{row.node_id}: shm", Verdict.NOT_APPLICABLE, f"on another host ({row.host or 'unnamed'})")


def _node_info(address: str, tickets: TicketSource | None) -> dict[str, Any]:
    with connected(address, tickets) as connection:
        frame = connection.call(Kind.NODE_INFO, pb.NodeInfo().SerializeToString(), time.monotonic() + CALL_S)
        return dict(json.loads(expect(pb.NodeInfoOk, frame, Kind.NODE_INFO_OK).json))


def _round_trips(row: control.NodeRow, here: bool, tickets: TicketSource | None) -> Iterator[Row]:
    identity = Identity.new("client", "kvstrata doctor", tickets)
    transports: list[Transport] = [TcpTransport(identity), *([ShmTransport(identity)] if here else [])]
    endpoint = endpoint_of(row)
    for transport in transports:
        try:
            if transport.reaches(endpoint):
                yield tried(transport, endpoint)
        finally:
            transport.close()
