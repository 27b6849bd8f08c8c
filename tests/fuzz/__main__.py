"""The fuzz campaign: 10,000 cases and more in slices that can be gone on with.

    python -m tests.fuzz --cases 10000 --table docs/reliability.md

A slice is fifty cases of one class, drawn by Hypothesis from the slice's number, so a failure is found again by its
class and slice: `--only media:17`. Verdicts go to `--results` (one line per slice); slices that stand there are not
run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.fuzz.classes import CLASSES, run_slice, shares
from tests.fuzz.verdicts import VERDICTS

SLICE = 50
BEGIN, END = "<!-- fuzz -->", "<!-- end of fuzz -->"


def campaign(cases: int, results: Path, minutes: float) -> dict[str, Counter[str]]:
    """Runs what is missing of so many cases; class -> verdict -> count."""
    done: dict[str, dict[str, int]] = {}
    if results.exists():
        done = {line["slice"]: line["verdicts"] for line in map(json.loads, results.read_text().splitlines())}
    end = time.monotonic() + 60 * minutes
    found: dict[str, Counter[str]] = {name: Counter() for name in CLASSES}
    for name, count in shares(cases).items():
        number = 0
        while found[name].total() < count:
            label = f"{name}:{number}"
            if label not in done:
                if time.monotonic() > end:  # what stands there is counted all the same
                    if number > max(
                        (int(each.split(":")[1]) for each in done if each.startswith(f"{name}:")), default=0
                    ):
                        break
                    number += 1
                    continue
                done[label] = one_slice(name, number)
                with results.open("a") as file:
                    file.write(json.dumps({"slice": label, "verdicts": done[label]}) + "\n")
            found[name].update(done[label])
            number += 1
        print(f"{name}: {dict(found[name])}", flush=True)
    return found


def one_slice(name: str, number: int) -> dict[str, int]:
    """Runs a slice and prints its failures."""
    verdicts: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for case, outcome in run_slice(name, number, SLICE):
        if isinstance(outcome, str):
            verdicts[outcome] += 1
            continue
        verdicts["failed"] += 1
        frame = traceback.extract_tb(outcome.__traceback__)[-1]
        seen[f"{frame.filename}:{frame.lineno}"] += 1
        if seen[f"{frame.filename}:{frame.lineno}"] <= 2:  # of failures in one place the first two are shown
            shown = "".join(traceback.format_exception(outcome)[-4:])[-1500:]
            print(f"--- {name}:{number}: {str(case)[:400]}\n{shown}", flush=True)
    return dict(verdicts)


def table(found: dict[str, Counter[str]]) -> str:
    """The counts as Markdown."""
    columns = [*VERDICTS, "failed"]
    rows = [f"| class | cases | {' | '.join(columns)} |", "|---|" + "---|" * (len(columns) + 1)]
    total: Counter[str] = Counter()
    for name, counts in found.items():
        total += counts
        cells = [f"{counts.total():,}", *(f"{counts[column]:,}" for column in columns)]
        rows.append(f"| {CLASSES[name].title} | {' | '.join(cells)} |")
    cells = [f"{total.total():,}", *(f"{total[column]:,}" for column in columns)]
    return "\n".join([*rows, f"| **all** | {' | '.join(cells)} |"])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Random rows, files, rewards, answers, checkpoints.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no slice after this time")
    parser.add_argument("--results", type=Path, default=Path("outputs/fuzz.jsonl"), help="verdicts so far")
    parser.add_argument("--table", type=Path, help=f"page whose part from {BEGIN} to {END} is replaced by the table")
    parser.add_argument("--only", help="run one slice again, as class:number")
    options = parser.parse_args()
    if options.only:
        name, _, number = options.only.partition(":")
        sys.exit(bool(one_slice(name, int(number)).get("failed")))
    for name in ("lightning.pytorch", "lightning.fabric", "lightrl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    found = campaign(options.cases, options.results, options.minutes)
    print(table(found))
    if options.table is not None:
        head, _, rest = options.table.read_text().partition(BEGIN)
        options.table.write_text(f"{head}{BEGIN}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}")
    sys.exit(any(counts["failed"] for counts in found.values()))


if __name__ == "__main__":
    main()
