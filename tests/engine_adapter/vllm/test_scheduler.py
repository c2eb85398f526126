"""vLLM's scheduler calls, on the core's scheduler side: what is asked, loaded, stored, held and let go."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.engine_adapter.connector.base import ConnectorMeta, ConnectorOutput, JobKind, JobOutcome, PoolState
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.scheduler_side import PoolSchedulerSide
from kvstrata.engine_adapter.vllm.block_pool import PoolBlockHolder
from kvstrata.engine_adapter.vllm.messages import RankReport, StepMeta, decode_meta, encode
from kvstrata.engine_adapter.vllm.scheduler import StepPlanner
from kvstrata.proto.errors import InvalidArgument
from tests.engine_adapter.connector.scheduler_fakes import HASH_BYTES, Clock, FakeLookups, full_layout
from tests.engine_adapter.vllm.stand_ins import BlockPool, BlockState, Lora, Request, SchedulerOutput

TOKENS = 4  # in a block


class Scheduling:
    """A planner between a stand-in of vLLM's scheduler and the core."""

    def __init__(self, ranks: int = 1, layout: PoolLayout | None = None) -> None:
        self.layout = layout or full_layout(ranks)
        self.pool = BlockPool(64)
        self.lookups = FakeLookups()
        config = PoolConfig(masters="m:1", load_policy="always")
        self.side = PoolSchedulerSide(self.layout, config, self.lookups, PoolBlockHolder(self.pool), clock=Clock())
        self.planner = StepPlanner(self.side, aligned_tokens=self.layout.aligned_tokens, ranks=ranks)
        self.tables: dict[str, tuple[list[int], ...]] = {}

    def request(self, name: str = "r", blocks: int = 4, **fields: object) -> Request:
        hashes = [bytes([index]) * HASH_BYTES for index in range(blocks)]
        tokens = blocks * TOKENS + 1
        request = Request(name, tokens, tokens, hashes, **fields)  # type: ignore[arg-type]
        self.planner.on_new_request(request)
        return request

    def step(
        self, *scheduled: tuple[Request, int], preempted: set[str] | None = None
    ) -> tuple[StepMeta, ConnectorMeta]:
        counts = {request.request_id: tokens for request, tokens in scheduled}
        meta = self.planner.build_connector_meta(SchedulerOutput(counts, preempted, BlockState(self.tables)))
        for request, tokens in scheduled:
            request.num_computed_tokens += tokens
        self.side.check()
        return meta, decode_meta(meta.jobs) if meta.jobs else ConnectorMeta()

    def answer(self, blocks: int) -> None:
        self.lookups.answer({bytes([index]) * HASH_BYTES for index in range(blocks)})

    def ended(self, job_id: int, kind: JobKind, done: bytes, ranks: tuple[int, ...] = (0,)) -> None:
        outcome = JobOutcome(job_id=job_id, kind=kind, done=done)
        report = encode(RankReport(output=ConnectorOutput(outcomes=[outcome])))
        self.planner.update_connector_output(dict.fromkeys(ranks, report))
        self.side.check()


def test_a_hit_is_asked_for_until_known_then_loaded_and_its_blocks_held_until_the_rank_says_so() -> None:
    vllm = Scheduling()
    request = vllm.request()
    assert vllm.planner.get_num_new_matched_tokens(request, 0) == (None, False)
    vllm.answer(2)
    assert vllm.planner.get_num_new_matched_tokens(request, 0) == (8, True)
    assert vllm.planner.get_num_new_matched_tokens(request, 0) == (8, True)
    vllm.planner.update_state_after_alloc(request, ([11, 12, 13],), 8)
    meta, jobs = vllm.step()
    (job,) = jobs.loads
    assert (job.request_id, job.groups[0].block_ids, meta.tokens) == ("r", [11, 12], 0)
    assert vllm.pool.held() == {11: 1, 12: 1} and vllm.planner.has_pending_work()
    vllm.ended(job.job_id, JobKind.LOAD, b"\1\1")
    assert vllm.pool.held() == {} and not vllm.planner.has_pending_work()
    vllm.planner.update_state_after_alloc(request, ([11, 12, 13],), 0)  # vLLM calls again after the load
    assert not vllm.step()[1].loads


