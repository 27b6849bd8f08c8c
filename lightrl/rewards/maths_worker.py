"""Child process of `MathVerify`. Reads one JSON object per line and writes one verdict per line.

Runs as a script, so that it imports only math-verify. Exits when its input ends or its parent exits.
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
    """Not an Exception, because math-verify catches those."""


def _out_of_time(*_: Any) -> None:
    raise _OutOfTime


def main() -> None:
    """Answers requests until the input ends, with limits on time and memory."""
    sys.path = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))]
    import math_verify

    logging.disable(logging.WARNING)  # math-verify warns that its own time limits are disabled
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # redirects output of libraries to stderr
    parent = os.getppid()
    # The first comparisons take seconds to load parsers and fill caches, so they run without a time limit.
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
    """The verdict, or without a reference `=` and the answer. A `timeout` of 0 means no limit."""
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
