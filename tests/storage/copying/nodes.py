"""Real nodes in this process that copy from each other, and what a master would order of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import CopyReason, Tier
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.records import VISIBLE, Block
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.base import Endpoint, Fetch, Push
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.regions import Region
from kvstrata.transfer.tcp import TcpTransport
from tests.storage.conftest import key, keys, payload
from tests.waiting import until

BLOCK_BYTES = 50_000
NAMESPACE = Namespace("model", BLOCK_BYTES, 16)
MIB = 1 << 20


class CopyNode:
    """A node, without a master unless one is given; what it answers is kept."""

    _commands = itertools.count(1)

    def __init__(self, path: Path, *, dram: int = 8 * MIB, ssd: int = 0, **options: Any) -> None:
        disks = ((path / "ssd", ssd),) if ssd else ()
        if ssd:
            (path / "ssd").mkdir(parents=True, exist_ok=True)
            options.setdefault("ssd_policy", SsdPolicy.WRITE_THROUGH)
        masters = options.pop("masters", ())
        config = StorageConfig(
            masters, "127.0.0.1:0", "127.0.0.1:0", path / "node", dram, slab_bytes=MIB, ssd=disks, **options
        )
        self.node = StorageNode(config)
        self.ready = self.node.start()
        self.stopped = False
        self.answers: list[control.CopyDone] = []
        self._transport = TcpTransport(Identity.new())
        self._peer = self._transport.connect(self.endpoint)

    @property
    def endpoint(self) -> Endpoint:
        node = self.node
        return Endpoint(node.identity.node_id, node.identity.incarnation, node.channel)

    @property
    def ref(self) -> control.CopyCommand:
        """A command with this node as its source, and nothing else said."""
        node = self.node
        command = control.CopyCommand()
        command.source.node_id = node.identity.node_id
        command.source.incarnation = node.identity.incarnation
        command.source.channel = node.channel
        return command

    # ------------------------------------------------------------------ blocks

    def store(self, numbers: range, salt: str = "", namespace: Namespace = NAMESPACE) -> list[int]:
        """Store a chain that begins with the first of these."""
        nbytes = namespace.block_bytes
        data = b"".join(payload(key(n), 0, nbytes) for n in numbers)
        region = Region(np.frombuffer(bytearray(data), np.uint8), None)
        push = Push(namespace, salt, keys(numbers), region.rows(namespace), time.monotonic() + 10)
        return [int(status) for status in self._peer.push(push).status]

    def load(self, numbers: range, salt: str = "", namespace: Namespace = NAMESPACE) -> list[int]:
        """Statuses of a read by a client; asserts that the bytes are the right ones."""
        nbytes = namespace.block_bytes
        target = Region(np.zeros(len(numbers) * nbytes, np.uint8), None)
        fetch = Fetch(namespace, salt, keys(numbers), target.rows(namespace), time.monotonic() + 10, "always")
        status = [int(each) for each in self._peer.fetch(fetch).status]
        for row, number in enumerate(numbers):
            if status[row] == 3:
                assert bytes(target.bytes[row * nbytes : (row + 1) * nbytes]) == payload(key(number), 0, nbytes)
        return status

    def block(self, number: int, tier: Tier = Tier.DRAM, salt: str = "") -> Block | None:
        """The block as the node has it, if it is visible there."""
        node = self.node
        with node.lock:
            entry = node.state.known.find(NAMESPACE)
            inventory = node.state.inventory if tier == Tier.DRAM else node.state.ssd
            if entry is None or inventory is None:
                return None
            shelf = inventory.shelves.get((entry.handle, salt))
            block = shelf.blocks.get(key(number)) if shelf is not None else None
            return block if block is not None and block.state == VISIBLE else None

    def present(self, numbers: range, tier: Tier = Tier.DRAM, salt: str = "") -> list[int]:
        return [number for number in numbers if self.block(number, tier, salt) is not None]

    def to_ssd(self, numbers: range) -> None:
        """Wait until these are on SSD, and have them leave memory."""
        until(lambda: self.present(numbers, Tier.SSD) == list(numbers))
        with self.node.lock:
            entry = self.node.state.known.find(NAMESPACE)
            assert entry is not None
            inventory = self.node.state.inventory
            shelf = inventory.shelves[entry.handle, ""]
            for number in reversed(numbers):
                inventory.withdraw(shelf.blocks[key(number)], "evicted")

    # ------------------------------------------------------------------ orders

    def order(
        self,
        source: CopyNode,
        numbers: range,
        *,
        salt: str = "",
        tier: Tier = Tier.DRAM,
        reason: CopyReason = CopyReason.REPLICA,
        epoch: int = 0,
        deadline_ms: int = 10_000,
        command: int = 0,
        namespace: Namespace = NAMESPACE,
        **ref: Any,
    ) -> int:
        """Order a copy; the command's number."""
        number = command or next(self._commands)
        message = source.ref
        message.command = number
        message.spec.CopyFrom(namespace.to_spec())
        message.salt = salt
        message.hashes = keys(numbers)
        message.epoch, message.tier, message.reason, message.deadline_ms = epoch, tier, reason, deadline_ms
        for name, value in ref.items():
            setattr(message.source, name, value)
        self.node.copier.take(message, 1, self.answers.append)
        return number

    def answer(self, command: int, seconds: float = 10.0) -> control.CopyDone:
        """What the command was answered; there is one answer."""
        until(lambda: any(done.command == command for done in self.answers), seconds)
        found = [done for done in self.answers if done.command == command]
        assert len(found) == 1
        return found[0]

    def copy(self, source: CopyNode, numbers: range, **how: Any) -> list[int]:
        """Order a copy and wait for it; statuses."""
        return list(self.answer(self.order(source, numbers, **how)).status)

    # ------------------------------------------------------------------ ends

    def assert_quiet(self) -> None:
        """Nothing is held, and every invariant holds."""
        node = self.node

        def quiet() -> bool:
            with node.lock:
                held = len(node.state.leases) + len(node.state.reservations) + len(node.state.copies)
                if held or node.ssd is None:
                    return not held
                moves = node.ssd.moves
                return len(moves.ssd.leases) == len(moves.quarantine) and not len(moves.ssd.reservations)

        until(quiet)
        if self.stopped:
            return  # its memory is gone
        with node.lock:
            node.state.check()
            if node.ssd is not None:
                node.ssd.moves.check()

    def stop(self) -> None:
        self.stopped = True
        self.node.stop()

    def close(self) -> None:
        self._peer.close()
        self._transport.close()
        self.node.stop()


MakeNode = Callable[..., CopyNode]
