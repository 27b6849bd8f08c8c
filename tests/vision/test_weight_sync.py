"""The check after a push covers what prompts show: a run stops before it samples with another vision tower."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.data.prompts import PromptSource
from lightrl.engines.base import StaleWeightsError
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.models.lora import adapts_media
from lightrl.models.spec import LoraSpec
from lightrl.records import SamplingParams
from tests.toys import digits_reward, quiet_trainer, sgd, sums_data
from tests.vision.conftest import picture


class OtherTower(TransformersEngine):
    """Takes the weights of the language model, and keeps a vision tower that differs a little."""

    asked = 0

    def load_weights(self, named_tensors: Any, *, policy_version: int) -> None:
        super().load_weights(named_tensors, policy_version=policy_version)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if "vision" in name:
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))

    async def generate(self, request: Any) -> Any:
        self.asked += 1
        return await super().generate(request)


def fit(folder: Any, engine: Any, rows: list[dict[str, Any]]) -> WeightSync:
    sync = WeightSync()
    data = sums_data(
        prompts=PromptSource(rows=rows),
        rewards=[digits_reward],
        engine=engine,
        sampling=SamplingParams(max_new_tokens=4),
        prompts_per_rollout=2,
        rollouts_per_epoch=2,
    )
    module = GRPOLightningModule(folder.path, optimizer=sgd)
    quiet_trainer(callbacks=[sync]).fit(module, data)
    return sync


SHOWING = [{"prompt": "what is it?", "images": [picture(16, 24, i)]} for i in range(4)]


def test_the_check_after_a_push_covers_what_prompts_show(folder_of: Any) -> None:
    folder, other = folder_of("idefics3"), OtherTower()
    sync = fit(folder, TransformersEngine(), SHOWING)
    assert sync.last_media_gap is not None and sync.last_media_gap < 5e-5
    with pytest.raises(StaleWeightsError, match="Idefics3"):
        fit(folder, other, SHOWING)
    assert other.asked == 1, "one completion, and no rollout"
    assert fit(folder, OtherTower(), [{"prompt": "what is 1+1?"}]).last_media_gap is None


def test_an_adapter_on_the_vision_tower_reaches_the_engine_merged(folder_of: Any) -> None:
    folder = folder_of("idefics3")
    assert adapts_media(folder.policy(lora=LoraSpec(r=2)).lm)
    assert not adapts_media(folder.policy(lora=LoraSpec(r=2, target_modules=r".*text_model.*\.(q_proj|v_proj)")).lm)
