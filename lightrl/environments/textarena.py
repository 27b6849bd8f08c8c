"""Single-player games of TextArena."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightrl.environments.gym import GymnasiumEnvironment


class TextArenaEnvironment(GymnasiumEnvironment):
    """Plays a single-player game of TextArena, such as "GuessTheNumber-v0" or "Wordle-v0".

    Each turn shows only the game's new messages, because the policy has the earlier ones in its context. The last
    turn gets the game's reward. A reply without brackets is put into brackets. TextArena reports an invalid move to
    the policy and ends the game at a second one in a row; the metric `invalid_actions` is 1 for games that end this
    way. A column `seed` of the row takes precedence over the group's seed.

    Args:
        game: ID of the game. Its `-raw` variant is played, since the others repeat the whole game each turn.
        arguments: Keyword arguments of `textarena.make`.

    Raises:
        ValueError: TextArena is not installed (extra `games`).

    Source: https://github.com/LeonGuertler/TextArena
    """

    def __init__(self, game: str, arguments: Mapping[str, Any] | None = None) -> None:
        raw = game if game.endswith("-raw") else f"{game}-raw"
        super().__init__("textarena.make", {"env_id": raw, **(arguments or {})}, global_random=True)
        self._invalid = 0.0

    def _begin(self, row: Mapping[str, Any], seed: int) -> Any:
        self._env.reset(num_players=1, seed=seed)
        return self._new()

    def _new(self) -> str:
        """The game's messages since the last turn, without the policy's own."""
        player, messages = self._env.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender != player and isinstance(text, str))

    def _advance(self, reply: Any) -> tuple[Any, float, bool]:
        text = reply.content
        if "[" not in text and "]" not in text:  # like TextArena's own wrapper
            text = f"[{text}]"
        done, _ = self._env.step(text)
        if not done:
            return self._new(), 0.0, False
        rewards, info = self._env.close()
        self._invalid = float(bool(info[0].get("invalid_move")))
        return None, float(rewards[0]), True

    @property
    def metrics(self) -> Mapping[str, float]:
        """Whether the game ended at an invalid move."""
        return {"invalid_actions": self._invalid}

    async def close(self) -> None:
        self._code.close()  # the game's own `close` only returns rewards
