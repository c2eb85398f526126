"""Real nodes that copy from each other: a lost node's blocks get their replicas again, and nothing leaves with a node
that is drained, or stops with time to be."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli.app import app
from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument, Refused
from tests.e2e.tiered_pool import BLOCK_BYTES, Tenant, TieredPool
from tests.waiting import until

COUNT = 48
#: A killed node is known at once; five seconds later its blocks are copied. The rest is for a shared machine.
REPAIRED_S = 40.0

Start = Callable[..., TieredPool]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    pools: list[TieredPool] = []

    def begin(nodes: int = 3, **more: object) -> TieredPool:
        pools.append(TieredPool(tmp_path, nodes, **more))  # type: ignore[arg-type]
        return pools[-1]

    yield begin
    for pool in pools:
        pool.end()


def stored(tenant: Tenant) -> Tenant:
    """All of it stored, and known to the master; a node may be silent for a moment on a busy machine."""
    until(lambda: bool(tenant.store().stored.all()), 30)
    until(lambda: tenant.lookup().hit_blocks == tenant.count, 30)
    return tenant


def all_load(tenant: Tenant) -> None:
    """Nothing is lost: all of it loads, with the right bytes."""
    until(lambda: bool(tenant.load().loaded.all()), 30)


def copies_of(admin: AdminClient, salt: str) -> dict[bytes, set[str]]:
    """The nodes that have each block."""
    listed = admin.list_blocks(salt=salt)
    return {row.hash: {place.rpartition("/")[0] for place in row.where} for row in listed.blocks}


def row_of(admin: AdminClient, node_id: str) -> control.NodeRow:
    return next(row for row in admin.nodes() if row.node_id == node_id)


def drained(admin: AdminClient, node_id: str) -> bool:
    return row_of(admin, node_id).drain.state not in ("", "draining")


def busiest(admin: AdminClient) -> str:
    """The node that has the most blocks."""
    return max(admin.nodes(), key=lambda row: row.blocks).node_id


def test_a_killed_node_s_blocks_get_their_second_replica_again(start: Start) -> None:
    pool = start()
    with AdminClient(pool.address) as admin, Client(pool.address, verify="always") as client:
        admin.set_replicas(2)
        tenant = stored(Tenant(client, "t", COUNT))
        until(lambda: all(len(nodes) == 2 for nodes in copies_of(admin, "t").values()), REPAIRED_S)
        all_load(tenant)
        victim = pool.node_named(busiest(admin))
        victim.signal(signal.SIGKILL)
        victim.end()

        def again() -> bool:
            copies = copies_of(admin, "t")
            return len(copies) == COUNT and all(
                len(nodes) == 2 and victim.ready["node_id"] not in nodes for nodes in copies.values()
            )

        until(again, REPAIRED_S)
        all_load(tenant)
        for row in admin.nodes():
            assert not row.status.reservations and not row.copies


def test_a_drained_node_takes_nothing_with_it(start: Start) -> None:
    """More than its memory holds: what is on SSD only goes too."""
    pool = start()
    with AdminClient(pool.address) as admin, Client(pool.address, verify="always") as client:
        tenants = [stored(Tenant(client, f"t{index}", 200)) for index in range(5)]
        leaver = busiest(admin)
        row = row_of(admin, leaver)
        assert row.blocks * BLOCK_BYTES > row.dram_bytes
        out = CliRunner().invoke(app, ["node", "drain", leaver, "--master", pool.address, "--budget", "2m", "--json"])
        assert out.exit_code == 0, out.output
        drain = json.loads(out.stdout)["drain"]
        assert drain["state"] == "drained" and drain["bytes_moved"] == drain["bytes_total"] > 0
        pool.node_named(leaver).signal(signal.SIGTERM)
        pool.node_named(leaver).process.wait(20)
        until(lambda: row_of(admin, leaver).state == "offline")
        for tenant in tenants:
            assert tenant.lookup().hit_blocks == 200, "the hit rate is kept"
            all_load(tenant)
        assert admin.remove_node(leaver).node_id == leaver
        assert leaver not in {row.node_id for row in admin.nodes()}


def test_a_drain_goes_on_when_its_master_is_killed(start: Start) -> None:
    pool = start(nodes=2, more=("--ssd-policy", "write-through", "--copy-bandwidth", "1MiB"))
    with AdminClient(pool.address) as admin, Client(pool.address, verify="always") as client:
        tenants = [stored(Tenant(client, f"t{index}", COUNT)) for index in range(3)]
        leaver = busiest(admin)
        admin.drain_node(leaver)
        until(lambda: row_of(admin, leaver).drain.bytes_total > 0)
        assert not drained(admin, leaver)
    pool.restart_master()
    with AdminClient(pool.address) as admin:
        until(lambda: any(row.node_id == leaver and row.synced for row in admin.nodes()), 20)
        until(lambda: drained(admin, leaver), REPAIRED_S)
        assert row_of(admin, leaver).drain.bytes_failed == 0
        pool.kill(next(name for name, daemon in pool.daemons.items() if daemon.ready.get("node_id") == leaver))
        until(lambda: row_of(admin, leaver).state == "offline", 20)
    with Client(pool.address, verify="always") as client:
        for tenant in tenants:
            tenant.client = client
            tenant.ns = client.namespace("model/t", block_bytes=BLOCK_BYTES, block_tokens=16)
            until(lambda tenant=tenant: tenant.lookup().hit_blocks == COUNT)  # type: ignore[misc]
            all_load(tenant)


def test_a_node_that_stops_with_time_to_be_drained_loses_nothing(start: Start) -> None:
    pool = start(nodes=2, more=("--ssd-policy", "write-through", "--drain-on-stop", "60"))
    with AdminClient(pool.address) as admin, Client(pool.address, verify="always") as client:
        tenants = [stored(Tenant(client, f"t{index}", COUNT)) for index in range(2)]
        leaver = busiest(admin)
        daemon = pool.node_named(leaver)
        daemon.signal(signal.SIGTERM)
        daemon.process.wait(60)
        until(lambda: row_of(admin, leaver).state == "offline", 5)
        for tenant in tenants:
            assert tenant.lookup().hit_blocks == COUNT
            all_load(tenant)
        assert row_of(admin, leaver).drain.state == "", "it is not drained for good: its next process takes blocks"


def test_undrain_and_what_cannot_be(start: Start) -> None:
    pool = start(nodes=2)
    with AdminClient(pool.address) as admin, Client(pool.address, verify="always") as client:
        with pytest.raises(InvalidArgument, match="no node"):
            admin.drain_node("nobody")
        one, other = (row.node_id for row in admin.nodes())
        with pytest.raises(Refused, match="drain"):
            admin.remove_node(one)
        admin.drain_node(one)
        until(lambda: drained(admin, one))
        stored(Tenant(client, "while", COUNT))
        assert {name for nodes in copies_of(admin, "while").values() for name in nodes} == {other}
        admin.drain_node(one, cancel=True)
        admin.drain_node(other)
        until(lambda: drained(admin, other), 20)
        stored(Tenant(client, "after", COUNT))
        assert {name for nodes in copies_of(admin, "after").values() for name in nodes} == {one}


def test_replicas_from_the_command_line(start: Start) -> None:
    pool = start(nodes=2)
    with Client(pool.address) as client:
        stored(Tenant(client, "t", 4))

    def run(*arguments: str) -> str:
        out = CliRunner().invoke(app, ["replicas", *arguments, "--master", pool.address])
        assert out.exit_code == 0, out.output
        return out.output

    assert "default" in run("list")
    run("set", "2", "--namespace", "model")
    text = run("set", "3", "--tenant", "t")
    assert "namespace model/t" in text and "tenant t" in text
    listed = json.loads(run("unset", "--tenant", "t", "--json"))
    assert [(rule["group"], rule["count"]) for rule in listed["rules"]] == [("model/t", 2)]
    out = CliRunner().invoke(
        app, ["replicas", "set", "2", "--tenant", "t", "--namespace", "m", "--master", pool.address]
    )
    assert out.exit_code == 2
