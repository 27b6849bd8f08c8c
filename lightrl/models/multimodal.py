"""Images, videos, and audio in a batch: model inputs, positions, and shared prefixes.

Sequences carry the output of their model's processor, and this module is independent of model families. Inputs per
token are laid out like the tokens, all others are concatenated in row order. Positions come from the model's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightrl.distributed.sharded import is_sharded
from lightrl.distributed.strategies import gather_objects, has_process_group
from lightrl.models.turns import TOKEN_INPUT, harmless_id, placeholder_ids
from lightrl.records import RowBatch

Rows = Sequence[dict[str, Any]]

TYPE_STEP = 1 << 26  # larger than any vocabulary


def video_timing(times: Sequence[float]) -> dict[str, Any]:
    """Returns the metadata that processors expect for a video whose frames are all used, from evenly spaced seconds."""
    step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    rate = 1 / step if step else 2.0
    frames = {"total_num_frames": len(times), "frames_indices": list(range(len(times))), "do_sample_frames": False}
    return {"fps": rate, "duration": len(times) / rate, "video_backend": "lightrl", **frames}


def merged_inputs(
    rows: Rows, wanted: Sequence[int], shape: tuple[int, int], device: torch.device, plain: int = 0
) -> dict[str, Tensor]:
    """Merges the model inputs of a batch of shape (B, T), from B dictionaries of each row's processor, `{}` for text.

    Inputs per token are (B, T), with the token type `plain` by default (see `causal_type`). All others are concatenated
    along their first dimension over the rows `wanted`, in stream order, with other dimensions zero-padded to the
    largest, as processors do for a batch.
    """
    merged: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if name.endswith(TOKEN_INPUT):
            merged[name] = torch.full(shape, plain, dtype=torch.long, device=device)
            for i, row in enumerate(rows):
                if name in row:
                    merged[name][i, : row[name].shape[1]] = row[name][0].to(device, non_blocking=True)
            continue
        parts = [rows[i][name].to(device, non_blocking=True) for i in wanted if name in rows[i]]
        if parts:
            largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
            merged[name] = torch.cat([_padded(part, largest) for part in parts])
    return merged


def _padded(part: Tensor, sizes: list[int]) -> Tensor:
    missing = [want - have for have, want in zip(part.shape[1:], sizes, strict=True)]
    return F.pad(part, [pad for extra in reversed(missing) for pad in (0, extra)]) if any(missing) else part


def marked_tokens(config: Any, rows: RowBatch) -> tuple[Tensor, Tensor]:
    """Returns token IDs for finding shared prefixes, and the (B, 2) positions of the first and last placeholder or -1.

    A row's media are computed once, at its first placeholder. Rows therefore share that position only if all of their
    media are equal, and no shared prefix ends between the first and the last placeholder. In the (B, T) token IDs, a
    negative number that identifies the media replaces a row's first placeholder. Sampled placeholders are other
    negative numbers. Tokens of other types are shifted.
    """
    ids, response = rows.on_host("token_ids").clone(), rows.on_host("response_mask")
    places = _placeholders(config, ids) & rows.on_host("attention_mask")
    sampled = places & response
    ids[sampled] = -1 - len(rows) - ids[sampled]
    places &= ~sampled
    spans = torch.full((len(rows), 2), -1)
    kinds: list[dict[str, Any]] = []
    for i, row in enumerate(rows.inputs):
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


def _placeholders(config: Any, token_ids: Tensor) -> Tensor:
    """Returns which tokens, in host memory, are placeholders."""
    return torch.isin(token_ids, torch.tensor(list(placeholder_ids(config).values())))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows have the same media, regardless of their text."""
    if one is other or one.keys() != other.keys():
        return one is other
    names = [name for name in one if not name.endswith(TOKEN_INPUT)]
    return all(one[name] is other[name] or torch.equal(one[name], other[name]) for name in names)


def media_positions(body: Any, token_ids: Tensor, rows: Rows) -> Tensor | None:
    """Computes (K, B, T) positions with the model's own code, per prompt; None if it has no such code.

    Tokens after a prompt continue from its largest position, as in generation. A shared prompt is computed once. Raises
    a ValueError if a row's inputs don't match its tokens.
    """
    function = getattr(body, "get_rope_index", None)
    if function is None:
        return None
    width = token_ids.shape[1]
    plain = torch.arange(width, device=token_ids.device)
    known: dict[int, tuple[Tensor, int]] = {}
    out: list[Tensor | None] = []
    for i, row in enumerate(rows):
        if not row:
            out.append(None)
            continue
        length = next((x.shape[1] for name, x in row.items() if name.endswith(TOKEN_INPUT)), width)
        if id(row) not in known:
            known[id(row)] = _prompt_positions(function, token_ids[i : i + 1, :length], row, i)
        prompt, following = known[id(row)]
        rest = plain[: width - length] + following
        out.append(torch.cat([prompt, rest.expand(len(prompt), -1)], 1))
    kinds = next(len(positions) for positions in out if positions is not None)
    return torch.stack([plain.expand(kinds, -1) if positions is None else positions for positions in out], 1)


