"""Replacing a small file whole, so that after a crash it holds the old content or the new one."""

from __future__ import annotations

import os
from pathlib import Path


def replace(file: Path, content: bytes) -> None:
    """Durable when it returns: content and name are flushed. Raises :class:`OSError`; the old file then stands."""
    fresh = file.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.replace(file)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
