"""The exported folder in the session's vLLM engine and in an evaluation that must not warn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import HFExport, WeightSync
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.rollout import Evaluation
from tests.engines.conftest import load
from tests.engines.test_vllm_sync import canary_gap
from tests.toys import quiet_trainer, sums_data

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("lora", [None, LoraSpec(r=4)])
def test_vllm_computes_the_same_from_the_exported_folder(
    engine: Any, tied_folder: Path, tmp_path: Path, lora: LoraSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "close", lambda: None)
    engine.mark_stale()
    module = PPOLightningModule(
        ModelSpec(str(tied_folder), lora=lora), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2)
    )
    evaluation = {"evaluation": Evaluation([{"prompt": "1+1="}]), "rollouts_per_epoch": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")  # as the engine's start
        trainer = quiet_trainer(callbacks=[WeightSync(), HFExport(dirpath=str(tmp_path / "out"))])
        trainer.fit(module, sums_data(engine=engine, **evaluation))
    assert not [w for w in caught if "sync_dist" in str(w.message)]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert canary_gap(engine, exported) <= 5e-5, "the evaluation after the last update brought the final weights"
    engine.load_weights(load(tied_folder).named_parameters(), policy_version=0)
    assert canary_gap(engine, exported) > 1e-3
    engine.load_weights(exported.named_parameters(), policy_version=99)
    tokens = torch.tensor([[2, *range(5, 25)]])
    got = torch.tensor(engine.logprobs(tokens.tolist()))
    torch.testing.assert_close(got, module.token_logprobs(tokens)[:, 1:], atol=5e-5, rtol=0)
