"""Checks of this machine: memory, limits, clocks, versions. Each does the thing itself where it can."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import mmap
import os
import platform
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstrata.cli.doctor.rows import Check, Row, Verdict
from kvstrata.cli.sizes import format_size
from kvstrata.storage import huge_pages as pages
from kvstrata.storage.config import MEMORY_SPARE_BYTES, memory_available
from kvstrata.storage.sealed_memory import SEALS
from kvstrata.transfer.identity import SOFTWARE

SHM_BYTES_MIN: Final = 1 << 30
OPEN_FILES_MIN: Final = 4096
CHILD_S: Final = 8.0
_PTRACE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_SHM: Final = Path("/dev/shm")

#: Reads a byte of its parent's memory, as a node reads a client's.
_READS_PARENT: Final = """
import sys
from kvstrata.storage.serving.process_memory import readable
print(readable(int(sys.argv[1]), int(sys.argv[2])))
"""


def checks() -> list[Check]:
    """All of them; none needs a cluster."""
    return [
        Check("machine", "versions", versions),
        Check("machine", "clock", clock),
        Check("machine", "open files", open_files),
        Check("memory", "available", available),
        Check("memory", "sealed memory", sealed_memory),
        Check("memory", "/dev/shm", shared_memory),
        Check("memory", "huge pages", huge_pages),
        Check("memory", "reading other processes", other_processes, CHILD_S + 2),
    ]


# ---------------------------------------------------------------- the machine


def versions() -> Iterator[Row]:
    told = [SOFTWARE, f"Python {platform.python_version()}", f"Linux {platform.release()}"]
    for name in ("grpcio", "protobuf", "numpy", "xxhash"):
        told.append(f"{name} {importlib.metadata.version(name)}")
    if sys.platform == "linux":
        yield Row("machine", "versions", Verdict.OK, ", ".join(told))
    else:
        yield Row("machine", "versions", Verdict.PROBLEM, ", ".join(told), "run kvstrata on Linux")


def clock() -> Iterator[Row]:
    """Leases count on a clock that never goes back; people count on one that is right."""
    seen = [time.monotonic_ns() for _ in range(1000)]
    before, slept = time.monotonic(), 0.02
    time.sleep(slept)
    passed = time.monotonic() - before
    resolution = time.clock_getres(time.CLOCK_MONOTONIC)
    if seen != sorted(seen) or passed < slept / 2:
        advice = "leases cannot be kept: choose another clock source of the kernel"
        yield Row("machine", "clock", Verdict.PROBLEM, f"the monotonic clock: {passed:.3f} s in {slept:g} s", advice)
    elif resolution > 1e-3:
        found = f"the monotonic clock has steps of {resolution * 1e3:g} ms"
        yield Row("machine", "clock", Verdict.WARNING, found, "deadlines are that much coarser")
    else:
        yield Row("machine", "clock", Verdict.OK, f"monotonic, steps of {resolution * 1e9:g} ns")


def open_files() -> Iterator[Row]:
    """Daemons raise the soft limit to the hard one by themselves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} of at most {_limit(hard)} open files"
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES_MIN:
        advice = f"allow {OPEN_FILES_MIN} or more (ulimit -Hn, LimitNOFILE=): a node takes two a slab, one a connection"
        yield Row("machine", "open files", Verdict.PROBLEM if hard < 256 else Verdict.WARNING, found, advice)
    else:
        yield Row("machine", "open files", Verdict.OK, found)


# ---------------------------------------------------------------- memory


def available() -> Iterator[Row]:
    nbytes = memory_available()
    found = f"{format_size(nbytes)} can be had (the machine's, or its control group's if that is less)"
    enough = nbytes > 4 * MEMORY_SPARE_BYTES
    verdict = Verdict.OK if enough else Verdict.WARNING
    yield Row("memory", "available", verdict, found, "" if enough else "a node has little to give here")


