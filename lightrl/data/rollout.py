"""Prompts in, scored rollouts out: the data module that owns the engine and the reward functions.

Letters: P prompts, G completions per prompt, B = P * G sequences, T tokens.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from jsonargparse import lazy_instance
from lightning.pytorch import LightningDataModule

from lightrl.data.prompts import PromptMixture, PromptSet, PromptSource
from lightrl.data.templates import load_tokenizer
from lightrl.engines.base import Engine, EngineContext, EngineDiedError, EngineRestartedError, StaleWeightsError
from lightrl.engines.vllm import VLLMEngine
from lightrl.rewards.base import RewardSpec
from lightrl.rewards.scorer import RewardScorer, Scores
from lightrl.types import CompletionGroup, Prompts, Rollouts, SamplingParams, class_name, pad_rows

__all__ = ["RolloutDataModule", "RolloutLoader"]

log = logging.getLogger(__name__)

PRECISION_TO_DTYPE = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float32", "transformer": "bfloat16"}


class RolloutLoader:
    """Lightning's train dataloader: sized, and a generator, so that each rollout is made when it is asked for.

    Lightning prefetches loaders without a length, which would make every rollout one update stale.
    """

    def __init__(self, datamodule: RolloutDataModule, num_rollouts: int) -> None:
        self.datamodule, self.num_rollouts = datamodule, num_rollouts
        self.position = 0

    def __len__(self) -> int:
        return self.num_rollouts

    def __iter__(self) -> Iterator[Rollouts]:
        if self.position >= self.num_rollouts:
            self.position = 0
        while self.position < self.num_rollouts:
            rollouts = self.datamodule.next_rollout()
            self.position += 1
            yield rollouts

    def state_dict(self) -> dict[str, int]:
        """Rollouts handed out in this epoch; at its end that is the start of the next."""
        return {"position": self.position % self.num_rollouts}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues within the epoch."""
        self.position = state_dict["position"]


