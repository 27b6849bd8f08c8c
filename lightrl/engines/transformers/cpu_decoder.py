"""A fast decoder for float32 Llama-style models on a CPU, which uses the model's weights but not its modules.

Three things make it several times faster than the model's forward pass for small steps. All completions of a prompt
share its KV cache, and one matrix product computes the attention scores of a group. The last live rows replace
finished ones, so the batch is always dense. `CPUModel` needs few operations per layer. `benchmarks/cpu_kernels.py`
measures the speedup.

Attention uses plain batched products, which are 3 to 10 times faster on a CPU than `scaled_dot_product_attention` with
one query per row. Keys are stored transposed, (D, L) and (D, C), which makes their product up to twice as fast.

Shapes: P live prompts, G maximum live completions per prompt, R live rows, L prompt tokens, C completion tokens,
T packed tokens, H query heads, K key heads, Q = H / K, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrl.engines.transformers.decoders import Decoder
from lightrl.records import Routes

_FIRST_COLUMNS = 64  # initial capacity in completion tokens, doubled when full
_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_ROTARY = {"default", "linear", "llama3", "yarn", "fixed"}  # tables independent of sequence length


class CPUDecoder(Decoder):
    """A decoder whose groups share the KV cache of their prompt. See `reserve` for the lengths, in tokens."""

    refills = True
    takes_media = False
    prefill_tokens = 8192

    def __init__(self, model: CPUModel, longest: int, new_tokens: int) -> None:
        self.model = model
        self.columns = new_tokens
        self.rotary = model.rotary_table(longest)
        layers, kv, d = len(model.layers), model.kv_heads, model.head_dim
        columns = min(new_tokens, _FIRST_COLUMNS)
        self.prompt_k = self.model.embedding.new_zeros(layers, 0, kv, d, 0)  # (layers, P, K, D, L)
        self.prompt_v = self.model.embedding.new_zeros(layers, 0, kv, 0, d)  # (layers, P, K, L, D)
        self.new_k = self.model.embedding.new_zeros(layers, 0, kv, d, columns)  # (layers, rows, K, D, C)
        self.new_v = self.model.embedding.new_zeros(layers, 0, kv, columns, d)  # (layers, rows, K, C, D)
        self.prompt_lengths: list[int] = []
        self.owner: list[int] = []  # index of each row's prompt in prompt_k
        self.filled: list[int] = []  # used columns of new_k and new_v per row
        self.positions = torch.empty(0, dtype=torch.long, device=model.device)

    def tokens_held(self, prompt_tokens: int, copies: int, new_tokens: int) -> int:
        """Counts the prompt once per group."""
        return prompt_tokens + copies * new_tokens

    def reserve(self, longest: int, new_tokens: int) -> None:
        if longest > len(self.rotary):
            self.rotary = self.model.rotary_table(longest)
        self.columns = max(self.columns, new_tokens)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        inputs: dict[str, Any],
        routes: Sequence[Routes | None] = (),
    ) -> Tensor:
        device, first = self.model.device, len(self.prompt_lengths)
        lengths = [len(prompt) for prompt in prompts]
        self._make_room(lengths, copies)
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        runs = [(length, len(list(run))) for length, run in groupby(lengths)]

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs, token, place = [], 0, first
            for length, count in runs:  # one kernel per run of equal lengths, without padding
                rows = slice(token, token + length * count)
                q1, k1, v1 = (x[rows].view(count, length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
                self.prompt_k[number, place : place + count, :, :, :length] = k1.transpose(2, 3)
                self.prompt_v[number, place : place + count, :, :length] = v1
                gqa = q1.shape[1] != k1.shape[1]
                out = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, scale=1.0, enable_gqa=gqa)
                outs.append(out.transpose(1, 2).reshape(length * count, -1))
                token, place = token + length * count, place + count
            return torch.cat(outs) if len(outs) > 1 else outs[0]

        ends = torch.tensor(lengths, device=device).cumsum(0) - 1
        logits = self.model.forward(tokens, positions, self.rotary, attend, ends, Workspace(self.model, len(tokens)))
        self.prompt_lengths += lengths
        self.owner += [first + i for i in range(len(prompts)) for _ in range(copies)]
        self.filled += [0] * (len(prompts) * copies)
        self.positions = torch.cat([self.positions, torch.tensor(lengths, device=device).repeat_interleave(copies)])
        self._regroup()
        self._arrange()
        return logits

    def _make_room(self, lengths: list[int], copies: int) -> None:
        """Grows `prompt_k` and `prompt_v` for more and longer prompts and `new_k` and `new_v` for more rows.

        Masks hide the finite values left by finished rows and prompts.
        """
        more = len(self.owner) + len(lengths) * copies - self.new_k.shape[1]
        if more > 0:
            self.new_k, self.new_v = (F.pad(held, (0, 0, 0, 0, 0, 0, 0, more)) for held in (self.new_k, self.new_v))
        count, longest = len(self.prompt_lengths), max(lengths)
        if count + len(lengths) <= self.prompt_k.shape[1] and longest <= self.prompt_k.shape[4]:
            return
        if not count:  # frees the longer cache of earlier prompts
            self.prompt_k, self.prompt_v = self.prompt_k[:, :0, ..., :0], self.prompt_v[:, :0, :, :0]
        elif longest > self.prompt_k.shape[4]:  # conversations grow, so extra room avoids a copy per turn
            longest += longest // 4
        more, wider = max(count + len(lengths) - self.prompt_k.shape[1], 0), max(longest - self.prompt_k.shape[4], 0)
        # Zeros pad shorter prompts, because an attention weight of 0 doesn't hide NaN.
        self.prompt_k = F.pad(self.prompt_k, (0, wider, 0, 0, 0, 0, 0, more))
        self.prompt_v = F.pad(self.prompt_v, (0, 0, 0, wider, 0, 0, 0, more))

    def _arrange(self) -> None:
        """Creates views and buffers for steps with the current rows and columns."""
        rows = len(self.owner)
        self.live_k, self.live_v = self.new_k[:, :rows], self.new_v[:, :rows]
        self.keys, self.values = self.live_k.flatten(1, 2), self.live_v.flatten(1, 2)
        self.space = Workspace(self.model, rows)

    def _regroup(self) -> None:
        """Computes masks and the rows' positions in the (P, G) grid of attention to prompts."""
        device, count = self.model.device, len(self.prompt_lengths)
        members: list[list[int]] = [[] for _ in range(count)]
        place = []
        for row, p in enumerate(self.owner):
            place.append(len(members[p]))
            members[p].append(row)
        self.group = max(map(len, members))
        self.even = [row for rows in members for row in rows] == list(range(count * self.group))
        grid = [rows + [0] * (self.group - len(rows)) for rows in members]
        self.grid = torch.tensor(grid, device=device).flatten()
        self.place = torch.tensor(self.owner, device=device) * self.group + torch.tensor(place, device=device)
        longest = max(self.prompt_lengths)
        self.prompt_keys = self.prompt_k[:, :count].flatten(1, 2)[..., :longest].unbind()
        self.prompt_values = self.prompt_v[:, :count].flatten(1, 2)[:, :, :longest].unbind()
        self.prompt_mask: Tensor | None = None
        if min(self.prompt_lengths) < longest:
            self.prompt_mask = self._mask(torch.tensor(self.prompt_lengths, device=device), longest)

    def _mask(self, lengths: Tensor, width: int) -> Tensor:
        """Returns the (N * K, 1, width) mask to add to attention scores that hides columns from (N,) `lengths` on."""
        hidden = torch.arange(width, device=lengths.device) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, device=lengths.device).masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(self.model.kv_heads, 0)[:, None]

    def step(self, tokens: Tensor) -> Tensor:
        rows, used = len(self.owner), max(self.filled)
        if used == self.new_v.shape[3]:
            room = min(2 * used, self.columns) - used
            self.new_k, self.new_v = F.pad(self.new_k, (0, room)), F.pad(self.new_v, (0, 0, 0, room))
            self._arrange()
        # Creates the views of all layers at once, with few operations.
        keys, values = self.keys.narrow(3, 0, used + 1).unbind(), self.values.narrow(2, 0, used + 1).unbind()
        next_k, next_v = self.live_k.select(4, used).unbind(), self.live_v.select(3, used).unbind()
        together, mask = min(self.filled) == used, None  # False after a refill
        if not together:
            column = torch.tensor(self.filled, device=tokens.device)
            mask = self._mask(column + 1, used + 1)
            row = torch.arange(rows, device=tokens.device)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if together:
                next_k[number].copy_(k)
                next_v[number].copy_(v)
            else:
                self.new_k[number, row, :, :, column], self.new_v[number, row, :, column] = k, v
            return self._attend(number, q, keys[number], values[number], mask)

        logits = self.model.forward(tokens, self.positions, self.rotary, attend, None, self.space)
        self.positions.add_(1)
        self.filled = [n + 1 for n in self.filled]
        return logits

    def _attend(self, number: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Computes (R, H * D) attention of one query per row to its prompt and its completion.

        For layer `number`, takes (R, H, D) queries, (R * K, D, C) keys and (R * K, C, D) values of the completions, and
        a (R * K, 1, C) mask to add, or None.
        """
        rows, kv, d = len(q), self.model.kv_heads, self.model.head_dim
        q = q.reshape(rows * kv, -1, d)
        own = _scores(q, keys, mask)
        count, group, per_key = len(self.prompt_lengths), self.group, q.shape[1]
        q, own = q.view(rows, kv, per_key, d), own.view(rows, kv, per_key, -1)
        if not self.even:
            q, own = q.index_select(0, self.grid), own.index_select(0, self.grid)
        q = q.view(count, group, kv, per_key, d).transpose(1, 2).reshape(count * kv, group * per_key, d)
        to_prompt = _scores(q, self.prompt_keys[number], self.prompt_mask)
        length = to_prompt.shape[2]
        own = own.view(count, group, kv, per_key, -1).transpose(1, 2)
        weights = torch.cat([to_prompt.view(count, kv, group, per_key, length), own], -1).softmax(-1)
        of_prompt = weights[..., :length].view(count * kv, group * per_key, length)
        of_prompt = torch.bmm(of_prompt, self.prompt_values[number])
        of_prompt = of_prompt.view(count, kv, group, per_key, d).transpose(1, 2)
        weights = weights[..., length:].transpose(1, 2)
        if not self.even:
            of_prompt = of_prompt.flatten(0, 1).index_select(0, self.place)
            weights = weights.flatten(0, 1).index_select(0, self.place)
        out = torch.bmm(weights.reshape(rows * kv, per_key, -1), values)
        out.view(of_prompt.shape).add_(of_prompt)
        return out.view(rows, -1)

    def keep(self, rows: list[int]) -> None:
        used = max(self.filled, default=0)
        moved = [(i, row) for i, row in enumerate(rows) if i != row]
        if moved and used:
            to, source = torch.tensor(moved, device=self.model.device).t()
            self.new_k[:, to, ..., :used] = self.new_k[:, source, ..., :used]
            self.new_v[:, to, :, :used] = self.new_v[:, source, :, :used]
        self.filled = [self.filled[i] for i in rows]
        self.positions = self.positions[torch.tensor(rows, dtype=torch.long, device=self.model.device)]
        self._keep_prompts([self.owner[i] for i in rows])
        if rows:
            self._regroup()
            self._arrange()

    def _keep_prompts(self, owner: list[int]) -> None:
        """Removes prompts without rows by replacing them with the last live ones."""
        alive = set(owner)
        count = len(alive)
        holes = [p for p in range(count) if p not in alive]
        tail = sorted(p for p in alive if p >= count)
        if holes:
            self.prompt_k[:, holes], self.prompt_v[:, holes] = self.prompt_k[:, tail], self.prompt_v[:, tail]
        for hole, p in zip(holes, tail, strict=True):
            self.prompt_lengths[hole] = self.prompt_lengths[p]
        del self.prompt_lengths[count:]
        moved = dict(zip(tail, holes, strict=True))
        self.owner = [moved.get(p, p) for p in owner]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Computes q k + mask for (batch, queries, D) and (batch, D, keys)."""
    return torch.bmm(q, k) if mask is None else torch.baddbmm(mask, q, k)


# ---- the model ---------------------------------------------------------------------------------------------------


class _Norm:
    """RMSNorm over the last dimension of size n, computed as x / hypot(|x| / sqrt(n), sqrt(eps)) * weight."""

    def __init__(self, norm: Any) -> None:
        self.weight = norm.weight
        self.factor = norm.weight.new_full((1,), norm.weight.numel() ** -0.5)
        self.least = norm.weight.new_full((1,), norm.variance_epsilon**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(self.factor).hypot_(self.least)
        return (x / size).mul_(self.weight)


class _Layer:
    """Weights of one decoder layer. `attention_in` and `mlp_in` are fused projections."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_in = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.attention_out = _join([attention.o_proj])
        self.mlp_in = _join([mlp.gate_proj, mlp.up_proj])
        self.mlp_out = _join([mlp.down_proj])
        self.activation = mlp.act_fn.forward  # skips the overhead of hooks
        self.attention_norm = _Norm(layer.input_layernorm)
        self.mlp_norm = _Norm(layer.post_attention_layernorm)
        self.head_norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if hasattr(attention, "q_norm") else None


def _join(projections: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Fuses projections into one (in, out) weight and one bias. The projections become views of them."""
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
    """Copies a matrix in blocks of rows, which stay in the CPU cache even if one matrix is transposed."""
    for to, rows in zip(target.split(64), source.split(64), strict=True):
        to.copy_(rows)


class CPUModel:
    """A model's weights in the format of `CPUDecoder`.

    The projections of a model for which `fits` is True become views of the fused weights, so it still works, and
    in-place weight updates apply to both.
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
        """Whether the model is a supported float32 model on a CPU, with full attention and fixed rotary tables."""
        config = model.config
        if type(model).__name__ not in _FAMILIES or model.dtype != torch.float32 or model.device.type != "cpu":
            return False
        layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
        sliding = type(model).__name__ == "MistralForCausalLM" and config.sliding_window is not None
        plain = all(type(m) is nn.Linear for n, m in model.named_modules() if n.endswith(("_proj", "lm_head")))
        rotary = getattr(model.model.rotary_emb, "rope_type", None) in _ROTARY
        return plain and rotary and not sliding and layer_types == {"full_attention"} and model.lm_head.bias is None

    def rotary_table(self, length: int) -> Tensor:
        """Returns the (length, 2, (H + 2 K) D) cos and sin for concatenated queries, keys, and values by position.

        The entries of queries include the attention scale. Those of values are 1 and 0, because values are not rotated.
        The first half of each head's sin is negated.
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
        """Computes the (T, V) logits of (T,) tokens at (T,) positions, or only those at the indices `last`.

        `table` is the result of `rotary_table`, and `space` a workspace for T tokens. `attend` maps the layer index,
        scaled q (T, H, D), and k and v (T, K, D) to (T, H * D).
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
    """Output buffers for a forward pass of T tokens, and views of them.

    Reused across steps, because creating a view takes as long as a small step's computation.
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
    """Computes out = x weight + bias."""
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def _add_product(h: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Computes h += x weight + bias."""
    h.addmm_(x, weight)
    if bias is not None:
        h.add_(bias)
