"""What the bench makes of its rounds: medians, ratios of neighbours, budgets, and the page."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import suite_markdown
from cases import Case, CpuWatch, Round, joined, measure
from suite_budgets import BUDGETS, Budget, judge, moved
from suite_markdown import BEGIN, END, sections, write
from suite_peers import read_lines
from suite_plots import plot
from suite_results import Results
from suite_scale import QUICK, Group, Scale
from transfer_pool import Missed
from transfer_shapes import Shape

from tests.waiting import until

BIG = moved("load", 64, 2 << 20)
READY_S = 30.0
TOLD = {
    "machine": {"cpu": "a CPU", "cpus": 2, "memory_gib": 8.0, "system": "Linux", "python": "3.11", "load_before": 0.1},
    "versions": {"kvstrata": "0.1"}, "rounds": 3, "load_after": 0.2, "busy": "",
}  # fmt: skip


def rounds_of(*gb_s: float, seconds: float = 1.0, node: float = 0.0) -> list[Round]:
    return [Round([seconds], int(speed * seconds * 1e9), 0.5, {"node": node}) for speed in gb_s]


def results(ours: list[float], memcpy: list[float], node: float = 0.0) -> Results:
    found = Results()
    for mine, theirs in zip(rounds_of(*ours, node=node), rounds_of(*memcpy), strict=True):
        found.add("kvstrata-shm", {BIG: mine})
        found.add("memcpy", {BIG: theirs})
    return found


def test_a_ratio_is_between_neighbours_of_a_round() -> None:
    found = results([1.0, 10.0, 5.0], [2.0, 20.0, 10.0])  # a machine whose speed drifts, and half of memcpy always
    ratio = found.ratio(BIG, "kvstrata-shm", "memcpy")
    assert ratio is not None and (ratio.low, ratio.median, ratio.high) == (0.5, 0.5, 0.5)


def test_a_ratio_of_latencies_is_above_one_when_ours_is_less() -> None:
    found = Results()
    found.add("kvstrata-shm", {BIG: Round([1e-4], 1, 0.0)})
    found.add("openlake", {BIG: Round([2e-4], 1, 0.0)})
    ratio = found.ratio(BIG, "kvstrata-shm", "openlake", figure="p50_us")
    assert ratio is not None and ratio.median == pytest.approx(2)


@pytest.mark.parametrize(("speed", "word"), [(0.95, "met"), (0.85, "**missed**")])
def test_a_budget_is_met_or_missed(speed: float, word: str) -> None:
    verdict = judge(results([speed] * 3, [1.0] * 3), BUDGETS[0])
    assert verdict.word == word and verdict.goal == ">= 0.9 x memcpy"


def test_a_bound_is_held_against_the_figure_itself() -> None:
    budget = Budget("node CPU", BIG, "kvstrata-shm", figure="cpu of node", most=0.02)
    assert judge(results([1.0], [1.0], node=0.0), budget).word == "met"
    assert judge(results([1.0], [1.0], node=0.5), budget).word == "**missed**"


def test_what_was_not_measured_is_not_met() -> None:
    assert {judge(Results(), budget).word for budget in BUDGETS} == {"not measured"}


def test_the_best_peer_is_none_of_ours_and_no_roofline() -> None:
    found = results([9.0], [8.0])
    found.add_medians("mooncake-shm", BIG, 5.0, 1.0, 1.0)
    found.add_medians("openlake", BIG, 6.0, 1.0, 1.0)
    verdict = judge(found, BUDGETS[1])
    assert verdict.best_peer == "openlake" and verdict.ratio is not None and verdict.ratio.median == 1.5
    assert verdict.word == "met"


LINES = (
    {"op": "get_batch_into"},
    {"op": "put_batch_from", "error": "no"},
    {"op": "get_buffer"},  # another way to load: the quickest one counts
    {"op": "batch_is_exist", "value_size": 0, "batch": 10_000},
)


def test_lines_of_peers_are_read_and_their_errors_left_out() -> None:
    row = {
        "GB_s_med": 1.5,
        "p50_us_med": 10,
        "p99_us_med": 20,
        "batch": 64,
        "value_size": 2 << 20,
        "peer": "mooncake-tcp",
    }
    lines = ["starting", *(json.dumps(row | more) for more in LINES)]
    found = Results()
    assert read_lines(found, lines) == 2
    speed = found.spread(BIG, "mooncake-tcp")
    assert speed is not None and speed.median == 1.5
    asked = found.spread(Case("lookup", "lookup", 10_000, note="all hit"), "mooncake-tcp", "p50_us")
    assert asked is not None and asked.median == 10


def test_json_has_every_round_and_is_read_again() -> None:
    found = results([1.0, 2.0], [3.0, 4.0])
    again = Results.from_list(json.loads(json.dumps(found.as_list())))
    assert again.as_list() == found.as_list()
    assert sections(again, TOLD) == sections(found, TOLD)


def test_several_clients_move_what_they_move_from_the_first_begin_to_the_last_end() -> None:
    one, two = Round([1.0], 10**9, 0.1, {}, 5.0, 6.0), Round([1.0], 10**9, 0.1, {}, 5.5, 6.5)
    assert joined([one, two], {}, at_once=2).gb_s == pytest.approx(2 / 1.5)
    assert joined([one, two], {}).gb_s == one.gb_s == 1.0, "one after the other: what is between calls does not count"


BURN = "import sys, time\nwhile time.process_time() < 0.3: pass\nsys.stdin.read()"


def test_cpu_of_another_process_and_of_its_children_counts() -> None:
    parent = "import subprocess, sys; sys.stdin.read(1); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen([sys.executable, "-c", parent, BURN], stdin=subprocess.PIPE) as process:
        watch = CpuWatch({"node": process.pid})
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        until(lambda: watch.seconds()["node"] >= 0.3, READY_S)
        process.stdin.close()  # both end


ENDED = """
import sys, threading, time
def burn():
    while time.thread_time() < 0.3: pass
