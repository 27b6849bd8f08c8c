"""The command line as a user meets it: help, short names, mistakes, resuming, predictions, and the same in Python."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.callbacks.progress.progress_bar import get_standard_metrics

import lightrl.algorithms
import lightrl.callbacks
import lightrl.data
import lightrl.engines
import lightrl.objectives
import lightrl.rewards
import lightrl.rollout
from lightrl.algorithms import LRSchedule
from lightrl.cli import main, run
from lightrl.cli.lightning_cli import redacted
from lightrl.cli.report.read import read_run
from lightrl.data import PromptSource
from lightrl.engines import EngineContext, EngineDiedError
from lightrl.rollout.collector import RolloutStalledError
from lightrl.rollout.learner import RLCallback
from tests.toys import model_fixture, write_run

ROOT = Path(__file__).resolve().parent.parent
ARITHMETIC = {"class_path": "lightrl.data.ArithmeticRows"}


model = model_fixture()


@pytest.fixture(autouse=True)
def _in_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    monkeypatch.setattr("sys.path", [*sys.path])  # `main` adds the working folder


@pytest.fixture()
def write(tmp_path: Path, model: str) -> Callable[..., str]:
    """Writes a small run as YAML: short class names throughout. Keyword arguments change what they name."""
    return functools.partial(write_run, tmp_path / "run.yaml", model)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs `lightrl fit ...`, which must fail with a short message; returns it."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["fit", *arguments])
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert "Traceback" not in message and "usage:" not in message
    start = message.index("error: ")
    return message[start:]


# ---- running -----------------------------------------------------------------------------------------------------


def test_loggers_get_the_whole_configuration_and_a_run_that_does_not_begin_leaves_what_was_logged(
    write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = {"class_path": "CompletionLogger", "init_args": {"every_n_rollouts": 1, "terminal": False}}
    config = write(trainer={"logger": True, "callbacks": [samples]}, run_dir="run")
    main(["fit", "--config", config])
    for file in ("hparams.yaml", "tensorboard/hparams.yaml"):
        said = yaml.safe_load((tmp_path / "run" / file).read_text())
        assert said["model"]["init_args"]["kl"]["init_args"]["coef"] == 0.04  # a default, resolved
        assert said["data"]["init_args"]["group_size"] == 2
        assert said["versions"]["torch"] == torch.__version__
        assert said["command"].startswith("lightrl")
    left = [tmp_path / "run" / name for name in ("metrics.csv", "samples.jsonl")]
    before = [path.read_bytes() for path in left]
    refused(capsys, "--config", config, "--model.init_args.updates.minibatch_size=7")
    assert [path.read_bytes() for path in left] == before
    main(["fit", "--config", config])
    assert [path.read_bytes().count(b"\n") for path in left] == [content.count(b"\n") for content in before]


def test_a_resumed_run_goes_on_in_its_table_and_an_evaluation_leaves_the_run_as_it_is(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = {"class_path": "CompletionLogger", "init_args": {"every_n_rollouts": 1, "terminal": False}}
    callbacks = [{"class_path": name} for name in ("EvaluateFirst", "RolloutCheckpoint")]
    trainer = {"logger": True, "callbacks": [*callbacks, samples], "enable_checkpointing": True}
    config = write(trainer=trainer, data={"evaluation": {"prompts": {"rows": ARITHMETIC, "limit": 4}}}, run_dir="run")
    monkeypatch.setattr("lightrl.cli.quiet", lambda: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*log files in this directory will be deleted")
        cli = run(["fit", "--config", config])
        assert "v_num" not in get_standard_metrics(cli.trainer)
        run(["fit", "--config", config, "--ckpt_path=last", "--trainer.max_epochs=2"])
        metrics = read_run(tmp_path / "run").metrics
        assert list(metrics["reward/mean"]) == [0, 1] and list(metrics["eval/reward"]) == [-1, 0, 1]
        left = ("config.yaml", "metrics.csv", "samples.jsonl")
        before = [(tmp_path / "run" / name).read_bytes() for name in left]
        run(["validate", "--config", config, "--ckpt_path=last"])
    assert [(tmp_path / "run" / name).read_bytes() for name in left] == before
    assert all((tmp_path / "run" / "validate" / name).is_file() for name in left)


def test_a_class_named_anew_starts_from_its_own_defaults(write: Callable[..., str], tmp_path: Path) -> None:
    """Not from those arguments of the class before that happen to have the same names; what is given stays."""
    config = write(model={"loss": {"class_path": "PPOClip", "init_args": {"eps_low": 0.1, "eps_high": 0.3}}})
    (tmp_path / "same.yaml").write_text("model: {init_args: {loss: {class_path: PPOClip, init_args: {eps_low: 0.25}}}}")
    (tmp_path / "gspo.yaml").write_text("model: {init_args: {loss: {class_path: GSPO}, kl: {class_path: KLInReward}}}")

    def loss(*arguments: str) -> tuple[str, float, float]:
        module = run(["--config", config, *arguments], run=False).model
        return type(module.loss).__name__, module.loss.eps_low, module.loss.eps_high

    assert loss() == ("PPOClip", 0.1, 0.3)
    assert loss("--config", "same.yaml") == ("PPOClip", 0.25, 0.3)
    assert loss("--config", "gspo.yaml") == ("GSPO", 3e-4, 4e-4)
    assert loss("--model.init_args.loss", "GSPO") == ("GSPO", 3e-4, 4e-4)
    assert loss("--model.init_args.loss", "GSPO", "--model.init_args.loss.eps_high", "0.5") == ("GSPO", 3e-4, 0.5)
    module = run(["--config", config, "--config", "gspo.yaml"], run=False).model
    assert module.kl.estimator == "k1"  # not KLInLoss's k3


@dataclass
class Endless(PromptSource):
    """A source of one's own, with an argument that `PromptSource` has not."""

    spice: int = 1


