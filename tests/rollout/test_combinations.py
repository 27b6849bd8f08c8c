"""Which features combine with environments and programs: every cell of docs/combinations.md is run or refused here.

python -m tests.rollout.test_combinations      # writes the page again
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightrl.algorithms import CriticSpec, DistillLightningModule, GRPOLightningModule, PPOLightningModule
from lightrl.algorithms.settings import ExtraLosses, Shaping, Updates
from lightrl.callbacks import EMA, AdaptiveKL, RewardNormalization, RolloutWriter, TrajectoryLogprobCheck
from lightrl.callbacks.rollout_writer import load_rollouts
from lightrl.data.curriculum import PromptCurriculum
from lightrl.data.prompts import PromptSource
from lightrl.engines import ServerEngine
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.objectives import GSPO, GiGPO, GroupRelative, KLInLoss, KLInReward, ReverseKL, TurnGAE, TurnReturns
from lightrl.records import SamplingParams
from lightrl.rollout import Ahead, Evaluation, InFlight, PTXSource
from tests.rollout.tasks import Keep, Letters, chat_model, fit, gap, sgd, talk
from tests.toys import ThreadEngine

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "combinations.md"
ENVIRONMENT, PROGRAM = "an environment", "a program"
RUNS = "tests/rollout/test_environment_runs.py::"
RANKS = "test_two_ranks_play_their_own_environments_and_learn_what_one_learns"


class Turns(Letters):
    """`Letters` whose replies are rewarded by their length, so that turns and attempts differ."""

    async def step(self, reply: Any) -> Any:
        step = await super().step(reply)
        step.reward += len(reply.content) / 100
        return step


class Start(Callback):
    """Remembers the policy before the first update."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = {name: value.clone() for name, value in module.actor.state_dict().items()}


@dataclass
class Run:
    """A run that has ended: the policy before it, the module after it, what its hooks saw, and its folder."""

    before: dict[str, torch.Tensor]
    module: Any
    keep: Keep
    folder: Path

    @property
    def moved(self) -> set[str]:
        """Names of the parameters that are not what they were."""
        now = self.module.actor.state_dict()
        return {name for name, value in now.items() if not value.equal(self.before[name])}


@dataclass
class Where:
    """What a cell is made of."""

    path: str
    folder: Path
    way: str
    ended: list[Callable[[], None]] = field(default_factory=list)

    def run(self, **arguments: Any) -> Run:
        """A rollout of two groups of four, and its update."""
        settings: dict[str, Any] = {"prompts_per_rollout": 2, "rollouts_per_epoch": 1, **arguments}
        settings |= {"environment": Turns} if self.way == ENVIRONMENT else {"program": talk}
        module, start = settings.pop("build", grpo)(self.path), Start()
        callbacks = [*settings.pop("callbacks", ()), start]
        _, keep = fit(self.path, callbacks, module, **settings)
        return Run(start.weights, module, keep, self.folder)


def grpo(path: str, spec: Any = None, **arguments: Any) -> Any:
    settings = {"kl": None, "optimizer": sgd, "advantage": GroupRelative(scale="none"), **arguments}
    return GRPOLightningModule(ModelSpec(path, **(spec or {})), **settings)


def critic(path: str, **arguments: Any) -> Any:
    return PPOLightningModule(path, CriticSpec(), **{"kl": None, "optimizer": sgd, "ppo_epochs": 1, **arguments})


@dataclass
class Cell:
    """A feature together with environments and programs.

    Attributes:
        feature: as users write it.
        arguments: of a run that has it.
        shows: what a run has to show for it, beside every trained token's proof; its words stand on the page.
        check: whether the run shows it.
        refused: what the run is refused with, in place of `check`; by way where only one is refused.
        tested: way -> test that runs it, where another file does.
        prove: whether engine and trainer are compared; not where their log-probs are of different distributions.
    """

    feature: str
    arguments: Callable[[Where], dict[str, Any]] = lambda where: {}
    shows: str = ""
    check: Callable[[Run, Where], bool] = lambda run, where: True
    refused: str | dict[str, str] = ""
    tested: dict[str, str] = field(default_factory=dict)
    prove: bool = True

    def refusal(self, way: str) -> str:
        """What is said instead of a run; "" where there is one."""
        return self.refused.get(way, "") if isinstance(self.refused, dict) else self.refused


