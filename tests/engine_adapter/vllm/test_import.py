"""What one sees who asks for the connector without vLLM."""

from __future__ import annotations

import importlib.util

import pytest

import kvstrata.engine_adapter.vllm as package


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is there")
def test_without_vllm_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"pip install 'kvstrata\[vllm\]'"):
        _ = package.KVStrataConnector


def test_other_names_are_no_part_of_it() -> None:
    with pytest.raises(AttributeError, match="Connector2"):
        _ = package.Connector2


def test_with_vllm_it_is_the_class_that_vllm_loads() -> None:
    pytest.importorskip("vllm")
    base = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
    assert issubclass(package.KVStrataConnector, base.KVConnectorBase_V1)
    assert issubclass(package.KVStrataConnector, base.SupportsHMA)
    assert not package.KVStrataConnector.__abstractmethods__
