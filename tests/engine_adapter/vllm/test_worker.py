"""Steps of vLLM's model runner on a worker side: when jobs begin, and how their outcomes are told."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvstrata.engine_adapter.connector.base import (
    ConnectorMeta,
    ConnectorOutput,
    GroupBlocks,
    Job,
    JobKind,
    JobOutcome,
)
from kvstrata.engine_adapter.vllm.messages import StepMeta, decode_report, encode
from kvstrata.engine_adapter.vllm.worker import StepRunner


class FakeSide:
    """Notes calls; outcomes are what the test puts there."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.outcomes: list[JobOutcome] = []

    def start(self, meta: ConnectorMeta) -> None:
        self.calls.append(f"start {[job.job_id for job in (*meta.loads, *meta.stores)]}")

    def forward_ended(self) -> None:
        self.calls.append("forward ended")

    def take_output(self) -> ConnectorOutput:
        taken, self.outcomes = self.outcomes, []
        return ConnectorOutput(outcomes=taken)

    def set_waker(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def wait_layer(self, layer: int) -> bool:
        self.calls.append(f"layer {layer}")
        return True

    def close(self) -> None:
        self.calls.append("closed")


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def job(job_id: int, kind: JobKind, *block_ids: int) -> Job:
    blocks = GroupBlocks(group=0, hashes=b"h" * 16 * len(block_ids), block_ids=list(block_ids))
    return Job(job_id=job_id, kind=kind, request_id=f"r{job_id}", cache_salt="", groups=[blocks], deadline_s=1.0)


def meta(*jobs: Job, tokens: int = 5, prefill: int = 0) -> StepMeta:
    loads = [each for each in jobs if each.kind is JobKind.LOAD]
    stores = [each for each in jobs if each.kind is JobKind.STORE]
    return StepMeta(encode(ConnectorMeta(loads=loads, stores=stores)) if jobs else b"", tokens, prefill)


@pytest.fixture
def side() -> FakeSide:
    return FakeSide()


def runner(side: FakeSide, *, by_blocks: bool = True, clock: Clock | None = None) -> StepRunner:
    return StepRunner(side, 3, by_blocks=by_blocks, clock=clock or Clock())


def test_jobs_begin_with_the_step_and_stores_are_told_when_its_forward_pass_ends(side: FakeSide) -> None:
    steps = runner(side)
    steps.begin(meta(job(1, JobKind.LOAD, 4), job(2, JobKind.STORE, 5)))
    steps.forward_ended()
    steps.begin(meta())
    steps.forward_ended()
    assert side.calls == ["start [1, 2]", "forward ended", "forward ended"]


def test_a_load_is_told_by_its_request_once_and_a_store_is_not(side: FakeSide) -> None:
    steps = runner(side)
    steps.begin(meta(job(1, JobKind.LOAD, 4, 5), job(2, JobKind.STORE, 6)))
    assert steps.transfer_results() == (set(), set())
    side.outcomes = [
        JobOutcome(job_id=2, kind=JobKind.STORE, done=b"\0"),
        JobOutcome(job_id=1, kind=JobKind.LOAD, done=b"\1\1"),
    ]
    assert steps.transfer_results() == ({"r1"}, set())
    assert steps.failed_blocks() == set()
    report = decode_report(steps.report())
    assert [outcome.job_id for outcome in report.output.outcomes] == [2, 1]
    assert steps.transfer_results() == (set(), set())
    assert decode_report(steps.report()).output.outcomes == []


def test_a_layer_is_waited_for_by_its_name(side: FakeSide) -> None:
    steps = StepRunner(side, 0, by_blocks=True, layers=["model.0", "model.1"])
    steps.wait_layer("model.1")
    steps.wait_layer("another group's")
    assert side.calls == ["layer 1"]


def test_a_layered_load_is_none_that_vllm_waits_for(side: FakeSide) -> None:
    steps = runner(side)
    steps.begin(meta(msgspec.structs.replace(job(1, JobKind.LOAD, 4, 5), layered=True)))
    side.outcomes = [JobOutcome(job_id=1, kind=JobKind.LOAD, done=b"\1\0")]
    assert steps.transfer_results() == (set(), set()) and steps.failed_blocks() == {5}


def test_blocks_that_did_not_come_are_named_in_the_same_step(side: FakeSide) -> None:
    steps = runner(side)
    steps.begin(meta(job(1, JobKind.LOAD, 4, 5, 6)))
    side.outcomes = [JobOutcome(job_id=1, kind=JobKind.LOAD, done=b"\1\0\0")]
    assert steps.transfer_results() == ({"r1"}, set())
    assert steps.failed_blocks() == {5, 6}
    assert steps.failed_blocks() == set()


def test_with_several_groups_the_request_is_named_instead(side: FakeSide) -> None:
    steps = runner(side, by_blocks=False)
    steps.begin(meta(job(1, JobKind.LOAD, 4, 5)))
    side.outcomes = [JobOutcome(job_id=1, kind=JobKind.LOAD, done=b"\1\0")]
    assert steps.transfer_results() == ({"r1"}, {"r1"})
    assert steps.failed_blocks() == set()


def test_a_step_is_measured_from_its_beginning_to_the_end_of_its_forward_pass(side: FakeSide) -> None:
    clock = Clock()
    steps = runner(side, clock=clock)
    steps.begin(meta(prefill=5))
    clock.now += 0.25
    steps.forward_ended()
    clock.now += 1.0
    report = decode_report(steps.report())
    assert (report.prefill_tokens, report.forward_s) == (5, 0.25)
    assert decode_report(steps.report()).prefill_tokens == 0


def test_the_rank_and_the_end(side: FakeSide) -> None:
    steps = runner(side)
    assert steps.rank == 3
    steps.close()
    assert side.calls == ["closed"]


def test_a_rank_whose_kv_another_one_stores_says_done_and_loads_all_the_same(side: FakeSide) -> None:
    steps = StepRunner(side, 1, by_blocks=True, stores=False)
    steps.begin(meta(job(1, JobKind.LOAD, 4), job(2, JobKind.STORE, 5, 6)))
    assert side.calls == ["start [1]"]
    assert steps.transfer_results() == (set(), set())
    (outcome,) = decode_report(steps.report()).output.outcomes
    assert (outcome.job_id, outcome.kind, outcome.done) == (2, JobKind.STORE, b"\1\1")
    assert decode_report(steps.report()).output.outcomes == []
