"""The policy: (B, T) tensors in, (B, T) tensors out.

Everything is computed inside `forward`, since FSDP2 shards these wrappers as roots, and ZeRO-3 gathers parameters in
module calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightrl.compat.transformers import router_modules
from lightrl.distributed.strategies import gathered
from lightrl.models.backbone import Backbone, BackboneOutput
from lightrl.models.loading import load_causal_lm
from lightrl.models.logprobs import Distribution, LogitMap, install_head
from lightrl.models.spec import Layout, ModelSpec
from lightrl.records import RowBatch


class PolicyOutput(NamedTuple):
    """Scores of given tokens, all float32, 0 outside the response mask.

    Attributes:
        logprobs: (B, T) log-probs of response tokens under the sampling distribution.
        entropy: (B, T) entropies in nats of the sampling distribution. None if not requested.
        values: (B, T) values of the state before each response token. None if not requested.
        aux_loss: Scalar load-balancing loss of a mixture-of-experts model. None for other models.
        divergence: (B, T) divergence of each response token's distribution from its teacher's. None if not requested.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    aux_loss: Tensor | None = None
    divergence: Tensor | None = None


class PolicyModel(nn.Module):
    """A causal language model that scores tokens.

    Args:
        lm: Model from `load_causal_lm`. Its head becomes a `TokenHead`.
        layout: See `ModelSpec`.

    Raises:
        ValueError: The head is not linear, or the model doesn't support an explicitly requested layout.
    """

    def __init__(self, lm: Any, *, layout: Layout = "auto") -> None:
        super().__init__()
        install_head(lm)
        self.lm = lm
        self.value_head: Any = None  # a shared critic's
        self.logit_map = LogitMap.of(lm.config.get_text_config())
        body = lm.base_model if lm.base_model is not lm else lm.model  # Llama 4's prefix is not an attribute
        self.stream = Backbone(lm, body, layout)
        self._checked = False

    @classmethod
    def from_spec(cls, spec: ModelSpec, *, trainable: bool, in_shards: bool = False) -> PolicyModel:
        """Loads a language model. See `load_causal_lm` for arguments."""
        return cls(load_causal_lm(spec, trainable=trainable, in_shards=in_shards), layout=spec.layout)

    def forward(
        self,
        rows: RowBatch,
        *,
        entropy: bool = False,
        values: bool = False,
        divergence: Callable[..., Tensor] | None = None,
    ) -> PolicyOutput:
        """Scores the response tokens.

        Args:
            rows: B sequences. Log-probs and entropies cover the tokens in their `supports`, if any. Routers use the
                experts in their `routes`, if any.
            entropy: Compute entropies.
            values: Compute values with the value head.
            divergence: Divergence from teachers, see `divergence_from`.

        Raises:
            ValueError: Rows are not right-padded.
        """
        if not self._checked:
            self._checked = True
            self.stream.check_logits(self.lm, self.logit_map)
        out = self.stream(rows)
        tokens = rows.token_ids.reshape(-1)[out.targets]
        head = self.lm.get_output_embeddings()
        picked, entropies = head(out.hidden, targets=tokens, entropy=entropy, distribution=self.distribution(rows, out))
        read = self.value_head(out.hidden) if values and self.value_head is not None else None
        apart = None
        if divergence is not None:
            apart = divergence(picked, out, head, partial(self.distribution, rows, out))
        return PolicyOutput(
            out.scatter(picked),
            None if entropies is None else out.scatter(entropies),
            None if read is None else out.scatter(read),
            out.aux_loss,
            None if apart is None else out.scatter(apart),
        )

    def distribution(self, rows: RowBatch, out: BackboneOutput, here: Tensor | None = None) -> Distribution:
        """Returns the sampling distribution of the tokens, or of those `here`."""
        support = None
        if any(each is not None for each in rows.supports):
            from lightrl.records import Support

            targets = out.targets if here is None else out.targets[here]
            support = Support.at(rows.supports, targets, out.shape[1])
        return Distribution(rows.temperature, self.logit_map, support)

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture-of-experts model."""
        return bool(router_modules(self.lm))

    def as_reference(self) -> AbstractContextManager[None]:
        """Context manager in which the policy is its LoRA reference: the base without the adapter."""
        from lightrl.models.lora import as_reference

        return as_reference(self.lm)


@torch.no_grad()
def named_hf_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters of the policy's language model under their Hugging Face names, LoRA merged, one at a time.

    `W + alpha / r * B A` is computed for one layer at a time, without changing the module. Tied parameters are yielded
    once, under their first name. A value head is excluded. Collective if parameters are sharded: every rank must
    iterate to the end.

    Args:
        policy: `PolicyModel` (or any object with `lm`).

    Yields:
        (name, full tensor). The tensor may share a parameter's memory, and is valid until the next one is requested.
    """
    if any(hasattr(module, "base_layer") for module in policy.lm.modules()):
        from lightrl.models.lora import named_merged_weights

        yield from named_merged_weights(policy)
        return
    for name, parameter in policy.lm.named_parameters():
        with gathered(parameter) as full:
            yield name, full
