"""Chat models as judges, at any OpenAI-compatible address."""

from __future__ import annotations

import asyncio
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

from lightrl.compat.arguments import at_least
from lightrl.engines.background import all_of
from lightrl.rewards.answers import TimedPattern
from lightrl.rewards.base import RewardError
from lightrl.rewards.encoding import encode_rows
from lightrl.rewards.remote import RetryingReward
from lightrl.rewards.rules import column_of

INSTRUCTION = """You grade answers. Here is the question (its images, if it has any, come first):

{prompt}

Here is the answer:

{completion}

Judge how correct and helpful the answer is, then end with one line "Score: N", N from 0 (useless) to 10 (perfect)."""


class GenerativeJudge(RetryingReward):
    """Asks a model at an OpenAI-compatible chat endpoint (vLLM's or SGLang's server, a hosted one) for a score.

        r = (x - low) / (high - low)        x: the last number that `pattern` finds in the judgment

    Each completion is one request with one user turn: the row's images, then `instruction`. A judgment without a number
    in [low, high] scores None; their share is logged as `reward/<name>/unread`. Judgments are shown with the
    completions as `<name>/judgement`.

    Args:
        url: Address of the chat completions, for example `http://127.0.0.1:8000/v1/chat/completions`.
        model: The judge's name at the server.
        instruction: Text for the judge. `{completion}` (required), `{prompt}`, and `{name}` of any dataset column are
            filled in; `{{` and `}}` are braces.
        prompt_column: Column for `{prompt}`: the question before any chat template, whose markers would confuse another
            model. A conversation becomes the texts of its turns.
        pattern: Regular expression with one group, the number. A judgment on which it takes over a second has none.
        low: x of reward 0.
        high: x of reward 1, above low.
        send_images: Send the row's images.
        video_frames: Number of evenly spaced frames of each video to send as images; 0 sends none.
        max_tokens: Maximum length of a judgment.
        temperature: Sampling temperature of the judge; 0 is greedy.
        extra: Further keys of the request, such as {"chat_template_kwargs": {"enable_thinking": false}}.
        timeout: Seconds for one request.
        concurrency: Maximum number of concurrent requests.
        connection: Retries, token, `on_failure`: the other arguments of `RetryingReward`.

    Raises:
        ValueError: An argument is out of range, the pattern does not have one group, or the instruction cannot be
            filled in or does not show the completion.
    """

    def __init__(
        self,
        url: str,
        model: str,
        instruction: str = INSTRUCTION,
        prompt_column: str = "prompt",
        pattern: str = r"[Ss]core\W*?\s*(-?\d+(?:\.\d+)?)",
        low: float = 0.0,
        high: float = 10.0,
        send_images: bool = True,
        video_frames: int = 8,
        max_tokens: int = 512,
        temperature: float = 0.0,
        extra: dict[str, Any] | None = None,
        timeout: float = 120.0,
        concurrency: int = 32,
        **connection: Any,
    ) -> None:
        self.pattern = TimedPattern("GenerativeJudge", pattern, timeout=1.0)
        if self.pattern.groups != 1:
            raise ValueError(f"GenerativeJudge: pattern={pattern!r} has {self.pattern.groups} groups. Use one group.")
        if not low < high:
            raise ValueError(f"GenerativeJudge: low={low}, high={high}: low must be below high.")
        super().__init__(url, timeout=timeout, concurrency=concurrency, **connection)
        self.fields = _fields(instruction)
        self.instruction = instruction
        self.prompt_column = prompt_column
        self.low = low
        self.high = high
        self.send_images = send_images
        self.video_frames = at_least("GenerativeJudge.video_frames", video_frames, 0)
        self.body = {"model": model, "max_tokens": max_tokens, "temperature": temperature, **(extra or {})}

    async def __call__(
        self,
        completions: Sequence[str],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        **columns: Any,
    ) -> list[float | None]:
        names = {name: self.prompt_column if name == "prompt" else name for name in self.fields - {"completion"}}
        wanted = {name: column_of(columns, column) for name, column in names.items()}
        texts = [
            self.instruction.format(completion=text, **{name: plain_text(values[i]) for name, values in wanted.items()})
            for i, text in enumerate(completions)
        ]
        pictures = self._pictures(images, videos, len(completions))
        judgments = await all_of(self._ask(*pair) for pair in zip(texts, pictures, strict=True))
        rewards = [await asyncio.to_thread(self._read, judgment) for judgment in judgments]
        answered = [judgment is not None for judgment in judgments]
        unread = sum(there and reward is None for there, reward in zip(answered, rewards, strict=True))
        log_metric("unread", unread / max(1, len(completions)))
        if self.on_failure == "skip":
            log_metric("unanswered", 1 - sum(answered) / max(1, len(completions)))
        log_extra("judgement", judgments)
        return rewards

    def _pictures(self, images: Sequence[Any], videos: Sequence[Any], num_rows: int) -> list[list[str]]:
        """Base64 PNG files of each row."""
        pictures: list[list[str]] = [[] for _ in range(num_rows)]
        if self.send_images and any(images):
            pictures = [list(row) for row in encode_rows(images)]
        if self.video_frames and any(videos):
            sampled = {id(row): [_evenly(video, self.video_frames) for video in row] for row in videos}
            for have, row in zip(pictures, encode_rows([sampled[id(row)] for row in videos]), strict=True):
                have += [frame for video in row for frame in video]
        return pictures

    async def _ask(self, text: str, pictures: list[str]) -> str | None:
        """The judgment; None if all retries failed and `on_failure` is "skip"."""
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}} for picture in pictures
        ]
        content.append({"type": "text", "text": text})
        answer = await self.post({**self.body, "messages": [{"role": "user", "content": content}]}, "a row")
        if answer is None:
            return None
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise RewardError(f"{self.url} answered {str(answer)[:200]}, not a chat completion.") from error

    def _read(self, judgment: str | None) -> float | None:
        try:
            found = self.pattern.last(judgment or "")
            x = math.nan if found is None else float(found)
        except (TimeoutError, ValueError):
            return None
        return (x - self.low) / (self.high - self.low) if self.low <= x <= self.high else None


