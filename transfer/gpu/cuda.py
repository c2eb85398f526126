"""The runtime of CUDA devices (ROCm's too, as cupy has both behind one interface)."""

from __future__ import annotations

from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.gpu.host import HostRuntime
from kvstrata.transfer.memory import Memory


class CudaRuntime(HostRuntime):
    def __init__(self, memory: Memory) -> None:
        raise Unavailable(f"{memory.spelled()} needs cupy: pip install 'kvstrata[gpu]'")
