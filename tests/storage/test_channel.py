"""The block channel over real sockets, TCP and unix, with the shipped transports and with raw frames."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import FingerprintMismatch, InvalidArgument, KVError
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.base import Endpoint, Fetch, Peer, Push
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.regions import Region, shareable
from kvstrata.transfer.shm import ShmTransport
from kvstrata.transfer.tcp import TcpTransport
from tests.waiting import until

from .conftest import key, keys, payload

NAMESPACE = Namespace("model", 5000, 16)


def endpoint(node: StorageNode) -> Endpoint:
    return Endpoint(node.identity.node_id, node.identity.incarnation, node.channel, str(node.unix_path), boot_id())


def region_of(numbers: range, version: int = 0, block_bytes: int = 5000, *, mapped: bool = False) -> Region:
    data = b"".join(payload(keys([n]), version, block_bytes) for n in numbers)
    if not mapped:
        return Region(np.frombuffer(bytearray(data), np.uint8), None)
    flat, mapping, fd = shareable(len(data))
    flat[:] = np.frombuffer(data, np.uint8)
    return Region(flat, mapping, fd)


def soon() -> float:
    return time.monotonic() + 5.0


@pytest.fixture(params=["shm-mapped", "shm-read", "tcp"])
def way(request: pytest.FixtureRequest, running: StorageNode) -> Iterator[tuple[Peer, bool]]:
    """(peer, whether its source regions are memfds)."""
    kind = request.param
    transport = TcpTransport(Identity.new()) if kind == "tcp" else ShmTransport(Identity.new())
    peer = transport.connect(endpoint(running))
    yield peer, kind == "shm-mapped"
    peer.close()
    transport.close()


def push(peer: Peer, numbers: range, region: Region, salt: str = "") -> list[int]:
    request = Push(NAMESPACE, salt, keys(numbers), region.rows(NAMESPACE), soon())
    return [int(status) for status in peer.push(request).status]


def test_bytes_come_back_by_every_way(running: StorageNode, way: tuple[Peer, bool]) -> None:
    peer, mapped = way
    source = region_of(range(40), mapped=mapped)
    assert push(peer, range(40), source) == [BlockStatus.STORED] * 40
    assert push(peer, range(40), source) == [BlockStatus.ALREADY_PRESENT] * 40
    target = Region(np.zeros(41 * 5000, np.uint8), None)
    got = peer.fetch(Fetch(NAMESPACE, "", keys(range(41)), target.rows(NAMESPACE), soon(), "always"))
    assert [int(s) for s in got.status] == [BlockStatus.LOADED] * 40 + [BlockStatus.MISSING]
    assert (target.bytes[: source.nbytes] == source.bytes).all() and not target.bytes[source.nbytes :].any()
    peer.upkeep()
    until(lambda: len(running.state.leases) == 0)
    with running.lock:
        running.state.check()
    assert running.state.sessions == 0


def test_paged_sources_and_targets(running: StorageNode, way: tuple[Peer, bool]) -> None:
    """Blocks scattered in pieces of unequal length, out of order, on both sides."""
    peer, mapped = way
    base = region_of(range(6), mapped=mapped)
    cuts = np.array([0, 17, 1000, 1001, 4999, 5000])
    table = np.empty((3, 5, 2), np.int64)
    for row, block in enumerate((5, 0, 3)):
        table[row, :, 0] = block * 5000 + cuts[:-1]
        table[row, :, 1] = np.diff(cuts)
    request = Push(NAMESPACE, "", keys([5, 0, 3]), base.view(NAMESPACE, table), soon())
    assert set(peer.push(request).status.tolist()) == {BlockStatus.STORED}
    target = Region(np.zeros(6 * 5000, np.uint8), None)
    got = peer.fetch(Fetch(NAMESPACE, "", keys([3, 5, 0]), target.view(NAMESPACE, table[[2, 0, 1]]), soon(), "always"))
    assert set(got.status.tolist()) == {BlockStatus.LOADED}
    for block in range(6):
        part = slice(block * 5000, (block + 1) * 5000)
        expected = base.bytes[part] if block in (5, 0, 3) else 0
        assert (target.bytes[part] == expected).all()


def test_large_writes_take_two_threads_and_commit_apart(running: StorageNode, way: tuple[Peer, bool]) -> None:
    peer, mapped = way
    namespace = Namespace("large", 900_000, 16)
    source = region_of(range(6), block_bytes=900_000, mapped=mapped)
    status = peer.push(Push(namespace, "", keys(range(6)), source.rows(namespace), soon())).status
    assert set(status.tolist()) == {BlockStatus.STORED}
    target = Region(np.zeros(source.nbytes, np.uint8), None)
    peer.fetch(Fetch(namespace, "", keys(range(6)), target.rows(namespace), soon(), "always"))
    assert (target.bytes == source.bytes).all()


def test_views_show_the_slots_themselves(running: StorageNode) -> None:
    peer = ShmTransport(Identity.new()).connect(endpoint(running))
    push(peer, range(3), region_of(range(3)))
    lease = peer.view(NAMESPACE, "", keys([1, 9]), soon())
    assert lease.valid() and lease.arrays[1] is None
    assert bytes(lease.arrays[0]) == payload(keys([1]), 0, 5000)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read-only"):
        lease.arrays[0][0] = 1  # type: ignore[index]
    lease.close()
    peer.close()
    until(lambda: running.state.sessions == 0)


# ---------------------------------------------------------------- frames by hand


@pytest.fixture(params=["tcp", "unix"])
def raw(request: pytest.FixtureRequest, running: StorageNode) -> Iterator[Connection]:
    local = request.param == "unix"
    address = f"unix:{running.unix_path}" if local else running.channel
    connection = Connection.open(address, Identity.new(), silence_s=2.0, passes_fds=local)
    yield connection
    connection.close()


def handle(connection: Connection, namespace: Namespace = NAMESPACE) -> int:
    message = pb.OpenNamespace(spec=namespace.to_spec()).SerializeToString()
    return expect(pb.NamespaceHandle, connection.call(Kind.OPEN_NAMESPACE, message), Kind.NAMESPACE_HANDLE).handle


def reserve(connection: Connection, numbers: range, salt: str = "") -> pb.ReserveOk:
    message = pb.Reserve(ns=handle(connection), salt=salt, hashes=keys(numbers), deadline_ms=500)
    return expect(pb.ReserveOk, connection.call(Kind.RESERVE, message.SerializeToString()), Kind.RESERVE_OK)


def write(connection: Connection, reservation: int, data: bytes, checksums: list[int]) -> list[int]:
    message = pb.Write(reservation=reservation, checksums=struct.pack(f"<{len(checksums)}Q", *checksums))
    frame = connection.call(Kind.WRITE, message.SerializeToString(), raw=[memoryview(data)])
    return list(expect(pb.CommitOk, frame, Kind.COMMIT_OK).status)


def test_what_was_in_a_slot_before_is_not_published(raw: Connection, running: StorageNode) -> None:
    """A commit without the bytes would show its writer those of whoever had the slot before."""
    number = reserve(raw, range(1)).reservation
    commit = pb.Commit(reservation=number, checksums=bytes(8)).SerializeToString()
    with pytest.raises(InvalidArgument, match="not written"):
        raw.call(Kind.COMMIT, commit)
    data = payload(keys([0]), 0, 5000)
    assert write(raw, number, data, [xxhash.xxh3_64_intdigest(data)]) == [BlockStatus.STORED]


def digests(data: bytes) -> list[int]:
    return [xxhash.xxh3_64_intdigest(data[start : start + 5000]) for start in range(0, len(data), 5000)]


def test_bytes_that_do_not_match_their_checksum_never_show(running: StorageNode, raw: Connection) -> None:
    data = bytes(region_of(range(3)).bytes)
    sums = digests(data)
    sums[1] ^= 1
    got = write(raw, reserve(raw, range(3)).reservation, data, sums)
    assert got == [BlockStatus.STORED, BlockStatus.CORRUPT, BlockStatus.STORED]
    message = pb.Acquire(ns=handle(raw), hashes=keys(range(3)))
    answer = expect(pb.AcquireOk, raw.call(Kind.ACQUIRE, message.SerializeToString()), Kind.ACQUIRE_OK)
    assert list(answer.status) == [BlockStatus.LOADED, BlockStatus.MISSING, BlockStatus.LOADED]
    assert running.state.counts.corrupt == 1


def test_a_write_of_the_wrong_size_is_refused_and_the_connection_lives(running: StorageNode, raw: Connection) -> None:
    data = bytes(region_of(range(2)).bytes)
    number = reserve(raw, range(2)).reservation
    with pytest.raises(InvalidArgument, match="bytes for"):
        write(raw, number, data[:-1], digests(data))
    with pytest.raises(InvalidArgument, match="checksums"):
        write(raw, number, data, [1])
    assert write(raw, number, data, digests(data)) == [BlockStatus.STORED] * 2


def test_a_write_to_a_reservation_that_ended_is_read_and_forgotten(running: StorageNode, raw: Connection) -> None:
    data = bytes(region_of(range(2)).bytes)
    number = reserve(raw, range(2)).reservation
    raw.call(Kind.ABORT, pb.Abort(reservation=number).SerializeToString())
    assert write(raw, number, data, digests(data)) == [BlockStatus.ABORTED] * 2
    assert running.state.arena.bytes_used == 0


def test_a_writer_that_hangs_up_in_the_middle_leaves_nothing(running: StorageNode) -> None:
    connection = Connection.open(running.channel, Identity.new(), silence_s=2.0)
    number = reserve(connection, range(100)).reservation
    message = pb.Write(reservation=number, checksums=bytes(800)).SerializeToString()
    head = wire.encode_header(Kind.WRITE, 9, len(message), 500_000) + message
    connection.stream.sock.sendall(head + b"x" * 200_000)
    until(lambda: any(b.state == 0 for b in running.state.inventory.blocks()))
    connection.close()
    until(lambda: running.state.arena.bytes_used == 0 and running.state.sessions == 0)
    with running.lock:
        running.state.check()


def test_inline_reads_end_their_lease_even_when_the_reader_goes(running: StorageNode) -> None:
    peer = ShmTransport(Identity.new()).connect(endpoint(running))
    push(peer, range(100), region_of(range(100)))
    peer.close()
    connection = Connection.open(running.channel, Identity.new(), silence_s=2.0)
    message = pb.Acquire(ns=handle(connection), hashes=keys(range(100)) * 20, mode=1).SerializeToString()
    connection.stream.send(Kind.ACQUIRE, 1, message)
    until(lambda: len(running.state.leases) == 1)
    with running.lock:
        running.state.session_ended(connection.stream.sock.getsockname(), 0.0)  # nothing of a session's own
    connection.close()
    until(lambda: len(running.state.leases) == 0)


BAD = [
    (Kind.ACQUIRE, pb.Acquire(ns=999, hashes=keys([1])), FingerprintMismatch),
    (Kind.ACQUIRE, pb.Acquire(ns=0, hashes=keys([1])), FingerprintMismatch),
    (Kind.ACQUIRE, pb.Acquire(ns=1, hashes=b"odd"), InvalidArgument),
    (Kind.ACQUIRE, pb.Acquire(ns=1, hashes=keys([1]), mode=7), InvalidArgument),
    (Kind.ACQUIRE, pb.Acquire(ns=1, hashes=bytes(16 * 70_000)), InvalidArgument),
    (Kind.RESERVE, pb.Reserve(ns=1, hashes=keys([1]), salt="s" * 200), InvalidArgument),
    (Kind.RESERVE, pb.Reserve(ns=1, hashes=keys([1]), parent=b"p"), InvalidArgument),
    (Kind.RESERVE, pb.Reserve(ns=1, hashes=keys([1]), epoch=3), FingerprintMismatch),
    (Kind.PULL, pb.Pull(reserve=pb.Reserve(ns=1, hashes=keys([1])), region=77, pieces=1), InvalidArgument),
    (Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=pb.NamespaceSpec(group="g")), InvalidArgument),
    (Kind.OPEN_NAMESPACE, pb.OpenNamespace(), InvalidArgument),
    (Kind.REGISTER_REGION, pb.RegisterRegion(region=1, address=1 << 63, length=1 << 63), InvalidArgument),
    (Kind.REGISTER_REGION, pb.RegisterRegion(region=1, address=4096, length=0), InvalidArgument),
]


def test_bad_requests_are_refused_and_the_connection_lives(running: StorageNode, raw: Connection) -> None:
    handle(raw)
    for kind, message, error in BAD:
        with pytest.raises(error):
            raw.call(kind, message.SerializeToString())
        assert raw.call(Kind.PING, b"").kind == Kind.PONG
    assert running.server.counts["handler_errors"] == 0
    assert running.arena.bytes_used == 0


def test_messages_that_do_not_decode_cost_one_connection(running: StorageNode) -> None:
    for kind in (Kind.ACQUIRE, Kind.RESERVE, Kind.PULL, Kind.COMMIT, Kind.WRITE, Kind.RELEASE, Kind.LOOKUP):
        connection = Connection.open(running.channel, Identity.new(), silence_s=2.0)
        with pytest.raises(KVError):
            connection.call(kind, b"\xff\xff\xff garbage")
    again = Connection.open(running.channel, Identity.new(), silence_s=2.0)
    assert again.call(Kind.PING, b"").kind == Kind.PONG
    again.close()
    assert running.server.counts["handler_errors"] == 0


def test_descriptors_are_not_given_over_tcp_and_slabs_are_bounded(running: StorageNode, raw: Connection) -> None:
    slabs = len(running.arena.slabs)
    local = raw.stream.passes_fds
    for wanted in (np.array([slabs], np.uint32), np.zeros(200, np.uint32), np.array([0], np.uint32)):
        message = pb.MapSlabs(slabs=wanted.tobytes()).SerializeToString()
        if local and len(wanted) == 1 and wanted[0] == 0:
            assert raw.call(Kind.MAP_SLABS, message).kind == Kind.MAP_SLABS_OK
            assert len(raw.stream.fds) == 1
        else:
            with pytest.raises(InvalidArgument):
                raw.call(Kind.MAP_SLABS, message)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_stray_descriptors_do_not_pile_up(running: StorageNode) -> None:
    connection = Connection.open(f"unix:{running.unix_path}", Identity.new(), silence_s=2.0, passes_fds=True)
    read, written = os.pipe()
    before = open_files()
    for _ in range(50):
        connection.call(Kind.PING, b"", fds=[read, written, read])
    assert open_files() <= before + 3
    os.close(read)
    os.close(written)
    connection.close()


def test_garbage_and_oversized_frames_cost_one_connection(running: StorageNode) -> None:
    host, port = running.channel.split(":")
    hello = Identity.new().hello().SerializeToString()
    greeted = wire.encode_header(Kind.HELLO, 1, len(hello)) + hello
    oversized = wire.HEADER.pack(wire.MAGIC, 1, int(Kind.ACQUIRE), 1, 0xFFFFFFFF, 0)
    absurd_raw = wire.HEADER.pack(wire.MAGIC, 1, int(Kind.WRITE), 1, 0, 1 << 60)
    for junk in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", greeted + oversized, greeted + absurd_raw, greeted[:30]):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
    connection = Connection.open(running.channel, Identity.new(), silence_s=2.0)
    assert connection.call(Kind.PING, b"").kind == Kind.PONG
    info = expect(pb.NodeInfoOk, connection.call(Kind.NODE_INFO, b""), Kind.NODE_INFO_OK)
    assert json.loads(info.json)["healthy"]
    connection.close()


def test_leases_are_given_back_with_the_next_message(running: StorageNode, raw: Connection) -> None:
    data = bytes(region_of(range(4)).bytes)
    write(raw, reserve(raw, range(4)).reservation, data, digests(data))
    ask = pb.Acquire(ns=handle(raw), hashes=keys(range(4)), deadline_ms=100)
    first = expect(pb.AcquireOk, raw.call(Kind.ACQUIRE, ask.SerializeToString()), Kind.ACQUIRE_OK)
    ask.releases = struct.pack("<Q", first.lease)
    second = expect(pb.AcquireOk, raw.call(Kind.ACQUIRE, ask.SerializeToString()), Kind.ACQUIRE_OK)
    assert len(running.state.leases) == 1 and second.lease != first.lease
    raw.tell(Kind.RELEASE, pb.Release(leases=struct.pack("<Q", second.lease)).SerializeToString())
    until(lambda: len(running.state.leases) == 0)
    renew = pb.Renew(lease=second.lease, lease_ms=1000).SerializeToString()
    assert expect(pb.RenewOk, raw.call(Kind.RENEW, renew), Kind.RENEW_OK).lease_ms == 0


WRITER = """
import subprocess, sys, time
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity
c = Connection.open("unix:" + sys.argv[1], Identity.new(), silence_s=2.0)
spec = pb.OpenNamespace(spec=Namespace("model", 5000, 16).to_spec()).SerializeToString()
h = expect(pb.NamespaceHandle, c.call(Kind.OPEN_NAMESPACE, spec), Kind.NAMESPACE_HANDLE).handle
c.call(Kind.RESERVE, pb.Reserve(ns=h, hashes=bytes(160), deadline_ms=60000).SerializeToString())
child = subprocess.Popen(["sleep", "60"], pass_fds=[c.stream.sock.fileno()])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_killed_writer_frees_its_slots_though_its_child_holds_the_socket(running: StorageNode) -> None:
    """FAULTS "a writer killed mid-put": its key is free in far less than its reservation's minute."""
    command = [sys.executable, "-c", WRITER, str(running.unix_path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    child = int(writer.stdout.readline())
    try:
        assert len(running.state.reservations) == 1
        killed = time.monotonic()
        writer.kill()
        until(lambda: len(running.state.reservations) == 0)
        assert time.monotonic() - killed < 3.0
        assert running.state.arena.bytes_used == 0
        assert Path(f"/proc/{child}").exists(), "the socket was still held open"
    finally:
        os.kill(child, signal.SIGKILL)
        writer.kill()
        writer.wait()
        writer.stdout.close()


def test_reading_ahead_without_an_ssd_marks_blocks_as_used(running: StorageNode, raw: Connection) -> None:
    number = handle(raw)
    for numbers in (range(2), range(2, 4)):
        data = b"x" * (NAMESPACE.block_bytes * 2)
        assert write(raw, reserve(raw, numbers).reservation, data, digests(data)) == [BlockStatus.STORED] * 2
    ask = pb.Acquire(ns=number, hashes=keys([0, 1, 9]), mode=2, deadline_ms=1000)
    answer = expect(pb.AcquireOk, raw.call(Kind.ACQUIRE, ask.SerializeToString()), Kind.ACQUIRE_OK)
    assert list(answer.status) == [BlockStatus.LOADED, BlockStatus.LOADED, BlockStatus.MISSING]
    coldest = [block.hash for block in running.state.inventory.coldest_blocks(2)]
    assert coldest == [key(3), key(2)], "what nobody asked for since it was stored"


def test_who_says_goodbye_has_nothing_for_readers_before_masters_hear_it(
    running: StorageNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is dropped between the goodbye and the end of the process would still be read from it."""
    said = []
    link = SimpleNamespace(
        leave=lambda reason: said.append(running.state.left),
        stop=lambda: None,
        acked_seq=0,
        attached=False,
        wake=lambda: None,
    )
    monkeypatch.setattr(running, "links", [link])
    running._leave_masters()
    assert said == [True]
