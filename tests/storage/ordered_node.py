"""A node of two tiers that carries out orders by hand: one turn at a time, time as the test says."""

from __future__ import annotations

import threading
from pathlib import Path

from kvstrata.proto import control_pb2 as control
from kvstrata.storage.masters.commands import Commands
from kvstrata.storage.masters.policies import PolicyFile
from kvstrata.storage.tiers.eraser import Eraser
from kvstrata.storage.tiers.recovery import Recovery, recover

from .conftest import keys
from .memory_store import MemoryStore
from .tier_node import TierNode


class FallibleStore(MemoryStore):
    """A store whose records and erasures fail while ``refuses`` says so."""

    refuses = False
    erasures = 0

    def record(self, removals):  # type: ignore[no-untyped-def]
        return not self.refuses and super().record(removals)

    def erase(self, places):  # type: ignore[no-untyped-def]
        self.erasures += 1
        return not self.refuses and super().erase(places)


class OrderedNode(TierNode):
    """``done`` are confirmations, in order. ``directory`` is where policies are kept; None: nowhere."""

    def __init__(self, directory: Path | None = None, store: FallibleStore | None = None, slabs: int = 4) -> None:
        self.disk_store = store or FallibleStore()
        super().__init__(slabs, store=self.disk_store)
        self.file = PolicyFile(directory) if directory is not None else None
        if self.file is not None:
            quotas, epochs = self.file.restored()
            self.state.quotas._shares.update({share.salt: share for share in quotas.shares()})
            for group, epoch in epochs.items():
                self.state.known.advance(group, epoch)
        self.lock = threading.Lock()
        self.eraser = Eraser(self.ssd, self.moves.quarantine.let_go)
        self.done: list[control.CommandDone] = []
        self.commands = Commands(self.state, self.lock, self.file, self.eraser, clock=lambda: self.now)
        self._number = 0

    def recover(self) -> Recovery:
        return recover(self.disk_store, self.state, self.now)

    def after_crash(self, directory: Path | None = None) -> OrderedNode:
        """Another process on the same devices and directory."""
        other = OrderedNode(directory, FallibleStore(disk=self.disk_store.disk))
        other.now = self.now
        other.recover()
        return other

    def close(self) -> None:
        self.check()
        self.arena.close()

    # ------------------------------------------------------------------ orders

    def _next(self) -> int:
        self._number += 1
        return self._number

    def bump(self, epoch: int, group: str = "model") -> int:
        number = self._next()
        self.commands.advance(control.NamespaceEpoch(group=group, epoch=epoch, command=number), self.done.append)
        return number

    def drop(self, group: str = "", salt: str | None = None, *, erase: bool = False) -> int:
        number = self._next()
        message = control.DropCommand(command=number, group=group, salt=salt or "", any_salt=salt is None, erase=erase)
        self.commands.drop(message, self.done.append)
        return number

    def order_removal(self, numbers: range | list[int], salt: str = "") -> int:
        number = self._next()
        message = control.RemoveCommand(command=number, spec=self.namespace.to_spec(), salt=salt, hashes=keys(numbers))
        self.commands.remove(message, self.done.append)
        return number

    def turn(self) -> list[tuple[int, str]]:
        """Confirmations of one turn: (command, error)."""
        before = len(self.done)
        self.commands.turn()
        self.check()
        return [(each.command, each.error) for each in self.done[before:]]

    # ------------------------------------------------------------------ readers and writers at the node's epoch

    @property
    def epoch(self) -> int:
        return self.state.entry(self.handle).epoch

    def store(self, numbers: range | list[int], version: int = 0, **where: object) -> list[int]:
        return super().store(numbers, version, **{"epoch": self.epoch, **where})

    def found(self, numbers: range | list[int], salt: str = "") -> list[int]:
        """What can be leased now, by number, from DRAM or after a promotion."""
        read = self.begin_read(numbers, salt)
        for move in read.moves if read is not None else []:
            self.finish(move)
        got = self.state.acquire(self.SESSION, self.handle, salt, keys(numbers), 2.0, self.now, self.epoch)
        if read is not None:
            self.moves.end_read(read)
        if got.lease is not None:
            self.state.release(self.SESSION, [got.lease.id])
        return [number for number, status in zip(numbers, got.status, strict=True) if status == 3]