class EvalLoader:
    """All evaluation prompts once, as scored rollouts, sampled when asked for. Ranks get equally many batches."""

    def __init__(self, datamodule: RolloutDataModule, prompts: PromptSet, batch_size: int) -> None:
        self.datamodule, self.prompts = datamodule, prompts
        self.batch_size = batch_size

    def __len__(self) -> int:
        per_rank = self.batch_size * self.datamodule.world_size
        return -(-len(self.prompts) // per_rank)

    def __iter__(self) -> Iterator[Rollouts]:
        dm = self.datamodule
        for i in range(len(self)):
            first = i * self.batch_size * dm.world_size
            rows = range(first, min(first + self.batch_size * dm.world_size, len(self.prompts)))[
                dm.rank :: dm.world_size
            ]
            rows = rows or range(first, first + 1)  # a rank without rows repeats one: it must take part
            yield dm.rollout(
                self.prompts.rows(list(rows)), dm.eval_sampling, dm.eval_group_size, stream="eval", cursor=first
            )


class RolloutDataModule(LightningDataModule):
    """Samples completions with the current policy, scores them, and hands Lightning one `Rollouts` per batch.

    Strictly on-policy: each rollout is generated when the training loop asks for it, after the weights of the last
    update have been pushed; the engine is asked for its `policy_version` and a mismatch raises.

    Args:
        prompts: where training prompts come from.
        rewards: reward functions: import paths (`package.module:function`, `file.py:function`) or configured classes.
        engine: what samples. The default is vLLM in this process.
        sampling: how training completions are sampled; temperature above 0.
        group_size: G, completions per prompt.
        prompts_per_rollout: P, prompts in one rollout, over all ranks; must be a multiple of their number.
        rollouts_per_epoch: rollouts in one Lightning epoch.
        reward_weights: weight of each reward function; 1 for each where None.
        reward_names: name of each in logs and recipes; the function's or class's own where None.
        recipes: label -> list of (reward name, weight): rows of different labels use different functions.
        label_column: column that holds a row's label, for `recipes`.
        reward_timeout: seconds one call of a reward function may take; None waits for ever.
        reward_concurrency: most calls of reward functions at a time.
        on_reward_error: `error` stops the run when a reward function raises or times out; `none` leaves its rows
            unscored by it and counts them.
        eval_prompts: prompts for validation and test; without them there is no validation.
        eval_sampling: how evaluation completions are sampled; `sampling` where None.
        eval_group_size: completions per evaluation prompt; above 1 gives pass@k and majority.
        eval_batch_size: evaluation prompts per batch and rank.
        predict_prompts: prompts for `lightrl predict`; `eval_prompts` where None.
        tokenizer: folder or hub name; the actor's own where None.
        seed: of prompt order and sampling; a run with the same seed repeats.

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
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.prompts, self.eval_prompts, self.predict_prompts = prompts, eval_prompts, predict_prompts
        self.engine, self.sampling, self.eval_sampling = engine, sampling, eval_sampling or sampling
        self.group_size, self.eval_group_size = group_size, eval_group_size
        self.prompts_per_rollout, self.rollouts_per_epoch = prompts_per_rollout, rollouts_per_epoch
        self.eval_batch_size, self.tokenizer_path, self.seed = eval_batch_size, tokenizer, seed
        self.ensure_synced: Callable[[], None] | None = None
        self.prompt_cursor = 0
        self._sets: dict[str, PromptSet] = {}
        counts = ("group_size", "eval_group_size", "prompts_per_rollout", "rollouts_per_epoch", "eval_batch_size")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if sampling.temperature == 0:
            raise ValueError("sampling.temperature=0: greedy completions of a prompt are all equal; train above 0.")
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
        needed = getattr(getattr(module, "advantage", None), "needs_groups", False)
        if stage == "fit" and needed and self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} with {type(module).__name__} ({class_name(module.advantage)}): its "
                "advantages compare the completions of one prompt, so it needs group_size of at least 2 (8 is usual)."
            )
        self.tokenizer = load_tokenizer(self.tokenizer_path or module.actor_spec.path)
        wanted = {"fit": ("prompts", "eval_prompts"), "predict": ("predict_prompts", "eval_prompts")}
        for name in wanted.get(stage, ("eval_prompts",)):
            source = getattr(self, name)
            if source is not None and name not in self._sets:
                self._sets[name] = source.load(self.tokenizer, seed=self.seed, shuffle=name == "prompts")

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
        self.engine.close()
        if self.scorer is not None:
            self.scorer.close()

    def state_dict(self) -> dict[str, int]:
        """The position in the prompts, the same on every rank."""
        return {"prompt_cursor": self.prompt_cursor}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues with the prompts that were next."""
        self.prompt_cursor = state_dict["prompt_cursor"]

    # ---- rollouts ----------------------------------------------------------------------------------------------

    def next_rollout(self) -> Rollouts:
        """Samples and scores the next prompts with the current policy."""
        first, count = self.prompt_cursor, self.prompts_per_rollout
        prompts = self._sets["prompts"].batch(first, count, rank=self.rank, world_size=self.world_size)
        rollouts = self.rollout(prompts, self.sampling, self.group_size, stream="train", cursor=first)
        self.prompt_cursor = first + count
        return rollouts

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
        start = time.perf_counter()
        self._ready_engine()
        synced = time.perf_counter()
        seeds = [request_seed(self.seed, stream, cursor, i * self.world_size + self.rank) for i in range(len(prompts))]
        groups: dict[int, CompletionGroup] = {}
        handles: dict[int, Any] = {}
        for group in self._groups(prompts, sampling, group_size, seeds):
            groups[group.prompt_index] = group
            handles[group.prompt_index] = self._submit(prompts, group)
        generated = time.perf_counter()
        assert len(groups) == len(prompts), "the engine lost a group"
        finished = [groups[i] for i in range(len(prompts))]
        scores = None if self.scorer is None else Scores.concat([handles[i].result() for i in range(len(prompts))])
        rollouts = build_rollouts(prompts, finished, scores, self.tokenizer.pad_token_id, sampling.temperature)
        rollouts.reward_weights = {} if self.scorer is None else dict(self.scorer.weights)
        rollouts.metrics |= {
            "time/sync": synced - start,
            "time/generate": generated - synced,
            "time/score": time.perf_counter() - generated,
        }
        return rollouts

    def _groups(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, seeds: list[int]
    ) -> Iterator[CompletionGroup]:
        """All groups as they finish. An engine that restarted gets the weights again and the lost prompts anew.

        Seeds belong to prompts, so what is sampled again is what would have been sampled.
        """
        pending = list(range(len(prompts)))
        while pending:
            asked = list(pending)
            try:
                stream = self.engine.generate(
                    prompts[asked], sampling, num_completions=group_size, seeds=[seeds[i] for i in asked]
                )
                for group in stream:
                    index = asked[group.prompt_index]
                    pending.remove(index)
                    yield replace(group, prompt_index=index)
            except EngineRestartedError as error:
                if self.world_size > 1:  # a push is collective, and the other ranks are elsewhere
                    raise EngineDiedError(f"{error} restart_engine works with one process only.") from error
                log.warning("%s Pushing the weights and sampling %d lost prompts again.", error, len(pending))
                self._ready_engine()

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
        )

    def _ready_engine(self) -> None:
        """Starts the engine if need be, pushes the weights, and refuses to go on with others than the policy's."""
        if not self.engine.started:
            self.engine.start(self._engine_context())
        if self.ensure_synced is not None:
            self.ensure_synced()
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        if self.engine.policy_version != module.policy_version:
            raise StaleWeightsError(
                f"The engine holds policy version {self.engine.policy_version} (-1: never synced), the trainer "
                f"{module.policy_version}: add the WeightSync callback (trainer.callbacks), which pushes the weights."
            )

    def _engine_context(self) -> EngineContext:
        trainer: Any = self.trainer
        lengths = [len_ for s in self._sets.values() if (len_ := s.max_prompt_tokens) is not None]
        return EngineContext(
            model_path=trainer.lightning_module.actor_spec.path,
            dtype=PRECISION_TO_DTYPE[str(trainer.precision).split("-")[0]],
            seed=self.seed,
            rank=self.rank,
            local_rank=int(trainer.local_rank),
            world_size=self.world_size,
            device=str(trainer.strategy.root_device),
            max_prompt_tokens=max(lengths) if lengths else None,
            max_new_tokens=max(self.sampling.max_new_tokens, self.eval_sampling.max_new_tokens),
            random_init=bool(trainer.lightning_module.actor_spec.random_init),
        )


