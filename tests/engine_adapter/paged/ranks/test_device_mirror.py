"""Blocks cross between device and host when a transfer needs them to, and not otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector.base import (
    ConnectorMeta,
    ConnectorOutput,
    GroupBlocks,
    Job,
    JobKind,
    JobOutcome,
)
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout
from kvstrata.engine_adapter.paged.ranks.device_mirror import DeviceMirror
from tests.engine_adapter.paged.model.strict_device import StrictArrays, storage_of

LAYOUT = PoolLayout(
    groups=(
        GroupLayout(fingerprint="full", block_tokens=16, layers=3),
        GroupLayout(fingerprint="window", block_tokens=16, layers=2, window_tokens=64),
    ),
    num_blocks=12,
    num_tensors=3,
    page_bytes=64,
    parts=2,
    hash_block_tokens=16,
    hash_bytes=4,
    aligned_tokens=16,
)


class Inner:
    """A worker side whose calls are noted, with what the host's memory held at each."""

    def __init__(self, host: npt.NDArray[np.uint8]) -> None:
        self.host = host
        self.calls: list[object] = []
        self.seen: list[npt.NDArray[np.uint8]] = []
        self.outcomes: list[JobOutcome] = []
        self.landed = True

    def _note(self, call: object) -> None:
        self.calls.append(call)
        self.seen.append(self.host.copy())

    def start(self, meta: ConnectorMeta) -> None:
        self._note(meta)

    def wait_layer(self, layer: int) -> bool:
        self._note(f"layer {layer}")
        return self.landed

    def forward_ended(self) -> None:
        self._note("forward_ended")

    def take_output(self) -> ConnectorOutput:
        self._note("take_output")
        outcomes, self.outcomes = self.outcomes, []
        return ConnectorOutput(outcomes=outcomes)

    def set_waker(self, wake: Callable[[], None]) -> None:
        wake()

    def close(self) -> None:
        self._note("close")


class Pair:
    """Both memories, full of bytes that differ everywhere."""

    def __init__(self, layout: PoolLayout = LAYOUT, copy_bytes: int = 1 << 20) -> None:
        draw = np.random.default_rng(0)
        self.layout = layout
        self.host: npt.NDArray[np.uint8] = draw.integers(0, 128, layout.memory_bytes, np.uint8)
        self.arrays = StrictArrays()
        device: Any = self.arrays.to_device(draw.integers(128, 256, layout.memory_bytes, np.uint8))
        self.device = storage_of(device)
        self.inner = Inner(self.host)
        self.mirror = DeviceMirror(self.inner, layout, self.host, device, self.arrays, copy_bytes=copy_bytes)

    def where(self, group: int, ids: list[int]) -> npt.NDArray[np.bool_]:
        """The bytes of blocks, as the pool's layout has them."""
        found = np.zeros(self.layout.memory_bytes, np.bool_)
        for start, length in self.layout.descriptors(group)[ids].reshape(-1, 2):
            found[start : start + length] = True
        return found


def job(kind: JobKind, *groups: tuple[int, list[int]], job_id: int = 1) -> Job:
    blocks = [GroupBlocks(group=group, hashes=bytes(4 * len(ids)), block_ids=ids) for group, ids in groups]
    return Job(job_id=job_id, kind=kind, request_id="r", cache_salt="", groups=blocks, deadline_s=1.0)


def ended(wanted: Job, done: bytes) -> JobOutcome:
    return JobOutcome(job_id=wanted.job_id, kind=wanted.kind, done=done)


def test_a_store_finds_in_host_memory_what_the_forward_pass_left_on_the_device() -> None:
    pair = Pair()
    stores = [job(JobKind.STORE, (0, [3, 7]), (1, [9])), job(JobKind.STORE, (0, [7]), job_id=2)]
    meta = ConnectorMeta(stores=stores)
    before = pair.host.copy()
    pair.mirror.start(meta)
    assert pair.inner.calls == [meta]
    assert np.array_equal(pair.host, before), "the forward pass has not written them yet"
    pair.device[:] ^= 1
    pair.mirror.forward_ended()
    stored = pair.where(0, [3, 7]) | pair.where(1, [9])
    assert pair.inner.calls[1:] == ["forward_ended"]
    assert np.array_equal(pair.inner.seen[1], np.where(stored, pair.device, before))
    pair.device[:] ^= 2
    pair.mirror.forward_ended()
    assert np.array_equal(pair.inner.seen[2], pair.inner.seen[1]), "each store crosses once"


def test_a_load_is_on_the_device_when_it_is_told_of() -> None:
    pair = Pair()
    load = job(JobKind.LOAD, (0, [5, 2, 11]), (1, [4, 8]))
    pair.mirror.start(ConnectorMeta(loads=[load]))
    before = pair.device.copy()
    pair.mirror.forward_ended()
    assert pair.mirror.take_output().outcomes == []
    assert np.array_equal(pair.device, before)
    pair.inner.outcomes = [ended(load, b"\x01\x00\x01\x00\x01")]
    assert pair.mirror.take_output().outcomes == [ended(load, b"\x01\x00\x01\x00\x01")]
    loaded = pair.where(0, [5, 11]) | pair.where(1, [8])
    assert np.array_equal(pair.device, np.where(loaded, pair.host, before))


