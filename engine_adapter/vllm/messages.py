"""What goes between the halves, inside of vLLM's own messages: the core's, encoded, and a step's measure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvstrata.engine_adapter.connector.base import ConnectorMeta, ConnectorOutput


@dataclass(frozen=True, slots=True)
class StepMeta:
    """Down, once a step. ``jobs``: a :class:`ConnectorMeta`, or empty. ``tokens`` are scheduled; ``prefill_tokens`` of
    them are worth a measure."""

    jobs: bytes = b""
    tokens: int = 0
    prefill_tokens: int = 0


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """Up, once a step and rank. ``prefill_tokens`` were computed in ``forward_s``; 0 where there is no measure."""

    output: ConnectorOutput
    prefill_tokens: int = 0
    forward_s: float = 0.0


_encoder = msgspec.msgpack.Encoder()
_meta_decoder = msgspec.msgpack.Decoder(ConnectorMeta)
_report_decoder = msgspec.msgpack.Decoder(RankReport)


def encode(message: ConnectorMeta | RankReport) -> bytes:
    return _encoder.encode(message)


def decode_meta(data: bytes) -> ConnectorMeta:
    """Raises :class:`msgspec.DecodeError` for what is none: another version in the other process."""
    return _meta_decoder.decode(data)


def decode_report(data: bytes) -> RankReport:
    """As :func:`decode_meta`."""
    return _report_decoder.decode(data)
