"""The kernels move every byte of every piece and no other, whatever the pieces: their source on this CPU."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.transfer.gpu import kernels
from kvstrata.transfer.gpu.kernels import CHUNK_BYTES, GATHER, GRID_MAX, SCATTER, SOURCE, grid_of, launch_table
from tests.transfer.gpu.cpu_kernels import CpuKernels

GUARD = 64


lengths = st.one_of(
    st.integers(1, 70),
    st.sampled_from([16, 256, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17]),
)


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.tuples(lengths, st.integers(0, 40)), min_size=1, max_size=12),
    shift=st.integers(0, 15),
    threads=st.sampled_from([1, 3, 32, 256]),
    grid=st.integers(1, 5),
    seed=st.integers(0, 1 << 16),
)
def test_every_byte_of_every_piece(
    cpu: CpuKernels, pieces: list[tuple[int, int]], shift: int, threads: int, grid: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    length = np.array([size for size, _ in pieces], np.int64)
    start = np.cumsum(length + [gap for _, gap in pieces]) - length + GUARD
    order = draw.permutation(len(pieces))
    start, length = start[order], length[order]
    device = draw.integers(0, 256, int((start + length).max()) + GUARD, np.uint8)
    host = draw.integers(0, 256, int(length.sum()) + 2 * GUARD + 16, np.uint8)
    packed = host[GUARD + shift :]
    table, chunks = launch_table(start + device.ctypes.data, length)
    device_before, host_before = device.copy(), host.copy()

    cpu.run("gather", table, chunks, packed.ctypes.data, grid, threads)
    image = np.concatenate([device[a : a + n] for a, n in zip(start, length, strict=True)])
    host_before[GUARD + shift :][: len(image)] = image
    assert np.array_equal(host, host_before) and np.array_equal(device, device_before)

    packed[: len(image)] = other = draw.integers(0, 256, len(image), np.uint8)
    host_before = host.copy()
    cpu.run("scatter", table, chunks, packed.ctypes.data, grid, threads)
    ends = np.cumsum(length)
    for a, n, end in zip(start, length, ends, strict=True):
        device_before[a : a + n] = other[end - n : end]
    assert np.array_equal(device, device_before) and np.array_equal(host, host_before)


def sparse(nbytes: int) -> mmap.mmap:
    """Address space; only what is touched takes memory."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)


@pytest.mark.parametrize("kernel", ["gather", "scatter"])
def test_offsets_beyond_32_bits(cpu: CpuKernels, kernel: str) -> None:
    """One piece longer than 4 GiB, of which one chunk is moved; and its packed bytes lie beyond 4 GiB too."""
    nbytes = (5 << 30) + 8 * CHUNK_BYTES
    device, host = sparse(nbytes), sparse(2 * nbytes)
    device_at, host_at = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (device, host))
    table, chunks = launch_table(np.array([device_at]), np.array([nbytes]))
    table[2, 0] = (4 << 30) + 16
    chunk = ((5 << 30) + CHUNK_BYTES) // CHUNK_BYTES
    at, packed_at = chunk * CHUNK_BYTES, chunk * CHUNK_BYTES + (4 << 30) + 16
    assert chunks == nbytes // CHUNK_BYTES and at > 1 << 32
    ctypes.memset(device_at + at, 5, CHUNK_BYTES)
    ctypes.memset(host_at + packed_at, 6, CHUNK_BYTES)
    cpu.run(kernel, table, chunks, host_at, chunks, 32, range(chunk, chunk + 1))
    expected = 5 if kernel == "gather" else 6
    for memory in (device_at + at, host_at + packed_at):
        assert ctypes.string_at(memory, CHUNK_BYTES) == bytes([expected]) * CHUNK_BYTES
        assert ctypes.string_at(memory - 64, 64) == ctypes.string_at(memory + CHUNK_BYTES, 64) == bytes(64)


def test_the_table_counts_chunks() -> None:
    length = np.array([1, CHUNK_BYTES, CHUNK_BYTES + 1, 7])
    table, chunks = launch_table(np.arange(4) * (1 << 40), length)
    assert chunks == 5 and table[3].tolist() == [0, 1, 2, 4]
    assert table[2].tolist() == [0, 1, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 2]
    assert table.dtype == np.int64 and (grid_of(3), grid_of(10**6)) == (3, GRID_MAX)


def test_the_source_has_both_kernels() -> None:
    for name in (GATHER, SCATTER):
        assert f'extern "C" __global__ void {name}(' in SOURCE
    assert kernels.CHUNK_BYTES % 16 == 0, "chunks begin where their piece's alignment allows words"


def test_nvcc_compiles_the_source(tmp_path: Path) -> None:
    """For a GPU, where the tool is: it needs no GPU, and shows nothing but that the source is CUDA's language."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    (tmp_path / "kernels.cu").write_text(SOURCE)
    done = subprocess.run(
        [nvcc, "-std=c++17", "--ptx", "-o", str(tmp_path / "kernels.ptx"), str(tmp_path / "kernels.cu")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    ptx = (tmp_path / "kernels.ptx").read_text()
    assert "ld.global.v4" in ptx or "ld.v4" in ptx, "words of 16 bytes"
