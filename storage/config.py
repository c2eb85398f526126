"""What a storage node is started with, and whether this machine can give it."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata.proto.errors import ConfigError, InvalidArgument
from kvstrata.transfer.identity import parse_address

#: Left for everything else of the process and the machine.
MEMORY_SPARE_BYTES: Final = 64 << 20
_CGROUP_MAX: Final = Path("/sys/fs/cgroup/memory.max")
_CGROUP_NOW: Final = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Addresses are ``HOST:PORT``, port 0 picks a free one; ``masters`` are channel addresses.

    ``name`` becomes the node id when the data directory is new. ``slab_bytes`` None: an eighth of DRAM,
    4 to 256 MiB.
    """

    masters: tuple[str, ...]
    listen: str
    http: str
    data: Path
    dram_bytes: int
    name: str | None = None
    hugepages: bool = False
    slab_bytes: int | None = None

    def validated(self) -> StorageConfig:
        """Return self, or raise :class:`ConfigError` naming the setting and what to do."""
        for address in (*self.masters, self.listen, self.http):
            try:
                parse_address(address)
            except InvalidArgument as error:
                raise ConfigError(str(error)) from error
        if self.dram_bytes <= 0:
            raise ConfigError(f"dram is {self.dram_bytes} bytes: give the node some")
        available = memory_available()
        if not self.hugepages and self.dram_bytes + MEMORY_SPARE_BYTES > available:
            raise ConfigError(
                f"dram of {self.dram_bytes >> 20} MiB is more than the {available >> 20} MiB this machine "
                "has available: choose a smaller --dram"
            )
        return self


def memory_available() -> int:
    """Bytes this process could still get: the machine's, or its control group's if that is less."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = int(_CGROUP_MAX.read_text())
        return min(available, limit - int(_CGROUP_NOW.read_text()))
    except (OSError, ValueError):
        return available  # no control group, or one without a limit


def raise_open_files() -> None:
    """Let this process open as many files as it may: two a slab, one a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
