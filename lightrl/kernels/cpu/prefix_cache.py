"""Keys and values of conversations whose next turn may come: what an engine need not compute again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True)
class Past:
    """Keys (layers, K, D, L) and values (layers, K, L, D) of a beginning of L tokens."""

    tokens: list[int]
    keys: Tensor
    values: Tensor


class PrefixCache:
    """Holds what was computed of sequences that ended, until one that begins with all of it comes.

    Only a whole sequence is found again, not a part of one as in vLLM's blocks. So whether a conversation's next turn
    is found depends on that conversation (and on others of the very same tokens), not on what happened to end before.

    Args:
        room: most tokens held; those that wait longest go first.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.held = 0
        self._pasts: OrderedDict[int, Past] = OrderedDict()  # by `_hashes`' last

    def put(self, past: Past) -> None:
        """Keeps a beginning; one of the same tokens is replaced."""
        if len(past.tokens) > self.room:
            return
        *_, key = _hashes(past.tokens)
        self._forget(key)
        self._pasts[key] = past
        self.held += len(past.tokens)
        while self.held > self.room:
            self._forget(next(iter(self._pasts)))

    def take(self, tokens: Sequence[int]) -> Past | None:
        """The longest beginning held of these tokens, at least one short of all, or None; it is then held no more."""
        if not self._pasts:
            return None
        hashes = list(_hashes(tokens))[:-1]
        for length in range(len(hashes), 0, -1):
            past = self._pasts.get(hashes[length - 1])
            if past is not None and past.tokens == list(tokens[:length]):
                self._forget(hashes[length - 1])
                return past
        return None

    def _forget(self, key: int) -> None:
        past = self._pasts.pop(key, None)
        self.held -= 0 if past is None else len(past.tokens)


def _hashes(tokens: Sequence[int]) -> accumulate[int]:
    """Of each beginning, the shortest first."""
    return accumulate(tokens, lambda before, token: hash((before, token)))
