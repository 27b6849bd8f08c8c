"""What images, videos and sound add to a batch: model inputs, positions, and what rows may share.

Rows carry what their model's processor made of them alone, and nothing here knows a family: inputs per token are laid
out like the tokens, all others are laid end to end in the order of their rows, positions come from the model's own
code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightrl.compat.peft import adapter_layers
from lightrl.distributed.strategies import has_process_group, is_sharded
from lightrl.models.media_tokens import TOKEN_INPUT, causal_type, placeholder_ids
from lightrl.records import HostRows

Rows = Sequence[dict[str, Any]]

TYPE_STEP = 1 << 26  # more than any vocabulary


def merged_inputs(
    rows: Rows, wanted: Sequence[int], shape: tuple[int, int], device: torch.device, plain: int = 0
) -> dict[str, Tensor]:
    """The model inputs of a batch.

    Args:
        rows: B dictionaries of what each row's processor gave, `{}` for text.
        wanted: numbers of the rows whose images and the like go through the model, in stream order.
        shape: (B, T).
        device: where to.
        plain: token type of text, see `causal_type`.

    Returns:
        inputs per token as (B, T), `plain` where a row says nothing; all others laid end to end along their first
        dimension, other dimensions zero-padded to the largest, as processors do for a batch.
    """
    merged: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if name.endswith(TOKEN_INPUT):
            merged[name] = torch.full(shape, plain, dtype=torch.long, device=device)
            for i, row in enumerate(rows):
                if name in row:
                    merged[name][i, : row[name].shape[1]] = row[name][0].to(device, non_blocking=True)
            continue
        parts = [rows[i][name] for i in wanted if name in rows[i]]
        if parts:
            largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
            padded = (_padded(part.to(device, non_blocking=True), largest) for part in parts)
            merged[name] = torch.cat(list(padded))
    return merged


def _padded(part: Tensor, sizes: list[int]) -> Tensor:
    if list(part.shape[1:]) == sizes:
        return part
    missing = [want - have for have, want in zip(part.shape[1:], sizes, strict=True)]
    return F.pad(part, [pad for extra in reversed(missing) for pad in (0, extra)])


def no_token_inputs(body: Any, token_ids: Tensor) -> dict[str, Tensor]:
    """`token_type_ids` of plain text for a batch of text, where a vision-language model requires them in training.

    A model of text alone gets none: GPT-2 and its like would add the embedding of token 0 everywhere.
    """
    insists = bool(placeholder_ids(body.config)) and TOKEN_INPUT in inspect.signature(body.forward).parameters
    return {TOKEN_INPUT: torch.full_like(token_ids, causal_type(body.config))} if insists else {}


def marked_tokens(config: Any, rows: Rows, host: HostRows) -> tuple[Tensor, Tensor]:
    """Tokens by which rows are compared for what they begin with alike.

    What a row shows goes through the model once, where its first placeholder stands. So rows share that place only if
    they show the same altogether, and no shared prefix ends between the first placeholder and the last.

    Returns:
        (B, T) token ids, in which the first placeholder of a row is a negative number that only rows with the same
        inputs have, sampled placeholders, which stand for themselves, are negative, too, and tokens of other types are
        other numbers; and the (B, 2) places of the first and the last placeholder, -1 where a row shows nothing.
    """
    ids = host.token_ids.clone()
    places = torch.isin(ids, torch.tensor(list(placeholder_ids(config).values()))) & host.attention_mask.bool()
    if host.response_mask is not None:
        sampled = places & host.response_mask.bool()
        ids[sampled] = -1 - len(rows) - ids[sampled]
        places &= ~sampled
    spans = torch.full((len(rows), 2), -1)
    kinds: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        if not row:
            continue
        kind = next((k for k, known in enumerate(kinds) if _same(known, row)), len(kinds))
        if kind == len(kinds):
            kinds.append(row)
        for name, x in row.items():
            if name.endswith(TOKEN_INPUT):
                ids[i, : x.shape[1]] += TYPE_STEP * x[0]
        found = places[i].nonzero().squeeze(1)
        spans[i] = torch.stack([found.min(), found.max()]) if len(found) else torch.zeros(2, dtype=torch.long)
        ids[i, spans[i, 0]] = -1 - kind
    return ids, spans


def told_apart(token_ids: Tensor, rows: Rows | None) -> Tensor:
    """Tokens by which micro-batches are cut: rows with inputs begin alike only if these are one object.

    So they count at least as many tokens as `marked_tokens` lets them compute, without a look at any pixels.
    """
    if not rows or not any(rows):
        return token_ids
    ids = token_ids.clone()
    numbers: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row:
            ids[i, 0] = -1 - numbers.setdefault(id(row), i)
    return ids


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows show the same, whatever their texts."""
    if one is other or one.keys() != other.keys():
        return one is other
    names = [name for name in one if not name.endswith(TOKEN_INPUT)]
    return all(one[name] is other[name] or torch.equal(one[name], other[name]) for name in names)


