"""Every member of a request is decided: it has its effect, is known to have none, or is rejected."""

from __future__ import annotations

import typing
from typing import Any

import anthropic
import anthropic.types as claude
import anthropic.types.beta as claude_beta
import openai
import openai.types.chat as chat
import openai.types.responses as responses
import pytest
from anthropic import beta_tool
from openai.types.beta import response_create_params as responses_beta
from openai.types.responses import response_create_params, response_input_item_param

from lightrl.environments.endpoint import anthropic_messages, openai_apis
from lightrl.environments.endpoint import responses as responses_api
from lightrl.environments.endpoint.api import TEXT_BLOCK, Api, Members
from lightrl.environments.endpoint.requests import RefusedError
from lightrl.records import SamplingParams
from tests.environments.test_endpoint import ASK, CALL, Engine, Open, play

HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Members of the SDKs' types that are sent as headers."""
APIS: dict[str, tuple[Api, dict[str, Any]]] = {
    "chat": (openai_apis.ChatCompletions(), {"messages": ASK}),
    "responses": (responses_api.Responses(), {"input": "Hello"}),
    "messages": (anthropic_messages.Messages(), {"messages": ASK, "max_tokens": 9}),
}


def names(*types: Any) -> set[str]:
    """The members of TypedDicts, without those that are sent as headers."""
    return {name for each in types for name in each.__annotations__} - HEADERS


DECIDED: list[tuple[str, Members, set[str]]] = [
    (
        "chat",
        openai_apis.ChatCompletions.members,
        names(*typing.get_args(chat.CompletionCreateParams)),
    ),
    (
        "responses",
        responses_api.Responses.members,
        names(
            *typing.get_args(response_create_params.ResponseCreateParams),
            *typing.get_args(responses_beta.ResponseCreateParams),
        ),
    ),
    (
        "messages",
        anthropic_messages.Messages.members,
        names(
            *typing.get_args(claude.MessageCreateParams),
            *typing.get_args(claude_beta.MessageCreateParams),
        ),
    ),
    ("chat stream_options", openai_apis._STREAM, names(chat.ChatCompletionStreamOptionsParam)),
    ("chat tool", openai_apis._CHAT_TOOL, names(chat.ChatCompletionFunctionToolParam)),
    ("chat call", openai_apis._CALL, names(chat.ChatCompletionMessageFunctionToolCallParam)),
    (
        "chat message",
        openai_apis._CHAT_MESSAGE,
        names(
            chat.ChatCompletionSystemMessageParam,
            chat.ChatCompletionDeveloperMessageParam,
            chat.ChatCompletionUserMessageParam,
            chat.ChatCompletionAssistantMessageParam,
            chat.ChatCompletionToolMessageParam,
        ),
    ),
    ("responses text", responses_api._TEXT_MEMBERS, names(responses.ResponseTextConfigParam)),
    ("responses tool", responses_api._RESPONSES_TOOL, names(responses.FunctionToolParam)),
    (
        "responses cache",
        responses_api._CACHE,
        names(response_create_params.PromptCacheOptions),
    ),
    (
        "responses message",
        responses_api._ITEMS["message"],
        names(responses.EasyInputMessageParam, responses.ResponseOutputMessageParam, response_input_item_param.Message),
    ),
    ("responses reasoning", responses_api._ITEMS["reasoning"], names(responses.ResponseReasoningItemParam)),
    ("responses call", responses_api._ITEMS["function_call"], names(responses.ResponseFunctionToolCallParam)),
    (
        "responses result",
        responses_api._ITEMS["function_call_output"],
        names(response_input_item_param.FunctionCallOutput),
    ),
    ("messages tool", anthropic_messages._TOOL, names(claude.ToolParam, claude_beta.BetaToolParam)),
    (
        "messages tool_choice",
        anthropic_messages._CHOICE,
        names(*typing.get_args(claude.ToolChoiceParam), *typing.get_args(claude_beta.BetaToolChoiceParam)),
    ),
    (
        "messages output_config",
        anthropic_messages._OUTPUT,
        names(claude.OutputConfigParam, claude_beta.BetaOutputConfigParam),
    ),
    (
        "messages message",
        anthropic_messages._MESSAGE,
        names(
            claude_beta.BetaUserMessageParam, claude_beta.BetaAssistantMessageParam, claude_beta.BetaSystemMessageParam
        ),
    ),
    ("messages thinking", anthropic_messages._BLOCKS["thinking"], names(claude_beta.BetaThinkingBlockParam)),
    ("messages call", anthropic_messages._BLOCKS["tool_use"], names(claude_beta.BetaToolUseBlockParam)),
    ("messages result", anthropic_messages._BLOCKS["tool_result"], names(claude_beta.BetaToolResultBlockParam)),
    (
        "text block",
        TEXT_BLOCK,
        names(
            chat.ChatCompletionContentPartTextParam,
            chat.ChatCompletionContentPartRefusalParam,
            responses.ResponseInputTextParam,
            claude_beta.BetaTextBlockParam,
        ),
    ),
]


