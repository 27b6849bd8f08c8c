"""What requests ask beyond a reply: where it stops, what it must match, several replies, log-probs, images."""

from __future__ import annotations

import base64
import io
import socket
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lightrl.environments.endpoint.api import content_of
from lightrl.environments.endpoint.server import Endpoint
from lightrl.records import CompletionGroup, GenerationRequest
from tests.environments import programs
from tests.environments.test_endpoint import ASK, CALL, TOKENIZER, TWO_CALLS, Engine, Open, play, sound
from tests.environments.test_sdks import Strict, fits

SAID: Any = ASK
TOOLS: Any = [{"type": "function", "function": programs.TOOL}]
SCHEMA: Any = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def clients(attempt: Open) -> tuple[openai.OpenAI, anthropic.Anthropic]:
    key = {"base_url": attempt.url, "api_key": attempt.key}
    return openai.OpenAI(**key), anthropic.Anthropic(**key)  # type: ignore[arg-type]


def ids_of(trajectory: Any) -> list[int]:
    row = trajectory.rows[0]
    return [token for token, number in zip(row.token_ids, row.turn_ids, strict=True) if number == 0]


def test_a_stop_string_is_sampled_and_trained_and_cut_from_what_the_program_sees() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        first: Any = client.chat.completions.create(model="m", messages=SAID, stop=["</code>", "Observation:"])
        assert first.choices[0].message.content == "do it" and first.choices[0].finish_reason == "stop"
        said = [*SAID, {"role": "assistant", "content": row["back"]}, {"role": "user", "content": "more"}]
        client.chat.completions.create(model="m", messages=said)
        other = anthropic.Anthropic(base_url=base_url, api_key=api_key)
        cut = other.messages.create(model="m", max_tokens=99, messages=SAID, stop_sequences=["</code>"])
        assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == (  # type: ignore[union-attr]
            *("stop_sequence", "</code>", "do it"),
        )
        return 1.0

    for back, more in (("do it", ""), ("do it</code>", ""), ("do it</code>\nCalling tools", "\nCalling tools")):
        engine = Strict("do it</code> and more", "done", "do it</code>")
        (trajectory,) = play(main, engine, {"back": back})
        assert trajectory.failure is None
        assert engine.asked[0].sampling.stop == ["</code>", "Observation:"] and engine.asked[1].sampling.stop is None
        assert [sorted(set(row.turn_ids) - {-1}) for row in trajectory.rows] == [[0, 1], [2]]
        assert TOKENIZER.decode(ids_of(trajectory)) == "do it</code>"
        context = TOKENIZER.decode(engine.asked[1].token_ids)
        assert f"do it</code>{more}<|im_end|>\n<|im_start|>user\nmore" in context
        engine.texts = ("do it</code>", "done", "do it</code>")
        sound(trajectory, engine)


