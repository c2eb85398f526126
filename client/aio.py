"""The async face: the same core, its calls run on a bounded set of threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstrata.client.arguments import Hashes
from kvstrata.client.client import Client
from kvstrata.client.fanout import OVERDUE_S
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.results import LoadResult, Lookup, Mask, RemoveResult, StoreResult
from kvstrata.client.view import View
from kvstrata.proto.errors import Closed
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.base import Verify
from kvstrata.transfer.regions import BlockView, Region

log = get_logger(__name__)

THREADS: Final = 16
#: What a cancelled call left under way is looked at so often.
SETTLE_PERIOD_S: Final = 0.01

R = TypeVar("R")


class AsyncClient:
    """:class:`Client` for asyncio: same arguments, same results, same errors.

    A cancelled call is waited for before the cancellation goes on: until a transfer has ended its memory is
    in use, and every call ends by ``transfer_deadline_ms``. What is PENDING then is waited for too, however long that
    takes: nobody would hear of it. Registration is not async: it moves no bytes.
    """

    def __init__(
        self,
        masters: str,
        token: str | None = None,
        transport: str = "auto",
        verify: Verify = "sample",
        transfer_deadline_ms: int = 2000,
        *,
        name: str = "",
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        insecure: bool = False,
    ) -> None:
        self.sync = Client(
            masters,
            token,
            transport,
            verify,
            transfer_deadline_ms,
            name=name,
            token_file=token_file,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            insecure=insecure,
        )
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstrata-aio")

    def register(self, buffer: Any, *, staged: bool = False) -> Region:
        return self.sync.register(buffer, staged=staged)

    def allocate(self, nbytes: int) -> Region:
        return self.sync.allocate(nbytes)

    async def unregister(self, region: Region) -> None:
        await self._run(partial(self.sync.unregister, region))

    async def namespace(self, group: str, **layout: int) -> PoolNamespace:
        """Keywords as for :meth:`Client.namespace`."""
        return await self._run(partial(self.sync.namespace, group, **layout))

    async def lookup(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes, *, request: str = "") -> Lookup:
        return await self._run(partial(self.sync.lookup, namespace, cache_salt, hashes, request=request))

    async def exists(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> Mask:
        return await self._run(partial(self.sync.exists, namespace, cache_salt, hashes))

    async def prefetch(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> Lookup | None:
        """Ends when the blocks are ready, as ``Client.prefetch(...).wait()``; make a task of it to go on meanwhile."""
        return await self._run(lambda: self.sync.prefetch(namespace, cache_salt, hashes).wait())

    async def keep(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes, ttl_s: float) -> int:
        return await self._run(partial(self.sync.keep, namespace, cache_salt, hashes, ttl_s))

    async def forget(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> int:
        return await self._run(partial(self.sync.forget, namespace, cache_salt, hashes))

    async def drop(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> int:
        return await self._run(partial(self.sync.drop, namespace, cache_salt, hashes))

    async def load(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes, blocks: BlockView) -> LoadResult:
        ordered = self.sync._ordered(blocks)
        return await self._run(partial(self.sync.load, namespace, cache_salt, hashes, ordered))

    async def store(
        self,
        namespace: PoolNamespace,
        cache_salt: str,
        hashes: Hashes,
        blocks: BlockView,
        parent: bytes | None = None,
        first_index: int = 0,
    ) -> StoreResult:
        ordered = self.sync._ordered(blocks)
        return await self._run(
            partial(self.sync.store, namespace, cache_salt, hashes, ordered, parent=parent, first_index=first_index)
        )

    async def remove(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> RemoveResult:
        return await self._run(partial(self.sync.remove, namespace, cache_salt, hashes))

    @asynccontextmanager
    async def view(self, namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> AsyncIterator[View]:
        context = self.sync.view(namespace, cache_salt, hashes)
        view = await self._run(context.__enter__)
        try:
            yield view
        finally:
            await self._run(partial(context.__exit__, None, None, None))

    def health(self) -> dict[str, object]:
        return self.sync.health()

    async def close(self) -> None:
        """As :meth:`Client.close`; safe twice."""
        await asyncio.to_thread(self.sync.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, call: Callable[[], R]) -> R:
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        except RuntimeError as error:
            if asyncio.get_running_loop().is_closed():
                raise
            raise Closed("the client is closed") from error
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if future.exception() is None:
                await _settled(future.result())
            raise


async def _settled(result: object) -> None:
    """Wait until no memory that a result names is in use; a second cancellation ends it."""
    if not isinstance(result, LoadResult | StoreResult):
        return
    overdue = time.monotonic() + OVERDUE_S
    while not result.settled():
        if time.monotonic() > overdue:
            log.error("a cancelled call has not settled; its memory stays in use", waited_s=OVERDUE_S)
            overdue += OVERDUE_S
        await asyncio.sleep(SETTLE_PERIOD_S)
