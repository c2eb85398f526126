"""What the node was told and must still know after a restart: shares, the fallback, weight epochs, who leads.

One file in the data directory, replaced whole. Its first line names the format and the body's length and
checksum; the body is JSON. A file that is not as it was written stops the start: to go on without it would
lift every tenant's limit, which is for the operator to decide. A node without the file (new, or the file was
moved away) works without limits until a master tells it some; weight epochs come back from the master at
attach, and what is on devices carries its own.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import xxhash

from kvstrata.proto.errors import ConfigError, KVError
from kvstrata.storage import durable_file
from kvstrata.storage.eviction.quotas import QuotaBook
from kvstrata.storage.masters.fence import Fence

FORMAT: Final = 1
#: A file beyond this is not one of ours.
BYTES_MAX: Final = 256 << 20
_FILE: Final = "policies.json"


@dataclass(frozen=True, slots=True)
class Policies:
    """``quotas`` is what :class:`~.quotas.QuotaBook` gave, ``epochs`` by group; ``leader``: epoch and id."""

    quotas: dict[str, object]
    epochs: dict[str, int] = field(default_factory=dict)
    leader: tuple[int, str] = (0, "")


class PolicyFile:
    """The file of one data directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / _FILE
        self._writing = threading.Lock()

    def load(self) -> Policies | None:
        """None when there is none. Raises :class:`ConfigError`, which says what to do, when it cannot be used."""
        try:
            if self.path.stat().st_size > BYTES_MAX:
                raise self._damaged("it is too large")
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._damaged(error.strerror or str(error)) from error
        return self._read(content)

    def _read(self, content: bytes) -> Policies:
        first, _, body = content.partition(b"\n")
        try:
            head = json.loads(first)
            version, length, checksum = head["format"], head["bytes"], head["xxh3"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._damaged(f"its first line is no header: {error}") from error
        if version != FORMAT:
            raise ConfigError(f"{self.path} has format {version}, this version reads {FORMAT}: use the newer kvstrata")
        if length != len(body) or checksum != xxhash.xxh3_64_hexdigest(body):
            raise self._damaged("its checksum does not match")
        try:
            kept = json.loads(body)
            quotas, epochs = kept["quotas"], kept["epochs"]
            epoch, leader_id = kept.get("leader", (0, ""))
        except (ValueError, TypeError, KeyError) as error:
            raise self._damaged(str(error)) from error
        if not isinstance(epochs, dict) or not all(type(epoch) is int and epoch >= 0 for epoch in epochs.values()):
            raise self._damaged("its weight epochs are no numbers")
        if not isinstance(quotas, dict):
            raise self._damaged("its shares are no object")
        if type(epoch) is not int or epoch < 0 or not isinstance(leader_id, str):
            raise self._damaged("its leader has no epoch")
        return Policies(quotas, epochs, (epoch, leader_id))

    def restored(self) -> tuple[QuotaBook, dict[str, int]]:
        """What the node works by until a master is heard: shares, and weight epochs by group; as :meth:`load`."""
        kept = self.load()
        if kept is None:
            return QuotaBook(), {}
        try:
            return QuotaBook.from_json(kept.quotas), kept.epochs
        except (KVError, AssertionError) as error:
            raise self._damaged(str(error)) from error

    def fence(self) -> Fence:
        """Whom the node obeyed last; as :meth:`load`."""
        kept = self.load()
        return Fence() if kept is None else Fence(*kept.leader)

    def save(self, policies: Policies) -> None:
        """Durable when it returns. Raises :class:`OSError`; what was saved before then stands."""
        body = json.dumps({"quotas": policies.quotas, "epochs": policies.epochs, "leader": policies.leader}).encode()
        head = json.dumps({"format": FORMAT, "bytes": len(body), "xxh3": xxhash.xxh3_64_hexdigest(body)}).encode()
        with self._writing:
            durable_file.replace(self.path, head + b"\n" + body)

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path} cannot be read ({why}): restore it, or move it away to start without tenants' limits "
            "until a master is in reach"
        )
