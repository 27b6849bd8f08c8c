"""The weights of a plain Llama-shaped model, and its forward with attention left open: what `CPUDecoder` runs.

Projections of one input are one product of a common matrix, which lies transposed, (in, out): with few tokens that is a
fifth to a half faster. The modules' weights become views of it, so loading weights into the modules loads them here and
no memory is spent.

Shapes: T packed tokens, H query heads, K key heads, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_ROTARY = {"default", "linear", "llama3", "yarn", "fixed"}  # tables that do not depend on the length of the sequence


class _Norm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, n wide, as x / hypot(|x| / sqrt(n), sqrt(eps))."""

    def __init__(self, norm: Any) -> None:
        self.weight = norm.weight
        self.factor = norm.weight.new_full((1,), norm.weight.numel() ** -0.5)
        self.least = norm.weight.new_full((1,), norm.variance_epsilon**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(self.factor).hypot_(self.least)
        return (x / size).mul_(self.weight)


class _Layer:
    """Weights of one decoder layer; `attention_in` and `mlp_in` are the joint projections."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_in = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.attention_out = _join([attention.o_proj])
        self.mlp_in = _join([mlp.gate_proj, mlp.up_proj])
        self.mlp_out = _join([mlp.down_proj])
        self.activation = mlp.act_fn.forward  # without the hooks' part of a call
        self.attention_norm = _Norm(layer.input_layernorm)
        self.mlp_norm = _Norm(layer.post_attention_layernorm)
        self.head_norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if hasattr(attention, "q_norm") else None


def _join(projections: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One (in, out) weight and one bias for several projections, which become views of them."""
    sizes, first = [p.out_features for p in projections], projections[0]
    weight = first.weight.new_empty(first.in_features, sum(sizes))
    for projection, part in zip(projections, weight.split(sizes, 1), strict=True):
        copy_by_rows(part.t(), projection.weight.data)
        projection.weight.data = part.t()
    if first.bias is None:
        return weight, None
    bias = torch.cat([p.bias.data for p in projections])
    for projection, part in zip(projections, bias.split(sizes), strict=True):
        projection.bias.data = part
    return weight, bias


def copy_by_rows(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)` of matrices, a few rows at a time: where one lies transposed both then stay in cache."""
    for to, rows in zip(target.split(64), source.split(64), strict=True):
        to.copy_(rows)


class CPUModel:
    """The weights of a model in the form in which `CPUDecoder` uses them.

    Args:
        model: one that `fits`. Its projections become views; it keeps working, and loading into its parameters in
            place loads here too.
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.embedding = model.model.embed_tokens.weight
        self.head = model.lm_head.weight
        self.norm = _Norm(model.model.norm)
        self.rotary = model.model.rotary_emb
        self.layers = [_Layer(layer) for layer in model.model.layers]
        attention = model.model.layers[0].self_attn
        self.head_dim = attention.head_dim
        self.scale = attention.scaling
        self.heads = self.config.num_attention_heads
        self.kv_heads = self.config.num_key_value_heads
        self.device = self.embedding.device

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the model is on a CPU, of a known family, in float32, with full attention and fixed rotary tables."""
        config = model.config
        if type(model).__name__ not in _FAMILIES or model.dtype != torch.float32 or model.device.type != "cpu":
            return False
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        sliding = type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None
        plain = all(type(m) is nn.Linear for n, m in model.named_modules() if n.endswith(("_proj", "lm_head")))
        rotary = getattr(model.model.rotary_emb, "rope_type", None) in _ROTARY
        return plain and rotary and not sliding and layer_types == {"full_attention"} and model.lm_head.bias is None

    def rotary_table(self, length: int) -> Tensor:
        """(length, 2, (H + 2 K) D): cos and sin for queries, keys and values side by side, at each position.

        Those of queries are multiplied by the scale of attention; values are not rotated (1 and 0). The first half of
        each head's sin is negated.
        """
        positions = torch.arange(length, device=self.device)[None]
        cos, sin = (x[0] for x in self.rotary(self.embedding[:1], positions))
        half = self.head_dim // 2
        both = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)], 1)
        values = torch.stack([torch.ones_like(cos), torch.zeros_like(sin)], 1)
        return torch.cat([both * self.scale] * self.heads + [both] * self.kv_heads + [values] * self.kv_heads, 2)

    def forward(
        self, tokens: Tensor, positions: Tensor, table: Tensor, attend: Any, last: Tensor | None, space: Workspace
    ) -> Tensor:
        """(T,) tokens -> (T, V) logits, or those of the positions `last`.

        Args:
            tokens, positions: (T,). table: of `rotary_table`.
            attend: (layer number, q (T, H, D) with the scale in it, k and v (T, K, D)) -> (T, H * D).
            last: positions whose logits are wanted; None for all.
            space: for T tokens.
        """
        torch.index_select(table, 0, positions, out=space.rotary)
        h = self.embedding.index_select(0, tokens)
        for number, layer in enumerate(self.layers):
            _product(layer.attention_norm(h), *layer.attention_in, space.x)
            if layer.head_norms is not None:
                for x, norm in zip((space.x_q, space.x_k), layer.head_norms, strict=True):
                    x.copy_(norm(x))
            torch.mul(space.x, space.cos, out=space.rotated)
            space.first.addcmul_(space.x_second, space.sin_first)
            space.second.addcmul_(space.x_first, space.sin_second)
            _add_product(h, attend(number, space.q, space.k, space.v), *layer.attention_out)
            _product(layer.mlp_norm(h), *layer.mlp_in, space.wide)
            _add_product(h, layer.activation(space.gate).mul_(space.up), *layer.mlp_out)
        h = h if last is None else h[last]
        return F.linear(self.norm(h), self.head)


class Workspace:
    """What the layers of a forward of T tokens compute into, and views of it.

    Made once for many steps: where steps are small, making a view takes as long as computing.
    """

    def __init__(self, model: CPUModel, count: int) -> None:
        new, parts, d = model.embedding.new_empty, (model.heads, model.kv_heads, model.kv_heads), model.head_dim
        halves = (count, -1, 2, d // 2)
        self.rotary = new(count, 2, sum(parts) * d)
        self.cos, sin = self.rotary.unbind(1)
        self.sin_first, self.sin_second = sin.view(halves).unbind(2)
        self.x, self.rotated = new(2, count, sum(parts) * d).unbind()
        self.x_q, self.x_k, _ = self.x.view(count, -1, d).split_with_sizes(parts, 1)
        self.x_first, self.x_second = self.x.view(halves).unbind(2)
        self.first, self.second = self.rotated.view(halves).unbind(2)
        self.q, self.k, self.v = self.rotated.view(count, -1, d).split_with_sizes(parts, 1)
        self.wide = new(count, model.layers[0].mlp_in[0].shape[1])
        self.gate, self.up = self.wide.view(count, 2, -1).unbind(1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x weight + bias."""
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _add_product(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """h += x weight + bias."""
    h.addmm_(x, weight)
    if bias is not None:
        h.add_(bias)
