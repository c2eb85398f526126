"""Removals as a set: what a header found at a start is held against, and their form in a log's record."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from kvstrata.proto.keys import Namespace, split_hashes
from kvstrata.storage.ssd.base import Removal, SlotHeader

_ENTRY: Final = struct.Struct("<II")  #: bytes of JSON, bytes of hashes and generations after it
_GENERATION: Final = struct.Struct("<Q")
#: Hashes in one entry, so that a record stays small.
_ENTRY_HASHES: Final = 4096
Scope = tuple[str, str | None, int | None]
Tenancy = tuple[Namespace, str]


class RemovalIndex:
    """Removals folded: for each block and each scope the greatest generation that is gone."""

    def __init__(self) -> None:
        self.blocks: dict[Tenancy, dict[bytes, int]] = {}
        self.scopes: dict[Scope, int] = {}
        #: Every block up to this generation is gone: what a damaged log may have named.
        self.everything_below = 0
        self.greatest = 0

    def add(self, removal: Removal) -> None:
        if removal.hashes:
            assert removal.namespace is not None and removal.salt is not None
            width = removal.namespace.hash_bytes
            self.add_blocks((removal.namespace, removal.salt), list(split_hashes(removal.hashes, width)), removal.below)
            return
        group = removal.group or (removal.namespace.group if removal.namespace else "")
        scope = (group, removal.salt, removal.epoch)
        self.scopes[scope] = max(self.scopes.get(scope, 0), removal.below)
        self.greatest = max(self.greatest, removal.below)

    def add_blocks(self, tenancy: Tenancy, hashes: Sequence[bytes], below: int) -> None:
        gone = self.blocks.setdefault(tenancy, {})
        for key in hashes:
            gone[key] = max(gone.get(key, 0), below)
        self.greatest = max(self.greatest, below)

    def covers(self, header: SlotHeader) -> bool:
        """The block was removed after it was written."""
        if header.generation <= self.everything_below:
            return True
        gone = self.blocks.get((header.namespace, header.salt))
        if gone is not None and header.generation <= gone.get(header.hash, 0):
            return True
        return any(
            header.generation <= below
            and group in ("", header.namespace.group)
            and (salt is None or salt == header.salt)
            and (epoch is None or header.epoch < epoch)
            for (group, salt, epoch), below in self.scopes.items()
        )

    def __bool__(self) -> bool:
        return bool(self.blocks or self.scopes or self.everything_below)

    def encode(self) -> Iterator[bytes]:
        """Entries that :meth:`merge` makes the same index of."""
        for (namespace, salt), gone in self.blocks.items():
            about = {
                "group": namespace.group, "block_bytes": namespace.block_bytes, "tokens": namespace.block_tokens,
                "width": namespace.hash_bytes, "shard": namespace.shard, "shards": namespace.shard_count, "salt": salt,
            }  # fmt: skip
            rows = list(gone.items())
            for start in range(0, len(rows), _ENTRY_HASHES):
                part = rows[start : start + _ENTRY_HASHES]
                yield _entry(about, b"".join(key + _GENERATION.pack(below) for key, below in part))
        for (group, scope_salt, epoch), below in self.scopes.items():
            yield _entry({"scope": [group, scope_salt, epoch], "below": below}, b"")
        if self.everything_below:
            yield _entry({"everything_below": self.everything_below}, b"")

    def merge(self, body: bytes) -> None:
        """Add all entries of a record's body, which its checksum vouches for."""
        at = 0
        while at < len(body):
            about_bytes, row_bytes = _ENTRY.unpack_from(body, at)
            at += _ENTRY.size
            about = json.loads(body[at : at + about_bytes])
            at += about_bytes
            self._merge_entry(about, body[at : at + row_bytes])
            at += row_bytes

    def _merge_entry(self, about: dict[str, object], rows: bytes) -> None:
        match about:
            case {"everything_below": int(below)}:
                self.everything_below = max(self.everything_below, below)
                self.greatest = max(self.greatest, below)
            case {"scope": [str(group), salt, epoch], "below": int(below)}:
                assert salt is None or isinstance(salt, str)
                assert epoch is None or isinstance(epoch, int)
                scope = (group, salt, epoch)
                self.scopes[scope] = max(self.scopes.get(scope, 0), below)
                self.greatest = max(self.greatest, below)
            case {
                "group": str(group), "block_bytes": int(block_bytes), "tokens": int(tokens), "width": int(width),
                "shard": int(shard), "shards": int(shards), "salt": str(salt),
            }:  # fmt: skip
                tenancy = (Namespace(group, block_bytes, tokens, width, shard, shards), salt)
                step = width + _GENERATION.size
                for start in range(0, len(rows), step):
                    (below,) = _GENERATION.unpack_from(rows, start + width)
                    self.add_blocks(tenancy, [rows[start : start + width]], below)
            case _:
                raise ValueError(f"a removal of a kind that this version does not know: {sorted(about)}")


def _entry(about: dict[str, object], rows: bytes) -> bytes:
    text = json.dumps(about).encode()
    return _ENTRY.pack(len(text), len(rows)) + text + rows
