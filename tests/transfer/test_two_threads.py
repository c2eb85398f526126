"""Work in two halves: the second thread is used while it has a core, and its memory is nobody's until it has ended."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from kvstrata.transfer import two_threads
from kvstrata.transfer.cores import ALONE_MAX, SecondCore, usable_cores
from kvstrata.transfer.two_threads import ASKER, HELPER, Half, Helpers, run_both, worth_it

WAIT_S = 30.0


def may_use(monkeypatch: pytest.MonkeyPatch, cores: int) -> SecondCore:
    """A process that has just begun, and may use so many cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(two_threads, "_second_core", core := SecondCore())
    monkeypatch.setattr(two_threads, "_helpers", Helpers())
    return core


def attempts(core: SecondCore, pieces: int, worked_s: float) -> list[bool]:
    """Of so many, each of one second: which were split, if two threads then work so many seconds in it."""
    split = []
    for _ in range(pieces):
        split.append(core.free())
        if split[-1]:
            core.tried(worked_s, 1.0)
    return split


def test_a_half_is_its_askers_or_a_helpers_whatever_their_threads_are_called() -> None:
    """A thread that has ended leaves its number to the next one, which may find a half of its predecessor's."""
    half = Half(lambda: None)
    assert half.claim() and half.claim() and not half.claim(HELPER)
    half = Half(lambda: None)
    assert half.claim(HELPER) and not half.claim()


def test_a_second_thread_is_used_while_it_has_a_core_and_rarely_while_it_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = may_use(monkeypatch, 2)
    assert all(attempts(core, 10, 1.9))
    split = attempts(core, 100, 1.0)  # two threads took turns on one core
    assert [i for i, both in enumerate(split) if both] == [0, 2, 6, 14, 30, 46, 62, 78, 94]
    assert attempts(core, ALONE_MAX + 1, 1.9).count(True) >= 1
    assert all(attempts(core, 10, 1.9)), "it is used again at once when there is a core"


def test_a_process_that_may_use_one_core_never_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    core = may_use(monkeypatch, 1)
    assert usable_cores() == 1 and not any(attempts(core, 10, 1.9))


def test_two_threads_that_take_the_last_count_at_once_do_not_end_it_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    core = may_use(monkeypatch, 2)
    core.in_vain()
    core._alone -= 2
    assert core.free()


def test_how_it_went_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    core, told = may_use(monkeypatch, 2), list[tuple[float, float]]()
    monkeypatch.setattr(core, "tried", lambda *what: told.append(what))
    begun = threading.Event()
    run_both(lambda: began(begun), begun.set)
    assert len(told) == 1 and told[0][0] >= 0 and told[0][1] > 0