def _prompt_positions(function: Any, prompt: Tensor, row: dict[str, Any], number: int) -> tuple[Tensor, int]:
    """Returns (K, L) positions of a prompt alone, and the position of the next token."""
    names = inspect.signature(function).parameters
    arguments = {name: x.to(prompt.device) for name, x in row.items() if name in names}
    try:
        positions = function(input_ids=prompt, **arguments)[0][:, 0]
    except (RuntimeError, StopIteration, TypeError, IndexError, AttributeError) as error:
        raise _misfit(number, str(error)) from error
    types = next((x[0] for name, x in row.items() if name.endswith(TOKEN_INPUT)), None)
    if types is not None:
        text = positions[:, types.to(positions.device) == 0]
        if bool((text != text[:1]).any()):  # placeholders of an image of another size
            raise _misfit(number, "placeholders and features have different shapes")
        positions = _after_media(positions, types.tolist())
    return positions, int(positions.max()) + 1


def _misfit(number: int, reason: str) -> ValueError:
    return ValueError(
        f"row {number} of the batch: its images, videos, or audio don't match the placeholders in its tokens "
        f"({reason}). Use inputs and tokens from the same call of the model's processor."
    )


def _after_media(positions: Tensor, types: list[int]) -> Tensor:
    """Returns (K, L) positions in which text after a video starts after the video's largest position.

    The models' training code and vLLM do the same. transformers continues only from a video's height and width, so text
    after a long video gets positions inside it.
    """
    for i in range(1, len(types)):
        if types[i - 1] != 0 and types[i] != types[i - 1]:
            gap = int(positions[:, :i].max()) + 1 - int(positions[:, i].min())
            if gap > 0:
                positions = torch.cat([positions[:, :i], positions[:, i:] + gap], 1)
    return positions


# ---- collective media encoders ---------------------------------------------------------------------------------------


def idle_parameters(body: Any) -> Tensor | float:
    """Returns 0 with a graph over the trained parameters outside the language model.

    DDP waits for the gradient of every parameter, and a batch of text uses none of the vision tower's.
    """
    if not (_several_ranks() and torch.is_grad_enabled()):
        return 0.0
    inside = {id(p) for p in body.get_decoder().parameters()}
    idle = [p for p in body.parameters() if p.requires_grad and id(p) not in inside and not is_sharded(p)]
    return sum((p.sum() * 0.0 for p in idle), 0.0)


def _several_ranks() -> bool:
    return has_process_group() and dist.get_world_size() > 1


def runs_on_all_ranks(body: Any) -> bool:
    """Whether every rank calls this model at the same time, since it is sharded or its gradients are reduced."""
    if not _several_ranks():
        return False
    return any(is_sharded(p) or (p.requires_grad and torch.is_grad_enabled()) for p in body.parameters())


def lent_rows(config: Any, rows: RowBatch) -> list[RowBatch]:
    """Returns single rows of other ranks that make this rank run the same modules. Collective.

    A vision tower that is sharded, or whose gradients are reduced as they arrive, must run on all ranks. A rank without
    media of a kind that another rank has gets the shortest row of that rank. Empty if all ranks have the same kinds.
    """
    offers, lent = _offers(config, rows), []
    kinds_of_ranks = gather_objects(list(offers))
    for kind in placeholder_ids(config):
        shows = [kind in kinds for kinds in kinds_of_ranks]
        if any(shows) and not all(shows):
            parcel: list[Any] = [offers.get(kind)]
            dist.broadcast_object_list(parcel, src=shows.index(True))
            if kind not in offers:
                lent.append(parcel[0])
    return lent


