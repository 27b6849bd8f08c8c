"""Reward models from preferences: the loss, what is logged, layouts, and the way into PPO."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrl.algorithms import PPOLightningModule, RewardLightningModule
from lightrl.callbacks import HFExport, WeightSync
from lightrl.data.preferences import PreferenceDataModule, PreferenceLoader, PreferencePair, PreferenceSource
from lightrl.models.reward import RewardModel, RewardModelSpec, bradley_terry_loss
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.rollout.learner import RLCallback
from tests.rows import as_rows, unshared
from tests.toys import model_fixture, quickstart_model, quiet_trainer, sgd, sums_data

# People want the sum, and a full stop after it.
ROWS = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a + b}.", "rejected": f"{a + b + 1}" if a % 2 else "", "margin": 0.5 * (a % 3)}
    for a in range(6)
    for b in range(4)
]


model_path = model_fixture(num_hidden_layers=2, hidden_size=64, intermediate_size=64)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.0)


def fit(module: Any, callbacks: Any = (), resume: str | None = None, **options: Any) -> Any:
    seed_everything(0, verbose=False)
    margin = options.pop("margin_column", None)
    source = PreferenceSource(rows=ROWS, margin_column=margin)
    kind = options.pop("data", PreferenceDataModule)
    data = kind(source, PreferenceSource(rows=ROWS[:5]), batch_size=options.pop("batch_size", 8))
    trainer = quiet_trainer(**{"max_steps": 1, "callbacks": list(callbacks), **options})
    trainer.fit(module, data, ckpt_path=resume)
    return trainer


def weights(module: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.reward_model.parameters()])


def test_loss_by_hand() -> None:
    chosen, rejected = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 2.0, 2.0])
    # -log sigmoid(1) = log(1 + e^-1) = 0.3132617; -log sigmoid(-2) = log(1 + e^2) = 2.1269280; -log sigmoid(0) = log 2
    got = bradley_terry_loss(chosen, rejected)
    torch.testing.assert_close(got, torch.tensor([0.3132617, 2.1269280, math.log(2)]))
    # Margins 1, -2, 3 leave differences 0, 0, -3: log 2, log 2, log(1 + e^3) = 3.0485874
    got = bradley_terry_loss(chosen, rejected, torch.tensor([1.0, -2.0, 3.0]))
    torch.testing.assert_close(got, torch.tensor([math.log(2), math.log(2), 3.0485874]))
    # Sums 1, 2, 4, squared and times 0.1: 0.1, 0.4, 1.6 more
    got = bradley_terry_loss(chosen, rejected, centering_coef=0.1)
    torch.testing.assert_close(got, torch.tensor([0.4132617, 2.5269280, math.log(2) + 1.6]))
    shifted = bradley_terry_loss(chosen + 5, rejected + 5)  # only differences count without the centering
    torch.testing.assert_close(shifted, bradley_terry_loss(chosen, rejected))
    assert bradley_terry_loss(torch.tensor([-1e4]), torch.tensor([1e4])).item() == pytest.approx(2e4)  # no overflow


class Fixed(RewardLightningModule):
    """Scores that are given, in place of a model's."""

    def score_pairs(self, batch: dict[str, torch.Tensor]) -> Any:
        chosen, rejected = batch["scores"].unbind(1)
        return chosen, rejected, bradley_terry_loss(chosen, rejected)


def test_eval_metrics_by_hand_leave_idle_pairs_out() -> None:
    """Differences 1, -2, 0 (a tie is not right), and a pair of an idle rank that must not count: 1 of 3."""
    module = Fixed("nowhere")
    module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    for scores, valid in (([[1.0, 0.0], [0.0, 2.0]], [True, True]), ([[2.0, 2.0], [9.0, 0.0]], [True, False])):
        module.validation_step({"scores": torch.tensor(scores), "valid": torch.tensor(valid)}, 0)
    assert module.eval_accuracy.compute().item() == pytest.approx(1 / 3)
    assert module.eval_margin.compute().item() == pytest.approx(-1 / 3)
    assert module.eval_loss.compute().item() == pytest.approx((0.3132617 + 2.1269280 + math.log(2)) / 3)


def test_training_metrics_are_means_over_the_pairs_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with 2 and 1 pairs: Lightning's mean over the ranks of what each logs is the mean over the 3 pairs."""
    shares = ([[1.0, 0.0], [0.0, 2.0]], [[3.0, 2.0]])
    logged: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr("lightrl.algorithms.supervised.strategies.all_reduce", lambda *_: torch.tensor(3.0))
    for scores in shares:
        module = Fixed("nowhere")
        module._trainer = SimpleNamespace(world_size=2, strategy=None)  # type: ignore[assignment]
        module.log_dict = lambda metrics, **_: logged.append(metrics)  # type: ignore[method-assign, assignment]
        loss = module.training_step({"scores": torch.tensor(scores)}, 0)
        assert loss.item() == pytest.approx(logged[-1]["loss/preference"].item())
    mean = {name: float(logged[0][name] + logged[1][name]) / 2 for name in logged[0]}
    # differences 1, -2, 1: two of three right, mean 0; scores sum to 8 over 6; losses .3132617, 2.1269280, .3132617
    assert mean["reward/accuracy"] == pytest.approx(2 / 3) and mean["reward/margin"] == pytest.approx(0.0, abs=1e-6)
    assert mean["reward/mean"] == pytest.approx(8 / 6)
    assert mean["loss/preference"] == pytest.approx((0.3132617 + 2.1269280 + 0.3132617) / 3)


