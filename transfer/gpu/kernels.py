"""The kernels: one launch moves all pieces of a gather or a scatter between device memory and pinned memory.

::

    table, i64[4, pieces]        piece 0            piece 1      piece 2
      address                    +-----------+      +----+       +-------+      in device memory
      bytes                      | c0 | c1 |c2      | c3 |       | c4 |c5
      packed offset                   |                |
      first chunk (0, 3, 4)           v                v
                                 [ c0 | c1 |c2| c3 | c4 |c5 ]                   packed, in pinned memory

The work is chunks of :data:`CHUNK_BYTES` at most; thread blocks take them in turn and find their piece by binary
search, so that a long piece is shared by many blocks and short ones cost no launch of their own. A thread moves 16
bytes at a time where both sides can be aligned to that, else 4, else 1. Few blocks are enough for the bus, and leave
the processors to the engine. Nothing is shared between threads: the same text is compiled for a CPU in the tests.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstrata.transfer.gpu.runtime import Int64s

CHUNK_BYTES: Final = 16 << 10
THREADS: Final = 256
GRID_MAX: Final = 64

GATHER: Final = "kvstrata_gather"
SCATTER: Final = "kvstrata_scatter"

SOURCE: Final = (
    f"#define CHUNK_BYTES {CHUNK_BYTES}LL\n"
    r"""
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned char u8;

struct Run { u8* piece; i64 offset; i64 bytes; };

// The part of a piece that a chunk is.
static __device__ Run run_of(const i64* table, i64 pieces, i64 chunk) {
  const i64* first = table + 3 * pieces;
  i64 low = 0, high = pieces - 1;  // first[low] <= chunk
  while (low < high) {
    i64 middle = low + (high - low + 1) / 2;
    if (first[middle] <= chunk) low = middle;
    else high = middle - 1;
  }
  i64 begin = (chunk - first[low]) * CHUNK_BYTES;
  i64 left = table[pieces + low] - begin;
  Run run;
  run.piece = (u8*)(u64)table[low] + begin;
  run.offset = table[2 * pieces + low] + begin;
  run.bytes = left < CHUNK_BYTES ? left : CHUNK_BYTES;
  return run;
}

// Four at a time: reads from pinned memory take microseconds, so several must be under way.
template <typename Word>
static __device__ void copy_words(u8* to, const u8* from, i64 words) {
  Word* target = (Word*)to;
  const Word* source = (const Word*)from;
  i64 step = blockDim.x;
  i64 at = threadIdx.x;
  for (; at + 3 * step < words; at += 4 * step) {
    Word a = source[at], b = source[at + step], c = source[at + 2 * step], d = source[at + 3 * step];
    target[at] = a;
    target[at + step] = b;
    target[at + 2 * step] = c;
    target[at + 3 * step] = d;
  }
  for (; at < words; at += step) target[at] = source[at];
}

// Bytes up to the first aligned word, words, and what is left.
template <typename Word>
static __device__ void copy_as(u8* to, const u8* from, i64 bytes) {
  const i64 size = sizeof(Word);
  i64 head = (size - (i64)((u64)to & (size - 1))) & (size - 1);
  if (head > bytes) head = bytes;
  i64 words = (bytes - head) / size;
  copy_words<u8>(to, from, head);
  copy_words<Word>(to + head, from + head, words);
  i64 done = head + words * size;
  copy_words<u8>(to + done, from + done, bytes - done);
}

static __device__ void copy_run(u8* to, const u8* from, i64 bytes) {
  u64 apart = (u64)to ^ (u64)from;
  if ((apart & 15) == 0) copy_as<uint4>(to, from, bytes);
  else if ((apart & 3) == 0) copy_as<unsigned int>(to, from, bytes);
  else copy_words<u8>(to, from, bytes);
}

extern "C" __global__ void kvstrata_gather(const i64* table, i64 pieces, i64 chunks, u8* packed) {
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    Run run = run_of(table, pieces, chunk);
    copy_run(packed + run.offset, run.piece, run.bytes);
  }
}

extern "C" __global__ void kvstrata_scatter(const i64* table, i64 pieces, i64 chunks, u8* packed) {
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    Run run = run_of(table, pieces, chunk);
    copy_run(run.piece, packed + run.offset, run.bytes);
  }
}
"""
)


def launch_table(address: Int64s, length: Int64s) -> tuple[Int64s, int]:
    """(table i64[4, n], chunks) of pieces i64[n], each of at least one byte, packed in order."""
    chunks = (length + (CHUNK_BYTES - 1)) // CHUNK_BYTES
    table = np.stack([address, length, np.cumsum(length) - length, np.cumsum(chunks) - chunks])
    return table, int(chunks.sum())


def grid_of(chunks: int) -> int:
    """Thread blocks for so many chunks."""
    return min(chunks, GRID_MAX)
