"""Plays a new user's first hour with whatever `lightrl` is on the path: `python new_user.py MODEL`, in an empty folder.

A project, rows and a reward function of one's own, a look before the run, five rollouts, a report, the exported model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROWS = [{"prompt": f"{a}+{b}=", "total": a + b} for a in range(4) for b in range(5)]
REWARD = '''
def near(completions, total, **columns):
    """1 for the sum, less the farther a number is from it, None for no number."""
    return [1 / (1 + abs(int(c) - t)) if c.isdigit() else None for c, t in zip(completions, total)]
'''
SMALL = [
    *("--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--data.init_args.rewards=[rewards.py:near]"),
    *("--data.init_args.engine=TransformersEngine", "--data.init_args.sampling.max_new_tokens=4"),
]


def play(model: str) -> None:
    """Each command as it is typed; in one process, which loads torch once."""
    from lightrl.cli import main

    def lightrl(*arguments: str) -> None:
        sys.argv = ["lightrl", *arguments]
        print("$", *sys.argv, flush=True)
        main(list(arguments))

    lightrl("init", "mine", "--model", model)
    os.chdir("mine")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("rewards.py").write_text(REWARD)
    config = Path("config.yaml").read_text().replace("rewards.py:correct", "rewards.py:near")
    Path("config.yaml").write_text(config.replace("max_new_tokens: 64", "max_new_tokens: 4"))
    lightrl("doctor", "--config", "config.yaml")
    lightrl("fit", "--config", "config.yaml", *SMALL)
    lightrl("report", "outputs/grpo")
    lightrl("export", "--checkpoint", "outputs/grpo/checkpoints/last.ckpt", "--output", "exported")


if __name__ == "__main__":
    play(sys.argv[1])
