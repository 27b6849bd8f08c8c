"""Runs a backbone on a (B, T) batch in the best layout it supports, and reads the wanted hidden states."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightrl.compat.transformers import attention_implementation, router_modules
from lightrl.kernels.cpu import enabled
from lightrl.kernels.cpu.memory import keep_freed_memory
from lightrl.kernels.fusing import fuse
from lightrl.models.logprobs import LogitMap
from lightrl.models.media_tokens import TOKEN_INPUT, causal_type, placeholder_ids
from lightrl.models.multimodal import (
    harmless_id,
    idle_parameters,
    lent_rows,
    marked_tokens,
    media_positions,
    merged_inputs,
    misfits_named,
    no_token_inputs,
    runs_on_all_ranks,
    sampled_placeholders,
    true_embeddings,
)
from lightrl.models.packing.attention import IMPLEMENTATION, keep_attention_caps, text_attention, unsupported_reason
from lightrl.models.packing.context import refuse_heads, share_stream
from lightrl.models.packing.layouts import LayoutError, TokenStream, make_stream
from lightrl.models.rope import fix_rope, longrope_limit
from lightrl.models.routing import Routers, RoutingPass
from lightrl.models.spec import Layout
from lightrl.records import HostRows, Routes


@dataclass
class BackboneOutput:
    """Hidden states where they are wanted.

    Attributes:
        hidden: (M, D). Where nothing is wanted it is one state, so that heads and collectives run all the same.
        targets: (M,) int64, index in the flattened (B, T) batch of the token each belongs to.
        empty: nothing is wanted, and `scatter` gives zeros (with a graph).
        aux_loss: see `PolicyOutput`.
    """

    hidden: Tensor
    targets: Tensor
    shape: tuple[int, int]
    empty: bool = False
    aux_loss: Tensor | None = None

    def scatter(self, values: Tensor) -> Tensor:
        """(M,) to (B, T), 0 where nothing is wanted."""
        if self.empty:
            values = values * 0.0
        width = self.shape[1]  # not a view of a flat tensor: FSDP2's hooks on outputs do not survive changes to views
        return values.new_zeros(self.shape).index_put((self.targets // width, self.targets % width), values)


class Backbone:
    """Calls a transformers backbone. Not a module itself: it only refers to one that its owner holds.

    Args:
        model: the whole model, whose class says what it supports.
        body: the part that gives hidden states.
        layout, cpu_kernels: see `ModelSpec`.

    Raises:
        ValueError: an explicit layout that the model cannot run.
    """

    def __init__(self, model: Any, body: Any, layout: Layout, cpu_kernels: bool | None = None) -> None:
        self.name = type(model).__name__
        self.body = body
        self.layout = layout
        self.explicit = layout != "auto"
        self.cpu_kernels = enabled(cpu_kernels)
        fuse(body, cpu=self.cpu_kernels)
        if self.cpu_kernels and not torch.accelerator.is_available():
            keep_freed_memory()
        self.config = model.config
        self.sees = bool(placeholder_ids(model.config)) and hasattr(body, "get_decoder")
        self.num_layers = model.config.get_text_config().num_hidden_layers
        keep_attention_caps(model)
        own = text_attention(model.config, attention_implementation(model.config.get_text_config()))
        self._longest = fix_rope(model)
        self._context: Any = None
        self._routers: Routers | None = None
        self._restore_attention = partial(model.set_attn_implementation, own)
        if layout != "padded":
            reason = unsupported_reason(model, body)
            if reason is None:
                model.set_attn_implementation(text_attention(model.config, IMPLEMENTATION))
            else:
                self._fall_back(reason)

    def spread(self, group: Any) -> None:
        """Turns on context parallelism: ranks of a process group run their rows as one stream (`packing/context.py`).

        Raises:
            ValueError: heads that they cannot share out, or a layout without a stream.
        """
        refuse_heads(self.config, dist.get_world_size(group))
        if self.layout == "padded":
            raise ValueError(
                f"context_parallel_size={dist.get_world_size(group)} with {self.name} in the padded layout: ranks "
                "share out a packed stream of tokens. Take a layout that is packed, or 1."
            )
        self._context = group

    def __call__(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor | None,
        group_ids: Tensor | None = None,
        inputs: list[dict[str, Any]] | None = None,
        host: HostRows | None = None,
        routes: Sequence[Routes | None] = (),
    ) -> BackboneOutput:
        """Hidden states at t - 1 for each response token t, or at each row's last token where the mask is None.

        `host` has the same rows in host memory; without it they are read from the device. `routes` are the experts that
        B rows' tokens are to go to.
        """
        if host is None:
            response, groups = (None if x is None else x.cpu() for x in (response_mask, group_ids))
            host = HostRows(token_ids.cpu(), attention_mask.cpu(), response, groups)
        self._refuse_long(host.attention_mask)
        rows = inputs if inputs and any(inputs) else None
        if rows and host.response_mask is not None and not bool((read := host.response_mask[:, 1:].any(1)).all()):
            # Of a row that nothing is read from, the mask no longer tells which placeholders were sampled: it is text.
            rows = [row if used else {} for row, used in zip(rows, read.tolist(), strict=True)]
            places = torch.isin(host.token_ids, torch.tensor(list(placeholder_ids(self.config).values())))
            places &= ~read[:, None]
            host = replace(host, token_ids=host.token_ids.masked_fill(places, harmless_id(self.config)))
            token_ids = token_ids.masked_fill(places.to(token_ids.device), harmless_id(self.config))
            rows = rows if any(rows) else None
        if self._context is not None:
            return self._run_spread(token_ids.device, host, rows, routes)
        if self.sees and runs_on_all_ranks(self.body):
            lent = lent_rows(self.config, rows or [], host, token_ids.device)
            if lent:
                return self._run_with(lent, host, rows, routes, token_ids.device)
        return self._run_rows(token_ids, attention_mask, host, rows, routes)

    def _run_with(
        self,
        lent: list[tuple[list[int], dict[str, Any]]],
        host: HostRows,
        rows: list[dict[str, Any]] | None,
        routes: Sequence[Routes | None],
        device: torch.device,
    ) -> BackboneOutput:
        """Runs the rows together with rows of other ranks, whose outputs count for nothing."""
        (count, width), more = host.token_ids.shape, len(lent)
        longest = max(width, *(len(ids) for ids, _ in lent))
        ids, attention, response = (
            F.pad(x, (0, longest - width, 0, more))
            for x in (host.token_ids, host.attention_mask.bool(), host.attention_mask.bool() & False)
        )
        if host.response_mask is not None:
            response[:count, :width] = host.response_mask.bool()
        for i, (tokens, _) in enumerate(lent, count):
            ids[i, : len(tokens)] = torch.tensor(tokens)
            attention[i, : len(tokens)] = True
            response[i, len(tokens) - 1] = True
        groups = host.group_ids
        if groups is not None:
            groups = torch.cat([groups, int(groups.max()) + 1 + torch.arange(more)])
        joint = HostRows(ids, attention, None if host.response_mask is None else response, groups)
        shown = [*(rows or [{}] * count), *(inputs for _, inputs in lent)]
        counted = count if bool(response[:count, 1:].any()) else None  # a loss over no row at all is no number
        routes = [*routes, *[None] * more] if routes else routes
        out = self._run_rows(ids.to(device), attention.to(device), joint, shown, routes, counted)
        row, column = out.targets // longest, out.targets % longest
        own = row < count
        idle = 0.0 * out.hidden[~own].sum()
        empty = not bool(own.any())
        hidden = (out.hidden[:1] if empty else out.hidden[own]) + idle
        targets = out.targets.new_zeros(1) if empty else (row * width + column)[own]
        return BackboneOutput(hidden, targets, (count, width), empty, out.aux_loss)

    def _run_rows(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        host: HostRows,
        rows: list[dict[str, Any]] | None,
        routes: Sequence[Routes | None],
        count: int | None = None,
    ) -> BackboneOutput:
        """Runs a batch; only its first `count` rows are in the load-balancing loss, all where None."""
        if rows and any("token_type_ids" in row for row in rows) and self.layout != "padded":
            self._fall_back("parts of its images attend in both directions")
        hidden = sampled_placeholders(self.config, host.token_ids, host.response_mask) if rows else None
        hidden = None if hidden is None else hidden.to(token_ids.device)
        shown = token_ids if hidden is None else token_ids.masked_fill(hidden, harmless_id(self.config))
        with misfits_named(self.body, shown, rows):
            return self._run(token_ids, attention_mask, host, rows, hidden, routes, count)

    def _refuse_long(self, mask: Tensor) -> None:
        """Refuses rows for which the model's family has other rotary factors than those that are fixed."""
        if self._longest is not None and (tokens := int(mask.sum(1).max())) > self._longest:
            dynamic = longrope_limit(self.config) is None
            raise ValueError(
                f"{self.name} with rows of {tokens} tokens: above {self._longest} its "
                f"{'dynamic RoPE has other factors for every length' if dynamic else 'LongRoPE has other factors'}. "
                f"{'Keep' if dynamic else 'Set long_rope: true on the model (`ModelSpec`), or keep'} rows shorter."
            )

    def _run(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        host: HostRows,
        rows: list[dict[str, Any]] | None,
        hidden: Tensor | None,
        routes: Sequence[Routes | None],
        count: int | None,
    ) -> BackboneOutput:
        if self.layout != "padded":
            ids, spans = marked_tokens(self.config, rows, host) if rows else (host.token_ids, None)
            stream = make_stream(
                ids,
                host.attention_mask,
                host.response_mask,
                share=self.layout != "packed" and host.group_ids is not None,
                spans=spans,
                routes=routes,
                cpu_kernels=self.cpu_kernels,
                device=token_ids.device,
            )
            try:
                with self._replaying(Routes.at(routes, stream.source, token_ids.shape[1])):
                    return self._run_stream(token_ids, stream, rows, hidden, count)
            except LayoutError as error:
                self._fall_back(str(error))
        places = torch.arange(token_ids.numel(), device=token_ids.device)
        with self._replaying(Routes.at(routes, places, token_ids.shape[1])):
            return self._run_padded(token_ids, attention_mask, host, rows, hidden, count)

    def _replaying(self, experts: Tensor | None) -> AbstractContextManager[RoutingPass | None]:
        """Context in which the routers use these (N, L, K) experts, as of `Routes.at`."""
        return nullcontext() if experts is None else self.routers.replaying(experts)

    @property
    def routers(self) -> Routers:
        """The routers of a mixture of experts, looked up on first use."""
        if self._routers is None:
            self._routers = Routers(self.body)
        return self._routers

    def _fall_back(self, reason: str) -> None:
        if self.explicit:
            raise ValueError(
                f"layout={self.layout!r} does not work with {self.name}: {reason}. Use layout='auto' or 'padded'."
            )
        warnings.warn(f"{self.name} runs in the padded layout, which is slower: {reason}.", stacklevel=2)
        self.layout = "padded"
        self._restore_attention()

    def _run_stream(
        self,
        token_ids: Tensor,
        stream: TokenStream,
        rows: list[dict[str, Any]] | None,
        hidden: Tensor | None,
        count: int | None,
    ) -> BackboneOutput:
        positions, ids = stream.position_ids.unsqueeze(0), token_ids.reshape(1, -1).index_select(1, stream.source)
        inputs = no_token_inputs(self.body, ids)
        shown = bool(rows) and len(stream.targets) > 0  # else the stream is empty, and no picture belongs to it
        if rows:
            plain = causal_type(self.config)
            merged = merged_inputs(rows, stream.shown if shown else [], stream.shape, token_ids.device, plain)
            inputs |= {
                name: x.reshape(1, -1).index_select(1, stream.source) if name.endswith(TOKEN_INPUT) else x
                for name, x in merged.items()
            }
            own = media_positions(self.body, token_ids, rows)
            if own is not None:
                positions = own.flatten(1).index_select(1, stream.source).unsqueeze(1)
        hidden = None if hidden is None else hidden.reshape(1, -1).index_select(1, stream.source)
        # transformers takes a 4-D mask as it is, so it builds none: the stream says who sees whom
        blank = torch.empty(1, 1, 1, 1, device=token_ids.device)
        with true_embeddings(self.body, hidden, ids):
            out = self.body(
                input_ids=ids if hidden is None else ids.masked_fill(hidden, harmless_id(self.config)),
                position_ids=positions,
                attention_mask=blank,
                use_cache=False,
                stream=stream,
                **inputs,
            )
        if stream.num_calls != self.num_layers:
            raise LayoutError(f"{stream.num_calls} of its {self.num_layers} layers use the replaced attention")
        counted = None if count is None else (stream.source < count * stream.shape[1]).long().unsqueeze(0)
        return self._output(out, stream.read, stream.targets, stream.shape, counted)

    def _run_spread(
        self, device: torch.device, host: HostRows, rows: list[dict[str, Any]] | None, routes: Sequence[Routes | None]
    ) -> BackboneOutput:
        """Runs this rank's part of its group's stream (context parallelism). Collective over the group."""
        if rows:
            raise ValueError("context_parallel_size above 1 with images, videos or sound: only text is shared out.")
        share = share_stream(
            host,
            self._context,
            share=self.layout != "packed",
            routes=routes,
            cpu_kernels=self.cpu_kernels,
            device=device,
        )
        with self._replaying(share.experts):
            out = self.body(
                input_ids=share.ids.unsqueeze(0),
                position_ids=share.positions.unsqueeze(0),
                attention_mask=torch.empty(1, 1, 1, 1, device=device),
                use_cache=False,
                stream=share.stream,
            )
        if share.stream.num_calls != self.num_layers:
            raise ValueError(
                f"context_parallel_size above 1 with {self.name}: {share.stream.num_calls} of its {self.num_layers} "
                "layers use the replaced attention. Take 1."
            )
        own = out.last_hidden_state[0]
        hidden = share.collect(own)
        empty = len(share.targets) == 0
        if empty:  # the backward is collective, so what was sent must stay in the graph
            hidden = own[:1] + 0.0 * hidden.sum()
        targets = share.targets.new_zeros(1) if empty else share.targets
        return BackboneOutput(hidden, targets, share.shape, empty)

    def _run_padded(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        host: HostRows,
        rows: list[dict[str, Any]] | None,
        hidden: Tensor | None,
        count: int | None,
    ) -> BackboneOutput:
        shape = (token_ids.shape[0], token_ids.shape[1])
        text = self.config.get_text_config()
        types = getattr(text, "layer_types", None) or ()
        chosen = getattr(text, "index_topk", None) if "indexed_attention" in types else None
        if chosen is not None and shape[1] > chosen:
            raise ValueError(
                f"{self.name} with rows of {shape[1]} tokens: its attention takes the best {chosen} keys (index_topk), "
                "and transformers chooses others in a padded batch than in a row alone. Keep rows that short."
            )
        inputs = no_token_inputs(self.body, token_ids)
        if rows:
            inputs |= merged_inputs(rows, range(len(rows)), shape, token_ids.device, causal_type(self.config))
            own = media_positions(self.body, token_ids, rows)
            inputs |= {} if own is None else {"position_ids": own}
        with true_embeddings(self.body, hidden, token_ids):
            out = self.body(
                input_ids=token_ids if hidden is None else token_ids.masked_fill(hidden, harmless_id(self.config)),
                attention_mask=attention_mask.long(),
                use_cache=False,
                **inputs,
            )
        if host.response_mask is None:
            starts = torch.arange(len(token_ids), device=token_ids.device) * token_ids.shape[1]
            targets = read = starts + attention_mask.sum(1).clamp(min=1) - 1
        else:
            wanted = host.response_mask.to(torch.bool, copy=True)
            wanted[:, :1] = False
            targets = wanted.reshape(-1).nonzero().squeeze(1).to(token_ids.device, non_blocking=True)
            read = targets - 1
        counted = attention_mask
        if count is not None:
            counted = attention_mask.clone()
            counted[count:] = False
        return self._output(out, read, targets, shape, counted)

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
            hidden = hidden + idle_parameters(self.body)
        return BackboneOutput(hidden, targets, shape, empty, self._aux_loss(out, mask))

    def _aux_loss(self, out: Any, mask: Tensor | None) -> Tensor | None:
        """Load-balancing loss as the model's own file defines it, if its configuration returns router logits."""
        config = self.body.config.get_text_config()
        if not getattr(config, "output_router_logits", False) or getattr(out, "router_logits", None) is None:
            return None
        function: Any = getattr(sys.modules[type(self.body).__module__], "load_balancing_loss_func", None)
        if function is None:
            return None
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        loss: Tensor = function(out.router_logits, experts, config.num_experts_per_tok, mask)
        return loss

    @torch.no_grad()
    def check_logits(self, lm: Any, logit_map: LogitMap) -> None:
        """Compares eight log-probs with the model's own forward, and with those beside a longer row, once.

        Catches models that change logits on their own, or whose rows depend on the batch or on chance.

        Raises:
            ValueError: they differ.
        """
        vocabulary = lm.config.get_text_config().vocab_size
        ids, longer = (torch.arange(count, device=lm.device) % vocabulary for count in (8, 16))
        extra = no_token_inputs(self.body, ids[None])
        head = lm.get_output_embeddings()
        hidden = self.body(input_ids=ids[None], use_cache=False, **extra).last_hidden_state[0]
        own, _ = head(hidden, targets=ids, logit_map=logit_map)
        logits = lm(input_ids=ids[None], use_cache=False, **extra).logits[0]
        plain = F.log_softmax(logits.float(), -1).gather(1, ids[:, None]).squeeze(1)
        tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.2
        worst = (own - plain).abs().max().item()
        if worst > tolerance:
            raise ValueError(
                f"{self.name}: log-probs from its head differ by {worst:.3g} from its own forward pass, so it changes "
                "logits in a way LightRL does not know. It cannot be trained correctly as it is."
            )
        if router_modules(lm):  # rounding, which depends on a batch's shape, may choose other experts
            return
        rows = torch.stack([F.pad(ids, (0, 8)), longer.flip(0)])
        mask = torch.stack([F.pad(torch.ones_like(ids), (0, 8)), torch.ones_like(longer)])
        extra = no_token_inputs(self.body, rows)
        hidden = self.body(input_ids=rows, attention_mask=mask, use_cache=False, **extra).last_hidden_state[0, :8]
        beside, _ = head(hidden, targets=ids, logit_map=logit_map)
        usual = (own - beside).abs().median().item()
        if usual > max(0.02, 2.5 * tolerance):
            raise ValueError(
                f"{self.name}: log-probs of a row differ by {usual:.3g} beside a longer row, so they depend on the "
                "batch or on chance. It cannot be trained correctly. Use a model of another family."
            )
