"""Prompts in, scored rollouts out: the data module that owns the engine and the reward functions.

Letters: P prompts, G completions per prompt, B = P * G sequences, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jsonargparse import lazy_instance
from lightning.pytorch import LightningDataModule

from lightrl.data.ahead import Ahead
from lightrl.data.checks import check_arguments, check_module
from lightrl.data.generation import engine_context, ready_engine, sample_groups
from lightrl.data.loaders import EvalLoader, RolloutLoader
from lightrl.data.processing import load_processor
from lightrl.data.prompts import PromptMixture, PromptSet, PromptSource
from lightrl.data.sampled import Draft, Sampled, build_rollouts, gather_numbers, refill, request_seed
from lightrl.data.sft import SFTLoader, SFTSource
from lightrl.data.streamed import StreamedRollouts, stream_rollout
from lightrl.data.templates import load_tokenizer
from lightrl.engines.base import Engine
from lightrl.engines.vllm import VLLMEngine
from lightrl.rewards.base import RewardSpec
from lightrl.rewards.scorer import RewardScorer, Scores
from lightrl.types import CompletionGroup, Prompts, Rollouts, SamplingParams, SupervisedBatch, realized, run_seed

__all__ = ["EvalLoader", "RolloutDataModule", "RolloutLoader"]

LEAVE_SECONDS = 5.0
"""How long the end of a run waits for a background thread to leave the engine."""


class RolloutDataModule(LightningDataModule):
    """Samples completions with the current policy, scores them, and hands Lightning one `Rollouts` per batch.

    Strictly on-policy unless `staleness` says otherwise: each rollout is generated when the training loop asks for it,
    after the weights of the last update have been pushed; the engine is asked for its `policy_version` and a mismatch
    raises.

    Args:
        prompts: where training prompts come from.
        rewards: reward functions: import paths (`package.module:function`, `file.py:function`) or configured classes.
        engine: what samples. The default is vLLM in this process.
        sampling: how training completions are sampled; temperature above 0.
        group_size: G, completions per prompt.
        prompts_per_rollout: P, prompts in one rollout, over all ranks; must be a multiple of their number.
        rollouts_per_epoch: rollouts in one Lightning epoch.
        max_refills: dynamic sampling (DAPO): groups whose completions all got the same reward are dropped and replaced
            by those of further prompts, in at most this many further generations per rollout; then the batch is
            completed with dropped groups, so that it keeps its size. Spread is that of the summed reward functions.
            0 keeps every group.
        staleness: how many rollouts the engine may sample ahead of the update, while the policy learns from earlier
            ones: a rollout is sampled by weights that lack the updates of at most so many rollouts. 0 is strictly
            on-policy, 1 hides the shorter of generation and update behind the longer. Needs an engine in processes of
            its own.
        off_policy_correction: with `staleness`, wrap the module's loss in `OffPolicyCorrection` unless it reads the
            engine's log-probs already. False leaves the loss as it is.
        streaming: strictly on-policy overlap: the module accumulates gradients of finished groups while others still
            generate; the update is the same. Needs an engine in processes of its own, and a module whose rollout
            makes one update from groups that do not depend on one another, which is checked.
        ptx: supervised rows for a second loss (`ptx_coef` of the module); None without one.
        ptx_batch_size: supervised rows per rollout and rank, shared by its mini-batches.
        reward_weights: weight of each reward function; 1 for each where None.
        reward_names: name of each in logs and recipes; the function's or class's own where None.
        recipes: label -> list of (reward name, weight): rows of different labels use different functions.
        label_column: column that holds a row's label, for `recipes`.
        reward_timeout: seconds one call of a reward function may take; None waits for ever.
        reward_concurrency: most calls of one reward function at a time; its own `max_concurrency` wins.
        on_reward_error: `error` stops the run when a reward function raises or times out; `none` leaves its rows
            unscored by it and counts them.
        eval_prompts: prompts for validation and test; without them there is no validation.
        eval_sampling: how evaluation completions are sampled; `sampling` where None.
        eval_group_size: completions per evaluation prompt; above 1 gives pass@k and majority.
        eval_batch_size: evaluation prompts per batch and rank.
        predict_prompts: prompts for `lightrl predict`; `eval_prompts` where None.
        tokenizer: folder or hub name; the actor's own where None.
        seed: of prompt order and sampling; None takes that of `seed_everything`. A run with the same seed repeats.

    Raises:
        ValueError: counts that do not fit, temperature 0 in training; the message names them.
    """

    def __init__(
        self,
        prompts: PromptSource | PromptMixture,
        rewards: list[RewardSpec] | None = None,
        engine: Engine = lazy_instance(VLLMEngine),  # noqa: B008
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        group_size: int = 1,
        prompts_per_rollout: int = 32,
        rollouts_per_epoch: int = 10,
        max_refills: int = 0,
        staleness: int = 0,
        off_policy_correction: bool = True,
        streaming: bool = False,
        ptx: SFTSource | None = None,
        ptx_batch_size: int = 32,
        reward_weights: list[float] | None = None,
        reward_names: list[str] | None = None,
        recipes: dict[str, list[tuple[str, float]]] | None = None,
        label_column: str = "label",
        reward_timeout: float | None = None,
        reward_concurrency: int = 32,
        on_reward_error: Literal["error", "none"] = "error",
        eval_prompts: PromptSource | PromptMixture | None = None,
        eval_sampling: SamplingParams | None = None,
        eval_group_size: int = 1,
        eval_batch_size: int = 64,
        predict_prompts: PromptSource | PromptMixture | None = None,
        tokenizer: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.prompts, self.eval_prompts, self.predict_prompts = prompts, eval_prompts, predict_prompts
        self.engine, self.sampling, self.eval_sampling = realized(engine), sampling, eval_sampling or sampling
        self.group_size, self.eval_group_size = group_size, eval_group_size
        self.prompts_per_rollout, self.rollouts_per_epoch = prompts_per_rollout, rollouts_per_epoch
        self.eval_batch_size, self.tokenizer_path = eval_batch_size, tokenizer
        self.seed = run_seed() if seed is None else seed
        self.max_refills, self.ptx, self.ptx_batch_size = max_refills, ptx, ptx_batch_size
        self.staleness, self.off_policy_correction, self.streaming = staleness, off_policy_correction, streaming
        self._ahead: Ahead | None = None
        self._stream: StreamedRollouts | None = None
        self._side_group: Any = None
        self._ptx_loader: SFTLoader | None = None
        self.ensure_synced: Callable[[], None] | None = None
        self.prompt_cursor = 0
        self._sets: dict[str, PromptSet] = {}
        check_arguments(self, rewards=bool(rewards))
        # Without functions the rewards come from the module's reward models alone.
        self.scorer = (
            None
            if not rewards
            else RewardScorer(
                rewards,
                weights=reward_weights,
                names=reward_names,
                recipes=recipes,
                label_column=label_column,
                timeout=reward_timeout,
                max_concurrency=reward_concurrency,
                on_error=on_reward_error,
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

    def setup(self, stage: str) -> None:
        """Loads tokenizer and prompts; the engine starts later, at the first rollout."""
        if self.prompts_per_rollout % self.world_size:
            raise ValueError(
                f"prompts_per_rollout={self.prompts_per_rollout} cannot be shared by {self.world_size} ranks: take a "
                f"multiple of {self.world_size}."
            )
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        if stage == "fit":
            check_module(self, module)
        self.tokenizer = load_tokenizer(self.tokenizer_path or module.actor_spec.path)
        self.processor = load_processor(module.actor_spec.path, self.tokenizer)
        wanted = {"fit": ("prompts", "eval_prompts"), "predict": ("predict_prompts", "eval_prompts")}
        for name in wanted.get(stage, ("eval_prompts",)):
            source = getattr(self, name)
            if source is not None and name not in self._sets:
                self._sets[name] = source.load(
                    self.tokenizer, seed=self.seed, shuffle=name == "prompts", processor=self.processor
                )

        if stage == "fit" and self.ptx is not None and self._ptx_loader is None:
            rows, pad = self.ptx.tokenized(self.tokenizer, self.processor), self.tokenizer.pad_token_id
            self._ptx_loader = SFTLoader(
                rows, self.ptx_batch_size, pad, seed=self.seed, rank=self.rank, world_size=self.world_size
            )
        if not self.engine.started:
            self.engine.check(engine_context(self))

    def train_dataloader(self) -> RolloutLoader:
        """One epoch of rollouts."""
        return RolloutLoader(self, self.rollouts_per_epoch)

    def val_dataloader(self) -> EvalLoader | list[Any]:
        """The evaluation prompts; nothing without them."""
        prompts = self._sets.get("eval_prompts")
        return [] if prompts is None else EvalLoader(self, prompts, self.eval_batch_size)

    def test_dataloader(self) -> EvalLoader | list[Any]:
        """As `val_dataloader`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> EvalLoader:
        """The prompts to complete."""
        prompts = self._sets.get("predict_prompts") or self._sets.get("eval_prompts")
        if prompts is None:
            raise ValueError("predict_prompts and eval_prompts are both missing: give one of them to complete prompts.")
        return EvalLoader(self, prompts, self.eval_batch_size)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a record's tensors."""
        return batch.to(device)

    def teardown(self, stage: str) -> None:
        """Ends the engine and the reward workers, also after an error or Ctrl-C."""
        for background in (self._ahead, self._stream):
            if background is not None:
                background.stop(self.engine.cancel, LEAVE_SECONDS)
        self._ahead = self._stream = None
        if self.scorer is not None:
            self.scorer.close()
        self.engine.close()

    def on_exception(self, exception: BaseException) -> None:
        """As `teardown`, which Lightning leaves out when a run ends with an error or Ctrl-C."""
        self.teardown("fit")

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts and in the supervised rows, the same on every rank."""
        ptx = None if self._ptx_loader is None else self._ptx_loader.state_dict()
        return {"prompt_cursor": self.prompt_cursor, "seed": self.seed, "ptx": ptx}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues with the prompts and rows that were next, in the order of the run that was interrupted."""
        if state_dict["seed"] != self.seed:
            self.seed, self._ptx_loader = state_dict["seed"], None
            self._sets.clear()
            self.setup("fit")
        self.prompt_cursor = state_dict["prompt_cursor"]
        if self._ptx_loader is not None and state_dict["ptx"] is not None:
            self._ptx_loader.load_state_dict(state_dict["ptx"])

    # ---- rollouts ----------------------------------------------------------------------------------------------

    def next_rollout(self, left: int = 0) -> Rollouts:
        """Samples and scores the next prompts: with the current policy, or ahead of it where `staleness` allows.

        Args:
            left: rollouts that will be asked for after this one; no more are sampled ahead.
        """
        if self.streaming:
            return stream_rollout(self)
        if self.staleness:
            draft = self._sampler_ahead().next(self.prompt_cursor, left)
        else:
            sync = ready_engine(self)
            draft = self._draft(self.prompt_cursor, gather_numbers, recover=True)
            draft.metrics["time/sync"] = sync
        rollouts = self._assemble(draft.sampled, self.sampling)
        rollouts.metrics |= draft.metrics
        if draft.version is not None:
            rollouts.policy_version = draft.version
        if self._ptx_loader is not None:
            batch: dict[str, Any] = next(iter(self._ptx_loader))
            rollouts.supervised = SupervisedBatch(**batch, group_ids=torch.arange(len(batch["token_ids"])))
        self.prompt_cursor = draft.cursor  # last, so that a rollout which is interrupted leaves no trace
        return rollouts

    def _draft(self, first: int, gather: Callable[[int], list[int]], *, recover: bool) -> Draft:
        """The training rollout that starts with prompt number `first`; the engine must be ready."""
        prompts, count = self._sets["prompts"], self.prompts_per_rollout
        own = prompts.batch(first, count, rank=self.rank, world_size=self.world_size)
        sampled = self.sample(own, self.sampling, self.group_size, self._seeds(own, first), recover=recover)
        cursor, metrics = first + count, dict[str, float]()
        if self.max_refills:
            draw = partial(self._draw, recover=recover)
            sampled, cursor, metrics = refill(
                sampled, cursor, self.max_refills, draw=draw, gather=gather, rank=self.rank
            )
        return Draft(sampled, cursor, {**metrics, **self._prompt_counts()})

    def _prompt_counts(self) -> dict[str, float]:
        counts = self._sets["prompts"].counts
        return {f"rollout/prompts_{name}": float(number) for name, number in counts.items()}

    def _sampler_ahead(self) -> Ahead:
        """What samples ahead for this data module; made when first asked for. Collective then."""
        if self._ahead is None:
            if self.world_size > 1 and self.max_refills:  # the thread's collectives must not meet the trainer's
                self._side_group = torch.distributed.new_group(backend="gloo")
            gather = partial(gather_numbers, group=self._side_group)
            module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
            self._ahead = Ahead(
                self.staleness,
                lambda cursor: self._draft(cursor, gather, recover=False),
                partial(ready_engine, self),
                lambda: int(module.policy_version),
                self.world_size,
            )
        return self._ahead

    def drain(self) -> None:
        """Waits until nothing is sampled in the background any more, so that others may use the engine."""
        if self._ahead is not None:
            self._ahead.drain()

    def rollout(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, *, stream: str, cursor: int
    ) -> Rollouts:
        """Samples `group_size` completions of each prompt and scores them while the slow ones still generate.

        Args:
            prompts: this rank's prompts.
            sampling: the distribution.
            group_size: completions per prompt.
            stream: name that keeps the random numbers of training and evaluation apart.
            cursor: number of prompts before this rollout, in the same stream; part of the random seeds.
        """
        self.drain()
        sync = ready_engine(self)
        seeds = self._seeds(prompts, cursor, stream)
        rollouts = self._assemble(self.sample(prompts, sampling, group_size, seeds), sampling)
        rollouts.metrics["time/sync"] = sync
        return rollouts

    def sample(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, seeds: list[int], *, recover: bool = True
    ) -> Sampled:
        """Groups of this rank's prompts with their scores; the engine must be ready.

        Args:
            prompts: P prompts.
            sampling: the distribution.
            group_size: completions per prompt.
            seeds: P random seeds.
            recover: push the weights to an engine that restarted and go on; False raises, as a thread must that runs
                while the weights move.
        """
        start = time.perf_counter()
        groups: dict[int, CompletionGroup] = {}
        handles: dict[int, Any] = {}
        for group in sample_groups(self, prompts, sampling, group_size, seeds, recover):
            groups[group.prompt_index] = group
            handles[group.prompt_index] = self._submit(prompts, group)
        generated = time.perf_counter()
        assert len(groups) == len(prompts), "the engine lost a group"
        scores = [] if self.scorer is None else [handles[i].result() for i in range(len(prompts))]
        seconds = {"time/generate": generated - start, "time/score": time.perf_counter() - generated}
        return Sampled(prompts, [groups[i] for i in range(len(prompts))], scores, seconds)

    def _seeds(self, prompts: Prompts, cursor: int, stream: str = "train") -> list[int]:
        return [request_seed(self.seed, stream, cursor, i * self.world_size + self.rank) for i in range(len(prompts))]

    def _draw(self, start: int, offset: int, count: int, *, recover: bool) -> Sampled:
        """Samples training prompts start + offset ..., a part of a run of prompts that the ranks share."""
        prompts = self._sets["prompts"].batch(start + offset, count)
        seeds = [request_seed(self.seed, "train", start, offset + i) for i in range(count)]
        return self.sample(prompts, self.sampling, self.group_size, seeds, recover=recover)

    def _assemble(self, sampled: Sampled, sampling: SamplingParams) -> Rollouts:
        scores = None if self.scorer is None else Scores.concat(sampled.scores)
        pad: Any = self.tokenizer.pad_token_id
        rollouts = build_rollouts(sampled.prompts, sampled.groups, scores, pad, sampling.temperature)
        rollouts.reward_weights = {} if self.scorer is None else dict(self.scorer.weights)
        rollouts.metrics |= sampled.seconds
        if not (self.staleness or self.streaming):
            self.engine.sleep()  # its memory is the trainer's until the next rollout, for engines that are told so
        return rollouts

    def _submit(self, prompts: Prompts, group: CompletionGroup) -> Any:
        if self.scorer is None:
            return None
        row, size = group.prompt_index, len(group.completions)
        return self.scorer.submit(
            prompts=[prompts.texts[row]] * size,
            completions=[c.text for c in group.completions],
            completion_ids=[c.token_ids for c in group.completions],
            columns={name: [values[row]] * size for name, values in prompts.columns.items()},
            group_ids=[row] * size,
            media=prompts.media[row].columns(size) if prompts.media else None,
        )
