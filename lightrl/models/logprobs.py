"""Log-probs and entropies of given tokens from hidden states, without a (tokens, vocabulary) matrix.

Logits are made for a chunk of tokens at a time, reduced to one log-prob and one entropy per token, and dropped; the
backward pass makes them again, chunk by chunk, and turns them into gradients in place. With z = logits / temperature,
p = softmax(z) and H the entropy:

    d logprob(y) / dz_j = [j = y] - p_j          d H / dz_j = -p_j (log p_j + H)

Logits have the dtype of the head's weight, as in inference engines; everything after them is float32.
It differs from fused cross-entropy kernels (Liger, https://arxiv.org/abs/2410.10989; Cut Cross-Entropy,
https://arxiv.org/abs/2411.09009) in that it needs nothing but matrix products, has the entropy with its gradient, and
leaves the loss to the caller. Letters: M tokens, D hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["LogitMap", "TokenHead", "chunked_logprobs", "install_head"]

CHUNK_ELEMENTS = 1 << 26  # logits that live at once: 256 MiB in float32


class LogitMap(NamedTuple):
    """What some families do to the head's output z: `cap * tanh(scale * z / cap)`, without the tanh where cap is 0."""

    scale: float = 1.0
    cap: float = 0.0

    @staticmethod
    def of(config: Any) -> LogitMap:
        """Granite divides by `logits_scaling`, Cohere and Falcon-H1 multiply, Gemma caps."""
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        return LogitMap(
            float(scale) / float(getattr(config, "logits_scaling", None) or 1.0),
            float(getattr(config, "final_logit_softcapping", None) or 0.0),
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
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """`log_softmax(logits / temperature)` at the targets, and its entropy.

    Args:
        hidden: (M, D), what the head reads.
        weight: (V, D). bias: (V,) or None.
        targets: (M,) int64 in [0, V).
        temperature: above 0.
        entropy: whether the entropy is wanted too.
        logit_map: what happens to logits before the temperature.
        chunk_elements: C * V is at most this, half of it where entropies need a second buffer; or C is 1.

    Returns:
        (M,) float32 log-probs and (M,) float32 entropies in nats or None; exact gradients for hidden, weight and bias.

    Raises:
        ValueError: temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: must be above 0; greedy decoding has no log-probs to train on.")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    hidden, weight = hidden.to(dtype), weight.to(dtype)  # autocast stops at custom functions
    chunk = max(1, chunk_elements // weight.shape[0])
    with torch.autocast(device, enabled=False):
        picked, entropies = _Chunked.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, temperature, entropy, logit_map, chunk
        )
    return picked, entropies if entropy else None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_map: LogitMap, temperature: float) -> Tensor:
    """(C, V) scaled logits in a fresh tensor, float32 or wider."""
    z = F.linear(hidden, weight, None if bias is None else bias.to(weight.dtype))
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if logit_map.cap:
        z.mul_(logit_map.scale / logit_map.cap).tanh_().mul_(logit_map.cap / temperature)
    elif logit_map.scale != temperature:
        z.mul_(logit_map.scale / temperature)
    return z


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, total)) for i in range(0, total, size))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor,
        temperature: float, entropy: bool, logit_map: LogitMap, chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = torch.promote_types(hidden.dtype, torch.float32)
        picked, lse, entropies = (torch.zeros(len(hidden), dtype=wide, device=hidden.device) for _ in range(3))
        for rows in _chunks(len(hidden), max(1, chunk // 2) if entropy else chunk):
            z = _logits(hidden[rows], weight, bias, logit_map, temperature)
            top = z.amax(1, keepdim=True)
            picked[rows] = z.gather(1, targets[rows, None]).squeeze(1)
            z.sub_(top)
            exp = z.exp() if entropy else z.exp_()
            total = exp.sum(1)
            lse[rows] = total.log() + top.squeeze(1)
            if entropy:  # H = log sum exp(z) - sum p z
                entropies[rows] = total.log() - torch.linalg.vecdot(exp, z) / total
            del z, exp  # before the next chunk is made
        picked -= lse
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies)
        ctx.settings = temperature, logit_map, chunk
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in the backward pass
        return picked, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        temperature, logit_map, chunk = ctx.settings
        grad_logprob = torch.zeros_like(lse) if grad_logprob is None else grad_logprob
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        cap = logit_map.cap / temperature  # bound of the scaled logits
        wide, slope = lse.dtype, logit_map.scale / temperature
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        d_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if need_bias else None
        for rows in _chunks(len(hidden), chunk if grad_entropy is None else max(1, chunk // 2)):
            z = _logits(hidden[rows], weight, bias, logit_map, temperature)
            g, h = grad_logprob[rows], None if grad_entropy is None else grad_entropy[rows]
            if h is None and not logit_map.cap:
                dz, factor = z.sub_(lse[rows, None]).exp_(), -g * slope  # dz is factor * p; targets are added below
            else:
                dz, factor = _logit_gradient(z, targets[rows], lse[rows], entropies[rows], g, h, cap), None
                dz *= slope
            scaled = hidden[rows] if factor is None else hidden[rows] * factor[:, None].to(hidden.dtype)
            if d_bias is not None:
                d_bias += dz.sum(0) if factor is None else factor @ dz
            dz = dz.to(weight.dtype)
            if d_hidden is not None:
                part = dz @ weight
                d_hidden[rows] = part if factor is None else (part - weight[targets[rows]]) * factor[:, None]
            if d_weight is not None:
                if d_weight.dtype == dz.dtype:
                    d_weight.addmm_(dz.T, scaled)
                else:
                    d_weight += dz.T @ scaled
            if factor is not None:
                if d_weight is not None:
                    d_weight.index_add_(0, targets[rows], scaled.to(wide), alpha=-1)
                if d_bias is not None:
                    d_bias.index_add_(0, targets[rows], factor, alpha=-1)
            del z, dz  # before the next chunk is made
        d_weight = d_weight.to(weight.dtype) if d_weight is not None else None
        d_bias = d_bias.to(bias.dtype) if d_bias is not None else None
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _logit_gradient(
    z: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropies: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    cap: float,
) -> Tensor:
    """Turns (C, V) scaled logits into the gradient with respect to them, or to the tanh's input under a cap."""
    slope = z.div(cap).square_().neg_().add_(1.0) if cap else None  # d tanh = 1 - tanh^2
    log_p = z.sub_(lse[:, None])
    if grad_entropy is None:
        dz = log_p.exp_().mul_(-grad_logprob[:, None])
    else:
        p = log_p.exp()
        # -p (g + h (log p + H)), where p underflows to 0 log p is still finite
        dz = log_p.add_(entropies[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprob[:, None]).mul_(p)
    rows = torch.arange(len(z), device=z.device)
    dz[rows, targets] += grad_logprob
    return dz if slope is None else dz.mul_(slope)


class TokenHead(nn.Linear):
    """A language head that answers with log-probs where it is given targets, and as before where it is not.

    An existing `nn.Linear` becomes one by changing its class, so its parameter, its name, its tying to the embedding
    and the hooks that sharding strategies put on it stay. All use of the weight happens inside this module's call:
    that is where ZeRO-3 gathers it (FSDP2 has it gathered throughout the root's forward).
    """

    def forward(self, hidden: Tensor, targets: Tensor | None = None, **settings: Any) -> Any:  # type: ignore[override]
        """Logits of (..., D), or with (M,) targets what `chunked_logprobs` returns."""
        if targets is None:
            return super().forward(hidden)
        return chunked_logprobs(hidden, self.weight, self.bias, targets, **settings)


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
