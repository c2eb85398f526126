"""Checks of GPUs: what Python sees of them, and whether an RDMA device can reach their memory."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstrata.cli.doctor.rows import Check, Row, Verdict

CHILD_S: Final = 30.0
#: Since which NVIDIA's open kernel modules can hand memory of a GPU to an RDMA device by themselves.
DMABUF_LINUX: Final = (5, 12)
_GPUS: Final = Path("/proc/driver/nvidia/gpus")
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_DEVICE_FILES: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
_PEERMEM: Final = Path("/sys/module/nvidia_peermem")
_INFINIBAND: Final = Path("/sys/class/infiniband")

#: What each of the two sees, as JSON: its version and how many, or why none.
_COUNTS: Final = """
import json
def cupy():
    import cupy
    return cupy.__version__, cupy.cuda.runtime.getDeviceCount()
def torch():
    import torch
    return torch.__version__, torch.cuda.device_count()
told = {}
for count in (cupy, torch):
    try:
        told[count.__name__] = count()
    except Exception as error:
        told[count.__name__] = (str(error).splitlines() or [type(error).__name__])[0]
print(json.dumps(told))
"""


def checks() -> list[Check]:
    return [
        Check("devices", "GPU", gpus, CHILD_S + 2),
        Check("devices", "GPU memory by RDMA", reached_by_rdma),
    ]


def gpus() -> Iterator[Row]:
    """Device memory is copied by cupy, whoever's tensors it holds: torch alone is not enough."""
    there = devices()
    installed = [name for name in ("cupy", "torch") if importlib.util.find_spec(name) is not None]
    if not there and not any(file.exists() for file in _DEVICE_FILES):
        found = f"no device, {' and '.join(installed) or 'neither cupy nor torch'} installed"
        yield Row("devices", "GPU", Verdict.NOT_APPLICABLE, found)
        return
    if not installed:
        yield _no_cupy(f"{there} NVIDIA GPUs, neither cupy nor torch installed")
        return
    # In a process of its own: a driver that hangs, or aborts, takes nothing with it.
    done = subprocess.run([sys.executable, "-c", _COUNTS], capture_output=True, text=True, timeout=CHILD_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield Row("devices", "GPU", Verdict.WARNING, f"could not be counted: {last}", "check the driver")
        return
    told: dict[str, list[object] | str] = json.loads(done.stdout)
    found = ", ".join(f"{name} {_said(one)}" for name, one in told.items())
    seen = {name: one[1] for name, one in told.items() if not isinstance(one, str)}
    if seen.get("cupy"):
        yield Row("devices", "GPU", Verdict.OK, found)
    elif seen.get("torch"):
        yield _no_cupy(found)
    else:
        found = f"{there} NVIDIA GPUs in this machine; {found}"
        yield Row("devices", "GPU", Verdict.WARNING, found, "check the driver and CUDA_VISIBLE_DEVICES")


def _no_cupy(found: str) -> Row:
    advice = "pip install 'kvstrata[gpu]': blocks are moved to and from GPU memory by cupy"
    return Row("devices", "GPU", Verdict.WARNING, found, advice)


def _said(one: list[object] | str) -> str:
    if not isinstance(one, str):
        return f"{one[0]}: {one[1]} devices"
    return "not installed" if one.startswith("No module named") else f"finds none ({one})"


def reached_by_rdma() -> Iterator[Row]:
    """A hint: registering is what proves it, and every client tests its rails."""
    what = "GPU memory by RDMA"
    if not devices() or not _INFINIBAND.is_dir() or not any(_INFINIBAND.iterdir()):
        yield Row("devices", what, Verdict.NOT_APPLICABLE, "it takes a GPU and an RDMA device")
        return
    ways = []
    if _PEERMEM.is_dir():
        ways.append("nvidia-peermem is loaded")
    if "Open Kernel Module" in (_DRIVER.read_text() if _DRIVER.exists() else "") and linux() >= DMABUF_LINUX:
        ways.append("open kernel modules with dma-buf")
    if ways:
        yield Row("devices", what, Verdict.OK, ", ".join(ways))
    else:
        found = f"neither nvidia-peermem nor, on Linux {platform.release()}, the driver's open kernel modules"
        advice = (
            "modprobe nvidia-peermem, or install the open kernel modules; blocks are staged in host memory meanwhile"
        )
        yield Row("devices", what, Verdict.WARNING, found, advice)


def devices() -> int:
    """How many NVIDIA GPUs the kernel's driver lists."""
    return sum(1 for _ in _GPUS.iterdir()) if _GPUS.is_dir() else 0


def linux() -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
