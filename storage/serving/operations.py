"""What a node's handlers are measured as: see :mod:`kvstrata.transfer.observed`."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.proto.wire import Kind
from kvstrata.transfer.observed import Operation
from kvstrata.transfer.tracing import Span, set_counts

_MODES: Final = ("lease", "inline", "prefetch", "copy")


def _acquired(span: Span, request: pb.Acquire, answer: bytes) -> None:
    reply = pb.AcquireOk.FromString(answer)
    _blocks(span, reply.status)
    span.set("mode", _MODES[request.mode])
    set_counts(span, "hit", {tier.name.lower(): reply.tier.count(tier) for tier in Tier})


def _reserved(span: Span, _: pb.Reserve | pb.Pull, answer: bytes) -> None:
    _blocks(span, pb.ReserveOk.FromString(answer).status)


def _committed(span: Span, _: pb.Commit | pb.Write, answer: bytes) -> None:
    _blocks(span, pb.CommitOk.FromString(answer).status)


def _blocks(span: Span, statuses: bytes) -> None:
    span.set("blocks", len(statuses))
    names = {BlockStatus(code).name.lower(): count for code, count in Counter(statuses).items()}
    set_counts(span, "status", names)


#: By frame kind.
OPERATIONS: Final[dict[int, Operation]] = {
    Kind.ACQUIRE: Operation("acquire", "kvstrata.node.acquire", pb.Acquire, lambda m: m.trace, _acquired),
    Kind.RESERVE: Operation("reserve", "kvstrata.node.reserve", pb.Reserve, lambda m: m.trace, _reserved),
    Kind.PULL: Operation("pull", "kvstrata.node.pull", pb.Pull, lambda m: m.reserve.trace, _reserved),
    Kind.WRITE: Operation("write", "kvstrata.node.write", pb.Write, lambda m: m.trace, _committed),
    Kind.COMMIT: Operation("commit", "kvstrata.node.commit", pb.Commit, lambda m: m.trace, _committed),
}
NAMES: Final = tuple(operation.name for operation in OPERATIONS.values())
