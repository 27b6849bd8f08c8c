"""Runs covering arrays of all features and writes the page of what goes together.

    python -m tests.pairs --arrays 4 --page docs/feature_pairs.md

Each array has every pair of settings; others follow from other seeds. Outcomes go to `--results` (one line per run);
runs that stand there are not run again, and `--only array-0:17` runs one again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

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


def page(rows: list[tuple[Settings, str]], arrays: int) -> str:
    """The factors, the counts and the refusals as Markdown."""
    counts = Counter(outcome for _, outcome in rows)
    lines = [f"{len(rows):,} runs of two rollouts, from {arrays} covering array(s) of {len(FACTORS)} features:", ""]
    lines += [
        "| outcome | runs | with vLLM | on two ranks | with images | with environments |",
        "|---|---|---|---|---|---|",
    ]
    for name in OUTCOMES:
        cells = [sum(s[factor] == level and outcome == name for s, outcome in rows) for factor, level in COSTLY]
        shown = OUTCOMES[name]
        lines.append(f"| {shown} | {' | '.join(f'{count:,}' for count in (counts[name], *cells))} |")
    lines += ["", "| feature | settings |", "|---|---|"]
    lines += [f"| {name} | {', '.join(levels)} |" for name, levels in FACTORS.items()]
    lines += ["", "## Rejected combinations", "", "Each raises an error at setup that names both options:", ""]
    lines += [f"- {refusal.name}" for refusal in REFUSALS]
    return "\n".join(lines)


OUTCOMES = {"trained": "trained", "nothing to learn": "no advantage", "refused": "rejected", "broken": "broken"}
"""Outcome in the results -> its name on the page."""
COSTLY = [("engine", "vLLM"), ("ranks", "2"), ("rows", "image"), ("rows", "environment")]


def labelled(seeds: range) -> dict[str, Settings]:
    """What is refused and the rows of each array by their names, in the order in which they are run.

    Two ranks first: they are processes forked from this one, in which no engine may have been yet.
    """
    rows: dict[str, Settings] = {f"refused:{number}": s for number, s in enumerate(refused_settings())}
    for seed in seeds:
        array = covering_array(seed)
        print(f"array {seed}: {len(array)} rows; no row can have {len(missing_pairs(array))} pairs", flush=True)
        rows |= {f"array-{seed}:{number}": s for number, s in enumerate(array)}
    return dict(sorted(rows.items(), key=lambda row: (row[1]["ranks"] == "1", row[1]["engine"] == "vLLM")))


def in_ci(rows: dict[str, Settings]) -> list[str]:
    """What is refused with two ranks or vLLM, and a few of the rows with these, which need a process of their own."""
    costly = {name: s for name, s in rows.items() if (s["engine"], s["ranks"]) != ("transformers", "1")}
    refused = [name for name in costly if name.startswith("refused")]
    rows = {name: s for name, s in rows.items() if name.startswith("array")}
    two = [name for name, s in rows.items() if (s["ranks"], s["engine"]) == ("2", "transformers")]
    real = [name for name, s in rows.items() if (s["ranks"], s["engine"], s["overlap"]) == ("1", "vLLM", "none")]
    return refused + two[:4] + real[:2]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Runs of two rollouts in which every pair of features meets.")
    parser.add_argument("--arrays", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first array")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after this time")
    parser.add_argument("--results", type=Path, help="outcomes so far")
    parser.add_argument("--only", help="run these again, as array-0:17,array-0:18, or those of CI, as ci")
    parser.add_argument("--page", type=Path, help=f"page whose part from {BEGIN} to {END} is replaced")
    options = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric", "lightrl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = labelled(range(options.seed, options.seed + options.arrays))
    done: dict[str, str] = {}
    if options.results is not None and options.results.exists():
        done = {line["row"]: line["outcome"] for line in map(json.loads, options.results.read_text().splitlines())}
    if options.only:
        names = in_ci(rows) if options.only == "ci" else options.only.split(",")
        rows, done = {name: rows[name] for name in names}, {}
    end = time.monotonic() + 60 * options.minutes
    for name, s in rows.items():
        if name in done:
            continue
        if time.monotonic() > end:
            break
        start = time.monotonic()
        done[name] = outcome_of(s)
        told = {
            "row": name,
            "outcome": done[name],
            "seconds": round(time.monotonic() - start, 1),
            "changes": changes(s),
        }
        print(json.dumps(told), flush=True)
        if options.results is not None:
            options.results.parent.mkdir(parents=True, exist_ok=True)
            with options.results.open("a") as file:
                file.write(json.dumps(told) + "\n")
    run_rows = [(s, done[name]) for name, s in rows.items() if name in done]
    counts = Counter(outcome for _, outcome in run_rows)
    print(f"{len(run_rows)} of {len(rows)} runs: {dict(counts)}")
    if options.page is not None:
        head, _, rest = options.page.read_text().partition(BEGIN)
        text = f"{head}{BEGIN}\n\n{page(run_rows, options.arrays)}\n\n{END}{rest.partition(END)[2]}"
        options.page.write_text(text)
    sys.exit(bool(counts["broken"]))


if __name__ == "__main__":
    main()
