"""Engines' events: in order and gapless or forgotten; and what an engine is then known to have."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.master.index import engine_events as engine_events_module
from kvstrata.master.index import engine_feed
from kvstrata.master.index.engine_events import EngineEvents
from kvstrata.master.index.engine_feed import EngineFeed
from kvstrata.master.index.engine_index import ENGINES_MAX, PLACES_MAX, EngineIndex, Prefix
from kvstrata.master.index.engine_source import EngineAddress, EngineSource, parse_engine
from kvstrata.proto.errors import Busy, ConfigError
from kvstrata.transfer.kv_events.events import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvstrata.transfer.loops import Loops

EPOCH = 1 << 32


def stored(*hashes: int | bytes, medium: str | None = GPU, group: int | None = 0) -> BlockStored:
    return BlockStored(list(hashes), None, [], 16, None, medium, None, None, group)


def removed(*hashes: int | bytes, medium: str | None = GPU, group: int | None = 0) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, group)


class TestIndex:
    def known(self, *said: Event, **more: Any) -> EngineIndex:
        index = EngineIndex(**more)
        index.add("e")
        index.apply("e", said)
        index.check()
        return index

    def test_a_prefix_ends_at_the_first_hole(self) -> None:
        index = self.known(stored(1, 2, 3, 5), stored(4, medium=CPU))
        assert index.prefix("e", [1, 2, 3, 4, 5, 6]) == Prefix(5, 3)
        assert index.prefix("e", [9, 1]) == Prefix(0, 0) and index.prefix("e", []) == Prefix(0, 0)

    def test_a_block_is_there_until_each_place_has_let_go(self) -> None:
        index = self.known(stored(1, group=0), stored(1, group=1), stored(1, medium=CPU))
        index.apply("e", [removed(1, group=0)])
        assert index.prefix("e", [1]) == Prefix(1, 1)
        index.apply("e", [removed(1, group=1)])
        assert index.prefix("e", [1]) == Prefix(1, 0)
        index.apply("e", [removed(1, medium=CPU, group=None), removed(7)])
        assert index.prefix("e", [1]) == Prefix(0, 0) and index.blocks("e") == 0

    def test_bytes_and_vllms_integers_are_one_hash(self) -> None:
        whole = bytes(range(32))
        index = self.known(stored(whole))
        index.apply("e", [removed(int.from_bytes(whole, "big") & ((1 << 64) - 1))])
        assert index.blocks("e") == 0

    def test_cleared(self) -> None:
        index = self.known(stored(1, 2), AllBlocksCleared(), stored(3))
        assert index.blocks("e") == 1

    def test_what_was_stored_longest_ago_goes_past_the_bound(self) -> None:
        index = self.known(stored(1, 2, 3), stored(1), stored(4), blocks_max=3)
        assert [index.prefix("e", [tail]).blocks for tail in (1, 2, 3, 4)] == [1, 0, 1, 1]

    def test_places_and_engines_are_bounded(self) -> None:
        index = self.known(*(stored(1, group=group) for group in range(2 * PLACES_MAX)))
        for number in range(1, ENGINES_MAX):
            index.add(str(number))
        with pytest.raises(Busy, match="is the bound"):
            index.add("one more")

    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.sampled_from([GPU, CPU]), st.integers(0, 1))))
    def test_it_is_a_set_of_places_by_block(self, said: list[tuple[bool, int, str, int]]) -> None:
        index, model = self.known(), set()
        for adds, tail, medium, group in said:
            index.apply("e", [(stored if adds else removed)(tail, medium=medium, group=group)])
            (model.add if adds else model.discard)((tail, medium, group))
        index.check()
        assert index.blocks("e") == len({tail for tail, _, _ in model})
        for tail in range(7):
            places = {medium for each, medium, _ in model if each == tail}
            assert index.prefix("e", [tail]) == Prefix(int(bool(places)), int(GPU in places))


class Engine:
    """A publisher with a replay buffer, and a feed behind a wire that loses what a test says."""

    def __init__(self, *, replays: bool, kept: int = 100, epoch: int = EPOCH) -> None:
        self.truth: set[int] = set()
        self.known: set[int] = set()
        self.sent: list[tuple[int, list[Event]]] = []
        self.kept, self.sequence, self.asked = kept, epoch, None
        self.feed = EngineFeed(self.apply, self.known.clear, replays=replays)
        self.ask(self.feed.connected())

    def apply(self, said: Sequence[Event]) -> None:
        for event in said:
            if isinstance(event, BlockStored):
                self.known.update(map(int, event.block_hashes))
            elif isinstance(event, BlockRemoved):
                self.known.difference_update(map(int, event.block_hashes))

    def ask(self, sequence: int | None) -> None:
        if sequence is not None:
            self.asked = sequence

    def say(self, added: bool, block: int, *, lost: bool = False) -> None:
        (self.truth.add if added else self.truth.discard)(block)
        said: list[Event] = [stored(block) if added else removed(block)]
        self.sent = [*self.sent, (self.sequence, said)][-self.kept :]
        if not lost:
            self.ask(self.feed.batch(self.sequence, said))
        self.sequence += 1
        self.feed.check()

    def answer(self) -> None:
        """The replay socket's answer, complete."""
        if self.asked is not None:
            for sequence, said in self.sent:
                if sequence >= self.asked:
                    self.feed.replay(sequence, said)
            self.asked = None
            self.feed.replayed()
            self.feed.check()

    def restart(self, *, epoch: int) -> None:
        self.truth.clear()
        self.sent, self.sequence = [], epoch