def layered(*ids: int) -> Job:
    return msgspec.structs.replace(job(JobKind.LOAD, (0, list(ids))), layered=True)


def test_a_layer_of_a_load_beside_the_step_is_on_the_device_when_it_is_read() -> None:
    pair, load = Pair(), layered(5, 2)
    pair.mirror.start(ConnectorMeta(loads=[load]))
    before, whole = pair.device.copy(), pair.where(0, [5, 2])
    tensor = np.arange(pair.layout.memory_bytes) // (pair.layout.num_blocks * pair.layout.page_bytes)
    for layer in range(3):
        assert pair.mirror.wait_layer(layer)
        assert np.array_equal(pair.device, np.where(whole & (tensor <= layer), pair.host, before))
    pair.mirror.forward_ended()
    pair.inner.outcomes = [ended(load, b"\1\1")]
    came = pair.device.copy()
    pair.host[:] ^= 1
    pair.mirror.take_output()
    assert np.array_equal(pair.device, came), "it crosses once"


@pytest.mark.parametrize("landed", [True, False])
def test_of_a_load_beside_the_step_that_failed_what_came_is_on_the_device_at_its_end(landed: bool) -> None:
    pair, load = Pair(), layered(5, 2)
    pair.inner.landed = landed
    pair.mirror.start(ConnectorMeta(loads=[load]))
    before = pair.device.copy()
    assert [pair.mirror.wait_layer(layer) for layer in range(3)] == [landed] * 3
    assert landed or np.array_equal(pair.device, before)
    pair.mirror.forward_ended()
    pair.host[:] ^= 1
    pair.inner.outcomes = [ended(load, b"\1\0")]
    pair.mirror.take_output()
    here = pair.where(0, [5])
    assert np.array_equal(pair.device[here], pair.host[here])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), parts=st.sampled_from((1, 2)), copy_bytes=st.sampled_from((1, 400, 1 << 20)))
def test_any_jobs_in_copies_of_any_size(data: st.DataObject, parts: int, copy_bytes: int) -> None:
    layout = PoolLayout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | {"parts": parts})
    pair = Pair(layout, copy_bytes)
    ids = data.draw(st.permutations(range(1, 12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, 11), min_size=3, max_size=3)))
    loaded, also, stored = ids[: cuts[0]], ids[cuts[0] : cuts[1]], ids[cuts[1] : cuts[2]]
    load = job(JobKind.LOAD, (0, loaded), (1, also))
    store = job(JobKind.STORE, (1, stored), job_id=2)
    done = data.draw(st.binary(min_size=len(loaded) + len(also), max_size=len(loaded) + len(also)))
    done = bytes(byte & 1 for byte in done)
    host, device = pair.host.copy(), pair.device.copy()
    pair.mirror.start(ConnectorMeta(loads=[load], stores=[store]))
    pair.mirror.forward_ended()
    pair.inner.outcomes = [ended(store, bytes(len(stored))), ended(load, done)]
    pair.mirror.take_output()
    host = np.where(pair.where(1, stored), device, host)
    came = [block for block, byte in zip(loaded, done, strict=False) if byte]
    came_also = [block for block, byte in zip(also, done[len(loaded) :], strict=True) if byte]
    assert np.array_equal(pair.host, host)
    assert np.array_equal(pair.device, np.where(pair.where(0, came) | pair.where(1, came_also), host, device))


@pytest.mark.parametrize("group", [(0, [0]), (0, [12]), (5, [1])])
def test_what_inner_refuses_is_left_to_it(group: tuple[int, list[int]]) -> None:
    pair = Pair()
    load, store = job(JobKind.LOAD, group), job(JobKind.STORE, group, job_id=2)
    host, device = pair.host.copy(), pair.device.copy()
    pair.mirror.start(ConnectorMeta(loads=[load], stores=[store]))
    pair.mirror.forward_ended()
    pair.inner.outcomes = [ended(load, b"\x00"), ended(store, b"\x00"), ended(job(JobKind.LOAD, job_id=77), b"")]
    assert len(pair.mirror.take_output().outcomes) == 3
    assert np.array_equal(pair.host, host) and np.array_equal(pair.device, device)


def test_of_two_loads_with_one_id_the_first_counts() -> None:
    pair = Pair()
    first, second = job(JobKind.LOAD, (0, [1])), job(JobKind.LOAD, (0, [2]))
    before = pair.device.copy()
    pair.mirror.start(ConnectorMeta(loads=[first, second]))
    pair.inner.outcomes = [ended(first, b"\x01")]
    pair.mirror.take_output()
    assert np.array_equal(pair.device, np.where(pair.where(0, [1]), pair.host, before))


def test_the_rest_is_passed_on() -> None:
    pair = Pair()
    woken: list[int] = []
    pair.mirror.set_waker(lambda: woken.append(1))
    meta = ConnectorMeta(loads=[job(JobKind.LOAD, (0, [1]))])
    pair.mirror.start(meta)
    pair.mirror.close()
    assert woken == [1] and pair.inner.calls == [meta, "close"]
