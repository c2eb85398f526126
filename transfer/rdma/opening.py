"""Opening rails to one node, and their test: known bytes are read over them both ways before any block is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ProtocolError, Unavailable
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import expect
from kvstrata.transfer.link import NodeLink
from kvstrata.transfer.rdma.client_rails import Agent, ClientRails
from kvstrata.transfer.rdma.engine import JobState, Pieces
from kvstrata.transfer.rdma.memory import LocalMemory
from kvstrata.transfer.rdma.pattern import mismatch
from kvstrata.transfer.regions import Region
from kvstrata.transfer.replies import elements

#: What opening may take, first contact of both agents included.
OPEN_S: Final = 3.0
#: More than this is no test pattern but a mistake.
PATTERN_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """Rails that have passed their test. ``slabs``: u64[k, 2] (address, bytes) in the node's address space.

    ``breaks``: how often the channel's breaker had opened by then; the node forgets an agent with its session.
    """

    agent: Agent
    peer: str
    slabs: npt.NDArray[np.uint64]
    breaks: int


def open_rails(link: NodeLink, own: ClientRails) -> Opened:
    """Make each agent known to the other, and test both ways. Takes :data:`OPEN_S` at most.

    Raises :class:`Unavailable` saying what stands in the way, or another :class:`KVError`.
    """
    deadline = time.monotonic() + OPEN_S
    channel, breaks = link.channel, link.channel.breaker.opened
    if channel.hello is None:
        channel.call(Kind.PING, b"", deadline)
    assert channel.hello is not None
    theirs, ours = channel.hello.rails, own.rails().kind
    if theirs != ours:
        raise Unavailable(f"the node has {theirs or 'no'} rails, this client {ours or 'none'}")
    agent = own.opened()
    engine = agent.engine
    engine.stir()
    message = pb.OpenRails(rails=ours, backend=engine.backend, agent=engine.connection())
    frame = channel.call(Kind.OPEN_RAILS, message.SerializeToString(), deadline)
    reply = expect(pb.OpenRailsOk, frame, Kind.OPEN_RAILS_OK)
    slabs = elements(reply.slabs, np.uint64)
    if len(slabs) % 2 or not 0 < reply.pattern_bytes <= PATTERN_BYTES_MAX:
        raise ProtocolError(f"rails with {len(slabs)} numbers for slabs and a pattern of {reply.pattern_bytes} bytes")
    opened = Opened(agent, engine.add_peer(reply.agent), slabs.reshape(-1, 2), breaks)
    try:
        _test_theirs(opened, reply, deadline)
        _test_ours(link, agent, reply.pattern_bytes, deadline)
    except BaseException:
        engine.remove_peer(opened.peer)
        raise
    return opened


def _test_theirs(opened: Opened, reply: pb.OpenRailsOk, deadline: float) -> None:
    engine, memory, nbytes = opened.agent.engine, opened.agent.memory, reply.pattern_bytes
    scratch = memory.scratch(nbytes, deadline)
    scratch.bytes[:nbytes] = 0
    length = np.array([nbytes], np.int64)
    address = np.array([reply.pattern_address], np.uint64).astype(np.int64)
    job = engine.read(opened.peer, Pieces(np.array([scratch.address], np.int64), length), Pieces(address, length))
    settled = job.wait(deadline) or job.give_up()
    problem = "" if job.state is JobState.DONE else job.problem or f"nothing arrived within {OPEN_S:.0f} s"
    if settled and not problem:
        problem = mismatch(scratch.bytes[:nbytes], reply.pattern_seed)
    memory.put_back(scratch, job)
    if problem:
        raise Unavailable(f"self-test, reading from the node: {problem}")


def _test_ours(link: NodeLink, agent: Agent, nbytes: int, deadline: float) -> None:
    known = agent.memory.pattern(nbytes)
    register_region(link, agent.memory, known.region, deadline)
    agent.engine.stir()
    message = pb.TestRail(region=known.region.id, seed=known.seed).SerializeToString()
    frame = link.channel.call(Kind.TEST_RAIL, message, deadline)
    problem = expect(pb.TestRailOk, frame, Kind.TEST_RAIL_OK).problem
    if problem:
        raise Unavailable(f"self-test, the node reading from here: {problem}")


def register_region(link: NodeLink, memory: LocalMemory, region: Region, deadline: float) -> None:
    """Have the node know a region, every extent of it. Raises :class:`KVError`, :class:`Unavailable` if it will not."""
    for registration in memory.of(region):
        message = pb.RegisterRegion(
            region=region.id,
            address=region.address,
            length=region.nbytes,
            agent=registration.metadata,
            memory=region.memory.spelled(),
        )
        frame = link.channel.call(Kind.REGISTER_REGION, message.SerializeToString(), deadline)
        method = expect(pb.RegisterRegionOk, frame, Kind.REGISTER_REGION_OK).method
        if method != "rdma":
            raise Unavailable(f"the node would read the region by {method or 'nothing'}, not over its rails")
