"""Shipped configurations with one thing changed: any key, by null, other types, bounds, misspelt, other classes."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from lightrl.cli import run, users_error
from lightrl.config_files import SHIPPED, expand_configs
from tests.fuzz.verdicts import ERROR, WORKS
from tests.toys import quickstart_model

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
Key = tuple[str | int, ...]


def merged(first: Any, then: Any) -> Any:
    """Two configurations as the command line merges them; another class takes none of the arguments, but a module."""
    if not (isinstance(first, dict) and isinstance(then, dict)):
        return copy.deepcopy(then)
    classes = [str(each.get("class_path")) for each in (first, then) if "class_path" in each]
    if len({*classes}) > 1 and not all(name.endswith("Module") for name in classes):
        return copy.deepcopy(then)
    return {**first, **{key: merged(first.get(key), value) for key, value in then.items()}}


@functools.cache
def place() -> Path:
    """A folder with a tiny model and rows like those of the shipped tasks."""
    folder = Path(tempfile.mkdtemp(prefix="lightrl-fuzz-"))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    quickstart_model(folder / "model", num_hidden_layers=1, max_position_embeddings=1024, **sizes)  # examples, too
    settings = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    texts = [(f"{a}+{a}=", f"{a} and {a}\n#### {2 * a}") for a in range(8)]
    rows = [
        {"question": q, "problem": q, "prompt": q, "answer": answer, "completion": answer[-2:]} for q, answer in texts
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@functools.cache
def whole() -> dict[str, dict[str, Any]]:
    """Name -> the shipped configurations that run by themselves, strategies and overlays laid over one, made tiny."""
    model, source = str(place() / "model"), {"path": str(place() / "rows.jsonl"), "rows": None, "name": None}
    trainer = {"accelerator": "cpu", "devices": 1, "precision": "32-true", "fast_dev_run": 1, "strategy": "auto"}
    trainer |= {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    actor = {"path": model, "random_init": False, "freeze": []}
    sampling = {"max_new_tokens": 4}
    data = {"prompts": source, "eval_prompts": source, "sampling": sampling, "eval_sampling": sampling}
    data |= {"engine": {"class_path": "TransformersEngine"}, "prompts_per_rollout": 4, "eval_batch_size": 4}
    rl = {"model": {"init_args": {"actor": actor, "minibatch_size": None}}, "data": {"init_args": data}}
    sft_data = {"tokenizer": model, "train": source, "val": source, "batch_size": 4}
    sft = {"model": {"init_args": {"actor": actor}}, "data": {"init_args": sft_data}}
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(SHIPPED.rglob("*.yaml")):
        chain = [argument.removeprefix("--config=") for argument in expand_configs(["--config", str(path)])]
        config: dict[str, Any] = {}
        for file in chain:
            config = merged(config, yaml.safe_load(Path(file).read_text()))
        config.pop("base", None)
        files[path.relative_to(SHIPPED).with_suffix("").as_posix()] = config
    found = {}
    for name, config in files.items():
        if name.startswith("strategies/"):
            continue  # another number of processes
        if name.startswith("overlays/"):
            config = merged(files["recipes/grpo_gsm8k_qwen2.5_0.5b"], config)
        if not {"model", "data"} <= config.keys() or "class_path" not in config["model"]:
            continue
        config = merged(merged(config, {"trainer": trainer}), sft if name.endswith("/sft") else rl)
        for key in ("staleness", "in_flight"):
            config["data"]["init_args"].pop(key, None)  # the engine samples in the trainer's process
        prompts = config["data"]["init_args"].get("prompts", {})
        if "class_path" in prompts:  # a curriculum, over rows of the place
            prompts["init_args"]["source"] = {key: prompts.pop(key) for key in source}
        arguments = config["model"]["init_args"]
        if arguments.get("reference"):
            arguments["reference"] = {"path": model}
        if arguments.get("teachers"):
            arguments["teachers"] = {key: {"path": model} for key in arguments["teachers"]}
        arguments.pop("aux_loss_coef", None)  # the small model has no experts
        found[name] = config
    return found


def keys_of(config: Any, path: Key = ()) -> Iterator[Key]:
    """Path of every key and every entry of a list, inner ones too."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from keys_of(value, (*path, key))


@functools.cache
def all_keys() -> list[tuple[str, Key]]:
    """(configuration, key): each distinct key once, in the first configuration that has it, and other values of it."""
    seen: dict[str, tuple[str, Key]] = {}
    for name, config in whole().items():
        for key in keys_of(config):
            value = functools.reduce(lambda inner, step: inner[step], key, config)
            seen.setdefault(f"{_plain(key)}={'' if isinstance(value, dict | list) else value}", (name, key))
    return list(seen.values())


def _plain(key: Key) -> str:
    return ".".join("*" if isinstance(step, int) else step for step in key)


