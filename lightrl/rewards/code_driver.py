"""Script that runs in the sandboxes of `CodeTests`: one runs the completion's code, the other the tests.

The completion's process holds its functions and answers requests to call them. The test process runs the tests with
proxies of these functions and reports the results. They exchange JSON lines with built-in values. The completion's code
sees only the arguments of calls, never a test, an expected value, or a comparison.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import operator
import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{"call": lambda function, *args, **kwargs: function(*args, **kwargs), "getattr": getattr, "setattr": setattr},
    **{"getitem": operator.getitem, "setitem": operator.setitem, "iter": iter, "next": next, "len": len},
    **{"str": str, "repr": repr},
}
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_BOUNDS = ("start", "stop", "step")
_PARTS: dict[Any, tuple[str, ...]] = {complex: ("real", "imag"), range: _BOUNDS, slice: _BOUNDS}
# Predicates that tests may call on a result. An object defined by the completion could return True for all of them.
_PREDICATES = {"startswith", "endswith"} | {
    name for kind in (str, float, frozenset) for name in dir(kind) if name.startswith("is")
}


class _Ended(BaseException):
    """Raised on a timeout or if the other process exits. Not an Exception, so tests don't catch it by accident."""


def _late(*_: Any) -> None:
    raise _Ended


class Channel:
    """One end of the connection, with the objects that the other end refers to by number."""

    def __init__(self) -> None:
        self.reader, self.writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(null, stream)
        self.objects: list[Any] = []
        self.sent = 0

    def send(self, *message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")
        self.writer.flush()

    def receive(self) -> Any:
        if line := self.reader.readline():
            return json.loads(line)
        raise _Ended

    def encode(self, value: Any) -> Any:
        """Converts a value to JSON. Instances of subclasses of built-in types become instances of the built-in type."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return {"int": int.__format__(value, "x")}
        if isinstance(value, (bytes, bytearray)):
            return {"bytearray" if isinstance(value, bytearray) else "bytes": memoryview(value).hex()}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in dict.items(value)]}
        for name, kind in _CONTAINERS.items():
            if isinstance(value, kind):
                return {name: [self.encode(item) for item in kind.__iter__(value)]}
        if type(value) in _PARTS:
            return {type(value).__name__: [self.encode(getattr(value, part)) for part in _PARTS[type(value)]]}
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_place")[1]}
        self.objects.append(value)
        return {"mine": len(self.objects) - 1}

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((name, held),) = value.items()
        if name in _CONTAINERS:
            return _CONTAINERS[name](self.decode(item) for item in held)
        if name == "dict":
            return {self.decode(key): self.decode(item) for key, item in held}
        if name == "int":
            return int(held, 16)
        if name in ("bytes", "bytearray"):
            return getattr(builtins, name).fromhex(held)
        if name in ("complex", "range", "slice"):
            return getattr(builtins, name)(*map(self.decode, held))
        return self.objects[held] if name == "yours" else Remote(self, int(held))

    def ask(self, operation: str, target: int, *args: Any, **kwargs: Any) -> Any:
        """Applies an operation to an object of the other end. Copies its changes to mutable arguments."""
        self.sent = number = self.sent + 1
        self.send(number, operation, target, list(map(self.encode, args)), self.encode(kwargs))
        while len(answer := self.receive()) == 5 or answer[0] != number:
            if len(answer) == 5:  # calls a function among the arguments
                self.apply(answer, ("call",))
        _, raised, value, changed = answer
        for old, new in zip((*args, *kwargs.values()), map(self.decode, changed)):  # noqa: B905
            if isinstance(old, (list, bytearray)):
                old[:] = new
            elif isinstance(old, (dict, set)):
                old.clear()
                old.update(new)
        if raised is None:
            return self.decode(value)
        kind = getattr(builtins, str(raised), None)
        ends = kind is StopIteration and operation != "next"  # would end `all(map(...))`
        kind = RuntimeError if ends or not (isinstance(kind, type) and issubclass(kind, Exception)) else kind
        raise kind.__new__(kind) if issubclass(kind, UnicodeError) else kind(str(value))

    def apply(self, request: Any, allowed: Any = _OPERATIONS) -> None:
        number, operation, target, args, kwargs = request
        try:
            if operation not in allowed:
                raise AttributeError(operation)
            given, named = list(map(self.decode, args)), self.decode(kwargs)
            value = self.encode(_OPERATIONS[operation](self.objects[target], *given, **named))
            mutable = (list, dict, set, bytearray)
            given += named.values()
            answer = [None, value, [self.encode(item) if isinstance(item, mutable) else None for item in given]]
        except _Ended:
            raise
        except BaseException as error:
            kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            answer = [next(kinds), str(error)[:1000], []]
        self.send(number, *answer)


class Remote:
    """Proxy of a completion's object in a test, which can call it and read its attributes.

    Equals only itself and has no truth value, order, or arithmetic, so the object can't decide whether a test passes.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        object.__setattr__(self, "_place", (channel, number))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _PREDICATES:
            raise AttributeError(name)
        return _ask("getattr")(self, name)

    def __bool__(self) -> bool:
        raise TypeError("an object of the completion has no truth value in a test")


def _ask(operation: str) -> Callable[..., Any]:
    def asked(remote: Remote, *args: Any, **kwargs: Any) -> Any:
        channel, number = object.__getattribute__(remote, "_place")
        return channel.ask(operation, number, *args, **kwargs)

    return asked


for _operation in _OPERATIONS:
    if _operation != "getattr":
        setattr(Remote, f"__{_operation}__", _ask(_operation))


def candidate(job: dict[str, Any]) -> None:
    """Runs the completion's process."""
    channel, names = Channel(), {}
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    try:
        for name, value in list(_run_completion("completion").items()):
            if not name.startswith("__") and not isinstance(value, types.ModuleType):
                names[name] = channel.encode(value)
    except BaseException:
        names = {}
    signal.setitimer(signal.ITIMER_REAL, 0)
    channel.send(names)
    while True:
        request = channel.receive()
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        try:
            channel.apply(request)
        except _Ended:
            channel.send(request[0], "TimeoutError", "", [])
        signal.setitimer(signal.ITIMER_REAL, 0)


def tester(job: dict[str, Any]) -> None:
    """Runs the test process. Writes 1 or 0 per test to stderr."""
    verdicts = os.fdopen(os.dup(2), "wb", buffering=0)
    channel = Channel()
    os.dup2(0, 2)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"] + 5.0)
    namespace: dict[str, Any] = {"__name__": "tests"}
    for name, value in channel.receive()[0].items():
        if not (name.startswith("__") or hasattr(builtins, name)):  # `__builtins__` would replace `abs` and imports
            namespace[name] = channel.decode(value)
    for name in _modules(job["tests"]):  # take precedence over the completion's names
        namespace[name] = importlib.import_module(name)
    for test in job["tests"]:
        signal.setitimer(signal.ITIMER_REAL, job["seconds"] + 1.0)
        try:
            exec(compile(test, "test", "exec"), namespace)
            verdict = b"1"
        except (Exception, _Ended):
            verdict = b"0"
        signal.setitimer(signal.ITIMER_REAL, 0)
        verdicts.write(verdict)


def _modules(tests: list[str]) -> set[str]:
    """Names of standard library modules that the tests use, such as `math` in `math.isclose`."""
    nodes = [node for source in tests for node in ast.walk(ast.parse(source))]
    used = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return (used - stored) & sys.stdlib_module_names


def programs(job: dict[str, Any]) -> None:
    """Runs the completion as a program for each input. Prints the list of outputs, None for failures."""
    outputs = []
    for text in job["inputs"]:
        with open("input", "wb+") as source, open("output", "wb+") as sink:
            source.write(text.encode(errors="replace"))
            source.seek(0)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, job["seconds"])
                os.dup2(source.fileno(), 0)
                os.dup2(sink.fileno(), 1)
                _run_completion("__main__")
                sys.exit()
            signal.setitimer(signal.ITIMER_REAL, job["seconds"] + 1.0)
            try:
                _, status = os.waitpid(pid, 0)
            except _Ended:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sink.seek(0)
            outputs.append(sink.read(job["output"]).decode(errors="replace") if status == 0 else None)
    print(json.dumps(outputs))


def _run_completion(name: str) -> dict[str, Any]:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(Path(__file__).with_name("code.py").read_text(), "completion.py", "exec"), module.__dict__)
    return module.__dict__


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, _late)
    role = {"candidate": candidate, "tester": tester, "programs": programs}[sys.argv[1]]
    role(json.loads(Path(__file__).with_name("job.json").read_text()))
