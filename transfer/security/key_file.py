"""The file of ticket keys, read again when it changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.security.tickets import TicketKeys
from kvstrata.transfer.security.watched_file import WatchedFile, read_private


class KeyFile:
    """The keys of ``path``, see :meth:`TicketKeys.parse`. Thread-safe.

    Raises :class:`ConfigError`, with what to do, when it cannot be used at first. What it becomes later is used within
    a second or two if it can be; else the last good keys stay, and :meth:`problem` says why.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._file = WatchedFile((path,), self._read, clock=clock)

    def keys(self) -> TicketKeys:
        """The keys of now. Cheap."""
        return self._file.current()

    def refresh(self) -> TicketKeys:
        """The keys that the file has at this moment, if it is good."""
        self._file.refresh()
        return self._file.current()

    def problem(self) -> str:
        """Why the file as it is now is not in use; empty when it is."""
        return self._file.problem()

    def _read(self) -> TicketKeys:
        content = read_private(self._path, "ticket keys", secret=True)
        try:
            return TicketKeys.parse(content.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path} is no text: is it the file of ticket keys?") from error
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error
