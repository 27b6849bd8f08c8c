"""The child process of `MathVerify`: reads one JSON object per line and answers with one verdict per line.

It runs as a file, not as a module, so that it loads math-verify alone. It ends with its input or its parent.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import select
import signal
import sys
from typing import Any

_MEMORY_BYTES = 4 << 30


class _OutOfTime(BaseException):
    """Not an Exception: math-verify catches those while it compares."""


def _out_of_time(*_: Any) -> None:
    raise _OutOfTime


def main() -> None:
    """Answers comparisons until its input ends, under bounds on time and memory."""
    sys.path = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))]
    import math_verify

    logging.disable(logging.WARNING)  # math-verify warns that its own time limits are off; ours are on
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    parent = os.getppid()
    # The first comparison loads parsers and fills caches for seconds. It runs before the clock does.
    for gold, text in (("\\frac{1}{2}", "so it is $0.5$"), ("3\\sqrt{2}", "\\boxed{\\sqrt{18}}")):
        _judge(math_verify, {"gold": gold, "text": text, "timeout": 0.0})
    answers.write('"ready"\n')
    while True:
        while not select.select([sys.stdin], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
        line = sys.stdin.readline()
        if not line:
            return
        answers.write(json.dumps(_judge(math_verify, json.loads(line))) + "\n")


def _judge(math_verify: Any, request: dict[str, Any]) -> str:
    """The verdict, or without a reference `=` and the answer in the text; a `timeout` of 0 seconds is none."""
    signal.setitimer(signal.ITIMER_REAL, request["timeout"])
    try:
        if "gold" not in request:
            return _answer(math_verify.parse(request["text"], parsing_timeout=None))
        gold = _parse_gold(math_verify, request["gold"])
        if not gold:
            return "unparsable"
        answer = math_verify.parse(request["text"], parsing_timeout=None)
        return "equal" if math_verify.verify(gold, answer, timeout_seconds=None) else "unequal"
    except (_OutOfTime, MemoryError, RecursionError):
        return "timeout"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(parsed: list[Any]) -> str:
    """`=` and one spelling of equal answers; "none" where nothing was found."""
    if not parsed:
        return "none"
    import sympy  # type: ignore[import-untyped]

    found = parsed[0]
    if isinstance(found, sympy.Expr):
        found = sympy.nsimplify(found, rational=True) if found.is_number else sympy.simplify(found)
    return f"={found}"


def _parse_gold(math_verify: Any, gold: str) -> list[Any]:
    """A bare formula such as `3\\sqrt{2}` is only read as LaTeX between dollar signs; `\\$5` has none of these."""
    bare = re.search(r"(?<!\\)\$", gold) is None and "\\boxed" not in gold
    parsed = math_verify.parse(f"${gold}$", parsing_timeout=None) if bare else []
    return list(parsed or math_verify.parse(gold, parsing_timeout=None))


if __name__ == "__main__":
    main()
