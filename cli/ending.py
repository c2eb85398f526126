"""How a process of ours ends that has had NIXL in it: without the destructors of C libraries.

NIXL's wheel brings its own libnl, and loads the machine's as well where that has RDMA libraries: both take down what
they share when the process exits, and it dies of SIGSEGV with all its work done. Seen with NIXL 1.5.1 beside Debian's
libnl 3.7 and libibverbs 44.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator

_BINDINGS = tuple(f"{package}._bindings" for package in ("nixl_cu12", "nixl_cu13", "nixl"))


@contextlib.contextmanager
def leaving_quietly() -> Iterator[None]:
    """Around all that a process does. What Python runs at an exit is run; then, with NIXL, the process is over."""
    codes = [0]
    atexit.register(_leave, codes)  # registered first, it runs last
    try:
        yield
    except SystemExit as error:
        codes[0] = _code_of(error)
        raise
    except BaseException:
        codes[0] = 1
        raise


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _leave(codes: list[int]) -> None:
    if not any(name in sys.modules for name in _BINDINGS):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader that has gone is told by the code of its own
            stream.flush()
    os._exit(codes[0])
