"""Compares a GRPO step of this checkout with one of another commit, alternating step by step.

    python benchmarks/against.py origin/main --cases a b c --threads 1 2

The other commit is checked out into a temporary git worktree. Both sides run the `tiny_step.py` of this checkout, each
with its own package, on the same model and prompts. A ratio above 1 means that this checkout is faster; with the same
commit on both sides, the ratio shows the machine's noise. `rollout` is the part of a step that samples and scores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tiny_step import CASES, Side, alternate, build

ROOT = Path(__file__).resolve().parent.parent


def measure(case: str, other: Path, threads: int, steps: int, variables: dict[str, str]) -> dict[str, Any]:
    """One row of the table: both sides' medians and their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        build(CASES[case], folder)
        sides = [
            Side("lightrl", case, folder, threads, 16384, steps + 3, package=root, variables=own)
            for root, own in ((other, {}), (ROOT, variables))
        ]
        theirs, ours = alternate(sides, steps)
    for side in (theirs, ours):
        side.pop("rewards")
    ratios = {f"ratio_{by}": theirs[f"{by}_s"] / ours[f"{by}_s"] for by in ("wall", "cpu", "rollout")}
    return {"case": case, "threads": threads, **ratios, "other": theirs, "this": ours}


def main() -> None:
    """Parses the command line, measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="commit to compare with")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="environment variables of this side only"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    variables = dict(pair.split("=", 1) for pair in arguments.set)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), arguments.commit], check=True)
        try:
            for case in arguments.cases:
                for threads in arguments.threads:
                    row = measure(case, other, threads, arguments.steps, variables)
                    rows.append(row)
                    print(
                        f"{case}, {threads} thread(s): {row['ratio_wall']:.2f} x wall, {row['ratio_cpu']:.2f} x CPU "
                        f"({row['other']['wall_s']:.3f} -> {row['this']['wall_s']:.3f} s), "
                        f"{row['ratio_rollout']:.2f} x rollout",
                        flush=True,
                    )
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"commit": arguments.commit, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
