"""The pool that a replay runs on: one of our own, or one that is running."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvstrata.cli.replay.capacity import blocks_held, node_bytes_for, ssd_blocks_held
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.processes import READY_S, Child, command, ready_line
from kvstrata.cli.replay.roster import Roster
from kvstrata.proto.errors import ConfigError

_FREE = "127.0.0.1:0"


class OwnPool:
    """A master and n storage nodes on free loopback ports, with data that goes when they do.

    ``masters`` is the address to give to clients.
    """

    def __init__(
        self, nodes: int, node_bytes: int, seed: int = 0, *, node_ssd_bytes: int = 0, node_options: Sequence[str] = ()
    ) -> None:
        """Start them all, with an SSD tier of ``node_ssd_bytes`` each; ``node_options`` are for ``kvstrata storage``.

        Raises ``Unavailable`` (and leaves nothing behind) when one does not get ready.
        """
        self._node_bytes = node_bytes
        self._node_ssd_bytes = node_ssd_bytes
        self._node_options = node_options
        self._data = tempfile.TemporaryDirectory(prefix="kvstrata-replay-")
        self.master: Child | None = None
        self.nodes: list[Child] = []
        try:
            self.masters = self._start_master(seed)
            for number in range(nodes):
                self._start_node(number, node_bytes)
            for node in self.nodes:
                ready_line(node)
            Roster.with_nodes(self.masters, nodes, READY_S)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, options: ReplayOptions) -> OwnPool:
        """One that holds at least the blocks that ``options`` ask for."""
        node_bytes = node_bytes_for(-(-options.pool_blocks // options.nodes), options.block_bytes)
        node_ssd_bytes = options.pool_ssd_bytes // options.nodes
        order = ("--eviction", options.eviction.value)
        return cls(options.nodes, node_bytes, options.seed, node_ssd_bytes=node_ssd_bytes, node_options=order)

    def blocks(self, block_bytes: int) -> int:
        """How many blocks of this size the nodes hold together, in both tiers."""
        on_ssd = ssd_blocks_held(self._node_ssd_bytes, block_bytes)
        return len(self.nodes) * (blocks_held(self._node_bytes, block_bytes) + on_ssd)

    def losses(self) -> list[str]:
        """How each process that is gone ended."""
        return [death for child in self._children() if (death := child.died())]

    def close(self) -> None:
        """Stop nodes before the master, and remove their data."""
        for child in self._children():
            child.stop()
        self._data.cleanup()

    def _children(self) -> list[Child]:
        return [*self.nodes, *([self.master] if self.master is not None else [])]

    def _start_master(self, seed: int) -> str:
        state = str(Path(self._data.name) / "master.db")
        addresses = ("--listen", _FREE, "--grpc", _FREE, "--http", _FREE)
        self.master = self._start("master", "master", *addresses, "--state", state, "--seed", str(seed))
        return str(ready_line(self.master)["channel"])

    def _start_node(self, number: int, node_bytes: int) -> None:
        data = str(Path(self._data.name) / f"node-{number}")
        where = ("--master", self.masters, "--listen", _FREE, "--http", _FREE)
        name = f"storage-node-{number}"
        tier = ("--ssd", f"{self.ssd_path(number)}={self._node_ssd_bytes}") if self._node_ssd_bytes else ()
        size = ("--data", data, "--dram", str(node_bytes))
        self.nodes.append(self._start(name, "storage", *where, *size, *tier, *self._node_options))

    def ssd_path(self, number: int) -> Path:
        """Where the SSD tier of a node lies."""
        return Path(self._data.name) / f"node-{number}-ssd"

    def _start(self, name: str, role: str, *arguments: str) -> Child:
        errors = Path(self._data.name) / f"{name}.log"
        return command(name, role, *arguments, "--log-format", "json", "--log-level", "warning", errors=errors)


class RunningPool:
    """A pool that someone else started."""

    def __init__(self, masters: str) -> None:
        """Raises ``Unavailable`` when no master answers, :class:`ConfigError` when no node is active.

        Masters that do not know their nodes yet are waited for.
        """
        self.masters = masters
        self._before = Roster.settled_of(masters, READY_S)
        if not self._before.nodes:
            raise ConfigError(f"the pool at {masters} has no active node: start one with 'kvstrata storage'")

    def blocks(self, block_bytes: int) -> int:
        """How many blocks of this size its active nodes hold together."""
        return sum(blocks_held(dram_bytes, block_bytes) for _, dram_bytes in self._before.nodes.values())

    def losses(self) -> list[str]:
        """What went or was restarted while the replay ran, as far as the master can tell."""
        return self._before.losses(self.masters)

    def close(self) -> None:
        """It goes on running."""
