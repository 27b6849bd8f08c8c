"""OpenAI's chat completions API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightrl.environments.base import call_message
from lightrl.environments.endpoint.api import Api, event, new_id
from lightrl.environments.endpoint.requests import Answered, Asked


class ChatCompletions(Api):
    """`POST /chat/completions`, see https://platform.openai.com/docs/api-reference/chat."""

    path = "/chat/completions"

    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        choices = []
        for i, answered in enumerate(answers):
            reply = answered.reply
            content = reply.content or (None if reply.tool_calls else "")
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if reply.reasoning:
                message["reasoning_content"] = reply.reasoning
            if reply.tool_calls:
                message["tool_calls"] = [
                    call_message(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False))
                    for call in reply.tool_calls
                ]
            finish = "length" if reply.truncated else "tool_calls" if reply.tool_calls else "stop"
            logprobs = None if answered.logprobs is None else {"content": answered.logprobs, "refusal": None}
            choices.append({"index": i, "message": message, "logprobs": logprobs, "finish_reason": finish})
        sent, said = answers[0].prompt_tokens, sum(answered.completion_tokens for answered in answers)
        return {
            **{"id": new_id("chatcmpl-"), "object": "chat.completion", "created": int(time.time())},
            **{"model": asked.model, "choices": choices},
            "usage": {"prompt_tokens": sent, "completion_tokens": said, "total_tokens": sent + said},
        }

    def events(self, asked: Asked, answers: Sequence[Answered], written: Mapping[str, Any]) -> Iterator[bytes]:
        head = {name: value for name, value in written.items() if name != "usage"} | {"object": "chat.completion.chunk"}
        head |= {"usage": None} if asked.usage else {}

        def chunk(choice: Mapping[str, Any], delta: dict[str, Any], **more: Any) -> bytes:
            empty = {"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None}
            return event({**head, "choices": [{**empty, **more}]})

        for choice in written["choices"]:
            message = choice["message"]
            yield chunk(choice, {"role": "assistant", "content": ""}, logprobs=choice["logprobs"])
            for name in ("reasoning_content", "content"):
                if message.get(name):
                    yield chunk(choice, {name: message[name]})
            for place, call in enumerate(message.get("tool_calls", ())):
                yield chunk(choice, {"tool_calls": [{"index": place, **call}]})
            yield chunk(choice, {}, finish_reason=choice["finish_reason"])
        if asked.usage:
            yield event({**head, "choices": [], "usage": written["usage"]})
        yield b"data: [DONE]\n\n"