def _fields(instruction: str) -> set[str]:
    """The names that are filled into an instruction."""
    try:
        parts = [part[1:] for part in string.Formatter().parse(instruction) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"GenerativeJudge: instruction={instruction[:60]!r}: {error}. Write braces twice.") from error
    for name, form, conversion in parts:
        if not name or form or conversion or set(".[]") & set(name) or name.isdigit():
            raise ValueError(
                f"GenerativeJudge: instruction has {{{name}}} with more, or less, than a name. Write {{completion}}, "
                "{prompt}, or {COLUMN} alone, and any other braces twice."
            )
    fields = {str(name) for name, _, _ in parts}
    if "completion" not in fields:
        raise ValueError("GenerativeJudge: instruction without {completion}: the judge would not see what it grades.")
    return fields


def plain_text(value: Any) -> str:
    """A column's value as text; of a conversation the texts of its turns, without images."""
    listed = isinstance(value, (list, tuple))
    if listed and value and all(isinstance(turn, dict) and "content" in turn for turn in value):
        return "\n\n".join(plain_text(turn["content"]) for turn in value)
    if listed and all(isinstance(part, dict) and "type" in part for part in value):
        return "\n".join(str(part["text"]) for part in value if part["type"] == "text" and part.get("text") is not None)
    return str(value)


def _evenly(frames: Any, count: int) -> list[Any]:
    """At most `count` frames, including the first and the last."""
    total = len(frames)
    if total <= count:
        return list(frames)
    return [frames[round(i * (total - 1) / max(1, count - 1))] for i in range(count)]
