"""Parameters of requests: those without effect are counted, those that change what the model reads are rejected."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from lightrl.environments.endpoint.anthropic_messages import Messages
from lightrl.environments.endpoint.openai_apis import ChatCompletions
from lightrl.environments.endpoint.requests import RefusedError
from lightrl.environments.endpoint.responses import Responses
from tests.environments.test_endpoint import ASK, Engine, play

APIS: Any = {
    "chat": (ChatCompletions(), {"messages": ASK}),
    "responses": (Responses(), {"input": "Hello"}),
    "messages": (Messages(), {"messages": ASK, "max_tokens": 9}),
}


@pytest.mark.parametrize(
    ("path", "more", "parameter"),
    [
        ("chat", {"functions": [{"name": "f"}]}, "functions"),
        ("chat", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ("chat", {"tools": [{"type": "web_search"}]}, "tools"),
        ("chat", {"max_tokens": -1}, "at least 1"),
        ("responses", {"conversation": "conv_1"}, "conversation"),
        ("messages", {"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ("messages", {"tools": [{"type": "web_search_20250305"}]}, "tools"),
    ],
)
def test_what_would_change_what_the_model_reads_is_rejected_by_name(
    path: str, more: dict[str, Any], parameter: str
) -> None:
    api, body = APIS[path]
    with pytest.raises(RefusedError, match=parameter) as caught:
        api.read({**body, **more}, list)
    assert caught.value.status == 400 and api.error(caught.value)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "more", "ignored"),
    [
        ("chat", {"metadata": {"a": "b"}, "user": "u", "store": True, "seed": None, "functions": [], "stop": []}, ()),
        ("chat", {"temperature": 0.5, "top_k": 3, "never_heard_of": 1}, ("temperature", "top_k", "never_heard_of")),
        ("responses", {"background": False, "include": ["reasoning.encrypted_content"], "top_p": 0.5}, ("top_p",)),
        ("messages", {"tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}}, ("thinking",)),
    ],
)
def test_what_changes_nothing_is_accepted_and_the_rest_is_counted(
    path: str, more: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    api, body = APIS[path]
    assert api.read({**body, **more}, list).ignored == ignored


def test_the_chat_templates_variables_are_those_of_the_run() -> None:
    def asked(wanted: Any, **settings: Any) -> Any:
        def main(row: Any, base_url: str, api_key: str) -> float:
            client = openai.OpenAI(base_url=base_url, api_key=api_key)
            more: Any = {"chat_template_kwargs": wanted}
            client.chat.completions.create(model="m", messages=ASK, extra_body=more)  # type: ignore[arg-type]
            return 1.0

        return play(main, Engine("Hi"), **settings)[0].failure

    assert asked({"enable_thinking": False}, template_kwargs={"enable_thinking": False}) is None
    assert "episode.template_kwargs" in asked({"enable_thinking": False})
