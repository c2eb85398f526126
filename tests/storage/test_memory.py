"""Slabs, their seals, the arena's bookkeeping, and clients' memory as the node reads it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proto.errors import ConfigError, InvalidArgument, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.storage.arena import dram_arena, slab_bytes_for
from kvstrata.storage.records import Block, NamespaceEntry, Shelf
from kvstrata.storage.sealed_memory import SEALS
from kvstrata.storage.serving import process_memory
from kvstrata.storage.serving.pieces import placed, read_few
from kvstrata.storage.serving.regions import RegionAsk, RegionBook, read_descriptors, spread
from kvstrata.storage.slab import Slab, slot_size, slots_of

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
MIB = 1 << 20


@pytest.fixture
def slab() -> Iterator[Slab]:
    one = Slab(0, 64 << 10)
    yield one
    one.close()


# ---------------------------------------------------------------- hostile clients


def test_a_client_can_neither_write_nor_resize_nor_punch(slab: Slab) -> None:
    """FAULTS "hostile client": each of these kills the node or zeroes blocks on an unsealed memfd."""
    slab.shape(4096)
    slab.view[slab.offset(0) : slab.offset(0) + 4] = b"good"
    libc = ctypes.CDLL(None, use_errno=True)
    for fd in (slab.fd, slab.share_fd):
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
        for attack in (
            lambda fd=fd: os.ftruncate(fd, 0),
            lambda fd=fd: os.ftruncate(fd, 1 << 30),
            lambda fd=fd: os.pwrite(fd, b"evil", slab.offset(0)),
            lambda fd=fd: mmap.mmap(fd, slab.nbytes, flags=mmap.MAP_SHARED),
            lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(OSError) as refused:
                attack()
            assert refused.value.errno in (errno.EPERM, errno.EINVAL, errno.EBADF, errno.EACCES)
        hole = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        assert libc.fallocate(fd, hole, ctypes.c_long(0), ctypes.c_long(slab.nbytes)) == -1
    reader = mmap.mmap(slab.share_fd, slab.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = np.frombuffer(reader, np.uint8).ctypes.data
    assert libc.mprotect(address, slab.nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    slab.view[slab.offset(0) + 4 : slab.offset(0) + 8] = b"more"
    assert reader[slab.offset(0) : slab.offset(0) + 8] == b"goodmore", "the node still writes, the client sees it"


# ---------------------------------------------------------------- arena


@given(block_bytes=st.integers(1, 1 << 22), slab_bytes=st.integers(16, 1 << 12).map(lambda pages: pages * 4096))
def test_slots_fit_beside_their_table(block_bytes: int, slab_bytes: int) -> None:
    size = slot_size(block_bytes)
    assert block_bytes <= size < block_bytes + 4096 and size % 64 == 0
    count = slots_of(slab_bytes, size)
    table = -(-count * 8 // 4096) * 4096
    assert table + count * size <= slab_bytes
    one_more = -(-(count + 1) * 8 // 4096) * 4096 + (count + 1) * size
    assert one_more > slab_bytes, "room for another slot is wasted"


def test_slab_sizes() -> None:
    assert slab_bytes_for(1 << 30, None) == 128 * MIB
    assert slab_bytes_for(64 << 30, None) == 256 * MIB
    assert slab_bytes_for(16 * MIB, None) == 4 * MIB
    assert slab_bytes_for(5 * MIB, None) == 5 * MIB // 2
    for dram, wanted in ((64 << 10, None), (8 * MIB, 5 * MIB), (8 * MIB, 4096)):
        with pytest.raises(ConfigError):
            slab_bytes_for(dram, wanted)


def test_hugepages_that_are_not_there_say_what_to_do() -> None:
    try:
        dram_arena(1 << 40, 1 << 39, hugepages=True)
    except ConfigError as error:
        assert "nr_hugepages" in str(error)
    else:
        pytest.fail("half a tebibyte of huge pages")


Take = tuple[int, int]


@settings(deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from([64, 1024, 4096, 20480]), st.integers(-20, 40)), max_size=30))
def test_slots_are_given_once_and_come_back(steps: list[Take]) -> None:
    arena = dram_arena(4 * (64 << 10), 64 << 10)
    shelf = Shelf(NamespaceEntry(1, Namespace("m", 1, 16)), "")
    taken: dict[int, list[Block]] = {}
    for size, count in steps:
        mine = taken.setdefault(size, [])
        for _ in range(min(-count, len(mine))):
            block = mine.pop()
            arena.free(block.slab, block.slot)
        if count > 0:
            for slab, slot in [(slab, slot) for slab, slots in arena.allocate(size, count) for slot in slots]:
                assert slab.slot_bytes == size and slot not in slab.blocks
                block = Block(shelf, b"", slab, slot, arena.next_generation(), 0)
                slab.generations[slot] = block.generation
                slab.blocks[slot] = block
                arena.bytes_used += size
                mine.append(block)
        arena.check()
    assert arena.bytes_used == sum(size * len(blocks) for size, blocks in taken.items()) <= arena.bytes_total
    arena.close()


def test_a_batch_lies_in_one_ascending_run() -> None:
    arena = dram_arena(2 * MIB, MIB)
    first = arena.allocate(4096, 100)
    assert [slots for _, slots in first] == [list(range(100))]
    second = arena.allocate(4096, 200)
    slots = arena.slots_in_a_slab(4096)
    assert [slots for _, slots in second] == [list(range(100, slots)), list(range(300 - slots))]
    assert second[0][0] is first[0][0] and second[1][0] is not first[0][0]
    arena.close()


# ---------------------------------------------------------------- descriptors


def packed(rows: list[tuple[int, int]]) -> bytes:
    return np.array(rows, np.int64).tobytes()


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 50), (50, 49)],
        [(0, 100), (0, 0)],
        [(0, 101), (0, -1)],
        [(-1, 50), (0, 50)],
        [(951, 50), (0, 50)],
        [(2**63 - 1, 50), (0, 50)],
        [(-(2**63), 50), (0, 50)],
        [(0, 2**63 - 1), (0, -(2**63) + 101)],
        [(0, 2**62), (0, 2**62)],
    ],
)
def test_descriptors_that_leave_the_region_or_the_block_are_refused(rows: list[tuple[int, int]]) -> None:
    for read in (read_descriptors, read_few):
        with pytest.raises(InvalidArgument):
            read(packed(rows), 1, 2, 100, 1000)


def test_descriptor_counts_are_checked_before_anything_else() -> None:
    for blocks, pieces, data in ((1, 0, b""), (1, 1 << 20, b""), (2, 1, packed([(0, 100)])), (1, 1, b"x" * 15)):
        for read in (read_descriptors, read_few):
            with pytest.raises(InvalidArgument):
                read(data, blocks, pieces, 100, 1000)
    assert read_descriptors(packed([(900, 60), (0, 40)]), 1, 2, 100, 1000).shape == (1, 2, 2)
    assert read_descriptors(b"", 0, 1, 100, 1000).shape == (0, 1, 2)
    assert len(read_few(packed([(900, 60), (0, 40)]), 1, 2, 100, 1000)) == 1
    assert len(read_few(b"", 0, 1, 100, 1000)) == 0


@settings(deadline=None)
@given(data=st.data())
def test_a_few_pieces_are_taken_refused_and_placed_as_many_are(data: st.DataObject) -> None:
    blocks, pieces = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    piece = st.tuples(st.integers(-1, 290), st.integers(0, 64))
    whole = st.integers(0, 4).map(lambda at: [(at * 64 + 64 * i // pieces, 64 // pieces) for i in range(pieces)])
    rows = [row for _ in range(blocks) for row in data.draw(whole | st.lists(piece, min_size=pieces, max_size=pieces))]
    block_bytes, slots = 64 // pieces * pieces, data.draw(st.lists(st.integers(0, 9), min_size=blocks, max_size=blocks))
    try:
        many = read_descriptors(packed(rows), blocks, pieces, block_bytes, 300)
    except InvalidArgument:
        with pytest.raises(InvalidArgument):
            read_few(packed(rows), blocks, pieces, block_bytes, 300)
        return
    few = read_few(packed(rows), blocks, pieces, block_bytes, 300)
    slab = Slab(0, 64 << 10)
    slab.shape(64)
    shelf = Shelf(NamespaceEntry(1, Namespace("m", block_bytes, 16)), "")
    held = [Block(shelf, b"", slab, slot, 0, 0) for slot in slots]
    for chosen in (list(range(blocks)), data.draw(st.lists(st.integers(0, blocks - 1), unique=True).map(sorted))):
        mine = [held[at] for at in chosen]
        told = spread(mine, many[chosen])
        expected = [(to + i, at + i) for to, at, count in zip(*told, strict=True) for i in range(count)]
        got = list(placed(mine, few[chosen]))
        assert [(to + i, at + i) for to, at, count in got for i in range(count)] == expected
        assert all(a[0] + a[2] != b[0] or a[1] + a[2] != b[1] for a, b in pairwise(got)), "neighbours are one"
    slab.close()


# ---------------------------------------------------------------- regions


def registered(memfd: int, nbytes: int) -> str:
    return RegionBook().register(b"s" * 16, RegionAsk(1, 4096, nbytes, 0, -1), memfd)


def test_only_memory_that_cannot_shrink_is_mapped() -> None:
    fd = os.memfd_create("client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    assert registered(fd, 8192) == "", "its owner could cut it off under us: SIGBUS"
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert registered(fd, 8192) == "map"
    assert registered(fd, 8193) == "", "longer than it is"
    os.close(fd)
    read, written = os.pipe()
    assert registered(read, 4096) == "", "not a memfd"
    os.close(read)
    os.close(written)


def test_regions_end_with_their_session() -> None:
    book = RegionBook()
    fd = os.memfd_create("client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    for number in (1, 2):
        book.register(b"a" * 16, RegionAsk(number, 4096, 4096, 0, -1), fd)
    book.unregister(b"a" * 16, 1)
    assert len(book) == 1
    with pytest.raises(InvalidArgument, match="region 2"):
        book.find(b"b" * 16, 2)
    book.session_ended(b"a" * 16)
    assert len(book) == 0
    os.close(fd)


VICTIM = """
import ctypes, sys, numpy as np
data = np.random.default_rng(7).integers(0, 256, 9 << 20, dtype=np.uint8)
print(data.ctypes.data, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def victim() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """(a process, where its 9 MiB of seeded bytes are)."""
    process = subprocess.Popen([sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_another_process_is_read_piece_by_piece(victim: tuple[subprocess.Popen[str], int]) -> None:
    """More pieces than one call takes, more bytes than one thread takes, and runs that merge."""
    process, address = victim
    expected = np.random.default_rng(7).integers(0, 256, 9 << 20, dtype=np.uint8)
    for pieces in (1, 7, 3000):
        cuts = np.linspace(0, 9 << 20, pieces + 1).astype(np.int64)
        order = np.random.default_rng(pieces).permutation(pieces)
        source, length = cuts[:-1][order], np.diff(cuts)[order]
        target = np.zeros(9 << 20, np.uint8)
        process_memory.read(process.pid, source + target.ctypes.data, source + address, length)
        assert (target == expected).all()


def test_memory_that_is_not_there_is_refused_and_a_dead_process_is_unavailable(
    victim: tuple[subprocess.Popen[str], int],
) -> None:
    process, address = victim
    target = np.zeros(9 << 20, np.uint8)

    def read(source: int, nbytes: int) -> None:
        process_memory.read(
            process.pid, np.array([target.ctypes.data]), np.array([source], np.int64), np.array([nbytes], np.int64)
        )

    for nbytes in (4096, 9 << 20):
        with pytest.raises(InvalidArgument, match="cannot be read"):
            read(4096, nbytes)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        process_memory.read_few(process.pid, 4096, [(target.ctypes.data, 0, 4096)])
    beyond = [(target.ctypes.data, 0, 4096), (target.ctypes.data + 4096, 1 << 46, 4096)]
    with pytest.raises(InvalidArgument, match="cannot be read"):
        process_memory.read_few(process.pid, address, beyond)
    assert target[:4096].any(), "what was there before it was read"
    assert process_memory.readable(process.pid, address) and not process_memory.readable(process.pid, 4096)
    process.kill()
    process.wait()
    with pytest.raises(Unavailable):
        read(address, 4096)


def test_a_process_that_died_while_it_was_read_is_not_believed(victim: tuple[subprocess.Popen[str], int]) -> None:
    """Its number may be another's by then, and the bytes with it."""
    process, address = victim
    pidfd = os.pidfd_open(process.pid)
    book = RegionBook()
    assert book.register(b"s" * 16, RegionAsk(1, address, 9 << 20, process.pid, pidfd), -1) == "vm"
    os.close(pidfd)
    region = book.find(b"s" * 16, 1)
    target = np.zeros(4096, np.uint8)
    where = (np.array([target.ctypes.data]), np.array([0], np.int64), np.array([4096], np.int64))
    region.pull(*where)
    assert target.any()
    target[:] = 0
    region.pull_few([(target.ctypes.data, 0, 4096)])
    assert target.any()
    process.kill()
    process.wait()
    with pytest.raises(Unavailable):
        region.pull(*where)
    with pytest.raises(Unavailable):
        region.pull_few([(target.ctypes.data, 0, 4096)])


def test_short_reads_go_on_where_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may stop anywhere, also inside a piece."""
    source = np.random.default_rng(3).integers(0, 256, 100_000, dtype=np.uint8)
    target = np.zeros_like(source)
    real: Callable[..., int] = process_memory._readv

    def short(pid: int, local: int, count: int, remote: int, remotes: int, flags: int) -> int:
        iovec = (ctypes.c_uint64 * 2).from_address(remote)
        mine = (ctypes.c_uint64 * 2).from_address(local)
        keep = iovec[1]
        iovec[1] = mine[1] = min(keep, 777)
        got = real(pid, local, 1, remote, 1, flags)
        iovec[1] = mine[1] = keep
        return got

    monkeypatch.setattr(process_memory, "_readv", short)
    cuts = np.array([0, 1, 5000, 5777, 99_000, 100_000])
    start, length = cuts[:-1][::-1].copy(), np.diff(cuts)[::-1].copy()
    process_memory.read(os.getpid(), start + target.ctypes.data, start + source.ctypes.data, length)
    assert (target == source).all()
    target[:] = 0
    rows = [(target.ctypes.data + at, at, count) for at, count in zip(start.tolist(), length.tolist(), strict=True)]
    process_memory.read_few(os.getpid(), source.ctypes.data, rows)
    assert (target == source).all()
