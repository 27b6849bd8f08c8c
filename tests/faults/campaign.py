"""Injects faults into real training runs and judges each by the same invariants; `make faults` runs many.

    python -m tests.faults.campaign --cases 250 --results outputs/faults.jsonl --table docs/reliability.md

A run is `lightrl fit` in a session of its own, forked from this process, which has imported everything, so that a case
takes seconds. The victim is the trainer, a rank of two, vLLM's engine core, a server that samples, or a server that
scores. The invariants:

- exit: the run ends within the bound;
- cause: its exit status fits the fault (0 where the fault's place was never reached), it prints no traceback, and where
  it ends with an error one message;
- processes: none of the run is left, and no socket in the folder of temporary files;
- checkpoint: the newest checkpoint that verifies holds all finished rollouts but the last (one is saved per rollout),
  and `--ckpt_path last` goes on from there;
- resumed: a run that ended, or one that is resumed from what is left, has the weights, bit for bit, of the run that
  nothing happened to.

Full disks (a small tmpfs) and lost networks need the right to make namespaces; without it these cases are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from lightrl.checkpoints.files import verify
from tests.faults.containment import adopt_orphans, contained, die_with_parent, libc_call
from tests.faults.injection import Case, be_the_run
from tests.ports import held_port
from tests.toys import SMALL, quickstart_model, write_run

ROLLOUTS, PROMPTS = 4, 4
BOUND = 90.0
"""Seconds, beyond those of an undisturbed run, within which a run ends on a busy machine."""
FIRST = 510.0
"""Seconds more for the first run of a kind, which compiles and loads what others find done."""
PATIENCE = 30.0
"""Seconds without a sign after which the engine core of a case counts as hung."""
LEAVE = 45.0
"""Seconds within which every process of a run that ended is gone; a rank without launcher waits 30."""
IGNORED = re.compile(r"^Exception ignored in.*\n(Traceback.*\n)?( .*\n)*", re.MULTILINE)
"""What Python prints of an error in a finaliser when nothing more can be opened; the run's own message follows."""
COMPILED = str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_faults")
"""What vLLM's sampler compiles, which takes longer than a run; else each case would have its own."""
HELD: list[socket.socket] = []
"""Of the servers of the case that runs."""
NOT_REACHED = "not reached"
MARK, END = "<!-- campaign -->", "<!-- end of campaign -->"

PLACES = ("startup", "sampling", "scoring", "update", "sync", "save", "named", "export", "shutdown", "time")
PARSED = ("startup", "time")
"""Where the run is the command line's, parser and all; elsewhere its objects are built without it, in less time."""
RUNNING = ("startup", "sampling", "scoring", "update", "sync", "shutdown")
SPACING, WORST, OPEN = 11, ("SIGKILL", "SIGSTOP for good"), ("sampling", "sync", "shutdown")
"""How seldom the slow engine's cases come, and which of them first."""
SIGNALS = {
    "SIGKILL": {-9},
    "SIGTERM": {75, -15},
    "SIGUSR1": {75, -10},
    "SIGHUP": {75, -1},
    "SIGINT": {1, 130},
    "SIGINT twice": {1, 130, -2},  # -2 while Python exits, which a shell shows as 130
    "SIGSTOP": {0},
}
RESOURCES = {name: {2} for name in ("full disk", "file size", "descriptors", "read-only")}
TRAINER = SIGNALS | RESOURCES | {"slow disk": {0}, "clock back": {-9}, "clock forward": {-9}}
RANK = {
    "SIGKILL": {1, -9},
    "SIGTERM": {75, -15, -9, 1},
    "SIGINT": {1, 130, -9},
    "SIGSTOP": {0},
}
EXPECTED: dict[str, dict[str, set[int]]] = {
    # victim -> fault -> exit statuses that say what happened; 0 also where the run was over
    "trainer": TRAINER,
    "rank 0": RANK | {"network, 1 s": {0}},
    "rank 1": RANK | {"SIGSTOP for good": {1}},
    "core": {name: {0, 1} for name in ("SIGKILL", "SIGTERM", "SIGSTOP for good")} | {"SIGINT": {0}, "SIGSTOP": {0}},
    "server": {name: {0} for name in ("SIGKILL", "SIGKILL, restarted", "SIGTERM", "SIGSTOP", "SIGSTOP for good")}
    | {"network, 1 s": {0}, "network": {1}},
    "reward": {name: {2} for name in ("SIGKILL", "SIGTERM", "SIGSTOP for good", "network")}
    | {"SIGKILL, restarted": {0}, "SIGSTOP": {0}, "network, 1 s": {0}},
}


