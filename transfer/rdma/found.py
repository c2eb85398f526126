"""What of one-sided transfers this machine has: RDMA devices, NIXL, locked memory, cross-memory attach."""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.rdma import nixl
from kvstrata.transfer.rdma.rails import INFINIBAND, Device, RailMode, RailOptions, Rails

BACKENDS: Final = ("UCX", "LIBFABRIC")
_CAP_SYS_PTRACE: Final = 19
_CAP_IPC_LOCK: Final = 14


@dataclass(frozen=True, slots=True)
class Places:
    """Where Linux says it."""

    infiniband: Path = INFINIBAND
    device_nodes: Path = Path("/dev/infiniband")
    ptrace_scope: Path = Path("/proc/sys/kernel/yama/ptrace_scope")
    status: Path = Path("/proc/self/status")


HERE: Final = Places()


def find_rails(options: RailOptions, places: Places = HERE) -> Rails:
    """What this process can use. Raises :class:`ConfigError` for what was asked for and cannot be, with what to do.

    Imports nothing of NIXL's; with ``AUTO`` it never raises but for options that are wrong by themselves.
    """
    if options.backend not in BACKENDS:
        raise ConfigError(f"rdma backend {options.backend!r} is unknown: {' or '.join(BACKENDS)}")
    if options.workers < 1:
        raise ConfigError(f"{options.workers} rdma workers: give 1 or more")
    if options.mode is RailMode.OFF:
        return Rails("", problem="one-sided transfers are turned off")
    if options.mode is RailMode.CMA:
        if problem := nixl_problem() or cma_problem(places):
            raise ConfigError(f"one-sided transfers by cma: {problem}")
        return Rails("cma")
    devices, problem = choose(find_devices(places), options.devices, places)
    problem = problem or nixl_problem()
    if problem and options.mode is RailMode.ON:
        raise ConfigError(f"one-sided transfers are on, and cannot be: {problem}")
    return Rails("", devices, problem) if problem else Rails("rdma", devices)


def find_devices(places: Places = HERE) -> tuple[Device, ...]:
    """Ports that are up, by name. Unreadable entries are left out."""
    found = []
    for port in sorted(places.infiniband.glob("*/ports/*")):
        if _read(port / "state").endswith("ACTIVE") and port.name.isdecimal():
            device = port.parents[1]
            numa = _read(device / "device" / "numa_node")
            found.append(
                Device(
                    device.name,
                    int(port.name),
                    int(numa) if numa.lstrip("-").isdecimal() else -1,
                    _read(port / "link_layer"),
                    _read(port / "rate"),
                )
            )
    return tuple(found)


def choose(found: tuple[Device, ...], wanted: tuple[str, ...], places: Places = HERE) -> tuple[tuple[Device, ...], str]:
    """The devices to use, and why there are none or not those that are wanted ("" when all is well)."""
    names = ", ".join(f"{device.name}:{device.port}" for device in found)
    if not found:
        down = sorted(path.name for path in places.infiniband.glob("*"))
        if down:
            return (), f"no port of {', '.join(down)} is active: look at cables and the subnet manager"
        return (), f"no RDMA device ({places.infiniband} is empty): tcp and shm work without one"
    chosen = []
    for name in wanted or [device.name for device in found]:
        matching = [device for device in found if name in (device.name, f"{device.name}:{device.port}")]
        if not matching:
            return (), f"device {name} is not there or not up; up are {names}"
        chosen += matching
    devices = tuple(dict.fromkeys(chosen))
    if not any(places.device_nodes.glob("uverbs*")):
        return devices, (
            f"{names} is up, but {places.device_nodes}/uverbs* is not there: give the container {places.device_nodes}"
        )
    return devices, ""


def nixl_problem() -> str:
    return "" if nixl.installed() else f"NIXL is not installed: {nixl.ADVICE}"


def cma_problem(places: Places = HERE) -> str:
    """Why processes of one user here cannot read each other's memory, or ""."""
    scope = _read(places.ptrace_scope) or "0"
    if scope != "0" and not _capable(_CAP_SYS_PTRACE, places):
        return f"kernel.yama.ptrace_scope is {scope}: set it to 0, or give the process CAP_SYS_PTRACE"
    if not _reads_itself():
        return "process_vm_readv is refused: allow it in the container's seccomp profile"
    return ""


def memlock_problem(nbytes: int, limit: int | None = None, places: Places = HERE) -> str:
    """Why ``nbytes`` of memory cannot be locked for a device, or "". ``limit``: bytes, -1 for none."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit in (resource.RLIM_INFINITY, -1) or limit >= nbytes or _capable(_CAP_IPC_LOCK, places):
        return ""
    return (
        f"the memlock limit is {limit} bytes, and {nbytes} are to be registered: ulimit -l unlimited "
        "(LimitMEMLOCK=infinity, docker run --ulimit memlock=-1), or CAP_IPC_LOCK"
    )


def _reads_itself() -> bool:
    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"k"), ctypes.create_string_buffer(1)
    local, remote = (ctypes.byref(Piece(ctypes.addressof(side), 1)) for side in (target, source))
    one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    read = ctypes.CDLL(None).process_vm_readv
    read.restype = ctypes.c_ssize_t
    return bool(read(os.getpid(), local, one, remote, one, flags) == 1)


def _capable(capability: int, places: Places) -> bool:
    for line in _read(places.status).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
