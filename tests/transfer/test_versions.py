"""Refused versions are counted by name, whatever names peers choose."""

from __future__ import annotations

from kvstrata.transfer.versions import CHARACTERS_MAX, NAMES_MAX, OTHERS, RefusedVersions


def test_names_are_bounded_in_number_and_length() -> None:
    refused = RefusedVersions()
    for number in range(NAMES_MAX + 10):
        refused.add(f"kvstrata {number}")
    refused.add("kvstrata 0")
    counts = refused.counts()
    assert counts["kvstrata 0"] == 2 and counts[OTHERS] == 10 and len(counts) == NAMES_MAX + 1
    another = RefusedVersions()
    another.add("x" * 1000)
    another.add("a\nb\x1b[31m")
    another.add("")
    assert another.counts() == {"x" * CHARACTERS_MAX: 1, "ab[31m": 1, "unnamed": 1}
