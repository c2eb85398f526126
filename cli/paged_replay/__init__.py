"""``kvstrata replay --engine paged``: recorded text on real engines, with and without the pool."""

from kvstrata.cli.paged_replay.options import CaseName, PagedOptions
from kvstrata.cli.paged_replay.replay import run_paged_replay
from kvstrata.cli.paged_replay.result import PagedResult

__all__ = ["CaseName", "PagedOptions", "PagedResult", "run_paged_replay"]
