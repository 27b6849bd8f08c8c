"""Reward models that see: a scalar head on a vision-language model, scored with the policy's tokens and pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLForConditionalGeneration

from examples.vlm.make_model import main, make_config, make_tokenizer
from lightrl.models.folders import save_hf_folder
from lightrl.models.loading import load_causal_lm
from lightrl.models.reward import RewardModel, RewardModelSpec, ValueModel, load_scalar
from lightrl.models.spec import ModelSpec
from lightrl.records import Rollouts
from tests.callbacks.toys import make_rollouts
from tests.rows import unshared
from tests.vision.models import QWEN, build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("vlm")
    main(str(path))
    torch.manual_seed(0)
    config = make_config(make_tokenizer())
    for part in (config, config.text_config, config.vision_config):
        part.initializer_range = 0.1
    Qwen2VLForConditionalGeneration(config).save_pretrained(path)
    return str(path)


@pytest.fixture
def seen(folder: str) -> Rollouts:
    """Two image prompts and one of text, two completions each; rows of a group share one dictionary."""
    config = make_config(make_tokenizer())
    rollouts = make_rollouts(
        ["x" * 12, "y" * 12, "z" * 9], [["abc", "de"], ["fgh", "i"], ["jk", "lmn"]], [[0.0] * 2] * 3
    )
    draw = torch.Generator().manual_seed(1)
    rollouts.token_ids = torch.randint(20, 90, rollouts.token_ids.shape, generator=draw)
    rollouts.token_ids[:4, 2:6] = config.image_token_id
    for row, prompt in ((1, 12), (3, 12), (5, 9)):
        rollouts.token_ids[row, :prompt] = rollouts.token_ids[row - 1, :prompt]
    kinds = torch.zeros(1, 12, dtype=torch.long)
    kinds[:, 2:6] = 1
    inputs = [
        {
            "pixel_values": torch.randn(16, 1176, generator=draw),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": kinds,
        }
        for _ in range(2)
    ]
    rollouts.inputs = [inputs[0], inputs[0], inputs[1], inputs[1], {}, {}]
    return rollouts


def test_scores_are_those_of_each_row_alone_and_see_the_image(folder: str, seen: Rollouts, tmp_path: Path) -> None:
    torch.manual_seed(3)
    trained = RewardModel.for_training(ModelSpec(folder))
    assert [p.shape for p in trained.head_parameters()] == [(1, 128)]
    torch.nn.init.normal_(trained.head_parameters()[0])
    save_hf_folder(trained, trained.model.state_dict(), tmp_path, tokenizer_path=folder)
    assert (tmp_path / "preprocessor_config.json").is_file()

    model = RewardModel.from_spec(RewardModelSpec("sees", str(tmp_path), tokenizer="policy"))
    assert not any(p.requires_grad for p in model.parameters())
    alone = RewardModel.from_spec(RewardModelSpec("alone", str(tmp_path), tokenizer="policy", layout="padded"))
    scores = model.score(seen, 10_000)
    with torch.no_grad():
        for row in range(len(seen)):
            length = int(seen.attention_mask[row].sum())
            kinds = {"mm_token_type_ids": torch.zeros(1, length, dtype=torch.long)}
            inputs = dict(seen.inputs[row]) or {}
            if inputs:
                kinds["mm_token_type_ids"][:, :12] = inputs.pop("mm_token_type_ids")
            ids = seen.token_ids[row : row + 1, :length]
            logits = alone.model(input_ids=ids, **inputs, **kinds, use_cache=False).logits
            assert float(logits) == pytest.approx(float(scores[row]), rel=1e-5, abs=5e-5)  # scores of up to 8
    assert scores.unique().numel() == len(seen) and torch.equal(scores.isfinite(), torch.ones(6, dtype=torch.bool))

    swapped = replace(seen, inputs=[*seen.inputs[2:4], *seen.inputs[:2], *seen.inputs[4:]])
    assert ((model.score(swapped, 10_000) - scores).abs() > 1e-4).tolist() == [True] * 4 + [False] * 2
    towers = []
    handle = model.model.model.visual.register_forward_hook(lambda *call: towers.append(len(call[1][0])))
    model.score(seen, 10_000)
    handle.remove()
    assert towers == [32]  # two images of 16 patches: once for each group, not for each completion


def test_its_gradient_reaches_the_vision_tower(folder: str, seen: Rollouts) -> None:
    model = RewardModel.for_training(ModelSpec(folder))
    out = model(seen)
    out.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.model.model.visual.patch_embed.parameters())


def test_texts_without_their_images_are_refused(folder: str, seen: Rollouts) -> None:
    model = RewardModel(RewardModel.for_training(ModelSpec(folder)).model, tokenizer=make_tokenizer())
    with pytest.raises(ValueError, match="Set tokenizer='policy'"):
        model.score(seen, 100)


@pytest.mark.parametrize("family", ["qwen3_vl", "llava", "qwen2_audio"])
def test_training_begins_with_the_weights_of_the_folder(family: str, tmp_path: Path) -> None:
    if family in QWEN:
        pytest.importorskip("torchvision", reason="the Qwen-VL processors need torchvision (scripts/setup.sh)")
    path = str(build(family, tmp_path / "base"))
    saved = dict(load_causal_lm(ModelSpec(path), trainable=False).model.named_parameters())
    trained = RewardModel.for_training(ModelSpec(path))
    assert saved.keys() == dict(trained.model.model.named_parameters()).keys()
    assert [n for n, p in trained.model.model.named_parameters() if not torch.equal(p, saved[n])] == []
    if family == "qwen2_audio" and Version(transformers.__version__) < Version("5.23"):
        # Before, transformers writes it under names that its own backbone does not read.
        with pytest.raises(ValueError, match=r"base' has no weights for language_model.embed_tokens.weight"):
            ValueModel.from_spec(ModelSpec(path))
    else:
        critic = ValueModel.from_spec(ModelSpec(path)).backbone
        assert [n for n, p in critic.named_parameters() if not torch.equal(p, saved[n])] == []

    save_hf_folder(trained, trained.model.state_dict(), tmp_path / "scores", tokenizer_path=path)
    loaded = RewardModel(load_scalar(ModelSpec(str(tmp_path / "scores")), trainable=False))
    weights = dict(loaded.model.named_parameters())
    assert [n for n, p in trained.model.named_parameters() if not torch.equal(p, weights[n])] == []
    rows = unshared(torch.randint(3, 50, (2, 9)))
    torch.testing.assert_close(loaded(rows), trained(rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("load", [RewardModel.for_training, ValueModel.from_spec])
def test_weights_that_would_be_random_are_refused(load: Any, folder: str, tmp_path: Path) -> None:
    for file in Path(folder).iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "norm" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{tmp_path.name}' has no weights for .*norm.*, .*norm.*, "):
        load(ModelSpec(str(tmp_path)))
