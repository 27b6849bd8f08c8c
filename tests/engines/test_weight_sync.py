"""`WeightSync` and PPO on the session's vLLM engine: the gap stays at rounding, and a sabotaged sync is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.engines.base import StaleWeightsError
from lightrl.models.spec import ModelSpec
from lightrl.records import SamplingParams
from tests.toys import Idle, quiet_trainer, sums_data

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


class Gaps(Callback):
    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.canaries: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.gaps.append(outputs["kl/engine_gap_max"])
        self.canaries += [c.last_gap for c in trainer.callbacks if isinstance(c, WeightSync)]


@pytest.fixture()
def lent(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The session's engine, which a run must not close; as if never synced."""
    monkeypatch.setattr(engine, "close", lambda: None)
    engine.mark_stale()
    return engine


def ppo(folder: Path | ModelSpec) -> PPOLightningModule:
    seed_everything(0, verbose=False)
    actor = folder if isinstance(folder, ModelSpec) else str(folder)
    return PPOLightningModule(actor, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ppo_and_engine_agree_after_every_update(lent: Any, tied_folder: Path, temperature: float) -> None:
    gaps = Gaps()
    data = sums_data(engine=lent, sampling=SamplingParams(max_new_tokens=6, temperature=temperature))
    module = ppo(tied_folder)
    quiet_trainer(callbacks=[WeightSync(), gaps]).fit(module, data)
    assert len(gaps.gaps) == 4 and module.policy_version == 8
    assert max(gaps.gaps) <= 5e-5 and max(gaps.canaries) <= 5e-5


Weights = Iterator[tuple[str, torch.Tensor]]


def stale_head(module: Any, honest: Callable[[], Weights]) -> Weights:
    """The tied embedding as it was before the first update; the rest is new."""
    for name, tensor in honest():
        if "embed_tokens" in name and module.policy_version == 0:
            module.first = tensor.detach().clone()
        yield name, module.first if "embed_tokens" in name else tensor


def test_sabotaged_weights_are_caught(lent: Any, tied_folder: Path) -> None:
    """What is left out is caught by the engine itself: tests/engines/test_vllm_sync.py."""
    module = ppo(tied_folder)
    honest = module.named_policy_weights
    module.named_policy_weights = lambda **some: stale_head(module, lambda: honest(**some))  # type: ignore[method-assign]
    message = r"policy version 2 .*differ from the trainer's by \d\.\d\de.*allowed: 0.0005"
    with pytest.raises(StaleWeightsError, match=message):
        quiet_trainer().fit(module, sums_data(engine=lent))
    assert module.trainer.fit_loop.total_batch_idx == 0, "the second rollout was generated"
    assert lent.policy_version == -1


def test_a_skipped_sync_is_caught(lent: Any, tied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = lent.load_weights

    def only_first(weights: Weights, *, policy_version: int) -> None:
        if policy_version == 0:
            honest(weights, policy_version=0)
        lent.policy_version = policy_version

    monkeypatch.setattr(lent, "load_weights", only_first)
    with pytest.raises(StaleWeightsError, match="stale or incomplete"):
        quiet_trainer().fit(ppo(tied_folder), sums_data(engine=lent))


def test_an_engine_never_synced_is_refused(lent: Any, tied_folder: Path) -> None:
    with pytest.raises(StaleWeightsError, match=r"version -1 \(-1: never synced\).*Idle did not push the weights"):
        quiet_trainer(callbacks=[Idle()]).fit(ppo(tied_folder), sums_data(engine=lent))
