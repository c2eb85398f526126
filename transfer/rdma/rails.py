"""Whether this process can use one-sided transfers, over what, and why not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

#: Where Linux lists RDMA devices.
INFINIBAND: Final = Path("/sys/class/infiniband")


class RailMode(Enum):
    """What a process is told about one-sided transfers.

    ``CMA``: between processes of one host, by the kernel's cross-memory attach; for tests and for machines without an
    RDMA device. There shared memory is faster.
    """

    AUTO = "auto"  #: where there is a device and NIXL, else not
    OFF = "off"
    ON = "on"  #: it is an error when it cannot be
    CMA = "cma"


@dataclass(frozen=True, slots=True)
class RailOptions:
    """``backend``: NIXL's plugin, "UCX" or "LIBFABRIC" (EFA). ``devices``: names as in :data:`INFINIBAND` (``mlx5_0``),
    or with a port (``mlx5_0:1``); none: all that are up. ``workers``: UCX workers."""

    mode: RailMode = RailMode.AUTO
    backend: str = "UCX"
    devices: tuple[str, ...] = ()
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """An RDMA device: ``port`` that is up, ``numa`` node (-1: unknown), ``link`` ("InfiniBand" or "Ethernet")."""

    name: str
    port: int
    numa: int
    link: str
    rate: str


@dataclass(frozen=True, slots=True)
class Rails:
    """What a process has. ``kind``: "rdma", "cma" or "" (none, and ``problem`` says why and what to do)."""

    kind: str
    devices: tuple[Device, ...] = ()
    problem: str = ""
