"""A group's weight epoch, begun from within an engine: for engines whose weights change while they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstrata.client.admin import AdminClient
from kvstrata.client.masters import parse_masters
from kvstrata.engine_adapter.connector.access import BY_ENVIRONMENT, PoolAccess
from kvstrata.proto.errors import Forbidden, InvalidArgument, Unavailable
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: What a call to a master takes at most, and how long it waits for its nodes to confirm.
CALL_S: Final = 2.0
CONFIRM_S: Final = 3.0


def begin_epochs(masters: str, groups: Sequence[str], access: PoolAccess = BY_ENVIRONMENT) -> None:
    """Give each of these namespace groups its next weight epoch: what the pool has of them is a miss from now on.

    ``access``: what to show; a token of the role client has to be one that may reset. A group that the pool does not
    know has nothing to forget. Asks one master after the other; raises what the
    last one raised when none did it, :class:`Unavailable` when none was reached.
    """
    problem: Exception = Unavailable(f"no master in {masters!r}")
    for address in parse_masters(masters):
        try:
            with AdminClient(address, timeout_s=CALL_S, **access.shown()) as admin:
                _begin(admin, groups)
            return
        except (Unavailable, InvalidArgument) as error:
            problem = error
    raise problem


def _known(admin: AdminClient) -> set[str] | None:
    """The groups that the pool has; None for one whose token may reset, and not look."""
    try:
        return {row.spec.group for row in admin.namespaces()}
    except Forbidden:
        return None


def _begin(admin: AdminClient, groups: Sequence[str]) -> None:
    known = _known(admin)
    for group in groups:
        if known is not None and group not in known:
            log.info("no weight epoch to end: the pool has nothing of this group", group=group)
            continue
        begun = admin.bump_epoch(group, wait_s=CONFIRM_S)
        log.info("weight epoch begun", group=group, epoch=begun.epoch, blocks=begun.blocks)
        if begun.unreached:
            # They confirm later: no lookup finds what they have.
            log.warning("nodes have not confirmed the weight epoch yet", nodes=", ".join(begun.unreached))
