"""Games with the interfaces of Gymnasium, GEM, SkyRL-Gym, and TextArena."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lightrl.environments import GymnasiumEnvironment, TextArenaEnvironment
from lightrl.records import Trajectory
from tests.environments.scripted import play_group, play_one, said


def play(make: Any, replies: Sequence[str], row: Any = None, **settings: Any) -> Trajectory:
    return play_one(make, [said(text) for text in replies], row or {"prompt": "Go. "}, **settings)


def shown(trajectory: Trajectory) -> list[Any]:
    return [message["content"] for message in trajectory.messages if message["role"] != "assistant"]


class Guess:
    """Guess a digit, with the interface that `kind` names."""

    def __init__(self, kind: str = "gymnasium") -> None:
        self.kind, self.tries, self.closed = kind, 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.number = np.random.default_rng(seed).integers(10)
        text = f"{(options or {}).get('hello', 'Guess a digit')}: {self.number}?"
        return text, {}

    def step(self, action: str) -> Any:
        self.tries += 1
        if action == "break":
            raise RuntimeError("the dice are gone")
        right = action == str(self.number)
        cut = self.tries == 3 and not right
        said, reward = f"no, {self.tries} tries", np.float32(right - 0.25)
        if self.kind == "odd":
            return said, reward
        return said, reward, right, cut, {}

    def close(self) -> None:
        self.closed = True


def test_a_game_with_gymnasiums_interface_is_played() -> None:
    made: list[Guess] = []

    def factory(kind: str) -> Guess:
        made.append(Guess(kind))
        return made[-1]

    def make() -> GymnasiumEnvironment:
        return GymnasiumEnvironment(factory, {"kind": "gymnasium"})

    number = int(np.random.default_rng(5).integers(10))
    row = {"prompt": "Go. ", "hello": "Which one", "seed": 5}
    won = play(make, ["x", str(number)], row)
    assert shown(won) == [f"Go. Which one: {number}?", "no, 1 tries"]
    assert (won.stop_reason, won.turn_rewards, won.metrics["truncated"]) == ("stop", [-0.25, 0.75], 0.0)
    cut = play(make, ["x"] * 3, row)
    assert (cut.stop_reason, cut.turn_rewards, cut.metrics["truncated"]) == ("stop", [-0.25] * 3, 1.0)
    assert play(make, ["x"] * 2, row, max_turns=2).stop_reason == "turns"
    assert all(game.closed for game in made)
    assert shown(play(make, ["x"] * 3, seed=2**40)) == shown(play(make, ["x"] * 3, seed=2**40))


def test_a_reset_with_any_keywords_gets_the_seed() -> None:
    class Open(Guess):
        def reset(self, **given: Any) -> Any:
            return super().reset(**given)

    for seed in (1, 4):
        number = int(np.random.default_rng(seed).integers(10))
        played = play(lambda: GymnasiumEnvironment(Open), ["x"], {"prompt": "", "seed": seed}, max_turns=1)
        assert shown(played) == [f"Guess a digit: {number}?"]


def test_a_step_that_raises_or_returns_something_else_is_a_failure() -> None:
    failed = play(lambda: GymnasiumEnvironment(Guess), ["break"])
    assert failed.stop_reason == "failure" and "the dice are gone" in str(failed.failure)
    assert failed.raised_at.count("test_gym.py") == 1 and "gym.py" not in failed.raised_at.replace("test_gym.py", "")
    odd = play(lambda: GymnasiumEnvironment(Guess, {"kind": "odd"}), ["x"])
    assert odd.stop_reason == "failure" and "unpack" in str(odd.failure)


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("name", ["reset", "step"])
def test_an_async_game_is_a_failure_that_names_the_method(name: str) -> None:
    async def later(self: Any, *given: Any, **named: Any) -> None: ...

    failed = play(lambda: GymnasiumEnvironment(type("Async", (Guess,), {name: later})), ["x"])
    assert failed.stop_reason == "failure" and f"{name} is async" in str(failed.failure)


class Wandering:
    """A game that draws from the generators of the process, in `step` also."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        return f"{random.random()} {np.random.rand()}", {}

    def step(self, action: str) -> Any:
        time.sleep(0.01)
        return f"{random.random()} {np.random.rand()}", 0.0, False, False, {}


def test_games_that_draw_from_the_processs_generators_repeat_and_leave_them_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    games = play_group(
        lambda: GymnasiumEnvironment(Wandering, global_random=True), [said("x")] * 3, number=4, max_turns=3
    )
    assert len({tuple(shown(game)) for game in games}) == 1 and len(set(shown(games[0]))) == 3
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


class Chat:
    """A game with SkyRL-Gym's interface."""

    def __init__(self, extras: dict[str, Any], turns: int = 2) -> None:
        self.answer, self.left = extras["reward_spec"]["ground_truth"], turns

    def init(self, prompt: list[dict[str, str]]) -> Any:
        return [{"role": "system", "content": "Be brief."}, *prompt], {}

    def step(self, action: str) -> dict[str, Any]:
        self.left -= 1
        right = action == self.answer
        again = [] if right else [{"role": "user", "content": "Again."}]
        return {"observations": again, "reward": float(right), "done": right or self.left == 0, "metadata": {}}


def test_a_game_of_skyrl_gym_gets_the_row_and_talks_in_messages() -> None:
    row = {"prompt": "6 x 7?", "reward_spec": {"ground_truth": "42"}}
    won = play(lambda: GymnasiumEnvironment(Chat), ["41", "42"], row)
    assert [(message["role"], message["content"]) for message in won.messages] == [
        ("system", "Be brief."),
        ("user", "6 x 7?"),
        ("assistant", "41"),
        ("user", "Again."),
        ("assistant", "42"),
    ]
    assert (won.stop_reason, won.turn_rewards) == ("stop", [0.0, 1.0])


def test_a_game_of_textarena_is_played_turn_by_turn() -> None:
    pytest.importorskip("textarena")

    def guess(said: list[str], **row: Any) -> Trajectory:
        row = {"prompt": "Go. ", "seed": 5, **row}
        return play(lambda: TextArenaEnvironment("GuessTheNumber-v0"), said, row, max_turns=len(said))

    games = [guess([str(number)]) for number in range(1, 21)]
    (right,) = [number for number, game in enumerate(games, 1) if game.turn_rewards == [1.0]]
    low = guess(["[1]", f"I take [{right}]."]) if right > 1 else guess(["[20]", "[1]"])
    first, second = shown(low)[-2:]
    assert first.startswith("Go. You are Player 0.") and first.count("You are Player 0.") == 1
    assert second == f"The target number is {'higher' if right > 1 else 'lower'}."
    assert (low.turn_rewards, low.stop_reason, low.metrics["invalid_actions"]) == ([0.0, 1.0], "stop", 0.0)
    wrong = guess(["a hundred", "two hundred"])
    assert "valid '[number]'" in shown(wrong)[-1] and wrong.metrics["invalid_actions"] == 1.0
    assert shown(guess(["[1]"], seed=7)) == shown(guess(["[1]"], seed=7))
    mixed = play(lambda: TextArenaEnvironment("Countdown-v0"), ["[0 1 +]", "[9]"], max_turns=2)  # swaps ID and text
    assert mixed.failure is None and "Move history" in shown(mixed)[1]
