"""Removing single blocks by hash: found in the directory, then removed by whole namespace and name."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from kvstrata.client.admin import AdminClient
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.channel_pb2 import NamespaceSpec
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import FOLDED_BYTES

LIST_MAX: Final = 10_000
#: Blocks may be stored while others are removed: after so many turns the rest is left.
TURNS_MAX: Final = 100


def folded(prefix: bytes) -> bytes:
    """A hash, or its beginning, as the directory knows it. Longer than 16 bytes: it must be a whole one."""
    return fold(prefix, len(prefix)).tobytes() if len(prefix) > FOLDED_BYTES else prefix


class Removal:
    """Blocks of a scope whose hash begins with ``prefix``."""

    def __init__(self, admin: AdminClient, group: str, salt: str | None, prefix: bytes) -> None:
        self._admin = admin
        self._group = group
        self._salt = salt
        self._prefix = prefix
        self._specs = {(row.spec.group, row.spec.shard): row.spec for row in admin.namespaces()}
        self.unreached: set[str] = set()

    def count(self) -> int:
        return int(self._list(1).total)

    def run(self, wait_s: float) -> int:
        """Remove them; returns how many the directory knew. Raises :class:`InvalidArgument` for a block that only
        its whole hash can name."""
        removed = 0
        for _ in range(TURNS_MAX):
            listed = self._list(LIST_MAX)
            if not listed.blocks:
                break
            before = removed
            for (spec, salt), hashes in self._by_table(listed).items():
                answer = self._admin.remove_blocks(self._specs[spec], salt, b"".join(hashes), wait_s=wait_s)
                removed += answer.removed
                self.unreached |= set(answer.unreached)
            if removed == before:
                break
        return removed

    def _list(self, limit: int) -> control.BlockList:
        return self._admin.list_blocks(self._group, self._salt, hash_prefix=folded(self._prefix), limit=limit)

    def _by_table(self, listed: control.BlockList) -> dict[tuple[tuple[str, int], str], list[bytes]]:
        found: dict[tuple[tuple[str, int], str], list[bytes]] = defaultdict(list)
        for row in listed.blocks:
            spec = self._specs[(row.group, row.shard)]
            found[((row.group, row.shard), row.salt)].append(self._whole(spec, row.hash))
        return found

    def _whole(self, spec: NamespaceSpec, name: bytes) -> bytes:
        if spec.hash_bytes == len(self._prefix):
            return self._prefix
        if spec.hash_bytes == FOLDED_BYTES:
            return name
        raise InvalidArgument(
            f"hashes of {spec.group} have {spec.hash_bytes} bytes, and the master keeps {FOLDED_BYTES} of them: "
            f"give the whole hash, or remove by --tenant and --namespace"
        )
