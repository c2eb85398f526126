"""The epoch in which a master leads that shares its store with no other."""

from __future__ import annotations

from kvstrata.master.stores.base import LeaderRecord, StateStore
from kvstrata.proto.errors import Unavailable
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)


def next_epoch(store: StateStore, master_id: str, heard: int) -> int:
    """An epoch past all that the store has given and anybody has ``heard`` of; kept, if the store can."""
    me = LeaderRecord(master_id, heard)
    try:
        store.resign(me)
        return store.campaign(me, 0).epoch
    except Unavailable as error:
        log.warning("the leader's epoch is not kept", reason=str(error))
        return heard + 1
