"""The data module, which turns prompts into scored rollouts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn

from lightrl import engines
from lightrl.compat.arguments import imported
from lightrl.compat.lightning import KeepsHooks, require_data, run_seed
from lightrl.data.processing import load_processor
from lightrl.data.prompts import PromptMixture, PromptSet, PromptSource, prompt_source, rendered_like
from lightrl.data.templates import load_tokenizer
from lightrl.engines.base import Engine
from lightrl.environments.episodes import Episode, SingleTurn
from lightrl.records import Rollouts, RowBatch, SamplingParams
from lightrl.rewards.base import RewardSpec
from lightrl.rewards.scorer import RewardScorer
from lightrl.rollout.collector import collate, trajectory_metrics
from lightrl.rollout.learner import EngineHost, RolloutLearner
from lightrl.rollout.sampler import OnPolicy, RolloutSampler, SampledRollout, Schedule

if TYPE_CHECKING:
    from lightrl.data.curriculum import PromptCurriculum
    from lightrl.data.sft import PTXSource
    from lightrl.data.sft_loader import SFTLoader

log = logging.getLogger(__name__)

CLOSE_SECONDS = 2.5
"""Time limit for closing reward functions, the schedule, and episodes, each. The engine has a separate limit."""


@dataclass(frozen=True)
class Evaluation:
    """Prompts and settings for validation, test, and prediction.

    Args:
        prompts: Prompts for validation and test, in any form that the data module's `prompts` accepts. None disables
            evaluation. Pass a dictionary, {math: {path: ...}, code: {path: ...}}, for several sets, logged as
            `eval/<name>/...`. `system_prompt`, `chat_template`, and `template_kwargs` default to the training
            prompts.
        sampling: Sampling settings. Defaults to the training settings without `fire_temperature`.
        group_size: Number of completions per prompt. Values above 1 enable pass@k and maj@n.
        batch_size: Number of prompts per batch and rank.
        answer: Function, or its import path, that extracts the answer from a completion for `eval/maj@n`. Defaults to
            the reward functions' `extract_answer`, then the last `\\boxed{}` or `####`, then the whole text.
        predict_prompts: Prompts for `lightrl predict`, rendered like `prompts`. Defaults to `prompts`.
        success_reward: Minimum reward of a solved prompt in pass@k and maj@n.
    """

    prompts: (
        PromptSource | PromptMixture | dict[str, PromptSource | PromptMixture] | list[dict[str, Any]] | str | None
    ) = None
    sampling: SamplingParams | None = None
    group_size: int = 1
    batch_size: int = 64
    answer: Callable[[str], str | None] | str | None = None
    predict_prompts: PromptSource | PromptMixture | list[dict[str, Any]] | str | None = None
    success_reward: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.answer, str):
            object.__setattr__(self, "answer", imported("evaluation.answer", self.answer))

    def sources(self, training: Any) -> dict[str, PromptSource | PromptMixture]:
        """Returns the prompts by argument name, such as `evaluation.prompts.math`."""
        sets = self.prompts if isinstance(self.prompts, dict) else {"": self.prompts}
        named = {f"evaluation.prompts.{name}".rstrip("."): prompts for name, prompts in sets.items()}
        named["evaluation.predict_prompts"] = self.predict_prompts
        return {
            name: rendered_like(prompt_source(prompts), training)
            for name, prompts in named.items()
            if prompts is not None
        }


class RolloutDataModule(KeepsHooks, LightningDataModule):
    """Samples completions with the current policy, scores them, and returns one `Rollouts` per training batch.

    Training is strictly on-policy by default: each rollout is sampled when the training loop requests it, after the
    weights of the last update have been pushed to the engine. An engine with stale weights raises an error.

    Args:
        prompts: Training prompts: a `PromptSource`, `PromptMixture`, or `PromptCurriculum`, a path or dataset ID, a
            list of dictionaries, or a `datasets.Dataset`.
        rewards: List of reward functions: import paths (`package.module:function`, `file.py:function`) or configured
            classes. Pass a `RewardScorer` (in YAML a mapping with `functions`) to set weights, names, labels, and time
            limits. Optional if the episode or the module's reward models provide rewards.
        engine: Inference engine that generates completions. Defaults to in-process `VLLMEngine`.
        sampling: Sampling settings of training completions. The temperature must be above 0.
        episode: Episode type, such as `EnvironmentEpisode` or `AgentProgram`, whose rewards are added to those of
            `rewards`. Defaults to `SingleTurn`, one completion per trajectory.
        group_size: Number of trajectories per prompt, G. Defaults to the algorithm's: 1 for PPO, 8 for group
            algorithms.
        prompts_per_rollout: Number of prompts per rollout across all ranks, P. Must be a multiple of the world size.
        rollouts_per_epoch: Number of rollouts per Lightning epoch. None makes an epoch one pass over the prompts and
            fills the last rollout with the first prompts of the next pass.
        schedule: When rollouts are sampled: `OnPolicy`, `Ahead`, or `InFlight`. Defaults to `OnPolicy`.
        evaluation: Prompts and settings for validation, test, and prediction.
        ptx: Supervised examples for an auxiliary SFT loss (`ptx_coef` of the module). Defaults to None.
        dynamic_sampling_rounds: Maximum number of resampling rounds per rollout for dynamic sampling (DAPO). Each round
            replaces groups whose rewards are all equal with groups of new prompts. Dropped groups fill any remaining
            places, so the batch size is constant. 0 keeps every group.
        tokenizer: Tokenizer directory or model ID, also used for exports. Defaults to the actor's.
        stall_timeout: Seconds without progress in the engine, rewards, and environments after which the run stops and
            reports what it was waiting for. None waits forever.
        seed: Random seed of prompt order and sampling. Defaults to the seed of `seed_everything`.

    Raises:
        ValueError: If the training temperature is 0, or two arguments are incompatible.
    """

    kept_hooks = ("setup", "teardown", "on_exception")

    def __init__(
        self,
        prompts: PromptSource | PromptMixture | PromptCurriculum | list[dict[str, Any]] | str,
        rewards: list[RewardSpec] | RewardScorer | None = None,
        engine: Engine | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        episode: Episode | None = None,
        group_size: int | None = None,
        prompts_per_rollout: int = 32,
        rollouts_per_epoch: int | None = 10,
        schedule: Schedule | None = None,
        evaluation: Evaluation = Evaluation(),
        ptx: PTXSource | None = None,
        dynamic_sampling_rounds: int = 0,
        tokenizer: str | None = None,
        stall_timeout: float | None = 1800.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.prompts = prompt_source(prompts)
        self.engine: Engine = engines.VLLMEngine() if engine is None else engine
        self.sampling = sampling
        self.episode = SingleTurn() if episode is None else episode
        self.prompts_per_rollout = prompts_per_rollout
        self.rollouts_per_epoch = rollouts_per_epoch
        self.schedule = OnPolicy() if schedule is None else schedule
        self.evaluation = evaluation
        self.eval_sources = evaluation.sources(self.prompts)
        self.eval_sampling = evaluation.sampling or replace(sampling, fire_temperature=None)
        self.ptx = ptx
        self.dynamic_sampling_rounds = dynamic_sampling_rounds
        self.tokenizer_path = tokenizer
        self.stall_timeout = stall_timeout
        self.seed = run_seed() if seed is None else seed
        self.scorer = rewards if isinstance(rewards, RewardScorer) else RewardScorer(rewards) if rewards else None
        self.host = EngineHost(self)
        self.prompt_cursor = 0
        self.restored = False  # whether `load_state_dict` was called
        self._group_size = group_size
        self._sets: dict[str, PromptSet] = {}
        self._ptx_loader: SFTLoader | None = None
        self._sampler: RolloutSampler | None = None
        self.schedule.check(self)

    # ---- Lightning's hooks -------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return int(self.trainer.global_rank) if self.trainer is not None else 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return int(self.trainer.world_size) if self.trainer is not None else 1

    @property
    def learner(self) -> RolloutLearner:
        """The module that is trained on the rollouts."""
        return self.trainer.lightning_module  # type: ignore[union-attr, return-value]

    @property
    def group_size(self) -> int:
        """Number of trajectories per prompt."""
        return self.learner.default_group_size if self._group_size is None else self._group_size

    def setup(self, stage: str) -> None:
        """Loads the tokenizer and the prompts. The engine starts at the first rollout."""
        if self.prompts_per_rollout < 1 or self.prompts_per_rollout % self.world_size:
            raise ValueError(
                f"prompts_per_rollout={self.prompts_per_rollout}: {self.world_size} ranks can't share it. Use a "
                f"multiple of {self.world_size}."
            )
        if self.rollouts_per_epoch is not None and self.rollouts_per_epoch < 1:
            raise ValueError(f"rollouts_per_epoch={self.rollouts_per_epoch}: must be at least 1. Raise it.")
        module, spec = self.learner, self.learner.actor_spec
        if stage == "fit":
            self._check_learner(module)
        self.engine.check_sampling(self.eval_sampling, "evaluation.sampling", trained=False)
        self.tokenizer = load_tokenizer(self.tokenizer_path or spec.path, chat_template=spec.chat_template)
        self.processor = load_processor(spec.path, self.tokenizer)
        if spec.chat_template is not None:
            self.episode.check_template()
        self.episode.setup(self.tokenizer, self.processor)
        run = (self.seed, self.rank, self.world_size, self.tokenizer_path, spec.path, spec.chat_template)
        if run != self.host.run:  # another model, for example, needs other tokens
            self._sets, self._ptx_loader, self.host = {}, None, EngineHost(self, run)
        self._load_prompts(stage)
        if stage == "fit" and self.ptx is not None and self._ptx_loader is None:
            order = {"seed": self.seed, "rank": self.rank, "world_size": self.world_size}
            self._ptx_loader = self.ptx.loader(self.tokenizer, self.processor, **order)
        if not self.engine.started:
            self.engine.check(self.host.context())
        if stage == "fit":
            for check in self.host.checks():
                check.check_sampling(self.sampling)
            self.schedule.attach(self.sampler)

    def _load_prompts(self, stage: str) -> None:
        """Loads the prompts that a stage needs, unless already loaded, and checks their columns."""
        scorer, predicted = self.scorer, "evaluation.predict_prompts"
        wanted: dict[str, Any] = {name: source for name, source in self.eval_sources.items() if name != predicted}
        if stage == "fit":
            wanted["prompts"] = self.prompts
        elif stage == "predict" and predicted in self.eval_sources:
            wanted = {predicted: self.eval_sources[predicted]}
        for name, source in wanted.items():
            if name in self._sets:
                continue
            training = name == "prompts"
            self.episode.check_prompts(getattr(source, "source", source))
            opened = self._sets[name] = source.load(
                self.tokenizer,
                seed=self.seed,
                shuffle=training,
                processor=self.processor,
                room=self.room(self.sampling if training else self.eval_sampling),
            )
            if scorer is not None:
                for part in opened.sources:
                    labels = None if scorer.rewards_by_label is None else part.values(scorer.label_column)
                    columns = [*part.columns, "messages"] if self.episode.multi_turn else part.columns
                    scorer.check_source(columns, f"{part.spec.label} ({name})", labels, opened.columns)

    @property
    def engine_needs(self) -> dict[str, Any]:
        """Fields of `EngineContext` that follow from the run's prompts and settings."""
        new_tokens = max(self.sampling.max_new_tokens, self.eval_sampling.max_new_tokens)
        lengths: list[Any] = [prompts.max_prompt_tokens for prompts in self._sets.values()]
        if self.episode.multi_turn:  # later requests are longer than the prompt
            longest = self.episode.max_tokens
            lengths = [None if longest is None else max(longest - new_tokens, 1)]
        sequences = self.prompts_per_rollout // self.world_size * self.group_size
        if self.evaluation.prompts is not None:
            sequences = max(sequences, self.evaluation.batch_size * self.evaluation.group_size)
        return {
            "seed": self.seed,
            "max_prompt_tokens": None if None in lengths else max(lengths, default=None),
            "max_new_tokens": new_tokens,
            "max_sequences": sequences,
            "fire": any(s.fire_temperature is not None for s in (self.sampling, self.eval_sampling)),
            "keep_cache": self.schedule.keeps_cache,
        }

    def room(self, sampling: SamplingParams) -> tuple[int, int] | None:
        """Returns the maximum lengths of a sequence and a completion in tokens; None if unknown before the start."""
        if self.episode.multi_turn:  # the episode has limits
            return None
        try:
            longest = self.engine.known_model_len(self.learner.actor_spec.path)
        except (OSError, ValueError):  # the engine reports it when it starts
            return None
        return None if longest is None else (longest, sampling.max_new_tokens)

    def train_dataloader(self) -> RolloutLoader:
        """Returns the loader of one epoch of rollouts."""
        count = self.rollouts_per_epoch
        if count is None:
            count = -(-len(self._sets["prompts"]) // self.prompts_per_rollout)
        return RolloutLoader(self, count)

    def val_dataloader(self) -> list[EvalLoader]:
        """Returns a loader for each set of evaluation prompts."""
        sets = {name: opened for name, opened in self._sets.items() if name.startswith("evaluation.prompts")}
        require_data(self.trainer, "evaluation.prompts", sets)
        return [EvalLoader(self, name.removeprefix("evaluation.prompts").lstrip("."), sets[name]) for name in sets]

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> EvalLoader:
        """The prompts to complete."""
        prompts = self._sets.get("evaluation.predict_prompts") or self._sets.get("evaluation.prompts")
        if prompts is None:
            raise ValueError("evaluation.predict_prompts=None: prediction needs a single set of prompts. Set it.")
        return EvalLoader(self, "", prompts)

    def teardown(self, stage: str) -> None:
        """Stops sampling, the reward functions, and the engine, each within `CLOSE_SECONDS`."""
        sampler, self._sampler = self._sampler, None
        with ExitStack() as parts:  # closes all in reverse order, even if one raises
            parts.callback(self.engine.close)
            if self.scorer is not None:
                parts.callback(self.scorer.close, CLOSE_SECONDS)
            parts.callback(self.schedule.close, CLOSE_SECONDS)
            if sampler is not None:
                parts.callback(sampler.close, CLOSE_SECONDS)

    def on_exception(self, exception: BaseException) -> None:
        """Calls `teardown`, which Lightning skips after an error or Ctrl-C. Errors are logged, not raised."""
        try:
            self.teardown("fit")
        except Exception as error:
            log.warning("Cleanup after the run failed: %s: %s", type(error).__name__, error, exc_info=error)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of prompts, supervised data, curriculum, and schedule, equal on all ranks."""
        prompts = self._sets.get("prompts")
        return {
            "prompt_cursor": self.prompt_cursor,
            "seed": self.seed,
            "ptx": None if self._ptx_loader is None else self._ptx_loader.state_dict(),
            "curriculum": None if prompts is None else prompts.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes at the next prompt of the interrupted run."""
        self.restored = True
        if state_dict["seed"] != self.seed:
            self.seed, self._sampler = state_dict["seed"], None
            self.setup("fit")
        self.prompt_cursor = state_dict["prompt_cursor"]
        self.schedule.load_state_dict(state_dict.get("schedule"))
        if state_dict.get("curriculum") is not None:
            self._sets["prompts"].load_state_dict(state_dict["curriculum"])
        if self._ptx_loader is not None and state_dict.get("ptx") is not None:
            self._ptx_loader.load_state_dict(state_dict["ptx"])

    # ---- rollouts ----------------------------------------------------------------------------------------------

    @property
    def sampler(self) -> RolloutSampler:
        """The sampler of this run, created on first use."""
        if self._sampler is None:
            self._sampler = RolloutSampler(self, self._sets.get("prompts"))
        return self._sampler

    @property
    def progress(self) -> tuple[int, int, str] | None:
        """(finished prompts, total prompts, activity) of the current rollout; None between rollouts."""
        return None if self._sampler is None else self._sampler.progress

    def next_rollout(self, left: int = 0) -> Rollouts:
        """Returns the schedule's next training rollout; `left` after it limit how many are sampled in advance."""
        sampled, prompts, fields = self.schedule.next(self.prompt_cursor, left), self._sets["prompts"], dict[str, Any]()
        if sampled.version is not None:
            fields["policy_version"] = sampled.version
        if self._ptx_loader is not None:
            batch: dict[str, Any] = next(iter(self._ptx_loader))
            fields["supervised"] = RowBatch(**batch, group_ids=torch.arange(len(batch["token_ids"])))
        rewards = [(group.prompt.indices[0], group.rewards) for group in sampled.sampled]
        sampled.metrics |= prompts.observe(rewards, sampled.cursor)
        rollouts = self._laid_out(sampled, **fields)
        self.prompt_cursor = sampled.cursor  # last, so that an interrupted rollout is repeated
        return rollouts

    def evaluate(self, name: str, prompts: PromptSet, first: int) -> Rollouts:
        """Samples and scores a batch of evaluation prompts with the current policy.

        The name of the set ("" for a single one) and a prompt's index in it determine the random seeds.
        """
        end = min(first + self.evaluation.batch_size * self.world_size, len(prompts))
        rows = list(range(first, end)[self.rank :: self.world_size])
        own = prompts.rows(rows or [first])  # a rank without prompts repeats one, because evaluation is collective
        self.schedule.drain()
        size, stream = self.evaluation.group_size, f"eval/{name}".rstrip("/")
        sampled = self.sampler.evaluate(own, self.eval_sampling, size, stream, first)
        rollouts = self._laid_out(sampled, trained=False, eval_set=name, filler=not rows)
        if size == 1:
            return rollouts
        from lightrl.rewards.answers import final_answers

        return replace(rollouts, answers=final_answers(rollouts, self.scorer, self.evaluation.answer))

    def _laid_out(self, sampled: SampledRollout, *, trained: bool = True, **fields: Any) -> Rollouts:
        """Collates groups into `Rollouts` with additional fields, and puts the engine to sleep."""
        groups, sampling, pad = sampled.groups, sampled.sampling, self.tokenizer.pad_token_id
        rollouts = collate(groups, pad, sampling.temperature, sampling.masked_tokens if trained else 0)
        turns = trajectory_metrics(groups) if self.episode.multi_turn else {}
        self.engine.sleep()  # if configured, frees GPU memory for the trainer
        weights = {} if self.scorer is None else dict(self.scorer.weights)
        metrics = sampled.metrics | rollouts.metrics | turns
        return replace(rollouts, metrics=metrics, reward_weights=weights, **fields)

    # ---- checks ------------------------------------------------------------------------------------------------

    def _check_learner(self, module: RolloutLearner) -> None:
        """Rejects incompatible settings of the data module and the module."""
        rounds, size, scored = self.dynamic_sampling_rounds, self.group_size, self.scorer or self.episode.multi_turn
        self.engine.check_sampling(self.sampling, trained=True)
        if size < 2 and (module.needs_groups or rounds):
            raise ValueError(
                f"group_size={size} with {type(module).__name__}, dynamic_sampling_rounds={rounds}: a group of one has "
                "nothing to compare. Set it to 8."
            )
        if module.needs_rewards and not scored and not module.scores_rollouts:
            rank_zero_warn(
                f"rewards=null with {type(module).__name__} without reward_models: nothing scores the completions, so "
                "the policy learns nothing unless a callback or a subclass sets rewards. Set data.rewards."
            )
        if (rounds or hasattr(self.prompts, "success_reward")) and (not scored or (rounds and module.scores_rollouts)):
            raise ValueError(
                f"dynamic_sampling_rounds={rounds}, prompts={type(self.prompts).__name__}: rewards must be complete as "
                "soon as a rollout is sampled. Set rewards, or serve the reward model and use RemoteReward."
            )
        if (self.ptx is not None) != (module.ptx_coef > 0):
            raise ValueError(
                f"ptx={'None' if self.ptx is None else self.ptx.label} (data) with ptx_coef={module.ptx_coef} "
                "(module): the SFT loss needs both data and a coefficient above 0. Set both or neither."
            )


class RolloutLoader:
    """Train dataloader of one epoch that samples each rollout when Lightning requests it.

    It has a length because Lightning prefetches from loaders without one, which would make each rollout stale.
    """

    def __init__(self, data: Any, num_rollouts: int) -> None:
        self.num_rollouts = num_rollouts
        self.position = 0
        self._data = data
        self._resumed = False

    def __len__(self) -> int:
        return self.num_rollouts

    def __iter__(self) -> Iterator[Rollouts]:
        if not self._resumed:  # also after an epoch shortened by `limit_train_batches`
            self.position = 0
        self._resumed = False
        while self.position < self.num_rollouts:
            rollouts = self._data.next_rollout(self._left())
            self.position += 1
            yield rollouts

    def _left(self) -> int:
        """Number of rollouts after the next one in the last epoch; unlimited in earlier epochs."""
        trainer = self._data.trainer
        last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        return max(self._of_epoch() - self.position - 1, 0) if last_epoch else sys.maxsize

    def _of_epoch(self) -> int:
        """Number of rollouts that Lightning requests per epoch."""
        return int(min(self.num_rollouts, max(self._data.trainer.fit_loop.max_batches, 1)))

    def state_dict(self) -> dict[str, int]:
        """Returns the position in the epoch."""
        return {"position": self.position % self._of_epoch()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resumes within the epoch."""
        self.position, self._resumed = state_dict["position"], True


class EvalLoader:
    """Iterates once over a set of evaluation prompts of all ranks. All ranks get the same number of batches."""

    def __init__(self, data: Any, name: str, prompts: PromptSet) -> None:
        self._data = data
        self._name = name
        self._prompts = prompts
        self._starts = range(0, len(prompts), data.evaluation.batch_size * data.world_size)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Rollouts]:
        return (self._data.evaluate(self._name, self._prompts, first) for first in self._starts)
