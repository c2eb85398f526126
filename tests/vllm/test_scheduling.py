"""What vLLM's scheduler does to requests while the pool is at work: preemption, abort, chunks of a prompt."""

from __future__ import annotations

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, Plain, draw
from tests.vllm.engine import BLOCK

LENGTH = 6 * BLOCK + 3
OUTPUT = 3 * BLOCK
#: Two and a half requests of 10 blocks each, and the null block.
FEW_BLOCKS = {"num_gpu_blocks_override": 26, "max_model_len": 20 * BLOCK}
PREEMPTIONS = "vllm:num_preemptions"


def test_preempted_requests_say_the_same(pool: RealPool, open_engine: OpenEngine, plain: Plain) -> None:
    prompts = draw(6, seed=30, length=LENGTH, shared=BLOCK)
    expected = plain(prompts, OUTPUT)
    writer = open_engine(pool.address, changed=FEW_BLOCKS)
    assert writer.generate(prompts, max_tokens=OUTPUT).tokens == expected
    assert writer.metrics()[PREEMPTIONS] > 0, "nothing was preempted: the test shows nothing"
    writer.settle()
    # Now every prompt is in the pool: requests are preempted with loads before and after.
    reader = open_engine(pool.address, changed=FEW_BLOCKS)
    answer = reader.generate(prompts, max_tokens=OUTPUT)
    assert answer.tokens == expected
    found = reader.metrics()
    assert found[PREEMPTIONS] > 0 and found["vllm:external_prefix_cache_hits"] > 0
    reader.settle()
    reader.stop()


def test_preemption_with_slow_and_failing_transfers(pool: RealPool, open_engine: OpenEngine, plain: Plain) -> None:
    prompts = draw(6, seed=31, length=LENGTH)
    expected = plain(prompts, OUTPUT)
    filler = open_engine(pool.address)
    filler.generate(prompts, max_tokens=1)
    filler.settle()
    engine = open_engine(
        pool.address, changed=FEW_BLOCKS, transport="auto+faults:delay_ms=30,lose=0.2,corrupt=0.2,seed=2"
    )
    assert engine.generate(prompts, max_tokens=OUTPUT).tokens == expected
    assert engine.metrics()[PREEMPTIONS] > 0
    engine.settle()


def test_a_request_that_is_aborted_while_it_loads_gives_its_blocks_back(
    pool: RealPool, open_engine: OpenEngine, plain: Plain
) -> None:
    prompts = draw(3, seed=32, length=LENGTH)
    expected = plain(prompts)
    writer = open_engine(pool.address)
    writer.generate(prompts, max_tokens=1)
    writer.settle()
    engine = open_engine(pool.address, transport="auto+faults:delay_ms=300", role="kv_consumer")
    answer = engine.generate(prompts, abort_while_loading=True)
    assert answer.tokens[1:] == expected[1:]
    engine.settle()
    engine.forget()
    again = engine.generate(prompts)
    assert again.tokens == expected
    engine.settle()


def test_a_prompt_computed_in_chunks_is_stored_whole(pool: RealPool, open_engine: OpenEngine, plain: Plain) -> None:
    prompts = draw(1, seed=33, length=12 * BLOCK + 1)
    chunked = {"max_num_batched_tokens": 3 * BLOCK + 7, "max_num_seqs": 2}
    writer = open_engine(pool.address, changed=chunked)
    expected = plain(prompts)
    assert writer.generate(prompts).tokens == expected
    writer.settle()
    reader = open_engine(pool.address, changed=chunked)
    answer = reader.generate(prompts)
    assert (answer.cached, answer.tokens) == ([12 * BLOCK], expected)