def media_positions(body: Any, token_ids: Tensor, rows: Rows) -> Tensor | None:
    """(K, B, T) positions as the model's own code gives them to each prompt; None where it has none of its own.

    What follows a prompt counts on from its largest position, as in generation. A prompt that several rows share is
    computed once.

    Raises:
        ValueError: a row's inputs do not fit its tokens; names the row.
    """
    function = getattr(body, "get_rope_index", None)
    if function is None:
        return None
    width = token_ids.shape[1]
    plain = torch.arange(width, device=token_ids.device)
    known: dict[int, tuple[dict[str, Any], Tensor, int]] = {}
    out: list[Tensor | None] = []
    for i, row in enumerate(rows):
        if not row:
            out.append(None)
            continue
        length = next((x.shape[1] for name, x in row.items() if name.endswith(TOKEN_INPUT)), width)
        if id(row) not in known:
            known[id(row)] = (row, *_prompt_positions(function, token_ids[i : i + 1, :length], row, i))
        _, prompt, following = known[id(row)]
        rest = plain[: width - length] + following
        out.append(torch.cat([prompt, rest.expand(len(prompt), -1)], 1))
    kinds = next(len(positions) for positions in out if positions is not None)
    return torch.stack([plain.expand(kinds, -1) if positions is None else positions for positions in out], 1)


def _prompt_positions(function: Any, prompt: Tensor, row: dict[str, Any], number: int) -> tuple[Tensor, int]:
    """(K, L) positions of a prompt alone, and the position of the token after it."""
    names = inspect.signature(function).parameters
    arguments = {name: x.to(prompt.device) for name, x in row.items() if name in names}
    try:
        positions = function(input_ids=prompt, **arguments)[0][:, 0]
    except (RuntimeError, StopIteration, TypeError, IndexError, AttributeError) as error:
        raise _misfit(number, str(error)) from error
    types = next((x[0] for name, x in row.items() if name.endswith(TOKEN_INPUT)), None)
    if types is not None:
        text = positions[:, types.to(positions.device) == 0]
        if bool((text != text[:1]).any()):  # an image of another size stands where this one's placeholders are
            raise _misfit(number, "placeholders of one and features of another are of different shapes")
    positions = _after_media(positions, row)
    return positions, int(positions.max()) + 1


def _misfit(number: int, reason: str) -> ValueError:
    return ValueError(
        f"row {number} of the batch: its images, videos or sounds do not fit the placeholders among its tokens "
        f"({reason}). Both must come from the same run of the model's processor."
    )


