"""The PPO module on a tiny model with the transformers engine: splits, shortcuts, skips, flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor

import lightrl.algorithms.policy_gradient as ppo_module
from lightrl.algorithms import CriticSpec, GRPOLightningModule, PPOLightningModule
from lightrl.algorithms.module import ExtraLosses, Updates
from lightrl.algorithms.policy_gradient import policy_forward as run
from lightrl.callbacks import LinearKL, WeightSync
from lightrl.models.spec import ModelSpec
from lightrl.objectives import KLInReward, PPOClip, RolloutRatio
from lightrl.records import Experience
from tests.algorithms.toys import fit, ppo, weights
from tests.toys import Keep, ThreadEngine, adam, model_fixture, quiet_trainer, sgd, sums_data

model_path = model_fixture(num_hidden_layers=2, hidden_size=64, intermediate_size=64)


@pytest.mark.parametrize("kind", [PPOLightningModule, GRPOLightningModule])
def test_micro_batches_and_layouts_do_not_change_the_update(kind: type[PPOLightningModule], model_path: str) -> None:
    results = []
    for tokens, layout in ((100_000, "padded"), (100_000, "packed"), (120, "padded"), (60, "shared_prefix")):
        spec = ModelSpec(model_path, layout=layout)  # type: ignore[arg-type]
        module = kind(spec, updates=Updates(micro_batch_tokens=tokens), optimizer=sgd)
        keep = fit(module)
        results.append((weights(module), keep.metrics[0]))
    for other, metrics in results[1:]:
        torch.testing.assert_close(other, results[0][0], atol=2e-6, rtol=1e-5)
        for name in ("loss/policy", "policy/entropy", "kl/old", "optim/grad_norm", "reward/mean"):
            assert metrics[name] == pytest.approx(results[0][1][name], abs=1e-5)


def test_one_update_per_rollout_needs_no_old_logprobs_and_gives_the_same(model_path: str) -> None:
    """Without KL in the reward old log-probs are not computed; a KL of weight 0 in it has them computed."""
    fast = GRPOLightningModule(model_path, optimizer=sgd, kl=None)
    slow = GRPOLightningModule(model_path, optimizer=sgd, kl=KLInReward(coef=0.0))
    first, second = fit(fast, rollouts=2), fit(slow, rollouts=2)
    assert first.experiences[0].old_logprobs is None and second.experiences[0].old_logprobs is not None
    torch.testing.assert_close(weights(fast), weights(slow), atol=1e-6, rtol=1e-5)


def test_rows_without_gradient_are_left_out_and_still_counted(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_first_sum(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """Groups of other prompts have equal rewards, so their advantages are 0."""
        return [
            float(sum(c in "02468" for c in text)) if prompt < "03" else 0.5
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    results = []
    for coefficient in (0.0, 1e-12):  # any entropy bonus, however small, means that every row has a gradient
        module = GRPOLightningModule(
            model_path, optimizer=sgd, kl=None, extra_losses=ExtraLosses(entropy_coef=coefficient)
        )
        sizes: list[int] = []
        with monkeypatch.context() as patched:
            patched.setattr(
                ppo_module, "policy_forward", lambda m, x, s=sizes, **w: (s.append(len(x)), run(m, x, **w))[1]
            )
            keep = fit(module, rewards=[only_first_sum], prompts_per_rollout=16)
        results.append((sum(sizes), weights(module), keep.metrics[0]["optim/grad_norm"]))
    (few, ours, norm), (all_rows, reference, norm_all) = results
    assert few < all_rows == 64
    assert norm == pytest.approx(norm_all, rel=1e-5)
    torch.testing.assert_close(ours, reference, atol=1e-6, rtol=1e-5)


def test_old_logprobs_may_be_the_engines(model_path: str) -> None:
    """The engine computes in float32 as the trainer does, so the updates are the same, without the forward."""
    results = []
    for loss in (PPOClip(), RolloutRatio(PPOClip())):
        module = GRPOLightningModule(model_path, kl=KLInReward(coef=0.1), loss=loss, ppo_epochs=2, optimizer=sgd)
        keep = fit(module)
        results.append((weights(module), keep.experiences[0], keep.metrics[0]))
    (plain, computed, metrics), (ours, taken, ours_metrics) = results
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)
    assert taken.old_logprobs is taken.engine_logprobs and computed.old_logprobs is not None
    assert not torch.equal(computed.old_logprobs, computed.engine_logprobs)
    assert metrics["kl/engine"] == pytest.approx(ours_metrics["kl/engine"], abs=1e-6)
    rows: list[int] = []
    module = GRPOLightningModule(model_path, kl=None, loss=RolloutRatio(PPOClip()), ppo_epochs=2, optimizer=sgd)
    module.token_logprobs = lambda ids, f=module.token_logprobs: (rows.append(0), f(ids))[1]  # type: ignore[method-assign]
    calls = _count_forwards(module)
    fit(module)
    assert len(calls) == 2 + len(rows), "two updates and the canary, and nothing else"


def _count_forwards(module: PPOLightningModule) -> list[int]:
    calls: list[int] = []
    original = module.configure_model

    def configure() -> None:
        original()
        module.actor.register_forward_hook(lambda *_: calls.append(1))

    module.configure_model = configure  # type: ignore[method-assign]
    return calls


def test_minibatches_cover_every_row_once_and_keep_groups_together(model_path: str) -> None:
    module = ppo(model_path, ppo_epochs=2, updates=Updates(minibatch_size=8))
    seen: list[list[int]] = []
    original = module.micro_batches

    def micro_batches(minibatch: Experience, *args: Any, **kwargs: Any) -> Any:
        seen.append(minibatch.group_ids.tolist())
        return original(minibatch, *args, **kwargs)

    module.micro_batches = micro_batches  # type: ignore[method-assign]
    keep = fit(module)
    assert len(seen) == 2 * 4 and module.policy_version == 8
    for epoch in (seen[:4], seen[4:]):
        assert sorted(group for part in epoch for group in part) == sorted(list(range(8)) * 4)
        assert all(part.count(g) == 4 for part in epoch for g in part)
    assert seen[:4] != seen[4:], "each epoch has its own order"
    assert keep.metrics[0]["policy/ratio_max"] > 1.0


class Explodes(PPOLightningModule):
    """Returns a NaN loss in the given rollouts."""

    broken: tuple[int, ...] = ()

    def compute_loss(self, minibatch: Experience) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        losses, metrics = super().compute_loss(minibatch)
        bad = self.trainer.fit_loop.total_batch_idx in self.broken
        return ({name: loss * float("nan") for name, loss in losses.items()} if bad else losses), metrics


def test_a_nonfinite_update_is_skipped_and_counted(model_path: str) -> None:
    module = Explodes(model_path, ppo_epochs=1, optimizer=adam)
    module.broken = (1,)
    keep = fit(module, rollouts=3)
    assert [m["optim/skipped_updates"] for m in keep.metrics] == [0.0, 1.0, 0.0]
    assert module.num_skipped_updates == 1 and module.policy_version == 2
    assert bool(weights(module).isfinite().all())


def test_an_update_without_a_token_to_train_is_skipped_and_counted(model_path: str) -> None:
    """Momentum and weight decay would move the weights; two such rollouts in a row do not end the run."""
    calls: list[int] = []

    def scores_the_first_rollout(completions: list[str], **_: Any) -> list[float | None]:
        calls.append(len(completions))
        scored = sum(calls) <= 32
        return [float(sum(c in "02468" for c in text)) if scored else None for text in completions]

    module = GRPOLightningModule(model_path, optimizer=adam, updates=Updates(max_skipped_updates=1))
    after: list[Tensor] = []

    class Watch(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            after.append(weights(module).clone())

    with pytest.warns(UserWarning, match="no trainable tokens"):
        data: dict[str, Any] = {"rewards": [scores_the_first_rollout], "engine": ThreadEngine()}
        keep = fit(module, rollouts=3, callbacks=[Watch()], **data)
    assert [m["optim/skipped_updates"] for m in keep.metrics] == [0.0, 1.0, 1.0]
    assert module.num_skipped_updates == 0 and module.policy_version == 1, "neither was for a number that is not finite"
    assert torch.equal(after[0], after[1]) and torch.equal(after[1], after[2])
    assert keep.metrics[2]["optim/lr_policy"] == keep.metrics[0]["optim/lr_policy"]


def test_too_many_skips_in_a_row_stop_the_run(model_path: str) -> None:
    module = Explodes(model_path, ppo_epochs=1, optimizer=adam, updates=Updates(max_skipped_updates=2))
    module.broken = (0, 1, 2)
    with pytest.raises(RuntimeError, match="2 updates in a row had a non-finite loss"):
        fit(module, rollouts=3)


def always_one(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize("shared", [False, True])
def test_critics_learn_values(shared: bool, model_path: str) -> None:
    critic = CriticSpec(shared=shared, lr=1e-2, clip=None, warmup_rollouts=6)
    module = ppo(model_path, critic=critic, ppo_epochs=4)
    keep = fit(module, rollouts=6, rewards=[always_one], prompts_per_rollout=4)
    errors = [abs(m["value/mean"] - 1.0) for m in keep.metrics]  # gamma = lambda = 1: every state is worth 1
    assert errors[-1] < 0.5 * errors[0], errors
    names = [group["name"] for group in module.trainer.optimizers[0].param_groups]
    assert names == ["policy", "critic"] and (module.critic is None) == critic.shared


def test_the_runs_seed_changes_prompts_and_samples(model_path: str) -> None:
    seen = []
    for seed in (1, 2):
        seed_everything(seed, verbose=False)
        module, keep = GRPOLightningModule(model_path, kl=None), Keep()
        quiet_trainer(callbacks=[WeightSync(), keep]).fit(module, sums_data(rollouts_per_epoch=1))
        seen.append(keep.rollouts[0])
    assert seen[0].prompts != seen[1].prompts and seen[0].completions != seen[1].completions


def test_hooks_are_called_once_per_rollout_and_metrics_are_documented_names(model_path: str) -> None:
    keep = fit(ppo(model_path), rollouts=2)
    assert len(keep.rollouts) == len(keep.experiences) == len(keep.metrics) == len(keep.updated) == 2
    expected = {
        *("kl/ref", "kl/engine", "loss/policy", "loss/value", "policy/entropy", "policy/ratio_max"),
        *("value/explained_variance", "completions/length", "rollout/truncated_fraction", "optim/grad_norm"),
        *("optim/lr_policy", "time/generate", "time/update"),
    }
    assert expected <= set(keep.metrics[0])
    rewards = keep.rollouts[0].rewards
    assert keep.metrics[0]["reward/mean"] == pytest.approx(float(rewards.mean()))
    assert keep.metrics[0]["reward/std"] == pytest.approx(float(rewards.std(unbiased=False)), abs=1e-6)
    assert keep.metrics[0]["reward/digits_reward/std"] == pytest.approx(keep.metrics[0]["reward/std"], abs=1e-6)
    clipped = [keep.metrics[0][f"policy/clip_fraction_{side}"] for side in ("low", "high", "region")]
    assert clipped[2] == pytest.approx(clipped[0] + clipped[1], abs=1e-6)
    lengths = keep.rollouts[0].response_mask.sum(1)[~keep.rollouts[0].truncated].float()
    for name, value in (("", lengths.mean()), ("_min", lengths.min()), ("_max", lengths.max())):
        assert keep.metrics[0][f"rollout/finished_length{name}"] == pytest.approx(float(value))
    assert keep.metrics[0]["kl/engine_gap_max"] < 5e-5, "engine and trainer disagree"
    e = keep.experiences[0]
    assert e.old_logprobs is not None and e.values is not None and e.ref_logprobs is not None
    for tensor in (e.old_logprobs, e.ref_logprobs, e.values, e.advantages, e.engine_logprobs):
        assert tensor.shape == e.token_ids.shape and bool((tensor[~e.response_mask] == 0).all())
    assert bool((e.old_logprobs[e.response_mask] < 0).all())
    torch.testing.assert_close(e.old_logprobs, e.engine_logprobs, atol=5e-5, rtol=0)
    torch.testing.assert_close(e.old_logprobs, e.ref_logprobs, atol=1e-6, rtol=0)  # nothing has been learnt yet


def test_linear_kl_is_hand_computed(model_path: str) -> None:
    seen: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            seen.append(module.kl.coef)

    fit(ppo(model_path, ppo_epochs=1), rollouts=4, callbacks=[LinearKL(0.2, 0.0, num_rollouts=2), Watch()])
    assert seen == pytest.approx([0.2, 0.1, 0.0, 0.0])  # 0.2 + (0 - 0.2) * min(i / 2, 1)
