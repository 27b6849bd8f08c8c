"""The weights of a plain Llama-shaped model, and its forward with attention left open: what `LeanDecoder` runs.

Projections of one input are one product: the modules' weights become views of a common matrix, so loading weights into
the modules loads them here and no memory is spent.

Letters: T packed tokens, H query heads, K key heads, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LeanModel"]

_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_ROTARY = {"default", "linear", "llama3", "yarn"}  # tables that do not depend on the length of the sequence


class _Layer:
    """Weights of one decoder layer; `attention_in` and `mlp_in` are the joint projections."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_in = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.attention_out = (attention.o_proj.weight.t(), attention.o_proj.bias)
        self.mlp_in = _join([mlp.gate_proj, mlp.up_proj])
        self.mlp_out = (mlp.down_proj.weight.t(), mlp.down_proj.bias)
        self.activation = mlp.act_fn
        self.attention_norm = layer.input_layernorm
        self.mlp_norm = layer.post_attention_layernorm
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None


def _join(projections: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for several projections, which become views of them."""

    def joined(parameters: list[Any]) -> Tensor:
        whole = torch.cat([p.data for p in parameters])
        for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
        return whole

    biases = [p.bias for p in projections]
    return joined([p.weight for p in projections]), None if biases[0] is None else joined(biases)


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.rsqrt(size.square_().div_(x.shape[-1]).add_(norm.variance_epsilon)) * norm.weight


class LeanModel:
    """The weights of a model in the form in which `LeanDecoder` uses them.

    Args:
        model: one that `fits`. Its projections become views; it keeps working, and loading into its parameters in
            place loads here too.
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.embedding = model.model.embed_tokens.weight
        self.head = model.lm_head.weight
        self.norm = model.model.norm
        self.rotary = model.model.rotary_emb
        self.layers = [_Layer(layer) for layer in model.model.layers]
        attention = model.model.layers[0].self_attn
        self.head_dim, self.scale = attention.head_dim, attention.scaling
        self.heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.device = self.embedding.device

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the model is of a known family, in float32, with full attention and fixed rotary tables."""
        config = model.config
        if type(model).__name__ not in _FAMILIES or model.dtype != torch.float32:
            return False
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        sliding = type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None
        plain = all(type(m) is nn.Linear for n, m in model.named_modules() if n.endswith(("_proj", "lm_head")))
        rotary = getattr(model.model.rotary_emb, "rope_type", None) in _ROTARY
        return plain and rotary and not sliding and layer_types == {"full_attention"} and model.lm_head.bias is None

    def rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, (length, 1, D) each; sin's first half is negated so that `roll` serves as `rotate_half`."""
        positions = torch.arange(length, device=self.device)[None]
        cos, sin = self.rotary(self.embedding[:1], positions)
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return cos[0, :, None], sin[0, :, None]

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Any, last: Tensor | None) -> Tensor:
        """(T,) tokens -> (T, V) logits, or those of the positions `last`.

        Args:
            tokens: (T,). cos, sin: (T, 1, D) of their positions.
            attend: (layer number, q (T, H, D), k and v (T, K, D)) -> (T, H * D).
            last: positions whose logits are wanted; None for all.
        """
        queries_and_keys = self.heads + self.kv_heads
        h = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            x = F.linear(_rms_norm(h, layer.attention_norm), *layer.attention_in)
            x = x.view(len(tokens), -1, self.head_dim)
            rotated, v = x[:, :queries_and_keys], x[:, queries_and_keys:]
            if layer.head_norms is not None:
                q, k = rotated[:, : self.heads], rotated[:, self.heads :]
                rotated = torch.cat([_rms_norm(q, layer.head_norms[0]), _rms_norm(k, layer.head_norms[1])], 1)
            rotated = (rotated * cos).addcmul_(rotated.roll(self.head_dim // 2, -1), sin)
            x = attend(number, rotated[:, : self.heads], rotated[:, self.heads :], v)
            _add_product(h, x, *layer.attention_out)
            x = F.linear(_rms_norm(h, layer.mlp_norm), *layer.mlp_in)
            gate, up = x.chunk(2, -1)
            _add_product(h, layer.activation(gate).mul_(up), *layer.mlp_out)
        h = h if last is None else h[last]
        return F.linear(_rms_norm(h, self.norm), self.head)


def _add_product(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """h += x weight + bias."""
    h.addmm_(x, weight)
    if bias is not None:
        h.add_(bias)
