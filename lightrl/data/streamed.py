"""A rollout whose groups are handed out while others still generate.

Letters: P prompts, G completions per prompt, B = P * G sequences.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.data.ahead import in_background
from lightrl.data.generation import ready_engine, recover_engine, some_groups
from lightrl.data.sampled import Sampled
from lightrl.engines.base import EngineRestartedError
from lightrl.rewards.scorer import Scores
from lightrl.types import CompletionGroup, Prompts, Rollouts

if TYPE_CHECKING:
    from lightrl.data.rollout import RolloutDataModule

__all__ = ["GroupStream", "StreamedRollouts", "stream_rollout"]


class GroupStream:
    """Samples the groups of P prompts in a thread of its own and hands them out as they are scored.

    Args:
        prompts: the prompts.
        generate: (prompt numbers) yields their groups as they finish. Called in the thread.
        submit: (group) starts scoring it and gives the handle; None where nothing scores.
        recover: (error, restarts so far, lost prompts) makes a restarted engine ready again. Called by the caller's
            thread. Gives the number of restarts.
    """

    def __init__(
        self,
        prompts: Prompts,
        generate: Callable[[list[int]], Iterator[CompletionGroup]],
        submit: Callable[[CompletionGroup], Any],
        recover: Callable[[EngineRestartedError, int, int], int],
    ) -> None:
        self.prompts = prompts
        self._generate, self._submit, self._recover = generate, submit, recover
        self._groups: dict[int, CompletionGroup] = {}
        self._handles: dict[int, Any] = {}
        self._scores: dict[int, Scores] = {}
        self._news: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._out = self._restarts = 0
        self._begun = self._generated = self._scored = time.perf_counter()
        self._thread = self._start(list(range(len(prompts))))

    def _start(self, rows: list[int]) -> threading.Thread:
        return in_background(lambda: self._work(rows))

    def _work(self, rows: list[int]) -> None:
        try:
            for group in self._generate(rows):
                row = group.prompt_index
                self._groups[row] = group
                handle = self._handles[row] = self._submit(group)
                if handle is None:
                    self._news.put(row)
                else:
                    handle.when_done(lambda row=row: self._hear(row))
            self._generated = time.perf_counter()
        except BaseException as error:
            self._news.put(error)

    def _hear(self, row: int) -> None:
        self._scored = time.perf_counter()
        self._news.put(row)

    @property
    def exhausted(self) -> bool:
        """Whether every group has been handed out."""
        return self._out == len(self.prompts)

    def next(self) -> list[int]:
        """Numbers of the prompts whose groups were scored since the last call; waits for one, the first time for all
        that is there."""
        rows: list[int] = []
        while not rows:
            rows = self._take(self._news.get())
            while not self._news.empty():
                rows += self._take(self._news.get())
        self._out += len(rows)
        if self.exhausted:
            self._thread.join()  # it is about to leave the engine, which others may use from now on
        return sorted(rows)

    def _take(self, news: int | BaseException) -> list[int]:
        if isinstance(news, EngineRestartedError):
            lost = [row for row in range(len(self.prompts)) if row not in self._groups]
            self._restarts = self._recover(news, self._restarts, len(lost))
            self._thread = self._start(lost)
            return []
        if isinstance(news, BaseException):
            raise news
        if self._handles[news] is not None:
            self._scores[news] = self._handles[news].result()
        return [news]

    def sampled(self, rows: Sequence[int]) -> Sampled:
        """Groups that were handed out, and what the whole took."""
        scores = [self._scores[row] for row in rows] if self._scores else []
        late = max(self._scored - self._generated, 0.0)
        seconds = {"time/generate": self._generated - self._begun, "time/score": late}
        return Sampled(self.prompts[list(rows)], [self._groups[row] for row in rows], scores, seconds)

    def stop(self, cancel: Callable[[], None], timeout: float) -> None:
        """Gives up and waits for the thread to leave the engine, at most so many seconds."""
        if self._thread.is_alive():
            cancel()
            self._thread.join(timeout)


class StreamedRollouts(Rollouts):
    """`Rollouts` that can also be had piece by piece: `pieces` yields finished groups while others still generate.

    Reading any field waits for all groups, so code that knows nothing of pieces sees ordinary `Rollouts`.

    Args:
        stream: where groups come from.
        group_size: G.
        assemble: (sampled groups, whether that is all of them) lays groups out as `Rollouts`.
        temperature: of the sampling distribution.
    """

    def __init__(
        self, stream: GroupStream, group_size: int, assemble: Callable[[Sampled, bool], Rollouts], temperature: float
    ) -> None:
        self.temperature, self.filler, self.supervised = temperature, False, None
        self._stream, self._group_size, self._assemble = stream, group_size, assemble
        self._device: torch.device | str = "cpu"
        self._finished = False

    def __len__(self) -> int:
        return len(self._stream.prompts) * self._group_size

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:  # the only ones that are not there from the start
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._finish()
        return self.__dict__[name]

    def _map(self, tensor_fn: Any, list_fn: Any) -> Any:
        return self.whole()._map(tensor_fn, list_fn)

    def to(self, device: torch.device | str) -> Rollouts:  # type: ignore[override]
        """Itself, which will come on that device; the finished one as ordinary `Rollouts`."""
        if self._finished:
            return self.whole().to(device)
        self._device = device
        return self

    def whole(self) -> Rollouts:
        """All rows as ordinary `Rollouts`, in the order of the prompts; waits for them."""
        return Rollouts(**{name: getattr(self, name) for name in _FIELDS})

    def pieces(self) -> Iterator[tuple[Tensor, Rollouts, bool]]:
        """Yields all groups that are scored by then, again and again, until all are out.

        Yields:
            the numbers of the piece's rows in the whole; the rows, with group ids as in the whole and no metrics;
            whether they are the last. One piece of all rows where the whole has been waited for already.
        """
        if self._finished:
            yield torch.arange(len(self)), replace(self.whole(), metrics={}), True
        while not self._stream.exhausted:
            prompts = self._stream.next()
            piece = self._assemble(self._stream.sampled(prompts), False)
            rows = torch.tensor([p * self._group_size + i for p in prompts for i in range(self._group_size)])
            piece.group_ids, piece.metrics = rows // self._group_size, {}
            yield rows, piece.to(self._device), self._stream.exhausted

    def _finish(self) -> None:
        while not self._stream.exhausted:
            self._stream.next()
        whole = self._assemble(self._stream.sampled(range(len(self._stream.prompts))), True).to(self._device)
        self.__dict__.update({name: getattr(whole, name) for name in _FIELDS - self.__dict__.keys()})
        self._finished = True

    def stop(self, cancel: Callable[[], None], timeout: float) -> None:
        """See `GroupStream.stop`."""
        self._stream.stop(cancel, timeout)


_FIELDS = {field.name for field in fields(Rollouts)}


def stream_rollout(data: RolloutDataModule) -> Rollouts:
    """The next rollout with the current policy, its groups as they finish."""
    first, count = data.prompt_cursor, data.prompts_per_rollout
    sync = ready_engine(data)
    own = data._sets["prompts"].batch(first, count, rank=data.rank, world_size=data.world_size)
    seeds = data._seeds(own, first)

    def assemble(sampled: Sampled, is_whole: bool) -> Rollouts:
        rollouts = data._assemble(sampled, data.sampling)
        rollouts.metrics |= {"time/sync": sync, **data._prompt_counts()} if is_whole else {}
        return rollouts

    stream = GroupStream(
        own,
        lambda rows: some_groups(data, own, rows, data.sampling, data.group_size, seeds),
        lambda group: data._submit(own, group),
        partial(recover_engine, data),
    )
    data._stream = StreamedRollouts(stream, data.group_size, assemble, data.sampling.temperature)
    data.prompt_cursor = first + count
    return data._stream
