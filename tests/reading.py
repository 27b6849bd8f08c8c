"""GRPO read from top to bottom: the files of its path, and how long they are.

`python -m tests.reading` writes the tables of docs/architecture.md; tests/test_architecture.py holds them to the code,
and the list of files to those that a run enters.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"

CORE = {
    "algorithms/ppo.py": "the module: one rollout to updates, hooks in the order in which they run",
    "algorithms/variants.py": "which parts GRPO, DAPO, RLOO... are made of",
    "objectives/advantages.py": "all advantage estimators but those of turns",
    "objectives/losses.py": "policy losses, but for the off-policy ones of `off_policy.py`",
}
"""Step, objective and variants."""

PATH = {
    "types.py": "the records",
    "data/prompts.py": "which prompt comes next",
    "data/rows.py": "rows of files, hub and memory",
    "data/templates.py": "chat templates",
    "data/processing.py": "prompts to token ids and media inputs",
    "data/media.py": "images, videos, sound of a row",
    "rollout/datamodule.py": "one rollout when Lightning asks for it",
    "rollout/loaders.py": "what Lightning iterates over",
    "rollout/learner.py": "what the data module asks of the module",
    "rollout/sync.py": "what it asks of a weight sync",
    "rollout/weight_sync.py": "the push and the canary",
    "rollout/collector.py": "episodes, engine and scorer brought together",
    "background.py": "threads beside the caller's",
    "environments/episodes.py": "one attempt: ask the engine once",
    "engines/base.py": "the engine's contract and its queue",
    "engines/transformers/engine.py": "an engine in this process",
    "engines/transformers/decoding.py": "continuous batching",
    "engines/transformers/decoders.py": "one step of a batch",
    "engines/transformers/sampling.py": "token from logits, with a seed of its own",
    "rewards/scorer.py": "all reward functions at once",
    "rewards/calls.py": "one call of one function",
    "rewards/base.py": "how a function is named and loaded",
    "rollout/collation.py": "groups to (B, T)",
    "algorithms/hooks.py": "callbacks that take part",
    "algorithms/batches.py": "experience, mini-batches, micro-batches",
    "algorithms/saving.py": "models built once, written, read back",
    "algorithms/schedule.py": "the optimizer, and learning rates by name",
    "algorithms/evaluation.py": "metrics of a rollout",
    "objectives/trajectories.py": "rows of a trajectory as one",
    "arguments.py": "what is refused of a number or a word that is given",
    "objectives/aggregation.py": "token losses to one number",
    "objectives/kl.py": "where the KL enters",
    "ops/advantages.py": "formulas",
    "ops/kl.py": "formulas",
    "ops/losses.py": "formulas",
    "ops/masking.py": "formulas",
    "models/spec.py": "what a model is given",
    "models/loading.py": "loading",
    "models/shards.py": "weights read part by part",
    "models/policy.py": "policy and critic: (B, T) to (B, T)",
    "models/backbone.py": "the backbone on a token stream",
    "models/logprobs.py": "log-probs without a (tokens, vocabulary) matrix",
    "models/lora.py": "adapters; names of weights",
    "models/multimodal.py": "media inputs in a stream",
    "models/media_tokens.py": "ids that stand for media",
    "models/packing/prefixes.py": "what rows begin with alike",
    "models/packing/layouts.py": "rows to a token stream",
    "models/packing/attention.py": "attention over a stream",
    "models/packing/micro_batches.py": "cutting by tokens",
    "distributed/strategies.py": "what differs between strategies",
    "distributed/reduction.py": "sums over ranks",
    "distributed/metrics.py": "means over ranks",
    "distributed/random_states.py": "seeds and generators",
}
"""Everything else between a prompt and the weights, with the transformers engine, in the order of reading."""

NOT_READ = ("compat/", "kernels/", "storage.py", "redaction.py", "console.py")
"""Entered, but nobody needs to read them to understand a run: parts of dependencies, the faster paths on a CPU, and
what keeps secrets out of log messages."""


def lines(source: str) -> tuple[int, int]:
    """Lines of a source; of these, lines of code: neither blank, nor comment, nor docstring."""
    code: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(source.splitlines()), len(code)


def table(files: dict[str, str]) -> str:
    """The files with their lines and sums, as Markdown."""
    counts = {name: lines((ROOT / "lightrl" / name).read_text()) for name in files}
    rows = [f"| `{name}` | {what} | {counts[name][0]:,} | {counts[name][1]:,} |" for name, what in files.items()]
    sums = [sum(count[i] for count in counts.values()) for i in (0, 1)]
    head = ["| file in `lightrl/` | what it is | lines | of code |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, f"| **{len(files)} files** | | **{sums[0]:,}** | **{sums[1]:,}** |"])


def written(page: str) -> str:
    """The page with the tables of now between its markers."""
    for name, files in (("core", CORE), ("path", {**PATH, **CORE})):
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        assert rest, f"docs/architecture.md has no marker {start!r}"
        page = before + start + table(files) + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
