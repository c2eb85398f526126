"""Speculative decoding: of an answer, what was accepted is stored, in the model's layers and in the draft model's."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, Plain, draw
from tests.vllm.engine import BLOCK

ANSWER = 3 * BLOCK
NOISE = 1.0


def make_draft(model: Path, folder: Path, seed: int) -> Path:
    """The model, but that it often says something else."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    noise = np.random.default_rng(seed).standard_normal(head.shape).astype(np.float32) * head.std() * NOISE
    save_file(weights | {"lm_head.weight": head + noise}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_answer_with_rejected_drafts_is_stored_as_it_was_accepted(
    open_engine: OpenEngine, pool: RealPool, plain: Plain, model: Path, tmp_path: Path
) -> None:

    def drafting(seed: int) -> dict[str, object]:
        drafter = make_draft(model, tmp_path / f"draft{seed}", seed)
        return {"speculative_config": {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3}}

    changed = drafting(1)
    prompts = draw(3, seed=90)
    answers = plain(prompts, ANSWER)
    writer = open_engine(pool.address, changed=changed)
    assert writer.generate_with_pool(prompts, max_tokens=ANSWER).tokens == answers
    counts = writer.metrics()
    drafted, accepted = (counts[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted"))
    assert 0 < accepted < drafted, "the test shows nothing"
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    reader = open_engine(pool.address, changed=changed)
    found = reader.generate_with_pool(whole)
    assert found.cached == [(len(tokens) - 1) // BLOCK * BLOCK for tokens in whole], (accepted, drafted)
    assert found.tokens == plain(whole)
    other = open_engine(pool.address, changed=drafting(2)).generate_with_pool(whole)
    assert other.cached == [0, 0, 0], "KV of another model that drafts"
    assert other.tokens == plain(whole)
