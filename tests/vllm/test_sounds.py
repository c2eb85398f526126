"""Prompts with more than text: KV is found for the same sound, and for no other."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, draw
from tests.vllm.engine import BLOCK, VllmEngine, arguments
from tests.vllm.tiny_listener import SOUND_TOKEN, SOUND_TOKENS, make_listener

BEFORE, AFTER = 2 * BLOCK, 2 * BLOCK + 3


def test_the_sound_is_a_part_of_the_key(pool: RealPool, tmp_path: Path, open_engine: OpenEngine) -> None:
    model = make_listener(tmp_path / "tiny-listener")
    (drawn,) = draw(1, seed=80, length=BEFORE + AFTER)
    text = [min(token, SOUND_TOKEN - 3) for token in drawn]
    prompts = [[*text[:BEFORE], SOUND_TOKEN, *text[BEFORE:]]]
    room = {"model": str(model), "max_num_batched_tokens": 1024}  # for the longest sound
    plain = VllmEngine(tmp_path / "plain.log", arguments(model, enable_prefix_caching=False) | room)
    first, second = (plain.generate(prompts, sound_seed=seed).tokens for seed in (1, 2))
    assert first != second, "the sound changes nothing: the test shows nothing"
    plain.end()
    writer, reader = (open_engine(pool.address, changed=room) for _ in range(2))
    assert writer.generate_with_pool(prompts, sound_seed=1).tokens == first
    other = reader.generate_with_pool(prompts, sound_seed=2)
    assert (other.cached, other.tokens) == ([BEFORE], second)
    reader.forget()
    same = reader.generate_with_pool(prompts, sound_seed=1)
    assert (same.cached, same.tokens) == ([(BEFORE + SOUND_TOKENS + AFTER) // BLOCK * BLOCK], first)
