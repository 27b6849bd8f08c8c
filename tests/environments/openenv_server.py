"""An environment of OpenEnv: guess a number; what is said aloud is counted."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field, field_validator


class Say(Action):
    message: str = Field(max_length=20)


class Heard(Observation):
    text: str


class Guess(Environment[Say, Heard, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.tries = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self.number, self.tries = (seed or 0) % 10, 0
        return Heard(text=kwargs.get("question") or "Guess a digit.")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self.tries += 1
        if "broken" in action.message:
            raise RuntimeError("the dice are gone")
        right = action.message == str(self.number)
        return Heard(text=f"no, {self.tries} tries", done=right, reward=1.0 if right else -0.1)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


class Move(Action):
    row: int = Field(ge=0, le=2)
    col: int = Field(ge=0, le=2)
    note: str = ""

    @field_validator("note")
    @classmethod
    def no_swearing(cls, note: str) -> str:
        if "damn" in note:
            raise ValueError("mind your language")
        return note


class Corner(Environment[Move, Heard, State]):
    """Find the corner; a second time without a reset there is none."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    ready = False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self.ready = True
        return Heard(text="Find the corner.")

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        right = self.ready and (action.row, action.col) == (2, 2)
        return Heard(text=f"not {action.row}, {action.col}", done=right, reward=float(right))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    guess = create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=2)
    app = create_fastapi_app(Corner, Move, Heard, max_concurrent_envs=2) if "corner" in sys.argv else guess
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
