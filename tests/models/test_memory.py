"""What saves memory: frozen weights in bfloat16, recomputed activations, the optimizer's state on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch._subclasses.fake_tensor import FakeTensorMode

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import OffloadOptimizer, WeightSync
from lightrl.models.loading import load_causal_lm
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.objectives import KLInReward
from tests.rows import as_rows
from tests.toys import Keep, model_fixture, quiet_trainer, sums_data

path = model_fixture(num_hidden_layers=2, hidden_size=64, intermediate_size=96)


def fit(path: str, *callbacks: Any, **arguments: Any) -> tuple[Any, Keep]:
    seed_everything(0, verbose=False)
    keep = Keep()
    module = GRPOLightningModule(path, kl=KLInReward(), **arguments)
    quiet_trainer(callbacks=[WeightSync(), keep, *callbacks]).fit(module, sums_data(rollouts_per_epoch=1))
    return module, keep


def nbytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_bfloat16_reference_takes_half_and_says_the_same(path: str) -> None:
    wide, reference = fit(path)
    narrow, ours = fit(path, reference=ModelSpec(path, dtype="bfloat16"))
    assert nbytes(narrow.reference) * 2 == nbytes(wide.reference) == nbytes(narrow.actor)
    assert {p.dtype for p in narrow.actor.parameters()} == {torch.float32}
    seen, expected = ours.experiences[-1], reference.experiences[-1]
    gap = (seen.ref_logprobs - expected.ref_logprobs)[seen.response_mask].abs()
    assert seen.ref_logprobs.dtype == torch.float32
    assert 0 < gap.mean() < 0.02 and gap.max() < 0.2


@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_recomputed_activations_save_memory_and_change_nothing(layout: Any, path: str) -> None:
    tokens = torch.randint(4, 12, (8, 40), generator=torch.Generator().manual_seed(0))
    tokens[:4], tokens[4:] = tokens[:4].clone(), tokens[4:].clone()
    tokens[1:4, :10], tokens[5:, :10] = tokens[0, :10], tokens[4, :10]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    response = mask.clone()
    response[:, :10] = False
    results = []
    for recompute in (False, True):
        spec = ModelSpec(path, gradient_checkpointing=recompute, layout=layout)
        model = PolicyModel(load_causal_lm(spec, trainable=True), layout=layout)
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model(as_rows(tokens, mask, response, group_ids=torch.arange(8) // 4, temperature=0.9))
        (out.logprobs * response).sum().backward()
        results.append((kept, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    (plain, expected), (saved, gradient) = results
    assert saved < 0.5 * plain
    assert (gradient - expected).norm() < 1e-5 * expected.norm()


def test_the_optimizer_leaves_the_device_and_comes_back() -> None:
    """With tensors that know their device but hold nothing; a run on CUDA is left to machines that have one."""
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(4, device="cuda"))
        optimizer = torch.optim.Adam([parameter])
        state = {"step": torch.zeros(()), "exp_avg": torch.zeros(4, device="cuda"), "count": 3}
        optimizer.state[parameter] = state
        trainer: Any = type("T", (), {"optimizers": [optimizer]})
        callback, module = OffloadOptimizer(), torch.nn.Module()
        for _ in range(2):
            callback.on_train_batch_end(trainer, module, None, None, 0)  # type: ignore[arg-type]
            assert state["exp_avg"].device.type == state["step"].device.type == "cpu"
            callback.on_before_optimizer_step(trainer, module, optimizer)  # type: ignore[arg-type]
            assert state["exp_avg"].device.type == "cuda" and state["step"].device.type == "cpu"
