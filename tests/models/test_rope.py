"""A row's log-probs don't depend on the rows of its micro-batch, whatever the family's rotary embedding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.engines.vllm import conversion
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.models.loading import load_causal_lm
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.records import EngineContext
from tests.models.conftest import make_batch, plain_scores
from tests.rows import as_rows
from tests.toys import build

ORIGINAL = 16
SHORT, LONG = [1.0, 1.0, 1.0, 1.0], [1.5, 4.0, 9.0, 20.0]
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        **{"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {},
}


def lm(kind: str, family: str = "Llama", **changes: Any) -> Any:
    rope = {"rope_type": kind, "rope_theta": 100.0, **ROPES[kind]}
    if family == "Phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.9}
    longest = ORIGINAL if kind == "dynamic" else 64
    if family in ("Phi3", "Phimoe"):
        changes |= {"original_max_position_embeddings": ORIGINAL, "eos_token_id": 1}
    return build(family, max_position_embeddings=longest, rope_parameters=rope, **changes)


def test_every_kind_of_rope_is_tried() -> None:
    assert {*ROPES} == {*ROPE_INIT_FUNCTIONS, "default"}


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize("kind", ROPES)
def test_a_rows_logprobs_do_not_depend_on_the_batch(kind: str, layout: Any) -> None:
    batch = make_batch([(4, [5, 3, 60]), (30, [4, 20])])
    short = batch.pick([0, 1])
    model = PolicyModel(load_causal_lm(spec(lm(kind)), trainable=True), layout=layout)
    if kind in ("dynamic", "longrope"):  # other factors for long rows
        with pytest.raises(ValueError, match="its positions end"):
            model(as_rows(*batch[:3], group_ids=batch.group_ids))
        expected, _ = plain_scores(lm(kind), short)
        for row in range(2):
            torch.testing.assert_close(scored(model, short, [row])[0], expected[row], atol=1e-4, rtol=1e-4)
        return
    together = model(as_rows(*batch[:3], group_ids=batch.group_ids)).logprobs
    for row in range(len(batch.token_ids)):
        alone = scored(model, batch, [row])[0]
        torch.testing.assert_close(together[row], alone, atol=1e-4, rtol=1e-4)
    expected, _ = plain_scores(lm(kind), batch)
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)


def scored(model: PolicyModel, batch: Any, rows: list[int]) -> torch.Tensor:
    part = batch.pick(rows)
    return model(as_rows(*part[:3], group_ids=part.group_ids)).logprobs.detach()


def spec(model: Any, **settings: Any) -> ModelSpec:
    found = ModelSpec("live", **settings)
    found.live = model
    return found


@pytest.mark.parametrize("family", ["Phi3", "Phimoe"])
def test_long_rows_of_longrope_are_named_with_the_fix(family: str) -> None:
    model = PolicyModel(load_causal_lm(spec(lm("longrope", family)), trainable=True))
    batch = make_batch([(4, [5, 8]), (10, [7])])
    with pytest.raises(ValueError, match="17 tokens: its positions end at 16"):
        model(as_rows(*batch[:3]))
    short = batch.pick([0, 1])
    expected, _ = plain_scores(lm("longrope", family).eval(), short)
    torch.testing.assert_close(model(as_rows(*short[:3])).logprobs, expected, atol=1e-4, rtol=1e-4)


def test_factors_per_kind_of_layer_are_fixed() -> None:
    kinds = {
        "full_attention": {"rope_type": "longrope", "rope_theta": 100.0, **ROPES["longrope"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    }
    changes = {"layer_types": [*kinds], "rope_parameters": kinds, "head_dim": 8, "max_position_embeddings": 64}
    model = build("Gemma3Text", **changes)
    batch = make_batch([(4, [5, 3]), (8, [4])])
    policy = PolicyModel(load_causal_lm(spec(model), trainable=True), layout="padded")
    together = policy(as_rows(*batch[:3])).logprobs
    for row in range(3):
        torch.testing.assert_close(together[row], scored(policy, batch, [row])[0], atol=1e-4, rtol=1e-4)


def test_rows_beyond_learned_positions_are_named() -> None:
    """Torch's own error is an index, and on a GPU an assertion that ends the process."""
    config = transformers.GPT2Config(vocab_size=128, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    model = PolicyModel(load_causal_lm(spec(transformers.GPT2LMHeadModel(config)), trainable=True))
    model(as_rows(*make_batch([(8, [8, 4])], pad=0)[:3]))
    with pytest.raises(ValueError, match="17 tokens: its positions end at 16"):
        model(as_rows(*make_batch([(8, [9, 4])], pad=0)[:3]))


def test_engines_use_the_trainers_factors(tmp_path: Path, model_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    tokenizer.save_pretrained(tmp_path)
    lm("longrope").save_pretrained(tmp_path)
    context = EngineContext(str(tmp_path), max_prompt_tokens=8, max_new_tokens=8)
    engine = TransformersEngine()
    engine.start(context)
    assert engine.max_model_len == ORIGINAL
    row = list(range(3, 15))
    batch = make_batch([(1, [11])])._replace(token_ids=torch.tensor([[*row, 0, 0]]))
    model = PolicyModel(load_causal_lm(ModelSpec(str(tmp_path)), trainable=True))
    expected = model(as_rows(*batch[:3])).logprobs[0, 1:12].tolist()
    assert engine.logprobs([row])[0] == pytest.approx(expected, abs=1e-4)
    engine.close()

    vllm = VLLMEngine()  # picks by max_model_len
    vllm.check(context)
    assert conversion.arguments(vllm, context, cuda=False)["max_model_len"] == 16
    with pytest.raises(ValueError, match="max_model_len"):
        VLLMEngine(max_model_len=ORIGINAL + 1).check(context)


@pytest.mark.parametrize(
    ("family", "noise"),
    [("Phimoe", {"input_jitter_noise": 0.3}), ("Mixtral", {"router_jitter_noise": 0.3})],
)
def test_routers_choose_the_same_experts_in_training(family: str, noise: dict[str, Any]) -> None:
    made = partial(build, family, num_local_experts=4, num_experts_per_tok=2, eos_token_id=1, **noise)
    batch = make_batch([(4, [5, 3]), (6, [4])])
    model = PolicyModel(load_causal_lm(spec(made()), trainable=True)).train()
    expected, _ = plain_scores(made().eval(), batch)
    torch.testing.assert_close(model(as_rows(*batch[:3])).logprobs, expected, atol=1e-4, rtol=1e-4)
