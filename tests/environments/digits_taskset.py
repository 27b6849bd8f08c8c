"""A task set of verifiers: copy a number. Task 1 breaks in its scoring."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitsTaskset"]


class DigitsData(vf.TaskData):
    answer: str
    breaks: bool = False


class DigitsTask(vf.Task[DigitsData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.breaks:
            raise RuntimeError("the judge is gone")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


class DigitsConfig(vf.TasksetConfig):
    first: int = 1


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self) -> Iterator[DigitsTask]:
        for number in range(3):
            answer = str(self.config.first + number)
            data = DigitsData(prompt=f"Say {answer}.", system_prompt="Be brief.", answer=answer, breaks=number == 1)
            yield DigitsTask(data, self.config.task)
