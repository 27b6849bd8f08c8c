"""Sampling of one token per row of logits by inverse CDF, with separate random numbers for each completion.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from lightrl.records import SamplingParams

_LARGEST_UNIFORM = 1 - 2.0**-40  # below 1 even after a multiplication by the total probability
_NUCLEUS_WIDTH = 1024  # number of top tokens to search for the nucleus before sorting the vocabulary
_CPU_ELEMENTS = 1 << 20  # probabilities per chunk of rows on a CPU, so that they stay in its caches: 8 MiB in float64
_MASK64 = 2**64 - 1


def _mix(x: int) -> int:
    """SplitMix64's finalizer, which maps adjacent integers to unrelated ones."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def completion_uniforms(seed: int, completion: int, count: int) -> Tensor:
    """Returns the first random numbers of a completion, which depend only on the prompt's seed and its index.

    (count,) float64 in [0, 1) on the CPU. A larger `count` doesn't change the first numbers.
    """
    mixed = _mix(_mix(seed & _MASK64) ^ completion)
    generator = torch.Generator().manual_seed(mixed >> 1)  # torch accepts 63 unsigned bits
    return torch.rand(count, dtype=torch.float64, generator=generator).clamp_(max=_LARGEST_UNIFORM)


def cuts(sampling: SamplingParams) -> bool:
    """Whether top-p, top-k, or min-p truncates the vocabulary."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)


def distribution(
    logits: Tensor,
    sampling: SamplingParams,
    *,
    seen: Tensor | None = None,
    forbidden: Tensor | None = None,
    first: bool = False,
) -> Tensor:
    """Returns the unnormalized sampling probabilities of (R, V) logits, with 0 for excluded tokens.

    The order is vLLM's: repetition penalty, forbidden tokens, temperature, min-p, FIRE, top-k, top-p. Top-p applies to
    the tokens kept by min-p and top-k. Tokens tied with the last one kept by top-k or top-p are also kept, so the
    result doesn't depend on sort order. Temperature 0 is treated as 1 here.

    `seen` are the tokens for the repetition penalty, required if it is enabled, and `forbidden` those to exclude, both
    (R, V) bool. `fire_temperature` applies to the `first` tokens of completions. Returns (R, V) float32, nonnegative,
    not renormalized after top-k and top-p.
    """
    logits = logits.float()
    if sampling.repetition_penalty != 1.0 and seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if forbidden is not None:
        logits = logits.masked_fill(forbidden, -torch.inf)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    probs = torch.softmax(logits, -1)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
    if first and sampling.fire_temperature is not None and sampling.temperature > 0:
        heated = logits * (sampling.temperature / sampling.fire_temperature)
        probs = heated.masked_fill(probs == 0, -torch.inf).softmax(-1) if sampling.min_p > 0 else heated.softmax(-1)
    if 0 < sampling.top_k < probs.shape[-1]:
        least = probs.topk(sampling.top_k, -1).values[:, -1:]
        probs = probs.masked_fill(probs < least, 0.0)
    if sampling.top_p < 1:
        probs = probs.masked_fill(probs < _nucleus_threshold(probs, sampling), 0.0)
    return probs


def _nucleus_threshold(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """(R, 1) probability of the least likely token of each row's nucleus."""
    vocabulary = probs.shape[-1]
    mass = sampling.top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
    for width in (min(_NUCLEUS_WIDTH, vocabulary), vocabulary):
        top = probs.topk(width, -1).values
        cumulative = top.cumsum(-1, dtype=torch.float64)
        if width == vocabulary or bool((cumulative[:, -1:] >= mass).all()):
            break
    before = cumulative - top
    return top.masked_fill(before >= mass, torch.inf).amin(-1, keepdim=True)


def sample(
    logits: Tensor,
    sampling: SamplingParams,
    uniforms: Tensor,
    *,
    seen: Tensor | None = None,
    forbidden: Tensor | None = None,
    first: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor] | None]:
    """Samples one token per row of (R, V) logits. See `distribution` for the other arguments.

    token = min {i : F(i) > u F(V)}, where F is the cumulative sum (float64) of `distribution` and u are (R,) float64
    uniforms in [0, 1). Temperature 0 selects the most likely token, with its log-prob at temperature 1, as in vLLM.

    Returns:
        Tokens (R,) int64, log-probs (R,) float32 of the renormalized distribution, and the kept token IDs of each row
        (int32 on the CPU), or None if the vocabulary is not truncated.
    """
    count = len(logits) if logits.is_cuda else max(1, _CPU_ELEMENTS // logits.shape[-1])
    parts = []
    for chunk in (slice(i, i + count) for i in range(0, len(logits), count)):
        seen_rows, forbidden_rows = (None if mask is None else mask[chunk] for mask in (seen, forbidden))
        parts.append(_sample(logits[chunk], sampling, uniforms[chunk], seen_rows, forbidden_rows, first))
    tokens, logprobs, kept = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs), list(chain(*kept)) if cuts(sampling) else None


def _sample(
    logits: Tensor,
    sampling: SamplingParams,
    uniforms: Tensor,
    seen: Tensor | None,
    forbidden: Tensor | None,
    first: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`sample` for some of the rows."""
    probs = distribution(logits, sampling, seen=seen, forbidden=forbidden, first=first)
    cumulative = probs.double().cumsum_(-1)  # cumsum's dtype argument would make another copy
    total = cumulative[:, -1:]
    if sampling.temperature == 0:
        tokens = probs.argmax(-1, keepdim=True)
    else:
        tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    logprobs = (probs.gather(-1, tokens) / total).log_().float()  # in float64, like the total
    kept = list[Tensor]()
    if cuts(sampling):
        rows, ids = probs.nonzero(as_tuple=True)
        counts = rows.bincount(minlength=len(probs)).tolist()
        kept = list(ids.to("cpu", torch.int32).split(counts))
    return tokens[:, 0], logprobs[:, 0], kept
