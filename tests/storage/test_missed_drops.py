"""A master that was sent word of a drop and never got it: it does not go on from its last delta."""

from __future__ import annotations

import threading

from kvstrata.proto import control_pb2 as control
from kvstrata.storage.masters.outbox import Outbox

from .conftest import Node


def session(node: Node) -> Outbox:
    outbox = Outbox(node.state, threading.Lock(), control.Attach(), lambda told: control.NodeStatus())
    outbox.attached.set()
    return outbox


def said(outbox: Outbox) -> list[control.NodeMessage]:
    return [message for message in outbox.turn(0.0) if message.WhichOneof("body") != "status"]


def test_a_snapshot_after_a_drop_that_was_lost_on_the_way_is_sent_again(node: Node) -> None:
    node.store(range(3))
    first = session(node)
    had = [message.snapshot.cut_seq for message in said(first)][-1]
    node.state.drop("", None, node.now)
    assert [message.WhichOneof("body") for message in said(first)] == ["snapshot"]  # and the link breaks
    again = session(node)
    assert not again.resume(had), "it has all deltas, and does not know of the drop"
    (snapshot,) = said(again)
    assert not snapshot.snapshot.holdings and snapshot.snapshot.cut_seq > had
    assert session(node).resume(snapshot.snapshot.cut_seq)


def test_deltas_after_a_drop_wait_for_its_snapshot(node: Node) -> None:
    """Else a master that got them, and not the snapshot, would seem to know of the drop."""
    outbox = session(node)
    said(outbox)
    node.state.drop("", None, node.now)
    node.store(range(2))
    bodies = [message.WhichOneof("body") for message in said(outbox)]
    assert bodies[0] == "snapshot"
