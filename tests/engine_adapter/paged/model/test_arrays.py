"""Which arrays there are, and what is said where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.model.arrays import HOST, ArrayModule, make_arrays
from kvstrata.engine_adapter.paged.model.collective_base import NoCollective
from kvstrata.engine_adapter.paged.model.weights import load_config, load_weights
from kvstrata.engine_adapter.paged.ranks.worker import Worker
from kvstrata.proto.errors import InvalidArgument
from tests.engine_adapter.paged.model.strict_device import StrictArrays


class CUDARuntimeError(RuntimeError):
    pass


def fake_cupy(gpus: int | str) -> ModuleType:
    """What is asked of cupy before there is an array; ``gpus``: how many, or why none can be counted."""

    def count() -> int:
        if isinstance(gpus, str):
            raise CUDARuntimeError(gpus)
        return gpus

    module = ModuleType("cupy")
    used: list[int] = []
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=count,
        getDeviceProperties=lambda index: {"name": f"GPU {index}".encode()},
        runtimeGetVersion=lambda: 12040,
    )
    module.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime, Device=lambda index: SimpleNamespace(use=lambda: used.append(index))
    )
    module.used = used  # type: ignore[attr-defined]
    module.__version__ = "13.9"  # type: ignore[attr-defined]
    return module


def test_on_the_host_nothing_moves() -> None:
    arrays = make_arrays("cpu")
    assert arrays is HOST and arrays.xp is np and arrays.on_host and not arrays.numerics
    array = np.arange(4)
    assert arrays.to_device(array) is array
    assert arrays.to_host(array) is array
    out = np.zeros(2, array.dtype)
    arrays.take_into(array, np.array([3, 1]), out)
    assert out.tolist() == [3, 1]
    arrays.synchronize()


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InvalidArgument, match=r"cupy, which cannot be imported: install kvstrata\[gpu\]"):
        make_arrays("cuda")


@pytest.mark.parametrize(
    ("gpus", "says"), [(0, "there is no GPU"), ("driver version", "no GPU can be used here: driver version")]
)
def test_without_a_gpu_it_is_said(monkeypatch: pytest.MonkeyPatch, gpus: int | str, says: str) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(gpus))
    with pytest.raises(InvalidArgument, match=says):
        make_arrays("cuda")
    with pytest.raises(InvalidArgument, match=says):
        Worker(EngineConfig(device="cuda"), 0, NoCollective())


def test_ranks_take_gpus_in_turn_and_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("CUPY_TF32", "1")
    arrays = make_arrays("cuda", 3)
    assert cupy.used == [1]  # type: ignore[attr-defined]
    assert arrays.xp is cupy and not arrays.on_host
    for part in ("cupy-13.9", "cuda-12040", "GPU 1", "CUPY_TF32=1"):
        assert part in arrays.numerics


def test_another_device_is_refused() -> None:
    assert EngineConfig(device="cuda").validated().device == "cuda"
    with pytest.raises(InvalidArgument, match="device is 'tpu': expected cpu or cuda"):
        EngineConfig(device="tpu").validated()  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError, match="tpu"):
        msgspec.convert({"device": "tpu"}, EngineConfig)


def test_an_engine_on_the_host_never_imports_cupy() -> None:
    """It takes seconds, and may be broken."""
    code = (
        "import sys; sys.modules['cupy'] = None;"
        "from kvstrata.engine_adapter.paged.ranks.worker import Worker;"
        "from kvstrata.engine_adapter.paged.config import *;"
        "from kvstrata.engine_adapter.paged.model.collective_base import NoCollective;"
        "Worker(EngineConfig(cache=CacheConfig(num_blocks=300)), 0, NoCollective()).close()"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"OPENBLAS_NUM_THREADS": "1"}, check=True, timeout=60)


def test_numpy_has_what_the_model_takes() -> None:
    missing = [name for name in vars(ArrayModule) if not name.startswith("_") and not hasattr(np, name)]
    assert not missing


def test_a_device_has_keys_of_its_own() -> None:
    """Its products have other bits than the host's: what one stored is not the other's."""
    config = load_config("tiny", 512)
    on_host = load_weights("tiny", config).identity
    arrays = StrictArrays()
    assert load_weights("tiny", config, arrays=arrays).identity == on_host
    arrays.numerics = "cupy-1/GPU"
    assert load_weights("tiny", config, arrays=arrays).identity == f"{on_host}/cupy-1/GPU"
