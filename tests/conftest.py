"""Two tiers of tests: what CI runs, and the long ones. Each says its seed, its budget and what it took.

``pytest`` leaves out what is marked ``long``; ``pytest --long`` runs that alone. ``--seed`` repeats a run.
With ``-n 2`` (pytest-xdist) the folders of tests that start most processes run in one worker, a test at a time, and all
else in the other, by file: such tests mind what the machine does besides, and wait a lot.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

#: Minutes that all tests of CI may take together.
CI_BUDGET_MIN = 40
#: And all of the long tier: of it ten are chaos, and about half an hour the soak.
LONG_BUDGET_MIN = 90
#: Folders of tests that start most processes.
WITH_PROCESSES = ("tests/bench/", "tests/chaos/", "tests/cli/", "tests/e2e/", "tests/helm/")
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
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    given = config.getoption("--seed")
    if given is not None and getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = given
    drawn = worker.get(WORKER_SEED) or int.from_bytes(os.urandom(4), "little")
    config.stash[SEED] = drawn if given is None else given
    if worker:
        os.environ.pop("COLUMNS", None)  # a worker's terminal is nobody's


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers have the seed that is shown."""
    node.workerinput[WORKER_SEED] = node.config.stash[SEED]


SEED = pytest.StashKey[int]()
WORKER_SEED = "kvstrata_seed"


def pytest_report_header(config: pytest.Config) -> str:
    tier = "long" if config.getoption("--long") else "ci"
    return f"tier: {tier}, seed {config.stash[SEED]} (repeat with --seed {config.stash[SEED]})"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, and all files of tests that start processes as one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByKind(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if nodeid.startswith(WITH_PROCESSES) else nodeid.partition("::")[0]

    return ByKind(config, log)


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
