"""A client's life: close, fork, threads, being dropped, and what its background loop does."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.client import Client, PoolNamespace, TransferState
from kvstrata.client.peers import Peers
from kvstrata.client.transfers import Transfers
from kvstrata.proto.errors import Closed, KVError, Unavailable
from kvstrata.transfer.base import Endpoint
from tests.client.fake_pool import FakeMaster, FakeNode, packed
from tests.waiting import until

SIZE = 64


def space(client: Client) -> PoolNamespace:
    return client.namespace("model/l", block_bytes=SIZE, block_tokens=16)


def test_close_is_idempotent_and_ends_use(client: Client, master: FakeMaster) -> None:
    ns = space(client)
    region = client.register(np.zeros((2, SIZE), np.uint8))
    blocks = region.rows(ns)
    assert client.store(ns, "", packed(2), blocks).stored.all()
    view = client.view(ns, "", packed(2))
    with view as arrays:
        client.close()
        client.close()
        assert len(arrays) == 2
    for call in (
        lambda: client.lookup(ns, "", packed(1)),
        lambda: client.load(ns, "", packed(2), blocks),
        lambda: client.store(ns, "", packed(2), blocks),
        lambda: client.load_async(ns, "", packed(2), blocks),
        lambda: client.store_async(ns, "", packed(2), blocks),
        lambda: client.prefetch(ns, "", packed(2)),
        lambda: client.register(bytearray(4)),
        lambda: client.allocate(4),
        lambda: client.unregister(region),
        lambda: client.namespace("g", block_bytes=1, block_tokens=1),
        lambda: client.remove(ns, "", packed(1)),
        lambda: client.exists(ns, "", packed(1)),
        client.health,
        lambda: client.view(ns, "", packed(1)).__enter__(),
    ):
        with pytest.raises(Closed, match="closed"):
            call()
    assert region.closed
    until(lambda: not master.server.sessions)


def test_close_while_calls_are_under_way(client: Client, master: FakeMaster, nodes: dict[str, FakeNode]) -> None:
    ns = space(client)
    blocks = client.register(np.zeros((8, SIZE), np.uint8)).rows(ns)
    client.store(ns, "", packed(8), blocks)
    for node in nodes.values():
        node.hold = threading.Event()
    running = client.load_async(ns, "", packed(8), blocks)
    queued = [client.load_async(ns, "", packed(8), blocks) for _ in range(10)]
    until(lambda: nodes["a"].fetches[-1] > 0)
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 2
    assert running.state is TransferState.PENDING and not running.done(), "its memory is in use"
    for node in nodes.values():
        assert node.hold is not None
        node.hold.set()
    assert running.wait()
    for transfer in queued:
        assert transfer.wait()
        assert transfer.state in (TransferState.DONE, TransferState.REFUSED)


def test_a_dropped_client_ends(connect: Callable[..., Client], master: FakeMaster) -> None:
    client = Client(master.address)
    space(client)
    until(lambda: len(master.server.sessions) == 1)
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
    until(lambda: not master.server.sessions)
    assert not any(t.name == "kvstrata-client-keeper" for t in threading.enumerate() if t.is_alive())


def test_a_forked_child_is_told_and_the_parent_goes_on(client: Client, master: FakeMaster) -> None:
    ns = space(client)
    blocks = client.register(np.zeros((8, SIZE), np.uint8)).rows(ns)
    client.store(ns, "", packed(8), blocks)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            refused = 0
            for call in (
                lambda: client.lookup(ns, "", packed(1)),
                lambda: client.load(ns, "", packed(8), blocks),
                lambda: client.store_async(ns, "", packed(8), blocks),
                lambda: client.register(bytearray(3)),
                client.health,
            ):
                try:
                    call()
                except Closed as error:
                    refused += "fork" in str(error)
            client.close()
            client.close()
            code = 0 if refused == 5 else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    master.learn()
    assert client.lookup(ns, "", packed(8)).hit_blocks == 8
    assert client.load(ns, "", packed(8), blocks).loaded.all()


def test_threads_share_a_client(client: Client, master: FakeMaster) -> None:
    ns = space(client)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            data = np.full((8, SIZE), number + 1, np.uint8)
            into = np.zeros_like(data)
            source, target = client.register(data).rows(ns), client.register(into).rows(ns)
            for turn in range(10):
                hashes = packed(8, 1000 * number + 8 * turn)
                assert client.store(ns, f"t{number % 3}", hashes, source).stored.all()
                into[:] = 0
                assert client.load(ns, f"t{number % 3}", hashes, target).loaded.all()
                assert (into == number + 1).all()
        except BaseException as error:  # noqa: BLE001  shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors and not any(thread.is_alive() for thread in threads)
    counts = client.health()["blocks"]
    assert counts["load"]["asked"] == counts["load"]["loaded"] == 640  # type: ignore[index]


def test_transfers_end_once_and_say_so(client: Client, nodes: dict[str, FakeNode]) -> None:
    ns = space(client)
    data = np.full((8, SIZE), 9, np.uint8)
    stored = client.store_async(ns, "", packed(8), client.register(data).rows(ns))
    assert stored.result().stored.all() and stored.done() and stored.state is TransferState.DONE
    nodes["b"].hold = threading.Event()
    into = np.zeros_like(data)
    loading = client.load_async(ns, "", packed(8), client.register(into).rows(ns))
    assert not loading.wait(time.monotonic() + 0.05) and loading.state is TransferState.PENDING
    nodes["b"].hold.set()
    assert loading.result().loaded.all() and (into == 9).all()


def test_past_the_bound_transfers_are_shed() -> None:
    transfers, gate = Transfers(threads=1, pending_max=2), threading.Event()
    try:
        accepted = [transfers.submit(lambda: gate.wait(5), lambda: False) for _ in range(2)]
        assert transfers.submit(lambda: True, lambda: False).result(0) is False
        gate.set()
        assert all(future.result(5) for future in accepted)
        until(lambda: transfers.pending == 0)
        assert transfers.submit(lambda: True, lambda: False).result(5)
    finally:
        gate.set()
        transfers.close()
    with pytest.raises(Closed):
        transfers.submit(lambda: True, lambda: True)


# -------------------------------------------------------------------- peers


class Wire:
    """A peer that counts its turns."""

    transport = "wire"

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.turns, self.closed, self.up = endpoint, 0, False, True
        self.error: KVError | None = None
        self.slow_s = 0.0

    def reachable(self) -> bool:
        return self.up

    def upkeep(self) -> None:
        time.sleep(self.slow_s)
        self.turns += 1
        if self.error:
            raise self.error

    def close(self) -> None:
        self.closed = True


def peers_of(**options: int) -> Peers:
    return Peers(Wire, "here", **options)  # type: ignore[arg-type]


def at(node: str, incarnation: int = 1, boot: str = "here") -> Endpoint:
    return Endpoint(node, incarnation, "h:1", "", boot)


def test_only_the_newest_incarnation_is_known() -> None:
    peers = peers_of()
    old = peers.get(at("a", 1))
    assert peers.get(at("a", 1)) is old
    new = peers.get(at("a", 2))
    assert new is not old and peers.get(at("a", 1)) is None and peers.get(at("a", 2)) is new
    assert not old.closed  # type: ignore[union-attr]
    peers.close_retired()
    assert old.closed and not new.closed  # type: ignore[union-attr]
    peers.close()
    assert new.closed and peers.get(at("a", 3)) is None  # type: ignore[union-attr]


def test_the_peers_are_bounded() -> None:
    peers = peers_of(peers_max=3)
    first = peers.get(at("n0"))
    for i in range(1, 5):
        peers.get(at(f"n{i}"))
    assert [known.endpoint.node_id for known in peers.all()] == ["n2", "n3", "n4"]
    peers.close_retired()
    assert first.closed  # type: ignore[union-attr]


def test_the_local_node_is_sole_only_while_it_is() -> None:
    peers = peers_of()
    assert peers.sole_local() is None
    peers.get(at("far", boot="there"))
    near = peers.get(at("near"))
    assert peers.sole_local() is near
    other = peers.get(at("other"))
    assert peers.sole_local() is None
    other.up = False  # type: ignore[union-attr]
    peers.upkeep(1.0)
    assert peers.sole_local() is near


def test_upkeep_reaches_the_living_first_and_the_lost_in_turns() -> None:
    peers = peers_of()
    wires = [peers.get(at(f"n{i}")) for i in range(6)]
    for wire in wires[:4]:
        wire.up, wire.slow_s = False, 0.02  # type: ignore[union-attr]
    wires[4].error = Unavailable("odd")  # type: ignore[union-attr]
    for turn in range(1, 9):
        with pytest.raises(Unavailable):
            peers.upkeep(0.01)
        assert wires[4].turns == wires[5].turns == turn  # type: ignore[union-attr]
    assert all(wire.turns >= 1 for wire in wires[:4])  # type: ignore[union-attr]


def test_a_node_out_of_reach_is_a_problem_not_an_error(
    client: Client, nodes: dict[str, FakeNode], master: FakeMaster
) -> None:
    ns = space(client)
    nodes["a"].put(ns, "", packed(1), [b"x" * SIZE])
    master.learn()
    master.nodes = {"z": FakeNode("z")}
    master.where = dict.fromkeys(master.where, "z")
    result = client.load(ns, "", packed(1), client.register(np.zeros((1, SIZE), np.uint8)).rows(ns))
    assert result.reasons == {"node_lost": 1}
    assert any("no transport reaches z" in problem for problem in client.health()["problems"])  # type: ignore[attr-defined]
