"""Log-probs and entropies of given tokens from hidden states, without a (tokens, vocabulary) matrix.

Logits are computed in chunks of tokens, reduced, and dropped. The backward pass recomputes them and turns them into
gradients in place. On a CPU, the first chunks are kept, since a second matrix product is slow. With
z = logits / temperature, p = softmax(z), and H the entropy:

    d logprob(y) / dz_j = [j = y] - p_j          d H / dz_j = -p_j (log p_j + H)

Logits have the dtype of the head's weight, as in inference engines, except on CUDA, where products are float32. All
later steps are float32. Unlike fused cross-entropy kernels (Liger, https://arxiv.org/abs/2410.10989; Cut Cross-Entropy,
https://arxiv.org/abs/2411.09009), this uses plain matrix products, differentiates the entropy, and leaves the loss to
the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from lightrl.records import Support

CHUNK_ELEMENTS = 1 << 25  # logits per chunk: 128 MiB in float32
CUDA_CHUNK_ELEMENTS = 1 << 28  # on CUDA, where each chunk reads the whole weight: 1 GiB
KEPT_ELEMENTS = 3 << 25  # on a CPU, logits kept for the backward pass: 384 MiB in float32
CUT = -1e9  # logit outside the support: finite, since entropies would otherwise have 0 times infinity


class LogitMap(NamedTuple):
    """Transformation of the head's output z: `cap * tanh(scale * z / cap)`, without the tanh if cap is 0."""

    scale: float = 1.0
    cap: float = 0.0

    @staticmethod
    def of(config: Any) -> LogitMap:
        """Granite divides by `logits_scaling`, Cohere and Falcon-H1 multiply, Gemma and RecurrentGemma cap."""
        cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        return LogitMap(float(scale) / float(getattr(config, "logits_scaling", None) or 1.0), float(cap or 0.0))


