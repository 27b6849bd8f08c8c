"""A task set of verifiers: add two numbers. The last number of the reply is the answer."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"-?\d+", trace.last_reply)
        return float(bool(numbers) and numbers[-1] == self.data.answer)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


class SumsConfig(vf.TasksetConfig):
    seed: int = 0
    size: int = 1000


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> Iterator[SumsTask]:
        draw = random.Random(self.config.seed)
        for _ in range(self.config.size):
            a, b = draw.randint(1, 99), draw.randint(1, 99)
            data = SumsData(prompt=f"Calculate {a} + {b}.", answer=str(a + b))
            yield SumsTask(data, self.config.task)
