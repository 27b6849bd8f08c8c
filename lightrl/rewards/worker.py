"""Child process of `MathVerify` and `ReasoningGymReward`. Reads a JSON object per line and writes an answer per line.

Runs as a script, so that it imports only the package that scores. Exits when its input ends or its parent exits.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import random
import re
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

_MEMORY_BYTES = 4 << 30
# Audit events of modules, see https://docs.python.org/3/library/audit_events.html
_DENIED = frozenset({"os", "subprocess", "socket", "ctypes", "shutil", "pty", "signal"})
_READS = frozenset({"os.listdir", "os.scandir"})


class _OutOfTime(BaseException):
    """Not an Exception, because math-verify catches those."""


def _out_of_time(*_: Any) -> None:
    raise _OutOfTime


def main() -> None:
    """Answers requests until the input ends, with limits on time and memory."""
    sys.path = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))]
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # an answer `exit()` closes sys.stdin
    os.dup2(2, 1)  # redirects output of libraries to stderr
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = os.getppid()
    judge = {"maths": _maths, "gym": _gym}[sys.argv[1]]()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    answers.write('"ready"\n')
    while True:
        while not select.select([requests], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
        line = requests.readline()
        if not line:
            return
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout"])
        try:
            answer = judge(request)
        except (_OutOfTime, MemoryError, RecursionError):
            answer = "timeout"
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer) + "\n")


def _gym() -> Callable[[dict[str, Any]], Any]:
    """Generates items of reasoning-gym, and scores answers, on which some generators call `eval`."""
    import numpy as np
    import reasoning_gym

    sys.addaudithook(_deny)

    @functools.lru_cache(maxsize=64)
    def dataset(name: str, settings: str, seed: int, size: int) -> Any:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(settings))

    @functools.lru_cache(maxsize=256)
    def item(gym: str) -> tuple[Any, Any]:
        """The dataset and one of its items."""
        made = json.loads(gym)
        items = dataset(made["name"], json.dumps(made["settings"]), made["seed"], made["size"])
        random.seed(made["seed"] + made["index"])  # some generators use the process-wide generators
        np.random.seed((made["seed"] + made["index"]) % 2**32)
        return items, items[made["index"]]

    def judge(request: dict[str, Any]) -> Any:
        """The score of an answer. Without an answer, the item's question and reference, or why there is none."""
        if "text" not in request:
            try:
                _, entry = item(request["gym"])
            except Exception as error:  # of a generator, or of its settings
                return f"{type(error).__name__}: {error}"
            return [str(entry["question"]), None if entry["answer"] is None else str(entry["answer"])]
        items, entry = item(request["gym"])
        try:
            score = float(items.score_answer(request["text"], copy.deepcopy(entry)))
        except (_OutOfTime, MemoryError, RecursionError):
            raise
        except BaseException:  # including SystemExit of an answer `exit()`
            return 0.0
        return score if 0.0 <= score <= 1.0 else 0.0

    return judge


def _deny(event: str, details: Any) -> None:
    """Denies what no score needs: programs, connections, and changes of files."""
    if event == "open":
        allowed = not isinstance(details[2], int) or not details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    else:
        allowed = event in _READS or event.partition(".")[0] not in _DENIED
    if not allowed:
        raise PermissionError(f"{event} in the answer of a completion")


def _maths() -> Callable[[dict[str, Any]], str]:
    """Compares answers with math-verify: a verdict, or without a reference `=` and the answer."""
    import math_verify

    logging.disable(logging.WARNING)  # math-verify warns that its own time limits are disabled

    def judge(request: dict[str, Any]) -> str:
        if "gold" not in request:
            return _answer(math_verify.parse(request["text"], parsing_timeout=None))
        gold = _parse_gold(math_verify, request["gold"])
        if not gold:
            return "unparsable"
        answer = math_verify.parse(request["text"], parsing_timeout=None)
        return "equal" if math_verify.verify(gold, answer, timeout_seconds=None) else "unequal"

    # The first comparisons take seconds to load parsers and fill caches, so they run without a time limit.
    for gold, text in (("\\frac{1}{2}", "so it is $0.5$"), ("3\\sqrt{2}", "\\boxed{\\sqrt{18}}")):
        judge({"gold": gold, "text": text})
    return judge


def _answer(parsed: list[Any]) -> str:
    """`=` and a canonical form of the answer; "none" without an answer."""
    if not parsed:
        return "none"
    import sympy  # type: ignore[import-untyped]

    found = parsed[0]
    if isinstance(found, sympy.Expr):
        found = sympy.nsimplify(found, rational=True) if found.is_number else sympy.simplify(found)
    return f"={found}"


def _parse_gold(math_verify: Any, gold: str) -> list[Any]:
    """Parses the reference. Adds dollar signs to a bare formula such as `3\\sqrt{2}`; `\\$5` counts as bare."""
    bare = re.search(r"(?<!\\)\$", gold) is None and "\\boxed" not in gold
    parsed = math_verify.parse(f"${gold}$", parsing_timeout=None) if bare else []
    return list(parsed or math_verify.parse(gold, parsing_timeout=None))


if __name__ == "__main__":
    main()
