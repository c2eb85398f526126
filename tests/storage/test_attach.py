"""The link to a master: a gRPC stand-in that keeps what it is told, stopped, restarted and lied to."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.control_pb2_grpc import MasterServicer, add_MasterServicer_to_server
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.masters.attach import MasterLink
from kvstrata.storage.masters.commands import TURN_S, Commands
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.masters.outbox import Outbox
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.identity import advertised
from kvstrata.transfer.loops import Loop, Loops
from kvstrata.transfer.server import ChannelServer
from tests.waiting import until

from .conftest import Node, key, keys
from .ordered_node import OrderedNode


class FakeMaster(MasterServicer):
    """Applies snapshots and deltas as a directory would; ``say`` queues a message for the node.

    ``leader``: the epoch and id that it leads in, (0, "") while it does not. ``remembers``: it has the node's
    blocks from before, and says so when the node attaches again.
    """

    def __init__(
        self, address: str = "127.0.0.1:0", leader: tuple[int, str] = (0, ""), remembers: bool = False
    ) -> None:
        self.leader = leader
        self.remembers = remembers
        self.attaches: list[control.Attach] = []
        self.blocks: set[tuple[str, bytes]] = set()
        self.seq = -1
        self.snapshots = 0
        self.parts = 0
        self.done: list[control.CommandDone] = []
        self.statuses = 0
        self.status = control.NodeStatus()
        self.tiers: set[int] = set()
        self.weights: set[int] = set()
        self.shares: control.Shares | None = None
        self.detached = ""
        self.gaps = 0
        self.to_say: queue.Queue[control.MasterMessage | None] = queue.Queue()
        self.epochs: list[control.NamespaceEpoch] = []
        self.grpc = grpc.server(futures.ThreadPoolExecutor(8))
        add_MasterServicer_to_server(self, self.grpc)
        self.port = self.grpc.add_insecure_port("127.0.0.1:0")
        self.grpc.start()
        self.loops = Loops()
        self.channel = ChannelServer({}, self._hello, lambda session: None, self.loops)
        self.address = self.channel.listen_tcp(address)

    def _hello(self, session: object) -> pb.HelloOk:
        return pb.HelloOk(role="master", grpc=f"127.0.0.1:{self.port}", cluster_id="c")

    def Sync(
        self, requests: Iterator[control.NodeMessage], context: grpc.ServicerContext
    ) -> Iterator[control.MasterMessage]:
        self.attaches.append(next(requests).attach)
        resume = self.seq if self.remembers and self.snapshots else 0
        if not resume:
            self.seq = -1
        say: queue.Queue[control.MasterMessage | None] = queue.Queue()
        self.to_say = say
        threading.Thread(target=self._read, args=(requests, say), daemon=True).start()
        attached = control.AttachOk(
            cluster_id="c", session=1, epochs=self.epochs, shares=self.shares,
            leading=bool(self.leader[0]), resume_seq=resume,
        )  # fmt: skip
        yield self._stamped(control.MasterMessage(attached=attached))
        while (message := say.get()) is not None:
            yield self._stamped(message)

    def _stamped(self, message: control.MasterMessage) -> control.MasterMessage:
        message.leader_epoch, message.leader_id = self.leader
        return message

    def end_stream(self) -> None:
        """The node is to attach again."""
        self.to_say.put(None)

    def _read(self, requests: Iterator[control.NodeMessage], say: queue.Queue[control.MasterMessage | None]) -> None:
        try:
            for message in requests:
                self._take(message, say)
        except grpc.RpcError:
            pass
        say.put(None)

    def _take(self, message: control.NodeMessage, say: queue.Queue[control.MasterMessage | None]) -> None:
        body = message.WhichOneof("body")
        if body == "snapshot":
            self.parts += 1
            if message.snapshot.first:
                self.blocks.clear()
            for holding in message.snapshot.holdings:
                self._apply(True, holding)
            if message.snapshot.last:
                self.seq = message.snapshot.cut_seq
                self.snapshots += 1
        elif body == "delta":
            self.gaps += message.delta.seq != self.seq + 1
            self.seq = message.delta.seq
            for change in message.delta.changes:
                self._apply(change.added, change)
            say.put(control.MasterMessage(ack=control.Ack(seq=self.seq)))
        elif body == "done":
            self.done.append(message.done)
        elif body == "status":
            self.statuses += 1
            self.status = message.status
        elif body == "detach":
            self.detached = message.detach.reason

    def _apply(self, added: bool, part: control.Holding | control.Change) -> None:
        self.tiers.add(part.tier)
        self.weights.add(part.epoch)
        for start in range(0, len(part.hashes), part.spec.hash_bytes):
            entry = (part.salt, part.hashes[start : start + part.spec.hash_bytes])
            (self.blocks.add if added else self.blocks.discard)(entry)

    def say(self, **body: object) -> None:
        self.to_say.put(control.MasterMessage(**body))  # type: ignore[arg-type]

    def stop(self) -> None:
        self.channel.stop(0.1)
        self.loops.stop(0.5)
        self.grpc.stop(0).wait(2)


class Linked:
    """A hand-driven node with one link, and the lock that goes with it."""

    def __init__(self, node: Node, master: str) -> None:
        self.node = node
        self.lock = threading.Lock()
        self.trims = 0
        self.commands = Commands(node.state, self.lock)
        self.loop = Loop("commands", TURN_S, self.commands.turn).start()
        self.commands.wake = self.loop.wake
        self.link = MasterLink(
            master,
            node.state,
            self.lock,
            self.commands,
            lambda host: control.Attach(node_id="n", incarnation=7, channel=f"{host}:1"),
            lambda told: control.NodeStatus(blocks=node.state.inventory.visible),
            self._acknowledged,
        )
        self.link.start()

    def _acknowledged(self) -> None:
        self.trims += 1
        with self.lock:
            self.node.state.deltas.trim(self.link.acked_seq)

    def store(self, numbers: range, salt: str = "") -> None:
        with self.lock:
            self.node.store(numbers, salt=salt)
        self.link.wake()

    def stop(self) -> None:
        self.link.leave("the test is over")
        self.link.stop()
        self.loop.stop()

    def inventory(self) -> set[tuple[str, bytes]]:
        with self.lock:
            held = self.node.state.snapshot()
        return {(each.salt, each.hashes[i : i + 16]) for each in held for i in range(0, len(each.hashes), 16)}


@pytest.fixture
def start() -> Iterator[Callable[[str], FakeMaster]]:
    masters: list[FakeMaster] = []

    def make(address: str = "127.0.0.1:0") -> FakeMaster:
        masters.append(FakeMaster(address))
        return masters[-1]

    yield make
    for master in masters:
        master.stop()


@pytest.fixture
def linked(node: Node, start: Callable[..., FakeMaster]) -> Iterator[tuple[Linked, FakeMaster]]:
    master = start()
    one = Linked(node, master.address)
    yield one, master
    one.stop()


def test_the_directory_follows_stores_evictions_and_removals(linked: tuple[Linked, FakeMaster]) -> None:
    one, master = linked
    until(lambda: master.snapshots == 1)
    for turn in range(12):
        one.store(range(turn * 10, turn * 10 + 10), salt=f"t{turn % 3}")
    assert one.node.state.counts.evicted > 0
    until(lambda: master.blocks == one.inventory())
    assert master.gaps == 0 and master.snapshots == 1
    until(lambda: one.trims > 0 and not one.node.state.deltas.after(one.link.acked_seq))
    until(lambda: master.statuses > 0)
    assert master.attaches[0].channel == "127.0.0.1:1"


def test_a_change_is_announced_within_a_tenth_of_a_second(linked: tuple[Linked, FakeMaster]) -> None:
    one, master = linked
    until(lambda: one.link.attached and master.snapshots == 1)
    waits = []
    for turn in range(5):
        started = time.monotonic()
        one.store(range(turn, turn + 1))
        until(lambda: len(master.blocks) == turn + 1)  # noqa: B023
        waits.append(time.monotonic() - started)
    assert min(waits) < 0.1


def test_a_restarted_master_hears_everything_again(node: Node, start: Callable[..., FakeMaster]) -> None:
    first = start()
    one = Linked(node, first.address)
    one.store(range(20))
    until(lambda: first.blocks == one.inventory())
    first.stop()
    until(lambda: not one.link.attached)
    one.store(range(20, 30), salt="meanwhile")
    stopped = time.monotonic()
    second = start(first.address)
    until(lambda: second.blocks == one.inventory() != set())
    assert time.monotonic() - stopped < 5.0, "within the budget of a master's restart"
    assert one.link.status().attaches == 2
    one.stop()


def test_resync_on_request(linked: tuple[Linked, FakeMaster]) -> None:
    one, master = linked
    one.store(range(10))
    until(lambda: len(master.blocks) == 10)
    master.blocks.add(("", b"a lie"))
    master.say(resync=control.Resync(reason="gap"))
    until(lambda: master.snapshots == 2)
    assert master.blocks == one.inventory()
    one.store(range(10, 12))
    until(lambda: master.blocks == one.inventory() and master.gaps == 0)


def test_a_log_trimmed_past_a_link_ends_in_a_snapshot(
    make_node: Callable[..., Node], start: Callable[..., FakeMaster]
) -> None:
    node = make_node(slabs=4)
    node.state.deltas = node.state.inventory.deltas = DeltaLog(kept_hashes_max=4, batch_hashes_max=2)
    master = start()
    one = Linked(node, master.address)
    until(lambda: master.snapshots == 1)
    with one.lock:  # a burst that the link cannot see before it is over
        for number in range(20):
            node.store([number])
    one.link.wake()
    until(lambda: master.blocks == one.inventory() and len(master.blocks) == 20)
    assert master.snapshots == 2
    one.stop()


def test_commands_are_carried_out_and_confirmed_after_their_deltas(linked: tuple[Linked, FakeMaster]) -> None:
    one, master = linked
    one.store(range(4))
    until(lambda: len(master.blocks) == 4)
    spec = one.node.namespace.to_spec()
    master.say(remove=control.RemoveCommand(command=9, spec=spec, hashes=keys([1, 2])))
    until(lambda: len(master.done) == 1)
    assert master.done[0].command == 9 and not master.done[0].error
    assert master.blocks == {("", key(0)), ("", key(3))}, "whoever reads the confirmation has the removal"
    master.say(remove=control.RemoveCommand(command=10, spec=pb.NamespaceSpec(group="g")))
    until(lambda: len(master.done) == 2)
    assert master.done[1].error
    master.say(epoch=control.NamespaceEpoch(group="model", epoch=3))
    until(lambda: one.node.state.inventory.visible == 0)


def test_epochs_are_learned_at_attach(node: Node, start: Callable[..., FakeMaster]) -> None:
    master = start()
    master.epochs = [control.NamespaceEpoch(group="model", epoch=5)]
    one = Linked(node, master.address)
    until(lambda: one.link.attached)
    assert node.state.open_namespace(node.namespace)[1] == 5
    one.stop()


def test_a_confirmation_never_overtakes_its_deltas(node: Node) -> None:
    """Removed and confirmed between two looks of the stream: whoever reads the confirmation has the removal."""
    node.store(range(4))
    lock = threading.Lock()
    outbox = Outbox(node.state, lock, control.Attach(), lambda told: control.NodeStatus())
    outbox.attached.set()
    stream = outbox.messages()
    while not next(stream).HasField("status"):
        pass
    node.store([9])
    seen: list[str] = []
    removed_at = -1
    for message in stream:
        body = message.WhichOneof("body")
        seen.append(str(body))
        if body == "delta" and removed_at < 0:
            removed_at = len(seen)  # the stream has looked for deltas, and not yet for confirmations
            node.state.remove(node.namespace, "", keys([1]), node.now)
            outbox.confirm(control.CommandDone(command=1))
        if body == "done":
            break
    assert seen[removed_at:] == ["delta", "done"]
    outbox.end()


def test_a_snapshot_has_both_tiers_and_their_weights() -> None:
    node = OrderedNode()
    node.bump(2)
    node.store(range(8))
    node.demote()
    node.make_room(range(8))
    outbox = Outbox(node.state, node.lock, control.Attach(), lambda told: control.NodeStatus())
    outbox.attached.set()
    snapshot = next(message.snapshot for message in outbox.messages() if message.HasField("snapshot"))
    held = {(holding.tier, holding.epoch): len(holding.hashes) // 16 for holding in snapshot.holdings}
    assert held[1, 2] >= 8 and (0, 2) in held and len(held) == 2
    outbox.end()
    node.close()


def test_a_drop_and_shares_come_over_the_link(linked: tuple[Linked, FakeMaster]) -> None:
    one, master = linked
    one.store(range(4), salt="a")
    one.store(range(4), salt="b")
    until(lambda: len(master.blocks) == 8)
    shares = control.Shares(revision=3, whole=True, shares=[control.Share(salt="b", dram_limit=2 * 4096)])
    master.say(shares=shares)
    master.say(drop=control.DropCommand(command=4, salt="a"))
    until(lambda: [done.command for done in master.done] == [4])
    assert not master.done[0].error
    until(lambda: one.commands.kept_revision == 3)
    assert {salt for salt, _ in one.inventory()} == {"b"}
    with one.lock:
        one.node.now = time.monotonic()
        for _ in range(3):
            one.node.state.expire(one.node.now)
        assert one.node.state.inventory.policy.charges == {"b": 2 * 4096}


def test_shares_hold_before_anything_is_admitted(node: Node, start: Callable[..., FakeMaster]) -> None:
    master = start()
    master.shares = control.Shares(revision=8, whole=True, fallback=control.Share(dram_limit=0))
    one = Linked(node, master.address)
    until(lambda: one.link.attached)
    assert node.store([1]) == [int(BlockStatus.QUOTA)]
    one.stop()


def test_a_node_says_what_it_works_by(tmp_path: Path, start: Callable[..., FakeMaster]) -> None:
    """First session: shares and an epoch; second process: both are in its attach, before anybody told it."""
    config = StorageConfig(
        (start().address,), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "n", 8 << 20, slab_bytes=1 << 20
    )
    first = start()
    first.shares = control.Shares(
        revision=5, whole=True, shares=[control.Share(salt="a", dram_limit=1 << 20, dram_floor=4096)], ttl_ms=60_000
    )
    first.epochs = [control.NamespaceEpoch(group="model", epoch=2)]
    node = StorageNode(replace(config, masters=(first.address,)))
    node.start()
    until(lambda: first.status.shares_revision == 5)
    assert first.status.dram_bytes_free == 8 << 20 and not first.attaches[0].shares
    node.stop()
    second = start()
    node = StorageNode(replace(config, masters=(second.address,)))
    node.start()
    until(lambda: second.statuses > 0)
    (told,) = second.attaches
    assert [(s.salt, s.dram_limit, s.dram_floor, s.HasField("ssd_limit")) for s in told.shares] == [
        ("a", 1 << 20, 4096, False)
    ]
    assert [(e.group, e.epoch) for e in told.epochs] == [("model", 2)]
    assert node.report.health()["shares_revision"] == 5
    node.stop()


def test_leaving_is_said(linked: tuple[Linked, FakeMaster]) -> None:
    one, master = linked
    until(lambda: one.link.attached)
    one.link.leave("maintenance")
    one.link.stop()
    until(lambda: master.detached == "maintenance")
    assert one.link.problem() == ""


def test_no_master_is_no_problem_of_the_link(node: Node) -> None:
    one = Linked(node, "127.0.0.1:1")
    until(lambda: "cannot connect" in one.link.status().problem)
    assert one.link.problem() == "" and not one.link.status().attached
    started = time.monotonic()
    one.link.stop()
    assert time.monotonic() - started < 2.5


def test_snapshots_come_in_bounded_parts(make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.storage.masters.outbox.PART_HASHES", 7)
    node = make_node(slabs=4)
    for salt in ("a", "b", "c"):
        node.store(range(10), salt=salt)
    outbox = Outbox(node.state, threading.Lock(), control.Attach(), lambda told: control.NodeStatus())
    outbox.attached.set()
    messages = outbox.messages()
    assert next(messages).HasField("attach")
    parts = []
    while not parts or not parts[-1].last:
        parts.append(next(messages).snapshot)
    sizes = [sum(len(holding.hashes) // 16 for holding in part.holdings) for part in parts]
    assert sum(sizes) == 30 and max(sizes) <= 7
    assert [part.first for part in parts] == [True] + [False] * (len(parts) - 1)
    outbox.end()


def test_wildcards_are_advertised_as_the_address_that_was_reached() -> None:
    assert advertised("0.0.0.0:7410", "10.0.0.3") == "10.0.0.3:7410"
    assert advertised("[::]:7410", "fd00::3") == "[fd00::3]:7410"
    assert advertised("127.0.0.1:7410", "10.0.0.3") == "127.0.0.1:7410"
    assert advertised("0.0.0.0:7410", "") == "0.0.0.0:7410"
