"""Log-probs and entropies of given tokens from hidden states, without a (tokens, vocabulary) matrix.

Logits are computed for a tile of tokens and vocabulary at a time, reduced to running sums, and dropped. The backward
pass computes them again and turns them into gradients in place. On a GPU a tile has the whole vocabulary; on a CPU it
fits the processor's cache, and the first tiles are kept, since a second matrix product costs more than memory there.
With z = logits / temperature, p = softmax(z), and H the entropy:

    d logprob(y) / dz_j = [j = y] - p_j          d H / dz_j = -p_j (log p_j + H)

Logits have the dtype of the head's weight, as in inference engines, except on CUDA, whose products are float32;
everything after them is float32. Unlike fused cross-entropy kernels (Liger, https://arxiv.org/abs/2410.10989; Cut
Cross-Entropy, https://arxiv.org/abs/2411.09009), this uses plain matrix products, differentiates the entropy, and
leaves the loss to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightrl.compat.arguments import above
from lightrl.records import Support

CHUNK_ELEMENTS = 1 << 26  # logits that live at once: 256 MiB in float32
CUDA_CHUNK_ELEMENTS = 1 << 28  # on CUDA, where each tile reads the whole weight: 1 GiB
CACHE_ELEMENTS, CACHE_TOKENS = 1 << 19, 1024  # on a CPU: 2 MiB, and fewest tokens that keep matrix products fast
CUT = -1e9  # the logit of a word outside the support: finite, since entropies would have 0 times infinity
KEPT_ELEMENTS = 3 << 25  # on a CPU, logits that are kept for the backward pass: 384 MiB in float32


class LogitMap(NamedTuple):
    """What some families do to the head's output z: `cap * tanh(scale * z / cap)`, without the tanh where cap is 0."""

    scale: float = 1.0
    cap: float = 0.0

    @staticmethod
    def of(config: Any) -> LogitMap:
        """Granite divides by `logits_scaling`, Cohere and Falcon-H1 multiply, Gemma and RecurrentGemma cap."""
        cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        return LogitMap(
            float(scale) / float(getattr(config, "logits_scaling", None) or 1.0),
            float(cap or 0.0),
        )


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_map: LogitMap = LogitMap(),  # noqa: B008 - an immutable tuple
    support: Support | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`log_softmax(logits / temperature)` at the targets, and its entropy.

    Args:
        hidden: (M, D), what the head reads.
        weight: (V, D). bias: (V,) or None.
        targets: (M,) int64 in [0, V).
        temperature: Above 0.
        entropy: Whether to compute entropies.
        logit_map: Applied to logits before the temperature.
        support: M entries, the words over which each softmax is taken; None takes all words.
        chunk_elements: Maximum size of a tile, halved if there are entropies; defaults to 2^28 on CUDA, 2^26 elsewhere,
            and is at most 2^19 on a CPU.

    Returns:
        (M,) float32 log-probs and (M,) float32 entropies in nats or None; exact gradients for hidden, weight, and bias.

    Raises:
        ValueError: temperature is not above 0.
    """
    above("temperature", temperature, note="; greedy decoding has no log-probs to train on")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    hidden, weight = hidden.to(dtype), weight.to(dtype)  # autocast stops at custom functions
    if chunk_elements is None:
        chunk_elements = CUDA_CHUNK_ELEMENTS if device == "cuda" else CHUNK_ELEMENTS
    limit, cpu = max(1, chunk_elements // 2 if entropy else chunk_elements), device == "cpu"
    tile = _tile_size(
        len(hidden), len(weight), min(limit, CACHE_ELEMENTS) if cpu else limit, CACHE_TOKENS if cpu else 1
    )
    keep = KEPT_ELEMENTS if cpu and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad) else 0
    with torch.autocast(device, enabled=False):
        picked, entropies = _Chunked.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, entropy, keep, (temperature, logit_map, tile, support)
        )
    return picked, entropies if entropy else None


def _tile_size(tokens: int, vocabulary: int, limit: int, narrowest: int) -> tuple[int, int]:
    """Rows and columns of a tile of at most `limit` logits; the whole vocabulary where `narrowest` rows remain."""
    rows = min(tokens, max(narrowest, limit // vocabulary), limit)
    return max(1, rows), max(1, min(vocabulary, limit // max(1, rows)))


def chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, total)) for i in range(0, total, size))


class Tiles:
    """Logits of a tile of tokens and vocabulary at a time, in one buffer that is reused."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: Any) -> None:
        self.hidden = hidden
        self.weight = weight
        self.bias = bias
        self.targets = targets
        self.temperature, self.logit_map, (self.tokens, self.words), self.support = settings
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        dtype = self.wide if _has_wide_products(hidden) else hidden.dtype
        self.memory = hidden.new_empty(self.tokens * self.words, dtype=dtype)
        self.kept: dict[tuple[int, int], Tensor] = {}

    def rows(self) -> Iterator[slice]:
        return chunks(len(self.hidden), self.tokens)

    def columns(self) -> Iterator[slice]:
        return chunks(len(self.weight), self.words)

    def logits(self, rows: slice, words: slice) -> Tensor:
        """Scaled logits, float32 or wider, valid until the next call; the caller may change them."""
        kept = self.kept.get((rows.start, words.start))
        if kept is not None:
            return self.scratch(kept).copy_(kept)
        return self.compute(rows, words, keep=False)

    def scratch(self, like: Tensor) -> Tensor:
        """The shared buffer in that shape; a new one where logits are wider than the head's weight."""
        memory = self.memory if self.memory.dtype == like.dtype else like.new_empty(like.numel())
        return memory[: like.numel()].view(like.shape)

    def compute(self, rows: slice, words: slice, *, keep: bool) -> Tensor:
        """The same, recomputed; with `keep` in memory of their own, which the caller must not change."""
        hidden, weight = self.hidden[rows], self.weight[words]
        size = len(hidden), len(weight)
        z = self.memory.new_empty(size) if keep else self.memory[: size[0] * size[1]].view(size)
        _put_product(z, hidden, weight.T)
        if self.bias is not None:
            z.add_(self.bias[words].to(z.dtype))
        z = z.to(self.wide)
        scale, cap = self.logit_map
        if cap:
            z.mul_(scale / cap).tanh_().mul_(cap / self.temperature)
        elif scale != self.temperature:
            z.mul_(scale / self.temperature)
        if self.support is not None:
            z.masked_fill_(outside_support(self.support, rows, words), CUT)
        if keep:
            self.kept[rows.start, words.start] = z
        return z

    def places(self, rows: slice, words: slice) -> tuple[Tensor, Tensor]:
        """(C, 1) columns of the targets, and whether they lie in the tile at all."""
        place = self.targets[rows, None] - words.start
        last = words.stop - words.start - 1
        return place.clamp(0, last), (place >= 0) & (place <= last)


