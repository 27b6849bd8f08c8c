"""On-policy distillation: minimisers in closed form, the gradient by enumeration, routing, refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.algorithms import DistillLightningModule, SFTLightningModule
from lightrl.algorithms.module import Updates
from lightrl.callbacks import PredictionWriter, WeightSync
from lightrl.data.prompts import PromptSource
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.engines.server.engine import ServerTeacher
from lightrl.models.spec import ModelSpec
from lightrl.objectives import Divergence, ForwardKL, JensenShannon, KLInReward, Reinforce, ReverseKL
from lightrl.records import Experience, Rollouts, SamplingParams
from lightrl.rollout import Evaluation
from tests.algorithms.test_bandit import REWARDS, K, bandit, policy, schedule, tv
from tests.toys import bandit_model, quickstart_model, quiet_trainer, sums_data

NUM_ROLLOUTS = 40


def probabilities(path: str) -> Tensor:
    """The K probabilities of a model after the prompt."""
    with torch.no_grad():
        logits: Tensor = AutoModelForCausalLM.from_pretrained(path)(torch.zeros(1, 1, dtype=torch.long)).logits[0, -1]
    return logits.softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divergence", "top", "with_reward"),
    [
        (None, None, True), (ReverseKL(), K - 1, False), (ForwardKL(), None, False)
    ],
    ids=["sampled and reward", "top words", "forward"],
)  # fmt: skip
def test_the_minimiser_is_the_teacher_and_with_a_reward_the_mixture(
    with_reward: bool, divergence: Divergence | None, top: int | None, tmp_path: Path
) -> None:
    seed_everything(0, verbose=False)
    student, teacher = bandit_model(tmp_path / "student", K), bandit_model(tmp_path / "teacher", K, seed=10)
    start, taught = probabilities(student), probabilities(teacher)
    module = DistillLightningModule(
        ModelSpec(student, layout="padded"), {"only": ModelSpec(teacher, layout="padded")},
        advantage=Reinforce() if with_reward else None, coef=0.5 if with_reward else 1.0,
        gamma=float(with_reward), divergence=divergence, divergence_top_k=top,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.03),
        lr_scheduler=lambda optimizer: schedule(optimizer, NUM_ROLLOUTS), updates=Updates(max_grad_norm=None),
    )  # fmt: skip
    rest: dict[str, Any] = {"rollouts_per_epoch": NUM_ROLLOUTS} | ({} if with_reward else {"rewards": None})
    if divergence is not None and not with_reward:  # without noise a few samples do
        rest |= {"group_size": 1, "prompts_per_rollout": 2}
    quiet_trainer().fit(module, bandit(**rest))
    optimum = (taught.log() + REWARDS / 0.5 * with_reward).softmax(-1)
    assert tv(start, optimum) > 0.2, "there is something to learn"
    assert tv(policy(module), optimum) <= 0.02, f"{policy(module)} instead of {optimum}"
    assert not any(name.startswith("teachers.") for name in module.state_dict())


class Keep(DistillLightningModule):
    """Keeps what the first update was made of and does not step."""

    def make_experience(self, rollouts: Rollouts) -> Experience:
        self.rollouts = rollouts
        self.kept = super().make_experience(rollouts)
        return self.kept

    def apply_gradients(self, *, finite: bool) -> dict[str, Any]:
        self.gradient = [p.grad.clone() for p in self.actor.parameters() if p.grad is not None]
        return {}


def test_the_gradient_is_that_of_the_reverse_kl(tmp_path: Path) -> None:
    student, teacher = bandit_model(tmp_path / "student", K), bandit_model(tmp_path / "teacher", K, seed=10)
    module = Keep(ModelSpec(student, layout="padded"), {"only": teacher})
    quiet_trainer().fit(module, bandit(rewards=None, rollouts_per_epoch=1))
    log_t = probabilities(teacher).log()
    prompt = torch.zeros(1, 1, dtype=torch.long)
    log_pi = module.actor.lm(prompt).logits[0, -1].log_softmax(-1)
    fixed = log_pi.detach()
    parameters = [p for p in module.actor.parameters() if p.requires_grad]
    # of the actions that were sampled: -1/B sum (log pi_T - log pi) grad log pi
    actions = module.kept.token_ids[:, 1]
    sampled = -((log_t - fixed)[actions] * log_pi[actions]).mean()
    expected = torch.autograd.grad(sampled, parameters, retain_graph=True)
    for got, want in zip(module.gradient, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    # over all actions, each as often as the policy takes it: the gradient of KL(pi || pi_T)
    enumerated = -(fixed.exp() * (log_t - fixed) * log_pi).sum()
    kl = (log_pi.exp() * (log_pi - log_t)).sum()
    for got, want in zip(
        torch.autograd.grad(enumerated, parameters, retain_graph=True), torch.autograd.grad(kl, parameters), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_a_kl_penalty_in_the_reward_counts_without_rewards(tmp_path: Path) -> None:
    """The rewards are only logged: A = log pi_T - log pi - 0.5 (log pi - log pi_ref)."""
    student, teacher, reference = (bandit_model(tmp_path / str(seed), K, seed=seed) for seed in (0, 10, 20))
    module = Keep(ModelSpec(student, layout="padded"), {"only": teacher}, reference=reference, kl=KLInReward(coef=0.5))
    quiet_trainer().fit(module, bandit(rollouts_per_epoch=1))
    own, taught, base = (
        probabilities(path).log()[module.kept.token_ids[:, 1]] for path in (student, teacher, reference)
    )
    torch.testing.assert_close(module.kept.advantages[:, 1], taught - own - 0.5 * (own - base), atol=1e-4, rtol=1e-4)
    assert bool((module.kept.rewards != 0).any())


@pytest.mark.parametrize("divergence", [ReverseKL(), ForwardKL(), JensenShannon(0.3)], ids=lambda d: type(d).__name__)
def test_the_gradient_of_a_divergence_is_the_dense_one(divergence: Divergence, tmp_path: Path) -> None:
    """Rows of two teachers, three micro-batches: the mean over all sampled tokens of D between whole distributions."""
    paths = {name: quickstart_model(tmp_path / name, seed=seed) for seed, name in enumerate(("student", "a", "b"))}
    rows = [{"prompt": f"{i}+{i}=", "who": "ab"[i % 2]} for i in range(8)]
    module = Keep(
        paths["student"], {"a": paths["a"], "b": paths["b"]}, "who", coef=0.5, divergence=divergence,
        updates=Updates(micro_batch_tokens=40),
    )  # fmt: skip
    data = sums_data(
        prompts=PromptSource(rows=rows), group_size=1, rollouts_per_epoch=1,
        sampling=SamplingParams(max_new_tokens=6, temperature=0.8),
    )  # fmt: skip
    quiet_trainer().fit(module, data)
    kept, total, count = module.kept, torch.zeros((), dtype=torch.float64), 0
    models = {name: copy.deepcopy(module.teachers[name].lm).double() for name in "ab"}
    student = copy.deepcopy(module.actor.lm).double()
    for row, name in enumerate(module.rollouts.columns["who"]):
        ids = kept.token_ids[row][kept.attention_mask[row]][None]
        mask = kept.response_mask[row, 1 : ids.shape[1]]
        own, theirs = ((m(ids).logits[0, :-1] / 0.8).log_softmax(-1) for m in (student, models[name]))
        total, count = total + divergence(own, theirs.detach())[mask].sum(), count + int(mask.sum())
    names = [name for name, p in module.actor.lm.named_parameters() if p.requires_grad]
    parameters = dict(student.named_parameters())
    expected = torch.autograd.grad(0.5 * total / count, [parameters[name] for name in names])
    for got, want in zip(module.gradient, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-3)
    logged = module.trainer.callback_metrics["loss/teacher"].item()
    assert float(total.detach() / count) == pytest.approx(logged, rel=1e-4)


def test_each_row_is_scored_by_the_teacher_that_its_column_names(tmp_path: Path) -> None:
    paths = {name: quickstart_model(tmp_path / name, seed=seed) for seed, name in enumerate(("student", "a", "b"))}
    rows = [{"prompt": f"{i}+{i}=", "who": "ab"[i % 2]} for i in range(8)]
    module = Keep(paths["student"], {"a": paths["a"], "b": paths["b"]}, "who", gamma=1.0, coef=0.5)
    quiet_trainer().fit(module, sums_data(prompts=PromptSource(rows=rows), group_size=1, rollouts_per_epoch=1))
    kept, who = module.kept, module.rollouts.columns["who"]
    teacher = kept.token_extras["teacher/logprobs"]
    assert kept.old_logprobs is not None and set(who) == {"a", "b"}
    for row, name in enumerate(who):
        ids = kept.token_ids[row][kept.attention_mask[row]]
        lm = copy.deepcopy(module.teachers[name].lm)
        scores = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        mask = kept.response_mask[row, 1 : len(ids)]
        torch.testing.assert_close(teacher[row, 1 : len(ids)][mask], scores[mask], atol=1e-4, rtol=1e-4)
    gap = (teacher - kept.old_logprobs) * kept.response_mask
    to_go = gap.flip(1).cumsum(1).flip(1) * kept.response_mask  # gamma 1: all that follows
    torch.testing.assert_close(kept.advantages, 0.5 * to_go, atol=1e-4, rtol=1e-4)
    module.teacher_column = "prompt"
    with pytest.raises(ValueError, match="teacher_column='prompt'"):
        module._teacher_numbers(module.rollouts)


def test_teachers_that_cannot_score_the_samples_are_rejected(tmp_path: Path) -> None:
    student = quickstart_model(tmp_path / "student")
    other = bandit_model(tmp_path / "other", K)
    with pytest.raises(ValueError, match=r"teachers\['bad'\]"):
        quiet_trainer().fit(DistillLightningModule(student, {"bad": other}), sums_data())
    sharded = DistillLightningModule(student, {"a": student}, divergence=ReverseKL())
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    sharded._trainer = SimpleNamespace(
        strategy=strategy, precision="32-true", callbacks=[], datamodule=None, overfit_batches=0
    )  # type: ignore[assignment]
    with pytest.raises(ValueError, match="divergence=ReverseKL with strategy"):
        sharded.setup("fit")
    larger = quickstart_model(tmp_path / "larger")
    tokenizer = AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(larger)
    with pytest.raises(ValueError, match=r"teachers\['more'\]"):
        quiet_trainer().fit(DistillLightningModule(student, {"more": larger}, divergence=ReverseKL()), sums_data())


def test_a_served_teacher_with_a_divergence_needs_its_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="divergence_top_k=None"):
        DistillLightningModule("student", {"far": ServerTeacher(["http://127.0.0.1:1"])}, divergence=ReverseKL())


def test_stored_completions_of_a_teacher_are_supervised_rows(tmp_path: Path) -> None:
    """What `lightrl predict` writes is read by the supervised data module, token for token, and learnt from."""
    teacher, student = quickstart_model(tmp_path / "teacher", seed=1), quickstart_model(tmp_path / "student")
    rows, file = [{"prompt": f"{i}+{i}="} for i in range(8)], tmp_path / "predictions.jsonl"
    data = sums_data(evaluation=Evaluation(predict_prompts=rows, sampling=SamplingParams(max_new_tokens=4)))
    trainer = quiet_trainer(callbacks=[WeightSync(), PredictionWriter(str(file))])
    trainer.predict(DistillLightningModule(teacher, {"unused": teacher}), data, return_predictions=False)
    stored = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["prompt"] for record in stored] == [row["prompt"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(student)
    source = SFTSource(path=str(file), chat_template=False)
    for example, record in zip(source.tokenized(tokenizer), stored, strict=True):
        prompt = tokenizer(record["prompt"])["input_ids"]
        completion = [*tokenizer(record["completion"])["input_ids"], tokenizer.eos_token_id]
        assert example.token_ids == [*prompt, *completion]
        assert list(example.trained) == [False] * len(prompt) + [True] * len(completion)
    module = SFTLightningModule(student, optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
    losses = []
    for epochs in (1, 20):
        fit = quiet_trainer(max_epochs=epochs, callbacks=[])
        fit.fit(module, SFTDataModule(train=source, tokenizer=student, batch_size=8))
        losses.append(fit.callback_metrics["loss/sft"].item())
    assert losses[1] < 0.5 * losses[0]