class Distribution(NamedTuple):
    """The distribution of each of M tokens, computed from the head's output."""

    temperature: float = 1.0  # divisor of logits, above 0
    logit_map: LogitMap = LogitMap()  # applied to logits before the temperature
    support: Support | None = None  # M entries, the tokens over which each softmax is computed; None for all

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
        """Returns (C, V) scaled logits of some tokens, float32 or wider."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        z = _product(hidden[rows], weight.T, wide)
        if bias is not None:
            z.add_(bias.to(z.dtype))
        scale, cap = self.logit_map
        if cap:
            z.mul_(scale / cap).tanh_().mul_(cap / self.temperature)
        elif scale != self.temperature:
            z.mul_(scale / self.temperature)
        if self.support is not None:
            z.masked_fill_(outside_support(self.support, rows, len(weight)), CUT)
        return z


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    distribution: Distribution = Distribution(),  # noqa: B008 - an immutable tuple
    *,
    entropy: bool = False,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes `log_softmax(logits / temperature)` at the targets, and its entropy.

    Takes the (M, D) input of the head, its (V, D) weight, its (V,) bias or None, and (M,) int64 targets. A chunk has at
    most `chunk_elements` logits (at least one token's), halved for entropies. Defaults to 2^28 on CUDA, 2^25 elsewhere.

    Returns:
        (M,) float32 log-probs and (M,) float32 entropies in nats or None. Gradients for hidden, weight, and bias are
        exact.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    hidden, weight = hidden.to(dtype), weight.to(dtype)  # autocast doesn't apply to custom functions
    if chunk_elements is None:
        chunk_elements = CUDA_CHUNK_ELEMENTS if device == "cuda" else CHUNK_ELEMENTS
    rows = max(1, (chunk_elements // 2 if entropy else chunk_elements) // len(weight))
    graph = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep = KEPT_ELEMENTS if device == "cpu" and graph else 0
    with torch.autocast(device, enabled=False):
        picked, entropies = _Chunked.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, entropy, rows, keep, distribution
        )
    return picked, entropies if entropy else None


def chunks(total: int, size: int) -> Iterator[slice]:
    """Yields slices of at most `size` that cover `total` tokens."""
    return (slice(i, min(i + size, total)) for i in range(0, total, size))


def outside_support(support: Support, rows: slice, words: int) -> Tensor:
    """Returns (C, words) bool, True outside each token's support."""
    counts, before = support.counts[rows], int(support.counts[: rows.start].sum())
    ids = support.ids[before : before + int(counts.sum())].long()
    owners = torch.repeat_interleave(torch.arange(len(counts), device=ids.device), counts)
    outside = (counts > 0)[:, None].repeat(1, words)
    inside = ids < words
    outside[owners[inside], ids[inside]] = False
    return outside


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        entropy: bool, rows: int, keep: int, distribution: Distribution,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = torch.promote_types(hidden.dtype, torch.float32)
        picked, lse, entropies = (torch.zeros(len(hidden), dtype=wide, device=hidden.device) for _ in range(3))
        kept: list[Tensor] = []
        for part in chunks(len(hidden), rows):
            z = distribution.logits(hidden, weight, bias, part)
            lse[part] = z.logsumexp(1)
            picked[part] = z.gather(1, targets[part, None]).squeeze(1) - lse[part]
            if (len(kept) + 1) * rows * len(weight) <= keep:
                kept.append(z)
                z = z - lse[part, None] if entropy else z
            elif entropy:
                z = z.sub_(lse[part, None])
            if entropy:
                entropies[part] = -torch.linalg.vecdot(z.exp(), z)
            del z  # before the next chunk
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies, *kept)
        ctx.distribution, ctx.rows = distribution, rows
        ctx.set_materialize_grads(False)  # entropies that are only logged cost nothing in the backward pass
        return picked, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, lse, entropies, *kept = ctx.saved_tensors
        (temperature, (scale, cap), _), wide = ctx.distribution, lse.dtype
        g = torch.zeros_like(lse) if grad_logprob is None else grad_logprob
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        d_bias = torch.zeros(len(weight), dtype=wide, device=weight.device) if need_bias else None
        # Without entropy and cap, the gradient is a factor per token times p - [target], applied on the narrow side.
        narrow = grad_entropy is None and not cap
        factor = (-g if narrow else torch.ones_like(g)) * (scale / temperature)
        scaled = hidden * factor[:, None].to(hidden.dtype)
        for number, part in enumerate(chunks(len(hidden), ctx.rows)):
            logits = None if number < len(kept) else ctx.distribution.logits(hidden, weight, bias, part)
            # Kept logits are not changed, for a second backward pass.
            log_p = kept[number] - lse[part, None] if logits is None else logits.sub_(lse[part, None])
            place = targets[part, None]
            if narrow:
                dz = log_p.exp_().scatter_add_(1, place, log_p.new_full(place.shape, -1.0))
            else:
                slope = None
                if cap:  # d tanh = 1 - tanh^2
                    slope = (log_p + lse[part, None]).mul_(temperature / cap).square_().neg_().add_(1.0)
                dz = log_p.exp().mul_(-g[part, None])
                if grad_entropy is not None:  # log p is finite even if p underflows to 0
                    p = log_p.exp()
                    dz.sub_(log_p.add_(entropies[part, None]).mul_(grad_entropy[part, None]).mul_(p))
                dz.scatter_add_(1, place, g[part, None])
                dz = dz if slope is None else dz.mul_(slope)
            if d_bias is not None:
                d_bias += factor[part] @ dz
            dz = dz.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[part] = _product(dz, weight, wide)
            if d_weight is not None:
                _add_product(d_weight, dz.T, scaled[part])
            del logits, log_p, dz  # before the next chunk
        d_hidden = d_hidden.mul_(factor[:, None]).to(hidden.dtype) if d_hidden is not None else None
        d_weight = d_weight.to(weight.dtype) if d_weight is not None else None
        d_bias = d_bias.to(bias.dtype) if d_bias is not None else None
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _wide_products(factor: Tensor) -> bool:
    """Whether the device can return half-precision products in float32, in which it accumulates them anyway."""
    return factor.is_cuda and factor.dtype in (torch.bfloat16, torch.float16)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if _wide_products(a):
        return torch.mm(a, b, out_dtype=dtype)  # type: ignore[call-overload,no-any-return]
    return torch.mm(a, b).to(dtype)


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes target += a b, without a temporary if supported."""
    if target.dtype == a.dtype:
        target.addmm_(a, b)
    elif _wide_products(a):
        torch.addmm(target, a, b, out_dtype=target.dtype, out=target)  # type: ignore[call-overload]
    else:
        target += a @ b


class TokenHead(nn.Linear):
    """A language head that returns log-probs if called with targets, and logits otherwise.

    Changing the class of an existing `nn.Linear` keeps its parameter, name, tying, and hooks. The weight is used only
    inside this module's call, where ZeRO-3 gathers it.
    """

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        compute: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> Any:
        """Returns logits of (..., D) hidden states or, with `targets`, `chunked_logprobs` of (M, D) hidden states.

        `compute` replaces it by another function of (hidden, weight, bias), with `settings` as its other arguments.
        """
        if targets is not None:
            return chunked_logprobs(hidden, self.weight, self.bias, targets, **settings)
        return super().forward(hidden) if compute is None else compute(hidden, self.weight, self.bias, **settings)


def install_head(lm: Any) -> None:
    """Turns a model's language head into a `TokenHead`, in place. Raises a ValueError if it is not linear."""
    head = lm.get_output_embeddings()
    if isinstance(head, TokenHead):
        return
    if type(head) is not nn.Linear:
        raise ValueError(
            f"{type(lm).__name__}: its head is a {type(head).__name__}, but log-probs need a plain nn.Linear. Exclude "
            "the head from lora.target_modules and from quantization, or load a model with a linear head."
        )
    head.__class__ = TokenHead
