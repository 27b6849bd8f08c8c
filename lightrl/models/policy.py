"""The policy, and the backbone of every model: (B, T) tensors in, (B, T) tensors out.

`Backbone` runs a batch in the best supported layout and selects hidden states. `PolicyModel` computes everything inside
`forward`, since FSDP2 shards these wrappers as roots, and ZeRO-3 gathers parameters in module calls.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrl.compat.transformers import attention_implementation, has_recurrent_state, router_modules, supports_sdpa
from lightrl.distributed.strategies import gathered
from lightrl.models.loading import fix_rope, load_causal_lm
from lightrl.models.logprobs import Distribution, LogitMap, install_head
from lightrl.models.packing.attention import IMPLEMENTATION
from lightrl.models.packing.streams import LayoutError, TokenStream, make_stream
from lightrl.models.spec import Layout, ModelSpec
from lightrl.models.turns import TOKEN_INPUT, causal_type, harmless_id, placeholder_ids, require_known
from lightrl.records import RowBatch


class PolicyOutput(NamedTuple):
    """Scores of given tokens, all float32, 0 outside the response mask; None if not requested."""

    logprobs: Tensor  # (B, T) of response tokens under the sampling distribution
    entropy: Tensor | None = None  # (B, T) in nats, of the sampling distribution
    values: Tensor | None = None  # (B, T) of the state before each response token
    aux_loss: Tensor | None = None  # scalar load-balancing loss of a mixture-of-experts model
    divergence: Tensor | None = None  # (B, T) of each token's distribution from its teacher's


class PolicyModel(nn.Module):
    """A causal language model from `load_causal_lm` that scores tokens. Its head becomes a `TokenHead`.

    Raises a ValueError if the head is not linear, or if the model doesn't support an explicitly requested layout.
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
        """Scores the response tokens of B sequences. Raises a ValueError if they are not right-padded.

        Log-probs and entropies cover the tokens in the rows' `supports`, if any. Routers use the experts in their
        `routes`. The `entropy`, `values` of the value head, and `divergence` from teachers (see `divergence_from`) are
        optional.
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
    """Yields (Hugging Face name, full tensor) of all parameters of `policy.lm`, LoRA merged, one at a time.

    `W + alpha / r * B A` is computed for one layer at a time, without changing the module. Tied parameters are yielded
    once, under their first name. A value head is excluded. A tensor may share a parameter's memory, and is valid until
    the next one is requested. Collective if parameters are sharded: every rank must iterate to the end.
    """
    if any(hasattr(module, "base_layer") for module in policy.lm.modules()):
        from lightrl.models.lora import named_merged_weights

        yield from named_merged_weights(policy)
        return
    for name, parameter in policy.lm.named_parameters():
        with gathered(parameter) as full:
            yield name, full


# ---- backbone ----------------------------------------------------------------------------------------------------


@dataclass
class BackboneOutput:
    """Hidden states at selected tokens. One state if none is selected, so that heads and collectives still run."""

    hidden: Tensor  # (M, D)
    targets: Tensor  # (M,) int64 index of each state's token in the flattened (B, T) batch
    shape: tuple[int, int]  # (B, T)
    empty: bool = False  # no state is selected; `scatter` then returns zeros with a graph
    aux_loss: Tensor | None = None  # see `PolicyOutput`

    def scatter(self, values: Tensor) -> Tensor:
        """Maps (M,) to (B, T), 0 elsewhere."""
        if self.empty:
            values = values * 0.0
        width = self.shape[1]  # not a view of a flat tensor: FSDP2's output hooks don't support in-place changes
        return values.new_zeros(self.shape).index_put((self.targets // width, self.targets % width), values)


class Backbone:
    """Calls a transformers backbone. Not a module, since it only refers to a module of its owner.

    `body` is the part of `model` that computes hidden states. The class of `model` determines what it supports. Raises
    a ValueError if it doesn't support an explicitly requested layout.
    """

    def __init__(self, model: Any, body: Any, layout: Layout) -> None:
        self.name = type(model).__name__
        self.body = body
        self.layout = layout  # the one in use: the requested one, or padded if the model supports no other
        self.explicit = layout != "auto"
        self.config = model.config
        self.sees = bool(placeholder_ids(model.config)) and hasattr(body, "get_decoder")
        self.num_layers = model.config.get_text_config().num_hidden_layers
        keep_attention_caps(model)
        own = text_attention(model.config, attention_implementation(model.config.get_text_config()))
        self._longest = fix_rope(model)
        self.group: Any = None  # ranks that run their sequences as one stream (`context.py`)
        self._routers: Any = None
        self._restore_attention = partial(model.set_attn_implementation, own)
        if layout != "padded":
            reason = unsupported_reason(model, body)
            if reason is None:
                model.set_attn_implementation(text_attention(model.config, IMPLEMENTATION))
            else:
                self._fall_back(reason)

    def __call__(self, rows: RowBatch, *, last: bool = False) -> BackboneOutput:
        """Returns hidden states at t - 1 for each response token t, or at the `last` token of each row."""
        mask = rows.on_host("attention_mask")
        lengths = mask.sum(1)
        require_known(self.config, int(torch.where(mask, rows.on_host("token_ids"), 0).max()))
        if self._longest is not None and int(lengths.max()) > self._longest:
            raise ValueError(
                f"{self.name} with sequences of {int(lengths.max())} tokens: its positions end at {self._longest}, or "
                "depend on the batch above. Use shorter sequences."
            )
        if any(rows.inputs) and not last:
            from lightrl.models.multimodal import without_unread_media

            rows = without_unread_media(self.config, rows)
        if self.group is not None:
            from lightrl.models.packing.context import run_spread

            return BackboneOutput(*run_spread(self, rows, self.group))
        if self.sees:
            from lightrl.models.multimodal import lent_rows, own_output, runs_on_all_ranks, with_lent

            if runs_on_all_ranks(self.body) and (lent := lent_rows(self.config, rows)):
                output: BackboneOutput = own_output(self._run(*with_lent(rows, lent), last), *rows.token_ids.shape)
                return output
        return self._run(rows, None, last)

    def _run(self, rows: RowBatch, count: int | None, last: bool) -> BackboneOutput:
        """Runs the rows, of which only the first `count` are in the load-balancing loss; None for all."""
        hidden = None  # (B, T) bool, True on placeholders sampled by the policy
        if any(rows.inputs):
            from lightrl.models.multimodal import sampled_placeholders

            if any("token_type_ids" in row for row in rows.inputs) and self.layout != "padded":
                self._fall_back("parts of its images use bidirectional attention")
            hidden = sampled_placeholders(self.config, rows)
        if self.layout != "padded":
            stream = self._stream(rows, last)
            try:
                with self._replaying(rows, stream.source):
                    return self._run_stream(rows, stream, hidden, count)
            except LayoutError as error:
                self._fall_back(str(error))
        with self._replaying(rows, torch.arange(rows.token_ids.numel(), device=rows.token_ids.device)):
            return self._run_padded(rows, hidden, count, last)

    def _replaying(self, rows: RowBatch, places: Tensor) -> Any:
        """Context manager in which the routers use the recorded experts of N tokens of the flattened batch."""
        if all(routes is None for routes in rows.routes):
            return nullcontext()
        from lightrl.records import Routes

        return self.routers.replaying(Routes.at(rows.routes, places, rows.token_ids.shape[1]))

    @property
    def routers(self) -> Any:
        """The `Routers` of a mixture-of-experts model."""
        if self._routers is None:
            from lightrl.models.routing import Routers

            self._routers = Routers(self.body)
        return self._routers

    def _fall_back(self, reason: str) -> None:
        if self.explicit:
            raise ValueError(
                f"layout={self.layout!r}: not supported by {self.name}, because {reason}. Use 'auto' or 'padded'."
            )
        warnings.warn(f"{self.name} runs in the padded layout, which is slower: {reason}.", stacklevel=2)
        self.layout = "padded"
        self._restore_attention()

    # ---- layouts --------------------------------------------------------------------------------------------------

    def _stream(self, rows: RowBatch, last: bool) -> TokenStream:
        ids, spans = rows.on_host("token_ids"), None
        if any(rows.inputs):
            from lightrl.models.multimodal import marked_tokens

            ids, spans = marked_tokens(self.config, rows)
        return make_stream(
            ids,
            rows.on_host("attention_mask"),
            rows.on_host("response_mask"),
            last=last,
            share=self.layout != "packed" and rows.group_ids is not None,
            spans=spans,
            routes=rows.routes,
            device=rows.token_ids.device,
        )

    def _run_stream(
        self, rows: RowBatch, stream: TokenStream, hidden: Tensor | None, count: int | None
    ) -> BackboneOutput:
        def of_stream(x: Tensor) -> Tensor:
            return x.reshape(1, -1).index_select(1, stream.source)

        ids = of_stream(rows.token_ids)
        positions, inputs = stream.position_ids.unsqueeze(0), no_token_inputs(self.body, ids)
        if any(rows.inputs):
            from lightrl.models.multimodal import media_positions, merged_inputs

            shown = stream.shown if len(stream.targets) > 0 else []  # an empty stream has no media
            merged = merged_inputs(rows.inputs, shown, stream.shape, ids.device, causal_type(self.config))
            inputs |= {name: of_stream(x) if name.endswith(TOKEN_INPUT) else x for name, x in merged.items()}
            own = media_positions(self.body, rows.token_ids, rows.inputs)
            if own is not None:
                positions = own.flatten(1).index_select(1, stream.source).unsqueeze(1)
        hidden = None if hidden is None else of_stream(hidden)
        out = self.call(ids, hidden, position_ids=positions, stream=stream, **inputs)
        if stream.num_calls != self.num_layers:
            raise LayoutError(f"only {stream.num_calls} of its {self.num_layers} layers use the replaced attention")
        counted = None if count is None else (stream.source < count * stream.shape[1]).long().unsqueeze(0)
        return self._output(out, stream.read, stream.targets, stream.shape, counted)

    def call(self, ids: Tensor, hidden: Tensor | None, **inputs: Any) -> Any:
        """Runs the body. Tokens at `hidden` are embedded by their IDs even if they are placeholders."""
        if "stream" in inputs:  # transformers builds no mask if given a 4-D one
            inputs["attention_mask"] = torch.empty(1, 1, 1, 1, device=ids.device)
        if hidden is None:
            return self.body(input_ids=ids, use_cache=False, **inputs)
        from lightrl.models.multimodal import true_embeddings

        with true_embeddings(self.body, hidden, ids):
            return self.body(input_ids=ids.masked_fill(hidden, harmless_id(self.config)), use_cache=False, **inputs)

    def _run_padded(self, rows: RowBatch, hidden: Tensor | None, count: int | None, last: bool) -> BackboneOutput:
        shape, device = (rows.token_ids.shape[0], rows.token_ids.shape[1]), rows.token_ids.device
        text = self.config.get_text_config()
        chosen = getattr(text, "index_topk", None)
        if "indexed_attention" in (getattr(text, "layer_types", None) or ()) and chosen and shape[1] > chosen:
            raise ValueError(
                f"{self.name} with sequences of {shape[1]} tokens: its attention selects the best {chosen} keys "
                "(index_topk), and transformers selects others in a padded batch. Use sequences of at most that length."
            )
        inputs = no_token_inputs(self.body, rows.token_ids)
        if any(rows.inputs):
            from lightrl.models.multimodal import media_positions, merged_inputs

            inputs |= merged_inputs(rows.inputs, range(len(rows)), shape, device, causal_type(self.config))
            own = media_positions(self.body, rows.token_ids, rows.inputs)
            inputs |= {} if own is None else {"position_ids": own}
        ids = rows.token_ids.masked_fill(~rows.attention_mask, harmless_id(self.config))  # pads may have no embedding
        out = self.call(ids, hidden, attention_mask=rows.attention_mask.long(), **inputs)
        if last:
            starts = torch.arange(len(rows), device=device) * shape[1]
            targets = read = starts + rows.attention_mask.sum(1).clamp(min=1) - 1
        else:
            wanted = rows.on_host("response_mask").to(torch.bool, copy=True)
            wanted[:, :1] = False
            targets = wanted.reshape(-1).nonzero().squeeze(1).to(device, non_blocking=True)
            read = targets - 1
        counted = rows.attention_mask
        if count is not None:
            counted = counted.clone()
            counted[count:] = False
        return self._output(out, read, targets, shape, counted)

    # ---- outputs --------------------------------------------------------------------------------------------------

    def _output(
        self, out: Any, read: Tensor, targets: Tensor, shape: tuple[int, int], mask: Tensor | None
    ) -> BackboneOutput:
        hidden = out.last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1])
        empty = len(targets) == 0
        if empty:
            read = targets = targets.new_zeros(1)
        hidden = hidden.index_select(0, read)
        if self.sees:
            from lightrl.models.multimodal import idle_parameters

            hidden = hidden + idle_parameters(self.body)
        aux_loss = None
        if getattr(self.body.config.get_text_config(), "output_router_logits", False):
            from lightrl.models.routing import load_balancing_loss

            aux_loss = load_balancing_loss(self.body, out, mask)
        return BackboneOutput(hidden, targets, shape, empty, aux_loss)

    @torch.no_grad()
    def check_logits(self, lm: Any, logit_map: LogitMap) -> None:
        """Compares eight log-probs with the model's own forward pass; a ValueError means that it changes logits."""
        vocabulary = lm.config.get_text_config().vocab_size
        ids = torch.arange(8, device=lm.device) % vocabulary
        head = lm.get_output_embeddings()
        extra = no_token_inputs(self.body, ids[None])
        hidden = self.body(input_ids=ids[None], use_cache=False, **extra).last_hidden_state[0]
        own, _ = head(hidden, targets=ids, distribution=Distribution(logit_map=logit_map))
        logits = lm(input_ids=ids[None], use_cache=False, **extra).logits[0]
        plain = F.log_softmax(logits.float(), -1).gather(1, ids[:, None]).squeeze(1)
        tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.2
        worst = (own - plain).abs().max().item()
        if worst > tolerance:
            raise ValueError(
                f"{self.name}: log-probs from its head differ by {worst:.3g} from its own forward pass, so it changes "
                "logits in an unknown way. Use a model from another family."
            )


