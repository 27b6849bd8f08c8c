"""Environments with a tiny model that samples at random: whole runs of the pipeline over several turns."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import TrajectoryLogprobCheck, WeightSync
from lightrl.data.prompts import PromptSource
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.environments import AgentProgram, Environment, EnvironmentEpisode, EnvironmentFailedError, Reply, Step
from lightrl.records import Experience, Rollouts, SamplingParams
from lightrl.rollout import RolloutDataModule
from lightrl.rollout.learner import RLCallback
from tests.environments.families import FAMILIES, make_tokenizer
from tests.rows import as_rows
from tests.toys import build, near_ties, quiet_trainer, sgd


def chat_model(
    folder: Path, family: str = "qwen2.5", seed: int = 0, experts: bool = False, positions: int = 512
) -> str:
    """A model with a family's chat template and random weights; or a mixture of experts whose routers nearly tie."""
    tokenizer = make_tokenizer(FAMILIES[family])
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32, for vLLM
    sizes |= {"max_position_embeddings": positions, "initializer_range": 0.1, "bos_token_id": None}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if experts:
        sizes |= {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
        lm = near_ties(build("Qwen3Moe", seed=seed, **sizes))
    else:
        lm = build("qwen2", seed=seed, **sizes)
    lm.save_pretrained(folder)
    return str(folder)


class Letters(Environment):
    """Asks again until a reply has an even number of characters; rewards vowels. The policy alone decides the end.

    Attributes:
        seen: (prompt, seed) of every reset.
        alive: environments that were reset and not closed.
    """

    seen: list[tuple[Any, int]] = []  # noqa: RUF012 - of all objects
    alive = 0

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.was_reset = False

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
        type(self).seen.append((row["prompt"], seed))
        type(self).alive += not self.was_reset
        self.was_reset = True
        return [{"role": "user", "content": f"{row['prompt']} {seed % 10}"}]

    async def step(self, reply: Reply) -> Step:
        await asyncio.sleep(self.delay)
        reward = sum(c in "aeiou" for c in reply.content) / 10
        if len(reply.content) % 3 == 0:
            return Step(reward=reward, done=True)
        return Step([{"role": "user", "content": f"again {len(reply.content)}"}], reward=reward)

    async def finish(self, stop_reason: str) -> float:
        return 1.0 if stop_reason == "stop" else 0.0

    async def close(self) -> None:
        type(self).alive -= self.was_reset
        self.was_reset = False


class Numbered(Letters):
    """The n-th environment of a run gets a fixed reward after one turn, or fails in some way.

    Args:
        rewards: n-th -> reward; None fails; the last goes for all that follow.
    """

    made = 0

    def __init__(self, rewards: list[float | None], how: str = "raise") -> None:
        super().__init__()
        self.reward = rewards[min(Numbered.made, len(rewards) - 1)]
        self.how = how
        Numbered.made += 1

    async def step(self, reply: Reply) -> Step:
        if self.reward is not None:
            return Step(reward=self.reward, done=True)
        if self.how == "raise":
            raise EnvironmentFailedError("the sandbox is gone")
        if self.how == "connection":
            raise ConnectionResetError("the tool server was killed")
        return Step(failure="no sandbox left", done=True)

    async def finish(self, stop_reason: str) -> float:
        return 0.0


def asked(messages: list[Any], base_url: str, api_key: str) -> str:
    """What the policy answers a program."""
    headers = {"x-api-key": api_key, "content-type": "application/json"}
    body = json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"]
        return said


def talk(row: dict[str, Any], base_url: str, api_key: str, at: Callable[[int], Any] = lambda turn: None) -> float:
    """A program of two turns and a question beside; `at` is called after each turn. Rewards vowels and length."""
    said: list[Any] = [{"role": "user", "content": row["prompt"]}]
    reward = 0.0
    for turn in range(2):
        said.append({"role": "assistant", "content": asked(said, base_url, api_key)})
        reward += sum(c in "aeiou" for c in said[-1]["content"]) / 10 + len(said[-1]["content"]) / 100
        at(turn)
        said.append({"role": "user", "content": f"again {turn}"})
    asked([{"role": "user", "content": "beside"}], base_url, api_key)
    return reward


class Keep(RLCallback):
    """Remembers rollouts, experiences and metrics.

    Attributes:
        gaps: per rollout, the largest difference between the trainer's log-probs and those that were sampled.
    """

    def __init__(self, compare: bool = True) -> None:
        self.compare = compare
        self.rollouts: list[Rollouts] = []
        self.experiences: list[Experience] = []
        self.metrics: list[dict[str, float]] = []
        self.evaluated: list[Rollouts] = []
        self.gaps: list[float] = []

    def on_rollout_scored(self, trainer: Any, module: Any, rollouts: Rollouts) -> None:
        self.rollouts.append(rollouts)
        if self.compare:
            self.gaps.append(gap(module, rollouts, rollouts.routes))

    def on_experience_made(self, trainer: Any, module: Any, experience: Experience) -> None:
        self.experiences.append(experience)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.metrics.append(outputs)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.evaluated.append(batch)


def gap(module: Any, rollouts: Rollouts, routes: Any) -> float:
    """The largest difference between the policy's log-probs, on these experts, and those that were sampled."""
    rows = rollouts.token_ids, rollouts.attention_mask, rollouts.response_mask
    with torch.no_grad():
        out = module.actor(as_rows(*rows, group_ids=rollouts.group_ids, inputs=rollouts.inputs or None, routes=routes))
    return float((out.logprobs - rollouts.engine_logprobs)[rollouts.response_mask].abs().max())


def make_data(
    environment: Any = Letters, episode: Any = None, program: Any = None, made: Any = None, **kwargs: Any
) -> RolloutDataModule:
    """Rollouts of four prompts, four attempts each, in environments, by a program or by an episode that is `made`."""
    settings = {"max_turns": 3, "on_truncated": "continue", **(episode or {})}
    arguments: dict[str, Any] = {
        "prompts": PromptSource(
            rows=[{"prompt": f"say {word}", "word": word} for word in ("one", "two", "six", "ten")]
        ),
        "engine": TransformersEngine(),
        "sampling": SamplingParams(max_new_tokens=6),
        "group_size": 4,
        "prompts_per_rollout": 4,
        "rollouts_per_epoch": 2,
        "seed": 0,
    }
    if made is not None:
        arguments["episode"] = made
    elif program is None:
        arguments["episode"] = EnvironmentEpisode(environment, **settings)
    else:
        arguments["episode"] = AgentProgram(program, **(episode or {}))
    return RolloutDataModule(**{**arguments, **kwargs})


def fit(
    path: Any,
    callbacks: Any = (),
    module: Any = None,
    trainer: Any = None,
    ckpt_path: Any = None,
    compare: bool = True,
    canary: bool = True,
    **data: Any,
) -> tuple[Any, Keep]:
    """A whole `Trainer.fit`, with the canary unless told otherwise."""
    seed_everything(0, verbose=False)
    Letters.seen, Letters.alive, Numbered.made = [], 0, 0
    keep = Keep(compare)
    module = module or GRPOLightningModule(path, kl=None, optimizer=sgd)
    proof = [TrajectoryLogprobCheck(num_trajectories=64, tolerance=1e-5)] if canary else []
    fitter = quiet_trainer(callbacks=[WeightSync(), *proof, keep, *callbacks], **(trainer or {}))
    fitter.fit(module, make_data(**data), ckpt_path=ckpt_path)
    return module, keep
