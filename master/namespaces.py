"""Namespaces the cluster knows: groups with one layout each, handles, weight epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstrata.proto.errors import Busy, FingerprintMismatch
from kvstrata.proto.keys import Namespace

GROUPS_MAX: Final = 4096
HANDLES_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Group:
    """What all shards of a group share. ``number`` is this process's name for it; ``epoch`` is durable."""

    number: int
    name: str
    block_bytes: int
    block_tokens: int
    hash_bytes: int
    shard_count: int
    epoch: int = 0

    def admits(self, namespace: Namespace) -> bool:
        return (self.block_bytes, self.block_tokens, self.hash_bytes, self.shard_count) == (
            namespace.block_bytes,
            namespace.block_tokens,
            namespace.hash_bytes,
            namespace.shard_count,
        )

    def namespace(self, shard: int) -> Namespace:
        return Namespace(self.name, self.block_bytes, self.block_tokens, self.hash_bytes, shard, self.shard_count)


@dataclass(frozen=True, slots=True)
class Opened:
    """A namespace with its handle (valid while this process lives) and its group."""

    handle: int
    namespace: Namespace
    group: Group


class Namespaces:
    """The registry. Both clients (on open) and nodes (in what they hold) register."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._handles: dict[tuple[int, int], int] = {}
        self._opened: list[Opened] = []

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def restore(self, namespace: Namespace, epoch: int) -> None:
        """Load a durable group at start."""
        group = Group(
            len(self._groups),
            namespace.group,
            namespace.block_bytes,
            namespace.block_tokens,
            namespace.hash_bytes,
            namespace.shard_count,
            epoch,
        )
        self._groups[group.name] = group

    def register(self, namespace: Namespace) -> tuple[Group, bool]:
        """The group of ``namespace``, and whether it is new (to be made durable).

        Raises :class:`FingerprintMismatch` when the group is known with another layout, :class:`Busy`
        when there are ``GROUPS_MAX`` of them.
        """
        group = self._groups.get(namespace.group)
        if group is not None:
            if not group.admits(namespace):
                raise FingerprintMismatch(_mismatch(group, namespace))
            return group, False
        if len(self._groups) >= GROUPS_MAX:
            raise Busy(f"{GROUPS_MAX} namespace groups are known, which is the bound: group {namespace.group!r}")
        self.restore(namespace, epoch=0)
        return self._groups[namespace.group], True

    def find(self, namespace: Namespace) -> Group | None:
        """The group if it is known with this very layout, registering nothing."""
        group = self._groups.get(namespace.group)
        return group if group is not None and group.admits(namespace) else None

    def open(self, namespace: Namespace) -> Opened:
        """The handle of a registered namespace."""
        group = self._groups[namespace.group]
        key = (group.number, namespace.shard)
        handle = self._handles.get(key)
        if handle is None:
            if len(self._opened) >= HANDLES_MAX:
                raise Busy(f"{HANDLES_MAX} namespaces are open, which is the bound")
            handle = self._handles[key] = len(self._opened) + 1
            self._opened.append(Opened(handle, namespace, group))
        return self._opened[handle - 1]

    def by_handle(self, handle: int) -> Opened:
        """What a handle names; raises :class:`FingerprintMismatch` for one this process never gave."""
        if not 1 <= handle <= len(self._opened):
            raise FingerprintMismatch(f"namespace handle {handle} is unknown to this master: open the namespace again")
        return self._opened[handle - 1]

    def check(self) -> None:
        assert [opened.handle for opened in self._opened] == list(range(1, len(self._opened) + 1))
        assert len({group.number for group in self._groups.values()}) == len(self._groups)


def _mismatch(group: Group, namespace: Namespace) -> str:
    known = group.namespace(0)
    parts = ("block_bytes", "block_tokens", "hash_bytes", "shard_count")
    differing = ", ".join(
        f"{part} {getattr(namespace, part)} (known: {getattr(known, part)})"
        for part in parts
        if getattr(namespace, part) != getattr(known, part)
    )
    return (
        f"group {group.name!r} is known with another layout: {differing}; "
        "whatever changes the layout must change the group's fingerprint"
    )