NONSENSE = [math.nan, math.inf, -math.inf]
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 0.5, -0.5, 1e30, 2**63, 10**400, *NONSENSE),
    *("", "x", "1e-3", "${env:LIGHTRL_FUZZ_MISSING}", "\x00", "os.system", "lightrl.nothing", "a b", "é" * 300),
    *([], {}, [None], [1], ["x"], {"a": 1}, {"path": 3}, {"rows": 3}, {"rows": []}, {"rows": [{}]}, [[]], [{}]),
    *({"class_path": 3}, {"class_path": "x"}, {"class_path": "os.system"}, {"class_path": "GRPOLightningModule"}),
    *({"class_path": "EMA", "init_args": {"x": 1}}, {"class_path": "EMA", "init_args": None}, {"init_args": {}}),
    *({"class_path": "ExactAnswer", "init_args": 3}, {"class_path": "TransformersEngine", "class": 1}),
    *({"class_path": "lightrl.rewards.ExactAnswer"}, {"class_path": "PPOClip", "init_args": {"eps_low": "x"}}),
]
CHANGES = ["value", "value", "value", "value", "misspell", "delete", "extra", "wrap"]
CONFIGS = st.deferred(
    lambda: st.tuples(
        st.sampled_from(all_keys()), st.sampled_from(CHANGES), st.sampled_from(range(len(VALUES))), st.integers(0, 9)
    )
)
PROCESSES = {
    "devices",
    "num_nodes",
    "strategy",
    "accelerator",
    "plugins",
    "sync_batchnorm",
}  # start others, or want a GPU


def changed(name: str, key: Key, change: str, number: int, letter: int) -> dict[str, Any]:
    """The configuration with the change."""
    config = copy.deepcopy(whole()[name])
    parent = functools.reduce(lambda inner, step: inner[step], key[:-1], config)
    last, value = key[-1], VALUES[number]
    if change == "value":
        parent[last] = value
    elif change == "delete":
        del parent[last]
    elif change == "wrap":
        parent[last] = [parent[last]]
    elif isinstance(last, int):
        parent[last] = {"x": parent[last]}
    elif change == "misspell":
        at = letter % len(last)
        parent[last[:at] + last[at] + last[at:]] = parent.pop(last)
    else:
        parent[f"{last}_{letter}"] = value
    return config


def must_fail(name: str, key: Key, change: str, number: int) -> bool:
    """Whether accepting it would be silent nonsense."""
    config = whole()[name]
    parent = functools.reduce(lambda inner, step: inner[step], key[:-1], config)
    if change == "extra" and VALUES[number] in ({}, {"init_args": {}}):
        return False  # no argument is given
    if change in ("misspell", "extra"):
        free = {"kwargs", "extra", "template_kwargs", "load_kwargs", "recipes", "teachers", "metadata", "columns"}
        named = isinstance(key[-1], int) or not free & set(map(str, key[:-1]))
        return bool(named and key[-2:-1] not in [("eval_prompts",)] and isinstance(parent, dict))
    before, value = parent[key[-1]], VALUES[number]
    if change != "value" or "kwargs" in key or "extra" in key:
        return False
    numeric = isinstance(before, int | float) and not isinstance(before, bool)
    if isinstance(value, float) and not math.isfinite(value):
        return numeric
    if key[-1] == "val_check_interval" and isinstance(value, dict):
        return False  # of a timedelta; fast_dev_run puts 1.0 in its place
    if numeric or isinstance(before, bool):
        free_form = {"seed_everything", "fast_dev_run", "logger", "barebones", "devices"} & set(map(str, key))
        return isinstance(value, list | dict) or (numeric and isinstance(value, bool) and not free_form)
    return key[-1] == "class_path" and value != before and not isinstance(value, dict)


def judge_configs(case: tuple[tuple[str, Key], str, int, int]) -> str:
    """Builds it by the command line; runs one rollout where that is quick and safe."""
    (name, key), change, number, letter = case
    config, said = changed(name, key, change, number, letter), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, _inside(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            Path("config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
            try:
                cli = run(["--config", "config.yaml"], run=False)
                if _quick(cli.trainer, key, change, number):
                    cli.trainer.fit(cli.model, cli.datamodule)
            except Exception as error:
                message = users_error(error)
                if message is None:
                    raise
                _require_clear(message, key if change != "delete" else (), VALUES[number])
                return ERROR
    assert not must_fail(name, key, change, number), "accepted silently"
    return WORKS


def _quick(trainer: Any, key: Key, change: str, number: int) -> bool:
    value = VALUES[number]
    huge = change in ("value", "extra") and isinstance(value, int | float) and not -10 <= value <= 10
    one_process = not PROCESSES & set(map(str, key)) and trainer.world_size == 1
    sampled_here = "engine" not in key  # another engine takes its time to start
    return sampled_here and one_process and not huge and bool(trainer.fast_dev_run) and number % 2 == 0


def _require_clear(message: str, key: Key, value: Any) -> None:
    """One message that names what is wrong, or shows it; of what is missing only its reader can be named."""
    lines = message.strip().splitlines()
    assert len(lines) <= 12 and "Traceback" not in message, f"{len(lines)} lines: {message[:1000]}"
    named = [step.rstrip("+") for step in key if isinstance(step, str) and step not in ("init_args", "class_path")]
    words = [word for step in named[-3:] for word in (step, step.rstrip("s"))]
    words += [repr(value)] if words and isinstance(value, str) and len(value) > 2 else []
    assert not words or any(word in message for word in words), f"names none of {words}: {message[:600]}"


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    here, arguments = os.getcwd(), sys.argv
    os.chdir(folder)
    sys.argv = ["lightrl"]  # LightningCLI warns about arguments beside `args`
    try:
        yield
    finally:
        os.chdir(here)
        sys.argv = arguments
