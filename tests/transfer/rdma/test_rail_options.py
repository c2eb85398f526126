"""What an engine's environment says of rails."""

from __future__ import annotations

import pytest

from kvstrata.client import Client
from kvstrata.transfer.rdma.rails import RailMode, RailOptions
from kvstrata.transfer.select import rail_options


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, RailOptions(RailMode.ON)),
        ({"KVSTRATA_RDMA_BACKEND": "", "KVSTRATA_RDMA_DEVICES": ""}, RailOptions(RailMode.ON)),
        ({"KVSTRATA_RDMA_BACKEND": "LIBFABRIC"}, RailOptions(RailMode.ON, "LIBFABRIC")),
        ({"KVSTRATA_RDMA_DEVICES": "mlx5_0, mlx5_1:1,"}, RailOptions(RailMode.ON, "UCX", ("mlx5_0", "mlx5_1:1"))),
    ],
)
def test_backend_and_devices_come_from_the_environment(environment: dict[str, str], expected: RailOptions) -> None:
    assert rail_options(RailMode.ON, environment) == expected


def test_within_a_host_nothing_of_it_counts() -> None:
    environment = {"KVSTRATA_RDMA_BACKEND": "LIBFABRIC", "KVSTRATA_RDMA_DEVICES": "mlx5_0"}
    assert rail_options(RailMode.CMA, environment) == RailOptions(RailMode.CMA)


def test_a_backend_that_does_not_exist_shows_in_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_RDMA_BACKEND", "PIGEON")
    with Client("127.0.0.1:1", transport="rdma") as client:
        rails = client.health()["rails"]
    assert isinstance(rails, dict) and rails["kind"] == "" and "'PIGEON' is unknown" in rails["problem"]
