"""Rewards from a scoring server over HTTP.

One request, `POST url` with JSON (lists of n values, keys that are not configured are left out):

    {"queries": [prompt + completion, ...], "prompts": [...], "completions": [...], "group_ids": [...],
     "references": [...], "labels": [...], "images": [...], "videos": [...], "completion_ids": [[...], ...],
     "columns": {name: [...]}}

`images` has a list of base64 PNG files for each row, `videos` a list of lists of them, one for each frame.
and its answer `{"rewards": [number or null, ...]}` with n values. `lightrl serve-reward` speaks it, and servers that
follow the `queries`/`prompts`/`labels` -> `rewards` convention do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightrl.compat.arguments import at_least
from lightrl.engines.background import all_of
from lightrl.rewards.base import RewardError
from lightrl.rewards.client import RetryingReward
from lightrl.rewards.media import encode_rows


class RemoteReward(RetryingReward):
    """Asks a scoring server.

    A refusal (4xx) or an answer that is not n rewards is a mistake in the set-up: it is not repeated and always an
    error.

    Args:
        url: the server's scoring address, for example `http://127.0.0.1:8000/score`.
        columns: data-set columns to send, under their own names.
        reference_column: column sent as `references`.
        label_column: sent as `labels`.
        image_column: column sent as `images` in place of the row's decoded images: text as it is, bytes and PIL
            images as base64 (PIL as PNG), lists of them alike.
        send_media: whether rows with images or videos send them, as base64.
        send_completion_ids: also send the sampled token ids.
        batch_size: most rows per request, at least 1; a group larger than that is sent whole.
        connection: time-outs, repetitions, token: the other arguments of `RetryingReward`.

    Raises:
        ValueError: an argument out of range, or no token in `token_env`.
    """

    def __init__(
        self,
        url: str,
        columns: list[str] | None = None,
        reference_column: str | None = None,
        label_column: str | None = None,
        image_column: str | None = None,
        send_media: bool = True,
        send_completion_ids: bool = False,
        batch_size: int = 64,
        **connection: Any,
    ) -> None:
        super().__init__(url, **connection)
        self.columns = list(columns or [])
        self.fields = {"references": reference_column, "labels": label_column, "images": image_column}
        self.send_media = send_media
        self.send_completion_ids = send_completion_ids
        self.batch_size = at_least("RemoteReward.batch_size", batch_size, 1)

    async def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        group_ids: Sequence[int],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        media = {name: rows for name, rows in (("images", images), ("videos", videos)) if any(rows)}
        rows = self._rows(prompts, completions, group_ids, {**columns, **media})
        if self.send_media:
            rows = {**{name: encode_rows(values) for name, values in media.items()}, **rows}
        batches = _batches(group_ids, self.batch_size)
        answers = await all_of(self._ask({name: v[a:b] for name, v in rows.items()}, b - a) for a, b in batches)
        if self.on_failure == "skip" and log_metric is not None:
            lost = sum(b - a for (a, b), answer in zip(batches, answers, strict=True) if answer is None)
            log_metric("unanswered", lost / max(1, len(completions)))
        values: list[float | None] = []
        for (a, b), answer in zip(batches, answers, strict=True):
            values += [None] * (b - a) if answer is None else answer
        return values

    def _rows(
        self, prompts: Sequence[str], completions: Sequence[str], group_ids: Sequence[int], columns: dict[str, Any]
    ) -> dict[str, list[Any]]:
        """Every key of the request; keys of `columns` get the prefix "columns/"."""
        wanted = {key: name for key, name in self.fields.items() if name is not None}
        wanted.update({f"columns/{name}": name for name in self.columns})
        missing = sorted(set(wanted.values()) - columns.keys())
        if missing:
            raise RewardError(
                f"RemoteReward sends the columns {', '.join(missing)}, which the data set lacks; "
                f"it has: {', '.join(sorted(columns))}."
            )
        rows = {key: list(columns[name]) for key, name in wanted.items()}
        if "images" in rows:
            rows["images"] = encode_rows(rows["images"])
        if self.send_completion_ids:
            rows["completion_ids"] = [list(ids) for ids in columns["completion_ids"]]
        rows["queries"] = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        return {**rows, "prompts": list(prompts), "completions": list(completions), "group_ids": list(group_ids)}

    async def _ask(self, rows: dict[str, list[Any]], num_rows: int) -> list[float | None] | None:
        """One request with its repetitions; None where all of them failed and `on_failure` is "skip"."""
        body: dict[str, Any] = {key: value for key, value in rows.items() if not key.startswith("columns/")}
        body["columns"] = {key[8:]: value for key, value in rows.items() if key.startswith("columns/")}
        answer = await self.post(body, f"{num_rows} rows")
        if answer is None:
            return None
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != num_rows:
            raise RewardError(
                f'{self.url} answered {str(answer)[:200]} for {num_rows} rows, not {{"rewards": [...]}} with '
                "one number or null each."
            )
        return rewards


def _batches(group_ids: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Cuts n rows into [start, end) pieces of at most `size` rows, between groups only."""
    cuts = [i for i in range(1, len(group_ids)) if group_ids[i] != group_ids[i - 1]] + [len(group_ids)]
    batches, start, end = [], 0, 0
    for cut in cuts:
        if cut - start > size and end > start:
            batches.append((start, end))
            start = end
        end = cut
    return [*batches, (start, end)] if end > start else batches
