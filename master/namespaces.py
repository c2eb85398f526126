"""Namespaces the cluster knows: groups with one layout each, handles, weight epochs.

The number of a group names its blocks of one weight epoch: a bump gives it a new one, so that whatever went
by the old number is out of reach at once. Handles stay: they name the group, not its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvstrata.proto.errors import Busy, FingerprintMismatch, InvalidArgument
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.security.rates import count_opened

GROUPS_MAX: Final = 4096
HANDLES_MAX: Final = 1 << 16
#: Of those that are new to this process, one subject opens no more than these: what is left is for others.
GROUPS_OF_A_SUBJECT: Final = GROUPS_MAX // 16
HANDLES_OF_A_SUBJECT: Final = HANDLES_MAX // 16
#: Epochs count bumps; a number past this was never one.
EPOCH_MAX: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Group:
    """What all shards of a group share. ``number`` is this process's name for it in this ``epoch``, which is durable.

    ``first`` is the number that it had at first: its story goes by that one.
    """

    number: int
    first: int
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
        self._by_number: dict[int, Group] = {}
        self._numbers = 0
        self._handles: dict[tuple[str, int], int] = {}
        self._opened: list[Opened] = []
        self._groups_by: Counter[str] = Counter()
        self._handles_by: Counter[str] = Counter()
        self._told: dict[str, int] = {}  #: epochs that nodes know of groups that this master does not

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def restore(self, namespace: Namespace, epoch: int) -> None:
        """Load a durable group at start."""
        number = self._numbers
        group = Group(
            number,
            number,
            namespace.group,
            namespace.block_bytes,
            namespace.block_tokens,
            namespace.hash_bytes,
            namespace.shard_count,
            epoch,
        )
        self._put(group)

    def _put(self, group: Group) -> None:
        before = self._groups.get(group.name)
        if before is not None:
            del self._by_number[before.number]
        self._numbers += 1
        self._groups[group.name] = self._by_number[group.number] = group

    def register(self, namespace: Namespace, by: str = "") -> tuple[Group, bool]:
        """The group of ``namespace``, and whether it is new (to be made durable). ``by``: the subject of who opens it;
        "" is not counted.

        Raises :class:`FingerprintMismatch` when the group is known with another layout, :class:`Busy`
        when there are ``GROUPS_MAX`` of them, or ``GROUPS_OF_A_SUBJECT`` of this one.
        """
        group = self._groups.get(namespace.group)
        if group is not None:
            if not group.admits(namespace):
                raise FingerprintMismatch(_mismatch(group, namespace))
            return group, False
        if len(self._groups) >= GROUPS_MAX:
            raise Busy(f"{GROUPS_MAX} namespace groups are known, which is the bound: group {namespace.group!r}")
        count_opened(self._groups_by, by, GROUPS_OF_A_SUBJECT, "namespace groups", "master")
        self.restore(namespace, epoch=self._told.pop(namespace.group, 0))
        return self._groups[namespace.group], True

    def find(self, namespace: Namespace) -> Group | None:
        """The group if it is known with this very layout, registering nothing."""
        group = self._groups.get(namespace.group)
        return group if group is not None and group.admits(namespace) else None

    def named(self, name: str) -> Group:
        """The group of that name; raises :class:`InvalidArgument` when there is none."""
        group = self._groups.get(name)
        if group is None:
            raise InvalidArgument(f"no namespace group {name!r} is known: `kvstrata namespace list` shows them")
        return group

    def by_number(self, number: int) -> Group | None:
        """The group that has this number now; None for a number of an earlier epoch."""
        return self._by_number.get(number)

    # ------------------------------------------------------------------ weight epochs

    @property
    def epochs(self) -> tuple[tuple[str, int], ...]:
        """(group, epoch) of every group past epoch 0, those that only nodes know of too."""
        known = ((group.name, group.epoch) for group in self._groups.values() if group.epoch)
        return (*known, *self._told.items())

    def bump(self, name: str, epoch: int | None = None) -> Group:
        """Give a group its next epoch (or ``epoch``) and a new number; O(its handles)."""
        before = self.named(name)
        after = replace(before, number=self._numbers, epoch=before.epoch + 1 if epoch is None else epoch)
        self._put(after)
        for index, opened in enumerate(self._opened):
            if opened.group.name == name:
                self._opened[index] = replace(opened, group=after)
        return after

    def knows(self, name: str) -> bool:
        """Whether the group has been registered here: not only its epoch heard of."""
        return name in self._groups

    def newer(self, epochs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of a node's epochs that are past what is known here; of unknown groups they are remembered."""
        ahead = []
        for name, epoch in epochs:
            group = self._groups.get(name)
            known = group.epoch if group is not None else self._told.get(name, 0)
            if not known < epoch <= EPOCH_MAX:
                continue
            if group is None:
                if not known and len(self._told) >= GROUPS_MAX:
                    continue
                self._told[name] = epoch
            ahead.append((name, epoch))
        return ahead

    # ------------------------------------------------------------------ handles

    def open(self, namespace: Namespace, by: str = "") -> Opened:
        """The handle of a registered namespace. Raises :class:`Busy` at a bound, as :meth:`register`."""
        group = self._groups[namespace.group]
        key = (group.name, namespace.shard)
        handle = self._handles.get(key)
        if handle is None:
            if len(self._opened) >= HANDLES_MAX:
                raise Busy(f"{HANDLES_MAX} namespaces are open, which is the bound")
            count_opened(self._handles_by, by, HANDLES_OF_A_SUBJECT, "namespaces", "master")
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
        assert self._by_number == {group.number: group for group in self._groups.values()}
        assert all(opened.group == self._groups[opened.group.name] for opened in self._opened)
        assert len({group.first for group in self._groups.values()}) == len(self._groups)
        assert all(group.number < self._numbers for group in self._groups.values())
        assert not self._told.keys() & self._groups.keys()
        assert all(0 < count <= GROUPS_OF_A_SUBJECT for count in self._groups_by.values())
        assert all(0 < count <= HANDLES_OF_A_SUBJECT for count in self._handles_by.values())
        assert self._groups_by.total() <= len(self._groups) and self._handles_by.total() <= len(self._opened)


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
