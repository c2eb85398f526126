"""What one sees who asks for the backend without SGLang."""

from __future__ import annotations

import importlib.util

import pytest

import kvstrata.engine_adapter.sglang as package


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is there")
def test_without_sglang_the_error_says_so() -> None:
    with pytest.raises(ImportError, match="needs SGLang"):
        _ = package.KVStrataStorage


def test_other_names_are_no_part_of_it() -> None:
    with pytest.raises(AttributeError, match="Storage2"):
        _ = package.Storage2
