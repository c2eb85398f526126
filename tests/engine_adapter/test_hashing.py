"""Block hashes: the same in every process, and another for every difference that matters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.proto.errors import InvalidArgument

PROBE = """
from kvstrata.engine_adapter.hashing import BlockHasher
for algorithm in ("sha256", "xxh3-128"):
    hasher, hashes = BlockHasher(4, algorithm), []
    hasher.extend(hasher.root("tenant", ("lora-a", "x")), hashes, list(range(10)))
    print(algorithm, *[h.hex() for h in hashes])
"""
#: A change of these is a change of every key in every pool: raise SCHEME_VERSION with it.
KNOWN = {
    "sha256": [
        "227f245eea539b666351b64eee4b97f3f39430ddf4e1dc5bf4761363209b7cf9",
        "5e6bd24d8fa49ee9f7281a5df7059151016803d132c9d210840fec2aa3184fc8",
    ],
    "xxh3-128": ["34e670c82a596bca6e1349b90119343a", "4dc61a2a7003aecd053f535d8fdcee82"],
}


def chain(tokens: list[int], salt: str = "", extra: tuple[str, ...] = (), **hasher: object) -> list[bytes]:
    made = BlockHasher(**({"block_tokens": 4} | hasher))  # type: ignore[arg-type]
    hashes: list[bytes] = []
    made.extend(made.root(salt, extra), hashes, tokens)
    return hashes


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_hashes_do_not_depend_on_the_process(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()} == KNOWN


@given(tokens=st.lists(st.integers(0, (1 << 32) - 1), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
@settings(max_examples=60, deadline=None)
def test_a_prompt_hashes_the_same_however_it_came(tokens: list[int], cuts: list[int]) -> None:
    hasher = BlockHasher(4, "xxh3-128")
    root, grown = hasher.root("s"), list[bytes]()
    for cut in (*sorted(cuts), len(tokens)):
        hasher.extend(root, grown, tokens[:cut])
    assert grown == chain(tokens, "s", algorithm="xxh3-128") and len(grown) == len(tokens) // 4


@given(tokens=st.lists(st.integers(0, 50), min_size=8, max_size=24), at=st.integers(0, 23), token=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_a_changed_token_changes_its_block_and_all_after_it_only(tokens: list[int], at: int, token: int) -> None:
    at %= len(tokens)
    changed = [*tokens[:at], token, *tokens[at + 1 :]]
    for index, (one, other) in enumerate(zip(chain(tokens), chain(changed), strict=True)):
        assert (one == other) == (changed == tokens or index < at // 4)


def test_every_difference_that_matters_gives_another_hash() -> None:
    tokens = list(range(16))
    heads = [
        chain(tokens)[0],
        chain(tokens, salt="a")[0],
        chain(tokens, extra=("a",))[0],
        chain(tokens, extra=("a", "b"))[0],
        chain(tokens, extra=("ab",))[0],
        chain(tokens, salt="a", extra=("b",))[0],
        chain(tokens, algorithm="xxh3-128")[0],
        chain(tokens, block_tokens=8)[0],
        chain(list(range(1, 17)))[0],
    ]
    assert len(set(heads)) == len(heads)
    assert {len(h) for h in chain(tokens)} == {32} and {len(h) for h in chain(tokens, algorithm="xxh3-128")} == {16}


@pytest.mark.parametrize("bad", [-1, 1 << 32, 1 << 70])
def test_a_token_out_of_range_is_refused_and_leaves_no_hash(bad: int) -> None:
    hasher, hashes = BlockHasher(2), list[bytes]()
    with pytest.raises(InvalidArgument, match="token ids"):
        hasher.extend(hasher.root(""), hashes, [1, 2, 3, bad])
    assert hashes == []


def test_an_unknown_algorithm_and_no_block_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="sha256, xxh3-128"):
        BlockHasher(16, "md5")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="block_tokens"):
        BlockHasher(0)
