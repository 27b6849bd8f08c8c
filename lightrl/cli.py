"""`lightrl`: Lightning's command line with LightRL's classes at hand by their short names."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["main", "run"]

USAGE = """LightRL: reinforcement fine-tuning as an ordinary Lightning job.

  lightrl fit --config x.yaml        train (PPO, GRPO, SFT, ...)
  lightrl validate --config x.yaml   evaluate on the evaluation prompts
  lightrl test --config x.yaml       the same, on test prompts
  lightrl predict --config x.yaml    write completions with their rewards
  lightrl report RUN_DIR             plots and samples of a run as one HTML page
  lightrl serve-reward ...           serve a reward function over HTTP
  lightrl plan --model MODEL         memory per GPU under each strategy
  lightrl export --checkpoint C --output D   a Hugging Face folder, or a plain checkpoint, of any checkpoint

`lightrl COMMAND --help` explains every argument; `lightrl fit --model.help PPOLightningModule` those of a class.
Several --config are merged, later ones win. LIGHTRL_DEBUG=1 shows the traceback of every error.
"""


def _report() -> Callable[..., Any]:
    from lightrl.report import report

    return report


def _plan() -> Callable[..., Any]:
    from lightrl.plan import plan

    return plan


def _serve_reward() -> Callable[..., Any]:
    from lightrl.rewards.server import serve_reward

    return serve_reward


def _export() -> Callable[..., Any]:
    from lightrl.export import export

    return export


COMMANDS: dict[str, Callable[[], Callable[..., Any]]] = {
    "report": _report,
    "serve-reward": _serve_reward,
    "plan": _plan,
    "export": _export,
}


def _build_cli() -> type[Any]:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    import lightrl.callbacks
    import lightrl.data
    import lightrl.engines
    import lightrl.modules
    import lightrl.rewards  # noqa: F401 - imported so that YAML may name their classes without a path
    from lightrl.engines import (  # noqa: F401 - imported lazily by their package
        ServerEngine,
        TransformersEngine,
        VLLMEngine,
    )

    _start_from_own_defaults()

    class LightRLCLI(LightningCLI):
        """`LightningCLI` in subclass mode, without a checkpoint's hyperparameters overriding YAML on resume."""

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            """Defaults that manual optimisation and generated batches need."""
            parser.set_defaults(
                {
                    "trainer.num_sanity_val_steps": 0,
                    "trainer.use_distributed_sampler": False,
                    "trainer.log_every_n_steps": 1,
                }
            )

        def _parse_ckpt_path(self) -> None:
            """Lightning would merge the checkpoint's hyperparameters over the given YAML; here YAML is what counts."""

    return LightRLCLI


def _start_from_own_defaults() -> None:
    """A loss, estimator, aggregation, KL or engine named anew starts from its own defaults.

    Where a class replaces another, jsonargparse hands it the other's arguments wherever the names match: `loss: GSPO`
    would get PPO's `eps_low=0.2` in the place of its 3e-4. It has no public switch for it: its function is wrapped.
    """
    from jsonargparse import Namespace, _typehints

    from lightrl.engines import Engine
    from lightrl.modules.advantages import AdvantageEstimator
    from lightrl.modules.aggregation import Aggregation
    from lightrl.modules.kl import KLPenalty
    from lightrl.modules.losses import PolicyLoss

    replaceable = (Engine, AdvantageEstimator, Aggregation, KLPenalty, PolicyLoss)
    original: Any = _typehints.discard_init_args_on_class_path_change
    if original.__module__ == __name__:
        return

    def discard(parser: Any, previous: Any, value: Any) -> None:
        if previous and "init_args" in previous and previous.get("class_path") and value.get("class_path"):
            old, new = (_typehints.import_object(spec["class_path"]) for spec in (previous, value))
            if old is not new and isinstance(old, type) and issubclass(old, replaceable):
                previous["init_args"] = Namespace()
        original(parser, previous, value)

    _typehints.discard_init_args_on_class_path_change = discard


def run(args: Sequence[str] | None = None, **kwargs: Any) -> Any:
    """Runs fit, validate, test or predict.

    Args:
        args: command line without the program's name; `sys.argv` where None.
        kwargs: further arguments of `LightningCLI`, e.g. `run=False` to build without running.

    Returns:
        the CLI object with `trainer`, `model` and `datamodule`.
    """
    from lightning.pytorch import LightningDataModule, LightningModule

    return _build_cli()(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        # Errors are raised and shown by `main`, without the parser's page of usage before them.
        parser_kwargs={"exit_on_error": False},
        auto_configure_optimizers=False,  # modules take an optimizer of their own; `--optimizer` would do nothing
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        args=list(args) if args is not None else None,
        **kwargs,
    )


def users_error(error: BaseException) -> str | None:
    """What to tell the user where the input is wrong; None for everything else, which keeps its traceback.

    That is what the parser refuses, and what LightRL itself raises to say what is wrong with an argument, a file or a
    reward function. A `ValueError` that comes out of a library or of the user's own code is none of it.
    """
    from jsonargparse import ArgumentError

    from lightrl.rewards.base import RewardError

    if isinstance(error, ArgumentError):
        return f"{error}\n`lightrl --help` and `lightrl COMMAND --help` explain the arguments."
    while _raised_in(error, "jsonargparse") and error.__cause__ is not None:
        error = error.__cause__  # the parser wraps what a constructor raises
    return str(error) if isinstance(error, ValueError | RewardError) and _raised_in(error, "lightrl") else None


def _raised_in(error: BaseException, package: str) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").split(".")[0] == package


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `lightrl` command: shows a user's error as one message and exits with status 2."""
    try:
        _main(args)
    except Exception as error:
        message = users_error(error)
        if message is None or os.environ.get("LIGHTRL_DEBUG") == "1":
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def _main(args: Sequence[str] | None) -> None:
    arguments = list(sys.argv[1:] if args is None else args)
    # Threads that spin while they wait make two busy processes on shared cores ten times slower than sleeping ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.path.insert(0, os.getcwd())  # YAML may name classes and functions of the folder it is run in
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    if arguments[0] in COMMANDS:
        from jsonargparse import auto_cli

        # Options may be written with dashes, too.
        options = [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), a) for a in arguments[1:]]
        auto_cli(COMMANDS[arguments[0]](), args=options, as_positional=True, prog=f"lightrl {arguments[0]}")
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        end_with_parent()
    run(args)


def end_with_parent(grace: float = 30.0) -> None:
    """Ends this process some seconds after the one that started it is gone.

    A rank that Lightning's or torchrun's launcher started would otherwise outlive a killed launcher and, with NCCL,
    wait for the missing rank until the collective's timeout. A rank that is only the last to finish has the seconds.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        time.sleep(grace)
        print("error: the process that started this rank is gone; ending.", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()
