"""A transfer that its call could not wait for, to be ended by a test."""

from __future__ import annotations

import threading
import time


class LateTransfer:
    """A :class:`kvstrata.transfer.base.Landing` that settles when ``over`` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def settled(self) -> bool:
        return self.over.is_set()

    def wait(self, deadline: float) -> bool:
        return self.over.wait(max(0.0, deadline - time.monotonic()))
