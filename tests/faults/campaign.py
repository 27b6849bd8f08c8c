"""Injects faults into real training runs and judges each by the same invariants; `make faults` runs many.

    python -m tests.faults.campaign --cases 200 --seed 0 --table docs/reliability.md

A run is `lightrl fit` with the transformers engine in a process (group) of its own, forked from this one, which has
imported everything, so that a case takes seconds. The invariants:

- exit: the run ends within the bound;
- cause: an exit status that fits the fault, and no traceback: one message says what happened;
- processes: nothing of the run's session is left;
- checkpoint: the newest checkpoint that verifies holds all finished rollouts but the last (one is saved per rollout);
- resumed: a run resumed from it ends with the weights, bit for bit, of the run that nothing happened to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from lightning.pytorch import Callback

from lightrl.cli import main
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.storage import verify
from tests.toys import quickstart_model

ROLLOUTS, PROMPTS = 4, 4
BOUND = 90.0
"""Seconds from the fault to the end of the run, on a busy machine."""

PLACES = ("startup", "sampling", "scoring", "update", "save", "named", "export", "shutdown", "time")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT", "SIGINT twice", "SIGSTOP")
FAULTS = (*SIGNALS, "file size", "descriptors", "read-only")
INVARIANTS = ("exit", "cause", "processes", "checkpoint", "resumed")
MARK = "<!-- campaign -->"
NOBODY = 65534


@dataclass
class Case:
    """One fault: what, where, and in which rollout (or after which part of an undisturbed run's time)."""

    fault: str
    place: str
    number: int
    fraction: float


@dataclass
class Verdict:
    """What came of it; `broken` names the invariants that did not hold."""

    case: Case
    outcome: str
    broken: list[str] = field(default_factory=list)
    said: str = ""


# ---- in the run ------------------------------------------------------------------------------------------------------


def strike(fault: str) -> None:
    """Does it to this process."""
    Path("struck").write_text(fault)
    own = os.getpid()
    if fault == "file size":  # what a full disk and a quota look like, for every file written from now on
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    elif fault == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    elif fault == "read-only":
        if os.geteuid() == 0:  # whom permissions do not bind
            os.seteuid(NOBODY)
        else:
            for folder in (Path.cwd(), *(path for path in Path.cwd().rglob("*") if path.is_dir())):
                folder.chmod(0o555)
    elif fault == "SIGINT twice":
        os.kill(own, signal.SIGINT)
        os.kill(own, signal.SIGINT)
    else:
        os.kill(own, getattr(signal, fault))


class Inject(Callback):
    """Strikes once at a place; says so when a rollout is finished."""

    def __init__(self, fault: str, place: str, number: int) -> None:
        self.fault, self.place, self.number = fault, place, number
        self.counts: Counter[str] = Counter()
        replace, rename, generate = os.replace, os.rename, TransformersEngine.generate

        def replaced(source: Any, target: Any, **kwargs: Any) -> None:
            if str(target).endswith("last.ckpt"):
                self.at("save")  # written, not yet named
            replace(source, target, **kwargs)
            if str(target).endswith("last.ckpt"):
                self.at("named")  # named, the list of checksums still that of both

        def renamed(source: Any, target: Any, **kwargs: Any) -> None:
            self.at("export")
            rename(source, target, **kwargs)

        def generated(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.at("sampling")
            return generate(engine, *args, **kwargs)

        if place in ("save", "named"):
            os.replace = replaced
        elif place == "export":
            os.rename = renamed
        elif place == "sampling":
            TransformersEngine.generate = generated  # type: ignore[method-assign]

    def at(self, place: str) -> None:
        if place == self.place:
            self.counts[place] += 1
            if self.counts[place] == (1 if place in ("startup", "export", "shutdown") else self.number):
                strike(self.fault)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.at("startup")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.at("update")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.place != "resumed":
            os.write(1, f"\nfinished {trainer.fit_loop.total_batch_idx + 1}\n".encode())  # a pipe, whatever is struck

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.at("shutdown")


class Reward:
    """Scores how many digits are even; strikes while scoring where that is the place."""

    __name__ = "digits"

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        if self.inject is not None:
            self.inject.at("scoring")
        return [float(sum(c in "02468" for c in text)) for text in completions]

    inject: Inject | None = None


def child(folder: Path, case: Case | None, arguments: list[str], output: int) -> None:
    """The run, in a process of its own."""
    os.setsid()
    os.chdir(folder)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.manual_seed(0)
    sys.argv = ["lightrl"]
    place = "resumed" if case is None else case.place
    status = 1
    try:
        os.environ["INJECT"] = json.dumps([case.fault if case else "", place, case.number if case else 0])
        main(["fit", "--config", "run.yaml", *arguments])
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Injected(Inject):
    """`Inject` without arguments, for YAML."""

    def __init__(self) -> None:
        super().__init__(*json.loads(os.environ["INJECT"]))
        Reward.inject = self


def write_config(folder: Path, model: str) -> None:
    """A run of four rollouts with one checkpoint each, an export and a log."""
    name = __spec__.name if __spec__ is not None else __name__
    callbacks: list[Any] = [
        {"class_path": "WeightSync"},
        {"class_path": f"{name}.Injected"},
        {"class_path": "HFExport", "init_args": {"dirpath": "model"}},
        {"class_path": "RolloutCheckpoint", "init_args": {"every_n_rollouts": 1, "dirpath": "checkpoints"}},
    ]
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "name": "", "version": "run"}}
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": logger, "callbacks": callbacks}
    trainer |= {"enable_progress_bar": False, "enable_model_summary": False}
    data = {
        "prompts": {"rows": [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]},
        "rewards": [{"class_path": f"{name}.Reward"}],
        "engine": "TransformersEngine",
        "sampling": {"max_new_tokens": 3},
        "group_size": 2,
        "prompts_per_rollout": PROMPTS,
        "rollouts_per_epoch": ROLLOUTS // 2,
    }
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}
    module = {"actor": model, "ppo_epochs": 1, "optimizer": optimizer}
    config = {
        "trainer": trainer,
        "model": {"class_path": "PPOLightningModule", "init_args": module},
        "data": {"class_path": "RolloutDataModule", "init_args": data},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


# ---- outside ---------------------------------------------------------------------------------------------------------


def run(folder: Path, case: Case | None, *arguments: str, took: float = 0.0) -> tuple[int | None, float]:
    """Forks the run, strikes by time where the case says so, and waits: (status or None at the bound, seconds)."""
    sys.stdout.flush()
    reading, writing = os.pipe()  # not a file, which a limit on files would silence
    pid = os.fork()
    if pid == 0:
        try:
            child(folder, case, list(arguments), writing)
        finally:  # an interrupt before the run began
            os._exit(130)
    os.close(writing)
    reader = threading.Thread(target=_keep, args=(reading, folder / "output"))
    reader.start()
    start, struck, status = time.monotonic(), False, None
    while time.monotonic() - start < BOUND + took:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            break
        due = case is not None and case.place == "time" and time.monotonic() - start > case.fraction * took
        if due and not struck and case is not None:
            struck = True
            (folder / "struck").write_text(case.fault)
            for _ in range(2 if case.fault == "SIGINT twice" else 1):
                os.kill(pid, getattr(signal, case.fault.split()[0]))
        if case is not None and case.fault == "SIGSTOP" and (folder / "struck").exists():
            time.sleep(0.5)
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
    if status is None:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    left = [p for p in psutil.process_iter() if _session(p.pid) == pid and p.status() != psutil.STATUS_ZOMBIE]
    (folder / "left").write_text("\n".join(map(str, left)))
    for process in left:
        process.kill()
    reader.join()
    return status, time.monotonic() - start


def _keep(reading: int, path: Path) -> None:
    with open(reading, "rb") as source, path.open("ab") as target:
        shutil.copyfileobj(source, target)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def newest(folder: Path) -> tuple[int, Path | None]:
    """Rollouts in the newest checkpoint that verifies."""
    for path in sorted(folder.glob("checkpoints/*.ckpt"), key=lambda p: p.stat().st_mtime_ns, reverse=True):
        try:
            verify(path)
        except ValueError:
            continue
        stored = torch.load(path, weights_only=True)
        return stored["RolloutDataModule"]["prompt_cursor"] // PROMPTS, path
    return 0, None


def fits(fault: str, status: int | None) -> bool:
    """Whether the status says what happened; 0 where the run was over, or where the fault is none."""
    allowed: dict[str, set[int]] = {
        "SIGKILL": {-9},
        "SIGTERM": {75, -15},
        "SIGUSR1": {75, -10},
        "SIGHUP": {75, -1},
        "SIGINT": {1, 130},
        "SIGINT twice": {1, 130},
        "SIGSTOP": {0},
        "file size": {2},
        "descriptors": {2},
        "read-only": {2},
    }
    return status is not None and status in allowed[fault]


def judge(case: Case, folder: Path, model: str, whole: dict[str, Any], took: float) -> Verdict:
    """Runs one case and what resumes from it."""
    folder.mkdir(parents=True)
    write_config(folder, model)
    status, _ = run(folder, case, took=took)
    said = (folder / "output").read_text(errors="replace")
    struck = (folder / "struck").exists()
    verdict = Verdict(case, "no effect" if status == 0 else f"ended with {status}", said=said[-1500:])
    if status is None:
        verdict.broken.append("exit")
    if (struck and status != 0 and not fits(case.fault, status)) or "Traceback" in said:
        verdict.broken.append("cause")
    if (folder / "left").read_text():
        verdict.broken.append("processes")
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        path.chmod(0o755)
    finished = max(map(int, re.findall(r"^finished (\d+)$", said, re.MULTILINE)), default=0)
    saved, path = newest(folder)
    if saved < finished - 1:
        verdict.broken.append("checkpoint")
    again, _ = run(folder, None, *(["--ckpt_path", "last"] if path is not None else []), took=took)
    _, last = newest(folder)
    if again != 0 or last is None or not same(torch.load(last, weights_only=True)["state_dict"], whole):
        verdict.broken.append("resumed")
        verdict.said += (folder / "output").read_text(errors="replace")[-1500:]
    if not struck:
        verdict.outcome = "not reached"
    return verdict


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def cases(count: int, seed: int) -> list[Case]:
    """Every fault at every place in turn, rollouts and times drawn from the seed; signals only where time decides."""
    drawn = random.Random(seed)
    pairs = [(f, p) for f in FAULTS for p in PLACES if not (p == "time" and f not in SIGNALS)]
    drawn.shuffle(pairs)
    chosen = [pairs[i % len(pairs)] for i in range(count)]
    return [Case(fault, place, drawn.randint(1, ROLLOUTS), drawn.random()) for fault, place in chosen]


def campaign(count: int, seed: int, tell: Callable[[str], None] = print, minutes: float = 1e9) -> list[Verdict]:
    """Runs the cases, or as many as fit into the minutes."""
    root = Path(tempfile.mkdtemp(prefix="lightrl-faults-"))
    start = time.monotonic()
    verdicts = []
    try:
        model = quickstart_model(root / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
        root.chmod(0o755)  # a run that lost its rights still finds its folder
        undisturbed = root / "whole"
        undisturbed.mkdir()
        write_config(undisturbed, model)
        status, took = run(undisturbed, None)
        if status != 0:
            raise RuntimeError((undisturbed / "output").read_text(errors="replace")[-3000:])
        whole = torch.load(undisturbed / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        tell(f"undisturbed: {took:.1f} s")
        for number, case in enumerate(cases(count, seed)):
            if time.monotonic() - start > 60 * minutes:
                break
            verdict = judge(case, root / f"case{number}", model, whole, took)
            verdicts.append(verdict)
            tell(f"{number} {case}: {verdict.outcome} {verdict.broken or 'ok'}")
            if verdict.broken:
                tell(verdict.said)
            shutil.rmtree(root / f"case{number}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return verdicts


def table(verdicts: list[Verdict]) -> str:
    """Counts of fault x place: those that held all invariants of all that were struck, and what broke."""
    lines = ["| fault | " + " | ".join(PLACES) + " |", "|---" * (len(PLACES) + 1) + "|"]
    for fault in FAULTS:
        cells = []
        for place in PLACES:
            here = [
                v for v in verdicts if (v.case.fault, v.case.place) == (fault, place) and v.outcome != "not reached"
            ]
            broken = Counter(name for v in here for name in v.broken)
            words = "".join(f", {name} {count}" for name, count in broken.items())
            cells.append(f"{sum(not v.broken for v in here)}/{len(here)}{words}" if here else "-")
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    reached = [v for v in verdicts if v.outcome != "not reached"]
    outcomes = Counter(f"{v.case.fault}: {v.outcome}" for v in reached)
    held = sum(not v.broken for v in reached)
    lines += [
        "",
        f"{held} of {len(reached)} faults held every invariant; {len(verdicts) - len(reached)} more were drawn",
    ]
    lines[-1] += " for a place that the run had passed or ended before. Outcomes: "
    lines[-1] += "; ".join(f"{name} ({count})" for name, count in sorted(outcomes.items())) + "."
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--table", type=Path, help="page whose part after the mark is replaced by the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = campaign(options.cases, options.seed, tell=lambda text: print(text, flush=True), minutes=options.minutes)
    print(table(found))
    if options.table is not None:
        head = options.table.read_text().partition(MARK)[0]
        options.table.write_text(f"{head}{MARK}\n\n{table(found)}\n")
    sys.exit(any(verdict.broken for verdict in found))
