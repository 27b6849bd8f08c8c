"""Tiny models of each family, a batch that mixes text, one image, two images and a video, and its completions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lightrl.data.processing import load_processor
from lightrl.data.processor import MediaProcessor
from lightrl.data.prompts import PromptSource
from lightrl.data.templates import load_tokenizer
from lightrl.models.loading import load_causal_lm
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.records import Prompts
from tests.rows import as_rows
from tests.vision.models import QWEN, build


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def film(frames: int, width: int = 24, height: int = 16, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, (frames, height, width, 3), dtype=np.uint8)


def mixed_rows(family: str) -> list[dict[str, Any]]:
    """Text, one image, two images, none, and a video where the family takes one."""
    rows: list[dict[str, Any]] = [
        {"prompt": "what is 1+1?"},
        {"prompt": "what is it?", "images": [picture(16, 24, 1)]},
        {"prompt": "is <image> like <image>?", "images": [picture(16, 16, 2), picture(32, 24, 3)]},
        {"prompt": "no"},
    ]
    if family in QWEN:
        rows.append({"prompt": "see <video>?", "videos": [film(7)]})
    return [{"images": None, "videos": None} | row for row in rows]


class Folder(NamedTuple):
    """A family's model folder with its tokenizer and processor."""

    family: str
    path: str
    tokenizer: Any
    processor: MediaProcessor

    def prompts(self, rows: list[dict[str, Any]], **source: Any) -> Prompts:
        """All rows as prompts, in order."""
        found = PromptSource(rows=rows, **source).load(self.tokenizer, processor=self.processor, shuffle=False)
        return found.batch(0, len(rows))

    def policy(self, layout: Any = "auto", **spec: Any) -> PolicyModel:
        return PolicyModel(load_causal_lm(ModelSpec(self.path, **spec), trainable=True), layout=layout)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folder]:
    built: dict[str, Folder] = {}

    def make(family: str) -> Folder:
        if family in QWEN:
            pytest.importorskip("torchvision", reason="the Qwen-VL processors need torchvision (scripts/setup.sh)")
        if family not in built:
            path = build(family, Path(tmp_path_factory.mktemp(family)))
            tokenizer = load_tokenizer(str(path))
            processor = load_processor(str(path), tokenizer)
            assert processor is not None
            built[family] = Folder(family, str(path), tokenizer, processor)
        return built[family]

    return make


class Batch(NamedTuple):
    token_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    group_ids: Tensor
    inputs: list[dict[str, Any]]

    def pick(self, rows: list[int]) -> Batch:
        """The given rows, without columns that are padding in all of them."""
        width = int(self.attention_mask[rows].sum(1).max())
        tensors = (x[rows][:, :width] for x in self[:3])
        return Batch(*tensors, self.group_ids[rows], [self.inputs[i] for i in rows])

    def run(self, policy: PolicyModel, **kwargs: Any) -> Any:
        return policy(as_rows(*self[:3], group_ids=self.group_ids, inputs=self.inputs), **kwargs)


def completed(prompts: Prompts, copies: int, placeholder: int, vocabulary: int = 70) -> Batch:
    """Random completions of unequal lengths; the first of each group has sampled a placeholder token itself."""
    generator = torch.Generator().manual_seed(0)
    rows, prompt_lengths, groups, inputs = [], [], [], []
    for p, (tokens, extra) in enumerate(zip(prompts.token_ids, prompts.inputs, strict=True)):
        for g in range(copies):
            new = torch.randint(3, vocabulary, (4 + 2 * g,), generator=generator).tolist()
            if g == 0:
                new[1] = placeholder
            rows.append(tokens + new)
            prompt_lengths.append(len(tokens))
            groups.append(p)
            inputs.append(extra)
    width = max(map(len, rows)) + 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention, response = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for i, (row, length) in enumerate(zip(rows, prompt_lengths, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        attention[i, : len(row)] = True
        response[i, length : len(row)] = True
    return Batch(ids, attention, response, torch.tensor(groups), inputs)