@dataclass
class Verdict:
    """What came of a case; `broken` names the invariants that did not hold."""

    case: Case
    outcome: str
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0
    said: str = ""


def places(victim: str, fault: str) -> Iterable[str]:
    """Where a fault is tried: all places for the trainer, those where it is waited for, for others."""
    if victim == "trainer":
        return PLACES if fault in SIGNALS else PLACES[:-1]
    return [*RUNNING, "save"] if victim.startswith(("rank", "core")) else RUNNING


def cases(count: int, seed: int, *, isolated: bool = True) -> list[Case]:
    """Every fault at every place in turn, times drawn from the seed; each `SPACING`-th is the slow engine's.

    Args:
        count: how many.
        seed: of the order and the draws.
        isolated: whether namespaces may be made.
    """
    drawn = random.Random(seed)
    every = [(v, f, p) for v, faults in EXPECTED.items() for f in faults for p in places(v, f)]
    every = [(v, f, p) for v, f, p in every if isolated or not (f == "full disk" or f.startswith("network"))]
    drawn.shuffle(every)
    cores = sorted((one for one in every if one[0] == "core"), key=lambda one: not (one[1] in WORST and one[2] in OPEN))
    others = iter([one for one in every if one[0] != "core"])
    order = [one for core in cores for one in (*itertools.islice(others, SPACING - 1), core)]
    order += others
    found = []
    for one in [*order, *drawn.choices(order, k=count)][:count]:
        last = ROLLOUTS // 2 if one[1].startswith("clock") else ROLLOUTS  # after which a kill must follow
        found.append(Case(*one, number=drawn.randint(1, last), fraction=drawn.random()))
    return found


def write_config(folder: Path, kept: Path, model: str, victim: str, *, patience: float = 300.0) -> None:
    """A run of four rollouts with one checkpoint each, an export and a log, and what the victim needs.

    `patience` is how many seconds the engine core may give no sign: the first run of all waits for its compiler.
    """
    name = "tests.faults.injection"
    callbacks: list[Any] = [
        {"class_path": "WeightSync"},
        {"class_path": f"{name}.Injected"},
        {"class_path": "HFExport", "init_args": {"dirpath": "model"}},
        {
            "class_path": "RolloutCheckpoint",
            "init_args": {"every_n_rollouts": 1, "dirpath": "checkpoints", "save_top_k": -1},
        },
    ]
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "name": "", "version": "run"}}
    trainer = {"max_epochs": 2, "logger": logger, "callbacks": callbacks, "enable_checkpointing": True}
    rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
    data = {"prompts": {"rows": rows}, "rewards": [{"class_path": f"{name}.Reward"}]}
    data |= {"prompts_per_rollout": PROMPTS, "rollouts_per_epoch": ROLLOUTS // 2}
    if victim.startswith("rank"):
        strategy = {"class_path": "DDPStrategy", "init_args": {"timeout": "0:00:10"}}
        trainer |= {"devices": 2, "strategy": strategy}
    elif victim == "core":
        arguments = {"in_process": False, "progress_timeout": patience}
        data |= {"engine": {"class_path": "VLLMEngine", "init_args": arguments}}
    elif victim == "server":
        urls = [f"http://127.0.0.1:{_port(kept, one)}" for one in ("server", "second server")]
        arguments = {"urls": urls, "kind": "sglang", "shared_folder": "weights", "timeout": 4.0}
        arguments |= {"progress_timeout": 15.0, "start_timeout": 15.0}
        data |= {"engine": {"class_path": "ServerEngine", "init_args": arguments}}
    elif victim == "reward":
        arguments = {"url": f"http://127.0.0.1:{_port(kept, 'reward')}/score", "timeout": 3.0, "retries": 5}
        data["rewards"].append({"class_path": "RemoteReward", "init_args": arguments | {"backoff": 0.2}})
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "weight_decay": 0.0}}
    learner = {"actor": model, "ppo_epochs": 1, "optimizer": optimizer}
    write_run(folder / "run.yaml", model, "PPOLightningModule", trainer=trainer, model=learner, data=data)


