"""``kvstrata replay``: recorded traffic on real processes, every byte verified, with a simulator as its oracle."""

from kvstrata.cli.replay.options import ReplayOptions, Routing
from kvstrata.cli.replay.replay import console_progress, run_replay
from kvstrata.cli.replay.result import ReplayResult
from kvstrata.cli.replay.traces import TraceError

__all__ = ["ReplayOptions", "ReplayResult", "Routing", "TraceError", "console_progress", "run_replay"]