def outside_support(support: Support, rows: slice, words: slice) -> Tensor:
    """(C, W) bool, True outside of each token's support, for a tile."""
    counts, before = support.counts[rows], int(support.counts[: rows.start].sum())
    ids = support.ids[before : before + int(counts.sum())].long()
    owners = torch.repeat_interleave(torch.arange(len(counts), device=ids.device), counts)
    inside = (ids >= words.start) & (ids < words.stop)
    outside = (counts > 0)[:, None].repeat(1, words.stop - words.start)
    outside[owners[inside], ids[inside] - words.start] = False
    return outside


class _Sums(NamedTuple):
    """Running softmax sums over part of the vocabulary: with m the largest z, `total` is the sum of e^(z - m) and
    `moment` that of e^(z - m) (z - m)."""

    top: Tensor
    total: Tensor
    moment: Tensor | None

    @staticmethod
    def of(z: Tensor, before: _Sums | None, out: Tensor, exp: Tensor | None) -> _Sums:
        """Takes one more tile into account; `out`, and for entropies `exp`, are memory of its size to write to."""
        top = z.amax(1) if before is None else torch.maximum(z.amax(1), before.top)
        z = torch.sub(z, top[:, None], out=out)
        exps = z.exp_() if exp is None else torch.exp(z, out=exp)
        total, moment = exps.sum(1), None if exp is None else torch.linalg.vecdot(exps, z)
        if before is not None:
            shift = before.top - top
            weight = shift.exp()
            total += weight * before.total
            if moment is not None and before.moment is not None:
                moment += weight * (before.moment + shift * before.total)
        return _Sums(top, total, moment)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        entropy: bool, keep: int, settings: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tiles = Tiles(hidden, weight, bias, targets, settings)
        picked, lse, entropies = (torch.zeros(len(hidden), dtype=tiles.wide, device=hidden.device) for _ in range(3))
        memory = torch.empty(len(tiles.memory), dtype=tiles.wide, device=hidden.device) if entropy else None
        for rows in tiles.rows():
            sums: _Sums | None = None
            for words in tiles.columns():
                kept = keep >= len(tiles.memory)
                keep -= len(tiles.memory) if kept else 0
                z = tiles.compute(rows, words, keep=kept)
                place, inside = tiles.places(rows, words)
                picked[rows] += torch.where(inside, z.gather(1, place), 0.0).squeeze(1)
                exp = None if memory is None else memory[: z.numel()].view(z.shape)
                sums = _Sums.of(z, sums, tiles.scratch(z) if kept else z, exp)
                del z  # before the next one is made
            assert sums is not None
            lse[rows] = sums.total.log() + sums.top
            if sums.moment is not None:  # H = log sum exp(z) - sum p z
                entropies[rows] = sums.total.log() - sums.moment / sums.total
        picked -= lse
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies, *tiles.kept.values())
        ctx.settings, ctx.places = settings, list(tiles.kept)
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in the backward pass
        return picked, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, lse, entropies, *kept = ctx.saved_tensors
        tiles = Tiles(hidden, weight, bias, targets, ctx.settings)
        tiles.kept = dict(zip(ctx.places, kept, strict=True))
        g = torch.zeros_like(lse) if grad_logprob is None else grad_logprob
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        slope = tiles.logit_map.scale / tiles.temperature
        # Without entropy and cap the gradient is a factor of the token times p - [target]: it goes to the narrow side.
        narrow = grad_entropy is None and not tiles.logit_map.cap
        factor = (-g if narrow else torch.ones_like(g)) * slope
        scaled = hidden * factor[:, None].to(hidden.dtype)
        d_hidden = torch.zeros(hidden.shape, dtype=tiles.wide, device=hidden.device) if need_hidden else None
        d_weight = torch.empty_like(weight) if need_weight else None
        d_bias = torch.zeros(len(weight), dtype=tiles.wide, device=weight.device) if need_bias else None
        for words in tiles.columns():
            of_words = _Sum(None if d_weight is None else d_weight[words], tiles.wide)
            for rows in tiles.rows():
                z = tiles.logits(rows, words)
                place, inside = tiles.places(rows, words)
                if narrow:
                    dz = z.sub_(lse[rows, None]).exp_().scatter_add_(1, place, -inside.to(z.dtype))
                else:
                    h = None if grad_entropy is None else grad_entropy[rows]
                    cap = tiles.logit_map.cap / tiles.temperature  # bound of the scaled logits
                    dz = _logit_gradient(z, place, inside, lse[rows], entropies[rows], g[rows], h, cap)
                if d_bias is not None:
                    d_bias[words] += factor[rows] @ dz
                dz = dz.to(weight.dtype)
                if d_hidden is not None:
                    _add_product(d_hidden[rows], dz, weight[words])
                if need_weight:
                    of_words.add(dz.T, scaled[rows])
                del z, dz  # before the next one is made
            of_words.finish()
        d_hidden = d_hidden.mul_(factor[:, None]).to(hidden.dtype) if d_hidden is not None else None
        d_bias = d_bias.to(bias.dtype) if d_bias is not None else None
        return d_hidden, d_weight, d_bias, None, None, None, None


