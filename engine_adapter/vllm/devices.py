"""Devices that vLLM computes on: whose KV memory can be pooled, and what decides the bytes in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from kvstrata.proto.errors import InvalidArgument

#: As torch names them; AMD's are "cuda" too.
DEVICES: Final = frozenset({"cpu", "cuda"})


class Capability(Protocol):
    """What is read of vLLM's ``DeviceCapability``."""

    major: int
    minor: int


class Platform(Protocol):
    """What is read of ``vllm.platforms.current_platform``."""

    device_name: str
    device_type: str

    def get_device_capability(self) -> Capability | None: ...


def check_devices(kinds: Iterable[str]) -> None:
    """``kinds``: the types of the devices that KV tensors are on. Raises :class:`InvalidArgument`."""
    others = sorted(set(kinds) - DEVICES)
    if others:
        raise InvalidArgument(
            f"KV memory on {', '.join(others)}: only vLLM on a CPU, or on CUDA or ROCm GPUs, can pool it"
        )


def exchanges_memory(model: object) -> bool:
    """Whether vLLM may give the memory under its KV back, to sleep, and take other memory to the same addresses.

    ``model``: its ``ModelConfig``; one of a vLLM that has no such settings does not.
    """
    return any(getattr(model, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator"))


def gpu_kind(platform: Platform, backend: object) -> str:
    """What, beside the layout that vLLM names, decides the order of bytes in a page, and how they were computed.

    ``backend``: the attention backend that was asked for, None where vLLM chooses by itself.
    """
    found = platform.get_device_capability()
    capability = f"-{found.major}.{found.minor}" if found is not None else ""
    name = getattr(backend, "name", backend) or "auto"
    return f"{platform.device_name}{capability}/{name}".lower()
