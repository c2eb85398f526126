"""From a list of directories to devices that can be scanned: sizes, whose they are, which were away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger
from kvstrata.storage.ssd.base import SECTOR_BYTES
from kvstrata.storage.ssd.device import Device, Limits
from kvstrata.storage.ssd.raw_file import OpenFile
from kvstrata.storage.ssd.removal_log import encode_opening
from kvstrata.storage.ssd.superblock import Folder, Superblock

if TYPE_CHECKING:
    from kvstrata.storage.ssd.tenant_keys import TenantKeys

log = get_logger(__name__)

#: Numbers that one start can give to blocks and records: those of the next start are greater.
START_BITS: Final = 40
EXTENT_BYTES_MIN: Final = 64 << 20
EXTENT_BYTES_MAX: Final = 1 << 30
#: An explicit extent size may be as small as this (tests, tiny pools).
EXTENT_BYTES_FLOOR: Final = 64 << 10
EXTENTS_WANTED: Final = 8
EXTENTS_MIN: Final = 2
REMOVAL_BYTES_MIN: Final = 256 << 10
REMOVAL_BYTES_MAX: Final = 16 << 20
_REMOVAL_PART: Final = 256


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """A directory, on a mount of its own, and how many bytes may be used there in all."""

    path: Path
    nbytes: int


def extent_bytes_for(smallest: int, wanted: int | None) -> int:
    """About an eighth of the smallest device, 64 MiB to 1 GiB and at most half of it, so that nothing is left over.

    Raises :class:`ConfigError`.
    """
    size = wanted
    if size is None:
        room = max(0, smallest - removal_bytes_for(smallest))
        about = min(max(room // EXTENTS_WANTED, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX)
        size = room // max(EXTENTS_MIN, -(-room // about))
    size -= size % SECTOR_BYTES
    if size < EXTENT_BYTES_FLOOR:
        raise ConfigError(f"extents of {size} bytes are too small: at least {EXTENT_BYTES_FLOOR} (is --ssd too small?)")
    return size


def removal_bytes_for(nbytes: int) -> int:
    """Room for the removals of a device of that size."""
    size = min(max(nbytes // _REMOVAL_PART, REMOVAL_BYTES_MIN), REMOVAL_BYTES_MAX)
    return size - size % SECTOR_BYTES


def open_devices(
    configs: Sequence[DeviceConfig],
    node_id: str,
    extent_bytes: int | None,
    open_file: OpenFile,
    limits: Limits,
    clock: Callable[[], float] = time.monotonic,
    keys: TenantKeys | None = None,
) -> tuple[list[Device], int]:
    """(devices, extent size). Raises :class:`ConfigError`; a device with I/O errors is opened as failed.

    ``keys``: with which all that is there was encrypted, and all that comes will be. None: neither is.
    """
    if not configs:
        raise ConfigError("no SSD device was given")
    folders: list[Folder] = []
    with contextlib.ExitStack() as undo:
        for config in configs:
            folders.append(Folder(config.path, node_id))
            undo.callback(folders[-1].close)
        ring = _agreed_ring(folders, keys)
        known = [folder.superblock for folder in folders if folder.superblock is not None]
        made = [superblock for superblock in known if superblock.ready]
        size = _agreed_extent_bytes(configs, made, extent_bytes)
        start = max((superblock.starts for superblock in known), default=0) + 1
        served = max((superblock.served for superblock in known), default=0)
        devices = [
            _open_one(index, folder, config, size, start, served, ring, open_file, limits, clock)
            for index, (folder, config) in enumerate(zip(folders, configs, strict=True))
        ]
        if all(device.failed for device in devices):
            raise ConfigError("; ".join(f"{device.folder.path}: {device.problem}" for device in devices))
        undo.pop_all()
    return devices, size


def _agreed_ring(folders: Sequence[Folder], keys: TenantKeys | None) -> str:
    """The id of the keys, which are durable from then on. A device that has others is refused."""
    ring = keys.ring if keys is not None else ""
    for folder in folders:
        made = folder.superblock
        if made is None or not made.ready or made.ring == ring:
            continue
        if not made.ring:
            problem = "holds blocks that are not encrypted: start without --ssd-key-file"
        elif keys is None:
            problem = "is encrypted: give --ssd-key-file as before"
        else:
            problem = f"is encrypted with other keys than those in {keys.file}: put that file back as it was"
        raise ConfigError(f"{folder.path} {problem}, or move its files away to start empty")
    if keys is not None:
        try:
            keys.save()
        except OSError as error:
            raise ConfigError(f"cannot write {keys.file}: {error.strerror or error}") from error
    return ring


def _agreed_extent_bytes(configs: Sequence[DeviceConfig], made: Sequence[Superblock], wanted: int | None) -> int:
    sizes = {superblock.extent_bytes for superblock in made}
    if wanted is not None:
        sizes.add(wanted)
    if len(sizes) > 1:
        raise ConfigError(
            f"the devices have extents of {' and '.join(map(str, sorted(sizes)))} bytes: all must have one size; "
            "move the files of some of them away to start those empty"
        )
    return extent_bytes_for(min(config.nbytes for config in configs), sizes.pop() if sizes else None)


def _open_one(
    index: int,
    folder: Folder,
    config: DeviceConfig,
    extent_bytes: int,
    start: int,
    served: int,
    ring: str,
    open_file: OpenFile,
    limits: Limits,
    clock: Callable[[], float],
) -> Device:
    before = folder.superblock
    away = before is not None and before.ready and before.starts < served
    if away:
        log.warning("a device was away while others served: it starts empty", path=str(folder.path))
    ready = before is not None and before.ready and not away
    removal_bytes = before.removal_bytes if before is not None and ready else removal_bytes_for(config.nbytes)
    extents = (config.nbytes - removal_bytes) // extent_bytes
    if extents < 1:
        raise ConfigError(
            f"{config.path}: {config.nbytes} bytes hold no extent of {extent_bytes} and {removal_bytes} for removals: "
            "give it more, or choose smaller extents"
        )
    try:
        opening = encode_opening(start << START_BITS)
        folder.lay_out(extent_bytes, extents, removal_bytes, start, opening, anew=away, ring=ring)
        file = open_file(folder.extents)
    except OSError as error:
        if folder.superblock is None:
            raise ConfigError(f"cannot make {config.path} an SSD device: {error.strerror or error}") from error
        device = Device(index, folder, None, open_file=open_file, limits=limits, clock=clock)
        device.fail(f"it could not be opened: {error}")
        return device
    return Device(index, folder, file, open_file=open_file, limits=limits, clock=clock)
