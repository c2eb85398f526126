"""The kernels' very source, compiled for this CPU: a shim stands for CUDA's words and loops over grid and threads.

Aligned accesses are checked by the compiler's sanitizer, since a GPU faults on them: a misaligned one traps.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstrata.transfer.gpu.kernels import SOURCE

_BEFORE = """
#define __global__
#define __device__
struct Index { unsigned int x; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
static Index blockIdx, gridDim, threadIdx, blockDim;
"""

#: Threads run from the last to the first: what only works in order shows.
_AFTER = """
typedef void (*Kernel)(const i64*, i64, i64, u8*);
static void run(Kernel kernel, const i64* table, i64 pieces, i64 chunks, u8* packed,
                unsigned grid, unsigned first, unsigned stop, unsigned threads) {
  gridDim.x = grid;
  blockDim.x = threads;
  for (unsigned block = stop; block-- > first;)
    for (unsigned thread = threads; thread-- > 0;) {
      blockIdx.x = block;
      threadIdx.x = thread;
      kernel(table, pieces, chunks, packed);
    }
}
extern "C" void run_gather(const i64* table, i64 pieces, i64 chunks, u8* packed,
                           unsigned grid, unsigned first, unsigned stop, unsigned threads) {
  run(kvstrata_gather, table, pieces, chunks, packed, grid, first, stop, threads);
}
extern "C" void run_scatter(const i64* table, i64 pieces, i64 chunks, u8* packed,
                            unsigned grid, unsigned first, unsigned stop, unsigned threads) {
  run(kvstrata_scatter, table, pieces, chunks, packed, grid, first, stop, threads);
}
"""


def compiler() -> str | None:
    """The C++ compiler of this machine, or None."""
    return next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None)


@dataclass(frozen=True)
class CpuKernels:
    """The compiled library."""

    library: ctypes.CDLL

    def run(
        self,
        kernel: str,
        table: npt.NDArray[np.int64],
        chunks: int,
        packed: int,
        grid: int,
        threads: int,
        blocks: range | None = None,
    ) -> None:
        """Run ``blocks`` (all, without) of a ``grid``. ``kernel``: "gather" or "scatter"; ``packed``: an address."""
        assert table.dtype == np.int64 and table.flags.c_contiguous and table.shape[0] == 4
        which = range(grid) if blocks is None else blocks
        function = self.library[f"run_{kernel}"]
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_void_p] + [
            ctypes.c_uint
        ] * 4
        function(table.ctypes.data, table.shape[1], chunks, packed, grid, which.start, which.stop, threads)


def compiled(folder: Path, cxx: str) -> CpuKernels:
    """Compiles into ``folder``."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(_BEFORE + SOURCE + _AFTER)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    checks = ["-fsanitize=alignment,signed-integer-overflow,shift", "-fsanitize-undefined-trap-on-error"]
    if Path(cxx).name.startswith("clang"):
        checks = [checks[0], "-fsanitize-trap=all"]
    subprocess.run([cxx, *flags, *checks, str(source), "-o", str(library)], check=True, timeout=120)
    return CpuKernels(ctypes.CDLL(str(library)))
