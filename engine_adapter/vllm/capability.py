"""Whether the installed vLLM offers what the connector stands on."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.proto.errors import InvalidArgument


def check_methods(holder: object, names: Sequence[str], what: str) -> None:
    """Raise :class:`InvalidArgument` when ``holder`` lacks one of ``names``. ``what`` it is, for the text."""
    missing = [name for name in names if not hasattr(holder, name)]
    if missing:
        raise InvalidArgument(f"this vLLM's {what} has no {', '.join(missing)}: kvstrata needs vLLM 0.30 or newer")
