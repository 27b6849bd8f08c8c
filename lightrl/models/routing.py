"""Routing replay: mixture-of-experts models are trained with the experts chosen by the engine.

Rounding decides between experts with nearly equal scores, so engine and trainer may choose different ones, which makes
log-probs and importance ratios jump. The engine records the set S of K chosen experts per token and layer. The
trainer's routers use S instead of their own top K; everything else is unchanged. For softmax routers that renormalize,

    w_i = softmax(z)_i / sum_{j in S} softmax(z)_j,  i in S,

so router and experts get the gradient of the function that was sampled from.

Source: Ma et al. 2025 (R3), https://arxiv.org/abs/2510.11370. Here, the model's own top-k returns S, so its use of the
values (softmax before or after, sigmoid, renormalization, scaling) is unchanged. Instead of keeping caches over turns,
the engine reuses S when it recomputes the tokens of earlier turns.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lightrl.compat.transformers import router_modules
from lightrl.records import Routes

_pass: ContextVar[RoutingPass | None] = ContextVar("routing_pass", default=None)


class RoutingPass:
    """Re-entrant context manager in which the routers of this thread record or replay their expert choices.

    `choices` are L tensors (N, K) int64 of experts for N tokens, -1 to let the router choose. None only records.
    """

    def __init__(self, choices: tuple[Tensor, ...] | None = None) -> None:
        self.choices = choices
        self.taken: dict[int, Tensor] = {}
        self.running: list[_TopK] = []
        self._tokens: list[Token[RoutingPass | None]] = []

    def __enter__(self) -> RoutingPass:
        self._tokens.append(_pass.set(self))
        return self

    def __exit__(self, *_: Any) -> None:
        _pass.reset(self._tokens.pop())


class _TopK(TorchFunctionMode):
    """Replaces the result of `topk` over experts within a router's forward pass."""

    def __init__(self, router: Any, choice: Tensor | None) -> None:
        super().__init__()
        self.k: int = router.top_k
        self.experts: int = router.num_experts
        self.choice = choice
        self.taken: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):  # other functions choose groups of experts, as in DeepSeek's routers
            return result
        scores: Tensor = args[0] if args else kwargs["input"]
        values, taken = result
        if scores.ndim != 2 or scores.shape[1] != self.experts or taken.shape[1] != self.k:
            return result
        if self.choice is not None:
            taken = torch.where(self.choice < 0, taken, self.choice)
            values = scores.gather(1, taken)
        self.taken.append(taken)
        return torch.return_types.topk((values, taken))


class Routers:
    """The routers of a model in layer order, with hooks that record and replay their choices.

    Raises:
        ValueError: The model has no router, or one that chooses experts in an unknown way.
    """

    def __init__(self, model: nn.Module) -> None:
        found = router_modules(model)
        self.name = type(found[0][1] if found else model).__name__
        if not found or not all(hasattr(router, "top_k") and hasattr(router, "num_experts") for _, router in found):
            raise self._unknown()
        self.layers = [int(next(part for part in name.split(".") if part.isdigit())) for name, _ in found]
        self.num_experts, self.top_k = (min(getattr(r, n) for _, r in found) for n in ("num_experts", "top_k"))
        self.dtype = torch.uint8 if max(router.num_experts for _, router in found) <= 256 else torch.int16
        for place, (_, router) in enumerate(found):
            router.register_forward_pre_hook(partial(self._begin, place))
            router.register_forward_hook(partial(self._end, place), always_call=True)

    def recorded(self, forward: RoutingPass) -> Tensor:
        """Returns (N, L, K) uint8 or int16 experts that the routers chose for the N tokens of a pass."""
        if len(forward.taken) < len(self.layers):
            raise self._unknown()
        return torch.stack([forward.taken[place] for place in range(len(self.layers))], 1).to(self.dtype)

    def arbitrary(self, rows: int, width: int) -> list[Routes]:
        """Returns experts of `rows` sequences that differ per token and layer and are the same at every call."""
        generator = torch.Generator().manual_seed(0)
        order = torch.rand(rows, width, len(self.layers), self.num_experts, generator=generator).argsort(-1)
        return [Routes(experts) for experts in order[..., : self.top_k].to(self.dtype)]

    def replaying(self, experts: Tensor) -> RoutingPass:
        """Returns a pass in which the routers use (N, L, K) int64 `experts`, from `Routes.at`."""
        if experts.shape[1] != len(self.layers):
            experts = experts[:, self.layers]
        return RoutingPass(experts.unbind(1))

    def _begin(self, place: int, router: Any, args: Any) -> None:
        forward = _pass.get()
        if forward is not None:
            mode = _TopK(router, None if forward.choices is None else forward.choices[place])
            forward.running.append(mode)
            mode.__enter__()

    def _end(self, place: int, router: Any, args: Any, output: Any) -> None:
        forward = _pass.get()
        if forward is None:
            return
        mode = forward.running.pop()
        mode.__exit__(None, None, None)
        if output is None:  # it raised, which also stops recomputation early
            return
        if len(mode.taken) == 1:
            forward.taken[place] = mode.taken[0]
        elif mode.choice is not None:
            raise self._unknown()

    def _unknown(self) -> ValueError:
        return ValueError(
            f"{self.name}: chooses experts in a way that routing replay doesn't support. Use a different model family."
        )


def load_balancing_loss(body: Any, out: Any, mask: Tensor | None) -> Tensor | None:
    """Computes the loss that the model's module defines from the router logits of a forward pass, if it has any."""
    function: Any = getattr(sys.modules[type(body).__module__], "load_balancing_loss_func", None)
    if function is None or getattr(out, "router_logits", None) is None:
        return None
    config = body.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    loss: Tensor = function(out.router_logits, experts, config.num_experts_per_tok, mask)
    return loss


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of torch's checkpointing: recomputation, on any thread, uses the same experts."""
    return nullcontext(), _pass.get() or nullcontext()


def return_router_logits(lm: PreTrainedModel) -> None:
    """Makes a mixture-of-experts model return router logits, from which its load-balancing loss is computed.

    Raises a ValueError if the model has no such loss (DeepSeek models balance experts themselves).
    """
    config: Any = lm.config.get_text_config()
    if not hasattr(sys.modules[type(lm).__module__], "load_balancing_loss_func"):
        raise ValueError(f"aux_loss_coef: {config.model_type} defines no load-balancing loss. Set it to 0.")
    config.output_router_logits = True
