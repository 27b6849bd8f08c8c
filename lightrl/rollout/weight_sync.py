"""Keeps the engine's weights equal to the trainer's, and proves it before anything is sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn.utils.rnn import pad_sequence

from lightrl.compat.arguments import above, at_least
from lightrl.compat.transformers import as_saved
from lightrl.distributed.states import fingerprint
from lightrl.engines.base import TOLERANCE, Engine, StaleWeightsError
from lightrl.models.turns import harmless_id, placeholder_ids
from lightrl.records import Completion, GenerationRequest, SamplingParams
from lightrl.rollout.learner import EngineSync, RolloutLearner

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class WeightSync(EngineSync):
    """Pushes the policy's weights to the engine right before it generates, whenever they have changed.

    Lazy, because no single Lightning hook precedes every generation (a resumed run skips `on_train_epoch_start`,
    validation comes at its own time): the data module asks `ensure_synced`, and a push happens if the engine's
    `policy_version` is not the module's. Nothing is stored in a checkpoint, so a resumed run pushes first. An engine
    that takes adapters gets the adapter alone. `RolloutDataModule` takes one with the settings below where no callback
    of the run is an `EngineSync`; name it to change them.

    After a push a *canary* asks engine and trainer for the log-probs of a few fixed tokens: of the run's first prompts
    once there are any, of random ones before. If they differ by more than `tolerance` the run stops: training on
    samples of stale or half-loaded weights fails silently otherwise. If the run has prompts with media, it also samples
    a few tokens after one of them and compares their log-probs: what the vision tower computes, how image tokens are
    attended to, and adapters on the tower show there alone. Two checks catch what is smaller than the tolerance: the
    engine must not answer exactly as before the push while the trainer's log-probs have moved, and where these have
    moved by ten times the gap of the push before, the engine's must have come half of the way.

    Args:
        canary: whether to ask after each push.
        tolerance: Maximum mean absolute difference in nats. Defaults by the engine's dtype: 5e-4 for float32, 0.05 for
            float16, 0.5 for bfloat16 (a pretrained model of 135M parameters rounds by 0.05 to 0.16). A tolerance of
            your own replaces the two other checks.
        num_sequences: sequences of the canary.
        num_tokens: tokens in each, and tokens sampled after a prompt with media. A mixture of experts gets more
            sequences if the engine routes its tokens: about eight tokens for each expert.

    Raises:
        StaleWeightsError: from `ensure_synced`, with the gap.
    """

    def __init__(
        self, canary: bool = True, tolerance: float | None = None, num_sequences: int = 2, num_tokens: int = 16
    ) -> None:
        self.canary = canary
        self.tolerance = above("WeightSync.tolerance", tolerance, or_none="(null) for the dtype's own")
        self.num_sequences = at_least("WeightSync.num_sequences", num_sequences, 1)
        self.num_tokens = at_least("WeightSync.num_tokens", num_tokens, 2)
        self.last_gap: float | None = None
        """Mean absolute log-prob gap in nats of the last canary."""
        self.last_media_gap: float | None = None
        """The same for a completion of a prompt with media; None for text alone."""
        self._frozen: int | None = None  # of the last push
        self._prompts: list[list[int]] | None = None
        self._media: GenerationRequest | None = None
        self._media_before: tuple[Completion, torch.Tensor, float] | None = None  # its trainer's log-probs, the gap
        self._answered: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # tokens, engine's, trainer's

    def show_prompts(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Takes the first prompts that it sees for the canary."""
        if self._prompts is None:
            self._prompts = [list(ids) for ids in token_ids]

    def show_media(self, request: GenerationRequest) -> None:
        """Keeps the first prompt with media that it sees."""
        self._media = self._media or request

    def ensure_synced(self, module: RolloutLearner, engine: Engine) -> None:
        """Pushes if the versions differ. Collective: every rank calls it at the same time."""
        if engine.policy_version == module.policy_version:
            return
        moved = self._frozen_moved(module)
        with torch.no_grad():
            if engine.pushes == "adapter":
                if moved:
                    raise ValueError(
                        f"lora: weights under the adapter have changed, and {type(engine).__name__} gets the adapter "
                        'alone. Set lora_sync="merged".'
                    )
                engine.load_adapter(*module.policy_adapter(), policy_version=module.policy_version)
            elif engine.takes_parts and engine.policy_version >= 0 and not moved and _some_frozen(module):
                # What is frozen is there from an earlier push.
                trained = _named_for(engine, module, module.named_policy_weights(trained_only=True))
                engine.load_weights(trained, policy_version=module.policy_version, partial=True)
            else:
                weights = _named_for(engine, module, module.named_policy_weights())
                engine.load_weights(weights, policy_version=module.policy_version)
            if self.canary:
                self._check(module, engine)
                self._check_media(module, engine)

    def _frozen_moved(self, module: RolloutLearner) -> bool:
        """Whether weights that no update changes have changed since the last push. Collective."""
        named, before = module.actor.lm.named_parameters(), self._frozen
        self._frozen = fingerprint(p for name, p in named if not p.requires_grad and "lora_" not in name)
        return bool(module.all_max(torch.tensor(float(before not in (None, self._frozen)))))

    def _check(self, module: RolloutLearner, engine: Engine) -> None:
        tokens = self._tokens(module, engine, min(self.num_tokens, engine.max_model_len - 1))
        for placeholder in placeholder_ids(module.actor.lm.config).values():  # stands for what is not there
            tokens[tokens == placeholder] = harmless_id(module.actor.lm.config)
        routes = [module.actor.agreed_routes(tokens)] if engine.replays_routes else []
        theirs = torch.tensor(engine.logprobs(tokens.tolist(), *routes))
        ours = module.token_logprobs(tokens.to(module.device), *routes).cpu()[:, 1:]
        if bool(module.all_max((~ours.isfinite()).any().float())):
            raise ValueError(
                f"The policy's log-probs are not finite after {module.policy_version} updates: its weights have grown "
                "beyond all bounds. Lower the learning rate, or bound max_grad_norm."
            )
        gaps = (ours - theirs).abs()
        self.last_gap = float(gaps.mean())
        tolerance = self._tolerance(engine)
        behind = self._why_behind(tokens, theirs, ours, tolerance) if self.tolerance is None else ""
        worst = bool(module.all_max(torch.tensor(float(bool(behind) or not self.last_gap <= tolerance))))
        self._answered = None if worst else (tokens, theirs, ours)
        if worst:
            version = engine.policy_version
            engine.mark_stale()
            raise StaleWeightsError(
                f"After pushing the weights of policy version {version} the engine's log-probs differ from the "
                f"trainer's by {self.last_gap:.2e} on average (at most {gaps.max():.2e}; allowed: {tolerance:g} on "
                f"average{behind}). The engine holds stale or incomplete weights. Check that its dtype matches the "
                "trainer's precision; raise WeightSync.tolerance only if the gap is rounding."
            )

    def _check_media(self, module: RolloutLearner, engine: Engine) -> None:
        """Compares the log-probs of a completion that the engine samples after a prompt with media. Collective."""
        request = self._media
        if not bool(module.all_max(torch.tensor(float(request is not None)))):
            return
        if request is None:  # other ranks have one, and every rank runs the model
            module.token_logprobs(torch.zeros((1, 2), dtype=torch.long, device=module.device))
            return self._judge_media(module, engine, 0.0, 0.0)
        room = min(self.num_tokens, engine.max_model_len - len(request.token_ids))
        asked = replace(request, sampling=SamplingParams(max_new_tokens=room, ignore_eos=True), seed=0)
        (group,) = engine.generate_all([asked])
        new = group.completions[0]
        before = self._media_before or (new, None, 0.0)
        now, again = _logprobs(module, request, [new, before[0]])
        theirs = torch.tensor(new.logprobs)
        gap = float((now - theirs).abs().mean())
        moved = 0.0 if before[1] is None else float((again - before[1]).abs().mean())
        self.last_media_gap = gap
        self._media_before = new, now, gap
        behind = self.tolerance is None and moved > 10 * before[2] and gap > moved / 2
        return self._judge_media(module, engine, gap, moved if behind else 0.0)

    def _judge_media(self, module: RolloutLearner, engine: Engine, gap: float, moved: float) -> None:
        tolerance = self._tolerance(engine)
        worst = float(module.all_max(torch.tensor([gap if gap == gap else float("inf"), moved])).max())
        if bool(module.all_max(torch.tensor(float(moved > 0 or not gap <= tolerance)))):
            self._media_before = None
            engine.mark_stale()
            raise StaleWeightsError(
                f"{type(engine).__name__} with {type(module.actor.lm).__name__}: after a prompt with images, videos, "
                f"or audio its log-probs differ from the trainer's by {worst:.2e} on average (allowed: {tolerance:g}), "
                "while those of text agree. They read the media differently: an adapter or weights outside the "
                "language model are missing in the engine, or it attends to media tokens in another way. Use "
                "TransformersEngine, or train on text only."
            )

    def _tolerance(self, engine: Engine) -> float:
        return self.tolerance or TOLERANCE.get(engine.dtype or "float32", TOLERANCE["bfloat16"])

    def _tokens(self, module: RolloutLearner, engine: Engine, length: int) -> torch.Tensor:
        """(rows, length): prompts one after the other, or random tokens where there are too few.

        Where the engine's routers choose the experts, rows of random tokens follow, so that most experts are asked.
        """
        config = module.actor.lm.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        known = [token for prompt in self._prompts or () for token in prompt][: self.num_sequences * length]
        if len(known) == self.num_sequences * length:
            tokens = torch.tensor(known).view(self.num_sequences, length)
        else:
            tokens = torch.randint(config.vocab_size, (self.num_sequences, length), generator=generator)
        if engine.replays_routes or not module.actor.has_experts:
            return tokens
        experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 0)
        rows = -(-8 * experts // (length * (getattr(config, "num_experts_per_tok", None) or 1)))
        return torch.cat([tokens, torch.randint(config.vocab_size, (rows, length), generator=generator)])

    def _why_behind(self, tokens: torch.Tensor, theirs: torch.Tensor, ours: torch.Tensor, tolerance: float) -> str:
        """How the answers since the last canary show that this push has not arrived; empty if they do not."""
        if self._answered is None or not torch.equal(tokens, self._answered[0]):
            return ""
        _, their_last, our_last = self._answered
        if torch.equal(theirs, their_last) and float((ours - our_last).abs().mean()) > tolerance / 100:
            return ", and none exactly as before the push"
        rounding = float((our_last - their_last).abs().mean())
        moved = float((ours - their_last).abs().mean())  # what the gap would be without a push
        half = moved > 10 * rounding and float((ours - theirs).abs().mean()) > moved / 2
        return ", and half of what the trainer has moved by" if half else ""


@torch.no_grad()
def _logprobs(
    module: RolloutLearner, request: GenerationRequest, completions: Sequence[Completion]
) -> list[torch.Tensor]:
    """The trainer's log-probs of each completion of a prompt with media."""
    rows = [torch.tensor(request.token_ids + completion.token_ids) for completion in completions]
    token_ids = pad_sequence(rows, batch_first=True).to(module.device)
    lengths = torch.tensor([len(row) for row in rows], device=module.device)
    places = torch.arange(token_ids.shape[1], device=module.device)
    attention = places < lengths[:, None]
    response = attention & (places >= len(request.token_ids))
    with module.trainer.precision_plugin.forward_context():
        out = module.actor(
            token_ids,
            attention,
            response,
            inputs=[request.inputs] * len(rows),
            routes=[completion.routes for completion in completions],
        )
    start = len(request.token_ids)
    return [row[start : len(ids)].cpu() for row, ids in zip(out.logprobs, rows, strict=True)]


def _named_for(
    engine: Engine, module: RolloutLearner, weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The policy's weights under the names that the engine's model has."""
    return as_saved(module.actor.lm, weights) if engine.pushes == "checkpoint" else weights


def _some_frozen(module: RolloutLearner) -> bool:
    """Whether the policy has weights that no update changes; else a push of all can be checked by name."""
    return not all(parameter.requires_grad for parameter in module.actor.lm.parameters())