def _port(kept: Path, name: str) -> int:
    holder = held_port()
    HELD.append(holder)
    port = int(holder.getsockname()[1])
    (kept / f"{name}.port").write_text(str(port))
    return port


class Campaign:
    """Runs cases of a seed, each in a folder of its own.

    Args:
        root: an empty folder.
        known: a folder that keeps what runs are like to which nothing happens.
        isolated: whether namespaces may be made.
    """

    def __init__(self, root: Path, known: Path, *, isolated: bool) -> None:
        self.root = root
        self.known = known
        self.isolated = isolated
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1}  # of 32, which vLLM can do
        self.model = quickstart_model(root / "model", **SMALL, **heads)
        self.undisturbed: dict[tuple[str, bool], tuple[dict[str, Any], float]] = {}
        root.chmod(0o755)  # a run that lost its rights still finds its folder

    def whole(self, victim: str, *, parsed: bool) -> tuple[dict[str, Any], float]:
        """Weights and seconds of the run that nothing happens to.

        Raises:
            RuntimeError: it failed.
        """
        kind = victim.split()[0], parsed
        known = self.known / f"{kind[0]}{'-parsed' * parsed}.pt"
        if kind not in self.undisturbed and known.exists():
            self.undisturbed[kind] = tuple(torch.load(known, weights_only=True))  # type: ignore[assignment]
        if kind not in self.undisturbed:
            folder, kept = self._folders(f"whole-{kind[0]}-{parsed}")
            write_config(folder, kept, self.model, victim)
            status, took = self.run(folder, kept, None, victim, parsed=parsed, took=FIRST)
            if status != 0:
                raise RuntimeError((kept / "output").read_text(errors="replace")[-3000:])
            weights = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
            self.undisturbed[kind] = weights, took
            written = self.root / f"{known.name}-{os.getpid()}"
            torch.save([weights, took], written)
            shutil.move(written, known)
        return self.undisturbed[kind]

    def _folders(self, name: str) -> tuple[Path, Path]:
        folder, kept = self.root / name, self.root / f"{name}-notes"
        folder.mkdir()
        (kept / "tmp").mkdir(parents=True)
        (kept / "tmp").chmod(0o777)
        return folder, kept

    def run(
        self,
        folder: Path,
        kept: Path,
        case: Case | None,
        victim: str,
        *arguments: str,
        parsed: bool,
        took: float = 0.0,
    ) -> tuple[int | None, float]:
        """Forks the run, strikes by time where the case says so, and waits: (status or None at the bound, seconds)."""
        sys.stdout.flush()
        reading, writing = os.pipe()  # not a file, which a limit on files would silence
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                die_with_parent()
                os.chdir(folder)
                os.dup2(writing, 1)
                os.dup2(writing, 2)
                os.close(writing)
                os.environ |= {"NOTES": str(kept), "MODEL": self.model, "TMPDIR": str(kept / "tmp")}
                os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", COMPILED)
                os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # each case its own, for 20 s and more
                tempfile.tempdir = None
                network = self.isolated and victim not in ("trainer", "core")
                os._exit(be_the_run(case, victim, list(arguments), parsed=parsed, network=network))
            finally:  # an interrupt before the run began
                os._exit(130)
        os.close(writing)
        reader = threading.Thread(target=_keep, args=(reading, kept / "output"))
        reader.start()
        start, status = time.monotonic(), None
        while time.monotonic() - start < BOUND + took:
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(code)
                break
            due = case is not None and case.place == "time" and time.monotonic() - start > case.fraction * took
            if due and case is not None and not (kept / "struck").exists():
                (kept / "struck").write_text(str(pid))
                for _ in range(2 if case.fault == "SIGINT twice" else 1):
                    os.kill(pid, getattr(signal, case.fault.split()[0]))
            if case is not None and case.fault == "SIGSTOP" and (kept / "struck").exists():
                time.sleep(0.7)  # every time: it may not have stopped, or the number not been written yet
                with suppress(ProcessLookupError, ValueError):
                    os.kill(int((kept / "struck").read_text()), signal.SIGCONT)
            time.sleep(0.02)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        seconds = time.monotonic() - start
        for name in ("server", "second server", "reward"):  # not the run's
            for file in (f"{name}.keeper", name):
                with suppress(FileNotFoundError, ProcessLookupError):
                    os.kill(int((kept / file).read_text()), signal.SIGKILL)
                    (kept / file).unlink()
        left = self._left(LEAVE if status is not None else 0.0)
        sockets = [path.name for path in (kept / "tmp").rglob("*") if path.is_socket()] if status != -9 else []
        (kept / "left").write_text("\n".join([*map(str, left), *sockets]))
        for process in left:
            process.kill()
        reader.join()
        return status, seconds

    def _left(self, patience: float) -> list[psutil.Process]:
        """Processes of the run, all of which this process adopts, after so many seconds."""
        end = time.monotonic() + patience
        while True:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            left = psutil.Process().children(recursive=True)
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def judge(self, number: int, case: Case) -> Verdict:
        """Runs one case, and what resumes from it."""
        whole, took = self.whole(case.victim, parsed=case.place in PARSED)
        folder, kept = self._folders(f"case{number}")
        mounted = case.fault == "full disk"
        if mounted:
            libc_call("mount", b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=16m,mode=755")
        try:
            return self._judge(case, folder, kept, whole, took)
        finally:
            if mounted:
                libc_call("umount2", str(folder).encode(), 0)
            shutil.rmtree(folder)
            shutil.rmtree(kept)
            while HELD:
                HELD.pop().close()

    def _judge(self, case: Case, folder: Path, kept: Path, whole: dict[str, Any], took: float) -> Verdict:
        write_config(folder, kept, self.model, case.victim, patience=PATIENCE)
        status, seconds = self.run(folder, kept, case, case.victim, parsed=case.place in PARSED, took=took)
        said = (kept / "output").read_text(errors="replace")
        struck = (kept / "struck").exists()
        outcome = "ran to completion" if status == 0 else f"ended with {status}"
        verdict = Verdict(case, outcome if struck else f"{NOT_REACHED}, {outcome}", seconds=round(seconds, 1))
        if status is None:
            verdict.broken.append("exit")
        if not (self._tells(case, status, said) if struck else status == 0):
            verdict.broken.append("cause")
        if (kept / "left").read_text():
            verdict.broken.append("processes")
            verdict.said += f"left: {(kept / 'left').read_text()}\n"
        (folder / "filler").unlink(missing_ok=True)
        for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            path.chmod(0o755)
        finished = max(map(int, re.findall(r"^finished (\d+)$", said, re.MULTILINE)), default=0)
        saved = max([0, *rollouts(folder).values()])
        if saved < finished - 1:
            verdict.broken.append("checkpoint")
        again, again_said = status, ""
        if status != 0:
            (kept / "output").unlink()
            last = ["--ckpt_path", "last"] if saved else []
            again, _ = self.run(folder, kept, None, case.victim, *last, parsed=case.place in PARSED, took=took)
            again_said = (kept / "output").read_text(errors="replace")
            begun = re.search(r"^begins (\d+)$", again_said, re.MULTILINE)
            if begun is not None and int(begun[1]) < saved and "checkpoint" not in verdict.broken:
                verdict.broken.append("checkpoint")
        if again != 0 or not any(same(weights(path), whole) for path in newest(folder)):
            verdict.broken.append("resumed")
        if verdict.broken:
            verdict.said += f"{said[-2500:]}\n---- resumed: {again}\n{again_said[-1500:] if again != 0 else ''}"
        return verdict

    def _tells(self, case: Case, status: int | None, said: str) -> bool:
        """Whether status and messages say what happened."""
        said = IGNORED.sub("", said)
        traced = re.search("^Traceback", said, re.MULTILINE) is not None  # not within a warning of a library
        expected = set(EXPECTED[case.victim][case.fault])
        if case.place == "startup" and case.victim != "trainer":
            expected |= {1, 2}  # a run that cannot begin says so
        if status == 0:
            over = case.place in ("shutdown", "export", "time") or case.number == ROLLOUTS
            return not traced and (0 in expected or over)
        errors = len(re.findall(r"^error: ", said, re.MULTILINE))
        one = errors == 1 or status not in (1, 2) or case.fault.startswith("SIGINT")
        return status in expected and not traced and one


def _keep(reading: int, path: Path) -> None:
    with open(reading, "rb") as source, path.open("ab") as target:
        shutil.copyfileobj(source, target)


def rollouts(folder: Path) -> dict[Path, int]:
    """How many rollouts each checkpoint that verifies has learned from."""
    found = {}
    for path in folder.glob("checkpoints/*.ckpt"):
        with suppress(ValueError):
            verify(path)
            found[path] = torch.load(path, weights_only=True)["RolloutDataModule"]["prompt_cursor"] // PROMPTS
    return found


def newest(folder: Path) -> list[Path]:
    """Checkpoints of the whole run."""
    return [path for path, number in rollouts(folder).items() if number == ROLLOUTS]


def weights(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True)["state_dict"])


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def campaign(options: argparse.Namespace, part: int, *, isolated: bool) -> None:
    """Runs this part of the cases that have no result yet, or as many as fit into the minutes."""
    adopt_orphans()
    done = Counter(verdict.case.kind for verdict in read_results(options.results))
    root, start = Path(tempfile.mkdtemp(prefix="lightrl-faults-")), time.monotonic()
    try:
        runs = Campaign(root, undisturbed(options.results), isolated=isolated)
        for number, case in enumerate(cases(options.cases, options.seed, isolated=isolated)):
            if done[case.kind]:
                done[case.kind] -= 1
                continue
            if number % options.workers != part or not re.search(options.only, str(case)):
                continue
            if time.monotonic() - start > 60 * options.minutes:
                break
            verdict = runs.judge(number, case)
            print(f"{case}: {verdict.outcome} in {verdict.seconds} s, {judged(verdict)}", flush=True)
            if verdict.broken:
                print(verdict.said, flush=True)
            with options.results.open("ab", buffering=0) as file:  # one write, so that no other worker's cuts it
                file.write(json.dumps(asdict(verdict)).encode() + b"\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def all_parts(options: argparse.Namespace, *, isolated: bool) -> int:
    """Runs each part in a process of its own; how many of them broke off."""
    if not isolated:
        print("no right to make namespaces: full disks and lost networks are left out", flush=True)
    workers = []
    for part in range(options.workers):
        workers.append(os.fork())
        if workers[-1] == 0:
            status = 1
            try:
                die_with_parent()
                campaign(options, part, isolated=isolated)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in workers)


