"""Whose orders a node obeys when masters disagree, also after a restart; and what a master that comes back is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import ConfigError
from kvstrata.storage import durable_file
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.eviction.quotas import NodeShare
from kvstrata.storage.masters.attach import MasterLink
from kvstrata.storage.masters.commands import TURN_S, Commands
from kvstrata.storage.masters.fence import Fence
from kvstrata.storage.masters.policies import Policies, PolicyFile
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.loops import Loop
from tests.waiting import until

from .conftest import Node, keys
from .ordered_node import OrderedNode
from .test_attach import FakeMaster


def test_the_greatest_epoch_is_obeyed() -> None:
    fence = Fence()
    assert not fence.admit(0, ""), "nobody has led yet: an earlier version of a master says nothing of it"
    assert not fence.admit(3, "a")
    assert not fence.admit(3, "a")
    assert "deposed" in fence.admit(3, "b"), "two in one epoch: the first"
    assert "deposed" in fence.admit(2, "c")
    assert "does not lead" in fence.admit(0, "")
    assert not fence.admit(4, "b")
    assert "deposed" in fence.admit(3, "a")
    assert (fence.epoch, fence.leader_id) == (4, "b")
    fence.check()


def test_whom_it_obeyed_outlives_the_process(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path)
    assert file.fence() == Fence()
    node = OrderedNode(tmp_path)
    assert not node.commands.obeys(7, "leader")
    node.order_removal([1])
    assert node.turn() == [(1, "")]
    node.close()
    again = OrderedNode(tmp_path)
    assert (again.commands.fence.epoch, again.commands.fence.leader_id) == (7, "leader")
    assert "deposed" in again.commands.obeys(6, "earlier")
    again.close()


def test_a_file_of_an_earlier_version_names_no_leader(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path)
    file.save(Policies({"format": 1}))
    assert file.fence() == Fence()
    body = file.path.read_bytes().partition(b"\n")[2]
    kept = json.loads(body)
    del kept["leader"]
    _write(file, kept)
    assert file.fence() == Fence()
    _write(file, kept | {"leader": [-1, "x"]})
    with pytest.raises(ConfigError, match="leader"):
        file.fence()


def _write(file: PolicyFile, kept: dict[str, object]) -> None:
    import xxhash

    body = json.dumps(kept).encode()
    head = json.dumps({"format": 1, "bytes": len(body), "xxh3": xxhash.xxh3_64_hexdigest(body)}).encode()
    durable_file.replace(file.path, head + b"\n" + body)


def test_no_order_is_confirmed_before_its_leader_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a restart would obey an earlier leader again, after the later one was told that all is done."""
    node = OrderedNode(tmp_path)
    node.store([1])
    assert not node.commands.obeys(7, "leader")

    def full(*_: object) -> None:
        raise OSError(28, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(durable_file, "replace", full)
        node.order_removal([1])
        assert node.turn() == []
    node.now += 2.0
    assert node.turn() == [(1, "")]
    node.close()


def test_only_the_leader_keeps_shares_alive(node: Node) -> None:
    now = [1000.0]
    commands = Commands(node.state, threading.Lock(), clock=lambda: now[0])
    assert not commands.obeys(2, "leader")
    share = control.Shares(revision=1, whole=True, shares=[control.Share(salt="t", dram_limit=4096)], ttl_ms=1000)
    commands.share(share)
    now[0] += 1.5
    assert node.state.quotas.lapsed(now[0])
    assert node.state.quotas.shares() == [NodeShare("t", 4096)]
    commands.heard()
    assert not node.state.quotas.lapsed(now[0])


def test_what_a_standby_says_renews_nothing(
    node: Node, start: Callable[..., FakeMaster], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, standby = start(leader=(1, "leader")), start()
    both = Followed(node, leader, standby)
    until(lambda: both.commands.fence.epoch == 1)
    heard: list[str] = []
    monkeypatch.setattr(both.commands, "heard", lambda: heard.append(threading.current_thread().name))
    both.store(range(4))
    until(lambda: all(link.acked_seq for link in both.links))
    assert heard and all(leader.address in name for name in heard)
    both.stop()


# ---------------------------------------------------------------------- two masters


@pytest.fixture
def start() -> Iterator[Callable[..., FakeMaster]]:
    masters: list[FakeMaster] = []

    def make(**how: object) -> FakeMaster:
        masters.append(FakeMaster(**how))  # type: ignore[arg-type]
        return masters[-1]

    yield make
    for master in masters:
        master.stop()


class Followed:
    """A hand-driven node with a link to each of several masters."""

    def __init__(self, node: Node, *masters: FakeMaster) -> None:
        self.node, self.masters = node, masters
        self.lock = threading.Lock()
        self.commands = Commands(node.state, self.lock)
        self.loop = Loop("commands", TURN_S, self.commands.turn).start()
        self.commands.wake = self.loop.wake
        self.links = [
            MasterLink(
                master.address,
                node.state,
                self.lock,
                self.commands,
                lambda host: control.Attach(node_id="n", incarnation=7, channel=f"{host}:1"),
                lambda told: control.NodeStatus(leader_epoch=self.commands.fence.epoch),
                lambda: None,
            )
            for master in masters
        ]
        for link in self.links:
            link.start()
        until(lambda: all(master.snapshots == 1 for master in masters))

    def store(self, numbers: range, salt: str = "") -> None:
        with self.lock:
            self.node.store(numbers, salt=salt)
        for link in self.links:
            link.wake()
        until(lambda: all(len(master.blocks) == self.node.state.inventory.visible for master in self.masters))

    def stop(self) -> None:
        for link in self.links:
            link.leave("the test is over")
            link.stop()
        self.loop.stop()


def test_a_deposed_leaders_orders_are_refused(node: Node, start: Callable[..., FakeMaster]) -> None:
    old, new = start(leader=(1, "old")), start(leader=(2, "new"))
    both = Followed(node, new, old)
    until(lambda: both.commands.fence.leader_id == "new")
    both.store(range(4))
    spec = node.namespace.to_spec()
    old.say(remove=control.RemoveCommand(command=5, spec=spec, hashes=keys([1])))
    old.say(drop=control.DropCommand(command=6, any_salt=True))
    old.say(epoch=control.NamespaceEpoch(group="model", epoch=9, command=7))
    old.say(shares=control.Shares(revision=3, whole=True, shares=[control.Share(salt="", dram_limit=0)]))
    old.say(copy=control.CopyCommand(command=8))
    until(lambda: len(old.done) == 3)
    assert all("deposed" in done.error for done in old.done)
    assert [done.command for done in old.done] == [5, 6, 7]
    until(lambda: both.commands.fence.refused == 5)
    assert node.state.inventory.visible == 4 and not node.state.quotas.shares()
    assert node.state.known.epoch("model") == 0
    until(lambda: old.status.leader_epoch == 2)
    new.say(remove=control.RemoveCommand(command=1, spec=spec, hashes=keys([1])))
    until(lambda: len(new.done) == 1)
    assert not new.done[0].error
    both.stop()


def test_a_refused_leader_is_told_at_once_whom_the_node_obeys(node: Node, start: Callable[..., FakeMaster]) -> None:
    old, new = start(leader=(1, "old")), start(leader=(2, "new"))
    both = Followed(node, new, old)
    until(lambda: old.statuses >= 1 and both.commands.fence.epoch == 2)
    waits = []
    for turn in range(4):
        told = old.statuses
        began = time.monotonic()
        old.say(remove=control.RemoveCommand(command=turn, spec=node.namespace.to_spec(), hashes=keys([1])))
        until(lambda: old.statuses > told)  # noqa: B023
        waits.append(time.monotonic() - began)
    assert min(waits) < 0.5, "not with the next report, which comes each second"
    both.stop()


def test_what_the_leader_drops_other_masters_hear_too(node: Node, start: Callable[..., FakeMaster]) -> None:
    """No delta says it: they are told anew what there is."""
    leader, standby = start(leader=(1, "leader")), start()
    both = Followed(node, leader, standby)
    both.store(range(4), salt="a")
    both.store(range(2), salt="b")
    leader.say(drop=control.DropCommand(command=4, salt="a"))
    until(lambda: len(leader.done) == 1)
    until(lambda: {salt for salt, _ in standby.blocks} == {"b"})
    assert standby.snapshots == 2 and leader.snapshots <= 2
    both.stop()


def test_a_master_that_remembers_is_sent_no_snapshot(node: Node, start: Callable[..., FakeMaster]) -> None:
    master = start(remembers=True)
    one = Followed(node, master)
    one.store(range(4))
    master.end_stream()
    until(lambda: len(master.attaches) == 2)
    with one.lock:
        node.store(range(4, 6))
    one.links[0].wake()
    until(lambda: len(master.blocks) == 6)
    assert master.snapshots == 1 and not master.gaps
    one.stop()


def test_after_a_drop_a_master_that_was_away_needs_a_snapshot(node: Node, start: Callable[..., FakeMaster]) -> None:
    leader, standby = start(leader=(1, "leader")), start(remembers=True)
    both = Followed(node, leader, standby)
    both.store(range(4), salt="a")
    standby.channel.stop(0.1)  # it cannot be found again for now
    standby.end_stream()
    until(lambda: not both.links[1].attached)
    leader.say(drop=control.DropCommand(command=4, salt="a"))
    until(lambda: len(leader.done) == 1)
    standby.channel = type(standby.channel)({}, standby._hello, lambda session: None, standby.loops)
    standby.channel.listen_tcp(standby.address)
    until(lambda: len(standby.attaches) == 2)
    until(lambda: not standby.blocks)
    assert standby.snapshots == 2
    both.stop()


def test_a_node_says_whom_it_obeys(tmp_path: Path, start: Callable[..., FakeMaster]) -> None:
    master = start(leader=(3, "leader"))
    config = StorageConfig((master.address,), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "n", 8 << 20, slab_bytes=1 << 20)
    node = StorageNode(config)
    node.start()
    until(lambda: master.status.leader_epoch == 3)
    assert node.report.health()["leader_epoch"] == 3 and node.report.health()["orders_refused"] == 0
    assert (master.attaches[0].leader_epoch, master.attaches[0].leader_id) == (0, "")
    until(lambda: PolicyFile(tmp_path / "n").fence().epoch == 3)
    node.stop()
    node = StorageNode(config)
    node.start()
    until(lambda: len(master.attaches) == 2)
    assert (master.attaches[1].leader_epoch, master.attaches[1].leader_id) == (3, "leader")
    node.stop()