def test_after_a_failed_load_the_request_is_computed() -> None:
    vllm = Scheduling()
    request = vllm.request()
    vllm.answer(2)
    assert vllm.planner.get_num_new_matched_tokens(request, 0) == (8, True)
    vllm.planner.update_state_after_alloc(request, ([11, 12],), 8)
    (job,) = vllm.step()[1].loads
    vllm.ended(job.job_id, JobKind.LOAD, b"\0\0")
    assert vllm.planner.get_num_new_matched_tokens(request, 0) == (0, False)


def test_full_blocks_are_stored_as_they_are_computed_and_held_although_the_request_ends() -> None:
    vllm = Scheduling()
    request = vllm.request()
    vllm.answer(0)
    assert vllm.planner.get_num_new_matched_tokens(request, 0) == (0, False)
    vllm.tables["r"] = ([21, 22, 23, 24, 25],)
    meta, jobs = vllm.step((request, 10))
    (store,) = jobs.stores
    assert store.groups[0].block_ids == [21, 22] and (meta.tokens, meta.prefill_tokens) == (10, 0)
    vllm.planner.request_finished(request)
    assert vllm.pool.held() == {21: 1, 22: 1}
    vllm.ended(store.job_id, JobKind.STORE, b"\1\1")
    assert vllm.pool.held() == {} and vllm.pool.freed == [22, 21], "the tail is evicted first"


def test_tables_are_not_read_for_steps_that_fill_no_block() -> None:
    vllm = Scheduling()
    request = vllm.request()
    vllm.answer(0)
    vllm.planner.get_num_new_matched_tokens(request, 0)
    assert not vllm.step((request, 3))[1].stores  # no table is there: reading it would fail
    with pytest.raises(AssertionError, match="no block table"):
        vllm.step((request, 1))


@pytest.mark.parametrize("told", ["by the step", "by the count"])
def test_a_preempted_request_is_looked_up_and_loaded_anew(told: str) -> None:
    vllm = Scheduling()
    request = vllm.request()
    vllm.answer(2)
    vllm.planner.get_num_new_matched_tokens(request, 0)
    vllm.planner.update_state_after_alloc(request, ([11, 12],), 8)
    (first,) = vllm.step()[1].loads
    vllm.ended(first.job_id, JobKind.LOAD, b"\1\1")
    request.num_preemptions, request.num_computed_tokens = 1, 0
    if told == "by the step":
        vllm.step(preempted={"r"})
    assert vllm.planner.get_num_new_matched_tokens(request, 0) == (None, False)
    vllm.answer(2)
    assert vllm.planner.get_num_new_matched_tokens(request, 0) == (8, True)
    vllm.planner.update_state_after_alloc(request, ([15, 16],), 8)
    (second,) = vllm.step()[1].loads
    assert second.job_id != first.job_id and second.groups[0].block_ids == [15, 16]


def test_an_abort_while_loading_leaves_the_blocks_held_until_the_load_has_ended() -> None:
    vllm = Scheduling()
    request = vllm.request()
    vllm.answer(2)
    vllm.planner.get_num_new_matched_tokens(request, 0)
    vllm.planner.update_state_after_alloc(request, ([11, 12],), 8)
    (job,) = vllm.step()[1].loads
    vllm.planner.request_finished(request)
    assert vllm.pool.held() == {11: 1, 12: 1}
    vllm.ended(job.job_id, JobKind.LOAD, b"\1\0")
    assert vllm.pool.held() == {}


def test_what_may_not_be_read_is_not_loaded() -> None:
    vllm = Scheduling()
    request = vllm.request(skip_reading_prefix_cache=True)
    vllm.answer(4)
    assert vllm.planner.get_num_new_matched_tokens(request, 0) == (0, False)


def test_a_local_hit_within_a_block_gets_nothing_more() -> None:
    vllm = Scheduling()
    request = vllm.request()
    vllm.answer(4)
    assert vllm.planner.get_num_new_matched_tokens(request, 3) == (0, False)
    assert vllm.planner.get_num_new_matched_tokens(request, 4) == (12, True)


