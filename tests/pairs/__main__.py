"""Runs covering arrays of all features and writes the page of what goes together.

    python -m tests.pairs --arrays 4 --page docs/feature_pairs.md

Each array has every pair of settings; others follow from other seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import traceback
from collections import Counter
from pathlib import Path

from tests.pairs.arrays import covering_array, missing_pairs, refused_settings, run
from tests.pairs.features import FACTORS, REFUSALS, Settings

BEGIN, END = "<!-- pairs -->", "<!-- end of pairs -->"


def changes(s: Settings) -> str:
    """What differs from the first setting of each factor."""
    return ", ".join(f"{name}: {level}" for name, level in s.items() if level != FACTORS[name][0])


def outcome_of(s: Settings) -> str:
    """What became of a run; failures are printed."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return run(s)
    except Exception as error:
        print(f"--- {changes(s)}\n{''.join(traceback.format_exception(error))[-2500:]}", flush=True)
        return "broken"


def page(counts: Counter[str], arrays: int) -> str:
    """The factors, the counts and the refusals as Markdown."""
    lines = [f"{counts.total():,} runs of two rollouts, {arrays} covering array(s) of {len(FACTORS)} features:", ""]
    lines += ["| outcome | runs |", "|---|---|", *(f"| {name} | {counts[name]:,} |" for name in OUTCOMES), ""]
    lines += ["| feature | settings |", "|---|---|"]
    lines += [f"| {name} | {', '.join(levels)} |" for name, levels in FACTORS.items()]
    lines += ["", "What is refused, each when the run is set up, with the names of both:", ""]
    lines += [f"- {refusal.name}" for refusal in REFUSALS]
    return "\n".join(lines)


OUTCOMES = ("trained", "nothing to learn", "refused", "broken")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Runs of two rollouts in which every pair of features meets.")
    parser.add_argument("--arrays", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first array")
    parser.add_argument("--rows", default=":", help="part of each array, as first:last")
    parser.add_argument("--page", type=Path, help=f"page whose part from {BEGIN} to {END} is replaced")
    options = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric", "lightrl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    first, _, last = options.rows.partition(":")
    part = slice(int(first or 0), int(last) if last else None)
    counts: Counter[str] = Counter()
    for s in refused_settings() if part.start == 0 else []:
        counts[outcome_of(s)] += 1
    for seed in range(options.seed, options.seed + options.arrays):
        array = covering_array(seed)
        for number, s in enumerate(array[part]):
            counts[outcome_of(s)] += 1
            if number % 20 == 19:
                print(f"array {seed}, {number + 1} of {len(array)}: {dict(counts)}", flush=True)
        print(f"array {seed}: {len(array)} rows; no row can have {len(missing_pairs(array))} pairs", flush=True)
    print(dict(counts))
    if options.page is not None:
        head, _, rest = options.page.read_text().partition(BEGIN)
        text = f"{head}{BEGIN}\n\n{page(counts, options.arrays)}\n\n{END}{rest.partition(END)[2]}"
        options.page.write_text(text)
    sys.exit(bool(counts["broken"]))


if __name__ == "__main__":
    main()
