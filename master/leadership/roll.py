"""Which masters there are, and which of them leads: for operators, and for masters to tell each other."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvstrata.master.hub import Hub
from kvstrata.master.stores.base import LeaderRecord, StateStore
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.identity import advertised


def announced(endpoint: str, advertise: str | None) -> str:
    """``HOST:PORT`` as others are to reach it: by ``advertise``, or by this host's name where it is bound to all."""
    if advertise is None:
        return advertised(endpoint, socket.gethostname())
    return f"{advertise}:{endpoint.rpartition(':')[2]}"


class Roll:
    """``me`` says where this master listens."""

    def __init__(self, hub: Hub, store: StateStore, me: Callable[[], LeaderRecord]) -> None:
        self._hub = hub
        self._store = store
        self._me = me

    def masters(self) -> control.MasterList:
        """Those that have said so lately; while the store is silent, this one and the leader that it knows of."""
        standing = self._hub.standing()
        listed = control.MasterList(epoch=standing.epoch if standing.leading else standing.heard)
        me = self._me()
        records = {me.master_id: me}
        if self._store.shared:
            try:
                records |= {record.master_id: record for record in self._store.masters()}
            except Unavailable as error:
                listed.problem = str(error)
        leader = me.channel if standing.leading else self._hub.leader()
        if leader and leader not in {record.channel for record in records.values()}:
            records[""] = LeaderRecord("", listed.epoch, channel=leader)
        for record in records.values():
            leading = bool(leader) and record.channel == leader
            listed.masters.add(
                master_id=record.master_id,
                channel=record.channel,
                grpc=record.grpc,
                http=record.http,
                leading=leading,
                epoch=listed.epoch if leading else 0,
                self=record.master_id == me.master_id,
            )
        return listed
