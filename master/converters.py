"""Between protobuf messages of the sync stream and the plain events and commands of the state.

Everything a node says is checked here: bounds, whole hashes, known tiers. What passes cannot make the
state fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from kvstrata.master import messages as m
from kvstrata.master.outbox import Stamp
from kvstrata.master.replies import node_ref
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import wire
from kvstrata.proto.errors import InvalidArgument, VersionMismatch
from kvstrata.proto.keys import SALT_CHARACTERS_MAX, Namespace, check_salt
from kvstrata.proto.limits import limits_of
from kvstrata.proto.status import Tier

NODE_ID_CHARACTERS_MAX: Final = 128
#: Hashes in one event. Longer snapshot parts become several, so that no event holds the lock for long: a change of a
#: directory of ten million costs 2 us a hash.
HASHES_AN_EVENT: Final = 1 << 11
_TIERS: Final = frozenset(int(tier) for tier in Tier)


def facts_of(attach: control.Attach) -> m.NodeFacts:
    """Raises :class:`InvalidArgument` or :class:`VersionMismatch`."""
    if not 1 <= len(attach.node_id) <= NODE_ID_CHARACTERS_MAX:
        raise InvalidArgument(f"a node id has 1 to {NODE_ID_CHARACTERS_MAX} characters, not {len(attach.node_id)}")
    if not attach.incarnation or not attach.channel:
        raise InvalidArgument(f"node {attach.node_id}: an attach names the incarnation and the channel address")
    if attach.protocol < wire.PROTOCOL_MIN:
        raise VersionMismatch(
            f"node {attach.node_id} ({attach.software}) speaks protocol {attach.protocol}, this master "
            f"{wire.PROTOCOL_MIN} and later: upgrade the node"
        )
    return m.NodeFacts(
        node_id=attach.node_id,
        incarnation=attach.incarnation,
        channel=attach.channel,
        unix_path=attach.unix_path,
        http=attach.http,
        host=attach.host,
        boot_id=attach.boot_id,
        dram_bytes=min(attach.dram_bytes, 1 << 62),
        ssd_bytes=min(attach.ssd_bytes, 1 << 62),
        software=attach.software,
        pid=attach.pid,
    )


def events_of(message: control.NodeMessage, session: int) -> Iterator[m.Event]:
    """The events of one message; raises :class:`InvalidArgument` for what makes no sense."""
    match message.WhichOneof("body"):
        case "snapshot":
            yield from _parts(message.snapshot, session)
        case "delta":
            yield m.DeltaBatch(session, message.delta.seq, tuple(_change(change) for change in message.delta.changes))
        case "done":
            yield m.CommandDone(session, message.done.command, message.done.error)
        case "status":
            yield m.StatusReport(session, _usage(message.status))
        case "detach":
            yield m.Detach(session, message.detach.reason[:200])
        case "copied":
            done = message.copied
            yield m.CopyDone(session, done.command, done.status, done.bytes, done.error[:200])
        case "offer":
            yield from _offers(message.offer, session)
        case "leaving":
            yield m.Leaving(session, message.leaving.budget_ms / 1000, message.leaving.reason[:200])
        case other:
            raise InvalidArgument(f"a sync message with body {other!r} after the attach")


def message_of(command: m.Send, cluster_id: str) -> control.MasterMessage:
    match command:
        case m.SendAttached():
            epochs = [control.NamespaceEpoch(group=group, epoch=epoch) for group, epoch in command.epochs]
            shares = None if command.shares is None else _shares(command.shares)
            attached = control.AttachOk(
                cluster_id=cluster_id,
                session=command.session,
                epochs=epochs,
                shares=shares,
                epoch=command.leader_epoch,
                leading=command.leading,
                resume_seq=command.resume_seq,
            )
            return control.MasterMessage(attached=attached)
        case m.SendShares():
            return control.MasterMessage(shares=_shares(command))
        case m.SendEpoch():
            epoch = control.NamespaceEpoch(group=command.group, epoch=command.epoch, command=command.command)
            return control.MasterMessage(epoch=epoch)
        case m.SendDrop():
            return control.MasterMessage(
                drop=control.DropCommand(
                    command=command.command,
                    group=command.group,
                    salt=command.salt or "",
                    any_salt=command.salt is None,
                    erase=command.erase,
                )
            )
        case m.SendResync():
            return control.MasterMessage(resync=control.Resync(reason=command.reason))
        case m.SendAck():
            return control.MasterMessage(ack=control.Ack(seq=command.seq))
        case m.SendHint():
            return control.MasterMessage(
                orphaned=control.Orphaned(
                    spec=command.namespace.to_spec(), salt=command.salt, hashes=command.hashes, epoch=command.epoch
                )
            )
        case m.SendCopy():
            return control.MasterMessage(copy=_copy(command))
        case m.SendDrain():
            budget_ms = int(command.budget_s * 1000)
            drain = control.DrainCommand(command=command.command, budget_ms=budget_ms, cancel=command.cancel)
            return control.MasterMessage(drain=drain)
        case m.SendDrained():
            return control.MasterMessage(drained=control.Drained(command=command.command, problem=command.problem))
        case m.SendSurplus():
            return control.MasterMessage(
                surplus=control.Surplus(
                    spec=command.namespace.to_spec(), salt=command.salt, hashes=command.hashes, epoch=command.epoch
                )
            )
        case m.SendRemove():
            return control.MasterMessage(
                remove=control.RemoveCommand(
                    command=command.command,
                    spec=command.namespace.to_spec(),
                    salt=command.salt,
                    hashes=command.hashes,
                )
            )


def stamped(message: control.MasterMessage, stamp: Stamp) -> control.MasterMessage:
    """The message with who says it."""
    message.leader_epoch, message.leader_id = stamp.epoch, stamp.leader_id
    return message


def _copy(command: m.SendCopy) -> control.CopyCommand:
    return control.CopyCommand(
        command=command.command,
        source=node_ref(command.source),
        spec=command.namespace.to_spec(),
        salt=command.salt,
        hashes=command.hashes,
        epoch=command.epoch,
        tier=command.tier,
        reason=command.reason,
        deadline_ms=int(command.deadline_s * 1000),
    )


def attach_of(attach: control.Attach) -> m.Attach:
    """Raises as :func:`facts_of`."""
    shares = tuple(m.Share(**limits_of(share)) for share in attach.shares)
    epochs = tuple((epoch.group, epoch.epoch) for epoch in attach.epochs)
    return m.Attach(facts_of(attach), shares, epochs, attach.leader_epoch, attach.leader_id[:NODE_ID_CHARACTERS_MAX])


def share_message(share: m.Share) -> control.Share:
    """Limits that are None stay absent."""
    return control.Share(**dataclasses.asdict(share))


def _shares(command: m.SendShares) -> control.Shares:
    return control.Shares(
        revision=command.revision,
        whole=command.whole,
        shares=[share_message(share) for share in command.shares],
        forgotten=command.forgotten,
        fallback=None if command.fallback is None else share_message(command.fallback),
        ttl_ms=command.ttl_ms,
    )


def _parts(snapshot: control.Snapshot, session: int) -> Iterator[m.SnapshotPart]:
    pieces = [piece for holding in snapshot.holdings for piece in _pieces(holding)]
    if not pieces:
        yield m.SnapshotPart(session, snapshot.cut_seq, (), snapshot.first, snapshot.last)
    for index, piece in enumerate(pieces):
        first = snapshot.first and index == 0
        last = snapshot.last and index == len(pieces) - 1
        yield m.SnapshotPart(session, snapshot.cut_seq, (piece,), first, last)


def _offers(offer: control.Offer, session: int) -> Iterator[m.Offer]:
    pieces = [piece for holding in offer.holdings for piece in _pieces(holding)]
    if not pieces:
        yield m.Offer(session, offer.command, (), offer.last, offer.bytes_total)
    for index, piece in enumerate(pieces):
        last = offer.last and index == len(pieces) - 1
        yield m.Offer(session, offer.command, (piece,), last, offer.bytes_total)


def _pieces(holding: control.Holding) -> Iterator[m.Holding]:
    namespace = _namespace(holding)
    step = HASHES_AN_EVENT * namespace.hash_bytes
    for start in range(0, len(holding.hashes), step):
        yield m.Holding(namespace, holding.salt, holding.tier, holding.hashes[start : start + step], holding.epoch)


def _change(change: control.Change) -> m.Change:
    return m.Change(
        change.added,
        _namespace(change),
        change.salt,
        change.tier,
        change.hashes,
        change.epoch,
        change.reason,
        change.cause[:SALT_CHARACTERS_MAX],
    )


def _namespace(part: control.Holding | control.Change) -> Namespace:
    namespace = Namespace.from_spec(part.spec)
    check_salt(part.salt)
    if part.tier not in _TIERS:
        raise InvalidArgument(f"tier {part.tier} is unknown to this master")
    if len(part.hashes) % namespace.hash_bytes:
        raise InvalidArgument(f"hashes are {len(part.hashes)} bytes: not a multiple of {namespace.hash_bytes}")
    return namespace


def _usage(status: control.NodeStatus) -> m.NodeUsage:
    return m.NodeUsage(
        dram_bytes_used=status.dram_bytes_used,
        dram_bytes_free=min(status.dram_bytes_free, 1 << 62),
        blocks=status.blocks,
        ssd_bytes_used=status.ssd_bytes_used,
        clients=status.clients,
        leases=status.leases,
        reservations=status.reservations,
        loop_age_seconds=dict(status.loop_age_seconds),
        ssd_bytes_free=min(status.ssd_bytes_free, 1 << 62),
        tenants=tuple(
            m.TenantUsage(
                check_salt(t.salt),
                *(min(each, 1 << 62) for each in (t.dram_bytes, t.ssd_bytes, t.dram_wanted, t.ssd_wanted)),
            )
            for t in status.tenants
        ),
        shares_revision=status.shares_revision,
        devices=tuple(
            m.Device(d.path[:200], d.state[:20], d.bytes, d.bytes_used, d.problem[:200]) for d in status.devices
        ),
        bytes_out=status.bytes_out,
        bytes_in=status.bytes_in,
        bytes_copied=status.bytes_copied,
        leader_epoch=status.leader_epoch,
        leader_id=status.leader_id[:NODE_ID_CHARACTERS_MAX],
    )
