"""A judge that ranks the completions of a group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from lightrl.compat.arguments import one_of
from lightrl.engines.background import all_of
from lightrl.rewards.chat import GUARD, ChatJudge, Judgment, object_schema, quoted, read_json, read_score, rows_to_judge

RANKING = """- An answer that reaches the goal scores much higher than one that does not.
- Among answers that reach it, the one that is more direct, correct in its details, and useful scores higher.
- Close answers get close scores, and an answer that is partly correct gets a part of the score."""


class GroupRanking(ChatJudge):
    """Compares all completions of a prompt with a judge, in one request.

        by="score":  r = score / 100, relative to the rest of the group
        by="rank":   r = (completions with a lower score + half of the others with the same) / (n - 1), in [0, 1]

    n is the number of distinct completions. Identical completions are shown once and get the same reward. Order and
    names of completions depend on a hash of their text, so a completion can't refer to another or influence its
    position. If the judge's response is invalid (see `ChatJudge`), the whole group is unscored. The judge sees all
    turns of a trajectory. Rewards are only comparable within a group; their mean over a run is not meaningful.

    Args:
        url: URL of an OpenAI-compatible server (see `ChatJudge`).
        model: Model name on the server.
        rubric: Criteria for better completions.
        by: Whether rewards are the judge's scores ("score") or their ranks ("rank").
        columns: Dataset columns to show to the judge, such as a reference answer.
        judge: Other arguments of `ChatJudge`.

    Source: RULER, https://art.openpipe.ai/fundamentals/ruler. RULER supports only scores and keeps the sampling order.
    """

    def __init__(
        self,
        url: str,
        model: str,
        rubric: str = RANKING,
        by: Literal["score", "rank"] = "score",
        columns: list[str] | None = None,
        **judge: Any,
    ) -> None:
        super().__init__(url, model, **judge)
        self.by = one_of("GroupRanking.by", by, "score", "rank")
        self.columns = list(columns or [])
        self.needed_columns = tuple(self.columns)
        self.instruction = (
            f"You compare answers of a language model to one question, which is part of its training.\n{GUARD}\n\n"
            f"What makes an answer better:\n{rubric}\n\nReply with one JSON object, with each answer once: "
            '{"answers": [{"name": "...", "reason": "one or two sentences", "score": N}, ...]}, N an integer from 0 to '
            "100. Use the whole range, and give different scores to answers that differ in quality."
        )

    async def __call__(
        self,
        completions: Sequence[str],
        group_ids: Sequence[int],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
        images: Sequence[Any] = (),
        **columns: Any,
    ) -> list[float | None]:
        rows = rows_to_judge(completions, self.prompt_column, self.columns, columns)
        pictures = self.pictures(images, len(completions))
        groups = list(dict.fromkeys(group_ids))
        answers = [quoted(row.pop("answer")) for row in rows]
        members = [[i for i, of_row in enumerate(group_ids) if of_row == group] for group in groups]
        judged = await all_of(
            self._compare(rows[own[0]], {answers[i] for i in own}, pictures[own[0]]) for own in members
        )
        self.report(judged, [groups.index(group) for group in group_ids], log_metric, log_extra)
        of_group = dict(zip(groups, judged, strict=True))
        found = (of_group[group].value for group in group_ids)
        return [None if values is None else values[answer] for values, answer in zip(found, answers, strict=True)]

    async def _compare(
        self, question: Mapping[str, Any], answers: Iterable[str], pictures: list[dict[str, Any]]
    ) -> Judgment:
        """Judges one group. The value of the judgment maps each answer (as JSON) to its reward."""
        key = quoted(question)
        places = {answer: hashlib.sha256((key + answer).encode()).hexdigest()[:4] for answer in answers}
        order = sorted(places, key=lambda answer: (places[answer], answer))
        names = {f"{places[answer]}-{number}": answer for number, answer in enumerate(order)}
        shown = ", ".join(f'{{"name": "{name}", "answer": {answer}}}' for name, answer in names.items())
        text = f'{key[:-1]}, "answers": [{shown}]}}'
        entry = object_schema(
            name={"type": "string", "enum": list(names)},
            reason={"type": "string"},
            score={"type": "integer", "enum": list(range(101))},
        )
        schema = object_schema(answers={"type": "array", "items": entry})
        return await self.ask(self.instruction, text, pictures, lambda said: self._rewards(said, names), schema)

    def _rewards(self, said: str, names: Mapping[str, str]) -> dict[str, float]:
        listed = read_json(said).get("answers")
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise ValueError('It has no list "answers".')
        if sorted(str(entry.get("name")) for entry in listed) != sorted(names):
            raise ValueError(f"It must name each of these answers once: {', '.join(names)}.")
        scores = {names[entry["name"]]: read_score(entry, 100) for entry in listed}
        if self.by == "score":
            return {answer: score / 100 for answer, score in scores.items()}
        every = list(scores.values())
        below = {x: sum(y < x for y in every) + (every.count(x) - 1) / 2 for x in every}
        return {answer: below[x] / (len(every) - 1) if len(every) > 1 else 0.5 for answer, x in scores.items()}
