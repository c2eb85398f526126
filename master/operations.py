"""What a master's handlers are measured as: see :mod:`kvstrata.transfer.observed`."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import salt_tag
from kvstrata.proto.status import PlaceState, Tier
from kvstrata.proto.wire import Kind
from kvstrata.transfer.observed import Operation
from kvstrata.transfer.tracing import Span, set_counts


def _looked_up(span: Span, request: pb.Lookup, answer: bytes) -> None:
    reply = pb.LookupOk.FromString(answer)
    codes = np.frombuffer(reply.run_code, np.uint16)
    lengths = np.frombuffer(reply.run_length, np.uint32).astype(np.int64)
    span.set("salt", salt_tag(request.salt))
    span.set("blocks", int(lengths.sum()))
    span.set("hit.prefix", reply.hit_blocks)
    span.set("not_yet", reply.not_yet)
    set_counts(span, "hit", {t.name.lower(): int(lengths[(codes != 0) & ((codes - 1) & 3 == t)].sum()) for t in Tier})
    if request.request:
        span.set("request", request.request)


def _placed(span: Span, request: pb.Place, answer: bytes) -> None:
    reply = pb.PlaceOk.FromString(answer)
    states = np.frombuffer(reply.run_state, np.uint8)
    lengths = np.frombuffer(reply.run_length, np.uint32).astype(np.int64)
    span.set("salt", salt_tag(request.salt))
    span.set("blocks", int(lengths.sum()))
    if request.unasked:
        span.set("unasked_bytes", len(request.unasked))
    set_counts(span, "place", {s.name.lower(): int(lengths[states == s].sum()) for s in PlaceState})


#: By frame kind.
OPERATIONS: Final[dict[int, Operation]] = {
    Kind.LOOKUP: Operation("lookup", "kvstrata.master.lookup", pb.Lookup, lambda m: m.trace, _looked_up),
    Kind.PLACE: Operation("place", "kvstrata.master.place", pb.Place, lambda m: m.trace, _placed),
}
NAMES: Final = tuple(operation.name for operation in OPERATIONS.values())
