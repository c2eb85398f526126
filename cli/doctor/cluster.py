"""Checks of a running cluster from here: every master by each of its ports, every node by each transport."""

from __future__ import annotations

import email.utils
import json
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstrata.cli.doctor.rows import Check, Row, Verdict
from kvstrata.client.admin import AdminClient
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import KVError, Refused
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint, Fetch, Peer, Push, Transport
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import SOFTWARE, Identity, boot_id
from kvstrata.transfer.regions import Region
from kvstrata.transfer.shm import ShmTransport
from kvstrata.transfer.slabs import SlabMap
from kvstrata.transfer.tcp import TcpTransport

CALL_S: Final = 2.0
PINGS: Final = 9
TRIES: Final = 3
#: HTTP dates are whole seconds.
SKEW_S: Final = 2.0
#: A round trip that takes longer is far for blocks, and near silence for a client.
FAR_S: Final = 0.05
BOUND_S: Final = 15.0
#: What the round trip stores, under names that nobody else has.
PROBE: Final = Namespace("kvstrata/doctor", 4096, 16)
SALT: Final = "kvstrata-doctor"
PROBE_BLOCKS: Final = 4

_LOADED, _STORED = int(BlockStatus.LOADED), int(BlockStatus.STORED)


@dataclass(slots=True)
class Roster:
    """What the masters that answer know: other masters by channel, nodes by id, and who else runs what."""

    masters: list[str] = field(default_factory=list)
    nodes: dict[str, control.NodeRow] = field(default_factory=dict)
    clients: list[control.ClientRow] = field(default_factory=list)


def roster(masters: Sequence[str]) -> Roster:
    """Ask each; those that do not answer are rows of their own later."""
    found = Roster(list(dict.fromkeys(masters)))
    for address in masters:
        try:
            with AdminClient(address, timeout_s=CALL_S) as admin:
                for node in admin.nodes():
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


