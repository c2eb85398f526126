"""The kernels, compiled for this CPU once a run."""

from __future__ import annotations

import pytest

from tests.transfer.gpu.cpu_kernels import CpuKernels, compiled, compiler


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler: apt-get install g++")
    return compiled(tmp_path_factory.mktemp("kernels"), found)
