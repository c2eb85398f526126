"""Stop strings in text that comes in pieces: nothing of a stop string gets out, however it is cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until one of ``stops`` appears; holds back only what may yet become one.

    The match that is complete first counts, of two that end together the longer one: as if the text came one
    character at a time, so the result does not depend on how it was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can go out now, in order. After ``stopped`` nothing comes any more."""
        if self.stopped:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        out, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return out

    def finish(self) -> str:
        """The text ended without a stop string: what was held back is text after all."""
        out, self._held = self._held, ""
        return out

    def check(self) -> None:
        assert len(self._held) < max((len(stop) for stop in self._stops), default=1)
        assert not (self.stopped and self._held)
        assert all(stop not in self._held for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, shorter than ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
