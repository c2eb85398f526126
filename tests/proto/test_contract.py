"""Keys, framing, statuses and errors: the parts every process relies on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto import control_pb2 as control
from kvstrata.proto import errors, wire
from kvstrata.proto.errors import InvalidArgument, ProtocolError
from kvstrata.proto.keys import Namespace, check_salt, pack_hashes, salt_tag, split_hashes
from kvstrata.proto.limits import Limits, limits_of
from kvstrata.proto.status import HELD, BlockStatus, Departure, HintKind
from kvstrata.proto.wire import Kind

BASE = Namespace("llama/bf16/bs16", 2 << 20, 16, 16, 1, 4)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("group", ""),
        ("group", "x" * 2000),
        ("block_bytes", 0),
        ("block_bytes", 1 << 40),
        ("block_tokens", -1),
        ("hash_bytes", 8),
        ("hash_bytes", 33),
        ("shard", 4),
        ("shard_count", 0),
        ("block_bytes", 1.5),
        ("block_bytes", True),
    ],
)
def test_a_namespace_out_of_bounds_is_refused_by_name(part: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=part.split("_")[0]):
        replace(BASE, **{part: value}).validated()


def test_every_part_of_a_namespace_is_part_of_its_identity() -> None:
    others = [
        replace(BASE, group="llama/bf16/bs32"),
        replace(BASE, block_bytes=1 << 20),
        replace(BASE, block_tokens=32),
        replace(BASE, hash_bytes=32),
        replace(BASE, shard=2),
        replace(BASE, shard_count=8),
    ]
    assert len({BASE.identity, *(other.identity for other in others)}) == 7
    assert Namespace.from_spec(BASE.to_spec()) == BASE


def test_identity_is_the_same_in_every_process() -> None:
    script = (
        "from kvstrata.proto.keys import Namespace as N; "
        "print(N('llama/bf16/bs16', 2<<20, 16, 16, 1, 4).identity.hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert seen == {BASE.identity.hex()}


def test_the_empty_salt_is_a_tenant_and_long_ones_are_refused() -> None:
    assert check_salt("") == ""
    with pytest.raises(InvalidArgument, match="129 characters"):
        check_salt("x" * 129)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=20))
def test_hashes_pack_and_split(hashes: list[bytes]) -> None:
    packed = pack_hashes(hashes, 16)
    assert list(split_hashes(packed, 16)) == hashes
    assert pack_hashes(memoryview(packed), 16) == packed


@pytest.mark.parametrize("hashes", [b"x" * 17, [b"x" * 16, b"y" * 15]])
def test_hashes_of_a_wrong_width_are_refused(hashes: object) -> None:
    with pytest.raises(InvalidArgument):
        pack_hashes(hashes, 16)  # type: ignore[arg-type]


@given(st.sampled_from(list(Kind)), st.integers(0, 2**32 - 1), st.integers(0, wire.MESSAGE_BYTES_MAX))
def test_a_header_comes_back(kind: Kind, request: int, size: int) -> None:
    header = wire.decode_header(wire.encode_header(kind, request, size))
    assert (header.kind, header.request, header.message_bytes, header.raw_bytes) == (kind, request, size, 0)


@given(st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES))
def test_any_bytes_decode_within_bounds_or_are_refused(data: bytes) -> None:
    try:
        header = wire.decode_header(data)
    except ProtocolError:
        return
    assert header.message_bytes <= wire.MESSAGE_BYTES_MAX and header.raw_bytes <= wire.RAW_BYTES_MAX
    assert header.kind in set(Kind)


def test_every_error_is_of_one_tree_and_travels_by_name() -> None:
    tree = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    ]
    assert all(issubclass(cls, errors.KVError) for cls in tree)
    assert all(name in (errors.__doc__ or "") for name in (cls.__name__ for cls in tree))
    for name, cls in errors.BY_CODE.items():
        assert type(errors.from_code(name, "text")) is cls
    assert type(errors.from_code("Nonsense", "text")) is errors.Refused


def test_status_values_are_frozen() -> None:
    """They are wire format: a change here breaks a running cluster."""
    assert {status.name: status.value for status in BlockStatus} == {
        "UNKNOWN": 0, "STORED": 1, "ALREADY_PRESENT": 2, "LOADED": 3, "RESERVED": 10, "IN_FLIGHT": 11,
        "MISSING": 20, "EVICTED": 21, "LEASE_LOST": 22, "CORRUPT": 23, "NODE_LOST": 24, "LATE": 25,
        "NOT_YET": 26, "NO_ROOM": 27, "READ_ERROR": 28, "PENDING": 29, "QUOTA": 40, "FULL": 41, "REFUSED": 42,
        "ABORTED": 43,
    }  # fmt: skip
    assert {status for status in BlockStatus if 0 < status < 10} == HELD
    assert {why.name: why.value for why in Departure} == {
        "UNKNOWN": 0, "ROOM": 1, "QUOTA": 2, "LOWERED": 3, "DEVICE": 4, "CORRUPT": 5, "REMOVED": 6, "DROPPED": 7,
        "EPOCH": 8, "HINT": 9, "ORPHAN": 10, "SURPLUS": 11,
    }  # fmt: skip
    assert {kind.name: kind.value for kind in HintKind} == {"KEEP": 1, "FORGET": 2, "DROP": 3}


@pytest.mark.parametrize("message", [control.Share, control.TenantPolicy])
def test_limits_survive_the_wire_and_none_is_not_zero(message: type[control.Share | control.TenantPolicy]) -> None:
    for limits in (
        Limits(salt="t", dram_limit=None, ssd_limit=0, dram_floor=3, ssd_floor=4),
        Limits(salt="", dram_limit=1 << 40, ssd_limit=None, dram_floor=0, ssd_floor=0),
    ):
        assert limits_of(message.FromString(message(**limits).SerializeToString())) == limits
    with pytest.raises(InvalidArgument, match="cache_salt"):
        limits_of(message(salt="x" * 129))


def test_a_tenant_is_named_by_the_sha_256_of_its_salt() -> None:
    assert (salt_tag("a"), salt_tag("")) == ("ca978112ca1b", ""), "printf a | sha256sum"
