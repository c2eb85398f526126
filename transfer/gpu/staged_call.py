"""What a read into and a write from device memory have in common: how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstrata.proto.errors import KVError, Refused
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Landing, Peer
from kvstrata.transfer.gpu.flights import DeviceFailed
from kvstrata.transfer.gpu.ring import Ring
from kvstrata.transfer.link import settle, undecided

log = get_logger(__name__)

#: When all blocks of a chunk ended so, the node is not asked about the rest.
OVER: Final = (int(BlockStatus.NODE_LOST), int(BlockStatus.LATE))


class StagedCall:
    """``_pending``: copies of the caller's memory that the call does not wait for. ``_copies_ended``: seen done."""

    def __init__(self, inner: Peer, ring: Ring, count: int) -> None:
        self._inner, self._ring = inner, ring
        self._status = undecided(count)
        self._pending: list[Landing] = []
        self._copies_ended = 0
        self._device_failed = False

    def _carry_out(self, work: Callable[[], None], end: Callable[[], None]) -> Exception | None:
        """``work``, and in any case ``end``; what the whole call is refused for, or a mistake in this program."""
        try:
            work()
        except Refused as error:
            return error
        except KVError as error:
            settle(self._status, error)
        except DeviceFailed as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001  the caller raises it, or has it in the log
            return error
        finally:
            end()
        return None

    def _finish(self, refusal: Exception | None, what: str) -> None:
        """Raise ``refusal`` when nothing touches the caller's memory, and else log it."""
        if refusal is not None:
            if not self._pending:
                raise refusal
            log.warning(f"a {what} was refused while a copy was under way", reason=str(refusal), exc_info=refusal)
        if self._copies_ended and not self._device_failed:
            self._ring.succeeded()

    def _failed(self, error: DeviceFailed) -> None:
        self._device_failed = True
        self._ring.failed(str(error))
