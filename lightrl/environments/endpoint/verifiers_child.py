"""The program of `VerifiersProgram`, which runs in the Python interpreter with verifiers.

Reads its settings as JSON from `LIGHTRL_VERIFIERS`. `python verifiers_child.py FILE` writes the task set to a file.
Runs as a script and imports nothing from LightRL.
"""

import hashlib
import json
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path[0] = os.getcwd()  # replaces the directory of this file

import tomllib  # noqa: E402
import verifiers.v1 as vf  # noqa: E402
from packaging.requirements import Requirement  # noqa: E402
from verifiers.v1.clients import EvalClientConfig, ModelContext  # noqa: E402
from verifiers.v1.configs.select import SelectConfig  # noqa: E402
from verifiers.v1.runtimes.subprocess import SubprocessRuntime  # noqa: E402
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config  # noqa: E402

KEY = "LIGHTRL_API_KEY"  # runtimes hide variables with such names from the policy's commands
SETTINGS = json.loads(os.environ["LIGHTRL_VERIFIERS"])


def _environment() -> Any:
    config = {**SETTINGS["environment"], "taskset": SETTINGS["taskset"]}
    kind = env_config_type(config["taskset"]["id"], config.get("id", ""))
    for name, field in kind.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            config[name] = {**SETTINGS["agent"], **config.get(name, {})}
    return load_environment(resolve_env_config(config))


ENVIRONMENT = _environment()
TASK = type(ENVIRONMENT.taskset).task_type()
_prepare = SubprocessRuntime.prepare_uv_script


def _has(requirement: str) -> bool:
    """Whether this interpreter satisfies a script's requirement."""
    wanted = Requirement(requirement)
    try:
        return version(wanted.name) in wanted.specifier
    except PackageNotFoundError:
        return False


async def _prepared(self: Any, script: Any, env: Any = None, **options: Any) -> list[str]:
    """The command of a harness's script. Uses this interpreter if it satisfies the requirements, otherwise uv."""
    data = script.encode() if isinstance(script, str) else script
    found = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", data.decode())
    wanted = tomllib.loads(re.sub(r"(?m)^# ?", "", found[1])) if found else {}
    if not all(map(_has, wanted.get("dependencies", []))):
        return list(await _prepare(self, script, env, **options))
    path = Path(self.scripts_dir) / f"{hashlib.sha256(data).hexdigest()}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)
    return [sys.executable, str(path)]


SubprocessRuntime.prepare_uv_script = _prepared


async def main(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Runs the example's task and returns its reward and metrics."""
    os.environ[KEY] = api_key
    task = TASK(TASK.data_type().model_validate_json(row["task"]), ENVIRONMENT.config.taskset.task)
    client = EvalClientConfig(base_url=base_url, api_key_var=KEY)
    context = ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
    async with ENVIRONMENT.serving():
        episode = await ENVIRONMENT.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    played = [trace for trace in episode.traces if trace.agent.config.client.base_url == base_url]
    if len(played) != 1:
        names = ", ".join(trace.agent.name for trace in played) or "none"
        raise RuntimeError(
            f"environment: the policy must play exactly one agent, but played {names}. Set `model` and `client` of the "
            "others."
        )
    scores = {name: reward.score for name, reward in played[0].rewards.items()}
    return {"reward": played[0].reward, "metrics": {**scores, **played[0].metrics}}


def rows(place: str) -> None:
    """Writes the task set as JSON lines."""
    tasks = ENVIRONMENT.taskset.select(SelectConfig(**SETTINGS["select"]))
    if not tasks.bounded:
        raise SystemExit("select: the task set is infinite. Set select.limit.")
    with open(place, "w") as file:
        for task in tasks:
            data = task.data
            prompt = data.prompt_text or data.name or f"task {data.idx}"
            print(json.dumps({"prompt": prompt, "name": data.name, "task": data.model_dump_json()}), file=file)


if __name__ == "__main__":
    rows(sys.argv[1])
