"""The fault-injecting transport in front of a real pool: what goes wrong shows, and is never served."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer import pulling
from kvstrata.transfer.faults import Faults
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

BLOCK_BYTES = 4096
COUNT = 200


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("pool"), nodes=1)
    yield pool
    pool.end()


def stored(pool: RealPool, chain: str) -> tuple[bytes, np.ndarray]:
    """Blocks put into the pool over a sound transport."""
    hashes = keys(COUNT, chain)
    data = payload(hashes, "", BLOCK_BYTES)
    with Client(pool.address) as client:
        ns = client.namespace("model/i", block_bytes=BLOCK_BYTES, block_tokens=16)
        rows = client.register(data.copy()).rows(ns)
        until(lambda: client.store(ns, "", hashes, rows).stored.all())
        until(lambda: client.lookup(ns, "", hashes).hit_blocks == COUNT)
    return hashes, data


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
@pytest.mark.parametrize(("fault", "reason"), [("corrupt", "corrupt"), ("lose", "node_lost"), ("evict", "evicted")])
def test_a_faulty_load_is_a_miss_with_its_reason(
    pool: RealPool, transport: str, rate: float, fault: str, reason: str
) -> None:
    hashes, data = stored(pool, "loads")
    spec = f"{transport}+faults:{fault}={rate},seed=4"
    # Verification is off on purpose: injected corruption must be caught all the same.
    with Client(pool.address, transport=spec, verify="never") as client:
        ns = client.namespace("model/i", block_bytes=BLOCK_BYTES, block_tokens=16)
        into = np.zeros_like(data)
        result = client.load(ns, "", hashes, client.register(into).rows(ns))
        assert (into[result.loaded] == data[result.loaded]).all(), "wrong bytes"
        assert set(result.reasons) <= {"loaded", reason}
        if fault == "corrupt" or rate == 1.0:  # others are tried once more, and may succeed
            assert result.reasons.get(reason, 0) > 0
        if rate == 1.0:
            assert not result.loaded.any()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_refused_store_leaves_nothing_visible(pool: RealPool, transport: str) -> None:
    hashes = keys(COUNT, f"refused/{transport}")
    data = payload(hashes, "", BLOCK_BYTES)
    with Client(pool.address, transport=f"{transport}+faults:refuse=0.5,seed=4") as client:
        ns = client.namespace("model/i", block_bytes=BLOCK_BYTES, block_tokens=16)
        result = client.store(ns, "", hashes, client.register(data.copy()).rows(ns))
        assert 0 < result.reasons["refused"] < COUNT and result.stored.any()
        until(lambda: (client.exists(ns, "", hashes) == result.stored).all())
        into = np.zeros_like(data)
        loaded = client.load(ns, "", hashes, client.register(into).rows(ns)).loaded
        assert (loaded == result.stored).all() and (into[loaded] == data[loaded]).all()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_delay_is_bounded_by_the_deadline(pool: RealPool, transport: str) -> None:
    hashes, data = stored(pool, "late")
    spec = f"{transport}+faults:delay_ms=60000"
    with Client(pool.address, transport=spec, transfer_deadline_ms=300) as client:
        ns = client.namespace("model/i", block_bytes=BLOCK_BYTES, block_tokens=16)
        result = client.load(ns, "", hashes, client.register(np.zeros_like(data)).rows(ns))
        assert not result.loaded.any() and result.seconds < 5


@pytest.mark.parametrize("text", ["lose", "lose=2", "lose=-1", "lose=x", "loss=0.1", "delay_ms=-1"])
def test_a_wrong_spelling_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="fault"):
        Faults.parse(text)


def test_faults_repeat_with_their_seed() -> None:
    assert Faults.parse("lose=0.5,corrupt=0.25,seed=3") == Faults(lose=0.5, corrupt=0.25, seed=3)


def test_bytes_that_changed_after_they_were_hashed_are_not_committed(
    pool: RealPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that stood still may pull from a buffer its writer has given up on and reused."""
    hashes = keys(4, "reused")
    with Client(pool.address, transport="shm") as client:
        ns = client.namespace("model/i", block_bytes=BLOCK_BYTES, block_tokens=16)
        rows = client.register(payload(hashes, "", BLOCK_BYTES)).rows(ns)
        sound = pulling.checksums
        monkeypatch.setattr(pulling, "checksums", lambda blocks: sound(blocks) ^ np.uint64(1))
        assert client.store(ns, "", hashes, rows).reasons == {"corrupt": 4}
        assert not client.load(ns, "", hashes, rows).loaded.any()
