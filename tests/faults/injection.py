"""Inside of a run of the campaign: strikes one of its processes at a place, and stands in for what is around it."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything, strategies
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies.launchers import subprocess_script

import lightrl.callbacks
import lightrl.engines
import lightrl.rewards
from lightrl import PPOLightningModule, PromptSource, RolloutDataModule, SamplingParams, cli
from lightrl.checkpoints.run_folder import RunGuard
from lightrl.engines import ServerEngine, TransformersEngine, VLLMEngine
from lightrl.rewards.server import serve_reward
from tests.engines.sglang_server import SGLangServer
from tests.faults.containment import die_with_parent, libc_call

NOBODY = 65534
DAY = 86400
ENGINES: dict[str, Any] = {"core": VLLMEngine, "server": ServerEngine}
ONCE = ("startup", "export", "shutdown")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
SET_FLAGS, UP = 0x8914, 0x41  # SIOCSIFFLAGS; IFF_UP | IFF_RUNNING


@dataclass(frozen=True)
class Case:
    """One fault: on whom, what, where, and in which rollout (or after which part of an undisturbed run's time)."""

    victim: str
    fault: str
    place: str
    number: int
    fraction: float

    @property
    def kind(self) -> tuple[str, str, str]:
        """Without what is drawn."""
        return self.victim, self.fault, self.place

    def __str__(self) -> str:
        return f"{self.victim}: {self.fault}, {self.place} {self.number}"


def loopback(up: bool) -> None:
    """Switches the loopback of this process's own network on or off."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP if up else 0))


def notes() -> Path:
    """Where the run and the campaign leave word for one another; no fault strikes it."""
    return Path(os.environ["NOTES"])


def strike(fault: str, pid: int) -> None:
    """Does it to this process, to the disk or network it uses, or (signals) to another process."""
    if fault == "file size":  # what a quota looks like, for every file written from now on
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    elif fault == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    elif fault == "read-only":
        if os.geteuid() == 0:  # whom permissions do not bind
            os.seteuid(NOBODY)
        else:
            for folder in (Path.cwd(), *(path for path in Path.cwd().rglob("*") if path.is_dir())):
                folder.chmod(0o555)
    elif fault == "full disk":
        descriptor = os.open("filler", os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(descriptor, bytes(4096))
        except OSError:
            os.close(descriptor)
    elif fault == "slow disk":
        for name in ("fsync", "replace", "rename"):
            setattr(os, name, _slow(getattr(os, name)))
    elif fault.startswith("clock"):
        _shift_clock(-DAY if fault == "clock back" else DAY)
    elif fault.startswith("network"):
        loopback(False)
        if fault == "network, 1 s":
            threading.Timer(1.0, loopback, [True]).start()
    else:
        for _ in range(2 if fault.endswith("twice") else 1):
            os.kill(pid, getattr(signal, fault.replace(",", "").split()[0]))


def _slow(call: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2)
        return call(*args, **kwargs)

    return slow


def _shift_clock(seconds: int) -> None:
    """For Python's clock and the times of files; the machine's stays as it is."""
    now, now_ns, replace = time.time, time.time_ns, os.replace

    def replaced(source: Any, target: Any, **kwargs: Any) -> None:
        replace(source, target, **kwargs)
        os.utime(target, (now() + seconds,) * 2)

    time.time, time.time_ns = lambda: now() + seconds, lambda: now_ns() + seconds * 10**9
    os.replace = replaced


class Injected(Callback):
    """Strikes once at a place; says when a rollout is finished. The case is in the environment."""

    def __init__(self) -> None:
        given = json.loads(os.environ["INJECT"])
        own = os.environ.get("LOCAL_RANK", "0") == "0"
        self.case = Case(**given) if given and own else None
        self.struck = False
        self.finished = 0
        self.doomed: int | None = None
        self.trainer: Any = None
        Reward.inject = self
        if self.case is not None:
            self._patch(self.case.place, ENGINES.get(self.case.victim, TransformersEngine))

    def _patch(self, place: str, engine_class: Any) -> None:
        replace, rename = os.replace, os.rename
        generate, load, start = engine_class.generate, engine_class.load_weights, engine_class.start

        def replaced(source: Any, target: Any, **kwargs: Any) -> None:
            last = str(target).endswith("last.ckpt")
            if last:
                self.at("save")  # written, not yet named
            replace(source, target, **kwargs)
            if last:
                self.at("named")  # named, the list of checksums still that of both

        def renamed(source: Any, target: Any, **kwargs: Any) -> None:
            self.at("export")
            rename(source, target, **kwargs)

        async def generated(engine: Any, request: Any) -> Any:
            self.at("sampling")
            return await generate(engine, request)

        def loaded(engine: Any, named_tensors: Any, **kwargs: Any) -> None:
            def tensors() -> Iterator[Any]:
                for number, pair in enumerate(named_tensors):
                    if number == 3:
                        self.at("sync")
                    yield pair

            load(engine, tensors(), **kwargs)

        def started(engine: Any, context: Any) -> None:
            start(engine, context)
            self.at("startup")

        if place in ("save", "named"):
            os.replace = replaced
        elif place == "export":
            os.rename = renamed
        elif place == "sampling":
            engine_class.generate = generated
        elif place == "sync":
            engine_class.load_weights = loaded
        elif self.case is not None and self.case.victim == "core":
            engine_class.start = started

    def at(self, place: str) -> None:
        case = self.case
        rollout = self.finished if place in ("save", "named") else self.finished + 1
        if self.struck or case is None or place != case.place or (place not in ONCE and rollout != case.number):
            return
        self.struck = True
        pid = self._victim(case.victim)
        (notes() / "struck").write_text(str(pid))
        if case.fault.startswith("clock"):
            self.doomed = self.finished + 1
        strike(case.fault, pid)

    def _victim(self, name: str) -> int:
        if name == "core":
            return int(self.trainer.datamodule.engine.process_ids[0])
        return os.getpid() if name in ("trainer", "rank 0") else int((notes() / name).read_text())

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer
        if self.case is not None and self.case.victim != "core":
            self.at("startup")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.finished = trainer.fit_loop.total_batch_idx + 1
        self._say(f"begins {self.finished}")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.doomed is not None and self.finished >= self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        self.at("update")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.finished = trainer.fit_loop.total_batch_idx + 1
        self._say(f"finished {self.finished}")

    def _say(self, text: str) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(1, f"\n{text}\n".encode())  # a pipe, whatever is struck

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.case is not None and self.case.victim != "trainer":  # later the engine is closed
            self.at("shutdown")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.at("shutdown")


class Reward:
    """Scores how many digits are even; strikes while scoring where that is the place."""

    __name__ = "digits"
    inject: Injected | None = None

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        if self.inject is not None:
            self.inject.at("scoring")
        return [float(sum(c in "02468" for c in text)) for text in completions]


# ---- the run's process, its second rank, and the servers around it ---------------------------------------------------


def made(spec: Any) -> Any:
    """The object of a `class_path`, found as the command line finds it."""
    module, _, name = spec["class_path"].rpartition(".")
    rooms = [import_module(module)] if module else [lightrl.callbacks, lightrl.engines, lightrl.rewards, strategies]
    (found,) = {getattr(room, name) for room in rooms if hasattr(room, name)}
    return found(**spec.get("init_args", {}))


def fit(arguments: Sequence[str]) -> None:
    """Builds and runs what `run.yaml` says, without the parser, which takes three quarters of a short run's time."""
    config = yaml.safe_load(Path("run.yaml").read_text())
    seed_everything(0)
    given = config["trainer"]
    strategy = given.get("strategy", "auto")
    if strategy != "auto":
        strategy["init_args"]["timeout"] = timedelta(seconds=int(strategy["init_args"]["timeout"][-2:]))
        strategy = made(strategy)
    given |= {"strategy": strategy, "callbacks": [RunGuard(), *map(made, given["callbacks"])]}
    folder = given["logger"]["init_args"]
    given |= {"logger": CSVLogger(**folder), "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    data, module = config["data"]["init_args"], config["model"]["init_args"]
    optimizer = module.pop("optimizer")["init_args"]
    engine = data["engine"] if isinstance(data["engine"], dict) else {"class_path": data["engine"]}
    data |= {"prompts": PromptSource(**data["prompts"]), "sampling": SamplingParams(**data["sampling"])}
    data |= {"rewards": [*map(made, data["rewards"])], "engine": made(engine)}
    trainer = Trainer(**given, log_every_n_steps=1)
    learner = PPOLightningModule(**module, optimizer=lambda parameters: torch.optim.AdamW(parameters, **optimizer))
    resumed = dict(zip(arguments[::2], arguments[1::2], strict=True)).get("--ckpt_path")
    trainer.fit(learner, RolloutDataModule(**data), ckpt_path=resumed)


def attend(arguments: list[str], *, parsed: bool) -> int:
    """`lightrl fit` with these arguments, which the parser reads or not; its exit status."""
    if not parsed:
        cli.run = lambda given: fit(given[3:])  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
    torch.manual_seed(0)
    sys.argv = ["lightrl"]
    try:
        cli.main(["fit", "--config", "run.yaml", *arguments])
        return 0
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()  # the process ends by `os._exit`
        sys.stdout.flush()
        sys.stderr.flush()


def be_the_run(case: Case | None, victim: str, arguments: list[str], *, parsed: bool, network: bool) -> int:
    """The run with what belongs to it, in this process, which was forked for it; its exit status."""
    os.environ["INJECT"] = json.dumps(asdict(case) if case is not None else None)
    if network:
        libc_call("unshare", NEW_NETWORK)
        loopback(True)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    again = case is not None and case.fault == "SIGKILL, restarted"
    if victim == "server":
        for name in ("server", "second server"):
            _keep(name, _sample_for, again)
    elif victim == "reward":
        _keep("reward", _score, again)
    if victim.startswith("rank"):
        _stand_by(arguments, parsed=parsed)
    return attend(arguments, parsed=parsed)


def _keep(name: str, serve: Callable[[int], None], again: bool) -> None:
    """Starts a server, restarted when it ends where that is wanted, and waits until it answers."""
    port = int((notes() / f"{name}.port").read_text())
    if os.fork() == 0:
        os.setsid()
        die_with_parent()
        (notes() / f"{name}.keeper").write_text(str(os.getpid()))
        while True:
            pid = os.fork()
            if pid == 0:
                die_with_parent()
                serve(port)
                os._exit(0)
            (notes() / name).write_text(str(pid))
            os.waitpid(pid, 0)
            if not again:
                os._exit(0)
            time.sleep(0.3)
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)


def _score(port: int) -> None:
    serve_reward(reward=f"{__name__}:longer", port=port)


def longer(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def _sample_for(port: int) -> None:
    app = SGLangServer(Path(os.environ["MODEL"])).app
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", lifespan="off")


def _stand_by(arguments: list[str], *, parsed: bool) -> None:
    """Forks what becomes rank 1 when Lightning's launcher would run the script again, which takes long to import."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        given = os.read(reading, 1 << 20)
        if not given:  # rank 0 ended before
            os._exit(0)
        os.environ.clear()
        os.environ.update(json.loads(given))
        os._exit(attend(arguments, parsed=parsed))
    (notes() / "rank 1").write_text(str(pid))

    class Forked:
        """What the launcher takes for a `subprocess.Popen`."""

        def __init__(self, command: Any, env: dict[str, str], cwd: Any = None) -> None:
            self.pid, self.args, self.returncode = pid, command, None
            os.write(writing, json.dumps(env).encode())
            os.close(writing)

        def poll(self) -> int | None:
            if self.returncode is None:
                ended, code = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(code) if ended else None
            return self.returncode

        def wait(self, timeout: float | None = None) -> int:
            end = time.monotonic() + (1e9 if timeout is None else timeout)
            while self.poll() is None:
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                time.sleep(0.05)
            assert self.returncode is not None
            return self.returncode

        def send_signal(self, number: int) -> None:
            if self.poll() is None:
                os.kill(self.pid, number)

        def kill(self) -> None:
            self.send_signal(signal.SIGKILL)

        def terminate(self) -> None:
            self.send_signal(signal.SIGTERM)

    subprocess_script.subprocess = SimpleNamespace(Popen=Forked)  # type: ignore[attr-defined]
