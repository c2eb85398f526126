"""The ranks of one engine as processes: each step is sent to all, and all are waited for.

A rank that dies is known by its pidfd, at once and by name. A rank that is silent is known by the meetings of the
ranks: while any rank comes to one, the step goes on, however long it takes.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.outputs import ModelRunnerOutput, SchedulerOutput
from kvstrata.engine_adapter.paged.ranks.collective import RankGroup
from kvstrata.engine_adapter.paged.ranks.rank_messages import (
    FromRank,
    RankFailed,
    RankReady,
    RunStep,
    StartRank,
    StepDone,
    ToRank,
)
from kvstrata.engine_adapter.paged.ranks.rank_process import RankProcess
from kvstrata.proto.errors import Closed, KVError, ProtocolError, Unavailable, from_code

#: For loading the model on every rank.
READY_S: Final = 600.0
#: For a step in which no rank makes progress.
SILENT_S: Final = 60.0
#: For a rank to close its connector, before it is killed.
STOP_S: Final = 15.0
#: How often progress is looked at while nothing is heard.
_GLANCE_S: Final = 0.25
#: After one rank has reported a failure: whether it was another's death that it saw.
_DEATH_S: Final = 0.2

Answer = TypeVar("Answer", RankReady, StepDone)


class ProcessExecutor:
    """Implements ``Executor``. The first loss of a rank is final: the others are killed, and every later call
    raises that loss again. Ranks end with this process, whatever ends it."""

    def __init__(
        self,
        config: EngineConfig,
        lookup_endpoint: str = "",
        *,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._silent_s = silent_s
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._lost: KVError | None = None
        self._group = RankGroup(config.tensor_parallel)
        self.ranks: list[RankProcess] = []
        try:
            for rank in range(config.tensor_parallel):
                self.ranks.append(RankProcess(rank, self._group, config.threads))
            self._group.drop()
            for process in self.ranks:
                start = StartRank(config=config, rank=process.rank, lookup_endpoint=lookup_endpoint)
                self._send([process], start)
            shapes = [ready.shape for ready in self._gather(RankReady, READY_S)]
        except BaseException:
            self._kill()
            raise
        if any(shape != shapes[0] for shape in shapes):
            self._kill()
            raise ProtocolError(f"ranks differ in what they loaded: {shapes}")
        self.kv_config, self.layout = shapes[0].kv_config, shapes[0].layout
        self.vocab_size, self.eos_token_id = shapes[0].vocab_size, shapes[0].eos_token_id
        self.max_model_len = shapes[0].max_model_len

    def execute(self, output: SchedulerOutput) -> list[ModelRunnerOutput]:
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        for process in self.ranks:
            process.drain_wake()
        try:
            self._send(self.ranks, RunStep(output=output))
            results = [done.output for done in self._gather(StepDone, self._silent_s)]
            _check_agreement(output.step_id, results)
        except BaseException as error:
            # Also an interrupt: the ranks' answers to this step must not pass for answers to the next.
            self._lost = error if isinstance(error, KVError) else Unavailable(f"step {output.step_id}: {error!r}")
            self._kill()
            raise
        return results

    def wake_fds(self) -> list[int]:
        return [process.wake_fd for process in self.ranks]

    def close(self) -> None:
        """All ranks close together, each within ``STOP_S``; a late one is killed."""
        if self._lost is None:
            self._lost = Closed("the executor is closed")
        for process in self.ranks:
            process.terminate()
        until = self._clock() + STOP_S
        for process in self.ranks:
            process.end(max(0.0, until - self._clock()))
        self.ranks = []
        self._group.close()

    def _kill(self) -> None:
        for process in self.ranks:
            process.end(0.0)
        self.ranks = []
        self._group.close()

    def _send(self, processes: Sequence[RankProcess], message: ToRank) -> None:
        frame = self._encoder.encode(message)
        for process in processes:
            try:
                process.channel.send(frame)
            except Unavailable as error:
                raise self._loss(process, str(error)) from error

    def _gather(self, kind: type[Answer], silent_s: float) -> list[Answer]:
        """One answer of every rank, in order of ranks."""
        answers: dict[int, Answer] = {}
        progress, moved_at = self._group.progress(), self._clock()
        poller = select.poll()
        for process in self.ranks:
            poller.register(process.channel, select.POLLIN)
            poller.register(process.pidfd, select.POLLIN)
        while len(answers) < len(self.ranks):
            ready = {fd for fd, _ in poller.poll(_GLANCE_S * 1000)}
            for process in self.ranks:
                if process.channel.fileno() in ready:
                    answer = self._read(process, kind)
                    if answer is not None:
                        answers[process.rank] = answer
                elif process.pidfd in ready:
                    raise self._loss(process, "ended")
            now = self._clock()
            reached = self._group.progress()
            if ready or reached != progress:
                progress, moved_at = reached, now
            elif now - moved_at > silent_s:
                raise self._silence([process for process in self.ranks if process.rank not in answers], silent_s)
        return [answers[process.rank] for process in self.ranks]

    def _read(self, process: RankProcess, kind: type[Answer]) -> Answer | None:
        """An answer if it is complete. Raises when the rank reports a failure, or has ended."""
        try:
            frame = process.channel.read()
            message = None if frame is None else self._decoder.decode(frame)
        except (Unavailable, ProtocolError, msgspec.ValidationError, msgspec.DecodeError) as error:
            raise self._loss(process, str(error)) from error
        if message is None:
            return None
        if isinstance(message, RankFailed):
            raise self._failure(process, message)
        if not isinstance(message, kind):
            raise self._loss(process, f"it sent {type(message).__name__} for {kind.__name__}")
        return message

    def _failure(self, process: RankProcess, failed: RankFailed) -> KVError:
        """A rank that loses another reports that: the one that was lost is the one to name."""
        lost = self._lost_peer(process) if failed.code == Unavailable.__name__ else None
        if lost is not None:
            return self._loss(lost, "ended")
        text = f"{process.name}: {failed.message}"
        return from_code(failed.code, text) if failed.code else Unavailable(text)

    def _lost_peer(self, reporter: RankProcess) -> RankProcess | None:
        """Another rank that ended without a word, now or within a moment."""
        until = self._clock() + _DEATH_S
        running = {process.pidfd: process for process in self.ranks if process is not reporter}
        while running:
            poller = select.poll()
            for pidfd in running:
                poller.register(pidfd, select.POLLIN)
            ended = [running.pop(pidfd) for pidfd, _ in poller.poll(max(0.0, until - self._clock()) * 1000)]
            if not ended:
                break
            for process in ended:
                if process.vanished:
                    return process
        return None

    def _loss(self, process: RankProcess, why: str) -> Unavailable:
        # Its end may be a moment behind the end of its channel.
        poller = select.poll()
        poller.register(process.pidfd, select.POLLIN)
        poller.poll(_DEATH_S * 1000)
        end = process.died() or f"{process.name} is lost: {why}"
        words = process.last_words()
        return Unavailable(f"{end}; it said last:\n{words}" if words else end)

    def _silence(self, waited_for: Sequence[RankProcess], silent_s: float) -> Unavailable:
        """Those that are furthest behind are what the others wait for."""
        progress = self._group.progress()
        behind = min(progress[process.rank] for process in waited_for)
        names = ", ".join(process.name for process in waited_for if progress[process.rank] == behind)
        return Unavailable(f"{names} made no progress for {silent_s:g} s")


def _check_agreement(step_id: int, results: Sequence[ModelRunnerOutput]) -> None:
    """Ranks compute the same logits bit by bit, so a difference is a defect, and whose is not known."""
    for rank, result in enumerate(results):
        if result.step_id != step_id or result.sampled != results[0].sampled:
            raise Unavailable(f"rank {rank} differs from rank 0 in step {step_id}: {result.sampled}")
