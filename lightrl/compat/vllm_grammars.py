"""Tokens allowed by vLLM's structured outputs, recomputed from grammar and sampled tokens."""

from __future__ import annotations

from typing import Any

import torch

from lightrl.records import Support

PRIVATE = {
    "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.compile_grammar": "the grammar that masks logits",
    "vllm.v1.structured_output.request:get_structured_output_key": "what it is compiled from",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "tokens that end a completion",
}
"""Undocumented names of vLLM 0.32, and what they are used for."""

MAX_IDS = 1 << 24
"""Maximum number of IDs stored per completion (64 MiB)."""


class Grammars:
    """Grammars of one engine, the same ones that vLLM uses to mask logits before sampling.

    Args:
        engine: vLLM's `LLMEngine`.
    """

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