def _has_wide_products(factor: Tensor) -> bool:
    """Whether the device can put products of half precision out in float32, in which it sums them anyway."""
    return factor.is_cuda and factor.dtype in (torch.bfloat16, torch.float16)


def _put_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target = a b, `target` possibly wider than the factors."""
    if target.dtype == a.dtype:
        torch.mm(a, b, out=target)
    elif _has_wide_products(a):
        torch.mm(a, b, out_dtype=target.dtype, out=target)  # type: ignore[call-overload]
    else:
        target.copy_(a @ b)


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a b, the same; without a temporary where the device can."""
    if target.dtype == a.dtype:
        target.addmm_(a, b)
    elif _has_wide_products(a):
        torch.addmm(target, a, b, out_dtype=target.dtype, out=target)  # type: ignore[call-overload]
    else:
        target += a @ b


class _Sum:
    """A sum of products, in place where the target is wide enough."""

    def __init__(self, target: Tensor | None, wide: torch.dtype) -> None:
        self.target = target
        self.first = True
        same = target is None or target.dtype == wide
        self.total: Any = (
            target if same or target is None else torch.empty(target.shape, dtype=wide, device=target.device)
        )

    def add(self, a: Tensor, b: Tensor) -> None:
        (_put_product if self.first else _add_product)(self.total, a, b)
        self.first = False

    def finish(self) -> None:
        if self.target is not self.total and self.target is not None:
            self.target.copy_(self.total)


