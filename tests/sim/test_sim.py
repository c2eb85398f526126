"""The simulated cluster: a fixed list of seeds, some fresh ones, broken builds that it notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
STEPS = 120
FIXED = (1, 12)  #: the first seed, and how many
#: A limit was lost with the store: its leader was killed with it before another master had read it; one that had stood
#: still came before the leader that knew it.
ONCE_FAILED = (9_100_869, 9_200_079)
FRESH = 4
LONG_SEEDS = 10_000
#: Processes of the long run.
LONG_JOBS = 2
#: Seconds after which no further seed is begun; a seed takes about a third of one on an idle core.
FIXED_S, FRESH_S, LONG_S = 40, 20, 2 * 3600
#: For the last seed that was begun, on a busy machine.
OVERTIME_S = 60
#: Broken builds that a run of CI tries; the long tier tries all.
QUICK = ("unleased", "old-weights", "no-departures", "risen")


def simulate(*options: str, seconds: float, fails: bool = False) -> str:
    """In a process of its own, so that the order of sets is the seed's, and a broken build breaks nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim", "--steps", str(STEPS), "--budget", str(seconds), *options],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds + OVERTIME_S, check=False,
    )  # fmt: skip
    assert done.returncode == int(fails), f"{done.stdout[-20_000:]}\n{done.stderr[-4_000:]}"
    return done.stdout


def noticed(name: str, seconds: float) -> None:
    """By the words that are about what was broken, in a story in which nothing is amiss without that."""
    mutant = MUTANTS[name]
    seeds = ("--seed", "1", "--seeds", str(mutant.seeds))
    told = simulate("--mutant", name, *seeds, "--first", "--json", *mutant.options, seconds=seconds, fails=True)
    last = json.loads(told.splitlines()[-1])
    assert any(words in last["problem"] for words in mutant.shows), f"noticed by something else: {last}"
    simulate("--seed", str(last["seed"]), *mutant.options, seconds=seconds)


@pytest.mark.timeout(FIXED_S + OVERTIME_S + 10)
def test_the_fixed_seeds() -> None:
    simulate("--seed", str(FIXED[0]), "--seeds", str(FIXED[1]), seconds=FIXED_S)


@pytest.mark.timeout(FIXED_S + OVERTIME_S + 10)
@pytest.mark.parametrize("number", ONCE_FAILED)
def test_seeds_that_failed_once(number: int) -> None:
    simulate("--seed", str(number), seconds=FIXED_S)


@pytest.mark.timeout(FRESH_S + OVERTIME_S + 60)
def test_fresh_seeds(seed: int) -> None:
    """A failure prints its seed and a story cut short: ``python -m tests.sim --seed N --steps 120`` tells it again."""
    simulate("--seed", str(1000 + seed), "--seeds", str(FRESH), "--first", "--shrink", "30", seconds=FRESH_S)


@pytest.mark.timeout(2 * OVERTIME_S + 10)
def test_a_seed_is_a_seed() -> None:
    stories = [simulate("--seed", "3", "--story", seconds=1) for _ in range(2)]
    assert stories[0] == stories[1] and "all faults end" in stories[0]


@pytest.mark.parametrize("name", QUICK)
def test_a_broken_build_is_noticed(name: str) -> None:
    """Within as many seeds as the list of them says."""
    noticed(name, 50)


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(QUICK)))
def test_every_broken_build_still_fits_what_it_breaks(name: str) -> None:
    """Whether it is noticed is for the long tier; one that is broken itself would be noticed by that."""
    mutant = MUTANTS[name]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim", "--mutant", name, "--seed", "2", "--steps", "40", *mutant.options],
        cwd=ROOT, capture_output=True, text=True, timeout=OVERTIME_S, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    assert not any(error in done.stdout for error in ("TypeError", "AttributeError", "NameError")), done.stdout[-4000:]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(name for name in set(MUTANTS) - set(QUICK) if not MUTANTS[name].covered))
def test_every_broken_build_is_noticed(name: str) -> None:
    noticed(name, 800)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(name for name in MUTANTS if MUTANTS[name].covered))
def test_a_breakage_that_something_else_covers_does_no_harm(name: str) -> None:
    mutant = MUTANTS[name]
    simulate("--mutant", name, "--seed", "1", "--seeds", str(mutant.seeds), *mutant.options, seconds=800)


def test_a_story_is_cut_short() -> None:
    """What is left of a failing story ends in the same words, and is shorter."""
    options = ("--mutant", "old-weights", "--seed", "1", "--first")
    told = [simulate(*options, *more, seconds=50, fails=True) for more in ((), ("--shrink", "10"))]
    assert all("INV-1" in story and "bump of" in story for story in told)
    assert len(told[1].splitlines()) < len(told[0].splitlines()) / 2


@pytest.mark.long
@pytest.mark.timeout(LONG_S + OVERTIME_S + 200)
def test_ten_thousand_seeds(seed: int) -> None:
    first = str(1000 + seed)
    seeds = ("--seed", first, "--seeds", str(LONG_SEEDS), "--jobs", str(LONG_JOBS))
    simulate(*seeds, "--first", "--shrink", "120", seconds=LONG_S)
