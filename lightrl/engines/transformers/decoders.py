"""Decoders, which hold the KV cache of the completions being sampled and compute logits.

Shapes: P prompts, G completions per prompt, R live rows, V vocabulary, L prompt length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lightrl.compat.transformers import cache_argument, has_recurrent_state
from lightrl.records import Routes

if TYPE_CHECKING:
    from lightrl.models.routing import Routers


class Decoder(Protocol):
    """KV cache of R rows. `prefill`, `step`, and `keep` are called in inference mode."""

    refills: bool
    """Whether prompts can be added while rows are live."""
    takes_media: bool
    """Whether `prefill` supports `inputs`."""
    prefill_tokens: int
    """Maximum number of tokens per `prefill`, which limits activation memory. A longer prompt runs alone."""
    routes: Tensor | None = None
    """Experts of the last tokens: (P, L, layers, K) after `prefill`, left-padded, and (R, 1, layers, K) after `step`.
    None for models without experts or with unsupported routers."""

    def tokens_held(self, prompt_tokens: int, copies: int, new_tokens: int) -> int:
        """Returns the maximum number of KV cache tokens that a group needs."""

    def reserve(self, longest: int, new_tokens: int) -> None:
        """Sets the maximum length of the next sequences, in total and of the completions alone."""
        return

    def batches(self, first: Sequence[int], other: Sequence[int]) -> bool:
        """Returns whether the prompt `other` can be batched with the longer prompt `first`."""
        return True

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        inputs: dict[str, Any],
        routes: Sequence[Routes | None] = (),
    ) -> Tensor:
        """Appends `copies` adjacent rows per prompt and returns the (P, V) logits after each prompt.

        `routes` sets the experts of the prompts' tokens, for a decoder that records them.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Appends (R,) tokens, one per row, and returns the (R, V) logits of the next tokens."""

    def keep(self, rows: list[int]) -> None:
        """Keeps only `rows`, in this order."""


class CacheDecoder(Decoder):
    """A decoder for any causal model, which uses the model's forward pass and transformers' cache.

    Prompts are left-padded, so that new tokens share a column and sliding windows, which count columns, are correct.
    Models with recurrent layers get only prompts of equal length per batch, because padding would enter their state.
    `routers` of a mixture-of-experts model are recorded.
    """

    refills = False
    takes_media = True
    prefill_tokens = 65536

    def __init__(self, model: PreTrainedModel, routers: Routers | None = None) -> None:
        self.model = model
        self.routers = routers
        text_config = model.config.get_text_config()
        types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
        self.pads = types <= {"full_attention", "sliding_attention"} and not has_recurrent_state(model)
        self.cache: Any = None
        self.cache_name = cache_argument(model)
        self.mask: Tensor | None = None
        self.positions: Tensor | None = None

    def tokens_held(self, prompt_tokens: int, copies: int, new_tokens: int) -> int:
        return copies * (prompt_tokens + new_tokens)

    def batches(self, first: Sequence[int], other: Sequence[int]) -> bool:
        return self.pads or len(first) == len(other)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        inputs: dict[str, Any],
        routes: Sequence[Routes | None] = (),
    ) -> Tensor:
        """See `Decoder.prefill`. `inputs` are additional arguments of the model's forward (images, ...)."""
        device, width = self.model.device, max(map(len, prompts))
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        columns = torch.arange(width, device=device)
        mask = columns >= width - lengths[:, None]
        padded = bool((lengths < width).any())
        extra = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        own = None
        if inputs:  # implies a single prompt
            from lightrl.models.multimodal import media_positions

            own = media_positions(self.model.base_model, ids, [inputs])
        positions = (columns - (width - lengths[:, None])).clamp(min=0) if own is None else own
        following = lengths if own is None else own.amax((0, 2)) + 1
        self.cache = DynamicCache(config=self.model.config)
        places = columns - (width - lengths[:, None]) + torch.arange(len(prompts), device=device)[:, None] * (width + 1)
        places = torch.where(mask, places, width)  # no routes are recorded for padding
        out = self._run(
            Routes.at(routes, places.flatten(), width + 1),
            input_ids=ids,
            attention_mask=mask.long() if padded else None,
            position_ids=positions,
            **extra,
        )
        self.cache = getattr(out, self.cache_name)
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
        """Runs a forward pass, with the given `experts` if any, and stores the experts used in `routes`."""
        arguments = {self.cache_name: self.cache, "use_cache": True, "logits_to_keep": 1, **inputs}
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
