"""What operators ask of content: bump an epoch, drop a scope, list blocks, explain a miss."""

from __future__ import annotations

import time
from typing import Final

from kvstrata.master.content.clearing import Cleared
from kvstrata.master.content.explain import Explanation, explain_block, explain_request, lines
from kvstrata.master.content.listing import Listing
from kvstrata.master.hub import Hub
from kvstrata.master.status import orders
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.proto.keys import HASH_BYTES_MAX, HASH_BYTES_MIN, check_salt

#: How long an order waits for its nodes when the caller does not say, and at most.
DEADLINE_S: Final = 10.0
DEADLINE_MAX_S: Final = 60.0
#: A listing reads for at most this long; what it has not counted by then it says it has not.
LISTING_S: Final = 20.0


class Content:
    """Thread-safe: everything goes through the hub's lock."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def bump(self, request: control.GroupName) -> control.Dropped:
        """Begin a group's next weight epoch. When this returns, no lookup finds anything older, and attached nodes
        that are not named ``unreached`` give nothing older to readers.

        Raises :class:`Unavailable` when the epoch is in effect and may be forgotten in a restart.
        """
        cleared = self._hub.order(lambda state, now: state.bump(request.group, now))
        self._hub.ordered(orders.epoch_bumped(request.group, cleared.epoch, cleared.blocks))
        durable = self._hub.durable()
        return self._waited(cleared, request.deadline_ms, f"epoch {cleared.epoch} is in effect", durable)

    def drop(self, request: control.Scope) -> control.Dropped:
        """Forget everything within a scope, here at once, then on every node."""
        salt = None if request.any_salt else check_salt(request.salt)
        return self.clear(request.group, salt, request.erase, request.dry_run, request.deadline_ms)

    def clear(
        self, group: str, salt: str | None, erase: bool = False, dry_run: bool = False, deadline_ms: int = 0
    ) -> control.Dropped:
        """:meth:`drop` in plain words: group "" is every namespace, salt None every tenant.

        Raises :class:`Unavailable` when nodes have not confirmed and may not be told after a restart.
        """
        if dry_run:
            return control.Dropped(blocks=self._hub.read(lambda state, _: state.clearing.counted(group, salt)))
        cleared = self._hub.order(lambda state, now: state.drop(group, salt, erase, now), durable=False)
        named = salt is not None and self._hub.read(lambda state, _: state.quotas.defined(salt))
        self._hub.ordered(orders.dropped(group, salt, cleared.blocks, named=named))
        return self._waited(cleared, deadline_ms, "dropped", self._hub.durable())

    def _waited(self, cleared: Cleared, deadline_ms: int, what: str, durable: bool) -> control.Dropped:
        wait_s = min(deadline_ms / 1000, DEADLINE_MAX_S) if deadline_ms else DEADLINE_S
        unreached = self._hub.confirmations(cleared.command, cleared.awaited, time.monotonic() + wait_s)
        if not durable and (cleared.epoch or unreached) and not self._hub.durable():
            problem = self._hub.why_not_durable()
            raise Unavailable(f"{what}, but a restart of this master may forget it: {problem}")
        return control.Dropped(epoch=cleared.epoch, blocks=cleared.blocks, unreached=unreached)

    def blocks(self, query: control.BlockQuery) -> control.BlockList:
        """Blocks of a scope. Reads in steps, and never holds others up for long."""
        salt = None if query.any_salt else check_salt(query.salt)
        listing = Listing(query.group, salt, query.hash_prefix, query.limit)
        ends = time.monotonic() + LISTING_S
        while not self._hub.read(listing.step):
            if time.monotonic() >= ends:
                raise Unavailable(
                    f"reading the directory took longer than {LISTING_S:.0f} s: name a tenant or namespace"
                )
        rows = [
            control.BlockRow(group=row.group, shard=row.shard, salt=row.salt, hash=row.key, where=row.where)
            for row in listing.rows
        ]
        return control.BlockList(blocks=rows, total=listing.total)

    def explain(self, query: control.ExplainQuery) -> control.Explanation:
        """Why a request's prefix ended, or a block is not here. Raises :class:`InvalidArgument`."""
        if bool(query.request) == bool(query.hash):
            raise InvalidArgument("name either a request or a block hash")
        if query.request:
            return self._hub.read(lambda state, now: _message(explain_request(state, query.request, now), now))
        if not HASH_BYTES_MIN <= len(query.hash) <= HASH_BYTES_MAX:
            raise InvalidArgument(
                f"a block hash has {HASH_BYTES_MIN} to {HASH_BYTES_MAX} bytes, not {len(query.hash)}: give it whole"
            )
        salt = check_salt(query.salt) if query.HasField("salt") else None
        return self._hub.read(
            lambda state, now: _message(explain_block(state, query.hash, query.group, salt, now), now)
        )


def _message(explanation: Explanation, now: float) -> control.Explanation:
    return control.Explanation(
        verdict=explanation.verdict,
        text=explanation.text,
        story=[
            control.ExplainLine(age_seconds=age, what=what, node_id=node) for age, what, node in lines(explanation, now)
        ],
        where=explanation.where,
        asked=explanation.asked,
        hit=explanation.hit,
        hash=explanation.block,
        group=explanation.group,
        salt=explanation.salt,
        elsewhere=explanation.elsewhere,
    )
