"""A user's regular expression, run under a time limit."""

from __future__ import annotations

from typing import Any

import regex

from lightrl.compat.arguments import above


class TimedPattern:
    r"""A regular expression whose every use ends within `timeout` seconds.

    Patterns such as `(\w+\s?)*\.` take exponential time on some texts, and Python's own `re` neither stops nor lets
    another thread (or Ctrl-C) run meanwhile. We use the `regex` package: the same syntax, a time limit, and Python's
    lock released while it matches.

    Args:
        owner: name of the class that has the pattern, for messages.
        pattern: the regular expression.
        timeout: seconds for one text, above 0.

    Raises:
        ValueError: an invalid pattern, or a time limit that is not above 0.
    """

    def __init__(self, owner: str, pattern: str, timeout: float) -> None:
        if not isinstance(pattern, str):
            raise ValueError(f"{owner}: pattern={pattern!r} is not a regular expression: give a string.")
        try:
            self._compiled = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"{owner}: pattern={pattern!r} is not a regular expression: {error}.") from error
        self.timeout = above(f"{owner}.timeout", timeout, note=" seconds")

    @property
    def groups(self) -> int:
        """Number of groups in the pattern."""
        return int(self._compiled.groups)

    def fullmatch(self, text: str) -> bool:
        """Whether the whole text matches.

        Raises:
            TimeoutError: it was not known in time.
        """
        return self._run(self._compiled.fullmatch, text) is not None

    def search(self, text: str) -> bool:
        """Whether the pattern matches anywhere in the text; raises as `fullmatch`."""
        return self._run(self._compiled.search, text) is not None

    def last(self, text: str) -> str | None:
        """The first group (or all) of the last match in the text, None without a match; raises as `fullmatch`."""
        matches = self._run(self._compiled.findall, text)
        if not matches:
            return None
        found = matches[-1]
        return str(found[0] if isinstance(found, tuple) else found)

    def _run(self, method: Any, text: str) -> Any:
        try:
            return method(text, timeout=self.timeout, concurrent=True)
        except MemoryError as error:  # its stack of places to come back to is bounded, too
            raise TimeoutError("the pattern ran out of memory") from error