def _logit_gradient(
    z: Tensor,
    place: Tensor,
    inside: Tensor,
    lse: Tensor,
    entropies: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    cap: float,
) -> Tensor:
    """Turns a tile of scaled logits into the gradient with respect to them, or to the tanh's input under a cap."""
    slope = z.div(cap).square_().neg_().add_(1.0) if cap else None  # d tanh = 1 - tanh^2
    log_p = z.sub_(lse[:, None])
    if grad_entropy is None:
        dz = log_p.exp_().mul_(-grad_logprob[:, None])
    else:
        p = log_p.exp()
        # -p (g + h (log p + H)), where p underflows to 0 log p is still finite
        dz = log_p.add_(entropies[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprob[:, None]).mul_(p)
    dz.scatter_add_(1, place, torch.where(inside, grad_logprob[:, None], 0.0))
    return dz if slope is None else dz.mul_(slope)


class TokenHead(nn.Linear):
    """A language head that returns log-probs if called with targets, and logits otherwise.

    An existing `nn.Linear` becomes one by changing its class, which keeps its parameter, name, tying, and hooks. The
    weight is used inside this module's call only: that is where ZeRO-3 gathers it.
    """

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        compute: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> Any:
        """Logits of (..., D) hidden states; with `targets`, `chunked_logprobs` of (M, D) hidden states.

        `compute` is another function of (hidden, weight, bias); `settings` are the function's other arguments.
        """
        if targets is not None:
            return chunked_logprobs(hidden, self.weight, self.bias, targets, **settings)
        return super().forward(hidden) if compute is None else compute(hidden, self.weight, self.bias, **settings)


def install_head(lm: Any) -> None:
    """Makes the language head of a model a `TokenHead`, in place.

    Raises:
        ValueError: the head is not a plain linear layer.
    """
    head = lm.get_output_embeddings()
    if isinstance(head, TokenHead):
        return
    if type(head) is not nn.Linear:
        raise ValueError(
            f"{type(lm).__name__} has a head of type {type(head).__name__}: log-probs need a plain nn.Linear. Leave "
            "the head out of lora.target_modules and of quantisation, or load a model with a linear head."
        )
    head.__class__ = TokenHead
