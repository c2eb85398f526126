"""Which devices' KV memory is pooled, and what of a GPU tells blocks of KV apart."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from kvstrata.engine_adapter.vllm.devices import check_devices, exchanges_memory, gpu_kind
from kvstrata.proto.errors import InvalidArgument


class Capability(NamedTuple):
    major: int
    minor: int


HOPPER = Capability(9, 0)


@dataclass
class Platform:
    device_name: str = "cuda"
    device_type: str = "cuda"
    capability: Capability | None = HOPPER

    def get_device_capability(self) -> Capability | None:
        return self.capability


class Backend(Enum):
    FLASH_ATTN = 1


@pytest.mark.parametrize("kinds", [["cpu"], ["cuda", "cuda"], []])
def test_memory_of_cpus_and_gpus_is_taken(kinds: list[str]) -> None:
    check_devices(kinds)


def test_memory_of_others_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"KV memory on hpu, xpu: .*CUDA or ROCm"):
        check_devices(["xpu", "cpu", "hpu"])


def test_what_tells_gpus_apart() -> None:
    assert gpu_kind(Platform(), None) == "cuda-9.0/auto"
    assert gpu_kind(Platform(capability=Capability(8, 6)), Backend.FLASH_ATTN) == "cuda-8.6/flash_attn"
    assert gpu_kind(Platform("rocm", capability=None), "TRITON_ATTN") == "rocm/triton_attn"


@pytest.mark.parametrize(
    ("settings", "does"),
    [
        ({}, False),
        ({"enable_sleep_mode": False, "enable_cumem_allocator": False}, False),
        ({"enable_sleep_mode": True}, True),
        ({"enable_sleep_mode": False, "enable_cumem_allocator": True}, True),
    ],
)
def test_an_engine_that_can_sleep_exchanges_its_memory(settings: dict[str, bool], does: bool) -> None:
    assert exchanges_memory(SimpleNamespace(**settings)) is does
