"""Decoders: what holds the keys and values of the rows that are being sampled.

A decoder knows nothing of sampling. `prefill` takes prompts, adds G rows for each and returns the logits after each
prompt; `step` takes one token per row and returns the next logits; `keep` forgets rows.

Shapes: P prompts, G completions per prompt, R live rows, V vocabulary, L prompt length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lightrl.compat.transformers import has_recurrent_state
from lightrl.records import Routes

if TYPE_CHECKING:
    from lightrl.models.routing import Routers


class Decoder(Protocol):
    """Keys and values of R rows, in the order in which `prefill` and `keep` left them.

    `prefill`, `step` and `keep` are called in inference mode.
    """

    refills: bool
    """Whether prompts can be added while rows are live."""
    prefill_tokens: int
    """Most prompt tokens of one `prefill`, unless a single prompt has more: it bounds the memory of activations."""
    routes: Tensor | None
    """The experts of the last tokens: (P, L, layers, K) after `prefill`, shorter prompts padded on the left, (R, 1,
    layers, K) after `step`. None for a model without, or whose routers cannot be recorded."""

    def tokens_held(self, prompt_tokens: int, copies: int, new_tokens: int) -> int:
        """Most tokens whose keys and values a group will need."""

    def admits(self, prompt: Sequence[int], inputs: dict[str, Any]) -> bool:
        """Whether it can hold such a prompt, beside the live rows where it `refills`."""

    def reserve(self, longest: int, new_tokens: int) -> None:
        """Says how many tokens what comes next may have, prompt and completion together, and completions alone."""

    def batches(self, first: Sequence[int], other: Sequence[int]) -> bool:
        """Whether the prompt `other` may be computed in one batch with the longer prompt `first`."""

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        inputs: dict[str, Any],
        routes: Sequence[Routes | None] = (),
    ) -> Tensor:
        """Adds `copies` rows per prompt, neighbours, at the end; (P, V) logits after each prompt.

        `routes` are experts that tokens of the prompts are to be sent to, for a decoder that records them.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """(R,) tokens, one per row -> (R, V) logits of the tokens after them."""

    def keep(self, rows: list[int]) -> None:
        """Row i becomes what was row `rows[i]`; the others are dropped."""


class CacheDecoder(Decoder):
    """The decoder for any model: its own forward and transformers' own cache, whatever that holds.

    Prompts of a batch are left-padded, so that the new tokens of all rows share a column, and sliding windows (which
    count columns) are right. A model with recurrent layers gets prompts of one length at a time: padding would enter
    its state.

    Args:
        model: a causal language model in evaluation mode.
        routers: of a mixture of experts, to be recorded.
    """

    refills = False
    prefill_tokens = 65536

    def __init__(self, model: PreTrainedModel, routers: Routers | None = None) -> None:
        self.model = model
        self.routers = routers
        self.routes: Tensor | None = None
        text_config = model.config.get_text_config()
        types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
        self.pads = types <= {"full_attention", "sliding_attention"} and not has_recurrent_state(model)
        self.cache: Any = None
        self.mask: Tensor | None = None
        self.positions: Tensor | None = None

    def tokens_held(self, prompt_tokens: int, copies: int, new_tokens: int) -> int:
        return copies * (prompt_tokens + new_tokens)

    def admits(self, prompt: Sequence[int], inputs: dict[str, Any]) -> bool:
        return True

    def reserve(self, longest: int, new_tokens: int) -> None: ...

    def batches(self, first: Sequence[int], other: Sequence[int]) -> bool:
        return self.pads or len(first) == len(other)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        inputs: dict[str, Any],
        routes: Sequence[Routes | None] = (),
    ) -> Tensor:
        """See `Decoder.prefill`; `inputs` are further arguments of the model's forward (images, ...)."""
        device, width = self.model.device, max(map(len, prompts))
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        columns = torch.arange(width, device=device)
        mask = columns >= width - lengths[:, None]
        padded = bool((lengths < width).any())
        extra = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        own = None
        if inputs:  # then it is one prompt
            from lightrl.models.multimodal import media_positions

            own = media_positions(self.model.base_model, ids, [inputs])
        positions = (columns - (width - lengths[:, None])).clamp(min=0) if own is None else own
        following = lengths if own is None else own.amax((0, 2)) + 1
        self.cache = DynamicCache(config=self.model.config)
        places = columns - (width - lengths[:, None]) + torch.arange(len(prompts), device=device)[:, None] * (width + 1)
        places = torch.where(mask, places, width)  # of the padding nothing was recorded
        out = self._run(
            Routes.at(routes, places.flatten(), width + 1),
            input_ids=ids,
            attention_mask=mask.long() if padded else None,
            position_ids=positions,
            **extra,
        )
        self.cache = getattr(out, "past_key_values", None)
        if self.cache is None:
            raise ValueError(
                f"model_path: {type(self.model).__name__} keeps no past_key_values, so TransformersEngine cannot "
                "decode with it; use VLLMEngine."
            )
        rows = torch.arange(len(prompts), device=device).repeat_interleave(copies)
        self.cache.reorder_cache(rows)
        self.positions = following[rows, None]
        self.mask = mask[rows].long() if padded else None
        return out.logits[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        out = self._run(None, input_ids=tokens[:, None], attention_mask=self.mask, position_ids=self.positions)
        self.positions = self.positions + 1 if self.positions is not None else None
        return out.logits[:, -1]

    def _run(self, experts: Tensor | None, **inputs: Any) -> Any:
        """One forward in which tokens go to `experts`, as of `Routes.at`; leaves what was taken in `routes`."""
        arguments = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1, **inputs}
        if self.routers is None:
            return self.model(**arguments)
        from lightrl.models.routing import RoutingPass

        with RoutingPass() if experts is None else self.routers.replaying(experts) as forward:
            out = self.model(**arguments)
        taken = self.routers.recorded(forward)
        self.routes = taken.view(*inputs["input_ids"].shape, *taken.shape[1:])
        return out

    def keep(self, rows: list[int]) -> None:
        if not rows:
            self.cache = self.mask = None
            return
        index = torch.tensor(rows, device=self.model.device)
        self.cache.reorder_cache(index)
        self.positions = self.positions[index] if self.positions is not None else None
        self.mask = self.mask[index] if self.mask is not None else None
