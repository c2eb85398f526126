"""``kvstrata bench --transport``: each way to a real node, and what is said when there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.transfer.rdma.found import find_devices
from tests.cli.test_doctor import called_process as called
from tests.cli.test_doctor_rails import needs_cma
from tests.e2e.tiered_pool import TieredPool

SMALL = ("--size", "64KiB", "--blocks", "8", "--calls", "2", "--rounds", "2")


@pytest.fixture(scope="module")
def with_rails(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredPool]:
    pool = TieredPool(tmp_path_factory.mktemp("pool"), more=("--rdma", "cma"))
    yield pool
    pool.end()


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredPool]:
    pool = TieredPool(tmp_path_factory.mktemp("pool"), more=("--rdma", "off"))
    yield pool
    pool.end()


@needs_cma
@pytest.mark.parametrize(("transport", "used"), [("shm", "shm"), ("tcp", "tcp"), ("rdma-cma", "rdma"), ("auto", "shm")])
def test_it_measures_over_the_transport_that_was_named(with_rails: TieredPool, transport: str, used: str) -> None:
    code, figures = called("bench", "--master", with_rails.address, *SMALL, "--transport", transport, "--json")
    assert code == 0, figures
    told = {figure["op"]: figure for figure in figures}
    assert told["store"]["transport"] == told["load"]["transport"] == used and told["lookup"]["transport"] == ""
    assert all(figure["missed"] == 0 for figure in figures)


@needs_cma
def test_a_node_without_rails_is_named_and_what_to_do(without: TieredPool) -> None:
    code, told = called("bench", "--master", without.address, *SMALL, "--transport", "rdma-cma")
    assert code == 3, told
    assert "8 of the first 8 blocks were not stored: 8 node_lost" in told and "the node has no rails" in told
    assert "kvstrata doctor" in told


@pytest.mark.skipif(bool(find_devices()), reason="this machine has an RDMA device")
def test_rdma_without_a_device_says_so_before_anything_is_asked() -> None:
    code, told = called("bench", "--master", "127.0.0.1:1", "--transport", "rdma")
    assert code == 2 and "no RDMA device" in told


def test_a_transport_that_does_not_exist(without: TieredPool) -> None:
    code, told = called("bench", "--master", without.address, "--transport", "pigeon")
    assert code == 2 and "rdma-cma" in told and "shm" in told


def test_a_socket_that_cannot_be_seen_is_named(without: TieredPool, tmp_path: Path) -> None:
    hidden = Path(str(without.node().ready["unix"]))
    aside = hidden.with_name("aside")
    hidden.rename(aside)
    try:
        code, told = called("bench", "--master", without.address, *SMALL, "--transport", "shm")
    finally:
        aside.rename(hidden)
    assert code == 3 and "no transport of 'shm' reaches node" in told, told


def test_auto_goes_by_tcp_where_nothing_else_reaches(without: TieredPool) -> None:
    hidden = Path(str(without.node().ready["unix"]))
    aside = hidden.with_name("aside")
    hidden.rename(aside)
    try:
        code, figures = called("bench", "--master", without.address, *SMALL, "--json")
    finally:
        aside.rename(hidden)
    assert code == 0 and figures[0]["transport"] == "tcp", json.dumps(figures)