def test_constrained_replies_are_trained_with_what_the_engine_left_or_not_at_all() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        chat = openai.OpenAI(base_url=base_url, api_key=api_key).chat.completions
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        named: Any = {"type": "function", "function": {"name": "add"}}
        for more in (
            {"response_format": {"type": "json_object"}},
            {"response_format": form},
            {"extra_body": {"guided_regex": "[{].*[}]"}},
            {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
            {"tools": TOOLS, "response_format": form},
        ):
            assert chat.create(model="m", messages=SAID, **more).choices[0].message.content == '{"x": 1}'
        for choice in ("required", named):
            reply = chat.create(model="m", messages=SAID, tools=TOOLS, tool_choice=choice).choices[0]
            assert reply.message.tool_calls and reply.finish_reason == "tool_calls"
        chat.create(model="m", messages=SAID)
        return 1.0

    class Unrecorded(Strict):
        async def __call__(self, request: GenerationRequest) -> CompletionGroup:
            group = await super().__call__(request)
            group.completions[0].support = None
            return group

    said = ('{"x": 1}',) * 5 + (CALL, CALL, "free")
    (trajectory,) = play(main, Strict(*said), tool_parser="hermes")
    assert trajectory.metrics["constrained_turns"] == 7 and trajectory.metrics["masked_turns"] == 0
    constrained = [row for row in trajectory.rows if 7 not in row.turn_ids]
    assert all(
        row.support is not None and row.support.counts.sum() == row.turn_ids.count(turn)
        for row in constrained
        for turn in set(row.turn_ids) - {-1}
    )
    engine = Unrecorded(*said)
    with pytest.warns(UserWarning, match="episode.constrained"):
        (trajectory,) = play(main, engine, tool_parser="hermes")
    assert trajectory.failure is None
    assert trajectory.metrics["constrained_turns"] == trajectory.metrics["masked_turns"] == 7
    assert [sorted(set(row.turn_ids) - {-1}) for row in trajectory.rows] == [[7]]
    assert [request.trained for request in engine.asked] == [False] * 7 + [True]
    forced = (engine.asked[5].sampling.extra or {})["structured_outputs"]
    assert fits(CALL, forced) and not fits("no call", forced)

    free = Engine(*said)
    (trajectory,) = play(main, free, tool_parser="hermes", constrained="free")
    assert trajectory.failure is None
    assert all(request.sampling.extra is None for request in free.asked)
    assert trajectory.metrics["constrained_turns"] == 0 and trajectory.metrics["ignored_parameters"] == 7
    assert sum(len(set(row.turn_ids) - {-1}) for row in trajectory.rows) == 8


def test_what_an_engine_cannot_constrain_is_rejected_and_the_attempt_continues() -> None:
    class Plain(Engine):
        async def __call__(self, request: GenerationRequest) -> CompletionGroup:
            if request.sampling.extra:
                raise ValueError("SamplingParams.extra: PlainEngine does not support it. Use VLLMEngine.")
            return await super().__call__(request)

    with Open(Plain("Hi")) as attempt:
        chat, _ = clients(attempt)
        with pytest.raises(openai.BadRequestError, match="response_format: .*VLLMEngine"):
            chat.chat.completions.create(model="m", messages=SAID, response_format={"type": "json_object"})
        with pytest.raises(openai.BadRequestError, match="top_logprobs: .*VLLMEngine"):
            chat.chat.completions.create(model="m", messages=SAID, logprobs=True, top_logprobs=2)
        assert chat.chat.completions.create(model="m", messages=SAID).choices[0].message.content == "Hi"
    assert attempt.trajectory.failure is None and attempt.trajectory.metrics["turns"] == 1


def test_one_call_at_a_time() -> None:
    with Open(Engine(TWO_CALLS)) as attempt:
        chat, messages = clients(attempt)
        reply = chat.chat.completions.create(model="m", messages=SAID, tools=TOOLS, parallel_tool_calls=False)
        assert len(reply.choices[0].message.tool_calls or []) == 1
        tool: Any = {"name": "add", "description": "x", "input_schema": programs.TOOL["parameters"]}
        one: Any = {"type": "auto", "disable_parallel_tool_use": True}
        answer = messages.messages.create(model="m", max_tokens=99, messages=SAID, tools=[tool], tool_choice=one)
        assert [block.type for block in answer.content] == ["tool_use"]


def test_blank_text_before_a_call_is_no_answer() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        reply = client.chat.completions.create(model="m", messages=SAID, tools=TOOLS).choices[0].message
        assert reply.content is None and reply.tool_calls
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "3"}
        client.chat.completions.create(model="m", messages=[*SAID, reply, result], tools=TOOLS)
        tool: Any = {**programs.TOOL, "type": "function", "strict": False}
        output = client.responses.create(model="m", input="Hello", tools=[tool]).output
        assert [item.type for item in output] == ["function_call"]
        return 1.0

    engine = Engine(f"\n\n{CALL}", "done", f"\n\n{CALL}")
    (trajectory,) = play(main, engine, tool_parser="hermes")
    assert trajectory.failure is None
    assert [sorted(set(row.turn_ids) - {-1}) for row in trajectory.rows] == [[0, 1], [2]]
    sound(trajectory, engine)


@pytest.mark.parametrize("stream", [False, True])
def test_n_replies_are_turns_that_are_each_trained_once(stream: bool) -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        if stream:
            with client.chat.completions.stream(model="m", messages=SAID, n=3) as events:
                choices: Any = events.get_final_completion().choices
        else:
            choices = client.chat.completions.create(model="m", messages=SAID, n=3).choices
        assert [(choice.index, choice.message.content) for choice in choices] == [(0, "a"), (1, "b"), (2, "c")]
        said = [*SAID, {"role": "assistant", "content": "b"}, {"role": "user", "content": "more"}]
        client.chat.completions.create(model="m", messages=said)
        with pytest.raises(openai.PermissionDeniedError):
            client.chat.completions.create(model="m", messages=SAID, n=100)
        return 1.0

    engine = Engine("a", "b", "c", "d")
    (trajectory,) = play(main, engine)
    assert trajectory.failure is None
    turns = [sorted(set(row.turn_ids) - {-1}) for row in trajectory.rows]
    assert [0] in turns and [1, 3] in turns and [2] in turns
    sound(trajectory, engine)


def test_logprobs_are_those_that_were_sampled() -> None:
    class Likeliest(Engine):
        async def __call__(self, request: GenerationRequest) -> CompletionGroup:
            group = await super().__call__(request)
            (said,) = group.completions
            if (request.sampling.extra or {}).get("logprobs"):
                said.top = [{token: -0.1, 5: -3.0} for token in said.token_ids]
            return group

    with Open(Likeliest("Hi you")) as attempt:
        client, _ = clients(attempt)
        found: Any = client.chat.completions.create(model="m", messages=SAID, logprobs=True).choices[0].logprobs
        assert "".join(entry.token for entry in found.content) == "Hi you" and not found.content[0].top_logprobs
        sampled = attempt.engine.asked[0]
        assert found.content[0].logprob == -(sampled.seed + 1)
        top: Any = client.chat.completions.create(model="m", messages=SAID, logprobs=True, top_logprobs=2).choices[0]
        assert [word.logprob for word in top.logprobs.content[0].top_logprobs] == [-0.1, -3.0]
        with client.chat.completions.stream(model="m", messages=SAID, logprobs=True) as events:
            streamed: Any = events.get_final_completion().choices[0].logprobs
        assert len(streamed.content) == len("Hi you")
        wanted: Any = ["message.output_text.logprobs"]
        output: Any = client.responses.create(model="m", input="Hello", include=wanted).output[0]
        assert len(output.content[0].logprobs) == len("Hi you")


