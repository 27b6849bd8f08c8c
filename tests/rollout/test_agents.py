"""Programs in the pipeline: whole runs of a tiny model, and the log-probs of what they train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import seed_everything

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import TrajectoryLogprobCheck, WeightSync
from lightrl.data.prompts import PromptSource
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.environments import AgentProgram, Episode
from lightrl.records import SamplingParams
from lightrl.rollout import RolloutDataModule
from tests.rollout.tasks import Keep, chat_model, sgd
from tests.toys import quiet_trainer


def main(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Goes on for three turns, with a question beside, and begins again with a summary."""
    with httpx.Client(headers={"x-api-key": api_key}, timeout=60) as client:

        def ask(messages: list[Any]) -> str:
            answer = client.post(base_url + "/chat/completions", json={"messages": messages})
            said: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
            return said

        said: list[Any] = [{"role": "user", "content": row["prompt"]}]
        reward = 0.0
        for turn in range(3):
            if turn == 1:
                ask([{"role": "user", "content": "beside"}])
            said.append({"role": "assistant", "content": ask(said)})
            reward += sum(c in "aeiou" for c in said[-1]["content"]) / 10
            said.append({"role": "user", "content": f"again {turn}"})
        ask([{"role": "user", "content": "summary"}, said[-1]])
    return reward


def failing(row: dict[str, Any], base_url: str, api_key: str) -> float:
    raise RuntimeError("no sandbox")


def run(path: str, episode: Any) -> Keep:
    """A whole `Trainer.fit` of two rollouts, with the canary."""
    seed_everything(0, verbose=False)
    keep = Keep()
    module = GRPOLightningModule(path, kl=None, optimizer=sgd)
    data = RolloutDataModule(
        prompts=PromptSource(rows=[{"prompt": f"say {word}"} for word in ("one", "two", "six", "ten")]),
        engine=TransformersEngine(),
        episode=episode,
        sampling=SamplingParams(max_new_tokens=6),
        group_size=4,
        prompts_per_rollout=4,
        rollouts_per_epoch=2,
        seed=0,
    )
    callbacks = [WeightSync(), TrajectoryLogprobCheck(num_trajectories=64, tolerance=1e-5), keep]
    quiet_trainer(callbacks=callbacks).fit(module, data)
    return keep


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_a_program_is_trained_on_the_log_probs_that_the_engine_sampled_with(family: str, tmp_path: Path) -> None:
    keep = run(chat_model(tmp_path, family), AgentProgram(main, max_environments=16))
    assert len(keep.rollouts) == 2
    assert max(keep.gaps) < 1e-5
    for rollouts in keep.rollouts:
        turns = rollouts.turn_ids
        assert turns is not None
        for trajectory in rollouts.trajectory_ids.unique():
            trained = turns[rollouts.trajectory_ids == trajectory]
            assert sorted(set(trained[trained >= 0].tolist())) == [0, 1, 2, 3, 4]
        if family == "qwen2.5":  # one row that goes on, the question beside, the summary; random text rarely forks
            assert 16 * 3 <= len(rollouts) < 16 * 4
    assert keep.rollouts[0].rewards.std() > 0


def test_a_program_is_given_in_yaml() -> None:
    parser = ArgumentParser()
    parser.add_argument("--episode", type=Episode)
    episode = {"class_path": "AgentProgram", "init_args": {"run": f"{__file__}:main", "max_retries": 1}}
    made = parser.instantiate_classes(parser.parse_object({"episode": episode})).episode
    assert made.runner.function.__name__ == "main"
    assert made.max_retries == 1


def test_a_program_that_always_fails_stops_the_run_with_the_cause(tmp_path: Path) -> None:
    episode = AgentProgram(failing, max_retries=0)
    with pytest.raises(RuntimeError, match="the program failed: RuntimeError: no sandbox"):
        run(chat_model(tmp_path), episode)


def test_prompt_sources_are_the_programs_own_business() -> None:
    source = PromptSource(rows=[{"prompt": "x"}], system_prompt="Be brief.")
    with pytest.raises(ValueError, match="prompts.system_prompt"):
        AgentProgram(main).check_prompts(source)
