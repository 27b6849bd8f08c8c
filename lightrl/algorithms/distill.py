"""On-policy distillation: teachers score the policy's own samples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from lightrl.algorithms.experience import TrajectoryLayout
from lightrl.algorithms.policy_gradient import PolicyGradientLightningModule
from lightrl.distributed.sharded import shards_parameters
from lightrl.distributed.strategies import MetricSums
from lightrl.engines.server.engine import ServerTeacher
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.models.teachers import Lesson, TopTokens, divergence_from, teach
from lightrl.objectives.divergences import Divergence
from lightrl.objectives.estimators import AdvantageEstimator
from lightrl.objectives.loss_terms import KLPenalty
from lightrl.objectives.special_estimators import Reinforce
from lightrl.ops.baselines import returns_to_go
from lightrl.records import Advantages, Experience, ModelOutputs, Rollouts

LOGPROBS, TOP_IDS, TOP_LOGPROBS = "teacher/logprobs", "teacher/top_ids", "teacher/top_logprobs"
"""Per token: the teacher's log-prob, and a served teacher's top-k tokens with their log-probs, (B, T, K)."""
NUMBERS = "teacher/number"
"""Per row: index of its teacher."""


class DistillLightningModule(PolicyGradientLightningModule):
    """On-policy distillation: trains the policy toward teachers on its own samples, with or without rewards.

        A_t = [advantage of the rewards] + coef * D_t,    D_t = d_t + gamma * D_{t+1}
        d_t = log pi_teacher(y_t | y_<t) - log pi(y_t | y_<t),    the negative sampled reverse KL

    With gamma 0, this is the gradient of KL(pi || pi_teacher) at the next token, summed over sampled prefixes that are
    held fixed. With gamma 1, it is the gradient of the KL over whole responses. Both are minimized by the teacher. With
    gamma 1 and a reward r, the optimum is `pi ~ pi_teacher * exp(r / coef)`. This holds for a Reinforce, RLOO, or
    GroupRelative(scale="none") `advantage`.

    With a `divergence`, each token's loss includes `coef * D(pi, pi_teacher)` at its prefix, prefixes held fixed. For
    `ReverseKL`, this is the exact value of what gamma 0 estimates from one sample. Teachers then run in every pass over
    a rollout. No (tokens, vocabulary) matrix is stored.

    Teachers are frozen. They score exactly the sampled tokens, at the sampling temperature and over the tokens left by
    top-p, top-k, and min-p. Metrics: `kl/teacher`, the mean of -d_t; with a divergence `loss/teacher`, its mean.

    Args:
        teachers: Teachers, by name. Each is a model directory, a model ID, a `ModelSpec`, or a `ServerTeacher`, which
            scores at temperature 1 over the whole vocabulary. Teachers must use the policy's token IDs.
        teacher_column: Data column with the name of each example's teacher. Required with several teachers.
        advantage: Estimator for the data module's rewards. If None, rewards are only logged, and every trajectory that
            didn't fail is trained.
        coef: Weight of D_t or the divergence, above 0.
        gamma: Discount of later tokens' d_t, in [0, 1]. Must be 0 with a divergence.
        divergence: `ReverseKL`, `ForwardKL`, or `JensenShannon` over the whole vocabulary. Defaults to the sampled
            reverse KL.
        divergence_top_k: Compare only the teacher's top-k tokens and the remaining probability. Defaults to the whole
            vocabulary.
        kl: Additional KL penalty against a reference.
        kwargs: Other arguments of `PolicyGradientLightningModule`.

    Raises:
        ValueError: A teacher has a different vocabulary, several teachers have no `teacher_column`, an example doesn't
            name a teacher, or a strategy shards models with a divergence.

    Source: https://arxiv.org/abs/2306.13649 (on-policy distillation), https://arxiv.org/abs/2306.08543 (reverse KL by
        policy gradient), https://thinkingmachines.ai/blog/on-policy-distillation (per-token advantage, gamma 0).
    """

    default_group_size = 1
    needs_rewards = False  # teachers score the completions
    teachers: nn.ModuleDict

    def __init__(
        self,
        actor: str | ModelSpec,
        teachers: dict[str, str | ModelSpec | ServerTeacher],
        teacher_column: str | None = None,
        *,
        advantage: AdvantageEstimator | None = None,
        coef: float = 1.0,
        gamma: float = 0.0,
        divergence: Divergence | None = None,
        divergence_top_k: int | None = None,
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        self.learns_rewards = advantage is not None
        super().__init__(actor, advantage=Reinforce() if advantage is None else advantage, kl=kl, **kwargs)
        served = {name: teacher for name, teacher in teachers.items() if isinstance(teacher, ServerTeacher)}
        self.teacher_names = list(teachers)
        self.teacher_servers = served
        self.teacher_specs = {
            name: ModelSpec.given(teacher) for name, teacher in teachers.items() if name not in served
        }
        self.teacher_column = teacher_column
        self.distill_coef = coef
        self.distill_gamma = gamma
        self.divergence = divergence
        self.divergence_top_k = divergence_top_k
        if len(teachers) > 1 and teacher_column is None:
            raise ValueError(
                f"teacher_column=None with teachers={sorted(teachers)}: each example needs a teacher. Set "
                "teacher_column."
            )
        if served and divergence is not None and divergence_top_k is None:
            raise ValueError(f"divergence_top_k=None with served teachers {sorted(served)}: set it, for example to 20.")

    def setup(self, stage: str) -> None:
        """Runs `PolicyGradientLightningModule.setup`, and rejects teachers with a different vocabulary."""
        super().setup(stage)
        if self.divergence is not None and shards_parameters(self.trainer.strategy):
            raise ValueError(
                f"divergence={type(self.divergence).__name__} with strategy={type(self.trainer.strategy).__name__}: "
                "needs the unsharded output layers of the student and the teacher. Use ddp or ZeRO 1 or 2, or "
                "divergence=None (null in YAML)."
            )
        for server in self.teacher_servers.values():
            server.check(self.actor_spec.path)
        own = AutoTokenizer.from_pretrained(self.actor_spec.path).get_vocab()
        for name, spec in self.teacher_specs.items():
            _require_vocabulary(name, spec.path, own, exact=self.divergence is not None)

    def build_models(self, in_shards: bool = False) -> None:
        super().build_models(in_shards)
        specs = self.teacher_specs.items()
        teachers = {name: PolicyModel.from_spec(spec, trainable=False, in_shards=in_shards) for name, spec in specs}
        self.teachers = nn.ModuleDict(teachers)

    def models(self) -> list[Any]:
        return [*super().models(), *self.teachers.values()]

    def evaluate_models(self, rollouts: Rollouts) -> ModelOutputs:
        """Adds the teachers' log-probs, or the numbers from which the update computes a divergence."""
        outputs, numbers = super().evaluate_models(rollouts), self._teacher_numbers(rollouts)
        if self.divergence is not None:
            outputs.row_extras[NUMBERS] = numbers
        else:
            if outputs.old_logprobs is None:
                outputs.old_logprobs = self._scores(self.actor, rollouts)
            outputs.token_extras[LOGPROBS] = torch.zeros_like(outputs.old_logprobs)
        for number, name in enumerate(self.teacher_names):
            rows = (numbers == number).nonzero().squeeze(1)
            if name in self.teacher_servers:
                self._ask_server(name, rollouts, rows, outputs)
            elif self.divergence is None:
                part = rollouts.select(rows if len(rows) else torch.zeros(1, dtype=torch.long))
                if not len(rows):  # all ranks must run sharded teachers
                    part.response_mask = torch.zeros_like(part.response_mask)
                part = replace(part, routes=[])  # the teacher routes tokens itself
                scores = self._scores(self.teachers[name], part)
                outputs.token_extras[LOGPROBS][rows.to(scores.device)] = scores[: len(rows)]
        return outputs

    def _ask_server(self, name: str, rollouts: Rollouts, rows: Tensor, outputs: ModelOutputs) -> None:
        """Writes a server's log-probs and top-k tokens for some rows to the outputs."""
        ids, lengths = rollouts.on_host("token_ids"), rollouts.on_host("attention_mask").sum(1).tolist()
        top, shape, extras = self.divergence_top_k or 0, tuple(rollouts.token_ids.shape), outputs.token_extras
        if rollouts.temperature != 1 or any(rollouts.inputs) or any(s is not None for s in rollouts.supports):
            raise ValueError(
                f"teachers[{name!r}]: served teachers score text at temperature 1 over the whole vocabulary. Use "
                "temperature 1 without top_p, top_k, min_p, and images, or an in-process teacher (a model directory)."
            )
        scored = extras.setdefault(LOGPROBS, torch.zeros(shape, device=rollouts.token_ids.device))
        if top:
            top_ids = extras.setdefault(TOP_IDS, torch.zeros(*shape, top, dtype=torch.long))
            top_logprobs = extras.setdefault(TOP_LOGPROBS, torch.zeros(*shape, top))
        numbers = rows.tolist()
        said = self.teacher_servers[name].scores([ids[row, : lengths[row]].tolist() for row in numbers], top)
        for row, scores in zip(numbers, said, strict=True):
            scored[row, 1 : lengths[row]] = torch.tensor(scores.logprobs).to(scored.device)
            if top:
                words = torch.tensor(scores.top, dtype=torch.float64)  # (n - 1, K, 2), float64 keeps IDs exact
                top_ids[row, 1 : lengths[row]] = words[..., 0].long()
                top_logprobs[row, 1 : lengths[row]] = words[..., 1].float()

    def _scores(self, model: Any, rows: Rollouts) -> Tensor:
        return self.batched(model, lambda x: {"logprobs": model(x).logprobs}, rows)["logprobs"]

    def _teacher_numbers(self, rollouts: Rollouts) -> Tensor:
        """Returns the (B,) index of each row's teacher, in host memory."""
        if self.teacher_column is None:
            return torch.zeros(len(rollouts), dtype=torch.long)
        named = [str(value) for value in rollouts.columns[self.teacher_column]]
        if unknown := sorted(set(named) - set(self.teacher_names)):
            raise ValueError(
                f"teacher_column={self.teacher_column!r}: {unknown[0]!r} is not one of the teachers "
                f"{sorted(self.teacher_names)}. Add it to teachers, or fix the data."
            )
        return torch.tensor([self.teacher_names.index(name) for name in named])

    def compute_advantages(self, rollouts: Rollouts, outputs: ModelOutputs) -> Advantages:
        """Adds the teachers' signal to the advantages of `PolicyGradientLightningModule`."""
        if self.learns_rewards:
            found = super().compute_advantages(rollouts, outputs)
        else:  # what remains is a KL penalty in the reward
            failed = torch.tensor(rollouts.failed, device=rollouts.rewards.device)
            unrewarded = replace(rollouts, rewards=torch.where(failed, torch.nan, 0.0), turn_rewards={})
            found = super().compute_advantages(unrewarded, outputs)
            found = replace(found, rewards=rollouts.rewards.nan_to_num(0.0))
        if self.divergence is not None:
            return found
        gap = _gap(rollouts.response_mask, outputs)
        layout = TrajectoryLayout(rollouts.trajectory_ids, rollouts.response_mask)
        gain = layout.split(returns_to_go(layout.join(gap), layout.mask, self.distill_gamma))
        return replace(found, advantages=found.advantages + self.distill_coef * gain * found.valid[:, None])

    def make_experience(self, rollouts: Rollouts) -> Experience:
        """Measures the distance to the teachers in addition to `PolicyGradientLightningModule.make_experience`."""
        experience = super().make_experience(rollouts)
        if self.divergence is None:
            sums = MetricSums()
            sums.add({"kl/teacher": -_gap(experience.response_mask, experience)}, experience.response_mask)
            experience.metrics |= self.means(sums)
        return experience

    def forward_policy(self, rows: Experience, **wanted: Any) -> dict[str, Tensor]:
        """Runs the policy; with a divergence, also computes each token's distance to its teacher."""
        if self.divergence is not None:
            wanted["divergence"] = partial(divergence_from, self._lessons(rows), self.divergence)
        return super().forward_policy(rows, **wanted)

    def _lessons(self, rows: Experience) -> list[Lesson]:
        device, width, lessons = rows.token_ids.device, rows.token_ids.shape[1], []
        for number, name in enumerate(self.teacher_names):
            own = (rows.row_extras[NUMBERS] == number).nonzero().squeeze(1)
            if not len(own):
                continue
            part = rows.select(own)
            teacher: Any = None if name in self.teacher_servers else self.teachers[name]
            lesson = self._served_lesson(part) if teacher is None else teach(teacher, part, self.divergence_top_k)
            targets = own.to(device)[lesson.targets // width] * width + lesson.targets % width
            lessons.append(Lesson(targets, lesson.states))
        return lessons

    def _served_lesson(self, rows: Experience) -> Lesson:
        """Returns what `_ask_server` recorded for the response tokens."""
        device = rows.token_ids.device
        targets = rows.on_host("response_mask").reshape(-1).nonzero().squeeze(1)
        top = (rows.token_extras[name] for name in (TOP_IDS, TOP_LOGPROBS))
        ids, logprobs = (x.flatten(0, 1)[targets].to(device) for x in top)
        return Lesson(targets.to(device), TopTokens(ids, logprobs))

    def policy_loss(self, rows: Experience, out: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the divergence, if any, to the loss of `PolicyGradientLightningModule`."""
        loss, metrics = super().policy_loss(rows, out)
        if self.divergence is None:
            return loss, metrics
        return loss + self.distill_coef * out["divergence"], {**metrics, "loss/teacher": out["divergence"].detach()}

    def skips_zero_advantages(self, rows: Experience) -> bool:
        """False with a divergence: every sequence then has a gradient."""
        return self.divergence is None and super().skips_zero_advantages(rows)

    def teardown(self, stage: str) -> None:
        """Closes the connections to served teachers."""
        super().teardown(stage)
        for server in self.teacher_servers.values():
            server.close()


def _gap(mask: Tensor, outputs: ModelOutputs) -> Tensor:
    """(B, T) log pi_teacher - log pi on the mask, 0 elsewhere."""
    assert outputs.old_logprobs is not None
    return torch.where(mask, outputs.token_extras[LOGPROBS] - outputs.old_logprobs, 0.0)


def _require_vocabulary(name: str, path: str, own: dict[str, int], *, exact: bool) -> None:
    """Raises a ValueError unless the teacher's tokenizer and model use the policy's ID for every token.

    With `exact`, the teacher must have no other tokens, since they would receive probability.
    """
    theirs = AutoTokenizer.from_pretrained(path).get_vocab()
    size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    differing = [token for token, i in own.items() if theirs.get(token) != i or i >= size]
    differing += sorted(set(theirs) - set(own)) if exact else []
    if differing:
        raise ValueError(
            f"teachers[{name!r}]={path!r}: its vocabulary differs from the policy's in {len(differing)} tokens, such "
            f"as {differing[0]!r}. Use a teacher of the policy's family."
        )