def began(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


@contextlib.contextmanager
def at_work(count: int) -> Iterator[None]:
    """So many threads have split their work, and are at it with a helper each until the end of the block."""
    all_begun, may_end, problems = threading.Barrier(2 * count + 1), threading.Event(), list[BaseException]()

    def half() -> None:
        all_begun.wait(WAIT_S)
        began(may_end)

    def caller() -> None:
        try:
            run_both(half, half)
        except BaseException as error:  # noqa: BLE001  asserted below
            problems.append(error)

    threads = [threading.Thread(target=caller) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        all_begun.wait(WAIT_S)
        yield
    finally:
        may_end.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert not problems


def test_threads_that_copy_at_once_have_a_helper_each_while_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    core = may_use(monkeypatch, 16)
    with at_work(7):
        assert worth_it() and not core._vain
    with at_work(8):
        assert not worth_it(), "all 16 are in use"


def test_work_that_finds_all_helpers_busy_says_nothing_about_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    core, done = may_use(monkeypatch, 2), list[str]()
    with at_work(1):
        assert not worth_it()
        run_both(lambda: done.append("mine"), lambda: done.append("others"))
        assert done == ["mine", "others"] and not core._vain


def test_a_helper_is_free_before_its_caller_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    may_use(monkeypatch, 2)
    begun = threading.Event()
    helpers = two_threads._of_this_process()
    full = []
    monkeypatch.setattr(Half, "end", lambda half: (full.append(helpers.full), half._ended.release()))
    run_both(lambda: began(begun), begun.set)
    assert full == [False]


def test_what_the_second_thread_does_not_come_to_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its core is wanted by others: nobody waits for it."""
    core, offered, done = may_use(monkeypatch, 2), list[Half](), list[str]()
    helpers = two_threads._of_this_process()
    monkeypatch.setattr(helpers, "offer", offered.append)
    run_both(lambda: done.append("mine"), lambda: done.append("others"))
    assert done == ["mine", "others"]
    assert not core.free(), "it counts as one in vain"

    def fails() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        run_both(fails, lambda: done.append("late"))
    late = [threading.Thread(target=helpers._do, args=(half,)) for half in offered]
    for thread in late:
        thread.start()
        thread.join(WAIT_S)
    assert done == ["mine", "others"], "who comes to it late does nothing"


def test_what_fails_in_the_second_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    may_use(monkeypatch, 2)
    begun = threading.Event()

    def fails() -> None:
        begun.set()
        raise MemoryError("of the other half")

    with pytest.raises(MemoryError, match="of the other half"):
        run_both(lambda: began(begun), fails)
    assert not two_threads._of_this_process().full


def held_open(begun: threading.Event, may_end: threading.Event, landed: list[bool]) -> Callable[[], None]:
    """Work that ends when it is let."""

    def copies() -> None:
        begun.set()
        began(may_end)
        landed.append(True)

    return copies


def soon(event: threading.Event) -> None:
    """Late enough for a caller that does not wait to have gone on."""
    threading.Timer(0.05, event.set).start()


def test_no_byte_lands_after_a_copy_has_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """One half fails while the other still copies: the memory is the caller's again only when both have ended."""
    may_use(monkeypatch, 2)
    begun, may_end, landed = threading.Event(), threading.Event(), list[bool]()

    def fails() -> None:
        began(begun)
        soon(may_end)
        raise MemoryError

    with pytest.raises(MemoryError):
        run_both(fails, held_open(begun, may_end, landed))
    assert landed


class Interrupted(BaseException):
    """What a signal's handler raises."""


def test_no_byte_lands_after_a_signal_has_ended_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    may_use(monkeypatch, 2)
    begun, may_end, landed = threading.Event(), threading.Event(), list[bool]()

    def handler(*_: object) -> None:
        soon(may_end)
        raise Interrupted

    def copies() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        held_open(begun, may_end, landed)()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Interrupted):
            run_both(lambda: began(begun), copies)
        assert landed
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("when", ["it is offered", "it is claimed back", "it is waited for, twice"])
def test_no_byte_lands_after_an_interrupt_at_any_step(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    may_use(monkeypatch, 2)
    begun, may_end, landed = threading.Event(), threading.Event(), list[bool]()
    helpers, main = two_threads._of_this_process(), threading.get_ident()
    left = 2 if "twice" in when else 1

    def interrupt() -> None:
        nonlocal left
        if left and threading.get_ident() == main:
            left -= 1
            soon(may_end)
            raise Interrupted

    class Waited:
        """A lock whose waits are interrupted."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.acquire, self.release = self.lock.acquire, self.lock.release

        def __enter__(self) -> None:
            interrupt()
            assert self.lock.acquire(timeout=WAIT_S)

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    class Watched(Half):
        def __init__(self, work: Callable[[], None]) -> None:
            super().__init__(work)
            if "waited" in when:
                self._ended = Waited()  # type: ignore[assignment]
                self._ended.acquire()

        def claim(self, who: str = ASKER) -> bool:
            mine = super().claim(who)
            if "claimed" in when:
                interrupt()
            return mine

    def offer(half: Half) -> None:
        Helpers.offer(helpers, half)
        began(begun)
        if "offered" in when:
            interrupt()

    monkeypatch.setattr(two_threads, "Half", Watched)
    monkeypatch.setattr(helpers, "offer", offer)
    with pytest.raises(Interrupted):
        run_both(lambda: began(begun), held_open(begun, may_end, landed))
    assert landed and not left