def test_a_prompt_source_of_ones_own_is_named_in_yaml(write: Callable[..., str]) -> None:
    own = {"class_path": f"{__name__}.Endless", "init_args": {"rows": ARITHMETIC, "spice": 3}}
    data = {"prompts": own, "evaluation": {"prompts": {"sources": [own, {"rows": ARITHMETIC}]}}}
    built = run(["--config", write(data=data), "--data.init_args.prompts.limit=5"], run=False).datamodule
    assert isinstance(built.prompts, Endless) and (built.prompts.spice, built.prompts.limit) == (3, 5)
    assert [type(source) for source in built.evaluation.prompts.sources] == [Endless, PromptSource]


def test_the_configuration_that_a_run_writes_can_be_run(write: Callable[..., str], tmp_path: Path) -> None:
    """Also with a schedule by name, and with rows: text in quotes stays text, even where it looks like a number."""
    row = {"prompt": [{"role": "user", "content": "12"}], "answer": "3", "id": "007", "n": 3, "x": 0.5, "ok": True}
    row |= {"none": None, "list": [1, "2"], "record": {"1": "2", "n": 2}, "lists": [[1.5, "text"]]}
    config = write(model={"lr_scheduler": {"name": "cosine"}}, data={"prompts": {"rows": [row]}})
    first, saved = run(["--config", config], run=False), tmp_path / "saved.yaml"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of the parser, where it cannot write a value
        saved.write_text(first.parser.dump(redacted(first.config)))
    for cli in (first, run(["--config", str(saved)], run=False)):
        assert cli.model.lr_scheduler_factory == LRSchedule("cosine")
        (read,) = cli.datamodule.prompts.rows
        assert read == row and {name: type(v) for name, v in read.items()} == {name: type(v) for name, v in row.items()}


