"""LoRA adapters: what one computed, neither another nor the base model is given; the same one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, draw
from tests.vllm.engine import BLOCK, Lora, Prompt, VllmEngine, arguments
from tests.vllm.tiny_lora import make_adapter

LENGTH = 6 * BLOCK + 3
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
Said = dict[str, list[Prompt | None]]


@pytest.fixture
def loras(tmp_path: Path) -> dict[str, Lora | None]:
    made = {
        name: Lora(name, number, str(make_adapter(tmp_path / name, seed=number)))
        for number, name in enumerate(("one", "two"), 1)
    }
    return {"base": None} | made


def say(engine: VllmEngine, loras: dict[str, Lora | None], prompts: list[Prompt]) -> Said:
    return {name: engine.generate(prompts, adapter=lora).tokens for name, lora in loras.items()}


def test_adapters_and_the_base_model_share_nothing_and_an_adapter_shares_with_itself(
    pool: RealPool, model: Path, tmp_path: Path, open_engine: OpenEngine, loras: dict[str, Lora | None]
) -> None:
    prompts = draw(2, seed=60, length=LENGTH)
    plain = VllmEngine(tmp_path / "plain.log", arguments(model, enable_prefix_caching=False, **ADAPTERS))
    expected = say(plain, loras, prompts)
    assert expected["base"] != expected["one"] != expected["two"] != expected["base"], "adapters that change nothing"
    plain.end()
    writer = open_engine(pool.address, changed=ADAPTERS)
    reader = open_engine(pool.address, changed=ADAPTERS, role="kv_consumer")
    nothing, all_of_it = [0] * len(prompts), [LENGTH // BLOCK * BLOCK] * len(prompts)
    for number, stored in enumerate(loras, 1):
        assert writer.generate_with_pool(prompts, adapter=loras[stored]).tokens == expected[stored]
        for asked in loras:
            answer = reader.generate_with_pool(prompts, adapter=loras[asked])
            assert answer.cached == (all_of_it if asked in [*loras][:number] else nothing), (asked, stored)
            assert answer.tokens == expected[asked], (asked, stored)
        reader.forget()
    writer.end()
    # Trained on, and saved where it was: another adapter to the pool, if not to vLLM.
    trained = Lora("one", 1, str(make_adapter(tmp_path / "one", seed=9)))
    after = open_engine(pool.address, changed=ADAPTERS)
    answer = after.generate_with_pool(prompts, adapter=trained)
    assert answer.cached == nothing and answer.tokens != expected["one"]