def checks(found: Roster, *, round_trip: bool) -> list[Check]:
    """Every master and every node; ``round_trip`` stores, loads and removes blocks on each node."""
    masters = [
        Check("masters", address, lambda address=address: master(address), BOUND_S)  # type: ignore[misc]
        for address in found.masters
    ]
    nodes = [
        Check("nodes", row.node_id, lambda row=row: node(row, round_trip), BOUND_S)  # type: ignore[misc]
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
    yield from _grpc(address)
    yield from http("masters", address, hello.http)


def _grpc(address: str) -> Iterator[Row]:
    what = f"{address}: gRPC"
    try:
        with AdminClient(address, timeout_s=CALL_S) as admin:
            began = time.monotonic()
            report = admin.health()
            took_s = time.monotonic() - began
    except KVError as error:
        advice = "is the port open between here and there? nodes need it to attach"
        yield Row("masters", what, Verdict.PROBLEM, str(error), advice)
        return
    if not report.healthy or report.problems:
        found = "; ".join(report.problems) or "it calls itself unhealthy"
        yield Row("masters", what, Verdict.PROBLEM, found, "kvstrata health says more")
    elif not report.ready:
        advice = "nodes of its roster have not come back: wait, start them, or take them off"
        yield Row("masters", what, Verdict.WARNING, "not ready yet", advice)
    else:
        found = f"healthy, {report.nodes_active} of {report.nodes_total} nodes active, {took_s * 1e3:.1f} ms"
        yield Row("masters", what, Verdict.OK, found)


# ---------------------------------------------------------------- nodes


def node(row: control.NodeRow, round_trip: bool) -> Iterator[Row]:
    name = row.node_id
    if row.state != "active":
        advice = "start it, or look at its log; kvstrata node remove takes a node that is gone off the roster"
        yield Row("nodes", name, Verdict.PROBLEM, f"its master calls it {row.state}", advice)
    elif not row.synced:
        yield Row("nodes", name, Verdict.WARNING, "its master is loading what it has", "wait")
    yield from _by_tcp(row)
    here = row.boot_id == boot_id()
    yield from _by_shm(row) if here else [_elsewhere(row)]
    yield from http("nodes", name, row.http)
    if round_trip:
        yield from _round_trips(row, here)


def _by_tcp(row: control.NodeRow) -> Iterator[Row]:
    what = f"{row.node_id}: tcp"
    try:
        hello, ping_s = greet(row.channel)
        health = _node_info(row.channel)
    except KVError as error:
        advice = "is it running, and its port open between here and there?"
        yield Row("nodes", what, Verdict.PROBLEM, f"{row.channel}: {error}", advice)
        return
    if hello.node_id != row.node_id:
        found = f"{row.channel} is {hello.role} {hello.node_id or 'of no name'}"
        yield Row("nodes", what, Verdict.PROBLEM, found, "two daemons claim one address: look at --listen of both")
        return
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


def _by_shm(row: control.NodeRow) -> Iterator[Row]:
    """The node's socket, and one slab of it mapped as an engine maps it."""
    what = f"{row.node_id}: shm"
    if not row.unix_path or not Path(row.unix_path).exists():
        found = f"its socket {row.unix_path or '(none)'} cannot be seen from here"
        advice = "mount the node's --data directory into this container at the same path; tcp works meanwhile"
        yield Row("nodes", what, Verdict.WARNING, found, advice)
        return
    try:
        hello, ping_s = greet(f"unix:{row.unix_path}")
        slabs = SlabMap(row.unix_path, Identity.new("admin"), hello.incarnation)
        try:
            nbytes = len(slabs.get(0).bytes)
        finally:
            slabs.close()
    except KVError as error:
        advice = "run engines as the user of the node (the socket has mode 600); tcp works meanwhile"
        yield Row("nodes", what, Verdict.WARNING, str(error), advice)
        return
    yield near("nodes", what, ping_s, f"a slab of {nbytes >> 20} MiB mapped")


def _elsewhere(row: control.NodeRow) -> Row:
    return Row("nodes", f"{row.node_id}: shm", Verdict.NOT_APPLICABLE, f"on another host ({row.host or 'unnamed'})")


def _node_info(address: str) -> dict[str, Any]:
    with _connected(address) as connection:
        frame = connection.call(Kind.NODE_INFO, pb.NodeInfo().SerializeToString(), time.monotonic() + CALL_S)
        return dict(json.loads(expect(pb.NodeInfoOk, frame, Kind.NODE_INFO_OK).json))


# ---------------------------------------------------------------- bytes there and back


def _round_trips(row: control.NodeRow, here: bool) -> Iterator[Row]:
    identity = Identity.new("client", "kvstrata doctor")
    transports: list[Transport] = [TcpTransport(identity), *([ShmTransport(identity)] if here else [])]
    endpoint = Endpoint(row.node_id, row.incarnation, row.channel, row.unix_path, row.boot_id)
    for transport in transports:
        try:
            if transport.reaches(endpoint):
                yield _tried(row, transport, endpoint)
        finally:
            transport.close()


def _tried(row: control.NodeRow, transport: Transport, endpoint: Endpoint) -> Row:
    """A busy machine may be silent for a moment, and be well."""
    what = f"{row.node_id}: round trip by {transport.name}"
    for _ in range(TRIES - 1):
        told = _there_and_back(what, transport.connect(endpoint))
        if told.verdict is not Verdict.PROBLEM:
            return told
    return _there_and_back(what, transport.connect(endpoint))


def _there_and_back(what: str, peer: Peer) -> Row:
    """Store blocks of fresh names, load them, compare every byte. They leave by themselves, as the coldest."""
    rng = np.random.default_rng()
    hashes = rng.bytes(PROBE_BLOCKS * PROBE.hash_bytes)
    source = Region(np.frombuffer(rng.bytes(PROBE_BLOCKS * PROBE.block_bytes), np.uint8).copy(), None)
    target = Region(np.zeros(source.nbytes, np.uint8), None)
    began = time.monotonic()
    until = began + CALL_S
    try:
        stored = peer.push(Push(PROBE, SALT, hashes, source.rows(PROBE), until)).status
        if not (stored == _STORED).all():
            return _not_stored(what, stored.tolist())
        loaded = peer.fetch(Fetch(PROBE, SALT, hashes, target.rows(PROBE), until, "always")).status
    except KVError as error:
        return Row("nodes", what, Verdict.PROBLEM, str(error), "see the node's log")
    finally:
        peer.close()
    took_ms = (time.monotonic() - began) * 1e3
    if not (loaded == _LOADED).all():
        return Row("nodes", what, Verdict.PROBLEM, f"stored, and not loaded: {_names(loaded.tolist())}", "see its log")
    if not (source.bytes == target.bytes).all():
        advice = "take the node out of service, and report this as a bug of kvstrata"
        return Row("nodes", what, Verdict.PROBLEM, "other bytes came back than were stored", advice)
    return Row("nodes", what, Verdict.OK, f"{PROBE_BLOCKS} blocks stored, loaded and compared in {took_ms:.1f} ms")


def _not_stored(what: str, statuses: list[int]) -> Row:
    quota = int(BlockStatus.QUOTA)
    if set(statuses) == {quota}:
        found = f"tenant {SALT} may store nothing"
        return Row("nodes", what, Verdict.NOT_APPLICABLE, found, f"kvstrata tenant set {SALT} --dram 1MiB, to try it")
    return Row("nodes", what, Verdict.PROBLEM, f"not stored: {_names(statuses)}", "see the node's log")


def _names(statuses: Iterable[int]) -> str:
    return ", ".join(sorted({BlockStatus(status).name.lower() for status in statuses}))


# ---------------------------------------------------------------- what all have in common


def greet(address: str) -> tuple[pb.HelloOk, float]:
    """(its hello, the median round trip in seconds). Raises :class:`Unavailable` and refusals."""
    with _connected(address) as connection:
        times = []
        for _ in range(PINGS):
            began = time.monotonic()
            connection.call(Kind.PING, b"", began + CALL_S)
            times.append(time.monotonic() - began)
        return connection.hello, statistics.median(times)


class _connected:
    """A connection for a few calls."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> Connection:
        self._connection = Connection.open(self._address, Identity.new("admin"), silence_s=CALL_S, connect_s=CALL_S)
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def near(area: str, what: str, ping_s: float, more: str = "") -> Row:
    found = ", ".join(part for part in (f"round trip {ping_s * 1e3:.2f} ms", more) if part)
    if ping_s > FAR_S:
        advice = "far for a pool: peers that are silent for 250 ms count as dead"
        return Row(area, what, Verdict.WARNING, found, advice)
    return Row(area, what, Verdict.OK, found)


def same_version(area: str, what: str, software: str) -> Iterator[Row]:
    if software != SOFTWARE:
        found = f"runs {software or 'an unknown version'}, this is {SOFTWARE}"
        yield Row(area, f"{what}: version", Verdict.WARNING, found, "upgrade the older one")


def who_is_there(found: Roster) -> Iterator[Row]:
    what = "nodes and clients"
    others = sorted({f"{client.name} ({client.software})" for client in found.clients if client.software != SOFTWARE})
    count = f"{len(found.nodes)} nodes and {len(found.clients)} clients known to the masters that answer"
    if others:
        told = f"{count}; of other versions: {', '.join(others)}"
        yield Row("cluster", what, Verdict.WARNING, told, "upgrade the older ones")
    elif not found.nodes:
        yield Row("cluster", what, Verdict.WARNING, count, "start storage nodes with --master HOST:PORT of the masters")
    else:
        yield Row("cluster", what, Verdict.OK, count)


def http(area: str, name: str, endpoint: str) -> Iterator[Row]:
    """Is it served, and does its wall clock agree with ours?"""
    what = f"{name}: HTTP"
    if not endpoint:
        yield Row(area, what, Verdict.NOT_APPLICABLE, "none")
        return
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    began = time.time()
    try:
        with opener.open(f"http://{endpoint}/healthz", timeout=CALL_S) as answer:
            status, date = answer.status, answer.headers.get("Date", "")
    except urllib.error.HTTPError as error:
        status, date = error.code, error.headers.get("Date", "")
        error.close()
    except OSError as error:
        advice = "is the port open? metrics and health are read there"
        yield Row(area, what, Verdict.WARNING, f"{endpoint}: {getattr(error, 'reason', error)}", advice)
        return
    if status == 200:
        yield Row(area, what, Verdict.OK, f"{endpoint} answers")
    else:
        yield Row(area, what, Verdict.PROBLEM, f"{endpoint}/healthz answers {status}", "its body says why")
    yield from skew(area, name, date, began, time.time())


def skew(area: str, name: str, date: str, began: float, ended: float) -> Iterator[Row]:
    """``date``: of an answer that came between two wall times of ours. Nothing counts on it but people and logs."""
    what = f"{name}: wall clock"
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        yield Row(area, what, Verdict.NOT_APPLICABLE, "it does not say what time it is")
        return
    ahead = theirs + 1.0 - began if theirs + 1.0 < began else max(0.0, theirs - ended)
    if abs(ahead) > SKEW_S:
        found = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
        advice = "let NTP set both: leases do not need it, logs and `kvstrata why` are read by it"
        yield Row(area, what, Verdict.WARNING, found, advice)
    else:
        yield Row(area, what, Verdict.OK, "agrees with this machine's")