def undisturbed(results: Path) -> Path:
    """Where the runs to which nothing happens are kept, beside the results."""
    return results.with_suffix(".undisturbed")


def read_results(path: Path) -> list[Verdict]:
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [Verdict(**record | {"case": Case(**record["case"])}) for record in records]


def judged(verdict: Verdict) -> str:
    """What a verdict counts as: a fault that was not injected held nothing."""
    if verdict.broken:
        return f"broken: {', '.join(verdict.broken)}"
    return "not counted" if verdict.outcome.startswith(NOT_REACHED) else "ok"


def table(verdicts: list[Verdict], before: str = "") -> str:
    """Counts of fault x place: those that held all invariants of all that count, what broke, and the outcomes.

    A case whose fault was not injected counts where its run broke an invariant all the same; else it is named below.

    Args:
        verdicts: of a campaign.
        before: an older table, whose rows of victims that this campaign did not strike stay.
    """
    struck = {v.case.victim for v in verdicts}
    stay = [line for line in before.splitlines() if line.split(" | ")[0][2:] in EXPECTED.keys() - struck]
    lines = [f"| victim | fault | {' | '.join(PLACES)} | outcomes |", "|---" * (len(PLACES) + 3) + "|"]
    reached = [v for v in verdicts if judged(v) != "not counted"]
    missed = [v.case for v in verdicts if judged(v) == "not counted"]
    for victim, faults in EXPECTED.items():
        lines += [line for line in stay if line.startswith(f"| {victim} |")]
        for fault in faults:
            row = [v for v in reached if (v.case.victim, v.case.fault) == (victim, fault)]
            cells = []
            for place in PLACES:
                here = [v for v in row if v.case.place == place]
                broken = Counter(name for v in here for name in v.broken)
                words = "".join(f", {name} {count}" for name, count in broken.items())
                cells.append(f"{sum(not v.broken for v in here)}/{len(here)}{words}" if here else "-")
            outcomes = Counter(v.outcome for v in row)
            told = "; ".join(f"{name} ({count})" for name, count in sorted(outcomes.items()))
            if row:
                lines.append(f"| {victim} | {fault} | {' | '.join(cells)} | {told} |")
    counts = [tuple(map(int, found)) for line in lines for found in re.findall(r"(?<=\| )(\d+)/(\d+)", line)]
    held, of = (sum(each) for each in zip(*counts, strict=True)) if counts else (0, 0)
    lines += ["", f"{held} of {of} injected faults satisfied every invariant; {len(missed)} more"]
    named = f" ({'; '.join(map(str, missed))})" if missed else ""
    lines[-1] += f" targeted a place that their run did not reach{named}."
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="cases at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no case after so many")
    parser.add_argument("--results", type=Path, help="JSON lines to go on from, and to add to")
    parser.add_argument("--only", default="", help="regular expression of cases, such as 'rank 1: SIGKILL'")
    parser.add_argument(
        "--table", type=Path, help=f"page with a table from {MARK} to {END}, whose victims are replaced"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(
        tempfile.mkdtemp(prefix="lightrl-faults-")
    )  # by hand: runs are forked, and would remove it at their end
    options.results = options.results or folder / "faults.jsonl"
    if not options.results.exists():  # a new campaign, perhaps of changed code
        shutil.rmtree(undisturbed(options.results), ignore_errors=True)
    undisturbed(options.results).mkdir(parents=True, exist_ok=True)
    broken_off = contained(lambda isolated: all_parts(options, isolated=isolated))
    found = read_results(options.results)
    shutil.rmtree(folder)
    print(table(found))
    if options.table is not None:
        head, _, rest = options.table.read_text().partition(MARK)
        before, _, rest = rest.partition(END)
        options.table.write_text(f"{head}{MARK}\n\n{table(found, before)}\n\n{END}{rest}")
    sys.exit(bool(broken_off) or any(verdict.broken for verdict in found))


if __name__ == "__main__":
    main()
