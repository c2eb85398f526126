"""Prompts with images: KV is found up to the first image that is another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, draw
from tests.vllm.engine import BLOCK, VllmEngine, arguments
from tests.vllm.install import TORCHVISION
from tests.vllm.tiny_viewer import IMAGE_TOKEN, IMAGE_TOKENS, make_viewer

BEFORE, BETWEEN, AFTER = 2 * BLOCK, BLOCK, 2 * BLOCK + 3
TO_SECOND = BEFORE + IMAGE_TOKENS + BETWEEN
WHOLE = TO_SECOND + IMAGE_TOKENS + AFTER
IMAGES = (1, 2)


@pytest.mark.skipif(not TORCHVISION.is_dir(), reason="python tests/vllm/install.py installs torchvision")
def test_each_image_is_a_part_of_the_keys_from_where_it_stands(
    pool: RealPool, tmp_path: Path, open_engine: OpenEngine
) -> None:
    model = make_viewer(tmp_path / "tiny-viewer")
    (drawn,) = draw(1, seed=85, length=BEFORE + BETWEEN + AFTER)
    text = [min(token, IMAGE_TOKEN - 1) for token in drawn]
    second = BEFORE + BETWEEN
    prompts = [[*text[:BEFORE], IMAGE_TOKEN, *text[BEFORE:second], IMAGE_TOKEN, *text[second:]]]
    changed = {"model": str(model)}
    paths = [str(TORCHVISION), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    plain = VllmEngine(tmp_path / "plain.log", arguments(model, enable_prefix_caching=False), environment)
    asked = {images: plain.generate(prompts, image_seeds=images).tokens for images in (IMAGES, (1, 3), (2, 1), (1, 1))}
    plain.end()
    assert len({str(tokens) for tokens in asked.values()}) == len(asked), "images change nothing: nothing is shown"
    writer, reader = (open_engine(pool.address, changed=changed, environment=environment) for _ in range(2))
    assert writer.generate_with_pool(prompts, image_seeds=IMAGES).tokens == asked[IMAGES]
    for images, found in ((1, 3), TO_SECOND), ((2, 1), BEFORE), ((1, 1), TO_SECOND), (IMAGES, WHOLE // BLOCK * BLOCK):
        reader.forget()
        answer = reader.generate_with_pool(prompts, image_seeds=images)
        assert (answer.cached, answer.tokens) == ([found], asked[images]), images
