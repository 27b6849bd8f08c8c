"""Models with one output per sequence or token: reward models, and the critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from lightrl.compat.transformers import model_class
from lightrl.compat.transformers_models import with_from_config
from lightrl.models.loading import causal_class, load_model, model_config
from lightrl.models.packing.micro_batches import run_micro_batches
from lightrl.models.policy import Backbone
from lightrl.models.spec import Layout, ModelSpec, read_chat_template
from lightrl.models.turns import placeholder_ids, text_ids
from lightrl.records import Rollouts, RowBatch, pad_rows


@dataclass
class RewardModelSpec:
    """A frozen reward model.

    Args:
        name: Name in metrics: letters, digits, and underscores.
        path: Model directory or model ID of a sequence-classification model with one label. A model for images and text
            must have a backbone `model` and a linear layer `score` (see `scalar_class`).
        weight: Weight of its reward in the sum. 0 only logs it.
        dtype: Dtype of the weights. Defaults to float32; bfloat16 halves the memory.
        tokenizer: "own" scores text with the model's tokenizer. "policy" scores the policy's token IDs and pixels,
            which requires the same vocabulary. Prompts with images need "policy".
        chat_template: Jinja text or its file, with which the "own" tokenizer renders [user: prompt, assistant:
            completion]. "default" is the tokenizer's. Defaults to scoring prompt + completion as plain text.
        max_length: Maximum text length in tokens. Longer texts lose their start, except for a BOS or CLS token.
            Defaults to the model's limit.
        layout: See `ModelSpec`.
        kwargs: Additional arguments of `from_pretrained`.
        labels: Score only examples with one of these values in `label_column`. Defaults to all.
        label_column: Dataset column with the label.
    """

    name: str
    path: str
    weight: float = 1.0
    dtype: str | None = None
    tokenizer: Literal["own", "policy"] = "own"
    chat_template: str | None = None
    max_length: int | None = None
    layout: Layout = "auto"
    kwargs: dict[str, Any] = field(default_factory=dict)
    labels: list[str] | None = None
    label_column: str = "label"

    def __post_init__(self) -> None:
        if self.chat_template not in (None, "default"):
            self.chat_template = read_chat_template(str(self.chat_template))

    def applies(self, columns: Mapping[str, Sequence[Any]]) -> list[bool] | None:
        """Returns which rows it scores, by their columns; None for all."""
        if self.labels is None:
            return None
        return [label in self.labels for label in columns[self.label_column]]

    def add_scores(self, rollouts: Rollouts, scores: Tensor) -> None:
        """Adds the model's (B,) scores to the rewards in place. Each trajectory's last row has its score.

        Trajectories without other rewards have only the scores of models. Failed trajectories and examples with other
        labels remain unscored, and weight 0 only records scores.
        """
        applies = self.applies(rollouts.columns) or [True] * len(rollouts)
        unscored = [failed or not own for failed, own in zip(rollouts.failed, applies, strict=True)]
        scores = scores[last_rows(rollouts.trajectory_ids)]
        scores = scores.masked_fill(torch.tensor(unscored, device=scores.device), float("nan"))
        rollouts.reward_parts[self.name], rollouts.reward_weights[self.name] = scores, self.weight
        total = rollouts.rewards.nan_to_num(0.0) + self.weight * scores
        rollouts.rewards = torch.where(scores.isfinite() & (self.weight != 0), total, rollouts.rewards)


class RewardModel(nn.Module):
    """Scores whole sequences with a sequence-classification model with one label.

    Without a `tokenizer`, it scores only token IDs. See `RewardModelSpec` for the other arguments.
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
        # RoBERTa's positions include two that no token uses.
        limits = (getattr(config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None))
        self.max_length = max_length or min(filter(None, limits), default=1 << 30)
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

    def forward(self, rows: RowBatch) -> Tensor:
        """Returns (B,) float32 scores, read at each row's last real token. Rows of a group share their prompt."""
        if self._backbone is None:
            logits = self.model(input_ids=rows.token_ids, attention_mask=rows.attention_mask.long()).logits
            return logits.squeeze(-1).float()
        head = _head(self.model)
        return _read(head, head.weight.dtype, self._backbone(rows, last=True).hidden)

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
        rows = RowBatch(
            token_ids=rollouts.token_ids,
            attention_mask=rollouts.attention_mask,
            response_mask=rollouts.response_mask,
            group_ids=rollouts.group_ids,
            inputs=rollouts.inputs if sees else [],
        )
        return self._score_rows(rows, micro_batch_tokens)

    @torch.no_grad()
    def score_texts(
        self, prompts: Sequence[Any], completions: Sequence[str], micro_batch_tokens: int = 16384
    ) -> Tensor:
        """Returns (B,) float32 scores of texts with the model's tokenizer; NaN for texts without tokens.

        Takes B prompts (strings or, with a chat template, conversations) and B completions. A forward pass has at most
        `micro_batch_tokens` tokens.
        """
        rows = [self._shortened(self.encode(p, c)) for p, c in zip(prompts, completions, strict=True)]
        device = next(self.model.parameters()).device
        pad = self.tokenizer.pad_token_id or 0
        empty = torch.tensor([not row for row in rows], device=device)
        rows = [row or [pad] for row in rows]
        token_ids = pad_rows(rows, pad, torch.long).to(device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(token_ids.shape[1], device=device) < lengths[:, None]
        numbers: dict[str, int] = {}
        groups = torch.tensor([numbers.setdefault(str(prompt), len(numbers)) for prompt in prompts], device=device)
        ends = own_ends(token_ids, mask, groups)
        batch = RowBatch(token_ids=token_ids, attention_mask=mask, response_mask=ends, group_ids=groups)
        return self._score_rows(batch, micro_batch_tokens).masked_fill(empty, float("nan"))

    def encode(self, prompt: Any, completion: str) -> list[int]:
        """Returns the token IDs of a prompt and completion for `score_texts`; may be empty."""
        if self.chat_template is None:
            return text_ids(self.tokenizer, prompt + completion)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages = [*turns, {"role": "assistant", "content": completion}]
        template = None if self.chat_template == "default" else self.chat_template
        text = self.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _shortened(self, ids: list[int]) -> list[int]:
        """Returns the last `max_length` tokens, after a leading BOS or CLS, at which encoders read their score."""
        firsts = (getattr(self.tokenizer, f"{name}_token_id", None) for name in ("bos", "cls"))
        kept = int(ids[:1] in [[first] for first in firsts])
        return ids if len(ids) <= self.max_length else ids[:kept] + ids[kept - self.max_length :]

    def _score_rows(self, rows: RowBatch, budget: int) -> Tensor:
        """Returns (B,) scores, with shared prefixes computed once."""
        alone = self._backbone is None or self._backbone.layout in ("packed", "padded")
        layout: Layout = "packed" if alone else "auto"
        return run_micro_batches(lambda part: {"scores": self(part)}, rows, budget, layout)["scores"]


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


def last_rows(trajectory_ids: Tensor) -> Tensor:
    """Returns the (B,) index of the last row of each row's trajectory."""
    index = trajectory_ids.unique(return_inverse=True)[1]
    rows = torch.arange(len(index), device=index.device)
    return rows.clone().scatter_reduce_(0, index, rows, "amax", include_self=False)[index]


def own_ends(token_ids: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """Returns (B, T) bool, True on each row's real tokens from the first one at which rows of its group differ."""
    own = mask.clone()
    for group in groups.unique():
        rows = (groups == group).nonzero().squeeze(1)
        alike = ((token_ids[rows] == token_ids[rows[0]]) & mask[rows]).all(0)
        own[rows, : int(alike.int().cumprod(0).sum())] = False
    return own


def _read(head: Callable[[Tensor], Any], dtype: torch.dtype, hidden: Tensor) -> Tensor:
    """Returns (M,) float32 outputs, in the head's precision: autocast would round close ones to ties."""
    with torch.autocast(hidden.device.type, enabled=False):
        found: Tensor = head(hidden.to(dtype)).squeeze(-1).float()
    return found


def _head(model: Any) -> Any:
    return getattr(model, "score", None)


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, *, centering_coef: float = 0.0
) -> Tensor:
    """Negative log-likelihood of each preference, with an optional centering term.

        loss = -log sigmoid(r_c - r_r - m) + c (r_c + r_r)^2

    Args:
        chosen: (P,) scores r_c of the preferred completions.
        rejected: (P,) scores r_r of the rejected completions.
        margin: (P,) margin m by which the preferred completion is better, in units of score. Defaults to 0.
        centering_coef: c, at least 0. The likelihood depends only on differences; this term determines the sum.

    Returns:
        (P,) losses, not averaged.

    Source: likelihood: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155 (eq. 1); margin: Llama 2,
        https://arxiv.org/abs/2307.09288 (eq. 2); centering: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
        Unlike in these papers, pairs are not averaged per prompt.
    """
    difference = chosen - rejected - (0.0 if margin is None else margin)
    return -F.logsigmoid(difference) + centering_coef * (chosen + rejected) ** 2


# ---- critic ------------------------------------------------------------------------------------------------------


class ValueHead(nn.Linear):
    """A linear layer from (M, D) hidden states to (M,) float32 values."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _read(super().forward, self.weight.dtype, hidden)


def new_value_head(model: Any) -> ValueHead:
    """Creates a head with initial values close to 0: weights with std 1 / (D + 1), bias 0."""
    from lightrl.compat.deepspeed import whole_parameters

    size = model.config.get_text_config().hidden_size
    with whole_parameters():
        head = ValueHead(size, 1)
    nn.init.normal_(head.weight, std=1.0 / (size + 1))
    nn.init.zeros_(head.bias)
    device = next(model.parameters()).device
    return head if device.type == "meta" else head.to(device)


class ValueModel(nn.Module):
    """A critic with a separate backbone, from `load_model`; `layout` as in `ModelSpec`."""

    def __init__(self, backbone: Any, *, layout: Layout = "auto") -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = new_value_head(backbone)
        self.stream = Backbone(backbone, backbone, layout)

    @classmethod
    def from_spec(cls, spec: ModelSpec, *, in_shards: bool = False) -> ValueModel:
        """Loads the backbone of a language model with a new head; `in_shards` as in `load_causal_lm`."""
        return cls(load_model(spec, AutoModel, trainable=True, in_shards=in_shards), layout=spec.layout)

    def forward(self, rows: RowBatch) -> Tensor:
        """Returns (B, T) float32 values of the state before each response token, 0 elsewhere."""
        out = self.stream(replace(rows, routes=[]))
        return out.scatter(self.value_head(out.hidden))
