"""Names of pages as hashes."""

from __future__ import annotations

import hashlib

import pytest

from kvstrata.engine_adapter.sglang.page_keys import page_hash, page_hashes

DIGEST = hashlib.sha256(b"page").hexdigest()


def test_a_digest_is_its_own_hash() -> None:
    assert page_hash(DIGEST) == hashlib.sha256(b"page").digest()


@pytest.mark.parametrize(
    "key", ["", "page", DIGEST[:-1], DIGEST + "0", DIGEST.upper(), f" {DIGEST[1:]}", DIGEST + "\n"]
)
def test_other_names_are_digested(key: str) -> None:
    assert page_hash(key) == hashlib.sha256(key.encode()).digest()


def test_names_are_packed_in_order() -> None:
    assert page_hashes([DIGEST, "page"]) == hashlib.sha256(b"page").digest() * 2
    assert page_hashes([]) == b""
