"""What one call does, counted: frames it sends by kind, function calls of its thread, the memory it takes."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from kvstrata.proto.wire import Kind
from kvstrata.transfer.frames import FrameStream


def function_calls(call: Callable[[], object]) -> int:
    """Calls of Python and C functions in this thread: the same on every machine for the same work.

    What polls while it waits for an answer, for as long as that takes, is left out.
    """
    count = 0
    polling = FrameStream.spin.__code__

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call") and frame.f_code is not polling

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def least_function_calls(call: Callable[[], object], times: int = 5) -> int:
    """The least of a few: on a busy machine an answer may come in parts, or from a node that was asked again."""
    return min(function_calls(call) for _ in range(times))


@contextmanager
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Frames that this thread sends, by kind; those of loops in the background are left out."""
    sent: Counter[str] = Counter()
    thread = threading.get_ident()
    send = FrameStream.send

    def counted(self: FrameStream, kind: int, *given: Any, **named: Any) -> None:
        if threading.get_ident() == thread:
            sent[Kind(kind).name] += 1
        send(self, kind, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(FrameStream, "send", counted)
        yield sent


def memory_peak(call: Callable[[], object]) -> int:
    """The most bytes that Python and numpy held at once for a call, beyond what they had before."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def slope(few: int, many: int, few_blocks: int, many_blocks: int) -> float:
    """What one more block costs."""
    return (many - few) / (many_blocks - few_blocks)
