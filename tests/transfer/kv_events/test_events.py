"""KV events on the wire: what vLLM's decoders read, and what versions of vLLM write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.kv_events import events
from kvstrata.transfer.kv_events.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, decode, encode

HASH = bytes(range(32))
STORED = BlockStored([HASH], None, [1, 2], 2, None, "GPU", None, [["salt"]], 0)
BATCH = Batch(12.5, [STORED, BlockRemoved([HASH], "CPU"), AllBlocksCleared()], 0)


def test_a_batch_is_an_array_and_an_event_a_map_with_its_type() -> None:
    raw = msgspec.msgpack.decode(encode(BATCH))
    assert raw[0] == 12.5 and raw[2] == 0
    stored, removed, cleared = raw[1]
    assert stored["type"] == "BlockStored" and stored["block_hashes"] == [HASH] and stored["extra_keys"] == [["salt"]]
    assert {"parent_block_hash", "lora_id", "medium", "lora_name"} <= stored.keys(), "vLLM's decoder wants them"
    assert (removed["type"], removed["medium"], cleared) == ("BlockRemoved", "CPU", {"type": "AllBlocksCleared"})
    assert decode(encode(BATCH)) == BATCH


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [7], None, [1, 2], 2, None],
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU"],
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, None, None, None, None, None, None, None, "later"],
        {"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2, "later": 1},
    ],
)
def test_older_and_newer_versions_are_read(event: Any) -> None:
    for batch in ([1.0, [event]], [1.0, [event], 3], {"ts": 1.0, "events": [event]}):
        (read,) = decode(msgspec.msgpack.encode(batch)).events
        assert isinstance(read, BlockStored) and read.block_hashes == [7] and read.block_size == 2
        assert read.medium in (None, "GPU")


def test_an_event_of_an_unknown_type_is_left_out() -> None:
    raw = [1.0, [["BlockMoved", 1], {"type": "Other"}, {"type": "AllBlocksCleared"}], None]
    assert decode(msgspec.msgpack.encode(raw)).events == [AllBlocksCleared()]


@given(st.binary(max_size=200) | st.recursive(st.integers(0, 99) | st.text(), st.lists).map(msgspec.msgpack.encode))
def test_garbage_is_refused(payload: bytes) -> None:
    try:
        decode(payload)
    except InvalidArgument:
        pass


def test_a_payload_past_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PAYLOAD_BYTES_MAX", 100)
    with pytest.raises(InvalidArgument, match="at most 100"):
        decode(bytes(101))


def test_a_hash_and_the_integer_that_vllm_makes_of_it_have_one_tail() -> None:
    as_vllm = int.from_bytes(HASH, "big") & ((1 << 64) - 1)
    assert events.tail(HASH) == events.tail(as_vllm) == as_vllm


def test_vllm_itself_reads_ours(tmp_path: Path) -> None:
    pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed here")
    (tmp_path / "batch").write_bytes(encode(BATCH))
    script = (
        "import sys, msgspec; from vllm.distributed.kv_events import KVEventBatch\n"
        "batch = msgspec.msgpack.decode(open(sys.argv[1], 'rb').read(), type=KVEventBatch)\n"
        "print([type(event).__name__ for event in batch.events], batch.events[0].extra_keys)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "batch")], capture_output=True, text=True, timeout=110, check=True
    )
    assert done.stdout.strip().endswith("['BlockStored', 'BlockRemoved', 'AllBlocksCleared'] [('salt',)]")
