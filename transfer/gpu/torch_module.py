"""torch, when the process uses it: it is never imported from here."""

from __future__ import annotations

import sys
from typing import Any


def loaded_torch() -> Any:
    """The module; None when it is not imported, or not yet all of it."""
    torch = sys.modules.get("torch")
    return None if getattr(getattr(torch, "__spec__", None), "_initializing", False) else torch
