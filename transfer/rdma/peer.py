"""One node as a client reaches it over rails, with its TCP connections for all else.

A load is one round trip (acquire), one transfer that this process's agent makes by itself, and a small one for the
slots' generation words. A store is pulled by the node's agent. While there are no rails, bytes go over TCP, unless
rails are all that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from kvstrata.proto.errors import Busy, InvalidArgument, KVError, LeaseExpired, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus, HintKind
from kvstrata.transfer.base import Endpoint, Fetch, Fetched, Lease, Mask, Named, Push, Pushed, StatusArray
from kvstrata.transfer.checksums import Sampler, block_checksum
from kvstrata.transfer.frames import Late
from kvstrata.transfer.grants import Granted
from kvstrata.transfer.link import settle, undecided
from kvstrata.transfer.pulling import pull
from kvstrata.transfer.rdma.client_rails import ClientRails
from kvstrata.transfer.rdma.landing import Unsettled, wait_for
from kvstrata.transfer.rdma.opening import Opened
from kvstrata.transfer.rdma.reading import Reading
from kvstrata.transfer.rdma.session import RailSession, RailState
from kvstrata.transfer.rdma.told import ToldRegions
from kvstrata.transfer.regions import BlockView, Region
from kvstrata.transfer.tcp import TcpPeer
from kvstrata.transfer.tracing import TRACING

log = get_logger(__name__)

_LOADED: Final = int(BlockStatus.LOADED)


class RailFailed(Unavailable):
    """The rails failed, not the node: the bytes may go another way."""


class RdmaPeer:
    """``only``: bytes go over rails or not at all. ``tcp`` becomes this object's own."""

    def __init__(self, tcp: TcpPeer, own: ClientRails, *, only: bool) -> None:
        self.endpoint: Endpoint = tcp.endpoint
        self.link = tcp.link
        self.rails = RailSession(tcp.link, own)
        self._tcp = tcp
        self._own = own
        self.only = only
        self._sampler = Sampler()
        self._tamper: Callable[[BlockView, int], None] | None = None
        self._told = ToldRegions(tcp.link)
        self._unsettled: set[Unsettled] = set()

    @property
    def transport(self) -> str:
        """What bytes take now."""
        return "rdma" if self.only or self.rails.state is RailState.UP else "tcp"

    @property
    def tamper(self) -> Callable[[BlockView, int], None] | None:
        return self._tamper

    @tamper.setter
    def tamper(self, tamper: Callable[[BlockView, int], None] | None) -> None:
        self._tamper = self._tcp.tamper = tamper

    def reaches_memory(self, region: Region) -> bool:
        """Whether bytes can move straight between the node and ``region`` now."""
        opened = self.rails.ready()
        return opened is not None and opened.agent.memory.known(region)

    def _ready(self, deadline: float) -> Opened | None:
        """Rails to use now. Raises :class:`Unavailable` when there are none and nothing else will do."""
        if not self.only:
            return self.rails.ready()
        opened = self.rails.wait(deadline)
        if opened is None:
            raise Unavailable(f"no rails to node {self.endpoint.node_id}: {self.rails.problem or 'not open yet'}")
        return opened

    # ------------------------------------------------------------------ reading

    def fetch(self, request: Fetch) -> Fetched:
        status = undecided(len(request.blocks))
        try:
            opened = self._ready(request.deadline)
            if opened is not None:
                return self._fetch(opened, request)
        except RailFailed as error:
            if self.only or not self.reachable():
                settle(status, error)
        except KVError as error:
            settle(status, error)
        if status.any():
            return Fetched(status, np.zeros(len(status), np.uint8))
        self._check_host(request.blocks.region)
        return self._tcp.fetch(request)

    def _fetch(self, opened: Opened, request: Fetch) -> Fetched:
        """Raises :class:`RailFailed` when no byte is under way and nothing was reported as landed."""
        status, tier = undecided(len(request.blocks)), np.zeros(len(request.blocks), np.uint8)
        self._know(opened, request.blocks.region, request.deadline)
        link = self.link
        answer, sent = link.acquire(request.namespace, request.salt, request.hashes, request.deadline, request.epoch)
        granted = Granted(answer, sent, len(status))
        status[:] = granted.status
        pending: tuple[Unsettled, ...] = ()
        if granted.count:
            tier[granted.positions] = granted.tier
            status[granted.positions] = BlockStatus.UNKNOWN
            pending = self._copy_out(opened, request, granted, status)
        moved = int(np.count_nonzero(status == _LOADED)) * request.namespace.block_bytes
        return Fetched(status, tier, granted.delta_seq, moved, pending)

    def _copy_out(self, opened: Opened, request: Fetch, granted: Granted, status: StatusArray) -> tuple[Unsettled, ...]:
        """Read and check what was granted; what was given up. The lease is given back when nothing uses it."""
        whole = granted.count == len(request.blocks)
        blocks = request.blocks if whole else request.blocks[granted.positions]
        reported = 0

        def landed(index: int, good: Mask) -> None:
            nonlocal reported
            if request.landed is not None and request.parts:
                loaded = np.zeros(len(request.blocks), bool)
                loaded[granted.positions] = good
                reported += 1
                request.landed(index, loaded)

        reading: Reading | None = None
        problem: Exception | None = None
        try:
            reading = Reading(opened, granted, blocks, request.deadline)
            with TRACING.span("kvstrata.copy"):
                wait = partial(wait_for, channel=self.link.channel, deadline=request.deadline)
                good = reading.run(wait, request.parts, landed)
            with TRACING.span("kvstrata.verify"):
                status[granted.positions] = self._verdict(request, granted, blocks, good)
            self.rails.worked()
        except Exception as error:  # noqa: BLE001  a mistake is raised below, unless it would hide what is left
            problem = error
        finally:
            left = self._left(reading, request, problem)
            if left is None:
                self.link.give_back(granted.lease)
            else:
                self._hold(left, granted.lease)
        if problem is None:
            return ()
        failed = isinstance(problem, Unavailable) and not isinstance(problem, Late)
        if failed or left is not None:
            self.rails.failed(opened, str(problem))
        if left is not None:
            status[granted.positions] = BlockStatus.PENDING
            if not isinstance(problem, KVError):
                log.error("a read failed while a transfer was under way", exc_info=problem)
            return (left,)
        if not isinstance(problem, KVError):
            raise problem
        if failed and not reported:
            raise RailFailed(str(problem)) from problem
        settle(status, problem)
        return ()

    def _left(self, reading: Reading | None, request: Fetch, problem: Exception | None) -> Unsettled | None:
        """What is under way still, and will not be waited for."""
        jobs = [] if reading is None else [job for job in reading.jobs if not job.settled()]
        if isinstance(problem, LeaseExpired):  # the node is alive: what is left comes soon
            for job in jobs:
                job.wait(request.deadline)
        jobs = [job for job in jobs if not (job.settled() or job.give_up())]
        return Unsettled(jobs, request.blocks.region) if jobs else None

    def _hold(self, left: Unsettled, lease: int) -> None:
        """Its node may not reuse the slots, nor the caller its memory, for as long as that can be helped."""

        def settled() -> None:
            self._unsettled.discard(left)
            self.link.give_back(lease)

        self._unsettled.add(left)
        left.then(settled)

    def _verdict(self, request: Fetch, granted: Granted, blocks: BlockView, good: Mask) -> StatusArray:
        """u8[granted]: LOADED where the slots are unchanged and samples match."""
        verdict = np.full(granted.count, _LOADED, np.uint8)
        if blocks.region.memory.on_host:
            if self._tamper is not None:
                for index in range(len(blocks)):
                    self._tamper(blocks, index)
            for index in self._sampler.choose(granted.count, request.verify):
                if block_checksum(blocks, index) != int(granted.checksum[index]):
                    verdict[index] = BlockStatus.CORRUPT
        verdict[~good] = BlockStatus.LEASE_LOST
        return verdict

    def view(self, namespace: Namespace, salt: str, hashes: bytes, deadline: float, epoch: int = 0) -> Lease:
        return self._tcp.view(namespace, salt, hashes, deadline, epoch)

    def prefetch(self, blocks: Named) -> StatusArray:
        return self.link.prefetch(blocks)

    def hint(self, blocks: Named, kind: HintKind, ttl_s: float) -> int:
        return self.link.hint(blocks, kind, ttl_s)

    # ------------------------------------------------------------------ writing

    def push(self, request: Push) -> Pushed:
        status, durable = undecided(len(request.blocks)), np.zeros(len(request.blocks), bool)
        try:
            opened = self._ready(request.deadline)
            if opened is not None:
                self._push(opened, request, status, durable)
        except (RailFailed, Busy) as error:
            if self.only or not self.reachable() or status.any():
                settle(status, error)
        except KVError as error:
            settle(status, error)
        if not status.any():
            self._check_host(request.blocks.region)
            return self._tcp.push(request)
        moved = int(np.count_nonzero(status == BlockStatus.STORED)) * request.namespace.block_bytes
        return Pushed(status, moved, durable)

    def _push(self, opened: Opened, request: Push, status: StatusArray, durable: Mask) -> None:
        region = request.blocks.region
        self._know(opened, region, request.deadline)
        self._tell(opened, region, request.deadline)
        opened.agent.engine.stir()
        try:
            try:
                pull(self.link, request, status, durable)
            except InvalidArgument as error:
                if "region" not in str(error):
                    raise
                self._told.untold(region)  # the node forgot our session: a broken link
                self._tell(opened, region, request.deadline)
                pull(self.link, request, status, durable)
            late = status == BlockStatus.PENDING
            if late.any():  # it reads what nobody will commit: harmless, for as long as there is memory
                status[late] = BlockStatus.LATE
                self._told.unanswered(region)
            else:
                self.rails.worked()
        except InvalidArgument as error:
            self.rails.failed(opened, str(error))
            raise RailFailed(str(error)) from error
        except Late:
            self._told.unanswered(region)
            raise
        except Unavailable as error:
            if self.reachable():  # an answer: the node's agent could not read
                self.rails.failed(opened, str(error))
                raise RailFailed(str(error)) from error
            self._told.unanswered(region)
            raise

    # ------------------------------------------------------------------ memory

    def _check_host(self, region: Region) -> None:
        """No other way leads to device memory: it is staged, where that is known how. Raises :class:`Unavailable`."""
        if not region.memory.on_host:
            raise Unavailable(f"no rails to node {self.endpoint.node_id} now, for memory on {region.memory.spelled()}")

    def _know(self, opened: Opened, region: Region, deadline: float) -> None:
        """The region is registered with our agent. Raises :class:`RailFailed` when it cannot be, :class:`Late`."""
        try:
            self._own.know(opened.agent, region, deadline)
        except Late:
            raise
        except Unavailable as error:
            raise RailFailed(str(error)) from error

    def _tell(self, opened: Opened, region: Region, deadline: float) -> None:
        """The node knows the region."""
        try:
            self._told.tell(opened, region, deadline)
        except InvalidArgument as error:  # it has forgotten our agent
            self.rails.failed(opened, str(error))
            raise RailFailed(str(error)) from error

    def forget(self, region: Region) -> bool:
        """See :meth:`ToldRegions.forget`."""
        return self._told.forget(region)

    def unsettled(self, region: Region | None = None) -> list[Unsettled]:
        """Reads that were given up and have not settled: into ``region``, or all."""
        return [one for one in list(self._unsettled) if region is None or one.region is region]

    # ------------------------------------------------------------------ upkeep

    def reachable(self) -> bool:
        return self.link.channel.breaker.closed

    def upkeep(self) -> None:
        self._tcp.upkeep()
        self.rails.upkeep()
        self._told.upkeep()

    def rail_health(self) -> dict[str, object]:
        """Plain values: see :meth:`RailSession.health`; and what has not settled."""
        return {**self.rails.health(), "unsettled": len(self._unsettled), "regions_leaving": self._told.leaving}

    def close(self) -> None:
        self.rails.close()
        self._tcp.close()
