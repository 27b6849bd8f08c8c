"""Writes docs/options.md and docs/cli.md from signatures and docstrings, without importing LightRL.

python scripts/options_table.py          # writes both pages
python scripts/options_table.py --check  # exits with 1 if a page is not up to date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = 25
ROOMS = {
    "algorithms": ("Modules", "Set these options under `model.init_args`."),
    "rollout": ("Rollouts", "Set the options of `RolloutDataModule` under `data.init_args`."),
    "data": ("Data", "Sources of prompts, supervised examples, and preference pairs."),
    "rewards": ("Rewards", "Entries of `data.init_args.rewards`."),
    "environments": ("Environments", "Set an environment or program under `data.init_args.episode`."),
    "engines": ("Engines", "Set the engine under `data.init_args.engine`."),
    "objectives": ("Objectives", "Parts of an algorithm: `advantage`, `loss`, `aggregation`, `kl`, `divergence`."),
    "callbacks": ("Callbacks", "Entries of `trainer.callbacks`."),
    "distributed": ("Strategies", "Set the strategy under `trainer.strategy`."),
}
EXTRA = {"engines": ["SamplingParams"], "algorithms": ["ModelSpec", "LoraSpec", "RewardModelSpec"]}

Args = list[tuple[str, str, str]]  # name, default, description


def index() -> dict[str, ast.ClassDef]:
    """Every class of the package by name."""
    found = {}
    for path in sorted((ROOT / "lightrl").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, node)
    return found


def described(docstring: str | None) -> dict[str, str]:
    """Argument -> description, from the `Args:` section of a docstring."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring or "", re.MULTILINE)
    entries = re.findall(r"^    (\*{0,2}\w+): ((?:.*\n?)(?:      .*\n?)*)", section[1], re.MULTILINE) if section else []
    return {name.lstrip("*"): " ".join(text.split()) for name, text in entries}


def short(text: str) -> str:
    """The first sentences of a description, as many as fit in a table cell."""
    kept = ""
    for sentence in re.split(r"(?<=[.!?]) (?=[A-Z`0-9])", text):
        if kept and len(f"{kept} {sentence}".split()) > WORDS:
            break
        kept = f"{kept} {sentence}".strip()
    words = kept.split()
    if len(words) > WORDS:
        cut = next((i for i in range(WORDS - 1, 7, -1) if words[i - 1][-1] in ";:,."), WORDS - 1)
        kept = " ".join(words[:cut]).rstrip(",;:") + " ..."
    return (kept[:1].upper() + kept[1:]).replace("|", "\\|")


def shown(default: ast.expr | None) -> str:
    """A default as YAML has it."""
    if default is None:
        return "required"
    if isinstance(default, ast.Call) and getattr(default.func, "id", "") == "field":
        factory = next((k.value for k in default.keywords if k.arg in ("default_factory", "default")), None)
        text = {"list": "[]", "dict": "{}"}.get(ast.unparse(factory) if factory else "", "")
        text = text or (f"{ast.unparse(factory)}()" if isinstance(factory, ast.Name) else "computed")
    elif isinstance(default, ast.Constant) and isinstance(default.value, str):
        text = default.value or '""'
    else:
        text = {"None": "null", "True": "true", "False": "false", "()": "[]"}.get(
            ast.unparse(default), ast.unparse(default)
        )
    return "`" + text.replace("|", "\\|") + "`"


