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
    "algorithms": ("Modules", "Set the class under `model`, and its options under `model.init_args`."),
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
PLACES = {
    "Updates": "Set these options under `model.init_args.updates`.",
    "Shaping": "Set these options under `model.init_args.shaping`.",
    "CriticSpec": "Set these options under `model.init_args.critic`. Only `PPOLightningModule` has a critic.",
    "ExtraLosses": "Set these options under `model.init_args.extra_losses`.",
    "LRSchedule": "Set these options under `model.init_args.lr_scheduler`.",
    "ModelSpec": "Set these options under `model.init_args.actor`. `reference`, `critic.model`, `teachers`, and\n"
    "`model` of `RewardLightningModule` also take them. A string sets `path`: `actor: MODEL`.",
    "LoraSpec": "Set these options under `model.init_args.actor.lora`, or under `lora` of another model.",
    "RewardModelSpec": "Set these options in the entries of `model.init_args.reward_models`.",
    "Evaluation": "Set these options under `data.init_args.evaluation`.",
    "Ahead": "Set the class under `data.init_args.schedule`.",
    "InFlight": "Set the class under `data.init_args.schedule`.",
    "PTXSource": "Set these options under `data.init_args.ptx`.",
    "PromptSource": "Set these options under `data.init_args.prompts` or `data.init_args.evaluation.prompts`.",
    "PromptMixture": "Set the class under `data.init_args.prompts`.",
    "PromptCurriculum": "Set the class under `data.init_args.prompts`.",
    "SFTSource": "Set these options under `train` and `val` of `SFTDataModule`.",
    "PreferenceSource": "Set these options under `train` and `val` of `PreferenceDataModule`.",
    "ArithmeticRows": "Set the class under `rows` of a source.",
    "ReasoningGymRows": "Set the class under `rows` of a source.",
    "ReasoningGymTask": "Set these options in the entries of `tasks` of `ReasoningGymRows`.",
    "RowSource": "All sources take these options, which their tables repeat.",
    "ServerTeacher": "Set the class under `model.init_args.teachers` of `DistillLightningModule`.",
    "SamplingParams": "Set these options under `data.init_args.sampling` or `data.init_args.evaluation.sampling`.",
}
"""Where options go that do not belong under the key that their section names."""

NOTES = {
    "RolloutDataModule": "`rollouts_per_epoch: null` makes an epoch one pass over the prompts, as in TRL and verl. The "
    "first prompts of the next\npass fill the last rollout.",
}
NOT_OPTIONS = {"TrajectoryLayout", "PromptSet", "Ledger", "AdvantageInput", "Turns", "LossInput"}
"""Classes that a configuration doesn't name."""


ROOT_MODULE = "PolicyGradientLightningModule"
PARTS = ("actor", "advantage", "loss", "aggregation", "kl", "ppo_epochs", "whiten_advantages")
"""Options of an algorithm that its table always shows."""

Args = list[tuple[str, str, str]]  # name, default, description


def index() -> dict[str, ast.ClassDef]:
    """Every class of the package by name."""
    found: dict[str, ast.ClassDef] = {}
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


def bases(node: ast.ClassDef) -> list[str]:
    """Names of the base classes."""
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [base.id for base in plain if isinstance(base, ast.Name)]


def forwarded(init: ast.FunctionDef, order: list[str]) -> set[str] | None:
    """Arguments that a constructor passes to its base together with its `**kwargs`, or None if it has no such call.

    `order` has the arguments of the base.
    """
    for call in ast.walk(init):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if init.args.kwarg is not None and given.get(None) == init.args.kwarg.arg:
                return {name for name in given if name is not None} | set(order[: len(call.args)])
    return None


def options(name: str, classes: dict[str, ast.ClassDef]) -> Args:
    """Constructor arguments of a class, including those that it passes on to its bases."""
    node = classes.get(name)
    if node is None:
        return []
    texts = described(ast.get_docstring(node))
    inherited: dict[str, tuple[str, str, str]] = {}
    for base in bases(node):
        inherited |= {row[0]: row for row in options(base, classes)}

    def row(argument: str, default: ast.expr | None) -> tuple[str, str, str]:
        known = inherited.get(argument, ("", "", ""))[2]
        return argument, shown(default), short(texts[argument]) if argument in texts else known

    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is not None:
        own = [row(argument, default) for argument, default in signature(init)]
        fixed = forwarded(init, list(inherited))
        if fixed is None:
            return own
        return own + [each for each in inherited.values() if each[0] not in fixed | {a for a, _, _ in own}]
    if any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        fields = [
            row(n.target.id, n.value)
            for n in node.body
            if isinstance(n, ast.AnnAssign)
            and isinstance(n.target, ast.Name)
            and (n.target.id in texts or n.target.id in inherited)
        ]
        return list((inherited | {field[0]: field for field in fields}).values())
    return next((found for base in bases(node) if (found := options(base, classes))), [])


def descends(name: str, ancestor: str, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a class is derived from another one."""
    node = classes.get(name)
    return node is not None and any(b == ancestor or descends(b, ancestor, classes) for b in bases(node))


def section(name: str, classes: dict[str, ast.ClassDef]) -> str | None:
    """Heading, place, table, and inherited options of a class; None if it has no options."""
    rows = [row for row in options(name, classes) if row[0] not in ("args", "kwargs")]
    if not any(description for _, _, description in rows) or name in NOT_OPTIONS:
        return None
    parts = [f"### {name}"]
    if name in PLACES:
        parts.append(PLACES[name])
    if descends(name, ROOT_MODULE, classes):
        inherited = options(ROOT_MODULE, classes)
        order = [argument for argument, _, _ in inherited]
        same = [row for row in rows if row in inherited and row[0] not in PARTS]
        rows = sorted(
            (row for row in rows if row not in same), key=lambda row: order.index(row[0]) if row[0] in order else 0
        )
        missing = [argument for argument in order if argument not in {row[0] for row in rows + same}]
        parts.append(table(rows))
        text = f"Also takes these options of [`{ROOT_MODULE}`](#{ROOT_MODULE.lower()}), with the same defaults:\n"
        text += ", ".join(f"`{argument}`" for argument, _, _ in same) + "."
        parts.append(text + "".join(f" `{argument}` is not an option." for argument in missing))
    else:
        parts.append(table(rows))
    return "\n\n".join([*parts, *([NOTES[name]] if name in NOTES else [])])


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
            part = section(name, classes)
            if part is not None:
                parts.append(part)
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