@pytest.mark.parametrize(("members", "named"), [case[1:] for case in DECIDED], ids=[case[0] for case in DECIDED])
def test_each_member_that_an_sdk_can_send_is_decided_once(members: Members, named: set[str]) -> None:
    kinds = [set(members.read), set(members.sampling), set(members.harmless), set(members.fixed)]
    decided = set().union(*kinds)
    assert sum(map(len, kinds)) == len(decided)
    assert len(named) > 1
    assert named - decided == set()


REJECTED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"add_generation_prompt": False}, "add_generation_prompt"),
    ("chat", {"response_format": {"type": "xml"}}, "response_format"),
    ("chat", {"structured_outputs": {"never_heard_of": 1}}, "structured_outputs.never_heard_of"),
    ("chat", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ("chat", {"tool_choice": "sometimes"}, "tool_choice"),
    ("messages", {"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ("chat", {"stop_token_ids": [1]}, "stop_token_ids"),
    ("chat", {"echo": True}, "echo"),
    ("chat", {"best_of": 4}, "best_of"),
    ("chat", {"ignore_eos": True}, "ignore_eos"),
    ("chat", {"logit_bias": {"5": 100}}, "logit_bias"),
    ("chat", {"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
    ("chat", {"bad_words": ["no"]}, "bad_words"),
    ("chat", {"web_search_options": {}}, "web_search_options"),
    ("chat", {"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ("chat", {"messages": [{**ASK[0], "prefix": True}]}, "messages[0].prefix"),
    ("chat", {"messages": [*ASK, {"role": "assistant", "function_call": {"name": "f"}}]}, "messages[1].function_call"),
    ("chat", {"chat_template": "{{ messages }}"}, "chat_template"),
    ("chat", {"never_heard_of": 1}, "never_heard_of"),
    ("responses", {"conversation": "conv_1"}, "conversation"),
    ("responses", {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ("responses", {"truncation": "auto"}, "truncation"),
    ("responses", {"multi_agent": {"enabled": True}}, "multi_agent"),
    ("responses", {"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
    ("responses", {"input": [{**ASK[0], "never_heard_of": 1}]}, "input[0].never_heard_of"),
    ("responses", {"never_heard_of": 1}, "never_heard_of"),
    ("messages", {"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
    ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ("messages", {"compaction": {"type": "enabled"}}, "compaction"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]}, "more"),
    ("messages", {"never_heard_of": 1}, "never_heard_of"),
]


@pytest.mark.parametrize(("path", "more", "parameter"), REJECTED)
def test_what_would_change_the_completion_or_is_unknown_is_rejected_by_name(
    path: str, more: dict[str, Any], parameter: str
) -> None:
    api, body = APIS[path]
    with pytest.raises(RefusedError) as caught:
        api.read({**body, **more}, list)
    error = api.error(caught.value)["error"]
    assert caught.value.status == 400 and error["type"] == "invalid_request_error"
    assert parameter in error["message"]
    if path != "messages":
        assert error["param"] == parameter
        assert error["code"] in ("unknown_parameter", "unsupported_parameter", "unsupported_value")


ACCEPTED: list[tuple[str, dict[str, Any], int]] = [
    (
        "chat",
        {
            **{"parallel_tool_calls": True, "n": 1, "echo": False, "best_of": 1, "logprobs": False, "stop": []},
            **{"logit_bias": {}, "min_tokens": 0, "tool_choice": "auto", "response_format": {"type": "text"}},
            **{"metadata": {"a": "b"}, "user": "u", "store": True, "service_tier": "auto", "seed": None},
            **{"thread": None, "prompt_cache_key": "k", "prediction": {"type": "content", "content": ""}},
            "stream_options": {"include_usage": True, "include_obfuscation": False},
            "messages": [
                {"role": "user", "name": "u", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
                {"role": "assistant", "content": "y", "refusal": None, "annotations": [], "function_call": None},
                {"role": "user", "content": "z"},
            ],
        },
        0,
    ),
    ("chat", {"temperature": 0.5, "top_k": 3, "reasoning_effort": "low"}, 3),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, 1),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "strict": False}}]}, 0),
    (
        "responses",
        {
            **{"parallel_tool_calls": True, "background": False, "include": ["reasoning.encrypted_content"]},
            **{"text": {"format": {"type": "text"}}, "truncation": "disabled", "store": False, "max_tool_calls": 3},
        },
        0,
    ),
    ("responses", {"top_p": 0.5, "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}, 3),
    (
        "messages",
        {
            **{"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "service_tier": "auto"},
            **{"metadata": {"user_id": "u"}, "context_management": {"edits": []}, "output_config": None},
        },
        0,
    ),
    ("messages", {"temperature": 1.0, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, 3),
]


@pytest.mark.parametrize(("path", "more", "ignored"), ACCEPTED)
def test_what_changes_nothing_is_accepted_and_sampling_parameters_are_counted(
    path: str, more: dict[str, Any], ignored: int
) -> None:
    api, body = APIS[path]
    assert len(api.read({**body, **more}, list).ignored) == ignored


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


def test_rejections_reach_the_sdks_in_their_providers_shape() -> None:
    with Open(Engine("Hi")) as attempt:
        client = openai.OpenAI(base_url=attempt.url, api_key=attempt.key)
        with pytest.raises(openai.BadRequestError) as unsupported:
            client.chat.completions.create(model="m", messages=ASK, logit_bias={"5": 1})  # type: ignore[arg-type]
        assert unsupported.value.param == "logit_bias" and unsupported.value.code == "unsupported_value"
        with pytest.raises(openai.BadRequestError) as unknown:
            client.responses.create(model="m", input="x", extra_body={"never_heard_of": "a"})
        assert unknown.value.param == "never_heard_of" and unknown.value.code == "unknown_parameter"
        other = anthropic.Anthropic(base_url=attempt.url, api_key=attempt.key)
        with pytest.raises(anthropic.BadRequestError) as extra:
            more = {"never_heard_of": 1}
            other.messages.create(model="m", messages=ASK, max_tokens=9, extra_body=more)  # type: ignore[arg-type]
        assert extra.value.body["error"] == {  # type: ignore[index, call-overload]
            "type": "invalid_request_error",
            "message": "never_heard_of: Extra inputs are not permitted",
        }
    assert attempt.trajectory.metrics["refused_requests"] == 3


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streaming"])
def test_anthropics_tool_runner_falls_back_to_whole_conversations(stream: bool) -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        @beta_tool
        def add(a: int, b: int) -> str:
            """Adds.

            Args:
                a: one
                b: two
            """
            return str(a + b)

        client = anthropic.Anthropic(base_url=base_url, api_key=api_key)
        runner: Any = client.beta.messages.tool_runner(
            model="m",
            max_tokens=200,
            tools=[add],
            messages=ASK,  # type: ignore[arg-type]
            stream=stream,
        )
        return float(runner.until_done().content[0].text == "3")

    engine = Engine(CALL, CALL, "3")
    (trajectory,) = play(main, engine)
    assert trajectory.failure is None
    assert trajectory.turn_rewards == [0.0, 0.0, 1.0]
    assert len(trajectory.rows) == 1
    said = [message["role"] for message in trajectory.messages]
    assert said == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trajectory.messages[0]["content"] == "Hello"
    assert trajectory.metrics["tool_calls"] == 2


def test_rejected_requests_are_counted_and_told_and_sampling_parameters_are_named_once() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        asks: dict[str, Any] = {"model": "m", "messages": ASK}
        for more in ({"logit_bias": {"5": 1}}, {"audio": {}}, {"messages": []}):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(**{**asks, **more})
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="m", input="x")
        client.chat.completions.create(**asks, temperature=0.2, top_p=0.5)
        client.chat.completions.create(**asks, temperature=0.2)
        return 1.0

    engine = Engine("Hi")
    with pytest.warns(UserWarning) as warned:
        trajectories = play(main, engine, number=2)
    said = [str(warning.message) for warning in warned]
    for trajectory in trajectories:
        assert trajectory.metrics["refused_requests"] == 4
        assert trajectory.metrics["ignored_parameters"] == 3
    for cause in ("logit_bias=", "audio=", "messages: must not be empty", "/embeddings", "temperature", "top_p"):
        assert len([text for text in said if cause in text]) == 1, (cause, said)
    assert engine.asked[0].sampling == SamplingParams(max_new_tokens=300)
