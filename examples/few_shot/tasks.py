"""Questions of reasoning-gym after solved examples, for base models without a chat template."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from lightrl.data import ReasoningGymRows

SHOTS = 4


class FewShotRows(ReasoningGymRows):
    """`ReasoningGymRows` whose prompts start with the first training examples, which are left out of the data."""

    def __call__(self) -> Dataset:
        """Generates the examples."""
        train = ReasoningGymRows(self.tasks, self.size, self.seed, "train", self.num_eval)()
        rows = train.select(range(SHOTS, len(train))) if self.split == "train" else super().__call__()
        shots = "".join(f"Q: {row['prompt']}\nA: {row['answer']}\n\n" for row in train.select(range(SHOTS)))

        def with_shots(row: dict[str, Any]) -> dict[str, Any]:
            return {"prompt": f"{shots}Q: {row['prompt']}\nA:"}

        return rows.map(with_shots)
