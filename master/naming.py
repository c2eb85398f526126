"""What blocks are called in the rooms of a master's state: in the directory, in the chronicle, among intents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

import numpy as np

from kvstrata.master import messages as m
from kvstrata.master.content.chronicle import Scope
from kvstrata.master.content.clearing import Clearing
from kvstrata.master.directory.directory import TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.namespaces import Group, Namespaces
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace

#: Scopes that are remembered, rather than worked out again.
SCOPES_MAX: Final = 1 << 12


class Naming:
    """Part of the master's state: from a namespace, a salt and hashes to names; gives commands to ``emit``."""

    def __init__(self, namespaces: Namespaces, clearing: Clearing, emit: Callable[[m.Command], None]) -> None:
        self._namespaces = namespaces
        self._clearing = clearing
        self._emit = emit
        self._scopes: dict[tuple[int, TableKey], Keys] = {}

    def register(self, namespace: Namespace, by: str = "") -> Group:
        """The group of a namespace; a new one is made durable. Raises as :meth:`Namespaces.register`."""
        group, new = self._namespaces.register(namespace, by)
        if new:
            self._emit(m.SaveGroup(namespace, group.epoch))
        return group

    def where(self, namespace: Namespace, salt: str, hashes: bytes) -> tuple[TableKey, Keys]:
        """The directory's table of one shard, and the blocks' keys in it."""
        group, _ = self._namespaces.register(namespace)
        return TableKey(group.number, namespace.shard, salt), fold(hashes, namespace.hash_bytes)

    def about(self, table: TableKey) -> Scope:
        """The chronicle's name of a table, which outlives weight epochs."""
        group = self._namespaces.by_number(table.group)
        assert group is not None
        return Scope(group.first, table.shard, table.salt)

    def scope(self, table: TableKey) -> Keys:
        """What tells apart equal hashes of different tenants and shards, and of before a drop: u64[1, 2]."""
        name = self._clearing.drops, table
        scope = self._scopes.get(name)
        if scope is None:
            if len(self._scopes) >= SCOPES_MAX:
                self._scopes.clear()
            text = f"{self._clearing.drops}/{table.group}/{table.shard}/{table.salt}"
            digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            scope = self._scopes[name] = np.frombuffer(digest, dtype="<u8").reshape(1, 2)
        return scope
