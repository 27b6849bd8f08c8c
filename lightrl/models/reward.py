"""Reward models: sequence-classification models with one output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from lightrl.compat.transformers import model_class, with_from_config
from lightrl.models.backbone import Backbone
from lightrl.models.loading import causal_class, load_model, model_config
from lightrl.models.packing.micro_batches import micro_batches, told_apart
from lightrl.models.policy import read_values, transformer_blocks
from lightrl.models.spec import Layout, ModelSpec, RewardModelSpec
from lightrl.models.turns import placeholder_ids, text_ids
from lightrl.records import pad_rows


class RewardModel(nn.Module):
    """Scores whole sequences.

    Args:
        model: Sequence-classification model with one label.
        tokenizer: Tokenizer for `score_texts`. Defaults to none, which scores only token IDs.
        chat_template, max_length, layout: See `RewardModelSpec`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        chat_template: str | None = None,
        max_length: int | None = None,
        layout: Layout = "auto",
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        config = model.config.get_text_config()
        self.max_length = max_length or getattr(config, "max_position_embeddings", None) or 1 << 30
        # Decoders read their `score` at the last token. Encoders have their own heads and are called unchanged.
        own_head = not isinstance(_head(model), nn.Linear)
        self._backbone = None if own_head else Backbone(model, model.base_model, layout)

    @classmethod
    def from_spec(cls, spec: RewardModelSpec) -> RewardModel:
        """Loads model and tokenizer, frozen."""
        model_spec = ModelSpec(spec.path, dtype=spec.dtype, kwargs=spec.kwargs)
        model = load_scalar(model_spec, trainable=False)
        own = spec.tokenizer == "own"
        tokenizer = AutoTokenizer.from_pretrained(spec.path) if own else None
        return cls(model, tokenizer, chat_template=spec.chat_template, max_length=spec.max_length, layout=spec.layout)

    @classmethod
    def for_training(cls, spec: ModelSpec) -> RewardModel:
        """Loads a model whose weights (with LoRA, adapters) and head are trained; initializes a missing head."""
        model: Any = load_scalar(spec, trainable=True)
        if spec.lora is not None and isinstance(_head(model), nn.Linear):
            _head(model).requires_grad_(True)
        return cls(model, layout=spec.layout)

    @property
    def lm(self) -> Any:
        """The Hugging Face model, named as in `PolicyModel`."""
        return self.model

    def head_parameters(self) -> list[nn.Parameter]:
        """Returns the trained parameters of the head; empty if it is not a linear layer."""
        head = _head(self.model)
        return [p for p in head.parameters() if p.requires_grad] if isinstance(head, nn.Linear) else []

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor | None = None,
        *,
        group_ids: Tensor | None = None,
        inputs: list[dict[str, Any]] | None = None,
    ) -> Tensor:
        """Returns (B,) float32 scores, read at each row's last real token.

        Args:
            token_ids: (B, T) int64, right-padded.
            attention_mask: (B, T) bool.
            response_mask: (B, T) bool, the end of each row that is not shared within its group. Used with `group_ids`.
            group_ids: (B,) int64. None shares nothing.
            inputs: B dictionaries of media inputs, `{}` for text. Defaults to text only.
        """
        if self._backbone is None:
            logits = self.model(input_ids=token_ids, attention_mask=attention_mask.long()).logits
            return logits.squeeze(-1).float()
        if response_mask is None or group_ids is None or not self._shares:
            out = self._backbone(token_ids, attention_mask, None, None, inputs)
            return read_values(_head(self.model), out.hidden)
        return self._forward_shared(token_ids, attention_mask, response_mask, group_ids, inputs)

    def _forward_shared(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        response: Tensor,
        groups: Tensor,
        inputs: list[dict[str, Any]] | None,
    ) -> Tensor:
        """Adds a column, since the last token's state is read as if to predict a token after it."""
        rows, ends = torch.arange(len(token_ids), device=token_ids.device), attention_mask.sum(1)
        ids, attention, wanted = (F.pad(x, (0, 1)) for x in (token_ids, attention_mask, response & attention_mask))
        attention[rows, ends] = True
        wanted[rows, ends] = True
        out = self._backbone(ids, attention, wanted, groups, inputs)  # type: ignore[misc]
        return out.scatter(read_values(_head(self.model), out.hidden))[rows, ends]

    @torch.no_grad()
    def score(self, rollouts: Any, micro_batch_tokens: int) -> Tensor:
        """Returns (B,) float32 scores of rollouts, from their texts or token IDs (`RewardModelSpec.tokenizer`).

        Collective: every rank runs the same number of forward passes, as sharded models require.

        Raises:
            ValueError: The rows have media, but the model reads text.
        """
        sees = any(getattr(rollouts, "inputs", None) or ())
        if self.tokenizer is not None and sees:
            raise ValueError(
                f"reward_models.tokenizer='own': {type(self.model).__name__} would read prompts without their images. "
                "Set tokenizer='policy' with a reward model of the policy's family."
            )
        if self.tokenizer is not None:
            templated = self.chat_template is not None and rollouts.raw_prompts
            prompts = rollouts.raw_prompts if templated else rollouts.prompts
            return self.score_texts(prompts, rollouts.completions, micro_batch_tokens)
        seen = (rollouts.response_mask, rollouts.inputs) if sees else (None, None)
        masks = rollouts.token_ids, rollouts.attention_mask
        return self._score_tokens(*masks, micro_batch_tokens, rollouts.group_ids, *seen)

    @torch.no_grad()
    def score_texts(
        self, prompts: Sequence[Any], completions: Sequence[str], micro_batch_tokens: int = 16384
    ) -> Tensor:
        """Returns (B,) float32 scores of texts with the model's tokenizer; NaN for texts without tokens.

        Args:
            prompts: B strings or, with a chat template, conversations.
            completions: B strings.
            micro_batch_tokens: Maximum number of tokens per forward pass.
        """
        rows = [self.encode(p, c)[-self.max_length :] for p, c in zip(prompts, completions, strict=True)]
        device = next(self.model.parameters()).device
        pad = self.tokenizer.pad_token_id or 0
        empty = torch.tensor([not row for row in rows], device=device)
        rows = [row or [pad] for row in rows]
        token_ids = pad_rows(rows, pad, torch.long).to(device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(token_ids.shape[1], device=device) < lengths[:, None]
        numbers: dict[str, int] = {}
        groups = torch.tensor([numbers.setdefault(str(prompt), len(numbers)) for prompt in prompts], device=device)
        return self._score_tokens(token_ids, mask, micro_batch_tokens, groups).masked_fill(empty, float("nan"))

    def encode(self, prompt: Any, completion: str) -> list[int]:
        """Returns the token IDs of a prompt and completion for `score_texts`; may be empty."""
        if self.chat_template is None:
            return text_ids(self.tokenizer, prompt + completion)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages = [*turns, {"role": "assistant", "content": completion}]
        template = None if self.chat_template == "default" else self.chat_template
        text = self.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _score_tokens(
        self,
        token_ids: Tensor,
        mask: Tensor,
        budget: int,
        groups: Tensor,
        response: Tensor | None = None,
        inputs: list[dict[str, Any]] | None = None,
    ) -> Tensor:
        """Returns (B,) scores, with shared prefixes computed once.

        `response` marks where rows of a group differ. Defaults to finding it.
        """
        response = own_ends(token_ids, mask, groups) if response is None else response
        ids = told_apart(token_ids.cpu(), inputs)
        bins = micro_batches(ids, mask.cpu(), response.cpu(), budget, layout="auto" if self._shares else "packed")
        scores = torch.zeros(len(token_ids), device=token_ids.device)
        for i in range(_max_over_ranks(len(bins), token_ids.device)):
            rows = (bins[i] if i < len(bins) else torch.zeros(1, dtype=torch.long)).to(token_ids.device)
            longest = int(mask[rows].sum(1).max())
            part = self(
                token_ids[rows, :longest],
                mask[rows, :longest],
                response[rows, :longest],
                group_ids=groups[rows],
                inputs=None if inputs is None else [inputs[row] for row in rows.tolist()],
            )
            if i < len(bins):
                scores[rows] = part
        return scores

    @property
    def _shares(self) -> bool:
        return self._backbone is not None and self._backbone.layout not in ("packed", "padded")

    def blocks(self) -> list[nn.Module]:
        """Returns the transformer blocks, as FSDP2 shards them."""
        return transformer_blocks(self.model)


def load_scalar(spec: ModelSpec, *, trainable: bool) -> PreTrainedModel:
    """Loads a model with a single-output head, which may be missing if it is trained. See `load_causal_lm`."""
    return load_model(spec, scalar_class(model_config(spec)), trainable=trainable, new_head=True, num_labels=1)


def scalar_class(config: Any) -> Any:
    """Returns the class with a classification head.

    transformers has none for vision-language models. The class created here uses the same names as those for text: the
    backbone `model`, read at the last token, and the linear layer `score`.
    """
    auto = AutoModelForSequenceClassification
    body = model_class(AutoModel, config)
    if model_class(auto, config) or not placeholder_ids(config) or body is None:
        return auto
    from transformers.modeling_layers import GenericForSequenceClassification

    base = next(c for c in body.__mro__[1:] if issubclass(c, PreTrainedModel))
    name = f"{body.__name__.removesuffix('Model')}ForSequenceClassification"
    return with_from_config(name, (GenericForSequenceClassification, base), model_class(causal_class(config), config))


def own_ends(token_ids: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """Returns (B, T) bool, True on each row's real tokens from the first one at which rows of its group differ."""
    own = mask.clone()
    for group in groups.unique():
        rows = (groups == group).nonzero().squeeze(1)
        alike = ((token_ids[rows] == token_ids[rows[0]]) & mask[rows]).all(0)
        own[rows, : int(alike.int().cumprod(0).sum())] = False
    return own


def _head(model: Any) -> Any:
    return getattr(model, "score", None)


def _max_over_ranks(count: int, device: torch.device) -> int:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return count
    most = torch.tensor(count, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)
