"""Huge pages for slabs: which kind this machine has, and how much of a mapping came to lie on them."""

from __future__ import annotations

import mmap
import re
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Final

from kvstrata.proto.errors import ConfigError

HUGEPAGE_BYTES: Final = 2 << 20
RESERVED: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
TRANSPARENT: Final = Path("/sys/kernel/mm/transparent_hugepage")
#: Linux 5.14: fault all pages in for writing, and say so when that fails.
MADV_POPULATE_WRITE: Final = 23
_ALLOWED: Final = frozenset({"always", "within_size", "advise", "force"})
_MAPPING: Final = re.compile(r"([0-9a-f]+)-[0-9a-f]+ ")


class Pages(Enum):
    """What memory lies on: 4 KiB pages, huge pages that were set aside, or huge pages that the kernel finds."""

    SMALL = "small"
    RESERVED = "reserved"
    TRANSPARENT = "transparent"


def reserved_bytes_free() -> int:
    """Bytes of reserved huge pages that nobody has, those that the kernel may add included; 0 where there are none."""
    free, promised, more, added = (
        _number(RESERVED / f"{name}_hugepages") for name in ("free", "resv", "nr_overcommit", "surplus")
    )
    return max(0, free - promised + max(0, more - added)) * HUGEPAGE_BYTES


def transparent_allowed() -> bool:
    """Whether shared memory that asks for huge pages (MADV_HUGEPAGE) may have them."""
    everywhere = _chosen(TRANSPARENT / "shmem_enabled")
    if everywhere in ("deny", "force"):
        return everywhere == "force"
    this_size = _chosen(TRANSPARENT / "hugepages-2048kB" / "shmem_enabled")  # Linux 6.11
    return (everywhere if this_size in ("", "inherit") else this_size) in _ALLOWED


def huge_pages_for(nbytes: int) -> Pages:
    """Reserved ones where they suffice, else transparent ones. Raises :class:`ConfigError` where neither are there."""
    free = reserved_bytes_free()
    if free >= nbytes:
        return Pages.RESERVED
    if transparent_allowed():
        return Pages.TRANSPARENT
    raise ConfigError(
        f"--hugepages: {nbytes >> 20} MiB are needed and {free >> 20} MiB of reserved huge pages are free: reserve "
        f"{nbytes // HUGEPAGE_BYTES} pages (sysctl vm.nr_hugepages), or let shared memory ask for transparent ones "
        f"(echo advise > {TRANSPARENT}/shmem_enabled), or start without --hugepages"
    )


def populate_transparent(mapping: mmap.mmap) -> None:
    """Ask for huge pages, then fault everything in. Raises :class:`OSError` where the memory is not to be had."""
    mapping.madvise(mmap.MADV_HUGEPAGE)
    mapping.madvise(MADV_POPULATE_WRITE)


def transparent_bytes(addresses: Collection[int]) -> int:
    """How much of this process' mappings that begin at ``addresses`` is mapped by transparent huge pages."""
    found, counted = 0, False
    with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            if begin := _MAPPING.match(line):
                counted = int(begin[1], 16) in addresses
            elif counted and line.startswith("ShmemPmdMapped:"):
                found += int(line.split()[1]) << 10
    return found


def _chosen(path: Path) -> str:
    """The value in brackets; "" where the kernel has no such setting."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