def test_a_reply_continues_the_text_that_a_program_began() -> None:
    def main(row: Any, base_url: str, api_key: str) -> float:
        client = anthropic.Anthropic(base_url=base_url, api_key=api_key)
        begun: Any = [*SAID, {"role": "assistant", "content": "The answer is ("}]
        assert client.messages.create(model="m", max_tokens=99, messages=begun).content[0].text == "B)"  # type: ignore
        said: Any = [*SAID, {"role": "assistant", "content": "The answer is (B)"}, {"role": "user", "content": "more"}]
        client.messages.create(model="m", max_tokens=99, messages=said)
        more: Any = {"continue_final_message": True, "add_generation_prompt": False}
        chat = openai.OpenAI(base_url=base_url, api_key=api_key).chat.completions
        assert chat.create(model="m", messages=begun, extra_body=more).choices[0].message.content == "B)"
        return 1.0

    engine = Engine("B)", "ok", "B)")
    (trajectory,) = play(main, engine)
    assert trajectory.failure is None
    assert [sorted(set(row.turn_ids) - {-1}) for row in trajectory.rows] == [[0, 1], [2]]
    assert TOKENIZER.decode(engine.asked[0].token_ids).endswith("assistant\nThe answer is (")
    assert TOKENIZER.decode(ids_of(trajectory)) == "B)<|im_end|>"
    sound(trajectory, engine)


def test_tokens_are_counted_models_are_retrieved_and_health_needs_no_key() -> None:
    with Open(Engine("Hi")) as attempt:
        chat, messages = clients(attempt)
        counted = messages.messages.count_tokens(model="m", messages=SAID).input_tokens
        assert counted == messages.messages.create(model="m", max_tokens=9, messages=SAID).usage.input_tokens
        assert chat.responses.input_tokens.count(model="m", input="Hello").input_tokens == counted
        assert chat.models.retrieve("org/model").id == "org/model"
        assert messages.models.retrieve("claude").id == "claude"
        assert [model.id for model in messages.models.list()] == ["policy"]
        root = attempt.url.removesuffix("/v1")
        assert httpx.get(root + "/health").json() == {"status": "ok"}
        assert httpx.get(attempt.url + "/models").status_code == 401
    assert attempt.trajectory.metrics["turns"] == 1


def test_images_reach_the_template_and_a_model_of_text_rejects_them() -> None:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(stream, "PNG")
    data = base64.b64encode(stream.getvalue()).decode()
    url = f"data:image/png;base64,{data}"
    openai_said: Any = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]}
    ]
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    claude_said: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    blocks = content_of(openai_said[0]["content"])
    assert blocks == [{"type": "text", "text": "see"}, {"type": "image", "image": url}]
    with Open(Engine("Hi")) as attempt:
        chat, messages = clients(attempt)
        with pytest.raises(openai.BadRequestError, match="takes text only"):
            chat.chat.completions.create(model="m", messages=openai_said)
        with pytest.raises(anthropic.BadRequestError, match="takes text only"):
            messages.messages.create(model="m", max_tokens=9, messages=claude_said)
        item: Any = {"type": "input_image", "image_url": url, "detail": "auto"}
        with pytest.raises(openai.BadRequestError, match="takes text only"):
            chat.responses.create(model="m", input=[{"role": "user", "content": [item]}])


def test_the_endpoint_listens_where_it_is_told_and_gives_the_address_of_containers() -> None:
    endpoint = Endpoint("0.0.0.0", 0, "http://host.docker.internal:{port}/v1")
    try:
        assert endpoint.base_url == f"http://host.docker.internal:{endpoint.port}/v1"
        assert httpx.get(f"http://127.0.0.1:{endpoint.port}/health").status_code == 200
        assert httpx.get(f"http://127.0.0.1:{endpoint.port}/v1/models").status_code == 401
    finally:
        endpoint.stop()
    seen: list[str] = []

    def main(row: Any, base_url: str, api_key: str) -> float:
        seen.append(base_url)
        local = base_url.replace("trainer", "127.0.0.1")
        openai.OpenAI(base_url=local, api_key=api_key).chat.completions.create(model="m", messages=SAID)
        return 1.0

    (trajectory,) = play(main, Engine("Hi"), bind="0.0.0.0", url="http://trainer:{port}/v1")
    assert trajectory.failure is None and seen[0].startswith("http://trainer:")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="port=.*in use.*port=0"):
        Endpoint(port=taken.getsockname()[1])
