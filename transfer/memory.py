"""What kind of memory bytes lie in: the host's, or a device's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstrata.proto.errors import InvalidArgument

#: Kinds that descriptors may name beside the host's.
DEVICE_KINDS: Final = ("cuda", "rocm")


@dataclass(frozen=True, slots=True)
class Memory:
    """``kind``: "host", or one of :data:`DEVICE_KINDS`; ``device``: its number, 0 for the host."""

    kind: str = "host"
    device: int = 0

    @property
    def on_host(self) -> bool:
        return self.kind == "host"

    def spelled(self) -> str:
        """ "cuda:0"; "" for the host. Wire format."""
        return "" if self.on_host else f"{self.kind}:{self.device}"

    @classmethod
    def parse(cls, text: str) -> Memory:
        """The inverse of :meth:`spelled`; raises :class:`InvalidArgument`."""
        if not text:
            return HOST
        kind, _, device = text.partition(":")
        if kind not in DEVICE_KINDS or not device.isdecimal() or len(device) > 5:
            raise InvalidArgument(f"memory {text!r} is unknown: expected KIND:DEVICE, as cuda:0")
        return cls(kind, int(device))


HOST: Final = Memory()