def test_predict_writes_completions_with_rewards(write: Callable[..., str], tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    writer = {"class_path": "PredictionWriter", "init_args": {"path": str(target)}}
    prompts = {"rows": {**ARITHMETIC, "init_args": {"split": "eval"}}, "limit": 3}
    config = write(
        trainer={"callbacks": ["WeightSync", writer]},
        data={"evaluation": {"predict_prompts": prompts, "group_size": 2}},
    )
    main(["predict", "--config", config])
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(records) == 3 * 2
    for record in records:
        assert record["reward"] == float(record["completion"] == record["answer"])
        assert {"prompt", "num_tokens", "truncated", "reward/ExactAnswer"} <= set(record)
    assert records[0]["prompt"] == records[1]["prompt"] != records[2]["prompt"]


def checkpointed(write: Callable[..., str], module: str, folder: Path, **changes: Any) -> str:
    saving = {"class_path": "RolloutCheckpoint", "init_args": {"dirpath": str(folder), "every_n_rollouts": 1}}
    return write(module, trainer={"callbacks": ["WeightSync", saving], "enable_checkpointing": True}, **changes)


def test_resume_takes_yaml_and_refuses_another_class(
    write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    main(["fit", "--config", checkpointed(write, "GRPOLightningModule", folder)])
    last = str(folder / "last.ckpt")
    # Lightning's own CLI would take what stands here for the model's arguments, over those of the YAML.
    content = torch.load(last, weights_only=True)
    torch.save(content | {"hyper_parameters": {"init_args": {"extra_losses": {"entropy_coef": 0.5}}}}, last)
    Path(f"{last}.sha256").unlink()
    changed = checkpointed(write, "GRPOLightningModule", folder, model={"extra_losses": {"entropy_coef": 0.01}})
    cli = run(["fit", "--config", changed, "--ckpt_path", last, "--trainer.max_epochs", "2"])
    assert cli.model.entropy_coef == 0.01
    assert cli.trainer.global_step == 2  # one rollout before, one after

    other = checkpointed(write, "RLOOLightningModule", folder)
    message = refused(capsys, "--config", other, "--ckpt_path", last, "--trainer.max_epochs", "3")
    assert "written by GRPOLightningModule, not by RLOOLightningModule" in message


# ---- mistakes ----------------------------------------------------------------------------------------------------


LATE: dict[str, dict[str, Any]] = {
    "maximum length of 64": {"data": {"sampling": {"max_new_tokens": 99}}},
}
"""Part of the message -> mistakes that are found after a model is loaded."""
MISTAKES: dict[str, dict[str, Any]] = LATE | {
    "prompt_column='question'": {"data": {"prompts": {"rows": ARITHMETIC, "prompt_column": "question"}}},
    "'./nosuch'": {"model": {"actor": {"path": "./nosuch"}}},
    "NO_SUCH_VARIABLE": {"model": {"actor": {"path": "${env:NO_SUCH_VARIABLE}"}}},
    "group_size": {"data": {"group_size": "x"}},
    "VLMEngine": {"data": {"engine": "VLMEngine"}},
    "strategy='foo'": {"trainer": {"strategy": "foo"}},
    "save_top_k=-5": {"trainer": {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"save_top_k": -5}}]}},
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_line(
    mistake: str, write: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    if mistake not in LATE:
        monkeypatch.setattr("lightrl.models.policy.load_causal_lm", lambda *args, **kwargs: loaded.append(args))
    message = refused(capsys, "--config", write(**MISTAKES[mistake]))
    assert mistake in message and message.count("\n") == 1 and len(message) < 500
    assert loaded == []


def test_secrets_stay_out_of_what_a_run_writes(
    write: Callable[..., str], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """One given as a variable, one in plain text, one in a URL; the model's loading gets the first."""
    monkeypatch.setenv("HUB_TOKEN", "secret-of-the-hub")
    kwargs = {"token": "${env:HUB_TOKEN}", "proxies": {"https": "http://me:secret-of-the-proxy@host"}}
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path / "logs")}}
    saving = {"class_path": "RolloutCheckpoint", "init_args": {"every_n_rollouts": 1}}
    trainer = {"logger": logger, "enable_checkpointing": True, "callbacks": ["WeightSync", saving]}
    cli = run(["fit", "--config", write(trainer=trainer, model={"actor": {"path": model, "kwargs": kwargs}})])
    assert cli.model.actor_spec.kwargs["token"] == "secret-of-the-hub"
    written = [path for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    assert {"config.yaml", "last.ckpt"} <= {path.name for path in written}
    assert not [path for path in written if b"secret-of" in path.read_bytes()]
    config = next(path for path in written if path.name == "config.yaml").read_text()
    assert "${env:HUB_TOKEN}" in config and "me:***@host" in config
    output = "".join(capfd.readouterr())
    assert "secret-of" not in output
    assert "model.init_args.actor.kwargs.proxies.https: contains a secret" in output


def test_a_logger_that_records_the_command_and_the_hyperparameters_show_no_secret_of_it(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one with quotes; the command itself stays, since Lightning starts further ranks by it."""
    (tmp_path / "recording.py").write_text("""
import sys
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

class Recording(DummyLogger):
    begun = []

    @property
    def experiment(self):
        self.begun.append(list(sys.argv))
        return super().experiment
""")
    command = [
        "fit",
        "--config",
        write(),
        "--model.init_args.actor.kwargs.token=it's-a-Secret",
        "--trainer.max_steps=0",
    ]
    loggers = [
        {"class_path": "recording.Recording"},
        {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "."}},
    ]
    config = write(trainer={"logger": loggers}, run_dir="run")
    monkeypatch.setattr("sys.argv", ["lightrl", *command])
    main(["fit", "--config", config, *command[3:]])
    import recording  # type: ignore[import-not-found]

    (begun, *_) = recording.Recording.begun
    assert begun[:2] == ["lightrl", "fit"] and not any("Secret" in argument for argument in begun)
    assert sys.argv == ["lightrl", *command]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".yaml", ".0", ".csv")]
    assert any("hparams" in path.name for path in written)
    assert not [path for path in written if b"Secret" in path.read_bytes()]


@pytest.mark.parametrize(
    "secret",
    [
        {"data": {"engine": {"class_path": "ServerEngine", "init_args": {"urls": ["h"], "api_key": ["hunter2-Zq"]}}}},
        {"model": {"actor": ["${env:HUNTER}"], "updates": "${env:HUNTER}"}},
    ],
    ids=["plain", "variable"],
)
def test_a_secret_that_the_parser_quotes_is_not_shown(
    secret: dict[str, Any],
    write: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightrl.checkpoints.redaction._secrets", set())
    monkeypatch.setenv("HUNTER", "hunter2-Zq")
    config = write(**secret)
    assert "hunter2" not in refused(capsys, "--config", config)
    with pytest.raises(SystemExit):
        main(["doctor", "--config", config])
    said = "".join(capsys.readouterr())
    assert "problem" in said and "hunter2" not in said


@pytest.mark.parametrize(
    ("command", "place", "message"),
    [
        ("fit --config run.yaml", "lightrl.cli.run", "Interrupted before training started; nothing was saved.\n"),
        ("doctor", "lightrl.cli.doctor.diagnose", "Interrupted.\n"),
    ],
)
def test_an_interrupt_is_one_line(
    command: str,
    place: str,
    message: str,
    write: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    write()
    monkeypatch.setattr(place, interrupt)
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert (stop.value.code, capsys.readouterr().err) == (130, message)


def test_an_interrupt_while_the_command_line_loads_is_one_line() -> None:
    script = """
import sys
class Interrupting:
    def find_spec(self, name, *args):
        if name == "lightrl.cli.config_files":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from lightrl.__main__ import command; command()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")
    assert 'lightrl = "lightrl.__main__:command"' in (ROOT / "pyproject.toml").read_text()


class Dying(RLCallback):
    """Fails as in a run whose engine has died."""

    def on_rollout_scored(self, trainer: Any, module: Any, rollouts: Any) -> None:
        raise EngineDiedError("The engine process is gone.")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDiedError("The engine process is gone."), 1),
        (RolloutStalledError("Nothing moved."), 1),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:55950: Connection reset by peer"), 1),
        (OSError(24, "Too many open files", "config.yaml"), 2),
    ],
)
def test_what_is_gone_is_told_in_one_line(
    error: Exception,
    code: int,
    write: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any) -> None:
        raise error

    if not isinstance(error, EngineDiedError):  # which a whole run meets
        monkeypatch.setattr("lightrl.cli.run", fails)
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", write(trainer={"callbacks": ["WeightSync", {"class_path": f"{__name__}.Dying"}]})])
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == code and len(told) == 1 and str(error) in told[0]


