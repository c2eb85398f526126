"""Which LoRA adapter a request's KV is of, by its contents.

vLLM's block hashes name an adapter by its name and path. That is enough within one engine; a pool outlives engines, and
an adapter that was trained on and saved again has the same name and path. So blocks of an adapter have keys of their
own: vLLM's hashes, hashed again with what the adapter's files hold, but for their last 8 bytes, by which routers know
that a block of the pool is a block of an engine.

The files are read when the adapter is first asked for, as vLLM reads them then; again where it is told to load the
adapter in place. An adapter that is a name on a hub, and no folder here, counts as vLLM counts it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from kvstrata.engine_adapter.vllm.identity import weights_digest
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

ADAPTERS_MAX: Final = 4096
#: Bytes of a hash that are vLLM's in the key too: see :func:`kvstrata.transfer.kv_events.events.tail`.
TAIL_BYTES: Final = 8
CONFIGURATION: Final = "adapter_config.json"


class Adapter(Protocol):
    """What is read of vLLM's ``LoRARequest``."""

    lora_int_id: int
    lora_path: str
    load_inplace: bool


class AdapterDigests:
    """Remembers the newest ``ADAPTERS_MAX`` adapters. Used from vLLM's scheduler thread only."""

    def __init__(self) -> None:
        self._digests: OrderedDict[tuple[int, str], bytes] = OrderedDict()

    def digest(self, adapter: Adapter | None) -> bytes:
        """Of what the adapter's files hold; empty for none, and for a name on a hub. Reads 64 KiB a file the first
        time. Files that cannot be read give a digest of their own: nothing is shared then, and vLLM says why."""
        if adapter is None:
            return b""
        key = (adapter.lora_int_id, adapter.lora_path)
        found = self._digests.pop(key, None)
        if found is None or adapter.load_inplace:
            found = _read(adapter.lora_path)
        self._digests[key] = found
        if len(self._digests) > ADAPTERS_MAX:
            self._digests.popitem(last=False)
        return found


def _read(path: str) -> bytes:
    try:
        folder = Path(path).expanduser()
        return bytes.fromhex(weights_digest(folder, CONFIGURATION)) if folder.is_dir() else b""
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of a user who is not there
        log.warning("an adapter's files cannot be read: its blocks are not shared", path=path, error=str(error))
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
