"""The decoding loop of the transformers engine, which admits requests, samples tokens, and returns finished groups.

Shapes: R live rows, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.engines.transformers.decoders import Decoder
from lightrl.engines.transformers.sampling import completion_uniforms, cuts, sample
from lightrl.records import Completion, CompletionGroup, GenerationRequest, Routes, Support


class _Job:
    """A pending request. `start` is the index of its first uniform; completion g starts `g * limit` later."""

    def __init__(
        self, request: GenerationRequest, eos_ids: set[int], start: int, version: int, parts: list[Completion]
    ) -> None:
        self.request = request
        self.start = start
        self.version = version
        self.sampling = sampling = request.sampling
        self.shared = replace(
            sampling, max_new_tokens=max(1, sampling.min_new_tokens)
        )  # rows that run together share it
        self.limit = sampling.max_new_tokens
        self.end_ids = set(sampling.stop_token_ids or []) | (set() if sampling.ignore_eos else eos_ids)
        self.stops = list(sampling.stop or [])
        # A visible token has at least one byte, so this many tokens cover a stop string.
        self.stop_window = max((len(stop.encode()) for stop in self.stops), default=0) + 8
        self.parts = list(parts) or [Completion([], [], "", "suspended")] * request.num_completions
        self.live = [g for g, part in enumerate(self.parts) if part.finish_reason == "suspended"]
        begun = [self.parts[g].token_ids for g in self.live]
        self.begun = any(begun)
        self.prefixes = [request.token_ids + tokens for tokens in begun] if self.begun else [request.token_ids]
        self.rows_each = 1 if self.begun else len(self.live)

    def group(self) -> CompletionGroup:
        """Returns the completions recorded so far."""
        oldest = min((min(part.policy_versions) for part in self.parts if part.policy_versions), default=self.version)
        return CompletionGroup(self.request, list(self.parts), oldest)

    def tokens_held(self, decoder: Decoder) -> int:
        """Returns the maximum number of KV cache tokens needed."""
        most = len(self.request.token_ids) + self.limit
        return sum(decoder.tokens_held(len(p), self.rows_each, most - len(p)) for p in self.prefixes)


class _Row:
    """An unfinished completion. `tokens` and `logprobs` don't include `Generation.pending`."""

    __slots__ = (
        "before", "completion", "job", "kept", "logprobs", "routes", "text", "tokens", "versions", "visible",
    )  # fmt: skip

    def __init__(self, job: _Job, completion: int, special: set[int]) -> None:
        self.job = job
        self.completion = completion
        self.before = before = job.parts[completion]
        self.tokens = list(before.token_ids)
        self.visible: list[int] = []  # tokens to search for stop strings, if any
        if job.stops:
            counted = self.tokens[max(job.request.sampling.min_new_tokens - 1, 0) :]
            self.visible = [t for t in counted if t not in special]
        self.logprobs = list(before.logprobs)
        self.versions = list(before.policy_versions)
        self.kept: list[Tensor] = []  # kept token IDs for each new token, if the vocabulary is truncated
        self.routes: list[Tensor] = []  # experts of the input tokens, if any
        self.text: str | None = None  # set by a stop string


