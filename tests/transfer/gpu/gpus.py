"""Whether this machine has a GPU."""

from __future__ import annotations

from typing import Any

import pytest


def gpu_or_skip() -> Any:
    """cupy, with a device that it can use; skips and says why else."""
    cupy = pytest.importorskip("cupy")
    try:
        if cupy.cuda.runtime.getDeviceCount():
            return cupy
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA device: {error}")
    pytest.skip("no CUDA device")
