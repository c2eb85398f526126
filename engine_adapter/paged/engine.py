"""One engine: a scheduler, its ranks, and its half of the connector, turned by whoever calls :meth:`Engine.step`."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvstrata.engine_adapter.connector.base import BlockHolder, SchedulerSide
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.kv_cache_manager import KVCacheManager
from kvstrata.engine_adapter.paged.cache.published_events import PublishedEvents
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.outputs import RequestOutput
from kvstrata.engine_adapter.paged.ranks.executor import Executor, make_executor
from kvstrata.engine_adapter.paged.request import Request, SamplingParams
from kvstrata.engine_adapter.paged.scheduling.scheduler import Scheduler
from kvstrata.engine_adapter.paged.scheduling.story import Event
from kvstrata.engine_adapter.paged.stats import EngineStats
from kvstrata.engine_adapter.paged.text.tokenizer import Tokenizer, load_tokenizer
from kvstrata.proto.errors import InvalidArgument, Unavailable

#: While a lookup has no answer the step is tried again this often: its deadline makes no descriptor readable.
LOOKUP_POLL_S: Final = 0.02
#: Its sockets: a folder of its own, to which eight characters are added, and the one for lookups.
FOLDER, LOOKUP_SOCKET = "kvstrata-engine-", "lookup"
#: What a step that only waits for transfers is tried again after, should a wake-up be lost.
TRANSFER_POLL_S: Final = 1.0

Connect = Callable[[BlockHolder], SchedulerSide]


class Engine:
    """Requests in, tokens out. For one thread, but for :meth:`wake` and :meth:`make_request`.

    ``connect`` makes the scheduler's half of the connector over the engine's blocks; None: no pool. The engine
    owns the executor, and closes it.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        connect: Connect | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_model_len = executor.max_model_len
        self.executor = executor
        self._clock = clock
        hash_tokens = executor.layout.hash_block_tokens
        self._hasher = BlockHasher(hash_tokens, config.cache.hash_algorithm)
        self.kv = KVCacheManager(
            executor.kv_config,
            hash_block_size=hash_tokens,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            events=bool(config.kv_events.endpoint),
        )
        self._published = PublishedEvents(config.kv_events) if config.kv_events.endpoint else None
        self.connector = connect(self.kv.pool) if connect is not None else None
        self.scheduler = Scheduler(
            config.step, self.kv, self.connector, max_model_len=executor.max_model_len, clock=clock
        )
        self._runnable = False  # another step may do something
        self._generated = itertools.count()
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._cleanup = contextlib.ExitStack()

    @classmethod
    def create(cls, config: EngineConfig) -> Engine:
        """Build all that ``config`` says. Takes as long as loading the model does.

        Raises :class:`InvalidArgument` (or another :class:`Refused`) for what cannot be, and :class:`Unavailable`
        for a rank that did not come up. A pool that is absent is no error.
        """
        config.validated()
        tokenizer = load_tokenizer(config.model.tokenizer)
        if not config.pool.masters:
            return cls(config, make_executor(config), tokenizer)
        # Nothing of a pool is needed, or imported, without one.
        from kvstrata.engine_adapter.connector.scheduler_side import make_scheduler_side
        from kvstrata.transfer.socket_folder import socket_home

        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=socket_home(f"{FOLDER}12345678/{LOOKUP_SOCKET}")))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            endpoint = f"ipc://{folder / LOOKUP_SOCKET}"
            executor = make_executor(config, endpoint)
            stack.callback(executor.close)
            engine = cls(
                config,
                executor,
                tokenizer,
                lambda holder: make_scheduler_side(executor.layout, config.pool, endpoint, holder),
            )
            engine._cleanup = stack.pop_all()
        return engine

    # -- requests

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str = "",
        extra_keys: Sequence[str] = (),
        trace: str = "",
    ) -> Request:
        """Check and hash a request, for :meth:`enqueue`. From any thread.

        Raises :class:`InvalidArgument` for an empty prompt, a token that the model does not have, or parameters
        out of range.
        """
        if prompt_token_ids and not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < self.executor.vocab_size:
            raise InvalidArgument(
                f"token ids from {min(prompt_token_ids)} to {max(prompt_token_ids)}: "
                f"the model has 0 to {self.executor.vocab_size - 1}"
            )
        return Request(
            request_id,
            prompt_token_ids,
            sampling,
            self._hasher,
            cache_salt=cache_salt,
            extra_keys=extra_keys,
            trace=trace,
            eos_token_id=self.executor.eos_token_id,
            arrival_s=self._clock(),
        )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str = "",
        extra_keys: Sequence[str] = (),
    ) -> None:
        """Queue a request. One that can never fit ends in the next step, with ``finish_reason`` "error".

        Raises as :meth:`make_request` and :meth:`Scheduler.add_request` do.
        """
        self.enqueue(
            self.make_request(request_id, prompt_token_ids, sampling, cache_salt=cache_salt, extra_keys=extra_keys)
        )

    def enqueue(self, request: Request) -> None:
        """Queue a request that was made before. Raises as :meth:`Scheduler.add_request` does."""
        self.scheduler.add_request(request)
        self._runnable = True

    def abort(self, request_id: str) -> None:
        """End it; its last output comes with the next step. An unknown id is nothing to do."""
        self.scheduler.abort(request_id)
        self._runnable = True

    # -- steps

    @property
    def has_work(self) -> bool:
        """Requests that have not ended, or transfers under way."""
        return self.scheduler.has_unfinished or (self.connector is not None and self.connector.jobs_pending() > 0)

    def step(self) -> list[RequestOutput]:
        """Run one step on all ranks; what it brought. Raises :class:`KVError` when a rank is lost: the engine's end.

        A step may have nothing to compute, while transfers are under way: :meth:`wait` before the next one.
        """
        output = self.scheduler.schedule()
        outputs = self.scheduler.update(output, self.executor.execute(output))
        self._runnable = self.scheduler.progressed
        self._publish()
        return outputs

    def _publish(self) -> None:
        if self._published is not None:
            self._published.publish(self.kv.take_events())

    def wait(self, timeout_s: float) -> None:
        """Return when a step may do something, when woken, or after ``timeout_s`` seconds."""
        work = self.has_work
        if work and self._runnable:
            return
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if work:
            timeout_s = min(timeout_s, TRANSFER_POLL_S)
            for descriptor in self.executor.wake_fds():
                poll.register(descriptor, select.POLLIN)
            # Only while somebody waits for an answer does a step read them.
            if self.scheduler.num_not_yet and self.connector is not None:
                timeout_s = min(timeout_s, LOOKUP_POLL_S)
                answers = self.connector.fileno_or_none()
                if answers is not None:
                    poll.register(answers, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """End a :meth:`wait`, the present one or the next. From any thread; nothing after :meth:`close`."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        cache_salt: str = "",
        *,
        deadline_s: float = 600.0,
    ) -> list[list[int]]:
        """Output tokens of each prompt; steps until all have ended. Requests of others go on, their outputs are lost.

        Raises :class:`InvalidArgument` when one is refused, :class:`Unavailable` past ``deadline_s``.
        """
        deadline = self._clock() + deadline_s
        tokens: dict[str, list[int]] = {f"generate-{next(self._generated)}": [] for _ in prompts}
        unfinished = dict.fromkeys(tokens)
        try:
            for request_id, prompt in zip(tokens, prompts, strict=True):
                self.add_request(request_id, prompt, sampling, cache_salt=cache_salt)
            while unfinished:
                if self._clock() > deadline:
                    raise Unavailable(f"{len(unfinished)} of {len(prompts)} prompts have no end after {deadline_s} s")
                for output in self.step():
                    if output.request_id not in unfinished:
                        continue
                    tokens[output.request_id] += output.new_token_ids
                    if output.finish_reason is not None:
                        del unfinished[output.request_id]
                    if output.error:
                        raise InvalidArgument(output.error)
                if unfinished:
                    self.wait(1.0)
        finally:
            for request_id in unfinished:
                self.abort(request_id)
        return list(tokens.values())

    # -- what can be asked

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def problems(self) -> list[str]:
        """What is wrong with the threads that load and store, as of the last step. The engine serves all the same."""
        problems = self.connector.problems() if self.connector is not None else []
        return problems + self._published.problems() if self._published is not None else problems

    @property
    def kv_events(self) -> dict[str, str]:
        """Where KV events are published, for the ready line."""
        return self._published.endpoints if self._published is not None else {}

    def story(self, request_id: str) -> list[Event]:
        """(seconds on the clock, what happened to the request), oldest first; bounded."""
        return self.scheduler.story(request_id)

    def reset_prefix_cache(self, *, reset_external: bool = False) -> bool:
        """Forget the engine's own cached blocks. False, and nothing done, while any is in use.

        ``reset_external``: the weights are new, so open the pool's namespaces anew, at its weight epoch of now. What
        the pool has of that epoch is found from then on; nothing is removed from it.
        """
        if not self.kv.reset_prefix_cache():
            return False
        self._publish()
        if reset_external and self.connector is not None:
            self.connector.reset()
            self._runnable = True
        return True

    def close(self) -> None:
        """End the ranks and the connector; requests that live are lost. Bounded; idempotent."""
        with self._wake_lock:
            if self._wake_fd < 0:
                return
            os.close(self._wake_fd)
            self._wake_fd = -1
        with self._cleanup:
            self.executor.close()
            if self.connector is not None:
                self.connector.close()
            if self._published is not None:
                self._published.close()
