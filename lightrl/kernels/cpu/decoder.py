"""A decoder for plain Llama-shaped models in float32: the model's weights, none of its modules' code.

Three things make it several times faster than a model's own forward where steps are small. A prompt's keys and values
exist once for all its completions, and the queries of a group meet them in one matrix product; prompts of a few tokens
are copied instead, which saves that product. Rows that ended are overwritten by the last live ones, so the batch is
always dense. And `CPUModel` needs few operations per layer.

Attention is written as plain batched products: with one query per row they are 3 to 10 times faster on a CPU than
`scaled_dot_product_attention`, whose kernels are made for many queries. Keys lie transposed, (D, L) and (D, C), which
makes their product up to twice as fast.

Shapes: P live prompts, G most live completions of a prompt, R live rows, L prompt tokens, C completion tokens held,
T packed tokens, H query heads, K key heads, Q = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.kernels.cpu.decoder_model import CPUModel, Workspace
from lightrl.types import Routes

__all__ = ["CPUDecoder"]

_FIRST_COLUMNS = 64  # completion tokens that there is room for at first; doubled when full
_LEAST_COLUMNS = 16  # softmax over fewer takes 5 times as long: it is vectorized along the columns
SHORT_PROMPT = 32  # prompts of one length up to this are copied to each completion


class CPUDecoder:
    """A `Decoder` (see there) whose groups share their prompt's keys and values.

    Args:
        model: the weights.
        longest: most tokens of prompt and completion that will come.
        new_tokens: most tokens of a completion.
        copied: tokens of every prompt where each row is to have a copy of its prompt's keys and values; 0 shares them.
    """

    refills = True
    prefill_tokens = 8192
    routes: Tensor | None = None  # it knows no model with experts

    def __init__(self, model: CPUModel, longest: int, new_tokens: int, copied: int = 0) -> None:
        self.model = model
        self.copied = copied
        self.columns = max(copied + new_tokens, _LEAST_COLUMNS)
        self.rotary = model.rotary_table(longest)
        layers, kv, d = len(model.layers), model.kv_heads, model.head_dim
        columns = min(self.columns, copied + _FIRST_COLUMNS)
        self.prompt_k = self.model.embedding.new_zeros(layers, 0, kv, d, 0)  # (layers, P, K, D, L)
        self.prompt_v = self.model.embedding.new_zeros(layers, 0, kv, 0, d)  # (layers, P, K, L, D)
        self.new_k = self.model.embedding.new_zeros(layers, 0, kv, d, columns)  # (layers, rows, K, D, C)
        self.new_v = self.model.embedding.new_zeros(layers, 0, kv, columns, d)  # (layers, rows, K, C, D)
        self.prompt_lengths: list[int] = []
        self.owner: list[int] = []  # per row, the place of its prompt in prompt_k
        self.filled: list[int] = []  # per row, the columns of new_k and new_v in use
        self.positions = torch.empty(0, dtype=torch.long, device=model.device)

    def tokens_held(self, prompt_tokens: int, copies: int, new_tokens: int) -> int:
        """A group holds its prompt once, unless it is copied."""
        return prompt_tokens * (copies if self.copied else 1) + copies * new_tokens

    def admits(self, prompt: Sequence[int], inputs: dict[str, Any]) -> bool:
        """Text; of one length where prompts are copied."""
        return not inputs and self.copied in (0, len(prompt))

    def reserve(self, longest: int, new_tokens: int) -> None:
        """See `Decoder.reserve`."""
        if longest > len(self.rotary):
            self.rotary = self.model.rotary_table(longest)
        self.columns = max(self.columns, self.copied + new_tokens)

    def batches(self, first: Sequence[int], other: Sequence[int]) -> bool:
        """Prompts of any lengths go together: they are packed."""
        return True

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        inputs: dict[str, Any],
        routes: Sequence[Routes | None] = (),
    ) -> Tensor:
        """See `Decoder.prefill`."""
        device, before, first_row = self.model.device, len(self.prompt_lengths), len(self.owner)
        lengths = [len(p) for p in prompts]
        self._make_room(lengths, copies)
        tokens = torch.tensor([t for p in prompts for t in p], device=device)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        runs = [(n, len(list(same))) for n, same in groupby(lengths)]

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs, token, place = [], 0, before
            for length, count in runs:  # one kernel for each run of equal lengths: nothing is padded
                rows = slice(token, token + length * count)
                q1, k1, v1 = (x[rows].view(count, length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
                if self.copied:
                    own = slice(first_row, first_row + count * copies)
                    self.new_k[number, own, :, :, :length] = k1.transpose(2, 3).repeat_interleave(copies, 0)
                    self.new_v[number, own, :, :length] = v1.repeat_interleave(copies, 0)
                else:
                    self.prompt_k[number, place : place + count, :, :, :length] = k1.transpose(2, 3)
                    self.prompt_v[number, place : place + count, :, :length] = v1
                out = F.scaled_dot_product_attention(
                    q1, k1, v1, is_causal=True, scale=1.0, enable_gqa=q1.shape[1] != k1.shape[1]
                )
                outs.append(out.transpose(1, 2).reshape(length * count, -1))
                token, place = token + length * count, place + count
            return torch.cat(outs) if len(outs) > 1 else outs[0]

        ends = torch.tensor(lengths, device=device).cumsum(0) - 1
        space = Workspace(self.model, len(tokens))
        logits = self.model.forward(tokens, positions, self.rotary, attend, ends, space)
        self.prompt_lengths += lengths
        self.owner += [before + i for i in range(len(prompts)) for _ in range(copies)]
        self.filled += [self.copied] * (len(prompts) * copies)
        self.positions = torch.cat(
            [self.positions, (ends.diff(prepend=ends.new_tensor([-1]))).repeat_interleave(copies)]
        )
        self._regroup()
        self._arrange()
        return logits

    def _make_room(self, lengths: list[int], copies: int) -> None:
        """Widens `prompt_k` and `prompt_v` for more and longer prompts and `new_k` and `new_v` for more rows.

        What rows and prompts that ended leave behind is hidden by the masks, and finite.
        """
        rows, needed = len(self.owner), len(self.owner) + len(lengths) * copies
        if needed > self.new_k.shape[1]:
            for name in ("new_k", "new_v"):
                held = getattr(self, name)
                taller = held.new_zeros(len(held), needed, *held.shape[2:])
                taller[:, :rows] = held[:, :rows]
                setattr(self, name, taller)
        if self.copied:
            return
        layers, room, kv, d, width = self.prompt_k.shape
        count, longest = len(self.prompt_lengths), max(lengths)
        needed = count + len(lengths)
        if needed <= room and longest <= width:
            return
        if count and longest > width:  # conversations grow: not for every token anew
            longest += longest // 4
        shape = (layers, max(needed, room if count else 0), kv, max(longest, width if count else 0), d)
        # With zeros where a prompt is shorter: a weight of 0 does not hide what is not a number.
        keys, values = self.prompt_k.new_zeros(*shape[:3], d, shape[3]), self.prompt_v.new_zeros(shape)
        if count:
            keys[:, :count, :, :, :width], values[:, :count, :, :width] = (
                self.prompt_k[:, :count],
                self.prompt_v[:, :count],
            )
        self.prompt_k, self.prompt_v = keys, values

    def _arrange(self) -> None:
        """Makes what steps use as long as the rows and the room for their columns stay the same."""
        rows = len(self.owner)
        self.live_k, self.live_v = self.new_k[:, :rows], self.new_v[:, :rows]
        self.keys, self.values = self.live_k.flatten(1, 2), self.live_v.flatten(1, 2)
        self.space = Workspace(self.model, rows)

    def _regroup(self) -> None:
        """Works out masks, and how rows stand in the (P, G) grid in which queries meet prompts."""
        if self.copied:
            return
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
            columns = torch.arange(longest, device=device)
            hidden = columns >= torch.tensor(self.prompt_lengths, device=device)[:, None]
            mask = torch.zeros(count, longest, device=device).masked_fill_(hidden, -torch.inf)
            self.prompt_mask = mask.repeat_interleave(self.model.kv_heads, 0)[:, None]

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        rows, used = len(self.owner), max(self.filled)
        if used == self.new_v.shape[3]:
            room = min(2 * used, self.columns) - used
            self.new_k, self.new_v = F.pad(self.new_k, (0, room)), F.pad(self.new_v, (0, 0, 0, room))
            self._arrange()
        columns = max(used + 1, _LEAST_COLUMNS) if self.copied else used + 1
        # Views of all layers at once: few operations.
        keys, values = self.keys.narrow(3, 0, columns).unbind(), self.values.narrow(2, 0, columns).unbind()
        next_k, next_v = self.live_k.select(4, used).unbind(), self.live_v.select(3, used).unbind()
        together, mask = min(self.filled) == used, None  # not so after a refill: rows of different ages
        if not together or columns > used + 1:
            column = torch.tensor(self.filled, device=tokens.device)
            hidden = torch.arange(columns, device=tokens.device) > column[:, None]
            mask = torch.zeros(rows, columns, device=tokens.device).masked_fill_(hidden, -torch.inf)
            mask = mask.repeat_interleave(self.model.kv_heads, 0)[:, None]
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
        """Attention of one query per row to its prompt and its completion.

        Args:
            number: of the layer.
            q: (R, H, D). keys: (R * K, D, C) and values: (R * K, C, D) of the completions.
            mask: (R * K, 1, C) to add, or None.

        Returns:
            (R, H * D).
        """
        rows, kv, d = len(q), self.model.kv_heads, self.model.head_dim
        q = q.reshape(rows * kv, -1, d)
        own = _scores(q, keys, mask)
        if self.copied:
            return torch.bmm(own.softmax(-1), values).view(rows, -1)
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

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """See `Decoder.keep`. Only rows that change places are copied."""
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
        """Moves the last of the prompts that rows still have into the places of those that none has, as rows move."""
        alive = set(owner)
        count = len(alive)
        holes = [p for p in range(count) if p not in alive]
        tail = sorted(p for p in alive if p >= count)
        if holes and not self.copied:
            self.prompt_k[:, holes], self.prompt_v[:, holes] = self.prompt_k[:, tail], self.prompt_v[:, tail]
        for hole, p in zip(holes, tail, strict=True):
            self.prompt_lengths[hole] = self.prompt_lengths[p]
        del self.prompt_lengths[count:]
        moved = dict(zip(tail, holes, strict=True))
        self.owner = [moved.get(p, p) for p in owner]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """q k + mask, for (batch, queries, D) and (batch, D, keys)."""
    return torch.bmm(q, k) if mask is None else torch.baddbmm(mask, q, k)