def _offers(config: Any, rows: RowBatch) -> dict[str, RowBatch]:
    """Returns the shortest row with each kind of media, up to the first token after all of its media."""
    found: dict[str, tuple[int, int]] = {}
    ids, sampled, harmless = rows.on_host("token_ids"), rows.on_host("response_mask"), harmless_id(config)
    for i, row in enumerate(rows.inputs):
        places = {kind: (ids[i] == token) & ~sampled[i] for kind, token in placeholder_ids(config).items() if row}
        ends = {kind: int(at.nonzero().max()) + 1 for kind, at in places.items() if bool(at.any())}
        for kind in ends:
            found[kind] = min(found.get(kind, (1 << 60, i)), (max(ends.values()), i))
    offers = {}
    for kind, (end, i) in found.items():
        tokens = F.pad(ids[i : i + 1, :end], (0, 1), value=harmless)  # the last one reads its media
        tokens[:, :end].masked_fill_(_placeholders(config, tokens[:, :end]) & sampled[i, :end], harmless)
        inputs = {
            name: (x[:, :end] if name.endswith(TOKEN_INPUT) else x).cpu() if isinstance(x, Tensor) else x
            for name, x in rows.inputs[i].items()
        }
        real = torch.ones_like(tokens, dtype=torch.bool)
        read = F.pad(torch.zeros_like(real[:, 1:]), (0, 1), value=True)
        offers[kind] = RowBatch(token_ids=tokens, attention_mask=real, response_mask=read, inputs=[inputs])
    return offers


def with_lent(rows: RowBatch, lent: list[RowBatch]) -> tuple[RowBatch, int | None]:
    """Returns B rows followed by rows of other ranks, and B; None if no output of the B rows is read."""
    parts, count, groups = [rows, *lent], len(rows), rows.on_host("group_ids")
    width = max(part.token_ids.shape[1] for part in parts)

    def joined(name: str) -> Tensor:
        return torch.cat([F.pad(x, (0, width - x.shape[1])) for x in (part.on_host(name) for part in parts)])

    response = joined("response_mask")
    if groups is not None:
        groups = torch.cat([groups, int(groups.max()) + 1 + torch.arange(len(lent))])
    whole = RowBatch(
        token_ids=joined("token_ids"),
        attention_mask=joined("attention_mask"),
        response_mask=response,
        group_ids=groups,
        inputs=[*(rows.inputs or [{}] * count), *(part.inputs[0] for part in lent)],
        routes=[*rows.routes, *[None] * len(lent)] if rows.routes else [],
    )
    # A load-balancing loss over no rows would be NaN.
    return whole.to(rows.token_ids.device), count if bool(response[:count, 1:].any()) else None


def own_output(out: Any, count: int, width: int) -> Any:
    """Returns the `BackboneOutput` for the (count, width) rows of this rank from the output of `with_lent`'s batch."""
    longest = out.shape[1]
    row, column = out.targets // longest, out.targets % longest
    own = row < count
    empty = not bool(own.any())
    hidden = (out.hidden[:1] if empty else out.hidden[own]) + 0.0 * out.hidden[~own].sum()
    targets = out.targets.new_zeros(1) if empty else (row * width + column)[own]
    return replace(out, hidden=hidden, targets=targets, shape=(count, width), empty=empty)


# ---- unread media and sampled placeholders ---------------------------------------------------------------------------


def without_unread_media(config: Any, rows: RowBatch) -> RowBatch:
    """Converts rows without read outputs to text: their masks don't mark sampled placeholders."""
    read = rows.on_host("response_mask")[:, 1:].any(1)
    if bool(read.all()):
        return rows
    ids, device = rows.on_host("token_ids"), rows.token_ids.device
    ids = ids.masked_fill(_placeholders(config, ids) & ~read[:, None], harmless_id(config))
    inputs = [row if used else {} for row, used in zip(rows.inputs, read.tolist(), strict=True)]
    changed = replace(rows, token_ids=ids.to(device), inputs=inputs)
    changed.host = {**rows.host, "token_ids": (changed.token_ids, ids)}
    return changed


def sampled_placeholders(config: Any, rows: RowBatch) -> Tensor | None:
    """Returns (B, T) bool, True if the policy sampled a token that stands for a feature; None if it sampled none."""
    found = _placeholders(config, rows.on_host("token_ids")) & rows.on_host("response_mask")
    return found.to(rows.token_ids.device) if bool(found.any()) else None


@contextmanager
def true_embeddings(body: Any, hidden: Tensor, token_ids: Tensor) -> Iterator[None]:
    """Context manager in which the body embeds `token_ids` at `hidden`, regardless of the IDs it is called with.

    In generation, a sampled placeholder is an ordinary token. A forward pass would treat it as a feature, so the body
    is called with another ID, and its embedding layer gets the real one.
    """

    def swap(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.where(hidden, token_ids, arguments[0]), *arguments[1:])

    handle = body.get_input_embeddings().register_forward_pre_hook(swap)
    try:
        yield
    finally:
        handle.remove()