def test_a_job_ends_when_all_ranks_have_said_so_in_whatever_steps() -> None:
    vllm = Scheduling(ranks=2)
    request = vllm.request()
    vllm.answer(2)
    vllm.planner.get_num_new_matched_tokens(request, 0)
    vllm.planner.update_state_after_alloc(request, ([11, 12],), 8)
    (job,) = vllm.step()[1].loads
    vllm.ended(job.job_id, JobKind.LOAD, b"\1\1", ranks=(1,))
    assert vllm.pool.held() == {11: 1, 12: 1}
    vllm.ended(job.job_id, JobKind.LOAD, b"\1\1", ranks=(0,))
    assert vllm.pool.held() == {}


def test_a_rank_that_says_nothing_is_as_it_was() -> None:
    vllm = Scheduling(ranks=2)
    absent = encode(RankReport(output=ConnectorOutput(pool=PoolState.ABSENT)))
    ready = encode(RankReport(output=ConnectorOutput()))
    vllm.planner.update_connector_output({0: ready, 1: absent})
    vllm.planner.update_connector_output({0: ready})
    assert vllm.planner.stats()["pool_ready"] == 0
    vllm.planner.update_connector_output({1: ready})
    assert vllm.planner.stats()["pool_ready"] == 1


def test_the_rate_of_prefill_is_that_of_steps_that_mostly_prefill() -> None:
    vllm = Scheduling()
    request = vllm.request(blocks=40)
    vllm.tables["r"] = ([*range(20, 64)],)
    assert vllm.step((request, 63))[0].prefill_tokens == 0, "too little to be measured"
    assert vllm.step((request, 64))[0].prefill_tokens == 64
    report = RankReport(output=ConnectorOutput(), prefill_tokens=64, forward_s=0.5)
    vllm.planner.update_connector_output({0: encode(report)})
    assert vllm.planner.stats()["prefill_tokens_s"] == 128
    request.num_computed_tokens = request.num_tokens - 1
    assert vllm.step((request, 1))[0].prefill_tokens == 0


def test_a_block_pool_without_references_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"block pool has no blocks, touch, free_blocks.*0\.30"):
        PoolBlockHolder(object())  # type: ignore[arg-type]


def test_a_finished_request_is_forgotten_and_its_name_may_come_back() -> None:
    vllm = Scheduling()
    first = vllm.request()
    vllm.planner.request_finished(first)
    vllm.planner.request_finished(first)
    second = vllm.request()
    assert len(vllm.lookups.asked) == 2
    vllm.answer(1)
    assert vllm.planner.get_num_new_matched_tokens(second, 0) == (4, True)
    third = vllm.request()  # queued again without an end: the newer one counts
    vllm.answer(2)
    assert vllm.planner.get_num_new_matched_tokens(third, 0) == (8, True)


def test_a_reset_keeps_the_engine_stepping_until_the_ranks_were_told() -> None:
    at = Scheduling()
    at.planner.reset()
    assert at.planner.has_pending_work()
    assert at.step()[1].reset
    assert not at.planner.has_pending_work() and at.step()[1] == ConnectorMeta()


def test_a_rank_without_news_is_still_refused_by_the_pool() -> None:
    at = Scheduling(ranks=2)
    said = encode(RankReport(output=ConnectorOutput(superseded=True)))
    at.planner.update_connector_output({0: said, 1: said})
    at.planner.update_connector_output({1: encode(RankReport(output=ConnectorOutput()))})
    assert at.planner.stats()["weights_superseded"] == 1


def test_what_one_adapter_computed_is_looked_up_and_stored_under_keys_of_its_own(tmp_path: Path) -> None:
    at = Scheduling()
    for number, name in enumerate(("a", "b"), 1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
        request = at.request(name, lora_request=Lora(number, str(tmp_path / name)))
        at.tables[name] = ([20 + number, 30 + number, 40 + number, 50 + number, 60 + number],)
        at.answer(4)
        assert at.planner.get_num_new_matched_tokens(request, 0) == (0, False), "of the base model, or another adapter"
        (store,) = at.step((request, 8))[1].stores
        assert len(store.groups[0].hashes) == 2 * HASH_BYTES
    first, second = ("".join(map(bytes.hex, asked.hashes)) for asked in at.lookups.asked)
    assert len(first) == len(second) == 2 * 4 * HASH_BYTES and first != second