def request_seed(seed: int, stream: str, cursor: int, row: int) -> int:
    """A 62-bit seed that depends on the run's seed, the stream, and the prompt's place in it, and on nothing else."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{cursor}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def build_rollouts(
    prompts: Prompts, groups: list[CompletionGroup], scores: Scores | None, pad_token_id: int, temperature: float
) -> Rollouts:
    """Lays P groups out as right-padded (B, T) rows, rows of a group next to one another.

    Args:
        prompts: P prompts. groups: their completions, in the order of the prompts.
        scores: of the B rows; None leaves them unscored (NaN).
        pad_token_id: fills the rows. temperature: of the sampling distribution.
    """
    rows = [(p, c) for p, group in enumerate(groups) for c in group.completions]
    picked = [p for p, _ in rows]
    tokens = [prompts.token_ids[p] + list(c.token_ids) for p, c in rows]
    before = [len(prompts.token_ids[p]) for p in picked]
    masks = [[0] * n + [1] * len(c.token_ids) for n, (_, c) in zip(before, rows, strict=True)]
    logprobs = [[0.0] * n + list(c.logprobs) for n, (_, c) in zip(before, rows, strict=True)]
    scores = scores or Scores(total=[float("nan")] * len(rows), parts={})
    columns = {name: [values[p] for p in picked] for name, values in prompts.columns.items()}
    return Rollouts(
        token_ids=pad_rows(tokens, pad_token_id, torch.long),
        attention_mask=pad_rows([[1] * len(row) for row in tokens], 0, torch.bool),
        response_mask=pad_rows(masks, 0, torch.bool),
        engine_logprobs=pad_rows(logprobs, 0.0, torch.float32),
        group_ids=torch.tensor(picked),
        rewards=torch.tensor(scores.total, dtype=torch.float32),
        reward_parts={name: torch.tensor(part, dtype=torch.float32) for name, part in scores.parts.items()},
        truncated=torch.tensor([c.finish_reason == "length" for _, c in rows]),
        policy_version=min(group.policy_version for group in groups),
        temperature=temperature,
        prompts=[prompts.texts[p] for p in picked],
        completions=[c.text for _, c in rows],
        columns={**columns, **scores.extra},
        inputs=[prompts.inputs[p] for p in picked] if prompts.inputs else [],
        metrics=dict(scores.metrics),
    )