def no_token_inputs(body: Any, token_ids: Tensor) -> dict[str, Tensor]:
    """Returns `token_type_ids` of plain text, which vision-language models may require in training.

    Text models get none: GPT-2 and similar models would add the embedding of token 0 everywhere.
    """
    insists = bool(placeholder_ids(body.config)) and TOKEN_INPUT in inspect.signature(body.forward).parameters
    return {TOKEN_INPUT: torch.full_like(token_ids, causal_type(body.config))} if insists else {}


def unsupported_reason(lm: Any, body: Any) -> str | None:
    """Returns why a model can't run packed, according to its class and config; None if it can."""
    config = lm.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    checks = {
        "its attention can't be replaced": not supports_sdpa(lm),
        "it has a recurrent state": has_recurrent_state(lm),
        f"it has layers of type {sorted(layer_types)}": not layer_types <= {"full_attention", "sliding_attention"},
        "it doesn't accept position_ids": "position_ids" not in inspect.signature(body.forward).parameters,
        "its attention has a distance bias (ALiBi)": bool(getattr(config, "alibi", False)),
        "it caps attention logits": getattr(config, "attn_logit_softcapping", None) is not None,
        "it uses chunked attention": getattr(config, "attention_chunk_size", None) is not None,
        "it uses bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False))
        or not getattr(config, "is_causal", True),
        "it is an encoder-decoder": getattr(config, "is_encoder_decoder", False),
    }
    return next((reason for reason, true in checks.items() if true), None)


def keep_attention_caps(lm: Any) -> None:
    """Switches to eager attention if the model caps attention logits, which transformers' SDPA silently ignores."""
    config = lm.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None and attention_implementation(config) == "sdpa":
        lm.set_attn_implementation(text_attention(lm.config, "eager"))


def text_attention(config: Any, attention: str) -> str | dict[str, str]:
    """Returns an attention implementation only for the language model, not for vision or audio encoders."""
    text = config.get_text_config()
    if text is config:
        return attention
    return {name: attention for name in config.sub_configs if getattr(config, name, None) is text}
