"""A node's memory as a client on the same host maps it: read-only, once, by descriptor passing."""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from typing import Final

import numpy as np

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ProtocolError, Unauthenticated
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.frames import FDS_MAX, Disconnected
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.regions import Region
from kvstrata.transfer.replies import elements
from kvstrata.transfer.shared_index import SharedIndex

MAP_S: Final = 2.0


class Slab:
    """One mapped slab: its address, a flat u8 view, and the generation table (u64 a slot)."""

    __slots__ = ("address", "bytes", "generations")

    def __init__(self, fd: int, length: int, slots: int) -> None:
        try:
            # Pages are entered as they are read, many at a time: entering all of them first would hold up one reader.
            mapping = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, OverflowError, ValueError) as error:
            raise ProtocolError(f"a slab of {length} bytes that cannot be mapped: {error}") from error
        self.bytes = np.frombuffer(mapping, np.uint8)
        self.address = self.bytes.ctypes.data
        self.generations = memoryview(mapping)[: 8 * min(slots, length // 8)].cast("Q")

    def check(self, slot: int, offset: int, nbytes: int) -> None:
        """Raises :class:`ProtocolError` for what is not inside: reading it would end this process."""
        if slot >= len(self.generations) or offset + nbytes > len(self.bytes):
            raise ProtocolError(f"the node named slot {slot} at {offset}: outside its slab of {len(self.bytes)} bytes")


class SlabMap:
    """Slabs of one incarnation of one node, mapped as reads first name them.

    Also the way to the node's shared index, and to register regions with that node, since all need descriptors
    passed over the unix socket. The connection is opened when first needed and stays, so that the session lives with
    it.
    """

    def __init__(self, unix_path: str, identity: Identity, incarnation: int) -> None:
        self._address = f"unix:{unix_path}"
        self._identity = identity
        self._incarnation = incarnation
        self._slabs: dict[int, Slab] = {}
        self._connection: Connection | None = None
        self._closed = False
        self._lock = threading.Lock()

    def get(self, index: int) -> Slab:
        """The slab, mapped now if it was not. Raises :class:`Unavailable`."""
        slab = self._slabs.get(index)
        return slab if slab is not None else self._map([index])[index]

    def ensure(self, indexes: set[int]) -> dict[int, Slab]:
        """All slabs by index, with ``indexes`` among them."""
        missing = indexes - self._slabs.keys()
        return self._map(sorted(missing)) if missing else self._slabs

    def register(self, region: Region) -> str:
        """Tell the node of a region; returns how it will read it: "map", "vm" or "" (not at all)."""
        message = pb.RegisterRegion(
            region=region.id, address=region.address, length=region.nbytes, memfd=region.memfd >= 0
        )
        fds = [region.memfd] if region.memfd >= 0 else []
        with self._lock:
            reply = self._connected().call(
                Kind.REGISTER_REGION, message.SerializeToString(), time.monotonic() + MAP_S, fds=fds
            )
        return expect(pb.RegisterRegionOk, reply, Kind.REGISTER_REGION_OK).method

    def unregister(self, region: Region) -> None:
        message = pb.UnregisterRegion(region=region.id)
        with self._lock:
            self._connected().call(Kind.UNREGISTER_REGION, message.SerializeToString(), time.monotonic() + MAP_S)

    def map_index(self, index: SharedIndex | None) -> SharedIndex:
        """Ask for the node's shared index, or for what ``index`` lacks of it: the node says again that it may be read.

        Raises :class:`Unavailable`, :class:`ProtocolError`, and :class:`Refused` where there is none for this client.
        """
        with self._lock:
            connection = self._connected()
            message = pb.MapIndex(first=index.memories if index is not None else 0).SerializeToString()
            frame = connection.call(Kind.MAP_INDEX, message, time.monotonic() + MAP_S)
            fds = connection.stream.take_fds()
            try:
                length = elements(expect(pb.MapIndexOk, frame, Kind.MAP_INDEX_OK).length, np.uint64).tolist()
                if len(length) != len(fds) or not (fds or index):
                    raise ProtocolError(f"{len(length)} pieces of the shared index with {len(fds)} descriptors")
                tables = list(zip(fds, length, strict=True))
                if index is None:
                    index = SharedIndex(*tables.pop(0), self._incarnation)
                for fd, nbytes in tables:
                    index.add(fd, nbytes)
            finally:
                for fd in fds:
                    os.close(fd)
        return index

    def alive(self) -> bool:
        """Whether the node holds its end of the connection: it has not stopped, and its process has not died."""
        connection = self._connection
        if connection is None:
            return False
        hangup = select.poll()  # of this call: one cannot be used by two threads
        try:
            hangup.register(connection.stream.sock, select.POLLRDHUP)
        except ValueError:  # closed
            return False
        return not hangup.poll(0) and not connection.broken

    def _map(self, indexes: list[int]) -> dict[int, Slab]:
        with self._lock:
            for start in range(0, len(indexes), FDS_MAX):
                self._map_some([i for i in indexes[start : start + FDS_MAX] if i not in self._slabs])
        return self._slabs

    def _map_some(self, indexes: list[int]) -> None:
        if not indexes:
            return
        wanted = np.asarray(indexes, np.uint32).tobytes()
        connection = self._connected()
        frame = connection.call(Kind.MAP_SLABS, pb.MapSlabs(slabs=wanted).SerializeToString(), time.monotonic() + MAP_S)
        fds = connection.stream.take_fds()
        try:
            reply = expect(pb.MapSlabsOk, frame, Kind.MAP_SLABS_OK)
            got = elements(reply.slabs, np.uint32).tolist()
            length = elements(reply.length, np.uint64).tolist()
            slots = elements(reply.slots, np.uint32).tolist()
            if not len(got) == len(fds) == len(length) == len(slots) or set(got) != set(indexes):
                raise ProtocolError(f"asked for slabs {indexes}, got {got} with {len(fds)} descriptors")
            for index, fd, nbytes, count in zip(got, fds, length, slots, strict=True):
                self._slabs[index] = Slab(fd, nbytes, count)
        finally:
            for fd in fds:
                os.close(fd)

    def _connected(self) -> Connection:
        if self._closed:  # a call that was under way
            raise Disconnected("the way to the node is closed")
        connection = self._connection
        if connection is None or connection.broken:
            try:
                connection = Connection.open(self._address, self._identity, passes_fds=True, accept=self._same)
            except Unauthenticated as error:  # one node of many: it is lost, and others are not
                raise Disconnected(str(error)) from error
            self._connection = connection
        connection.refresh(time.monotonic() + MAP_S)
        return connection

    def _same(self, hello: pb.HelloOk) -> None:
        if hello.incarnation != self._incarnation:
            raise Disconnected(f"node {hello.node_id} was restarted")

    def close(self) -> None:
        """Forget the maps; they go when the last array over them does. Nothing is mapped any more."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            self._slabs = {}
