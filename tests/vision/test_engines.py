"""Engines see what the trainer sees: equal log-probs for text, images, videos, and audio."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightrl.compat.transformers import as_saved
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.environments.episodes import one_turn
from lightrl.models.policy import named_hf_weights
from lightrl.models.spec import LoraSpec
from lightrl.records import EngineContext, Prompts, Rollouts, SamplingParams
from lightrl.rollout.collector import ScoredGroup, collate
from tests.engines.conftest import ask
from tests.vision.conftest import mixed_rows, picture
from tests.vision.looking import played
from tests.vision.models import FAMILIES, QWEN


def sample(engine: Any, prompts: Prompts, copies: int = 3) -> Rollouts:
    seeds = range(len(prompts))
    groups = dict(ask(engine, prompts, SamplingParams(max_new_tokens=10), num_completions=copies, seeds=seeds))
    return collate([ScoredGroup(prompts[[i]], one_turn(groups[i]), None) for i in seeds], 0, 1.0)


def gap(policy: Any, rollouts: Rollouts) -> float:
    with torch.no_grad():
        out = policy(rollouts)
    return float((out.logprobs - rollouts.engine_logprobs).abs().max())


def nudge(policy: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def compare(engine: Any, folder: Any) -> Any:
    """Mixed rows in order and shuffled, then another version of the weights."""
    engine.start(EngineContext(folder.path, max_prompt_tokens=400, max_new_tokens=12))
    policy = folder.policy()
    nudge(policy, 1)
    engine.load_weights(named_hf_weights(policy), policy_version=0)
    prompts = folder.prompts(mixed_rows(folder.family))
    order = [3, 1, 0, 2, 4][-len(prompts) :] if len(prompts) == 5 else [3, 1, 0, 2]
    assert gap(policy, sample(engine, prompts)) < 5e-5
    assert gap(policy, sample(engine, prompts[order])) < 5e-5
    nudge(policy, 2)
    engine.load_weights(named_hf_weights(policy), policy_version=1)
    assert gap(policy, sample(engine, prompts)) < 5e-5 and engine.policy_version == 1
    return policy


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3", "paligemma"])  # the last two attend to images both ways
def test_the_transformers_engine_agrees(folder_of: Any, family: str) -> None:
    engine = TransformersEngine()
    compare(engine, folder_of(family))
    engine.close()


@pytest.mark.vllm
@pytest.mark.parametrize(
    "family", ["qwen2_vl", *(pytest.param(f, marks=pytest.mark.long) for f in ("idefics3", "qwen2_5_vl", "qwen3_vl"))]
)
def test_vllm_agrees(folder_of: Any, family: str) -> None:
    pytest.importorskip("vllm")
    from lightrl.engines import VLLMEngine

    folder, engine = folder_of(family), VLLMEngine(engine_args={"kv_cache_memory_bytes": 32 << 20})
    try:
        policy = compare(engine, folder)
        if family in QWEN:
            assert gap(policy, played(engine, folder)) < 5e-5
        if family == "qwen2_vl":  # media of another row: vLLM's placeholders are not the trainer's
            prompts = folder.prompts(mixed_rows(family))[[1, 2]]
            prompts.media[0].images[:] = [picture(32, 32)]
            prompts.media[0].key = "other"
            with pytest.raises(ValueError, match=r"[Pp]rompt 0 \(dataset row 1\).*differ"):
                sample(engine, prompts)
    finally:
        engine.close()


@pytest.mark.long
@pytest.mark.vllm
def test_vllm_on_a_cpu_rejects_images_of_models_that_attend_to_them_both_ways(folder_of: Any) -> None:
    pytest.importorskip("vllm")
    from lightrl.engines import VLLMEngine

    folder, engine = folder_of("gemma3"), VLLMEngine(engine_args={"kv_cache_memory_bytes": 32 << 20})
    engine.start(EngineContext(folder.path, max_prompt_tokens=400, max_new_tokens=12))
    try:
        prompts, policy = folder.prompts(mixed_rows("gemma3")), folder.policy()
        nudge(policy, 1)
        engine.load_weights(as_saved(policy.lm, named_hf_weights(policy)), policy_version=0)
        assert gap(policy, sample(engine, prompts[[0, 3]])) < 5e-5, "of text"
        with pytest.raises(ValueError, match="Gemma3"):
            sample(engine, prompts)
        engine._adapter.attends_both_ways = False  # type: ignore[union-attr]
        assert gap(policy, sample(engine, prompts)) > 1e-3, "so it is rejected for a reason"
    finally:
        engine.close()


def test_freezing_and_lora_on_parts(folder_of: Any) -> None:
    folder = folder_of("qwen2_vl")
    frozen = folder.policy(freeze=["visual", "*embed_tokens*"])
    for name, parameter in frozen.lm.named_parameters():
        assert parameter.requires_grad == ("visual" not in name and "embed_tokens" not in name)
    with pytest.raises(ValueError, match="vision_tower"):
        folder.policy(freeze=["vision_tower"])
    lora = LoraSpec(r=2, target_modules=r".*language_model.*\.(q_proj|v_proj)")
    policy = folder.policy(lora=lora)
    trained = [name for name, parameter in policy.lm.named_parameters() if parameter.requires_grad]
    assert trained and all("language_model" in name and "lora_" in name for name in trained)


def sound(seed: int, samples: int = 4000) -> dict[str, Any]:
    values = np.random.default_rng(seed).normal(size=samples).astype(np.float32)
    return {"array": values, "sampling_rate": 16000}


def test_audio_goes_the_same_way(folder_of: Any) -> None:
    folder = folder_of("qwen2_audio")
    rows = [{"prompt": "hello", "audio": None}, {"prompt": "say it?", "audio": sound(1)}]
    rows += [{"prompt": "is <audio> like <audio>?", "audio": [sound(2), sound(3, 9000)]}]
    prompts = folder.prompts(rows)
    assert [len(m.audios) for m in prompts.media] == [0, 1, 2] and "input_features" in prompts.inputs[1]
    engine = TransformersEngine()
    engine.start(EngineContext(folder.path))
    rollouts = sample(engine, prompts)
    for layout in ("padded", "packed", "shared_prefix"):
        assert gap(folder.policy(layout), rollouts) < 5e-5, layout
    with pytest.raises(ValueError, match="row 0: .*8000"):
        folder.prompts([{"prompt": "a", "audio": {**sound(1), "sampling_rate": 8000}}])
