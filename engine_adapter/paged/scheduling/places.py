"""Where every live request is: one of four places, each in the order in which it will be served.

::

                 +--------- admitted, nothing to load ---------+
                 |                                             v
    add ---> waiting --- admitted, external hit ---> loading   running ---> (finished)
                 ^                                     |       ^   |
                 |                                     v       |   |
                 |                                    ready ---+   |
                 |                                     |  a seat   |
                 +--------------- preempted -----------+-----------+

A request that runs beside its load, and whose load does not end with that step, goes from running to loading.
``loading`` and ``ready`` requests hold blocks but no seat (``max_num_seqs``) and none of a step's tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvstrata.engine_adapter.paged.request import Request, RequestStatus


class Places:
    """The four places. Names the moves; decides nothing."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.by_id: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.loading: dict[int, Request] = {}  #: by job id
        self.ready: deque[Request] = deque()  #: loaded, before they have a seat
        self.running: list[Request] = []  #: in the order of admission: the last one has the lowest priority

    @property
    def has_seat(self) -> bool:
        return len(self.running) < self.max_num_seqs

    def enter(self, request: Request) -> None:
        """A new request, at the end of the queue."""
        self.by_id[request.request_id] = request
        self.waiting.append(request)

    def run(self, request: Request) -> None:
        """From waiting to running. Cheap near the front of the queue."""
        self.waiting.remove(request)
        self._seat(request)

    def load(self, request: Request, job_id: int) -> None:
        """From waiting to loading."""
        self.waiting.remove(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self.loading[job_id] = request

    def wait_for(self, request: Request, job_id: int) -> None:
        """From running to loading: it ran beside a load that has not ended."""
        self._take_out(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self.loading[job_id] = request

    def loaded(self, job_id: int) -> Request | None:
        """From loading to ready; None for a job that no request waits for."""
        request = self.loading.pop(job_id, None)
        if request is not None:
            request.status = RequestStatus.WAITING
            self.ready.append(request)
        return request

    def seat_ready(self) -> None:
        """From ready to running, while there are seats."""
        while self.ready and self.has_seat:
            self._seat(self.ready.popleft())

    def send_back(self, request: Request) -> None:
        """From running or ready to the front of the queue. Several go back in reverse order of admission."""
        self._take_out(request)
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)

    def leave(self, request: Request) -> None:
        """Gone for good, from wherever it is."""
        self._take_out(request)
        del self.by_id[request.request_id]

    def victim(self, kept: Request) -> Request | None:
        """Who gives up blocks for ``kept``: the last one admitted after it, those without a seat first."""
        if self.ready:
            return self.ready[-1]
        last = self.running[-1]
        return None if last is kept else last

    def _seat(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def _take_out(self, request: Request) -> None:
        match request.status:
            case RequestStatus.RUNNING:
                self.running.remove(request)
            case RequestStatus.WAITING_FOR_REMOTE_KVS:
                del self.loading[next(job for job, other in self.loading.items() if other is request)]
            case _ if request in self.ready:
                self.ready.remove(request)
            case _:
                self.waiting.remove(request)

    def __iter__(self) -> Iterator[Request]:
        yield from self.waiting
        yield from self.loading.values()
        yield from self.ready
        yield from self.running

    def check(self) -> None:
        """Assert that every live request is in exactly one place, with the status of that place."""
        placed = list(self)
        assert len(placed) == len(self.by_id), f"{len(placed)} requests in places, {len(self.by_id)} alive"
        assert all(self.by_id.get(request.request_id) is request for request in placed), "a request in two places"
        queued = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert all(request.status in queued for request in self.waiting)
        assert all(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in self.loading.values())
        assert all(request.status is RequestStatus.WAITING for request in self.ready)
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        assert len(self.running) <= self.max_num_seqs, f"{len(self.running)} running, {self.max_num_seqs} seats"
