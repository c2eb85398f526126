"""A file that is read again when it changes, and whose last good content stays in use when it has become bad."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from kvstrata.proto.errors import ConfigError

#: A change is seen within this.
LOOK_S: Final = 1.0
FILE_BYTES_MAX: Final = 1 << 20
#: Permissions that a secret must not have: reading and writing by others than its owner and group.
_OTHERS: Final = stat.S_IROTH | stat.S_IWOTH
_Seen = tuple[int, int, int]

T = TypeVar("T")


def read_private(path: Path, what: str, *, secret: bool) -> bytes:
    """The whole file. Raises :class:`ConfigError` when it cannot be read, is too large, or when others may change it
    or, of a ``secret``, read it. ``what`` names it in the error."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror or error}") from error
    if stat.S_ISREG(mode) and mode & (_OTHERS if secret else stat.S_IWOTH):
        raise ConfigError(
            f"the {what} {path} can be {'read or ' if secret else ''}changed by others: chmod o-rwx {path}"
        )
    check_size(content, path, what)
    return content


def check_size(content: bytes, path: Path, what: str) -> None:
    """Raises :class:`ConfigError` for more than :func:`read_private` reads."""
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"the {what} {path} has more than {FILE_BYTES_MAX} bytes: is it the right file?")


class WatchedFile(Generic[T]):
    """What ``load`` makes of files, made anew within ``LOOK_S`` of a change of any of them. Thread-safe.

    ``load`` runs at construction, where its :class:`ConfigError` goes to the caller; what it raises later, of any kind,
    is told by :meth:`problem`, and the last good content stays.
    """

    def __init__(
        self, paths: tuple[Path, ...], load: Callable[[], T], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = paths
        self._load = load
        self._clock = clock
        self._lock = threading.Lock()
        self._problem = ""
        self._looked = clock()
        self._seen = self._look()
        self._content = load()

    def current(self) -> T:
        """Cheap: looks at the files at most once in ``LOOK_S``, and not while another thread does."""
        if self._clock() - self._looked >= LOOK_S and self._lock.acquire(blocking=False):
            try:
                self._look_again()
            finally:
                self._lock.release()
        return self._content

    def refresh(self) -> None:
        """Look now; waits for another thread that does."""
        with self._lock:
            self._look_again()

    def _look_again(self) -> None:
        self._looked = self._clock()
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._content = self._load()
        except ConfigError as error:
            self._stays(str(error))
        except Exception as error:  # noqa: BLE001 (of any parser: callers go on; its text may show the content)
            self._stays(f"{self._paths[0]} cannot be read ({type(error).__name__})")
        else:
            self._problem = ""
            _log().info("file read again", path=str(self._paths[0]))

    def problem(self) -> str:
        """Why the files as they are now are not in use; empty when they are."""
        self.current()
        return f"{self._problem} (the last good one is in use)" if self._problem else ""

    def _stays(self, problem: str) -> None:
        if self._problem != problem:
            _log().error("changed file is not good, the last good one stays in use", problem=problem)
        self._problem = problem

    def _look(self) -> tuple[_Seen | None, ...]:
        return tuple(_seen(path) for path in self._paths)


def _log() -> Any:
    """Loaded when there is something to say: the heartbeat process, which watches a file too, has to stay light."""
    from kvstrata.proto.logs import get_logger

    return get_logger(__name__)


def _seen(path: Path) -> _Seen | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino
