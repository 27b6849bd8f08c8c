"""`CodeTests`: right code passes, wrong code fails, and no code passes by cheating."""

# ruff: noqa: E501 - a program per line

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from lightrl.environments import BashTool, PythonTool, ToolEnvironment
from lightrl.environments.base import Reply, ToolCall
from lightrl.rewards import CodeTests, RewardError, Sandbox
from lightrl.rewards.code import extract_code, parse_tests
from tests.rewards.conftest import need_sandbox

need_sandbox(allow_module_level=True)

ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert [add(2, 2)] == [4]", "assert add(3, 4) in (7,)"]
ECHO = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]


@pytest.fixture(scope="module")
def reward() -> CodeTests:
    return CodeTests(test_timeout=1.0, sandbox=Sandbox(timeout=10.0), concurrency=4)


def scores(reward: CodeTests, codes: list[str], tests: list[Any]) -> list[float | None]:
    return asyncio.run(reward(codes, tests=tests))


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nIt works."


RIGHT = {
    "function": ("def add(a, b):\n    return a + b", ADD),
    "text of tests": ("def add(a, b):\n    return a + b", "\n".join(ADD)),
    "JSON": ("def add(a, b):\n    return a + b", json.dumps(ADD)),
    "check of a candidate": (
        "def add(a, b):\n    return a + b",
        "def check(candidate):\n    for i in range(3):\n        assert candidate(i, 1) == i + 1\n\ncheck(add)",
    ),
    "class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
        "s = Stack()\ns.push(3)\ns.push([1])\nassert len(s) == 2 and s.items[0] == 3\nassert s.pop() == [1]\n"
        "s.pop()\ntry:\n    s.pop()\n    assert False\nexcept IndexError:\n    pass",
    ),
    "own error": (
        "class Bad(ValueError): pass\ndef f(x):\n    raise Bad(x)",
        "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    ),
    "changed arguments": (
        "def sort(x): x.sort()\ndef put(d, k): d[k] = 1",
        "x = [2, 1]\nsort(x)\nassert x == [1, 2]\nd = {}\nput(d, 'a')\nassert d == {'a': 1}\n"
        "x = [2, 1]\nsort(x=x)\nassert x == [1, 2]\nput({}, k='b')\nput(k='c', d=d)\nassert 'c' in d",
    ),
    "other values": (
        "def f(): return [1 + 2j, range(3)]\ndef g(s): return 'abcdef'[s]\ndef h(): return b'\\xff'.decode()",
        "assert f() == [1 + 2j, range(3)]\nassert g(slice(1, 3)) == 'bc'\n"
        "try:\n    h()\nexcept UnicodeDecodeError:\n    pass\nelse:\n    assert False",
    ),
    "function as argument": (
        "def apply(f, xs): return [f(x) for x in xs]",
        ["assert apply(lambda x: x + 1, [1, 2]) == [2, 3]", "assert apply(len, ['ab']) == [2]"],
    ),
    "values": (
        "from collections import Counter, namedtuple\nP = namedtuple('P', 'x y')\n"
        "def f(): return [(1, 2.5), {'a': {1}}, None, b'x', 10 ** 5000, float('inf'), True]\n"
        "def c(): return Counter('aab')\ndef p(): return P(1, 2)\ndef g():\n    yield 1\n    yield 2",
        "assert f() == [(1, 2.5), {'a': {1}}, None, b'x', 10 ** 5000, float('inf'), True]\n"
        "assert c() == {'a': 2, 'b': 1}\nassert p() == (1, 2)\nassert list(g()) == [1, 2] and 2 in g()",
    ),
    "dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def f(x): return P(x)",
        ["assert f(3).x == 3"],
    ),
    "modules": ("import math\ndef f(x): return math.sqrt(x)", ["assert math.isclose(f(2), 1.4142135623730951)"]),
    "program": ("a, b = map(int, input().split())\nprint(a + b)", ECHO),
    "program that exits": (
        "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin.read().split())))\n    sys.exit(0)",
        {"inputs": [pair["input"] for pair in ECHO], "outputs": [pair["output"] for pair in ECHO]},
    ),
}


def test_right_code_passes_every_test(reward: CodeTests) -> None:
    values = scores(reward, [fenced(code) for code, _ in RIGHT.values()], [tests for _, tests in RIGHT.values()])
    assert dict(zip(RIGHT, values, strict=True)) == dict.fromkeys(RIGHT, 1.0)


EVIL = (
    "class Evil{base}:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
    "    def __hash__(self): return 0\n    def __bool__(self): return True\n    def __contains__(self, x): return True\n"
    "    def __lt__(self, other): return True\n    def __sub__(self, other): return 0\n"
    "    def __getattr__(self, name): return lambda *args: True\n    __radd__ = __rsub__ = __gt__ = __le__ = __lt__\n"
)
ADDS = "def add(*args): return {}\n"
SEARCH = "import builtins, gc, glob, json, os, sys\nfound = []\n"
CHEATS = {
    "no code": "",
    "syntax error": "def add(a, b) return",
    "os._exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "SystemExit": "raise SystemExit(0)",
    "exit in the call": "import os\ndef add(*args): os._exit(0)",
    "exit later": "import atexit, os\natexit.register(os._exit, 0)\ndef add(*args): raise SystemExit(0)",
    "AssertionError": "def add(*args): raise AssertionError",
    "marker": "import os, sys\nprint('1111')\nfor n in range(64):\n    try: os.write(n, b'1111')\n    except OSError: pass",
    "marker in the call": "import os\ndef add(*args):\n    for n in range(64):\n        try: os.write(n, b'1111')\n        except OSError: pass",
    "marker to others": "import glob\nfor path in glob.glob('/proc/*/fd/*'):\n    try: open(path, 'w').write('1111')\n    except OSError: pass",
    "equal to all": EVIL.format(base="") + ADDS.format("Evil()"),
    "integer equal to all": EVIL.format(base="(int)") + ADDS.format("Evil(99)"),
    "list equal to all": EVIL.format(base="(list)") + ADDS.format("Evil([99])"),
    "text equal to all": EVIL.format(base="(str)") + ADDS.format("Evil('x')"),
    "class": EVIL.format(base="") + "    @property\n    def __class__(self): return int\n" + ADDS.format("Evil()"),
    "metaclass": EVIL.format(base="(type)") + "add = Evil('add', (), {})",
    "builtins": "import builtins\nfor name in ('compile', 'exec', 'print', 'all', 'hasattr'): setattr(builtins, name, lambda *a, **k: True)\nbuiltins.AssertionError = ZeroDivisionError",
    "driver": "import __main__ as driver\ndriver.Channel.encode = lambda *a: {'yours': 0}\ndriver._OPERATIONS['call'] = lambda *a: True\n" + ADDS.format("1"),
    "answers": "import __main__ as driver\ndef apply(self, request, allowed=None):\n    self.send(request[0], None, {'mine': 0}, [])\n    self.send('1111')\ndriver.Channel.apply = apply\n" + ADDS.format("1"),
    "requests": "import __main__ as driver\ndef apply(self, request, allowed=None):\n    for op in ('call', 'getattr', 'str', 'repr'): self.send(1, op, 0, ['__globals__'], {'dict': []})\n    self.send(request[0], None, 99, [])\ndriver.Channel.apply = apply\n" + ADDS.format("1"),
    "files of tests": SEARCH + "for path in glob.glob('/tmp/**', recursive=True) + glob.glob('../**', recursive=True):\n    if os.path.isfile(path): found += json.loads(open(path).read()).get('tests', [])\nassert found",
    "tests in memory": SEARCH + "for o in gc.get_objects():\n    if isinstance(o, dict) and 'tests' in o: found.append(o)\nframe = sys._getframe()\nwhile frame:\n    if 'tests' in frame.f_locals: found.append(1)\n    frame = frame.f_back\n" + ADDS.format("3 if found else 99"),
    "processes": SEARCH + "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/mem'):\n    try: found.append(open(path, 'rb').read(100)) if str(os.getpid()) not in path else 0\n    except OSError: pass\n" + ADDS.format("99"),
    "signals": "import os, signal\nfor pid in range(2, 5000):\n    if pid != os.getpid():\n        try: os.kill(pid, signal.SIGKILL)\n        except OSError: pass",
    "stuck": "def add(*args):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
    "endless answer": "def add(*args): return '1' * (1 << 26)",
    "deep answer": "def add(*args):\n    x = []\n    for i in range(100_000): x = [x]\n    return x",
    "garbage": "import os\nos.write(4, b'\\xff\\x00{' * 100)\n" + ADDS.format("3"),
}  # fmt: skip


def test_no_code_passes_a_test_by_cheating(reward: CodeTests) -> None:
    start = time.monotonic()
    values = scores(reward, [fenced(code) for code in CHEATS.values()], [ADD] * len(CHEATS))
    assert {name: value for name, value in zip(CHEATS, values, strict=True) if value} == {}
    assert time.monotonic() - start < 60


FORGED = """import __main__ as driver
send = driver.Channel.send
class Module:
    def Fraction(*args): return 99
def forged(self, *message):
    if isinstance(message[0], dict):
        fakes = {"abs": lambda x: 0, "__import__": lambda *args: Module}
        message[0]["__builtins__"] = {"dict": [[name, self.encode(fake)] for name, fake in fakes.items()]}
    send(self, *message)
driver.Channel.send = forged
def f(x): return 99
"""
SHADY = {  # per cheat its code and the test that it would pass if it ran next to the code
    "math": ("class math:\n    isclose = lambda *args: True\ndef f(x): return 0", "assert math.isclose(f(2), 1.41)"),
    "abs": ("def abs(x): return 0\ndef f(x): return 5", "assert abs(f(2) - 1.41) < 0.01"),
    "difference": (EVIL.format(base="") + "def f(x): return Evil()", "assert abs(f(2) - 1.41) < 0.01"),
    "truth": (EVIL.format(base="") + "def f(x): return Evil()", "assert f(7)"),
    "no truth": ("class E:\n    def __bool__(self): return False\ndef f(x): return E()", "assert not f(8)"),
    "order": (EVIL.format(base="") + "def f(x): return Evil()", "assert f(3) > 2"),
    "reversed order": (EVIL.format(base="") + "def f(x): return Evil()", "assert 2 <= f(3)"),
    "contains": (EVIL.format(base="") + "def f(x): return Evil()", "assert 3 in f(3)"),
    "predicate": (EVIL.format(base="") + "def f(x): return Evil()", "assert f('a').startswith('a')"),
    "isinstance": (EVIL.format(base="") + "def f(x): return Evil()", "assert isinstance(f(3), int)"),
    "instance": (
        "class M(type):\n    def __instancecheck__(cls, x): return True\nclass int(metaclass=M): pass\ndef f(x): return 'x'",
        "assert isinstance(f(3), int)",
    ),
    "same": (EVIL.format(base="") + "def f(x): return Evil()", "assert f(3) == f(3) == 9"),
    "error": ("def f(x): raise SystemExit", "try:\n    f(1)\nexcept SystemExit:\n    pass"),
    "death": ("import os\ndef f(x): os._exit(0)", "try:\n    f(1)\nexcept BaseException:\n    raise"),
    "end of an iteration": ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == x + 1, range(3)))"),
    "builtins of the tests": (FORGED, "from fractions import Fraction\nassert f(2) == Fraction(1, 2)"),
    "function of the tests": (FORGED, "assert abs(f(2) - 1.41) < 0.01"),
    "nothing printed": ("import os\nos._exit(0)", [{"input": "", "output": ""}, {"input": "", "output": "1"}]),
    "printed twice": ("print(3)\nprint('[\"3\"]')", [{"input": "", "output": "3"}]),
    "printed list": ("import os\nfor n in range(3, 20):\n    try: os.write(n, b'[\"3\"]')\n    except OSError: pass\nprint(4)", [{"input": "", "output": "3"}]),
    "printed garbage": ("import os\nos.write(1, b'3')\nfor n in range(3, 20):\n    try: os.write(n, b'[[], 3]')\n    except OSError: pass\nos.kill(os.getppid(), 9)", [{"input": "", "output": "3"}] * 2),
    "fails after printing": ("print(3)\nraise ValueError", [{"input": "", "output": "3"}]),
}  # fmt: skip


def test_tests_are_decided_on_their_own_side(reward: CodeTests) -> None:
    values = scores(reward, [code for code, _ in SHADY.values()], [tests for _, tests in SHADY.values()])
    passed = {name: value for name, value in zip(SHADY, values, strict=True) if value == 1.0}
    assert passed == {} and values[list(SHADY).index("nothing printed")] in (0.0, 0.5)


def test_a_slow_test_costs_only_itself_and_the_share_is_of_all_tests(reward: CodeTests) -> None:
    code = "def add(a, b):\n    while a == 1: pass\n    return a + b"
    assert scores(reward, [code, "def add(a, b): return 3"], [ADD, ADD]) == [0.75, 0.25]
    strict = CodeTests(all_or_nothing=True, test_timeout=1.0, sandbox=reward.sandbox)
    assert scores(strict, ["def add(a, b): return 3", "def add(a, b): return a + b"], [ADD, ADD]) == [0.0, 1.0]


def test_a_sandbox_that_runs_no_test_is_rejected() -> None:
    for sandbox in (Sandbox(python="/no/such/python"), Sandbox(memory_mib=8)):
        with pytest.raises(ValueError, match="CodeTests.sandbox: .* runs no test"):
            CodeTests(sandbox=sandbox)


def test_metrics_and_rows_without_usable_tests(reward: CodeTests) -> None:
    logged: dict[str, float] = {}
    code = "def add(a, b): return a + b"
    values = asyncio.run(reward([code] * 3, tests=[ADD, None, "assert add("], log_metric=logged.__setitem__))
    assert values == [1.0, None, None]
    assert logged == {"all_passed": 1 / 3, "unusable": 2 / 3}
    calls = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}
    short = {"inputs": ["1", "2"], "outputs": ["1"]}
    for wrong in (3, [], [1], [{"input": "1"}], {"tests": []}, calls, short):
        with pytest.raises(RewardError, match="tests="):
            parse_tests(wrong)
    with pytest.raises(RewardError, match="column="):
        asyncio.run(reward([code]))


def test_tests_end_with_an_assert() -> None:
    assert parse_tests("'doc'\nimport math\nx = 1\nassert x\nx = 2\nfor i in (1,):\n    assert i\nprint(1)") == [
        '"""doc"""\nimport math\nx = 1\nassert x',
        "x = 2\nfor i in (1,):\n    assert i\nprint(1)",
    ]


def test_a_check_that_would_never_run_is_rejected() -> None:
    assert len(parse_tests("def test():\n    assert add(1, 2) == 3\ntest()\nassert add(0, 0) == 0") or ()) == 1
    called = ["def check(f):\n    assert f()", "check(g)"]
    assert parse_tests(called) == called
    unittest = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(), 1)"
    for wrong in ("def check(f):\n    assert f()", [unittest], "def test_a():\n    assert f()"):
        with pytest.raises(RewardError, match="tests=.*never called"):
            parse_tests(wrong)


def test_the_last_python_block_counts() -> None:
    two = "```python\nfirst\n```\nand\n```py\nsecond\n```\nRun it:\n```bash\npython x.py\n```"
    assert extract_code(two) == extract_code(two + "\nThat is all.\n") == "second"
    assert extract_code("```" + " " * 200_000) == ""
    assert extract_code(two + "\nIt prints:\n```\n3\n```") == "second"
    assert extract_code("```\nopen to the end") == "open to the end"
    assert extract_code("def f(): pass") == "def f(): pass"


async def _called(tool: Any, name: str, **arguments: str) -> str:
    environment = ToolEnvironment(lambda: tool)
    await environment.reset({"prompt": "Compute."}, seed=0)
    step = await environment.step(Reply("", tool_calls=[ToolCall(name, arguments, "1")]))
    await environment.close()
    return str(step.messages[0]["content"])


def test_code_tools_answer_with_output_and_errors() -> None:
    assert asyncio.run(_called(PythonTool(), "python", code="print(6 * 7)")) == "42"
    assert "ZeroDivisionError" in asyncio.run(_called(PythonTool(), "python", code="1 / 0"))
    assert asyncio.run(_called(BashTool(), "bash", script="echo $((6 * 7)); exit 3")) == "42\n[exit code 3]"
    assert Sandbox(timeout=1.0).run_python("while True: pass").text() == "[stopped: timeout limit]"
