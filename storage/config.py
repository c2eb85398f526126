"""What a storage node is started with, and whether this machine can give it."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata.proto.errors import ConfigError, InvalidArgument
from kvstrata.storage.arena import slab_bytes_for
from kvstrata.storage.eviction.setting import EvictionOrder
from kvstrata.storage.huge_pages import Pages, huge_pages_for
from kvstrata.storage.ssd.base import SsdStore
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.identity import parse_address
from kvstrata.transfer.rdma.found import BACKENDS
from kvstrata.transfer.rdma.rails import RailMode, RailOptions
from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.rates import USUAL, Bounds
from kvstrata.transfer.traces import BY_ENVIRONMENT, TraceOptions

if TYPE_CHECKING:
    from kvstrata.storage.ssd.tenant_keys import TenantKeys

#: Left for everything else of the process and the machine.
MEMORY_SPARE_BYTES: Final = 64 << 20
#: Less than this on a device is a mistake in the units.
SSD_BYTES_MIN: Final = 8 << 20
#: A terabyte in a day and a half, for about a hundredth of a core.
SCRUB_RATE: Final = 8 << 20
#: A fast network card keeps nine tenths for requests.
COPY_BANDWIDTH: Final = 256 << 20
_CGROUP_MAX: Final = Path("/sys/fs/cgroup/memory.max")
_CGROUP_NOW: Final = Path("/sys/fs/cgroup/memory.current")
_RAILS: Final = RailOptions()
_OPEN: Final = SecurityFiles()


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Addresses are ``HOST:PORT``, port 0 picks a free one; ``masters`` are channel addresses.

    ``name`` becomes the node id when the data directory is new. ``slab_bytes`` None: an eighth of DRAM,
    4 to 256 MiB. ``ssd`` are directories, one a device, with the bytes to use of each; ``ssd_daily_writes``
    None: as many as come. ``scrub_rate``: bytes a second of SSDs read back for nobody, to find what has changed
    there; 0: none. ``ssd_key_file`` holds the operator's key; None: SSDs are not encrypted. ``copy_bandwidth``:
    bytes a second that copies from and to other nodes may take in all; 0: no bound. ``drain_on_stop_s``: how long
    SIGTERM waits for the node to be drained; 0: not at all. ``rails``: one-sided transfers. ``shared_index``: clients
    of this host find blocks in DRAM by themselves. ``security``: the files of tokens, keys and certificates;
    ``bounds``: of each client.
    """

    masters: tuple[str, ...]
    listen: str
    http: str
    data: Path
    dram_bytes: int
    name: str | None = None
    hugepages: bool = False
    slab_bytes: int | None = None
    ssd: tuple[tuple[Path, int], ...] = ()
    ssd_policy: SsdPolicy = SsdPolicy.DEMOTE
    ssd_daily_writes: int | None = None
    ssd_key_file: Path | None = None
    eviction: EvictionOrder = EvictionOrder.SEGMENTED
    scrub_rate: int = SCRUB_RATE
    copy_bandwidth: int = COPY_BANDWIDTH
    drain_on_stop_s: float = 0.0
    rails: RailOptions = _RAILS
    shared_index: bool = True
    security: SecurityFiles = _OPEN
    bounds: Bounds = USUAL
    traces: TraceOptions = BY_ENVIRONMENT

    def validated(self) -> StorageConfig:
        """Return self, or raise :class:`ConfigError` naming the setting and what to do."""
        for address in (*self.masters, self.listen, self.http):
            try:
                parse_address(address)
            except InvalidArgument as error:
                raise ConfigError(str(error)) from error
        if self.dram_bytes <= 0:
            raise ConfigError(f"dram is {self.dram_bytes} bytes: give the node some")
        if self.copy_bandwidth < 0 or self.drain_on_stop_s < 0:
            raise ConfigError("--copy-bandwidth and --drain-on-stop are 0 or more: 0 turns them off")
        available = memory_available()
        if not self._on_reserved_pages() and self.dram_bytes + MEMORY_SPARE_BYTES > available:
            raise ConfigError(
                f"dram of {self.dram_bytes >> 20} MiB is more than the {available >> 20} MiB this machine "
                "has available: choose a smaller --dram"
            )
        self._validate_ssd()
        self._validate_rails()
        self.traces.validated()
        return self

    def _on_reserved_pages(self) -> bool:
        """Reserved huge pages are no part of what is available. Raises :class:`ConfigError` where asked for in vain."""
        if not self.hugepages:
            return False
        slab = slab_bytes_for(self.dram_bytes, self.slab_bytes, hugepages=True)
        return huge_pages_for(self.dram_bytes // slab * slab) is Pages.RESERVED

    def _validate_rails(self) -> None:
        rails = self.rails
        if rails.backend not in BACKENDS:
            raise ConfigError(f"--rdma-backend is {rails.backend!r}: choose {' or '.join(BACKENDS)}")
        if rails.devices and rails.mode in (RailMode.OFF, RailMode.CMA):
            raise ConfigError(f"--rdma {rails.mode.value} uses no devices: leave out --rdma-devices")
        if not all(rails.devices):
            raise ConfigError("--rdma-devices has an empty name: write names with commas between, as mlx5_0,mlx5_1:1")
        if rails.mode is RailMode.CMA and rails.backend != "UCX":
            raise ConfigError("--rdma cma needs --rdma-backend UCX")

    def _validate_ssd(self) -> None:
        seen: set[Path] = set()
        for path, nbytes in self.ssd:
            real = path.resolve()
            if real in seen:
                raise ConfigError(f"--ssd names {path} twice: one directory a device")
            seen.add(real)
            if nbytes < SSD_BYTES_MIN:
                raise ConfigError(
                    f"--ssd {path} is given {nbytes} bytes: at least {SSD_BYTES_MIN >> 20}MiB (as {path}=100GiB)"
                )
        if self.ssd_daily_writes is not None and self.ssd_daily_writes <= 0:
            raise ConfigError(
                f"--ssd-daily-writes is {self.ssd_daily_writes}: give the bytes a day that the devices are rated for, "
                "or --ssd-policy off to write nothing"
            )
        asked = self.ssd_daily_writes is not None or self.ssd_key_file is not None
        if not self.ssd and (asked or self.ssd_policy is not SsdPolicy.DEMOTE):
            raise ConfigError("--ssd-policy, --ssd-daily-writes and --ssd-key-file need an SSD: add --ssd PATH=SIZE")


def open_keys(config: StorageConfig) -> TenantKeys | None:
    """The keys of what is on the node's SSDs; None when that is not encrypted. Raises :class:`ConfigError`."""
    if config.ssd_key_file is None:
        return None
    try:
        from kvstrata.storage.ssd.tenant_keys import FILE_NAME, TenantKeys, read_key_file
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise ConfigError("--ssd-key-file needs a package: pip install 'kvstrata[encryption]'") from error

    return TenantKeys(config.data / FILE_NAME, read_key_file(config.ssd_key_file))


def open_store(config: StorageConfig, node_id: str, keys: TenantKeys | None = None) -> SsdStore | None:
    """The node's SSDs, locked and ready to be scanned; None when it has none. Raises :class:`ConfigError`."""
    if not config.ssd:
        return None
    from kvstrata.storage.ssd.log import SsdLog
    from kvstrata.storage.ssd.opening import DeviceConfig

    return SsdLog.open([DeviceConfig(path, nbytes) for path, nbytes in config.ssd], node_id=node_id, keys=keys)


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