class Failing(Callback):
    """The user's own code."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        raise ValueError("mine")


def test_the_users_own_code_keeps_its_traceback(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(trainer={"callbacks": ["WeightSync", {"class_path": f"{__name__}.Failing"}]})
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    with pytest.raises(ValueError, match="mine"):
        main(["fit", "--config", config])


def test_debug_shows_the_traceback(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTRL_DEBUG", "1")
    with pytest.raises(ValueError, match="group_size=1"):
        main(["fit", "--config", write(data={"group_size": 1})])


def test_the_example_overrides_one_hook(model: str) -> None:
    path = ROOT / "examples" / "custom_hook.py"
    spec = importlib.util.spec_from_file_location("custom_hook", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    seen: list[torch.Tensor] = []

    class Watch(RLCallback):
        def on_experience_made(self, trainer: Any, pl_module: Any, experience: Any) -> None:
            seen.append(experience.advantages)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = example.main(model, limit_train_batches=2, callbacks=[example.WeightSync(), Watch()], **quiet)
    assert trainer.global_step == 2
    assert len(seen) == 2 and all((advantages >= 0).all() for advantages in seen)


def configurable_classes() -> list[type]:
    """Every concrete class that YAML can name."""
    packages = (
        lightrl.algorithms,
        lightrl.objectives,
        lightrl.rollout,
        lightrl.data,
        lightrl.engines,
        lightrl.rewards,
        lightrl.callbacks,
    )
    found = [getattr(package, name) for package in packages for name in {*dir(package), *package.__all__}]
    classes = {c for c in found if inspect.isclass(c) and c.__module__.startswith("lightrl.")}
    internal = {EngineContext, lightrl.rewards.RewardScorer}
    kept = [c for c in classes if c not in internal and not inspect.isabstract(c) and not issubclass(c, BaseException)]
    return sorted((c for c in kept if c.__name__ != "KLPenalty"), key=lambda c: c.__name__)


@pytest.mark.parametrize("cls", configurable_classes(), ids=lambda c: c.__name__)
def test_every_argument_is_explained(cls: type) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(cls, "it")
    unexplained = [a.dest for a in parser._actions if a.dest.startswith("it.") and not (a.help or "").strip(" .")]
    assert unexplained == []