def test_a_gap_is_asked_for_and_nothing_is_lost() -> None:
    engine = Engine(replays=True)
    engine.answer()
    engine.say(True, 1)
    engine.say(True, 2, lost=True)
    engine.say(False, 1, lost=True)
    engine.say(True, 3)
    assert engine.asked == EPOCH + 1 and engine.known == {1}
    engine.answer()
    assert engine.known == engine.truth == {2, 3} and engine.feed.counts["incomplete"] == 0


def test_without_replay_a_gap_means_to_forget() -> None:
    engine = Engine(replays=False)
    engine.say(True, 1)
    engine.say(False, 1, lost=True)
    engine.say(True, 3)
    assert engine.known == {3} and engine.feed.counts["gaps"] == engine.feed.counts["incomplete"] == 1


@pytest.mark.parametrize("epoch", [0, EPOCH])
def test_a_restart_is_noticed_by_its_sequence(epoch: int) -> None:
    engine = Engine(replays=False, epoch=epoch)
    for block in range(3):
        engine.say(True, block)
    engine.restart(epoch=2 * EPOCH if epoch else 0)
    engine.say(True, 9)
    assert engine.known == {9} and engine.feed.counts["restarts"] == 1


def test_what_waits_for_a_replay_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_feed, "PENDING_MAX", 3)
    engine = Engine(replays=True)
    for block in range(5):
        engine.say(True, block)
    assert engine.known == engine.truth


@given(
    st.lists(
        st.tuples(st.sampled_from(["say", "say", "say", "lose", "answer", "restart"]), st.booleans(), st.integers(0, 4))
    ),
    st.booleans(),
    st.integers(1, 6),
)
def test_it_never_knows_of_what_is_not_there(steps: list[tuple[str, bool, int]], replays: bool, kept: int) -> None:
    """Whenever the last batch has been applied, what is known is true; with a replay that reaches back, all of it."""
    engine = Engine(replays=replays, kept=kept)
    epochs = 1
    for what, added, block in steps:
        if what in ("say", "lose"):
            engine.say(added, block, lost=what == "lose")
        elif what == "answer":
            engine.answer()
        else:
            epochs += 1
            engine.restart(epoch=epochs * EPOCH)
        if not engine.feed.replaying and engine.feed.last == engine.sequence - 1:
            assert engine.known <= engine.truth
    engine.answer()
    engine.say(True, 7)
    engine.answer()
    assert engine.known <= engine.truth and 7 in engine.known


def test_addresses() -> None:
    assert parse_engine("a=tcp://h:1") == EngineAddress("a", "tcp://h:1")
    assert parse_engine("a=tcp://h:1,replay=tcp://h:2") == EngineAddress("a", "tcp://h:1", "tcp://h:2")
    for wrong in ("", "a", "=tcp://h:1", "a=h:1", "a=tcp://h:1,again=tcp://h:2", "a=tcp://h:1,replay=", "a=tcp://h:1,"):
        with pytest.raises(ConfigError, match="write NAME="):
            parse_engine(wrong)


def test_what_waits_for_a_replay_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.master.index.engine_feed.PENDING_BYTES_MAX", 100)
    taken: list[Sequence[Event]] = []
    feed = EngineFeed(taken.append, lambda: None, replays=True)
    assert feed.connected() == 0
    for number in range(3):
        assert feed.batch(number, [stored(number)], 40) is None
        feed.check()
    assert len(taken) == 3 and not feed.replaying, "the third did not fit: the answer is not waited for"
    assert feed.batch(4, [stored(4)], 40) == 3 and feed.replaying
    assert feed.batch(5, [stored(5)], 90) is None and feed.replaying, "what waited before counts no more"
    feed.check()


def test_sockets_are_not_taken_from_under_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events_module, "STOP_S", 0.05)
    loops, within, go_on = Loops(), threading.Event(), threading.Event()

    def slow(events: EngineEvents) -> None:
        within.set()
        assert go_on.wait(10.0)

    monkeypatch.setattr(EngineEvents, "_read", slow)
    events = EngineEvents([EngineAddress("e", "tcp://127.0.0.1:9")], loops)
    try:
        assert within.wait(10.0)
        events.close()
        assert not any(socket.closed for socket in events._sources["e"].sockets)
    finally:
        go_on.set()
        loops.stop()
    events.close()
    assert events._context.closed


def test_a_question_does_not_wait_for_what_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events_module, "POLL_MS", 1)
    loops, within, go_on = Loops(), threading.Event(), threading.Event()

    def slow(source: EngineSource) -> None:
        within.set()
        assert go_on.wait(30.0)

    monkeypatch.setattr(EngineSource, "read", slow)
    events = EngineEvents([EngineAddress(name, "tcp://127.0.0.1:9") for name in ("a", "b")], loops)
    try:
        with ThreadPoolExecutor(1) as asking:
            assert within.wait(10.0)
            try:
                answers = asking.submit(lambda: (events.states(), events.states(names=["b", "?"]), events.counts()))
                everybody, some, counts = answers.result(5.0)
            finally:
                go_on.set()
    finally:
        loops.stop()
        events.close()
    assert [state.name for state in everybody] == list(counts) == ["a", "b"]
    assert [state.name for state in some] == ["b"]
