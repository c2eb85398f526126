"""What rails a machine has, from trees like Linux's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.proto.errors import ConfigError, Unavailable
from kvstrata.transfer.rdma import found, nixl
from kvstrata.transfer.rdma.found import Places, cma_problem, find_devices, find_rails, memlock_problem
from kvstrata.transfer.rdma.owner import open_engine
from kvstrata.transfer.rdma.rails import Device, RailMode, RailOptions, Rails


@pytest.fixture(autouse=True)
def with_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "installed", lambda: "nixl_cu12")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A machine without devices, whose processes have no capabilities."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t0000000000000000\n")
    return Places(tmp_path / "infiniband", tmp_path / "dev", tmp_path / "scope", status)


def add(
    places: Places, name: str, port: int = 1, state: str = "4: ACTIVE", link: str = "InfiniBand", numa: int = 0
) -> None:
    folder = places.infiniband / name / "ports" / str(port)
    folder.mkdir(parents=True)
    (folder / "state").write_text(state + "\n")
    (folder / "link_layer").write_text(link + "\n")
    (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (places.infiniband / name / "device").mkdir(exist_ok=True)
    (places.infiniband / name / "device" / "numa_node").write_text(f"{numa}\n")
    places.device_nodes.mkdir(exist_ok=True)
    (places.device_nodes / "uverbs0").touch()


def test_ports_that_are_up_are_found(places: Places) -> None:
    add(places, "mlx5_0", numa=1)
    add(places, "mlx5_1", state="1: DOWN")
    add(places, "mlx5_2", port=2, link="Ethernet", numa=-1)
    assert find_devices(places) == (
        Device("mlx5_0", 1, 1, "InfiniBand", "400 Gb/sec (4X NDR)"),
        Device("mlx5_2", 2, -1, "Ethernet", "400 Gb/sec (4X NDR)"),
    )


def test_auto_takes_what_is_up(places: Places) -> None:
    assert not find_rails(RailOptions(), places).kind
    add(places, "mlx5_0")
    add(places, "mlx5_1")
    rails = find_rails(RailOptions(), places)
    assert rails.kind == "rdma" and [device.name for device in rails.devices] == ["mlx5_0", "mlx5_1"]
    assert rails.problem == ""


def test_named_devices_are_taken_in_that_order(places: Places) -> None:
    for port in (1, 2):
        add(places, "mlx5_0", port)
    add(places, "mlx5_1")
    wanted = RailOptions(RailMode.ON, devices=("mlx5_1", "mlx5_0:2", "mlx5_0"))
    assert [(device.name, device.port) for device in find_rails(wanted, places).devices] == [
        ("mlx5_1", 1),
        ("mlx5_0", 2),
        ("mlx5_0", 1),
    ]


def test_off_has_none(places: Places) -> None:
    add(places, "mlx5_0")
    rails = find_rails(RailOptions(RailMode.OFF), places)
    assert rails == Rails("", problem=rails.problem) and rails.problem


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("none", "no RDMA device"),
        ("down", "no port of mlx5_0 is active"),
        ("other", "mlx5_9 is not there"),
        ("nodes", "uverbs"),
        ("nixl", "pip install"),
    ],
)
def test_on_says_what_is_missing_and_auto_goes_without(
    places: Places, monkeypatch: pytest.MonkeyPatch, trouble: str, says: str
) -> None:
    if trouble != "none":
        add(places, "mlx5_0", state="1: DOWN" if trouble == "down" else "4: ACTIVE")
    if trouble == "nodes":
        (places.device_nodes / "uverbs0").unlink()
    if trouble == "nixl":
        monkeypatch.setattr(nixl, "installed", lambda: "")
    devices = ("mlx5_9",) if trouble == "other" else ()
    with pytest.raises(ConfigError, match=says):
        find_rails(RailOptions(RailMode.ON, devices=devices), places)
    rails = find_rails(RailOptions(RailMode.AUTO, devices=devices), places)
    assert not rails.kind and says in rails.problem
    with pytest.raises(ConfigError, match=says):
        open_engine("x", rails)


@pytest.mark.parametrize("options", [RailOptions(backend="TCP"), RailOptions(workers=0)])
def test_options_that_are_wrong_are_refused_in_every_mode(places: Places, options: RailOptions) -> None:
    with pytest.raises(ConfigError):
        find_rails(options, places)


def test_cma_needs_leave_to_read_other_processes(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    cma = RailOptions(RailMode.CMA)
    assert cma_problem(places) == "" and find_rails(cma, places) == Rails("cma")
    places.ptrace_scope.write_text("1\n")
    with pytest.raises(ConfigError, match="ptrace_scope is 1"):
        find_rails(cma, places)
    places.status.write_text("CapEff:\t0000000000080000\n")
    assert cma_problem(places) == ""
    monkeypatch.setattr(found, "_reads_itself", lambda: False)
    with pytest.raises(ConfigError, match="seccomp"):
        find_rails(cma, places)
    monkeypatch.setattr(found, "_reads_itself", lambda: True)
    monkeypatch.setattr(nixl, "installed", lambda: "")
    with pytest.raises(ConfigError, match="pip install"):
        find_rails(cma, places)


def test_locked_memory_is_compared_with_what_is_registered(places: Places) -> None:
    assert "ulimit -l" in memlock_problem(9 << 20, 8 << 20, places)
    assert memlock_problem(8 << 20, 8 << 20, places) == ""
    assert memlock_problem(9 << 20, -1, places) == ""
    places.status.write_text("CapEff:\t0000000000004000\n")
    assert memlock_problem(9 << 20, 8 << 20, places) == ""


def test_the_backend_is_told_which_devices_and_never_bare_tcp() -> None:
    device = Device("mlx5_0", 1, 0, "InfiniBand", "")
    told = nixl.backend_options(Rails("rdma", (device, Device("mlx5_1", 2, 0, "", ""))), RailOptions(workers=3))
    assert told["ucx_devices"] == "mlx5_0:1,mlx5_1:2"
    assert told["engine_config"] == "TLS=^tcp" and told["num_workers"] == "3"
    assert told["ucx_error_handling_mode"] == "peer"
    assert nixl.backend_options(Rails("rdma", (device,)), RailOptions(backend="LIBFABRIC")) == {}


def test_what_the_user_tells_ucx_stays(tmp_path: Path) -> None:
    cma, none = Rails("cma"), tmp_path / "none"
    told = nixl.ucx_environment(cma, {}, none)
    assert "cma" in told["UCX_TLS"].split(",") and "cuda" not in told["UCX_TLS"] and told["UCX_LOG_FILE"] == "stderr"
    assert "cuda_copy" in nixl.ucx_environment(cma, {}, tmp_path)["UCX_TLS"].split(",")
    assert nixl.ucx_environment(cma, {"UCX_TLS": "all", "UCX_LOG_FILE": "x", "UCX_MODULES": "all"}, tmp_path) == {}
    assert "UCX_TLS" not in nixl.ucx_environment(Rails("rdma"), {}, none)


def test_without_nixl_there_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_nixl",))
    with pytest.raises(Unavailable, match="pip install"):
        nixl.bindings()