sys.stdin.read(1)
thread = threading.Thread(target=burn)
thread.start()
thread.join()
print(flush=True)
sys.stdin.read()
"""


def test_cpu_of_a_thread_that_has_ended_counts() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ENDED], stdin=pipe, stdout=pipe, text=True) as process:
        watch = CpuWatch({"node": process.pid})
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("x")
        process.stdin.flush()
        assert process.stdout.readline() == "\n"
        assert watch.seconds()["node"] >= 0.3
        process.stdin.close()


def test_the_page_gets_its_sections_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n")
    for speed in (1.0, 2.0):
        write(page, sections(results([speed], [1.0]), TOLD))
    text = page.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\n\n3 rounds") and text.endswith(f"{END}\n\nafter\n")
    assert "old" not in text and text.count("## Against the budgets") == 1
    assert "| load | 2 MiB | 64 | 2.000 | - | - | 1.000 |" in text
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="put these two lines there"):
        write(page, "figures")


def test_figures_of_a_busy_machine_say_so() -> None:
    assert "**Other processes want it.**" in sections(Results(), TOLD | {"busy": "other processes want it"})


def test_the_page_has_the_marks_and_the_columns() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert "| op | block | blocks a call | " + " | ".join(suite_markdown.COLUMNS) + " |" in page


def test_plots_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert [path.name for path in plot(results([1.0, 2.0], [3.0, 4.0]), tmp_path)] == ["blocks.svg"]
    assert plot(Results(), tmp_path) == []
    first = Results()
    first.add(
        "kvstrata-shm", {Case("clients", "load", 64, 1 << 20, "8 clients, first loads"): Round([0.5], 1 << 20, 0.1)}
    )
    assert [path.name for path in plot(first, tmp_path)] == ["clients.svg"], "where they are all there is"


def test_a_turn_that_missed_is_taken_again_and_counted() -> None:
    tries, said = [], []

    def turn() -> dict[Case, Round]:
        tries.append(1)
        if len(tries) < 3:
            raise Missed("a node was silent")
        return {BIG: Round([1.0], 1, 0.0)}

    added: list[str] = []
    Group("g", {"kvstrata-shm": turn}).run(random.Random(0), lambda system, found: added.append(system), said.append)
    assert len(said) == 2 and added == ["kvstrata-shm"]


def test_scattered_pieces_are_all_there_and_apart() -> None:
    shape = Shape("s", 16, 2 << 20, 64, scattered=True)
    offsets = shape.offsets()
    assert sorted(offsets.ravel().tolist()) == list(range(0, shape.nbytes, shape.piece_bytes))
    neighbours = (offsets.ravel()[1:] - offsets.ravel()[:-1]) == shape.piece_bytes
    assert neighbours.mean() < 0.05


def test_a_quick_run_is_a_part_of_a_whole_one() -> None:
    assert set(QUICK.sizes) <= set(Scale().sizes) and set(QUICK.clients) <= set(Scale().clients)
    assert QUICK.calls(1 << 30) == QUICK.calls_min and Scale().calls(1) == Scale().calls_max


def test_calls_are_timed_one_by_one() -> None:
    one = measure([lambda: time.sleep(0.01)] * 3, 30)
    assert len(one.seconds) == 3 and min(one.seconds) >= 0.01 and one.ended - one.began >= 0.03
