from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstrata.cli.app import app
from kvstrata.cli.paged_replay import PagedOptions
from kvstrata.proto.errors import ConfigError

TEXT = json.dumps({"agent": "a", "session": "s", "timestamp": 1, "input": "hello", "output": "there"})
BLOCKS = json.dumps({"t": 0.0, "session": "s", "in": 64, "out": 1, "block": 64, "runs": [[0, 0]]})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"engines": 0}, "engines is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"faults": 1.5}, "faults is 1.5"),
        ({"output_tokens": 0}, "output_tokens is 0"),
        ({"pool_bytes": 1 << 20}, "pool_bytes is"),
        ({"routing": "random"}, "round-robin or sticky"),
        ({"cases": ()}, "none, private, pool"),
        ({"cases": ("private", "private")}, "none, private, pool"),
        ({"cases": ("pools",)}, "none, private, pool"),
        ({"tokenizer": "bpe:12"}, "bpe:N"),
        ({"tokenizer": "bpe"}, "bpe:N"),
        ({"tokenizer": "nowhere.json"}, "tokenizer.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PagedOptions(**wrong)


def test_the_pool_is_twice_all_engines_unless_said() -> None:
    assert PagedOptions(engines=3, kv_bytes=1 << 30).pool_bytes_all == 6 << 30
    assert PagedOptions(pool_bytes=1 << 28).pool_bytes_all == 1 << 28
    assert PagedOptions(engines=1, kv_bytes=1, nodes=4).pool_bytes_all == 32 << 20
    assert PagedOptions(tokenizer="bpe:8192").bpe_tokens == 8192
    assert PagedOptions().bpe_tokens == 0


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    (tmp_path / "blocks.jsonl").write_text(BLOCKS + "\n")
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(f"{TEXT}\n".encode()))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--engine paged --trace blocks.jsonl", "block ids"),
        ("--engine stand-in --trace text.jsonl.gz", "holds text"),
        ("--trace text.jsonl.gz --private-tokens 5", "--private-tokens is for stand-in engines"),
        ("--trace blocks.jsonl --kv-memory 1GiB", "--kv-memory is for paged engines"),
        ("--faults 0.5", "--faults is for paged engines"),
        ("--engine vllm", "choose paged or stand-in"),
        ("--trace text.jsonl.gz --agent b", "its agents are a"),
        ("--engine paged --agent b", "name one with --trace"),
        ("--trace text.jsonl.gz --model 9000b --tokenizer bytes", "9000b"),
    ],
)
def test_options_that_do_not_fit_the_engine_end_with_usage(
    arguments: str, said: str, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(traces)
    done = CliRunner().invoke(app, ["replay", *arguments.split()])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
