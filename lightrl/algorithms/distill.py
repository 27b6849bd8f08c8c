"""On-policy distillation: teachers score the policy's own samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from lightrl.algorithms.experience import TrajectoryLayout
from lightrl.algorithms.ppo import policy_forward
from lightrl.algorithms.variants import CriticFreeLightningModule
from lightrl.compat.arguments import above, fraction
from lightrl.data.curriculum import PromptCurriculum
from lightrl.data.processing import encode_prompt
from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.data.templates import load_tokenizer
from lightrl.distributed import strategies
from lightrl.distributed.reduction import MetricSums
from lightrl.engines.server.teacher import ServerTeacher
from lightrl.models.loading import require_model
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.models.teachers import Lesson
from lightrl.objectives.divergences import Divergence
from lightrl.objectives.estimators import AdvantageEstimator, Reinforce
from lightrl.objectives.kl import KLPenalty
from lightrl.ops.advantages import returns_to_go
from lightrl.records import Advantages, Experience, ModelOutputs, Rollouts, SupervisedBatch, TopTokens
from lightrl.rollout.datamodule import RolloutDataModule

LOGPROBS, TOP_IDS, TOP_LOGPROBS = "teacher/logprobs", "teacher/top_ids", "teacher/top_logprobs"
"""Per token: the teacher's log-prob, and a served teacher's top-k tokens with their log-probs, (B, T, K)."""
NUMBERS, PROMPTS = "teacher/number", "teacher/prompt"
"""Per row: index of its teacher, and the token IDs that precede the first sampled token for the teacher."""


class DistillLightningModule(CriticFreeLightningModule):
    """On-policy distillation: trains the policy toward teachers on its own samples, with or without rewards.

        A_t = [advantage of the rewards] + coef * D_t,    D_t = d_t + gamma * D_{t+1}
        d_t = log pi_teacher(y_t | y_<t) - log pi(y_t | y_<t),    the negative sampled reverse KL

    With gamma 0, the gradient is that of KL(pi || pi_teacher) at the next token, summed over sampled prefixes that are
    held fixed. With gamma 1, it is the gradient of the KL over whole responses. Both are minimized by the teacher. With
    gamma 1 and a reward r, the optimum is `pi ~ pi_teacher * exp(r / coef)`. This holds for a Reinforce, RLOO, or
    GroupRelative(scale="none") `advantage`.

    With a `divergence`, each token's loss gets `coef * D(pi, pi_teacher)` at its prefix, prefixes held fixed. For
    `ReverseKL`, this is the exact value of what gamma 0 estimates from one sample. Teachers then run in every pass over
    a rollout. No (tokens, vocabulary) matrix is stored.

    Teachers are frozen. They score exactly the sampled tokens, at the sampling temperature and over the tokens left by
    top-p, top-k, and min-p. Metrics: `kl/teacher`, the mean of -d_t; with a divergence `loss/teacher`, its mean.

    Args:
        teachers: Teachers by name. Each is a model directory, a model ID, a `ModelSpec`, or a `ServerTeacher`, which
            scores at temperature 1 over the whole vocabulary. Teachers must use the policy's token IDs.
        teacher_column: Data column with the name of each example's teacher. Required with several teachers.
        advantage: Estimator for the data module's rewards. If None, rewards are only logged, and every trajectory that
            didn't fail is trained.
        coef: Weight of D_t or the divergence, above 0.
        gamma: Discount of later tokens' d_t, in [0, 1]. Must be 0 with a divergence.
        divergence: `ReverseKL`, `ForwardKL`, or `JensenShannon` over the whole vocabulary. Defaults to the sampled
            reverse KL.
        privileged_column: Data column with a prompt (a string or a conversation) that the teacher reads instead of the
            policy's, such as the question with its solution. With the policy's own model as teacher, this is
            self-distillation (OPSD). Requires a divergence over the whole vocabulary.
        divergence_top_k: Compare only the teacher's top-k tokens and the remaining probability. Defaults to the whole
            vocabulary.
        kl: Additional KL penalty against a reference.
        kwargs: Other arguments of `PPOLightningModule` except `critic`.

    Raises:
        ValueError: An argument is out of range or has no effect, or a teacher has another vocabulary. Also if a
            strategy shards models with a divergence, if an example names no teacher, or if a trajectory of several rows
            has a privileged prompt.

    Source: https://arxiv.org/abs/2306.13649 (on-policy distillation), https://arxiv.org/abs/2306.08543 (reverse KL by
        policy gradient), https://thinkingmachines.ai/blog/on-policy-distillation (per-token advantage, gamma 0),
        https://github.com/siyan-zhao/OPSD (privileged prompts; we don't clip each word's contribution).
    """

    default_group_size = 1
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
        privileged_column: str | None = None,
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        self.learns_rewards = advantage is not None
        super().__init__(actor, advantage=Reinforce() if advantage is None else advantage, kl=kl, **kwargs)
        served = {name: teacher for name, teacher in teachers.items() if isinstance(teacher, ServerTeacher)}
        self.teacher_names = list(teachers)
        self.teacher_servers = served
        self.teacher_specs = {
            name: ModelSpec.given(teacher, argument=f"teachers[{name!r}]")
            for name, teacher in teachers.items()
            if name not in served
        }
        self.teacher_column = teacher_column
        self.privileged_column = privileged_column
        self.distill_coef = above("DistillLightningModule.coef", coef)
        self.distill_gamma = fraction("DistillLightningModule.gamma", gamma)
        self.divergence = divergence
        self.divergence_top_k = divergence_top_k
        self._require_matching_teachers()
        self._require_settings_with_effect()

    def _require_matching_teachers(self) -> None:
        """Raises a ValueError for teachers that are ambiguous or can't provide the requested scores."""
        names, top_k, column = sorted(self.teacher_names), self.divergence_top_k, self.privileged_column
        kind = type(self.divergence).__name__
        if not names:
            raise ValueError("teachers={}: must not be empty. Pass at least one teacher, as name -> model.")
        if len(names) > 1 and self.teacher_column is None:
            raise ValueError(
                f"teacher_column=None with teachers={names}: each example needs a teacher. Set teacher_column."
            )
        if self.divergence is not None and self.distill_gamma:
            raise ValueError(
                f"gamma={self.distill_gamma} with divergence={kind}: a divergence is computed per token. Use gamma=0, "
                "or divergence=None (null in YAML)."
            )
        if top_k is not None and (self.divergence is None or top_k < 1):
            raise ValueError(f"divergence_top_k={top_k} with divergence={kind}: must be at least 1 with a divergence.")
        if self.teacher_servers and self.divergence is not None and top_k is None:
            raise ValueError(
                f"divergence={kind} with served teachers {sorted(self.teacher_servers)}: servers report only their top "
                "tokens. Set divergence_top_k (vLLM: at most its --max-logprobs, 20)."
            )
        if column is not None and (self.teacher_servers or self.divergence is None or top_k):
            raise ValueError(
                f"privileged_column={column!r}: needs a divergence, divergence_top_k=None, and in-process teachers. "
                "Change these settings, or remove privileged_column."
            )

    def _require_settings_with_effect(self) -> None:
        """Raises a ValueError for advantage or reward settings without an estimator."""
        if self.learns_rewards:
            return
        shaping, idle = self.shaping, {"reward_clip": self.shaping.reward_clip is not None}
        if self.divergence is not None:
            idle["whiten_advantages"] = self.whiten_advantages
            idle["advantage_clip"] = shaping.advantage_clip is not None
            idle["top_entropy_fraction"] = shaping.top_entropy_fraction < 1
        for name, found in idle.items():
            if found:
                extra = "" if self.divergence is None else f" and divergence={type(self.divergence).__name__}"
                raise ValueError(
                    f"{name}={getattr(shaping, name, True)} with advantage=None{extra}: has no effect. Leave it at "
                    "its default, or pass an advantage estimator for rewards."
                )

    def setup(self, stage: str) -> None:
        """Runs `PPOLightningModule.setup`, and rejects teachers with another vocabulary."""
        super().setup(stage)
        if self.privileged_column is not None:
            self._privileged_source()
        if self.divergence is not None and strategies.shards_parameters(self.trainer.strategy):
            raise ValueError(
                f"divergence={type(self.divergence).__name__} with strategy={type(self.trainer.strategy).__name__}: "
                "needs the unsharded output layers of student and teacher. Use ddp or ZeRO 1 or 2, or "
                "divergence=None (null in YAML)."
            )
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.teacher_servers and isinstance(data, RolloutDataModule):
            sampling = data.sampling
            cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
            if sampling.temperature != 1 or (cut and data.engine.records_support):
                raise ValueError(
                    f"sampling={sampling} with served teachers {sorted(self.teacher_servers)}: servers score at "
                    "temperature 1 over the whole vocabulary. Use temperature 1 without top_p, top_k, and min_p, or an "
                    "in-process teacher."
                )
        for server in self.teacher_servers.values():
            server.check(self.actor_spec.path)
        own = AutoTokenizer.from_pretrained(self.actor_spec.path).get_vocab()
        for name, spec in self.teacher_specs.items():
            require_model(spec)
            _require_vocabulary(name, spec.path, own, exact=self.divergence is not None)

    def build_models(self, in_shards: bool = False) -> None:
        super().build_models(in_shards)
        specs = self.teacher_specs.items()
        teachers = {name: PolicyModel.from_spec(spec, trainable=False, in_shards=in_shards) for name, spec in specs}
        self.teachers = nn.ModuleDict(teachers)

    def models(self) -> list[Any]:
        return [*super().models(), *self.teachers.values()]

    def evaluate_models(self, rollouts: Rollouts) -> ModelOutputs:
        """Adds the teachers' log-probs, or what they need in the update, to those of `PPOLightningModule`."""
        outputs = super().evaluate_models(rollouts)
        teachers = self._rows_of_teachers(rollouts)
        if self.divergence is not None:
            numbers = torch.zeros(len(rollouts), dtype=torch.long)
            for name, rows in teachers.items():
                numbers[rows] = self.teacher_names.index(name)
                if name in self.teacher_servers:
                    self._ask_server(name, rollouts, rows, outputs)
            outputs.row_extras[NUMBERS] = numbers
            if self.privileged_column is not None:
                outputs.row_extras[PROMPTS] = self._privileged_prompts(self.privileged_column, rollouts)
            return outputs
        if outputs.old_logprobs is None:
            outputs.old_logprobs = self._scores(self.actor, rollouts)
        outputs.token_extras[LOGPROBS] = torch.zeros_like(outputs.old_logprobs)
        for name, rows in teachers.items():
            if name in self.teacher_servers:
                self._ask_server(name, rollouts, rows, outputs)
                continue
            rows = rows.to(rollouts.token_ids.device)
            part = rollouts.select(rows if len(rows) else torch.zeros(1, dtype=torch.long, device=rows.device))
            if not len(rows):  # all ranks must run sharded teachers
                part.response_mask = torch.zeros_like(part.response_mask)
            scores = self._scores(self.teachers[name], part, routes=())  # the teacher routes tokens itself
            outputs.token_extras[LOGPROBS][rows] = scores[: len(rows)]
        return outputs

    def _ask_server(self, name: str, rollouts: Rollouts, rows: Tensor, outputs: ModelOutputs) -> None:
        """Writes a server's log-probs and top-k tokens of some rows to the outputs."""
        ids, lengths = rollouts.on_host("token_ids"), rollouts.on_host("attention_mask").sum(1).tolist()
        top, shape, extras = self.divergence_top_k or 0, tuple(rollouts.token_ids.shape), outputs.token_extras
        if any(rollouts.inputs):
            raise ValueError(
                f"teachers[{name!r}]: served teachers score only text, but prompts have images. Use an in-process "
                "teacher."
            )
        if rollouts.temperature != 1:  # a callback changed it after `setup`
            raise ValueError(
                f"sampling.temperature={rollouts.temperature} with served teacher {name!r}: servers score at "
                "temperature 1. Use temperature 1, or an in-process teacher (a model directory)."
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

    def _scores(self, model: Any, rows: Rollouts, **settings: Any) -> Tensor:
        out = self.batched(model, lambda x: {"logprobs": policy_forward(model, x, **settings)["logprobs"]}, rows)
        return out["logprobs"]

    def _rows_of_teachers(self, rollouts: Rollouts) -> dict[str, Tensor]:
        if self.teacher_column is None:
            return {name: torch.arange(len(rollouts)) for name in self.teacher_names}
        if self.teacher_column not in rollouts.columns:
            raise ValueError(
                f"teacher_column={self.teacher_column!r}: not in the data. Use one of {sorted(rollouts.columns)}."
            )
        named = [str(value) for value in rollouts.columns[self.teacher_column]]
        unknown = sorted(set(named) - set(self.teacher_names))
        if unknown:
            raise ValueError(
                f"teacher_column={self.teacher_column!r}: {unknown[0]!r} is not one of the teachers "
                f"{sorted(self.teacher_names)}. Add it to teachers, or fix the data."
            )
        return {
            name: torch.tensor([row for row, value in enumerate(named) if value == name], dtype=torch.long)
            for name in self.teacher_names
        }

    def compute_advantages(self, rollouts: Rollouts, outputs: ModelOutputs) -> Advantages:
        """Adds the teachers' part to the advantages of `PPOLightningModule`."""
        found = super().compute_advantages(rollouts, outputs)
        if not self.learns_rewards:
            valid = ~torch.tensor(rollouts.failed, device=found.valid.device)
            found = replace(found, advantages=torch.zeros_like(found.advantages), valid=valid)
        if self.divergence is not None:
            return found
        gap = _gap(rollouts.response_mask, outputs)
        layout = TrajectoryLayout(rollouts.trajectory_ids, rollouts.response_mask)
        gain = layout.split(returns_to_go(layout.join(gap), layout.mask, self.distill_gamma))
        return replace(found, advantages=found.advantages + self.distill_coef * gain * found.valid[:, None])

    def make_experience(self, rollouts: Rollouts) -> Experience:
        """Measures the distance to the teachers in addition to `PPOLightningModule.make_experience`."""
        experience = super().make_experience(rollouts)
        if self.divergence is None:
            sums = MetricSums()
            sums.add({"kl/teacher": -_gap(experience.response_mask, experience)}, experience.response_mask)
            experience.metrics |= self.means(sums)
        return experience

    def forward_policy(self, rows: Experience, **wanted: Any) -> dict[str, Tensor]:
        """Runs the policy; with a divergence, also computes each token's distance to its teacher."""
        if self.divergence is not None:
            wanted |= {"divergence": self.divergence, "lessons": self._lessons(rows)}
        return super().forward_policy(rows, **wanted)

    def _lessons(self, rows: Experience) -> list[Lesson]:
        device, width, lessons = rows.token_ids.device, rows.token_ids.shape[1], []
        for number, name in enumerate(self.teacher_names):
            own = (rows.row_extras[NUMBERS] == number).nonzero().squeeze(1)
            if not len(own):
                continue
            part = rows.select(own)
            lesson = self._served_lesson(part) if name in self.teacher_servers else self._own_lesson(name, part)
            targets = own.to(device)[lesson.targets // width] * width + lesson.targets % width
            lessons.append(Lesson(targets, lesson.states))
        return lessons

    def _own_lesson(self, name: str, rows: Experience) -> Lesson:
        """Returns an in-process teacher's distributions at positions of `rows`, even with another prompt."""
        teacher: Any = self.teachers[name]
        if PROMPTS not in rows.row_extras:
            lesson: Lesson = teacher.teach(rows, self.divergence_top_k)
            return lesson
        read, shifts = _with_other_prompts(rows)
        lesson = teacher.teach(read)
        width, own = read.token_ids.shape[1], rows.token_ids.shape[1]
        row = lesson.targets // width
        place = (lesson.targets % width - shifts.to(row.device)[row]).clamp(min=0)
        return Lesson(row * own + place, lesson.states)

    def _privileged_prompts(self, column: str, rollouts: Rollouts) -> list[list[int]]:
        """Returns the token IDs that teachers read before each row's first sampled token."""
        if column not in rollouts.columns:
            raise ValueError(f"privileged_column={column!r}: not in the data. Use one of {sorted(rollouts.columns)}.")
        if any(rollouts.inputs):
            raise ValueError(
                f"privileged_column={column!r}: can't replace prompts with images. Remove privileged_column."
            )
        if len(rollouts.trajectory_ids.unique()) < len(rollouts):
            raise ValueError(
                f"privileged_column={column!r}: a trajectory has several rows because its history was rewritten. Use a "
                "chat template that keeps the history, or remove privileged_column."
            )
        data, source = self.trainer.datamodule, self._privileged_source()  # type: ignore[attr-defined]
        if isinstance(data, RolloutDataModule):
            tokenizer, processor = data.tokenizer, data.processor
        else:
            tokenizer = load_tokenizer(self.actor_spec.path, chat_template=self.actor_spec.chat_template)
            processor = None
        found = []
        of_rows = {name: rollouts.columns[name] for name in source.rendering_columns if name in rollouts.columns}
        for i, prompt in enumerate(rollouts.columns[column]):
            row = {name: values[i] for name, values in of_rows.items()}
            try:
                encoded, _ = encode_prompt(prompt, row, source, tokenizer, processor)
            except ValueError as error:
                raise ValueError(f"privileged_column={column!r}: {error}") from error
            if encoded.inputs:
                raise ValueError(
                    f"privileged_column={column!r}: a prompt has images, which the teacher can't read. Remove them."
                )
            found.append(encoded.token_ids)
        return found

    def _privileged_source(self) -> PromptSource:
        """Returns the prompt source whose settings render privileged prompts.

        Raises:
            ValueError: There are several sources with different settings.
        """
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, RolloutDataModule):
            return PromptSource(rows=[{}])  # default settings
        prompts = data.prompts.source if isinstance(data.prompts, PromptCurriculum) else data.prompts
        first, *others = prompts.sources if isinstance(prompts, PromptMixture) else [prompts]
        for name in ("system_prompt", "chat_template", "template_kwargs", "tools_column"):
            for other in others:
                if getattr(other, name) != getattr(first, name):
                    raise ValueError(
                        f"privileged_column={self.privileged_column!r} with sources whose {name} differ "
                        f"({getattr(first, name)!r} and {getattr(other, name)!r}): an example doesn't record its "
                        "source. Use the same value in all sources, or write the difference into the prompts."
                    )
        return first

    def _served_lesson(self, rows: Experience) -> Lesson:
        """Returns what `_ask_server` recorded for the response tokens."""
        device = rows.token_ids.device
        targets = rows.on_host("response_mask").reshape(-1).nonzero().squeeze(1)
        top = (rows.token_extras[name] for name in (TOP_IDS, TOP_LOGPROBS))
        ids, logprobs = (x.flatten(0, 1)[targets].to(device) for x in top)
        return Lesson(targets.to(device), TopTokens(ids, logprobs))

    def policy_loss(self, rows: Experience, out: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the divergence, if any, to the loss of `PPOLightningModule`."""
        loss, metrics = super().policy_loss(rows, out)
        if self.divergence is None:
            return loss, metrics
        return loss + self.distill_coef * out["divergence"], {**metrics, "loss/teacher": out["divergence"].detach()}

    @property
    def needs_rewards(self) -> bool:
        """False: teachers score the completions."""
        return False

    def skips_zero_advantages(self, rows: Experience) -> bool:
        """False with a divergence: every sequence then has a gradient."""
        return self.divergence is None and super().skips_zero_advantages(rows)

    def teardown(self, stage: str) -> None:
        """Closes the connections to served teachers."""
        super().teardown(stage)
        for server in self.teacher_servers.values():
            server.close()


def _with_other_prompts(rows: Experience) -> tuple[SupervisedBatch, Tensor]:
    """Replaces the prompts with the teachers' own; also returns the offset of each row's sampled tokens."""
    ids, lengths = rows.on_host("token_ids"), rows.on_host("attention_mask").sum(1).tolist()
    response = rows.on_host("response_mask")
    firsts = torch.where(response.any(1), response.int().argmax(1), torch.tensor(lengths)).tolist()
    parts = list(zip(rows.row_extras[PROMPTS], firsts, lengths, strict=True))
    width = max(len(prompt) + length - first for prompt, first, length in parts)
    token_ids = torch.zeros(len(parts), width, dtype=torch.long)
    attention, sampled = (torch.zeros(len(parts), width, dtype=torch.bool) for _ in range(2))
    for row, (prompt, first, length) in enumerate(parts):
        begin, end = len(prompt), len(prompt) + length - first
        token_ids[row, :end] = torch.tensor([*prompt, *ids[row, first:length].tolist()])
        attention[row, :end] = True
        sampled[row, begin:end] = response[row, first:length]
    shifts = torch.tensor([len(prompt) - first for prompt, first, _ in parts])
    device = rows.token_ids.device
    read = SupervisedBatch(
        token_ids, attention_mask=attention, response_mask=sampled, group_ids=rows.on_host("group_ids")
    )
    return read.to(device), shifts


def _gap(mask: Tensor, outputs: ModelOutputs | Experience) -> Tensor:
    """(B, T) log pi_teacher - log pi on the mask, 0 elsewhere."""
    assert outputs.old_logprobs is not None
    return torch.where(mask, outputs.token_extras[LOGPROBS] - outputs.old_logprobs, 0.0)


def _require_vocabulary(name: str, path: str, own: dict[str, int], *, exact: bool) -> None:
    """Raises a ValueError unless the teacher's tokenizer and model know every token of the policy by the same ID.

    With `exact`, the teacher must have no other tokens, since they would get probability.
    """
    theirs = AutoTokenizer.from_pretrained(path).get_vocab()
    differing = sorted((i, token) for token, i in own.items() if theirs.get(token) != i)
    size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    more = sorted(set(theirs) - set(own)) if exact else []
    if differing:
        i, token = differing[0]
        wrong = f"{len(differing)} of the policy's {len(own)} tokens are missing or have another ID, such as {token!r} "
        wrong += f"({i} here, {theirs.get(token)} there)"
    elif size <= max(own.values()):
        wrong = f"its head has {size} tokens, fewer than the {max(own.values()) + 1} IDs of the policy's tokenizer"
    elif more:
        wrong = f"{len(more)} tokens are missing in the policy's vocabulary, such as {more[0]!r}"
    else:
        return
    fix = "Use a teacher of the policy's family" + (", or divergence=None (null in YAML)." if more else ".")
    raise ValueError(f"teachers[{name!r}]={path!r}: its vocabulary differs from the policy's: {wrong}. {fix}")
