"""Prompts in, scored rollouts out: the data module that owns the engine and the reward functions."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightrl.compat.arguments import above, imported, instance_of, whole_number
from lightrl.compat.jsonargparse import deferred, realized
from lightrl.compat.lightning import run_seed
from lightrl.data.curriculum import CurriculumSet, PromptCurriculum
from lightrl.data.processing import load_processor
from lightrl.data.prompts import PromptMixture, PromptSet, PromptSource, prompt_source, rendered_like
from lightrl.data.sft import SFTLoader, SFTSource
from lightrl.data.templates import load_tokenizer
from lightrl.distributed.fsdp2 import FSDP2Strategy
from lightrl.distributed.strategies import gather_objects
from lightrl.engines.base import Engine, StaleWeightsError
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.environments.episodes import Episode, SingleTurn, Task, request_seed
from lightrl.models.loading import positions_of, require_vocabulary
from lightrl.models.multimodal import adapts_media
from lightrl.models.turns import ending_turns
from lightrl.records import (
    Completion,
    EngineContext,
    GenerationRequest,
    Prompts,
    Rollouts,
    SamplingParams,
    SupervisedBatch,
)
from lightrl.rewards.base import RewardSpec
from lightrl.rewards.extract import extract_boxed, extract_gsm8k
from lightrl.rewards.scorer import OWN_NAMES, RewardScorer
from lightrl.rollout.collation import ScoredGroup, collate, trajectory_metrics
from lightrl.rollout.collector import LEAVE_SECONDS, Collection, Collector
from lightrl.rollout.dynamic_sampling import refill
from lightrl.rollout.learner import RolloutLearner
from lightrl.rollout.loaders import EvalLoader, RolloutLoader
from lightrl.rollout.progress import show_in_bar
from lightrl.rollout.sources import CollectedRollout, InFlight, InFlightSource, StaleSource
from lightrl.rollout.sync import EngineSync, TrajectoryCheck
from lightrl.rollout.weight_sync import WeightSync

log = logging.getLogger(__name__)

CLOSE_SECONDS = 7.0
"""How long the end of a run waits for threads, reward functions and an engine of its own process, together."""

PRECISION_TO_DTYPE = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float32", "transformer": "bfloat16"}


class RolloutDataModule(LightningDataModule):
    """Samples completions with the current policy, scores them, and hands Lightning one `Rollouts` per batch.

    Strictly on-policy unless `staleness` says otherwise: each rollout is generated when the training loop asks for it,
    after the weights of the last update have been pushed; the engine is asked for its `policy_version` and a mismatch
    raises.

    Args:
        prompts: where training prompts come from: a source, several mixed, one with a `PromptCurriculum`, or just the
            rows: a path or hub name, a list of dictionaries, a `datasets.Dataset`.
        rewards: reward functions: import paths (`package.module:function`, `file.py:function`) or configured classes.
        engine: what samples. The default is vLLM in this process.
        sampling: how training completions are sampled; temperature above 0.
        episode: how the attempts at a prompt come about: one completion each by default; over many turns
            `EnvironmentEpisode` or `AgentProgram`, whose rewards are added to those of `rewards`, which may be empty.
        group_size: G, attempts per prompt; None takes the algorithm's own (PPO 1, group algorithms 8).
        prompts_per_rollout: P, prompts in one rollout, over all ranks; must be a multiple of their number.
        rollouts_per_epoch: rollouts in one Lightning epoch; None makes an epoch one pass over the prompts, the last
            rollout filled up with the first prompts of the next pass.
        shuffle: a new order of the prompts in every pass; False keeps the order of the rows.
        dynamic_sampling_rounds: Maximum number of further generations per rollout for dynamic sampling (DAPO): groups
            whose completions all got the same reward are replaced by groups of further prompts. Groups still
            missing after that are filled with dropped ones, so the batch keeps its size. 0 keeps every group.
        staleness: how many rollouts the engine may sample ahead of the update, while the policy learns from earlier
            ones: a rollout is sampled by weights that lack the updates of at most this many rollouts. 0 is strictly
            on-policy, 1 hides the shorter of generation and update behind the longer. Needs an engine in processes of
            its own.
        in_flight: with `staleness`, change the weights within completions instead of between rollouts: each is begun
            by a policy that lacks the updates of at most `staleness` rollouts and continues with newer ones. Needs an
            engine that resumes suspended requests (`VLLMEngine`); {} for the defaults.
        ptx: supervised rows for a second loss (`ptx_coef` of the module); None without one.
        ptx_batch_size: supervised rows per rollout and rank, shared by its mini-batches.
        reward_weights: weight of each reward function; 1 for each where None.
        reward_names: name of each in logs and rewards_by_label; the function's or class's own where None.
        rewards_by_label: label -> list of (reward name, weight): rows of different labels use different functions.
        label_column: column that holds a row's label, for `rewards_by_label`.
        reward_timeout: seconds one call of a reward function may take; None waits for ever.
        reward_concurrency: most calls of one reward function at a time; its own `max_concurrency` wins.
        on_reward_error: `error` stops the run when a reward function raises or times out; `none` leaves its rows
            unscored by it and counts them.
        eval_prompts: Prompts for validation and test, given as `prompts`; without them there is no validation. Several
            sets by name, {math: {path: ...}, code: {path: ...}}, are logged as `eval/<name>/...`. They are rendered as
            `prompts` are: `system_prompt`, `chat_template`, and variables in `template_kwargs` that they do not set
            themselves are those of `prompts`. The same holds for `predict_prompts`.
        eval_sampling: how evaluation completions are sampled; `sampling` without its `fire_temperature` where None.
        eval_group_size: completions per evaluation prompt; above 1 gives pass@k and majority.
        eval_batch_size: evaluation prompts per batch and rank.
        eval_answer: Function or import path that finds the answer in a completion, for `eval/maj@n`. Defaults to
            the reward functions' `extract_answer`, then the last `\\boxed{}` or `####`, then the whole text.
        predict_prompts: prompts for `lightrl predict`; `eval_prompts` where None.
        tokenizer: folder or hub name, which exports get too; the actor's own where None.
        stall_timeout: seconds, above 0, without progress of engine, rewards and environments after which a rollout
            stops the run with what it waits for; None waits for ever.
        seed: of prompt order and sampling; None takes that of `seed_everything`. A run with the same seed repeats.

    Raises:
        ValueError: counts that do not fit, temperature 0 in training; the message names them.
    """

    def __init__(
        self,
        prompts: PromptSource | PromptMixture | PromptCurriculum | list[dict[str, Any]] | str,
        rewards: list[RewardSpec] | None = None,
        engine: Engine = deferred(VLLMEngine),  # noqa: B008
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        episode: Episode = deferred(SingleTurn),  # noqa: B008
        group_size: int | None = None,
        prompts_per_rollout: int = 32,
        rollouts_per_epoch: int | None = 10,
        shuffle: bool = True,
        dynamic_sampling_rounds: int = 0,
        staleness: int = 0,
        in_flight: InFlight | None = None,
        ptx: SFTSource | None = None,
        ptx_batch_size: int = 32,
        reward_weights: list[float] | None = None,
        reward_names: list[str] | None = None,
        rewards_by_label: dict[str, list[tuple[str, float]]] | None = None,
        label_column: str = "label",
        reward_timeout: float | None = None,
        reward_concurrency: int = 32,
        on_reward_error: Literal["error", "skip"] = "error",
        eval_prompts: PromptSource
        | PromptMixture
        | dict[str, PromptSource | PromptMixture]
        | list[dict[str, Any]]
        | str
        | None = None,
        eval_sampling: SamplingParams | None = None,
        eval_group_size: int = 1,
        eval_batch_size: int = 64,
        eval_answer: Callable[[str], str | None] | str | None = None,
        predict_prompts: PromptSource | PromptMixture | list[dict[str, Any]] | str | None = None,
        tokenizer: str | None = None,
        stall_timeout: float | None = 1800.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(rewards, str) or callable(rewards):
            raise ValueError(f"rewards={rewards!r}: give a list of reward functions, also of one.")
        self.prompts = prompts if isinstance(prompts, PromptCurriculum) else prompt_source(prompts, "prompts")
        named = eval_prompts if isinstance(eval_prompts, dict) else {"": eval_prompts}
        self.eval_prompts = {
            name: rendered_like(prompt_source(source, f"eval_prompts.{name}".rstrip(".")), self.prompts)
            for name, source in named.items()
            if source is not None
        }
        self.predict_prompts = None
        if predict_prompts is not None:
            self.predict_prompts = rendered_like(prompt_source(predict_prompts, "predict_prompts"), self.prompts)
        self.engine = realized(engine, "engine", Engine)
        self.episode = realized(episode, "episode", Episode)
        self.sampling = realized(sampling, "sampling", SamplingParams)
        instance_of("eval_sampling", eval_sampling, SamplingParams, or_none="to sample as in training")
        self.eval_sampling = eval_sampling or replace(sampling, fire_temperature=None)
        self.eval_group_size = eval_group_size
        self.eval_batch_size = eval_batch_size
        self.eval_answer = imported("eval_answer", eval_answer) if isinstance(eval_answer, str) else eval_answer
        self.prompts_per_rollout = prompts_per_rollout
        self.rollouts_per_epoch = rollouts_per_epoch
        self.shuffle = shuffle
        self.dynamic_sampling_rounds = dynamic_sampling_rounds
        self.staleness = staleness
        self.in_flight = instance_of("in_flight", in_flight, InFlight, or_none="for changes between rollouts only")
        self.ptx = instance_of("ptx", ptx, SFTSource, or_none="for no supervised rows")
        self.ptx_batch_size = ptx_batch_size
        self.tokenizer_path = tokenizer
        self.stall_timeout = stall_timeout
        self.seed = run_seed() if seed is None else seed
        self.prompt_cursor = 0
        self._group_size = group_size
        self._sets: dict[str, PromptSet] = {}
        self._ptx_loader: SFTLoader | None = None
        self._collector: Collector | None = None
        self._stale_source: StaleSource | InFlightSource | None = None
        self._begun: list[dict[str, Any]] = []
        self._side_group: Any = None
        self._default_sync = WeightSync()
        self._check_arguments(rewards=bool(rewards))
        # Without functions the rewards come from the module's reward models alone.
        self.scorer = (
            None
            if not rewards
            else RewardScorer(
                rewards,
                weights=reward_weights,
                names=reward_names,
                rewards_by_label=rewards_by_label,
                label_column=label_column,
                timeout=reward_timeout,
                max_concurrency=reward_concurrency,
                on_reward_error=on_reward_error,
            )
        )

    # ---- Lightning's hooks -------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process among all."""
        return int(self.trainer.global_rank) if self.trainer is not None else 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return int(self.trainer.world_size) if self.trainer is not None else 1

    @property
    def learner(self) -> RolloutLearner:
        """The module that learns from the rollouts."""
        module = None if self.trainer is None else self.trainer.lightning_module
        if not isinstance(module, RolloutLearner):
            raise ValueError(
                f"RolloutDataModule feeds modules that derive from RolloutLearner (PPOLightningModule does), not "
                f"{type(module).__name__}."
            )
        return module

    @property
    def group_size(self) -> int:
        """Attempts per prompt: as given, else the algorithm's own."""
        return self.learner.default_group_size if self._group_size is None else self._group_size

    def setup(self, stage: str) -> None:
        """Loads tokenizer and prompts; the engine starts later, at the first rollout."""
        if self.prompts_per_rollout % self.world_size:
            raise ValueError(
                f"prompts_per_rollout={self.prompts_per_rollout} cannot be shared by {self.world_size} ranks: take a "
                f"multiple of {self.world_size}."
            )
        module = self.learner
        if stage == "fit":
            self._check_learner(module)
        self.engine.check_sampling(self.eval_sampling, "eval_sampling", trained=False)
        spec = module.actor_spec
        self.tokenizer = load_tokenizer(self.tokenizer_path or spec.path, chat_template=spec.chat_template)
        self._check_vocabularies(module)
        self.processor = load_processor(spec.path, self.tokenizer)
        self._check_stop_tokens()
        if spec.chat_template is not None:
            self.episode.check_template()
        self.episode.setup(self.tokenizer, self.processor)
        self._load_prompts(stage)
        of_episodes = ("messages",) if self.episode.multi_turn else ()
        for name in self._used_sets(stage):
            self._sets[name].require_free([*OWN_NAMES, *of_episodes, *(["prompt"] if of_episodes else [])])
            if self.scorer is not None:
                self._check_scored(self.scorer, name, of_episodes)
        if stage == "fit" and self.ptx is not None and self._ptx_loader is None:
            rows = self.ptx.tokenized(self.tokenizer, self.processor, positions_of(spec.path))
            pad = self.tokenizer.pad_token_id
            self._ptx_loader = SFTLoader(
                rows, self.ptx_batch_size, pad, seed=self.seed, rank=self.rank, world_size=self.world_size
            )
        if not self.engine.started:
            self.engine.check(self._engine_context())

    def _used_sets(self, stage: str) -> list[str]:
        """Names of the prompts that a stage completes."""
        if stage != "predict":
            return [name for name in self._sets if name != "predict_prompts" and (stage == "fit" or name != "prompts")]
        names: list[str] = ["predict_prompts", "eval_prompts/"]
        return [name for name in names if name in self._sets][:1]

    def _check_scored(self, scorer: RewardScorer, name: str, of_episodes: Sequence[str]) -> None:
        """Refuses prompts without the columns that the reward functions of their rows need."""
        opened = self._sets[name]
        for source in opened.sources:
            labels = source.values(scorer.label_column) if scorer.rewards_by_label is not None else None
            columns = [*source.columns, *of_episodes]
            scorer.check_source(columns, f"{source.spec.label} ({name.rstrip('/')})", labels, opened.columns)

    def _load_prompts(self, stage: str) -> None:
        """Opens the prompts that a stage needs and that are not open yet."""
        sources: dict[str, PromptSource | PromptMixture | PromptCurriculum] = {
            f"eval_prompts/{name}": source for name, source in self.eval_prompts.items()
        }
        if stage == "fit":
            sources["prompts"] = self.prompts
        elif stage == "predict" and self.predict_prompts is not None:
            sources["predict_prompts"] = self.predict_prompts
        scorer = self.scorer
        labelled = scorer is not None and scorer.rewards_by_label is not None
        for name, source in sources.items():
            if name not in self._sets:
                self.episode.check_prompts(source.source if isinstance(source, PromptCurriculum) else source)
                self._sets[name] = source.load(
                    self.tokenizer,
                    seed=self.seed,
                    shuffle=self.shuffle and name == "prompts",
                    processor=self.processor,
                    check_column=scorer.label_column if scorer is not None and labelled else None,
                    check_row=scorer.check_label if scorer is not None and labelled else None,
                    room=self._room(self.sampling if name == "prompts" else self.eval_sampling),
                )

    def _room(self, sampling: SamplingParams) -> tuple[int, int] | None:
        """Tokens that a sequence of the engine holds, and those of its completion; None where it is not known."""
        if self.episode.multi_turn:  # whose own limits say what happens then
            return None
        try:
            longest = self.engine.known_model_len(self.learner.actor_spec.path)
        except (OSError, ValueError):  # the engine says it better when it starts
            return None
        return None if longest is None else (longest, sampling.max_new_tokens)

    def train_dataloader(self) -> RolloutLoader:
        """One epoch of rollouts."""
        assert self.trainer is not None, "Lightning has attached its trainer"
        one_pass = self.rollouts_per_epoch is None
        count = -(-len(self._sets["prompts"]) // self.prompts_per_rollout) if one_pass else self.rollouts_per_epoch
        assert count is not None
        return RolloutLoader(self.next_rollout, count, self.trainer)

    def val_dataloader(self) -> list[EvalLoader]:
        """The evaluation prompts, a loader for each set; nothing without them."""
        return [self._eval_loader(self._sets[f"eval_prompts/{name}"], name) for name in self.eval_prompts]

    def test_dataloader(self) -> list[EvalLoader]:
        """As `val_dataloader`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> EvalLoader:
        """The prompts to complete."""
        prompts = self._sets.get("predict_prompts") or self._sets.get("eval_prompts/")
        if prompts is None:
            raise ValueError(
                "predict_prompts is missing, and eval_prompts too or several by name: give the prompts to complete."
            )
        return self._eval_loader(prompts)

    def _eval_loader(self, prompts: PromptSet, name: str = "") -> EvalLoader:
        evaluate = partial(self._evaluate, name=name)
        return EvalLoader(evaluate, prompts, self.eval_batch_size, self.rank, self.world_size)

    def _evaluate(self, prompts: Prompts, first: int, name: str) -> Rollouts:
        stream = f"eval/{name}".rstrip("/")
        rollouts = self.rollout(prompts, self.eval_sampling, self.eval_group_size, stream=stream, cursor=first)
        rollouts.eval_set = name
        if self.eval_group_size > 1:
            rollouts.answers = self._answers(rollouts)
        return rollouts

    def _answers(self, rollouts: Rollouts) -> list[str]:
        """What each completion votes for: its answer, or its whole text where nothing finds one."""
        labels: list[Any] = [None] * len(rollouts)
        ways: list[Callable[[str, Any], str | None]] = [lambda text, label: extract_boxed(text) or extract_gsm8k(text)]
        if self.scorer is not None:
            labels = rollouts.columns.get(self.scorer.label_column, labels)
            ways.insert(0, self.scorer.extract_answer)
        if (own := self.eval_answer) is not None:
            ways.insert(0, lambda text, label: own(text))
        return [
            next((answer for way in ways if (answer := way(text, label)) is not None), text.strip())
            for text, label in zip(rollouts.completions, labels, strict=True)
        ]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a record's tensors; shows the module a training rollout before callbacks get it."""
        moved = batch.to(device)
        trainer: Any = self.trainer
        if isinstance(moved, Rollouts) and trainer is not None and trainer.training:
            self.learner.note_rewards(moved)
        return moved

    def teardown(self, stage: str) -> None:
        """Ends what samples, the reward workers and the engine, also after an error or Ctrl-C.

        What hangs is given a few seconds, which all parts share.
        """
        end = time.monotonic() + CLOSE_SECONDS

        def left() -> float:
            return max(end - time.monotonic(), 0.5)

        collector, stale = self._collector, self._stale_source
        self._collector = self._stale_source = None
        stuck = True  # unless its end tells otherwise
        try:
            stuck = collector is not None and collector.close(LEAVE_SECONDS / 2)
        finally:  # whatever raises, all are closed
            try:
                if stale is not None:
                    stale.stop(LEAVE_SECONDS / 2)
            finally:
                self._close_engine(stuck, left)

    def _close_engine(self, stuck: bool, left: Callable[[], float]) -> None:
        """Ends the reward workers and the engine, beside one another where the engine may hang."""
        beside = stuck or self.engine.concurrent  # it hangs, or waits for processes that may
        failed: list[Exception] = []

        def close() -> None:
            try:
                self.engine.close()
            except Exception as error:
                failed.append(error)

        closing = threading.Thread(target=close, name="lightrl-closing", daemon=True)
        if beside:
            closing.start()
        try:
            if self.scorer is not None:
                self.scorer.close(min(LEAVE_SECONDS, left()))
        finally:
            if beside:
                closing.join(left())
            else:
                close()
            if failed:
                raise failed[0]
        if closing.is_alive():
            name = type(self.engine).__name__
            log.warning("%s did not close within %g s and is left behind.", name, CLOSE_SECONDS)

    def on_exception(self, exception: BaseException) -> None:
        """As `teardown`, which Lightning leaves out when a run ends with an error or Ctrl-C.

        What goes wrong here is logged, so that the run's own error stays its last word.
        """
        try:
            self.teardown("fit")
        except Exception as error:
            log.warning("The end of the run was not clean: %s: %s", type(error).__name__, error, exc_info=error)

    def state_dict(self) -> dict[str, Any]:
        """The position in prompts and supervised rows, and what a curriculum has seen, the same on every rank."""
        ptx = None if self._ptx_loader is None else self._ptx_loader.state_dict()
        prompts = self._sets.get("prompts")
        learnt = prompts.state_dict() if isinstance(prompts, CurriculumSet) else None
        state = {"prompt_cursor": self.prompt_cursor, "seed": self.seed, "ptx": ptx, "curriculum": learnt}
        return state if self.in_flight is None else state | {"in_flight": self._in_flight_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues with the prompts and rows that were next, in the order of the run that was interrupted."""
        if state_dict["seed"] != self.seed:
            self.seed, self._ptx_loader = state_dict["seed"], None
            self._sets.clear()
            self.setup("fit")
        self.prompt_cursor = state_dict["prompt_cursor"]
        self._begun = state_dict.get("in_flight", [])
        prompts = self._sets.get("prompts")
        if isinstance(prompts, CurriculumSet) and state_dict.get("curriculum") is not None:
            prompts.load_state_dict(state_dict["curriculum"])
        if self._ptx_loader is not None and state_dict.get("ptx") is not None:
            self._ptx_loader.load_state_dict(state_dict["ptx"])

    def _in_flight_state(self) -> list[dict[str, Any]]:
        """What every rank has sampled of the rollouts under way. Collective."""
        source = self._stale_source
        parts = gather_objects([source.state_dict()] if isinstance(source, InFlightSource) else [self._begun])
        flights = [part for own in parts for part in own]
        return [
            same[0] | {"sampled": {seed: done for part in same for seed, done in part["sampled"].items()}}
            for same in zip(*flights, strict=True)
        ]

    # ---- rollouts ----------------------------------------------------------------------------------------------

    def next_rollout(self, left: int = 0) -> Rollouts:
        """Samples and scores the next prompts: with the current policy, or ahead of it where `staleness` allows.

        Args:
            left: rollouts that will be asked for after this one; no more are sampled ahead.
        """
        if self.staleness:
            collected = self._stale().next(self.prompt_cursor, left)
        else:
            own = self._own_prompts(self.prompt_cursor)
            self._show(own)
            sync = self._ready_engine()
            sampling = self._training_sampling()
            collected = self._collect_rollout(self.prompt_cursor, sampling, gather_objects, recover=True, own=own)
            collected.metrics["time/sync"] = sync
        rollouts = self._assemble(collected.groups, collected.sampling)
        rollouts.metrics |= collected.metrics
        if collected.version is not None:
            rollouts.policy_version = collected.version
        if self._ptx_loader is not None:
            batch: dict[str, Any] = next(iter(self._ptx_loader))
            rollouts.supervised = SupervisedBatch(**batch, group_ids=torch.arange(len(batch["token_ids"])))
        prompts = self._sets["prompts"]
        if isinstance(prompts, CurriculumSet):
            rollouts.metrics |= prompts.observe(self._visits(prompts.spec, collected.sampled), collected.cursor)
        self.prompt_cursor = collected.cursor  # last, so that a rollout which is interrupted leaves no trace
        return rollouts

    def rollout(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, *, stream: str, cursor: int
    ) -> Rollouts:
        """Samples `group_size` attempts at each prompt with the current policy and scores them.

        Args:
            prompts: this rank's prompts.
            sampling: the distribution.
            group_size: attempts per prompt.
            stream: Name that keeps the random numbers of training and evaluation apart. If it begins with "eval", the
                rows are not for training: no token is masked.
            cursor: number of prompts before this rollout, in the same stream; part of the random seeds.
        """
        self.drain()
        self._show(prompts)
        trained = not stream.startswith("eval")
        sync = self._ready_engine()
        seeds = self._seeds(prompts, cursor, stream)
        collection = self._start(prompts, sampling, group_size, seeds, trained=trained)
        rollouts = self._assemble(collection.finish(), sampling, trained=trained)
        rollouts.metrics |= {**collection.seconds, "time/sync": sync}
        return rollouts

    def _training_sampling(self) -> SamplingParams:
        """The settings of a rollout that begins now. Callbacks may change `sampling`: later ones then differ.

        Raises:
            ValueError: the trainer would score another distribution than tokens are drawn from.
        """
        sampling = self.sampling
        self.engine.check_sampling(sampling, trained=True)
        if sampling.masked_tokens >= sampling.max_new_tokens:
            name = "min_new_tokens" if sampling.min_new_tokens else "fire_temperature"
            raise ValueError(
                f"sampling.{name}={getattr(sampling, name)} with max_new_tokens={sampling.max_new_tokens}: the first "
                f"{sampling.masked_tokens} tokens of a completion are not trained, so none is left. Raise "
                "max_new_tokens; `ignore_eos` makes completions of a fixed length."
            )
        return sampling

    def drain(self) -> None:
        """Waits until nothing is sampled in the background any more, so that others may use the engine."""
        if self._stale_source is not None:
            self._stale_source.drain()

    def _collect_rollout(
        self,
        first: int,
        sampling: SamplingParams,
        gather: Callable[[int], list[int]],
        *,
        recover: bool,
        begun: Collection | None = None,
        own: Prompts | None = None,
    ) -> CollectedRollout:
        """The training rollout that starts with prompt number `first`, or has `begun`; the engine must be ready."""
        count, metrics = self.prompts_per_rollout, {"time/generate": 0.0, "time/score": 0.0}
        retried, sampled = 0, list[ScoredGroup]()

        def collect(collection: Collection) -> list[ScoredGroup]:
            nonlocal retried
            groups = collection.finish()
            for name, seconds in collection.seconds.items():
                metrics[name] += seconds
            retried += collection.retried
            sampled.extend(groups)
            return groups

        def collect_more(start: int, offset: int, count: int) -> list[ScoredGroup]:
            seeds = [request_seed(self.seed, "train", start, offset + i) for i in range(count)]
            return collect(start_with(self._sets["prompts"].batch(start + offset, count), seeds))

        def start_with(prompts: Prompts, seeds: list[int]) -> Collection:
            return self._start(prompts, sampling, self.group_size, seeds, recover=recover, trained=True)

        if begun is None:
            own = self._own_prompts(first) if own is None else own
            begun = start_with(own, self._seeds(own, first))
        groups, cursor = collect(begun), first + count
        if self.dynamic_sampling_rounds:
            groups, cursor, refilled = refill(
                groups, cursor, self.dynamic_sampling_rounds, collect=collect_more, gather=gather, rank=self.rank
            )
            metrics |= refilled
        if self.episode.multi_turn:
            metrics["rollout/retried"] = float(retried)
        self._check_trajectories(groups, sampling)
        return CollectedRollout(groups, cursor, {**metrics, **self._prompt_counts()}, sampling, sampled=sampled)

    def _visits(self, spec: PromptCurriculum, groups: list[ScoredGroup]) -> list[tuple[int, float]]:
        """(data-set row, share of attempts that succeeded) of every rank's groups. Collective."""
        own = []
        for group in groups:
            rewards = [reward for reward in group.rewards if not math.isnan(reward)]
            if rewards:
                succeeded = sum(reward >= spec.success_reward for reward in rewards)
                own.append((group.prompt.indices[0], succeeded / len(rewards)))
        return [visit for visits in gather_objects(own) for visit in visits]

    def _stale(self) -> StaleSource | InFlightSource:
        """What samples ahead; made when first asked for. Collective then."""
        if self._stale_source is None and self.in_flight is not None:
            self._stale_source = InFlightSource(
                self.staleness,
                self.in_flight,
                self._begin_rollout,
                self._ready_engine,
                lambda: self.learner.policy_version,
                prompts=self.prompts_per_rollout,
            )
            self._stale_source.load_state_dict(self._begun)
        if self._stale_source is None:
            # The thread's collectives must not meet the trainer's.
            if self.world_size > 1 and self.dynamic_sampling_rounds:
                self._side_group = torch.distributed.new_group(backend="gloo")
            gather = partial(gather_objects, group=self._side_group)
            self._stale_source = StaleSource(
                self.staleness,
                lambda cursor, sampling: self._collect_rollout(cursor, sampling, gather, recover=False),
                self._training_sampling,
                self._ready_engine,
                lambda: self.learner.policy_version,
                self.world_size,
            )
        return self._stale_source

    def _begin_rollout(
        self,
        first: int,
        begun: dict[int, list[Completion]],
        sampling: SamplingParams | None,
    ) -> tuple[Collection, Callable[[], CollectedRollout]]:
        """Starts the training rollout with that first prompt; it, and what waits for its end."""
        own = self._own_prompts(first)
        seeds = self._seeds(own, first)
        settings = sampling or self._training_sampling()
        collection = self._start(own, settings, self.group_size, seeds, recover=False, begun=begun, trained=True)
        finish = partial(self._collect_rollout, first, settings, gather_objects, recover=False, begun=collection)
        return collection, finish

    def _own_prompts(self, first: int) -> Prompts:
        """This rank's share of the training rollout that starts with prompt number `first`."""
        prompts = self._sets["prompts"]
        return prompts.batch(first, self.prompts_per_rollout, rank=self.rank, world_size=self.world_size)

    def _prompt_counts(self) -> dict[str, float]:
        counts = self._sets["prompts"].counts
        return {f"rollout/prompts_{name}": float(number) for name, number in counts.items()}

    def _seeds(self, prompts: Prompts, cursor: int, stream: str = "train") -> list[int]:
        return [request_seed(self.seed, stream, cursor, i * self.world_size + self.rank) for i in range(len(prompts))]

    def _show(self, prompts: Prompts) -> None:
        """Tells what pushes weights of prompts that are about to be sampled."""
        if not any(prompts.media):
            for sync in self._syncs():
                sync.show_prompts(prompts.token_ids)
        elif not self.episode.multi_turn:  # several turns may begin with something else
            i = next(i for i, media in enumerate(prompts.media) if media)
            self._show_media(prompts.request(i, self.sampling, 0, 1))

    def _show_media(self, request: GenerationRequest) -> None:
        for sync in self._syncs():
            sync.show_media(request)

    def _start(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, seeds: list[int], **how: Any
    ) -> Collection:
        """Starts the groups of this rank's prompts, as `Collector.start` says; the engine must be ready."""
        self._show(prompts)
        if self.scorer is not None:
            self.scorer.set_progress(self._progress())
        sampling = ending_turns(sampling, self.tokenizer)
        if self._collector is None:
            self._collector = Collector(
                self.engine,
                self.episode,
                self.scorer,
                ready=self._ready_engine,
                world_size=self.world_size,
                stall_timeout=self.stall_timeout,
                show=partial(show_in_bar, self.trainer),
                asks_with_media=self._show_media,
            )
        tasks = [
            Task(
                prompts[[i]],
                tuple(range(group_size)),
                seeds[i],
                sampling,
                self.tokenizer,
                self.engine.max_model_len,
                name=f"prompt {i} (data-set row {prompts.indices[i]})" if prompts.indices else f"prompt {i}",
            )
            for i in range(len(prompts))
        ]
        return self._collector.start(tasks, **how)

    def _assemble(self, groups: list[ScoredGroup], sampling: SamplingParams, *, trained: bool = True) -> Rollouts:
        pad: Any = self.tokenizer.pad_token_id
        masked_tokens = sampling.masked_tokens if trained else 0
        rollouts = collate(groups, pad, sampling.temperature, masked_tokens=masked_tokens)
        rollouts.reward_weights = {} if self.scorer is None else dict(self.scorer.weights)
        if self.episode.multi_turn:
            rollouts.metrics |= trajectory_metrics(groups)
        if not self.staleness:
            self.engine.sleep()  # its memory is the trainer's until the next rollout, for engines that are told so
        return rollouts

    # ---- the engine --------------------------------------------------------------------------------------------

    def _ready_engine(self) -> float:
        """Starts the engine if need be, pushes the weights, and refuses to go on with others than the policy's.

        Returns:
            the seconds it took.
        """
        begin = time.perf_counter()
        if not self.engine.started:
            rank_zero_info(f"Starting {type(self.engine).__name__} with {self.learner.actor_spec.name} ...")
            self.engine.start(self._engine_context())
            rank_zero_info(f"{type(self.engine).__name__} started in {time.perf_counter() - begin:.1f} s.")
        self.engine.wake()
        self.learner.note_weight_changes()
        for callback in self._syncs():
            callback.ensure_synced(self.learner, self.engine)
        if self.engine.policy_version != self.learner.policy_version:
            raise StaleWeightsError(
                f"The engine holds policy version {self.engine.policy_version} (-1: never synced), the trainer "
                f"{self.learner.policy_version}: {', '.join(type(c).__name__ for c in self._syncs())} did not push "
                "the weights. Leave it out of trainer.callbacks for WeightSync, which does."
            )
        return time.perf_counter() - begin

    def _syncs(self) -> list[EngineSync]:
        return [callback for callback in self._callbacks() if isinstance(callback, EngineSync)] or [self._default_sync]

    def _checks(self) -> list[TrajectoryCheck]:
        return [callback for callback in self._callbacks() if isinstance(callback, TrajectoryCheck)]

    def _callbacks(self) -> list[Any]:
        return [] if self.trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]

    def _check_trajectories(self, groups: Sequence[ScoredGroup], sampling: SamplingParams) -> None:
        """Shows a training rollout to callbacks that look at it while the engine holds what sampled it.

        Engines are asked about tokens alone, so prompts with media are left out.
        """
        trajectories = [t for group in groups if not any(group.prompt.media) for t in group.trajectories]
        for callback in self._checks():
            callback.check_sampling(sampling)
            callback.check_trajectories(self.engine, trajectories, self.tokenizer)

    def _progress(self) -> float:
        """Rollouts done of all those of the run; 0 where it is no training, or has no end that can be counted."""
        trainer: Any = self.trainer
        if trainer is None or trainer.state.fn != "fit" or not isinstance(trainer.num_training_batches, int):
            return 0.0
        total = trainer.num_training_batches * (trainer.max_epochs or 0)
        return min((trainer.fit_loop.total_batch_idx + 1) / total, 1.0) if total > 0 else 0.0

    def _engine_context(self) -> EngineContext:
        """What the run tells the engine."""
        trainer: Any = self.trainer
        spec = self.learner.actor_spec
        new_tokens = max(self.sampling.max_new_tokens, self.eval_sampling.max_new_tokens)
        if self.episode.multi_turn:  # a prompt is only the beginning of what is asked
            longest = self.episode.max_tokens
            lengths = [None if longest is None else max(longest - new_tokens, 1)]
        else:
            lengths = [prompts.max_prompt_tokens for prompts in self._sets.values()]
        known = [length for length in lengths if length is not None]
        sequences = [self.prompts_per_rollout // self.world_size * self.group_size]
        sequences += [self.eval_batch_size * self.eval_group_size] * bool(self.eval_prompts)
        computed = trainer.strategy.param_dtype if isinstance(trainer.strategy, FSDP2Strategy) else None
        return EngineContext(
            model_path=spec.path,
            dtype=computed or PRECISION_TO_DTYPE[str(trainer.precision).split("-")[0]],
            seed=self.seed,
            rank=self.rank,
            local_rank=int(trainer.local_rank),
            world_size=self.world_size,
            device=str(trainer.strategy.root_device),
            max_prompt_tokens=max(known) if known and len(known) == len(lengths) else None,
            max_new_tokens=new_tokens,
            max_sequences=max(sequences),
            random_init=bool(spec.random_init),
            fire=any(s.fire_temperature is not None for s in (self.sampling, self.eval_sampling)),
            keep_cache=self.in_flight is not None and self.in_flight.cache == "keep",
            long_rope=spec.long_rope,
            lora_rank=self._adapter_rank(),
        )

    def _adapter_rank(self) -> int:
        """Rank of the adapter that an engine may put on the folder's weights; 0 for merged weights."""
        lora, actor = self.learner.actor_spec.lora, getattr(self.learner, "actor", None)
        if lora is None or lora.quantize_4bit:
            return 0
        # Engines leave out adapters of a vision tower
        return 0 if actor is not None and adapts_media(actor.lm) else lora.r

    # ---- checks, which change nothing --------------------------------------------------------------------------

    def _check_arguments(self, *, rewards: bool) -> None:
        """Refuses numbers out of range, and arguments that need others."""
        counts = {
            "group_size": 1 if self._group_size is None else self._group_size,
            "eval_group_size": self.eval_group_size,
            "prompts_per_rollout": self.prompts_per_rollout,
            "rollouts_per_epoch": 1 if self.rollouts_per_epoch is None else self.rollouts_per_epoch,
            "eval_batch_size": self.eval_batch_size,
            "ptx_batch_size": self.ptx_batch_size,
        }
        for name, value in counts.items():
            whole_number(name, value, 1)
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: must be from 0 to 2**63 - 1.")
        whole_number("dynamic_sampling_rounds", self.dynamic_sampling_rounds)
        whole_number("staleness", self.staleness)
        above("stall_timeout", self.stall_timeout, note=" seconds", or_none="(null) to wait for ever")
        if self.dynamic_sampling_rounds and not (rewards or self.episode.multi_turn):
            raise ValueError(
                f"dynamic_sampling_rounds={self.dynamic_sampling_rounds} drops groups without reward spread: it "
                "needs reward functions in "
                "`rewards`, whose results are known before the update."
            )
        if isinstance(self.prompts, PromptCurriculum):
            if self.staleness:
                raise ValueError(
                    f"staleness={self.staleness} with PromptCurriculum: the next prompts depend on how the last ones "
                    "went, which is not known while they are sampled. Use one of the two."
                )
            if not (rewards or self.episode.multi_turn):
                raise ValueError(
                    "PromptCurriculum without `rewards`: it picks prompts by rewards that are known when a rollout has "
                    "been sampled. Give reward functions, or serve the reward model as one (RemoteReward)."
                )
        self._check_overlap()

    def _check_in_flight(self) -> None:
        """Refuses what the weights cannot change within."""
        self.engine.check_in_flight()
        refused = {
            "staleness=0": (self.staleness == 0, "nothing is sampled while the weights change; set it to 1 or more"),
            f"dynamic_sampling_rounds={self.dynamic_sampling_rounds}": (
                self.dynamic_sampling_rounds > 0,
                "prompts are begun ahead, before it is known how many the refills take; drop one of the two",
            ),
        }
        for name, (found, reason) in refused.items():
            if found:
                raise ValueError(f"in_flight with {name}: {reason}.")

    def _check_overlap(self) -> None:
        """Rejects what `staleness` cannot do with the engine."""
        if self.in_flight is not None:
            self._check_in_flight()
        if not self.staleness:
            return
        wanted = f"staleness={self.staleness}"
        if not self.engine.concurrent:
            raise ValueError(
                f"{wanted} with engine={type(self.engine).__name__} in the trainer's process: it cannot sample while "
                "the trainer computes. Take VLLMEngine(in_process=False), or leave it off."
            )
        if self.engine.sleeps:
            raise ValueError(
                f"{wanted} with an engine={type(self.engine).__name__} that sleeps between rollouts: one that samples "
                "beside the update never does. Set its sleep_level=0."
            )

    def _check_learner(self, module: RolloutLearner) -> None:
        """Refuses what the data module and the module that it feeds cannot do together."""
        name = type(module).__name__
        self._training_sampling()
        if module.needs_groups and self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} with {name}: its advantages compare the attempts at one prompt, so it "
                "needs group_size of at least 2 (8 is usual)."
            )
        module.refuse_group_size(self.group_size)
        if module.needs_rewards and self.scorer is None and not (self.episode.multi_turn or module.scores_rollouts):
            rank_zero_warn(
                f"rewards=null with {name} without reward_models: nothing scores the completions, so the policy learns "
                "nothing unless a callback or a subclass gives rewards. Name functions in data.rewards."
            )
        if self.dynamic_sampling_rounds and self.group_size < 2:
            raise ValueError(
                f"dynamic_sampling_rounds={self.dynamic_sampling_rounds} drops groups without reward spread: it "
                f"needs group_size of at least 2 (it is {self.group_size})."
            )
        if self.dynamic_sampling_rounds and module.scores_rollouts:
            raise ValueError(
                f"dynamic_sampling_rounds={self.dynamic_sampling_rounds} with reward_models: a group's spread is "
                "not known before the module's "
                "reward models have scored it. Set dynamic_sampling_rounds=0, or serve the model as a reward function."
            )
        if (self.ptx is not None) != (module.ptx_coef > 0):
            raise ValueError(
                f"ptx={'None' if self.ptx is None else self.ptx.label} (data) with ptx_coef={module.ptx_coef} "
                "(module): a supervised loss needs both, rows and a coefficient above 0; set both or neither."
            )
        for callback in self._checks():
            callback.check_sampling(self.sampling)
            if self.in_flight is not None:
                raise ValueError(
                    f"in_flight with callback {type(callback).__name__}: the engine no longer holds the weights that "
                    "sampled a trajectory when it is over. Remove the callback; LogprobMonitor compares in the trainer."
                )

    def _check_vocabularies(self, module: RolloutLearner) -> None:
        """Refuses models that would read tokens for which they have no embedding."""
        critic = getattr(module, "critic_spec", None)
        scored = [spec for spec in getattr(module, "reward_model_specs", ()) if spec.tokenizer == "policy"]
        reading = [module.actor_spec, getattr(module, "reference_spec", None), getattr(critic, "model", None), *scored]
        for path in {spec.path: None for spec in reading if spec is not None}:
            require_vocabulary(self.tokenizer, path)

    def _check_stop_tokens(self) -> None:
        """Refuses ids beyond the vocabulary, which no completion would ever end with."""
        given = {"sampling": self.sampling, "eval_sampling": self.eval_sampling}
        for name, sampling in given.items():
            most = max(sampling.stop_token_ids or [-1])
            if most >= len(self.tokenizer) and most > (last := max(self.tokenizer.get_vocab().values())):
                raise ValueError(
                    f"{name}.stop_token_ids={sampling.stop_token_ids}: the tokenizer's last token is {last}, so that "
                    f"nothing would end with {most}."
                )