def test_layouts_and_padding_do_not_change_the_update(model_path: str) -> None:
    """The shared prefix (prompt, or more) is computed once; scores, losses and weights after a step stay the same."""
    results = []
    for layout in ("padded", "packed", "shared_prefix"):
        module = RewardLightningModule(ModelSpec(model_path, layout=layout), optimizer=sgd)  # type: ignore[arg-type]
        trainer = fit(module)
        results.append((weights(module), trainer.callback_metrics["loss/preference"]))
    for other in results[1:]:
        torch.testing.assert_close(other[0], results[0][0], atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(other[1], results[0][1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed", "auto"])
def test_scores_of_pairs_are_those_of_single_rows(layout: Any, model_path: str) -> None:
    torch.manual_seed(0)
    model = RewardModel.for_training(ModelSpec(model_path, layout=layout))
    pairs = [
        PreferencePair([5, 14, 5, 18, 6, 1], [5, 14, 5, 18, 7, 8, 9, 1], 0.0),
        PreferencePair([5, 18, 6], [5, 18, 6, 7], 0.0),  # one is the beginning of the other
        PreferencePair([5, 6], [5, 6], 0.0),  # equal
        PreferencePair([7, 6], [5, 6], 0.0),  # nothing in common
    ]
    batch = PreferenceLoader(pairs, 4, 0, train=False).collate(pairs)  # type: ignore[arg-type]
    wider = {k: torch.nn.functional.pad(v, (0, 3)) if v.ndim == 2 else v for k, v in batch.items()}
    rows = [row for pair in pairs for row in pair[:2]]
    alone = [model.model(input_ids=torch.tensor([row])).logits.item() for row in rows]
    for b in (batch, wider):
        got = model(as_rows(b["token_ids"], b["attention_mask"], b["response_mask"], group_ids=b["group_ids"]))
        assert got.tolist() == pytest.approx(alone, abs=2e-5)


def test_one_step_is_that_of_plain_pytorch(model_path: str) -> None:
    """Margin and centering included; the gradient is that of transformers' own model on each sequence alone."""
    module = RewardLightningModule(model_path, optimizer=sgd, centering_coef=0.1)
    fit(module, margin_column="margin", batch_size=24)
    seed_everything(0, verbose=False)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    losses = []
    for row in ROWS:
        chosen, rejected = (
            plain(input_ids=torch.tensor([tokenizer(f"{row['prompt']}{row[side]}")["input_ids"] + [1]])).logits[0, 0]
            for side in ("chosen", "rejected")
        )
        difference = chosen - rejected - float(row["margin"])  # type: ignore[arg-type]
        losses.append((1 + (-difference).exp()).log() + 0.1 * (chosen + rejected) ** 2)
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(weights(module), expected, atol=2e-6, rtol=1e-4)


def test_it_learns_exports_and_ppo_loads_it(model_path: str, tmp_path: Path) -> None:
    module = RewardLightningModule(model_path, optimizer=adam)
    trainer = fit(module, [HFExport(str(tmp_path / "rm"))], max_steps=40, max_epochs=-1)
    assert trainer.callback_metrics["eval/accuracy"] == 1.0
    assert trainer.callback_metrics["eval/margin"] > 1
    assert trainer.callback_metrics["reward/accuracy"] > 0.9

    spec = RewardModelSpec("preference", str(tmp_path / "rm"), tokenizer="policy")
    ppo = PPOLightningModule(model_path, reward_models=[spec], kl=None)
    grab = Grab()
    quiet_trainer(callbacks=[WeightSync(), grab]).fit(ppo, sums_data(rewards=None, rollouts_per_epoch=1))
    rollouts = grab.rollouts
    with torch.no_grad():
        expected = module.reward_model(unshared(rollouts.token_ids, rollouts.attention_mask))
    torch.testing.assert_close(rollouts.rewards, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rollouts.reward_parts["preference"], expected, atol=1e-5, rtol=1e-5)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    both = plain(input_ids=rollouts.token_ids[:1, : int(rollouts.attention_mask[0].sum())])
    assert both.logits.item() == pytest.approx(expected[0].item(), abs=1e-5)
    assert plain.config.pad_token_id == 0


class Grab(RLCallback):
    """Keeps the scored rollouts."""

    def on_rollout_scored(self, trainer: Any, module: Any, rollouts: Any) -> None:
        self.rollouts = rollouts


def test_text_rendering_gives_the_scores_of_its_own_tokenizer(model_path: str, tmp_path: Path) -> None:
    """`rendering="text"` is what `RewardModelSpec(tokenizer="own")` scores."""
    module = RewardLightningModule(model_path, optimizer=adam)
    fit(module, [HFExport(str(tmp_path / "rm"))])
    loaded = RewardModel.from_spec(RewardModelSpec("preference", str(tmp_path / "rm")))
    scores = loaded.score_texts([row["prompt"] for row in ROWS], [row["chosen"] for row in ROWS])  # type: ignore[misc]
    pairs = PreferenceSource(rows=ROWS, rendering="text").tokenized(AutoTokenizer.from_pretrained(model_path))
    batch = PreferenceLoader(pairs, 24, 0, train=False).collate(pairs)  # type: ignore[arg-type]
    with torch.no_grad():
        chosen, _, _ = module.score_pairs(batch)
    torch.testing.assert_close(chosen, scores, atol=1e-5, rtol=1e-5)


class OwnState(PreferenceDataModule):
    def state_dict(self) -> dict[str, Any]:
        return {"own": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("when", ["within an epoch", "between epochs", "between epochs, own state"])
def test_resume_continues_exactly(when: str, model_path: str, tmp_path: Path) -> None:
    """Lightning restores the loader within an epoch only."""
    within = when == "within an epoch"
    length = {"max_steps": 2, "max_epochs": -1} if within else {"max_steps": -1, "max_epochs": 1}
    total = {"max_steps": 5, "max_epochs": -1} if within else {"max_steps": -1, "max_epochs": 2}
    whole = RewardLightningModule(model_path, optimizer=adam)
    fit(whole, **total)
    first = RewardLightningModule(model_path, optimizer=adam)
    saver = ModelCheckpoint(tmp_path, "part", save_on_train_epoch_end=True)
    data = OwnState if "own" in when else PreferenceDataModule
    trainer = fit(first, [saver], enable_checkpointing=True, data=data, **length)
    if within:
        trainer.save_checkpoint(tmp_path / "part.ckpt")
    rest = RewardLightningModule(model_path, optimizer=adam)
    fit(rest, data=data, resume=str(tmp_path / "part.ckpt"), **total)
    torch.testing.assert_close(weights(rest), weights(whole), atol=0, rtol=0)
    assert (weights(first) - weights(whole)).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["own pad", "new, lora"])
def test_transformers_scores_an_export_alike_in_batches_and_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
    path = quickstart_model(tmp_path / "model", vocab_size=32, pad_token_id=None, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if kind != "own pad":
        tokenizer.pad_token = tokenizer.eos_token  # as if `<pad>` were not in the vocabulary
        monkeypatch.setattr("lightrl.models.folders.UNUSED", re.compile("none"))
    tokenizer.save_pretrained(path)
    module = RewardLightningModule(ModelSpec(path, lora=LoraSpec(r=2) if "lora" in kind else None), optimizer=adam)
    trainer = fit(module, [HFExport(str(tmp_path / "export"))])
    assert trainer.global_step == 1 and module.reward_model.lm.config.vocab_size == 32
    trained = {name for name, p in module.reward_model.named_parameters() if p.requires_grad}
    assert len(trained) > 5 and "model.score.weight" in trained
    assert "lora" not in kind or all("lora_" in name for name in trained - {"model.score.weight"})

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    pad = exported.pad_token_id
    assert pad == plain.config.pad_token_id and exported.eos_token_id == tokenizer.eos_token_id != pad
    assert exported.pad_token == ("<pad>" if kind == "own pad" else "<|pad|>")
    assert plain.config.vocab_size == (32 if kind == "own pad" else 33)
    pairs = PreferenceSource(rows=ROWS[:6]).tokenized(tokenizer)
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]  # they end with EOS
    reloaded = RewardModel.from_spec(RewardModelSpec("r", str(tmp_path / "export")))
    with torch.no_grad():
        alone = torch.cat([module.reward_model(unshared(torch.tensor([x]))) for x in sides])
        batch = exported.pad({"input_ids": sides}, return_tensors="pt")
        torch.testing.assert_close(plain(**batch).logits[:, 0], alone, atol=1e-5, rtol=1e-4)
        one = torch.cat([plain(input_ids=torch.tensor([x])).logits[:, 0] for x in sides])
        torch.testing.assert_close(one, alone, atol=1e-5, rtol=1e-4)
        again = reloaded(unshared(batch["input_ids"], batch["attention_mask"].bool()))
        torch.testing.assert_close(again, alone, atol=1e-5, rtol=1e-4)
