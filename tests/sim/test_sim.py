"""The simulated cluster: a fixed list of seeds, some fresh ones, and that a seed is a seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 120
FIXED = (1, 10)  #: the first seed, and how many
FRESH = 4
LONG_SEEDS = 10_000
#: Bounds of the runs as such; a seed takes about a second.
CI_S, LONG_S = 110, 7200


def simulate(*options: str, seconds: float) -> str:
    """In a process of its own, so that the order of sets is the seed's."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim", "--steps", str(STEPS), *options],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-4_000:]}"
    return done.stdout


@pytest.mark.timeout(CI_S + 10)
def test_the_fixed_seeds() -> None:
    simulate("--seed", str(FIXED[0]), "--seeds", str(FIXED[1]), seconds=CI_S)


@pytest.mark.timeout(CI_S + 10)
def test_fresh_seeds(seed: int) -> None:
    """A failure prints its seed: ``python -m tests.sim --seed N --steps 120`` tells the story again."""
    simulate("--seed", str(1000 + seed), "--seeds", str(FRESH), seconds=CI_S)


def test_a_seed_is_a_seed() -> None:
    stories = [simulate("--seed", "3", "--story", seconds=60) for _ in range(2)]
    assert stories[0] == stories[1] and "all faults end" in stories[0]


@pytest.mark.long
@pytest.mark.timeout(LONG_S + 60)
def test_ten_thousand_seeds(seed: int) -> None:
    simulate("--seed", str(1000 + seed), "--seeds", str(LONG_SEEDS), seconds=LONG_S)
