"""Real daemons that ask for tickets: clients by every transport, nodes among themselves, and those without a ticket."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.client.aio import AsyncClient
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Forbidden, ForbiddenSalt, InvalidArgument, Refused, TicketExpired, Unauthenticated
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity, parse_address
from kvstrata.transfer.rdma.found import cma_problem, nixl_problem
from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.minted import MintedTickets
from kvstrata.transfer.security.rights import Rights, Role
from kvstrata.transfer.security.tickets import LIFE_S, SKEW_S
from tests.e2e.real_pool import keys, payload
from tests.e2e.ticket_pool import TicketPool, key_line, private
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

SIZE = 4096
COUNT = 32
NO_RAILS = nixl_problem() or cma_problem()
RAILS = pytest.param("rdma-cma", marks=pytest.mark.skipif(bool(NO_RAILS), reason=NO_RAILS))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TicketPool]:
    pool = TicketPool(tmp_path_factory.mktemp("tickets"), options=() if NO_RAILS else ("--rdma", "cma"))
    yield pool
    pool.end()


def engine(pool: TicketPool, name: str = "engine", transport: str = "auto") -> Client:
    return Client(pool.address, pool.tokens[name], transport, "always", 5000)


def stored(client: Client, chain: str, salt: str = "acme-1") -> tuple[object, bytes, np.ndarray]:
    ns = client.namespace("model/a", block_bytes=SIZE, block_tokens=16)
    hashes = keys(COUNT, chain)
    data = payload(hashes, salt, SIZE)
    result = client.store(ns, salt, hashes, client.register(data.copy()).rows(ns))
    assert result.stored.all(), result.reasons
    return ns, hashes, data


# ------------------------------------------------------------------ those who have a ticket


@pytest.mark.parametrize("transport", ["tcp", "shm", RAILS])
def test_blocks_go_in_and_out_by_every_transport(pool: TicketPool, transport: str) -> None:
    with engine(pool, "acme", transport) as client:
        ns, hashes, data = stored(client, f"by {transport}")
        into = np.zeros_like(data)
        rows = client.register(into).rows(ns)
        until(lambda: client.lookup(ns, "acme-1", hashes).hit_blocks == COUNT)
        client.prefetch(ns, "acme-1", hashes).wait(time.monotonic() + 5)
        for _ in range(2):
            result = client.load(ns, "acme-1", hashes, rows)
            assert result.loaded.all(), result.reasons
            assert (into == data).all()
        assert client.remove(ns, "acme-1", hashes).removed == COUNT
        assert client.health()["ticket"]["subject"] == "acme"  # type: ignore[index]


def test_an_async_client_shows_its_token_too(pool: TicketPool) -> None:
    async def use() -> int:
        async with AsyncClient(pool.address, pool.tokens["engine"]) as client:
            ns = await client.namespace("model/a", block_bytes=SIZE, block_tokens=16)
            found = await client.lookup(ns, "acme-1", keys(4, "nothing"))
            return int(found.hit_blocks or 0)

    assert asyncio.run(use()) == 0


def test_nodes_copy_from_each_other(pool: TicketPool) -> None:
    with engine(pool) as client, AdminClient(pool.address, token=pool.tokens["admin"]) as admin:
        ns, hashes, _ = stored(client, "twice", "copied")
        admin.set_replicas(2, salt="copied")
        directory = client._directory
        until(lambda: directory.lookup(ns, "copied", hashes, time.monotonic() + 1).replicas == 2, 30)  # type: ignore[arg-type]


def test_keys_are_rotated_under_traffic_and_no_call_fails(pool: TicketPool) -> None:
    with engine(pool) as client:
        ns, hashes, data = stored(client, "rotation", "rotated")
        rows = client.register(np.zeros_like(data)).rows(ns)  # type: ignore[arg-type]
        stop, bad, loads = threading.Event(), [], [0]

        def load() -> None:
            while not stop.is_set():
                result = client.load(ns, "rotated", hashes, rows)  # type: ignore[arg-type]
                if not result.loaded.all():
                    bad.append(result.reasons)
                loads[0] += 1

        thread = threading.Thread(target=load)
        thread.start()
        try:
            for names in (("one", "two"), ("two", "one")):
                pool.write_keys(*names)
                until(lambda names=names: signs(pool) == names[0], 15)  # type: ignore[misc]
                with engine(pool) as newcomer:
                    opened = newcomer.namespace("model/a", block_bytes=SIZE, block_tokens=16)
                    assert newcomer.lookup(opened, "rotated", hashes).hit_blocks == COUNT
            so_far = loads[0]
            until(lambda: loads[0] > so_far + 5)
        finally:
            stop.set()
            thread.join(10)
        assert not bad and loads[0]
        with AdminClient(pool.address, token=pool.tokens["admin"]) as admin:
            assert all(row.state == "active" for row in admin.nodes())


def signs(pool: TicketPool) -> str:
    """The key that the master signs tickets with now."""
    with engine(pool) as client:
        client.namespace("model/a", block_bytes=SIZE, block_tokens=16)
        tickets = client._tickets
        assert tickets is not None
        return pb.TicketClaims.FromString(tickets.current().claims).key


# ------------------------------------------------------------------ those who have none, or not for this


def test_without_a_token_nothing_is_let_in(pool: TicketPool) -> None:
    with pytest.raises(Unauthenticated, match="token"):
        Client(pool.address)
    for daemon in pool.daemons.values():
        with pytest.raises(Unauthenticated, match="token"):
            Connection.open(daemon.ready["channel"], Identity.new(), silence_s=5.0)


def test_a_foreign_tenant_and_a_foreign_namespace_are_refused_as_a_whole(pool: TicketPool) -> None:
    with engine(pool, "acme") as client:
        ns, hashes, data = stored(client, "mine")
        rows = client.register(data.copy()).rows(ns)  # type: ignore[arg-type]
        for salt in ("", "other", "acme"):
            with pytest.raises(ForbiddenSalt):
                client.lookup(ns, salt, hashes)  # type: ignore[arg-type]
            with pytest.raises(ForbiddenSalt):
                client.load(ns, salt, hashes, rows)  # type: ignore[arg-type]
            with pytest.raises(ForbiddenSalt):
                client.store(ns, salt, hashes, rows)  # type: ignore[arg-type]
            with pytest.raises(ForbiddenSalt):
                client.remove(ns, salt, hashes)  # type: ignore[arg-type]
        with pytest.raises(ForbiddenSalt):
            client.namespace("secret/b", block_bytes=SIZE, block_tokens=16)
        until(lambda: client.lookup(ns, "acme-1", hashes).hit_blocks == COUNT)  # type: ignore[arg-type]


def test_a_role_that_only_looks_moves_no_block(pool: TicketPool) -> None:
    with engine(pool, "watcher") as client, pytest.raises(Forbidden):
        client.namespace("model/a", block_bytes=SIZE, block_tokens=16)


def test_an_engine_is_no_node_whatever_it_says(pool: TicketPool) -> None:
    """Not for copies, which say where blocks stand and of what; not for heartbeats, which keep a node alive."""
    tickets = MintedTickets(KeyFile(pool.keys), Rights("engine", Role.CLIENT, ("*",), ("*",)))
    node = pool.nodes()[0].ready
    connection = Connection.open(node["channel"], Identity.new("node", tickets=tickets), silence_s=5.0)
    spec = Namespace("model/a", SIZE, 16).to_spec()
    opened = connection.call(Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=spec).SerializeToString())
    handle = pb.NamespaceHandle.FromString(opened.message).handle
    asked = pb.Acquire(ns=handle, salt="acme-1", hashes=keys(1), mode=3, deadline_ms=1000)
    with pytest.raises((Forbidden, InvalidArgument)):
        connection.call(Kind.ACQUIRE, asked.SerializeToString())
    connection.close()
    connection = Connection.open(pool.address, Identity.new("heartbeat", tickets=tickets), silence_s=5.0)
    beat = pb.Heartbeat(node_id=node["node_id"], incarnation=node["incarnation"], dying=True)
    with pytest.raises(Forbidden):
        connection.call(Kind.HEARTBEAT, beat.SerializeToString())
    connection.close()


def test_garbage_on_the_ports_ends_its_own_connections(pool: TicketPool) -> None:
    generator = np.random.default_rng(7)
    for daemon in pool.daemons.values():
        for _ in range(8):
            with socket.create_connection(parse_address(daemon.ready["channel"])[1], timeout=10) as sock:  # type: ignore[arg-type]
                sock.sendall(generator.bytes(200))
                while sock.recv(4096):
                    pass
    with engine(pool) as client:
        stored(client, "after garbage")


def test_secrets_are_in_no_command_line_and_in_no_log(pool: TicketPool) -> None:
    secrets = [*pool.tokens.values(), *(line.partition(":")[2] for line in pool.keys.read_text().split())]
    seen = "".join(path.read_text() for path in pool.base.glob("*.log"))
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            seen += path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
    for daemon in pool.daemons.values():
        seen += Path(f"/proc/{daemon.process.pid}/environ").read_text(errors="replace")
    assert "heartbeat" in seen
    assert not [secret for secret in secrets if secret in seen]


def test_what_was_refused_is_counted_where_it_is_scraped(pool: TicketPool) -> None:
    for name, daemon in pool.daemons.items():
        with pytest.raises(Unauthenticated):
            Connection.open(daemon.ready["channel"], Identity.new(), silence_s=5.0).call(Kind.LOOKUP, b"")
        connection = Connection.open(daemon.ready["channel"], Identity.new(), silence_s=5.0, hello_only=True)
        with pytest.raises(Unauthenticated):
            connection.call(Kind.ACQUIRE, b"")
        connection.close()
        request = urllib.request.Request(
            f"http://{daemon.ready['http']}/metrics", headers={"Authorization": f"Bearer {pool.tokens['watcher']}"}
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            page = answer.read().decode()
        part = "master" if name == "master" else "node"
        line = f'kvstrata_{part}_channel_refused_total{{reason="unauthenticated"}} '
        (value,) = (float(each.removeprefix(line)) for each in page.splitlines() if each.startswith(line))
        assert value > 0


# ------------------------------------------------------------------ a ticket that runs out


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StorageNode]:
    path = private(tmp_path / "ticket-keys", key_line("one"))
    security = SecurityFiles(ticket_keys=path)
    config = StorageConfig((), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "node", 8 << 20, security=security)
    node = StorageNode(config)
    node.start()
    yield node
    node.stop()


def test_a_lease_and_a_reservation_outlive_their_ticket_and_nothing_new_begins(node: StorageNode) -> None:
    assert node.security.key_file is not None
    ahead = [0.0]
    node.admission._clock = lambda: time.time() + ahead[0]
    tickets = MintedTickets(node.security.key_file, Rights("engine", Role.CLIENT, ("*",), ("*",)))
    connection = Connection.open(node.channel, Identity.new(tickets=tickets), silence_s=5.0)
    spec = Namespace("model/a", SIZE, 16).to_spec()
    opened = connection.call(Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=spec).SerializeToString())
    handle = pb.NamespaceHandle.FromString(opened.message).handle

    def reserve(hashes: bytes) -> pb.ReserveOk:
        asked = pb.Reserve(ns=handle, hashes=hashes, deadline_ms=60_000).SerializeToString()
        return pb.ReserveOk.FromString(connection.call(Kind.RESERVE, asked).message)

    def write(reservation: int) -> pb.CommitOk:
        import xxhash

        block = os.urandom(SIZE)
        sums = xxhash.xxh3_64_intdigest(block).to_bytes(8, "little")
        message = pb.Write(reservation=reservation, checksums=sums).SerializeToString()
        return pb.CommitOk.FromString(connection.call(Kind.WRITE, message, raw=[memoryview(block)]).message)

    def acquire() -> pb.AcquireOk:
        asked = pb.Acquire(ns=handle, hashes=keys(1), deadline_ms=30_000).SerializeToString()
        return pb.AcquireOk.FromString(connection.call(Kind.ACQUIRE, asked).message)

    assert list(write(reserve(keys(1)).reservation).status) == [1]
    lease, begun = acquire().lease, reserve(keys(1, "later")).reservation
    assert lease and begun
    ahead[0] = LIFE_S + SKEW_S + 5
    for refused in (acquire, lambda: reserve(keys(1, "new"))):
        with pytest.raises(TicketExpired):
            refused()
    renewed = connection.call(Kind.RENEW, pb.Renew(lease=lease, lease_ms=5000).SerializeToString())
    assert pb.RenewOk.FromString(renewed.message).lease_ms
    assert list(write(begun).status) == [1]
    assert node.report.health()["leases"] == 1
    connection.tell(Kind.RELEASE, pb.Release(leases=lease.to_bytes(8, "little")).SerializeToString())
    until(lambda: node.report.health()["leases"] == 0)
    connection.close()
    node.state.check()


def test_the_ids_of_another_session_are_worth_nothing(node: StorageNode) -> None:
    assert node.security.key_file is not None
    session = os.urandom(16)
    mine, other, theirs = (
        Connection.open(
            node.channel,
            Identity(each, tickets=MintedTickets(node.security.key_file, Rights(name, Role.CLIENT, ("*",), ("*",)))),
            silence_s=5.0,
        )
        for name, each in (("engine-a", session), ("engine-b", os.urandom(16)), ("engine-b", session))
    )
    spec = Namespace("model/a", SIZE, 16).to_spec()
    opened = mine.call(Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=spec).SerializeToString())
    handle = pb.NamespaceHandle.FromString(opened.message).handle
    asked = pb.Reserve(ns=handle, hashes=keys(1), deadline_ms=60_000).SerializeToString()
    reservation = pb.ReserveOk.FromString(mine.call(Kind.RESERVE, asked).message).reservation
    stolen = pb.Commit(reservation=reservation, checksums=bytes(8)).SerializeToString()
    pull = pb.Pull(reserve=pb.Reserve(ns=handle, hashes=keys(1)), region=1).SerializeToString()
    for thief in (other, theirs):
        assert 1 not in pb.CommitOk.FromString(thief.call(Kind.COMMIT, stolen).message).status
        thief.call(Kind.ABORT, pb.Abort(reservation=reservation).SerializeToString())
        with pytest.raises(Refused):
            thief.call(Kind.PULL, pull)
    written = pb.Write(reservation=reservation, checksums=xxhash.xxh3_64_intdigest(bytes(SIZE)).to_bytes(8, "little"))
    done = mine.call(Kind.WRITE, written.SerializeToString(), raw=[memoryview(bytes(SIZE))])
    assert list(pb.CommitOk.FromString(done.message).status) == [1]
    for connection in (mine, other, theirs):
        connection.close()