def same_weights(other: dict[str, Any]) -> Callable[[Run, Where], bool]:
    """Whether the update is that of a run with other arguments."""

    def check(run: Run, where: Where) -> bool:
        twin = where.run(**other).module.actor.state_dict()
        mine = run.module.actor.state_dict()
        return all(torch.allclose(mine[name], value, atol=1e-6) for name, value in twin.items())

    return check


def turns_differ(run: Run, where: Where) -> bool:
    """Whether turns of one trajectory have different advantages."""
    experience, turns = run.keep.experiences[0], run.keep.rollouts[0].turn_ids
    assert turns is not None
    rows = zip(experience.advantages, turns, strict=True)
    return any(len({round(float(a), 6) for a in advantages[turn >= 0]}) > 1 for advantages, turn in rows)


def saved(run: Run, where: Where) -> bool:
    """Whether 8 trajectories have turns, and log-probs of the policy that sampled them and of the one that is now."""
    records = load_rollouts(where.folder / "rollouts" / "rollout=000001")[1]
    rows = [row for record in records for row in record["rows"]]
    sampled = [(row, i) for row in rows for i, turn in enumerate(row["turns"]) if turn >= 0]
    moved = [abs(row["new_logprobs"][i] - row["old_logprobs"][i]) for row, i in sampled]
    return (
        [len(record["turns"]) > 0 for record in records] == [True] * 8
        and all(abs(row["old_logprobs"][i] - row["engine_logprobs"][i]) < 2e-5 for row, i in sampled)
        and all(row["entropy"][i] > 0 for row, i in sampled)
        and 1e-4 < max(moved) < 10
    )


def replies(run: Run) -> list[str]:
    said = [message for messages in run.keep.rollouts[0].messages for message in messages]
    return [message["content"] for message in said if message["role"] == "assistant"]


def teacher(path: str) -> str:
    """Another model with the same tokens."""
    folder = Path(path).parent / "teacher"
    return str(folder) if folder.exists() else chat_model(folder, seed=1)


def mixture(path: str) -> str:
    """A mixture of experts with the same tokens."""
    folder = Path(path).parent / "experts"
    return str(folder) if folder.exists() else chat_model(folder, experts=True)


def replayed(run: Run, where: Where) -> bool:
    """Whether only the replay of the engine's experts closes the gap between its log-probs and the trainer's."""
    rows, module = run.keep.rollouts[0], grpo(mixture(where.path))
    module.build_models()
    return gap(module, rows, rows.routes) < 1e-5 and gap(module, rows, ()) > 1e-3


def served(where: Where) -> dict[str, Any]:
    pytest.importorskip("uvicorn")
    from tests.engines.sglang_server import SGLangServer

    server = SGLangServer(where.path, max_model_len=512)
    url = server.start()
    where.ended.append(server.stop)
    return {"engine": ServerEngine([url], kind="sglang", shared_folder=str(where.folder / "weights"))}


