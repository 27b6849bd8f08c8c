"""The policy: (B, T) tensors in, (B, T) tensors out.

Everything is computed inside `forward`, since FSDP2 shards these wrappers as roots, and ZeRO-3 gathers parameters in
module calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrl.compat.transformers import block_class_names, router_modules
from lightrl.models.backbone import Backbone, BackboneOutput
from lightrl.models.loading import load_causal_lm
from lightrl.models.logprobs import LogitMap, install_head
from lightrl.models.spec import Layout, ModelSpec
from lightrl.records import HostRows, Routes, Support

if TYPE_CHECKING:
    from lightrl.models.lora import Gather
    from lightrl.models.teachers import Lesson


class PolicyOutput(NamedTuple):
    """Scores of given tokens, all float32, 0 outside the response mask.

    Attributes:
        logprobs: (B, T) log-probs of response tokens under the sampling distribution.
        entropy: (B, T) entropies in nats of the sampling distribution. None if not requested.
        values: (B, T) values of the state before each response token. None if not requested.
        aux_loss: Scalar load-balancing loss of a mixture-of-experts model. None for other models.
        divergence: (B, T) divergence of each response token's distribution from its teacher's. None without lessons.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    aux_loss: Tensor | None = None
    divergence: Tensor | None = None


class StreamModel(nn.Module):
    """A model whose backbone runs (B, T) rows as a stream of tokens."""

    _backbone: Backbone

    @property
    def layout(self) -> Layout:
        """The layout in use: the requested one, or padded if the model supports no other."""
        return self._backbone.layout

    def spread(self, group: Any) -> None:
        """Enables context parallelism; see `Backbone.spread`."""
        self._backbone.spread(group)


