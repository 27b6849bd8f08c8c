"""`WeightSync` with the transformers engine: what it pushes when, what its canary sees, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from transformers import AutoTokenizer

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.engines.base import StaleWeightsError
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.models.spec import ModelSpec
from tests.toys import model_fixture, quickstart_model, quiet_trainer, sums_data

model = model_fixture(num_hidden_layers=2, hidden_size=64, intermediate_size=64)


class Engine(TransformersEngine):
    """Counts pushes and canaries, and can lie about a push."""

    def __init__(self, skip_from: int = 1000, leave_out: str | None = None) -> None:
        super().__init__()
        self.skip_from, self.leave_out = skip_from, leave_out
        self.pushed: list[int] = []
        self.asked = 0

    def load_weights(self, named_tensors: Any, *, policy_version: int) -> None:
        self.pushed.append(policy_version)
        old = dict(self._model.state_dict()) if self.leave_out and policy_version else {}
        kept = {k: v.clone() for k, v in old.items() if self.leave_out and self.leave_out in k}
        if policy_version < self.skip_from:
            super().load_weights(named_tensors, policy_version=policy_version)
        with torch.no_grad():
            for name, tensor in kept.items():
                self._model.state_dict()[name].copy_(tensor)
        self.policy_version = policy_version

    def logprobs(self, sequences: Any) -> list[list[float]]:
        self.asked += 1
        return super().logprobs(sequences)


def fit(path: str, engine: Engine, lr: float = 1e-2, sync: WeightSync | None = None, **kwargs: Any) -> Any:
    seed_everything(0, verbose=False)
    module = PPOLightningModule(ModelSpec(path), optimizer=lambda params: torch.optim.AdamW(params, lr=lr))
    trainer = quiet_trainer(callbacks=[sync or WeightSync()], **kwargs)
    trainer.fit(module, sums_data(engine=engine))
    return module


def test_one_push_and_one_canary_for_each_version(model: str) -> None:
    engine, sync = Engine(), WeightSync()
    fit(model, engine, sync=sync)
    assert engine.pushed == [0, 2, 4, 6] and engine.asked == 4
    assert sync.last_gap is not None and 0 < sync.last_gap < 5e-6
    engine = Engine()
    fit(model, engine, sync=WeightSync(canary=False))
    assert engine.pushed == [0, 2, 4, 6] and engine.asked == 0


@pytest.mark.parametrize("sabotage", [{"skip_from": 2}, {"leave_out": "layers.1.mlp.down_proj"}, {"leave_out": "norm"}])
def test_canary_tells_the_gap(model: str, sabotage: dict[str, Any]) -> None:
    engine, sync = Engine(**sabotage), WeightSync()
    with pytest.raises(StaleWeightsError, match="of policy version 2 ") as error:
        fit(model, engine, sync=sync)
    assert sync.last_gap is not None and sync.last_gap > 5e-4
    assert f"{sync.last_gap:.2e} on average" in str(error.value)
    assert engine.pushed == [0, 2]


def test_bfloat16_rounding_is_let_through_and_a_skipped_push_is_not(model: str) -> None:
    sync = WeightSync()
    fit(model, Engine(), sync=sync, precision="bf16-mixed")
    assert sync.last_gap is not None and sync.last_gap < 0.15
    with pytest.raises(StaleWeightsError, match="allowed: 0.5 on average"):
        fit(model, Engine(skip_from=2), lr=0.1, precision="bf16-mixed")
    with pytest.raises(StaleWeightsError, match="identical to those before the push"):
        fit(model, Engine(skip_from=2), lr=1e-3, sync=sync, precision="bf16-mixed")
    assert sync.last_gap < 0.5


def test_steps_far_below_the_tolerance_leave_no_engine_behind_unseen(model: str) -> None:
    """The canary asks for prompts; a push that moves nothing is one too few, however small."""
    asked: list[list[list[int]]] = []

    class Asked(Engine):
        def logprobs(self, sequences: Any) -> list[list[float]]:
            asked.append(sequences)
            return super().logprobs(sequences)

    sync = WeightSync()
    fit(model, Asked(), lr=3e-7, sync=sync)
    assert sync.last_gap is not None and sync.last_gap < 5e-6
    first = sums_data().prompts.rows
    assert asked[0] == asked[1] == asked[2] == asked[3] and len(asked[1]) == 2 and len(asked[1][0]) == 16
    tokens = [token for row in asked[1] for token in row]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert all(tokenizer.decode(tokens[i : i + 6]).endswith("=") for i in range(0, 30, 6)), first
    sync = WeightSync()
    with pytest.raises(StaleWeightsError, match="of policy version 4 "):
        fit(model, Engine(skip_from=4), lr=3e-7, sync=sync)
    assert sync.last_gap is not None and sync.last_gap < 5e-4 / 2
    assert fit(model, Engine(skip_from=4), lr=3e-7, sync=WeightSync(tolerance=5e-4)).policy_version == 8


def test_an_engine_has_the_dtype_of_half_precision_weights(model: str) -> None:
    """With the default precision: without autocast, the trainer computes in it."""
    data = sums_data(rollouts_per_epoch=1)
    quiet_trainer(callbacks=[]).fit(PPOLightningModule(ModelSpec(model, dtype="bfloat16")), data)
    assert data.engine.dtype == "bfloat16"


def test_the_check_asks_about_many_tokens_where_the_engine_routes_them(tmp_path: Path) -> None:
    class Routes(Engine):
        shapes: tuple[int, ...] = ()

        def start(self, context: Any) -> None:
            super().start(context)
            self.replays_routes = False

        def logprobs(self, sequences: Any) -> list[list[float]]:
            self.shapes = tuple(len(s) for s in sequences)
            return super().logprobs(sequences)

    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 1}
    engine = Routes()
    fit(quickstart_model(tmp_path / "model", family="Mixtral", **sizes, **experts), engine)
    assert engine.shapes == (16,) * (2 + 8 * 8 // 16)


def test_without_the_callback_the_data_module_pushes_the_weights_itself(model: str) -> None:
    data, seen = sums_data(rollouts_per_epoch=2), list[int]()

    class Versions(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(data.engine.policy_version)

    quiet_trainer(callbacks=[Versions()]).fit(PPOLightningModule(model), data)
    assert len(seen) == 2 and 0 == seen[0] < seen[1]
