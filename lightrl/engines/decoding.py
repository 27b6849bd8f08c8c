"""The decoding loop of the transformers engine: admits prompts, samples a token per row, hands out finished groups.

Letters: P prompts, G completions per prompt, R live rows, V vocabulary, N most new tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightrl.engines.decoders import Decoder
from lightrl.engines.sampling import completion_uniforms, forbidden_tokens, sample
from lightrl.types import Completion, CompletionGroup, Prompts, SamplingParams

__all__ = ["Generation"]


class _Row:
    """One completion under way. `tokens` and `logprobs` lack what is in `Generation.pending`."""

    __slots__ = ("completion", "logprobs", "prompt", "text", "tokens", "visible")

    def __init__(self, prompt: int, completion: int) -> None:
        self.prompt, self.completion = prompt, completion
        self.tokens: list[int] = []
        self.visible: list[int] = []  # tokens that may be part of a stop string; empty where there are none
        self.logprobs: list[float] = []
        self.text: str | None = None  # set when a stop string cuts it


class Generation:
    """One call of `generate`.

    Args:
        decoder: empty; holds the keys and values.
        prompts, sampling, copies, seeds: as for `Engine.generate` (copies is G).
        tokenizer: for texts and stop strings.
        eos_ids: end-of-sequence tokens, heeded unless `sampling.ignore_eos`.
        device: of the logits.
        max_sequences: most rows at a time. max_tokens: most tokens held at a time.
        policy_version: of the weights that sample.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Prompts,
        sampling: SamplingParams,
        copies: int,
        seeds: Sequence[int],
        *,
        tokenizer: Any,
        eos_ids: set[int],
        device: torch.device,
        max_sequences: int,
        max_tokens: int,
        policy_version: int,
    ) -> None:
        self.decoder, self.prompts, self.sampling, self.copies = decoder, prompts, sampling, copies
        self.tokenizer, self.policy_version, self.device = tokenizer, policy_version, device
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.end_ids = set(sampling.stop_token_ids or []) | (set() if sampling.ignore_eos else eos_ids)
        self.stops = list(sampling.stop or [])
        # A token that can be seen has at least one byte, so this many tokens reach back over a stop string.
        self.stop_window = max((len(stop.encode()) for stop in self.stops), default=0) + 8
        self.special = set(tokenizer.all_special_ids) if self.stops else set()
        self.uniforms = torch.stack(
            [completion_uniforms(seed, g, sampling.max_new_tokens) for seed in seeds for g in range(copies)]
        ).to(device)
        # Longest first: neighbours are of about the same length, so little of a batch of prompts is padding.
        self.waiting = deque(sorted(range(len(prompts)), key=lambda p: -len(prompts.token_ids[p])))
        self.rows: list[_Row] = []
        self.last = torch.empty(0, dtype=torch.long, device=device)
        self.cursors = torch.empty(0, dtype=torch.long, device=device)  # per row, the place of its next uniform
        self.pending: list[tuple[Tensor, Tensor]] = []  # tokens and log-probs of steps that no row ended with
        self.seen: Tensor | None = None
        self.finished: dict[int, list[Completion | None]] = {}
        self.unfinished: dict[int, int] = {}
        self.held = 0
        self.longest = 0  # tokens written down of the longest live row

    def groups(self) -> Iterator[CompletionGroup]:
        """The groups, each as soon as its last completion is done."""
        while self.waiting or self.rows:
            admitted = self._admit()
            # Not a `with` around the loop: a generator would leave inference mode on in its caller.
            ended = self._prefill(admitted) if admitted else self._step()
            yield from self._retire(ended)

    # ------------------------------------------------------------------------------------------------ admission

    def _cost(self, prompt: int) -> int:
        length = len(self.prompts.token_ids[prompt])
        return self.decoder.tokens_held(length, self.copies, self.sampling.max_new_tokens)

    def _batches(self, taken: list[int], other: int) -> bool:
        first = taken[0] if taken else other
        return self.decoder.batches(self.prompts.token_ids[first], self.prompts.token_ids[other])

    def _extra(self, prompt: int) -> dict[str, Any]:
        return self.prompts.inputs[prompt] if self.prompts.inputs else {}

    def _admit(self) -> list[int]:
        """The prompts to start now: as many as there is room for, at least one where nothing is live."""
        if not self.waiting or (self.rows and not self.decoder.refills):
            return []
        taken: list[int] = []
        tokens = 0
        while self.waiting:
            p = self.waiting[0]
            tokens += len(self.prompts.token_ids[p])
            sequences = len(self.rows) + (len(taken) + 1) * self.copies
            fits = sequences <= self.max_sequences and self.held + self._cost(p) <= self.max_tokens
            if not fits and (self.rows or taken):
                break
            together = tokens <= self.decoder.prefill_tokens and not self._extra(p) and self._batches(taken, p)
            if taken and not together:
                break
            taken.append(self.waiting.popleft())
            self.held += self._cost(p)
            if self._extra(p):  # extra inputs belong to one prompt: it goes through the model alone
                break
        return taken

    # ------------------------------------------------------------------------------------------------- sampling

    @torch.inference_mode()
    def _prefill(self, admitted: list[int]) -> list[int]:
        """Computes prompts and samples the first token of their completions; positions of rows that ended."""
        first, limit = len(self.rows), self.sampling.max_new_tokens
        for p in admitted:
            self.rows += [_Row(p, g) for g in range(self.copies)]
            self.finished[p], self.unfinished[p] = [None] * self.copies, self.copies
        token_ids = [self.prompts.token_ids[p] for p in admitted]
        logits = self.decoder.prefill(token_ids, self.copies, self._extra(admitted[0]))
        logits = logits.repeat_interleave(self.copies, 0)
        slots = [p * self.copies + g for p in admitted for g in range(self.copies)]
        self.cursors = torch.cat([self.cursors, torch.tensor(slots, device=self.device) * limit])
        if self.sampling.repetition_penalty != 1.0:
            seen = torch.zeros(len(admitted), logits.shape[-1], dtype=torch.bool, device=self.device)
            for i, tokens in enumerate(token_ids):
                seen[i, list(tokens)] = True
            seen = seen.repeat_interleave(self.copies, 0)
            self.seen = seen if self.seen is None else torch.cat([self.seen, seen])
        self.last = torch.cat([self.last, self._sample(logits, first)])
        return self._write_down(first)

    @torch.inference_mode()
    def _step(self) -> list[int]:
        """Samples one more token for every row; positions of rows that ended."""
        self.last = tokens = self._sample(self.decoder.step(self.last), 0)
        # The lists of the rows are made only where a row may have ended: that takes as long as the sampling.
        at_limit = self.longest + len(self.pending) == self.sampling.max_new_tokens
        may_end = at_limit or self.stops or (self.end_ids and not self.end_ids.isdisjoint(tokens.tolist()))
        return self._write_down(0) if may_end else []

    def _sample(self, logits: Tensor, first: int) -> Tensor:
        """Samples for the rows from `first` on, and leaves tokens and log-probs in `pending`; the tokens."""
        cursors, forbidden, seen = self.cursors[first:], None, None
        least = self.sampling.min_new_tokens
        if least and self.end_ids and min(len(row.tokens) for row in self.rows[first:]) + len(self.pending) < least:
            young = cursors % self.sampling.max_new_tokens < least
            forbidden = forbidden_tokens(young, sorted(self.end_ids), logits.shape[-1])
        if self.seen is not None:
            seen = self.seen[first:]
        tokens, logprobs = sample(logits, self.sampling, self.uniforms.take(cursors), seen=seen, forbidden=forbidden)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        cursors += 1
        self.pending.append((tokens, logprobs))
        return tokens

    def _write_down(self, first: int) -> list[int]:
        """Gives what is pending to the rows from `first` on, which it belongs to; positions of those that ended."""
        tokens, logprobs = (torch.stack(steps, 1).tolist() for steps in zip(*self.pending, strict=True))
        self.pending.clear()
        ended, limit = [], self.sampling.max_new_tokens
        for i, row in enumerate(self.rows[first:]):
            row.tokens += tokens[i]
            row.logprobs += logprobs[i]
            last = row.tokens[-1]
            stopped = bool(self.stops) and self._stopped(row, last)  # also of the last token: its text is cut
            if stopped or last in self.end_ids or len(row.tokens) == limit:
                ended.append(first + i)
        return ended

    def _stopped(self, row: _Row, token: int) -> bool:
        """Whether a stop string is complete; cuts the row's text before it."""
        if len(row.tokens) < self.sampling.min_new_tokens:
            return False
        if token not in self.special:
            row.visible.append(token)
        tail = self._decode(row.visible[-self.stop_window :])
        if not any(stop in tail for stop in self.stops):
            return False
        text = self._decode(row.tokens)
        # A stop string among the tokens before min_new_tokens does not count.
        start = len(text) - len(self._decode(row.visible)) if self.sampling.min_new_tokens else 0
        cuts = [at for at in (text.find(stop, max(start, 0)) for stop in self.stops) if at >= 0]
        if cuts:
            row.text = text[: min(cuts)]
        return bool(cuts)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # ------------------------------------------------------------------------------------------------ retirement

    def _retire(self, ended: list[int]) -> list[CompletionGroup]:
        """Forgets rows that ended and returns the groups that are complete with them."""
        groups = []
        for i in ended:
            row = self.rows[i]
            p = row.prompt
            self.finished[p][row.completion] = self._completion(row)
            self.unfinished[p] -= 1
            if not self.unfinished[p]:
                self.held -= self._cost(p)
                completions = [c for c in self.finished.pop(p) if c is not None]
                groups.append(CompletionGroup(p, completions, self.policy_version))
        if ended:
            self._compact(set(ended))
        if not self.pending:
            self.longest = max((len(row.tokens) for row in self.rows), default=0)
        return groups

    def _completion(self, row: _Row) -> Completion:
        stopped = row.text is not None or row.tokens[-1] in self.end_ids
        text = row.text if row.text is not None else self._decode(row.tokens)
        return Completion(row.tokens, row.logprobs, text, "stop" if stopped else "length")

    @torch.inference_mode()
    def _compact(self, ended: set[int]) -> None:
        """Moves the last live rows into the places of those that ended: the rest need not be copied."""
        count = len(self.rows) - len(ended)
        tail = iter(i for i in range(count, len(self.rows)) if i not in ended)
        keep = [next(tail) if i in ended else i for i in range(count)]
        index = torch.tensor(keep, dtype=torch.long, device=self.device)
        self.rows = [self.rows[i] for i in keep]
        self.last, self.cursors = self.last[index], self.cursors[index]
        if self.seen is not None:
            self.seen = self.seen[index]
        self.decoder.keep(keep)