def signature(function: ast.FunctionDef) -> list[tuple[str, ast.expr | None]]:
    """Arguments and defaults of a function, without `self`."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    pairs = [*zip(plain, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [(argument.arg, default) for argument, default in pairs if argument.arg != "self"]


def options(name: str, classes: dict[str, ast.ClassDef]) -> Args:
    """Constructor arguments of a class that its docstring or that of a base describes."""
    node = classes.get(name)
    if node is None:
        return []
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    names = [base.id for base in bases if isinstance(base, ast.Name)]
    texts = described(ast.get_docstring(node))
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is not None:
        pairs = signature(init)
    elif any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        pairs = [
            (n.target.id, n.value)
            for n in node.body
            if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.target.id in texts
        ]
    else:
        return next((found for base in names if (found := options(base, classes))), [])
    inherited: dict[str, str] = {}
    for base in names:
        inherited |= {argument: text for argument, _, text in options(base, classes)}
        if base in ("CriticFreeLightningModule", "GRPOLightningModule"):
            inherited |= {argument: text for argument, _, text in options("PPOLightningModule", classes)}
    return [(a, shown(d), short(texts[a]) if a in texts else inherited.get(a, "")) for a, d in pairs]


def table(rows: Args, head: str = "option") -> str:
    lines = [f"| {head} | default | description |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {default} | {text} |" for name, default, text in rows)])


def public(room: str) -> list[str]:
    """Names of a package in the order of its API page."""
    return re.findall(r"^ {8}- (\w+)$", (ROOT / "docs" / "reference" / f"{room}.md").read_text(), re.MULTILINE)


def options_page() -> str:
    classes = index()
    parts = [
        "# Options\n\nThis page lists every option of every class that a configuration can name, with its default. "
        "`scripts/options_table.py` generates\nthis page. `lightrl fit --model.help CLASS` and "
        "`lightrl fit --data.help CLASS` print complete descriptions.\nFor the syntax of files and overrides, see "
        "[Configuration files](configuration.md).",
        "## Run\n\nTop-level options, in the file or on the command line.\n\n"
        + table(
            [
                ("base", "`null`", "Base configuration files, read before this file. Only valid in a file."),
                ("run_dir", "`null`", "Directory for everything the run writes."),
                ("seed_everything", "`0`", "Seed of all random number generators."),
                ("ckpt_path", "`null`", "Checkpoint to resume from; `last` is the newest one."),
                ("trainer", "", "Arguments of Lightning's `Trainer`: `max_epochs`, `devices`, `strategy`, ..."),
                ("model", "", "`class_path` and `init_args` of a module."),
                ("data", "", "`class_path` and `init_args` of a data module."),
            ]
        ),
    ]
    for room, (title, text) in ROOMS.items():
        parts.append(f"## {title}\n\n{text}")
        for name in [*public(room), *EXTRA.get(room, ())]:
            rows = [row for row in options(name, classes) if row[0] not in ("args", "kwargs")]
            if rows and any(description for _, _, description in rows):
                parts.append(f"### {name}\n\n{table(rows)}")
    return "\n\n".join(parts) + "\n"


def cli_page() -> str:
    source = ast.parse((ROOT / "lightrl/cli/__init__.py").read_text())
    values = {n.targets[0].id: n.value for n in source.body if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]
    commands: dict[str, str] = ast.literal_eval(values["COMMANDS"])
    usage: str = ast.literal_eval(values["USAGE"])
    runs = ast.parse((ROOT / "lightrl/cli/lightning_cli.py").read_text())
    constants = {n.targets[0].id: n.value for n in runs.body if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]
    run_usage: str = ast.literal_eval(constants["USAGE"])
    run_texts: dict[str, str] = ast.literal_eval(constants["DESCRIPTIONS"])
    lines = re.findall(r"^  lightrl (\S+).*?   ?(\S.*)$", usage, re.MULTILINE)
    tail = usage[usage.index("Run `lightrl COMMAND") :]
    exits = re.search(r"Exit codes: (.*)", tail, re.DOTALL)[1]  # type: ignore[index]
    codes = [code.strip().split(" ", 1) for code in " ".join(exits.split()).rstrip(".").split(";")]
    parts = [
        "# Command line\n\nThis page lists the commands of `lightrl` and their arguments. `scripts/options_table.py` "
        "generates this page.\n\n```bash\nlightrl COMMAND --help\n```",
        "## Commands\n\n| command | purpose |\n|---|---|\n"
        + "\n".join(f"| [`{name}`](#{name}) | {re.sub(r'^.*?  +', '', text)} |" for name, text in lines),
        "## Common options\n\n```text\n" + tail[: tail.index("Exit codes")].strip() + "\n```",
        "## Exit codes\n\n| code | meaning |\n|---|---|\n" + "\n".join(f"| {code} | {text} |" for code, text in codes),
    ]
    for name, _ in lines:
        if name in run_texts:
            body = f"## {name}\n\n{run_texts[name]}"
            if name == "fit":
                text = run_usage.replace("{command}", "fit").split("\n\nRun `lightrl")[0]
                body += f"\n\n```text\n{text}\n```\n\nAll options are on the page [Options](options.md)."
            else:
                body += " It takes the same options as [`fit`](#fit)."
            parts.append(body)
            continue
        module, _, function = commands[name].partition(":")
        path = ROOT / (module.replace(".", "/") + ".py")
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        node = next(n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == function)
        assert isinstance(node, ast.FunctionDef)
        docstring = ast.get_docstring(node) or ""
        texts = described(docstring)
        intro = " ".join(re.split(r"\n(?:Args|Raises|Returns):", docstring)[0].split())
        rows = [
            (a if default is None else f"--{a.replace('_', '-')}", shown(default), short(texts.get(a, "")))
            for a, default in signature(node)
        ]
        parts.append(f"## {name}\n\n{intro}" + (f"\n\n{table(rows, 'argument')}" if rows else ""))
    return "\n\n".join(parts) + "\n"


PAGES = {"options.md": options_page, "cli.md": cli_page}


def main() -> None:
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / "docs" / name, make()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if "--check" in sys.argv and stale:
        sys.exit(f"Not up to date: {', '.join(stale)}. Run `python scripts/options_table.py`.")


if __name__ == "__main__":
    main()
