"""bench/ is a folder of scripts that import each other by bare names: it goes onto the path for these tests."""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = str(Path(__file__).parents[2] / "bench")
if BENCH not in sys.path:
    sys.path.insert(0, BENCH)
