"""Power lost at any moment: nothing removed comes back, nothing flushed is lost, every byte is verified."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.proto.status import BlockStatus
from kvstrata.storage.ssd.faults import CrashDisk
from tests.storage.ssd.stores import BLOCK_BYTES, Store, key, payload, versions_of

KEYS = 12
numbers = st.integers(0, KEYS - 1)


class CrashMachine(RuleBasedStateMachine):
    """A model: for each key the versions that may be found, and whether one must be."""

    @initialize(devices=st.integers(1, 2))
    def start(self, devices: int) -> None:
        # What is durable is the fault layer's to say: memory does, and its flushes take no time.
        memory = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(prefix="kvstrata-crash-", dir=memory if memory.is_dir() else None))
        self.folders = [self.root / name for name in "ab"[:devices]]
        self.version = 0
        self.may: dict[bytes, set[int]] = {key(number): set() for number in range(KEYS)}
        self.must: dict[bytes, int] = {}
        self.open()

    def open(self, dies_after: int | None = None) -> None:
        self.disk = CrashDisk(dies_after=dies_after)
        self.store = Store(self.folders, open_file=self.disk.open_file).scan()

    @property
    def dead(self) -> bool:
        return self.disk.off

    @rule(chosen=st.sets(numbers, min_size=1, max_size=6), dies=st.none() | st.integers(0, 12))
    def write(self, chosen: set[int], dies: int | None) -> None:
        self.version += 1
        versions = {key(number): payload(key(number), self.version, BLOCK_BYTES) for number in chosen}
        for name in versions:  # a node writes a key again only when it has it no more
            self.store.evict(name)
            self.must.pop(name, None)
        self.disk.dies_after = dies
        for name, good in self.store.write(versions).items():
            self.may[name].add(self.version)
            if good:
                self.must[name] = self.version
        self._after()

    @rule(chosen=st.sets(numbers, min_size=1, max_size=4), dies=st.none() | st.integers(0, 4))
    def remove(self, chosen: set[int], dies: int | None) -> None:
        names = [key(number) for number in sorted(chosen)]
        self.disk.dies_after = dies
        durable = self.store.remove(names)
        for name in names:
            self.must.pop(name, None)
            if durable:
                self.may[name].clear()
        self._after()

    @rule(number=numbers)
    def evict(self, number: int) -> None:
        """Its slot may be written over from here on; until then a restart may find it."""
        self.store.evict(key(number))
        self.must.pop(key(number), None)

    @rule(number=numbers)
    def erase(self, number: int) -> None:
        block = self.store.blocks.get(key(number))
        if block is None:
            return
        extent, slot = block.slab, block.slot
        assert self.store.log.erase([(extent, slot)])  # type: ignore[list-item]
        self.evict(number)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.disk.close()
        self._found_again()

    @rule(seed=st.integers(0, 1 << 16))
    def lose_power(self, seed: int) -> None:
        self._crash(random.Random(seed))

    def _after(self) -> None:
        self.disk.dies_after = None
        if self.dead:
            self._crash(random.Random(self.version))

    def _crash(self, kept: random.Random) -> None:
        self.disk.crash(kept)
        self.store.close()
        self.disk.close()
        self._found_again(dies=kept.randrange(30) if kept.random() < 0.3 else None)

    def _found_again(self, dies: int | None = None) -> None:
        self.open(dies)
        if self.dead:  # in the middle of the recovery
            self.disk.crash(random.Random(dies))
            self.store.close()
            self.disk.close()
            self.open()
        self.disk.dies_after = None
        held = self.must
        for name, version in held.items():
            assert name in self.store.blocks, f"{name.hex()} was flushed and is lost"
            assert self._version_of(name) == version
        for name in list(self.store.blocks):
            found = self._version_of(name)
            assert found is None or found in self.may[name], f"{name.hex()} v{found} came back"
            if found is not None:
                self.must[name] = found
        for name in self.may:
            if name not in self.store.blocks:
                self.must.pop(name, None)

    def _version_of(self, name: bytes) -> int | None:
        """None: the slot was written over, or torn; a miss."""
        (status, data) = self.store.read([name])[0]
        if status == BlockStatus.CORRUPT:
            self.store.evict(name)
            return None
        assert status == BlockStatus.LOADED
        for version in range(self.version, 0, -1):
            if data == payload(name, version, BLOCK_BYTES):
                return version
        raise AssertionError(f"{name.hex()}: bytes that nobody wrote")

    @precondition(lambda self: not self.dead)
    @invariant()
    def everything_durable_is_readable(self) -> None:
        names = list(self.must)
        for name, (status, data) in zip(names, self.store.read(names), strict=True):
            assert status == BlockStatus.LOADED and data == payload(name, self.must[name], BLOCK_BYTES)
        self.store.log.arena.check()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.disk.close()
            shutil.rmtree(self.root)


CrashMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TestCrashes = CrashMachine.TestCase


@pytest.mark.parametrize("dies_after", range(0, 24, 2))
def test_power_lost_at_each_step_of_a_recovery(tmp_path: Path, dies_after: int) -> None:
    """Removals are forgotten only after what they kept dead is blank."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store = Store(folders).scan()
    store.write(versions_of(range(60)))
    assert store.remove([key(number) for number in range(0, 60, 6)])
    store.close()
    disk = CrashDisk(dies_after=dies_after)
    Store(folders, open_file=disk.open_file).scan().close()
    disk.crash([False, True] * 500)
    disk.close()
    store = Store(folders).scan()
    assert set(store.blocks) == {key(number) for number in range(60) if number % 6}
    for name, (status, data) in zip(store.blocks, store.read(list(store.blocks)), strict=True):
        assert status == BlockStatus.LOADED and data == payload(name, 0, BLOCK_BYTES)
    store.close()