class PolicyModel(StreamModel):
    """A causal language model that scores tokens.

    Args:
        lm: Model from `load_causal_lm`. Its head becomes a `TokenHead`.
        value_head: Put a linear critic on the same backbone.
        layout: See `ModelSpec`.

    Raises:
        ValueError: The head is not linear, or the model doesn't support an explicitly requested layout.
    """

    def __init__(self, lm: Any, *, value_head: bool = False, layout: Layout = "auto") -> None:
        super().__init__()
        install_head(lm)
        self.lm = lm
        self.value_head = new_value_head(lm) if value_head else None
        self.logit_map = LogitMap.of(lm.config.get_text_config())
        body = lm.base_model if lm.base_model is not lm else lm.model  # Llama 4's prefix is not an attribute
        self._backbone = Backbone(lm, body, layout)
        self._checked = False

    @classmethod
    def from_spec(
        cls, spec: ModelSpec, *, trainable: bool, in_shards: bool = False, value_head: bool = False
    ) -> PolicyModel:
        """Loads a language model. See `load_causal_lm` for arguments."""
        lm = load_causal_lm(spec, trainable=trainable, in_shards=in_shards)
        return cls(lm, value_head=value_head, layout=spec.layout)

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        *,
        group_ids: Tensor | None = None,
        host: HostRows | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
        values: bool = False,
        inputs: list[dict[str, Any]] | None = None,
        supports: Sequence[Support | None] = (),
        routes: Sequence[Routes | None] = (),
        lessons: Sequence[Lesson] = (),
        divergence: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> PolicyOutput:
        """Scores the response tokens.

        Args:
            token_ids: (B, T) int64, right-padded.
            attention_mask: (B, T) bool.
            response_mask: (B, T) bool. Token 0 has no preceding token and gets 0.
            group_ids: (B,) int64. None shares no prefixes. Otherwise, rows of all groups may share them.
            host: The same four tensors in host memory, which avoids a synchronization. Defaults to copying them.
            temperature: Temperature of the sampling distribution, above 0.
            entropy: Compute entropies.
            values: Compute values with the value head.
            inputs: B dictionaries of additional model inputs, `{}` for text.
            supports: B supports of the tokens' distributions, as in `Rollouts`, over which log-probs and entropies are
                computed. None entries, or an empty sequence, use the whole vocabulary.
            routes: B records of the experts to use, as in `Rollouts`. None entries, or an empty sequence, let the
                routers choose.
            lessons: Teachers' distributions at response tokens, each in at most one lesson.
            divergence: Divergence from the lessons, see `chunked_divergence`.

        Raises:
            ValueError: Rows are not right-padded.
        """
        if not self._checked:
            self._checked = True
            self._backbone.check_logits(self.lm, self.logit_map)
        out = self._backbone(token_ids, attention_mask, response_mask, group_ids, inputs, host, routes)
        tokens = token_ids.reshape(-1)[out.targets]
        settings = self._head_settings(out, supports, temperature)
        head = self.lm.get_output_embeddings()
        picked, entropies = head(out.hidden, targets=tokens, entropy=entropy, **settings)
        read = read_values(self.value_head, out.hidden) if values and self.value_head is not None else None
        apart = None
        if divergence is not None:
            from lightrl.models.teachers import divergence_from

            settings_at = partial(self._head_settings, out, supports, temperature)
            apart = divergence_from(picked, lessons, out, token_ids.numel(), head, settings_at, divergence)
        return PolicyOutput(
            out.scatter(picked),
            None if entropies is None else out.scatter(entropies),
            None if read is None else out.scatter(read),
            out.aux_loss,
            None if apart is None else out.scatter(apart),
        )

    @torch.no_grad()
    def teach(self, rows: Any, top: int | None = None) -> Lesson:
        """Returns the model's distributions at the response tokens of B rows (`Experience`, `Rollouts`), as a teacher.

        With `top`, only the top-k tokens. The full distribution includes the head itself, which must not be sharded.
        """
        from lightrl.models.teachers import Lesson, TeacherStates, chunked_top

        out = self._backbone(
            rows.token_ids, rows.attention_mask, rows.response_mask, rows.group_ids, rows.inputs, rows.host_rows()
        )
        head = self.lm.get_output_embeddings()
        if top is None:
            return Lesson(out.targets, TeacherStates(out.hidden, head.weight, head.bias, self.logit_map))
        settings = self._head_settings(out, rows.supports, rows.temperature)
        return Lesson(out.targets, head(out.hidden, compute=chunked_top, count=top, **settings))

    def _head_settings(
        self, out: BackboneOutput, supports: Sequence[Support | None], temperature: float, here: Tensor | None = None
    ) -> dict[str, Any]:
        """Settings of the sampling distribution of the tokens, or of those `here`."""
        targets = out.targets if here is None else out.targets[here]
        support = Support.at(supports, targets, out.shape[1]) if supports else None
        return {"temperature": temperature, "logit_map": self.logit_map, "support": support}

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture-of-experts model."""
        return bool(router_modules(self.lm))

    def agreed_routes(self, token_ids: Tensor) -> list[Routes | None]:
        """Returns arbitrary but fixed experts for (B, T) tokens, to compare engine and trainer."""
        return [Routes(experts) for experts in self._backbone.routers.arbitrary(*token_ids.shape)]

    def blocks(self) -> list[nn.Module]:
        """Returns the transformer blocks, as FSDP2 shards them."""
        return transformer_blocks(self.lm)

    def as_reference(self) -> AbstractContextManager[None]:
        """Context manager in which the policy is its LoRA reference: the base without the adapter."""
        from lightrl.models.lora import as_reference

        return as_reference(self.lm)


@torch.no_grad()
def named_hf_weights(policy: Any, gather: Gather | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters of the policy's language model under their Hugging Face names, LoRA merged, one at a time.

    `W + alpha / r * B A` is computed for one layer at a time, without changing the module. Tied parameters are yielded
    once, under their first name. A value head is excluded.

    Args:
        policy: `PolicyModel` (or any object with `lm`).
        gather: Returns a context manager around the full tensor of a sharded parameter. If it is collective, every rank
            must iterate to the end. Defaults to none, for unsharded parameters.

    Yields:
        (name, full tensor). The tensor may be a parameter itself, and is valid until the next one is requested.
    """
    gather = gather or nullcontext
    if any(hasattr(module, "base_layer") for module in policy.lm.modules()):
        from lightrl.models.lora import named_merged_weights

        yield from named_merged_weights(policy, gather)
        return
    for name, parameter in policy.lm.named_parameters():
        with gather(parameter) as full:
            yield name, full


def new_value_head(model: Any) -> nn.Linear:
    """Creates a linear head with initial values close to 0: weights with std 1 / (D + 1), bias 0."""
    from lightrl.compat.deepspeed import whole_parameters

    size = model.config.get_text_config().hidden_size
    with whole_parameters():
        head = nn.Linear(size, 1)
    nn.init.normal_(head.weight, std=1.0 / (size + 1))
    nn.init.zeros_(head.bias)
    device = next(model.parameters()).device
    return head if device.type == "meta" else head.to(device)


def read_values(head: Any, hidden: Tensor) -> Tensor:
    """Returns (M,) float32 values or rewards, in the head's precision: autocast would round close ones to ties."""
    with torch.autocast(hidden.device.type, enabled=False):
        values: Tensor = head(hidden.to(head.weight.dtype)).squeeze(-1).float()
    return values


def transformer_blocks(model: Any) -> list[nn.Module]:
    """Returns modules of the classes that the model declares indivisible."""
    names = block_class_names(model)
    return [module for module in model.modules() if type(module).__name__ in names]
