"""Two tiers of tests: what CI runs, and the long ones. Each says its seed, its budget and what it took.

``pytest`` leaves out what is marked ``long``; ``pytest --long`` runs that alone. ``--seed`` repeats a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

#: Minutes that all tests of CI may take together.
CI_BUDGET_MIN = 40
#: And all of the long tier: of it ten are chaos, and about half an hour the soak.
LONG_BUDGET_MIN = 90
#: For a long test that names no limit of its own.
LONG_TIMEOUT_S = 1800.0

_STARTED = time.monotonic()

#: No example is judged by the time that it took: another process may have had the processor.
settings.register_profile("kvstrata", deadline=None)
settings.load_profile("kvstrata")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvstrata")
    group.addoption("--long", action="store_true", help="run the long tier: chaos, soak, many seeds, fuzz")
    group.addoption("--seed", type=int, default=None, help="repeat a run: the seed that it printed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    given = config.getoption("--seed")
    if given is not None and getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = given
    config.stash[SEED] = int.from_bytes(os.urandom(4), "little") if given is None else given


SEED = pytest.StashKey[int]()


def pytest_report_header(config: pytest.Config) -> str:
    tier = "long" if config.getoption("--long") else "ci"
    return f"tier: {tier}, seed {config.stash[SEED]} (repeat with --seed {config.stash[SEED]})"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = bool(config.getoption("--long"))
    left_out = [item for item in items if (item.get_closest_marker("long") is not None) != long]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if (item.get_closest_marker("long") is not None) == long]
    if long:
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    if config.getoption("--long"):
        return f"budget: {LONG_BUDGET_MIN} min for the whole long tier"
    return f"budget: {CI_BUDGET_MIN} min for all of CI"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    minutes = (time.monotonic() - _STARTED) / 60
    terminalreporter.write_line(f"took {minutes:.1f} min; seed {config.stash[SEED]}")


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """The run's seed: shown at its beginning and end, and given again with ``--seed``."""
    yield request.config.stash[SEED]