def some_flat(prompts: list[str], completions: list[str], word: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def layout(name: str) -> Cell:
    return Cell(
        f"`actor.layout: {name}`",
        lambda where: {"build": lambda path: grpo(path, {"layout": name})},
        "the update of the padded layout",
        same_weights({"build": lambda path: grpo(path, {"layout": "padded"})}),
    )


def refused_prompts(feature: str, message: str, **source: Any) -> Cell:
    rows = [{"prompt": "say a", "word": "a"}]
    return Cell(feature, lambda where: {"prompts": PromptSource(rows=rows, **source)}, refused=message)


def estimator(feature: str, build: Callable[[str], Any], refused: Any = "") -> Cell:
    shows = "turns of one trajectory get different advantages"
    return Cell(feature, lambda where: {"build": build}, shows, turns_differ, refused)


CELLS: dict[str, list[Cell]] = {
    "Engines": [
        Cell("`TransformersEngine`", shows="the trainer's log-probs are those of sampling, within 1e-5"),
        Cell("`VLLMEngine`", tested={
            ENVIRONMENT: RUNS + "test_vllm_in_this_process_samples_rows_whose_logprobs_are_those_trained",
            PROGRAM: RUNS + "test_vllm_samples_what_a_program_is_trained_on",
        }),
        Cell("`ServerEngine`", served, "all rows come from the server"),
        Cell("an engine that dies between two turns (`restart_engine`)", tested={
            ENVIRONMENT: RUNS + "test_an_engine_that_is_killed_in_the_middle_of_turns_is_started_again",
            PROGRAM: RUNS + "test_an_engine_that_is_killed_between_two_turns_of_programs_is_started_again",
        }),
    ],
    "Generation and learning at once": [
        Cell(
            "`schedule: Ahead`",
            lambda where: {"engine": ThreadEngine(), "schedule": Ahead(), "rollouts_per_epoch": 3},
            "rollouts after the first lack one update",
            lambda run, where: [m["rollout/staleness"] for m in run.keep.metrics] == [0, 1, 1], prove=False,
        ),
        Cell(
            "`schedule: InFlight`",
            lambda where: {"engine": ThreadEngine(), "schedule": InFlight(), "rollouts_per_epoch": 3},
            "the first tokens of rollouts after the first lack one update",
            lambda run, where: [m["rollout/staleness"] for m in run.keep.metrics] == [0, 1, 1], prove=False,
        ),
        Cell(
            "`schedule: InFlight` with `dynamic_sampling_rounds`",
            lambda where: {"engine": ThreadEngine(), "schedule": InFlight(), "dynamic_sampling_rounds": 1},
            refused="schedule=InFlight with dynamic_sampling_rounds=1",
        ),
        Cell(
            "`schedule: Ahead` with an engine that computes in the trainer's thread",
            lambda where: {"schedule": Ahead()},
            refused="in the trainer's process: it can't sample while the trainer computes",
        ),
        Cell(
            "dynamic sampling (`dynamic_sampling_rounds`)",
            lambda where: {"dynamic_sampling_rounds": 2, "rewards": [lambda completions, word, **_: [
                -100.0 if w == "one" else float(len(c)) for c, w in zip(completions, word, strict=True)
            ]], "prompts_per_rollout": 4},
            "the batch keeps its size",
            lambda run, where: len(set(run.keep.rollouts[0].trajectory_ids.tolist())) == 16,
        ),
    ],
    "The policy": [
        Cell(
            "LoRA", lambda where: {"build": lambda path: grpo(path, {"lora": LoraSpec(r=2)})},
            "the adapter moves, and nothing else",
            lambda run, where: bool(run.moved) and all("lora_" in name for name in run.moved),
        ),
        Cell(
            "a mixture of experts, whose routing is replayed",
            lambda where: {"build": lambda path: grpo(mixture(path))},
            "the trainer's log-probs are those of sampling, although routers nearly tie; without replay they are not",
            replayed,
        ),
        Cell(
            "`freeze`", lambda where: {"build": lambda path: grpo(path, {"freeze": ["*mlp*"]})},
            "what is frozen stays",
            lambda run, where: bool(run.moved) and not any("mlp" in name for name in run.moved),
        ),
        Cell(
            "`gradient_checkpointing`",
            lambda where: {"build": lambda path: grpo(path, {"gradient_checkpointing": True})},
            "the update without it", same_weights({}),
        ),
        *(layout(name) for name in ("packed", "shared_prefix")),
        Cell(
            "`actor.layout: shared_prefix`, cut by `micro_batch_tokens`",
            lambda where: {
                "build": lambda path: grpo(path, {"layout": "shared_prefix"}, updates=Updates(micro_batch_tokens=128))
            },
            "the update of the padded layout", same_weights({"build": lambda path: grpo(path, {"layout": "padded"})}),
        ),
        Cell(
            "`micro_batch_tokens`",
            lambda where: {"build": lambda path: grpo(path, updates=Updates(micro_batch_tokens=256))},
            "the update of one micro-batch", same_weights({}),
        ),
    ],
    "Strategies": [
        *(
            Cell(
                f"{name}, two ranks", shows="the update of one process",
                tested=dict.fromkeys((ENVIRONMENT, PROGRAM), RUNS + RANKS),
            )
            for name in ("DDP", "FSDP2", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3")
        ),
    ],
    "Estimators and losses": [
        Cell(
            "trajectory-level estimators, losses, aggregations",
            lambda where: {"build": lambda path: grpo(path, loss=GSPO())},
            "GSPO: one ratio per trajectory; all others: `tests/algorithms/test_trajectories.py`",
        ),
        Cell(
            "PPO with a critic", lambda where: {"build": critic}, "the critic has values of every sampled token",
            lambda run, where: bool((run.keep.experiences[0].values[run.keep.rollouts[0].response_mask] != 0).all()),
        ),
        estimator("`TurnReturns`", lambda path: grpo(path, advantage=TurnReturns(gamma=0.5))),
        estimator("`TurnGAE`", lambda path: critic(path, advantage=TurnGAE(gamma=0.5))),
        estimator(
            "`GiGPO`", lambda path: grpo(path, advantage=GiGPO()), {PROGRAM: "nothing says which state a turn began in"}
        ),
        Cell(
            "turn-level estimators with `reward_clip`",
            lambda where: {"build": lambda path: grpo(path, advantage=TurnReturns(), shaping=Shaping(reward_clip=1.0))},
            refused="gives turns credit for their own rewards",
        ),
        Cell(
            "turn-level estimators with `RewardNormalization`",
            lambda where: {"build": lambda path: grpo(path, advantage=TurnReturns()),
                           "callbacks": [RewardNormalization()]},
            refused="gives turns credit for their own rewards",
        ),
        Cell(
            "`KLInLoss`, `AdaptiveKL`", lambda where: {
                "build": lambda path: grpo(path, kl=KLInLoss(coef=0.1)), "callbacks": [AdaptiveKL(target=0.1)],
            },
            "the reference scores every sampled token",
            lambda run, where: run.keep.experiences[0].ref_logprobs is not None,
        ),
        Cell(
            "`KLInReward`", lambda where: {"build": lambda path: critic(path, kl=KLInReward(coef=0.1))},
            "the reference scores every sampled token",
            lambda run, where: run.keep.experiences[0].ref_logprobs is not None,
        ),
        Cell(
            "`ppo_epochs`, `minibatch_size`",
            lambda where: {"build": lambda path: grpo(path, ppo_epochs=2, updates=Updates(minibatch_size=4))},
            "four updates of a rollout", lambda run, where: run.module.policy_version == 4,
        ),
        Cell(
            "`ptx`", lambda where: {
                "build": lambda path: grpo(path, extra_losses=ExtraLosses(ptx_coef=0.5)),
                "ptx": PTXSource(rows=[{"prompt": "say a", "completion": "a"}], batch_size=1),
            },
            "a supervised loss", lambda run, where: run.keep.metrics[0]["loss/ptx"] > 0,
        ),
        Cell(
            "distillation",
            lambda where: {"build": lambda path: DistillLightningModule(path, {"one": teacher(path)}, optimizer=sgd)},
            "the teacher scores every sampled token",
            lambda run, where: "teacher/logprobs" in run.keep.experiences[0].token_extras,
        ),
        Cell(
            "distillation with a `divergence`", lambda where: {
                "build": lambda path: DistillLightningModule(
                    path, {"one": teacher(path)}, divergence=ReverseKL(), optimizer=sgd
                ),
            },
            "the whole distributions of every sampled token differ",
            lambda run, where: run.keep.metrics[0]["loss/teacher"] > 0,
        ),
    ],
    "Sampling": [
        Cell(
            "`temperature`", lambda where: {"sampling": SamplingParams(max_new_tokens=6, temperature=0.7)},
            "without `TrajectoryLogprobCheck`: the policy moves", lambda run, where: bool(run.moved), prove=False,
        ),
        Cell(
            "`TrajectoryLogprobCheck` with `temperature`", lambda where: {
                "sampling": SamplingParams(max_new_tokens=6, temperature=0.7), "callbacks": [TrajectoryLogprobCheck()],
            },
            refused="TrajectoryLogprobCheck with sampling.temperature=0.7",
        ),
        Cell(
            "`top_p`", lambda where: {"sampling": SamplingParams(max_new_tokens=6, top_p=0.5)},
            "without `TrajectoryLogprobCheck`: what each token was drawn from is recorded",
            lambda run, where: any(s is not None and bool(s.counts.any()) for s in run.keep.rollouts[0].supports),
            prove=False,
        ),
        Cell(
            "`TrajectoryLogprobCheck` with `top_p`", lambda where: {
                "sampling": SamplingParams(max_new_tokens=6, top_p=0.5), "callbacks": [TrajectoryLogprobCheck()],
            },
            refused="TrajectoryLogprobCheck with sampling.top_p=0.5",
        ),
        Cell(
            "`stop`", lambda where: {"sampling": SamplingParams(max_new_tokens=12, stop=["e", "a"])},
            "replies end with it",
            lambda run, where: any(reply.endswith(("e", "a")) for reply in replies(run)),
        ),
    ],
    "Prompts and rewards": [
        Cell(
            "reward functions", lambda where: {"rewards": [some_flat]}, "they get the last reply",
            lambda run, where: bool((run.keep.rollouts[0].reward_parts["some_flat"] >= 0).all()),
        ),
        Cell(
            "`RewardNormalization`", lambda where: {"callbacks": [RewardNormalization()]},
            "rewards are scaled", lambda run, where: bool(run.keep.rollouts[0].rewards.isfinite().all()),
        ),
        Cell(
            "`evaluation`", lambda where: {
                "evaluation": Evaluation([{"prompt": "say a", "word": "a"}], SamplingParams(max_new_tokens=4), 2),
            },
            "evaluation plays turns, too",
            lambda run, where: run.keep.evaluated[0].turn_ids is not None and len(run.keep.evaluated) == 1,
        ),
        Cell(
            "`PromptCurriculum`", lambda where: {
                "prompts": PromptCurriculum(
                    PromptSource(rows=[{"prompt": f"say {word}", "word": word} for word in "abab"]), replay=0.25
                ),
            },
            "two of four prompts have been seen",
            lambda run, where: run.keep.metrics[0]["rollout/rows_unseen"] == 0.5,
        ),
        Cell(
            "images in messages",
            refused={PROGRAM: "this endpoint takes text only"},
            shows="the trainer's log-probs are those of sampling",
            tested={
                ENVIRONMENT: "tests/vision/test_environments.py::test_a_run_learns_from_what_environments_show",
                PROGRAM: "tests/environments/test_endpoint.py::"
                "test_malformed_requests_are_refused_in_the_shape_of_their_interface_and_fail_nothing",
            },
        ),
        Cell(
            "rows with images (`media_columns`)",
            tested={
                way: "tests/vision/test_environments.py::test_rows_with_images_are_left_to_the_environment"
                for way in (ENVIRONMENT, PROGRAM)
            },
            refused="has media, but an environment's `reset` makes the first messages",
        ),
        refused_prompts("`prompts.system_prompt`", "prompts.system_prompt with an environment", system_prompt="s"),
        refused_prompts("`prompts.template_kwargs`", "set episode.template_kwargs", template_kwargs={"a": 1}),
        refused_prompts(
            "`overlong: truncate_left`", 'prompts.overlong="truncate_left" with an environment',
            max_prompt_tokens=9, overlong="truncate_left",
        ),
    ],
    "Callbacks and checkpoints": [
        Cell(
            "`EMA`", lambda where: {"callbacks": [EMA(0.5)]}, "the policy moves", lambda run, where: bool(run.moved)
        ),
        Cell(
            "`RolloutWriter`", lambda where: {"callbacks": [RolloutWriter(1, str(where.folder / "rollouts"))]},
            "every trajectory is saved with its turns, and its tokens with the policy before and after the update",
            saved,
        ),
        Cell("`RolloutCheckpoint`: killed and resumed, bit for bit", tested={
            way: RUNS + "test_killed_between_two_turns_and_resumed_is_the_run_that_was_not"
            for way in (ENVIRONMENT, PROGRAM)
        }),
    ],
}  # fmt: skip


@pytest.mark.parametrize("way", [ENVIRONMENT, PROGRAM])
@pytest.mark.parametrize("cell", [cell for cells in CELLS.values() for cell in cells], ids=lambda cell: cell.feature)
def test_each_cell_is_run_or_refused_as_the_page_says(cell: Cell, way: str, path: str, tmp_path: Path) -> None:
    if cell.tested:
        if way not in cell.tested:
            pytest.skip("not tried, and so on the page")
        file, name = cell.tested[way].split("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text()
        return
    where = Where(path, tmp_path, way)
    arguments = {"canary": cell.prove, "compare": cell.prove, **cell.arguments(where)}
    try:
        if cell.refusal(way):
            with pytest.raises(ValueError, match=re.escape(cell.refusal(way))):
                where.run(**{**arguments, "canary": False})
            return
        run = where.run(**arguments)
        assert (
            run.moved and run.keep.metrics[0]["rollout/turns"] > 1 and run.keep.metrics[0]["rollout/stop_failure"] == 0
        )
        assert not cell.prove or max(run.keep.gaps) < 1e-5
        assert cell.check(run, where), cell.shows
    finally:
        for end in where.ended:
            end()


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text() == page(), "docs/combinations.md: run `python -m tests.rollout.test_combinations`"


def word(cell: Cell, way: str) -> str:
    """What became of a cell."""
    if cell.tested and way not in cell.tested:
        return "not tried"
    return "refused" if cell.refusal(way) else "run"


def page() -> str:
    """docs/combinations.md."""
    lines = [
        "# What combines with environments",
        "",
        "Written by `python -m tests.rollout.test_combinations` from the table that",
        "`tests/rollout/test_combinations.py` tests with a tiny model, one rollout per cell. In every run the policy",
        "must move, and each trained token is compared with the engine's log-probs at 1e-5 (`TrajectoryLogprobCheck`);",
        "not with `Ahead`, `InFlight`, or another sampling temperature. *Environment* is an `EnvironmentEpisode`,",
        "*program* an `AgentProgram` ([environments](environments.md)). A refusal names the argument and the way out.",
    ]
    for title, cells in CELLS.items():
        lines += ["", f"## {title}", "", "| feature | environment | program | what is seen |", "|---|---|---|---|"]
        for cell in cells:
            words = [word(cell, way) for way in (ENVIRONMENT, PROGRAM)]
            said = dict.fromkeys(f"“{text}”" for way in (ENVIRONMENT, PROGRAM) if (text := cell.refusal(way)))
            shows = [cell.shows] if cell.shows and "run" in words else []
            tests = [f"`{test}`" for test in dict.fromkeys(cell.tested.values())]
            seen = "<br>".join(text for text in ("; ".join([*shows, *said]), *tests) if text)
            lines.append(f"| {cell.feature} | {words[0]} | {words[1]} | {seen} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
