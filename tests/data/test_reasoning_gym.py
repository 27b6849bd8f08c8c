"""Rows and rewards of reasoning-gym's generators."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("reasoning_gym")

from lightrl.data.curriculum import PromptCurriculum
from lightrl.data.prompts import PromptSource
from lightrl.data.reasoning_gym import ReasoningGymRows, ReasoningGymTask
from lightrl.rewards import ReasoningGymReward


@pytest.fixture(scope="module")
def scored() -> Iterator[Any]:
    """`scored(extract, texts, gym)` -> scores."""
    made: dict[str, ReasoningGymReward] = {}

    def score(extract: Any, texts: list[str], gym: list[str], **options: Any) -> list[float | None]:
        if extract not in made:
            made[extract] = ReasoningGymReward(extract, timeout=2.0)
        return made[extract](texts, gym, **options)

    yield score
    for reward in made.values():
        reward.close()


SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def test_no_question_is_in_both_splits() -> None:
    """Single-digit sums have 162 questions, of which many are in the evaluation set."""
    settings: dict[str, Any] = {"tasks": {"chain_sum": SUMS}, "size": 150, "seed": 3, "num_eval": 64}
    train, held_out = (ReasoningGymRows(**settings, split=split)() for split in ("train", "eval"))
    assert len(train) == 150 and len(held_out) == 64
    assert not set(train["prompt"]) & set(held_out["prompt"])
    assert ReasoningGymRows(**settings)().to_list() == train.to_list()


@pytest.mark.parametrize("task", ["chain_sum", "letter_counting", "number_sorting", "countdown", "maze", "graph_color"])
def test_a_reference_is_scored_as_right_and_nonsense_is_not(task: str, scored: Any) -> None:
    rows = ReasoningGymRows(task, size=4)()
    good, bad = (scored("text", [t or "" for t in texts], rows["gym"]) for texts in (rows["answer"], ["qwertz"] * 4))
    assert all(score < 1 for score in bad)
    if task == "graph_color":
        assert rows["answer"] == [None] * 4
    elif task != "countdown":  # whose reference is one expression of many
        assert good == [1.0] * 4


def test_answers_that_run_code_or_never_end_harm_nothing(scored: Any, tmp_path: Path) -> None:
    """`binary_matrix` calls `eval` on an answer, and `polynomial_multiplication` sympy's parser, which does."""
    file = str(tmp_path / "new")
    for task in ("binary_matrix", "polynomial_multiplication"):
        row = ReasoningGymRows(task, size=1)()[0]
        attacks = [f"__import__('os').system('touch {file}')", f"open({file!r}, 'w')"]
        attacks += ["__import__('os')._exit(0)", "9**9**9**9", "(" * 5000]
        scores = scored("text", [*attacks, row["answer"]], [row["gym"]] * 6)
        assert scores[-1] == 1.0 and not any(scores[:-1]), task
        assert scores[2:4] == [None, None] and not Path(file).exists()


def test_solved_leaves_out_partial_credit(scored: Any) -> None:
    row, logged = ReasoningGymRows({"chain_sum": SUMS}, size=1)()[0], dict[str, float]()
    texts = [row["answer"], f"{row['answer']}0", "no", row["answer"]]
    scores = scored("number", texts, [row["gym"]] * 4, log_metric=logged.__setitem__)
    assert 0 < scores[1] < 1 and sum(scores) > 2
    assert logged == {"solved": 0.5, "timeouts": 0.0}


def test_where_the_answer_is_found(scored: Any) -> None:
    row = ReasoningGymRows({"chain_sum": SUMS}, size=1)()[0]
    answer = row["answer"]
    texts = {
        "tags": f"<answer>1e9</answer> or <answer> {answer} </answer>.",
        "boxed": rf"so \boxed{{{answer}}}",
        "number": f"7 and then {answer}.",
        "last_line": f"so\n{answer}\n\n",
        "text": f" {answer}",
    }
    for extract, text in texts.items():
        assert scored(extract, [text, "no"], [row["gym"]] * 2) == [1.0, 0.0]


def test_a_mixture_holds_its_weights_and_levels(tokenizer) -> None:
    easy, hard = {"max_digits": 1, "min_digits": 1}, {"max_digits": 4, "min_digits": 4}
    rows = ReasoningGymRows(
        [
            ReasoningGymTask("chain_sum", easy, weight=3.0, level="easy"),
            ReasoningGymTask("chain_sum", hard, level="hard"),
        ],
        size=80,
    )
    found = rows()
    assert found["level"].count("easy") == 60 and found["level"].count("hard") == 20
    assert found["level"][:20].count("hard") > 1  # shuffled
    assert {json.loads(gym)["settings"]["max_digits"] for gym in found["gym"]} == {1, 4}
    curriculum = PromptCurriculum(PromptSource(rows=rows), class_column="level", classes=["easy", "hard"])
    drawn = curriculum.load(tokenizer).batch(0, 20)
    assert set(drawn.columns["level"]) == {"easy"}


def test_questions_are_equal_in_every_process_and_leave_the_random_generators_alone(scored: Any) -> None:
    """`isomorphic_strings` depends on the order of a set, and the others on the process-wide generators."""
    tasks: dict[str, Any] = {"isomorphic_strings": {}, "list_functions": {}, "pool_matrix": {}}
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    rows = ReasoningGymRows(tasks, size=60, num_eval=6)()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[union-attr]
    code = f"from lightrl.data import ReasoningGymRows as R; print(R({tasks}, size=60, num_eval=6)()['prompt'][:])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=550)
    assert done.stdout.strip() == str(rows["prompt"][:])
    assert scored("text", rows["answer"], rows["gym"]) == [1.0] * 60


@pytest.mark.parametrize(
    ("task", "answer"),
    [("prime_factorization", "I don't know"), ("game_of_life", "{}"), ("boxnet", "[1]"), ("spiral_matrix", "exit()")],
)
def test_an_answer_that_a_generator_cannot_read_scores_zero(task: str, answer: str, scored: Any) -> None:
    row = ReasoningGymRows(task, size=1, num_eval=0)()[0]
    assert scored("text", [answer], [row["gym"]]) == [0.0]


def test_a_wrong_task_is_named() -> None:
    for tasks, message in (({"chain_summ": {}}, "chain_summ"), ({"chain_sum": {"min_trems": 2}}, "min_trems")):
        with pytest.raises(ValueError, match=message):
            ReasoningGymRows(tasks)()
