"""A bounded log of what happened to each request, so that "why is it slow" has an answer."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

#: Requests remembered; the one that was longest without an event is forgotten first.
REQUESTS_MAX: Final = 1024
#: Events remembered a request, latest ones.
EVENTS_MAX: Final = 64

Event = tuple[float, str]  #: (seconds on the scheduler's clock, what happened)


class Story:
    """Events by request id. An id that comes back continues its story."""

    def __init__(self) -> None:
        self._events: OrderedDict[str, deque[Event]] = OrderedDict()

    def tell(self, request_id: str, at: float, event: str) -> None:
        events = self._events.get(request_id)
        if events is None:
            events = self._events[request_id] = deque(maxlen=EVENTS_MAX)
            if len(self._events) > REQUESTS_MAX:
                self._events.popitem(last=False)
        else:
            self._events.move_to_end(request_id)
        events.append((at, event))

    def of(self, request_id: str) -> list[Event]:
        """Oldest first; empty for an id that is not, or no longer, remembered."""
        return list(self._events.get(request_id, ()))
