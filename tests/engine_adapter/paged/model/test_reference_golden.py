"""Logits that transformers computed, for files as it saves them: checked where it is not installed too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import threadpoolctl

from kvstrata.engine_adapter.paged.model.collective_base import NoCollective
from kvstrata.engine_adapter.paged.model.llama import Llama
from kvstrata.engine_adapter.paged.model.weights import load_config, load_weights
from tests.engine_adapter.paged.model_steps import Steps

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_golden(name: str) -> None:
    """Llama: bf16, llama3 scaling. Mistral: f16, all layers windowed. Qwen2: f32 in shards, biases, tied, mixed."""
    folder = str(GOLDEN / name)
    config = load_config(folder, 0)
    with np.load(GOLDEN / name / "expected.npz") as expected:
        token_ids, logits = expected["token_ids"], expected["logits"]
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        steps = Steps(Llama(config, load_weights(folder, config), collective=NoCollective()))
        sequence = steps.sequence(token_ids)
        steps.step([(sequence, 270)])
        for _ in range(30):
            steps.step([(sequence, 1)])
    np.testing.assert_allclose(sequence.logits[-len(logits) :], logits, atol=1e-4)
