"""Slabs on huge pages, as far as this machine has any; and which kind is chosen where."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.storage import config as storage_config
from kvstrata.storage import huge_pages
from kvstrata.storage.arena import dram_arena
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.huge_pages import (
    HUGEPAGE_BYTES,
    Pages,
    huge_pages_for,
    reserved_bytes_free,
    transparent_allowed,
    transparent_bytes,
)
from kvstrata.storage.slab import Slab

BYTES = 2 * HUGEPAGE_BYTES
HAVE_RESERVED = reserved_bytes_free() >= 2 * BYTES
HAVE_TRANSPARENT = transparent_allowed()


class Kernel:
    """What a kernel says of huge pages, in files of a test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "hugepages-2048kB").mkdir()

    def reserved(self, *, free: int = 0, promised: int = 0, overcommit: int = 0, surplus: int = 0) -> None:
        numbers = {"free": free, "resv": promised, "nr_overcommit": overcommit, "surplus": surplus}
        for name, number in numbers.items():
            (self.folder / f"{name}_hugepages").write_text(f"{number}\n")

    def transparent(self, everywhere: str, this_size: str = "") -> None:
        words = "always within_size advise never deny force inherit"
        (self.folder / "shmem_enabled").write_text(words.replace(everywhere, f"[{everywhere}]"))
        if this_size:
            own = self.folder / "hugepages-2048kB" / "shmem_enabled"
            own.write_text(words.replace(this_size, f"[{this_size}]"))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(huge_pages, "RESERVED", tmp_path)
    monkeypatch.setattr(huge_pages, "TRANSPARENT", tmp_path)
    return Kernel(tmp_path)


def test_nothing_is_there_where_the_kernel_says_nothing(kernel: Kernel) -> None:
    assert reserved_bytes_free() == 0 and not transparent_allowed()


def test_what_others_were_promised_is_not_free(kernel: Kernel) -> None:
    kernel.reserved(free=10, promised=4)
    assert reserved_bytes_free() == 6 * HUGEPAGE_BYTES
    kernel.reserved(free=10, promised=4, overcommit=5, surplus=2)
    assert reserved_bytes_free() == 9 * HUGEPAGE_BYTES
    kernel.reserved(free=1, promised=4)
    assert reserved_bytes_free() == 0


@pytest.mark.parametrize(
    ("everywhere", "this_size", "allowed"),
    [
        ("never", "", False),
        ("advise", "", True),
        ("within_size", "inherit", True),
        ("never", "inherit", False),
        ("never", "advise", True),
        ("advise", "never", False),
        ("deny", "always", False),
        ("force", "never", True),
    ],
)
def test_shared_memory_may_ask(kernel: Kernel, everywhere: str, this_size: str, allowed: bool) -> None:
    kernel.transparent(everywhere, this_size)
    assert transparent_allowed() is allowed


def test_reserved_ones_come_first_and_only_when_they_suffice(kernel: Kernel) -> None:
    kernel.reserved(free=2)
    kernel.transparent("advise")
    assert huge_pages_for(2 * HUGEPAGE_BYTES) is Pages.RESERVED
    assert huge_pages_for(3 * HUGEPAGE_BYTES) is Pages.TRANSPARENT


def test_without_any_both_settings_are_named(kernel: Kernel) -> None:
    kernel.reserved(free=1)
    kernel.transparent("never")
    with pytest.raises(ConfigError, match=r"reserve 8 pages.*vm\.nr_hugepages.*shmem_enabled"):
        dram_arena(8 * HUGEPAGE_BYTES, 2 * HUGEPAGE_BYTES, hugepages=True)


def test_only_reserved_ones_are_apart_from_what_is_available(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_config, "memory_available", lambda: 0)
    asked = StorageConfig(("127.0.0.1:1",), "127.0.0.1:0", "127.0.0.1:0", kernel.folder, 4 * BYTES, hugepages=True)
    kernel.reserved(free=4 * BYTES // HUGEPAGE_BYTES)
    asked.validated()
    kernel.reserved()
    kernel.transparent("advise")
    with pytest.raises(ConfigError, match="smaller --dram"):
        asked.validated()
    with pytest.raises(ConfigError, match="smaller --dram"):
        replace(asked, hugepages=False).validated()


# ---------------------------------------------------------------- on this machine


def use(slab: Slab) -> bytes:
    """What a client reads of what the node has written."""
    slab.view[-4:] = b"last"
    reader = mmap.mmap(slab.share_fd, slab.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    try:
        return reader[-4:]
    finally:
        reader.close()


@pytest.mark.skipif(not HAVE_RESERVED, reason="needs reserved huge pages: sysctl vm.nr_hugepages=4")
def test_slabs_on_reserved_pages() -> None:
    before = reserved_bytes_free()
    arena = dram_arena(2 * BYTES, BYTES, hugepages=True)
    assert reserved_bytes_free() == before - 2 * BYTES
    assert [use(slab) for slab in arena.slabs] == [b"last", b"last"]
    arena.close()
    assert reserved_bytes_free() == before


@pytest.mark.skipif(not HAVE_TRANSPARENT, reason="needs shmem_enabled of transparent_hugepage to be advise")
def test_slabs_on_transparent_pages() -> None:
    slabs = [Slab(index, BYTES, pages=Pages.TRANSPARENT) for index in range(2)]
    small = Slab(2, BYTES)
    assert transparent_bytes({slab.address for slab in slabs}) > 0  # all of it, unless memory is in fragments
    assert [use(slab) for slab in slabs] == [b"last", b"last"]
    for slab in (*slabs, small):
        slab.close()


def test_small_pages_are_not_counted_as_huge() -> None:
    with_small = Slab(0, BYTES)
    assert transparent_bytes(set()) == 0
    if not HAVE_TRANSPARENT:
        assert transparent_bytes({with_small.address}) == 0
    with_small.close()
