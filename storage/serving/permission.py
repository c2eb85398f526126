"""Whether a peer may touch the tenant and the namespace that its message names."""

from __future__ import annotations

from kvstrata.proto import channel_pb2 as pb
from kvstrata.storage.state import NodeState
from kvstrata.transfer.sessions import ServerConnection


def check_touch(
    connection: ServerConnection, state: NodeState, message: pb.Acquire | pb.Reserve | pb.Hint | pb.Touched
) -> None:
    """Raises :class:`ForbiddenSalt` by names alone: whether a block is there is not looked at.

    Raises :class:`FingerprintMismatch` for an unknown handle. The state's lock need not be held: entries only grow.
    """
    connection.rights.touch(message.salt, state.entry(message.ns).namespace.group)
