"""A rank's half in vLLM's model runner: jobs begin around the forward pass, outcomes become vLLM's results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from kvstrata.engine_adapter.connector.base import ConnectorOutput, Job, JobKind, JobOutcome, WorkerSide
from kvstrata.engine_adapter.vllm.messages import RankReport, StepMeta, decode_meta, encode

#: A step that computes nothing waits so long for an outcome: an engine that shares its process with the transfers'
#: threads, and never sleeps, would keep the interpreter from them.
IDLE_WAIT_S: Final = 0.001


class TransferResults(NamedTuple):
    """Loads that ended on this rank, by request; ``failed``: those that did not bring every block."""

    finished: set[str]
    failed: set[str]


class StepRunner:
    """Used from the model runner's thread only.

    ``by_blocks``: failures are told as block ids (the only way to keep a partial load), which are ambiguous with more
    than one KV cache group; then they are told by request. ``stores`` False: another rank stores the same KV.
    ``layers``: names of the layers of the one group, in the order of their pages.
    """

    def __init__(
        self,
        side: WorkerSide,
        rank: int,
        *,
        by_blocks: bool,
        stores: bool = True,
        layers: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._side = side
        self._rank = rank
        self._by_blocks = by_blocks
        self._stores = stores
        self._layers = {name: index for index, name in enumerate(layers)}
        self._left_to_others: list[JobOutcome] = []
        self._clock = clock
        self._loads: dict[int, Job] = {}
        self._failed_blocks: set[int] = set()
        self._output = ConnectorOutput()
        self._outcome = threading.Event()
        self._began = 0.0
        self._meta = StepMeta()
        self._measured = (0, 0.0)
        side.set_waker(self._outcome.set)

    @property
    def rank(self) -> int:
        return self._rank

    def begin(self, meta: StepMeta) -> None:
        """The forward pass is about to begin, and loads run beside it; stores wait for :meth:`forward_ended`."""
        self._meta, self._began = meta, self._clock()
        if meta.jobs:
            jobs = decode_meta(meta.jobs)
            self._loads.update((job.job_id, job) for job in jobs.loads)
            if not self._stores:
                self._left_to_others += [_nothing_to_do(job) for job in jobs.stores]
                jobs = msgspec.structs.replace(jobs, stores=[])
            self._side.start(jobs)

    def wait_layer(self, name: str) -> None:
        """Before attention reads the layer's KV: what layered loads bring to it is there, or will not come in time."""
        if (layer := self._layers.get(name)) is not None:
            self._side.wait_layer(layer)

    def forward_ended(self) -> None:
        """The step's KV is in memory."""
        self._side.forward_ended()
        self._measured = (self._meta.prefill_tokens, self._clock() - self._began)

    def transfer_results(self) -> TransferResults:
        """Take the outcomes; :meth:`failed_blocks` and :meth:`report` belong to the same step."""
        if not self._meta.tokens:
            self._outcome.wait(IDLE_WAIT_S)
        self._outcome.clear()
        self._output = self._side.take_output()
        finished, failed = set(), set()
        for outcome in self._output.outcomes:
            job = self._loads.pop(outcome.job_id, None) if outcome.kind is JobKind.LOAD else None
            if job is None:
                continue
            if not job.layered:  # vLLM is told of what it waits for
                finished.add(job.request_id)
            if 0 not in outcome.done:
                continue
            if self._by_blocks:
                self._failed_blocks.update(_missing(job, outcome))
            else:
                failed.add(job.request_id)
        return TransferResults(finished, failed)

    def failed_blocks(self) -> set[int]:
        """Block ids that the loads of this step's results did not bring; each once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> bytes:
        """A :class:`RankReport` of this step."""
        tokens, seconds = self._measured
        self._measured = (0, 0.0)
        output, others = self._output, self._left_to_others
        if others:
            output = msgspec.structs.replace(output, outcomes=[*output.outcomes, *others])
            self._left_to_others = []
        return encode(RankReport(output=output, prefill_tokens=tokens, forward_s=seconds))

    def close(self) -> None:
        self._side.close()


def _nothing_to_do(store: Job) -> JobOutcome:
    """This rank's part of a store that another one makes: done."""
    return JobOutcome(
        job_id=store.job_id, kind=store.kind, done=b"\1" * sum(len(entry.block_ids) for entry in store.groups)
    )


def _missing(job: Job, outcome: JobOutcome) -> list[int]:
    block_ids = [block_id for entry in job.groups for block_id in entry.block_ids]
    return [block_id for block_id, done in zip(block_ids, outcome.done, strict=True) if not done]