@contextmanager
def misfits_named(body: Any, token_ids: Tensor, rows: Rows | None) -> Iterator[None]:
    """Context in which an error of the model's about a whole batch becomes one that names the row.

    Not in a model that all ranks run together: one rank alone cannot run it again.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if runs_on_all_ranks(body):
            raise
        for i, row in enumerate(rows or ()):
            if row and not _fits(body, token_ids[i : i + 1], row):
                raise _misfit(i, str(error)) from error
        raise


@torch.no_grad()
def _fits(body: Any, token_ids: Tensor, row: dict[str, Any]) -> bool:
    inputs = merged_inputs([row], [0], (1, token_ids.shape[1]), token_ids.device, causal_type(body.config))
    try:
        body(input_ids=token_ids, use_cache=False, **inputs)
    except (ValueError, RuntimeError):
        return False
    return True


def idle_parameters(body: Any) -> Tensor | float:
    """0, with a graph over the trained parameters outside the language model.

    DDP waits for the gradient of every parameter, and some are not used by a batch: all of the vision tower's in a
    batch of text, its last layers in families that read an earlier one. Sharded parameters need no gradient.
    """
    if not (has_process_group() and dist.get_world_size() > 1 and torch.is_grad_enabled()):
        return 0.0
    inside = {id(p) for p in body.get_decoder().parameters()}
    idle = [p for p in body.parameters() if p.requires_grad and id(p) not in inside and not is_sharded(p)]
    return sum((p.sum() * 0.0 for p in idle), 0.0)


def adapts_media(lm: Any) -> bool:
    """Whether a LoRA adapter sits on what reads images, videos, or sound."""
    if not placeholder_ids(lm.config):
        return False
    language = {id(module) for module in (*lm.base_model.get_decoder().modules(), lm.get_output_embeddings())}
    return any(id(layer) not in language for layer in adapter_layers(lm).values())


def runs_on_all_ranks(body: Any) -> bool:
    """Whether every rank calls this model at the same time, since it is sharded or its gradients will be reduced."""
    if not has_process_group() or dist.get_world_size() == 1:
        return False
    return any(is_sharded(p) or (p.requires_grad and torch.is_grad_enabled()) for p in body.parameters())


def lent_rows(config: Any, rows: Rows, host: HostRows, device: torch.device) -> list[tuple[list[int], dict[str, Any]]]:
    """Rows of other ranks that make this rank run the same modules as they do. Collective.

    A vision tower runs on the ranks that show an image. Where it is sharded, or its gradients are reduced as they
    arrive, it has to run on all of them. So a rank that shows nothing of a kind that another rank shows gets the
    shortest row of that rank.

    Args:
        config: of the model.
        rows: B dictionaries of model inputs, `{}` for text.
        host: the same rows' tokens.
        device: of the model.

    Returns:
        (token ids, inputs) of each row to run, the last of whose tokens follows its media; none where all ranks show
        the same kinds.
    """
    offers = _offers(config, rows, host)
    kinds, rank = list(placeholder_ids(config)), dist.get_rank()
    shows = torch.tensor([kind in offers for kind in kinds], dtype=torch.long, device=device)
    agreed = torch.cat([shows * (rank + 1), -shows])
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    lenders, all_show = agreed.view(2, -1).tolist()
    lent = []
    for kind, lender, shown in zip(kinds, lenders, all_show, strict=True):
        if lender == 0 or shown == -1:
            continue
        parcel = [offers.get(kind)]
        dist.broadcast_object_list(parcel, src=lender - 1)
        if kind not in offers and parcel[0] is not None:
            lent.append(parcel[0])
    return lent


def _offers(config: Any, rows: Rows, host: HostRows) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Kind -> the shortest row that shows some, up to the first token after all of its media."""
    found: dict[str, tuple[int, int]] = {}
    placeholders = placeholder_ids(config)
    for i, row in enumerate(rows):
        if not row:
            continue
        places = {kind: host.token_ids[i] == token for kind, token in placeholders.items()}
        if host.response_mask is not None:
            places = {kind: at & ~host.response_mask[i].bool() for kind, at in places.items()}
        ends = {kind: int(at.nonzero().max()) + 1 for kind, at in places.items() if bool(at.any())}
        for kind in ends:
            found[kind] = min(found.get(kind, (1 << 60, i)), (max(ends.values()), i))
    offers = {}
    for kind, (end, i) in found.items():
        ids = host.token_ids[i, :end].clone()
        if host.response_mask is not None:
            sampled = torch.isin(ids, torch.tensor(list(placeholders.values()))) & host.response_mask[i, :end].bool()
            ids[sampled] = harmless_id(config)
        inputs = {
            name: (x[:, :end] if name.endswith(TOKEN_INPUT) else x).cpu() if isinstance(x, Tensor) else x
            for name, x in rows[i].items()
        }
        offers[kind] = ([*ids.tolist(), harmless_id(config)], inputs)
    return offers


def _after_media(positions: Tensor, row: dict[str, Any]) -> Tensor:
    """(K, L) the same positions, but what follows a video begins after the largest position in it.

    So it was in the code that these models were trained with, and so it is in vLLM. transformers 5.19 counts on from a
    video's height and width alone, so that the text after a long video stands at positions inside it.
    """
    types: Any = next((x[0].tolist() for name, x in row.items() if name.endswith(TOKEN_INPUT)), [])
    for i in range(1, len(types)):
        if types[i - 1] != 0 and types[i] != types[i - 1]:
            gap = int(positions[:, :i].max()) + 1 - int(positions[:, i].min())
            if gap > 0:
                positions = torch.cat([positions[:, :i], positions[:, i:] + gap], 1)
    return positions


def sampled_placeholders(config: Any, token_ids: Tensor, response_mask: Tensor | None) -> Tensor | None:
    """(B, T) bool, where the policy itself sampled a token that stands for a feature; None where it did not."""
    ids = list(placeholder_ids(config).values())
    if response_mask is None or not ids:
        return None
    found = torch.isin(token_ids, torch.tensor(ids, device=token_ids.device)) & response_mask
    return found if bool(found.any()) else None


def harmless_id(config: Any) -> int:
    """A token id that is no media placeholder."""
    return next(i for i in range(len(placeholder_ids(config)) + 1) if i not in placeholder_ids(config).values())


@contextmanager
def true_embeddings(body: Any, hidden: Tensor | None, token_ids: Tensor) -> Iterator[None]:
    """Context in which the body embeds `token_ids` where `hidden` is set, whatever ids it is called with there.

    A sampled placeholder is a token like any other in generation. In a forward pass it would be taken for a feature, so
    the body is called with another id there, and its embedding layer gets the real one.
    """
    if hidden is None:
        yield
        return

    def swap(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.where(hidden, token_ids, arguments[0]), *arguments[1:])

    handle = body.get_input_embeddings().register_forward_pre_hook(swap)
    try:
        yield
    finally:
        handle.remove()
