"""Memory limits from pool sizes: never less than what the daemon takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.storage.arena import slab_bytes_for
from kvstrata.storage.config import MEMORY_SPARE_BYTES
from tests.helm.rendering import main_container, objects, one

UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
#: Measured: a node that has just started; and what 237,000 blocks in memory and on SSD added, a block.
PROCESS_BYTES, BLOCK_BYTES = 110 << 20, 860
#: Two processes map the pool: 8 bytes of page table a page of 4 KiB each.
PAGE_TABLE_PARTS = 4096 // 16


def nbytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def quantities(least: int, most: int) -> st.SearchStrategy[str]:
    """Quantities as values hold them, so large in bytes."""
    return st.one_of(
        [
            st.integers(max(1, -(-least // size)), most // size).map(lambda n, unit=unit: f"{n}{unit}")  # type: ignore[misc]
            for unit, size in UNITS.items()
            if most // size >= max(1, -(-least // size))
        ]
    )


pools = st.fixed_dictionaries(
    {
        "dram": quantities(64 << 20, 2 << 40),
        "blockBytes": quantities(16 << 10, 16 << 20),
        "hugepages": st.booleans(),
        "ssd": st.fixed_dictionaries(
            {
                "devices": st.lists(quantities(1 << 30, 16 << 40), max_size=4).map(
                    lambda sizes: [{"hostPath": f"/mnt/{n}", "size": size} for n, size in enumerate(sizes)]
                )
            }
        ),
        "rdma": st.fixed_dictionaries({"enabled": st.booleans()}),
    }
)


@settings(max_examples=60, deadline=None)
@given(pools)
def test_a_node_never_needs_more_than_its_limit(storage: dict[str, Any]) -> None:
    container = main_container(one(objects({"storage": storage}), "DaemonSet", "-storage"))
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    dram = nbytes(storage["dram"])
    ssd = sum(nbytes(each["size"]) for each in storage["ssd"]["devices"])
    blocks = (dram + ssd) // nbytes(storage["blockBytes"])
    beside = PROCESS_BYTES + MEMORY_SPARE_BYTES + blocks * BLOCK_BYTES + dram // PAGE_TABLE_PARTS + (64 << 20)
    assert limits["memory"] == requests["memory"], "memory that is allocated at the start is asked for"
    assert f"--dram={dram}" in container["args"]
    assert [arg for arg in container["args"] if arg.startswith("--ssd=")] == [
        f"--ssd={each['hostPath']}/kv={nbytes(each['size'])}" for each in storage["ssd"]["devices"]
    ]
    if storage["hugepages"]:
        assert nbytes(limits["memory"]) >= beside
        pages = nbytes(limits["hugepages-2Mi"])
        slab = slab_bytes_for(dram, None, hugepages=True)
        assert pages % (2 << 20) == 0 and pages >= dram // slab * slab and pages == nbytes(requests["hugepages-2Mi"])
    else:
        assert nbytes(limits["memory"]) >= dram + beside
        assert "hugepages-2Mi" not in limits


@settings(max_examples=25, deadline=None)
@given(st.integers(1000, 2_000_000_000))
def test_a_master_has_room_for_its_directory(blocks: int) -> None:
    container = main_container(one(objects({"master": {"blocks": blocks}}), "StatefulSet", "-master"))
    limit = container["resources"]["limits"]["memory"]
    assert nbytes(limit) >= (110 << 20) + 2 * 112 * blocks


@settings(max_examples=25, deadline=None)
@given(quantities(64 << 20, 2 << 40))
def test_the_startup_probe_waits_for_the_memory(dram: str) -> None:
    probe = main_container(one(objects({"storage": {"dram": dram}}), "DaemonSet", "-storage"))["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 55 + nbytes(dram) / (256 << 20)


@pytest.mark.parametrize(("size", "claim"), [("500Gi", 500), ("1Ti", 1024)])
def test_a_claim_is_larger_than_what_is_used_of_it(size: str, claim: int) -> None:
    values = {"storage": {"kind": "StatefulSet", "ssd": {"devices": [{"size": size}]}}}
    claims = one(objects(values), "StatefulSet", "-storage")["spec"]["volumeClaimTemplates"]
    (storage,) = [c["spec"]["resources"]["requests"]["storage"] for c in claims if c["metadata"]["name"] == "ssd-0"]
    assert nbytes(storage) >= claim * 1.05 * (1 << 30)
