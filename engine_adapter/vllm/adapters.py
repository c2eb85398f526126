"""Which LoRA adapter a request's KV is of, by its contents.

vLLM's block hashes name an adapter by its name and path. That is enough within one engine; a pool outlives engines, and
an adapter that was trained on and saved again has the same name and path. So blocks of an adapter have keys of their
own: vLLM's hashes, hashed again with what the adapter's files hold, but for their last 8 bytes, by which routers know
that a block of the pool is a block of an engine.

The files are read when the adapter is first asked for, as vLLM reads them then, and again where it may have loaded it
anew. If they are others then, vLLM's own cache still has KV of the older weights under the same hashes, and gives it
out: blocks of that adapter are nobody else's from then on, until that cache is reset with the pool's. An adapter that
is a name on a hub counts as vLLM counts it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvstrata.engine_adapter.vllm.identity import weights_digest
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: Past so many the blocks of further adapters are nobody else's: to forget one would be to forget that it changed.
ADAPTERS_MAX: Final = 65_536
#: Bytes of a hash that are vLLM's in the key too: see :func:`kvstrata.transfer.kv_events.events.tail`.
TAIL_BYTES: Final = 8
CONFIGURATION: Final = "adapter_config.json"

#: Names, sizes and times of an adapter's files; None of a name on a hub.
_Seen = tuple[tuple[str, int, int], ...] | None


class Adapter(Protocol):
    """What is read of vLLM's ``LoRARequest``."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


@dataclass(slots=True)
class _Known:
    number: int  #: vLLM's, another each time it is told to load the adapter
    seen: _Seen
    digest: bytes


class AdapterDigests:
    """Remembers up to ``ADAPTERS_MAX`` adapters by name and path, as vLLM's hashes do. Used from vLLM's scheduler
    thread only."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known] = {}

    def digest(self, adapter: Adapter | None) -> bytes:
        """Of what the adapter's files hold; empty for none, and for a name on a hub. Reads 64 KiB a file the first
        time. A digest of its own, so that nothing is shared, where files cannot be read, or have changed."""
        if adapter is None:
            return b""
        key = (adapter.lora_name, adapter.lora_path)
        known = self._known.get(key)
        if known is not None and known.number == adapter.lora_int_id and not adapter.load_inplace:
            return known.digest
        try:
            seen = _seen(adapter.lora_path)
            if known is None:
                if len(self._known) >= ADAPTERS_MAX:
                    return _own()
                self._known[key] = known = _Known(adapter.lora_int_id, seen, _read(adapter.lora_path, seen))
            elif known.seen != seen and known.digest != _read(adapter.lora_path, seen):
                log.warning(
                    "an adapter has other weights under its old name and path: its blocks are not shared any more",
                    adapter=adapter.lora_name, path=adapter.lora_path,
                )  # fmt: skip
                known.digest = _own()
        except (OSError, RuntimeError) as error:  # RuntimeError: the home of a user who is not there
            log.warning(
                "an adapter's files cannot be read: its blocks are not shared",
                path=adapter.lora_path, error=str(error),
            )  # fmt: skip
            return _own()
        known.number, known.seen = adapter.lora_int_id, seen
        return known.digest

    def reset(self) -> None:
        """vLLM's own cache is empty, and so is the pool's part of the model: no block is of older weights."""
        self._known.clear()


def _seen(path: str) -> _Seen:
    """As vLLM takes it for a name on a hub: neither absolute nor below a home, and not there."""
    folder = Path(path).expanduser()
    if not folder.is_absolute() and not folder.exists():
        return None
    stats = ((entry.name, entry.stat()) for entry in sorted(folder.iterdir()) if entry.is_file())
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _read(path: str, seen: _Seen) -> bytes:
    return b"" if seen is None else bytes.fromhex(weights_digest(Path(path).expanduser(), CONFIGURATION))


def _own() -> bytes:
    return secrets.token_bytes(16)


class AdapterHashes:
    """A request's block hashes, each hashed again with its adapter's digest, as vLLM's list of them grows."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest
        self._of: list[bytes] = []
        self._keyed: list[bytes] = []

    def keyed(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """As many and as long as ``hashes``. Hashes are chained: those up to an equal one are equal. O(new ones)."""
        known = min(len(self._of), len(hashes))
        if known and self._of[known - 1] != hashes[known - 1]:
            known = 0
        del self._of[known:], self._keyed[known:]
        for each in hashes[known:]:
            self._of.append(each)
            head = hashlib.sha256(self._digest + each).digest()[: len(each) - TAIL_BYTES]
            self._keyed.append(head + each[-TAIL_BYTES:])
        return self._keyed
