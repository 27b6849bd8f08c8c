"""Prompts in, scored rollouts out: the data module that owns the engine and the reward functions.

Letters: P prompts, G completions per prompt, B = P * G sequences, T tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from jsonargparse import lazy_instance
from lightning.pytorch import LightningDataModule

from lightrl.data.loaders import EvalLoader, RolloutLoader
from lightrl.data.prompts import PromptMixture, PromptSet, PromptSource
from lightrl.data.sampled import Sampled, build_rollouts, refill, request_seed
from lightrl.data.sft import SFTLoader, SFTSource
from lightrl.data.templates import load_tokenizer
from lightrl.engines.base import Engine, EngineContext, EngineDiedError, EngineRestartedError, StaleWeightsError
from lightrl.engines.vllm import VLLMEngine
from lightrl.rewards.base import RewardSpec
from lightrl.rewards.scorer import RewardScorer, Scores
from lightrl.types import CompletionGroup, Prompts, Rollouts, SamplingParams, SupervisedBatch, realized, run_seed

__all__ = ["EvalLoader", "RolloutDataModule", "RolloutLoader"]

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Times a `restart_engine` engine may die within one rollout."""

PRECISION_TO_DTYPE = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float32", "transformer": "bfloat16"}


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
        max_refills: dynamic sampling (DAPO): groups whose completions all got the same reward are dropped and replaced
            by those of further prompts, in at most this many further generations per rollout; then the batch is
            completed with dropped groups, so that it keeps its size. Spread is that of the summed reward functions.
            0 keeps every group.
        ptx: supervised rows for a second loss (`ptx_coef` of the module); None without one.
        ptx_batch_size: supervised rows per rollout and rank, shared by its mini-batches.
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
        self._ptx_loader: SFTLoader | None = None
        self.ensure_synced: Callable[[], None] | None = None
        self.prompt_cursor = 0
        self._sets: dict[str, PromptSet] = {}
        counts = ("group_size", "eval_group_size", "prompts_per_rollout", "rollouts_per_epoch", "eval_batch_size")
        for name in (*counts, "ptx_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if max_refills < 0:
            raise ValueError(f"max_refills={max_refills}: must be 0 (off) or more.")
        if max_refills and (group_size < 2 or not rewards):
            raise ValueError(
                f"max_refills={max_refills} drops groups without reward spread: it needs group_size of at least 2 (it "
                f"is {group_size}) and reward functions in `rewards`, whose results are known before the update."
            )
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
        if stage == "fit":
            self._check_module(module)
        self.tokenizer = load_tokenizer(self.tokenizer_path or module.actor_spec.path)
        wanted = {"fit": ("prompts", "eval_prompts"), "predict": ("predict_prompts", "eval_prompts")}
        for name in wanted.get(stage, ("eval_prompts",)):
            source = getattr(self, name)
            if source is not None and name not in self._sets:
                self._sets[name] = source.load(self.tokenizer, seed=self.seed, shuffle=name == "prompts")

        if stage == "fit" and self.ptx is not None and self._ptx_loader is None:
            rows, pad = self.ptx.tokenized(self.tokenizer), self.tokenizer.pad_token_id
            self._ptx_loader = SFTLoader(
                rows, self.ptx_batch_size, pad, seed=self.seed, rank=self.rank, world_size=self.world_size
            )

    def _check_module(self, module: Any) -> None:
        """Refuses what this data module and the module it trains cannot do together."""
        self._check_sampling(getattr(module, "loss", None))
        if getattr(getattr(module, "advantage", None), "needs_groups", False) and self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} with {type(module).__name__} ({type(module.advantage).__name__}): its "
                "advantages compare the completions of one prompt, so it needs group_size of at least 2 (8 is usual)."
            )
        if self.max_refills and getattr(module, "reward_model_specs", None):
            raise ValueError(
                f"max_refills={self.max_refills} with reward_models: a group's spread is not known before the module's "
                "reward models have scored it. Set max_refills=0, or serve the model as a reward function."
            )
        coefficient = getattr(module, "ptx_coef", 0.0)
        if (self.ptx is not None) != (coefficient > 0):
            raise ValueError(
                f"ptx={'None' if self.ptx is None else self.ptx.label} (data) with ptx_coef={coefficient} (module): a "
                "supervised loss needs both, rows and a coefficient above 0; set both or neither."
            )

    def _check_sampling(self, loss: Any) -> None:
        """The trainer computes log-probs of the full softmax; what the engine cuts from it makes a difference."""
        plain = SamplingParams()
        names = ("top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens", "regex", "json_schema")
        cuts = [f"{n}={getattr(self.sampling, n)!r}" for n in names if getattr(self.sampling, n) != getattr(plain, n)]
        if cuts and getattr(loss, "reads_engine_logprobs", False):
            raise ValueError(
                f"sampling with {', '.join(cuts)} and loss={type(loss).__name__}: the engine's log-probs are those "
                "of a cut distribution, and comparing them with the trainer's would weight every token wrongly. Sample "
                "with temperature alone, or drop the correction."
            )
        if cuts:
            log.warning(
                "Training samples come from a distribution cut by %s, while log-probs are those of the full softmax: "
                "the gradient is slightly biased. Temperature alone is exact.",
                ", ".join(cuts),
            )

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

    def next_rollout(self) -> Rollouts:
        """Samples and scores the next prompts with the current policy."""
        first, count, prompts = self.prompt_cursor, self.prompts_per_rollout, self._sets["prompts"]
        sync = self._ready_engine()
        own = prompts.batch(first, count, rank=self.rank, world_size=self.world_size)
        sampled = self.sample(own, self.sampling, self.group_size, self._seeds(own, first))
        cursor, metrics = first + count, dict[str, float]()
        if self.max_refills:
            sampled, cursor, metrics = refill(
                sampled, cursor, self.max_refills, draw=self._draw, gather=gather_numbers, rank=self.rank
            )
        rollouts = self._assemble(sampled, self.sampling, sync)
        counts = {f"rollout/prompts_{name}": float(number) for name, number in prompts.counts.items()}
        rollouts.metrics |= {**metrics, **counts}
        if self._ptx_loader is not None:
            batch: dict[str, Any] = next(iter(self._ptx_loader))
            rollouts.supervised = SupervisedBatch(**batch, group_ids=torch.arange(len(batch["token_ids"])))
        self.prompt_cursor = cursor  # last, so that a rollout which is interrupted leaves no trace
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
        sync = self._ready_engine()
        seeds = self._seeds(prompts, cursor, stream)
        return self._assemble(self.sample(prompts, sampling, group_size, seeds), sampling, sync)

    def sample(self, prompts: Prompts, sampling: SamplingParams, group_size: int, seeds: list[int]) -> Sampled:
        """Groups of this rank's prompts with their scores; the engine must be ready.

        Args:
            prompts: P prompts.
            sampling: the distribution.
            group_size: completions per prompt.
            seeds: P random seeds.
        """
        start = time.perf_counter()
        groups: dict[int, CompletionGroup] = {}
        handles: dict[int, Any] = {}
        for group in self._groups(prompts, sampling, group_size, seeds):
            groups[group.prompt_index] = group
            handles[group.prompt_index] = self._submit(prompts, group)
        generated = time.perf_counter()
        assert len(groups) == len(prompts), "the engine lost a group"
        scores = [] if self.scorer is None else [handles[i].result() for i in range(len(prompts))]
        seconds = {"time/generate": generated - start, "time/score": time.perf_counter() - generated}
        return Sampled(prompts, [groups[i] for i in range(len(prompts))], scores, seconds)

    def _seeds(self, prompts: Prompts, cursor: int, stream: str = "train") -> list[int]:
        return [request_seed(self.seed, stream, cursor, i * self.world_size + self.rank) for i in range(len(prompts))]

    def _draw(self, start: int, offset: int, count: int) -> Sampled:
        """Samples training prompts start + offset ..., a part of a run of prompts that the ranks share."""
        prompts = self._sets["prompts"].batch(start + offset, count)
        seeds = [request_seed(self.seed, "train", start, offset + i) for i in range(count)]
        return self.sample(prompts, self.sampling, self.group_size, seeds)

    def _assemble(self, sampled: Sampled, sampling: SamplingParams, sync: float) -> Rollouts:
        scores = None if self.scorer is None else Scores.concat(sampled.scores)
        pad: Any = self.tokenizer.pad_token_id
        rollouts = build_rollouts(sampled.prompts, sampled.groups, scores, pad, sampling.temperature)
        rollouts.reward_weights = {} if self.scorer is None else dict(self.scorer.weights)
        rollouts.metrics |= {"time/sync": sync, **sampled.seconds}
        self.engine.sleep()  # its memory is the trainer's until the next rollout, for engines that are told so
        return rollouts

    def _groups(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, seeds: list[int]
    ) -> Iterator[CompletionGroup]:
        """All groups as they finish. An engine that restarted gets the weights again and the lost prompts anew.

        Seeds belong to prompts, so what is sampled again is what would have been sampled.
        """
        pending, restarts = list(range(len(prompts))), 0
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
                restarts += 1
                if restarts > MAX_RESTARTS:
                    raise EngineDiedError(
                        f"The engine died {restarts} times in one rollout: look for what kills it (memory, a driver), "
                        "restarting does not help."
                    ) from error
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

    def _ready_engine(self) -> float:
        """Starts the engine if need be, pushes the weights, and refuses to go on with others than the policy's.

        Returns:
            the seconds it took.
        """
        begin = time.perf_counter()
        if not self.engine.started:
            self.engine.start(self._engine_context())
        self.engine.wake()
        if self.ensure_synced is not None:
            self.ensure_synced()
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        if self.engine.policy_version != module.policy_version:
            raise StaleWeightsError(
                f"The engine holds policy version {self.engine.policy_version} (-1: never synced), the trainer "
                f"{module.policy_version}: add the WeightSync callback (trainer.callbacks), which pushes the weights."
            )
        return time.perf_counter() - begin

    def _engine_context(self) -> EngineContext:
        trainer: Any = self.trainer
        lora = trainer.lightning_module.actor_spec.lora
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
            lora_rank=0 if lora is None or lora.quantize_4bit else lora.r,
        )


def gather_numbers(number: int) -> list[int]:
    """Every rank's number, in the order of the ranks. Collective."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [number]
    numbers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(numbers, number)
    return numbers
