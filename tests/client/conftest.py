"""Fixtures: a fake pool of two nodes behind a master on a real socket, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstrata.client import Client
from tests.client.fake_pool import FakeChoice, FakeMaster, FakeNode


@pytest.fixture
def nodes() -> dict[str, FakeNode]:
    return {"a": FakeNode("a"), "b": FakeNode("b")}


@pytest.fixture
def master(nodes: dict[str, FakeNode]) -> Iterator[FakeMaster]:
    master = FakeMaster(nodes)
    yield master
    master.stop()


@pytest.fixture
def connect(nodes: dict[str, FakeNode], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Client]]:
    """Makes clients whose peers are the fake nodes, and whose calls may take long on a busy machine."""
    opened: list[Client] = []

    class Choice(FakeChoice):
        pass

    Choice.nodes = nodes
    monkeypatch.setattr("kvstrata.client.client.TransportChoice", Choice)

    def make(masters: str, **options: object) -> Client:
        options.setdefault("transfer_deadline_ms", 20_000)
        opened.append(Client(masters, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for client in opened:
        client.close()


@pytest.fixture
def client(master: FakeMaster, connect: Callable[..., Client]) -> Client:
    return connect(master.address)
