"""The job ledger: holds until the last rank reported, one end a job, nonsense counted."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.engine_adapter.connector.base import GroupBlocks, Job, JobKind, JobOutcome
from kvstrata.engine_adapter.connector.jobs import STORY_MAX, JobLedger
from tests.engine_adapter.connector.scheduler_fakes import Clock, CountingHolder


def blocks(*ids: int, group: int = 0) -> GroupBlocks:
    return GroupBlocks(group=group, hashes=bytes(16 * len(ids)), block_ids=list(ids))


def outcome(job: Job, done: bytes, **more: object) -> JobOutcome:
    return JobOutcome(job_id=job.job_id, kind=job.kind, done=done, **more)  # type: ignore[arg-type]


class Fixture:
    def __init__(self, ranks: int = 2) -> None:
        self.clock = Clock()
        self.holder = CountingHolder()
        self.ledger = JobLedger(ranks, self.holder, self.clock)

    def open(self, *ids: int, kind: JobKind = JobKind.LOAD, request_id: str = "r") -> Job:
        return self.ledger.open(kind, request_id, "", [blocks(*ids)], 5.0)


def test_blocks_are_held_until_the_last_rank_reported() -> None:
    at = Fixture()
    job = at.open(3, 4, 5)
    assert at.ledger.outcome(1, outcome(job, b"\1\0\1", bytes_moved=7, seconds=0.5, reasons={"late": 1})) is None
    assert at.holder.held() == {3: 1, 4: 1, 5: 1} and len(at.ledger) == 1
    end = at.ledger.outcome(0, outcome(job, b"\1\1\0", bytes_moved=9, seconds=0.2, reasons={"late": 1, "evicted": 1}))
    assert end is not None
    assert end.done == b"\1\0\0" and end.reasons == {"late": 2, "evicted": 1}
    assert (end.bytes_moved, end.seconds) == (7, 0.5)  # of the rank that took longest
    assert at.holder.held() == {} and len(at.ledger) == 0
    at.ledger.check()


def test_unknown_and_duplicate_outcomes_change_nothing() -> None:
    at = Fixture()
    job = at.open(3)
    at.ledger.outcome(0, outcome(job, b"\1"))
    assert at.ledger.outcome(0, outcome(job, b"\1")) is None
    assert at.ledger.outcome(7, outcome(job, b"\1")) is None
    assert at.ledger.outcome(1, JobOutcome(job_id=99, kind=JobKind.LOAD, done=b"")) is None
    assert at.ledger.unknown_outcomes == 3 and at.holder.held() == {3: 1}
    assert at.ledger.outcome(1, outcome(job, b"\1")) is not None
    assert at.ledger.outcome(1, outcome(job, b"\1")) is None
    assert at.ledger.unknown_outcomes == 4 and at.holder.held() == {}
    assert any("ignored" in text for _, text in at.ledger.story(job.job_id))


@pytest.mark.parametrize("done", [b"", b"\1", b"\1\1\1"])
def test_an_outcome_of_the_wrong_length_is_nothing_done(done: bytes) -> None:
    at = Fixture()
    job = at.open(3, 4)
    at.ledger.outcome(0, outcome(job, b"\1\1"))
    end = at.ledger.outcome(1, outcome(job, done))
    assert end is not None and end.done == b"\0\0" and at.ledger.malformed_outcomes == 1


def test_bytes_other_than_0_and_1_are_read_by_their_lowest_bit() -> None:
    at = Fixture(ranks=1)
    end = at.ledger.outcome(0, outcome(at.open(3, 4), b"\xff\xfe"))
    assert end is not None and end.done == b"\1\0"


def test_ids_are_not_reused_and_two_jobs_of_one_request_are_apart() -> None:
    at = Fixture(ranks=1)
    first, second = at.open(3), at.open(3)
    assert first.job_id != second.job_id and at.holder.held() == {3: 2}
    at.ledger.outcome(0, outcome(second, b"\1"))
    assert at.holder.held() == {3: 1} and first.job_id in at.ledger and second.job_id not in at.ledger
    assert at.open(4).job_id > second.job_id


def test_overdue_jobs_are_named_once_and_stay_held() -> None:
    at = Fixture()
    job = at.open(3)
    at.clock.now = 100.0  # the step that carried it took long: its store begins now
    assert at.ledger.newly_overdue() == []
    at.clock.now = 110.9
    assert at.ledger.newly_overdue() == []
    at.clock.now = 111.1  # two deadlines and a second
    assert at.ledger.newly_overdue() == [job] and at.ledger.newly_overdue() == []
    assert at.ledger.overdue_jobs == 1 and at.holder.held() == {3: 1}


def test_cancel_and_abandon_release() -> None:
    at = Fixture()
    unsent, sent = at.open(3), at.open(4, kind=JobKind.STORE)
    at.ledger.outcome(0, outcome(sent, b"\1"))
    at.ledger.cancel(unsent.job_id)
    with pytest.raises(AssertionError, match="was sent"):
        at.ledger.cancel(sent.job_id)
    assert at.ledger.pending_blocks(JobKind.LOAD) == 0 and at.ledger.pending_blocks(JobKind.STORE) == 1
    assert at.ledger.abandon() == 1 and at.holder.held() == {}
    assert at.ledger.outcome(1, outcome(sent, b"\1")) is None
    at.ledger.check()


def test_the_story_is_bounded() -> None:
    at = Fixture(ranks=1)
    for _ in range(STORY_MAX):
        at.ledger.outcome(0, outcome(at.open(1), b"\1"))
    assert len(at.ledger._story) == STORY_MAX and at.ledger.story(1) == []


class Ledger(RuleBasedStateMachine):
    """Jobs opened, reported in any order, twice or wrongly, against a dict."""

    @initialize(ranks=st.integers(1, 3))
    def start(self, ranks: int) -> None:
        self.at = Fixture(ranks)
        self.ranks = ranks
        self.waiting: dict[int, tuple[Job, dict[int, bytes]]] = {}
        self.closed: list[Job] = []

    @rule(ids=st.lists(st.integers(1, 9), max_size=5, unique=True), kind=st.sampled_from(JobKind))
    def open(self, ids: list[int], kind: JobKind) -> None:
        job = self.at.open(*ids, kind=kind)
        self.waiting[job.job_id] = (job, {})

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        job, reports = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        rank = data.draw(st.integers(0, self.ranks - 1))
        count = len(job.groups[0].block_ids)
        done = bytes(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
        end = self.at.ledger.outcome(rank, outcome(job, done))
        reports.setdefault(rank, done)
        if len(reports) < self.ranks:
            assert end is None
            return
        assert end is not None and end.job == job
        assert end.done == bytes(min(column) for column in zip(*reports.values(), strict=True))
        self.closed.append(self.waiting.pop(job.job_id)[0])

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def report_again(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.closed))
        assert self.at.ledger.outcome(0, outcome(job, b"")) is None

    @invariant()
    def holds_are_those_of_open_jobs(self) -> None:
        expected: dict[int, int] = {}
        for job, _ in self.waiting.values():
            for block in job.groups[0].block_ids:
                expected[block] = expected.get(block, 0) + 1
        assert self.at.holder.held() == expected
        self.at.ledger.check()


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