def sealed_memory() -> Iterator[Row]:
    """Nodes hand memory to clients that nobody may write, resize or punch holes into."""
    what, old = "sealed memory", "the kernel is too old for it: Linux 5.1 or newer (F_SEAL_FUTURE_WRITE)"
    try:
        fd = os.memfd_create("kvstrata-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        yield Row("memory", what, Verdict.PROBLEM, f"memfd_create: {error.strerror}", "allow it in the sandbox")
        return
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as ours:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            ours[:2] = b"ok"
            with mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ) as theirs:
                shared = theirs[:2] == b"ok"
            yield _sealed(what, shared, _writable(fd))
    except OSError as error:
        yield Row("memory", what, Verdict.PROBLEM, f"sealing: {error.strerror}", old)
    finally:
        os.close(fd)


def _writable(fd: int) -> bool:
    try:
        mmap.mmap(fd, mmap.PAGESIZE).close()
    except PermissionError:
        return False
    return True


def _sealed(what: str, shared: bool, writable: bool) -> Row:
    if shared and not writable:
        return Row("memory", what, Verdict.OK, "shared read-only, and sealed against writes")
    found = "a sealed map can be written" if writable else "a sealed map does not show what was written"
    return Row("memory", what, Verdict.PROBLEM, found, "use --transport tcp on this machine")


def shared_memory() -> Iterator[Row]:
    """Slabs are memfds, which /dev/shm does not bound; engines beside them need it."""
    what, advice = "/dev/shm", "mount a tmpfs on it (docker run --shm-size=8g, or an emptyDir of medium Memory)"
    try:
        mode, room = _SHM.stat().st_mode, os.statvfs(_SHM)
    except OSError as error:
        yield Row("memory", what, Verdict.WARNING, f"{error.strerror}", advice)
        return
    total, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    found = f"{format_size(free)} free of {format_size(total)}, mode {stat.S_IMODE(mode):o}"
    if not os.access(_SHM, os.W_OK | os.X_OK):
        yield Row("memory", what, Verdict.PROBLEM, found, "make it writable for this user (mode 1777)")
    elif total < SHM_BYTES_MIN:
        yield Row("memory", what, Verdict.WARNING, f"{found}: little for an engine", advice)
    else:
        yield Row("memory", what, Verdict.OK, found)


def huge_pages() -> Iterator[Row]:
    what = "huge pages"
    total, free = _number(pages.RESERVED / "nr_hugepages"), pages.reserved_bytes_free() // pages.HUGEPAGE_BYTES
    if not total and not free:
        if pages.transparent_allowed():
            yield Row("memory", what, Verdict.OK, "none reserved; shared memory may ask for transparent ones")
            return
        found = "none reserved, and shared memory gets no transparent ones: needed for storage --hugepages alone"
        yield Row("memory", what, Verdict.NOT_APPLICABLE, found)
        return
    found = f"{free} of {total} of 2 MiB free"
    if not free:
        yield Row(
            "memory", what, Verdict.WARNING, found, "reserve more (/proc/sys/vm/nr_hugepages) before a node starts"
        )
        return
    try:
        fd = os.memfd_create("kvstrata-doctor", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        try:
            os.ftruncate(fd, 2 << 20)
        finally:
            os.close(fd)
        yield Row("memory", what, Verdict.OK, found)
    except OSError as error:
        yield Row("memory", what, Verdict.PROBLEM, f"{found}, and one cannot be had: {error.strerror}", "see dmesg")


def other_processes() -> Iterator[Row]:
    """A node copies a client's ordinary memory by process_vm_readv; where it may not, bytes are staged."""
    what = "reading other processes"
    scope = _PTRACE.read_text().strip() if _PTRACE.exists() else "none"
    probe = ctypes.create_string_buffer(b"kvstrata")
    command = [sys.executable, "-c", _READS_PARENT, str(os.getpid()), str(ctypes.addressof(probe))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S, check=False)
    found = f"process_vm_readv {'works' if done.stdout.strip() == 'True' else 'is refused'}, ptrace_scope {scope}"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield Row("memory", what, Verdict.WARNING, f"could not be tried: {last}", "try again on a quiet machine")
    elif done.stdout.strip() == "True":
        yield Row("memory", what, Verdict.OK, found)
    else:
        advice = (
            "stores over shm take a copy more: use memory of client.allocate(), or kernel.yama.ptrace_scope=0, or "
            "CAP_SYS_PTRACE for the node; --rdma cma needs one of the latter two"
        )
        yield Row("memory", what, Verdict.WARNING, found, advice)


# ---------------------------------------------------------------- small things


def _number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else str(value)
