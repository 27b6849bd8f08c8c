"""Renders conversations of the model families in the `renderers` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.environments.base import Message, Tools
from lightrl.environments.bridges import MARK, Bridge, SampledTurn, Tokens


class RendererBridge(Bridge):
    """Extends tokens with the package `renderers`, https://github.com/PrimeIntellect-ai/renderers."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.renderer = renderer

    def render(self, messages: Sequence[Message], tools: Tools) -> Tokens:
        said = self.guarded(messages)
        try:
            ids = self.renderer.render_ids(said, tools=self.guarded(tools) or None, add_generation_prompt=True)
        except Exception as error:
            raise ValueError(f"The renderer rejects the conversation: {error}. Set renderer: template.") from error
        return Tokens(ids)

    def extend(
        self, turn: SampledTurn, history: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> Tokens | None:
        before = [*turn.prompt_ids, *turn.completion_ids]
        extended = self.renderer.bridge_to_next_turn(
            turn.prompt_ids, turn.completion_ids, self.guarded(new), tools=self.guarded(tools) or None
        )
        if extended is None or list(extended.token_ids[: len(before)]) != before:
            return None
        return Tokens(extended.token_ids[len(before) :])


class _MarkedTokenizer:
    """A tokenizer for `renderers` that encodes marked text of special tokens as ordinary tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[Any]]:
        """Token IDs and, on request, their offsets in the text."""
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        at = 0
        for part in text.split(MARK):
            encoded = self.tokenizer(part, **kwargs)
            ids += encoded["input_ids"]
            places += [(at + start, at + end) for start, end in encoded.get("offset_mapping", ())]
            at += len(part) + len(MARK)
        return {"input_ids": ids, "offset_mapping": places}

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return [i for part in text.split(MARK) if part for i in self.tokenizer.encode(part, *args, **kwargs)]


def make_renderer(tokenizer: Any, name: str | None, options: Mapping[str, Any] | None = None) -> Any | None:
    """Creates the renderer of a model family, by default the one for the model ID.

    Returns None for "template" or without a renderer for the model ID. `options` are variables of the chat template.
    """
    if name == "template":
        return None
    try:
        import renderers
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        if name is None:
            return None
        raise
    name = name or MODEL_RENDERER_MAP.get(getattr(tokenizer, "name_or_path", ""))
    if name is None:
        return None
    wrapped = _MarkedTokenizer(tokenizer)
    return renderers.create_renderer(
        wrapped, renderers.config_from_name(name), chat_template_kwargs=dict(options or {})
    )
