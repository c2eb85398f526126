"""YAML of which nothing is passed over: of two keys that are the same, YAML's last one counts, and here none."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class SameKeyError(yaml.constructor.ConstructorError):
    """A mapping has a key twice: its text has the key, its ``problem_mark`` the place."""


class StrictLoader(yaml.SafeLoader):
    """For :func:`yaml.load`. Plain values alone, as of its base; raises :class:`SameKeyError`.

    PyYAML lets errors of what it calls through, of any kind: 2026-02-30 is a ValueError.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for given, _ in node.value:
            key = self.construct_object(given, deep=True)
            if not isinstance(key, Hashable):
                continue  # which the base refuses
            if key in seen:
                raise SameKeyError(None, None, f"{key!r} is there twice", given.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
