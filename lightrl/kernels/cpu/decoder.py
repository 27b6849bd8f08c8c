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
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.kernels.cpu.decoder_model import CPUModel, Workspace
from lightrl.kernels.cpu.prefix_cache import Past, PrefixCache
from lightrl.records import Routes

_FIRST_COLUMNS = 64  # completion tokens that there is room for at first; doubled when full
_LEAST_COLUMNS = 16  # softmax over fewer takes 5 times as long: it is vectorized along the columns
_PAST_QUERIES = 512  # new tokens of a prompt that meet its past at a time: it bounds the memory of their scores
SHORT_PROMPT = 32  # prompts of one length up to this are copied to each completion


@dataclass
class _Part:
    """The tokens of a prompt that are to be computed, behind `past`, and the places of all prompts like it."""

    tokens: list[int]
    past: Past | None
    places: list[int]

    @property
    def begun(self) -> int:
        return 0 if self.past is None else len(self.past.tokens)

    @property
    def length(self) -> int:
        return self.begun + len(self.tokens)


class CPUDecoder:
    """A `Decoder` (see there) whose groups share their prompt's keys and values.

    Args:
        model: the weights.
        longest: most tokens of prompt and completion that will come.
        new_tokens: most tokens of a completion.
        copied: tokens of every prompt where each row is to have a copy of its prompt's keys and values; 0 shares them.
        past_tokens: most tokens held of rows that ended, for prompts that go on with them.
    """

    refills = True
    prefill_tokens = 8192
    routes: Tensor | None = None  # it knows no model with experts

    def __init__(self, model: CPUModel, longest: int, new_tokens: int, copied: int = 0, past_tokens: int = 0) -> None:
        self.model = model
        self.past = PrefixCache(past_tokens)
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
        if longest > len(self.rotary):
            self.rotary = self.model.rotary_table(longest)
        self.columns = max(self.columns, self.copied + new_tokens)

    def batches(self, first: Sequence[int], other: Sequence[int]) -> bool:
        """Prompts of any lengths go together: they are packed."""
        return True

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        inputs: dict[str, Any],
        routes: Sequence[Routes | None] = (),
    ) -> Tensor:
        device, before, first_row = self.model.device, len(self.prompt_lengths), len(self.owner)
        lengths = [len(p) for p in prompts]
        self._make_room(lengths, copies)
        parts = self._parts(prompts, before)
        tokens = torch.tensor([t for part in parts for t in part.tokens], device=device)
        positions = torch.cat([torch.arange(part.begun, part.length, device=device) for part in parts])
        # One kernel for each run of equal lengths: nothing is padded.
        runs = [list(run) for _, run in groupby(parts, lambda part: (part.length, part.past and id(part)))]

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs, token = [], 0
            for run in runs:
                count, length = len(run), len(run[0].tokens)
                rows = slice(token, token + length * count)
                q1, k1, v1 = (x[rows].view(count, length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
                if self.copied:
                    own = slice(first_row, first_row + count * copies)
                    self.new_k[number, own, :, :, :length] = k1.transpose(2, 3).repeat_interleave(copies, 0)
                    self.new_v[number, own, :, :length] = v1.repeat_interleave(copies, 0)
                else:
                    self._store(number, run, k1.transpose(2, 3), v1)
                if run[0].past is None:
                    out = F.scaled_dot_product_attention(
                        q1, k1, v1, is_causal=True, scale=1.0, enable_gqa=q1.shape[1] != k1.shape[1]
                    )
                else:
                    out = self._attend_to_past(number, run[0], q1[0])
                outs.append(out.transpose(1, 2).reshape(length * count, -1))
                token += length * count
            return torch.cat(outs) if len(outs) > 1 else outs[0]

        ends = torch.tensor([len(part.tokens) for part in parts], device=device).cumsum(0) - 1
        space = Workspace(self.model, len(tokens))
        logits = self.model.forward(tokens, positions, self.rotary, attend, ends, space)
        self.prompt_lengths += lengths
        self.owner += [before + i for i in range(len(prompts)) for _ in range(copies)]
        self.filled += [self.copied] * (len(prompts) * copies)
        self.positions = torch.cat([self.positions, torch.tensor(lengths, device=device).repeat_interleave(copies)])
        self._regroup()
        self._arrange()
        order = {place: i for i, part in enumerate(parts) for place in part.places}
        return logits if len(parts) == len(prompts) else logits[[order[before + i] for i in range(len(prompts))]]

    def _parts(self, prompts: Sequence[Sequence[int]], before: int) -> list[_Part]:
        """What is to be computed of prompts: each once, and from where what is held of it ends."""
        parts: dict[tuple[int, ...], _Part] = {}
        for place, prompt in enumerate(prompts, before):
            if self.copied:
                parts[place,] = _Part(list(prompt), None, [place])
                continue
            part = parts.get(tuple(prompt))
            if part is None:
                past = self.past.take(prompt)
                begun = 0 if past is None else len(past.tokens)
                part = parts[tuple(prompt)] = _Part(list(prompt[begun:]), past, [])
            part.places.append(place)
        return list(parts.values())

    def _store(self, number: int, run: list[_Part], keys: Tensor, values: Tensor) -> None:
        """Writes keys (parts, K, D, new tokens) and values of a layer and a run, and what is held of it, in place."""
        begun, length = run[0].begun, run[0].length
        places = [place for part in run for place in part.places]
        first, count = places[0], len(places)
        if count > len(run):  # the same prompt several times
            of = [i for i, part in enumerate(run) for _ in part.places]
            keys, values = keys[of], values[of]
        to = slice(first, first + count) if places == list(range(first, first + count)) else places
        self.prompt_k[number, to, :, :, begun:length] = keys
        self.prompt_v[number, to, :, begun:length] = values
        if (past := run[0].past) is not None:
            self.prompt_k[number, to, :, :, :begun] = past.keys[number]
            self.prompt_v[number, to, :, :begun] = past.values[number]

    def _attend_to_past(self, number: int, part: _Part, q: Tensor) -> Tensor:
        """Attention of a prompt's new tokens, (H, T, D), to all of it; (1, H, T, D)."""
        heads, count, d = q.shape
        keys = self.prompt_k[number, part.places[0], :, :, : part.length]
        values = self.prompt_v[number, part.places[0], :, : part.length]
        outs = []
        for first in range(0, count, _PAST_QUERIES):
            some = q[:, first : first + _PAST_QUERIES]
            seen = torch.ones(some.shape[1], part.length, dtype=torch.bool, device=q.device)
            hidden = seen.triu_(part.begun + first + 1).repeat(heads // len(keys), 1)
            scores = torch.bmm(some.reshape(len(keys), -1, d), keys).masked_fill_(hidden, -torch.inf)
            outs.append(torch.bmm(scores.softmax(-1), values).view(heads, -1, d))
        return torch.cat(outs, 1)[None]

    def forget(self) -> None:
        self.past = PrefixCache(self.past.room)

    @torch.inference_mode()
    def remember(self, row: int, tokens: Sequence[int]) -> None:
        if self.copied:
            return
        place, filled = self.owner[row], self.filled[row]
        length = self.prompt_lengths[place]
        keys, values = self.prompt_k[:, place, :, :, :length], self.prompt_v[:, place, :, :length]
        keys = torch.cat([keys, self.new_k[:, row, :, :, :filled]], -1)
        values = torch.cat([values, self.new_v[:, row, :, :filled]], -2)
        self.past.put(Past(list(tokens[: length + filled]), keys, values))  # the last was not computed

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
        if count and longest > width:  # conversations grow; with room, so that not every token copies
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

    def step(self, tokens: Tensor) -> Tensor:
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