@dataclass(eq=False)
class Generation:
    """Decoding state of all pending requests.

    `make_decoder` returns an empty decoder for the waiting requests. `now` is the policy version of the weights. There
    are at most `max_sequences` rows and `max_tokens` tokens in the KV cache.
    """

    make_decoder: Callable[[Sequence[GenerationRequest]], Decoder]
    now: int
    _: KW_ONLY
    tokenizer: Any
    eos_ids: set[int]
    device: torch.device
    max_sequences: int
    max_tokens: int
    decoder: Decoder | None = field(default=None, init=False)
    waiting: deque[_Job] = field(default_factory=deque, init=False)
    jobs: dict[GenerationRequest, _Job] = field(default_factory=dict, init=False)  # waiting or running
    rows: list[_Row] = field(default_factory=list, init=False)
    # Tokens, log-probs, kept token IDs per row, and experts of the input tokens, of steps without a finished row.
    pending: list[tuple[Tensor, Tensor, list[Tensor] | None, Tensor | None]] = field(default_factory=list, init=False)
    seen: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.special = set(self.tokenizer.all_special_ids)
        self.uniforms = torch.empty(0, dtype=torch.float64, device=self.device)  # of all jobs, concatenated
        self.last = torch.empty(0, dtype=torch.long, device=self.device)
        self.cursors = torch.empty(0, dtype=torch.long, device=self.device)  # index of each row's next uniform

    def step(self) -> list[CompletionGroup]:
        """Prefills prompts that fit, or samples a token per row. Returns the finished groups."""
        admitted = self._admit()
        return self._retire(self._prefill(admitted) if admitted else self._step())

    def changed(self, version: int, *, keep_cache: bool) -> None:
        """Handles a weight change: records the version of sampled tokens and drops the KV cache."""
        self._write_down_pending()
        for row in self.rows:
            row.versions += [self.now] * (len(row.tokens) - len(row.versions))
        self.now = version
        if keep_cache:
            return
        self.partials()
        begun = {row.job: None for row in self.rows}
        jobs = [_Job(job.request, self.eos_ids, job.start, version, job.parts) for job in begun]
        self.jobs |= {job.request: job for job in jobs}
        self.waiting.extendleft(sorted(jobs, key=lambda job: max(map(len, job.prefixes))))
        self.rows, self.decoder, self.seen = [], None, None
        self.last, self.cursors = self.last[:0], self.cursors[:0]

    # ------------------------------------------------------------------------------------------------ admission

    @torch.inference_mode()
    def add(self, requests: list[GenerationRequest]) -> None:
        """Queues requests."""
        start, drawn, jobs = len(self.uniforms), list[Tensor](), list[_Job]()
        for request in requests:
            job = _Job(request, self.eos_ids, start, self.now, request.begun)
            drawn += [completion_uniforms(request.seed, g, job.limit) for g in range(request.num_completions)]
            start += request.num_completions * job.limit
            jobs.append(job)
            self.jobs[request] = job
        self.uniforms = torch.cat([self.uniforms, torch.cat(drawn).to(self.device)])
        # Sorting by length minimizes padding in prefill batches.
        self.waiting += sorted(jobs, key=lambda job: -len(job.request.token_ids))

    def _admit(self) -> list[_Job]:
        """Returns the jobs to start now: as many as fit, and at least one if nothing is running."""
        if not self.waiting or (self.rows and not (self.decoder and self.decoder.refills)):
            return []
        if self.decoder is None or (not self.rows and not self._admits(self.waiting[0])):
            self.decoder = self.make_decoder([job.request for job in self.waiting])
        taken: list[_Job] = []
        tokens, held = 0, sum(job.tokens_held(self.decoder) for job in {row.job for row in self.rows})
        while self.waiting and self._admits(self.waiting[0]):
            job = self.waiting[0]
            tokens += sum(map(len, job.prefixes))
            cost = job.tokens_held(self.decoder)
            sequences = len(self.rows) + sum(len(other.live) for other in taken) + len(job.live)
            fits = sequences <= self.max_sequences and held + cost <= self.max_tokens
            if not fits and (self.rows or taken):
                break
            if taken and (tokens > self.decoder.prefill_tokens or not self._batches(taken[0], job)):
                break
            taken.append(self.waiting.popleft())
            held += cost
            if job.request.inputs:  # a prompt with media is prefilled alone
                break
        return taken

    def _admits(self, job: _Job) -> bool:
        first = self.rows[0].job if self.rows else job
        fits = self.decoder is not None and (self.decoder.takes_media or not job.request.inputs)
        return fits and first.shared == job.shared

    def _batches(self, first: _Job, other: _Job) -> bool:
        assert self.decoder is not None
        alike = first.rows_each == other.rows_each and first.begun == other.begun and not other.request.inputs
        alike = alike and first.shared == other.shared
        return alike and all(self.decoder.batches(first.prefixes[0], p) for p in other.prefixes)

    # ------------------------------------------------------------------------------------------------- sampling

    @torch.inference_mode()
    def _prefill(self, admitted: list[_Job]) -> list[int]:
        """Prefills prompts and samples the first token of their completions. Returns finished row indices."""
        assert self.decoder is not None
        self._write_down_pending()  # belongs to earlier rows
        first, copies = len(self.rows), admitted[0].rows_each
        self.rows += [_Row(job, g, self.special) for job in admitted for g in job.live]
        longest = max(len(job.request.token_ids) + job.limit for job in admitted)
        self.decoder.reserve(longest, max(job.limit for job in admitted))
        parts = [(job, prefix) for job in admitted for prefix in job.prefixes]
        rows = self.rows[first:]
        known = [row.before.routes or row.job.request.routes for row in rows[::copies]]
        logits = self.decoder.prefill([prefix for _, prefix in parts], copies, admitted[0].request.inputs, known)
        if self.decoder.routes is not None:
            for i, ((_, prefix), routes) in enumerate(zip(parts, self.decoder.routes.cpu(), strict=True)):
                for row in rows[i * copies : (i + 1) * copies]:
                    row.routes.append(routes[len(routes) - len(prefix) :])
        logits = logits.repeat_interleave(copies, 0)
        slots = [row.job.start + row.completion * row.job.limit + len(row.tokens) for row in rows]
        self.cursors = torch.cat([self.cursors, torch.tensor(slots, device=self.device)])
        self._note_seen(admitted, logits.shape[-1])
        self.last = torch.cat([self.last, self._sample(logits, first, None)])
        return self._write_down(first)

    def _note_seen(self, admitted: list[_Job], vocabulary: int) -> None:
        """Records the tokens of prompts for the repetition penalty, if it is used."""
        if admitted[0].sampling.repetition_penalty == 1.0:
            return
        prefixes = [prefix for job in admitted for prefix in job.prefixes]
        seen = torch.zeros(len(prefixes), vocabulary, dtype=torch.bool, device=self.device)
        for i, prefix in enumerate(prefixes):
            seen[i, list(prefix)] = True
        seen = seen.repeat_interleave(admitted[0].rows_each, 0)
        self.seen = seen if self.seen is None else torch.cat([self.seen, seen])

    @torch.inference_mode()
    def _step(self) -> list[int]:
        """Samples one token per row. Returns finished row indices."""
        assert self.decoder is not None
        logits = self.decoder.step(self.last)
        self.last = tokens = self._sample(logits, 0, self.decoder.routes)
        job = self.rows[0].job
        # Updates the rows' lists only if a row may have finished, because it takes as long as sampling.
        may_end = job.stops or len(self.pending) >= min(row.job.limit - len(row.tokens) for row in self.rows)
        if may_end or (job.end_ids and not job.end_ids.isdisjoint(tokens.tolist())):
            return self._write_down(0)
        return []

    def _sample(self, logits: Tensor, first: int, routes: Tensor | None) -> Tensor:
        """Samples tokens for the rows from `first`, adds them to `pending`, and returns them."""
        rows = self.rows[first:]
        job = rows[0].job
        sampling, forbidden = job.sampling, None
        if sampling.min_new_tokens and job.end_ids:
            lengths = [len(row.tokens) + len(self.pending) for row in rows]
            if min(lengths) < sampling.min_new_tokens:
                young = torch.tensor(lengths, device=self.device) < sampling.min_new_tokens
                forbidden = torch.zeros(logits.shape, dtype=torch.bool, device=self.device)
                forbidden[:, sorted(job.end_ids)] = young[:, None]
        seen = None if self.seen is None else self.seen[first:]
        fresh = not self.pending and not rows[-1].tokens  # rows added together share their first step
        uniforms = self.uniforms.take(self.cursors[first:])
        tokens, logprobs, kept = sample(logits, sampling, uniforms, seen=seen, forbidden=forbidden, first=fresh)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        self.cursors[first:].add_(1)  # `+=` would add a copy
        self.pending.append((tokens, logprobs, kept, routes))
        return tokens

    def _write_down(self, first: int) -> list[int]:
        """Moves pending tokens to the rows from `first`. Returns finished row indices."""
        tokens = torch.stack([step[0] for step in self.pending], 1).tolist()
        logprobs = torch.stack([step[1] for step in self.pending], 1).tolist()
        supports = [step[2] for step in self.pending if step[2] is not None]  # in all steps or none
        fed = [step[3] for step in self.pending if step[3] is not None]
        routes = torch.cat(fed, 1).cpu() if fed else None
        self.pending.clear()
        ended = []
        for i, row in enumerate(self.rows[first:]):
            row.tokens += tokens[i]
            row.logprobs += logprobs[i]
            row.kept += [kept[i] for kept in supports]
            if routes is not None:
                row.routes.append(routes[i])
            last, job = row.tokens[-1], row.job
            stopped = bool(job.stops) and self._stopped(row, last)  # also for the last token
            if stopped or last in job.end_ids or len(row.tokens) == job.limit:
                ended.append(first + i)
        return ended

    def _stopped(self, row: _Row, token: int) -> bool:
        """Checks for a complete stop string and cuts the row's text after it."""
        job = row.job
        least = job.sampling.min_new_tokens
        if len(row.tokens) < least:
            return False
        if token not in self.special:
            row.visible.append(token)
        tail = self._decode(row.visible[-job.stop_window :])
        if not any(stop in tail for stop in job.stops):
            return False
        text = self._decode(row.tokens)
        # Ignores stop strings before min_new_tokens.
        start = len(text) - len(self._decode(row.visible)) if least else 0
        found = [(at, at + len(stop)) for stop in job.stops if (at := text.find(stop, max(start, 0))) >= 0]
        if found:
            row.text = text[: min(found)[1]]
        return bool(found)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # ------------------------------------------------------------------------------------------------ retirement

    def _retire(self, ended: list[int]) -> list[CompletionGroup]:
        """Removes finished rows and returns the groups that they complete."""
        groups = []
        for i in ended:
            row = self.rows[i]
            job = row.job
            job.parts[row.completion] = self._completion(row)
            if all(part.finish_reason != "suspended" for part in job.parts):
                del self.jobs[job.request]
                groups.append(job.group())
        if ended:
            self._compact(set(ended))
        return groups

    def _completion(self, row: _Row) -> Completion:
        before = len(row.before.token_ids)
        new = len(row.tokens) - before
        versions = row.versions + [self.now] * (len(row.tokens) - len(row.versions))
        support = Support.of(row.kept) if cuts(row.job.sampling) else None
        support = Support.joined((before, row.before.support), (new, support))
        routes = Routes(torch.cat(row.routes)) if row.routes else None
        stopped = row.text is not None or row.tokens[-1] in row.job.end_ids
        if not stopped and len(row.tokens) < row.job.limit:
            return Completion(row.tokens, row.logprobs, "", "suspended", support, routes, versions)
        text = row.text if row.text is not None else self._decode(row.tokens)
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        return Completion(row.tokens, row.logprobs, text, reason, support, routes, versions)

    def partials(self) -> list[CompletionGroup]:
        """Returns the partial groups of all pending requests, in the order of their requests."""
        self._write_down_pending()
        for row in self.rows:
            row.job.parts[row.completion] = self._completion(row)
        return [job.group() for job in self.jobs.values()]

    def abort(self, requests: list[GenerationRequest]) -> None:
        """Cancels requests."""
        jobs = [self.jobs.pop(request) for request in requests]
        self._write_down_pending()  # before the rows move
        for job in jobs:
            if job in self.waiting:
                self.waiting.remove(job)
        if ended := {i for i, row in enumerate(self.rows) if row.job in jobs}:
            self._compact(ended)

    def _write_down_pending(self) -> None:
        """Moves pending tokens to their rows. This finishes no row."""
        if self.pending:
            self._write_down(0)

    @torch.inference_mode()
    def _compact(self, ended: set[int]) -> None:
        """Replaces finished rows with the last live rows, to copy as few as possible."""
        assert self.decoder is not None
        count = len(self.rows) - len(ended)
        tail = iter(i for i in range(count, len(self.rows)) if i not in ended)
        keep = [next(tail) if i in ended else i for i in range(count)]
        index = torch.tensor(keep, dtype=torch.long, device=self.device)
        self.rows = [self.rows[i] for i in keep]
        self.last, self.cursors = self.last[index], self.cursors[index]
        if self.seen is not None:
            self.seen = self.seen[index] if keep else None
        self.decoder.keep(keep)
