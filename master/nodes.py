"""The nodes a master knows: those that ever attached, and what each one is doing now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstrata.master.attachment import Attachment
from kvstrata.master.liveness import NodeState, Pulse
from kvstrata.master.messages import NodeFacts, NodeUsage, SaveNode
from kvstrata.master.traffic import Traffic


@dataclass(eq=False, slots=True)
class Node:
    """One persistent node id. Without an attachment it is offline."""

    node_id: str
    dram_bytes: int = 0
    ssd_bytes: int = 0
    gone: bool = False  #: it left on purpose, or was told to
    draining: bool = False  #: an operator wants it empty
    stopping: bool = False  #: it said that it will stop, once it is drained
    state: NodeState = NodeState.OFFLINE
    attachment: Attachment | None = None
    pulse: Pulse | None = None
    usage: NodeUsage | None = None
    facts: NodeFacts | None = None
    active_since: float | None = None
    placed_bytes: int = 0  #: sent there since its last report
    traffic: Traffic = field(default_factory=Traffic)
    touched: set[Node] = field(default_factory=set, repr=False)  #: :attr:`Nodes.touched`

    @property
    def serving(self) -> bool:
        """Its inventory is in service (though it may be suspected)."""
        return self.attachment is not None and self.attachment.slot is not None

    @property
    def linked(self) -> bool:
        """Commands can be sent to it."""
        return self.attachment is not None and self.pulse is not None and self.pulse.link_lost_at is None

    @property
    def may_hold_blocks(self) -> bool:
        """False for a node that stopped on purpose and has nothing that outlives its process."""
        return not (self.gone and self.attachment is None and self.ssd_bytes == 0)

    @property
    def leaving(self) -> bool:
        """It takes no new blocks, and its replicas do not count as staying."""
        return self.draining or self.stopping

    def saved(self) -> SaveNode:
        return SaveNode(self.node_id, self.dram_bytes, self.ssd_bytes, self.gone, self.draining)

    def sent(self, nbytes: int) -> None:
        """So much is on its way there; counts until its next report."""
        self.placed_bytes += nbytes
        self.touched.add(self)

    def reported(self, usage: NodeUsage) -> None:
        self.usage, self.placed_bytes = usage, 0
        self.touched.add(self)


class Nodes:
    """By node id, and by the session of the current attachment."""

    def __init__(self) -> None:
        self._by_id: dict[str, Node] = {}
        self._by_session: dict[int, Node] = {}
        #: Nodes with other amounts than before, for who follows them to clear.
        self.touched: set[Node] = set()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def restore(self, saved: SaveNode) -> None:
        node = Node(saved.node_id, saved.dram_bytes, saved.ssd_bytes, saved.gone, saved.draining, touched=self.touched)
        self._by_id[saved.node_id] = node

    def remove(self, node: Node) -> None:
        """Forget a node that is not attached."""
        assert node.attachment is None, node.node_id
        del self._by_id[node.node_id]
        self.touched.discard(node)

    def get(self, node_id: str) -> Node | None:
        return self._by_id.get(node_id)

    def get_or_add(self, node_id: str) -> Node:
        node = self._by_id.get(node_id)
        if node is None:
            node = self._by_id[node_id] = Node(node_id, touched=self.touched)
        return node

    def of_session(self, session: int) -> Node | None:
        """The node whose current attachment has this session; None for a session that is over."""
        return self._by_session.get(session)

    def bind(self, node: Node, attachment: Attachment) -> None:
        """``attachment`` is the node's current one from now on."""
        self.unbind(node)
        node.attachment = attachment
        self._by_session[attachment.session] = node

    def unbind(self, node: Node) -> None:
        if node.attachment is not None:
            self._by_session.pop(node.attachment.session, None)
            node.attachment = None

    def check(self) -> None:
        """Assert that the two indexes agree, and that states match attachments."""
        bound = {node.attachment.session: node for node in self if node.attachment is not None}
        assert bound == self._by_session
        for node in self:
            assert (node.attachment is None) == (node.pulse is None), node.node_id
            assert (node.attachment is None) == (node.state is NodeState.OFFLINE), (node.node_id, node.state)
            assert node.state is not NodeState.ACTIVE or node.serving, node.node_id
            if node.attachment is not None:
                node.attachment.check()
